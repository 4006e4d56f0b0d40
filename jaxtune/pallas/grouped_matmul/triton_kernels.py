"""Triton kernels of the grouped product and of thin_pair.py."""

import triton
import triton.language as tl


@triton.jit
def _right_block(
    weight,
    expert,
    columns,
    along,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    INNER_LAST: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block [STEP, COLUMNS] of one expert's matrix, [OUTER, INNER] if INNER_LAST, else [INNER,
    OUTER]; zeros outside.
    """
    weight += expert.to(tl.int64) * (INNER * OUTER)
    if INNER_LAST:
        offsets = columns[None, :] * INNER + along[:, None]
    else:
        offsets = along[:, None] * OUTER + columns[None, :]
    if INNER % STEP == 0 and OUTER % COLUMNS == 0:
        return tl.load(weight + offsets)
    else:
        return tl.load(weight + offsets, mask=(along < INNER)[:, None] & (columns < OUTER)[None, :], other=0.0)


@triton.jit
def _rows(x, rows, along, INNER: tl.constexpr, STEP: tl.constexpr):
    """A block [ROWS, STEP] of x [., INNER], zeros from column INNER on."""
    offsets = rows.to(tl.int64)[:, None] * INNER + along[None, :]
    if INNER % STEP == 0:
        return tl.load(x + offsets)
    else:
        return tl.load(x + offsets, mask=(along < INNER)[None, :], other=0.0)


@triton.jit
def product_kernel(
    x,
    weight,
    u,
    side,
    tile_expert,
    count,
    out,
    ROW_TILES: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    INNER_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of out [rows, OUTER] = x [rows, INNER] weight[expert] + u [rows, RANK] side[expert]. Each expert's
    weight is [OUTER, INNER] if INNER_LAST is 1, else [INNER, OUTER], and its side likewise. RANK 0: no adapter.

    `count` points to the number of tiles of Groups with tokens; the tiles after them get zeros. Each is divided into
    GROUP_TILES tiles of ROWS rows. Programs are numbered in bands of BAND tiles of rows. The grid has ROW_TILES times
    ceil(OUTER / COLUMNS) programs.

      x, u: [rows, INNER], [rows, RANK]. tile_expert: int32[tiles], of Groups.
      RANK_STEP: RANK as a power of two of at least 16. STEP: summed columns at a time.
      ROWS, COLUMNS: of a program's tile.
    """
    COLUMN_TILES: tl.constexpr = (OUTER + COLUMNS - 1) // COLUMNS
    item = tl.program_id(0)
    band = item // (BAND * COLUMN_TILES)
    height = tl.minimum(ROW_TILES - band * BAND, BAND)
    index_in_band = item - band * (BAND * COLUMN_TILES)
    column_tile = index_in_band // height
    row_tile = band * BAND + index_in_band - column_tile * height
    group_tile = row_tile // GROUP_TILES
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if group_tile < tl.load(count):
        expert = tl.load(tile_expert + group_tile)
        for first in range(0, INNER, STEP):
            along = first + tl.arange(0, STEP)
            left = _rows(x, rows, along, INNER, STEP)
            right = _right_block(weight, expert, columns, along, INNER, OUTER, INNER_LAST, STEP, COLUMNS)
            total = tl.dot(left, right, total)
        if RANK > 0:
            along = tl.arange(0, RANK_STEP)
            left = _rows(u, rows, along, RANK, RANK_STEP)
            right = _right_block(side, expert, columns, along, RANK, OUTER, INNER_LAST, RANK_STEP, COLUMNS)
            total = tl.dot(left, right, total)
    values = total.to(out.dtype.element_ty)
    offsets = rows.to(tl.int64)[:, None] * OUTER + columns[None, :]
    if OUTER % COLUMNS == 0:
        tl.store(out + offsets, values)
    else:
        tl.store(out + offsets, values, mask=(columns < OUTER)[None, :])


@triton.jit
def thin_pair_kernel(
    dout,
    b,
    inner,
    order,
    starts,
    sizes,
    dinner,
    db,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Multiplies COLUMNS columns of one expert's rows of dout by its b, and, transposed, by inner, in float32 sums,
    BLOCK rows at a time. An expert's rows are divided into RANGES ranges. Grid: (OUT / COLUMNS, rounded up; EXPERTS
    RANGES).

      inner: [ROWS, INNER], of which RANK columns are used.
      order: int32[EXPERTS], the experts in the order of the programs.
      dinner: float32[blocks of columns, ROWS, RANK], what each block adds to dout b; only experts' rows.
      db: float32[RANGES, EXPERTS, OUT, RANK], what each range adds to dout^T inner.
      WIDTH: a power of two, at least 16 and RANK.
      dout, b: [ROWS, OUT] of 16 bits, [EXPERTS, OUT, RANK].
      starts, sizes: int32[EXPERTS], each expert's first row, and its rows that are not empty.
    """
    DTYPE: tl.constexpr = dout.dtype.element_ty
    expert = tl.load(order + tl.program_id(1) // RANGES).to(tl.int64)
    range_index = tl.program_id(1) % RANGES
    start, size = tl.load(starts + expert).to(tl.int64), tl.load(sizes + expert)
    steps = (size + BLOCK - 1) // BLOCK
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, WIDTH)[None, :]
    real_columns, real_ranks = columns < OUT, ranks < RANK
    sides, real = columns[:, None] * RANK + ranks, real_columns[:, None] & real_ranks
    side = tl.load(b + expert * OUT * RANK + sides, mask=real, other=0.0).to(DTYPE)
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(steps * range_index // RANGES, steps * (range_index + 1) // RANGES):
        first = start + step * BLOCK
        real_rows = number < size - step * BLOCK
        tile = tl.load(
            dout + first * OUT + number * OUT + columns[None, :], mask=real_rows & real_columns[None, :], other=0.0
        )
        thin = tl.load(inner + first * INNER + number * INNER + ranks, mask=real_rows & real_ranks, other=0.0)
        sums = tl.dot(tl.trans(tile), thin, sums)
        target = dinner + (tl.program_id(0).to(tl.int64) * ROWS + first) * RANK
        tl.store(target + number * RANK + ranks, tl.dot(tile, side), mask=real_rows & real_ranks)
    tl.store(db + (range_index.to(tl.int64) * EXPERTS + expert) * OUT * RANK + sides, sums, mask=real)
