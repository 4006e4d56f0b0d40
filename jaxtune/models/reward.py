"""Replaces the head of a causal language model by another (`with_head`), for example by one that gives a text a score,
which makes it a reward model (`reward_model`, for users and the compat package). Training whose objective needs
another head, its planner, and the loading of adapters that were trained with one, call `with_head`."""

from __future__ import annotations

import dataclasses
import json

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import SCORE, TEXT, Head
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure, has_adapter


def reward_model(model: Decoder, seed: int = 0) -> Decoder:
    """Makes a reward model of a causal language model: the same model with a head that scores texts, `score` [1,
    hidden], which is Hugging Face's ForSequenceClassification with one label. `Decoder.logits` then gives the scores,
    which mean nothing until the head is trained. It is for users and the compat package; a run with the objective
    reward calls with_head itself.

    Args:
      model: without adapters; a reward model is returned unchanged, with or without adapters.
      seed: draws the head's weight.
    Returns:
      a new model that shares every other array with `model`, or `model` itself if it is a reward model.
    Raises:
      ValueError: a language model with adapters, or a head that is neither a language model's nor `score`.
    """
    return with_head(model, SCORE, seed)


def with_head(model: Decoder, head: Head, seed: int = 0) -> Decoder:
    """Makes a copy of the model with a new head in place of its own; a model that has that head already is returned
    unchanged. The copy's config, and the config.json that it is saved with, name the new head. reward_model calls it;
    so do load_adapter with the adapter's head, and runs and the planner with the objective's. An embedding that was
    tied to the old head stays, untied.

    Args:
      model: without adapters, unless it has that head; get_peft_model adds them later, and the head is trained with
        them.
      head: the declaration of the new head, whose weight is [outputs, hidden]; not that of a language model.
      seed: draws the weight from a normal distribution with the config's initializer_range as standard deviation, as
        transformers does, in the dtype of the model's weights.
    Returns:
      a new model that shares every other array with `model`. It is saved as a text model, without passthrough tensors.
    Raises:
      ValueError: unless the model has that head already: a model with adapters, or with a head that is not a language
        model's; `head` is a language model's.
    """
    if model.config.head == head:
        return model
    asked = "reward_model" if head == SCORE else f"with_head({head.name!r})"
    if not model.config.head.is_text or head.outputs is None:
        raise ValueError(f"{asked}: {model.config.head.what}: start from the language model that it was made of")
    if has_adapter(model):
        raise ValueError(f"{asked}: this model has adapters: merge them first (merge_adapter), or start from its base")
    config = dataclasses.replace(model.config, head=head, tie_embeddings=False)
    made = copy_structure(model)
    made.config = config
    dtype = model.weight_dtype
    std, key = config.initializer_range, jax.random.key(seed)
    made.head = nnx.data(Linear(config.hidden_size, head.outputs, bias=False, std=std, key=key, dtype=dtype))
    if model.source is not None:
        hf = json.loads(model.source.config)
        architecture = str(next(iter(hf.get("architectures") or ()), TEXT.architecture))
        hf |= {"architectures": [head.architecture_of(architecture)]} | head.hf_config()
        made.source = dataclasses.replace(model.source, config=json.dumps(hf), passthrough=None)
    return made
