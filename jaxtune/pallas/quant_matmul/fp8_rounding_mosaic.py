"""Rounds rows to e4m3, each with one scale, by a Pallas Mosaic GPU kernel for Hopper, which reads its input once; XLA
would read it twice. The result equals that of fp8_product.rounded (without `blocks`) bit for bit.

A warpgroup has a row in registers, in 16 bits; the row may consist of rows of several arrays side by side. It finds the
row's largest magnitude, and writes the codes and the scale. If rows are short, a warpgroup has several and loads all of
them before it waits for one; with one program for each row it would wait for memory most of the time. For
grouped_matmul, rows that are sorted by expert can be multiplied by their expert's factors, one for each column, and
gathered from tokens. `rounded` calls the kernel, and `refusal` says which rows it supports.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.formats.fp8 import LARGEST, scale_of

_LANES = 128
_VECTORS = (8, 4)  # 16-bit numbers that a lane reads at once
_TILE_ROWS = 128  # rows that have one expert
_MOST = 28_672  # the longest row: 112 registers of a lane
_VALUES_AT_ONCE = 8192  # numbers that a warpgroup reads at once, if rows are shorter


def _vector(widths: Sequence[int]) -> int | None:
    """The number of 16-bit values that a lane reads at once, 8 or 4. The 128 lanes of a warpgroup read 128 times as
    many neighbouring values of a row, a run. It is the largest number for which runs divide rows of all these widths,
    or else, if none does, the largest that divides the widths themselves and with which no row is shorter than a run
    (1,024 values for 8, 512 for 4); then the last run of a row overlaps the one before, which stores the same values.
    None if one of the rows is shorter than 512, or its width no multiple of 4. `refusal` and the kernel's body call
    it."""

    def fits(width: int, vector: int) -> bool:
        return width >= _LANES * vector and width % vector == 0

    whole = (v for v in _VECTORS if all(width % (_LANES * v) == 0 for width in widths))
    return next(whole, next((v for v in _VECTORS if all(fits(width, v) for width in widths)), None))


def refusal(widths: Sequence[int], dtype) -> str | None:
    """Returns the reason, in words, why this kernel cannot round rows that consist of rows of several arrays side by
    side, or None if it can. widths: the number of columns of each of these arrays; dtype: of the arrays. The reasons
    are no Hopper GPU, a dtype that has not 16 bits, arrays of fewer than 512 columns or of columns that are no multiple
    of 4, and rows of more than 28,672 numbers in all. fp8_product.side_by_side and grouped_matmul's fp8_experts.py ask
    it; XLA then rounds."""
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if _vector(widths) is None:
        least = _LANES * _VECTORS[-1]
        return f"rows of {min(widths)} numbers, fewer than {least} or no multiple of {_VECTORS[-1]}"
    if sum(widths) > _MOST:
        return f"{sum(widths)} numbers in a row, more than {_MOST}"
    return None


def _kernel(*refs, widths: tuple[int, ...], rows_each: int, scaled: bool, grouped: bool, gathered: bool):
    """The kernel's body: a program rounds `rows_each` rows of the output, and stores their codes and scales. The rows
    of the last program may overlap those of the one before, and the last run of values in a row may overlap the run
    before it; both then store the same values.

    Args:
      refs: in global memory, in this order: for each of `widths` an array [rows, width], or [T, width] if `gathered`;
        if `scaled`, factors float32[E, sum of widths]; if `grouped`, int32[rows / 128], the expert of each 128 rows; if
        `gathered`, int32[rows], the token of each row; the outputs codes e4m3[rows, sum of widths] and scales
        float32[rows].
      widths: the number of columns of each array; a row of the output consists of their rows side by side.
      rows_each: the number of rows of a program.
      scaled: whether numbers are multiplied by factors before they are rounded.
      grouped: True: each 128 rows have the factors of their expert; False: all rows have the same factors, and E is 1.
      gathered: True: a row of the output is gathered from the arrays by its token, where token T stands for a row of
        zeros; False: it is the row with the same number.
    """
    *given, codes_ref, scale_ref = refs
    arrays, others = given[: len(widths)], iter(given[len(widths) :])
    factors_ref = next(others) if scaled else None
    experts_ref = next(others) if grouped else None
    tokens_ref = next(others) if gathered else None
    vector = _vector(widths)
    assert vector is not None
    piece = _LANES * vector
    load = functools.partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((piece,), vector), optimized=False)
    pieces, before = [], 0  # (array, position in its row, position in all widths)
    for ref, width in zip(arrays, widths):
        pieces += [(ref, at, before + at) for at in (min(first, width - piece) for first in range(0, width, piece))]
        before += width

    first = jnp.minimum(lax.axis_index("rows") * rows_each, codes_ref.shape[0] - rows_each)
    rows = [first + number for number in range(rows_each)]
    sources = rows if tokens_ref is None else [tokens_ref[row] for row in rows]
    last = arrays[0].shape[0] - 1
    kept = [[load(ref.at[jnp.minimum(source, last), pl.ds(at, piece)]) for ref, at, _ in pieces] for source in sources]

    def store(row, numbers):
        expert = 0
        if factors_ref is not None and experts_ref is not None:
            expert = jnp.minimum(experts_ref[lax.div(row, jnp.int32(_TILE_ROWS))], factors_ref.shape[0] - 1)

        def number(index: int):
            wide = numbers[index].astype(jnp.float32)
            if factors_ref is None:
                return wide
            return wide * load(factors_ref.at[expert, pl.ds(pieces[index][2], piece)])

        largest = functools.reduce(jnp.maximum, (jnp.abs(number(index)) for index in range(len(pieces)))).max()
        scale = scale_of(largest, largest * (1.0 / LARGEST))
        scale_ref[row] = scale
        for index, (_, _, place) in enumerate(pieces):
            codes_ref[row, pl.ds(place, piece)] = (number(index) / scale).astype(codes_ref.dtype)

    def store_zeros(row):
        scale_ref[row] = jnp.float32(1.0)
        for _, _, place in pieces:
            codes_ref[row, pl.ds(place, piece)] = jnp.zeros((piece,), codes_ref.dtype)

    for row, source, numbers in zip(rows, sources, kept):
        if tokens_ref is None:
            store(row, numbers)
        else:
            there = functools.partial(store, row, numbers)
            lax.cond(source <= last, there, functools.partial(store_zeros, row))


def rounded(
    arrays: Sequence[jax.Array],
    factors: jax.Array | None,
    experts: jax.Array | None = None,
    tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to e4m3 by the kernel: (codes e4m3[rows, sum of widths], scales float32[rows]). A row consists of the
    rows of several arrays side by side, and may be multiplied by factors before it is rounded. A row of zeros has scale
    1. Call it only if `refusal` returns None. fp8_product.side_by_side calls it, and so do grouped_matmul's products in
    FP8.

    Args:
      arrays: 16-bit [rows, width] each, or [T, width] if `tokens` are given.
      factors: float32[sum of widths], the factor of each column, or with `experts` [E, sum of widths]; None: no
        factors.
      experts: int32[rows / 128], the expert of each 128 rows, whose factors they get; None: all rows have the same
        factors. Without factors it is not used.
      tokens: int32[rows], for each row of the result the row of the arrays that it is gathered from; T stands for a row
        of zeros. None: rows are not gathered.
    """
    widths = tuple(array.shape[1] for array in arrays)
    rows = arrays[0].shape[0] if tokens is None else tokens.shape[0]
    grouped = experts is not None and factors is not None
    operands = list(arrays)
    if factors is not None:
        operands.append(factors if grouped else factors[None])
    operands += [experts] if grouped else []
    operands += [] if tokens is None else [tokens]
    rows_each = min(max(_VALUES_AT_ONCE // sum(widths), 1), rows)
    options = dict(rows_each=rows_each, scaled=factors is not None, grouped=grouped, gathered=tokens is not None)
    codes, scale = gpu_kernel.kernel(
        functools.partial(_kernel, widths=widths, **options),
        "to_fp8",
        gpu_kernel.interpreter(),
        out_type=[
            jax.ShapeDtypeStruct((rows, sum(widths)), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(-(-rows // rows_each),),
        grid_names=("rows",),
    )(*operands)
    return codes, scale
