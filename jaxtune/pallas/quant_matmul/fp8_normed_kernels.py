"""The Triton kernel of fp8_normed.py."""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import LEAST_SCALE, computed, inverse_of, larger, scale_of


@triton.jit
def _at_least(scale):
    """At least LEAST_SCALE; NaN stays."""
    return tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)


@triton.jit
def _by_eight(wide, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """[BLOCK, COLUMNS / 8, 8], whose last axis is what a thread has."""
    return tl.reshape(wide, [BLOCK, COLUMNS // 8, 8])


@triton.jit
def normed_to_fp8_kernel(
    x,
    factors,
    a,
    codes,
    scales,
    inner,
    inverses,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes the RMS norm of BLOCK rows times `factors`, rounds it from float32 to e4m3, and multiplies it by a thin
    array. Grid: (ROWS / BLOCK, rounded up,).

    The inverse root mean square is a factor of a row's scales and product, and of no code, so with BLOCKS numbers are
    read once. Else they are read a second time, from the last column to the first: the last ones are still in a cache.

      x, codes: bfloat16[ROWS, SIZE], e4m3[ROWS, SIZE]. factors: float32[SIZE]. EPS: added to the mean square.
      a: bfloat16[RANK, SIZE], with `factors` in it; not read if WIDTH is 0.
      scales: float32[ROWS], or with BLOCKS [SIZE / 128, ROWS] (COLUMNS, read at once, is then 128).
      inner, inverses: [ROWS, RANK], and float32[ROWS], inverse root mean squares.
      WIDTH: a power of two of at least 16 and RANK, or 0.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    real_rows = rows < ROWS
    numbers = tl.arange(0, COLUMNS)[None, :]
    columns = tl.broadcast_to(numbers, [BLOCK, COLUMNS])  # factors are loaded in the layout of the rows
    ranks = tl.arange(0, max(WIDTH, 1))
    lanes = tl.arange(0, 16)[None, :]  # of the threads that have a row
    squares = tl.zeros([BLOCK, COLUMNS // 8], tl.float32)
    magnitudes = tl.zeros([BLOCK, COLUMNS // 8], tl.float32)
    sums = tl.zeros([BLOCK, max(WIDTH, 1)], tl.float32)
    block_scales = ()  # the scales of blocks, of which each of these threads has some
    if BLOCKS:
        for _index in tl.static_range((SIZE // 128 + 15) // 16):
            block_scales = block_scales + (tl.zeros([BLOCK, 16], tl.float32),)
    for start in range(0, SIZE, COLUMNS):
        offsets = rows * SIZE + (start + numbers)
        factor = tl.load(factors + start + columns)
        number = tl.load(x + offsets, mask=real_rows, other=0.0)
        if WIDTH > 0:
            side = tl.load(a + ranks[:, None] * SIZE + (start + numbers), mask=(ranks < RANK)[:, None], other=0.0)
            sums = tl.dot(number, tl.trans(side), sums)
        wide = number.to(tl.float32)
        squares += tl.sum(_by_eight(wide * wide, BLOCK, COLUMNS), 2)
        wide = wide * factor.to(tl.float32)
        largest = tl.reduce(_by_eight(tl.abs(wide), BLOCK, COLUMNS), 2, larger)
        if BLOCKS:
            scale = scale_of(tl.reduce(largest, 1, larger, keep_dims=True))
            updated_scales = ()
            for index in tl.static_range(len(block_scales)):
                updated_scales = updated_scales + (
                    tl.where(lanes == start // 128 - 16 * index, scale, block_scales[index]),
                )
            block_scales = updated_scales
            # As many codes a thread as it has numbers of x, which it would read in halves of sectors otherwise.
            target = codes + tl.max_contiguous(offsets, [1, 8])
            tl.store(target, (wide * inverse_of(scale)).to(codes.dtype.element_ty), mask=real_rows)
        else:
            magnitudes = larger(magnitudes, largest)
        if WIDTH > 0:
            sums = computed(sums)
    inverse = tl.rsqrt(tl.sum(squares, 1) * (1.0 / SIZE) + EPS)[:, None]
    tl.store(inverses + rows, inverse, mask=real_rows)
    if WIDTH > 0:
        product = (sums * inverse).to(inner.dtype.element_ty)
        tl.store(inner + rows * RANK + ranks[None, :], product, mask=real_rows & (ranks < RANK)[None, :])
    if BLOCKS:
        for index in tl.static_range(len(block_scales)):
            block = 16 * index + lanes
            mask = real_rows & (block < SIZE // 128)
            tl.store(scales + block * ROWS + rows, _at_least(block_scales[index] * inverse), mask=mask)
    else:
        scale = scale_of(tl.reduce(magnitudes, 1, larger, keep_dims=True))
        tl.store(scales + rows, _at_least(scale * inverse), mask=real_rows)
        inverse_scale = inverse_of(scale)
        following = tl.load(x + rows * SIZE + (SIZE - COLUMNS + numbers), mask=real_rows, other=0.0)
        for back in range(0, SIZE, COLUMNS):
            start = SIZE - COLUMNS - back
            number, offsets = following, rows * SIZE + (start + numbers)
            following = tl.load(x + offsets - COLUMNS, mask=real_rows & (numbers < start), other=0.0)
            wide = number.to(tl.float32) * tl.load(factors + start + columns).to(tl.float32)
            target = codes + tl.max_contiguous(offsets, [1, 8])
            tl.store(target, (wide * inverse_scale).to(codes.dtype.element_ty), mask=real_rows)
