"""Products of up to 256 rows with weights in FP8 as they are stored, by Triton kernels on Hopper. x is rounded by rows,
or with weights in tiles by each 128 numbers.

Tensor cores sum the columns of a split in ascending order, and a split's sum is moved to float32 once, or with tiles
after each 128 columns, as in training. Splits follow from the weights' shapes alone: a row has the same bits beside any
rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.formats import FP8, Stored
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import few_sizes, few_thin, fp8_product
from jaxtune.pallas.quant_matmul.fp8_rounding import BLOCK
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights

MOST_ROWS = 256
_MOST_WEIGHTS = 3
_MOST_COLUMNS = 16384  # of a row, which one program rounds
_MOST_OF_FOUR_WARPS = 4096  # columns that four warps round; eight round more
_ROWS, _DEPTH = 64, 128  # of the weights, and columns, of a step that decide the splits


class Coded(NamedTuple):
    """Rows in e4m3."""

    codes: jax.Array  # e4m3[N, in]
    scales: jax.Array  # float32[N], or of blocks [in / 128, N]

    @classmethod
    def of(cls, x: jax.Array, blocks: bool) -> Coded:
        """x [N, in] as `fp8_product.rounded` rounds it. ValueError: as of `coded_types`."""
        coded_types(len(x), x.shape[1], blocks)
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


def tile_of(tokens: int, activation: str | None, tight: bool) -> Tile:
    """The sizes of a program's tile. tokens: rows of x. tight: registers have further sums."""
    count = max(16, 1 << (tokens - 1).bit_length())
    if activation is None:
        return Tile(_ROWS, 8 if tight and count > 128 else 4, {16: 8, 32: 8, 64: 6, 128: 5}.get(count, 4), count)
    if count > 128 or (tight and count > 64):
        return Tile(64, 8, 4, 128 if tight else count)
    return Tile(128, 8, 5 if count <= 64 else 4, count)


def splits_of(weights: Sequence[jax.Array | Stored], activation: str | None) -> int:
    """Ranges of the summed columns, 1 to 8: the fewest equal ones that occupy the multiprocessors."""
    if activation is not None:
        return 1
    steps, programs = weights[0].shape[1] // _DEPTH, sum(weight.shape[0] for weight in weights) // _ROWS
    return few_sizes.fewest_splits(steps, programs)


def in_blocks(weights: Sequence[jax.Array | Stored]) -> bool | None:
    """Whether all weights have scales of 128 x 128 (True) or of rows (False); None: neither."""
    kinds = {weight.block if isinstance(weight, FP8) and not weight.swapped else None for weight in weights}
    if kinds == {TILE}:
        return True
    return False if kinds in ({ROW}, {MATRIX}) else None


