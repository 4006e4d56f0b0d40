"""Forms of the kernel of `attended` that attended_forms.py measures, without norms and window: when the new token's own
parts are read, how the tiles are read, and how many key/value heads a program has."""

import triton
import triton.language as tl

from jaxtune.pallas.few_rows.attended_kernels import _in_log2
from jaxtune.pallas.few_rows.triton_kernels import _sum

_MASKED = tl.constexpr(-1e30)


@triton.jit
def _clock(row):
    """The GPU's clock in nanoseconds, 32 bits of it. row: any number; an assembly needs an argument here."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo;", "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _core(row):
    """The number of the multiprocessor that the program runs on. row: as for _clock."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _loaded(
    parts,
    cos,
    sin,
    sinks,
    row,
    head,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The new token's own parts: sums of queries, key and value, cos and sin of the rotation, the sink."""
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    OWN: tl.constexpr = HEADS // KV_HEADS
    stride: tl.constexpr = COUNT * ALL * DIM
    half, columns, members = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, OWN_ROWS)
    real = (members < OWN)[:, None] & (half < HALF)[None, :]
    places = (row * ALL + head * OWN + members)[:, None] * DIM + half[None, :]
    own = (row * ALL + HEADS + head) * DIM
    c = tl.load(cos + row * HALF + half)
    s = tl.load(sin + row * HALF + half)
    sink = tl.load(sinks + head * OWN + members, mask=members < OWN, other=_MASKED)
    q_low = _sum(parts, places, real, stride, SPLITS, DTYPE).to(DTYPE)
    q_high = _sum(parts, places + HALF, real, stride, SPLITS, DTYPE).to(DTYPE)
    k_low = _sum(parts, own + half, half < HALF, stride, SPLITS, DTYPE).to(DTYPE)
    k_high = _sum(parts, own + HALF + half, half < HALF, stride, SPLITS, DTYPE).to(DTYPE)
    value = _sum(parts, own + KV_HEADS * DIM + columns, columns < DIM, stride, SPLITS, DTYPE).to(DTYPE)
    return c, s, sink, q_low, q_high, k_low, k_high, value


