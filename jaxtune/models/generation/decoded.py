"""Weights that a sampler decodes once instead of in each step: the quantised weights of as many layers as there is free
memory for.

The values of decoded weights are those that each product would decode, so the tokens are those of the quantised model.
A step of some dozen rows multiplies weights of 16 bits at the speed at which it reads them, which no product that
decodes reaches. Layers are decoded whole, because a step has the fewest kernels where all weights of a layer are plain
arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from jaxtune.models.decoder import Decoder
from jaxtune.models.linear import Linear, frozen
from jaxtune.models.lora import copy_structure
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.linear_cross_entropy import filled_up
from jaxtune.pallas.quant_matmul import decoded

LEAST_ROWS = 17  # fewer rows are multiplied by codes faster than by decoded weights


@dataclasses.dataclass(frozen=True)
class Decodable:
    """What the decoded weights of a model would take, by which the sampler's plan (plan_slots) decides how many layers
    it decodes."""

    # for each layer, device bytes of its decoded weights in the model's compute dtype; 0: it has none to decode
    layers: tuple[int, ...]
    # device bytes of buffers that the sampler's programs need at most beside slots, weights and the states of prompts
    # that they prefill; decoded weights leave them free
    buffer_bytes: int
    prefill_tokens: int  # the most tokens that one program prefills

    @classmethod
    def of(cls, model: Decoder, prefill_tokens: int, most: int | None = None) -> Decodable:
        """Measures `model`, whose arrays may be jax.ShapeDtypeStructs, for a sampler that prefills at most
        `prefill_tokens` tokens at a time. most: only this many layers from the first one are decoded; None: all."""
        itemsize = jnp.dtype(model.dtype).itemsize
        sizes = [sum(weight.size for _, weight in layer) * itemsize for layer in _quantised(model)]
        return cls(tuple(sizes[:most]), _buffer_bytes(model, prefill_tokens), prefill_tokens)

    def within(self, room: float) -> tuple[int, int]:
        """(how many layers from the first one are decoded in `room` bytes of device memory, the bytes that they take),
        (0, 0) if none of them has a weight to decode."""
        sums = [0, *itertools.accumulate(self.layers)]
        count = max((count for count, size in enumerate(sums) if size <= room), default=0)
        return (count, sums[count]) if sums[count] else (0, 0)


def _quantised(model: Decoder) -> list[list[tuple[Linear, Stored]]]:
    """For each layer of `model` the list of (linear, its weight) of the linears whose quantised weight a product would
    decode: not those that multiply in FP8 or round their weights. Experts stay as they are: a step reads nearly all of
    them, and in fewer bits faster. The linear that computes per-layer embeddings (Gemma 4 E2B) is in the last list."""
    layers = [[matrix for *_, matrix in layer.matrices() if not matrix.num_experts] for layer in model.layers]
    if model.per_layer is not None:
        layers[-1].append(model.per_layer.projection)
    return [
        [
            (linear, weight)
            for linear in layer
            if isinstance(weight := linear.stored_weight, Stored) and not linear.fp8 and linear.fake_quant is None
        ]
        for layer in layers
    ]


def _buffer_bytes(model: Decoder, tokens: int) -> int:
    """Decodable.buffer_bytes of a model, an upper estimate: the head as steps multiply by it, if that is a copy, and
    for the layer that needs the most, its weights as products decode them, experts too, and the inputs and outputs of
    its products with the `tokens` tokens that one program prefills."""
    moe, layers = model.config.moe, []
    for layer in model.layers:
        numbers = 0
        for *_, matrix in layer.matrices():
            rows = tokens * (moe.experts_per_token if matrix.num_experts and moe is not None else 1)
            numbers += rows * sum(matrix.sizes[-2:])
            numbers += matrix.stored_weight.size if isinstance(matrix.stored_weight, Stored) else 0
        layers.append(numbers)
    stored = model.head_variable.get_value()
    head = jax.eval_shape(functools.partial(head_of_step, model), jax.ShapeDtypeStruct(stored.shape, stored.dtype))
    copied = (head.shape, head.dtype) != (stored.shape, stored.dtype)
    return max(layers) * jnp.dtype(model.dtype).itemsize + copied * head.size * head.dtype.itemsize


def head_of_step(model: Decoder, head: jax.Array) -> jax.Array:
    """The weight [vocab, hidden] of the head of `model` as a decoding step multiplies by it: cast to the dtype in which
    the head computes, and padded where products of 16 bits need it (filled_up). head: the weight as it is stored."""
    return filled_up(head.astype(model.head_compute or model.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _decoded(weight: Stored, dtype: str) -> jax.Array:
    """The weight [out, in] as an array, decoded as a product with activations of the dtype `dtype` decodes it."""
    return decoded(weight, jnp.zeros((), dtype))[0]


class Decoded:
    """Decodes the quantised weights of the first `layers` layers of models that share them, such as one model with the
    adapters of several training steps, each weight once. Experts, and linears that multiply in FP8 or round their
    weights (QAT), stay as they are. A sampler has one, and calls `of` for its first model and in each update."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def of(self, model: Decoder) -> Decoder:
        """Returns a new model with decoded weights, in the compute dtype and frozen, in place of quantised ones in its
        first layers; its other arrays are those of `model`. Weights that the last call decoded and this model has too
        are not decoded again, and others are freed."""
        model, kept = copy_structure(model), {}
        for linear, weight in itertools.chain(*_quantised(model)[: self._layers]):
            codes = jax.tree.leaves(weight)[0]
            # The codes are kept, so that no other array gets their id.
            found = self._kept.get(id(codes)) or (codes, _decoded(weight, model.dtype))
            kept[id(codes)] = found
            linear.weight = frozen(linear.weight.replace(found[1]))
        self._kept = kept
        return model
