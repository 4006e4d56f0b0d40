"""The bodies of the Triton kernels of gated_thin.py: the inner rows of experts are multiplied by a thin array of their
expert while they are in registers."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import share_of, within


@triton.jit
def _loaded(gate_up, rows, there, start, SIZE: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """COLUMNS columns of gate and up, from column `start` on, of the rows `rows` [BLOCK, 1] of gate_up [ROWS, 2 SIZE],
    both in float32; zeros where `there` is false or a column is past the end."""
    if INTERLEAVED:
        pairs = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
        both = tl.load(gate_up + rows * (2 * SIZE) + pairs, mask=there & (pairs < 2 * SIZE), other=0.0)
        x, y = tl.split(tl.reshape(both, [both.shape[0], COLUMNS, 2]))
    else:
        columns = start + tl.arange(0, COLUMNS)[None, :]
        real = there & (columns < SIZE)
        x = tl.load(gate_up + rows * (2 * SIZE) + columns, mask=real, other=0.0)
        y = tl.load(gate_up + rows * (2 * SIZE) + SIZE + columns, mask=real, other=0.0)
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def gated_rows_thin_kernel(
    gate_up,
    weights,
    a,
    tile_expert,
    tile_sizes,
    gated,
    inner,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Computes the inner rows of BLOCK rows, times their weights, in float32, rounds them once, writes them and
    multiplies them by a^T of their expert. Empty rows get zeros. Grid: (ROWS / BLOCK,); BLOCK divides TILE_ROWS.

    Args:
      gate_up: [ROWS, 2 SIZE], of 16 bits. The first SIZE columns are gate, and the others up. If INTERLEAVED is 1, the
        even columns are gate, and the odd ones up.
      weights: float32[ROWS], the router's.
      a: [EXPERTS, RANK, SIZE], like gate_up.
      tile_expert, tile_sizes: int32[ROWS / TILE_ROWS], the expert of each tile and the number of its rows that are not
        empty, which come first.
      gated: [ROWS, SIZE], the inner rows times their weights. inner: [ROWS, WIDTH], gated a^T, rounded once from float32
        sums; zeros from column RANK on. WIDTH is a power of two of at least 16.
      ACTIVATION, ALPHA: of the activation (share_of).
      CLIPPED, LIMIT: 1: gate and up are clipped at LIMIT, and 1 is added to up.
    """
    DTYPE: tl.constexpr = gated.dtype.element_ty
    first = tl.program_id(0) * BLOCK
    tile = first // TILE_ROWS
    size = tl.load(tile_sizes + tile) - first % TILE_ROWS
    expert = tl.minimum(tl.load(tile_expert + tile), EXPERTS - 1).to(tl.int64)
    number, ranks = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)
    rows = first.to(tl.int64) + number
    there = number < size
    weight = tl.load(weights + rows, mask=there, other=0.0)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        x, y = _loaded(gate_up, rows, there, start, SIZE, COLUMNS, INTERLEAVED)
        if CLIPPED:
            x, y = tl.minimum(x, LIMIT), tl.minimum(tl.maximum(y, -LIMIT), LIMIT) + 1.0
        real_sides = (ranks < RANK)[:, None] & (columns < SIZE)
        side = tl.load(a + (expert * RANK + ranks[:, None]) * SIZE + columns, mask=real_sides, other=0.0)
        share, _ = share_of(x, ACTIVATION, ALPHA, 1)
        product = (x * share * y * weight).to(DTYPE)
        tl.store(gated + rows * SIZE + columns, product, mask=columns < SIZE)
        sums = tl.dot(product, tl.trans(side), sums)
    tl.store(inner + rows * WIDTH + ranks[None, :], sums.to(DTYPE))


