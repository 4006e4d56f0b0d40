"""Copies tokens to the rows of their experts (`spread`), as a Pallas Mosaic GPU kernel for Hopper.

TMA copies whole rows, without registers: the kernel reads every token once and writes it to its k rows. A gather in the
order of the rows would read a token k times, too far apart to find it in the L2 cache. For 16,384 tokens of
Qwen3-30B-A3B on an H200 the kernel takes 0.20 ms, XLA's gather 0.33, the bytes alone 0.17.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import gpu_kernel, persistent
from jaxtune.pallas.mosaic_modules import plgpu

_WIDTH = 64  # a row is copied as [hidden / 64, 64], because a TMA box has at most 256 elements along an axis
_ROWS, _STAGES = 4, 3  # tokens that are copied at a time, and how many such copies are in flight
_EMPTY = 32  # rows that are tested for emptiness at a time
_PROGRAMS = 2  # programs per multiprocessor


def refusal(dtype, hidden: int, k: int) -> str | None:
    """Why the kernel cannot copy tokens of `hidden` numbers to k rows each, or None."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if hidden % _WIDTH or not 0 < hidden <= 8192:
        return f"hidden size {hidden}; multiples of {_WIDTH} up to 8,192"
    if k > 32:
        return f"{k} experts a token; up to 32"
    return None


def _kernel(body, name: str, **options):
    """The compiled kernel, or its interpretation within gpu_kernel.interpreted."""
    return gpu_kernel.kernel(body, name, gpu_kernel.interpreter(), **options)


def _programs(count: int, of_a_core: int) -> int:
    return min(count, of_a_core * persistent.cores() if gpu_kernel.interpreter() is None else 3)


def _spread_kernel(
    x_ref, zeros_ref, slots_ref, source_ref, out_ref, rows_smem, zero_smem, full, zero_full, *, programs, k, pairs
):
    """Sets out[slots[t, j]] = x[t] for every pair with a row, and zeros in empty rows.

    x_ref: [tokens, hidden / 64, 64], tokens a multiple of four.
    slots_ref: int32[tokens * k]; the number of rows for a pair without an expert.
    source_ref: int32[rows], the pair of each row; `pairs` or more for empty rows.
    rows_smem, zero_smem: stages of tokens, and a row of zeros.
    """
    program = lax.axis_index("program")
    rows, chunks = out_ref.shape[0], x_ref.shape[0] // _ROWS
    run_count = lax.div(chunks - program + (programs - 1), jnp.int32(programs))

    def first_token(number):
        return (program + jnp.minimum(number, run_count - 1) * programs) * _ROWS

    def fetch(number):
        slot = lax.rem(number, jnp.int32(_STAGES))

        @pl.when(number < run_count)
        def _():
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first_token(number), _ROWS)], rows_smem.at[slot], full.at[slot])

    def targets(number):
        return tuple(slots_ref[first_token(number) * k + pair] for pair in range(_ROWS * k))  # all on their way at once

    def store(row, row_index, where):
        @pl.when(where)  # the interpreter knows no predicate of a copy
        def _():
            plgpu.copy_smem_to_gmem(row, out_ref.at[row_index], commit_group=False)

    def step(number, targets_now):
        slot = lax.rem(number, jnp.int32(_STAGES))
        following = targets(number + 1)
        plgpu.barrier_wait(full.at[slot])
        for pair, target in enumerate(targets_now):
            store(rows_smem.at[slot, pair // k], target, target < rows)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the tokens before have left: their slot is free
        fetch(number + _STAGES - 1)
        return following

    def clear(number, _):
        first = (program + number * programs) * _EMPTY
        source = [source_ref[jnp.minimum(first + row, rows - 1)] for row in range(_EMPTY)]
        for row in range(_EMPTY):
            store(zero_smem, first + row, jnp.logical_and(source[row] >= pairs, first + row < rows))
        return _

    plgpu.copy_gmem_to_smem(zeros_ref, zero_smem, zero_full)
    for number in range(_STAGES - 1):
        fetch(jnp.int32(number))
    lax.fori_loop(0, run_count, step, targets(jnp.int32(0)))
    plgpu.barrier_wait(zero_full)
    looks = lax.div(jnp.int32(-(-rows // _EMPTY)) - program + (programs - 1), jnp.int32(programs))
    lax.fori_loop(0, looks, clear, None)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


def spread(x: jax.Array, slots: jax.Array, source: jax.Array) -> jax.Array:
    """x [T, H] in the rows of its pairs, [rows, H], with zeros in empty rows, in bfloat16 or float16. Only if `refusal`
    is None.

      slots: int32[T, k], the row of each pair; the number of rows for a pair without an expert.
      source: int32[rows], the pair of each row; T * k for empty rows.
    """
    tokens, hidden = x.shape
    rows, k = source.shape[0], slots.shape[1]
    padding = -tokens % _ROWS
    x = jnp.pad(x, ((0, padding), (0, 0)))
    padded = jnp.pad(slots, ((0, padding), (0, 0)), constant_values=rows).reshape(-1)
    chunks_per_row = hidden // _WIDTH
    programs = _programs((tokens + padding) // _ROWS, _PROGRAMS)
    out = _kernel(
        functools.partial(_spread_kernel, programs=programs, k=k, pairs=slots.size),
        "permute",
        out_type=jax.ShapeDtypeStruct((rows, chunks_per_row, _WIDTH), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((_STAGES, _ROWS, chunks_per_row, _WIDTH), x.dtype),
            plgpu.SMEM((chunks_per_row, _WIDTH), x.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=1),
        ],
    )(x.reshape(-1, chunks_per_row, _WIDTH), jnp.zeros((chunks_per_row, _WIDTH), x.dtype), padded, source)
    return out.reshape(rows, hidden)
