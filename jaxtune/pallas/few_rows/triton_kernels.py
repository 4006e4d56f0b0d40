"""The bodies of the Triton kernels of a decoding step, which triton.py calls (that of experts is in
experts_kernels.py): product_kernel (products and gated products), activated_kernel, added_norm_kernel, and
placed_kernel, which norms, rotates and writes into the caches.

The result of `products` is given as partial sums: float32 [SPLITS, COUNT, ...], or if SPLITS is 1 the product itself in
the compute dtype. The kernel that reads partial sums adds the splits in ascending order and rounds the result to the
compute dtype. FLOAT32 says where a norm rounds: 1: after the product with its weight only; 0: before and after it.
OFFSET is added to the weight if FLOAT32 is 1.
"""

import triton
import triton.language as tl


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """For expert_kernel: returns the activation of a gated MLP, applied to `gate`, in float32 as `gate` is: silu if
    ACTIVATION is 1, and the tanh approximation of gelu if it is 2."""
    if ACTIVATION == 1:
        return gate / (1.0 + tl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Returns x, float32, rounded to DTYPE, as float32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _activated_in_steps(gate, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """For product_kernel: returns the activation of a gated MLP, applied to `gate`, with the rounding of training,
    where XLA rounds each step to DTYPE. So tokens are sampled from the model that is trained.

    Args:
      gate: float32 numbers that DTYPE can represent, as the result's are.
      ACTIVATION: 1: silu. 2: the tanh approximation of gelu, whose constants are rounded too.
      DTYPE: the compute dtype.
    """
    if ACTIVATION == 1:
        share = _rounded(1.0 / _rounded(1.0 + _rounded(tl.exp(-gate), DTYPE), DTYPE), DTYPE)
        return _rounded(gate * share, DTYPE)
    else:
        cubic = _rounded(tl.full([], 0.044715, tl.float32), DTYPE)
        factor = _rounded(tl.full([], 0.7978845608028654, tl.float32), DTYPE)
        inner = _rounded(_rounded(gate * gate, DTYPE) * gate, DTYPE)
        inner = _rounded(_rounded(gate + _rounded(inner * cubic, DTYPE), DTYPE) * factor, DTYPE)
        # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
        share = _rounded(1.0 + _rounded(1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)), DTYPE), DTYPE)
        return _rounded(gate * (0.5 * share), DTYPE)


