"""Triton kernels of `normed_heads`. The halves of a head, which the rotation needs apart, are apart from the start."""

import triton
import triton.language as tl


@triton.jit
def _halves(array, offsets, real, HALF: tl.constexpr):
    """Both halves of heads, float32, 0 where `real` is False. offsets: of the first half; the second is HALF behind."""
    low = tl.load(array + offsets, mask=real, other=0.0).to(tl.float32)
    high = tl.load(array + HALF + offsets, mask=real, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _factors(weight, OFFSET: tl.constexpr, FLOAT32: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """A norm's factors for both halves of a head, float32[1, HALF] each: the weight [2 HALF] plus OFFSET."""
    half = tl.arange(0, HALF)[None, :]
    low = tl.load(weight + half)
    high = tl.load(weight + HALF + half)
    if FLOAT32:
        return OFFSET + low.to(tl.float32), OFFSET + high.to(tl.float32)
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit
def _scaled(normed, factor, FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    """float32 product as the reference rounds it: to DTYPE at the end, and unless FLOAT32, the normed numbers
    before.
    """
    if not FLOAT32:
        normed = normed.to(DTYPE).to(tl.float32)
    return (normed * factor).to(DTYPE).to(tl.float32)


@triton.jit
def normed_heads_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms and rotates BLOCK heads. Grid: (COUNT / BLOCK, rounded up,).

    x, out: [COUNT, 2 HALF]; HEADS after one another are of one token.
    cos, sin: float32[COUNT / HEADS, HALF].
    weight: [2 HALF]. EPS: added to the mean square.
    FLOAT32: 1: OFFSET is added to the weight, and only the product is rounded; 0: both factors are, too.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    half = tl.arange(0, HALF)[None, :]
    heads = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    real, offsets = heads < COUNT, heads * (2 * HALF) + half
    low, high = _halves(x, offsets, real, HALF)
    angles = heads // HEADS * HALF + half
    c = tl.load(cos + angles, mask=real, other=0.0)
    s = tl.load(sin + angles, mask=real, other=0.0)
    factor_low, factor_high = _factors(weight, OFFSET, FLOAT32, HALF, DTYPE)
    inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + EPS)[:, None]
    low = _scaled(low * inverse, factor_low, FLOAT32, DTYPE)
    high = _scaled(high * inverse, factor_high, FLOAT32, DTYPE)
    tl.store(out + offsets, (low * c - high * s).to(DTYPE), mask=real)
    tl.store(out + HALF + offsets, (high * c + low * s).to(DTYPE), mask=real)


@triton.jit
def normed_heads_gradient_kernel(
    x,
    weight,
    cos,
    sin,
    dout,
    dx,
    dweight,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Gradient of x for STEPS tiles of BLOCK heads, and these heads' share of the weight's gradient, in float32. Grid:
    (COUNT / (STEPS BLOCK), rounded up,).

      dout: [COUNT, 2 HALF], gradient of the output.
      dweight: float32[programs, 2 HALF].
      x, dx: [COUNT, 2 HALF]; HEADS after one another are of one token. cos, sin: float32[COUNT / HEADS, HALF].
      EPS: added to the mean square. FLOAT32: 1: OFFSET is added to the weight; 0: the weight is rounded to dx's dtype.
    """
    DTYPE: tl.constexpr = dx.dtype.element_ty
    factor_low, factor_high = _factors(weight, OFFSET, FLOAT32, HALF, DTYPE)
    half = tl.arange(0, HALF)
    # Added up over the heads of a tile at the end only, as threads must wait for each other to do so.
    sum_low = tl.zeros([BLOCK, HALF], tl.float32)
    sum_high = tl.zeros([BLOCK, HALF], tl.float32)
    for step in range(STEPS):
        heads = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)[:, None]
        real, offsets = heads < COUNT, heads * (2 * HALF) + half[None, :]
        low, high = _halves(x, offsets, real, HALF)
        first, second = _halves(dout, offsets, real, HALF)
        angles = heads // HEADS * HALF + half[None, :]
        c = tl.load(cos + angles, mask=real, other=0.0)
        s = tl.load(sin + angles, mask=real, other=0.0)
        dlow = first * c + second * s
        dhigh = second * c - first * s
        inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + EPS)[:, None]
        low, high = low * inverse, high * inverse
        sum_low += dlow * low
        sum_high += dhigh * high
        dlow, dhigh = dlow * factor_low, dhigh * factor_high
        shared = ((tl.sum(dlow * low, 1) + tl.sum(dhigh * high, 1)) / (2 * HALF))[:, None]
        tl.store(dx + offsets, ((dlow - low * shared) * inverse).to(DTYPE), mask=real)
        tl.store(dx + HALF + offsets, ((dhigh - high * shared) * inverse).to(DTYPE), mask=real)
    sums = dweight + tl.program_id(0) * (2 * HALF) + half
    tl.store(sums, tl.sum(sum_low, 0))
    tl.store(sums + HALF, tl.sum(sum_high, 0))