def refusal(
    weights: Sequence[jax.Array | Stored],
    dtype,
    tokens: int,
    activation: str | None = None,
    loras: Sequence[LoraWeights | None] = (),
) -> str | None:
    """Why `product` cannot multiply by these weights, or None. dtype, tokens: of x, unrounded."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.measured(targets.HOPPER)) is not None:
        return reason
    blocks = in_blocks(weights)
    if blocks is None or dtype != jnp.bfloat16 or len(weights) > _MOST_WEIGHTS or not 1 <= tokens <= MOST_ROWS:
        names = ", ".join(type(weight).__name__ for weight in weights)
        return f"{tokens} rows in {jnp.dtype(dtype).name}, weights {names}; 1 to {MOST_ROWS} in bfloat16, FP8 of a kind"
    same = {weight.shape for weight in weights}
    if activation is not None and (activation not in few_sizes.NUMBERS or len(weights) != 2 or len(same) > 1):
        return f"activation {activation} of {len(weights)} weights"
    multiple, columns = 128 if blocks or activation else _ROWS, weights[0].shape[1]
    if any(weight.shape[0] % multiple for weight in weights) or columns % _DEPTH or columns > _MOST_COLUMNS:
        shapes = ", ".join(str(weight.shape) for weight in weights)
        return f"weights {shapes}; multiples of {multiple} and {_DEPTH}, up to {_MOST_COLUMNS} columns"
    stored = [weight for weight in weights if isinstance(weight, FP8)]
    return few_thin.refusal(loras) or _first_use(stored, tokens, activation, loras)


def _first_use(
    stored: Sequence[FP8], tokens: int, activation: str | None, loras: Sequence[LoraWeights | None]
) -> str | None:
    """The case has as many weights, splits and blocks of rows of x, and more steps than are in flight."""
    block, columns, splits = stored[0].block, stored[0].shape[1], splits_of(stored, activation)
    blocks = block == TILE
    tile = tile_of(tokens, activation, blocks or bool(few_thin.padded_rank(loras)))
    several, warps = tokens > tile.tokens, _rounding_warps(columns)

    def compare():
        draw = np.random.default_rng(0)
        inner = few_thin.columns_of_check(loras, columns, _DEPTH * splits, 2 * tile.stages + 2)
        count = tile.tokens * (2 if several else 1) - tile.tokens // 4
        x = jnp.asarray(draw.standard_normal((count, inner)), jnp.bfloat16)
        sizes = (256, 256) if activation else (128, 256, 128)[: len(stored)]
        small = [
            FP8.encode(jnp.asarray(0.05 * draw.standard_normal((size, inner)), jnp.bfloat16), block) for size in sizes
        ]
        adapters = few_thin.small_adapters(loras, count, sizes, inner, x.dtype, 0.1)
        rows = jnp.asarray(draw.standard_normal((3, _MOST_OF_FOUR_WARPS + BLOCK if warps > 4 else 5 * BLOCK)), x.dtype)
        coded = Coded.of(x, blocks)
        out, wide = _product(coded, small, activation, x, adapters, splits), coded.decode()
        exact = [dispatch.exactly(jnp.matmul)(wide, weight.decode(jnp.float32).T) for weight in small]
        exact = [out + few_thin.exact(x, lora) for out, lora in zip(exact, adapters or [None] * 3, strict=False)]
        if activation is not None:
            exact = [ACTIVATIONS[activation](exact[0]) * exact[1]]
        kernels = [rounded(rows, blocks).decode(), out.astype(jnp.float32).sum(0)]
        return kernels, [Coded.of(rows, blocks).decode(), jnp.concatenate(exact, axis=1)]

    what = f"scales of {block}, {len(stored)} weights, {splits} splits, {tile}{', several' if several else ''}"
    what += f", rows rounded by {warps} warps{few_thin.text(loras)}"
    what += f", {few_thin.depth_of(columns)} columns of A" if few_thin.padded_rank(loras) else ""
    return dispatch.first_use("fp8_few", "triton", what + ("" if activation is None else f", {activation}"), compare)


def _rounding_warps(columns: int) -> int:
    return 8 if columns > _MOST_OF_FOUR_WARPS else 4


def rounded(x: jax.Array, blocks: bool) -> Coded:
    """x [N, in] of 16 bits in e4m3, to the bits of fp8_product.rounded. ValueError: as of `coded_types`."""
    from jaxtune.pallas.quant_matmul import fp8_few_kernels

    count, size = x.shape
    codes, scales = compat.triton_graph_call(
        fp8_few_kernels.rounded_rows_kernel,
        (x,),
        coded_types(count, size, blocks),
        (count,),
        warps=_rounding_warps(size),
        stages=1,
        COUNT=count,
        SIZE=size,
        WIDTH=1 << (size - 1).bit_length(),
        BLOCK=BLOCK if blocks else 0,
    )
    return Coded(codes, scales)


def coded_types(count: int, size: int, blocks: bool) -> list[jax.ShapeDtypeStruct]:
    """Of a Coded of `count` rows of `size` numbers. ValueError if blocks do not divide a row."""
    if blocks and size % BLOCK:
        raise ValueError(f"rows of {size} numbers in blocks of {BLOCK}")
    scales = (size // BLOCK, count) if blocks else (count,)
    return [jax.ShapeDtypeStruct((count, size), jnp.float8_e4m3fn), jax.ShapeDtypeStruct(scales, jnp.float32)]


def product(
    x: Coded,
    weights: Sequence[jax.Array | Stored],
    activation: str | None = None,
    unrounded: jax.Array | None = None,
    loras: Sequence[LoraWeights | None] = (),
) -> jax.Array:
    """x W^T of up to three weights [out_i, in] side by side: partial sums float32[splits, N, sum of out], bfloat16 for
    one split; with an activation activation(x gate^T) * (x up^T), [1, N, out]. Only if `refusal` is None.

    unrounded: x [N, in], which the adapters multiply: ValueError without it.
    """
    return _product(x, weights, activation, unrounded, loras, splits_of(weights, activation))


def _product(
    x: Coded,
    weights: Sequence[jax.Array | Stored],
    activation: str | None,
    unrounded: jax.Array | None,
    loras: Sequence[LoraWeights | None],
    splits: int,
) -> jax.Array:
    """`product` in so many splits."""
    from jaxtune.pallas.quant_matmul import fp8_few_kernels

    blocks, (count, inner), padding = bool(in_blocks(weights)), x.codes.shape, _MOST_WEIGHTS - len(weights)
    stored = [weight for weight in weights if isinstance(weight, FP8)]
    rank = few_thin.padded_rank(loras)
    if rank and unrounded is None:
        raise ValueError("fp8_few.product: adapters multiply rows that are not rounded: unrounded is None")
    tile = tile_of(count, activation, blocks or rank > 0)
    codes = [weight.codes for weight in stored]
    scales = [weight.scales.astype(jnp.float32) for weight in stored]
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    width = sum(sizes) if activation is None else sizes[0]
    adapters, ranks = few_thin.arrays_of(x.codes if unrounded is None else unrounded, loras)
    (out,) = compat.triton_graph_call(
        fp8_few_kernels.few_product_kernel,
        (*x, *codes, *codes[:1] * padding, *scales, *scales[:1] * padding, *adapters),
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
        ACTIVATION=few_sizes.NUMBERS[activation],
        ROWS=tile.rows,
        DEPTH=_DEPTH,
        TOKENS=tile.tokens,
        SPLITS=splits,
        STAGES=tile.stages,
        **ranks,
    )
    return out
