"""Parts that the Triton kernels of several operations share. Those that round to e4m3 compute the same scales and codes
as FP8.encode (pallas/formats/fp8.py)."""

import triton
import triton.language as tl

from jaxtune.pallas.formats import fp8

# Whether kernels run in Triton's interpreter, which runs no assembly.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
LARGEST: tl.constexpr = tl.constexpr(fp8.LARGEST)
LEAST_SCALE: tl.constexpr = tl.constexpr(fp8.LEAST_SCALE)


@triton.jit
def larger(one, other):
    """The larger number, NaN if one of them is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_of(x):
    """1 / x of float32 numbers from 2^-126 to 2^126: what XLA multiplies by on a GPU when it divides by x."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def scale_of(largest):
    """The scale of float32 numbers that are rounded to e4m3, whose largest magnitudes are given, as
    formats.fp8.scale_of has it."""
    scale = largest * (1.0 / LARGEST)
    return tl.where(largest < LEAST_SCALE, 1.0, tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale))


@triton.jit
def computed(sums):
    """The sums of a product, which has ended here. Tensor cores read its operands from shared memory; without a use of
    their sums in the same step of a loop, the compiler would let them do so in the next step, in which tiles that are
    read ahead are already written over an operand that is used otherwise too."""
    if INTERPRETED:
        return sums
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], tl.float32, is_pure=False, pack=1)
