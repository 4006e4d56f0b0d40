"""Lane-level operations of the Adam kernel (api.py), which Pallas does not have: a look-up of many codes in a table
(looked_up), the step's direction by approximate instructions (direction), the encoding of a moment (places), and the
storing of a chunk (store_chunk). All threads of a warpgroup (128 threads) call each of them at the same point, within
the kernel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    SCALAR,
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
)
from jaxtune.system.private_mlir import arith, ir, llvm


def _elementwise(arrays, refs, layout, dtype, function):
    """Applies a function of single elements to arrays in registers. The function writes PTX or MLIR instructions that
    Pallas has no operation for: `direction` and `places` are made with it.

    Args:
      arrays: the arrays in registers, all of one shape and of `layout`.
      refs: arrays in memory that the function may read, such as a table.
      layout: the layout of the arrays and of the result (plgpu.Layout), that is, which thread has which elements.
      dtype: the dtype of the result.
      function: called once for every index, with a list of one MLIR scalar from each of `arrays`, and `refs`; it
        returns the result's element at that index, an MLIR scalar.
    Returns:
      an array of `dtype` with the shape and the layout of the first of `arrays`.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(*(layout for _ in arrays), *(plgpu.RefType() for _ in refs)),
        return_type=plgpu.ShapeDtypeStruct(arrays[0].shape, dtype, layout),
    )
    def apply(_, *operands):
        given, refs = operands[: len(arrays)], operands[len(arrays) :]
        found = np.empty_like(given[0].registers)
        for place in np.ndindex(found.shape):
            registers = [array.registers[place] for array in given]
            count = ir.VectorType(registers[0].type).shape[0]
            found[place] = ir_vector([function([ir_item(r, i) for r in registers], refs) for i in range(count)])
        signed = False if dtype == jnp.uint8 else None
        return mgpu.FragmentedArray(_registers=found, _layout=given[0].layout, _is_signed=signed)

    return apply(*arrays, *refs)


def looked_up(codes, table_smem, layout):
    """Returns table[codes], float32 in the shape of `codes`. The Adam kernel decodes both moments by it, and then
    multiplies by absmax.

    Args:
      codes: uint8 in registers, of a layout that gives a thread its codes in vectors of a multiple of four neighbours.
      table_smem: float32[256, 32] in shared memory: the table of 256 numbers, repeated in 32 columns, as
        lanes.fill_banks writes it. Each lane reads its own column, so that lanes never read the same memory bank. A
        barrier must come between the writing and this call.
      layout: the layout of the codes and of the result.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout)
    )
    def look_up(_, codes, table_smem):
        byte, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
        column = ir_mul(arith.andi(ir_thread(), ir_const(31)), 4)
        found = np.empty_like(codes.registers)
        for place, register in np.ndenumerate(codes.registers):
            values = []
            for word in ir_words(register, ir.VectorType(register.type).shape[0] // 4):
                for index in range(4):  # a row of the table is 128 bytes
                    row = arith.shli(word, ir_const(7)) if index == 0 else ir_shift_right(word, 8 * index - 7)
                    offset = arith.ori(arith.andi(row, ir_const(0x7F80)), column)
                    values.append(llvm.load(f32, ir_address(table_smem, offset, byte)))
            found[place] = ir_vector(values)
        return mgpu.FragmentedArray(_registers=found, _layout=codes.layout, _is_signed=None)

    return look_up(codes, table_smem)


def direction(m, v, mean_factor, root_factor, eps, layout):
    """Returns Adam's direction m mean_factor / (sqrt(v) root_factor + eps), float32, by PTX's approximate square root
    and reciprocal, which are much faster than exact ones; they may be off in the last bits, and take subnormal numbers
    as 0. The kernel of adam8/api.py calls it for each chunk, with the new moments before they are rounded.

    Args:
      m, v: the first and the second moment, float32 in registers of `layout`.
      mean_factor: the bias correction of m, 1 / (1 - beta1^t), as an array of m's shape and layout.
      root_factor: the bias correction of sqrt(v), 1 / sqrt(1 - beta2^t), as an array of m's shape and layout.
      eps: Adam's eps, a Python float.
      layout: the layout of all arrays and of the result.
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


