"""Lane-level building blocks of Mosaic kernels for which Pallas has no operation, emitted as PTX through `inline_mgpu`.
A lane is one of the 32 threads of a warp; a warpgroup is four warps.

All threads of a warpgroup call a function unless it says otherwise. Functions named ir_... are called within PTX
bodies, and take and return MLIR values. Pallas' interpreter runs none of this, so kernels do the same in jnp when
interpreted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, gpu, ir, llvm, nvvm, vector

ROWS_OF_A_WARP = 16  # rows of the weight in a small product: the M of mma.m16n8k16
_WARPS = 4  # of a warpgroup


@functools.cache
def scalar():
    """The layout of scalar arguments: every thread of the warpgroup has the value."""
    return plgpu.Layout.WG_SPLAT(())


def ir_i32():
    """MLIR's type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def ir_const(value: int):
    """An int32 constant from -2^31 to 2^31 - 1."""
    return arith.constant(ir_i32(), ir.IntegerAttr.get(ir_i32(), value))


def ir_add(*values):
    """The sum of one or more int32; it wraps around."""
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def ir_mul(a, b: int):
    return arith.muli(a, ir_const(b))


def ir_shift_right(value, amount: int):
    """An int32 shifted right, with zeros on the left."""
    return arith.shrui(value, ir_const(amount)) if amount else value


def ir_item(value, index: int):
    """Element `index` of a vector."""
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def ir_vector(values):
    """A vector register of scalars of one type."""
    result = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for index, value in enumerate(values):
        result = vector.insert(value, result, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
    return result


def ir_words(value, count: int):
    """The `count` 32-bit integers of a vector register, lowest first."""
    words = vector.bitcast(ir.VectorType.get((count,), ir_i32()), value)
    return [ir_item(words, index) for index in range(count)]


def ir_thread():
    """The thread's number in its warpgroup, int32 from 0 to 127."""
    return arith.remui(arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x)), ir_const(128))


def ir_scalar(array):
    """The element of a FragmentedArray with one, which is how Pallas passes `scalar` arguments."""
    value = array.registers.flat[0]
    return ir_item(value, 0) if isinstance(value.type, ir.VectorType) else value


def ir_address(ref, index, element):
    """A pointer to element `index` (int32) of `ref`, taken as a flat array of the MLIR type `element`.

    ref: an MLIR memref of Pallas' kernel.
    """
    return utils.getelementptr(utils.memref_ptr(ref), [index], element)


def ir_load(ref, index, element, result=None):
    """Loads from ir_address(ref, index, element). result: an MLIR type, such as a vector for several neighbouring
    elements; None: `element`.
    """
    return llvm.load(result or element, ir_address(ref, index, element))


def ir_fragments(registers, results):
    """The mgpu arrays that `results` describe, of lists of a thread's registers; further lists are left out."""
    arrays = []
    for values, result in zip(registers, results, strict=False):
        fragment_registers = np.empty((len(values),), object)
        fragment_registers[:] = values
        signed = False if result.dtype == jnp.uint8 else None
        layout = result.layout.to_mgpu()
        arrays.append(mgpu.FragmentedArray(_registers=fragment_registers, _layout=layout, _is_signed=signed))
    return arrays


def ir_product(a, b):
    """float32 a * b, rounded. As PTX, so that no following addition is fused: decoders of quantised formats round
    between the two.
    """
    return utils.inline_ptx("mul.rn.f32 $0, $1, $2;", a, b, result_types=ir.F32Type.get())


def ir_narrow(low, high, dtype):
    """float32 `low` and `high` rounded to bfloat16 or float16, as one int32 with `low` in the lower half.

    dtype: jnp.bfloat16; any other means float16.
    """
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    return utils.inline_ptx(f"cvt.rn.{name}x2.f32 $0, $1, $2;", high, low, result_types=ir_i32())


