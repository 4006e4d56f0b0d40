"""The bodies of the Triton kernels of `normed_heads` (triton.py): a head is normed and rotated, and its gradient is
rotated back and taken through the norm, in registers."""

import triton
import triton.language as tl


@triton.jit
def _parts(array, lines, real, HALF: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Loads heads, float32: their first and second halves of the rotated dimensions, [BLOCK, HALF] each, and the REST
    dimensions after them, [BLOCK, REST_BLOCK], 0 beyond REST.

    Args:
      array: [heads, 2 HALF + REST].
      lines: int64[BLOCK, 1], where each head begins in it.
      real: bool[BLOCK, 1], whether there is such a head; others are 0.
      REST_BLOCK: REST rounded up to a power of two, at least 1.
    """
    half = tl.arange(0, HALF)[None, :]
    low = tl.load(array + lines + half, mask=real, other=0.0).to(tl.float32)
    high = tl.load(array + lines + HALF + half, mask=real, other=0.0).to(tl.float32)
    columns = tl.arange(0, REST_BLOCK)[None, :]
    rest = tl.load(array + lines + 2 * HALF + columns, mask=real & (columns < REST), other=0.0).to(tl.float32)
    return low, high, rest


@triton.jit
def _store(array, lines, real, low, high, rest, HALF: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Stores heads of which `_parts` has such parts, rounded to the array's dtype. Its other arguments are those of
    `_parts`."""
    DTYPE: tl.constexpr = array.dtype.element_ty
    half = tl.arange(0, HALF)[None, :]
    tl.store(array + lines + half, low.to(DTYPE), mask=real)
    tl.store(array + lines + HALF + half, high.to(DTYPE), mask=real)
    if REST > 0:
        columns = tl.arange(0, REST_BLOCK)[None, :]
        tl.store(array + lines + 2 * HALF + columns, rest.to(DTYPE), mask=real & (columns < REST))


@triton.jit
def _weights(
    weight,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The factors of a norm, float32, in the parts of `_parts`: [1, HALF], [1, HALF] and [1, REST_BLOCK]. They are the
    weight, [2 HALF + REST], with OFFSET added if FLOAT32 is 1, and otherwise rounded to DTYPE."""
    half, columns = tl.arange(0, HALF)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    low = tl.load(weight + half)
    high = tl.load(weight + HALF + half)
    rest = tl.load(weight + 2 * HALF + columns, mask=columns < REST, other=0.0)
    if FLOAT32:
        return OFFSET + low.to(tl.float32), OFFSET + high.to(tl.float32), OFFSET + rest.to(tl.float32)
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32), rest.to(DTYPE).to(tl.float32)


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
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms and rotates BLOCK heads. Grid: (COUNT / BLOCK, rounded up,).

    Args:
      x, out: [COUNT, 2 HALF + REST], the heads of all tokens; HEADS after one another are of one token.
      weight: [2 HALF + REST], that of the norm.
      cos, sin: float32[COUNT / HEADS, HALF], of the rotation's angles.
      EPS: is added to the mean square.
      OFFSET, FLOAT32: of the norm (_weights).
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF + REST
    heads = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    real, lines = heads < COUNT, heads * DIM
    low, high, rest = _parts(x, lines, real, HALF, REST, REST_BLOCK)
    angles = heads // HEADS * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + angles, mask=real, other=0.0)
    s = tl.load(sin + angles, mask=real, other=0.0)
    by_low, by_high, by_rest = _weights(weight, OFFSET, FLOAT32, HALF, REST, REST_BLOCK, DTYPE)
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
    inverse = tl.rsqrt(squares / DIM + EPS)[:, None]
    low = _scaled(low * inverse, by_low, FLOAT32, DTYPE)
    high = _scaled(high * inverse, by_high, FLOAT32, DTYPE)
    rest = _scaled(rest * inverse, by_rest, FLOAT32, DTYPE)
    _store(out, lines, real, low * c - high * s, high * c + low * s, rest, HALF, REST, REST_BLOCK)


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
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The gradients of normed_heads_kernel with respect to x, and of STEPS times BLOCK heads with respect to the
    weight. All is computed in float32. Grid: (COUNT / (STEPS BLOCK), rounded up,).

    Args:
      x, weight, cos, sin: as for normed_heads_kernel, and all constants but STEPS.
      dout: [COUNT, 2 HALF + REST], the gradient of its output.
      dx: like x.
      dweight: float32[programs, 2 HALF + REST], each program's part of the weight's gradient.
    """
    DTYPE: tl.constexpr = dx.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF + REST
    by_low, by_high, by_rest = _weights(weight, OFFSET, FLOAT32, HALF, REST, REST_BLOCK, DTYPE)
    half = tl.arange(0, HALF)
    columns = tl.arange(0, REST_BLOCK)
    sum_low = tl.zeros([HALF], tl.float32)
    sum_high = tl.zeros([HALF], tl.float32)
    sum_rest = tl.zeros([REST_BLOCK], tl.float32)
    for step in range(STEPS):
        heads = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)[:, None]
        real, lines = heads < COUNT, heads * DIM
        low, high, rest = _parts(x, lines, real, HALF, REST, REST_BLOCK)
        first, second, drest = _parts(dout, lines, real, HALF, REST, REST_BLOCK)
        angles = heads // HEADS * HALF + half[None, :]
        c = tl.load(cos + angles, mask=real, other=0.0)
        s = tl.load(sin + angles, mask=real, other=0.0)
        dlow = first * c + second * s
        dhigh = second * c - first * s
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / DIM + EPS)[:, None]
        low, high, rest = low * inverse, high * inverse, rest * inverse
        sum_low += tl.sum(dlow * low, 0)
        sum_high += tl.sum(dhigh * high, 0)
        sum_rest += tl.sum(drest * rest, 0)
        dlow, dhigh, drest = dlow * by_low, dhigh * by_high, drest * by_rest
        shared = tl.sum(dlow * low, 1) + tl.sum(dhigh * high, 1) + tl.sum(drest * rest, 1)
        shared = (shared / DIM)[:, None]
        dlow = (dlow - low * shared) * inverse
        dhigh = (dhigh - high * shared) * inverse
        drest = (drest - rest * shared) * inverse
        _store(dx, lines, real, dlow, dhigh, drest, HALF, REST, REST_BLOCK)
    sums = dweight + tl.program_id(0) * DIM
    tl.store(sums + half, sum_low)
    tl.store(sums + HALF + half, sum_high)
    if REST > 0:
        tl.store(sums + 2 * HALF + columns, sum_rest, mask=columns < REST)