@triton.jit
def gated_rows_thin_backward_kernel(
    gate_up,
    weights,
    dgated,
    dinner,
    order,
    starts,
    sizes,
    dgate_up,
    dweights,
    da,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Computes the backward of experts' gated activation in COLUMNS columns of one expert's rows, in float32, and what
    these rows add to dinner^T gated, where gated are the inner rows times their weights, rounded to gate_up's dtype. An
    expert's tiles of TILE_ROWS rows are divided into RANGES ranges, which are read BLOCK rows at a time. Grid: (SIZE /
    COLUMNS, rounded up; EXPERTS RANGES).

    dgate_up may be the same memory as gate_up: each program reads a block before it writes it, and no other program
    reads it. Empty rows of an expert's tiles get zeros; rows of tiles without an expert are not written.

    Args:
      gate_up, INTERLEAVED: as for gated_rows_thin_kernel, and so are weights, ACTIVATION, CLIPPED, LIMIT and ALPHA.
      dgated: [ROWS, SIZE], the gradient of gated.
      dinner: [ROWS, INNER], like gate_up, of which the first RANK columns are used.
      order: int32[EXPERTS], the experts in the order of the programs.
      starts, sizes: int32[EXPERTS], each expert's first row, and how many rows it has from there on.
      dgate_up: the gradient of gate_up.
      dweights: float32[blocks of columns, ROWS], what each block of columns adds to the gradient of the weights.
      da: float32[RANGES, EXPERTS, RANK, SIZE], what each range of an expert's rows adds to dinner^T gated.
      WIDTH: the columns with which the thin array is multiplied, at least RANK: a power of two of at least 16.
    """
    DTYPE: tl.constexpr = dgated.dtype.element_ty
    expert = tl.load(order + tl.program_id(1) // RANGES).to(tl.int64)
    part = tl.program_id(1) % RANGES
    begin, size = tl.load(starts + expert).to(tl.int64), tl.load(sizes + expert)
    PER_TILE: tl.constexpr = TILE_ROWS // BLOCK
    steps = (size + TILE_ROWS - 1) // TILE_ROWS * PER_TILE
    start = tl.program_id(0) * COLUMNS
    columns = start + tl.arange(0, COLUMNS)[None, :]
    ranks = tl.arange(0, WIDTH)[None, :]
    within_size = columns < SIZE
    number = tl.arange(0, BLOCK)[:, None]
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for step in range(steps * part // RANGES, steps * (part + 1) // RANGES):
        rows = begin + step * BLOCK + number
        there = number < size - step * BLOCK
        x, y = _loaded(gate_up, rows, there, start, SIZE, COLUMNS, INTERLEAVED)
        dout = tl.load(dgated + rows * SIZE + columns, mask=there & within_size, other=0.0).to(tl.float32)
        weight = tl.load(weights + rows, mask=there, other=0.0)
        thin = tl.load(dinner + rows * INNER + ranks, mask=there & (ranks < RANK), other=0.0)
        dx_within, dy_within = 1.0, 1.0
        if CLIPPED:
            dx_within = within(x, LIMIT)
            dy_within = within(y, LIMIT) * within(-y, LIMIT)
            x, y = tl.minimum(x, LIMIT), tl.minimum(tl.maximum(y, -LIMIT), LIMIT) + 1.0
        share, slope = share_of(x, ACTIVATION, ALPHA, 1)
        active = x * share
        product = active * y
        sums = tl.dot(tl.trans((product * weight).to(DTYPE)), thin, sums)
        target = dweights + tl.program_id(0).to(tl.int64) * ROWS + begin + step * BLOCK + tl.arange(0, BLOCK)
        tl.store(target, tl.sum(dout * product, 1))
        dout *= weight
        dx = (dout * y * (share + x * slope) * dx_within).to(DTYPE)
        dy = (dout * active * dy_within).to(DTYPE)
        if INTERLEAVED:
            pairs = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
            tl.store(dgate_up + rows * (2 * SIZE) + pairs, tl.interleave(dx, dy), mask=pairs < 2 * SIZE)
        else:
            tl.store(dgate_up + rows * (2 * SIZE) + columns, dx, mask=within_size)
            tl.store(dgate_up + rows * (2 * SIZE) + SIZE + columns, dy, mask=within_size)
    places = (part.to(tl.int64) * EXPERTS + expert) * RANK * SIZE + ranks * SIZE + tl.trans(columns)
    tl.store(da + places, sums, mask=tl.trans(within_size) & (ranks < RANK))
