"""Triton kernels of gated activations that multiply what they compute by thin arrays before it leaves the
multiprocessor. A program has STEPS tiles of BLOCK rows.
"""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import share_of
from jaxtune.pallas.triton_parts import INTERPRETED, inverse_of, larger, scale_of


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Rounds float32 to DTYPE, two numbers an instruction."""
    if INTERPRETED or tl.float16 == DTYPE:
        return x.to(DTYPE)
    else:  # Triton would type what follows a branch even where that returns
        two: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(two, "=r,r,r", [x], tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def _store_rounded(x, codes, scales, code_offsets, real, scale_offsets, row_mask):
    """Rounds a tile x [BLOCK, 128] of 16 bits to e4m3, each row by its own scale (scale_of)."""
    x32 = x.to(tl.float32)
    scale = scale_of(tl.reduce(tl.abs(x32), 1, larger, keep_dims=True))
    tl.store(scales + scale_offsets, scale, mask=row_mask)
    tl.store(codes + code_offsets, (x32 * inverse_of(scale)).to(codes.dtype.element_ty), mask=real)


@triton.jit
def gated_thin_kernel(
    gate,
    up,
    a,
    result,
    scales,
    inner,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESULT: tl.constexpr,
):
    """activation(gate) * up of BLOCK rows, in float32, rounded once to gate's dtype, and times a^T. Grid: (ROWS /
    BLOCK, rounded up,).

      gate, up: [ROWS, SIZE] of 16 bits; a: [RANK, SIZE].
      result: RESULT 0: nothing is stored. 1: activation(gate) * up. 2: its codes e4m3[ROWS, SIZE], a scale for each
        128 of a row; COLUMNS is 128.
      scales: RESULT 2: float32[SIZE / 128, rounded up, ROWS].
      inner: [ROWS, RANK], rounded once from float32 sums.
      WIDTH: a power of two, at least 16 and RANK. ACTIVATION: 0: silu; 1: tanh approximation of gelu.
    """
    DTYPE: tl.constexpr = gate.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    ranks = tl.arange(0, WIDTH)
    row_mask = rows < ROWS
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        offsets, real = rows * SIZE + columns, row_mask & (columns < SIZE)
        x = tl.load(gate + offsets, mask=real, other=0.0).to(tl.float32)
        y = tl.load(up + offsets, mask=real, other=0.0).to(tl.float32)
        a_offsets, a_mask = ranks[:, None] * SIZE + columns, (ranks < RANK)[:, None] & (columns < SIZE)
        a_tile = tl.load(a + a_offsets, mask=a_mask, other=0.0)
        share, _ = share_of(x, ACTIVATION, 1.0, 1)
        product = _rounded(x * share * y, DTYPE)
        if RESULT == 1:
            tl.store(result + offsets, product, mask=real)
        if RESULT == 2:
            # As many codes a thread as it has numbers of gate, which it would read in halves of sectors otherwise.
            coded, scaled = tl.max_contiguous(offsets, [1, 8]), (start // 128) * ROWS + rows
            _store_rounded(product, result, scales, coded, real, scaled, row_mask)
        sums = tl.dot(product, tl.trans(a_tile), sums)
    tl.store(inner + rows * RANK + ranks[None, :], sums.to(DTYPE), mask=row_mask & (ranks < RANK)[None, :])


@triton.jit
def gated_thin_backward_kernel(
    gate,
    up,
    dgated,
    dinner,
    dgate,
    dup,
    da,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Gradients of gate and up in COLUMNS columns of STEPS tiles, in float32, and these rows' share of dinner^T times
    the rounded activation(gate) * up. Grid: (SIZE / COLUMNS, ROWS / (STEPS BLOCK)), rounded up. dgate may be gate's
    memory, and dup up's: a tile is read before it is written.

      gate, up, dgated, dgate, dup: [ROWS, SIZE] of 16 bits; dinner: [ROWS, RANK].
      da: float32[ranges of rows, RANK, SIZE], each range's sum.
      WIDTH: a power of two, at least 16 and RANK. ACTIVATION: 0: silu; 1: tanh approximation of gelu.
    """
    DTYPE: tl.constexpr = gate.dtype.element_ty
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, WIDTH)[None, :]
    column_mask, real_ranks = columns < SIZE, ranks < RANK
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        row_mask = number < ROWS - first
        offsets, real = first * SIZE + number * SIZE + columns[None, :], row_mask & column_mask[None, :]
        dout = tl.load(dgated + offsets, mask=real, other=0.0).to(tl.float32)
        x = tl.load(gate + offsets, mask=real, other=0.0).to(tl.float32)
        y = tl.load(up + offsets, mask=real, other=0.0).to(tl.float32)
        thin = tl.load(dinner + first * RANK + number * RANK + ranks, mask=row_mask & real_ranks, other=0.0)
        share, slope = share_of(x, ACTIVATION, 1.0, 1)
        active = x * share
        sums = tl.dot(tl.trans((active * y).to(DTYPE)), thin, sums)
        tl.store(dgate + offsets, (dout * y * (share + x * slope)).to(DTYPE), mask=real)
        tl.store(dup + offsets, (dout * active).to(DTYPE), mask=real)
    range_sums = da + tl.program_id(1).to(tl.int64) * RANK * SIZE
    tl.store(range_sums + ranks * SIZE + columns[:, None], sums, mask=column_mask[:, None] & real_ranks)


