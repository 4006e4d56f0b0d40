"""Weights that a sampler converts once instead of in each step: it decodes quantised weights, where memory is free, and
rounds adapters to the compute dtype.

The values of decoded weights are those that each product would decode, so the tokens are those of the quantised model.
A step of some dozen rows multiplies weights of 16 bits at the speed at which it reads them, which no product that
decodes reaches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxtune.models.decoder import Decoder
from jaxtune.models.linear import Linear, frozen
from jaxtune.models.lora import copy_structure, linears
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import decoded

LEAST_ROWS = 17  # fewer rows are multiplied by codes faster than by decoded weights


def decoded_bytes(model: Decoder) -> int:
    """The bytes of device memory that a sampler would need for the decoded weights of a model, in its compute dtype:
    those of all linears whose products would otherwise decode a quantised weight; 0 if there is none. Experts are not
    among them. The sampler's plan decides by it whether to decode."""
    return sum(weight.size for _, weight in _quantised(model)) * jnp.dtype(model.dtype).itemsize


def _quantised(model: Decoder) -> Iterator[tuple[Linear, Stored]]:
    """Yields (linear, its weight) for each linear of `model` whose quantised weight a product would decode: not those
    that multiply in FP8 or round their weights. Experts stay as they are: a step reads nearly all of them, and in
    fewer bits faster."""
    for _, linear in linears(model):
        weight = linear.stored_weight
        if isinstance(weight, Stored) and not linear.fp8 and linear.fake_quant is None:
            yield linear, weight


@functools.partial(jax.jit, static_argnums=1)
def _decoded(weight: Stored, dtype: str) -> jax.Array:
    """The weight [out, in] as an array, decoded as a product with activations of the dtype `dtype` decodes it."""
    return decoded(weight, jnp.zeros((), dtype))[0]


def with_rounded_adapters(model: Decoder) -> Decoder:
    """Returns the model with the A and B of its adapters in the compute dtype, to which every product casts them, so
    that the products of a decoding step need no casts. Its other arrays are those of `model`, which does not change.

    Adapters whose float32 numbers are used too stay as they are: those with DoRA, and those of linears that round their
    weights. So do adapters of experts."""
    model = copy_structure(model)
    loras = [linear.lora for _, linear in linears(model) if linear.lora is not None and linear.fake_quant is None]
    sides = [side for lora in loras if lora.magnitude is None for side in (lora.a, lora.b)]
    sides = [side for side in sides if side[...].dtype != model.dtype]
    for side, value in zip(sides, _cast([side[...] for side in sides], model.dtype), strict=True):
        side.set_value(value)
    return model


@functools.partial(jax.jit, static_argnums=1)
def _cast(arrays: list[jax.Array], dtype: str) -> list[jax.Array]:
    """The arrays, cast to `dtype`, in one program."""
    return [array.astype(dtype) for array in arrays]


class Decoded:
    """Decodes the quantised weights of models that share them, such as one model with the adapters of several training
    steps, each weight once. Experts, and linears that multiply in FP8 or round their weights (QAT), stay as they are. A
    sampler has one, and calls `of` for its first model and in each update."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def of(self, model: Decoder) -> Decoder:
        """Returns a new model with decoded weights, in the compute dtype and frozen, in place of quantised ones; its
        other arrays are those of `model`. Weights that the last call decoded and this model has too are not decoded
        again, and others are freed."""
        model, kept = copy_structure(model), {}
        for linear, weight in _quantised(model):
            codes = jax.tree.leaves(weight)[0]
            # The codes are kept, so that no other array gets their id.
            found = self._kept.get(id(codes)) or (codes, _decoded(weight, model.dtype))
            kept[id(codes)] = found
            linear.weight = frozen(linear.weight.replace(found[1]))
        self._kept = kept
        return model
