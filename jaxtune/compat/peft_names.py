"""PEFT's names that scripts import beside LoraConfig, for a CompatModel in place of a torch model."""

from __future__ import annotations

import enum
import os

import jaxtune
from jaxtune.compat.adapters import add_lora, lora_settings
from jaxtune.compat.arguments import settle
from jaxtune.compat.model import CompatModel
from jaxtune.compat.tables import AUTO, PEFT_MODEL
from jaxtune.compat.transformers_names import load_plain
from jaxtune.compat.wording import worded
from jaxtune.models.adapters.named import local_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import AdapterConfig


class TaskType(enum.StrEnum):
    """PEFT's kinds of tasks. Every model here is a CAUSAL_LM; another kind has no effect, which is printed."""

    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"


def with_adapter(model: CompatModel, module: Decoder, adapter: AdapterConfig) -> CompatModel:
    """A new CompatModel of `module`, which has the adapter, with the settings of `model`; the adapter alone trains."""
    return CompatModel(
        module,
        model.tokenizer,
        model.max_seq_length,
        model.residuals,
        adapter=adapter,
        random_state=model.random_state,
        packing=model.packing,
        fast=model.fast,
        cache=model.cache,
    )


@worded
def get_peft_model(
    model: CompatModel, peft_config: object, adapter_name: str = "default", **others: object
) -> CompatModel:
    """PEFT's: a new model with a new adapter, which alone trains, over the weights of `model`.

    ValueError: a setting is not supported, or the model has an adapter already.
      peft_config: a LoraConfig, this package's or PEFT's.
      adapter_name: must be "default".
    """
    settle("get_peft_model", {"adapter_name": adapter_name, **others}, PEFT_MODEL, get_peft_model)
    settings = lora_settings("get_peft_model", peft_config)
    return with_adapter(model, *add_lora(model.module, "LoraConfig", model.random_state, experts_too=False, **settings))


def prepare_model_for_kbit_training(
    model: CompatModel, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: object = None
) -> CompatModel:
    """Returns the model itself: quantised weights are frozen anyway.

    use_gradient_checkpointing: False keeps every residual on the device, in place, unless SFTConfig says otherwise.
    gradient_checkpointing_kwargs: has no effect.
    """
    del gradient_checkpointing_kwargs
    if not use_gradient_checkpointing:
        model.residuals = "keep"
    return model


class _WithAdapter(type):
    """Of classes whose instances are the CompatModels that have an adapter."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, CompatModel) and instance.has_adapter


class PeftModel(metaclass=_WithAdapter):
    """PEFT's class; a model with an adapter counts as its instance."""

    @staticmethod
    @worded
    def from_pretrained(
        model: CompatModel,
        model_id: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """A new model: `model` with the adapter of a PEFT folder. ValueError: it does not fit, or there is one already.

        model_id: the adapter's folder or hub name.
        adapter_name: must be "default".
        is_trainable: has no effect: it can be trained further.
        """
        del is_trainable
        settle("PeftModel.from_pretrained", {"adapter_name": adapter_name, **others}, PEFT_MODEL)
        path = local_adapter(model_id)
        return with_adapter(model, jaxtune.load_adapter(model.module, path), AdapterConfig(path=path))


class AutoPeftModelForCausalLM:
    """PEFT's class."""

    @staticmethod
    @worded
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """The base model of an adapter's folder with the adapter on it, in the given dtype, else the recorded one, else
        bfloat16. It is quantised only if `others` say so, even if the adapter was trained over a quantised base.

          pretrained_model_name_or_path: any other model trains nothing until it gets an adapter.
          adapter_name: must be "default".
          is_trainable: has no effect.
          others: as in plain_arguments.
        """
        del is_trainable
        where = "AutoPeftModelForCausalLM.from_pretrained"
        peft = {name: others.pop(name) for name in PEFT_MODEL if name in others and name not in AUTO}
        settle(where, {"adapter_name": adapter_name, **peft}, PEFT_MODEL)
        return load_plain(where, pretrained_model_name_or_path, 3407, False, others)
