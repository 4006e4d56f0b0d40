"""Gathering rows and summing them as Pallas Mosaic GPU kernels for Hopper: TMA moves whole rows.

`rows_of` never takes a row through registers: what a program has on its way is bound by shared memory. `summed` brings
the k rows of eight tokens, part by part, and adds them in float32 from the first to the last. Neither adds by atomics.

Not run on a GPU yet.
"""

# Pallas' annotations know neither its own transforms nor barriers.
# pyright: reportAbstractUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel
from jaxtune.pallas.grouped_matmul import mosaic

_WIDTH = 64  # a row is so many numbers by hidden / 64: a box of TMA has at most 256 in a direction
_ROWS, _STAGES = 4, 3  # of a gather: rows that go together, and how many times that are on their way
_TOKENS = 8  # of a sum, that go together
_INDICES = 32  # of a sum, that are read before the first is used
_SUM_BYTES = 150_000  # of shared memory for rows on their way to a sum
_PROGRAMS = 2  # of a gather on a multiprocessor


def refusal(dtype, hidden: int, k: int) -> str | None:
    """Why these kernels cannot serve this call, or None."""
    from jaxtune.pallas.dispatch import compute_capability

    if mosaic.interpreter() is None and compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if hidden % _WIDTH or not 0 < hidden <= 8192:
        return f"hidden size {hidden}; multiples of {_WIDTH} up to 8,192"
    if k > 32:
        return f"{k} experts a token; up to 32"
    return None


def _kernel(body, **options):
    return gpu_kernel.kernel(body, mosaic.interpreter(), **options)


def _programs(count: int, of_a_core: int) -> int:
    return min(count, of_a_core * mosaic.cores() if mosaic.interpreter() is None else 3)


# ---- gather


def _gather_kernel(x_ref, zeros_ref, index_ref, out_ref, rows_smem, zero_smem, full, zero_full, *, programs):
    """out[row] = x[index[row]], or zeros past the end."""
    program = lax.axis_index("program")
    tokens, chunks = x_ref.shape[0], out_ref.shape[0] // _ROWS
    mine = lax.div(chunks - program + (programs - 1), jnp.int32(programs))

    def first_row(number):
        return (program + jnp.minimum(number, mine - 1) * programs) * _ROWS

    def fetch(number):
        """Brings one chunk, if there is one; returns which rows of x."""
        slot, first = lax.rem(number, jnp.int32(_STAGES)), first_row(number)
        index = [index_ref[first + row] for row in range(_ROWS)]  # all of them are on their way at once

        @pl.when(number < mine)
        def _():
            for row in range(_ROWS):
                source = x_ref.at[jnp.minimum(index[row], tokens - 1)]
                plgpu.copy_gmem_to_smem(source, rows_smem.at[slot, row], full.at[slot])

        return tuple(index)

    def step(number, held):
        slot, first = lax.rem(number, jnp.int32(_STAGES)), first_row(number)
        plgpu.barrier_wait(full.at[slot])
        for row in range(_ROWS):
            target = out_ref.at[first + row]
            real = held[row] < tokens
            pl.when(real)(lambda row=row, target=target: plgpu.copy_smem_to_gmem(rows_smem.at[slot, row], target))
            pl.when(jnp.logical_not(real))(lambda target=target: plgpu.copy_smem_to_gmem(zero_smem, target))
        # All but this chunk's rows have been read: the slot of the chunk before is free.
        plgpu.wait_smem_to_gmem(_ROWS, wait_read_only=True)
        return (*held[_ROWS:], *fetch(number + _STAGES - 1))

    plgpu.copy_gmem_to_smem(zeros_ref, zero_smem, zero_full)
    held = ()
    for number in range(_STAGES - 1):
        held = (*held, *fetch(jnp.int32(number)))
    plgpu.barrier_wait(zero_full)
    lax.fori_loop(0, mine, step, held)
    plgpu.wait_smem_to_gmem(0)


