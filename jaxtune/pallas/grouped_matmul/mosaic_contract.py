"""The gradients of experts' adapters and of whole weights as persistent Pallas Mosaic GPU kernels for Hopper: left^T
right, summed over each expert's rows. For an adapter the left side is thin, with the rank as columns.

A product batched by tile and then summed would write and read each tile's result again: 84 MB for 335 MB of rows of an
adapter. Here one accumulator takes all rows of an expert. An item is a tile of the output: an expert, some columns of
the left side (128 for a weight with at least 128, else 64), and some of the right side. One warpgroup loads 64 rows at
a time, while the others (one for each 64 left columns) multiply or store.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import dispatch, gpu_kernel, mosaic_types, persistent
from jaxtune.pallas.grouped_matmul import gather, reference
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups, groups_of
from jaxtune.pallas.mosaic_modules import plgpu

_STEP = 64  # rows at a time, and columns of the thin side: the least that wgmma takes there
# Columns of an item (the first that divide the wide side's are taken), and steps that are loaded ahead; two programs
# fit a multiprocessor.
_STAGES = {128: 3, 192: 2, 64: 5}
_PROGRAMS = 2

# A weight's gradient: the columns of an item, and the steps that are loaded ahead, by the bytes of a number of the
# result, whose tile needs shared memory too.
_WEIGHT_STAGES = {2: {256: 3, 192: 4, 128: 5, 64: 6}, 4: {192: 3, 128: 4, 64: 6}}
_NARROW = 192  # tiles with fewer columns than this are used only for sides that have fewer columns
# Registers of a thread of the warpgroup that loads, and of the two that multiply, as of mosaic.py's kernel.
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


def _kernel(thin_ref, wide_ref, bounds_ref, *refs, programs: int, gathered: bool):
    """out float32[E, r, n]: thin^T wide over the rows of the tiles from bounds_ref[e] to before bounds_ref[e + 1].

    thin_ref: [rows, R], R a multiple of 64. r is R, or for an R of 64 perhaps less.
    refs: the token of each row if `gathered`; out; shared memory and barriers.
    """
    if gathered:
        tokens_ref, *refs = refs
    out_ref, thin_smem, wide_smem, out_smem, full, free, *refs = refs
    stages, _, columns = wide_smem.shape
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    blocks, thin_blocks = wide_ref.shape[1] // columns, thin_ref.shape[1] // _STEP
    item_rows = out_ref.shape[1] // thin_blocks  # without rows that come from the thin side's padding
    items = out_ref.shape[0] * blocks * thin_blocks
    item_count = lax.div(items - program + (programs - 1), jnp.int32(programs))

    def place(index):
        """(expert, which section of the thin side, which block of the wide side's columns)"""
        item = program + index * programs
        expert, remainder = (
            lax.div(item, jnp.int32(blocks * thin_blocks)),
            lax.rem(item, jnp.int32(blocks * thin_blocks)),
        )
        return expert, lax.div(remainder, jnp.int32(blocks)), lax.rem(remainder, jnp.int32(blocks))

    def steps(expert):
        return (bounds_ref[expert + 1] - bounds_ref[expert]) * (TILE_ROWS // _STEP)

    def slot_of(cursor):
        return lax.rem(cursor, jnp.int32(stages))

    interpreted = gpu_kernel.interpreter() is not None

    def bring():
        if gathered:
            gather.init_barriers(refs[0], interpreted)

        def item(index, cursor):
            expert, thin_block, block = place(index)
            first, count = bounds_ref[expert] * TILE_ROWS, steps(expert)

            def tokens_of(number):
                row = jnp.minimum(first + jnp.minimum(number, count - 1) * _STEP, tokens_ref.shape[0] - _STEP)
                return gather.numbers(tokens_ref, jnp.maximum(row, 0), _STEP, interpreted)

            def step(number, state):
                cursor, *tokens = state
                following = [tokens_of(number + 1) for _ in tokens]
                slot = slot_of(cursor)
                pl.when(cursor >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows = pl.ds(first + number * _STEP, _STEP)
                thin = thin_ref.at[rows, pl.ds(thin_block * _STEP, _STEP)]
                plgpu.copy_gmem_to_smem(thin, thin_smem.at[slot], full.at[slot])
                if gathered:
                    target = wide_smem.at[slot]
                    gather.start_copy(
                        wide_ref, tokens[0], target, block * columns, mosaic_types.tiled(jnp.bfloat16), interpreted
                    )
                    plgpu.barrier_arrive(full.at[slot])
                    gather.signal_arrival(refs[0], slot, interpreted)
                else:
                    wide = wide_ref.at[rows, pl.ds(block * columns, columns)]
                    plgpu.copy_gmem_to_smem(wide, wide_smem.at[slot], full.at[slot])
                return cursor + 1, *following

            start = (cursor, tokens_of(jnp.int32(0))) if gathered else (cursor,)
            return lax.fori_loop(0, count, step, start)[0]

        total = lax.fori_loop(0, item_count, item, jnp.int32(0))
        # Every arrival is waited for, because a barrier must not be left in the middle of a phase.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda cursor, _: plgpu.barrier_wait(free.at[slot_of(cursor)]), None)

    def compute():
        def release(cursor):
            plgpu.barrier_arrive(free.at[slot_of(cursor)])

        def item(index, cursor):
            expert, thin_block, block = place(index)
            item_steps = steps(expert)

            def accumulate(acc):
                def step(number, cursor):
                    slot = slot_of(cursor)
                    plgpu.barrier_wait(full.at[slot])
                    if gathered:
                        round_ = lax.div(cursor, jnp.int32(stages))
                        gather.wait(refs[0], slot, lax.rem(round_, jnp.int32(2)), interpreted)
                    plgpu.wgmma(acc, thin_smem.at[slot].transpose((1, 0)), wide_smem.at[slot])
                    plgpu.wgmma_wait(1)  # the previous product is done
                    pl.when(number > 0)(lambda: release(cursor - 1))
                    return cursor + 1

                lax.fori_loop(0, item_steps, step, cursor)
                plgpu.wgmma_wait(0)
                return acc[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((_STEP, columns), jnp.float32))
            cursor = cursor + item_steps
            pl.when(item_steps > 0)(lambda: release(cursor - 1))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's copy has been read
            out_smem[...] = total
            plgpu.commit_smem()
            target = out_ref.at[expert, pl.ds(thin_block * item_rows, item_rows), pl.ds(block * columns, columns)]
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, item_rows)], target)
            return cursor

        lax.fori_loop(0, item_count, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg == 0, compute, bring)