def places(x, cells_smem, shift: int, first_cell: int, signed: bool, layout):
    """Encodes numbers in a dynamic map of 256 values (blockwise8.py): returns the uint8 code of each x, which is the
    index of the value nearest to it. The Adam kernel encodes the new moments by it, divided by their blocks' absmax.

    The map is divided into cells, ranges of magnitudes that have the same upper bits in float32, and within a cell the
    code of a magnitude rises by one at most. The table has an entry for each cell; the entry plus the lower bits of |x|
    overflows exactly where the code rises, and its upper bits are the code, which with `signed` is then counted from
    the code of 0, up or down. So a code takes one read of memory and no search.

    Args:
      x: float32 in registers of `layout`, in [-1, 1] if `signed`, otherwise in [0, 1].
      cells_smem: the table adam8.api.cells(signed), int32, in shared memory.
      shift: the number of lower bits of a float32 that differ within a cell; the bits above them are the cell's number.
      first_cell: the number of the table's first cell; a smaller magnitude is encoded as the start of this cell.
      signed: True for the first moment's map, which has negative values too; False for the second moment's.
      layout: the layout of x and of the result.
    """
    one, mask = 0x3F800000, (1 << shift) - 1

    def code(elements, refs):
        bits = arith.bitcast(ir_i32(), elements[0])
        magnitude = arith.andi(bits, ir_const(0x7FFFFFFF))
        magnitude = arith.minui(arith.maxui(magnitude, ir_const(first_cell << shift)), ir_const(one))
        cell = arith.subi(ir_shift_right(magnitude, shift), ir_const(first_cell))
        place = arith.addi(ir_load(refs[0], cell, ir_i32()), arith.andi(magnitude, ir_const(mask)))
        place = ir_shift_right(place, shift)
        if signed:
            below = arith.subi(ir_const(127), arith.minui(place, ir_const(127)))
            negative = arith.cmpi(arith.CmpIPredicate.slt, bits, ir_const(0))
            place = arith.select(negative, below, ir_add(place, ir_const(127)))
        return arith.trunci(ir.IntegerType.get_signless(8), place)

    return _elementwise([x], [cells_smem], layout, jnp.uint8, code)


# ---- chunks in memory


def store_chunk(array, ref, number, layout):
    """Stores an array of `size` elements from registers as chunk `number` of a flat array in global memory: ref[size
    number : size (number + 1)] = array, row by row. The Adam kernel stores the direction so.

    The address is computed in 64 bits, because number times size may exceed int32.

    Args:
      array: [rows, columns] in registers of `layout`; rows times columns is `size`.
      ref: the flat array, one-dimensional, of array's dtype.
      number: int32[], the index of the chunk, counted from 0.
      layout: the layout of `array`.
    """

    @mosaic_types.inline_mgpu(arg_types=(layout, SCALAR, plgpu.RefType()))
    def store(_, array, number, ref):
        element = ir.MemRefType(ref.type).element_type
        rows, columns = array.shape
        strides = array.layout.tiling.tile_strides((columns, 1))
        (of_warp,), (of_lane,) = (
            [strides[d] for d in dims] for dims in (array.layout.warp_dims, array.layout.lane_dims)
        )
        warp, lane = ir_shift_right(ir_thread(), 5), arith.andi(ir_thread(), ir_const(31))
        pointer = ir_chunk(ref, ir_scalar(number), rows * columns, element)
        pointer = utils.getelementptr(pointer, [ir_add(ir_mul(warp, of_warp), ir_mul(lane, of_lane))], element)
        for place, register in np.ndenumerate(array.registers):
            offset = sum(index * stride for index, stride in zip(place, strides, strict=True))
            llvm.store(register, utils.getelementptr(pointer, [offset], element))

    store(array, number, ref)
