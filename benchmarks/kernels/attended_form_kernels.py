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
def _whole(low, high, DIM: tl.constexpr, GROUP: tl.constexpr):
    """[GROUP, DIM] of its two halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (GROUP, DIM))


@triton.jit
def _own(
    parts,
    cos,
    sin,
    sinks,
    keys,
    values,
    row,
    head,
    position,
    newest,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,
    JOIN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes the new token's key and value, and returns its queries (whole, or their first halves), their second
    halves, the largest score, the sum of weights and the weighted value of its own key."""
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    OWN: tl.constexpr = HEADS // KV_HEADS
    stride: tl.constexpr = COUNT * ALL * DIM
    half, columns, members = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, GROUP)
    real = (members < OWN)[:, None] & (half < HALF)[None, :]
    places = (row * ALL + head * OWN + members)[:, None] * DIM + half[None, :]
    own = (row * ALL + HEADS + head) * DIM
    c = tl.load(cos + row * HALF + half)
    s = tl.load(sin + row * HALF + half)
    sink = tl.load(sinks + head * OWN + members, mask=members < OWN, other=_MASKED)
    q_low = _sum(parts, places, real, stride, SPLITS, DTYPE)
    q_high = _sum(parts, places + HALF, real, stride, SPLITS, DTYPE)
    k_low = _sum(parts, own + half, half < HALF, stride, SPLITS, DTYPE)
    k_high = _sum(parts, own + HALF + half, half < HALF, stride, SPLITS, DTYPE)
    value = _sum(parts, own + KV_HEADS * DIM + columns, columns < DIM, stride, SPLITS, DTYPE)
    turned = q_low * c[None, :] - q_high * s[None, :]
    q_high = (q_high * c[None, :] + q_low * s[None, :]).to(DTYPE)
    q_low = turned.to(DTYPE)
    turned = k_low * c - k_high * s
    k_high = (k_high * c + k_low * s).to(DTYPE)
    k_low = turned.to(DTYPE)
    if position >= 0:
        place = (row * KV_HEADS + head).to(tl.int64) * CAPACITY * DIM + newest * DIM
        tl.store(keys + place + half, k_low)
        tl.store(keys + place + HALF + half, k_high)
        tl.store(values + place + columns, value.to(DTYPE))
    score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
    score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
    score = tl.where(position >= 0, _in_log2(score, SCALE, CAP), _MASKED)
    top = tl.maximum(score, sink)
    weight = tl.where(position >= 0, tl.exp2(score - top), 0.0)
    total = weight + tl.where(sink > _MASKED, tl.exp2(sink - top), 0.0)
    acc = weight.to(DTYPE).to(tl.float32)[:, None] * value[None, :]
    if JOIN:
        q_low = _whole(q_low, q_high, DIM, GROUP)
    return q_low, q_high, top, total, acc


