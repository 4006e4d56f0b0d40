"""Weights that a sampler converts once instead of in each step, those of as many layers as there is free memory for: it
decodes the quantised weights of linears, except those that multiply in FP8 or round their weights (QAT), and casts and
pads adapters of experts to the form that the kernels of experts read. Quantised experts stay as they are.
A sampler with fewer than LEAST_ROWS slots, or with `deterministic`, converts nothing. `Converted` does it, after
`Convertible` has measured what it would take; `head_of_step` gives the head in the form by which each step multiplies.

The values of decoded weights are those that each product would decode, so the tokens are those of the quantised model,
up to the rounding of products.
A step of some dozen rows multiplies weights of 16 bits at the speed at which it reads them, which no product that
decodes reaches. All such linears of a layer are decoded, or none, because a step has the fewest kernels where they are
all plain arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.structure import Structure, structure_of
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Linear, frozen
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.grouped_matmul import filled_adapter, fills_adapters
from jaxtune.pallas.linear_cross_entropy import filled_up
from jaxtune.pallas.quant_matmul import decoded

LEAST_ROWS = 17  # fewer rows are multiplied by codes faster than by decoded weights


@dataclasses.dataclass(frozen=True)
class Convertible:
    """What the converted weights of a model would take, by which the sampler's plan (plan_slots) decides of how many
    layers they are converted."""

    # for each layer that may be converted, from the first one on, device bytes of its decoded weights in the model's
    # compute dtype and of its experts' adapters in the form that kernels read; 0: it has nothing to convert
    layers: tuple[int, ...]
    # device bytes of buffers that the sampler's programs need at most beside slots, weights and the states of prompts
    # that they prefill; plan_slots leaves them free beside the decoded weights
    buffer_bytes: int
    prefill_tokens: int  # the most tokens that one program prefills

    @classmethod
    def of(cls, model: Decoder, prefill_tokens: int, most: int | None = None) -> Convertible:
        """Measures `model`, whose arrays may be jax.ShapeDtypeStructs, for a sampler that prefills at most
        `prefill_tokens` tokens at a time. most: only this many layers from the first one are converted; None: all."""
        itemsize = jnp.dtype(model.dtype).itemsize
        sizes = [sum(weight.size for _, weight in layer) * itemsize for layer in _quantised(model)]
        adapters = [sum(int(matrix.adapter_bytes(itemsize)) for matrix in layer) for layer in _adapted(model)]
        sizes = [size + added for size, added in zip(sizes, adapters, strict=True)]
        return cls(tuple(sizes[:most]), _buffer_bytes(model, prefill_tokens), prefill_tokens)

    def within(self, room: float) -> tuple[int, int]:
        """(the most layers, counted from the first one, whose converted weights take at most `room` bytes of device
        memory; the bytes that they take); (0, 0) if none of them has anything to convert. plan_slots asks it."""
        sums = [0, *itertools.accumulate(self.layers)]
        count = max((count for count, size in enumerate(sums) if size <= room), default=0)
        return (count, sums[count]) if sums[count] else (0, 0)


@functools.lru_cache(32)
def convertible_of(
    structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], prefill_tokens: int, most: int | None
) -> Convertible:
    """The Convertible of a model, computed once for models of one structure, for a sampler's plan. shapes: the shapes
    and dtypes of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)). prefill_tokens, most: as for
    Convertible.of."""
    return Convertible.of(structure.model(shapes), prefill_tokens, most)


def _quantised(model: Decoder) -> list[list[tuple[Linear, Stored]]]:
    """For each layer of `model` the list of (linear, its weight) of the linears whose quantised weight a product would
    decode: not those that multiply in FP8 or round their weights. Experts stay as they are: a step reads nearly all of
    them, and in fewer bits faster. The linear that computes per-layer embeddings (Gemma 4 E2B) is in the last list.
    Convertible.of measures these weights, and `_form` plans their conversion."""
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


def _adapted(model: Decoder) -> list[list[ExpertLinear]]:
    """For each layer of `model` the list of the experts' matrices whose adapters each product would cast and pad
    (fills_adapters); not those that round their weights, whose adapters' float32 numbers are used too, nor those that
    multiply in FP8. Convertible.of measures these adapters, and `_form` plans their conversion."""
    layers = [[matrix for *_, matrix in layer.matrices() if matrix.num_experts] for layer in model.layers]
    return [
        [
            matrix
            for matrix in layer
            if matrix.lora is not None
            and matrix.fake_quant is None
            and not matrix.fp8
            and fills_adapters(matrix.compute or model.dtype, *matrix.sizes[:0:-1])
        ]
        for layer in layers
    ]


def _buffer_bytes(model: Decoder, tokens: int) -> int:
    """Convertible.buffer_bytes of a model, an upper estimate: the head as steps multiply by it, if that is a copy
    (head_of_step casts or pads it), and for the layer that needs the most, its weights as products decode them, experts
    too, and the inputs and outputs of its products with the `tokens` tokens that one program prefills. plan_slots
    leaves these bytes free when it decides of how many layers weights are converted, but not when it chooses the number
    of slots."""
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
    """The weight of the head of `model` as a decoding step multiplies by it, [vocab or a little more, hidden]: cast to
    the dtype in which the head computes, and in 16 bits padded with rows of zeros to a multiple of 8, as products need
    it (filled_up). head: the weight as it is stored, [vocab, hidden]. A round does so once for all of its steps
    (slots._decode), unless the sampler has a single slot."""
    return filled_up(head.astype(model.head_compute or model.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _decoded(weight: Stored, dtype: str) -> jax.Array:
    """The weight [out, in] as an array, decoded as a product with activations of the dtype `dtype` decodes it, so that
    a sampler's converted weights give the same products (Converted.of)."""
    return decoded(weight, jnp.zeros((), dtype))[0]


