"""Triton kernel of a decoding step's attention in the order of the forward of training."""

import triton
import triton.language as tl

from jaxtune.pallas.attention.triton_kernels import _attend, _block, _store

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def ordered_kernel(
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
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of one key/value head's queries of one row. Grid: (key/value heads, rows).

    query, out: [rows, HEADS, DIM]. keys, values: [rows, KV_HEADS, CAPACITY, DIM]. lengths: int32[rows].
    sinks: float32[HEADS], a logit without a value; -inf for none.
    WIDTH: DIM as a power of two. GROUP: query heads of a key/value head, as a power of two of at least 16.
    SCALE, CAP: factor on scores s, and c of the soft cap c tanh(s / c); 0: none. KEYS: keys visited at a time.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    OWN: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths + row)
    heads = (row * HEADS + head * OWN) * DIM
    cache = (row * KV_HEADS + head) * CAPACITY * DIM
    members = tl.arange(0, GROUP)
    lower = tl.zeros([GROUP], tl.int32)
    seen = lower + length - 1
    q = _block(query + heads, 0, OWN, DIM, DIM, WIDTH, GROUP, True)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    top = tl.full([GROUP], _MASKED, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    whole = length // KEYS * KEYS
    k, v = keys + cache, values + cache
    acc, top, total = _attend(
        acc, top, total, q, k, v, seen, lower, 0, whole, CAPACITY, DIM, DIM, WIDTH, SCALE, CAP, KEYS, False
    )
    acc, top, total = _attend(
        acc, top, total, q, k, v, seen, lower, whole, length, CAPACITY, DIM, DIM, WIDTH, SCALE, CAP, KEYS, True
    )
    sink = tl.load(sinks + head * OWN + members, mask=members < OWN, other=float("-inf")) * _LOG2E
    final = tl.maximum(top, sink)
    fade = tl.exp2(top - final)
    total = total * fade + tl.exp2(sink - final)
    acc = acc * tl.where(length > 0, fade / total, 0.0)[:, None]
    _store(out + heads, acc, 0, OWN, DIM, DIM, WIDTH, GROUP)
