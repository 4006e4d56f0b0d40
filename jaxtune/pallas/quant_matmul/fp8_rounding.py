"""Rounding rows to e4m3 as a Pallas Mosaic GPU kernel for Hopper, in one pass over memory.

A warpgroup has a row, or the rows of several arrays side by side, in its registers in 16 bits: it finds the largest
magnitude, and writes codes and scale. XLA reads what it rounds twice. Bit for bit fp8_product.rounded.
"""

# Pallas' annotations do not know its own references.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.formats.fp8 import LARGEST

_LANES = 128
_VECTORS = (8, 4)  # 16-bit numbers that a lane reads at once
_MOST = 28_672  # numbers of a row: 112 registers of a lane


def refusal(widths: Sequence[int], dtype) -> str | None:
    """Why this kernel cannot round rows of these widths side by side, or None."""
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    for width in widths:
        if width % (_LANES * _VECTORS[-1]):
            return f"rows of {width} numbers, no multiple of {_LANES * _VECTORS[-1]}"
    if sum(widths) > _MOST:
        return f"{sum(widths)} numbers in a row, more than {_MOST}"
    return None


def _kernel(*refs, widths: tuple[int, ...], scaled: bool):
    """refs: an array [rows, width] for each of `widths`; where `scaled` factors, float32[all widths]; codes, scales."""
    refs, (codes_ref, scale_ref) = refs[:-2], refs[-2:]
    row = lax.axis_index("row")
    vector = next(v for v in _VECTORS if all(width % (_LANES * v) == 0 for width in widths))
    piece = _LANES * vector
    places = [(ref, at) for ref, width in zip(refs, widths) for at in range(0, width, piece)]
    load = functools.partial(plgpu.load, layout=plgpu.Layout.WG_STRIDED((piece,), vector), optimized=False)
    kept = [load(ref.at[row, pl.ds(at, piece)]) for ref, at in places]

    def number(index: int):
        wide = kept[index].astype(jnp.float32)
        return wide * load(refs[-1].at[pl.ds(index * piece, piece)]) if scaled else wide

    largest = functools.reduce(jnp.maximum, (jnp.abs(number(index)) for index in range(len(kept)))).max()
    scale = jnp.where(largest == 0.0, 1.0, largest * (1.0 / LARGEST))
    scale_ref[row] = scale
    for index in range(len(kept)):
        codes_ref[row, pl.ds(index * piece, piece)] = (number(index) / scale).astype(codes_ref.dtype)


def rounded(arrays: Sequence[jax.Array], factors: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """arrays [rows, width each] side by side, times factors float32[all widths] -> (e4m3[rows, all widths],
    float32[rows]); see `refusal`."""
    widths, rows = tuple(array.shape[1] for array in arrays), arrays[0].shape[0]
    codes, scale = gpu_kernel.kernel(
        functools.partial(_kernel, widths=widths, scaled=factors is not None),
        "to_fp8",
        gpu_kernel.interpreter(),
        out_type=[
            jax.ShapeDtypeStruct((rows, sum(widths)), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("row",),
    )(*arrays, *(() if factors is None else (factors,)))
    return codes, scale
