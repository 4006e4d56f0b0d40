"""What fused_matmul.py does lane by lane: decoding into shared memory, for the tensor cores; see lanes.py."""

# MLIR's Python bindings and Pallas' refs have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxtune.pallas.quant_matmul.lanes import (
    SCALAR,
    _add,
    _address,
    _const,
    _i32,
    _item,
    _load,
    _mul,
    _narrow,
    _product,
    _scalar,
    _shift_right,
    _thread,
    _vector,
    _words,
)


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
