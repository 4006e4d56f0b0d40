"""What line_matmul.py does lane by lane; see lanes.py."""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm

from jaxtune.pallas.lanes import (
    SCALAR,
    _add,
    _address,
    _const,
    _i32,
    _item,
    _load,
    _mul,
    _product,
    _products,
    _scalar,
    _shift_right,
    _thread,
    _vector,
    _words,
)


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


def span_absmax(absmax_ref, nested_ref, first_row, first_line, rows: int, together: int, warpgroups: int):
    """A thread's share of the absmax of `rows` rows over four lines of 256 elements, for `keep_span`: ([128 x 4 n] of
    absmax_ref's dtype, float32[128 x n] nested absmax or None). absmax_ref: [all rows, blocks]. Of the lines from
    first_line on, `together` are neighbours, and then come as many of each other warpgroup. Lines that are not there
    repeat the last one.
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
        line = arith.andi(_thread(), _const(3))
        others = _mul(arith.andi(line, _const(4 - together)), warpgroups - 1)
        line = arith.minui(_add(_scalar(first_line), line, others), _const(blocks // 4 - 1))
        kept, factors = [], []
        for number in range(count):
            place = arith.minui(_add(_thread(), _const(128 * number)), _const(4 * rows - 1))
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


def keep_span(share, offset, table_smem, scales_smem, rows: int):
    """scales_smem[block of the span, place of the row] = float32 absmax, of what `span_absmax` loaded.

    scales_smem: float32[16, rows and a few]. Of 16 rows, the two that a lane holds (see `line_product`) are neighbours.
    offset: float32, or None; the map of quantised absmax is in table_smem's columns 32 to 63.
    """
    arrays = [part for part in share if part is not None]
    layouts = [plgpu.Layout.WG_STRIDED(part.shape, vector) for part, vector in zip(arrays, (4, 1), strict=False)]
    if offset is not None:
        arrays, layouts = [*arrays, offset], [*layouts, SCALAR]

    @plgpu.inline_mgpu(arg_types=(*layouts, plgpu.RefType(), plgpu.RefType()))
    def keep(_, kept, *rest):
        f32 = ir.F32Type.get()
        *nested, scales_smem, table_smem = rest
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own = _add(arith.andi(_thread(), _const(31)), _const(32))
        for number, four in enumerate(kept.registers.flat):
            values = [_item(four, index) for index in range(4)]
            if nested:
                offset, factor = _scalar(nested[1]), _item(nested[0].registers.flat[number], 0)
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

    keep(*arrays, scales_smem, table_smem)


def line_product(acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem, transforms, dtype):
    """acc + one line's part of weight @ x^T, on the tensor cores (mma.m16n8k16).

    codes_smem: uint8[16 g, 128 n], rows of the weight by n lines of 256 elements, tiled and swizzled by `transforms`;
    of number `line` the first of four warps takes the first block of 64, and so on. x_smem: [tokens, n, 256], 16-bit;
    scales_smem: of `keep_span`, from its block `first_scale`; table_smem: uint32[256, 64], of which a lane reads its
    own column.

    A lane has 8 bytes of a row and block: which of a product's k a lane holds does not matter as long as x is held
    alike, so the lane's 16 elements of x are neighbours too. Each block's sum is scaled in float32.

    acc: float32[512 g n], of n times 8 tokens: a register of four for each 16 rows and 8 tokens. The first two are for
    tokens 2 q and 2 q + 1 and a row r of the first 8, the others for row r + 8 (quad q, r: `_fragment_row`).
    """
    layout = plgpu.Layout.WG_STRIDED(acc.shape, 4)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(
            layout, plgpu.RefType(transforms), *(plgpu.RefType() for _ in range(2)), SCALAR, SCALAR, plgpu.RefType()
        ),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout),
    )  # fmt: skip
    def multiply(_, acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem):
        f32, i32, i8 = ir.F32Type.get(), _i32(), ir.IntegerType.get_signless(8)
        two, four = ir.VectorType.get((2,), i32), ir.VectorType.get((4,), i32)
        eights, lines = ir.MemRefType(codes_smem.type).shape[:2]  # tiles of 8 rows by a line
        groups = eights // 2
        widths = len(acc.registers.flat) // groups
        tokens, _, elements = ir.MemRefType(x_smem.type).shape
        lane, warp = arith.andi(_thread(), _const(31)), _shift_right(_thread(), 5)
        group, quad = _shift_right(lane, 2), arith.andi(lane, _const(3))

        odd = arith.andi(group, _const(1))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, _const(0))
        rights = []
        for width in range(widths):
            token = arith.minui(_add(group, _const(8 * width)), _const(tokens - 1))
            at = _add(_mul(token, lines * elements), _mul(_scalar(line), elements), _mul(warp, 64), _mul(quad, 16))
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
        own_codes = _add(_mul(_scalar(line), 8 * 128), _mul(row, 128), within)
        own_column = _mul(lane, 4)
        stride = ir.MemRefType(scales_smem.type).shape[1]
        own_scales = _add(_mul(_add(_scalar(first_scale), warp), stride), _mul(group, 2))

        def pair(word, byte):
            """The two elements that a byte of codes stands for: its row of 256 bytes, this lane's column."""
            place = utils.inline_ptx(
                "prmt.b32 $0, $1, $2, $3;", word, own_column, _const(0x7604 | byte << 4), result_types=i32
            )
            return llvm.load(i32, _address(table_smem, place, i8))

        registers = np.empty_like(acc.registers)
        for number in range(groups):
            words = []
            for half in range(2):
                at = _add(own_codes, _const((2 * number + half) * lines * 8 * 128))
                words.append(_words(llvm.load(two, _address(codes_smem, at, i8)), 2))
            at = _add(own_scales, _const(16 * number))
            scales = llvm.load(ir.VectorType.get((2,), f32), _address(scales_smem, at, f32))
            scales = [_item(scales, half) for half in range(2)]
            products = _products(words, rights, pair, name)
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

    return multiply(acc, codes_smem, x_smem, scales_smem, line, first_scale, table_smem)


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


