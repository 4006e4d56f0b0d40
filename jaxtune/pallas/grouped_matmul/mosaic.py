"""The product of rows sorted by expert with the experts' weights, as a persistent Pallas Mosaic GPU kernel for Hopper
(wgmma, TMA, warp specialisation).

Each of n programs, one for each multiprocessor, computes every n-th item, a tile of rows times a tile of columns of the
output. One warpgroup loads blocks of 64 along the summed axis K, as many ahead as fit, while the two others, each with
64 of the 128 rows, multiply or store. A tile of rows has one expert, so the work is even whatever the sizes of the
groups; tiles without rows are only stored, as zeros. Items are ordered in bands of rows, which share rows and weights
in the L2 cache. An adapter's product is a few more steps along K. Rows may be gathered from tokens (gather.py), and a
fourth warpgroup may decode a weight in four bits (mosaic_ahead.py).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import gpu_kernel, mosaic_types, persistent, tuning
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.grouped_matmul import gather
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups
from jaxtune.pallas.grouped_matmul.mosaic_ahead import Decoder
from jaxtune.pallas.mosaic_modules import plgpu

_WARPGROUPS = 2  # warpgroups that compute
_OWN = TILE_ROWS // _WARPGROUPS  # rows of each
_STEP = 64  # columns of a step along K: 128 bytes, a row of the swizzle


@dataclasses.dataclass(frozen=True)
class _Registers:
    """Registers of each thread of a warpgroup, by its task; all threads' add up to at most 64,512."""

    memory: int  # of a thread of the warpgroup that loads
    compute: int  # of a thread of the two warpgroups that multiply
    decode: int = 0  # of a thread of the warpgroup that decodes weights; 0: the kernel has no such warpgroup

    @staticmethod
    def of(gathered: bool, decoding: bool) -> _Registers:
        """The division in a kernel; gathering rows takes registers for addresses."""
        if decoding:
            return _Registers(40, 184, 96)
        return _Registers(72, 216) if gathered else _Registers(40, 232)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the kernel divides its work."""

    columns: int  # the columns of a tile of the output
    stages: int  # how many blocks of 64 along the summed axis K are loaded ahead
    band: int = 16  # how many tiles of rows form a band, within which tiles of the output are computed column by column
    # the number of steps of 64 along K (a larger one than `stages` counts as `stages`) by which the first multiplying
    # warpgroup starts before the second. They stay apart, as they share the tensor cores, and one multiplies while the
    # other stores; 0: they start at the same time
    lead: int = 0


# The first whose columns divide the output's is taken, in the order measured on an H200; stages fill the shared memory
# beside the tile that is stored.
BLOCKS = (Blocks(192, 4), Blocks(256, 3), Blocks(128, 5), Blocks(64, 6))
_MOST_COLUMNS_BESIDE = 192  # the most columns beside a decoder; four warpgroups do not have the registers for more

# Blocks that the tuner measures (tune.py).
CANDIDATES = (*BLOCKS[:3], Blocks(192, 4, 8), Blocks(256, 3, 8), Blocks(192, 4, 16, 2), Blocks(128, 6, 8, 4))


def refusal(dtype, in_size: int, out_size: int, tile_rows: int) -> str | None:
    """Why this kernel cannot multiply rows by weights [out_size, in_size] on this GPU, or None, in both directions."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype}"
    if tile_rows != TILE_ROWS:
        return f"tiles of {tile_rows} rows, not {TILE_ROWS}"
    for size in (in_size, out_size):  # the backward's product has the other direction
        if size % _STEP:
            return f"size {size} is not a multiple of {_STEP}"
    return None


def candidates(out_size: int, ahead: bool) -> list[Blocks]:
    """The Blocks that the tuner measures for a result of out_size columns.

    ahead: whether the kernel also decodes the weight, which leaves registers only for tiles of 192 columns.
    """
    if ahead:
        return [blocks for blocks in CANDIDATES if blocks.columns <= min(_MOST_COLUMNS_BESIDE, out_size)]
    return [blocks for blocks in CANDIDATES if out_size % blocks.columns == 0]


def bucket(in_size: int, out_size: int, contract: int, ahead: bool) -> str:
    """The name under which the tuner stores Blocks, shared by all numbers of rows and experts, with and without an
    adapter. contract: the weight's axis that is summed over, 1 or 2. ahead: the weight is decoded by a warpgroup.

      in_size, out_size: of the product: summed size, and columns of the result.
    """
    return f"in={in_size}, out={out_size}, contract={contract}" + (", decoding" if ahead else "")


