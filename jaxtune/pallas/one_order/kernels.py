"""Triton kernels of operations that training and sampling compute alike. Where a sum's order could follow from how a
compiler lays numbers out in registers, it is written out.
"""

import triton
import triton.language as tl

from jaxtune.pallas.decode.few_rows.triton_kernels import normed_and_rotated_head
from jaxtune.pallas.gated.kernels import share_of


@triton.jit
def _tile(array, base, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Pointers [ROWS, 1] to rows of array [COUNT, WIDTH] from `base` on; the last row's for what is behind it."""
    rows = tl.minimum(tl.arange(0, ROWS), COUNT - 1 - base)
    return array + base.to(tl.int64) * WIDTH + rows[:, None] * WIDTH


@triton.jit
def _store(out, numbers, token, row, COUNT: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Writes numbers [TOKENS, ROWS] into out [COUNT, OUT], from (token, row) on."""
    tokens, rows = tl.arange(0, TOKENS)[:, None], tl.arange(0, ROWS)[None, :]
    targets = out + token.to(tl.int64) * OUT + row + tokens * OUT + rows
    tl.store(targets, numbers.to(out.dtype.element_ty), mask=(tokens < COUNT - token) & (rows < OUT - row))


@triton.jit
def product_kernel(
    x,
    weight,
    inner,
    b,
    out,
    COUNT: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    THIN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [COUNT, OUT] = x [COUNT, COLUMNS] times the transpose of weight [OUT, COLUMNS]: float32 sums over ascending
    columns, rounded to out's dtype. Grid: (COUNT / TOKENS * OUT / ROWS, each rounded up,).

      RANK not 0: plus inner [COUNT, RANK] times the transpose of b [OUT, RANK]; both products are rounded to x's dtype
        first. THIN: RANK as a power of two of at least 16.
      TOKENS, ROWS, DEPTH: rows of x and of weight, and columns of a step. STAGES: steps in flight.
      BAND: tiles of tokens that programs visit for one tile of the weight before the next one.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    across: tl.constexpr = (OUT + ROWS - 1) // ROWS
    down: tl.constexpr = (COUNT + TOKENS - 1) // TOKENS
    band = tl.program_id(0) // (BAND * across)
    within = tl.program_id(0) % (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    token = (band * BAND + within % height) * TOKENS
    row = within // height * ROWS
    columns = tl.arange(0, DEPTH)[None, :]
    x_tiles = _tile(x, token, COUNT, COLUMNS, TOKENS) + columns
    weight_tiles = _tile(weight, row, OUT, COLUMNS, ROWS) + columns
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for step in tl.range(0, (COLUMNS + DEPTH - 1) // DEPTH, num_stages=STAGES):
        if COLUMNS % DEPTH == 0:
            x_tile, weight_tile = tl.load(x_tiles), tl.load(weight_tiles)
        else:
            real = columns < COLUMNS - step * DEPTH
            x_tile, weight_tile = tl.load(x_tiles, mask=real, other=0.0), tl.load(weight_tiles, mask=real, other=0.0)
        total = tl.dot(x_tile, tl.trans(weight_tile), total)
        x_tiles += DEPTH
        weight_tiles += DEPTH
    if RANK == 0:
        _store(out, total, token, row, COUNT, OUT, TOKENS, ROWS)
    else:
        ranks = tl.arange(0, THIN)[None, :]
        exists = ranks < RANK
        inner_tile = tl.load(_tile(inner, token, COUNT, RANK, TOKENS) + ranks, mask=exists, other=0.0)
        # In halves of the columns: the registers do not hold both products of a large tile.
        rounded = tl.permute(tl.reshape(total.to(DTYPE), [TOKENS, 2, ROWS // 2]), [0, 2, 1])
        for half in tl.static_range(2):
            base = row + half * (ROWS // 2)
            b_tile = tl.load(_tile(b, base, OUT, RANK, ROWS // 2) + ranks, mask=exists, other=0.0)
            thin = tl.dot(inner_tile, tl.trans(b_tile)).to(DTYPE)
            part = tl.split(rounded)[half].to(tl.float32) + thin.to(tl.float32)
            _store(out, part, token, base, COUNT, OUT, TOKENS, ROWS // 2)


@triton.jit
def gated_kernel(
    gate,
    up,
    weights,
    out,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(gate) * up, SIZE numbers of 16 bits, in float32, rounded once. Grid: (SIZE / BLOCK, rounded up).

    COLUMNS not 0: gate and up are one array [SIZE / COLUMNS, 2 COLUMNS], in which each row's gate is first.
    WEIGHTED: each row is multiplied by its one of float32[SIZE / COLUMNS] `weights`, as experts' kernels do it; else
      these are not read.
    ACTIVATION: 0: silu; 1: tanh approximation of gelu.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = offsets < SIZE
    places, behind = offsets, 0
    if COLUMNS > 0:
        places, behind = offsets + offsets // COLUMNS * COLUMNS, COLUMNS
    x = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    y = tl.load(up + places + behind, mask=real, other=0.0).to(tl.float32)
    share, _ = share_of(x, ACTIVATION, 1.0, WEIGHTED)
    result = x * share * y
    if WEIGHTED:
        result = result * tl.load(weights + offsets // COLUMNS, mask=real, other=0.0)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def heads_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORMS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Norms and rotates a head as placed_kernel does, of which it has the sum. Grid: (tokens, HEADS).

    x, out: [tokens, HEADS, DIM]. weight: [DIM], if NORMS. cos, sin: float32[tokens, DIM / 2].
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = DIM // 2
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    offsets = (token * HEADS + tl.program_id(1)) * DIM + columns
    low = tl.load(x + offsets).to(tl.float32)
    high = tl.load(x + offsets + HALF).to(tl.float32)
    angles = token * HALF + columns
    low, high = normed_and_rotated_head(
        low, high, weight, cos, sin, columns, angles, NORMS, 1, EPS, OFFSET, FLOAT32, DTYPE
    )
    tl.store(out + offsets, low.to(DTYPE))
    tl.store(out + offsets + HALF, high.to(DTYPE))


@triton.jit
def log_probability_kernel(
    logits,
    tokens,
    temperatures,
    log_probabilities,
    log_sums,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Log-probabilities of a row's COUNT tokens under softmax(logits / temperature), and the log of its sum. Grid:
    (rows,).

      logits: float32[rows, STRIDE], of which the first SIZE count. tokens, log_probabilities: [rows, COUNT].
      temperatures, log_sums: float32[rows]. BLOCK: 2 to the LEVELS.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    inverse = 1.0 / tl.load(temperatures + row)
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, SIZE, BLOCK):
        numbers = tl.load(logits + start + columns, mask=start + columns < SIZE, other=float("-inf"))
        largest = tl.maximum(largest, numbers)
    top = tl.max(largest) * inverse
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        real = start + columns < SIZE
        numbers = tl.load(logits + start + columns, mask=real, other=0.0)
        sums += tl.where(real, tl.exp(tl.fma(numbers, inverse, -top)), 0.0)
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [2, BLOCK >> (level + 1)]), 0)
    log_sum = tl.log(tl.sum(sums))
    for index in range(COUNT):
        number = tl.load(logits + tl.load(tokens + row * COUNT + index))
        tl.store(log_probabilities + row * COUNT + index, tl.fma(number, inverse, -top) - log_sum)
    tl.store(log_sums + row, top + log_sum)
