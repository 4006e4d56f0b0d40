"""What the Mosaic kernels do lane by lane, where Pallas has no word for it: table look-ups, and warp-level products.

Each function here emits PTX through Pallas' `inline_mgpu`, from registers to registers (and from memory that Pallas
cannot index by lane). The interpreter cannot run it; mosaic.py has its meaning in jnp beside each call.
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
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, vector

SCALAR = plgpu.Layout.WG_SPLAT(())
ROWS_OF_A_WARP = 16  # of the weight, in the small product: the M of mma.m16n8k16
_WARPS = 4


def _i32():
    return ir.IntegerType.get_signless(32)


def _const(value: int):
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _add(*values):
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def _mul(a, b: int):
    return arith.muli(a, _const(b))


def _shift_right(value, amount: int):
    return arith.shrui(value, _const(amount)) if amount else value


def _item(value, index: int):
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def _vector(values):
    result = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for index, value in enumerate(values):
        result = vector.insert(value, result, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
    return result


def _words(value, count: int):
    """A vector register as `count` 32-bit integers."""
    both = vector.bitcast(ir.VectorType.get((count,), _i32()), value)
    return [_item(both, index) for index in range(count)]


def _thread():
    """Of its warpgroup, 0 to 127."""
    return arith.remui(arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x)), _const(128))


def _scalar(array):
    """The value of a one-element FragmentedArray."""
    value = array.registers.flat[0]
    return _item(value, 0) if isinstance(value.type, ir.VectorType) else value


def _address(ref, index, element):
    """Pointer to ref's element number `index` (int32), of MLIR type `element`."""
    return utils.getelementptr(utils.memref_ptr(ref), [index], element)


def _load(ref, index, element, result=None):
    return llvm.load(result or element, _address(ref, index, element))


def _product(a, b):
    """float32 a * b; in PTX, so that no addition after it is contracted into it."""
    return utils.inline_ptx("mul.rn.f32 $0, $1, $2;", a, b, result_types=ir.F32Type.get())


def _narrow(low, high, dtype):
    """Two float32 rounded into one 32-bit register."""
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    return utils.inline_ptx(f"cvt.rn.{name}x2.f32 $0, $1, $2;", high, low, result_types=_i32())


def block_scales(codes, nested, offset, map_ref, layout):
    """float32 map[codes] * nested + offset, in `layout` as the uint8 codes; nested, offset: float32 scalars."""

    @plgpu.inline_mgpu(
        arg_types=(layout, SCALAR, SCALAR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout),
    )
    def scales(_, codes, nested, offset, map_ref):
        f32 = ir.F32Type.get()
        nested, offset = _scalar(nested), _scalar(offset)
        found = np.empty_like(codes.registers)
        for place, register in np.ndenumerate(codes.registers):
            code = arith.extui(_i32(), _item(register, 0))
            found[place] = _vector([arith.addf(_product(_load(map_ref, code, f32), nested), offset)])
        return mgpu.FragmentedArray(_registers=found, _layout=codes.layout, _is_signed=None)

    return scales(codes, nested, offset, map_ref)


