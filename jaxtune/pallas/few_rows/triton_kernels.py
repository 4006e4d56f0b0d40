"""The bodies of the Triton kernels of a decoding step, which triton.py describes and calls.

Partial sums are float32 [SPLITS, COUNT, ...], or with SPLITS of 1 the finished product in the compute dtype; who reads
them adds the splits in ascending order and rounds to the compute dtype, as a product is rounded. FLOAT32 says where a
norm rounds: after the product with its weight (1) or before and after it (0). OFFSET is added to the weight.
"""

import triton
import triton.language as tl


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """The activation of a gated MLP of `gate`, float32: silu for an ACTIVATION of 1, else gelu by tanh."""
    if ACTIVATION == 1:
        return gate / (1.0 + tl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))


@triton.jit
def product_kernel(
    x,
    first,
    second,
    third,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = x W^T for COUNT rows of x [COUNT, INNER], padded to TOKENS. Grid: (rows of all weights / ROWS, SPLITS).
    DEPTH columns are read at a time, with STAGES reads on their way.

    W is the weights first, second and third, of FIRST, SECOND and THIRD rows, one below the other; out is the partial
    sums [SPLITS, COUNT, FIRST + SECOND + THIRD]. With an ACTIVATION, first and second are the weights of gate and up,
    and out [COUNT, FIRST] is activation(gate) * up, for which gate and up are rounded; there is one split.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = FIRST if ACTIVATION else FIRST + SECOND + THIRD
    begin = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    weight, own = first, begin
    if not ACTIVATION:
        if SECOND > 0:
            if begin >= FIRST:
                weight, own = second, begin - FIRST
        if THIRD > 0:
            if begin >= FIRST + SECOND:
                weight, own = third, begin - FIRST - SECOND
    rows = own + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    lines = rows.to(tl.int64)[:, None] * INNER
    real = (tokens < COUNT)[None, :]
    steps: tl.constexpr = INNER // DEPTH // SPLITS
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        columns = step * DEPTH + tl.arange(0, DEPTH)
        part = tl.load(x + tokens[None, :] * INNER + columns[:, None], mask=real, other=0.0)
        total = tl.dot(tl.load(weight + lines + columns[None, :], eviction_policy="evict_first"), part, total)
        if ACTIVATION:
            up = tl.dot(tl.load(second + lines + columns[None, :], eviction_policy="evict_first"), part, up)
    if ACTIVATION:
        gate = _activated(total.to(DTYPE).to(tl.float32), ACTIVATION).to(DTYPE).to(tl.float32)
        total = gate * up.to(DTYPE).to(tl.float32)
    places = (split * COUNT + tokens[:, None]) * WIDTH + begin + tl.arange(0, ROWS)[None, :]
    tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=(tokens < COUNT)[:, None])


@triton.jit
def _sum(parts, places, real, STRIDE, SPLITS: tl.constexpr, DTYPE: tl.constexpr):
    """float32: at each of `places` (offsets of numbers) the sum of the partial sums `parts` over SPLITS splits, which
    are STRIDE numbers apart, rounded to DTYPE; 0 where `real` is false."""
    total = tl.load(parts + places, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * STRIDE + places, mask=real, other=0.0)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _times_weight(wide, weight, OFFSET: tl.constexpr, FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    """A norm's product with its weight, float32 that is rounded to DTYPE, from normed numbers `wide`, float32, and the
    weight, of its own dtype. FLOAT32: OFFSET is added to the weight, and only the product is rounded; otherwise both
    factors are rounded too."""
    if FLOAT32:
        scaled = wide * (OFFSET + weight.to(tl.float32))
    else:
        scaled = wide.to(DTYPE).to(tl.float32) * weight.to(DTYPE).to(tl.float32)
    return scaled.to(DTYPE).to(tl.float32)


@triton.jit
def added_norm_kernel(
    x,
    parts,
    weight,
    added,
    normed,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """Writes added = x + the sum of parts, and normed = the RMS norm of that, of one row of SIZE numbers, padded to
    WIDTH. Grid: (COUNT,).

    x, added and normed are [COUNT, SIZE]; parts is [SPLITS, COUNT, SIZE]; weight [SIZE], EPS, OFFSET and FLOAT32 are
    the norm's: EPS is added to the mean square, OFFSET to the weight, and FLOAT32 says that only the product with the
    weight is rounded.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    real = columns < SIZE
    places = row * SIZE + columns
    wide = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    wide += _sum(parts, places, real, COUNT * SIZE, SPLITS, DTYPE)
    wide = wide.to(DTYPE).to(tl.float32)
    tl.store(added + places, wide.to(DTYPE), mask=real)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + EPS)
    wide = _times_weight(wide, tl.load(weight + columns, mask=real, other=0.0), OFFSET, FLOAT32, DTYPE)
    tl.store(normed + places, wide.to(DTYPE), mask=real)


@triton.jit
def placed_kernel(
    parts,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    old_keys,
    old_values,
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
    """One head of one new token: a query is normed, rotated and written to query [COUNT, HEADS, DIM], a key normed,
    rotated and written to its place in keys, a value written to values. Grid: (HEADS + 2 KV_HEADS, COUNT). q_weight
    and k_weight [DIM] are those of the norms (NORMS: whether there are any), with EPS, OFFSET and FLOAT32 as in
    added_norm_kernel; ROTATES: whether heads are rotated.

    parts [SPLITS, COUNT, HEADS + 2 KV_HEADS, DIM]; cos and sin float32[COUNT, DIM / 2]; positions int32[COUNT]. keys
    and values [COUNT, KV_HEADS, CAPACITY, DIM] are the same memory as old_keys and old_values, which are not read.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    head, row = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, HALF)
    real = columns < HALF
    places = (row * ALL + head) * DIM + columns
    low = _sum(parts, places, real, COUNT * ALL * DIM, SPLITS, DTYPE)
    high = _sum(parts, places + HALF, real, COUNT * ALL * DIM, SPLITS, DTYPE)
    if head < HEADS + KV_HEADS:
        if NORMS:
            inverse = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / DIM + EPS)
            weight = q_weight
            if head >= HEADS:
                weight = k_weight
            low = _times_weight(low * inverse, tl.load(weight + columns), OFFSET, FLOAT32, DTYPE)
            high = _times_weight(high * inverse, tl.load(weight + HALF + columns), OFFSET, FLOAT32, DTYPE)
        if ROTATES:
            c = tl.load(cos + row * HALF + columns)
            s = tl.load(sin + row * HALF + columns)
            turned = low * c - high * s
            high = high * c + low * s
            low = turned
    if head < HEADS:
        to = query + (row * HEADS + head) * DIM + columns
        tl.store(to, low.to(DTYPE))
        tl.store(to + HALF, high.to(DTYPE))
    else:
        position = tl.load(positions + row)
        if position >= 0:
            own = (head - HEADS) % KV_HEADS
            place = ((row * KV_HEADS + own).to(tl.int64) * CAPACITY + position % CAPACITY) * DIM
            cache = keys
            if head >= HEADS + KV_HEADS:
                cache = values
            tl.store(cache + place + columns, low.to(DTYPE))
            tl.store(cache + place + HALF + columns, high.to(DTYPE))
