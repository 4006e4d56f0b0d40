"""What Triton kernels of several operations share. Scales and codes in e4m3 equal those of FP8.encode."""

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
    """formats.fp8.scale_of for the largest magnitudes of float32 numbers."""
    scale = largest * (1.0 / LARGEST)
    return tl.where(largest < LEAST_SCALE, 1.0, tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale))


@triton.jit
def scales_of_rows(magnitudes):
    """The scale of each row of magnitudes; the largest is found among their bits as integers, where NaN is largest."""
    largest = tl.max(magnitudes.to(tl.int32, bitcast=True), 1, keep_dims=True).to(tl.float32, bitcast=True)
    return scale_of(largest)


@triton.jit
def codes_of(numbers, scale, codes):
    """Numbers over their scales, in the dtype of `codes`. A scale is normal or not finite, so multiplying by its
    reciprocal gives a division's bits, in one instruction and not three.
    """
    quotient = numbers / scale if INTERPRETED else numbers * (1.0 / scale)
    return quotient.to(codes.dtype.element_ty)


@triton.jit
def computed(sums):
    """The sums of a product, which has ended here. Tensor cores read operands from shared memory; without a use of the
    sums in the same step of a loop they might do so in the next, when tiles read ahead are already written over an
    operand.
    """
    if INTERPRETED:
        return sums
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], tl.float32, is_pure=False, pack=1)


@triton.jit
def rounded_row(
    numbers, codes, scales, row, COUNT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes row `row` of COUNT, float32[WIDTH] with zeros from SIZE on, in e4m3: its codes [SIZE], and its scale, or
    with BLOCK, which divides SIZE, those of its blocks, [SIZE / BLOCK, COUNT].
    """
    GROUP: tl.constexpr = BLOCK if BLOCK else WIDTH
    groups = tl.reshape(numbers, [WIDTH // GROUP, GROUP])
    scale = scales_of_rows(tl.abs(groups))
    columns = tl.arange(0, WIDTH // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + row * SIZE + columns, codes_of(groups, scale, codes), mask=columns < SIZE)
    group = tl.arange(0, WIDTH // GROUP)[:, None]
    tl.store(scales + group * COUNT + row, scale, mask=group * GROUP < SIZE)


@triton.jit
def of_three(number, first, second, third, COUNT: tl.constexpr):
    """What belongs to the weight `number` of COUNT, up to three: pointers, or scalars of one type."""
    chosen = first
    if COUNT > 1:
        if number == 1:
            chosen = second
    if COUNT > 2:
        if number == 2:
            chosen = third
    return chosen


@triton.jit
def number_of_three(number, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr, COUNT: tl.constexpr):
    """of_three of int32 constants."""
    return of_three(
        number, tl.full([], first, tl.int32), tl.full([], second, tl.int32), tl.full([], third, tl.int32), COUNT
    )