def table_values(codes, scales, table_ref, codes_layout, scales_layout, out_layout, dtype):
    """`dtype`[2 x codes]: table entries times scales. codes: uint8, four a register; scales: one a register of codes.

    The table lies across a warp's lanes, entry i in lanes i and i + 16, and a shuffle fetches an entry: of an index it
    reads the low four bits, and ignores the others.
    """

    @plgpu.inline_mgpu(
        arg_types=(codes_layout, scales_layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((2 * codes.shape[0],), dtype, out_layout),
    )
    def values(_, codes, scales, table_ref):
        f32 = ir.F32Type.get()
        entry = _load(table_ref, arith.andi(_thread(), _const(15)), f32)
        found = np.empty_like(codes.registers)
        narrow = ir.VectorType.get((8,), utils.dtype_to_ir_type(dtype))
        for place, scale in zip(np.ndindex(codes.registers.shape), scales.registers.flat, strict=True):
            (word,) = _words(codes.registers[place], 1)
            scale = _item(scale, 0)
            pairs = []
            for byte in range(4):
                both = []
                for shift in (8 * byte + 4, 8 * byte):
                    index = _shift_right(word, shift)
                    value = nvvm.shfl_sync(_const(-1), entry, index, _const(0x101F), nvvm.ShflKind.idx)
                    both.append(_product(value, scale))
                pairs.append(_narrow(*both, dtype))
            found[place] = vector.bitcast(narrow, _vector(pairs))
        return mgpu.FragmentedArray(_registers=found, _layout=out_layout.to_mgpu(), _is_signed=None)

    return values(codes, scales, table_ref)


def fill_pairs(pairs_ref, pairs_smem, warpgroups: int):
    """Copies uint32[256] into each of 32 columns of pairs_smem [256, 32]: a lane then reads its own bank."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, pairs_ref, pairs_smem):
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        four = ir.VectorType.get((4,), _i32())
        for step in range(256 * 8 // (128 * warpgroups)):
            place = _add(thread, _const(step * 128 * warpgroups))
            value = _load(pairs_ref, _shift_right(place, 3), _i32())
            llvm.store(_vector([value] * 4), _address(pairs_smem, place, four))

    fill(pairs_ref, pairs_smem)


def absmax_share(absmax_ref, nested_ref, first_row, rows: int, warpgroups: int):
    """A thread's share of the absmax of rows first_row to first_row + rows - 1, for `keep_scales`: ([128 x 4 n] of
    absmax_ref's dtype, float32[128 x n] nested absmax or None). absmax_ref: [all rows, blocks]; n: shares of four.
    """
    blocks = absmax_ref.shape[1]
    groups = rows * blocks // 4
    count = -(-groups // (128 * warpgroups))
    fours = plgpu.Layout.WG_STRIDED((128 * 4 * count,), 4)
    ones = plgpu.Layout.WG_STRIDED((128 * count,), 1)
    refs = [absmax_ref, *([] if nested_ref is None else [nested_ref])]
    results = [
        plgpu.ShapeDtypeStruct((128 * 4 * count,), absmax_ref.dtype, fours),
        *([] if nested_ref is None else [plgpu.ShapeDtypeStruct((128 * count,), jnp.float32, ones)]),
    ]

    @plgpu.inline_mgpu(arg_types=(SCALAR, *(plgpu.RefType() for _ in refs)), return_type=results)
    def load(_, first_row, absmax_ref, *nested_ref):
        f32 = ir.F32Type.get()
        absmax_type = ir.MemRefType(absmax_ref.type).element_type
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        first = _mul(_scalar(first_row), blocks)
        kept, factors = [], []
        for number in range(count):
            group = arith.minui(_add(thread, _const(number * 128 * warpgroups)), _const(groups - 1))
            source = _add(first, _mul(group, 4))
            kept.append(llvm.load(ir.VectorType.get((4,), absmax_type), _address(absmax_ref, source, absmax_type)))
            factors += [_vector([_load(ref, _shift_right(source, 8), f32)]) for ref in nested_ref]
        found = []
        for values, result in zip((kept, factors), results, strict=False):
            registers = np.empty((count,), object)
            registers[:] = values
            signed = False if result.dtype == jnp.uint8 else None
            found.append(mgpu.FragmentedArray(_registers=registers, _layout=result.layout.to_mgpu(), _is_signed=signed))
        return found

    found = load(first_row, *refs)
    return found if nested_ref is not None else (*found, None)


def keep_scales(share, nested_refs, scales_smem, blocks: int, warpgroups: int):
    """scales_smem[row, block] = float32 absmax, of what `absmax_share` loaded. nested_refs: map and offset, or none."""
    arrays = [part for part in share if part is not None]
    layouts = [plgpu.Layout.WG_STRIDED(part.shape, vector) for part, vector in zip(arrays, (4, 1), strict=False)]
    refs = [scales_smem, *nested_refs]

    @plgpu.inline_mgpu(arg_types=(*layouts, *(plgpu.RefType() for _ in refs)))
    def keep(_, kept, *rest):
        f32 = ir.F32Type.get()
        *factors, scales_smem = rest[: len(arrays)]
        nested_refs = rest[len(arrays) :]
        rows, stride = ir.MemRefType(scales_smem.type).shape
        groups = rows * blocks // 4
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        for number, four in enumerate(kept.registers.flat):
            start = number * 128 * warpgroups
            group = _add(thread, _const(start))
            if nested_refs:
                map_ref, offset_ref = nested_refs
                factor = _item(factors[0].registers.flat[number], 0)
                offset = _load(offset_ref, _const(0), f32)
                codes = [arith.extui(_i32(), _item(four, index)) for index in range(4)]
                four = _vector([arith.addf(_product(_load(map_ref, c, f32), factor), offset) for c in codes])
            row = arith.divui(group, _const(blocks // 4))
            column = _mul(arith.subi(group, _mul(row, blocks // 4)), 4)
            place = _address(scales_smem, _add(_mul(row, stride), column), f32)
            if start + 128 * warpgroups <= groups:
                llvm.store(four, place)
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, group, _const(groups))):
                    llvm.store(four, place)

    keep(*arrays, *refs)


def x_fragments(chunk, x_ref, width: int, parts: int):
    """uint32[128 x 2 n]: what each lane multiplies by in one chunk, the right sides of `small_product`, of width n.

    x_ref: [tokens, columns], 16-bit. Of eight columns of a right side, the first 8 / parts are tokens over the first
    part of a warp's elements of a row, the next ones the same tokens over the second. Tokens that are not there repeat
    the last one.
    """
    each = 8 // parts
    shape = (128 * 2 * width,)
    layout = plgpu.Layout.WG_STRIDED(shape, 4)

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout)
    )
    def load(_, chunk, x_ref):
        tokens, columns = ir.MemRefType(x_ref.type).shape
        lane = arith.andi(_thread(), _const(31))
        quad, group = arith.andi(lane, _const(3)), _shift_right(lane, 2)
        within = _add(_mul(arith.andi(quad, _const(1)), 32), _mul(_shift_right(quad, 1), 16))
        at = _add(_mul(_scalar(chunk), 512 * parts), _mul(_shift_right(_thread(), 5), 128 * parts), within)
        at = _add(at, _mul(arith.divui(group, _const(each)), 128))
        four = ir.VectorType.get((4,), _i32())
        found = []
        for block in range(2):
            for eight in range(width // 8):
                token = _add(arith.andi(group, _const(each - 1)), _const(each * eight))
                if tokens < each * (eight + 1):
                    token = arith.minui(token, _const(tokens - 1))
                source = _add(_mul(token, columns), at, _const(64 * block))
                pointer = _address(x_ref, source, ir.IntegerType.get_signless(16))
                found += [llvm.load(four, utils.getelementptr(pointer, [part], four)) for part in range(2)]
        registers = np.empty((len(found),), object)
        registers[:] = found
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=False)

    return load(chunk, x_ref)


def small_product(acc, codes, x, chunk, pairs_smem, scales_smem, layouts, dtype):
    """acc + one chunk's part of weight @ x^T, on the tensor cores (mma.m16n8k16).

    codes: uint8[16, 256 p], of each of 16 rows 512 p elements, 128 p of them a warp's. x: of `x_fragments`, of width n
    and p parts. pairs_smem: uint32[256, 32]; scales_smem: float32[16, blocks of a row and a few].

    A lane has 16 bytes of a row. Four neighbouring lanes, which a product takes for a row, have a part of 64 bytes: all
    that the warp has of the row, or half of it, a whole line of memory being its 128 bytes. Then two sets of four
    lanes are two "rows" of the product, of which each finds its part of x in half of the columns; the other half of its
    results means nothing. Within a part, lanes exchange bytes, so that a product lies within one block, whose sum is
    then scaled. Which of a product's k a lane holds does not matter, as long as x is held alike.

    acc: float32[64 p, n]. Row (s, w, i, a, h) in [p, 4, 2, 8 / p, p] and column (e, h, t) in [n / 8, p, 8 / p]: the sum
    of warp w over part h, of row (s 2 + i) 8 / p + a and token e 8 / p + t.
    """
    acc_layout, codes_layout = layouts
    parts = acc.shape[0] // 64
    x_layout = plgpu.Layout.WG_STRIDED(x.shape, 4)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(acc_layout, codes_layout, x_layout, SCALAR, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, acc_layout),
    )
    def multiply(_, acc, codes, x, chunk, pairs_smem, scales_smem):
        f32, i32 = ir.F32Type.get(), _i32()
        chunk = _scalar(chunk)
        lane = arith.andi(_thread(), _const(31))
        warp = _shift_right(_thread(), 5)
        group, quad = _shift_right(lane, 2), arith.andi(lane, _const(3))
        first_block = arith.cmpi(arith.CmpIPredicate.ult, quad, _const(2))  # of its half: whether the lane's bytes are
        own_column = _mul(lane, 4)

        def pair(word, byte):
            """The two elements that a byte of codes stands for: its row of the table, this lane's column."""
            row = arith.shli(word, _const(7)) if byte == 0 else _shift_right(word, 8 * byte - 7)
            offset = arith.ori(arith.andi(row, _const(0x7F80)), own_column)
            return llvm.load(i32, _address(pairs_smem, offset, ir.IntegerType.get_signless(8)))

        # The words of codes by [8 / p rows][block].
        held = []
        for register in codes.registers.flat:
            words = _words(register, 4)
            given = [arith.select(first_block, high, low) for low, high in zip(words[:2], words[2:], strict=True)]
            taken = [utils.shfl_bfly(word, 2) for word in given]
            held.append(
                (
                    [arith.select(first_block, own, other) for own, other in zip(words[:2], taken, strict=True)],
                    [arith.select(first_block, other, own) for own, other in zip(words[2:], taken, strict=True)],
                )
            )
        stride = ir.MemRefType(scales_smem.type).shape[1]
        part = arith.andi(group, _const(parts - 1))
        block = _add(_mul(chunk, 8 * parts), _mul(warp, 2 * parts), _mul(part, 2))
        scales = []
        for rows in range(2 * parts):
            row = _add(arith.divui(group, _const(parts)), _const(8 // parts * rows))
            both = _load(scales_smem, _add(_mul(row, stride), block), f32, ir.VectorType.get((2,), f32))
            scales.append([_item(both, index) for index in range(2)])
        sums = [
            [_item(r, 0), _item(r, 1)] for r in acc.registers.flat
        ]  # by 16 rows of products, 8 columns, half of the rows
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        widths = acc.shape[1] // 8
        x_words = iter(_words(register, 4) for register in x.registers.flat)
        for block in range(2):
            rights = [[*next(x_words), *next(x_words)] for _ in range(widths)]
            for eight in range(parts):
                words = [held[2 * eight + half][block] for half in range(2)]
                products = [[zero] * 4 for _ in range(widths)]
                for step in range(4):
                    bytes_ = [2 * (step % 2), 2 * (step % 2) + 1]
                    left = [pair(words[half][step // 2], byte) for byte in bytes_ for half in range(2)]
                    for width in range(widths):
                        products[width] = utils.inline_ptx(
                            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
                            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                            *left,
                            *rights[width][2 * step : 2 * step + 2],
                            *products[width],
                            result_types=(f32,) * 4,
                            convergent=True,
                        )
                for width in range(widths):
                    for half in range(2):
                        kept = sums[(eight * widths + width) * 2 + half]
                        for index in range(2):
                            kept[index] = utils.inline_ptx(
                                "fma.rn.f32 $0, $1, $2, $3;",
                                products[width][2 * half + index],
                                scales[2 * eight + half][block],
                                kept[index],
                                result_types=f32,
                            )
        found = np.empty_like(acc.registers)
        for index, place in enumerate(np.ndindex(found.shape)):
            found[place] = _vector(sums[index])
        return mgpu.FragmentedArray(_registers=found, _layout=acc.layout, _is_signed=None)

    return multiply(acc, codes, x, chunk, pairs_smem, scales_smem)


def store_sums(partial_smem, out_ref, first_row, dtype):
    """out_ref[token, first_row + row] = the sum of what small_product left for them; by one warpgroup.

    partial_smem: [warpgroups] of small_product's accumulators.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def store(_, partial_smem, out_ref, first_row):
        f32 = ir.F32Type.get()
        warpgroups, partial_rows, width = ir.MemRefType(partial_smem.type).shape
        tokens, rows = ir.MemRefType(out_ref.type).shape
        narrow = utils.dtype_to_ir_type(dtype)
        parts = partial_rows // 64
        each, of_a_product = 8 // parts, 16 // parts
        row, eighth = arith.andi(_thread(), _const(15)), _shift_right(_thread(), 4)
        # Row (s, i, a) stands at s 64 + (i 8 / p + a) p.
        place = _mul(arith.divui(row, _const(of_a_product)), 64)
        place = _add(place, _mul(arith.andi(row, _const(of_a_product - 1)), parts))
        for first_token in range(0, tokens, 8):
            token = _add(eighth, _const(first_token))
            column = _add(_mul(arith.divui(token, _const(each)), 8), arith.andi(token, _const(each - 1)))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, _const(tokens))):
                total = None
                for warpgroup in range(warpgroups):
                    for warp in range(_WARPS):
                        for part in range(parts):
                            above = warpgroup * partial_rows + warp * 16 + part
                            index = _add(_mul(place, width), column, _const(above * width + each * part))
                            term = _load(partial_smem, index, f32)
                            total = term if total is None else arith.addf(total, term)
                place_out = _add(_mul(token, rows), _scalar(first_row), row)
                llvm.store(arith.truncf(narrow, total), _address(out_ref, place_out, narrow))

    store(partial_smem, out_ref, first_row)


# ---- the product of a few tokens by whole lines (line_matmul.py)


def _fragment_row():
    """Which of eight neighbouring rows a lane's quad holds: two by two, so that four quads, a phase of an 8-byte read,
    meet different banks of a swizzled tile."""
    group = _shift_right(arith.andi(_thread(), _const(31)), 2)
    return arith.ori(arith.andi(_mul(group, 2), _const(7)), _shift_right(group, 2))


def fill_columns(source_ref, table_smem, first: int, warpgroups: int):
    """Copies a 32-bit source_ref [256] into each of the columns first to first + 31 of table_smem, uint32[256, 64]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, source_ref, table_smem):
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        for start in range(0, 256 * 8, 128 * warpgroups):
            # With three warpgroups the last rows are written twice.
            place = arith.minui(_add(thread, _const(start)), _const(256 * 8 - 1))
            row = _shift_right(place, 3)
            at = _add(_mul(row, 64), _mul(arith.andi(place, _const(7)), 4), _const(first))
            llvm.store(_vector([_load(source_ref, row, _i32())] * 4), _address(table_smem, at, _i32()))

    fill(source_ref, table_smem)


def span_absmax(absmax_ref, nested_ref, first_row, first_line, rows: int):
    """A thread's share of the absmax of `rows` rows over four lines of 256 elements, for `keep_span`: ([128 x 4 n] of
    absmax_ref's dtype, float32[128 x n] nested absmax or None). absmax_ref: [all rows, blocks]. Lines that are not
    there repeat the last one.
    """
    blocks = absmax_ref.shape[1]
    count = -(-4 * rows // 128)
    refs = [absmax_ref, *([] if nested_ref is None else [nested_ref])]
    results = [
        plgpu.ShapeDtypeStruct(
            (128 * 4 * count,), absmax_ref.dtype, plgpu.Layout.WG_STRIDED((128 * 4 * count,), 4)
        ),
        *(
            []
            if nested_ref is None
            else [plgpu.ShapeDtypeStruct((128 * count,), jnp.float32, plgpu.Layout.WG_STRIDED((128 * count,), 1))]
        ),
    ]  # fmt: skip

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *(plgpu.RefType() for _ in refs)), return_type=results)
    def load(_, first_row, first_line, absmax_ref, *nested_ref):
        absmax_type = ir.MemRefType(absmax_ref.type).element_type
        kept, factors = [], []
        for number in range(count):
            place = arith.minui(_add(_thread(), _const(128 * number)), _const(4 * rows - 1))
            line = _add(_scalar(first_line), arith.andi(place, _const(3)))
            line = arith.minui(line, _const(blocks // 4 - 1))
            source = _add(_mul(_add(_scalar(first_row), _shift_right(place, 2)), blocks), _mul(line, 4))
            kept.append(llvm.load(ir.VectorType.get((4,), absmax_type), _address(absmax_ref, source, absmax_type)))
            factors += [_vector([_load(ref, _shift_right(source, 8), ir.F32Type.get())]) for ref in nested_ref]
        found = []
        for values, result in zip((kept, factors), results, strict=False):
            registers = np.empty((count,), object)
            registers[:] = values
            signed = False if result.dtype == jnp.uint8 else None
            found.append(mgpu.FragmentedArray(_registers=registers, _layout=result.layout.to_mgpu(), _is_signed=signed))
        return found

    found = load(first_row, first_line, *refs)
    return found if nested_ref is not None else (*found, None)


def keep_span(share, offset_ref, table_smem, scales_smem, rows: int):
    """scales_smem[block of the span, place of the row] = float32 absmax, of what `span_absmax` loaded.

    scales_smem: float32[16, rows and a few]. Of 16 rows, the two that a lane holds (see `line_product`) are neighbours.
    offset_ref: float32[1], or None; the map of quantised absmax is in table_smem's columns 32 to 63.
    """
    arrays = [part for part in share if part is not None]
    layouts = [plgpu.Layout.WG_STRIDED(part.shape, vector) for part, vector in zip(arrays, (4, 1), strict=False)]
    refs = [scales_smem, *([] if offset_ref is None else [offset_ref, table_smem])]

    @plgpu.inline_mgpu(arg_types=(*layouts, *(plgpu.RefType() for _ in refs)))
    def keep(_, kept, *rest):
        f32 = ir.F32Type.get()
        *factors, scales_smem = rest[: len(arrays)]
        nested_refs = rest[len(arrays) :]
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own = _add(arith.andi(_thread(), _const(31)), _const(32))
        for number, four in enumerate(kept.registers.flat):
            values = [_item(four, index) for index in range(4)]
            if nested_refs:
                offset_ref, table_smem = nested_refs
                offset, factor = _load(offset_ref, _const(0), f32), _item(factors[0].registers.flat[number], 0)
                places = [_add(_mul(arith.extui(_i32(), value), 64), own) for value in values]
                values = [arith.addf(_product(_load(table_smem, at, f32), factor), offset) for at in places]
            place = _add(_thread(), _const(128 * number))
            row = _shift_right(place, 2)
            eighth = arith.andi(row, _const(7))
            group = arith.ori(_shift_right(eighth, 1), _mul(arith.andi(eighth, _const(1)), 4))
            half = arith.andi(_shift_right(row, 3), _const(1))
            at = _add(_mul(_shift_right(row, 4), 16), _mul(group, 2), half)
            at = _add(at, _mul(arith.andi(place, _const(3)), 4 * stride))

            def store(values=values, at=at):
                for index, value in enumerate(values):
                    llvm.store(value, _address(scales_smem, _add(at, _const(index * stride)), f32))

            if 128 * (number + 1) <= 4 * rows:
                store()
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, place, _const(4 * rows))):
                    store()

    keep(*arrays, *refs)


def line_product(acc, codes_smem, x_smem, scales_smem, first_scale, table_smem, transforms, dtype):
    """acc + one line's part of weight @ x^T, on the tensor cores (mma.m16n8k16).

    codes_smem: uint8[16 g, 128], rows of the weight by 256 elements, tiled and swizzled by `transforms`; the first of
    four warps takes the first block of 64, and so on. x_smem: [tokens, 256], 16-bit; scales_smem: of `keep_span`, from
    its block `first_scale`; table_smem: uint32[256, 64], of which a lane reads its own column.

    A lane has 8 bytes of a row and block: which of a product's k a lane holds does not matter as long as x is held
    alike, so the lane's 16 elements of x are neighbours too. Each block's sum is scaled in float32.

    acc: float32[512 g n], of n times 8 tokens: a register of four for each 16 rows and 8 tokens. The first two are for
    tokens 2 q and 2 q + 1 and a row r of the first 8, the others for row r + 8 (quad q, r: `_fragment_row`).
    """
    layout = plgpu.Layout.WG_STRIDED(acc.shape, 4)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(
            layout, plgpu.RefType(transforms), plgpu.RefType(), plgpu.RefType(), SCALAR, plgpu.RefType()
        ),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout),
    )  # fmt: skip
    def multiply(_, acc, codes_smem, x_smem, scales_smem, first_scale, table_smem):
        f32, i32, i8 = ir.F32Type.get(), _i32(), ir.IntegerType.get_signless(8)
        two, four = ir.VectorType.get((2,), i32), ir.VectorType.get((4,), i32)
        groups = 2 * ir.MemRefType(codes_smem.type).shape[0] // 4  # tiles of 8 rows
        widths = len(acc.registers.flat) // groups
        tokens, elements = ir.MemRefType(x_smem.type).shape
        lane, warp = arith.andi(_thread(), _const(31)), _shift_right(_thread(), 5)
        group, quad = _shift_right(lane, 2), arith.andi(lane, _const(3))

        odd = arith.andi(group, _const(1))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, _const(0))
        rights = []
        for width in range(widths):
            token = arith.minui(_add(group, _const(8 * width)), _const(tokens - 1))
            at = _add(_mul(token, elements), _mul(warp, 64), _mul(quad, 16))
            # Quads next to each other take their halves in turns: their rows are in the same banks.
            halves = [arith.xori(_mul(odd, 8), _const(8 * half)) for half in range(2)]
            found = [
                llvm.load(four, _address(x_smem, _add(at, half), ir.IntegerType.get_signless(16))) for half in halves
            ]
            first, second = (_words(each, 4) for each in found)
            low = [arith.select(is_odd, b, a) for a, b in zip(first, second, strict=True)]
            high = [arith.select(is_odd, a, b) for a, b in zip(first, second, strict=True)]
            rights.append([*low, *high])

        row = _fragment_row()
        within = arith.xori(_add(_mul(warp, 32), _mul(quad, 8)), _mul(row, 16))  # the 128-byte swizzle
        own_codes = _add(_mul(row, 128), within)
        own_column = _mul(lane, 4)
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own_scales = _add(_mul(_add(_scalar(first_scale), warp), stride), _mul(group, 2))

        def pair(word, byte):
            """The two elements that a byte of codes stands for: its row of 256 bytes, this lane's column."""
            place = utils.inline_ptx(
                "prmt.b32 $0, $1, $2, $3;", word, own_column, _const(0x7604 | byte << 4), result_types=i32
            )
            return llvm.load(i32, _address(table_smem, place, i8))

        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        registers = np.empty_like(acc.registers)
        for number in range(groups):
            words = []
            for half in range(2):
                at = _add(own_codes, _const((16 * number + 8 * half) * 128))
                words.append(_words(llvm.load(two, _address(codes_smem, at, i8)), 2))
            at = _add(own_scales, _const(16 * number))
            scales = llvm.load(ir.VectorType.get((2,), f32), _address(scales_smem, at, f32))
            scales = [_item(scales, half) for half in range(2)]
            products = [[zero] * 4 for _ in range(widths)]
            for step in range(4):
                bytes_ = [2 * (step % 2), 2 * (step % 2) + 1]
                left = [pair(words[half][step // 2], byte) for byte in bytes_ for half in range(2)]
                for width in range(widths):
                    products[width] = utils.inline_ptx(
                        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
                        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                        *left,
                        *rights[width][2 * step : 2 * step + 2],
                        *products[width],
                        result_types=(f32,) * 4,
                        convergent=True,
                    )
            for width in range(widths):
                place = number * widths + width
                kept = [_item(acc.registers.flat[place], index) for index in range(4)]
                registers.flat[place] = _vector(
                    [
                        utils.inline_ptx(
                            "fma.rn.f32 $0, $1, $2, $3;",
                            products[width][index],
                            scales[index // 2],
                            kept[index],
                            result_types=f32,
                        )
                        for index in range(4)
                    ]
                )
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return multiply(acc, codes_smem, x_smem, scales_smem, first_scale, table_smem)


def keep_line_sums(acc, partial_smem, first):
    """partial_smem[first + warp, token, row] = each warp's own sums of `line_product`.

    partial_smem: float32[all warps, tokens, rows and four]: a quad's tokens are in different banks.
    """
    layout = plgpu.Layout.WG_STRIDED(acc.shape, 4)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), SCALAR))
    def keep(_, acc, partial_smem, first):
        f32 = ir.F32Type.get()
        _, tokens, stride = ir.MemRefType(partial_smem.type).shape
        groups = (stride - 4) // 16
        widths = len(acc.registers.flat) // groups
        warp, quad = _shift_right(_thread(), 5), arith.andi(_thread(), _const(3))
        own = _add(_mul(_add(_scalar(first), warp), tokens * stride), _fragment_row())
        for width in range(widths):
            for index in range(2):
                token = _add(_mul(quad, 2), _const(8 * width + index))
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, _const(tokens))):
                    for number in range(groups):
                        register = acc.registers.flat[number * widths + width]
                        for half in range(2):
                            at = _add(own, _mul(token, stride), _const(16 * number + 8 * half))
                            llvm.store(_item(register, 2 * half + index), _address(partial_smem, at, f32))

    keep(acc, partial_smem, first)


