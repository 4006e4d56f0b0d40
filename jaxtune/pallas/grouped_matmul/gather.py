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
from jaxlib.mlir.dialects import arith, llvm

from jaxtune.pallas.quant_matmul.lanes import (
    SCALAR,
    _add,
    _address,
    _const,
    _i32,
    _item,
    _load,
    _mul,
    _scalar,
    _shift_right,
    _thread,
    _vector,
)

_EVERY = 16  # a lane's rows are so far apart
_PIECE = 16  # bytes
_COLUMNS = 64  # of a tile, 16 bits each: 128 bytes
_TILE = 8 * 128  # bytes


def _layout(rows: int):
    """Of int32[8 rows], a row's number in each of its eight lanes: lane t has those of rows t // 8 + 16 i."""
    return plgpu.Layout.WG_STRIDED((8 * rows,), rows // _EVERY)


def numbers(tokens_ref, first, rows: int, interpreted: bool):
    """tokens_ref [first : first + rows], int32, as `bring` takes it; rows: a multiple of 16."""
    if interpreted:
        return tokens_ref[pl.ds(first, rows)]
    layout = _layout(rows)

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((8 * rows,), jnp.int32, layout)
    )
    def load(_, first, tokens_ref):
        start = _add(_scalar(first), _shift_right(_thread(), 3))
        registers = np.empty((1,), object)
        registers[0] = _vector(
            [_load(tokens_ref, _add(start, _const(_EVERY * number)), _i32()) for number in range(rows // _EVERY)]
        )
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return load(first, tokens_ref)


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

    @plgpu.inline_mgpu(arg_types=(_layout(rows), SCALAR, plgpu.RefType(), plgpu.RefType(transforms)))
    def copy(_, tokens, first_column, x_ref, target):
        count, width = ir.MemRefType(x_ref.type).shape
        first, piece = _shift_right(_thread(), 3), arith.andi(_thread(), _const(7))
        within = arith.andi(first, _const(7))  # its tile of 8 rows, of which parts lie side by side
        swizzled = arith.xori(piece, within)
        address = arith.trunci(_i32(), llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(target)))
        tile = _mul(_shift_right(first, 3), parts * _TILE)
        address = _add(address, tile, _mul(within, 128), _mul(swizzled, _PIECE))
        start = _add(_shift_right(_scalar(first_column), 3), piece)  # in pieces of 8 numbers
        eight = ir.VectorType.get((8,), ir.MemRefType(x_ref.type).element_type)
        for number in range(rows // _EVERY):
            token = _item(tokens.registers.flat[0], number)
            there = arith.cmpi(arith.CmpIPredicate.ult, token, _const(count))
            size = arith.select(there, _const(_PIECE), _const(0))
            place = _add(_mul(arith.select(there, token, _const(0)), width // 8), start)
            for part in range(parts):
                source = _address(x_ref, _add(place, _const(part * _COLUMNS // 8)), eight)
                goal = _add(address, _const((number * (_EVERY // 8) * parts + part) * _TILE))
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
