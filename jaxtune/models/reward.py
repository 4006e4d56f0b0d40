"""Replaces the head of a causal language model, for example by one that gives a text a score, for a reward model."""

from __future__ import annotations

import dataclasses
import json

from flax import nnx

from jaxtune.models import initial
from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import SCORE, TEXT, Head
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure, has_adapter


def reward_model(model: Decoder, seed: int = 0) -> Decoder:
    """A new model over the same arrays with the head `score` [1, hidden] (Hugging Face's ForSequenceClassification with
    one label); a reward model is returned unchanged. Scores (`Decoder.logits`) mean nothing until the head is trained.

    Raises ValueError for a language model with adapters, or another head.
    """
    return with_head(model, SCORE, seed)


def with_head(model: Decoder, head: Head, seed: int = 0) -> Decoder:
    """A model over the same arrays with a new head [outputs, hidden]; one that has that head already is returned
    unchanged. An embedding that was tied to the old head stays. A tower and passthrough tensors are dropped.

      head: the kind of head, such as SCORE.
      seed: draws the weight as transformers does, normal with initializer_range.

    Raises ValueError for adapters, a model whose head is not a language model's, or a language model's `head`.
    """
    if model.config.head == head:
        return model
    call = "reward_model" if head == SCORE else f"with_head({head.name!r})"
    if not model.config.head.is_text or head.outputs is None:
        raise ValueError(f"{call}: {model.config.head.description}: start from the language model that it was made of")
    if has_adapter(model):
        raise ValueError(f"{call}: this model has adapters: merge them first (merge_adapter), or start from its base")
    config = dataclasses.replace(model.config, head=head, tie_embeddings=False)
    new_model = copy_structure(model)
    new_model.config = config
    if new_model.vision is not None:
        del new_model.vision
    dtype = model.weight_dtype
    std, key = config.initializer_range, initial.key_of(seed)
    new_model.head = nnx.data(Linear(config.hidden_size, head.outputs, bias=False, std=std, key=key, dtype=dtype))
    if model.source is not None:
        hf = json.loads(model.source.config)
        architecture = str(next(iter(hf.get("architectures") or ()), TEXT.architecture))
        hf |= {"architectures": [head.architecture_of(architecture)]} | head.hf_config()
        nested = model.source.nested and model.vision is None
        new_model.source = dataclasses.replace(model.source, config=json.dumps(hf), passthrough=None, nested=nested)
    return new_model
