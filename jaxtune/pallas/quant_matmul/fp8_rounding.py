"""Rounds rows to e4m3 by Triton kernels that read their input once, where XLA would read it twice: each row, or each
128 numbers of a row, with one scale, bit for bit as fp8_product.rounded.

A row of the result may consist of several arrays' rows side by side. Rows sorted by expert can be multiplied by their
expert's factors, and gathered from tokens. A program that has factors rounds several rows in turn, as these are then in
the L1 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, targets

_ARRAYS = 4  # that may be side by side
_MOST = 51_200  # the longest row that has one scale, as long as fits in registers
_TILE_ROWS = 128  # sorted rows that have one expert; a program's rows, a power of two, are among them
BLOCK = 128  # numbers that share a scale, if rows do not


class Tile(NamedTuple):
    """How a kernel divides its work; rows of a kernel for blocks are blocks of 128 columns."""

    rows: int  # that a program reads at once
    columns: int  # of them that it reads by one operation
    warps: int  # of a program
    steps: int = 1  # how many times `rows` a program rounds, one after another


def tile(total: int, scaled: bool, blocks: bool) -> Tile:
    """As measured on an H200, for rows of `total` numbers. scaled: whether factors multiply them."""
    if blocks:
        return Tile(32, BLOCK, 4, 2)
    if total <= 2048:
        return Tile(1, 1024, 4, 8) if scaled else Tile(4, 256, 4)
    if total <= 8192:
        return Tile(1, 1024, 4, 4 if scaled else 1)
    if total <= 16384:
        return Tile(1, 2048, 8, 4 if scaled else 1)
    return Tile(1, 2048, 16, 4) if total <= 28672 else Tile(1, 2048, 32)  # no room for the next row


def refusal(widths: Sequence[int], dtype, blocks: bool) -> str | None:
    """Why the kernels cannot round rows of arrays with these widths side by side, or None."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if (reason := targets.fp8_refusal()) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if len(widths) > _ARRAYS:
        return f"{len(widths)} arrays side by side, more than {_ARRAYS}"
    odd = next((width for width in widths if width % 8), None)
    if odd is not None:
        return f"rows of {odd} numbers, no multiple of 8"
    if not blocks and sum(widths) > _MOST:
        return f"{sum(widths)} numbers in a row, more than {_MOST}"
    return None


def rounded(
    arrays: Sequence[jax.Array],
    factors: jax.Array | None,
    experts: jax.Array | None = None,
    tokens: jax.Array | None = None,
    blocks: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(codes e4m3[rows, K], scales float32[rows], or with `blocks` [K / 128, rows]) of arrays' rows side by side, times
    factors. With `blocks` each array's columns are padded to a multiple of 128. Only if `refusal` is None.

      arrays: 16-bit [rows, width] each, or [T, width] with `tokens`.
      factors: float32[sum of widths], or with `experts` [E, sum of widths]; None with `blocks`.
      experts: int32[rows / 128].
      tokens: int32[rows], each row's row of the arrays; T for zeros.
      blocks: each 128 numbers have a scale, not each row.
    """
    widths = tuple(array.shape[1] for array in arrays)
    rows = len(arrays[0]) if tokens is None else len(tokens)
    unused = arrays[0]  # what a kernel gets instead of an array that it does not read
    kernel_arrays = [*arrays, *[unused] * (_ARRAYS - len(arrays))]
    constants = dict(ROWS=rows, SOURCES=len(arrays[0]), WIDTHS=widths, GATHERED=int(tokens is not None))
    tokens = unused if tokens is None else tokens
    if blocks:
        return _by_blocks([*kernel_arrays, tokens], rows, widths, constants)
    grouped = experts is not None and factors is not None
    constants |= dict(SCALED=int(factors is not None), GROUPED=int(grouped))
    constants |= dict(EXPERTS=factors.shape[0] if factors is not None and grouped else 1, TILE_ROWS=_TILE_ROWS)
    optional_arrays = [unused if factors is None else factors, experts if grouped else unused, tokens]
    return _by_rows([*kernel_arrays, *optional_arrays], rows, widths, constants)


def _by_rows(arrays: list, rows: int, widths: tuple[int, ...], constants: dict) -> tuple:
    """(codes e4m3[rows, sum of widths], scales) with one scale for each row. constants: of the kernel."""
    from jaxtune.pallas.quant_matmul import fp8_rounding_kernels as kernels

    shape, pieces, total = tile(sum(widths), bool(constants["SCALED"]), False), [], 0
    for index, width in enumerate(widths):
        pieces += [(index, first, total + first, width - first) for first in range(0, width, shape.columns)]
        total += width
    codes, scales = compat.triton_call(
        kernels.to_fp8_rows_kernel,
        arrays,
        [jax.ShapeDtypeStruct((rows, total), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        (-(-rows // (shape.rows * shape.steps)),),
        warps=shape.warps,
        stages=1,
        TOTAL=total,
        PIECES=tuple(pieces),
        BLOCK=shape.rows,
        WIDTH=shape.columns,
        STEPS=shape.steps,
        **constants,
    )
    return codes, scales


def _by_blocks(arrays: list, rows: int, widths: tuple[int, ...], constants: dict) -> tuple:
    """(codes e4m3[rows, widths rounded up to 128s], scales) with one scale for each 128 numbers of a row."""
    from jaxtune.pallas.quant_matmul import fp8_rounding_kernels as kernels

    shape = tile(sum(widths), False, True)
    block_counts = [-(-width // BLOCK) for width in widths]  # in blocks
    codes, scales = compat.triton_call(
        kernels.to_fp8_blocks_kernel,
        arrays,
        [
            jax.ShapeDtypeStruct((rows, sum(block_counts) * BLOCK), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((sum(block_counts), rows), jnp.float32),
        ],
        (sum(-(-rows * count // (shape.rows * shape.steps)) for count in block_counts),),
        warps=shape.warps,
        stages=1,
        PLACES=tuple(BLOCK * sum(block_counts[:index]) for index in range(len(widths))),
        TOTAL=sum(block_counts) * BLOCK,
        BLOCK=shape.rows,
        STEPS=shape.steps,
        **constants,
    )
    return codes, scales
