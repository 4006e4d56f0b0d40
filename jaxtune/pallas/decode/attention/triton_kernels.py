"""Bodies of the Triton kernels of decode attention, and of insert_kernel; scores are in units of log2."""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def _tile(array, first, STEP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """[STEP, WIDTH], zeros from DIM on, of a matrix with DIM columns; all rows must exist."""
    columns = tl.arange(0, WIDTH)
    pointers = array + (first + tl.arange(0, STEP))[:, None] * DIM + columns[None, :]
    if WIDTH == DIM:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def _scores(q, k, first, newest, visible_tokens, SCALE: tl.constexpr, CAP: tl.constexpr, CAPACITY: tl.constexpr):
    """(float32[GROUP, STEP] in log2, _MASKED where invisible; bool[STEP], visible) of q [GROUP, WIDTH], k [STEP,
    WIDTH].
    """
    scores = tl.dot(q, tl.trans(k)) * SCALE
    if CAP > 0.0:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
        scores = CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP * _LOG2E))))
    age = newest - (first + tl.arange(0, k.shape[0]))
    age = tl.where(age < 0, age + CAPACITY, age)
    visible = age < visible_tokens
    return tl.where(visible[None, :], scores * _LOG2E, _MASKED), visible


@triton.jit
def decode_split_kernel(
    query,
    keys,
    values,
    lengths,
    firsts,
    tiles,
    split_outputs,
    lses,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Attention of the query heads of one KV head of one row over one split. A split without tiles writes nothing.
    Grid: (SPLITS, KV_HEADS, B).

      query: [B, HEADS, DIM].
      firsts, tiles: int32[B, SPLITS] of splits.live_tiles.
      split_outputs: float32[B, KV_HEADS, SPLITS, heads of a group, DIM], normalised over the split; lses: log-sum-exps
        in log2, without DIM.
      keys, values: [B, KV_HEADS, CAPACITY, DIM], token t of a row at t % CAPACITY. lengths: int32[B], the newest
      included.
      WINDOW: tokens that the newest sees; 0: all. SCALE, CAP: factor on scores, soft cap (0: none).
      STEP: keys of a tile. GROUP, WIDTH: query heads of a KV head, and DIM, as powers of two from 16 and 64 on.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + row * SPLITS + split)
    if count > 0:
        OWN: tl.constexpr = HEADS // KV_HEADS
        members, columns = tl.arange(0, GROUP), tl.arange(0, WIDTH)
        real = (members < OWN)[:, None] & (columns < DIM)[None, :]
        offsets = members[:, None] * DIM + columns[None, :]
        q = tl.load(query + (row * HEADS + head * OWN) * DIM + offsets, mask=real, other=0.0)
        length = tl.load(lengths + row)
        visible_tokens = tl.minimum(length, WINDOW) if WINDOW > 0 else length
        newest = (length - 1) % CAPACITY
        first = tl.load(firsts + row * SPLITS + split) * STEP
        cache = (row * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM
        top = tl.full([GROUP], _MASKED, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        acc = tl.zeros([GROUP, WIDTH], tl.float32)
        for begin in range(first, first + count * STEP, STEP):
            k = _tile(keys + cache, begin, STEP, DIM, WIDTH).to(q.dtype)
            scores, _ = _scores(q, k, begin, newest, visible_tokens, SCALE, CAP, CAPACITY)
            new_top = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * fade + tl.sum(weights, 1)
            v = _tile(values + cache, begin, STEP, DIM, WIDTH).to(q.dtype)
            acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None])
            top = new_top
        split_row = ((row * KV_HEADS + head) * SPLITS + split).to(tl.int64) * OWN
        tl.store(split_outputs + split_row * DIM + offsets, acc / total[:, None], mask=real)
        tl.store(lses + split_row + members, top + tl.log2(total), mask=members < OWN)


