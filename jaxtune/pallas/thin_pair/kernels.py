"""Triton kernel of `thin_pair`: reads each tile of an output's gradient once, for two products."""

import triton
import triton.language as tl


@triton.jit
def thin_pair_kernel(
    dout,
    b,
    inner,
    dinner,
    db,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Multiplies COLUMNS columns of STEPS tiles of BLOCK rows of dout by b, and, transposed, by inner, with float32
    sums. Grid: (OUT / COLUMNS, ROWS / (STEPS BLOCK)), rounded up.

      dout: [ROWS, OUT] of 16 bits; inner: [ROWS, RANK]; b: [OUT, RANK], rounded to dout's dtype.
      dinner: float32[blocks of columns, ROWS, RANK], each block's share of dout b.
      db: float32[ranges of rows, OUT, RANK], each range's share of dout^T inner.
      WIDTH: columns of the thin products, a power of two of at least 16.
    """
    DTYPE: tl.constexpr = dout.dtype.element_ty
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, WIDTH)[None, :]
    column_mask, real_ranks = columns < OUT, ranks < RANK
    b_offsets, real = columns[:, None] * RANK + ranks, column_mask[:, None] & real_ranks
    b_tile = tl.load(b + b_offsets, mask=real, other=0.0).to(DTYPE)
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        row_mask = number < ROWS - first
        tile = tl.load(
            dout + first * OUT + number * OUT + columns[None, :], mask=row_mask & column_mask[None, :], other=0.0
        )
        thin, thin_places = inner + first * RANK, number * RANK + ranks
        sums = tl.dot(tl.trans(tile), tl.load(thin + thin_places, mask=row_mask & real_ranks, other=0.0), sums)
        block_sums = dinner + (tl.program_id(0).to(tl.int64) * ROWS + first) * RANK
        tl.store(block_sums + thin_places, tl.dot(tile, b_tile), mask=row_mask & real_ranks)
    tl.store(db + tl.program_id(1).to(tl.int64) * OUT * RANK + b_offsets, sums, mask=real)
