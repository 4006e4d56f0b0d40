"""The bodies of the Triton kernels of `gated_thin` and `gated_thin_backward` (thin_triton.py): activation(gate) * up is
multiplied by a thin array while it is in registers."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import share_of


@triton.jit
def gated_thin_kernel(
    gate,
    up,
    a,
    gated,
    inner,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Computes activation(gate) * up of BLOCK rows in float32, rounds it once, writes it and multiplies it by a^T. Grid:
    (ROWS / BLOCK, rounded up,).

    Args:
      gate, up: [ROWS, SIZE], of 16 bits.
      a: [RANK, SIZE], like gate.
      gated: activation(gate) * up, like gate.
      inner: [ROWS, RANK], like gate, gated a^T, rounded once from float32 sums.
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
        share, _ = share_of(x, ACTIVATION, 1.0, 2)
        product = (x * share * y).to(DTYPE)
        tl.store(gated + places, product, mask=real)
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