def store_line_sums(partial_smem, out_ref, split, first_row, warpgroups: int):
    """out_ref[split, token, first_row + row] = the sum over all warps of `keep_line_sums`, in their order; by all."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def store(_, partial_smem, out_ref, split, first_row):
        f32 = ir.F32Type.get()
        out_type = ir.MemRefType(out_ref.type)
        _, tokens, all_rows = out_type.shape
        warps, _, stride = ir.MemRefType(partial_smem.type).shape
        rows = stride - 4
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        for start in range(0, tokens * rows, 128 * warpgroups):
            place = _add(thread, _const(start))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, place, _const(tokens * rows))):
                token = arith.divui(place, _const(rows))
                row = arith.subi(place, _mul(token, rows))
                total = None
                for warp in range(warps):
                    at = _add(_mul(token, stride), row, _const(warp * tokens * stride))
                    term = _load(partial_smem, at, f32)
                    total = term if total is None else arith.addf(total, term)
                if out_type.element_type != f32:
                    total = arith.truncf(out_type.element_type, total)
                at = _add(_mul(_add(_mul(_scalar(split), tokens), token), all_rows), _scalar(first_row), row)
                llvm.store(total, _address(out_ref, at, out_type.element_type))

    store(partial_smem, out_ref, split, first_row)


# ---- decoding into shared memory, for the tensor cores (fused_matmul.py)


def _swizzled(address, bytes_: int):
    """Of a byte address within a swizzled tile, whose rows of 128 bytes exchange their 16-byte chunks."""
    chunk = arith.andi(_shift_right(address, 7), _const(bytes_ // 16 - 1))
    return arith.xori(address, _mul(chunk, 16))


def unit_absmax(absmax_ref, nested_ref, first_row, first_block, rows: int):
    """absmax of each thread's unit, a row and block of 64, for `decode_units`: ([128] of absmax_ref's dtype,
    float32[128] nested absmax or None). Thread t's unit is row t mod `rows` and block t div `rows` from the first.
    """
    layout = plgpu.Layout.WG_STRIDED((128,), 1)
    blocks = absmax_ref.shape[1]
    refs = [absmax_ref, *([] if nested_ref is None else [nested_ref])]
    results = [plgpu.ShapeDtypeStruct((128,), ref.dtype, layout) for ref in refs]

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *(plgpu.RefType() for _ in refs)), return_type=results)
    def load(_, first_row, first_block, absmax_ref, *nested_ref):
        row = arith.andi(_thread(), _const(rows - 1))
        block = _shift_right(_thread(), rows.bit_length() - 1)
        place = _add(_mul(_add(_scalar(first_row), row), blocks), _scalar(first_block), block)
        values = [_load(absmax_ref, place, ir.MemRefType(absmax_ref.type).element_type)]
        values += [_load(ref, _shift_right(place, 8), ir.F32Type.get()) for ref in nested_ref]
        found = []
        for value, result in zip(values, results, strict=True):
            registers = np.empty((1,), object)
            registers[0] = _vector([value])
            signed = False if result.dtype == jnp.uint8 else None
            found.append(mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed))
        return found

    found = load(first_row, first_block, *refs)
    return found if nested_ref is not None else (*found, None)


def decode_units(codes_smem, share, nested_refs, w_smem, part, rows: int, table: np.ndarray, transforms, dtype):
    """Writes what a warpgroup decodes of a step to w_smem: bit for bit the table's entries times absmax.

    codes_smem: uint8[128, 32], a unit a row; share: of `unit_absmax`, of as many rows; nested_refs: map and offset, or
    none. w_smem: `dtype`[all rows, 64] or [rows, all columns], of which these units are number `part`.
    transforms: of codes_smem and w_smem: tiled and swizzled.

    A thread has a unit, of which all elements are one of 16 values: it makes those, and keeps their upper and their
    lower bytes in four registers each. A permute of two registers looks four of eight entries up; a third one takes
    those of the right half.
    """
    arrays = [part for part in share if part is not None]
    layout = plgpu.Layout.WG_STRIDED((128,), 1)
    refs = [codes_smem, w_smem, *nested_refs]

    @plgpu.inline_mgpu(
        arg_types=(
            *(layout for _ in arrays), *(plgpu.RefType(each) for each in transforms),
            *(plgpu.RefType() for _ in nested_refs),
        ),
    )  # fmt: skip
    def decode(_, *operands):
        f32, i32, i8 = ir.F32Type.get(), _i32(), ir.IntegerType.get_signless(8)
        four = ir.VectorType.get((4,), i32)
        given, (codes_smem, w_smem, *nested_refs) = operands[: len(arrays)], operands[len(arrays) :]
        values = [_item(array.registers.flat[0], 0) for array in given]
        scale = values[0]
        if nested_refs:
            map_ref, offset_ref = nested_refs
            entry = _load(map_ref, arith.extui(i32, scale), f32)
            scale = arith.addf(_product(entry, values[1]), _load(offset_ref, _const(0), f32))

        words = []
        for chunk in range(2):
            place = _swizzled(_add(_mul(_thread(), 32), _const(16 * chunk)), 32)
            words += _words(llvm.load(four, _address(codes_smem, place, i8)), 4)

        def permuted(a, b, selector):
            return utils.inline_ptx("prmt.b32 $0, $1, $2, $3;", a, b, selector, result_types=i32)

        entries = [_product(arith.constant(f32, ir.FloatAttr.get(f32, float(value))), scale) for value in table]
        pairs = [_narrow(entries[i], entries[i + 1], dtype) for i in range(0, 16, 2)]
        bytes_ = [
            [permuted(pairs[i], pairs[i + 1], _const(which)) for i in range(0, 8, 2)] for which in (0x6420, 0x7531)
        ]  # the lower ones, the upper ones: of four entries each
        # w_smem is tiled by 8 rows and 64 columns.
        row = arith.andi(_thread(), _const(rows - 1))
        block, blocks = _shift_right(_thread(), rows.bit_length() - 1), 128 // rows
        tile, inner = _shift_right(row, 3), arith.andi(row, _const(7))
        if blocks == 1:
            tile = _add(tile, _const(part * (rows // 8)))
        else:
            wide = ir.MemRefType(w_smem.type).shape[1]
            tile = _add(_mul(tile, wide), _const(part * blocks), block)
        target = _add(_mul(tile, 1024), _mul(inner, 128))
        for number, word in enumerate(words):
            below = arith.andi(word, _const(0x77777777))
            half = arith.ori(arith.andi(_shift_right(word, 1), _const(0x44444444)), _const(0x32103210))
            found = []
            for shift in (0, 16):
                place, which = _shift_right(below, shift), _shift_right(half, shift)
                low, high = (
                    permuted(permuted(of[0], of[1], place), permuted(of[2], of[3], place), which) for of in bytes_
                )
                # The first of two elements is in the upper half of their byte.
                found += [permuted(low, high, _const(order)) for order in (0x4051, 0x6273)]
            place = _swizzled(_add(target, _const(16 * number)), 128)
            llvm.store(_vector(found), _address(w_smem, place, i8))

    decode(*arrays, *refs)


# ---- eight bits a value (adam8.py)


def fill_table(table_ref, table_smem):
    """Copies a one-dimensional array of 32-bit values, by one warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def fill(_, table_ref, table_smem):
        (count,) = ir.MemRefType(table_smem.type).shape
        for start in range(0, count, 128):
            place = _add(_thread(), _const(start))
            if start + 128 > count:
                place = arith.minui(place, _const(count - 1))
            llvm.store(_load(table_ref, place, _i32()), _address(table_smem, place, _i32()))

    fill(table_ref, table_smem)


