"""The body of the Triton kernel of `normed_stream` (triton.py): rows are taken through the norm's derivative in
registers, and each array is read or written once."""

import triton
import triton.language as tl


@triton.jit
def normed_stream_gradient_kernel(
    x,
    weight,
    dnormed,
    passed,
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
    """Computes, for STEPS tiles of BLOCK rows, the gradient of x, and the share of the weight's gradient that comes
    from these rows. It computes in float32. Grid: (COUNT / (STEPS BLOCK), rounded up,).

    Args:
      x: [COUNT, SIZE].
      weight: [SIZE], that of the norm. Its factors are the weight, with OFFSET added if FLOAT32 is 1, and otherwise
        rounded to x's dtype.
      dnormed: like x, the gradient of the normed x.
      passed: if PASSED is 1, like x, a gradient of x that is added; else it is not read.
      dx: like x.
      dweight: if TRAINED is 1, float32[programs, SIZE], one share of the weight's gradient for each program; else it is
        not written.
      WIDTH: the least power of two that is not below SIZE.
      EPS: is added to the mean square.
      STEPS: the number of tiles that a program computes, one after another.
    """
    DTYPE: tl.constexpr = dx.dtype.element_ty
    number = tl.arange(0, WIDTH)[None, :]
    within = number < SIZE
    factor = tl.load(weight + number, mask=within, other=0.0)
    if FLOAT32:
        factor = OFFSET + factor.to(tl.float32)
    else:
        factor = factor.to(DTYPE).to(tl.float32)
    # Added up over the rows of a tile at the end only, as threads must wait for each other to do so.
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)[:, None]
        real, places = (rows < COUNT) & within, rows * SIZE + number
        given = tl.load(x + places, mask=real, other=0.0)
        gradient = tl.load(dnormed + places, mask=real, other=0.0)
        if PASSED:
            added = tl.load(passed + places, mask=real, other=0.0)
        wide = given.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + EPS)[:, None]
        wide = wide * inverse
        gradient = gradient.to(tl.float32)
        if TRAINED:
            sums += gradient * wide
        gradient = gradient * factor
        shared = (tl.sum(gradient * wide, 1) / SIZE)[:, None]
        found = (gradient - wide * shared) * inverse
        if PASSED:
            found += added.to(tl.float32)
        tl.store(dx + places, found.to(DTYPE), mask=real)
    if TRAINED:
        tl.store(dweight + tl.program_id(0) * SIZE + number, tl.sum(sums, 0)[None, :], mask=within)
