"""Lane-level decoding of the scales of blocks, for kernels that decode a weight chunk by chunk (mosaic_decode.py). As
in lanes.py, all threads of a warpgroup call each function; Pallas' interpreter cannot run them. `codes` are the scales
as they are stored, uint8 in registers, one in each; `layout` (a plgpu.Layout) is their register layout, and that of the
float32 scales that are returned. table_scales decodes the quantised absmax of NF4 and FP4, table_scales or
divided_scales the scales of NVFP4, and powers_of_two those of MXFP4."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import mosaic_types
from jaxtune.pallas.lanes import SCALAR, ir_const, ir_i32, ir_item, ir_load, ir_product, ir_scalar, ir_vector
from jaxtune.system.private_mlir import arith, ir


def table_scales(codes, factor, offset, map_ref, layout):
    """Decodes scales that are indices into a table: float32 map[codes] * factor + offset, rounded after the product as
    bitsandbytes does. codes: uint8 in registers of `layout` (a plgpu.Layout), one in each; the result has the same
    layout. factor, offset: float32 scalars, the same for all codes. map_ref: float32[256] in global or shared memory.

    Chunks.values calls it for NF4 and FP4 with double quantisation (factor: the nested absmax, which all blocks of a
    chunk share), and for NVFP4 whose scales are multiplied by the tensor's scale (factor: this scale; offset: 0)."""

    @mosaic_types.inline_mgpu(
        arg_types=(layout, SCALAR, SCALAR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout),
    )
    def scales(_, codes, factor, offset, map_ref):
        factor, offset = ir_scalar(factor), ir_scalar(offset)
        return _each(codes, lambda code: arith.addf(ir_product(_entry(map_ref, code), factor), offset))

    return scales(codes, factor, offset, map_ref)


def divided_scales(codes, divisor, map_ref, layout):
    """float32 map[codes] / divisor, correctly rounded, for uint8 `codes`, one in each register, in the same `layout`
    (plgpu.Layout) as these; divisor is a float32 scalar, map_ref float32[256] in global or shared memory. The divisor,
    its reciprocal and every quotient but 0 must be normal numbers. Chunks.values computes by it the scales of an NVFP4
    weight that are divided by the tensor's scale (NVFP4.divides); decoded numbers then equal those of plain JAX.

    With PTX's div.rn for each scale, decoding NVFP4 took 1.55 times as long. Instead, the reciprocal of the divisor is
    computed once, and quotients are corrected by what is left of the dividend (Markstein,
    https://doi.org/10.1147/rd.341.0111).
    """

    @mosaic_types.inline_mgpu(
        arg_types=(layout, SCALAR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout),
    )
    def scales(_, codes, divisor, map_ref):
        divisor = ir_scalar(divisor)
        reciprocal, negative = _ptx("rcp.rn.f32", divisor), _ptx("neg.f32", divisor)

        def quotient(code):
            dividend = _entry(map_ref, code)
            found = ir_product(dividend, reciprocal)
            for _ in range(2):  # after the first time it is at most one unit in the last place off
                found = _ptx("fma.rn.f32", _ptx("fma.rn.f32", found, negative, dividend), reciprocal, found)
            return found

        return _each(codes, quotient)

    return scales(codes, divisor, map_ref)


def powers_of_two(codes, layout):
    """float32 2^(codes - 127), in the same `layout` (a plgpu.Layout) as the uint8 codes, one in each register. No code
    may be 255 (NaN in e8m0). Chunks.values decodes MXFP4's scales with it."""

    @mosaic_types.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(codes.shape, jnp.float32, layout))
    def powers(_, codes):
        def power(code):
            bits = arith.maxui(arith.shli(code, ir_const(23)), ir_const(1 << 22))  # 2^-127 is subnormal
            return arith.bitcast(ir.F32Type.get(), bits)

        return _each(codes, power)

    return powers(codes)


def _ptx(instruction: str, *operands):
    """Emits the PTX instruction of this name, such as "rcp.rn.f32", and returns its float32 result. operands: float32
    MLIR values. divided_scales calls it."""
    places = ", ".join(f"${index}" for index in range(len(operands) + 1))
    return utils.inline_ptx(f"{instruction} {places};", *operands, result_types=ir.F32Type.get())


def _entry(map_ref, code):
    """Looks up one entry of a table of scales: the MLIR float32 at index `code` (an MLIR int32: a stored scale of NF4's
    or FP4's double quantisation, or of NVFP4) of map_ref, float32[256] in global or shared memory. table_scales and
    divided_scales call it."""
    return ir_load(map_ref, code, ir.F32Type.get())


def _each(codes, scale: Callable):
    """Decodes all codes in a FragmentedArray (uint8, one in each register) with the function `scale`, which maps a code
    (an MLIR int32) to an MLIR float32. It returns the FragmentedArray of the results, in the same layout. table_scales,
    divided_scales and powers_of_two call it."""
    found = np.empty_like(codes.registers)
    for place, register in np.ndenumerate(codes.registers):
        found[place] = ir_vector([scale(arith.extui(ir_i32(), ir_item(register, 0)))])
    return mgpu.FragmentedArray(_registers=found, _layout=codes.layout, _is_signed=None)
