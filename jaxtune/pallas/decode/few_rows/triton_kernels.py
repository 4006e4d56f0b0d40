"""Bodies of the Triton kernels of a decoding step. A product is partial sums float32[SPLITS, COUNT, ...], or in the
compute dtype for one split, which its reader adds in ascending order.
"""

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import number_of_three, of_three, rounded_row

# The numbers of gelu_tanh in bfloat16 and in float16.
_CUBIC, _FACTOR = (
    tl.constexpr(tuple(float(np.asarray(number, dtype)) for dtype in (jnp.bfloat16, jnp.float16)))
    for number in (0.044715, 0.7978845608028654)
)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _activated_in_steps(gate, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation of float32 `gate`, each step rounded to DTYPE (16 bits) as XLA does in training."""
    if ACTIVATION == 1:
        share = _rounded(1.0 / _rounded(1.0 + _rounded(tl.exp(-gate), DTYPE), DTYPE), DTYPE)
        return _rounded(gate * share, DTYPE)
    else:
        # Rounded here, as Gluon makes no scalar without a layout.
        CUBIC: tl.constexpr = _CUBIC[0] if tl.bfloat16 == DTYPE else _CUBIC[1]
        FACTOR: tl.constexpr = _FACTOR[0] if tl.bfloat16 == DTYPE else _FACTOR[1]
        inner = _rounded(_rounded(gate * gate, DTYPE) * gate, DTYPE)
        inner = _rounded(_rounded(gate + _rounded(inner * CUBIC, DTYPE), DTYPE) * FACTOR, DTYPE)
        # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
        share = _rounded(1.0 + _rounded(1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)), DTYPE), DTYPE)
        return _rounded(gate * (0.5 * share), DTYPE)


@triton.jit
def _rows_of_b(b, rows, ranks, rank):
    """[rows, ranks] of an adapter's B, whose first row `b` points to; 0 where `ranks` is negative
    or not below `rank`.
    """
    real = (ranks >= 0) & (ranks < rank)
    return tl.load(b + rows[:, None] * rank + ranks[None, :], mask=real[None, :], other=0.0)


@triton.jit
def product_kernel(
    x,
    first,
    second,
    third,
    first_a,
    first_b,
    second_a,
    second_b,
    third_a,
    third_b,
    first_gate,
    second_gate,
    third_gate,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    SHARD: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    THIRD_RANK: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    SECOND_SCALE: tl.constexpr,
    THIRD_SCALE: tl.constexpr,
    GATED: tl.constexpr,
):
    """out = x W^T, W being first [FIRST, INNER], second and third one below the other (0 rows if unused): partial sums
    float32[SPLITS, COUNT, FIRST + SECOND + THIRD], or x's dtype for one split. Grid: (rows of W / ROWS, SPLITS, COUNT /
    TOKENS rounded up).

    ACTIVATION 1 (silu) or 2 (gelu_tanh): out [1, COUNT, FIRST] is activation(gate) * up, with first and second as
    gate's and up's weights; both, and each step of the activation, are rounded to x's dtype.

    RANK not 0: W + scale B A in place of each W. Each program multiplies its columns of x by those of A too, so every
    partial sum has its share of the adapter. x A^T is rounded to x's dtype before and after its scale, as in training;
    so are W's product and that with B before they are added, unless in splits or a gated product, for which the
    registers do not suffice.

      x: [INNER / SHARD, COUNT, SHARD] of 16 bits; SHARD: columns of a shard, a multiple of DEPTH.
      first_a, first_b, second_a, second_b, third_a, third_b: [its rank, INNER] and [rows, its rank] in x's dtype; None
      if RANK is 0.
      INNER: summed columns, a multiple of DEPTH (columns of a step) * SPLITS. STAGES: steps in flight.
      ROWS, TOKENS: rows of W, and of x (a power of two of at least 16), of a program.
      RANK: the largest rank as a power of two of at least 16.
      FIRST_RANK, SECOND_RANK, THIRD_RANK: 0: no adapter. FIRST_SCALE, SECOND_SCALE, THIRD_SCALE: the adapters' factors.
      GATED: a factor for each row of x and column of its x A^T in their place: first_gate, second_gate, third_gate,
        float32[COUNT, its rank]; else these are None.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = FIRST if ACTIVATION else FIRST + SECOND + THIRD
    begin = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    WEIGHTS: tl.constexpr = 1 if ACTIVATION else 1 + (SECOND > 0) + (THIRD > 0)
    number = (begin >= FIRST).to(tl.int32) + (begin >= FIRST + SECOND).to(tl.int32)
    weight = of_three(number, first, second, third, WEIGHTS)
    rows = begin - number_of_three(number, 0, FIRST, FIRST + SECOND, WEIGHTS) + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if COUNT > TOKENS:
        tokens += tl.program_id(2) * TOKENS
    lines = rows.to(tl.int64)[:, None] * INNER
    real = (tokens < COUNT)[None, :]
    steps: tl.constexpr = INNER // DEPTH // SPLITS
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    if RANK > 0:
        a, b = (
            of_three(number, first_a, second_a, third_a, WEIGHTS),
            of_three(number, first_b, second_b, third_b, WEIGHTS),
        )
        rank = number_of_three(number, FIRST_RANK, SECOND_RANK, THIRD_RANK, WEIGHTS)
        first_scale, second_scale = tl.full([], FIRST_SCALE, tl.float32), tl.full([], SECOND_SCALE, tl.float32)
        scale = of_three(number, first_scale, second_scale, tl.full([], THIRD_SCALE, tl.float32), WEIGHTS)
        # Those of gate and up are one product of twice the rank.
        THIN: tl.constexpr = 2 * RANK if ACTIVATION else RANK
        ranks = tl.arange(0, THIN)
        thin_lines, exists = a + ranks * INNER, ranks < rank
        if ACTIVATION:
            thin_lines = tl.where(ranks < RANK, thin_lines, second_a + (ranks - RANK) * INNER)
            exists = tl.where(ranks < RANK, exists, ranks < RANK + SECOND_RANK)
            scale = tl.where(ranks < RANK, scale, SECOND_SCALE)[None, :]
        inner = tl.zeros([TOKENS, THIN], tl.float32)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        columns = step * DEPTH + tl.arange(0, DEPTH)
        x_columns = columns
        if SHARD < INNER:
            x_columns += step * DEPTH // SHARD * (COUNT - 1) * SHARD
        x_tile = tl.load(x + tokens[None, :] * SHARD + x_columns[:, None], mask=real, other=0.0)
        total = tl.dot(tl.load(weight + lines + columns[None, :], eviction_policy="evict_first"), x_tile, total)
        if ACTIVATION:
            up = tl.dot(tl.load(second + lines + columns[None, :], eviction_policy="evict_first"), x_tile, up)
        if RANK > 0:
            thin = tl.load(thin_lines[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
            inner = tl.dot(tl.trans(x_tile), tl.trans(thin), inner)
    if RANK > 0:
        inner = _rounded(inner, DTYPE)
        if GATED:
            gate = of_three(number, first_gate, second_gate, third_gate, WEIGHTS)
            factors = gate + tokens[:, None] * rank + ranks[None, :]
            if ACTIVATION:
                of_up = second_gate + tokens[:, None] * SECOND_RANK + (ranks - RANK)[None, :]
                factors = tl.where((ranks < RANK)[None, :], factors, of_up)
            scale = tl.load(factors, mask=(tokens < COUNT)[:, None] & exists[None, :], other=0.0)
            inner = tl.where(scale != 0.0, inner, 0.0)  # whatever the columns of other adapters give
        inner = tl.trans((inner * scale).to(DTYPE))
        b_rows = _rows_of_b(b, rows, ranks, rank)
        if ACTIVATION:  # read at the same time
            up_b_rows = _rows_of_b(second_b, rows, ranks - RANK, SECOND_RANK)
        if SPLITS == 1 and not ACTIVATION:
            total = _rounded(total, DTYPE) + _rounded(tl.dot(b_rows, inner), DTYPE)
        else:
            total = tl.dot(b_rows, inner, total)
        if ACTIVATION:
            up = tl.dot(up_b_rows, inner, up)
    if ACTIVATION:
        total = _activated_in_steps(_rounded(total, DTYPE), ACTIVATION, DTYPE) * _rounded(up, DTYPE)
    offsets = (split * COUNT + tokens[:, None]) * WIDTH + begin + tl.arange(0, ROWS)[None, :]
    tl.store(out + offsets, tl.trans(total).to(out.dtype.element_ty), mask=(tokens < COUNT)[:, None])


@triton.jit
def activated_kernel(gate, up, out, BLOCK: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Writes activation(gate) * up, SIZE numbers, BLOCK a program, rounded as product_kernel rounds.

    gate, up, out: flat, SIZE numbers of 16 bits. ACTIVATION: 1: silu; 2: tanh approximation of gelu.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = offsets < SIZE
    result = tl.load(gate + offsets, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(up + offsets, mask=real, other=0.0).to(tl.float32)
    result = _activated_in_steps(result, ACTIVATION, DTYPE) * factor
    tl.store(out + offsets, result.to(DTYPE), mask=real)


@triton.jit
def _sum(partial_sums, offsets, real, STRIDE, SPLITS: tl.constexpr, DTYPE: tl.constexpr):
    """float32 sum over SPLITS splits, STRIDE numbers apart, rounded to DTYPE; 0 where `real` is False."""
    total = tl.load(partial_sums + offsets, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_sums + split * STRIDE + offsets, mask=real, other=0.0)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _times_weight(wide, weight, OFFSET: tl.constexpr, FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    """Product of the normed float32 `wide` with its norm's weight, rounded to DTYPE, as float32."""
    if FLOAT32:
        scaled = wide * (OFFSET + weight.to(tl.float32))
    else:
        scaled = wide.to(DTYPE).to(tl.float32) * weight.to(DTYPE).to(tl.float32)
    return scaled.to(DTYPE).to(tl.float32)


@triton.jit
def _normed_and_rotated(
    low,
    high,
    inverse,
    weights,
    rotation,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norms and rotates heads of queries or keys: float32 halves [HALF] or [heads, HALF], each step but the rotation
    rounded.
    """
    if NORMS:
        low = _times_weight(low * inverse, weights[0], OFFSET, FLOAT32, DTYPE)
        high = _times_weight(high * inverse, weights[1], OFFSET, FLOAT32, DTYPE)
    if ROTATES:
        rotated_low = low * rotation[0] - high * rotation[1]
        high = high * rotation[0] + low * rotation[1]
        low = rotated_low
    return low, high


@triton.jit
def _loaded(low, high, offsets, READS: tl.constexpr):
    """The numbers at `offsets` from the pointers low and high; zeros, without a read, if READS is 0."""
    if READS:
        return tl.load(low + offsets), tl.load(high + offsets)
    else:
        return 0.0, 0.0


@triton.jit
def normed_and_rotated_head(
    low,
    high,
    weight,
    cos,
    sin,
    columns,
    angles,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norms and rotates the float32 halves [HALF] of one head; a compiler has no choice of multiply-adds.

    weight: the norm's, if NORMS. columns, angles: indices of the first half's numbers in weight, and in cos and sin.
    """
    HALF: tl.constexpr = low.shape[0]
    inverse = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / (2 * HALF) + EPS)
    weights = _loaded(weight, weight + HALF, columns, NORMS)
    low, high = _normed_and_rotated(low, high, inverse, weights, weights, NORMS, 0, OFFSET, FLOAT32, DTYPE)
    if ROTATES:
        c, s = _loaded(cos, sin, angles, ROTATES)
        rotated = tl.fma(low, c, -(high * s))
        high = tl.fma(high, c, low * s)
        low = rotated
    return low, high


@triton.jit
def added_norm_kernel(
    x,
    partial_sums,
    weight,
    added,
    normed,
    codes,
    scales,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    SHARD: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """added = x + the sum of partial_sums, which is rounded first; normed = the RMS norm of added as rounded. Grid:
    (COUNT,). SPLITS 0: added is x, and is not written.

    ROUNDS: normed in e4m3 too, as triton_parts.rounded_row writes it: codes, scales, BLOCK; else these are None.

      x, added, normed: [COUNT, SIZE]. weight: [SIZE], the norm's.
      partial_sums: [SPLITS, SIZE / SHARD, COUNT, SHARD]; SHARD: columns of a shard.
      WIDTH: SIZE as a power of two. EPS: added to the mean square.
      FLOAT32: 1: OFFSET is added to the weight, and only the product is rounded; 0: the normed numbers are, too.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    real = columns < SIZE
    offsets = row * SIZE + columns
    # Read before the sum over the row, for which a program waits.
    factors = tl.load(weight + columns, mask=real, other=0.0)
    stream = tl.load(x + offsets, mask=real, other=0.0).to(tl.float32)
    if SPLITS > 0:
        sums = offsets
        if SHARD < SIZE:
            sums = row * SHARD + columns + columns // SHARD * (COUNT - 1) * SHARD
        stream += _sum(partial_sums, sums, real, COUNT * SIZE, SPLITS, DTYPE)
        stream = stream.to(DTYPE).to(tl.float32)
        tl.store(added + offsets, stream.to(DTYPE), mask=real)
    stream = stream * tl.rsqrt(tl.sum(stream * stream) / SIZE + EPS)
    stream = _times_weight(stream, factors, OFFSET, FLOAT32, DTYPE)
    tl.store(normed + offsets, stream.to(DTYPE), mask=real)
    if ROUNDS:
        rounded_row(stream, codes, scales, row, COUNT, SIZE, WIDTH, BLOCK)


@triton.jit
def placed_kernel(
    partial_sums,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    input_keys,
    input_values,
    query,
    keys,
    values,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """One head of one new token: a query is normed, rotated and written to `query` [COUNT, HEADS, DIM]; a key, too, to
    `keys` [COUNT, KV_HEADS, CAPACITY, DIM] at its position modulo CAPACITY; a value as it is to `values`. Sums over
    splits, and results of norm and rotation, are rounded to the query's dtype. Grid: (HEADS + 2 KV_HEADS, COUNT).

      partial_sums: [SPLITS, COUNT, HEADS + 2 KV_HEADS, DIM].
      q_weight, k_weight: [DIM], if NORMS. cos, sin: float32[COUNT, DIM / 2], if ROTATES.
      positions: int32[COUNT]; nothing is written to the caches for a negative one.
      input_keys, input_values: the caches as inputs, in the same memory; not read.
      EPS: added to the mean square of a head.
      FLOAT32: 1: OFFSET is added to the weight, and only the product is rounded; 0: the normed numbers are, too.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    head, row = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, HALF)
    real = columns < HALF
    offsets = (row * ALL + head) * DIM + columns
    low = _sum(partial_sums, offsets, real, COUNT * ALL * DIM, SPLITS, DTYPE)
    high = _sum(partial_sums, offsets + HALF, real, COUNT * ALL * DIM, SPLITS, DTYPE)
    if head < HEADS + KV_HEADS:
        weight = q_weight
        if head >= HEADS:
            weight = k_weight
        angles = row * HALF + columns
        low, high = normed_and_rotated_head(
            low, high, weight, cos, sin, columns, angles, NORMS, ROTATES, EPS, OFFSET, FLOAT32, DTYPE
        )
    if head < HEADS:
        target = query + (row * HEADS + head) * DIM + columns
        tl.store(target, low.to(DTYPE))
        tl.store(target + HALF, high.to(DTYPE))
    else:
        position = tl.load(positions + row)
        if position >= 0:
            kv_head = (head - HEADS) % KV_HEADS
            cache_offset = ((row * KV_HEADS + kv_head).to(tl.int64) * CAPACITY + position % CAPACITY) * DIM
            cache = keys
            if head >= HEADS + KV_HEADS:
                cache = values
            tl.store(cache + cache_offset + columns, low.to(DTYPE))
            tl.store(cache + cache_offset + HALF + columns, high.to(DTYPE))