@triton.jit
def _written(out, acc, total, row, head, HEADS: tl.constexpr, OWN: tl.constexpr, GROUP: tl.constexpr):
    """Writes the attention of the query heads of one key/value head."""
    columns, members = tl.arange(0, acc.shape[1]), tl.arange(0, GROUP)
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    places = (row * HEADS + head * OWN + members)[:, None] * acc.shape[1] + columns[None, :]
    real = (members < OWN)[:, None] & (columns < acc.shape[1])[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=real)


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
    LATE: tl.constexpr,
    MASK: tl.constexpr,
    JOIN: tl.constexpr,
    SUM: tl.constexpr,
    OWN_PARTS: tl.constexpr,
    MATH: tl.constexpr,
    PER: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Grid: (KV_HEADS / PER, COUNT). The arguments are those of attended_kernel, and:

    before: not read; it makes a layer wait for the one before.
    times: int32[programs, 4], start, end (nanoseconds) and multiprocessor of each program, if TIMES is 1.
    LATE: 1: the own parts are read in the loop's first iteration, after the first tiles' reads are begun.
    MASK: 1: keys past the row's end are not read.
    JOIN: 1: queries and keys are multiplied whole.
    SUM: 1: the weights of a tile's keys are added up at the end only.
    OWN_PARTS: 0: constants stand in for the own parts.
    MATH: 0: scores are the weights.
    PER: key/value heads of a program, one after another in one loop; LATE is 1 if it is more than one.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    OWN: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(1)
    if TIMES:
        begun = _clock(row)
    position = tl.load(positions + row)
    half, columns = tl.arange(0, HALF), tl.arange(0, DIM)
    cache = (row * KV_HEADS + tl.program_id(0) * PER).to(tl.int64) * CAPACITY * DIM
    newest = tl.maximum(position, 0) % CAPACITY
    seen = position + 1
    end = tl.where(seen > CAPACITY, CAPACITY, position)
    head = tl.program_id(0) * PER
    if LATE or not OWN_PARTS:
        top = tl.full([GROUP], 0.0, tl.float32)
        total = tl.full([GROUP], 0.0, tl.float32)
        acc = tl.full([GROUP, DIM], 0.0, tl.float32)
        q_low = tl.full([GROUP, DIM if JOIN else HALF], 0.01, DTYPE)
        q_high = tl.full([GROUP, HALF], 0.01, DTYPE)
    else:
        q_low, q_high, top, total, acc = _own(
            parts, cos, sin, sinks, keys, values, row, head, position, newest,
            COUNT, HEADS, KV_HEADS, DIM, CAPACITY, SPLITS, SCALE, CAP, GROUP, JOIN, DTYPE,
        )  # fmt: skip
    if SUM:
        sums = tl.full([GROUP, STEP], 0.0, tl.float32)
    if LATE:
        end = tl.maximum(end, 1)
    tiles = tl.cdiv(end, STEP)
    # As a variable of the loop it keeps addresses of own parts from being computed before the loop, and held there.
    at = row
    for tile in tl.range(0, tiles * PER, num_stages=STAGES):
        nth = tile // tiles if PER > 1 else 0
        begin = (tile - nth * tiles) * STEP
        tokens = begin + tl.arange(0, STEP)
        lines = cache + (nth * CAPACITY + tokens)[:, None] * DIM
        if LATE and OWN_PARTS:
            if begin < STEP:
                if PER > 1:
                    if nth > 0:
                        if SUM:
                            total += tl.sum(sums, 1)
                        _written(out, acc, total, row, head + nth - 1, HEADS, OWN, GROUP)
                q_low, q_high, top, total, acc = _own(
                    parts, cos, sin, sinks, keys, values, at if PER == 1 else row + begin, head + nth, position, newest,
                    COUNT, HEADS, KV_HEADS, DIM, CAPACITY, SPLITS, SCALE, CAP, GROUP, JOIN, DTYPE,
                )  # fmt: skip
                if SUM:
                    sums = tl.full([GROUP, STEP], 0.0, tl.float32)
        if JOIN:
            if MASK:
                key = tl.load(keys + lines + columns[None, :], mask=(tokens < end)[:, None], other=0.0)
            else:
                key = tl.load(keys + lines + columns[None, :])
            scores = tl.dot(q_low, tl.trans(key))
        else:
            if MASK:
                low = tl.load(keys + lines + half[None, :], mask=(tokens < end)[:, None], other=0.0)
                high = tl.load(keys + lines + HALF + half[None, :], mask=(tokens < end)[:, None], other=0.0)
            else:
                low = tl.load(keys + lines + half[None, :])
                high = tl.load(keys + lines + HALF + half[None, :])
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
        if MASK:
            value = tl.load(values + lines + columns[None, :], mask=(tokens < end)[:, None], other=0.0)
        else:
            value = tl.load(values + lines + columns[None, :])
        acc = tl.dot(weights.to(DTYPE), value, acc)
        at = 0
    if SUM:
        total += tl.sum(sums, 1)
    _written(out, acc, total, row, head + PER - 1, HEADS, OWN, GROUP)
    if TIMES:
        place = times + 4 * (row * (KV_HEADS // PER) + tl.program_id(0))
        tl.store(place, begun)
        tl.store(place + 1, _clock(row))
        tl.store(place + 2, _core(row))
