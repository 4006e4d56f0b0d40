"""Triton kernels that multiply experts' inner rows by a thin array of their expert while they are in registers."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import clipped, row_gradients, share_of


@triton.jit
def _loaded(gate_up, number, inside, start, SIZE: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """COLUMNS columns of gate and up in float32, of rows `number` [BLOCK, 1] of gate_up [., 2 SIZE]; zeros outside."""
    columns = start + tl.arange(0, COLUMNS)[None, :]
    real = inside & (columns < SIZE)
    if INTERLEAVED:
        # A pair is read as one number, so that nothing moves between threads.
        DTYPE: tl.constexpr = gate_up.dtype.element_ty
        pairs = tl.load(gate_up.to(tl.pointer_type(tl.uint32)) + (number * SIZE + columns), mask=real, other=0)
        x = (pairs & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
        y = (pairs >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        offsets = number * (2 * SIZE) + columns
        x = tl.load(gate_up + offsets, mask=real, other=0.0)
        y = tl.load(gate_up + SIZE + offsets, mask=real, other=0.0)
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
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORES: tl.constexpr,
):
    """Computes BLOCK inner rows, times their weights, in float32, rounds them once and multiplies them by a^T of their
    expert. Empty rows get zeros. Grid: (ROWS / BLOCK,); BLOCK divides TILE_ROWS.

      gate_up: [ROWS, 2 SIZE], 16 bits; gate, then up, or with INTERLEAVED in even and odd columns.
      gated: [ROWS, SIZE]; not written if STORES is 0.
      inner: [ROWS, INNER], gated a^T, rounded once from float32 sums; zeros from column RANK on.
      WIDTH: a power of two, at least 16 and RANK, that divides INNER.
      CLIPPED, LIMIT: 1: gate and up are clipped at LIMIT, and 1 is added to up.
      weights: float32[ROWS], the router's. a: [EXPERTS, RANK, SIZE] of 16 bits.
      tile_expert, tile_sizes: int32[tiles of TILE_ROWS rows], of Groups: expert, and rows that are not empty.
      COLUMNS: of gate and up, computed at once.
      ACTIVATION, ALPHA: 0: x times sigmoid of ALPHA x; 1: tanh approximation of gelu.
    """
    DTYPE: tl.constexpr = gated.dtype.element_ty
    first = tl.program_id(0) * BLOCK
    tile = first // TILE_ROWS
    size = tl.load(tile_sizes + tile) - first % TILE_ROWS
    expert = tl.minimum(tl.load(tile_expert + tile), EXPERTS - 1).to(tl.int64)
    number, ranks = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH)
    inside = number < size
    weight = tl.load(weights + first + number, mask=inside, other=0.0)
    gate_up += first.to(tl.int64) * (2 * SIZE)
    gated += first.to(tl.int64) * SIZE
    inner += first.to(tl.int64) * INNER
    a += expert * (RANK * SIZE)
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        x, y = _loaded(gate_up, number, inside, start, SIZE, COLUMNS, INTERLEAVED)
        x, y = clipped(x, y, CLIPPED, LIMIT)
        real_sides = (ranks < RANK)[:, None] & (columns < SIZE)
        side = tl.load(a + (ranks[:, None] * SIZE + columns), mask=real_sides, other=0.0)
        share, _ = share_of(x, ACTIVATION, ALPHA, 1)
        product = (x * share * y * weight).to(DTYPE)
        if STORES:
            tl.store(gated + (number * SIZE + columns), product, mask=columns < SIZE)
        sums = tl.dot(product, tl.trans(side), sums)
    thin = sums.to(DTYPE)
    tl.store(inner + (number * INNER + ranks[None, :]), thin)
    for column in range(WIDTH, INNER, WIDTH):
        tl.store(inner + (number * INNER + column + ranks[None, :]), tl.zeros([BLOCK, WIDTH], DTYPE))


@triton.jit
def gated_rows_thin_backward_kernel(
    gate_up,
    weights,
    dgated,
    dinner,
    chunk_first,
    chunk_rows,
    dgate_up,
    dweights,
    da,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INNER: tl.constexpr,
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
    """The backward of the gated activation in COLUMNS columns of a chunk of rows (whole tiles of one expert), in
    float32, and what these rows add to dinner^T gated. Grid: (SIZE / COLUMNS, rounded up; chunks).

    dgate_up may be gate_up's memory: each program reads a block before it writes it, and no other program reads it.
    Empty rows of a chunk get zeros; rows of tiles without an expert are not written.

      gate_up, dgate_up: [ROWS, 2 SIZE], 16 bits; gate, then up, or with INTERLEAVED in even and odd columns.
      weights: float32[ROWS], the router's. dgated: [ROWS, SIZE], gradient of the weighted inner rows.
      dinner: [ROWS, INNER], of which RANK columns are used. WIDTH: a power of two, at least 16 and RANK.
      chunk_first, chunk_rows: int32[chunks], the first row, and how many from there on are not empty.
      dweights: float32[blocks of columns, ROWS], a share of the weights' gradient from each block.
      da: float32[chunks, RANK, SIZE].
      TILE_ROWS, BLOCK: rows of a tile of Groups, and rows read at once.
      ACTIVATION, ALPHA: 0: x times sigmoid of ALPHA x; 1: tanh approximation of gelu.
      CLIPPED, LIMIT: 1: gate and up are clipped at LIMIT, and 1 is added to up.
    """
    DTYPE: tl.constexpr = dgated.dtype.element_ty
    chunk = tl.program_id(1)
    first, size = tl.load(chunk_first + chunk), tl.load(chunk_rows + chunk)
    start = tl.program_id(0) * COLUMNS
    columns = start + tl.arange(0, COLUMNS)[None, :]
    ranks = tl.arange(0, WIDTH)[None, :]
    within_size, real_ranks = columns < SIZE, ranks < RANK
    number = tl.arange(0, BLOCK)
    line = number[:, None]
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for step in range((size + TILE_ROWS - 1) // TILE_ROWS * (TILE_ROWS // BLOCK)):
        row = first + step * BLOCK
        inside = line < size - step * BLOCK
        x, y = _loaded(gate_up + row.to(tl.int64) * (2 * SIZE), line, inside, start, SIZE, COLUMNS, INTERLEAVED)
        dout = tl.load(dgated + row.to(tl.int64) * SIZE + (line * SIZE + columns), mask=inside & within_size, other=0.0)
        weight = tl.load(weights + row + line, mask=inside, other=0.0)
        thin = tl.load(dinner + row.to(tl.int64) * INNER + (line * INNER + ranks), mask=inside & real_ranks, other=0.0)
        dout = dout.to(tl.float32)
        product, dx, dy = row_gradients(x, y, dout, weight, CLIPPED, LIMIT, ACTIVATION, ALPHA, 1)
        sums = tl.dot(tl.trans((product * weight).to(DTYPE)), thin, sums)
        target = dweights + tl.program_id(0).to(tl.int64) * ROWS + row
        tl.store(target + number, tl.sum(dout * product, 1))
        dx, dy = dx.to(DTYPE), dy.to(DTYPE)
        result = dgate_up + row.to(tl.int64) * (2 * SIZE)
        if INTERLEAVED:
            low, high = dx.to(tl.uint16, bitcast=True).to(tl.uint32), dy.to(tl.uint16, bitcast=True).to(tl.uint32)
            target = result.to(tl.pointer_type(tl.uint32)) + (line * SIZE + columns)
            tl.store(target, low | (high << 16), mask=within_size)
        else:
            tl.store(result + (line * (2 * SIZE) + columns), dx, mask=within_size)
            tl.store(result + SIZE + (line * (2 * SIZE) + columns), dy, mask=within_size)
    offsets = chunk.to(tl.int64) * (RANK * SIZE) + (ranks * SIZE + tl.trans(columns))
    tl.store(da + offsets, sums, mask=tl.trans(within_size) & real_ranks)
