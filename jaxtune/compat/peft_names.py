"""PEFT's functions and classes that scripts import beside LoraConfig, for a CompatModel in place of a torch model:
`get_peft_model` adds an adapter, PeftModel and AutoPeftModelForCausalLM load a saved one, and
prepare_model_for_kbit_training and TaskType have almost nothing to do. `with_adapter` makes the CompatModel of a module
that got an adapter, here and for the trainers' peft_config."""

from __future__ import annotations

import enum
import os

import jaxtune
from jaxtune.compat.adapters import adapted, lora_settings
from jaxtune.compat.arguments import settle
from jaxtune.compat.model import CompatModel
from jaxtune.compat.tables import AUTO, PEFT_MODEL
from jaxtune.compat.transformers_names import load_plain
from jaxtune.compat.wording import worded
from jaxtune.models.adapters.named import local_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import AdapterConfig


class TaskType(enum.StrEnum):
    """PEFT's kinds of tasks, for LoraConfig's task_type. Every model here is a causal language model, CAUSAL_LM;
    another kind has no effect, which is printed."""

    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"


def with_adapter(model: CompatModel, module: Decoder, adapter: AdapterConfig) -> CompatModel:
    """Returns a new CompatModel of `module`, with the tokenizer and the settings of `model`, of which only the adapter
    trains. get_peft_model and PeftModel.from_pretrained call it, and the trainers for their peft_config.

    Args:
      model: the script's model without the adapter; it is not changed.
      module: its module with the adapter.
      adapter: the section `adapter` of a run's config that describes the adapter.
    """
    return CompatModel(
        module,
        model.tokenizer,
        model.max_seq_length,
        model.residuals,
        adapter=adapter,
        random_state=model.random_state,
        packing=model.packing,
        fast=model.fast,
    )


@worded
def get_peft_model(
    model: CompatModel, peft_config: object, adapter_name: str = "default", **others: object
) -> CompatModel:
    """PEFT's function: returns a new model, `model` with a new adapter, which alone trains. The model's random_state
    seeds the adapter.

    Args:
      model: the script's model; it is not changed, and shares its weights with the result.
      peft_config: the LoraConfig, this package's or PEFT's, that describes the adapter.
      adapter_name: must be "default", because an adapter has no name here.
      others: PEFT's other arguments. A printed line reports each one that has no effect here.
    Raises:
      ValueError: another adapter_name; peft_config is no LoraConfig, or has a setting that is not supported; the model
        has an adapter already; or one of `others` would change the result or is unknown.
    """
    settle("get_peft_model", {"adapter_name": adapter_name, **others}, PEFT_MODEL, get_peft_model)
    settings = lora_settings("get_peft_model", peft_config)
    return with_adapter(model, *adapted(model.module, "LoraConfig", model.random_state, experts_too=False, **settings))


def prepare_model_for_kbit_training(
    model: CompatModel, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: object = None
) -> CompatModel:
    """PEFT's function, which needs to do little here: returns the model itself, because quantised weights are frozen
    anyway.

    Args:
      model: the script's model.
      use_gradient_checkpointing: True changes nothing. False sets the model, in place, to keep every residual of the
        backward pass on the device; SFTConfig's gradient_checkpointing takes precedence unless it is None.
      gradient_checkpointing_kwargs: has no effect.
    """
    del gradient_checkpointing_kwargs
    if not use_gradient_checkpointing:
        model.residuals = "keep"
    return model


class PeftModel:
    """PEFT's class, of which scripts use one function: from_pretrained returns a new model, the given one with a saved
    adapter on it, which can be trained further whatever is_trainable says."""

    @staticmethod
    @worded
    def from_pretrained(
        model: CompatModel,
        model_id: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """Returns a new model, `model` with the adapter of a PEFT folder.

        Args:
          model: the script's model without an adapter; it is not changed, and shares its weights with the result.
          model_id: the adapter's folder or hub name.
          adapter_name: must be "default", because an adapter has no name here.
          is_trainable: has no effect: the adapter can always be trained further.
          others: PEFT's other arguments. A printed line reports each one that has no effect here.
        Raises:
          ValueError: another adapter_name; one of `others` would change the result or is unknown; the folder has no
            adapter that fits the model; or the model has an adapter already.
        """
        del is_trainable
        settle("PeftModel.from_pretrained", {"adapter_name": adapter_name, **others}, PEFT_MODEL)
        path = local_adapter(model_id)
        return with_adapter(model, jaxtune.load_adapter(model.module, path), AdapterConfig(path=path))


class AutoPeftModelForCausalLM:
    """PEFT's class, of which scripts use one function: from_pretrained loads an adapter with the base model that it
    names."""

    @staticmethod
    @worded
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **others: object,
    ) -> CompatModel:
        """Returns the model of an adapter's folder: its base model with the adapter on it. The base is loaded in the
        dtype that is given, else in the one that the folder records, else in bfloat16. It is quantised on
        loading only if `others` say so, even if the adapter was trained over a quantised base.

        Args:
          pretrained_model_name_or_path: the adapter's local folder. For any other model the result has no adapter:
            nothing of it trains, and a trainer refuses it unless it also gets a peft_config, which adds an adapter.
          adapter_name: must be "default", because an adapter has no name here.
          is_trainable: has no effect: the adapter can always be trained further.
          others: PEFT's and transformers' other arguments, such as quantization_config and dtype (see load_plain). A
            printed line reports each one that has no effect here.
        Raises:
          ValueError: another adapter_name, or one of `others` would change the result or is unknown.
        """
        del is_trainable
        where = "AutoPeftModelForCausalLM.from_pretrained"
        peft = {name: others.pop(name) for name in PEFT_MODEL if name in others and name not in AUTO}
        settle(where, {"adapter_name": adapter_name, **peft}, PEFT_MODEL)
        return load_plain(where, pretrained_model_name_or_path, None, 3407, False, others)