@triton.jit
def _repeated(x, GROUP: tl.constexpr):
    """[GROUP, ...] of [rows, ...], each row as often as it fits."""
    ROWS: tl.constexpr = x.shape[0]
    if ROWS == GROUP:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, GROUP // ROWS)), (GROUP,))
    else:
        return tl.reshape(tl.broadcast_to(x[:, None, :], (ROWS, GROUP // ROWS, x.shape[1])), (GROUP, x.shape[1]))


@triton.jit
def _own(
    c,
    s,
    sink,
    q_low,
    q_high,
    k_low,
    k_high,
    value,
    keys,
    values,
    place,
    position,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes the new token's key and value to `place`, and returns its queries' halves, the largest score, the sum of
    weights and the weighted value of its own key."""
    HALF: tl.constexpr = k_low.shape[0]
    half, columns = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
    k_low, k_high, value = k_low.to(tl.float32), k_high.to(tl.float32), value.to(tl.float32)
    turned = q_low * c[None, :] - q_high * s[None, :]
    q_high = (q_high * c[None, :] + q_low * s[None, :]).to(DTYPE)
    q_low = turned.to(DTYPE)
    turned = k_low * c - k_high * s
    k_high = (k_high * c + k_low * s).to(DTYPE)
    k_low = turned.to(DTYPE)
    if position >= 0:
        tl.store(keys + place + half, k_low)
        tl.store(keys + place + HALF + half, k_high)
        tl.store(values + place + columns, value.to(DTYPE))
    score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
    score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
    score = tl.where(position >= 0, _in_log2(score, SCALE, CAP), _MASKED)
    top = tl.maximum(score, sink)
    weight = tl.where(position >= 0, tl.exp2(score - top), 0.0)
    total = weight + tl.where(sink > _MASKED, tl.exp2(sink - top), 0.0)
    top, total, weight = _repeated(top, GROUP), _repeated(total, GROUP), _repeated(weight, GROUP)
    acc = weight.to(DTYPE).to(tl.float32)[:, None] * value[None, :]
    return _repeated(q_low, GROUP), _repeated(q_high, GROUP), top, total, acc


@triton.jit
def form_kernel(
    parts,
    before,
    cos,
    sin,
    positions,
    sinks,
    old_keys,
    old_values,
    out,
    keys,
    values,
    times,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    SUM: tl.constexpr,
    OWN_PARTS: tl.constexpr,
    MATH: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Grid: (KV_HEADS, COUNT). The arguments are those of attended_kernel. The own parts are computed in the loop's
    first iteration, after the first tiles' reads are begun, and keys past the row's end are not read. And:

      before: not read; it makes a layer wait for the one before.
      times: int32[programs, 4], start, end (nanoseconds) and multiprocessor of each program, if TIMES is 1.
      EARLY: 1: the own parts are read before the first tiles; 0: after them.
      AHEAD: how many keys are read before the row's length is known, and of shorter rows too.
      OWN_ROWS: rows of the queries' tile when they are normed and rotated.
      SUM: 1: the weights of a tile's keys are added up at the end only.
      OWN_PARTS: 0: constants stand in for the own parts.
      MATH: 0: scores are the weights.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    OWN: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    head, row = tl.program_id(0), tl.program_id(1)
    if TIMES:
        begun = _clock(row)
    position = tl.load(positions + row)
    half, columns = tl.arange(0, HALF), tl.arange(0, DIM)
    cache = (row * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM
    newest = tl.maximum(position, 0) % CAPACITY
    seen = position + 1
    end = tl.where(seen > CAPACITY, CAPACITY, position)
    end = tl.maximum(end, AHEAD if AHEAD > 0 else 1)
    top = tl.full([GROUP], 0.0, tl.float32)
    total = tl.full([GROUP], 0.0, tl.float32)
    acc = tl.full([GROUP, DIM], 0.0, tl.float32)
    q_low = tl.full([GROUP, HALF], 0.01, DTYPE)
    q_high = tl.full([GROUP, HALF], 0.01, DTYPE)
    if SUM:
        sums = tl.full([GROUP, STEP], 0.0, tl.float32)
    if EARLY:
        c, s, sink, raw_low, raw_high, k_low, k_high, own_value = _loaded(
            parts, cos, sin, sinks, row, head, COUNT, HEADS, KV_HEADS, DIM, SPLITS, OWN_ROWS, DTYPE
        )
    # As a variable of the loop it keeps addresses of own parts from being computed before the loop, and held there.
    at = row
    for begin in tl.range(0, end, STEP, num_stages=STAGES):
        tokens = begin + tl.arange(0, STEP)
        lines = cache + tokens[:, None] * DIM
        if OWN_PARTS:
            if begin == 0:
                if not EARLY:
                    c, s, sink, raw_low, raw_high, k_low, k_high, own_value = _loaded(
                        parts, cos, sin, sinks, at, head, COUNT, HEADS, KV_HEADS, DIM, SPLITS, OWN_ROWS, DTYPE
                    )
                place = (at * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM + newest * DIM
                q_low, q_high, top, total, acc = _own(
                    c, s, sink, raw_low, raw_high, k_low, k_high, own_value, keys, values, place, position, SCALE, CAP,
                    GROUP, DTYPE,
                )  # fmt: skip
        written = (tokens < end)[:, None]
        low = tl.load(keys + lines + half[None, :], mask=written, other=0.0)
        high = tl.load(keys + lines + HALF + half[None, :], mask=written, other=0.0)
        scores = tl.dot(q_high, tl.trans(high), tl.dot(q_low, tl.trans(low)))
        age = newest - tokens
        age = tl.where(age < 0, age + CAPACITY, age)
        visible = ((age > 0) & (age < seen))[None, :]
        if MATH:
            scores = tl.where(visible, _in_log2(scores, SCALE, CAP), _MASKED)
            new = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - new)
            weights = tl.where(visible, tl.exp2(scores - new[:, None]), 0.0)
            if SUM:
                total = total * fade
                sums = sums * fade[:, None] + weights
            else:
                total = total * fade + tl.sum(weights, 1)
            acc = acc * fade[:, None]
            top = new
        else:
            weights = scores
        value = tl.load(values + lines + columns[None, :], mask=written, other=0.0)
        acc = tl.dot(weights.to(DTYPE), value, acc)
        at = 0
    if SUM:
        total += tl.sum(sums, 1)
    members = tl.arange(0, GROUP)
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    REPEATS: tl.constexpr = GROUP // OWN_ROWS
    query = members // REPEATS
    places = (row * HEADS + head * OWN + query)[:, None] * DIM + columns[None, :]
    real = (query < OWN) & (query * REPEATS == members)
    tl.store(out + places, acc.to(DTYPE), mask=real[:, None] & (columns < DIM)[None, :])
    if TIMES:
        place = times + 4 * (row * KV_HEADS + head)
        tl.store(place, begun)
        tl.store(place + 1, _clock(row))
        tl.store(place + 2, _core(row))