def blocks_for(in_size: int, out_size: int, contract: int, dtype, ahead: bool) -> Blocks:
    """The Blocks that the tuner measured (or forces) for a product, or the first of BLOCKS whose columns divide
    `out_size`, a multiple of 64.

    With a decoder (`ahead`) tiles have at most 192 columns, which the registers allow, and exactly these if the last
    tile, moved back to end with the output, overlaps the one before by at most a sixteenth.

      in_size, contract: the summed size, and the weight's axis of it. dtype: of the rows.
    """
    measured = tuning.tuned("grouped_matmul", bucket(in_size, out_size, contract, ahead), dtype, Blocks)
    if measured is not None:
        return Blocks(**measured)
    if ahead and -out_size % _MOST_COLUMNS_BESIDE <= out_size // 16:
        return Blocks(_MOST_COLUMNS_BESIDE, 4, 8)
    most_columns = _MOST_COLUMNS_BESIDE if ahead else out_size
    return next(blocks for blocks in BLOCKS if out_size % blocks.columns == 0 and blocks.columns <= most_columns)


def _kernel(
    x_ref,
    expert_ref,
    sizes_ref,
    count_ref,
    *refs,
    blocks: Blocks,
    contract: int,
    programs: int,
    gathered: bool,
    with_extra: bool,
    decoder: Decoder | None,
    packed: int,
):
    """out [rows, N] = x [rows, K] W[expert of each tile] + u [rows, R] L[expert of each tile].

    W and L are [E, N, K] and [E, N, R] (`contract` 2), or [E, K, N] and [E, R, N] (`contract` 1).
    x_ref: the sorted rows, or the tokens [T, K] if `gathered`.
    refs: the token of each row if `gathered`; u and L if `with_extra`; W, or the `packed` arrays of a decoder; out;
    with a decoder the buffer for W; scratch memory.
    """
    if gathered:
        tokens_ref, *refs = refs
    if with_extra:
        u_ref, l_ref, *refs = refs
    if decoder is None:
        w_ref, out_ref, *refs = refs
    else:
        out_ref, w_ref, *scratch = refs[packed:]
        packed_refs, refs = refs[:packed], scratch
        ready = decoder.semaphores() if gpu_kernel.interpreter() is None else refs.pop()
    x_smem, w_smem, out_smem, full, free, *refs = refs
    rows_there = refs.pop() if gathered else None
    interpreted = gpu_kernel.interpreter() is not None
    columns, stages = blocks.columns, blocks.stages
    wg, program = lax.axis_index("wg"), lax.axis_index("sm")
    registers = _Registers.of(gathered, decoder is not None)
    row_tiles, column_tiles = expert_ref.shape[0], -(-out_ref.shape[1] // columns)
    items = row_tiles * column_tiles
    item_count = lax.div(items - program + (programs - 1), jnp.int32(programs))
    main_steps = x_ref.shape[1] // _STEP
    all_steps = main_steps + (u_ref.shape[1] // _STEP if with_extra else 0)
    count = count_ref[0]
    # For `stages` steps the first warpgroup needs no slot that the second has to free.
    lead = min(blocks.lead, stages, all_steps)

    def item_place(index):
        return persistent.tile_position(program + index * programs, row_tiles, column_tiles, blocks.band)

    def tile_of(index):
        """An item's tile of rows, to read of it an item early; any item's if there is none."""
        return jnp.clip(item_place(jnp.minimum(index, item_count - 1))[0], 0, row_tiles - 1)

    def columns_of(column_tile):
        """The last tile overlaps the one before if tiles do not divide the columns: both store the same there."""
        return pl.ds(jnp.minimum(column_tile * columns, out_ref.shape[1] - columns), columns)

    def steps(row_tile):
        """Tiles without rows take no step, and are stored as zeros."""
        return jnp.where(row_tile < count, all_steps, 0)

    def slot_of(cursor):
        return lax.rem(cursor, jnp.int32(stages))

    def tokens_of(index):
        return gather.numbers(tokens_ref, tile_of(index) * TILE_ROWS, TILE_ROWS, interpreted)

    def bring():
        plgpu.set_max_registers(registers.memory, action="decrease")
        if gathered:
            gather.init_barriers(rows_there, interpreted)
        if decoder is not None and gpu_kernel.interpreter() is not None:
            plgpu.barrier_wait(ready)  # type: ignore[arg-type]

        def item(index, state):
            cursor, expert, *tokens = state
            row_tile, column_tile = item_place(index)
            following = (expert_ref[tile_of(index + 1)], *(tokens_of(index + 1) for _ in tokens))
            rows, column_slice = pl.ds(row_tile * TILE_ROWS, TILE_ROWS), columns_of(column_tile)

            if decoder is not None and gpu_kernel.interpreter() is None:
                wait = functools.partial(decoder.wait, ready, expert, programs)
                pl.when(row_tile < count)(wait)

            def copy(slot, x, w, step):
                along = pl.ds(step * _STEP, _STEP)
                if gathered and x is x_ref:
                    gather.start_copy(
                        x, tokens[0], x_smem.at[slot], step * _STEP, mosaic_types.tiled(jnp.bfloat16), interpreted
                    )
                    plgpu.barrier_arrive(full.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(x.at[rows, along], x_smem.at[slot], full.at[slot])
                if gathered:
                    gather.signal_arrival(rows_there, slot, interpreted)
                side = w.at[expert, column_slice, along] if contract == 2 else w.at[expert, along, column_slice]
                plgpu.copy_gmem_to_smem(side, w_smem.at[slot], full.at[slot])

            def step(number, cursor):
                slot = slot_of(cursor)
                pl.when(cursor >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                if with_extra:
                    pl.when(number < main_steps)(lambda: copy(slot, x_ref, w_ref, number))
                    pl.when(number >= main_steps)(lambda: copy(slot, u_ref, l_ref, number - main_steps))
                else:
                    copy(slot, x_ref, w_ref, number)
                return cursor + 1

            return lax.fori_loop(0, steps(row_tile), step, cursor), *following

        first = jnp.int32(0)
        start = (first, expert_ref[tile_of(first)], *([tokens_of(first)] if gathered else []))
        total, *_ = lax.fori_loop(0, item_count, item, start)
        # Every arrival is waited for, because a barrier must not be left in the middle of a phase.
        last = jnp.maximum(total - stages, 0)
        lax.fori_loop(last, total, lambda cursor, _: plgpu.barrier_wait(free.at[slot_of(cursor)]), None)

    def compute():
        plgpu.set_max_registers(registers.compute, action="increase")

        def release(cursor):
            plgpu.barrier_arrive(free.at[slot_of(cursor)])

        def await_filled(cursor):
            plgpu.barrier_wait(full.at[slot_of(cursor)])
            if gathered:
                round_ = lax.div(cursor, jnp.int32(stages))
                gather.wait(rows_there, slot_of(cursor), lax.rem(round_, jnp.int32(2)), interpreted)

        def let_start(condition):
            """The second warpgroup waits once, if there is an item, for the first to be `lead` steps into it."""
            (started_barrier,) = refs
            pl.when(condition & (wg == 0))(lambda: plgpu.barrier_arrive(started_barrier))

        if lead:
            pl.when((item_count > 0) & (wg == 1))(lambda: plgpu.barrier_wait(refs[0]))

        def item(index, state):
            cursor, size = state
            row_tile, column_tile = item_place(index)
            following = sizes_ref[tile_of(index + 1)]
            tile_steps = steps(row_tile)
            multiplied = jnp.where(size > wg * _OWN, tile_steps, 0)  # none if this warpgroup's rows are empty

            def accumulate(acc):
                def step(number, cursor):
                    slot = slot_of(cursor)
                    await_filled(cursor)
                    side = w_smem.at[slot]
                    plgpu.wgmma(
                        acc, x_smem.at[slot, pl.ds(wg * _OWN, _OWN)], side.transpose((1, 0)) if contract == 2 else side
                    )
                    plgpu.wgmma_wait(1)  # the previous product is done
                    pl.when(number > 0)(lambda: release(cursor - 1))
                    if lead:
                        let_start((index == 0) & (number == lead - 1))
                    return cursor + 1

                if lead:
                    let_start((index == 0) & (tile_steps == 0))
                lax.fori_loop(0, multiplied, step, cursor)
                plgpu.wgmma_wait(0)
                return acc[...]

            def pass_on(_, cursor):
                await_filled(cursor)
                release(cursor)
                return cursor + 1

            total = pl.run_scoped(accumulate, plgpu.ACC((_OWN, columns), jnp.float32))
            pl.when(multiplied > 0)(lambda: release(cursor + tile_steps - 1))
            lax.fori_loop(multiplied, tile_steps, pass_on, cursor)
            cursor = cursor + tile_steps
            rows = pl.ds(row_tile * TILE_ROWS + wg * _OWN, _OWN)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's copy has been read
            out_smem.at[wg][...] = total.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[rows, columns_of(column_tile)])
            return cursor, following

        lax.fori_loop(0, item_count, item, (jnp.int32(0), sizes_ref[tile_of(jnp.int32(0))]))
        plgpu.wait_smem_to_gmem(0)

    def decode():
        assert decoder is not None
        plgpu.set_max_registers(registers.decode, action="decrease")
        if gpu_kernel.interpreter() is None:
            decoder.decode(packed_refs, w_ref, ready, program, programs)
        else:
            decoder.decode_all(packed_refs, w_ref)
            plgpu.barrier_arrive(ready)  # type: ignore[arg-type]

    def others():
        lax.cond(wg == _WARPGROUPS, bring, decode)

    lax.cond(wg < _WARPGROUPS, compute, bring if decoder is None else others)


def padded_rank_axis(array, axis: int):
    """Pads `axis`, an adapter's rank, with zeros to a multiple of 64: the kernel sums over it in steps of 64."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padded_rank(array.shape[axis]) - array.shape[axis])
    return jnp.pad(array, widths)


def padded_rank(rank: int) -> int:
    return -(-rank // _STEP) * _STEP


def thin(x, weight, groups: Groups, contract: int, tokens=None):
    """`reference.thin` by the kernel, padded with zero columns to a multiple of 64, as the u of `product`'s `extra`. x
    is [T, K] with `tokens`.

      weight: [E, n, K] (contract = 2) or [E, K, n] (1).
      tokens: int32[rows], the row of x for each sorted row; None: x is sorted.
    """
    return product(x, padded_rank_axis(weight.astype(x.dtype), 3 - contract), groups, contract, tokens=tokens)


def product(x, weight, groups: Groups, contract: int, extra=None, tokens=None, *, blocks: Blocks | None = None):
    """`reference.product` by the kernel. Only if `refusal` is None: K and n are multiples of 64.

    x: sorted rows [rows, K], or [T, K] with `tokens`.
    weight: an array in x's dtype; or in four bits, without `tokens` (else ValueError).
    tokens: int32[rows], the row of x for each sorted row; T for an empty row.
    contract: the weight's summed axis, 2 for [E, n, K], 1 for [E, K, n].
    extra: None, or an adapter's (u [rows, r], [E, n, r] or [E, r, n]); the rank is padded here.
    blocks: None: `blocks_for`.
    """
    columns, ahead = weight.shape[3 - contract], isinstance(weight, Stored)
    if ahead and tokens is not None:
        raise ValueError("grouped_matmul: beside a decoder no rows are gathered")
    blocks = blocks or blocks_for(x.shape[1], columns, contract, x.dtype, ahead)
    operands = [x, groups.tile_expert, groups.tile_sizes, groups.count[None]]
    if tokens is not None:
        operands.append(tokens)
    if extra is not None:
        u, side = extra
        operands += [padded_rank_axis(u, 1), padded_rank_axis(side.astype(x.dtype), contract)]
    decoder, packed = None, [weight]
    out_type = [jax.ShapeDtypeStruct((groups.rows, columns), x.dtype)]
    if ahead:
        decoder = Decoder.of(weight, x.dtype)
        packed = decoder.chunks.operands(weight)
        out_type.append(jax.ShapeDtypeStruct(weight.shape, x.dtype))
    programs = persistent.cores()
    side_shape = (blocks.columns, _STEP) if contract == 2 else (_STEP, blocks.columns)
    out, *_ = gpu_kernel.kernel(
        functools.partial(
            _kernel,
            blocks=blocks,
            contract=contract,
            programs=programs,
            gathered=tokens is not None,
            with_extra=extra is not None,
            decoder=decoder,
            packed=len(packed),
        ),
        "grouped_matmul",
        gpu_kernel.interpreter(),
        out_type=out_type,
        grid=(programs,),
        grid_names=("sm",),
        num_threads=_WARPGROUPS + (1 if decoder is None else 2),
        thread_name="wg",
        scratch_types=[
            mosaic_types.smem((blocks.stages, TILE_ROWS, _STEP), x.dtype),
            mosaic_types.smem((blocks.stages, *side_shape), x.dtype),
            mosaic_types.smem((_WARPGROUPS, _OWN, blocks.columns), x.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=blocks.stages),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=blocks.stages),
            *([plgpu.Barrier(num_arrivals=1)] if blocks.lead else []),
            *([gather.barriers(blocks.stages)] if tokens is not None else []),
            *([plgpu.Barrier(num_arrivals=1)] if ahead and gpu_kernel.interpreter() is not None else []),
        ],
    )(*operands, *packed)
    return out
