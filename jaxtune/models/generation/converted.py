"""Weights that a sampler converts once instead of in each step, for as many leading layers as memory allows.

It decodes quantised linears and experts, and casts and pads adapters of experts; FP8 products, QAT and `swapped`
weights stay. A step of some dozen rows multiplies 16-bit weights at the speed of reading them, which no product that
decodes reaches. A layer's matrices are all decoded, because a step has the fewest kernels then; for few rows its
experts alone. No bit changes within one_order.exact (notes/few_rows.md).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.structure import Structure, shaped, structure_of
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Linear, frozen
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.grouped_matmul import padded_adapter, pads_adapters
from jaxtune.pallas.linear_cross_entropy import filled_up
from jaxtune.pallas.quant_matmul import decoded

LEAST_ROWS = 17  # linears multiply fewer rows by codes faster than by decoded weights; for experts no kernel does


@dataclasses.dataclass(frozen=True)
class Convertible:
    """What the converted weights of a model would take."""

    # for each layer that may be converted, from the first one on, device bytes of its decoded weights in the model's
    # compute dtype and of its experts' adapters in the form that kernels read; 0: it has nothing to convert
    layers: tuple[int, ...]
    # device bytes of buffers that the sampler's programs need at most beside slots, weights and the states of prompts
    # that they prefill; plan_slots leaves them free beside the decoded weights
    buffer_bytes: int
    prefill_tokens: int  # the most tokens that one program prefills
    experts: tuple[int, ...] = ()  # as `layers`, of quantised experts alone; (): there are none

    @classmethod
    def of(cls, model: Decoder, prefill_tokens: int, most: int | None = None) -> Convertible:
        """Measures a model, arrays or shapes.

        prefill_tokens: the most that one program prefills, which decides the buffers.
        most: the most layers that are converted; None: all.
        """
        layers, experts = (_converted_bytes(model, linears)[:most] for linears in (True, False))
        return cls(layers, _buffer_bytes(model, prefill_tokens), prefill_tokens, experts)

    def for_rows(self, rows: int, exact: bool) -> Convertible:
        """What is converted for steps of so many rows. exact: as of Sampler."""
        return self if converts_linears(rows, exact) else dataclasses.replace(self, layers=self.experts)

    def within(self, room: float) -> tuple[int, int]:
        """(the most leading layers whose converted weights fit into `room` bytes, their bytes), or (0, 0)."""
        sums = [0, *itertools.accumulate(self.layers)]
        count = max((count for count, size in enumerate(sums) if size <= room), default=0)
        return (count, sums[count]) if sums[count] else (0, 0)


def converts_linears(rows: int, exact: bool) -> bool:
    """Whether all of a layer is converted for steps of so many rows, or its quantised experts alone. exact: as of
    Sampler; no kernel multiplies by codes in one order, so that each step decodes them.
    """
    return exact or rows >= LEAST_ROWS


@functools.lru_cache(32)
def convertible_of(
    structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], prefill_tokens: int, most: int | None
) -> Convertible:
    """Convertible.of, cached.

    structure: the model without its arrays.
    shapes: of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)).
    prefill_tokens: the most that one program prefills, which decides the buffers.
    most: the most layers that are converted; None: all.
    """
    return Convertible.of(shaped(structure, shapes), prefill_tokens, most)


def _converted_bytes(model: Decoder, linears: bool) -> tuple[int, ...]:
    """Convertible.layers, or Convertible.experts without `linears`."""
    itemsize = jnp.dtype(model.dtype).itemsize
    layers = zip(_quantised(model, linears), _adapted(model, linears), strict=True)
    return tuple(
        itemsize * sum(weight.size for _, weight in weights) + sum(int(m.adapter_bytes(itemsize)) for m in adapted)
        for weights, adapted in layers
    )


def _quantised(model: Decoder, linears: bool) -> list[list[tuple[Linear | ExpertLinear, Stored]]]:
    """For each layer, the matrices whose quantised weight a product would decode, or the experts among them."""
    layers = [[matrix for *_, matrix in layer.matrices()] for layer in model.layers]
    if model.per_layer is not None:
        layers[-1].append(model.per_layer.projection)
    return [
        [
            (matrix, weight)
            for matrix in layer
            if (linears or matrix.num_experts) and (weight := _decodable(matrix)) is not None
        ]
        for layer in layers
    ]


def _decodable(matrix: Linear | ExpertLinear) -> Stored | None:
    """Its weight if each product would decode it to an array of the same order."""
    weight = matrix.stored_weight
    if matrix.fp8 or matrix.fake_quant is not None or not isinstance(weight, Stored) or weight.swapped:
        return None
    return weight


def _adapted(model: Decoder, linears: bool) -> list[list[ExpertLinear]]:
    """For each layer, the experts' matrices whose adapters each product would cast and pad; without `linears` those
    that are decoded.
    """
    layers = [[matrix for *_, matrix in layer.matrices() if matrix.num_experts] for layer in model.layers]
    return [
        [
            matrix
            for matrix in layer
            if matrix.lora is not None
            and matrix.fake_quant is None
            and not matrix.fp8
            and (linears or _decodable(matrix) is not None)
            and pads_adapters(matrix.compute or model.dtype, *matrix.sizes[:0:-1])
        ]
        for layer in layers
    ]


@functools.lru_cache(32)
def picture_bytes(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], tokens: int) -> int:
    """Device bytes that a prefill takes beside weights and states if all `tokens` tokens of a prompt are of pictures:
    it is one program. 0 for a model without a tower.

    structure, shapes: as of `convertible_of`.
    """
    model = shaped(structure, shapes)
    if (tower := model.vision) is None:
        return 0
    config, itemsize = tower.config, jnp.dtype(model.dtype).itemsize
    patches = tokens * config.merge_size**2
    merging = max(sum(sum(getattr(each, name).sizes) for name in each.matrices) for _, each in tower.mergers)
    states = (len(tower.mergers) - 1) * patches * config.blocks.hidden_size  # that are merged, too
    cast = patches * config.patch_numbers
    of_tower = states + max(cast, _layer_numbers(tower.layers, config.blocks, patches), tokens * merging)
    features = tokens * len(tower.mergers) * config.out_size
    numbers = features + max(of_tower, _layer_numbers(model.layers, model.config, tokens))
    return 4 * cast + itemsize * numbers


def _layer_numbers(layers: Iterable[Block], config: DecoderConfig, tokens: int) -> int:
    """Numbers of a layer's forward at its peak."""
    most = 0
    for layer in layers:
        numbers, decoded_weight = collections.Counter[str](), 0
        for module, _, matrix in layer.matrices():
            many = config.moe.experts_per_token if matrix.num_experts and config.moe is not None else 1
            numbers[module] += tokens * many * matrix.sizes[-2]
            weight = matrix.stored_weight
            if isinstance(weight, Stored) and not matrix.num_experts:
                decoded_weight = max(decoded_weight, weight.size)
        most = max(most, max(numbers.values()) + decoded_weight + 3 * tokens * config.hidden_size)
    return most


