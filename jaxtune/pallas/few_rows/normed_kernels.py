"""The body of the Triton kernel of `normed_products` and `normed_gated_product` for a single row (normed.py): a product
with the RMS norm of the residual stream, which each program computes for itself."""

import triton
import triton.language as tl

from jaxtune.pallas.few_rows.triton_kernels import _activated_in_steps, _rounded, _sum, _times_weight


@triton.jit
def _stream(x, parts, columns, INNER: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of the residual stream at `columns`: x plus the sum of parts over the splits, rounded to DTYPE before and
    after, as float32. x: [INNER]. parts: [PARTS, INNER]."""
    real = columns < INNER
    wide = tl.load(x + columns, mask=real, other=0.0).to(tl.float32)
    return _rounded(wide + _sum(parts, columns, real, INNER, PARTS, DTYPE), DTYPE)


@triton.jit
def normed_product_kernel(
    x,
    parts,
    norm,
    first,
    second,
    third,
    added,
    out,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Writes added = x + the sum of parts, as added_norm_kernel does, and out = its RMS norm times the weights, as
    product_kernel does with one split, for a single row. Grid: (rows of the weights / ROWS,).

    Every program reads the whole row, to compute the mean square in its first iteration, when the copies of the first
    tiles of the weights are on their way. The normed numbers of each step are computed again from what the L1 cache
    holds by then. The tensor cores multiply TOKENS rows, which are all the same one.

    Args:
      x: [INNER], the residual stream.
      parts: [PARTS, INNER], the partial sums of a product; None if PARTS is 0.
      norm: [INNER], the weight of the norm.
      first, second, third: the weights, [FIRST, INNER] and so on, one below the other; with an ACTIVATION those of gate
        and up.
      added: [INNER]. out: [FIRST + SECOND + THIRD], or [FIRST] with an activation.
      WIDTH: INNER, rounded up to a power of two.
      ROWS, DEPTH, STAGES, ACTIVATION: as for product_kernel. EPS, OFFSET, FLOAT32: as for added_norm_kernel.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin = tl.program_id(0) * ROWS
    weight, row = first, begin
    if not ACTIVATION:
        if SECOND > 0:
            if begin >= FIRST:
                weight, row = second, begin - FIRST
        if THIRD > 0:
            if begin >= FIRST + SECOND:
                weight, row = third, begin - FIRST - SECOND
    rows = row + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    lines = rows.to(tl.int64)[:, None] * INNER
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    inverse = 0.0
    later = 0  # in the first iteration, as in attended_kernel
    steps: tl.constexpr = INNER // DEPTH
    depth = tl.arange(0, DEPTH)
    own, factors = tl.load(x + depth), tl.load(norm + depth)
    for step in tl.range(0, steps, num_stages=STAGES):
        if step == 0:
            every = later + tl.arange(0, WIDTH)
            wide = _stream(x, parts, every, INNER, PARTS, DTYPE)
            if begin == 0:
                tl.store(added + every, wide.to(DTYPE), mask=every < INNER)
            inverse = tl.rsqrt(tl.sum(wide * wide) / INNER + EPS)
        columns = step * DEPTH + depth
        wide = own.to(tl.float32) + _sum(parts, columns, columns < INNER, INNER, PARTS, DTYPE)
        wide = _times_weight(_rounded(wide, DTYPE) * inverse, factors, OFFSET, FLOAT32, DTYPE).to(DTYPE)
        following = (step + 1) % steps * DEPTH + depth
        own, factors = tl.load(x + following), tl.load(norm + following)
        part = tl.broadcast_to(wide[:, None], [DEPTH, TOKENS])
        total = tl.dot(tl.load(weight + lines + columns[None, :], eviction_policy="evict_first"), part, total)
        if ACTIVATION:
            up = tl.dot(tl.load(second + lines + columns[None, :], eviction_policy="evict_first"), part, up)
        later = 16
    if ACTIVATION:
        total = _activated_in_steps(_rounded(total, DTYPE), ACTIVATION, DTYPE) * _rounded(up, DTYPE)
    places = begin + tl.arange(0, ROWS)[:, None] + tl.zeros([1, TOKENS], tl.int32)
    tl.store(out + places, total.to(DTYPE), mask=(tokens == 0)[None, :])
