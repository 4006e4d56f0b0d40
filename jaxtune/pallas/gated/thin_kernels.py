"""The bodies of the Triton kernels of `gated_thin` and `gated_thin_backward` (thin_triton.py): activation(gate) * up is
multiplied by a thin array while it is in registers."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import INTERPRETED, share_of


@triton.jit
def _larger(one, other):
    """The larger number, NaN if one of them is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _inverse(x):
    """1 / x of float32 numbers from 2^-126 to 2^126: what XLA multiplies by on a GPU when it divides by x."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Rounds float32 numbers to DTYPE, two in one instruction. The compiler itself would round numbers that are also
    needed in float32 one by one, which takes longer."""
    if INTERPRETED or tl.float16 == DTYPE:
        return x.to(DTYPE)
    two: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(two, "=r,r,r", [x], tl.bfloat16, is_pure=False, pack=2)


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
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
):
    """Computes activation(gate) * up of BLOCK rows in float32, rounds it once, to gate's dtype, writes it as RESULT
    says, and multiplies it by a^T. Grid: (ROWS / BLOCK, rounded up,).

    Args:
      gate, up: [ROWS, SIZE], of 16 bits.
      a: [RANK, SIZE], like gate.
      result: with RESULT 1 activation(gate) * up, like gate. With 2 its codes, e4m3[ROWS, SIZE]: each 128 numbers of a
        row are divided by their largest magnitude over LARGEST, but at least by LEAST_SCALE, and zeros by 1; COLUMNS
        is 128. With 0 it is not written.
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
            number = product.to(tl.float32)
            largest = tl.reduce(tl.abs(number), 1, _larger, keep_dims=True)
            scale = largest * (1.0 / LARGEST)
            scale = tl.where(largest < LEAST_SCALE, 1.0, tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale))
            tl.store(scales + (start // 128) * ROWS + rows, scale, mask=there)
            codes = (number * _inverse(scale)).to(result.dtype.element_ty)
            # As many codes a thread as it has numbers of gate, which it would read in halves of sectors otherwise.
            tl.store(result + tl.max_contiguous(places, [1, 8]), codes, mask=real)
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
    DTYPE: tl.constexpr = gate.dtype.element_ty
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
        tl.store(dgate + places, (dout * y * (share + x * slope)).to(DTYPE), mask=real)
        tl.store(dup + places, (dout * active).to(DTYPE), mask=real)
    part = da + tl.program_id(1).to(tl.int64) * RANK * SIZE
    tl.store(part + ranks * SIZE + columns[:, None], sums, mask=within[:, None] & real_ranks)
