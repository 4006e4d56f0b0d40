"""Lane-level operations of the product of a few tokens with a four-bit weight (line_matmul.py). As in lanes.py, all
threads of a warpgroup call each of them. A line is 256 elements of a row, whose codes are a memory line of 128 bytes; a
span is four lines, whose scales are decoded at a time.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import (
    ir_add,
    ir_address,
    ir_const,
    ir_fragments,
    ir_i32,
    ir_item,
    ir_load,
    ir_mul,
    ir_product,
    ir_products,
    ir_scalar,
    ir_shift_right,
    ir_thread,
    ir_vector,
    ir_words,
    scalar,
)
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, gpu, ir, llvm, nvvm


def _fragment_row():
    """The row, 0 to 7, whose codes this lane's quad multiplies, such that four quads read different memory banks."""
    group = ir_shift_right(arith.andi(ir_thread(), ir_const(31)), 2)
    return arith.ori(arith.andi(ir_mul(group, 2), ir_const(7)), ir_shift_right(group, 2))


def fill_columns(source_ref, table_smem, first: int, warpgroups: int):
    """Copies a table of 256 32-bit values into each of the columns first to first + 31 of table_smem, uint32[256, 64]:
    each lane then reads its own memory bank. All threads of the program call it, and pass a barrier before they read.

      source_ref: uint32[256], in global memory. warpgroups: of the program.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, source_ref, table_smem):
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))
        for start in range(0, 256 * 8, 128 * warpgroups):
            # With three warpgroups the last rows are written twice, with the same values.
            position = arith.minui(ir_add(thread, ir_const(start)), ir_const(256 * 8 - 1))
            row = ir_shift_right(position, 3)
            target = ir_add(ir_mul(row, 64), ir_mul(arith.andi(position, ir_const(7)), 4), ir_const(first))
            llvm.store(ir_vector([ir_load(source_ref, row, ir_i32())] * 4), ir_address(table_smem, target, ir_i32()))

    fill(source_ref, table_smem)


def span_absmax(absmax_ref, nested_ref, first_row, first_line, rows: int, adjacent: int, warpgroups: int):
    """Loads this thread's share of the absmax of `rows` rows over the warpgroup's next four lines, ([128 x 4 n],
    float32[128 x n] nested absmax or None), n = ceil(4 rows / 128); apart from `keep_span`, so that it can run while
    the span before is multiplied. Lines past a row's end repeat the last one.

      absmax_ref: uint8 (double quantisation) or float32 [all rows, blocks of a row].
      adjacent: neighbouring lines of one warpgroup, 1, 2 or 4; the warpgroups take turns.
      nested_ref: float32, of each 256 consecutive numbers of absmax_ref, or None. first_row, first_line: int32[].
    """
    blocks = absmax_ref.shape[1]
    count = -(-4 * rows // 128)
    refs = [absmax_ref, *([] if nested_ref is None else [nested_ref])]
    results = [
        plgpu.ShapeDtypeStruct((128 * 4 * count,), absmax_ref.dtype, plgpu.Layout.WG_STRIDED((128 * 4 * count,), 4)),
        *(
            []
            if nested_ref is None
            else [plgpu.ShapeDtypeStruct((128 * count,), jnp.float32, plgpu.Layout.WG_STRIDED((128 * count,), 1))]
        ),
    ]

    @mosaic_types.inline_mgpu(arg_types=(scalar(), scalar(), *(plgpu.RefType() for _ in refs)), return_type=results)
    def load(_, first_row, first_line, absmax_ref, *nested_ref):
        absmax_type = ir.MemRefType(absmax_ref.type).element_type
        line = arith.andi(ir_thread(), ir_const(3))
        other_lines = ir_mul(arith.andi(line, ir_const(4 - adjacent)), warpgroups - 1)
        line = arith.minui(ir_add(ir_scalar(first_line), line, other_lines), ir_const(blocks // 4 - 1))
        absmax_values, factors = [], []
        for number in range(count):
            position = arith.minui(ir_add(ir_thread(), ir_const(128 * number)), ir_const(4 * rows - 1))
            source = ir_add(ir_mul(ir_add(ir_scalar(first_row), ir_shift_right(position, 2)), blocks), ir_mul(line, 4))
            absmax_values.append(
                llvm.load(ir.VectorType.get((4,), absmax_type), ir_address(absmax_ref, source, absmax_type))
            )
            factors += [ir_vector([ir_load(ref, ir_shift_right(source, 8), ir.F32Type.get())]) for ref in nested_ref]
        return ir_fragments((absmax_values, factors), results)

    loaded = load(first_row, first_line, *refs)
    return loaded if nested_ref is not None else (*loaded, None)


def keep_span(share, offset, table_smem, scales_smem, rows: int):
    """scales_smem[block of the span, position of the row] = the float32 absmax of `span_absmax`, decoded. The
    warpgroup's threads must have read the previous span before, and must pass a barrier afterwards.

      offset: float32[] of double quantisation, whose map is in columns 32 to 63 of table_smem; or None.
      scales_smem: float32[16, rows or more]; the two of 16 rows that a lane has are neighbours.
      share: of `span_absmax`. rows: of the program.
    """
    arrays = [array for array in share if array is not None]
    layouts = [plgpu.Layout.WG_STRIDED(array.shape, vector) for array, vector in zip(arrays, (4, 1), strict=False)]
    if offset is not None:
        arrays, layouts = [*arrays, offset], [*layouts, scalar()]

    @mosaic_types.inline_mgpu(arg_types=(*layouts, plgpu.RefType(), plgpu.RefType()))
    def keep(_, absmax, *refs):
        f32 = ir.F32Type.get()
        *nested, scales_smem, table_smem = refs
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own_column = ir_add(arith.andi(ir_thread(), ir_const(31)), ir_const(32))
        for number, four in enumerate(absmax.registers.flat):
            values = [ir_item(four, index) for index in range(4)]
            if nested:
                offset, factor = ir_scalar(nested[1]), ir_item(nested[0].registers.flat[number], 0)
                addresses = [ir_add(ir_mul(arith.extui(ir_i32(), value), 64), own_column) for value in values]
                values = [
                    arith.addf(ir_product(ir_load(table_smem, address, f32), factor), offset) for address in addresses
                ]
            position = ir_add(ir_thread(), ir_const(128 * number))
            row = ir_shift_right(position, 2)
            eighth = arith.andi(row, ir_const(7))
            group = arith.ori(ir_shift_right(eighth, 1), ir_mul(arith.andi(eighth, ir_const(1)), 4))
            half = arith.andi(ir_shift_right(row, 3), ir_const(1))
            address = ir_add(ir_mul(ir_shift_right(row, 4), 16), ir_mul(group, 2), half)
            address = ir_add(address, ir_mul(arith.andi(position, ir_const(3)), 4 * stride))

            def store(values=values, address=address):
                for index, value in enumerate(values):
                    llvm.store(value, ir_address(scales_smem, ir_add(address, ir_const(index * stride)), f32))

            if 128 * (number + 1) <= 4 * rows:
                store()
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, position, ir_const(4 * rows))):
                    store()

    keep(*arrays, scales_smem, table_smem)


def line_product(acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem, transforms, dtype):
    """acc plus the product of the program's rows and x^T over the 256 columns of a line, on the tensor cores
    (mma.m16n8k16).

    Each lane multiplies 8 bytes of codes of a row, within one block. The order of a product's k does not matter if it
    is the same in x, so the lane's 16 elements of x are neighbours too. Each block's sum is scaled in float32.

      acc: float32[512 g n], a register of four numbers for each of g times 16 rows and n times 8 tokens: two for tokens
      2 q and 2 q + 1 and row r, two for row r + 8 (q: the lane in its quad, r: `_fragment_row`).
      codes_smem: uint8[16 g, 128 m], m lines, swizzled; each warp takes a block of 64.
      x_smem: 16-bit [tokens, m, 256].
      first_scale: int32[], the line's first block in scales_smem.
      dtype: of the tensor cores' operands, bfloat16 or float16.
      line: int32[], its number in codes_smem. table_smem: uint32[256, 64], of fill_columns. transforms: of codes_smem.
    """
    layout = plgpu.Layout.WG_STRIDED(acc.shape, 4)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @mosaic_types.inline_mgpu(
        arg_types=(
            layout,
            plgpu.RefType(transforms),
            *(plgpu.RefType() for _ in range(2)),
            scalar(),
            scalar(),
            plgpu.RefType(),
        ),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout),
    )
    def multiply(_, acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem):
        f32, i32, i8 = ir.F32Type.get(), ir_i32(), ir.IntegerType.get_signless(8)
        two, four = ir.VectorType.get((2,), i32), ir.VectorType.get((4,), i32)
        eights, lines = ir.MemRefType(codes_smem.type).shape[:2]  # tiles of 8 rows by a line
        groups = eights // 2
        widths = len(acc.registers.flat) // groups
        tokens, _, elements = ir.MemRefType(x_smem.type).shape
        lane, warp = arith.andi(ir_thread(), ir_const(31)), ir_shift_right(ir_thread(), 5)
        group, quad = ir_shift_right(lane, 2), arith.andi(lane, ir_const(3))

        odd = arith.andi(group, ir_const(1))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, ir_const(0))
        rights = []
        for width in range(widths):
            token = arith.minui(ir_add(group, ir_const(8 * width)), ir_const(tokens - 1))
            address = ir_add(
                ir_mul(token, lines * elements), ir_mul(ir_scalar(line), elements), ir_mul(warp, 64), ir_mul(quad, 16)
            )
            # Neighbouring quads read their halves in alternating order, as their rows are in the same banks.
            halves = [arith.xori(ir_mul(odd, 8), ir_const(8 * half)) for half in range(2)]
            loaded = [
                llvm.load(four, ir_address(x_smem, ir_add(address, half), ir.IntegerType.get_signless(16)))
                for half in halves
            ]
            first, second = (ir_words(vector, 4) for vector in loaded)
            low = [arith.select(is_odd, b, a) for a, b in zip(first, second, strict=True)]
            high = [arith.select(is_odd, a, b) for a, b in zip(first, second, strict=True)]
            rights.append([*low, *high])

        row = _fragment_row()
        byte_in_line = arith.xori(ir_add(ir_mul(warp, 32), ir_mul(quad, 8)), ir_mul(row, 16))  # the 128-byte swizzle
        own_codes = ir_add(ir_mul(ir_scalar(line), 8 * 128), ir_mul(row, 128), byte_in_line)
        own_column = ir_mul(lane, 4)
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own_scales = ir_add(ir_mul(ir_add(ir_scalar(first_scale), warp), stride), ir_mul(group, 2))

        def pair(word, byte):
            """The two elements of a byte of codes: its row of 256 bytes, this lane's column."""
            byte_address = utils.inline_ptx(
                "prmt.b32 $0, $1, $2, $3;", word, own_column, ir_const(0x7604 | byte << 4), result_types=i32
            )
            return llvm.load(i32, ir_address(table_smem, byte_address, i8))

        registers = np.empty_like(acc.registers)
        for number in range(groups):
            words = []
            for half in range(2):
                address = ir_add(own_codes, ir_const((2 * number + half) * lines * 8 * 128))
                words.append(ir_words(llvm.load(two, ir_address(codes_smem, address, i8)), 2))
            address = ir_add(own_scales, ir_const(16 * number))
            scales = llvm.load(ir.VectorType.get((2,), f32), ir_address(scales_smem, address, f32))
            scales = [ir_item(scales, half) for half in range(2)]
            products = ir_products(words, rights, pair, name)
            for width in range(widths):
                register_index = number * widths + width
                sums = [ir_item(acc.registers.flat[register_index], index) for index in range(4)]
                registers.flat[register_index] = ir_vector(
                    [
                        utils.inline_ptx(
                            "fma.rn.f32 $0, $1, $2, $3;",
                            products[width][index],
                            scales[index // 2],
                            sums[index],
                            result_types=f32,
                        )
                        for index in range(4)
                    ]
                )
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return multiply(acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem)


def keep_line_sums(acc, partial_smem, first):
    """partial_smem[first + warp, token, row] = each warp's sums of `line_product`. partial_smem is float32[all warps,
    tokens, rows + 4]: with the four more, a quad's tokens are in different memory banks.

      first: int32[]. acc: of `line_product`.
    """
    layout = plgpu.Layout.WG_STRIDED(acc.shape, 4)

    @mosaic_types.inline_mgpu(arg_types=(layout, plgpu.RefType(), scalar()))
    def keep(_, acc, partial_smem, first):
        f32 = ir.F32Type.get()
        _, tokens, stride = ir.MemRefType(partial_smem.type).shape
        groups = (stride - 4) // 16
        widths = len(acc.registers.flat) // groups
        warp, quad = ir_shift_right(ir_thread(), 5), arith.andi(ir_thread(), ir_const(3))
        own_offset = ir_add(ir_mul(ir_add(ir_scalar(first), warp), tokens * stride), _fragment_row())
        for width in range(widths):
            for index in range(2):
                token = ir_add(ir_mul(quad, 2), ir_const(8 * width + index))
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, ir_const(tokens))):
                    for number in range(groups):
                        register = acc.registers.flat[number * widths + width]
                        for half in range(2):
                            address = ir_add(own_offset, ir_mul(token, stride), ir_const(16 * number + 8 * half))
                            llvm.store(ir_item(register, 2 * half + index), ir_address(partial_smem, address, f32))

    keep(acc, partial_smem, first)