def ir_permute(low, high, selector):
    """PTX's prmt.b32: byte i is the byte of (low, high) that nibble i of `selector` (0 to 7) numbers; int32 or Python
    ints.
    """
    return utils.prmt(*(ir_const(word) if isinstance(word, int) else word for word in (low, high, selector)))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _entries(table: bytes, word):
    """Looks up eight 4-bit codes of an int32 in 16 float32 values (`table`, their bytes), lowest first, by byte
    permutations.
    """
    values = np.frombuffer(table, np.float32).view(np.uint32)
    planes = [[_signed(int(w)) for w in ((values >> 8 * byte) & 255).astype(np.uint8).view("<u4")] for byte in range(4)]
    index, upper = arith.andi(word, ir_const(0x77777777)), arith.andi(ir_shift_right(word, 3), ir_const(0x11111111))
    entries = []
    for shift in (0, 16):
        shifted, mask = ir_shift_right(index, shift), ir_permute(0x0000FF00, 0, ir_shift_right(upper, shift))
        by_byte = []
        for a, b, c, d in planes:
            if a == b == c == d == 0:
                by_byte.append(ir_const(0))
                continue
            below, above = ir_permute(a, b, shifted), ir_permute(c, d, shifted)
            by_byte.append(arith.xori(below, arith.andi(arith.xori(below, above), mask)))
        # Transposes four words of four bytes.
        pairs = [(ir_permute(by_byte[i], by_byte[i + 1], s)) for i in (0, 2) for s in (0x5140, 0x7362)]
        entries += [ir_permute(pairs[n >> 1], pairs[2 + (n >> 1)], (0x5410, 0x7632)[n & 1]) for n in range(4)]
    return [arith.bitcast(ir.F32Type.get(), entry) for entry in entries]


def _shuffled_entries(lane_entry, word):
    """Looks up eight 4-bit codes of an int32 by warp shuffles, lowest first; lanes i and i + 16 provide entry i."""
    shuffle = nvvm.ShflKind.idx
    return [
        nvvm.shfl_sync(ir_const(-1), lane_entry, ir_shift_right(word, 4 * n), ir_const(0x101F), shuffle)
        for n in range(8)
    ]