def _buffer_bytes(model: Decoder, tokens: int) -> int:
    """An upper estimate: a copied head, and the largest layer's decoded weights, inputs and outputs for `tokens`
    tokens.
    """
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
    """The stored head [vocab, hidden] cast to its compute dtype and, in 16 bits, padded with rows of zeros to a
    multiple of 8.
    """
    return filled_up(head.astype(model.head_compute or model.dtype))


def _decoded(weight: Stored, dtype: str) -> jax.Array:
    return decoded(weight, jnp.zeros((), dtype))[0]


def _of[A, S, R](function: Callable[[A, S], R], arrays: A, static: S, mesh: Mesh | None) -> R:
    """function(arrays, static), as shapes if an array is one. mesh: of devices that each have the arrays."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        return jax.eval_shape(lambda values: function(values, static), arrays)
    return _jitted(function, static, mesh)(arrays)


@functools.lru_cache(16)
def _jitted[A, S, R](function: Callable[[A, S], R], static: S, mesh: Mesh | None) -> Callable[[A], R]:
    @functools.wraps(function)
    def of_arrays(arrays):
        return function(arrays, static)

    return jax.jit(partition.divided(of_arrays, mesh, partition.WHOLE, partition.WHOLE))


class _Form(NamedTuple):
    """How a converted model's arrays follow from the model's. A place is an index in the model's jax.tree.leaves."""

    structure: Structure  # of the model with converted weights
    dtype: str  # in which weights are decoded
    # for each array of `structure` its index in one list: the arrays of the model, then the decoded weights in the
    # order of `weights`, then the cast and padded sides in the order of `adapters`
    indices: list[int]
    weights: list[tuple[Any, list[int]]]  # of each weight that is decoded: (its tree structure, its arrays' places)
    # of each side (A or B) of an experts' adapter that is cast and padded: (its place, the axis of the rank, the dtype)
    adapters: list[tuple[int, int, str]]


