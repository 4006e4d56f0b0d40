"""Operations of single lanes in the product of one token with a four-bit weight (row_matmul.py). As in lanes.py, all
threads of a warpgroup call each of them.

A pair is two neighbouring rows, a chunk the pairs that one bulk copy loads, a slice 1,024 neighbouring columns; each
warp multiplies one slice of one pair. A block is 64 numbers of a row with one absmax. `wg` is the warpgroup's number
among those that multiply.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    ir_add,
    ir_address,
    ir_const,
    ir_i32,
    ir_item,
    ir_load,
    ir_mul,
    ir_narrow,
    ir_permute,
    ir_product,
    ir_scalar,
    ir_shift_right,
    ir_thread,
    ir_vector,
    ir_words,
    scalar,
)
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, ir, llvm, nvvm

SLICE = 1024  # elements of a row that a warp takes: 512 bytes of codes, 16 blocks
_HALF = SLICE // 2


def _x():
    """The layout of a lane's elements of the token."""
    return plgpu.Layout.WG_STRIDED((128 * 16,), 4)


def _one():
    return plgpu.Layout.WG_STRIDED((128,), 1)


def _warp(wg):
    """This thread's warp among all multiplying warps, an MLIR int32."""
    return ir_add(ir_mul(ir_scalar(wg), 4), ir_shift_right(ir_thread(), 5))


def _lane():
    return arith.andi(ir_thread(), ir_const(31))


def _block(wg, slices: int):
    """The block of the chunk whose scale this lane decodes: lane 16 i + j that of block j of row i."""
    warp, lane = _warp(wg), _lane()
    pair, slice_index = arith.divui(warp, ir_const(slices)), arith.remui(warp, ir_const(slices))
    row = ir_add(ir_mul(pair, 2), ir_shift_right(lane, 4))
    return ir_add(ir_mul(row, slices * 16), ir_mul(slice_index, 16), arith.andi(lane, ir_const(15)))


def own_x(x_ref, wg, slices: int):
    """The token's elements by which a lane multiplies its codes, two 16-bit ones in each of uint32[128 x 16], the same
    for every chunk. x_ref: 16 bits, in global memory.

      wg: int32[], the warpgroup's number. slices: of 1,024 columns in a row.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(scalar(), plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((128 * 16,), jnp.uint32, _x())
    )
    def load(_, wg, x_ref):
        slice_index = arith.remui(_warp(wg), ir_const(slices))
        first = ir_add(ir_mul(slice_index, SLICE), ir_mul(_lane(), 16))
        four = ir.VectorType.get((4,), ir_i32())
        pointers = [
            ir_address(x_ref, ir_add(first, ir_const(_HALF * half + 8 * eight)), ir.IntegerType.get_signless(16))
            for half in range(2)
            for eight in range(2)
        ]
        registers = np.empty((4,), object)
        registers[:] = [llvm.load(four, pointer) for pointer in pointers]
        return mgpu.FragmentedArray(_registers=registers, _layout=_x().to_mgpu(), _is_signed=False)

    return load(wg, x_ref)


def own_nested(nested_ref, chunk, wg, pairs: int, slices: int, nested_block: int):
    """The nested absmax by which each lane decodes a quantised absmax, float32[128]. nested_ref has one for each
    `nested_block` blocks.

      chunk, wg: int32[], the chunk's and the warpgroup's number. pairs: of rows in a chunk. slices: of a row.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(scalar(), scalar(), plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, _one())
    )
    def load(_, chunk, wg, nested_ref):
        blocks = pairs * 2 * slices * 16
        # Warps without work have numbers past those of the chunk.
        block = arith.minui(_block(wg, slices), ir_const(blocks - 1))
        number = arith.divui(ir_add(ir_mul(ir_scalar(chunk), blocks), block), ir_const(nested_block))
        registers = np.empty((1,), object)
        registers[0] = ir_vector([ir_load(nested_ref, number, ir.F32Type.get())])
        return mgpu.FragmentedArray(_registers=registers, _layout=_one().to_mgpu(), _is_signed=None)

    return load(chunk, wg, nested_ref)


