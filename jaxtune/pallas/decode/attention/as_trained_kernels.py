"""Triton kernel of a decoding step's attention in the order of the forward of training."""

import triton
import triton.language as tl

from jaxtune.pallas.attention.triton_kernels import _attend, _block, _store

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def as_trained_kernel(
    query,
    keys,
    values,
    before,
    sinks,
    out,
    TOKENS: tl.constexpr,
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
    """Attention of one key/value head's queries of one new token. Grid: (rows TOKENS, key/value heads).

    query, out: [rows, TOKENS, HEADS, DIM]. keys, values: [rows, KV_HEADS, CAPACITY, DIM].
    before: int32[rows], the position of the first of a row's TOKENS; a negative one sees nothing.
    sinks: float32[HEADS], a logit without a value; -inf for none.
    WIDTH: DIM as a power of two. GROUP: query heads of a key/value head, as a power of two of at least 16.
    SCALE, CAP: factor on scores s, and c of the soft cap c tanh(s / c); 0: none. KEYS: keys visited at a time.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token // TOKENS
    OWN: tl.constexpr = HEADS // KV_HEADS
    first = tl.load(before + row)
    length = tl.where(first < 0, 0, first + (token - row * TOKENS).to(tl.int32) + 1)
    length = tl.minimum(length, CAPACITY)  # tokens of padding are behind the cache
    heads = (token * HEADS + head * OWN) * DIM
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