@functools.lru_cache(32)
def _form(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], layers: int, linears: bool) -> _Form:
    """What becomes of each array, which marks stand for, if the first `layers` layers, or their experts alone, are
    converted.
    """
    marks = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
    index_of = {id(mark): index for index, mark in enumerate(marks)}
    model, form = structure.model(marks), _Form(structure, "", [], [], [])

    def new_mark(shape, dtype) -> jax.ShapeDtypeStruct:
        """The mark of a new array, behind all others."""
        marks.append(jax.ShapeDtypeStruct(shape, dtype))
        index_of[id(marks[-1])] = len(marks) - 1
        return marks[-1]

    adapted = _adapted(model, linears)[:layers]  # listed before weights are decoded
    for matrix, weight in itertools.chain(*_quantised(model, linears)[:layers]):
        arrays, tree = jax.tree.flatten(weight)
        form.weights.append((tree, [index_of[id(array)] for array in arrays]))
        matrix.weight = frozen(matrix.weight.replace(new_mark(weight.shape, model.dtype)))
    for matrix in itertools.chain(*adapted):
        lora, dtype = matrix.lora, matrix.compute or model.dtype
        assert lora is not None
        scale, rank = lora.scale, lora.rank
        for name, axis in (("a", 1), ("b", 2)):
            side = getattr(lora, name)
            value = side.get_value()
            form.adapters.append((index_of[id(value)], axis, dtype))
            padded = jax.eval_shape(lambda a, axis=axis, dtype=dtype: padded_adapter(a, axis, dtype), value)
            setattr(lora, name, side.replace(new_mark(padded.shape, dtype)))
        lora.alpha, lora.rslora, lora.own_ranks = scale * lora.rank, False, rank  # the scale is as it was
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    indices = [index_of[id(leaf)] for leaf in leaves]
    return form._replace(structure=structure_of(graph, treedef, model.config), dtype=model.dtype, indices=indices)


class Converted:
    """Converts the first `layers` layers of models that share quantised weights, such as one model between training
    steps.

    mesh: of devices that each have the whole weights; None: one device has.
    linears: False: experts alone, see converts_linears.
    """

    def __init__(self, layers: int, mesh: Mesh | None = None, linears: bool = True) -> None:
        self._layers, self._mesh, self._linears = layers, mesh, linears
        self._cache: dict[int, tuple[jax.Array, jax.Array]] = {}

    def of(self, structure: Structure, leaves: Sequence[jax.Array]) -> tuple[Structure, list[jax.Array]]:
        """(structure, arrays) of the converted model. Weights that the last call decoded are reused, or freed."""
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        form, arrays, cache = _form(structure, shapes, self._layers, self._linears), list(leaves), {}
        for tree, indices in form.weights:
            codes = leaves[indices[0]]
            # The codes are kept, so that no other array gets their id.
            entry = self._cache.get(id(codes))
            if entry is None:
                weight = jax.tree.unflatten(tree, [leaves[index] for index in indices])
                entry = codes, _of(_decoded, weight, form.dtype, self._mesh)
            cache[id(codes)] = entry
            arrays.append(entry[1])
        sides = [leaves[index] for index, *_ in form.adapters]
        arrays += _of(_filled, sides, tuple((axis, dtype) for _, axis, dtype in form.adapters), self._mesh)
        self._cache = cache
        return form.structure, [arrays[index] for index in form.indices]


def _filled(sides: list[jax.Array], how) -> list[jax.Array]:
    """Casts and pads the A [E, r, in] or B [E, out, r] of experts' adapters. how: for each (axis of r, dtype)."""
    return [padded_adapter(side, axis, dtype) for side, (axis, dtype) in zip(sides, how, strict=True)]
