"""Small random models, and adapters that have been somewhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from random_weights import random_tensor
from tiny import CONFIGS

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.families.common import tensor_name
from jaxtune.models.hf import model_from_config
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.models.placement import partition
from jaxtune.models.registry import names_of

TWO_LAYERS = (LayerSpec(),) * 2


def tiny_config(layers=TWO_LAYERS, stages=None, **changes) -> DecoderConfig:
    settings = dict(
        family="llama",
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        layers=tuple(dataclasses.replace(layer, stages=stages or layer.stages) for layer in layers),
        max_position_embeddings=128,
        attention_scale=8**-0.5,
        initializer_range=0.2,
    )
    return DecoderConfig(**(settings | changes))


def tiny_model(dtype="float32", seed: int = 0, **changes) -> Decoder:
    return Decoder(tiny_config(**changes), jax.random.key(seed), dtype)


def adapted_model(model: Decoder, seed: int = 1, **settings) -> Decoder:
    """An adapter that is not at its start."""
    return shaken(get_peft_model(model, **settings), seed)


def shaken(model: Decoder, seed: int = 1) -> Decoder:
    """The model, whose trainable tensors have all moved at random (not those of lora_A, which start at random)."""
    draw = np.random.default_rng(seed)

    def shake(variable, size):
        value = variable.get_value()
        variable.set_value(value + size * draw.standard_normal(value.shape).astype(np.float32))

    for _, linear in matrices(model):
        if linear.lora is not None:
            shake(linear.lora.b, 0.1)
            if linear.lora.magnitude is not None:
                shake(linear.lora.magnitude, 0.2)
    for module in (model.embedding, model.head):
        if module is not None and isinstance(module.weight, nnx.Param):
            shake(module.weight, 0.1)
    return model


def named(model) -> dict[str, nnx.Variable]:
    """{Hugging Face name: variable}"""
    norms = names_of(model.config)
    layers = model.config.layers
    return {tensor_name(path, norms, layers): variable for path, variable in nnx.to_flat_state(nnx.state(model))}


def golden_model(name: str) -> Decoder:
    """The model of tiny.CONFIGS[name] in fp32 that the golden files were made from, without its files."""
    # Shapes only: to draw weights that are replaced would compile a program for each shape.
    model = nnx.eval_shape(lambda: model_from_config(CONFIGS[name], jax.random.key(0)))
    for key, variable in named(model).items():
        variable.set_value(jnp.asarray(random_tensor(key, variable.shape)))
    return model


def over(model: Decoder, *sizes: int) -> Decoder:
    """The model on a mesh of (data, fsdp) devices."""
    mesh = partition.make_mesh(*sizes)
    graph, state = nnx.split(model)
    return nnx.merge(graph, partition.put(state, partition.shardings(state, mesh)))
