"""The product of two arrays of e4m3 codes, x [M, K] and a weight [N, K], as a persistent Pallas Mosaic GPU kernel for
Hopper (wgmma, TMA, warp specialisation).

One warpgroup loads 128 (or 64) codes along K of both operands, as many steps ahead as fit, while the two others, each
with 64 of the 128 rows, multiply or store. If rows are sorted by expert, each tile is multiplied by its expert's
weight.

With one scale for each row the tensor cores sum over all of K, and the result is scaled once. With scales of 128
numbers they sum over 128, and a warpgroup scales and adds these sums in float32, while the other multiplies. An
adapter's product is one more step, in 16 bits.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import gpu_kernel, mosaic_types, persistent
from jaxtune.pallas.mosaic_modules import plgpu

_WARPGROUPS = 2  # warpgroups that compute
_OWN = 64  # rows of each
ROWS = _WARPGROUPS * _OWN  # rows of a tile
STEP = 128  # codes along K of a step: a row of the swizzle, and the codes that share a scale
_HALF_STEP = 64  # a shorter step, if whole ones do not divide K and scales are outside of the sum
_COLUMNS = (256, 192, 128, 64)  # columns of a tile; the first that divide the output's are taken
_STORED = 64  # columns that are stored at a time
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 72, 216  # registers of a thread; all threads have 65,536
RANKS = (16, 32, 64)  # ranks to which an adapter is padded: rows of a swizzle of 32, 64 and 128 bytes
_SHARED_BYTES = 231_000  # a program's shared memory without its barriers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernel divides its work."""

    columns: int  # the columns of a tile of the output, which always has 128 rows
    stages: int  # how many steps' operands shared memory has room for
    band: int = 16  # tiles are numbered in bands of this many rows of tiles, which run at the same time (persistent.py)
    step: int = STEP  # how many codes along K a step multiplies


