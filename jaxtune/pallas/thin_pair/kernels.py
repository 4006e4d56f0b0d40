"""Triton kernel of `thin_pair`: reads each tile of an output's gradient once, for two products."""

import triton
import triton.language as tl


@triton.jit
def thin_pair_kernel(
    a,
    b,
    c,
    a_side,
    b_side,
    c_side,
    inner,
    products,
    dbs,
    ROWS: tl.constexpr,
    WIDTHS: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Multiplies COLUMNS columns of STEPS tiles of BLOCK rows of an output's gradient by its B, and, transposed, by its
    low-rank input, with float32 sums. Grid: (blocks of columns of all outputs, ranges of rows).

      a, b, c: [ROWS, width] of 16 bits, of up to three outputs.
      a_side, b_side, c_side: their B's [width, RANK], rounded to a's dtype.
      inner: low-rank inputs side by side [ROWS, outputs RANK].
      products: float32[blocks of columns, ROWS, RANK], each block's share of the product with B.
      dbs: float32[ranges of rows, TOTAL, RANK], each range's share of the transposed products.
      WIDTHS, PLACES, FIRST: each output's columns, first row of `dbs`, and first block of columns.
      WIDTH: columns of the thin products, a power of two of at least 16.
    """
    DTYPE: tl.constexpr = a.dtype.element_ty
    JOINED: tl.constexpr = RANK * len(WIDTHS)
    arrays, sides = (a, b, c), (a_side, b_side, c_side)
    source, side, width, place, first_block, thin_column = a, a_side, WIDTHS[0], 0, 0, 0
    for index in tl.static_range(1, len(WIDTHS)):
        if tl.program_id(0) >= FIRST[index]:
            source, side, width = arrays[index], sides[index], WIDTHS[index]
            place, first_block, thin_column = PLACES[index], FIRST[index], index * RANK
    columns = (tl.program_id(0) - first_block) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, WIDTH)[None, :]
    column_mask, real_ranks = columns < width, ranks < RANK
    side_offsets, real = columns[:, None] * RANK + ranks, column_mask[:, None] & real_ranks
    side_tile = tl.load(side + side_offsets, mask=real, other=0.0).to(DTYPE)
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        row_mask = number < ROWS - first
        tile = tl.load(
            source + first * width + number * width + columns[None, :], mask=row_mask & column_mask[None, :], other=0.0
        )
        thin = inner + first * JOINED + thin_column
        thin_tile = tl.load(thin + (number * JOINED + ranks), mask=row_mask & real_ranks, other=0.0)
        sums = tl.dot(tl.trans(tile), thin_tile, sums)
        block_sums = products + (tl.program_id(0).to(tl.int64) * ROWS + first) * RANK
        tl.store(block_sums + (number * RANK + ranks), tl.dot(tile, side_tile), mask=row_mask & real_ranks)
    tl.store(dbs + (tl.program_id(1).to(tl.int64) * TOTAL + place) * RANK + side_offsets, sums, mask=real)
