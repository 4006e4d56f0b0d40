"""The bodies of the Triton kernels of `gated_thin` and `gated_thin_backward` (thin_triton.py): activation(gate) * up is
multiplied by a thin array while it is in registers."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import share_of
from jaxtune.pallas.triton_parts import INTERPRETED, inverse_of, larger, scale_of


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Rounds float32 numbers to DTYPE, two in one instruction. The compiler itself would round numbers that are also
    needed in float32 one by one, which takes longer."""
    if INTERPRETED or tl.float16 == DTYPE:
        return x.to(DTYPE)
    two: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(two, "=r,r,r", [x], tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def _store_rounded(x, codes, scales, places, real, places_of_scales, there):
    """Rounds a tile of 128 columns to e4m3, each row by its own scale (scale_of).

    Args:
      x: [BLOCK, 128], of 16 bits.
      codes, scales: where codes and scales are written.
      places, real: for each number, the place of its code, and whether it is written.
      places_of_scales, there: [BLOCK, 1], for each row, the place of its scale, and whether it is written.
    """
    number = x.to(tl.float32)
    scale = scale_of(tl.reduce(tl.abs(number), 1, larger, keep_dims=True))
    tl.store(scales + places_of_scales, scale, mask=there)
    tl.store(codes + places, (number * inverse_of(scale)).to(codes.dtype.element_ty), mask=real)


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
    """Computes activation(gate) * up of BLOCK rows in float32, rounds it once, to gate's dtype, writes it as RESULT
    says, and multiplies it by a^T. Grid: (ROWS / BLOCK, rounded up,).

    Args:
      gate, up: [ROWS, SIZE], of 16 bits.
      a: [RANK, SIZE], like gate.
      result: with RESULT 1 activation(gate) * up, like gate. With 2 its codes, e4m3[ROWS, SIZE], of which each 128 of
        a row have a scale (scale_of); COLUMNS is 128. With 0 it is not written.
      scales: with RESULT 2 float32[SIZE / 128, rounded up, ROWS], the scales of the codes; else it is not written.
      inner: [ROWS, RANK], like gate: activation(gate) * up times a^T, rounded once from float32 sums.
      WIDTH: the columns with which the thin array is multiplied, at least RANK: a power of two of at least 16.
      COLUMNS: the number of columns that are computed at once.
      ACTIVATION: of gate (share_of).
    """
    DTYPE: tl.constexpr = gate.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    ranks = tl.arange(0, WIDTH)
    there = rows < ROWS
    sums = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)[None, :]
        places, real = rows * SIZE + columns, there & (columns < SIZE)
        x = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
        y = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
        sides, real_sides = ranks[:, None] * SIZE + columns, (ranks < RANK)[:, None] & (columns < SIZE)
        side = tl.load(a + sides, mask=real_sides, other=0.0)
        share, _ = share_of(x, ACTIVATION, 1.0, 1)
        product = _rounded(x * share * y, DTYPE)
        if RESULT == 1:
            tl.store(result + places, product, mask=real)
        if RESULT == 2:
            # As many codes a thread as it has numbers of gate, which it would read in halves of sectors otherwise.
            coded, scaled = tl.max_contiguous(places, [1, 8]), (start // 128) * ROWS + rows
            _store_rounded(product, result, scales, coded, real, scaled, there)
        sums = tl.dot(product, tl.trans(side), sums)
    tl.store(inner + rows * RANK + ranks[None, :], sums.to(DTYPE), mask=there & (ranks < RANK)[None, :])


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
    """Computes the gradients of gate and up in COLUMNS columns of STEPS tiles of BLOCK rows, in float32, and what these
    rows add to dinner^T gated, where gated is activation(gate) * up, rounded to gate's dtype. Grid: (blocks of columns,
    ranges of rows): (SIZE / COLUMNS, ROWS / (STEPS BLOCK)), rounded up.

    dgate may be the same memory as gate, and dup the same as up: a tile is read before it is written, and no other
    program reads it.

    Args:
      gate, up, dgated: [ROWS, SIZE], of 16 bits; dgated is the gradient of gated.
      dinner: [ROWS, RANK], like gate.
      dgate, dup: the gradients of gate and up, like gate.
      da: float32[ranges of rows, RANK, SIZE], what each range of rows adds to dinner^T gated.
      WIDTH: the columns with which the thin array is multiplied, at least RANK: a power of two of at least 16.
      ACTIVATION: of gate (share_of).
    """
    codes, scales = dgate, da  # they are not written
    sizes: tl.constexpr = (ROWS, SIZE, RANK, WIDTH, BLOCK, COLUMNS, STEPS)
    _backward(gate, up, dgated, dinner, dgate, dup, codes, scales, da, sizes, ACTIVATION, 0)


@triton.jit
def gated_thin_backward_rounded_kernel(
    gate,
    up,
    dgated,
    dinner,
    dgate,
    dup,
    codes,
    scales,
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
    """What gated_thin_backward_kernel computes, and the gradients of gate and up, side by side, rounded to e4m3
    (_store_rounded). COLUMNS is 128. The arguments are those of gated_thin_backward_kernel and these:

      codes: e4m3[ROWS, 2 width], where width is SIZE, rounded up to a multiple of 128: the codes of gate's gradient
        begin at column 0, those of up's at `width`. Columns that fill up are zeros.
      scales: float32[2 width / 128, ROWS].
    """
    sizes: tl.constexpr = (ROWS, SIZE, RANK, WIDTH, BLOCK, COLUMNS, STEPS)
    _backward(gate, up, dgated, dinner, dgate, dup, codes, scales, da, sizes, ACTIVATION, 1)


@triton.jit
def _backward(
    gate,
    up,
    dgated,
    dinner,
    dgate,
    dup,
    codes,
    scales,
    da,
    sizes: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The body of both kernels of the backward, which describe its arguments. sizes: ROWS, SIZE, RANK, WIDTH, BLOCK,
    COLUMNS and STEPS. ROUNDS: 1 if codes and scales are written, else 0."""
    ROWS: tl.constexpr = sizes[0]
    SIZE: tl.constexpr = sizes[1]
    RANK: tl.constexpr = sizes[2]
    WIDTH: tl.constexpr = sizes[3]
    BLOCK: tl.constexpr = sizes[4]
    COLUMNS: tl.constexpr = sizes[5]
    STEPS: tl.constexpr = sizes[6]
    DTYPE: tl.constexpr = gate.dtype.element_ty
    FILLED: tl.constexpr = (SIZE + 127) // 128 * 128
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, WIDTH)[None, :]
    within, real_ranks = columns < SIZE, ranks < RANK
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        there = number < ROWS - first
        places, real = first * SIZE + number * SIZE + columns[None, :], there & within[None, :]
        dout = tl.load(dgated + places, mask=real, other=0.0).to(tl.float32)
        x = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
        y = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
        thin = tl.load(dinner + first * RANK + number * RANK + ranks, mask=there & real_ranks, other=0.0)
        share, slope = share_of(x, ACTIVATION, 1.0, 1)
        active = x * share
        sums = tl.dot(tl.trans((active * y).to(DTYPE)), thin, sums)
        if ROUNDS:
            of_gate, of_up = _rounded(dout * y * (share + x * slope), DTYPE), _rounded(dout * active, DTYPE)
            tl.store(dgate + places, of_gate, mask=real)
            tl.store(dup + places, of_up, mask=real)
            # As many codes a thread as it writes numbers of dgate, in halves of sectors otherwise.
            coded = tl.max_contiguous(first * (2 * FILLED) + number * (2 * FILLED) + columns[None, :], [1, 8])
            further = tl.max_contiguous(coded + FILLED, [1, 8])
            scaled = tl.program_id(0) * ROWS + first + number
            _store_rounded(of_gate, codes, scales, coded, there, scaled, there)
            scaled += FILLED // 128 * ROWS
            _store_rounded(of_up, codes, scales, further, there, scaled, there)
        else:
            tl.store(dgate + places, (dout * y * (share + x * slope)).to(DTYPE), mask=real)
            tl.store(dup + places, (dout * active).to(DTYPE), mask=real)
    part = da + tl.program_id(1).to(tl.int64) * RANK * SIZE
    tl.store(part + ranks * SIZE + columns[:, None], sums, mask=within[:, None] & real_ranks)