@triton.jit
def _rows_of_b(b, rows, ranks, rank):
    """For product_kernel: loads rows of an adapter's B, to whose first row `b` points and which has `rank` columns, for
    the tensor cores: [rows, ranks], the numbers at the indices `rows` and `ranks`, with zeros in the columns `ranks`
    that are negative or not below `rank`. In a gated product the columns of x A^T for gate come before those for up, so
    that the indices for up are negative at gate's."""
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
    RANK: tl.constexpr,
    FIRST_RANK: tl.constexpr,
    SECOND_RANK: tl.constexpr,
    THIRD_RANK: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    SECOND_SCALE: tl.constexpr,
    THIRD_SCALE: tl.constexpr,
):
    """The kernel of products and gated_product: out = x W^T. W consists of the weights first, second and third, [FIRST,
    INNER], [SECOND, INNER] and [THIRD, INNER], one below the other; a weight that is not used has 0 rows. out has the
    partial sums [SPLITS, COUNT, FIRST + SECOND + THIRD], float32, or with one split the product in x's dtype. Grid:
    (rows of W / ROWS, SPLITS, COUNT / TOKENS rounded up).

    If ACTIVATION is not 0, first and second are the weights of gate and up, and out [1, COUNT, FIRST] is
    activation(gate) * up, gate and up being x times the weights; both, and each step of the activation, are rounded to
    x's dtype before they are multiplied. SPLITS is 1 and the grid has FIRST / ROWS programs.

    If RANK is not 0, W + scale B A is multiplied in place of each weight W. Each program multiplies its columns of x by
    those of A too, [TOKENS, RANK] (of both A if ACTIVATION is not 0, [TOKENS, 2 * RANK]), and adds this times its rows
    of B to its sum. So every partial sum has its share of the adapter's product, and A is read by each program that
    multiplies rows of its weight. x A^T is rounded to x's dtype as in training. So is the product of that with B if it
    is neither divided into splits nor that of a gated product, for which the registers do not suffice.

    Args:
      x: [COUNT, INNER], of which the tensor cores multiply TOKENS rows, the further ones being 0.
      first_a, second_a, third_a: A of each weight's adapter, [its rank, INNER], in x's dtype; None if RANK is 0.
      first_b, second_b, third_b: B of each, [rows of the weight, its rank], in x's dtype; None if RANK is 0.
      COUNT: the number of rows of x.
      INNER: the number of columns that are summed over, a multiple of DEPTH * SPLITS.
      FIRST, SECOND, THIRD: the number of rows of each weight, multiples of ROWS.
      ROWS: the rows of W of a program.
      DEPTH: the columns that are read in one step.
      TOKENS: the rows of x of a program: COUNT, rounded up to a power of two of at least 16, or less.
      ACTIVATION: 0: none; 1: silu; 2: the tanh approximation of gelu.
      SPLITS: the ranges of columns that different programs sum over.
      STAGES: how many steps are read ahead.
      RANK: the largest rank, rounded up to a power of two of at least 16; 0 if no weight has an adapter.
      FIRST_RANK, SECOND_RANK, THIRD_RANK: the ranks; 0 for a weight without an adapter, whose A and B are not read.
      FIRST_SCALE, SECOND_SCALE, THIRD_SCALE: the factors on x A^T, which is rounded to x's dtype before and after.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = FIRST if ACTIVATION else FIRST + SECOND + THIRD
    begin = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    weight, own = first, begin
    a, b = first_a, first_b
    rank, scale = tl.full([], FIRST_RANK, tl.int32), tl.full([], FIRST_SCALE, tl.float32)
    if not ACTIVATION:
        if SECOND > 0:
            if begin >= FIRST:
                weight, own = second, begin - FIRST
                if RANK > 0:
                    a, b = second_a, second_b
                    rank, scale = tl.full([], SECOND_RANK, tl.int32), tl.full([], SECOND_SCALE, tl.float32)
        if THIRD > 0:
            if begin >= FIRST + SECOND:
                weight, own = third, begin - FIRST - SECOND
                if RANK > 0:
                    a, b = third_a, third_b
                    rank, scale = tl.full([], THIRD_RANK, tl.int32), tl.full([], THIRD_SCALE, tl.float32)
    rows = own + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if COUNT > TOKENS:
        tokens += tl.program_id(2) * TOKENS
    lines = rows.to(tl.int64)[:, None] * INNER
    real = (tokens < COUNT)[None, :]
    steps: tl.constexpr = INNER // DEPTH // SPLITS
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    if RANK > 0:
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
        part = tl.load(x + tokens[None, :] * INNER + columns[:, None], mask=real, other=0.0)
        total = tl.dot(tl.load(weight + lines + columns[None, :], eviction_policy="evict_first"), part, total)
        if ACTIVATION:
            up = tl.dot(tl.load(second + lines + columns[None, :], eviction_policy="evict_first"), part, up)
        if RANK > 0:
            thin = tl.load(thin_lines[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
            inner = tl.dot(tl.trans(part), tl.trans(thin), inner)
    if RANK > 0:
        inner = tl.trans((_rounded(inner, DTYPE) * scale).to(DTYPE))
        side = _rows_of_b(b, rows, ranks, rank)
        if ACTIVATION:  # read at the same time
            up_side = _rows_of_b(second_b, rows, ranks - RANK, SECOND_RANK)
        if SPLITS == 1 and not ACTIVATION:
            total += _rounded(tl.dot(side, inner), DTYPE)
        else:
            total = tl.dot(side, inner, total)
        if ACTIVATION:
            up = tl.dot(up_side, inner, up)
    if ACTIVATION:
        total = _activated_in_steps(_rounded(total, DTYPE), ACTIVATION, DTYPE) * _rounded(up, DTYPE)
    places = (split * COUNT + tokens[:, None]) * WIDTH + begin + tl.arange(0, ROWS)[None, :]
    tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=(tokens < COUNT)[:, None])


@triton.jit
def activated_kernel(gate, up, out, BLOCK: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    """The kernel of activated: writes activation(gate) * up to out, each of SIZE numbers, rounded as product_kernel
    rounds them. Each program computes BLOCK numbers. ACTIVATION: 1: silu. 2: the tanh approximation of gelu."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = places < SIZE
    wide = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
    wide = _activated_in_steps(wide, ACTIVATION, DTYPE) * factor
    tl.store(out + places, wide.to(DTYPE), mask=real)


