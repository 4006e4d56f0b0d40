"""What adam8.py does lane by lane, and its copies to shared memory; see lanes.py.

The copies are written out here: of the five parts of a chunk one lane asks for all, through bulk copies that know no
shapes, with 64-bit addresses.
"""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

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
    _words,
)


def _elementwise(arrays, refs, layout, dtype, function):
    """function(elements, refs) of each element of `arrays`, all in `layout`."""

    @plgpu.inline_mgpu(
        arg_types=(*(layout for _ in arrays), *(plgpu.RefType() for _ in refs)),
        return_type=plgpu.ShapeDtypeStruct(arrays[0].shape, dtype, layout),
    )
    def apply(_, *operands):
        given, refs = operands[: len(arrays)], operands[len(arrays) :]
        found = np.empty_like(given[0].registers)
        for place in np.ndindex(found.shape):
            registers = [array.registers[place] for array in given]
            count = ir.VectorType(registers[0].type).shape[0]
            found[place] = _vector([function([_item(r, i) for r in registers], refs) for i in range(count)])
        signed = False if dtype == jnp.uint8 else None
        return mgpu.FragmentedArray(_registers=found, _layout=given[0].layout, _is_signed=signed)

    return apply(*arrays, *refs)


def looked_up(codes, table_smem, layout):
    """float32 of the table at uint8 codes; table_smem: float32[256, 32], of lanes.fill_banks."""

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout)
    )
    def look_up(_, codes, table_smem):
        byte, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
        column = _mul(arith.andi(_thread(), _const(31)), 4)
        found = np.empty_like(codes.registers)
        for place, register in np.ndenumerate(codes.registers):
            values = []
            for word in _words(register, ir.VectorType(register.type).shape[0] // 4):
                for index in range(4):  # a row of the table is 128 bytes
                    row = arith.shli(word, _const(7)) if index == 0 else _shift_right(word, 8 * index - 7)
                    offset = arith.ori(arith.andi(row, _const(0x7F80)), column)
                    values.append(llvm.load(f32, _address(table_smem, offset, byte)))
            found[place] = _vector(values)
        return mgpu.FragmentedArray(_registers=found, _layout=codes.layout, _is_signed=None)

    return look_up(codes, table_smem)


def direction(m, v, mean_factor, root_factor, eps, layout):
    """m mean_factor / (sqrt(v) root_factor + eps), by the approximate square root and reciprocal (1 and 2 units)."""

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
    """uint8 codes of float32 x from -1 (or 0) to 1 in a dynamic map; cells_smem: of adam8.cells.

    The upper bits of |x| number its cell, in which the place rises by one at most; an entry is made so that adding the
    lower bits carries into the place where it does.
    """
    one, mask = 0x3F800000, (1 << shift) - 1

    def code(elements, refs):
        bits = arith.bitcast(_i32(), elements[0])
        magnitude = arith.andi(bits, _const(0x7FFFFFFF))
        magnitude = arith.minui(arith.maxui(magnitude, _const(first_cell << shift)), _const(one))
        cell = arith.subi(_shift_right(magnitude, shift), _const(first_cell))
        place = arith.addi(_load(refs[0], cell, _i32()), arith.andi(magnitude, _const(mask)))
        place = _shift_right(place, shift)
        if signed:
            below = arith.subi(_const(127), arith.minui(place, _const(127)))
            negative = arith.cmpi(arith.CmpIPredicate.slt, bits, _const(0))
            place = arith.select(negative, below, _add(place, _const(127)))
        return arith.trunci(ir.IntegerType.get_signless(8), place)

    return _elementwise([x], [cells_smem], layout, jnp.uint8, code)


# ---- chunks, to and from memory


def _chunk(ref, number, size: int, element):
    """Pointer to chunk `number` of ref, of `size` elements of the MLIR type; in 64 bits."""
    return utils.getelementptr(utils.memref_ptr(ref), [number], ir.Type.parse(f"!llvm.array<{size} x {element}>"))


def store_chunk(array, ref, number, layout):
    """ref[size number :][: size] = array, [rows, columns] of `size` elements; ref: of one dimension.

    The start is computed in 64 bits: number times size may be beyond int32."""

    @plgpu.inline_mgpu(arg_types=(layout, SCALAR, plgpu.RefType()))
    def store(_, array, number, ref):
        element = ir.MemRefType(ref.type).element_type
        rows, columns = array.shape
        strides = array.layout.tiling.tile_strides((columns, 1))
        (of_warp,), (of_lane,) = (
            [strides[d] for d in dims] for dims in (array.layout.warp_dims, array.layout.lane_dims)
        )
        warp, lane = _shift_right(_thread(), 5), arith.andi(_thread(), _const(31))
        pointer = _chunk(ref, _scalar(number), rows * columns, element)
        pointer = utils.getelementptr(pointer, [_add(_mul(warp, of_warp), _mul(lane, of_lane))], element)
        for place, register in np.ndenumerate(array.registers):
            offset = sum(index * stride for index, stride in zip(place, strides, strict=True))
            llvm.store(register, utils.getelementptr(pointer, [offset], element))

    store(array, number, ref)


def _shared(ref, index, size: int):
    """32-bit address, in shared memory, of `index` times `size` bytes into ref."""
    return _add(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)), _mul(index, size))


def begin_barriers(full_smem):
    """Sets up barriers of one arrival each in full_smem, int32[2 barriers]; others see them after program_barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def begin(_, full_smem):
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        (words,) = ir.MemRefType(full_smem.type).shape
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _const(0))):
            for number in range(words // 2):
                at = _shared(full_smem, _const(number), 8)
                utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", at, has_side_effects=True)
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    begin(full_smem)


def program_barrier():
    """All that the program's threads wrote to shared memory is seen by all of them."""

    @plgpu.inline_mgpu()
    def wait(_):
        gpu.barrier()

    wait()


def copy_chunk(sources, slots, sizes, full_smem, number, slot):
    """Begins to copy chunk `number` of each of `sources`, of so many bytes, to number `slot` of `slots`; by one lane.

    Barrier `slot` of full_smem completes when all is there."""
    refs = (*sources, *slots, full_smem)

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *(plgpu.RefType() for _ in refs)))
    def copy(_, number, slot, *refs):
        number, slot = _scalar(number), _scalar(slot)
        sources, slots = refs[: len(sizes)], refs[len(sizes) : -1]
        byte = ir.IntegerType.get_signless(8)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, _thread(), _const(0))):
            full = _shared(refs[-1], slot, 8)
            expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {sum(sizes)};"
            utils.inline_ptx(expect, full, has_side_effects=True)
            for source, target, size in zip(sources, slots, sizes, strict=True):
                utils.inline_ptx(
                    f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];",
                    _shared(target, slot, size),
                    _chunk(source, number, size, byte),
                    full,
                    has_side_effects=True,
                )

    copy(number, slot, *refs)


def wait_for_chunk(full_smem, slot, parity):
    """Until a copy to the slot is there: the first, third, ... with parity 0, the second, fourth, ... with 1."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, plgpu.RefType()))
    def wait(_, slot, parity, full_smem):
        utils.inline_ptx(
            "{ .reg .pred there; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; "
            "@!there bra again_${:uid}; }",
            _shared(full_smem, _scalar(slot), 8),
            _scalar(parity),
            has_side_effects=True,
        )

    wait(slot, parity, full_smem)
