"""The bodies of the Triton kernels of `normed_heads` (triton.py): a head is normed and rotated, and its gradient is
rotated back and taken through the norm, in registers. The halves of a head, which the rotation needs apart, are apart
from the beginning."""

import triton
import triton.language as tl


@triton.jit
def _halves(array, places, real, HALF: tl.constexpr):
    """Loads both halves of heads, float32, 0 where the mask `real` is False. places: where the numbers of the first
    half lie in `array`; those of the second lie HALF behind them."""
    low = tl.load(array + places, mask=real, other=0.0).to(tl.float32)
    high = tl.load(array + HALF + places, mask=real, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _factors(weight, OFFSET: tl.constexpr, FLOAT32: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """The factors of a norm for both halves of a head, float32[1, HALF] each. They are the weight, [2 HALF], with
    OFFSET added if FLOAT32 is 1, and otherwise rounded to DTYPE."""
    half = tl.arange(0, HALF)[None, :]
    low = tl.load(weight + half)
    high = tl.load(weight + HALF + half)
    if FLOAT32:
        return OFFSET + low.to(tl.float32), OFFSET + high.to(tl.float32)
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit
def _scaled(normed, factor, FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    """The product of normed numbers and a norm's factors, both float32, as the reference rounds it: to DTYPE at the
    end, and if FLOAT32 is 0, the normed numbers before. Returned as float32."""
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

    Args:
      x, out: [COUNT, 2 HALF], the heads of all tokens; HEADS after one another are of one token.
      weight: [2 HALF], that of the norm.
      cos, sin: float32[COUNT / HEADS, HALF], of the rotation's angles.
      EPS: is added to the mean square.
      OFFSET, FLOAT32: of the norm (_factors).
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    half = tl.arange(0, HALF)[None, :]
    heads = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    real, places = heads < COUNT, heads * (2 * HALF) + half
    low, high = _halves(x, places, real, HALF)
    angles = heads // HEADS * HALF + half
    c = tl.load(cos + angles, mask=real, other=0.0)
    s = tl.load(sin + angles, mask=real, other=0.0)
    by_low, by_high = _factors(weight, OFFSET, FLOAT32, HALF, DTYPE)
    inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + EPS)[:, None]
    low = _scaled(low * inverse, by_low, FLOAT32, DTYPE)
    high = _scaled(high * inverse, by_high, FLOAT32, DTYPE)
    tl.store(out + places, (low * c - high * s).to(DTYPE), mask=real)
    tl.store(out + HALF + places, (high * c + low * s).to(DTYPE), mask=real)


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
    """Computes, for STEPS tiles of BLOCK heads, the gradient of x, and the share of the weight's gradient that comes
    from these heads. It computes in float32. Grid: (COUNT / (STEPS BLOCK), rounded up,).

    Args:
      x, weight, cos, sin, and the constants that are not described here: as for normed_heads_kernel.
      dout: [COUNT, 2 HALF], the gradient of its output.
      dx: like x.
      dweight: float32[programs, 2 HALF], one share of the weight's gradient for each program.
      STEPS: the number of tiles that a program computes, one after another.
    """
    DTYPE: tl.constexpr = dx.dtype.element_ty
    by_low, by_high = _factors(weight, OFFSET, FLOAT32, HALF, DTYPE)
    half = tl.arange(0, HALF)
    # Added up over the heads of a tile at the end only, as threads must wait for each other to do so.
    sum_low = tl.zeros([BLOCK, HALF], tl.float32)
    sum_high = tl.zeros([BLOCK, HALF], tl.float32)
    for step in range(STEPS):
        heads = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)[:, None]
        real, places = heads < COUNT, heads * (2 * HALF) + half[None, :]
        low, high = _halves(x, places, real, HALF)
        first, second = _halves(dout, places, real, HALF)
        angles = heads // HEADS * HALF + half[None, :]
        c = tl.load(cos + angles, mask=real, other=0.0)
        s = tl.load(sin + angles, mask=real, other=0.0)
        dlow = first * c + second * s
        dhigh = second * c - first * s
        inverse = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + EPS)[:, None]
        low, high = low * inverse, high * inverse
        sum_low += dlow * low
        sum_high += dhigh * high
        dlow, dhigh = dlow * by_low, dhigh * by_high
        shared = ((tl.sum(dlow * low, 1) + tl.sum(dhigh * high, 1)) / (2 * HALF))[:, None]
        tl.store(dx + places, ((dlow - low * shared) * inverse).to(DTYPE), mask=real)
        tl.store(dx + HALF + places, ((dhigh - high * shared) * inverse).to(DTYPE), mask=real)
    sums = dweight + tl.program_id(0) * (2 * HALF) + half
    tl.store(sums, tl.sum(sum_low, 0))
    tl.store(sums + HALF, tl.sum(sum_high, 0))
