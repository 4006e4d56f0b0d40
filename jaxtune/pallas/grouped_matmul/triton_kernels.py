"""The body of the Triton kernel of the grouped product; triton.py describes and calls it."""

import triton
import triton.language as tl


@triton.jit
def _side(
    weight,
    expert,
    columns,
    along,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    FAST: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[STEP, COLUMNS] of an expert's weight at the indices `along` the summed axis and `columns`, zero outside. The
    weight is [OUTER, INNER] if FAST (the summed axis is contiguous), else [INNER, OUTER]."""
    weight += expert.to(tl.int64) * (INNER * OUTER)
    if FAST:
        places = columns[None, :] * INNER + along[:, None]
    else:
        places = along[:, None] * OUTER + columns[None, :]
    if INNER % STEP == 0 and OUTER % COLUMNS == 0:
        return tl.load(weight + places)
    else:
        return tl.load(weight + places, mask=(along < INNER)[:, None] & (columns < OUTER)[None, :], other=0.0)


@triton.jit
def _rows(x, rows, along, INNER: tl.constexpr, STEP: tl.constexpr):
    """[ROWS, STEP] of x [., INNER] at these rows and the indices `along` the last axis; zero outside."""
    places = rows.to(tl.int64)[:, None] * INNER + along[None, :]
    if INNER % STEP == 0:
        return tl.load(x + places)
    else:
        return tl.load(x + places, mask=(along < INNER)[None, :], other=0.0)


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
    FAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    """One tile of out [rows, OUTER] = x [rows, INNER] weight[expert] + u [rows, RANK] side[expert]; weight and side
    are [E, OUTER, .] if FAST, else [E, ., OUTER]. tile_expert: the expert of each tile of Groups; `count`: the number
    of those that are not empty, each of which has GROUP_TILES tiles of ROWS rows. RANK is 0 without an adapter.

    A tile has ROWS rows and COLUMNS columns, and sums over STEP numbers at a time, over RANK_STEP for the adapter.
    Tiles are ordered in bands of BAND tiles of rows. Grid: (ROW_TILES column tiles,).
    """
    COLUMN_TILES: tl.constexpr = (OUTER + COLUMNS - 1) // COLUMNS
    item = tl.program_id(0)
    band = item // (BAND * COLUMN_TILES)
    height = tl.minimum(ROW_TILES - band * BAND, BAND)
    within = item - band * (BAND * COLUMN_TILES)
    column_tile = within // height
    row_tile = band * BAND + within - column_tile * height
    group_tile = row_tile // GROUP_TILES
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if group_tile < tl.load(count):
        expert = tl.load(tile_expert + group_tile)
        for first in range(0, INNER, STEP):
            along = first + tl.arange(0, STEP)
            left = _rows(x, rows, along, INNER, STEP)
            right = _side(weight, expert, columns, along, INNER, OUTER, FAST, STEP, COLUMNS)
            total = tl.dot(left, right, total)
        if RANK > 0:
            along = tl.arange(0, RANK_STEP)
            left = _rows(u, rows, along, RANK, RANK_STEP)
            right = _side(side, expert, columns, along, RANK, OUTER, FAST, RANK_STEP, COLUMNS)
            total = tl.dot(left, right, total)
    values = total.to(out.dtype.element_ty)
    places = rows.to(tl.int64)[:, None] * OUTER + columns[None, :]
    if OUTER % COLUMNS == 0:
        tl.store(out + places, values)
    else:
        tl.store(out + places, values, mask=(columns < OUTER)[None, :])