@triton.jit
def rounded_gradients_kernel(
    gate,
    up,
    dgated,
    thins,
    sides,
    codes,
    scales,
    parts,
    da,
    db_gate,
    db_up,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Gradients of gate and up in 128 columns of STEPS tiles, in float32, rounded to gate's dtype, then once more to
    e4m3, and multiplied by the thin arrays of gate's and up's adapters; activation(gate) * up, rounded, times that of
    down's. Grid: (SIZE / COLUMNS, ROWS / (STEPS BLOCK)), rounded up.

      gate, up, dgated: [ROWS, SIZE] of 16 bits.
      thins: [3, RANK, ROWS], gradient of down's low-rank input, low-rank inputs of gate and up.
      sides: [2, RANK, SIZE], the B's of gate and up, transposed.
      codes: e4m3[ROWS, 2 width], width = SIZE rounded up to 128s; up's begin at `width`. Further columns are zeros.
      scales: float32[2 width / 128, ROWS].
      parts: float32[blocks of columns, ROWS, 2, RANK], each block's share of the gradients times `sides`.
      da, db_gate, db_up: float32[ranges of rows, RANK, SIZE] and [ranges of rows, SIZE, RANK], each range's shares.
      WIDTH: a power of two, at least 16 and RANK. ACTIVATION: 0: silu; 1: tanh approximation of gelu.
    """
    DTYPE: tl.constexpr = gate.dtype.element_ty
    FILLED: tl.constexpr = (SIZE + 127) // 128 * 128
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    ranks = tl.arange(0, WIDTH)[:, None]
    column_mask, real_ranks = columns < SIZE, ranks < RANK
    wide, real_wide = ranks * SIZE + columns, real_ranks & column_mask
    side_gate = tl.load(sides + wide, mask=real_wide, other=0.0)
    side_up = tl.load(sides + RANK * SIZE + wide, mask=real_wide, other=0.0)
    sums_down = tl.zeros([WIDTH, COLUMNS], tl.float32)
    sums_gate = tl.zeros([WIDTH, COLUMNS], tl.float32)
    sums_up = tl.zeros([WIDTH, COLUMNS], tl.float32)
    number, row = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        row_mask = number < ROWS - first
        offsets, real = first * SIZE + number * SIZE + columns, row_mask & column_mask
        dout = tl.load(dgated + offsets, mask=real, other=0.0).to(tl.float32)
        x = tl.load(gate + offsets, mask=real, other=0.0).to(tl.float32)
        y = tl.load(up + offsets, mask=real, other=0.0).to(tl.float32)
        long, real_long = first + ranks * ROWS + row, real_ranks & (row < ROWS - first)
        thin_down = tl.load(thins + long, mask=real_long, other=0.0)
        thin_gate = tl.load(thins + RANK * ROWS + long, mask=real_long, other=0.0)
        thin_up = tl.load(thins + 2 * RANK * ROWS + long, mask=real_long, other=0.0)
        share, slope = share_of(x, ACTIVATION, 1.0, 1)
        active = x * share
        product = _rounded(active * y, DTYPE)
        dgate, dup = _rounded(dout * y * (share + x * slope), DTYPE), _rounded(dout * active, DTYPE)
        # As many codes a thread as it reads numbers of gate, which it would read in halves of sectors otherwise.
        coded = tl.max_contiguous(first * (2 * FILLED) + number * (2 * FILLED) + columns, [1, 8])
        up_coded = tl.max_contiguous(coded + FILLED, [1, 8])
        scaled = tl.program_id(0) * ROWS + first + number
        block_products = parts + (tl.program_id(0).to(tl.int64) * ROWS + first) * (2 * RANK) + number * (2 * RANK)
        block_products, real_part = block_products + tl.trans(ranks), row_mask & tl.trans(real_ranks)
        # The products of `sides` are the first: Triton divides the warps for all products as for the last one, whose
        # columns are enough for them.
        _store_rounded(dgate, codes, scales, coded, row_mask, scaled, row_mask)
        tl.store(block_products, tl.trans(tl.dot(side_gate, tl.trans(dgate))), mask=real_part)
        _store_rounded(dup, codes, scales, up_coded, row_mask, scaled + FILLED // 128 * ROWS, row_mask)
        tl.store(block_products + RANK, tl.trans(tl.dot(side_up, tl.trans(dup))), mask=real_part)
        sums_gate = tl.dot(thin_gate, dgate, sums_gate)
        sums_up = tl.dot(thin_up, dup, sums_up)
        sums_down = tl.dot(thin_down, product, sums_down)
    added = tl.program_id(1).to(tl.int64) * (RANK * SIZE)
    tl.store(da + added + wide, sums_down, mask=real_wide)
    across, real_across = tl.trans(columns) * RANK + tl.trans(ranks), tl.trans(real_wide)
    tl.store(db_gate + added + across, tl.trans(sums_gate), mask=real_across)
    tl.store(db_up + added + across, tl.trans(sums_up), mask=real_across)