def store_line_sums(partial_smem, totals_smem, out_ref, split, first_row, warpgroups: int, splits: int):
    """out_ref[0, token, first_row + row] = the sums over all warps of all programs of the cluster, in a fixed order.
    All threads of the cluster call it, because they wait for each other.

      totals_smem: 32-bit, [tokens, rows] at least; with several splits overwritten, for other programs to read.
      split, splits: the program's number in its cluster, and the number of these programs.
      partial_smem: of `keep_line_sums`. first_row: int32[].
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), scalar(), scalar()))
    def store(_, partial_smem, totals_smem, out_ref, split, first_row):
        f32 = ir.F32Type.get()
        out_type = ir.MemRefType(out_ref.type)
        _, tokens, all_rows = out_type.shape
        warps, _, stride = ir.MemRefType(partial_smem.type).shape
        rows = stride - 4
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))

        def for_places(first, count: int, limit: int, body):
            for start in range(0, count, 128 * warpgroups):
                own_element = ir_add(thread, ir_const(start))
                element = own_element if first is None else ir_add(own_element, first)
                in_range = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.ult, own_element, ir_const(count)),
                    arith.cmpi(arith.CmpIPredicate.ult, element, ir_const(limit)),
                )
                with utils.when(in_range):
                    token = arith.divui(element, ir_const(rows))
                    body(element, token, arith.subi(element, ir_mul(token, rows)))

        def total_of(terms):
            return functools.reduce(arith.addf, terms)

        def own_total(token, row):
            address = ir_add(ir_mul(token, stride), row)
            return total_of(
                ir_load(partial_smem, ir_add(address, ir_const(n * tokens * stride)), f32) for n in range(warps)
            )

        def put(token, row, total):
            address = ir_add(ir_mul(token, all_rows), ir_scalar(first_row), row)
            llvm.store(arith.truncf(out_type.element_type, total), ir_address(out_ref, address, out_type.element_type))

        elements = tokens * rows
        if splits == 1:
            for_places(None, elements, elements, lambda _, token, row: put(token, row, own_total(token, row)))
            return

        def keep_total(element, token, row):
            llvm.store(own_total(token, row), ir_address(totals_smem, element, f32))

        def put_all(element, token, row):
            own_totals = utils.memref_ptr(totals_smem)
            pointers = [utils.get_cluster_ptr(own_totals, ir_const(number)) for number in range(splits)]
            put(
                token,
                row,
                total_of(llvm.load(f32, utils.getelementptr(pointer, [element], f32)) for pointer in pointers),
            )

        for_places(None, elements, elements, keep_total)
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)
        share = -(-elements // splits)
        for_places(ir_mul(ir_scalar(split), share), share, elements, put_all)
        # No program ends while its sums are still read; stores need not be waited for.
        nvvm.cluster_arrive_relaxed(aligned=True)
        nvvm.cluster_wait(aligned=True)

    store(partial_smem, totals_smem, out_ref, split, first_row)
