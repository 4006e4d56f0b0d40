"""Triton kernel of `attended`, one program for each key/value head of each row, or several where few rows decode."""

import triton
import triton.language as tl

from jaxtune.pallas.decode.few_rows.triton_kernels import _loaded, _normed_and_rotated, _sum

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def _in_log2(scores, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Float32 products of queries and keys, scaled, capped (CAP 0: not) and in units of log2."""
    scores = scores * SCALE
    if CAP > 0.0:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
        scores = CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP * _LOG2E))))
    return scores * _LOG2E


@triton.jit
def _operand(query, MULTIPLIED: tl.constexpr):
    """A query's numbers as products read them; float16 has no larger ones. NaN stays."""
    if query.dtype == MULTIPLIED:
        return query
    else:
        return tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(MULTIPLIED)


@triton.jit
def _own_parts(
    partial_sums,
    q_weight,
    k_weight,
    rotations,
    sinks,
    keys,
    values,
    row,
    later,
    head,
    share,
    position,
    newest,
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
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    SHARES: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """Norms and rotates the new token's heads of one key/value head of one row, and writes its key and value into the
    caches.

    Returns its queries' halves in MULTIPLIED, and top, total and acc of its own key and the sink.
    """
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    OWN: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    stride: tl.constexpr = COUNT * ALL * DIM
    half, columns, members = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, GROUP)
    real = (members < OWN)[:, None] & (half < HALF)[None, :]
    KV_OF_SHARD: tl.constexpr = KV_HEADS // SHARDS
    before, kv_head = row * ALL, head
    if SHARDS > 1:
        shard = head // KV_OF_SHARD
        before, kv_head = (shard * COUNT + row) * (ALL // SHARDS), head - shard * KV_OF_SHARD
    offsets = (before + kv_head * OWN + members)[:, None] * DIM + half[None, :]
    key_offset = (before + HEADS // SHARDS + kv_head) * DIM

    # All is read before anything that threads exchange, as a program waits for memory only once then.
    if sinks is None:
        sink = tl.full([GROUP], _MASKED, tl.float32)
    else:
        sink = tl.load(sinks + head * OWN + members, mask=members < OWN, other=_MASKED)
    angles = row * DIM + half
    k_rotation = _loaded(rotations, rotations + HALF, angles, ROTATES)
    q_rotation = _loaded(rotations, rotations + HALF, angles[None, :], ROTATES)
    q_weight, k_weight = q_weight + later, k_weight + later
    q_norm = _loaded(q_weight, q_weight + HALF, half[None, :], NORMS)
    k_norm = _loaded(k_weight, k_weight + HALF, half, NORMS)
    q_low = _sum(partial_sums, offsets, real, stride, SPLITS, DTYPE)
    q_high = _sum(partial_sums, offsets + HALF, real, stride, SPLITS, DTYPE)
    k_low = _sum(partial_sums, key_offset + half, half < HALF, stride, SPLITS, DTYPE)
    k_high = _sum(partial_sums, key_offset + HALF + half, half < HALF, stride, SPLITS, DTYPE)
    value = _sum(partial_sums, key_offset + KV_OF_SHARD * DIM + columns, columns < DIM, stride, SPLITS, DTYPE)

    inverse = tl.rsqrt((tl.sum(q_low * q_low, 1) + tl.sum(q_high * q_high, 1)) / DIM + EPS)[:, None]
    q_low, q_high = _normed_and_rotated(
        q_low, q_high, inverse, q_norm, q_rotation, NORMS, ROTATES, OFFSET, FLOAT32, DTYPE
    )
    inverse = tl.rsqrt((tl.sum(k_low * k_low, 0) + tl.sum(k_high * k_high, 0)) / DIM + EPS)
    k_low, k_high = _normed_and_rotated(
        k_low, k_high, inverse, k_norm, k_rotation, NORMS, ROTATES, OFFSET, FLOAT32, DTYPE
    )
    q_low, q_high = _operand(q_low.to(DTYPE), MULTIPLIED), _operand(q_high.to(DTYPE), MULTIPLIED)
    STORED: tl.constexpr = keys.dtype.element_ty
    k_low, k_high, value = k_low.to(DTYPE).to(STORED), k_high.to(DTYPE).to(STORED), value.to(DTYPE).to(STORED)
    if (position >= 0) & (share == 0):
        cache_offset = ((row * KV_HEADS + head).to(tl.int64) * CAPACITY + newest) * DIM
        tl.store(keys + cache_offset + half, k_low)
        tl.store(keys + cache_offset + HALF + half, k_high)
        tl.store(values + cache_offset + columns, value)

    score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
    score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
    score = tl.where(position >= 0, _in_log2(score, SCALE, CAP), _MASKED)
    top = tl.maximum(score, sink)
    weight = tl.where(position >= 0, tl.exp2(score - top), 0.0)
    total = weight + tl.where(sink > _MASKED, tl.exp2(sink - top), 0.0)
    acc = weight.to(MULTIPLIED).to(tl.float32)[:, None] * value.to(tl.float32)[None, :]
    if SHARES > 1:
        top, total = tl.where(share == 0, top, _MASKED), tl.where(share == 0, total, 0.0)
        acc = tl.where(share == 0, acc, 0.0)
    return q_low, q_high, top, total, acc


@triton.jit
def _added_shares(
    top,
    total,
    acc,
    sums,
    arrived,
    head_index,
    share,
    DIM: tl.constexpr,
    OWN: tl.constexpr,
    GROUP: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Adds up the sums of a head's SHARES programs in one order: (sum of weights, weighted sum of values, whether it is
    the last).

      sums: float32[heads of all rows, SHARES, OWN, DIM + 2], global memory for acc, top, total.
      arrived: float32[heads of all rows], programs that have written their sums: 0 before and after.
    """
    columns, members = tl.arange(0, DIM), tl.arange(0, GROUP)
    real, row = members < OWN, DIM + 2
    lines = sums + (head_index * SHARES * OWN + members) * row
    share_lines = lines + share * OWN * row
    tl.store(share_lines[:, None] + columns[None, :], acc, mask=real[:, None])
    tl.store(share_lines + DIM, top, mask=real)
    tl.store(share_lines + DIM + 1, total, mask=real)
    tl.debug_barrier()  # all threads have written before one of them counts; the last program reads after it counted
    last = tl.atomic_add(arrived + head_index, 1.0, sem="acq_rel") == SHARES - 1
    if last:
        tl.store(arrived + head_index, 0.0)
        top = tl.full([GROUP], _MASKED, tl.float32)
        for peer in tl.static_range(SHARES):
            top = tl.maximum(top, tl.load(lines + peer * OWN * row + DIM, mask=real, other=_MASKED))
        total, acc = tl.full([GROUP], 0.0, tl.float32), tl.full([GROUP, DIM], 0.0, tl.float32)
        for peer in tl.static_range(SHARES):
            line = lines + peer * OWN * row
            fade = tl.exp2(tl.load(line + DIM, mask=real, other=_MASKED) - top)
            total += tl.load(line + DIM + 1, mask=real, other=0.0) * fade
            acc += tl.load(line[:, None] + columns[None, :], mask=real[:, None], other=0.0) * fade[:, None]
    return total, acc, last


@triton.jit
def attended_kernel(
    partial_sums,
    q_weight,
    k_weight,
    rotations,
    positions,
    sinks,
    input_keys,
    input_values,
    out,
    keys,
    values,
    sums,
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
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SHARES: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """Attention of the query heads of one key/value head of one row; a row without a token gets 0. Grid: (KV_HEADS,
    COUNT, SHARES), where SHARES programs share a head, each reading every SHARES-th tile.

    The new token's key and value come from registers, as this kernel writes them.

      partial_sums: [SPLITS, SHARDS, COUNT, (HEADS + 2 KV_HEADS) / SHARDS, DIM], of the new tokens' queries, keys and
      values; a shard has those of KV_HEADS / SHARDS.
      q_weight, k_weight: [DIM], the norms' weights, if NORMS.
      rotations: float32[COUNT, DIM], cos then sin, if ROTATES; behind them, unless SHARES is 1, `arrived` of
      _added_shares.
      positions: int32[COUNT], of the new token; nothing is written for a negative one.
      sinks: float32[HEADS] in log2, or None. out: [COUNT, HEADS, DIM], the attention.
      keys, values: the caches [COUNT, KV_HEADS, CAPACITY, DIM], token t at t % CAPACITY; input_keys, input_values: the
      same memory as inputs, not read.
      sums: of _added_shares; None if SHARES is 1.
      EPS, OFFSET, FLOAT32: of the norms; FLOAT32: OFFSET is added to the weight, and only the product is rounded.
      WINDOW: tokens that the new one sees; 0: all. SCALE, CAP: factor on scores, soft cap (0: none).
      GROUP: query heads of a key/value head as a power of two of at least 16.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    # One instruction converts e4m3 to float16, several to bfloat16.
    MULTIPLIED: tl.constexpr = tl.float16 if keys.dtype.element_ty == tl.float8e4nv else DTYPE
    OWN: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    head, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    half, columns, members = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, GROUP)
    cache = (row * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM
    newest = tl.maximum(position, 0) % CAPACITY
    length = position + 1
    visible_tokens = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    # A row that fits the cache has its keys in order; in a longer one every key of the ring may be visible.
    first = tl.where(length > CAPACITY, 0, (length - visible_tokens) // STEP * STEP) if WINDOW > 0 else 0
    end = tl.where(length > CAPACITY, CAPACITY, position)
    share = 0
    if SHARES > 1:
        share = tl.program_id(2)
        first += share * STEP

    # The own parts are read and computed in the first iteration, because the copies of the first tiles are issued
    # before the loop and are on their way then. For larger heads the registers do not suffice for that.
    WITHIN: tl.constexpr = DIM <= 128
    if WITHIN:
        top, total = tl.full([GROUP], 0.0, tl.float32), tl.full([GROUP], 0.0, tl.float32)
        acc = tl.full([GROUP, DIM], 0.0, tl.float32)
        q_low, q_high = tl.full([GROUP, HALF], 0.0, MULTIPLIED), tl.full([GROUP, HALF], 0.0, MULTIPLIED)
    else:
        q_low, q_high, top, total, acc = _own_parts(
            partial_sums,
            q_weight,
            k_weight,
            rotations,
            sinks,
            keys,
            values,
            row,
            0,
            head,
            share,
            position,
            newest,
            COUNT,
            HEADS,
            KV_HEADS,
            DIM,
            CAPACITY,
            SPLITS,
            NORMS,
            ROTATES,
            EPS,
            OFFSET,
            FLOAT32,
            SCALE,
            CAP,
            GROUP,
            DTYPE,
            MULTIPLIED,
            SHARES,
            SHARDS,
        )
    # 0 in the first iteration. The addresses of own parts depend on it, so that the compiler does not compute them
    # before the loop, as it does with all that is the same in each iteration: they would take 40 registers to its end.
    later = 0
    for begin in tl.range(first, tl.maximum(end, first + 1), STEP * SHARES, num_stages=STAGES):
        if WITHIN:
            if begin == first:
                q_low, q_high, top, total, acc = _own_parts(
                    partial_sums, q_weight, k_weight, rotations, sinks, keys, values, row + later, later, head, share,
                    position, newest, COUNT, HEADS, KV_HEADS, DIM, CAPACITY, SPLITS, NORMS, ROTATES, EPS, OFFSET,
                    FLOAT32, SCALE, CAP, GROUP, DTYPE, MULTIPLIED, SHARES, SHARDS,
                )  # fmt: skip
        tokens = begin + tl.arange(0, STEP)
        lines, written = cache + tokens[:, None] * DIM, (tokens < end)[:, None]
        low = tl.load(keys + lines + half[None, :], mask=written, other=0.0).to(MULTIPLIED)
        high = tl.load(keys + lines + HALF + half[None, :], mask=written, other=0.0).to(MULTIPLIED)
        scores = tl.dot(q_high, tl.trans(high), tl.dot(q_low, tl.trans(low)))
        age = newest - tokens
        age = tl.where(age < 0, age + CAPACITY, age)
        visible = ((age > 0) & (age < visible_tokens))[None, :]
        if SHARES > 1:  # a share's first tile may begin after the row's end
            visible &= (tokens < end)[None, :]
        scores = tl.where(visible, _in_log2(scores, SCALE, CAP), _MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)
        weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
        total = total * fade + tl.sum(weights, 1)
        value = tl.load(values + lines + columns[None, :], mask=written, other=0.0).to(MULTIPLIED)
        acc = tl.dot(weights.to(MULTIPLIED), value, acc * fade[:, None])
        top = new_top
        later = 16  # a multiple of a vector's numbers, by which the compiler knows that loads are aligned
    last = True
    if SHARES > 1:
        head_index = row * KV_HEADS + head
        arrived = rotations + COUNT * DIM * ROTATES
        total, acc, last = _added_shares(top, total, acc, sums, arrived, head_index, share, DIM, OWN, GROUP, SHARES)
    if last:
        acc = acc / tl.maximum(total, 1e-30)[:, None]
        offsets = (row * HEADS + head * OWN + members)[:, None] * DIM + columns[None, :]
        tl.store(out + offsets, acc.to(DTYPE), mask=(members < OWN)[:, None] & (columns < DIM)[None, :])
