"""Lane-level decoding of the scales of blocks. As in lanes.py, all threads of a warpgroup call each function; Pallas'
interpreter cannot run them. `codes` are stored scales, uint8, one in each register of `layout`, which the float32
results have too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import ir_const, ir_i32, ir_item, ir_load, ir_product, ir_scalar, ir_vector, scalar
from jaxtune.pallas.mosaic_modules import mgpu, plgpu, utils
from jaxtune.system.private_mlir import arith, ir


def table_scales(codes, factor, offset, map_ref, layout):
    """map[codes] * factor + offset, rounded after the product as bitsandbytes does; map_ref: float32[256].

    codes: uint8 in registers of `layout`. factor, offset: float32[].
    """

    @mosaic_types.inline_mgpu(
        arg_types=(layout, scalar(), scalar(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout),
    )
    def scales(_, codes, factor, offset, map_ref):
        factor, offset = ir_scalar(factor), ir_scalar(offset)
        return _each(codes, lambda code: arith.addf(ir_product(_entry(map_ref, code), factor), offset))

    return scales(codes, factor, offset, map_ref)


def divided_scales(codes, divisor, map_ref, layout):
    """map[codes] / divisor, correctly rounded. The divisor, its reciprocal and every quotient but 0 must be normal
    numbers.

    With PTX's div.rn, decoding NVFP4 took 1.55 times as long. Instead, quotients are corrected by the remainder
    (Markstein, https://doi.org/10.1147/rd.341.0111).

      map_ref: float32[256], in memory.
      codes: uint8 in registers of `layout`. divisor: float32[].
    """

    @mosaic_types.inline_mgpu(
        arg_types=(layout, scalar(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout),
    )
    def scales(_, codes, divisor, map_ref):
        divisor = ir_scalar(divisor)
        reciprocal, negative = _ptx("rcp.rn.f32", divisor), _ptx("neg.f32", divisor)

        def quotient(code):
            dividend = _entry(map_ref, code)
            ratio = ir_product(dividend, reciprocal)
            for _ in range(2):  # after the first time it is at most one unit in the last place off
                ratio = _ptx("fma.rn.f32", _ptx("fma.rn.f32", ratio, negative, dividend), reciprocal, ratio)
            return ratio

        return _each(codes, quotient)

    return scales(codes, divisor, map_ref)


def powers_of_two(codes, layout):
    """2^(codes - 127), MXFP4's scales. No code may be 255 (NaN in e8m0)."""

    @mosaic_types.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout))
    def powers(_, codes):
        def power(code):
            bits = arith.maxui(arith.shli(code, ir_const(23)), ir_const(1 << 22))  # 2^-127 is subnormal
            return arith.bitcast(ir.F32Type.get(), bits)

        return _each(codes, power)

    return powers(codes)


def _ptx(instruction: str, *operands):
    """The float32 result of a PTX instruction, such as "rcp.rn.f32"."""
    placeholders = ", ".join(f"${index}" for index in range(len(operands) + 1))
    return utils.inline_ptx(f"{instruction} {placeholders};", *operands, result_types=ir.F32Type.get())


def _entry(map_ref, code):
    return ir_load(map_ref, code, ir.F32Type.get())


def _each(codes, scale: Callable):
    """Maps every code, an MLIR int32, to an MLIR float32, in the same layout."""
    registers = np.empty_like(codes.registers)
    for index, register in np.ndenumerate(codes.registers):
        registers[index] = ir_vector([scale(arith.extui(ir_i32(), ir_item(register, 0)))])
    return mgpu.FragmentedArray(_registers=registers, _layout=codes.layout, _is_signed=None)