@triton.jit
def decode_whole_kernel(
    query,
    keys,
    values,
    lengths,
    sinks,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of the query heads of one KV head of one row over all keys that it sees, in the order of the cache, to
    out [B, HEADS, DIM]; an empty row gets 0. Grid: (KV_HEADS, B).

      sinks: float32[HEADS] in log2; _MASKED: none. STAGES: tiles in flight.
      query: [B, HEADS, DIM]. lengths: int32[B], tokens of each row, the newest included.
      keys, values: [B, KV_HEADS, CAPACITY, DIM], token t of a row at t % CAPACITY.
      WINDOW: tokens that the newest sees; 0: all. SCALE, CAP: factor on scores, soft cap (0: none).
      STEP: keys of a tile. GROUP, WIDTH: query heads of a KV head, and DIM, as powers of two from 16 and 64 on.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    OWN: tl.constexpr = HEADS // KV_HEADS
    members, columns = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    real = (members < OWN)[:, None] & (columns < DIM)[None, :]
    offsets = (row * HEADS + head * OWN) * DIM + members[:, None] * DIM + columns[None, :]
    q = tl.load(query + offsets, mask=real, other=0.0)
    length = tl.load(lengths + row)
    visible_tokens = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    newest = (length - 1) % CAPACITY
    # A row that fits the cache has its keys in order; in a longer one every key of the ring may be visible.
    first = tl.where(length > CAPACITY, 0, (length - visible_tokens) // STEP * STEP)
    cache = (row * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM
    top = tl.load(sinks + head * OWN + members, mask=members < OWN, other=_MASKED)
    total = tl.where(top > _MASKED, 1.0, 0.0)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    for begin in tl.range(first, tl.minimum(length, CAPACITY), STEP, num_stages=STAGES):
        k = _tile(keys + cache, begin, STEP, DIM, WIDTH).to(q.dtype)
        scores, visible = _scores(q, k, begin, newest, visible_tokens, SCALE, CAP, CAPACITY)
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)
        weights = tl.where(visible[None, :], tl.exp2(scores - new_top[:, None]), 0.0)
        total = total * fade + tl.sum(weights, 1)
        v = _tile(values + cache, begin, STEP, DIM, WIDTH).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None])
        top = new_top
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def decode_combine_kernel(
    split_outputs,
    lses,
    order,
    counts,
    sinks,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Combines a row's splits in order, adds the sinks, and writes out [B, HEADS, DIM]; a row without keys gets 0.
    Grid: (KV_HEADS, B).

      split_outputs, lses: from decode_split_kernel.
      order, counts: int32[B, SPLITS] and int32[B] of splits.order_of.
      sinks: float32[HEADS] in log2; _MASKED: none.
      GROUP, WIDTH: query heads of a KV head, and DIM, as powers of two from 16 and 64 on.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    OWN: tl.constexpr = HEADS // KV_HEADS
    members, columns = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    real = (members < OWN)[:, None] & (columns < DIM)[None, :]
    offsets = members[:, None] * DIM + columns[None, :]
    top = tl.load(sinks + head * OWN + members, mask=members < OWN, other=_MASKED)
    total = tl.where(top > _MASKED, 1.0, 0.0)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    for number in range(tl.load(counts + row)):
        split = tl.load(order + row * SPLITS + number)
        split_row = ((row * KV_HEADS + head) * SPLITS + split).to(tl.int64) * OWN
        lse = tl.load(lses + split_row + members, mask=members < OWN, other=_MASKED)
        new_top = tl.maximum(top, lse)
        fade, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        total = total * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * tl.load(
            split_outputs + split_row * DIM + offsets, mask=real, other=0.0
        )
        top = new_top
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + (row * HEADS + head * OWN) * DIM + offsets, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def insert_kernel(
    staged,
    rows,
    slots,
    old,
    cache,
    COUNT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROOM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies row rows[i] of staged [R, KV_HEADS, ROOM, DIM] into row slots[i] of cache [COUNT, ...], if there is one.
    `old` is the cache as an input, in the same memory. Grid: (blocks of BLOCK numbers of a head, KV_HEADS, copied
    rows).

      rows, slots: int32[copied rows]; a slot outside of 0 to COUNT - 1 is skipped, a row is not checked.
      ROOM, CAPACITY: keys of a staged row, and of the cache's, not fewer.
    """
    block, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + number)
    if slot >= 0 and slot < COUNT:
        row = tl.load(rows + number)
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        real = offsets < ROOM * DIM
        numbers = tl.load(staged + (row * KV_HEADS + head).to(tl.int64) * ROOM * DIM + offsets, mask=real)
        tl.store(cache + (slot * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM + offsets, numbers, mask=real)
