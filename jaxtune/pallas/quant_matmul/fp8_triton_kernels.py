"""The Triton kernel of fp8_triton.py."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(x, w, x_scale, w_scale, u, side, tile_expert, tile_sizes, out,
                   TOKENS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, RANK: tl.constexpr,
                   GROUPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   STEP: tl.constexpr, BAND: tl.constexpr):  # fmt: skip
    """One tile of out [TOKENS, OUTER] = scaled(x [TOKENS, INNER] w[e] [OUTER, INNER]^T) + u [TOKENS, RANK] side[e]
    [OUTER, RANK]^T, or without BLOCK scaled(x w[e]^T + u side[e]^T); x and w are e4m3. RANK 0: no adapter.

    BLOCK, the codes along INNER that share a scale, equals STEP; 0 means one scale for each row. If GROUPED, w, side
    and w_scale have a leading axis of experts, e is tile_expert[tile of rows], and a tile of size 0 stores zeros, as u
    is zero there.

      x_scale, w_scale: float32[TOKENS], [OUTER]; with BLOCK [INNER / BLOCK, TOKENS], [OUTER / BLOCK, INNER / BLOCK].
      tile_expert, tile_sizes: int32[tiles of rows]: expert, and rows that are not empty.
      ROWS, COLUMNS, BAND: of a program's tile; tiles of rows in a band.
    """
    ROW_TILES: tl.constexpr = (TOKENS + ROWS - 1) // ROWS
    COLUMN_TILES: tl.constexpr = OUTER // COLUMNS
    item = tl.program_id(0)
    band = item // (BAND * COLUMN_TILES)
    height = tl.minimum(ROW_TILES - band * BAND, BAND)
    index_in_band = item - band * (BAND * COLUMN_TILES)
    column_tile = index_in_band // height
    row_tile = band * BAND + index_in_band - column_tile * height
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    real_rows = rows < TOKENS
    wide_rows = rows.to(tl.int64)
    steps = INNER // STEP
    if GROUPED:
        steps = tl.where(tl.load(tile_sizes + row_tile) > 0, steps, 0)
        expert = tl.where(steps > 0, tl.load(tile_expert + row_tile), 0).to(tl.int64)
        w += expert * (OUTER * INNER)
        side += expert * (OUTER * RANK)
        w_scale += expert * ((OUTER // BLOCK) * (INNER // BLOCK) if BLOCK else OUTER)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    along = tl.arange(0, STEP)
    for step in range(steps):
        left = tl.load(
            x + wide_rows[:, None] * INNER + (step * STEP + along)[None, :], mask=real_rows[:, None], other=0.0
        )
        right = tl.load(w + columns[None, :] * INNER + (step * STEP + along)[:, None])
        if BLOCK:
            row_scales_of_step = tl.load(x_scale + step * TOKENS + rows, mask=real_rows, other=0.0)
            weight_scale = tl.load(w_scale + (column_tile * COLUMNS // BLOCK) * (INNER // BLOCK) + step)
            total += tl.dot(left, right) * (row_scales_of_step * weight_scale)[:, None]
        else:
            total = tl.dot(left, right, total)
    if RANK:  # after the loop, because during it there are no registers for its operands
        rank = tl.arange(0, RANK)
        thin = tl.load(u + wide_rows[:, None] * RANK + rank[None, :], mask=real_rows[:, None], other=0.0)
        total = tl.dot(thin, tl.load(side + columns[None, :] * RANK + rank[:, None]), total)
    if not BLOCK:
        row_scales = tl.load(x_scale + rows, mask=real_rows, other=0.0)
        total *= row_scales[:, None] * tl.load(w_scale + columns)[None, :]
    offsets = wide_rows[:, None] * OUTER + columns[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=real_rows[:, None])
