"""What row_matmul.py does lane by lane; see lanes.py."""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxtune.pallas.lanes import (
    SCALAR,
    _add,
    _address,
    _const,
    _i32,
    _item,
    _load,
    _mul,
    _narrow,
    _permute,
    _product,
    _scalar,
    _shift_right,
    _thread,
    _vector,
    _words,
)

SLICE = 1024  # elements of a row that a warp takes: 512 bytes of codes, 16 blocks
_HALF = SLICE // 2
_X = plgpu.Layout.WG_STRIDED((128 * 16,), 4)
_ONE = plgpu.Layout.WG_STRIDED((128,), 1)


def _warp(wg):
    return _add(_mul(_scalar(wg), 4), _shift_right(_thread(), 5))


def _lane():
    return arith.andi(_thread(), _const(31))


def _block(wg, slices: int):
    """Of a lane, and of a chunk's blocks, the number of the one whose scale it decodes: lane (row, half, quad)."""
    warp, lane = _warp(wg), _lane()
    pair, part = arith.divui(warp, _const(slices)), arith.remui(warp, _const(slices))
    row = _add(_mul(pair, 2), _shift_right(lane, 4))
    return _add(_mul(row, slices * 16), _mul(part, 16), arith.andi(lane, _const(15)))


def own_x(x_ref, wg, slices: int):
    """uint32[128 x 16]: what a lane multiplies its codes by. x_ref: [columns], 16-bit."""

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((128 * 16,), jnp.uint32, _X)
    )
    def load(_, wg, x_ref):
        part = arith.remui(_warp(wg), _const(slices))
        first = _add(_mul(part, SLICE), _mul(_lane(), 16))
        four = ir.VectorType.get((4,), _i32())
        pointers = [
            _address(x_ref, _add(first, _const(_HALF * half + 8 * eight)), ir.IntegerType.get_signless(16))
            for half in range(2)
            for eight in range(2)
        ]
        registers = np.empty((4,), object)
        registers[:] = [llvm.load(four, pointer) for pointer in pointers]
        return mgpu.FragmentedArray(_registers=registers, _layout=_X.to_mgpu(), _is_signed=False)

    return load(wg, x_ref)


