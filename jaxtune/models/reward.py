"""A causal language model with a head that scores texts: Hugging Face's ForSequenceClassification with one label."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.families.common import SCORES
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure, has_adapter


def reward_model(model: Decoder, seed: int = 0) -> Decoder:
    """The model with a new head, `score` [1, hidden], in the place of its own; one that has it is returned as it is.

    Args:
      model: without adapters; get_peft_model then adds them, and trains the head with them.
      seed: of the head, drawn from a normal distribution with the config's initializer_range, as transformers does it.
    Returns:
      a new model that shares every other array with `model`, which scores [..., hidden] by `logits`. It is saved as a
      text model: without a vision tower, or layers that predict further tokens.
    Raises:
      ValueError: a model with adapters.
    """
    if model.config.num_labels is not None:
        return model
    if has_adapter(model):
        raise ValueError(
            "reward_model: this model has adapters: merge them first (merge_adapter), or start from its base"
        )
    config = dataclasses.replace(model.config, num_labels=1, tie_embeddings=False)
    made = copy_structure(model)
    made.config = config
    dtype = model.norm.weight.get_value().dtype
    key = jax.random.key(seed)
    head = Linear(config.hidden_size, 1, bias=False, std=config.initializer_range, key=key, dtype=dtype)
    made.head = nnx.data(head)
    if model.source is not None:
        scoring = json.dumps(_scoring(json.loads(model.source.config)))
        made.source = dataclasses.replace(model.source, config=scoring, carried=None)
    return made


def _scoring(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model with a head that scores."""
    theirs = str(next(iter(hf.get("architectures") or ()), "ForCausalLM"))
    return hf | {
        "architectures": [theirs.replace("ForCausalLM", SCORES)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