def blocks_for(in_size: int, out_size: int, rank: int, in_blocks: bool) -> Blocks:
    """The widest tile whose columns divide out_size, and as many steps ahead as shared memory has room for. rank:
    padded.

      in_size: summed. in_blocks: each 128 numbers have a scale.
    """
    columns = next(size for size in _COLUMNS if out_size % size == 0 and not (in_blocks and size % STEP))
    step = STEP if in_size % STEP == 0 else _HALF_STEP
    free_bytes = _SHARED_BYTES - 2 * _WARPGROUPS * _OWN * _STORED * 2 - 2 * rank * (ROWS + columns)
    return Blocks(columns, min(free_bytes // (step * (ROWS + columns)), 6 * STEP // step), step=step)


def refusal(tokens: int, in_size: int, out_size: int, rank: int, dtype, in_blocks: bool) -> str | None:
    """Why this kernel cannot multiply e4m3 [tokens, in_size] by [out_size, in_size], or None."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    multiple = STEP if in_blocks else _HALF_STEP
    for size in (in_size, out_size):
        if size % multiple:
            return f"size {size} is not a multiple of {multiple}"
    if tokens < ROWS:
        return f"{tokens} tokens, fewer than {ROWS}"
    if tokens % 8:
        return f"{tokens} tokens, no multiple of 8"  # Mosaic has no layout for others
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if padded_rank(rank) is None:
        return f"adapters of rank {rank} in all, more than {RANKS[-1]}"
    return None


def padded_rank(rank: int) -> int | None:
    """Columns to which an adapter's operands must be padded: 16, 32 or 64; None for a rank above 64."""
    return next((size for size in RANKS if rank <= size), None)


def _kernel(x_ref, *refs, sides: int, blocks: Blocks, programs: int, in_blocks: bool, rank: int, grouped: bool):
    """out [M, N] = scaled(x [M, K] w[e] [N, K]^T) + u [M, R] l[e] [N, R]^T with `in_blocks`, else scaled(x w[e]^T + u
    l[e]^T); e is the expert of a tile of 128 rows, or 0.

      refs: `sides` arrays of w, [E, N, K_i]; the scales of x and w; if `grouped`, each tile's expert and number of rows
      that are not empty; if `rank`, u and l [E, N, R]; the output; shared memory and barriers.
    """
    w_refs, (x_scale_ref, w_scale_ref, *refs) = refs[:sides], refs[sides:]
    if grouped:
        expert_ref, sizes_ref, *refs = refs
    if rank:
        u_ref, l_ref, *refs = refs
        out_ref, x_smem, w_smem, out_smem, full, free, u_smem, l_smem, extra_full, extra_free = refs
    else:
        out_ref, x_smem, w_smem, out_smem, full, free = refs
    columns, stages = blocks.columns, blocks.stages
    wg, program = lax.axis_index("wg"), lax.axis_index("sm")
    (all_rows, width), (experts, out_size, _) = x_ref.shape, w_refs[0].shape
    row_tiles, column_tiles, all_steps = -(-all_rows // ROWS), out_size // columns, width // blocks.step
    tile_count = lax.div(row_tiles * column_tiles - program + (programs - 1), jnp.int32(programs))

    def corner(index):
        """(first row, first column) of a tile; the last tile's rows overlap the ones before, and both store the same
        values.
        """
        row, column = persistent.tile_position(program + index * programs, row_tiles, column_tiles, blocks.band)
        return jnp.minimum(row * ROWS, all_rows - ROWS), column * columns

    def tile_of(index):
        """(expert, rows that are not empty) of a tile, read one tile ahead; () if not grouped."""
        if not grouped:
            return ()
        item = program + jnp.minimum(index, tile_count - 1) * programs
        row = jnp.clip(persistent.tile_position(item, row_tiles, column_tiles, blocks.band)[0], 0, row_tiles - 1)
        return jnp.minimum(expert_ref[row], experts - 1), sizes_ref[row]

    def steps_of(tile, least: int | jax.Array = 0):
        """Steps along K; 0 if at most `least` of the tile's rows are not empty."""
        return jnp.where(tile[1] > least, all_steps, 0) if grouped else all_steps

    def expert_of(tile):
        return tile[0] if grouped else 0

    def slot_of(cursor):
        return lax.rem(cursor, jnp.int32(stages))

    def bring():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

        def item(index, state):
            cursor, *tile = state
            following, expert = tile_of(index + 1), expert_of(tile)
            row, column = corner(index)
            rows, column_slice = pl.ds(row, ROWS), pl.ds(column, columns)

            def step(w_ref, before, number, cursor):
                """Loads step `number` of an array of w, after `before` steps of others."""
                slot, along = slot_of(cursor), pl.ds(number * blocks.step, blocks.step)
                x_columns = pl.ds((number + before) * blocks.step, blocks.step) if before else along
                pl.when(cursor >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(x_ref.at[rows, x_columns], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(w_ref.at[expert, column_slice, along], w_smem.at[slot], full.at[slot])
                return cursor + 1

            if rank:  # for empty tiles too, whose rows of u are zeros
                pl.when(index > 0)(lambda: plgpu.barrier_wait(extra_free))
                plgpu.copy_gmem_to_smem(u_ref.at[rows], u_smem.at[0], extra_full)
                plgpu.copy_gmem_to_smem(l_ref.at[expert, column_slice], l_smem.at[0], extra_full)
            before = 0
            for w_ref in w_refs:
                count = w_ref.shape[2] // blocks.step if sides > 1 else steps_of(tile)
                cursor = lax.fori_loop(0, count, functools.partial(step, w_ref, before), cursor)
                before += w_ref.shape[2] // blocks.step
            return cursor, *following

        total, *_ = lax.fori_loop(0, tile_count, item, (jnp.int32(0), *tile_of(jnp.int32(0))))
        # Every arrival is waited for, because a barrier must not be left in the middle of a phase.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda cursor, _: plgpu.barrier_wait(free.at[slot_of(cursor)]), None)
        if rank:
            pl.when(tile_count > 0)(lambda: plgpu.barrier_wait(extra_free))

    warpgroup_rows = pl.ds(wg * _OWN, _OWN)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def of_rows(scales, count: int):
        return lax.broadcast_in_dim(scales, (_OWN, count), [0])

    def adapter(acc, cursor, first: int = 0, count: int = columns):
        # Zero, which the compiler must not know: it would compute the operands' addresses once and keep, or spill,
        # them.
        zero = lax.shift_right_logical(cursor, jnp.int32(30))
        plgpu.wgmma(acc, u_smem.at[zero, warpgroup_rows], l_smem.at[zero, pl.ds(first, count)].transpose((1, 0)))

    def pass_on(first, steps, cursor):
        """Frees the slots of a tile's steps without multiplying, for a warpgroup whose rows are all empty."""

        def free_slot(number, _):
            plgpu.barrier_wait(full.at[slot_of(cursor + number)])
            plgpu.barrier_arrive(free.at[slot_of(cursor + number)])

        if grouped:
            lax.fori_loop(first, steps, free_slot, None)

    def by_rows(row, column, cursor, tile, steps, multiplied):
        """Yields (first column, float32[64, 64]) of this warpgroup's rows."""

        def accumulate(acc):
            def step(number, cursor):
                slot = slot_of(cursor)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, x_smem.at[slot, warpgroup_rows], w_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the previous product is done
                pl.when(number > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(cursor - 1)]))
                return cursor + 1

            if rank:
                plgpu.barrier_wait(extra_full)
                adapter(acc, cursor)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(extra_free)
            lax.fori_loop(0, multiplied, step, cursor)
            plgpu.wgmma_wait(0)
            return acc[...]

        total = pl.run_scoped(accumulate, plgpu.ACC((_OWN, columns), jnp.float32))
        pl.when(multiplied > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(cursor + steps - 1)]))
        pass_on(multiplied, steps, cursor)
        x_scale = plgpu.load(x_scale_ref.at[pl.ds(row + wg * _OWN, _OWN)], layout=by_row, optimized=False)
        for first in range(0, columns, _STORED):
            stripe = lax.slice(total, (0, first), (_OWN, first + _STORED))
            weight_scales = w_scale_ref.at[expert_of(tile), pl.ds(column + first, _STORED)]
            w_scale = plgpu.load(weight_scales, layout=by_column, optimized=False)
            yield first, stripe * of_rows(x_scale, _STORED) * lax.broadcast_in_dim(w_scale, stripe.shape, [1])

    def by_blocks(row, column, cursor, tile, steps, multiplied):
        """As `by_rows`, with sums of 128 codes in each of the tile's column blocks of 128."""
        column_blocks = columns // STEP
        first_block = lax.div(column, jnp.int32(STEP))

        def scales(number):
            number = jnp.minimum(number, all_steps - 1)
            row_scales = x_scale_ref.at[number, pl.ds(row + wg * _OWN, _OWN)]
            weight_scales = [
                w_scale_ref[expert_of(tile), first_block + column_block, number]
                for column_block in range(column_blocks)
            ]
            return plgpu.load(row_scales, layout=by_row, optimized=False), weight_scales

        def product(multiply):
            def run(acc):
                multiply(acc)
                plgpu.wgmma_wait(0)
                return acc[...]

            return pl.run_scoped(run, plgpu.ACC((_OWN, STEP), jnp.float32))

        def step(number, state):
            cursor, (x_scale, w_scales), sums = state
            following = scales(number + 1)
            slot = slot_of(cursor)
            plgpu.barrier_wait(full.at[slot])

            def multiply(acc, column_block):
                side = w_smem.at[slot, pl.ds(column_block * STEP, STEP)]
                plgpu.wgmma(acc, x_smem.at[slot, warpgroup_rows], side.transpose((1, 0)))

            next_sums = []
            for column_block in range(column_blocks):
                partial_sum = product(functools.partial(multiply, column_block=column_block))
                next_sums.append(sums[column_block] + partial_sum * of_rows(x_scale * w_scales[column_block], STEP))
            plgpu.barrier_arrive(free.at[slot])
            return cursor + 1, following, next_sums

        zeros = [
            plgpu.layout_cast(jnp.zeros((_OWN, STEP), jnp.float32), plgpu.Layout.WGMMA) for _ in range(column_blocks)
        ]
        _, _, sums = lax.fori_loop(0, multiplied, step, (cursor, scales(jnp.int32(0)), zeros))
        pass_on(multiplied, steps, cursor)
        if rank:
            plgpu.barrier_wait(extra_full)
            for column_block in range(column_blocks):
                sums[column_block] += product(
                    functools.partial(adapter, cursor=cursor, first=column_block * STEP, count=STEP)
                )
            plgpu.barrier_arrive(extra_free)
        for first in range(0, columns, _STORED):
            column_block, offset = divmod(first, STEP)
            yield first, lax.slice(sums[column_block], (0, offset), (_OWN, offset + _STORED))

    def compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        def item(index, state):
            cursor, *tile = state
            following, steps = tile_of(index + 1), steps_of(tile)
            row, column = corner(index)
            rows = pl.ds(row + wg * _OWN, _OWN)
            stripes = (by_blocks if in_blocks else by_rows)(row, column, cursor, tile, steps, steps_of(tile, wg * _OWN))
            for number, (first, stripe) in enumerate(stripes):
                stored = out_smem.at[wg, number % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has been read
                stored[...] = stripe.astype(out_ref.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(stored, out_ref.at[rows, pl.ds(column + first, _STORED)])
            return cursor + steps, *following

        lax.fori_loop(0, tile_count, item, (jnp.int32(0), *tile_of(jnp.int32(0))))
        plgpu.wait_smem_to_gmem(0)

    lax.cond(wg < _WARPGROUPS, compute, bring)


def product(
    x, sides, x_scale, w_scale, extra=None, tiles: tuple[jax.Array, jax.Array] | None = None, *, dtype, in_blocks: bool
):
    """x [M, K] w [N, K]^T times both scales, plus u l^T: dtype[M, N], bfloat16 or float16. Only if `refusal` is None.

    sides: w's codes [N, K_i], side by side along K. If several, each K_i is a multiple of 128.
    x_scale, w_scale: float32 [M] and [N]; with `in_blocks` [K / 128, M] and [N / 128, K / 128].
    extra: None, or an adapter's bfloat16 u [M, R] and l [N, R], R from `padded_rank`. Without `in_blocks` the scales
    multiply their product too, so divide u and l by them.
    tiles: None, or of rows sorted by expert int32[M / 128] twice: each 128 rows' expert, and how many of them, the
    first ones, are not empty. w (one array), w_scale and l then have a leading axis of experts.
    in_blocks: each 128 numbers have a scale, not each row.
    """
    if tiles is None:
        sides, w_scale = [side[None] for side in sides], w_scale[None]
        extra = None if extra is None else (extra[0], extra[1][None])
    (tokens, width), columns = x.shape, sides[0].shape[1]
    rank = extra[0].shape[1] if extra is not None else 0
    blocks = blocks_for(width, columns, rank, in_blocks)
    programs = persistent.cores()
    adapter_scratch = []
    if extra is not None:
        kind = extra[0].dtype
        adapter_scratch = [
            mosaic_types.smem((1, ROWS, rank), kind, 2 * rank),
            mosaic_types.smem((1, blocks.columns, rank), kind, 2 * rank),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ]
    return gpu_kernel.kernel(
        functools.partial(
            _kernel,
            sides=len(sides),
            blocks=blocks,
            programs=programs,
            in_blocks=in_blocks,
            rank=rank,
            grouped=tiles is not None,
        ),
        "fp8_matmul",
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct((tokens, columns), dtype),
        grid=(programs,),
        grid_names=("sm",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            mosaic_types.smem((blocks.stages, ROWS, blocks.step), x.dtype, blocks.step),
            mosaic_types.smem((blocks.stages, blocks.columns, blocks.step), x.dtype, blocks.step),
            mosaic_types.smem((_WARPGROUPS, 2, _OWN, _STORED), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=blocks.stages),
            *adapter_scratch,
        ],
    )(x, *sides, x_scale, w_scale, *(tiles or ()), *(extra or ()))