@triton.jit
def _sum(parts, places, real, STRIDE, SPLITS: tl.constexpr, DTYPE: tl.constexpr):
    """Loads the partial sums of a product and adds them, for added_norm_kernel and placed_kernel: for each of `places`,
    offsets from `parts`, the sum of the numbers at that offset over SPLITS splits, rounded to DTYPE and returned as
    float32; 0 where the mask `real` is False. STRIDE: the distance of two splits, in numbers."""
    total = tl.load(parts + places, mask=real, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * STRIDE + places, mask=real, other=0.0)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _times_weight(wide, weight, OFFSET: tl.constexpr, FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    """The product of a norm with its weight, the last step of an RMS norm, rounded to DTYPE and returned as float32.

    Args:
      wide: the normed numbers, float32.
      weight: in any float dtype.
      OFFSET: the number that is added to the weight if FLOAT32 is 1.
      FLOAT32: 1: only the product is rounded. 0: both factors are rounded to DTYPE first.
    """
    if FLOAT32:
        scaled = wide * (OFFSET + weight.to(tl.float32))
    else:
        scaled = wide.to(DTYPE).to(tl.float32) * weight.to(DTYPE).to(tl.float32)
    return scaled.to(DTYPE).to(tl.float32)


@triton.jit
def _turned(
    low,
    high,
    inverse,
    weights,
    turn,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    OFFSET: tl.constexpr,
    FLOAT32: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norms and rotates heads of queries or keys, for placed_kernel and attended_kernel. Returns their two halves,
    float32; each step is rounded to DTYPE, but the rotation is not.

    Args:
      low, high: the halves of one head, [HALF], or of several, [heads, HALF], float32.
      inverse: the norm's factor, the reciprocal root of the mean square; one number, or [heads, 1].
      weights: the halves of the norm's weight, [HALF] or [1, HALF] each; not used if NORMS is 0.
      turn: cos and sin of the rotation's angles, float32, of the same shape; not used if ROTATES is 0.
      NORMS, ROTATES: 1: the heads are normed, rotated; 0: they are not.
      OFFSET, FLOAT32: of the norm (_times_weight).
    """
    if NORMS:
        low = _times_weight(low * inverse, weights[0], OFFSET, FLOAT32, DTYPE)
        high = _times_weight(high * inverse, weights[1], OFFSET, FLOAT32, DTYPE)
    if ROTATES:
        turned = low * turn[0] - high * turn[1]
        high = high * turn[0] + low * turn[1]
        low = turned
    return low, high


@triton.jit
def _loaded(low, high, places, READS: tl.constexpr):
    """For placed_kernel and attended_kernel: a pair of the numbers at `places`, offsets from the pointers low and high;
    if READS is 0 nothing is read, and both are 0."""
    if READS:
        return tl.load(low + places), tl.load(high + places)
    else:
        return 0.0, 0.0


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
    """The kernel of added_norm: writes added = x + the sum of parts over the splits, where that sum is rounded to x's
    dtype first, and normed = the RMS norm of added as rounded. Grid: (COUNT,): each program computes one row of SIZE
    numbers.

    Args:
      x: [COUNT, SIZE], the residual stream.
      parts: [SPLITS, COUNT, SIZE], the partial sums of a product.
      weight: [SIZE], that of the norm.
      added, normed: the results, [COUNT, SIZE].
      WIDTH: SIZE, rounded up to a power of two.
      EPS: the number that is added to the mean square.
      OFFSET: the number that is added to the weight if FLOAT32 is 1.
      FLOAT32: 1: the norm is rounded only after the product with the weight. 0: before and after it.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    real = columns < SIZE
    places = row * SIZE + columns
    # Read before the sum over the row, for which a program waits.
    factors = tl.load(weight + columns, mask=real, other=0.0)
    wide = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    wide += _sum(parts, places, real, COUNT * SIZE, SPLITS, DTYPE)
    wide = wide.to(DTYPE).to(tl.float32)
    tl.store(added + places, wide.to(DTYPE), mask=real)
    wide = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + EPS)
    wide = _times_weight(wide, factors, OFFSET, FLOAT32, DTYPE)
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
    """The kernel of placed. Each program computes one head of one new token: a query is normed, rotated and written to
    `query`; a key is normed, rotated and written to `keys` at the token's position; a value is written to `values`
    there, as it is. The sums over the splits, and the results of norm and rotation, are rounded to the caches' dtype.
    Grid: (HEADS + 2 KV_HEADS, COUNT).

    Args:
      parts: [SPLITS, COUNT, HEADS + 2 KV_HEADS, DIM], the partial sums of queries, keys and values.
      q_weight, k_weight: [DIM], those of the norms; not read if NORMS is 0.
      cos, sin: float32[COUNT, DIM / 2], of the rotation's angles; not read if ROTATES is 0.
      positions: int32[COUNT]; a key and a value are written at the position modulo CAPACITY, none for a negative one.
      old_keys, old_values: the caches as inputs, in the same memory as keys and values; not read.
      query: [COUNT, HEADS, DIM].
      keys, values: the caches, [COUNT, KV_HEADS, CAPACITY, DIM].
      NORMS: 1: queries and keys are normed; 0: they are not.
      ROTATES: 1: they are rotated; 0: they are not.
      EPS: the number that the norms add to the mean square.
      OFFSET: the number that they add to their weights if FLOAT32 is 1.
      FLOAT32: 1: a norm is rounded only after the product with its weight. 0: before and after it.
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
        inverse = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / DIM + EPS)
        weight = q_weight
        if head >= HEADS:
            weight = k_weight
        weights = _loaded(weight, weight + HALF, columns, NORMS)
        turn = _loaded(cos, sin, row * HALF + columns, ROTATES)
        low, high = _turned(low, high, inverse, weights, turn, NORMS, ROTATES, OFFSET, FLOAT32, DTYPE)
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
