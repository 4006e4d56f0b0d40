"""Triton kernel of `normed_stream`'s derivative: each array is read or written once."""

import triton
import triton.language as tl


@triton.jit
def normed_stream_gradient_kernel(
    x,
    weight,
    dnormed,
    stream_gradient,
    dx,
    dweight,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    PASSED: tl.constexpr,
    TRAINED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Gradient of x for STEPS tiles of BLOCK rows, and these rows' share of the weight's gradient, in float32. Grid:
    (COUNT / (STEPS BLOCK), rounded up,).

      x, dnormed, dx: [COUNT, SIZE]; dnormed: gradient of the normed x.
      weight: [SIZE]; FLOAT32: OFFSET is added; else it is rounded to x's dtype.
      stream_gradient: a gradient that is added to dx, if PASSED.
      dweight: float32[programs, SIZE], if TRAINED.
      WIDTH: SIZE as a power of two. EPS: added to the mean square.
    """
    DTYPE: tl.constexpr = dx.dtype.element_ty
    number = tl.arange(0, WIDTH)[None, :]
    column_mask = number < SIZE
    factor = tl.load(weight + number, mask=column_mask, other=0.0)
    if FLOAT32:
        factor = OFFSET + factor.to(tl.float32)
    else:
        factor = factor.to(DTYPE).to(tl.float32)
    # Added up over the rows of a tile at the end only, as threads must wait for each other to do so.
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)[:, None]
        real, offsets = (rows < COUNT) & column_mask, rows * SIZE + number
        x_tile = tl.load(x + offsets, mask=real, other=0.0)
        gradient = tl.load(dnormed + offsets, mask=real, other=0.0)
        if PASSED:
            added = tl.load(stream_gradient + offsets, mask=real, other=0.0)
        normed_x = x_tile.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(normed_x * normed_x, 1) / SIZE + EPS)[:, None]
        normed_x = normed_x * inverse
        gradient = gradient.to(tl.float32)
        if TRAINED:
            sums += gradient * normed_x
        gradient = gradient * factor
        shared = (tl.sum(gradient * normed_x, 1) / SIZE)[:, None]
        dx_tile = (gradient - normed_x * shared) * inverse
        if PASSED:
            dx_tile += added.to(tl.float32)
        tl.store(dx + offsets, dx_tile.to(DTYPE), mask=real)
    if TRAINED:
        tl.store(dweight + tl.program_id(0) * SIZE + number, tl.sum(sums, 0)[None, :], mask=column_mask)
