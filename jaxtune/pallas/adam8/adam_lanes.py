"""Lane-level operations of the Adam kernel that Pallas lacks. All 128 threads of a warpgroup call each at the same
point.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    ir_add,
    ir_address,
    ir_chunk,
    ir_const,
    ir_i32,
    ir_item,
    ir_load,
    ir_mul,
    ir_scalar,
    ir_shift_right,
    ir_thread,
    ir_vector,
    ir_words,
    scalar,
)
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, ir, llvm


def _elementwise(arrays, refs, layout, dtype, function):
    """An array of `dtype` in `layout`: `function` of each element of `arrays`, in PTX or MLIR.

    arrays: in registers, of one shape and of `layout`. refs: in memory, which the function may read.
    function: gets a list of one MLIR scalar from each array, and refs; returns an MLIR scalar.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(*(layout for _ in arrays), *(plgpu.RefType() for _ in refs)),
        return_type=plgpu.ShapeDtypeStruct(arrays[0].shape, dtype, layout),
    )
    def apply(_, *operands):
        inputs, refs = operands[: len(arrays)], operands[len(arrays) :]
        result_registers = np.empty_like(inputs[0].registers)
        for index in np.ndindex(result_registers.shape):
            registers = [array.registers[index] for array in inputs]
            count = ir.VectorType(registers[0].type).shape[0]
            result_registers[index] = ir_vector(
                [function([ir_item(r, i) for r in registers], refs) for i in range(count)]
            )
        signed = False if dtype == jnp.uint8 else None
        return mgpu.FragmentedArray(_registers=result_registers, _layout=inputs[0].layout, _is_signed=signed)

    return apply(*arrays, *refs)


def looked_up(codes, table_smem, layout):
    """table[codes], float32.

    codes: uint8 in registers, in vectors of a multiple of four neighbours.
    table_smem: float32[256, 32], the table repeated in 32 columns (lanes.fill_banks): each lane reads its own, so
      that lanes never read the same bank. A barrier must come between its writing and this call.
    layout: of `codes` and of the result.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout)
    )
    def look_up(_, codes, table_smem):
        byte, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
        column = ir_mul(arith.andi(ir_thread(), ir_const(31)), 4)
        result_registers = np.empty_like(codes.registers)
        for position, register in np.ndenumerate(codes.registers):
            values = []
            for word in ir_words(register, ir.VectorType(register.type).shape[0] // 4):
                for index in range(4):  # a row of the table is 128 bytes
                    row = arith.shli(word, ir_const(7)) if index == 0 else ir_shift_right(word, 8 * index - 7)
                    offset = arith.ori(arith.andi(row, ir_const(0x7F80)), column)
                    values.append(llvm.load(f32, ir_address(table_smem, offset, byte)))
            result_registers[position] = ir_vector(values)
        return mgpu.FragmentedArray(_registers=result_registers, _layout=codes.layout, _is_signed=None)

    return look_up(codes, table_smem)


def direction(m, v, mean_factor, root_factor, eps, layout):
    """Adam's direction m mean_factor / (sqrt(v) root_factor + eps), float32, by PTX's approximate square root and
    reciprocal, much faster than exact ones: the last bits may be off, and subnormal numbers count as 0.

      mean_factor: 1 / (1 - beta1^t) in m's shape and layout; root_factor: 1 / sqrt(1 - beta2^t).
      m, v: float32 in registers, the new moments. eps: Python number. layout: of m, v, both factors and the result.
    """

    def of_one(elements, _):
        m, v, mean_factor, root_factor = elements
        f32 = ir.F32Type.get()
        root = utils.inline_ptx("sqrt.approx.ftz.f32 $0, $1;", v, result_types=f32)
        small = arith.constant(f32, ir.FloatAttr.get(f32, eps))
        below = arith.addf(arith.mulf(root, root_factor), small)
        inverse = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", below, result_types=f32)
        return arith.mulf(arith.mulf(m, mean_factor), inverse)

    return _elementwise([m, v, mean_factor, root_factor], [], layout, jnp.float32, of_one)


def nearest_codes(x, cells_smem, shift: int, first_cell: int, signed: bool, layout):
    """uint8 code of each x in a dynamic map of 256 values (blockwise8.py), the index of the nearest.

    The map is divided into cells, ranges of magnitudes with the same upper float32 bits, within which the code rises by
    one at most. A cell's entry plus the lower bits of |x| overflows exactly where the code rises, and its upper bits
    are the code, with `signed` counted from the code of 0, up or down: one read and no search.

      x: float32 in [-1, 1] if `signed`, else in [0, 1].
      cells_smem: int32, api.cells(signed).
      shift: lower bits that differ within a cell.
      first_cell: number of the table's first cell; smaller magnitudes are encoded as its start.
      signed: the first moment's map.
      layout: of x and of the result.
    """
    one_bits, mask = 0x3F800000, (1 << shift) - 1

    def code(elements, refs):
        bits = arith.bitcast(ir_i32(), elements[0])
        magnitude = arith.andi(bits, ir_const(0x7FFFFFFF))
        magnitude = arith.minui(arith.maxui(magnitude, ir_const(first_cell << shift)), ir_const(one_bits))
        cell = arith.subi(ir_shift_right(magnitude, shift), ir_const(first_cell))
        entry = arith.addi(ir_load(refs[0], cell, ir_i32()), arith.andi(magnitude, ir_const(mask)))
        entry = ir_shift_right(entry, shift)
        if signed:
            below = arith.subi(ir_const(127), arith.minui(entry, ir_const(127)))
            negative = arith.cmpi(arith.CmpIPredicate.slt, bits, ir_const(0))
            entry = arith.select(negative, below, ir_add(entry, ir_const(127)))
        return arith.trunci(ir.IntegerType.get_signless(8), entry)

    return _elementwise([x], [cells_smem], layout, jnp.uint8, code)


# ---- chunks in memory


def store_chunk(array, ref, number, layout):
    """Stores [rows, columns] in registers as chunk `number` (int32[]) of the flat array `ref`. The address has 64 bits,
    because an element's index may exceed int32. layout: of `array`.

      ref: in global memory, any length that is whole chunks.
    """

    @mosaic_types.inline_mgpu(arg_types=(layout, scalar(), plgpu.RefType()))
    def store(_, array, number, ref):
        element = ir.MemRefType(ref.type).element_type
        rows, columns = array.shape
        strides = array.layout.tiling.tile_strides((columns, 1))
        (warp_stride,), (lane_stride,) = (
            [strides[d] for d in dims] for dims in (array.layout.warp_dims, array.layout.lane_dims)
        )
        warp, lane = ir_shift_right(ir_thread(), 5), arith.andi(ir_thread(), ir_const(31))
        pointer = ir_chunk(ref, ir_scalar(number), rows * columns, element)
        pointer = utils.getelementptr(pointer, [ir_add(ir_mul(warp, warp_stride), ir_mul(lane, lane_stride))], element)
        for position, register in np.ndenumerate(array.registers):
            offset = sum(index * stride for index, stride in zip(position, strides, strict=True))
            llvm.store(register, utils.getelementptr(pointer, [offset], element))

    store(array, number, ref)
