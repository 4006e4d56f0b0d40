"""PEFT's functions and classes that scripts import beside LoraConfig."""

from __future__ import annotations

import enum
import os

import jaxtune
from jaxtune.compat.adapters import adapted, lora_settings
from jaxtune.compat.arguments import settle
from jaxtune.compat.model import CompatModel
from jaxtune.compat.tables import AUTO, PEFT_MODEL
from jaxtune.compat.transformers_names import load_plain
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import AdapterConfig


class TaskType(enum.StrEnum):
    """PEFT's kinds of tasks. Every model here is a causal language model."""

    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"


def with_adapter(model: CompatModel, module: Decoder, adapter: AdapterConfig) -> CompatModel:
    """A new model with another module; tokenizer and settings are those of `model`.

    Args:
      model: the script's model without the adapter.
      module: the module with the adapter.
      adapter: the section `adapter` of a config that describes it.
    """
    return CompatModel(
        module,
        model.tokenizer,
        model.max_seq_length,
        model.residuals,
        adapter=adapter,
        random_state=model.random_state,
        packing=model.packing,
    )


def get_peft_model(
    model: CompatModel, peft_config: object, adapter_name: str = "default", **others: object
) -> CompatModel:
    """PEFT's: a new model with the adapter that a LoraConfig describes, this package's or PEFT's. A printed line
    reports `adapter_name` and each of `others` if it has no effect here; one that would change the result, or that is
    unknown, raises ValueError."""
    settle("get_peft_model", {"adapter_name": adapter_name, **others}, PEFT_MODEL, get_peft_model)
    settings = lora_settings(peft_config)
    return with_adapter(model, *adapted(model.module, "LoraConfig", model.random_state, experts_too=False, **settings))


def prepare_model_for_kbit_training(
    model: CompatModel, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: object = None
) -> CompatModel:
    """The model itself: quantised weights are frozen, and norms and adapters are computed in float32 where it matters.
    Without gradient checkpointing every residual is kept on the device, if the trainer does not say otherwise."""
    del gradient_checkpointing_kwargs
    if not use_gradient_checkpointing:
        model.residuals = "keep"
    return model


class PeftModel:
    """PEFT's class of a function that puts a saved adapter on a model."""

    @staticmethod
    def from_pretrained(
        model: CompatModel,
        model_id: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """A new model with the adapter of a folder. It can be trained further, whatever is_trainable says. `others` are
        PEFT's other arguments: a printed line reports one that has no effect here; one that would change the result, or
        that is unknown, raises ValueError."""
        del is_trainable
        settle("PeftModel.from_pretrained", {"adapter_name": adapter_name, **others}, PEFT_MODEL)
        path = os.fspath(model_id)
        return with_adapter(model, jaxtune.load_adapter(model.module, path), AdapterConfig(path=path))


class AutoPeftModelForCausalLM:
    """PEFT's class of a function that loads an adapter with the base that it names."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """The model of an adapter's folder, over its base in 16 bits or as quantization_config says. `others` are the
        arguments of transformers' from_pretrained, such as quantization_config and dtype: a printed line reports one
        that has no effect here; one that would change the result, or that is unknown, raises ValueError."""
        del is_trainable
        where = "AutoPeftModelForCausalLM.from_pretrained"
        peft = {name: others.pop(name) for name in PEFT_MODEL if name in others and name not in AUTO}
        settle(where, {"adapter_name": adapter_name, **peft}, PEFT_MODEL)
        return load_plain(where, pretrained_model_name_or_path, None, 3407, False, others)
