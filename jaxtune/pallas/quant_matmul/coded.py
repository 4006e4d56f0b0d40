"""Products of up to 16 rows with weights in FP8, int8, NVFP4 or MXFP4, in Triton on Hopper. Numbers are decoded to
bfloat16 in registers, to the bits of `decode`, and an element is one float32 sum over ascending columns: so a row has
the bits that a product with the decoded weight gives it, beside any rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4, Stored
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.quant_matmul.reference import exact_product

MOST_ROWS = 16  # more are multiplied faster by a decoded weight
MOST_WEIGHTS = 3  # of a call


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs."""

    rows: int  # of the weights, of a program
    depth: int  # columns of a step
    warps: int
    stages: int  # steps read ahead
    left: bool = False  # whether the weight is the left side of the tensor cores' product


@dataclasses.dataclass(frozen=True)
class Coding:
    """How the kernel reads a weight; those of one call have the same."""

    name: str  # of the kernel's constant
    divides: bool = False  # block scales are divided by the tensor's scale
    stride: int = 1  # 0: all rows share a scale, or one of the tensor's


_NARROW, _WIDE = Tile(16, 128, 1, 8, left=True), Tile(64, 128, 4, 6, left=True)
_TILED, _BLOCKS = Tile(32, 128, 2, 12, left=True), Tile(64, 256, 4, 6, left=True)
# By format, as measured on an H200: for up to _LEFT_TOKENS rows of x and weights of few and of many rows; for more rows
# of x.
_TILES = {
    "FP8_ROWS": (_NARROW, _WIDE, Tile(32, 256, 4, 5)),
    "FP8_TILES": (_TILED, _TILED, Tile(32, 128, 4, 8)),
    "INT8": (_NARROW, _WIDE, Tile(32, 256, 4, 5)),
    "NVFP4": (_BLOCKS, _BLOCKS, Tile(32, 256, 4, 5)),
    "MXFP4": (_BLOCKS, _BLOCKS, Tile(32, 512, 4, 5)),
}
_MANY_ROWS, _LEFT_TOKENS = 16384, 8


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


def tile_of(kind: Coding, rows: int, tokens: int) -> Tile:
    """rows: of all weights of a call."""
    return _TILES[kind.name][2 if tokens > _LEFT_TOKENS else int(rows >= _MANY_ROWS)]


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


def refusal(weights: Sequence[Stored], dtype, tokens: int) -> str | None:
    """Why `products` cannot multiply by these weights, of which all have the same `coding`, or None. dtype, tokens: of
    x.
    """
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dispatch.compute_capability() != (9, 0):
        return "measured on Hopper alone (compute capability 9.0)"
    kind = coding(weights[0])
    if kind is None or dtype != jnp.bfloat16 or len(weights) > MOST_WEIGHTS or not 1 <= tokens <= MOST_ROWS:
        names = ", ".join(type(weight).__name__ for weight in weights)
        return f"{tokens} rows in {jnp.dtype(dtype).name}, weights {names}; 1 to {MOST_ROWS} in bfloat16"
    tile = tile_of(kind, sum(weight.shape[0] for weight in weights), tokens)
    rows = 128 if kind.name == "FP8_TILES" else tile.rows
    if any(weight.shape[0] % rows or weight.shape[1] % tile.depth for weight in weights):
        shapes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {shapes}; multiples of {rows} and {tile.depth}"

    def compare():
        draw = np.random.default_rng(0)
        columns = tile.depth * (tile.stages + 2)
        small = [
            small_like(weight, (size * rows, columns), draw) for weight, size in zip(weights, (2, 1, 3), strict=False)
        ]
        x = jnp.asarray(draw.standard_normal((tokens, columns)), dtype)
        return list(_products(x, small, tile)), [exact_product(x, weight) for weight in small]

    return dispatch.first_use("quant_matmul", "triton, codes", f"{kind}, {len(weights)} weights, {tile}", compare)


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
    kind = coding(weights[0])
    assert kind is not None
    return _products(x, weights, tile_of(kind, sum(weight.shape[0] for weight in weights), len(x)))


def _products(x, weights: Sequence[Stored], tile: Tile) -> tuple[jax.Array, ...]:
    from jaxtune.pallas.quant_matmul import coded_kernels

    kind, (tokens, inner), padding = coding(weights[0]), x.shape, MOST_WEIGHTS - len(weights)
    assert kind is not None
    arrays = [_arrays(weight) for weight in weights]
    arrays += [arrays[0]] * padding
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    columns = list(zip(*arrays, strict=True))
    absent = {} if len(columns) > 2 else dict.fromkeys(("first_tensor", "second_tensor", "third_tensor"))
    (out,) = compat.triton_graph_call(
        coded_kernels.coded_kernel,
        (x, *(array for column in columns for array in column)),
        (jax.ShapeDtypeStruct((tokens, sum(sizes)), x.dtype),),
        (sum(sizes) // tile.rows,),
        warps=tile.warps,
        stages=tile.stages,
        COUNT=tokens,
        INNER=inner,
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        FORMAT=getattr(coded_kernels, kind.name),
        DIVIDES=int(kind.divides),
        STRIDE=kind.stride,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=_LEFT_TOKENS if tile.left else MOST_ROWS,
        LEFT=int(tile.left),
        STAGES=tile.stages,
        **absent,
    )
    return tuple(jnp.split(out, np.cumsum(sizes[: len(weights) - 1]), axis=1))


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