def store_line_sums(partial_smem, totals_smem, out_ref, split, first_row, warpgroups: int, splits: int):
    """out_ref[0, token, first_row + row] = the sum over all warps of `keep_line_sums`, of each of a cluster's `splits`
    programs, in their order; by all. totals_smem: 32-bit, at least [tokens, rows], which is overwritten.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def store(_, partial_smem, totals_smem, out_ref, split, first_row):
        f32 = ir.F32Type.get()
        out_type = ir.MemRefType(out_ref.type)
        _, tokens, all_rows = out_type.shape
        warps, _, stride = ir.MemRefType(partial_smem.type).shape
        rows = stride - 4
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))

        def for_places(first, count: int, limit: int, body):
            """body(place, its token, its row) of `count` places from `first` on, below `limit`."""
            for start in range(0, count, 128 * warpgroups):
                own = _add(thread, _const(start))
                place = own if first is None else _add(own, first)
                within = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.ult, own, _const(count)),
                    arith.cmpi(arith.CmpIPredicate.ult, place, _const(limit)),
                )
                with utils.when(within):
                    token = arith.divui(place, _const(rows))
                    body(place, token, arith.subi(place, _mul(token, rows)))

        def total_of(terms):
            return functools.reduce(arith.addf, terms)

        def own_total(token, row):
            at = _add(_mul(token, stride), row)
            return total_of(_load(partial_smem, _add(at, _const(n * tokens * stride)), f32) for n in range(warps))

        def put(token, row, total):
            at = _add(_mul(token, all_rows), _scalar(first_row), row)
            llvm.store(arith.truncf(out_type.element_type, total), _address(out_ref, at, out_type.element_type))

        places = tokens * rows
        if splits == 1:
            for_places(None, places, places, lambda _, token, row: put(token, row, own_total(token, row)))
            return

        def keep_total(place, token, row):
            llvm.store(own_total(token, row), _address(totals_smem, place, f32))

        def put_all(place, token, row):
            own = utils.memref_ptr(totals_smem)
            theirs = [utils.get_cluster_ptr(own, _const(number)) for number in range(splits)]
            put(token, row, total_of(llvm.load(f32, utils.getelementptr(there, [place], f32)) for there in theirs))

        for_places(None, places, places, keep_total)
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)
        share = -(-places // splits)
        for_places(_mul(_scalar(split), share), share, places, put_all)
        nvvm.cluster_arrive_relaxed(aligned=True)  # nobody leaves whose sums are still read; what was stored can wait
        nvvm.cluster_wait(aligned=True)

    store(partial_smem, totals_smem, out_ref, split, first_row)