def multiply(x, nested, offset, chunk_index, slot, wg, refs, *, pairs: int, slices: int, dtype):
    """partial[chunk_index, warp], float32[8, 2] = the warp's pair of rows times the token over its slice, for each quad
    and row, by the tensor cores. Call it after lanes.wait_for_chunk and a barrier after the filling of table and map.

    A lane has 8 bytes of its quad's block of each row, in each half of the slice. For the tensor cores (m16n8k16) the
    eight quads are eight rows with different k each; column g of the right operand has quad g's elements of x. So only
    the diagonal of the products is used, and a lane needs x only at its own codes.

      x, nested: from own_x and own_nested; nested and offset are None if absmax are float32.
      chunk_index, slot: int32[], the chunk's number in this program, and its index in `codes` and `absmax`.
      refs: codes, absmax, table, map or None, and partial, in shared memory.
      wg: int32[], the warpgroup's number. pairs: of rows in a chunk. slices: of a row. dtype: of the operands.
    """
    codes, absmax, table, *maps, partial = (ref for ref in refs if ref is not None)
    values = [] if nested is None else [nested, offset]
    types = [] if nested is None else [_one(), scalar()]
    smem_refs = (codes, absmax, table, *maps, partial)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @mosaic_types.inline_mgpu(
        arg_types=(_x(), scalar(), scalar(), scalar(), *types, *(plgpu.RefType() for _ in smem_refs))
    )
    def run(_, x, position, slot, wg, *arrays):
        values, (codes, absmax, table, *maps, partial) = arrays[: len(types)], arrays[len(types) :]
        f32, byte = ir.F32Type.get(), ir.IntegerType.get_signless(8)
        row_bytes = slices * SLICE // 2
        warp, lane, slot = _warp(wg), _lane(), ir_scalar(slot)
        quad = ir_shift_right(lane, 2)
        pair, slice_index = arith.divui(warp, ir_const(slices)), arith.remui(warp, ir_const(slices))
        own_column = ir_mul(lane, 4)

        def entries(word, number):
            """The two elements of a byte of codes: its row of the table, 256 bytes, this lane's column."""
            offset = ir_permute(word, own_column, 0x5504 | number << 4)
            return llvm.load(ir_i32(), ir_address(table, offset, byte))

        def from_lane(value, number):
            return nvvm.shfl_sync(ir_const(-1), value, number, ir_const(31), nvvm.ShflKind.idx)

        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, warp, ir_const(pairs * slices))):
            first = ir_add(ir_mul(slot, pairs * 2 * row_bytes), ir_mul(pair, 2 * row_bytes))
            first = ir_add(first, ir_mul(slice_index, SLICE // 2), ir_mul(lane, 8))
            two = ir.VectorType.get((2,), ir_i32())
            words = [
                [
                    ir_words(ir_load(codes, ir_add(first, ir_const(row * row_bytes + _HALF // 2 * half)), byte, two), 2)
                    for row in range(2)
                ]
                for half in range(2)
            ]
            own_block = ir_add(ir_mul(slot, pairs * 2 * slices * 16), _block(wg, slices))
            if values:
                nested, offset = ir_item(values[0].registers.flat[0], 0), ir_scalar(values[1])
                code = arith.extui(ir_i32(), ir_load(absmax, own_block, byte))
                scale = arith.addf(ir_product(ir_load(maps[0], code, f32), nested), offset)
            else:
                scale = ir_load(absmax, own_block, f32)
            rights = [word for register in x.registers.flat for word in ir_words(register, 4)]
            zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
            products = []
            for half in range(2):
                sums = [zero] * 4
                for step in range(4):
                    left = [
                        entries(words[half][row][step // 2], 2 * (step % 2) + number)
                        for number in range(2)
                        for row in range(2)
                    ]
                    right = rights[8 * half + 2 * step : 8 * half + 2 * step + 2]
                    sums = utils.inline_ptx(
                        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
                        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                        *left,
                        *right,
                        *sums,
                        result_types=(f32,) * 4,
                        convergent=True,
                    )
                products.append(sums)
            # A lane has columns 2 t and 2 t + 1 of its quad's row, so the diagonal is in lane t = quad / 2.
            odd = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(quad, ir_const(1)), ir_const(1))
            totals = []
            for row in range(2):
                terms = []
                for half in range(2):
                    diagonal_product = arith.select(odd, products[half][2 * row + 1], products[half][2 * row])
                    terms.append(
                        ir_product(diagonal_product, from_lane(scale, ir_add(ir_const(16 * row + 8 * half), quad)))
                    )
                totals.append(arith.addf(*terms))
            diagonal = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, ir_const(3)), ir_shift_right(quad, 1))
            with utils.when(diagonal):
                (_, warps, _, _) = ir.MemRefType(partial.type).shape
                target = ir_add(ir_mul(ir_add(ir_mul(ir_scalar(position), warps), warp), 16), ir_mul(quad, 2))
                llvm.store(ir_vector(totals), ir_address(partial, target, f32))

    run(x, chunk_index, slot, wg, *values, *smem_refs)


def store_sums(partial_smem, out_ref, count, program, programs, wg, warpgroups: int, *, pairs: int, slices: int, dtype):
    """out_ref[rows] = the sums of `multiply`, float32[places, warps, 8, 2], over slices and quads. All multiplying
    warpgroups call it, after a barrier; the program has `count` chunks, program, program + programs, ...

      partial_smem: where `multiply` wrote them. dtype: to which the sums are rounded.
      wg: int32[], the warpgroup's number. pairs: of rows in a chunk.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar(), scalar(), scalar(), scalar()))
    def store(_, partial_smem, out_ref, count, program, programs, wg):
        f32 = ir.F32Type.get()
        capacity, warps, _, _ = ir.MemRefType(partial_smem.type).shape
        two = ir.VectorType.get((2,), f32)
        thread = ir_add(ir_mul(ir_scalar(wg), 128), ir_thread())
        quad = arith.andi(thread, ir_const(7))
        for start in range(0, capacity * pairs * 8, 128 * warpgroups):
            number = ir_shift_right(ir_add(thread, ir_const(start)), 3)
            chunk_index, pair = arith.divui(number, ir_const(pairs)), arith.remui(number, ir_const(pairs))
            # All lanes add, because they exchange values; those past the end repeat the last pair.
            inside = arith.minui(chunk_index, ir_const(capacity - 1))
            first = ir_add(ir_mul(ir_add(ir_mul(inside, warps), ir_mul(pair, slices)), 16), ir_mul(quad, 2))
            sums = None
            for slice_index in range(slices):
                term = ir_load(partial_smem, ir_add(first, ir_const(16 * slice_index)), f32, two)
                term = [ir_item(term, row) for row in range(2)]
                sums = term if sums is None else [arith.addf(a, b) for a, b in zip(sums, term, strict=True)]
            assert sums is not None
            for distance in (1, 2, 4):
                sums = [arith.addf(value, utils.shfl_bfly(value, distance)) for value in sums]
            writes = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, chunk_index, ir_scalar(count)),
                arith.cmpi(arith.CmpIPredicate.eq, quad, ir_const(0)),
            )
            with utils.when(writes):
                chunk = ir_add(ir_scalar(program), arith.muli(chunk_index, ir_scalar(programs)))
                target = ir_address(out_ref, ir_add(ir_mul(chunk, pairs), pair), ir_i32())
                first, second = sums
                llvm.store(ir_narrow(first, second, dtype), target)

    store(partial_smem, out_ref, count, program, programs, wg)
