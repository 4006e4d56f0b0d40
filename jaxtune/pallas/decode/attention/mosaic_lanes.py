"""Loads and stores rows of a tensor-core tile between global memory and registers.

In Layout.WGMMA warp w has rows 16 w to 16 w + 15, lane l rows l / 4 and l / 4 + 8 of these, and of every 8 columns 2 (l
% 4) and 2 (l % 4) + 1. The interpreter cannot run this.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    ir_add,
    ir_chunk,
    ir_const,
    ir_item,
    ir_mul,
    ir_scalar,
    ir_shift_right,
    ir_thread,
    scalar,
)
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, ir, llvm

TILE = 64  # rows of a tile


def _row(half: int):
    """MLIR int32: the first (half 0) or second (half 1, 8 rows on) of this lane's two rows of a tile."""
    thread = ir_thread()
    first_row = ir_mul(ir_shift_right(thread, 5), 16)
    return ir_add(first_row, ir_shift_right(arith.andi(thread, ir_const(31)), 2), ir_const(8 * half))


def _column():
    """MLIR int32: the first of this lane's two neighbouring columns of every 8."""
    return ir_mul(arith.andi(ir_thread(), ir_const(3)), 2)


def load_rows(ref, chunk, shape: tuple[int, int]):
    """A small matrix as a tile [64, columns] in registers (Layout.WGMMA, ref's dtype), by one warpgroup.

    ref: global memory, read as a sequence of matrices; chunk: int32[], which.
    shape: (rows, columns), at most 64 rows, columns a multiple of 8; the tile's other rows repeat rows.
    """
    (rows, columns), dtype = shape, jnp.dtype(ref.dtype)

    @mosaic_types.inline_mgpu(
        arg_types=(scalar(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((TILE, columns), dtype, plgpu.Layout.WGMMA),
    )
    def load(_, chunk, ref):
        element = utils.dtype_to_ir_type(dtype)
        start = ir_chunk(ref, ir_scalar(chunk), rows * columns, element)
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape((TILE, columns)), dtype=object)
        for half in (0, 1) if rows > 8 else (0,):
            row = arith.minui(_row(half), ir_const(rows - 1))
            lane_offset = ir_add(ir_mul(row, columns), _column())
            for tile in range(columns // 8):
                pointer = utils.getelementptr(start, [ir_add(lane_offset, ir_const(8 * tile))], element)
                registers[0, tile, 0, 0, half] = llvm.load(ir.VectorType.get((2,), element), pointer)
        if rows <= 8:
            registers[:, :, :, :, 1] = registers[:, :, :, :, 0]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(chunk, ref)


def store_rows(values, numbers, out_ref, numbers_ref, chunk, rows: int):
    """Stores the first `rows` rows of a tile, and one number for each, into global memory, by one warpgroup.

    values: float32[64, columns] in Layout.WGMMA; numbers: float32[64].
    out_ref, numbers_ref: float32, taken as sequences of [rows, columns] and of [rows]; chunk: int32[], the index in
      both.
    """
    columns = values.shape[1]

    @mosaic_types.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.RefType(), plgpu.RefType(), scalar())
    )
    def store(_, values, numbers, out_ref, numbers_ref, chunk):
        f32 = ir.F32Type.get()
        start = ir_chunk(out_ref, ir_scalar(chunk), rows * columns, f32)
        numbers_start = ir_chunk(numbers_ref, ir_scalar(chunk), rows, f32)
        for half in (0, 1) if rows > 8 else (0,):
            row = _row(half)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, ir_const(rows))):
                lane_offset = ir_add(ir_mul(row, columns), _column())
                for tile in range(columns // 8):
                    pointer = utils.getelementptr(start, [ir_add(lane_offset, ir_const(8 * tile))], f32)
                    llvm.store(values.registers[0, tile, 0, 0, half].flat[0], pointer)
                number = numbers.registers.reshape(-1)[half]
                number = ir_item(number, 0) if isinstance(number.type, ir.VectorType) else number
                llvm.store(number, utils.getelementptr(numbers_start, [row], f32))

    store(values, numbers, out_ref, numbers_ref, chunk)
