"""Copies of rows of tokens from global to shared memory, for kernels that read tokens at given indices while they
multiply, without a sorted copy.

TMA copies boxes, and on Hopper it cannot gather rows. Here the 128 lanes of a warpgroup copy 16 bytes each at a time
(cp.async), eight of them the 128 bytes of a row, to the addresses where TMA would put them: tiles of 8 rows of 128
bytes, swizzled. A lane has every 16th row.

It is as fast as TMA over consecutive rows, if the fence before wgmma names shared memory: without `.shared::cta` it
waits for all traffic, 450 cycles a step. In Pallas' interpreter copies are synchronous.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    ir_add,
    ir_address,
    ir_const,
    ir_i32,
    ir_item,
    ir_load,
    ir_mul,
    ir_scalar,
    ir_shift_right,
    ir_thread,
    ir_vector,
    scalar,
)
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, ir, llvm

_EVERY = 16  # distance between a lane's rows
_PIECE = 16  # bytes that a lane copies at a time
_COLUMNS = 64  # columns of a tile, 16 bits each: 128 bytes
_TILE = 8 * 128  # bytes of a tile


def _layout(rows: int):
    """The layout of `rows` indices, int32[8 rows]: lane t has those of the rows t // 8 + 16 i."""
    return plgpu.Layout.WG_STRIDED((8 * rows,), rows // _EVERY)


def numbers(tokens_ref, first, rows: int, interpreted: bool):
    """Loads tokens_ref[first : first + rows] into the calling warpgroup's registers, as `start_copy` takes them;
    separate, so that indices can be loaded while earlier rows are copied. `rows` is a multiple of 16.
    """
    if interpreted:
        return tokens_ref[pl.ds(first, rows)]
    layout = _layout(rows)

    @mosaic_types.inline_mgpu(
        arg_types=(scalar(), plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((8 * rows,), jnp.int32, layout)
    )
    def load(_, first, tokens_ref):
        start = ir_add(ir_scalar(first), ir_shift_right(ir_thread(), 3))
        registers = np.empty((1,), object)
        registers[0] = ir_vector(
            [
                ir_load(tokens_ref, ir_add(start, ir_const(_EVERY * number)), ir_i32())
                for number in range(rows // _EVERY)
            ]
        )
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return load(first, tokens_ref)


def start_copy(x_ref, tokens, target, first_column, transforms, interpreted: bool):
    """Starts to copy rows of x_ref to `target`; all lanes of the loading warpgroup call it, and nobody may still read
    `target`. The rows have arrived after `signal_arrival` and `wait`.

      x_ref: the tokens [T, K] in global memory, 16 bits.
      tokens: from `numbers`; the index T copies zeros.
      target: [rows, columns] in shared memory, columns a multiple of 64, tiles of (8, 64) swizzled by 128 bytes.
      first_column: int32[], a multiple of 8.
      transforms: of `target`.
    """
    rows, columns = target.shape
    if interpreted:
        gathered = x_ref[:, pl.ds(first_column, columns)][jnp.minimum(tokens, x_ref.shape[0] - 1)]
        target[...] = jnp.where((tokens < x_ref.shape[0])[:, None], gathered, jnp.zeros_like(gathered))
        return
    column_tiles = columns // _COLUMNS

    @mosaic_types.inline_mgpu(arg_types=(_layout(rows), scalar(), plgpu.RefType(), plgpu.RefType(transforms)))
    def copy(_, tokens, first_column, x_ref, target):
        count, width = ir.MemRefType(x_ref.type).shape
        first, piece = ir_shift_right(ir_thread(), 3), arith.andi(ir_thread(), ir_const(7))
        row_in_tile = arith.andi(first, ir_const(7))  # tiles of 8 rows are contiguous
        swizzled = arith.xori(piece, row_in_tile)
        address = arith.trunci(ir_i32(), llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(target)))
        tile = ir_mul(ir_shift_right(first, 3), column_tiles * _TILE)
        address = ir_add(address, tile, ir_mul(row_in_tile, 128), ir_mul(swizzled, _PIECE))
        start = ir_add(ir_shift_right(ir_scalar(first_column), 3), piece)  # counted in pieces of 8 numbers
        eight = ir.VectorType.get((8,), ir.MemRefType(x_ref.type).element_type)
        for number in range(rows // _EVERY):
            token = ir_item(tokens.registers.flat[0], number)
            exists = arith.cmpi(arith.CmpIPredicate.ult, token, ir_const(count))
            size = arith.select(exists, ir_const(_PIECE), ir_const(0))
            piece_index = ir_add(ir_mul(arith.select(exists, token, ir_const(0)), width // 8), start)
            for column_tile in range(column_tiles):
                source = ir_address(x_ref, ir_add(piece_index, ir_const(column_tile * _COLUMNS // 8)), eight)
                target_address = ir_add(
                    address, ir_const((number * (_EVERY // 8) * column_tiles + column_tile) * _TILE)
                )
                utils.inline_ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;", target_address, source, size, has_side_effects=True
                )

    copy(tokens, first_column, x_ref, target)


def barriers(slots: int):
    """The scratch type of `slots` hardware barriers of 64 bits in shared memory. Copies (cp.async) arrive at them by
    PTX, for which Pallas' own barriers have no operation.
    """
    return plgpu.SMEM((2 * slots,), jnp.int32)


def _barrier(barriers_ref, slot):
    """A barrier's address in shared memory as PTX takes it; `slot` is an MLIR int32."""
    pointer = ir_address(barriers_ref, slot, ir.IntegerType.get_signless(64))
    return arith.trunci(ir_i32(), llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer))


def init_barriers(barriers_ref, interpreted: bool):
    """Initialises the barriers; each completes when 128 lanes have arrived. All lanes of the loading warpgroup call it
    first, and then arrive at a barrier of Pallas, for which the others wait before their first `wait`.
    """
    if interpreted:  # the interpreter's copies are synchronous
        return

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(),))
    def begin(_, barriers_ref):
        (words,) = ir.MemRefType(barriers_ref.type).shape
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, ir_thread(), ir_const(0))):
            for slot in range(words // 2):
                barrier = _barrier(barriers_ref, ir_const(slot))
                utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 128;", barrier, has_side_effects=True)
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        utils.warpgroup_barrier()

    begin(barriers_ref)


def signal_arrival(barriers_ref, slot, interpreted: bool):
    """Makes each lane of the loading warpgroup arrive at barrier `slot` once everything that it has copied so far has
    arrived; returns at once.

      barriers_ref: in shared memory, one for each slot.
    """
    if interpreted:
        return

    @mosaic_types.inline_mgpu(arg_types=(scalar(), plgpu.RefType()))
    def tell(_, slot, barriers_ref):
        barrier = _barrier(barriers_ref, ir_scalar(slot))
        utils.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier, has_side_effects=True)

    tell(slot, barriers_ref)


def wait(barriers_ref, slot, parity, interpreted: bool):
    """Makes a multiplying warpgroup wait until everything announced at barrier `slot` is in shared memory and visible
    to wgmma. parity: 0 for the first, third, ... wait at this barrier, 1 for the others.

      barriers_ref, slot: barriers in shared memory, and which, int32[].
    """
    if interpreted:
        plgpu.commit_smem()  # the fence below
        return

    @mosaic_types.inline_mgpu(arg_types=(scalar(), scalar(), plgpu.RefType()))
    def wait(_, slot, parity, barriers_ref):
        utils.inline_ptx(
            "{ .reg .pred there; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; "
            "@!there bra again_${:uid}; }",
            _barrier(barriers_ref, ir_scalar(slot)),
            ir_scalar(parity),
            has_side_effects=True,
        )
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    wait(slot, parity, barriers_ref)