def contract_rows(thin: jax.Array, wide: jax.Array, groups: Groups, rank: int, tokens=None) -> jax.Array:
    """The gradient of an adapter's A, or of B transposed: float32[E, rank, n], thin^T wide summed over each expert's
    rows; zeros for an expert without rows. Only if `refusal` is None.

      thin: [rows, R], R a multiple of 64, at least `rank`.
      wide: [rows, n], n a multiple of 64, or [T, n] with `tokens`, T for zeros; both bfloat16 or both float16. Empty
      rows must be zero in one and finite in the other.
      tokens: int32[rows], the row of `wide` for each sorted row, or None.
    """
    experts, size = groups.num_experts, wide.shape[1]
    columns = next(columns for columns in _STAGES if size % columns == 0)
    stages = _STAGES[columns]
    thin_blocks = -(-rank // _STEP)
    block_rows = _STEP if thin_blocks > 1 else -(-rank // 8) * 8  # a tile of the result has 8 rows
    ends = jnp.arange(experts + 1, dtype=jnp.int32)
    bounds = (groups.tile_expert < ends[:, None]).sum(1, dtype=jnp.int32)
    programs = _PROGRAMS * persistent.cores() if gpu_kernel.interpreter() is None else 2
    out = gpu_kernel.kernel(
        functools.partial(_kernel, programs=programs, gathered=tokens is not None),
        "grouped_contraction",
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct((experts, block_rows * thin_blocks, size), jnp.float32),
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            mosaic_types.smem((stages, _STEP, _STEP), wide.dtype),
            mosaic_types.smem((stages, _STEP, columns), wide.dtype),
            mosaic_types.smem((_STEP, columns), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            *([] if tokens is None else [gather.barriers(stages)]),
        ],
    )(thin[:, : thin_blocks * _STEP], wide, bounds, *([] if tokens is None else [tokens]))
    return out[:, :rank]


def _weight_kernel(
    left_ref,
    right_ref,
    starts_ref,
    sizes_ref,
    out_ref,
    left_smem,
    right_smem,
    out_smem,
    full,
    free,
    *,
    programs: int,
):
    """out [E, p, q]: left^T right over each expert's rows, in whole steps of 64; the last tile overlaps the one before.

    left_ref, right_ref: [rows, p] and [rows, q], 16 bits, p and q multiples of 64.
    starts_ref, sizes_ref: int32[E], first row (a multiple of 64) and number of rows without empty ones.
    """
    stages, warpgroups, *_ = left_smem.shape
    columns = right_smem.shape[2]
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    experts, left_size, right_size = out_ref.shape
    item_columns = warpgroups * _STEP  # columns of the left side of an item
    left_blocks, blocks = pl.cdiv(left_size, item_columns), pl.cdiv(right_size, columns)
    items = experts * left_blocks * blocks
    item_count = lax.div(items - program + (programs - 1), jnp.int32(programs))

    def place(index):
        """(expert, first column of the left side, first column of the right side)"""
        item = program + index * programs
        expert, remainder = (
            lax.div(item, jnp.int32(left_blocks * blocks)),
            lax.rem(item, jnp.int32(left_blocks * blocks)),
        )
        left_block, block = lax.div(remainder, jnp.int32(blocks)), lax.rem(remainder, jnp.int32(blocks))
        return (
            expert,
            jnp.minimum(left_block * item_columns, left_size - item_columns),
            jnp.minimum(block * columns, right_size - columns),
        )

    def rows_of(index):
        """(first row, steps) of an item's expert, to read them an item early; any expert's if there is none."""
        expert = jnp.clip(place(jnp.minimum(index, item_count - 1))[0], 0, experts - 1)
        return starts_ref[expert], lax.div(sizes_ref[expert] + (_STEP - 1), jnp.int32(_STEP))

    def slot_of(cursor):
        return lax.rem(cursor, jnp.int32(stages))

    def bring():
        if warpgroups > 1:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

        def item(index, state):
            cursor, first, count = state
            _, left_column, right_column = place(index)
            following = rows_of(index + 1)

            def step(number, cursor):
                slot = slot_of(cursor)
                pl.when(cursor >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                rows = pl.ds(pl.multiple_of(first, _STEP) + number * _STEP, _STEP)
                for warpgroup in range(warpgroups):
                    left = left_ref.at[rows, pl.ds(left_column + warpgroup * _STEP, _STEP)]
                    plgpu.copy_gmem_to_smem(left, left_smem.at[slot, warpgroup], full.at[slot])
                right = right_ref.at[rows, pl.ds(right_column, columns)]
                plgpu.copy_gmem_to_smem(right, right_smem.at[slot], full.at[slot])
                return cursor + 1

            return lax.fori_loop(0, count, step, cursor), *following

        total, *_ = lax.fori_loop(0, item_count, item, (jnp.int32(0), *rows_of(jnp.int32(0))))
        # Every arrival is waited for, because a barrier must not be left in the middle of a phase.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda cursor, _: plgpu.barrier_wait(free.at[slot_of(cursor)]), None)

    def compute():
        if warpgroups > 1:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        def release(cursor):
            plgpu.barrier_arrive(free.at[slot_of(cursor)])

        def item(index, state):
            cursor, count = state
            expert, left_column, right_column = place(index)
            _, following = rows_of(index + 1)

            def accumulate(acc):
                def step(number, cursor):
                    slot = slot_of(cursor)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, left_smem.at[slot, wg].transpose((1, 0)), right_smem.at[slot])
                    plgpu.wgmma_wait(1)  # the previous product is done
                    pl.when(number > 0)(lambda: release(cursor - 1))
                    return cursor + 1

                lax.fori_loop(0, count, step, cursor)
                plgpu.wgmma_wait(0)
                return acc[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((_STEP, columns), jnp.float32))
            cursor = cursor + count
            pl.when(count > 0)(lambda: release(cursor - 1))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's copy has been read
            out_smem.at[wg][...] = total.astype(out_ref.dtype)
            plgpu.commit_smem()
            target = out_ref.at[expert, pl.ds(left_column + wg * _STEP, _STEP), pl.ds(right_column, columns)]
            plgpu.copy_smem_to_gmem(out_smem.at[wg], target)
            return cursor, following

        lax.fori_loop(0, item_count, item, (jnp.int32(0), rows_of(jnp.int32(0))[1]))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg < warpgroups, compute, bring)


def _weight_columns(size: int, dtype) -> int:
    """The columns of an item, with which the fewest are multiplied twice; of equal ones the widest."""
    fitting = [columns for columns in _WEIGHT_STAGES[jnp.dtype(dtype).itemsize] if columns <= size]
    wide = [columns for columns in fitting if columns >= _NARROW] or fitting[:1]
    return min(wide, key=lambda columns: -(-size // columns) * columns)


def weight_gradient(left: jax.Array, right: jax.Array, groups: Groups, dtype) -> jax.Array:
    """The gradient of experts' weights: [E, p, q], left^T right summed over each expert's rows in float32 and rounded
    once to `dtype`; otherwise as contract_rows. Only if `weight_refusal` is None.

      left, right: [rows, p] and [rows, q], p and q multiples of 64.
    """
    columns = _weight_columns(right.shape[1], dtype)
    stages = _WEIGHT_STAGES[jnp.dtype(dtype).itemsize][columns]
    warpgroups = 2 if left.shape[1] >= 2 * _STEP else 1
    programs = persistent.cores()
    return gpu_kernel.kernel(
        functools.partial(_weight_kernel, programs=programs),
        "expert_weight_gradient",
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct((groups.num_experts, left.shape[1], right.shape[1]), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            mosaic_types.smem((stages, warpgroups, _STEP, _STEP), left.dtype),
            mosaic_types.smem((stages, _STEP, columns), right.dtype),
            mosaic_types.smem((warpgroups, _STEP, columns), dtype),
            plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ],
    )(left, right, groups.starts(), groups.sizes)


def refusal(dtype) -> str | None:
    """Why this GPU must not run contract_rows in this dtype, or None."""

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1129)
        keys = jax.random.split(jax.random.key(0), 3)
        results, cases = [], []
        for size in (256, 192, 320):  # in blocks of 128, 192 and 64 columns
            for rank, key in ((16, keys[0]), (72, keys[1])):
                wide = jax.random.normal(keys[2], (groups.rows, size)).astype(dtype)
                thin = jax.random.normal(key, (groups.rows, -(-rank // _STEP) * _STEP)).astype(dtype)
                tokens = jnp.arange(groups.rows)[::-1].at[128].set(groups.rows)
                for row_tokens in (None, tokens):
                    results.append(jax.jit(contract_rows, static_argnums=3)(thin, wide, groups, rank, row_tokens))
                    cases.append((thin[:, :rank], wide, row_tokens))

        def exact(thin, wide, row_tokens):
            rows = reference.rows_of(wide, row_tokens).astype(jnp.float32)
            return reference.contract_rows(thin.astype(jnp.float32), rows, groups, jnp.float32)

        expected = dispatch.exactly(lambda cases: [exact(*case) for case in cases])(cases)
        return results, expected

    return dispatch.first_use("grouped_matmul", "mosaic_contract", jnp.dtype(dtype).name, compare)


def weight_refusal(dtype, weight_dtype) -> str | None:
    """As `refusal`, for weight_gradient with rows of `dtype` and a result in `weight_dtype`."""
    rows_dtype, result_dtype = jnp.dtype(dtype), jnp.dtype(weight_dtype)
    if result_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"gradients in {result_dtype.name}"

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1129)
        row = jnp.arange(groups.rows)[:, None]
        inside = (row >= groups.starts()) & (row < groups.starts() + groups.sizes)
        occupied = inside.any(1, keepdims=True)
        keys = jax.random.split(jax.random.key(0))
        results, cases = [], []
        # One and two warpgroups that multiply; items of 256, 192, 128 and 64 columns; sizes that they do not divide.
        for left_size, right_size in ((64, 64), (128, 320), (192, 448), (320, 128)):
            left = jax.random.normal(keys[0], (groups.rows, left_size)).astype(rows_dtype)
            right = jnp.where(occupied, jax.random.normal(keys[1], (groups.rows, right_size)), 0).astype(rows_dtype)
            results.append(jax.jit(weight_gradient, static_argnums=3)(left, right, groups, result_dtype))
            cases.append((left.astype(jnp.float32), right.astype(jnp.float32)))

        def exact(cases):
            return [reference.contract_rows(left, right, groups, jnp.float32) for left, right in cases]

        return results, dispatch.exactly(exact)(cases)

    return dispatch.first_use(
        "grouped_matmul", "mosaic_weight_gradient", f"{rows_dtype.name} to {result_dtype.name}", compare
    )
