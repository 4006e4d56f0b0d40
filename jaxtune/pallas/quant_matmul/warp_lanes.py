"""What line_matmul.py does lane by lane where each warp has lines of its own; see lanes.py."""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from jaxtune.pallas.quant_matmul.lanes import (
    SCALAR,
    _add,
    _address,
    _const,
    _i32,
    _item,
    _mul,
    _product,
    _scalar,
    _shift_right,
    _vector,
    _words,
)
from jaxtune.pallas.quant_matmul.line_lanes import _fragment_row

_CODES = 16 * 128  # bytes of a unit: a line of each of 16 rows
_NESTED = 64  # where the nested absmax are behind quantised absmax
UNIT = _CODES + 256  # with the absmax of its 64 blocks, and the nested absmax of its rows


class _Units:
    """A warp's units, in the order in which it takes them: of each of its lines, 16 rows after another.

    first_line: the program's; end: one past its last; warps: of the program, which take lines in turns.
    """

    def __init__(self, refs, ring_smem, first_row, first_line, end, warps: int):
        self.codes, self.absmax, *self.nested = refs
        self.ring = ring_smem
        _, self.stages, _ = ir.MemRefType(ring_smem.type).shape
        self.warps = warps
        thread = arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x))
        warp = _shift_right(thread, 5)
        self.lane = arith.andi(thread, _const(31))
        self.first_row = _scalar(first_row)
        self.first_line = _add(_scalar(first_line), warp)
        left = _add(arith.subi(_scalar(end), self.first_line), _const(warps - 1))
        self.lines = arith.divui(arith.maxsi(left, _const(0)), _const(warps))
        self.slots = _mul(warp, self.stages * UNIT)
        self.last = arith.subi(_scalar(end), _const(1))

    def touch(self, x_ref, step):
        """Brings x of the warp's line number `step` into the L2; nobody waits for it."""
        tokens, columns = ir.MemRefType(x_ref.type).shape
        line = arith.minui(_add(self.first_line, _mul(step, self.warps)), self.last)
        for first in range(0, 16 * tokens, 32):  # sectors of 32 bytes
            number = arith.minui(_add(self.lane, _const(first)), _const(16 * tokens - 1))
            at = _add(_mul(_shift_right(number, 4), columns), _mul(line, 256), _mul(arith.andi(number, _const(15)), 16))
            pointer = llvm.addrspacecast(llvm.PointerType.get(1), _address(x_ref, at, ir.IntegerType.get_signless(16)))
            utils.inline_ptx("prefetch.global.L2 [$0];", pointer)

    def start(self, slot, step, group):
        """Copies 16 rows of the warp's line number `step`, its rows from 16 group on, to byte `slot` of the ring; one
        group of copies, which is empty if there is no such line."""
        with utils.when(arith.cmpi(arith.CmpIPredicate.slt, step, self.lines)):
            line = _add(self.first_line, _mul(step, self.warps))
            self._codes(slot, line, group)
            self._absmax(slot, line, group)
        nvvm.cp_async_commit_group()

    def _copy(self, ref, index, element, slot, size: int):
        pointer = llvm.addrspacecast(llvm.PointerType.get(1), _address(ref, index, element))
        kind = "cg" if size == 16 else "ca"
        target = _address(self.ring, slot, ir.IntegerType.get_signless(8))
        nvvm.cp_async_shared_global(target, pointer, size, ir.Attribute.parse(f"#nvvm.load_cache_modifier<{kind}>"))

    def _codes(self, slot, line, group):
        """Of four rows a whole line at once. The 16-byte pieces of a row are exchanged as by a 128-byte swizzle."""
        columns = ir.MemRefType(self.codes.type).shape[1]
        row, piece = _shift_right(self.lane, 3), arith.andi(self.lane, _const(7))
        source = _add(_mul(_add(self.first_row, row, _mul(group, 16)), columns), _mul(line, 128), _mul(piece, 16))
        for four in range(4):
            within = _mul(arith.xori(piece, _add(row, _const(4 * (four % 2)))), 16)
            target = _add(slot, _mul(row, 128), within, _const(512 * four))
            at = _add(source, _const(4 * four * columns))
            self._copy(self.codes, at, ir.IntegerType.get_signless(8), target, 16)

    def _absmax(self, slot, line, group):
        """A lane has the four absmax of a row's line; of quantised ones, another lane their nested absmax."""
        absmax_type = ir.MemRefType(self.absmax.type)
        blocks, element = absmax_type.shape[1], absmax_type.element_type
        row = arith.andi(self.lane, _const(15))
        source = _add(_mul(_add(self.first_row, row, _mul(group, 16)), blocks), _mul(line, 4))
        size = 4 if self.nested else 16
        target = _add(slot, _const(_CODES))
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, self.lane, _const(16))):
            self._copy(self.absmax, source, element, _add(target, _mul(row, size)), size)
        for ref in self.nested:
            with utils.when(arith.cmpi(arith.CmpIPredicate.uge, self.lane, _const(16))):
                place = _add(target, _const(_NESTED), _mul(row, 4))
                self._copy(ref, _shift_right(source, 8), ir.F32Type.get(), place, 4)