def own_nested(nested_ref, chunk, wg, pairs: int, slices: int, nested_block: int):
    """float32[128]: the nested absmax of the block that a lane decodes the scale of."""

    @plgpu.inline_mgpu(
        arg_types=(SCALAR, SCALAR, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((128,), jnp.float32, _ONE)
    )
    def load(_, chunk, wg, nested_ref):
        blocks = pairs * 2 * slices * 16
        # Warps without work have numbers past the chunk's.
        own = arith.minui(_block(wg, slices), _const(blocks - 1))
        number = arith.divui(_add(_mul(_scalar(chunk), blocks), own), _const(nested_block))
        registers = np.empty((1,), object)
        registers[0] = _vector([_load(nested_ref, number, ir.F32Type.get())])
        return mgpu.FragmentedArray(_registers=registers, _layout=_ONE.to_mgpu(), _is_signed=None)

    return load(chunk, wg, nested_ref)


def multiply(x, nested, offset, place, slot, wg, refs, *, pairs: int, slices: int, dtype):
    """partial[place, warp] = the sums of a warp's two rows over its slice, by quads and rows, on the tensor cores.

    x: of own_x. nested: of own_nested, and offset: float32 scalar; or None, both. refs: codes uint8[slots, chunk],
    absmax [slots, blocks of a chunk], table uint32[256, 64], map float32[256] (None without nested), partial
    float32[places, warps, 8, 2].

    A quad of lanes has a block of each row, a lane 8 bytes of it: of each half of the slice. To the tensor cores
    (m16n8k16) the eight quads are eight rows, of which each has its own k's; the right side's column g has x at those
    of quad g. So the products' diagonal is wanted, and a lane needs x only where its own codes are. Rows 8 to 15 are
    the pair's other row.
    """
    codes, absmax, table, *maps, partial = (ref for ref in refs if ref is not None)
    values = [] if nested is None else [nested, offset]
    types = [] if nested is None else [_ONE, SCALAR]
    given = (codes, absmax, table, *maps, partial)
    name = "bf16" if dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(arg_types=(_X, SCALAR, SCALAR, SCALAR, *types, *(plgpu.RefType() for _ in given)))
    def run(_, x, place, slot, wg, *rest):
        values, (codes, absmax, table, *maps, partial) = rest[: len(types)], rest[len(types) :]
        f32, byte = ir.F32Type.get(), ir.IntegerType.get_signless(8)
        row_bytes = slices * SLICE // 2
        warp, lane, slot = _warp(wg), _lane(), _scalar(slot)
        quad = _shift_right(lane, 2)
        pair, part = arith.divui(warp, _const(slices)), arith.remui(warp, _const(slices))
        own_column = _mul(lane, 4)

        def entries(word, number):
            """The two elements that a byte of codes stands for: its row of the table, 256 bytes, this lane's column."""
            offset = _permute(word, own_column, 0x5504 | number << 4)
            return llvm.load(_i32(), _address(table, offset, byte))

        def from_lane(value, number):
            return nvvm.shfl_sync(_const(-1), value, number, _const(31), nvvm.ShflKind.idx)

        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, warp, _const(pairs * slices))):
            first = _add(_mul(slot, pairs * 2 * row_bytes), _mul(pair, 2 * row_bytes))
            first = _add(first, _mul(part, SLICE // 2), _mul(lane, 8))
            two = ir.VectorType.get((2,), _i32())
            words = [
                [_words(_load(codes, _add(first, _const(row * row_bytes + _HALF // 2 * half)), byte, two), 2)
                 for row in range(2)]
                for half in range(2)
            ]  # fmt: skip
            own = _add(_mul(slot, pairs * 2 * slices * 16), _block(wg, slices))
            if values:
                nested, offset = _item(values[0].registers.flat[0], 0), _scalar(values[1])
                code = arith.extui(_i32(), _load(absmax, own, byte))
                scale = arith.addf(_product(_load(maps[0], code, f32), nested), offset)
            else:
                scale = _load(absmax, own, f32)
            rights = [word for register in x.registers.flat for word in _words(register, 4)]
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
            # A lane holds columns 2 t and 2 t + 1 of its quad's row: the diagonal lies in lane t = quad / 2.
            odd = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(quad, _const(1)), _const(1))
            totals = []
            for row in range(2):
                terms = []
                for half in range(2):
                    here = arith.select(odd, products[half][2 * row + 1], products[half][2 * row])
                    terms.append(_product(here, from_lane(scale, _add(_const(16 * row + 8 * half), quad))))
                totals.append(arith.addf(*terms))
            diagonal = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, _const(3)), _shift_right(quad, 1))
            with utils.when(diagonal):
                (_, warps, _, _) = ir.MemRefType(partial.type).shape
                target = _add(_mul(_add(_mul(_scalar(place), warps), warp), 16), _mul(quad, 2))
                llvm.store(_vector(totals), _address(partial, target, f32))

    run(x, place, slot, wg, *values, *given)


def store_sums(partial_smem, out_ref, count, program, programs, wg, warpgroups: int, *, pairs: int, slices: int, dtype):
    """out_ref[row] = what `multiply` left for it in partial_smem, for `count` chunks: program, program + programs, ...

    By eight lanes a pair of rows, which add up slices first and then quads.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, SCALAR, SCALAR))
    def store(_, partial_smem, out_ref, count, program, programs, wg):
        f32 = ir.F32Type.get()
        places, warps, _, _ = ir.MemRefType(partial_smem.type).shape
        two = ir.VectorType.get((2,), f32)
        thread = _add(_mul(_scalar(wg), 128), _thread())
        quad = arith.andi(thread, _const(7))
        for start in range(0, places * pairs * 8, 128 * warpgroups):
            number = _shift_right(_add(thread, _const(start)), 3)
            place, pair = arith.divui(number, _const(pairs)), arith.remui(number, _const(pairs))
            # All lanes add, for they exchange; those past the end over the last one's.
            inside = arith.minui(place, _const(places - 1))
            first = _add(_mul(_add(_mul(inside, warps), _mul(pair, slices)), 16), _mul(quad, 2))
            sums = None
            for part in range(slices):
                term = _load(partial_smem, _add(first, _const(16 * part)), f32, two)
                term = [_item(term, row) for row in range(2)]
                sums = term if sums is None else [arith.addf(a, b) for a, b in zip(sums, term, strict=True)]
            assert sums is not None
            for distance in (1, 2, 4):
                sums = [arith.addf(value, utils.shfl_bfly(value, distance)) for value in sums]
            writes = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ult, place, _scalar(count)),
                arith.cmpi(arith.CmpIPredicate.eq, quad, _const(0)),
            )
            with utils.when(writes):
                chunk = _add(_scalar(program), arith.muli(place, _scalar(programs)))
                target = _address(out_ref, _add(_mul(chunk, pairs), pair), _i32())
                llvm.store(_narrow(*sums, dtype), target)

    store(partial_smem, out_ref, count, program, programs, wg)
