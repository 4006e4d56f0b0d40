"""The Triton kernels of fp8_few.py."""

import triton
import triton.language as tl

from jaxtune.pallas.decode.few_rows.triton_kernels import _activated_in_steps
from jaxtune.pallas.quant_matmul.few_thin_kernels import adapted
from jaxtune.pallas.triton_parts import number_of_three, of_three, rounded_row


@triton.jit
def rounded_rows_kernel(
    x, codes, scales, COUNT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of x [COUNT, SIZE] in e4m3: codes [COUNT, SIZE]; scales float32[COUNT], or with BLOCK, the numbers that
    share one, [SIZE / BLOCK, COUNT]. Grid: (COUNT,). WIDTH: SIZE as a power of two.
    """
    row, columns = tl.program_id(0), tl.arange(0, WIDTH)
    numbers = tl.load(x + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    rounded_row(numbers, codes, scales, row, COUNT, SIZE, WIDTH, BLOCK)


@triton.jit
def few_product_kernel(
    x,
    x_scales,
    first,
    second,
    third,
    first_scales,
    second_scales,
    third_scales,
    thin,
    first_b,
    second_b,
    third_b,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    THIRD_RANK: tl.constexpr,
):
    """out = x W^T, W being first [FIRST, INNER], second and third one below the other (0 rows if unused), all e4m3 and
    times their scales: partial sums float32[SPLITS, COUNT, FIRST + SECOND + THIRD], or rounded for one split. Grid:
    (COUNT / TOKENS rounded up, rows of W / ROWS, SPLITS); programs of the same rows of W run side by side.

    ACTIVATION 1 (silu) or 2 (gelu_tanh): out [1, COUNT, FIRST] is activation(first's product) * second's; both, and
    each step of the activation, are rounded to out's dtype.

      x, x_scales: e4m3[COUNT, INNER], float32[COUNT], or with BLOCK [INNER / BLOCK, COUNT].
      first_scales, second_scales, third_scales: float32 of each row, or with STRIDE 0 of all; with BLOCK [rows / BLOCK,
      INNER / BLOCK].
      BLOCK: codes along INNER that share a scale, equal to DEPTH, and the rows of W that do; 0: rows do.
      INNER: a multiple of DEPTH (columns of a step) * SPLITS. STAGES: steps in flight.
      ROWS, TOKENS: rows of W, and of x (a power of two of at least 16), of a program.
      RANK: not 0: plus thin [COUNT, weights x RANK] times first_b^T, second_b^T, third_b^T, [rows, its rank], rounded;
        the sum is rounded once, as in training's kernels.
    """
    DTYPE: tl.constexpr = tl.bfloat16
    WIDTH: tl.constexpr = FIRST if ACTIVATION else FIRST + SECOND + THIRD
    begin = tl.program_id(1) * ROWS
    split = tl.program_id(2)
    WEIGHTS: tl.constexpr = 1 if ACTIVATION else 1 + (SECOND > 0) + (THIRD > 0)
    number = (begin >= FIRST).to(tl.int32) + (begin >= FIRST + SECOND).to(tl.int32)
    weight = of_three(number, first, second, third, WEIGHTS)
    scales = of_three(number, first_scales, second_scales, third_scales, WEIGHTS)
    first_row = begin - number_of_three(number, 0, FIRST, FIRST + SECOND, WEIGHTS)
    rows = first_row + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if COUNT > TOKENS:
        tokens += tl.program_id(0) * TOKENS
    lines = rows.to(tl.int64)[:, None] * INNER
    real = tokens < COUNT
    steps: tl.constexpr = INNER // DEPTH // SPLITS
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        columns = step * DEPTH + tl.arange(0, DEPTH)
        x_tile = tl.load(x + tokens[None, :] * INNER + columns[:, None], mask=real[None, :], other=0.0)
        tile = tl.load(weight + lines + columns[None, :], eviction_policy="evict_first")
        if BLOCK:
            of_tokens = tl.load(x_scales + step * COUNT + tokens, mask=real, other=0.0)
            scale_index = (first_row // BLOCK) * (INNER // BLOCK) + step
            total += tl.dot(tile, x_tile) * (of_tokens * tl.load(scales + scale_index))[None, :]
        else:
            total = tl.dot(tile, x_tile, total)
        if ACTIVATION:
            tile = tl.load(second + lines + columns[None, :], eviction_policy="evict_first")
            if BLOCK:
                up += tl.dot(tile, x_tile) * (of_tokens * tl.load(second_scales + scale_index))[None, :]
            else:
                up = tl.dot(tile, x_tile, up)
    if not BLOCK:
        of_tokens = tl.load(x_scales + tokens, mask=real, other=0.0)[None, :]
        total *= of_tokens * tl.load(scales + rows * STRIDE)[:, None]
        if ACTIVATION:
            up *= of_tokens * tl.load(second_scales + rows * STRIDE)[:, None]
    if RANK > 0:
        WIDE: tl.constexpr = RANK * (1 + (SECOND > 0) + (THIRD > 0))
        if split == 0:
            b = of_three(number, first_b, second_b, third_b, WEIGHTS)
            rank = number_of_three(number, FIRST_RANK, SECOND_RANK, THIRD_RANK, WEIGHTS)
            first_thin = number_of_three(number, 0, RANK, 2 * RANK, WEIGHTS)
            total += adapted(thin, b, rank, rows, tokens, first_thin, COUNT, RANK, WIDE)
        if ACTIVATION:
            up += adapted(thin, second_b, SECOND_RANK, rows, tokens, RANK, COUNT, RANK, WIDE)
    if ACTIVATION:
        gate = _activated_in_steps(total.to(DTYPE).to(tl.float32), ACTIVATION, DTYPE)
        total = gate * up.to(DTYPE).to(tl.float32)
    offsets = (split * COUNT + tokens[:, None]) * WIDTH + begin + tl.arange(0, ROWS)[None, :]
    tl.store(out + offsets, tl.trans(total).to(out.dtype.element_ty), mask=real[:, None])