def _next(value, step: int, first, end: int):
    """(value + step, or `first` where that is first + end; whether it is)."""
    after = _add(value, _const(step))
    at_end = arith.cmpi(arith.CmpIPredicate.eq, after, _add(first, _const(end)))
    return arith.select(at_end, first, after), at_end


def start_units(refs, ring_smem, x_ref, first_row, first_line, end, warps: int, groups: int):
    """Starts as many copies as the ring holds; then `units_product`, with the same arguments.

    refs: uint8 codes [all rows, columns / 2], absmax [all rows, blocks] and, of quantised ones, the nested absmax.
    ring_smem: uint8[warps, stages, UNIT]. The program's lines of 256 elements are those from first_line to end - 1.
    """

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, SCALAR, *(plgpu.RefType() for _ in range(2 + len(refs)))))
    def start(_, first_row, first_line, end, ring_smem, x_ref, *refs):
        units = _Units(refs, ring_smem, first_row, first_line, end, warps)
        for unit in range(units.stages):
            slot = _add(units.slots, _const(unit * UNIT))
            units.start(slot, _const(unit // groups), _const(unit % groups))
        units.touch(x_ref, _const(0))

    start(first_row, first_line, end, ring_smem, x_ref, *refs)


def units_product(refs, ring_smem, sums_smem, x_ref, table_smem, offset, first_row, first_line, end, dtype):
    """sums_smem[warp] = weight @ x^T over the warp's lines, on the tensor cores (mma.m16n8k16).

    After `start_units`. sums_smem: float32[warps, g, n, 32, 4], for g times 16 rows and n times 8 tokens: what each
    lane has of a product, as in line_lanes.line_product. x_ref: [tokens, columns], 16-bit; table_smem: uint32[256, 64]:
    pairs of elements, the map of quantised absmax; offset: float32, or None. Nothing here is shared by warps.

    The loop is over 16 rows, and not written out, because a program that reads megabytes but once cannot wait for
    instructions; so sums are in shared memory (by count, 2 of 112 wavefronts of a unit for one token, 8 for eight).
    """
    tokens = x_ref.shape[0]
    warps, groups, widths = sums_smem.shape[:3]
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    scalars = [first_row, first_line, end, *([] if offset is None else [offset])]

    @plgpu.inline_mgpu(arg_types=(tuple(SCALAR for _ in scalars), *(plgpu.RefType() for _ in range(4 + len(refs)))))
    def product(_, scalars, ring_smem, sums_smem, x_ref, table_smem, *refs):
        f32, i32, i8 = ir.F32Type.get(), _i32(), ir.IntegerType.get_signless(8)
        two, four = ir.VectorType.get((2,), i32), ir.VectorType.get((4,), i32)
        units = _Units(refs, ring_smem, *scalars[:3], warps)
        columns = ir.MemRefType(x_ref.type).shape[1]
        warp = _shift_right(arith.index_castui(i32, gpu.thread_id(gpu.Dimension.x)), 5)
        group, quad = _shift_right(units.lane, 2), arith.andi(units.lane, _const(3))
        own_column = _mul(units.lane, 4)
        row = _fragment_row()
        has_tokens = [
            arith.cmpi(arith.CmpIPredicate.ult, _add(_mul(quad, 2), _const(8 * width)), _const(tokens))
            for width in range(widths)
        ]
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))

        def entry(word, byte: int, column: int):
            """Of the table's row that a byte of `word` names, this lane's column, from `column` on."""
            place = utils.inline_ptx(
                "prmt.b32 $0, $1, $2, $3;", word, own_column, _const(0x7604 | byte << 4), result_types=i32
            )
            return llvm.load(i32, _address(table_smem, _add(place, _const(4 * column)), i8))

        def right_sides(line):
            """x of a line: words by [width][block]."""
            found = []
            for width in range(widths):
                token = arith.minui(_add(group, _const(8 * width)), _const(tokens - 1))
                at = _add(_mul(token, columns), _mul(line, 256), _mul(quad, 16))
                found.append([])
                for block in range(4):
                    source = _address(x_ref, _add(at, _const(64 * block)), ir.IntegerType.get_signless(16))
                    halves = [llvm.load(four, utils.getelementptr(source, [half], four)) for half in range(2)]
                    found[-1].append([word for half in halves for word in _words(half, 4)])
            return found

        def scales_of(slot):
            """float32 absmax by [half][block], of this lane's rows of a unit."""
            found = []
            for half in range(2):
                place = _add(row, _const(8 * half))
                if not units.nested:
                    at = _add(slot, _const(_CODES), _mul(place, 16))
                    values = llvm.load(ir.VectorType.get((4,), f32), _address(units.ring, at, i8))
                    found.append([_item(values, block) for block in range(4)])
                    continue
                word = llvm.load(i32, _address(units.ring, _add(slot, _const(_CODES), _mul(place, 4)), i8))
                at = _add(slot, _const(_CODES + _NESTED), _mul(place, 4))
                factor = llvm.load(f32, _address(units.ring, at, i8))
                values = [arith.bitcast(f32, entry(word, block, 32)) for block in range(4)]
                found.append([arith.addf(_product(value, factor), _scalar(scalars[3])) for value in values])
            return found

        def codes_of(slot):
            """This lane's eight bytes by [block][half], two words each."""
            words = []
            for block in range(4):
                within = arith.xori(_add(_mul(quad, 8), _const(32 * block)), _mul(row, 16))
                at = _add(slot, _mul(row, 128), within)
                words.append([])
                for half in range(2):
                    address = _address(units.ring, _add(at, _const(8 * 128 * half)), i8)
                    words[-1].append(_words(llvm.load(two, address), 2))
            return words

        def add_products(group, words, scales, rights):
            """To the warp's sums, those of a unit."""
            places, sums = [], []
            for width in range(widths):
                at = _mul(_add(_mul(_add(_mul(warp, groups), group), widths), _const(width)), 32)
                # Lanes whose tokens are not there read with the first of their quad, and keep nothing.
                lane = arith.select(has_tokens[width], units.lane, arith.andi(units.lane, _const(28)))
                places.append(_address(sums_smem, _mul(_add(at, lane), 4), f32))
                kept = llvm.load(ir.VectorType.get((4,), f32), places[-1])
                sums.append([_item(kept, index) for index in range(4)])
            for block in range(4):
                products = [[zero] * 4 for _ in range(widths)]
                for step in range(4):
                    bytes_ = [2 * (step % 2), 2 * (step % 2) + 1]
                    left = [entry(words[block][half][step // 2], byte, 0) for byte in bytes_ for half in range(2)]
                    for width in range(widths):
                        products[width] = utils.inline_ptx(
                            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
                            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                            *left,
                            *rights[width][block][2 * step : 2 * step + 2],
                            *products[width],
                            result_types=(f32,) * 4,
                            convergent=True,
                        )
                for width in range(widths):
                    for index in range(4):
                        sums[width][index] = utils.inline_ptx(
                            "fma.rn.f32 $0, $1, $2, $3;",
                            products[width][index],
                            scales[index // 2][block],
                            sums[width][index],
                            result_types=f32,
                        )
            for width in range(widths):
                with utils.when(has_tokens[width]):
                    llvm.store(_vector(sums[width]), places[width])

        for number in range(groups * widths):
            at = _mul(_add(_mul(warp, groups * widths * 32), units.lane, _const(number * 32)), 4)
            llvm.store(_vector([zero] * 4), _address(sums_smem, at, f32))
        ahead = [_const(units.stages // groups), _const(units.stages % groups)]  # of the next copy, line and rows
        lines = scf.ForOp(_const(0), units.lines, _const(1), [units.slots, *ahead])
        with ir.InsertionPoint(lines.body):
            rights = right_sides(_add(units.first_line, _mul(lines.induction_variable, warps)))
            units.touch(x_ref, _add(lines.induction_variable, _const(1)))
            rows = scf.ForOp(_const(0), _const(groups), _const(1), list(lines.inner_iter_args))
            with ir.InsertionPoint(rows.body):
                slot, later, later_group = rows.inner_iter_args
                nvvm.cp_async_wait_group(units.stages - 1)
                nvvm.bar_warp_sync(_const(-1))  # the other lanes' copies too
                words, scales = codes_of(slot), scales_of(slot)
                nvvm.bar_warp_sync(_const(-1))  # all have read it
                units.start(slot, later, later_group)
                add_products(rows.induction_variable, words, scales, rights)
                slot, _ = _next(slot, UNIT, units.slots, units.stages * UNIT)
                later_group, is_line = _next(later_group, 1, _const(0), groups)
                later = arith.select(is_line, _add(later, _const(1)), later)
                scf.yield_([slot, later, later_group])
            scf.yield_(list(rows.results))

    product(tuple(scalars), ring_smem, sums_smem, x_ref, table_smem, *refs)


def place_of_sum(sums_smem, token, row):
    """Number of the element of warp 0 in the sums of `units_product`."""
    _, _, widths, _, _ = ir.MemRefType(sums_smem.type).shape
    eighth, pair = arith.andi(row, _const(7)), arith.andi(_shift_right(token, 1), _const(3))
    group = arith.ori(_shift_right(eighth, 1), _mul(arith.andi(eighth, _const(1)), 4))  # see line_lanes._fragment_row
    product = _add(_mul(_shift_right(row, 4), widths), _shift_right(token, 3))
    within = _add(_mul(arith.andi(_shift_right(row, 3), _const(1)), 2), arith.andi(token, _const(1)))
    return _add(_mul(_add(_mul(product, 32), _mul(group, 4), pair), 4), within)