class _Form(NamedTuple):
    """How the arrays of a model with converted weights follow from those of the model. A place is an array's index in
    jax.tree.leaves(nnx.state(model)). Converted.of works by it, `_form` makes it."""

    structure: Structure  # of the model with converted weights
    dtype: str  # in which weights are decoded
    # for each array of `structure` its index in one list: the arrays of the model, then the decoded weights in the
    # order of `weights`, then the cast and padded sides in the order of `adapters`
    places: list[int]
    weights: list[tuple[Any, list[int]]]  # of each weight that is decoded: (its tree structure, its arrays' places)
    # of each side (A or B) of an experts' adapter that is cast and padded: (its place, the axis of the rank, the dtype)
    adapters: list[tuple[int, int, str]]


@functools.lru_cache(32)
def _form(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], layers: int) -> _Form:
    """Finds how the weights of the first `layers` layers are converted in models of one structure, once for all of
    them, for Converted.of; nothing is converted here. shapes: the shapes and dtypes of the models' arrays, in the order
    of jax.tree.leaves(nnx.state(model))."""
    marks = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    place_of = {id(mark): place for place, mark in enumerate(marks)}
    model, form = structure.model(marks), _Form(structure, "", [], [], [])

    def made(shape, dtype) -> jax.ShapeDtypeStruct:
        """The mark of an array that is made, behind all others."""
        marks.append(jax.ShapeDtypeStruct(shape, dtype))
        place_of[id(marks[-1])] = len(marks) - 1
        return marks[-1]

    for linear, weight in itertools.chain(*_quantised(model)[:layers]):
        arrays, tree = jax.tree.flatten(weight)
        form.weights.append((tree, [place_of[id(array)] for array in arrays]))
        linear.weight = frozen(linear.weight.replace(made(weight.shape, model.dtype)))
    for matrix in itertools.chain(*_adapted(model)[:layers]):
        lora, dtype = matrix.lora, matrix.compute or model.dtype
        assert lora is not None
        scale = lora.scale
        for name, axis in (("a", 1), ("b", 2)):
            side = getattr(lora, name)
            given = side.get_value()
            form.adapters.append((place_of[id(given)], axis, dtype))
            filled = jax.eval_shape(lambda a, axis=axis, dtype=dtype: filled_adapter(a, axis, dtype), given)
            setattr(lora, name, side.replace(made(filled.shape, dtype)))
        lora.alpha, lora.rslora = scale * lora.rank, False  # which leaves the scale as it is
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    places = [place_of[id(leaf)] for leaf in leaves]
    return form._replace(structure=structure_of(graph, treedef, model.config), dtype=model.dtype, places=places)


class Converted:
    """Converts the weights of the first `layers` layers of models that share them, such as one model with the adapters
    of several training steps: each quantised weight is decoded once, and experts' adapters are cast and padded each
    time. Quantised experts, and linears that multiply in FP8 or round their weights (QAT), stay as they are. A sampler
    whose plan converts layers has one, and calls `of` for its first model and in each update."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._kept: dict[int, tuple[jax.Array, jax.Array]] = {}

    def of(self, structure: Structure, leaves: Sequence[jax.Array]) -> tuple[Structure, list[jax.Array]]:
        """Returns (the structure, the arrays) of a model with converted weights, of which decoded ones are frozen and
        in the compute dtype, in its first layers; all other arrays are those of the model, which structure and leaves
        (structure.flattened) give. Weights that the last call decoded and this model has too are not decoded again, and
        others are freed."""
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        form, every, kept = _form(structure, shapes, self._layers), list(leaves), {}
        for tree, places in form.weights:
            codes = leaves[places[0]]
            # The codes are kept, so that no other array gets their id.
            found = self._kept.get(id(codes))
            if found is None:
                weight = jax.tree.unflatten(tree, [leaves[place] for place in places])
                found = codes, _decoded(weight, form.dtype)
            kept[id(codes)] = found
            every.append(found[1])
        every += _filled(
            [leaves[place] for place, *_ in form.adapters], tuple((axis, dtype) for _, axis, dtype in form.adapters)
        )
        self._kept = kept
        return form.structure, [every[place] for place in form.places]


@functools.partial(jax.jit, static_argnums=1)
def _filled(sides: list[jax.Array], how) -> list[jax.Array]:
    """Casts and pads the A and B of experts' adapters (filled_adapter), all in one program, for Converted.of. sides:
    each [E, r, in] or [E, out, r]. how: for each side (the axis of the rank r, the dtype)."""
    return [filled_adapter(side, axis, dtype) for side, (axis, dtype) in zip(sides, how, strict=True)]