def rows_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [T, H] at index int32[rows]; zero where index is past the end. See reference.rows_of."""
    tokens, hidden = x.shape
    short = -index.shape[0] % _ROWS
    index = jnp.pad(index, (0, short), constant_values=tokens)
    parts = hidden // _WIDTH
    programs = _programs(index.shape[0] // _ROWS, _PROGRAMS)
    out = _kernel(
        functools.partial(_gather_kernel, programs=programs),
        out_type=jax.ShapeDtypeStruct((index.shape[0], parts, _WIDTH), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((_STAGES, _ROWS, parts, _WIDTH), x.dtype),
            plgpu.SMEM((parts, _WIDTH), x.dtype),
            plgpu.Barrier(num_arrivals=_ROWS, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=1),
        ],
    )(x.reshape(tokens, parts, _WIDTH), jnp.zeros((parts, _WIDTH), x.dtype), index)
    return out.reshape(-1, hidden)[: index.shape[0] - short]


# ---- sum


def _sum_kernel(rows_ref, zeros_ref, slots_ref, out_ref, rows_smem, out_smem, full, *, programs, k):
    """out[t] = sum_j rows[slots[t, j]], zeros for those past the end; a unit of work is a part of eight tokens."""
    program = lax.axis_index("program")
    rows = rows_ref.shape[0]
    part = rows_smem.shape[3]
    parts = out_ref.shape[1] // part
    units = out_ref.shape[0] // _TOKENS * parts
    mine = lax.div(units - program + (programs - 1), jnp.int32(programs))
    layout = plgpu.Layout.WG_STRIDED((_TOKENS, part, _WIDTH), 4)

    def place(number):
        """(first token, the part) of a unit."""
        unit = program + number * programs
        chunk = lax.div(unit, jnp.int32(parts))
        return chunk * _TOKENS, pl.ds((unit - chunk * parts) * part, part)

    def fetch(number):
        @pl.when(number < mine)
        def _():
            slot = lax.rem(number, jnp.int32(2))
            token, here = place(number)
            pairs = [(t, j) for t in range(_TOKENS) for j in range(k)]
            for first in range(0, len(pairs), _INDICES):
                some = pairs[first : first + _INDICES]
                indices = [slots_ref[(token + t) * k + j] for t, j in some]
                for (t, j), index in zip(some, indices, strict=True):
                    target = rows_smem.at[slot, j, t]
                    lax.cond(
                        index < rows,
                        lambda index=index, target=target: plgpu.copy_gmem_to_smem(
                            rows_ref.at[index, here], target, full.at[slot]
                        ),
                        lambda target=target: plgpu.copy_gmem_to_smem(zeros_ref, target, full.at[slot]),
                    )

    def step(number, _):
        slot = lax.rem(number, jnp.int32(2))
        fetch(number + 1)  # into the slot of the unit before, which every lane has read
        plgpu.barrier_wait(full.at[slot])

        def wide(j):
            return plgpu.load(rows_smem.at[slot, j], layout=layout, optimized=False).astype(jnp.float32)

        total = wide(0)
        for j in range(1, k):
            total = total + wide(j)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last unit has left
        out_smem[...] = total.astype(out_ref.dtype)
        plgpu.commit_smem()
        token, here = place(number)
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[pl.ds(token, _TOKENS), here])

    fetch(jnp.int32(0))
    lax.fori_loop(0, mine, step, None)
    plgpu.wait_smem_to_gmem(0)


def _part(blocks: int, k: int) -> int:
    """How many blocks of 64 of a row a unit takes: the most that divide a row and fit twice, up to 16."""
    fits = (n for n in range(16, 0, -1) if blocks % n == 0 and 2 * k * _TOKENS * n * 2 * _WIDTH <= _SUM_BYTES)
    return next(fits, 1)


def summed(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """rows [rows, H], slots int32[T, k] -> [T, H]; see reference.summed."""
    tokens, k = slots.shape
    count, hidden = rows.shape
    blocks = hidden // _WIDTH
    part = _part(blocks, k)
    short = -tokens % _TOKENS
    slots = jnp.pad(slots, ((0, short), (0, 0)), constant_values=count).reshape(-1)
    programs = _programs((tokens + short) // _TOKENS * (blocks // part), 1)
    out = _kernel(
        functools.partial(_sum_kernel, programs=programs, k=k),
        out_type=jax.ShapeDtypeStruct((tokens + short, blocks, _WIDTH), rows.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((2, k, _TOKENS, part, _WIDTH), rows.dtype),
            plgpu.SMEM((_TOKENS, part, _WIDTH), rows.dtype),
            plgpu.Barrier(num_arrivals=k * _TOKENS, num_barriers=2),
        ],
    )(rows.reshape(count, blocks, _WIDTH), jnp.zeros((part, _WIDTH), rows.dtype), slots)
    return out.reshape(-1, hidden)[:tokens]
