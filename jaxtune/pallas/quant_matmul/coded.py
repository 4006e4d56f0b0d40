"""Products of up to 16 rows with weights in FP8, int8, NVFP4 or MXFP4, in Gluon on Hopper. Numbers are decoded to
bfloat16 in registers, to the bits of `decode`, and an element is RANGES float32 sums, each over the ascending columns
of its range, added in order: a row has the same bits beside any rows, but not all those of a product with the decoded
weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, one_order, targets
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4, Stored
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import few_sizes, few_thin
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights
from jaxtune.pallas.quant_matmul.reference import exact_product

MOST_ROWS = 16  # more are multiplied faster by a decoded weight
MOST_WEIGHTS = 3  # of a call
_FEW_TOKENS = 8  # the columns that tensor cores multiply at least


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs, each of RANGES warps."""

    rows: int  # of out, of a program: 16, or 8 with an activation, or multiples
    depth: int  # columns of a step of each range
    stages: int  # steps read ahead, and the one that is multiplied


@dataclasses.dataclass(frozen=True)
class Coding:
    """How the kernel reads a weight; those of one call have the same."""

    name: str  # of the kernel's constant
    divides: bool = False  # block scales are divided by the tensor's scale
    stride: int = 1  # 0: all rows share a scale, or one of the tensor's


RANGES = 4  # of the columns, each with a sum of its own; an element's bits depend on it, so it is the same for all rows
# Of products, and with an activation, as measured on an H200; of NVFP4 for up to _FEW_TOKENS rows of x.
_PLAIN, _GATED, _DEEP = Tile(16, 128, 3), Tile(8, 128, 3), Tile(16, 256, 2)


def coding(weight: jax.Array | Stored) -> Coding | None:
    """How the kernel reads the weight [out, in]; None: it cannot."""
    if not isinstance(weight, Stored) or weight.ndim != 2 or weight.swapped:
        return None
    if isinstance(weight, FP8) and weight.block in (ROW, MATRIX):
        return Coding("FP8_ROWS", stride=int(weight.block == ROW))
    if isinstance(weight, FP8) and weight.block == TILE:
        return Coding("FP8_TILES")
    if isinstance(weight, Int8):
        return Coding("INT8")
    if isinstance(weight, NVFP4):
        return Coding("NVFP4", weight.divides, int(weight.tensor_scale.size > 1))
    return Coding("MXFP4") if isinstance(weight, MXFP4) else None