def table_values(
    codes,
    scales,
    table: bytes,
    table_ref,
    codes_layout,
    scales_layout,
    out_layout,
    dtype,
    *,
    low_first: bool,
    beside_products: bool,
):
    """Decodes 4-bit numbers in registers: `dtype`[2 n], entries of a table of 16 values times a scale.

    codes: uint8[n], two codes each; a register has eight codes.
    scales: float32, one for each register of codes.
    table, table_ref: the bytes of float32[16], and the same in memory, from which shuffles load.
    low_first: whether the first number of a byte is in its low four bits.
    beside_products: looks up by byte permutations, which leave shared memory to tensor cores. Otherwise by warp
    shuffles, with fewer instructions (a pass that only decodes: 3.9 TB/s instead of 3.4).
    codes_layout, scales_layout, out_layout: register layouts of codes, scales and the result.
    """

    @mosaic_types.inline_mgpu(
        arg_types=(codes_layout, scales_layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((2 * codes.shape[0],), dtype, out_layout),
    )
    def values(_, codes, scales, table_ref):
        registers = np.empty_like(codes.registers)
        narrow = ir.VectorType.get((8,), utils.dtype_to_ir_type(dtype))
        lane_entry = None
        if not beside_products:
            lane_entry = ir_load(table_ref, arith.andi(ir_thread(), ir_const(15)), ir.F32Type.get())
        for index, scale in zip(np.ndindex(codes.registers.shape), scales.registers.flat, strict=True):
            (word,) = ir_words(codes.registers[index], 1)
            entries = _entries(table, word) if beside_products else _shuffled_entries(lane_entry, word)
            scaled = [ir_product(entry, ir_item(scale, 0)) for entry in entries]
            pairs = [(scaled[2 * byte], scaled[2 * byte + 1]) for byte in range(4)]
            words = [ir_narrow(a, b, dtype) if low_first else ir_narrow(b, a, dtype) for a, b in pairs]
            registers[index] = vector.bitcast(narrow, ir_vector(words))
        return mgpu.FragmentedArray(_registers=registers, _layout=out_layout.to_mgpu(), _is_signed=None)

    return values(codes, scales, table_ref)


def fill_banks(table_ref, table_smem, warpgroups: int):
    """Copies table_ref [256] of 32-bit values into each of the 32 columns of table_smem [256, 32], so that each lane
    reads its own memory bank. All threads of the program call it; a barrier of all must follow.

      warpgroups: of the program.
      table_ref, table_smem: in global and shared memory.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, table_ref, table_smem):
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))
        four = ir.VectorType.get((4,), ir_i32())
        for start in range(0, 256 * 8, 128 * warpgroups):
            element = ir_add(thread, ir_const(start))
            if start + 128 * warpgroups > 256 * 8:  # threads past the end write the last element again
                element = arith.minui(element, ir_const(256 * 8 - 1))
            value = ir_load(table_ref, ir_shift_right(element, 3), ir_i32())
            llvm.store(ir_vector([value] * 4), ir_address(table_smem, element, four))

    fill(table_ref, table_smem)


def absmax_share(absmax_ref, nested_ref, first_row, rows: int, warpgroups: int):
    """Loads this thread's share of the absmax (scales of a row's blocks) of a tile of rows into registers, for
    `keep_scales`. Two functions, so that one tile's absmax loads while the tile before is multiplied. All threads of
    the program call it; spare ones repeat the last group of four blocks.

      absmax_ref: uint8 (double quantisation) or float32 [all rows, blocks, a multiple of 4], in global memory.
      nested_ref: float32, of each 256 consecutive numbers of absmax_ref, or None.
      first_row, rows: int32[]; the rows of a tile.

    Returns ([128 x 4 n] of absmax_ref's dtype, float32[128 x n] nested absmax or None).
    """
    blocks = absmax_ref.shape[1]
    groups = rows * blocks // 4
    count = -(-groups // (128 * warpgroups))
    absmax_layout = plgpu.Layout.WG_STRIDED((128 * 4 * count,), 4)
    nested_layout = plgpu.Layout.WG_STRIDED((128 * count,), 1)
    refs = [absmax_ref, *([] if nested_ref is None else [nested_ref])]
    results = [
        plgpu.ShapeDtypeStruct((128 * 4 * count,), absmax_ref.dtype, absmax_layout),
        *([] if nested_ref is None else [plgpu.ShapeDtypeStruct((128 * count,), jnp.float32, nested_layout)]),
    ]

    @mosaic_types.inline_mgpu(arg_types=(scalar(), *(plgpu.RefType() for _ in refs)), return_type=results)
    def load(_, first_row, absmax_ref, *nested_ref):
        f32 = ir.F32Type.get()
        absmax_type = ir.MemRefType(absmax_ref.type).element_type
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))
        first = ir_mul(ir_scalar(first_row), blocks)
        absmax, factors = [], []
        for number in range(count):
            group = arith.minui(ir_add(thread, ir_const(number * 128 * warpgroups)), ir_const(groups - 1))
            source = ir_add(first, ir_mul(group, 4))
            absmax.append(llvm.load(ir.VectorType.get((4,), absmax_type), ir_address(absmax_ref, source, absmax_type)))
            factors += [ir_vector([ir_load(ref, ir_shift_right(source, 8), f32)]) for ref in nested_ref]
        return ir_fragments((absmax, factors), results)

    loaded = load(first_row, *refs)
    return loaded if nested_ref is not None else (*loaded, None)


def keep_scales(share, nested_refs, scales_smem, blocks: int, warpgroups: int):
    """Writes a tile's scales to shared memory, decoded if they are uint8 (map[absmax] * nested + offset). All threads
    of the program call it, after all have finished reading scales_smem; a barrier must follow.

      share: from `absmax_share`.
      nested_refs: (map float32[256], offset float32[1]) of double quantisation, in global memory, or empty.
      scales_smem: float32[rows of a tile, at least `blocks`].
      blocks: of a row, a multiple of 4.
    """
    arrays = [array for array in share if array is not None]
    layouts = [plgpu.Layout.WG_STRIDED(array.shape, vector) for array, vector in zip(arrays, (4, 1), strict=False)]
    refs = [scales_smem, *nested_refs]

    @mosaic_types.inline_mgpu(arg_types=(*layouts, *(plgpu.RefType() for _ in refs)))
    def keep(_, absmax, *operands):
        f32 = ir.F32Type.get()
        *factors, scales_smem = operands[: len(arrays)]
        nested_refs = operands[len(arrays) :]
        rows, stride = ir.MemRefType(scales_smem.type).shape
        groups = rows * blocks // 4
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))
        for number, four in enumerate(absmax.registers.flat):
            start = number * 128 * warpgroups
            group = ir_add(thread, ir_const(start))
            if nested_refs:
                map_ref, offset_ref = nested_refs
                factor = ir_item(factors[0].registers.flat[number], 0)
                offset = ir_load(offset_ref, ir_const(0), f32)
                codes = [arith.extui(ir_i32(), ir_item(four, index)) for index in range(4)]
                four = ir_vector([arith.addf(ir_product(ir_load(map_ref, c, f32), factor), offset) for c in codes])
            row = arith.divui(group, ir_const(blocks // 4))
            column = ir_mul(arith.subi(group, ir_mul(row, blocks // 4)), 4)
            target = ir_address(scales_smem, ir_add(ir_mul(row, stride), column), f32)
            if start + 128 * warpgroups <= groups:
                llvm.store(four, target)
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, group, ir_const(groups))):
                    llvm.store(four, target)

    keep(*arrays, *refs)


def x_fragments(chunk, x_ref, width: int, parts: int):
    """Loads the elements of x that a lane needs in `small_product` for one chunk of columns: uint32[128 x 2 width], two
    16-bit elements each.

      chunk: int32[]; a chunk is 512 * parts neighbouring columns.
      x_ref: 16-bit [tokens, columns], in global memory.
      width: columns of all right operands of the tensor cores, 8 or 16, at least tokens * parts.
      parts: 1 or 2, runs of 128 columns that each warp has in a chunk.

    A right operand has eight columns: 8 / parts tokens over a warp's first run, with two parts the same tokens over the
    second. Spare columns repeat the last token.
    """
    tokens_per_part = 8 // parts
    shape = (128 * 2 * width,)
    layout = plgpu.Layout.WG_STRIDED(shape, 4)

    @mosaic_types.inline_mgpu(
        arg_types=(scalar(), plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout)
    )
    def load(_, chunk, x_ref):
        tokens, columns = ir.MemRefType(x_ref.type).shape
        lane = arith.andi(ir_thread(), ir_const(31))
        quad, group = arith.andi(lane, ir_const(3)), ir_shift_right(lane, 2)
        column = ir_add(ir_mul(arith.andi(quad, ir_const(1)), 32), ir_mul(ir_shift_right(quad, 1), 16))
        position = ir_add(
            ir_mul(ir_scalar(chunk), 512 * parts), ir_mul(ir_shift_right(ir_thread(), 5), 128 * parts), column
        )
        position = ir_add(position, ir_mul(arith.divui(group, ir_const(tokens_per_part)), 128))
        four = ir.VectorType.get((4,), ir_i32())
        fragments = []
        for block in range(2):
            for eight in range(width // 8):
                token = ir_add(arith.andi(group, ir_const(tokens_per_part - 1)), ir_const(tokens_per_part * eight))
                if tokens < tokens_per_part * (eight + 1):
                    token = arith.minui(token, ir_const(tokens - 1))
                source = ir_add(ir_mul(token, columns), position, ir_const(64 * block))
                pointer = ir_address(x_ref, source, ir.IntegerType.get_signless(16))
                fragments += [llvm.load(four, utils.getelementptr(pointer, [half], four)) for half in range(2)]
        registers = np.empty((len(fragments),), object)
        registers[:] = fragments
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=False)

    return load(chunk, x_ref)


def ir_products(words, rights, pair, name: str):
    """Multiplies 16 rows of a weight, 64 elements each, by 8 columns, for each of `rights`, on the tensor cores. All
    lanes of a warp call it.

      words: this lane's codes, two words of a row of the first eight, then of the second.
      rights: for each product this lane's eight words of two 16-bit elements.
      pair: (word, byte) -> the two elements of that byte as one word.
      name: "bf16" or "f16".

    Returns for each four float32 sums: two columns of a row of the first eight, then of the second.
    """
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    products: list[Sequence[ir.Value]] = [[zero] * 4 for _ in rights]
    for step in range(4):
        bytes_ = [2 * (step % 2), 2 * (step % 2) + 1]
        left = [pair(words[half][step // 2], byte) for byte in bytes_ for half in range(2)]
        for width, right in enumerate(rights):
            products[width] = utils.inline_ptx(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
                "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                *left,
                *right[2 * step : 2 * step + 2],
                *products[width],
                result_types=(f32,) * 4,
                convergent=True,
            )
    return products


def small_product(acc, codes, x, chunk, pairs_smem, scales_smem, layouts, dtype):
    """Adds to acc the product of 16 rows of a 4-bit weight and x^T over one chunk of columns, on the tensor cores
    (mma.m16n8k16), by one warpgroup; `store_sums` adds up over warpgroups, warps and parts.

      acc: float32[64 p, n] in registers, n 8 or 16. Of a row's codes in a chunk, each warp takes p parts of 64 bytes: 2
        reads whole memory lines, which is faster, but leaves room for 4 tokens in 8 columns. The sum of warp w over
        part h for row (2 s + i) (8 / p) + a and token e (8 / p) + t is at row (s, w, i, a, h) of [p, 4, 2, 8 / p, p]
        and column (e, h, t) of [n / 8, p, 8 / p]; entries whose two h differ are meaningless.
      codes: uint8[16, 256 p] in registers: 512 p elements of each row, 128 p for each warp.
      x: from `x_fragments`, with width n and p parts.
      chunk: int32[], its number within the row.
      pairs_smem: uint32[256, 32], from `fill_banks`: the two elements of each byte.
      scales_smem: float32[16, at least the blocks of a row].
      layouts: of acc and the result, and of codes.
      dtype: of the tensor cores' operands, bfloat16 or float16.

    A lane has 16 bytes of a row; four neighbouring lanes, a row to the tensor cores, have a part. With two parts, two
    sets of four lanes are two "rows", and each finds its part of x in four of the columns. Within a part, lanes
    exchange bytes, so that each product is within one block, whose sum is then scaled.
    """
    acc_layout, codes_layout = layouts
    parts = acc.shape[0] // 64
    x_layout = plgpu.Layout.WG_STRIDED(x.shape, 4)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @mosaic_types.inline_mgpu(
        arg_types=(acc_layout, codes_layout, x_layout, scalar(), plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, acc_layout),
    )
    def multiply(_, acc, codes, x, chunk, pairs_smem, scales_smem):
        f32, i32 = ir.F32Type.get(), ir_i32()
        chunk = ir_scalar(chunk)
        lane = arith.andi(ir_thread(), ir_const(31))
        warp = ir_shift_right(ir_thread(), 5)
        group, quad = ir_shift_right(lane, 2), arith.andi(lane, ir_const(3))
        # Whether the lane's bytes are those of its half's first block.
        first_block = arith.cmpi(arith.CmpIPredicate.ult, quad, ir_const(2))
        own_column = ir_mul(lane, 4)

        def pair(word, byte):
            """The two elements of a byte of codes: its row of the table, this lane's column."""
            row = arith.shli(word, ir_const(7)) if byte == 0 else ir_shift_right(word, 8 * byte - 7)
            offset = arith.ori(arith.andi(row, ir_const(0x7F80)), own_column)
            return llvm.load(i32, ir_address(pairs_smem, offset, ir.IntegerType.get_signless(8)))

        # The words of codes by [8 / p rows][block].
        own_words = []
        for register in codes.registers.flat:
            words = ir_words(register, 4)
            sent = [arith.select(first_block, high, low) for low, high in zip(words[:2], words[2:], strict=True)]
            received = [utils.shfl_bfly(word, 2) for word in sent]
            own_words.append(
                (
                    [
                        arith.select(first_block, lane_word, peer_word)
                        for lane_word, peer_word in zip(words[:2], received, strict=True)
                    ],
                    [
                        arith.select(first_block, peer_word, lane_word)
                        for lane_word, peer_word in zip(words[2:], received, strict=True)
                    ],
                )
            )
        stride = ir.MemRefType(scales_smem.type).shape[1]
        part = arith.andi(group, ir_const(parts - 1))
        block = ir_add(ir_mul(chunk, 8 * parts), ir_mul(warp, 2 * parts), ir_mul(part, 2))
        scales = []
        for rows in range(2 * parts):
            row = ir_add(arith.divui(group, ir_const(parts)), ir_const(8 // parts * rows))
            scale_pair = ir_load(scales_smem, ir_add(ir_mul(row, stride), block), f32, ir.VectorType.get((2,), f32))
            scales.append([ir_item(scale_pair, index) for index in range(2)])
        # By 16 rows of products, 8 columns, half of the rows.
        sums = [[ir_item(r, 0), ir_item(r, 1)] for r in acc.registers.flat]
        widths = acc.shape[1] // 8
        x_words = iter(ir_words(register, 4) for register in x.registers.flat)
        for block in range(2):
            rights = [[*next(x_words), *next(x_words)] for _ in range(widths)]
            for eight in range(parts):
                words = [own_words[2 * eight + half][block] for half in range(2)]
                products = ir_products(words, rights, pair, name)
                for width in range(widths):
                    for half in range(2):
                        row_sums = sums[(eight * widths + width) * 2 + half]
                        for index in range(2):
                            row_sums[index] = utils.inline_ptx(
                                "fma.rn.f32 $0, $1, $2, $3;",
                                products[width][2 * half + index],
                                scales[2 * eight + half][block],
                                row_sums[index],
                                result_types=f32,
                            )
        registers = np.empty_like(acc.registers)
        for index, position in enumerate(np.ndindex(registers.shape)):
            registers[position] = ir_vector(sums[index])
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return multiply(acc, codes, x, chunk, pairs_smem, scales_smem)


def store_sums(partial_smem, out_ref, first_row, dtype):
    """Sets out_ref[token, first_row + row] (global memory) to the added sums of `small_product` for 16 rows and all
    tokens. partial_smem: float32[warpgroups, 64 p, n], each warpgroup's acc. One warpgroup calls it, after a barrier.
    dtype: to which the sums are rounded.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar()))
    def store(_, partial_smem, out_ref, first_row):
        f32 = ir.F32Type.get()
        warpgroups, partial_rows, width = ir.MemRefType(partial_smem.type).shape
        tokens, rows = ir.MemRefType(out_ref.type).shape
        narrow = utils.dtype_to_ir_type(dtype)
        parts = partial_rows // 64
        tokens_per_part, rows_per_part = 8 // parts, 16 // parts
        row, eighth = arith.andi(ir_thread(), ir_const(15)), ir_shift_right(ir_thread(), 4)
        # Row (s, i, a) stands at s 64 + (i 8 / p + a) p.
        sum_row = ir_mul(arith.divui(row, ir_const(rows_per_part)), 64)
        sum_row = ir_add(sum_row, ir_mul(arith.andi(row, ir_const(rows_per_part - 1)), parts))
        for first_token in range(0, tokens, 8):
            token = ir_add(eighth, ir_const(first_token))
            column = ir_add(
                ir_mul(arith.divui(token, ir_const(tokens_per_part)), 8),
                arith.andi(token, ir_const(tokens_per_part - 1)),
            )
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, ir_const(tokens))):
                total = None
                for warpgroup in range(warpgroups):
                    for warp in range(_WARPS):
                        for part in range(parts):
                            above = warpgroup * partial_rows + warp * 16 + part
                            index = ir_add(
                                ir_mul(sum_row, width), column, ir_const(above * width + tokens_per_part * part)
                            )
                            term = ir_load(partial_smem, index, f32)
                            total = term if total is None else arith.addf(total, term)
                out_index = ir_add(ir_mul(token, rows), ir_scalar(first_row), row)
                llvm.store(arith.truncf(narrow, total), ir_address(out_ref, out_index, narrow))

    store(partial_smem, out_ref, first_row)


# ---- shared by several kernels


def fill_table(table_ref, table_smem):
    """Copies a one-dimensional array of 32-bit values to shared memory. Each warpgroup that calls it copies all; a
    barrier must follow.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, table_ref, table_smem):
        (count,) = ir.MemRefType(table_smem.type).shape
        for start in range(0, count, 128):
            element = ir_add(ir_thread(), ir_const(start))
            if start + 128 > count:
                element = arith.minui(element, ir_const(count - 1))
            llvm.store(ir_load(table_ref, element, ir_i32()), ir_address(table_smem, element, ir_i32()))

    fill(table_ref, table_smem)


def warpgroup_barrier():
    """A barrier of the calling warpgroup, which then sees what all its threads wrote to shared memory."""

    @mosaic_types.inline_mgpu()
    def wait(_):
        utils.warpgroup_barrier()

    wait()


def store_chunk(values, out_ref, chunk, layout):
    """Stores 16-bit values [n] as elements chunk * n and on of out_ref, in global memory and of any shape. layout: of
    `values`, WG_STRIDED with vectors of 8.
    """

    @mosaic_types.inline_mgpu(arg_types=(layout, scalar(), plgpu.RefType()))
    def store(_, values, chunk, out_ref):
        registers = list(values.registers.flat)
        first = ir_add(ir_mul(ir_scalar(chunk), 128 * len(registers)), ir_thread())
        for number, register in enumerate(registers):
            element = ir_add(first, ir_const(128 * number))
            llvm.store(register, ir_address(out_ref, element, register.type))

    store(values, chunk, out_ref)


def copies_see_stores():
    """A fence (fence.proxy.async.global) between ordinary stores to global memory and TMA copies that read it. Both
    warpgroups call it: before signalling a semaphore, and after waiting for it.
    """

    @mosaic_types.inline_mgpu()
    def fence(_):
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


# ---- bulk copies to shared memory, and barriers that they report to


def ir_chunk(ref, number, size: int, element):
    """A pointer to chunk `number` (int32) of ref, taken as a flat array of `element`, `size` a chunk. Its offset has 64
    bits.
    """
    return utils.getelementptr(utils.memref_ptr(ref), [number], ir.Type.parse(f"!llvm.array<{size} x {element}>"))


def _shared(ref, index, size: int):
    """The 32-bit shared-memory address of byte index * size of ref."""
    return ir_add(llvm.ptrtoint(ir_i32(), utils.memref_ptr(ref)), ir_mul(index, size))


def begin_barriers(full_smem):
    """Initialises the mbarriers of `copy_chunk`, int32[2 * barriers] in shared memory. The first warpgroup must call
    it. Its first thread may use them at once, others after the next program_barrier.
    """

    @mosaic_types.inline_mgpu(arg_types=(plgpu.RefType(),))
    def begin(_, full_smem):
        thread = arith.index_castui(ir_i32(), gpu.thread_id(gpu.Dimension.x))
        (words,) = ir.MemRefType(full_smem.type).shape
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, ir_const(0))):
            for number in range(words // 2):
                address = _shared(full_smem, ir_const(number), 8)
                utils.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", address, has_side_effects=True)
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    begin(full_smem)


def program_barrier():
    """A barrier of all threads of the program, which then see what all wrote to shared memory."""

    @mosaic_types.inline_mgpu()
    def wait(_):
        gpu.barrier()

    wait()


def copy_chunk(sources, slots, sizes, full_smem, number, slot):
    """Starts an asynchronous copy of one chunk of each of `sources` to shared memory. All threads of a warpgroup call
    it, and the first does the work.

      sources: in global memory, read as bytes.
      slots: for each source a shared array of several slots, each for a chunk.
      sizes: bytes of a chunk of each source, multiples of 16.
      full_smem: barriers from `begin_barriers`, one a slot, complete when all chunks have arrived.
      number, slot: int32[], the chunk's number in the sources, and the slot, whose previous chunk must have been read.
    """
    refs = (*sources, *slots, full_smem)

    @mosaic_types.inline_mgpu(arg_types=(scalar(), scalar(), *(plgpu.RefType() for _ in refs)))
    def copy(_, number, slot, *refs):
        number, slot = ir_scalar(number), ir_scalar(slot)
        sources, slots = refs[: len(sizes)], refs[len(sizes) : -1]
        byte = ir.IntegerType.get_signless(8)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, ir_thread(), ir_const(0))):
            full = _shared(refs[-1], slot, 8)
            expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {sum(sizes)};"
            utils.inline_ptx(expect, full, has_side_effects=True)
            for source, target, size in zip(sources, slots, sizes, strict=True):
                utils.inline_ptx(
                    f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];",
                    _shared(target, slot, size),
                    ir_chunk(source, number, size, byte),
                    full,
                    has_side_effects=True,
                )

    copy(number, slot, *refs)


def wait_for_chunk(full_smem, slot, parity):
    """Waits in each calling thread for a `copy_chunk` to slot `slot` (int32[]). parity: int32[], 0 for the first,
    third, ... copy to this slot, else 1. full_smem: barriers, one for each slot.
    """

    @mosaic_types.inline_mgpu(arg_types=(scalar(), scalar(), plgpu.RefType()))
    def wait(_, slot, parity, full_smem):
        utils.inline_ptx(
            "{ .reg .pred there; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; "
            "@!there bra again_${:uid}; }",
            _shared(full_smem, ir_scalar(slot), 8),
            ir_scalar(parity),
            has_side_effects=True,
        )

    wait(slot, parity, full_smem)