def warpgroup_barrier():
    """All that the warpgroup's threads wrote to shared memory is seen by all of them."""

    @plgpu.inline_mgpu()
    def wait(_):
        utils.warpgroup_barrier()

    wait()


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


def with_layout(array, shape, layout, result_layout):
    """The array in another shape and layout, in which every lane has the same elements in the same order."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, array.dtype, result_layout))
    def relabel(_, array):
        result = result_layout.to_mgpu()
        registers = array.registers.reshape(result.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=result, _is_signed=None)

    return relabel(array)


def looked_up(codes, table_smem, layout):
    """float32 table_smem[codes]; codes: uint8."""

    def entry(elements, refs):
        return _load(refs[0], arith.extui(_i32(), elements[0]), ir.F32Type.get())

    return _elementwise([codes], [table_smem], layout, jnp.float32, entry)


def adam_direction(m, v, mean_factor, root_factor, eps, layout):
    """m mean_factor / (sqrt(v) root_factor + eps), by the approximate square root and reciprocal (1 and 2 units)."""

    def direction(elements, _):
        m, v, mean_factor, root_factor = elements
        f32 = ir.F32Type.get()
        root = utils.inline_ptx("sqrt.approx.ftz.f32 $0, $1;", v, result_types=f32)
        small = arith.constant(f32, ir.FloatAttr.get(f32, eps))
        below = arith.addf(arith.mulf(root, root_factor), small)
        inverse = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", below, result_types=f32)
        return arith.mulf(arith.mulf(m, mean_factor), inverse)

    return _elementwise([m, v, mean_factor, root_factor], [], layout, jnp.float32, direction)


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