def tile_of(weight: Stored, tokens: int, activation: str | None) -> Tile:
    """weight: one of a call. tokens: rows of x."""
    tile = _PLAIN if activation is None or isinstance(weight, Int8) else _GATED
    deep = activation is None and isinstance(weight, NVFP4) and tokens <= _FEW_TOKENS
    if deep and weight.shape[1] % (RANGES * _DEEP.depth) == 0:
        return _DEEP
    # Half as deep for sizes such as Gemma 4's 3,840; a range of FP8's tiles is of whole ones.
    whole = weight.shape[1] % (RANGES * tile.depth) == 0 or (isinstance(weight, FP8) and weight.block == TILE)
    return tile if whole else dataclasses.replace(tile, depth=tile.depth // 2)


def few_products(x: jax.Array, weights: Mapping[int, jax.Array | Stored]) -> dict[int, jax.Array]:
    """{key: x W^T, [tokens, out]} of the weights that `products` multiplies, as many of a coding as it takes in a call.

    x: [tokens, in]. weights: [out, in] each, by any keys.
    """
    by_coding: dict[Coding, list[tuple[int, Stored]]] = {}
    for key, weight in weights.items():
        kind = coding(weight)
        if kind is not None and isinstance(weight, Stored):
            by_coding.setdefault(kind, []).append((key, weight))
    outs: dict[int, jax.Array] = {}
    for entries in by_coding.values():
        for start in range(0, len(entries), MOST_WEIGHTS):
            keys, call = zip(*entries[start : start + MOST_WEIGHTS], strict=True)
            if refusal(call, x.dtype, len(x)) is None:
                outs |= zip(keys, products(x, call), strict=True)
    return outs


def few_product(
    x: jax.Array,
    weights: Sequence[jax.Array | Stored],
    activation: str | None = None,
    loras: Sequence[LoraWeights | None] = (),
) -> jax.Array | None:
    """x W^T of up to three weights side by side in one kernel, [tokens, sum of out]. With an activation: activation(x
    gate^T) * (x up^T), [tokens, out], each step rounded to x's dtype. None if there is no kernel for the call. Not
    differentiable.

    x: [tokens, in]. weights: [out, in] each; (gate, up). activation: a key of gated.ACTIVATIONS.
    loras: an adapter or None for each weight, up to rank 64, not DoRA, in one kernel more; (): none.
    """
    stored = [weight for weight in weights if isinstance(weight, Stored)]
    if (
        len(stored) < len(weights)
        or len({coding(weight) for weight in stored}) > 1
        or activation not in few_sizes.NUMBERS
    ):
        return None
    if activation is not None and (len(stored) != 2 or stored[0].shape != stored[1].shape):
        return None
    if refusal(stored, x.dtype, len(x), activation, loras) is not None:
        return None
    return _multiplied(x, stored, tile_of(stored[0], len(x), activation), activation, loras)


def refusal(
    weights: Sequence[Stored],
    dtype,
    tokens: int,
    activation: str | None = None,
    loras: Sequence[LoraWeights | None] = (),
) -> str | None:
    """Why `products` cannot multiply by these weights, of which all have the same `coding`, or None."""
    reason = "sums in one order" if one_order.is_exact() else compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    kind = coding(weights[0])
    if kind is None or dtype != jnp.bfloat16 or len(weights) > MOST_WEIGHTS or not 1 <= tokens <= MOST_ROWS:
        names = ", ".join(type(weight).__name__ for weight in weights)
        return f"{tokens} rows in {jnp.dtype(dtype).name}, weights {names}; 1 to {MOST_ROWS} in bfloat16"
    tile = tile_of(weights[0], tokens, activation)
    rows = 128 if kind.name == "FP8_TILES" else max(16, tile.rows)
    depth = RANGES * tile.depth
    if any(weight.shape[0] % rows or weight.shape[1] % depth for weight in weights):
        shapes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {shapes}; multiples of {rows} and {depth}"

    if (reason := few_thin.refusal(loras)) is not None:
        return reason

    def compare():
        draw = np.random.default_rng(0)
        columns = few_thin.columns_of_check(loras, weights[0].shape[1], depth, tile.stages + 2)
        sizes = (2, 2) if activation else (2, 1, 3)
        small = [small_like(weight, (size * rows, columns), draw) for weight, size in zip(weights, sizes, strict=False)]
        x = jnp.asarray(draw.standard_normal((tokens, columns)), dtype)
        exact = [exact_product(x, weight) for weight in small]
        adapters = few_thin.small_adapters(loras, tokens, [weight.shape[0] for weight in small], columns, dtype, 0.1)
        exact = [out + few_thin.exact(x, lora) for out, lora in zip(exact, adapters or [None] * 3, strict=False)]
        if activation is None:
            return list(_products(x, small, tile, adapters)), exact
        return [_multiplied(x, small, tile, activation, adapters)], [ACTIVATIONS[activation](exact[0]) * exact[1]]

    body = "one row" if tokens == 1 else f"{_tokens(tokens)} rows"  # each another form of the kernel
    what = f"{kind}, {len(weights)} weights, {tile}, {body}{few_thin.text(loras)}"
    if few_thin.padded_rank(loras):
        what += f", {few_thin.depth_of(weights[0].shape[1])} columns of A"
    what += "" if activation is None else f", {activation}"
    return dispatch.first_use("quant_matmul", "triton, codes", what, compare)


def _tokens(tokens: int) -> int:
    """The columns that tensor cores multiply for rows of x."""
    return _FEW_TOKENS if tokens <= _FEW_TOKENS else MOST_ROWS


def small_like(weight: Stored, shape: tuple[int, int], draw: np.random.Generator) -> Stored:
    """A random weight with the same `coding`."""
    numbers = jnp.asarray(0.05 * draw.standard_normal(shape), jnp.bfloat16)
    if isinstance(weight, FP8):
        return FP8.encode(numbers, weight.block)
    if isinstance(weight, NVFP4):
        small = NVFP4.encode(numbers)
        scale = small.tensor_scale if weight.divides else 1 / small.tensor_scale
        if weight.tensor_scale.size > 1:
            scale = jnp.broadcast_to(scale, (shape[0], 1)) * (1 + jnp.arange(shape[0])[:, None] % 3)
        return dataclasses.replace(small, tensor_scale=scale, divides=weight.divides)
    return type(weight).encode(numbers)


def products(x: jax.Array, weights: Sequence[Stored]) -> tuple[jax.Array, ...]:
    """x W^T for each weight, [tokens, out_i] in x's dtype. Only if `refusal` is None.

    x: [1 to 16, in] bfloat16. weights: [out_i, in] each, all with the same `coding`.
    """
    return _products(x, weights, tile_of(weights[0], len(x), None))


def _products(x, weights: Sequence[Stored], tile: Tile, loras: Sequence = ()) -> tuple[jax.Array, ...]:
    sizes = [weight.shape[0] for weight in weights]
    return tuple(jnp.split(_multiplied(x, weights, tile, None, loras), np.cumsum(sizes[:-1]), axis=1))


def _multiplied(
    x, weights: Sequence[Stored], tile: Tile, activation: str | None = None, loras: Sequence[LoraWeights | None] = ()
) -> jax.Array:
    """The products side by side, or with an activation that of the first times the second."""
    from jaxtune.pallas.quant_matmul import coded_kernels

    kind, (tokens, inner), padding = coding(weights[0]), x.shape, MOST_WEIGHTS - len(weights)
    assert kind is not None
    arrays = [_arrays(weight) for weight in weights]
    arrays += [arrays[0]] * padding
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    width = sum(sizes) if activation is None else sizes[0]
    columns = list(zip(*arrays, strict=True))
    absent = {} if len(columns) > 2 else dict.fromkeys(("first_tensor", "second_tensor", "third_tensor"))
    adapters, ranks = few_thin.arrays_of(x, loras)
    (out,) = compat.triton_graph_call(
        coded_kernels.coded_kernel,
        (x, *(array for column in columns for array in column), *adapters),
        (jax.ShapeDtypeStruct((tokens, width), x.dtype),),
        (width // tile.rows,),
        warps=RANGES,
        stages=1,
        COUNT=tokens,
        INNER=inner,
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        ACTIVATION=few_sizes.NUMBERS[activation],
        FORMAT=getattr(coded_kernels, kind.name),
        DIVIDES=int(kind.divides),
        STRIDE=kind.stride,
        RANGES=RANGES,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=_tokens(tokens),
        STAGES=tile.stages,
        **absent,
        **ranks,
    )
    return out


def _arrays(weight: Stored) -> tuple[jax.Array, ...]:
    """The arrays that the kernel reads: codes, scales and, of NVFP4, the tensor's scales."""
    if isinstance(weight, FP8):
        return weight.codes, weight.scales.astype(jnp.float32)
    if isinstance(weight, Int8):
        return weight.codes, weight.absmax
    if isinstance(weight, NVFP4):
        return weight.codes, weight.scales, weight.tensor_scale
    assert isinstance(weight, MXFP4)
    return weight.codes, weight.scales
