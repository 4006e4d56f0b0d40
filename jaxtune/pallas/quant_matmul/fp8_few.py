"""Products of up to 256 rows with weights in FP8 as they are stored, by Triton kernels on Hopper: a decoding step's. x
is rounded by rows, or with weights in tiles by each 128 numbers, as `fp8_product` rounds it.

Tensor cores sum the columns of a split in ascending order, and a split's sum is moved to float32 once, or with tiles
after each 128 columns, as in training. Hopper's keep fewer bits of such a sum than float32 has. Splits follow from the
weights' shapes alone: a row has the same bits beside any rows, and however many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.formats import FP8, Stored
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE, Block
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import fp8_product
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK

MOST_ROWS = 256
_MOST_WEIGHTS = 3
_MOST_COLUMNS = 16384  # of a row, which one program rounds
_NUMBERS = {None: 0, "silu": 1, "gelu_tanh": 2}  # of activations, in the kernel
_ENOUGH = 96  # programs that occupy a Hopper GPU well enough: fewer splits are less to add
_ROWS, _DEPTH = 64, 128  # of the weights, and columns, of a step that decide the splits


class Coded(NamedTuple):
    """Rows in e4m3."""

    codes: jax.Array  # e4m3[N, in]
    scales: jax.Array  # float32[N], or of blocks [in / 128, N]

    @classmethod
    def of(cls, x: jax.Array, blocks: bool) -> Coded:
        """x [N, in] as `fp8_product.rounded` rounds it."""
        codes, scales = fp8_product.rounded(x, blocks)
        return cls(codes, scales.T if blocks else scales[:, 0])

    def decode(self) -> jax.Array:
        """float32[N, in]"""
        blocks = self.scales.ndim == 2
        scales = jnp.repeat(self.scales.T, BLOCK, axis=1) if blocks else self.scales[:, None]
        return self.codes.astype(jnp.float32) * scales


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is divided among programs."""

    rows: int  # of the weight, of a program; with an activation of gate and of up each
    warps: int  # of a program
    stages: int  # steps of 128 columns that are read ahead
    tokens: int  # rows of x that tensor cores multiply at once


def tile_of(tokens: int, activation: str | None, blocks: bool) -> Tile:
    """The sizes of a program's tile. tokens: rows of x."""
    count = max(16, 1 << (tokens - 1).bit_length())
    if activation is None:
        return Tile(_ROWS, 8 if blocks and count > 128 else 4, {16: 8, 32: 8, 64: 6, 128: 5}.get(count, 4), count)
    if count > 128 or (blocks and count > 64):
        return Tile(64, 8, 4, 128 if blocks else count)
    return Tile(128, 8, 5 if count <= 64 else 4, count)


