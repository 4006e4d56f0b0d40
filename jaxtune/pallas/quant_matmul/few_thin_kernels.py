"""The Triton kernel of few_thin.py, and what a product's kernel adds of an adapter."""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import number_of_three, of_three


@triton.jit
def thin_kernel(
    x,
    first_a,
    second_a,
    third_a,
    first_gate,
    second_gate,
    third_gate,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    THIRD_RANK: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    SECOND_SCALE: tl.constexpr,
    THIRD_SCALE: tl.constexpr,
):
    """A tile of out [COUNT, WIDTH]: x [COUNT, INNER] times first_a^T, RANK columns of which FIRST_RANK are not 0, then
    second_a's and third_a's; rounded, scaled, rounded. Grid: (COUNT / TILE, WIDTH / TILE, both rounded up).

    first_a, second_a, third_a: [its rank, INNER]. DEPTH: columns of a step, which divides INNER.
    GATED: first_gate, second_gate, third_gate, float32[COUNT, its rank], in place of the scales; else they are None.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin = tl.program_id(1) * TILE
    WEIGHTS: tl.constexpr = WIDTH // RANK
    number = begin // RANK
    a = of_three(number, first_a, second_a, third_a, WEIGHTS)
    rank = number_of_three(number, FIRST_RANK, SECOND_RANK, THIRD_RANK, WEIGHTS)
    tokens, ranks = tl.program_id(0) * TILE + tl.arange(0, TILE), begin - number * RANK + tl.arange(0, TILE)
    real, exists = tokens < COUNT, ranks < rank
    total = tl.zeros([TILE, TILE], tl.float32)
    for step in tl.range(INNER // DEPTH, num_stages=STAGES):
        columns = step * DEPTH + tl.arange(0, DEPTH)
        x_tile = tl.load(x + tokens[:, None] * INNER + columns[None, :], mask=real[:, None], other=0.0)
        a_tile = tl.load(a + ranks[None, :] * INNER + columns[:, None], mask=exists[None, :], other=0.0)
        total = tl.dot(x_tile, a_tile, total)
    total = total.to(DTYPE).to(tl.float32)
    if GATED:
        mask = real[:, None] & exists[None, :]
        gate = of_three(number, first_gate, second_gate, third_gate, WEIGHTS)
        factors = tl.load(gate + tokens[:, None] * rank + ranks[None, :], mask=mask, other=0.0)
        total = tl.where(factors != 0.0, total * factors, 0.0)  # whatever the columns of other adapters give
    else:
        first_scale, second_scale = tl.full([], FIRST_SCALE, tl.float32), tl.full([], SECOND_SCALE, tl.float32)
        total *= of_three(number, first_scale, second_scale, tl.full([], THIRD_SCALE, tl.float32), WEIGHTS)
    offsets = tokens[:, None] * WIDTH + begin + tl.arange(0, TILE)[None, :]
    tl.store(out + offsets, total.to(DTYPE), mask=real[:, None])


@triton.jit
def adapted(thin, b, rank, rows, tokens, first, COUNT: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """float32[rows, tokens]: rows of b [out, rank] times RANK columns of thin [COUNT, WIDTH], from
    `first` on, rounded.
    """
    ranks = tl.arange(0, RANK)
    side = tl.load(b + rows[:, None] * rank + ranks[None, :], mask=(ranks < rank)[None, :], other=0.0)
    inner = tl.load(thin + tokens[None, :] * WIDTH + first + ranks[:, None], mask=(tokens < COUNT)[None, :], other=0.0)
    return tl.dot(side, inner).to(side.dtype).to(tl.float32)
