"""activation(x gate^T) * (x up^T) for 129 to 256 rows of x, as a Pallas Mosaic GPU kernel for Hopper.

Such a product is bound by multiplications, and these by the GPU's power. Two programs, a cluster, multiply the halves
of the rows by the same tile of the weights, which one read brings to both. A tile has `columns` rows of gate and as
many of up, so a warpgroup has both numbers of each result in registers, and no product is written. Its size makes the
tiles occupy the multiprocessors evenly (112 + 112 for the 14,336 of Llama-3.1-8B).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel, mosaic_types, persistent

_HALVES = 2  # programs of a cluster
_WARPGROUPS = 2  # warpgroups of a program that compute
_OWN = 64  # rows of each
ROWS = _WARPGROUPS * _OWN  # rows of x of a program
STEP = 64  # columns of x that are loaded at a time
_STORED = 16  # results of a row that are computed at a time: a row of the swizzle of 32 bytes
_COLUMNS = range(128, 48, -_STORED)  # rows of gate (and of up) of a tile; 2 * 128 are the most that wgmma multiplies
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232  # registers of a thread; all threads have 65,536
_SHARED_BYTES = 231_000  # a program's shared memory without its barriers
_MOST_STAGES = 6


def columns_of(out: int) -> int | None:
    """Rows of gate (and of up) in a tile: the divisor of `out` among 64, 80, 96, 112 and 128 that leaves the busiest
    program the fewest rows, or None.
    """
    pairs = persistent.cores() // _HALVES
    fitting = [columns for columns in _COLUMNS if out % columns == 0]
    return min(fitting, key=lambda columns: -(-(out // columns) // pairs) * columns, default=None)


def refusal(x, gate, activation: str) -> str | None:
    """Why the kernel does not support a call on this GPU, or None. x [N, in], gate [out, in] are arrays or shapes.

    activation: "silu" or "gelu_tanh" are supported.
    """
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}"
    if not ROWS < len(x) <= _HALVES * ROWS or len(x) % 8:  # Mosaic has no layout for other numbers
        return f"{len(x)} rows; multiples of 8 from {ROWS + 8} to {_HALVES * ROWS}"
    if columns_of(gate.shape[0]) is None or gate.shape[1] % STEP:
        return f"weights {gate.shape}: no tile divides their rows, or {STEP} not their columns"
    return None if activation in ("silu", "gelu_tanh") else f"activation {activation}"


def _activated(gate, activation: str, dtype):
    """The activation of float32 `gate`, each step rounded to `dtype`, as triton_kernels._activated_in_steps and
    training do.
    """

    def rounded(number):
        return number.astype(dtype).astype(jnp.float32)

    if activation == "silu":
        return rounded(gate * rounded(1.0 / rounded(1.0 + rounded(jnp.exp(-gate)))))
    cubic, factor = (float(np.float32(number).astype(dtype)) for number in (0.044715, 0.7978845608028654))
    inner = rounded(rounded(gate * gate) * gate)
    inner = rounded(rounded(gate + rounded(inner * cubic)) * factor)
    # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
    share = rounded(1.0 + rounded(1.0 - 2.0 / (1.0 + jnp.exp(2.0 * inner))))
    return rounded(gate * (0.5 * share))


def _kernel(x_ref, gate_ref, up_ref, out_ref, x_smem, w_smem, out_smem, full, free, *, pairs, stages, activation):
    """out [N, out] = activation(x gate^T) * (x up^T). The two programs of pair p compute tiles p, p + pairs, ..., each
    for 128 rows; the second's end with the last row and may overlap the first's, with the same values.

      x_smem, w_smem, out_smem: [stages, 128, STEP], [stages, 2 * columns, STEP] (gate first), [warpgroups, 64,
        columns].
      full, free: barriers of each stage: both operands are there; all readers are done.
    """
    wg, pair, half = lax.axis_index("wg"), lax.axis_index("pair"), lax.axis_index("half")
    (rows, width), columns = x_ref.shape, out_smem.shape[2]
    steps, dtype = width // STEP, out_ref.dtype
    tile_count = lax.div(out_ref.shape[1] // columns - pair + (pairs - 1), jnp.int32(pairs))
    first_row = half * (rows - ROWS)
    sharing = None if gpu_kernel.interpreter() is not None else "half"

    def slot_of(counter):
        return lax.rem(counter, jnp.int32(stages))

    def column_of(index):
        return (pair + index * pairs) * columns

    def bring():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

        def item(index, counter):
            weight_rows = pl.ds(column_of(index), columns)

            def step(number, counter):
                slot, along = slot_of(counter), pl.ds(number * STEP, STEP)
                pl.when(counter >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first_row, ROWS), along], x_smem.at[slot], full.at[slot])
                for first_row_of_weight, ref in ((0, gate_ref), (columns, up_ref)):
                    target = w_smem.at[slot, pl.ds(first_row_of_weight, columns)]
                    plgpu.copy_gmem_to_smem(ref.at[weight_rows, along], target, full.at[slot], collective_axes=sharing)
                return counter + 1

            return lax.fori_loop(0, steps, step, counter)

        total = lax.fori_loop(0, tile_count, item, jnp.int32(0))
        # Every arrival is waited for: a barrier must not be left in the middle of a phase, nor may a program end that
        # the other one of its cluster still writes to.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda counter, _: plgpu.barrier_wait(free.at[slot_of(counter)]), None)

    def compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        row_slice = pl.ds(wg * _OWN, _OWN)

        def item(index, counter):
            def accumulate(acc):
                def step(number, counter):
                    slot = slot_of(counter)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, x_smem.at[slot, row_slice], w_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # the previous product is done
                    pl.when(number > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(counter - 1)]))
                    return counter + 1

                lax.fori_loop(0, steps, step, counter)
                plgpu.wgmma_wait(0)
                return acc[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((_OWN, 2 * columns), jnp.float32))
            plgpu.barrier_arrive(free.at[slot_of(counter + steps - 1)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the copy of the last tile has been read
            for first in range(0, columns, _STORED):
                gate, up = (
                    lax.slice(total, (0, start), (_OWN, start + _STORED)).astype(dtype).astype(jnp.float32)
                    for start in (first, columns + first)
                )
                stored = out_smem.at[wg, :, pl.ds(first, _STORED)]
                stored[...] = (_activated(gate, activation, dtype) * up).astype(dtype)
            plgpu.commit_smem()
            target = out_ref.at[pl.ds(first_row + wg * _OWN, _OWN), pl.ds(column_of(index), columns)]
            plgpu.copy_smem_to_gmem(out_smem.at[wg], target)
            return counter + steps

        lax.fori_loop(0, tile_count, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg < _WARPGROUPS, compute, bring)


def gated_product(x, gate, up, activation: str):
    """[N, out] in x's dtype. Both products and each step of the activation are rounded to it, as in plain JAX.

    x: [N, in], N from 136 to 256. gate, up: [out, in] in x's dtype. activation: "silu" or "gelu_tanh".
    """
    rows, out = len(x), gate.shape[0]
    columns, interpret = columns_of(out), gpu_kernel.interpreter()
    assert columns is not None
    tiles, pairs = out // columns, persistent.cores() // _HALVES
    pairs = -(-tiles // -(-tiles // pairs))  # as few as compute the tiles in no more turns
    stored = 2 * ROWS * columns
    stages = min((_SHARED_BYTES - stored) // (2 * STEP * (ROWS + 2 * columns)), _MOST_STAGES)

    # The interpreter has no clusters whose programs read the same copy, so there each reads its own.
    if interpret is not None:
        axes = dict(grid=(pairs, _HALVES), grid_names=("pair", "half"))
        free = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages)
    else:
        axes = dict(grid=(pairs,), grid_names=("pair",), cluster=(_HALVES,), cluster_names=("half",))
        free = plgpu.ClusterBarrier(collective_axes=("half",), num_arrivals=_WARPGROUPS, num_barriers=stages)
    return gpu_kernel.kernel(
        functools.partial(_kernel, pairs=pairs, stages=stages, activation=activation),
        "gated_product",
        interpret,
        out_type=jax.ShapeDtypeStruct((rows, out), x.dtype),
        **axes,
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            mosaic_types.smem((stages, ROWS, STEP), x.dtype),
            mosaic_types.smem((stages, 2 * columns, STEP), x.dtype),
            mosaic_types.smem((_WARPGROUPS, _OWN, columns), x.dtype, row_bytes=32),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            free,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, gate, up)
