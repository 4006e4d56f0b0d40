"""Rows of tokens brought to shared memory as they are needed, in place of a buffer that they are copied to first.

TMA copies boxes, and on Hopper no rows of any numbers. Here the 128 lanes of a warpgroup copy 16 bytes each at a time
(cp.async), eight of them a row's 128 bytes, to where TMA would put them: tiles of 8 rows of 128 bytes, swizzled. A lane
has every 16th row, and always the same 16 bytes of a row.

Where memory is the limit (mosaic_contract.py) it costs nothing. In the product of mosaic.py, which reads its rows once
for each tile of columns, and waits for the lanes, it cost two thirds of its time (Qwen3-30B-A3B, H200): there rows are
copied first.
"""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

_SCALAR = plgpu.Layout.WG_SPLAT(())
_EVERY = 16  # a lane's rows are so far apart
_PIECE = 16  # bytes
_COLUMNS = 64  # of a tile, 16 bits each: 128 bytes


def _i32(value: int | None = None):
    kind = ir.IntegerType.get_signless(32)
    return kind if value is None else arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _layout(rows: int):
    """Of int32[8 rows], a row's number in each of its eight lanes: lane t has those of rows t // 8 + 16 i."""
    return plgpu.Layout.WG_STRIDED((8 * rows,), rows // _EVERY)


def _item(array, index: int):
    return vector.extract(array, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def _thread():
    return arith.remui(arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x)), _i32(128))


def _first_row():
    return arith.shrui(_thread(), _i32(3))


def _of_lanes(values, rows: int):
    registers = np.empty((1,), object)
    array = llvm.mlir_undef(ir.VectorType.get((len(values),), _i32()))
    for index, value in enumerate(values):
        array = vector.insert(value, array, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
    registers[0] = array
    return mgpu.FragmentedArray(_registers=registers, _layout=_layout(rows).to_mgpu(), _is_signed=True)


def numbers(tokens_ref, first, rows: int, interpreted: bool):
    """tokens_ref [first : first + rows], int32, as `bring` takes it; rows: a multiple of 16."""
    if interpreted:
        return tokens_ref[pl.ds(first, rows)]
    layout = _layout(rows)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((8 * rows,), jnp.int32, layout)
    )
    def load(_, first, tokens_ref):
        start = arith.addi(_scalar(first), _first_row())
        places = [arith.addi(start, _i32(_EVERY * number)) for number in range(rows // _EVERY)]
        pointer = utils.memref_ptr(tokens_ref)
        return _of_lanes([llvm.load(_i32(), utils.getelementptr(pointer, [place], _i32())) for place in places], rows)

    return load(first, tokens_ref)


def _scalar(array):
    value = array.registers.flat[0]
    return _item(value, 0) if isinstance(value.type, ir.VectorType) else value


def bring(x_ref, tokens, target, first_column, transforms, interpreted: bool):
    """target [rows, columns] in shared memory = x_ref [T, K] at tokens, from first_column on, once `arrived` says so; a
    token that is T is a row of zeros.

    tokens: as from `numbers`. first_column: a multiple of 8. transforms: of target, tiles of (8, 64) swizzled by 128.
    """
    rows, columns = target.shape
    if interpreted:
        found = x_ref[:, pl.ds(first_column, columns)][jnp.minimum(tokens, x_ref.shape[0] - 1)]
        target[...] = jnp.where((tokens < x_ref.shape[0])[:, None], found, jnp.zeros_like(found))
        return
    parts = columns // _COLUMNS

    @plgpu.inline_mgpu(arg_types=(_layout(rows), _SCALAR, plgpu.RefType(), plgpu.RefType(transforms)))
    def copy(_, tokens, first_column, x_ref, target):
        i64 = ir.IntegerType.get_signless(64)
        count, width = ir.MemRefType(x_ref.type).shape
        shared = arith.trunci(_i32(), llvm.ptrtoint(i64, utils.memref_ptr(target)))
        first = _first_row()
        piece = arith.andi(_thread(), _i32(7))
        swizzled = arith.xori(piece, arith.andi(first, _i32(7)))
        # Row r lies in tile r // 8 of parts; its rows of 128 bytes follow one another.
        tile = arith.muli(arith.shrui(first, _i32(3)), _i32(parts * 1024))
        within = arith.addi(arith.muli(arith.andi(first, _i32(7)), _i32(128)), arith.muli(swizzled, _i32(_PIECE)))
        shared = arith.addi(shared, arith.addi(tile, within))
        start = arith.addi(arith.shrui(_scalar(first_column), _i32(3)), piece)  # in pieces of 8 numbers
        eight = ir.VectorType.get((8,), ir.MemRefType(x_ref.type).element_type)
        pointer = utils.memref_ptr(x_ref)
        for number in range(rows // _EVERY):
            token = _item(tokens.registers.flat[0], number)
            there = arith.cmpi(arith.CmpIPredicate.ult, token, _i32(count))
            size = arith.select(there, _i32(_PIECE), _i32(0))
            token = arith.select(there, token, _i32(0))
            place = arith.addi(arith.muli(token, _i32(width // 8)), start)
            for part in range(parts):
                source = utils.getelementptr(pointer, [arith.addi(place, _i32(part * _COLUMNS // 8))], eight)
                goal = arith.addi(shared, _i32(number * (_EVERY // 8) * parts * 1024 + part * 1024))
                utils.inline_ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;", goal, source, size, has_side_effects=True
                )
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(tokens, first_column, x_ref, target)


def arrived(after: int):
    """Waits until all that this lane has brought has arrived, but for the last `after`; wgmma sees it, once a barrier
    says so."""

    @plgpu.inline_mgpu()
    def wait(_):
        utils.inline_ptx(f"cp.async.wait_group {after};", has_side_effects=True)
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    wait()


def lagging(full, slot_of, stages: int, interpreted: bool):
    """(step, end): to call with the number of a step when its rows are on their way, and with that of all steps. They
    tell the barriers `full`, some steps later, that rows have arrived.

    stages: the slots for rows, three or more. A slot is free when the step after its own is multiplied; so of as many
    steps as there are slots the first two must have been told of, for the bringing to go on.
    """
    after = stages - 2
    assert after > 0, stages

    def tell(at):
        plgpu.barrier_arrive(full.at[slot_of(at)])

    if interpreted:  # where copies do not lag
        return tell, lambda total: None

    def step(at):
        @pl.when(at >= after)
        def _():
            arrived(after)
            tell(at - after)

    def end(total):
        arrived(0)
        lax.fori_loop(jnp.maximum(total - after, 0), total, lambda at, _: tell(at), None)

    return step, end