def splits_of(weights: Sequence[jax.Array | Stored], activation: str | None) -> int:
    """Ranges of the summed columns, 1 to 8: the fewest that occupy the multiprocessors, of those that are equal."""
    if activation is not None:
        return 1
    steps, programs = weights[0].shape[1] // _DEPTH, sum(weight.shape[0] for weight in weights) // _ROWS
    fitting = [n for n in range(1, 9) if steps % n == 0 and (n == 1 or steps // n >= 2)]
    return next((n for n in fitting if n * programs >= _ENOUGH), fitting[-1])


def in_blocks(weights: Sequence[jax.Array | Stored]) -> bool | None:
    """Whether the weights, all of them, have scales of 128 x 128 (True) or of rows (False); None: neither."""
    kinds = {weight.block if isinstance(weight, FP8) and not weight.swapped else None for weight in weights}
    if kinds == {TILE}:
        return True
    return False if kinds in ({ROW}, {MATRIX}) else None


def refusal(weights: Sequence[jax.Array | Stored], dtype, tokens: int, activation: str | None = None) -> str | None:
    """Why `product` cannot multiply by these weights, or None. dtype, tokens: of x, unrounded."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if dispatch.compute_capability() != (9, 0):
        return "written for Hopper alone (compute capability 9.0)"
    blocks = in_blocks(weights)
    if blocks is None or dtype != jnp.bfloat16 or len(weights) > _MOST_WEIGHTS or not 1 <= tokens <= MOST_ROWS:
        names = ", ".join(type(weight).__name__ for weight in weights)
        return f"{tokens} rows in {jnp.dtype(dtype).name}, weights {names}; 1 to {MOST_ROWS} in bfloat16, FP8 of a kind"
    same = {weight.shape for weight in weights}
    if activation is not None and (activation not in _NUMBERS or len(weights) != 2 or len(same) > 1):
        return f"activation {activation} of {len(weights)} weights"
    multiple, columns = 128 if blocks or activation else _ROWS, weights[0].shape[1]
    if any(weight.shape[0] % multiple for weight in weights) or columns % _DEPTH or columns > _MOST_COLUMNS:
        shapes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {shapes}; multiples of {multiple} and {_DEPTH}, up to {_MOST_COLUMNS} columns"
    stored = [weight for weight in weights if isinstance(weight, FP8)]
    return _first_use(stored[0].block, blocks, tokens, activation)


def _first_use(block: Block, blocks: bool, tokens: int, activation: str | None) -> str | None:
    tile = tile_of(tokens, activation, blocks)

    def compare():
        draw = np.random.default_rng(0)
        columns, count = _DEPTH * (2 * tile.stages + 2), tile.tokens - tile.tokens // 4
        x = jnp.asarray(draw.standard_normal((count, columns)), jnp.bfloat16)
        sizes = (256, 256) if activation else (128, 256, 128)
        small = [
            FP8.encode(jnp.asarray(0.05 * draw.standard_normal((size, columns)), jnp.bfloat16), block) for size in sizes
        ]
        rounded_x = rounded(x, blocks)
        out = product(rounded_x, small, activation)
        wide, expected = rounded_x.decode(), Coded.of(x, blocks).decode()
        exact = [dispatch.exactly(jnp.matmul)(wide, weight.decode(jnp.float32).T) for weight in small]
        if activation is not None:
            exact = [ACTIVATIONS[activation](exact[0]) * exact[1]]
        return [wide, out.sum(0)], [expected, jnp.concatenate(exact, axis=1)]

    what = f"scales of {block}, {tile}" + ("" if activation is None else f", {activation}")
    return dispatch.first_use("fp8_few", "triton", what, compare)


def rounded(x: jax.Array, blocks: bool) -> Coded:
    """x [N, in] of 16 bits in e4m3, by one kernel, to the bits of fp8_product.rounded."""
    from jaxtune.pallas.quant_matmul import fp8_few_kernels

    count, size = x.shape
    codes, scales = compat.triton_graph_call(
        fp8_few_kernels.rounded_rows_kernel,
        (x,),
        coded_types(count, size, blocks),
        (count,),
        warps=8 if size > 4096 else 4,
        stages=1,
        COUNT=count,
        SIZE=size,
        WIDTH=1 << (size - 1).bit_length(),
        BLOCK=BLOCK if blocks else 0,
    )
    return Coded(codes, scales)


def coded_types(count: int, size: int, blocks: bool) -> list[jax.ShapeDtypeStruct]:
    """Of a Coded of `count` rows of `size` numbers."""
    scales = (size // BLOCK, count) if blocks else (count,)
    return [jax.ShapeDtypeStruct((count, size), jnp.float8_e4m3fn), jax.ShapeDtypeStruct(scales, jnp.float32)]


def product(x: Coded, weights: Sequence[jax.Array | Stored], activation: str | None = None) -> jax.Array:
    """x W^T of the weights side by side: partial sums float32[splits, N, sum of out], or rounded to bfloat16 if there
    is one; with an activation activation(x gate^T) * (x up^T), [1, N, out]. Only if `refusal` is None.

    weights: up to three [out_i, in]; (gate, up).
    """
    from jaxtune.pallas.quant_matmul import fp8_few_kernels

    blocks, (count, inner), padding = bool(in_blocks(weights)), x.codes.shape, _MOST_WEIGHTS - len(weights)
    stored = [weight for weight in weights if isinstance(weight, FP8)]
    tile, splits = tile_of(count, activation, blocks), splits_of(weights, activation)
    codes = [weight.codes for weight in stored]
    scales = [weight.scales.astype(jnp.float32) for weight in stored]
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    width = sum(sizes) if activation is None else sizes[0]
    (out,) = compat.triton_graph_call(
        fp8_few_kernels.few_product_kernel,
        (*x, *codes, *codes[:1] * padding, *scales, *scales[:1] * padding),
        (jax.ShapeDtypeStruct((splits, count, width), jnp.bfloat16 if splits == 1 else jnp.float32),),
        (-(-count // tile.tokens), width // tile.rows, splits),
        warps=tile.warps,
        stages=tile.stages,
        COUNT=count,
        INNER=inner,
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        STRIDE=int(stored[0].block != MATRIX),
        BLOCK=BLOCK if blocks else 0,
        ACTIVATION=_NUMBERS[activation],
        ROWS=tile.rows,
        DEPTH=_DEPTH,
        TOKENS=tile.tokens,
        SPLITS=splits,
        STAGES=tile.stages,
    )
    return out
