"""Bodies of the Triton attention kernels. Arrays are contiguous; scores are in units of log2; blocks have WIDTH
columns, zeros from DIM on. MASKED: a bound may cross the blocks; otherwise every key is visible to every query.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)


@triton.jit
def _block(
    array,
    first,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Loads [ROWS, WIDTH]: a head's rows from `first` on, zeros from LENGTH on with CHECK."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + columns[None, :]
    if WIDTH == DIM:
        if CHECK:
            return tl.load(pointers, mask=(first + rows < LENGTH)[:, None], other=0.0)
        else:
            return tl.load(pointers)
    else:
        if CHECK:
            return tl.load(pointers, mask=(first + rows < LENGTH)[:, None] & (columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def _store(
    array,
    values,
    first,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Stores the first DIM columns of values [ROWS, WIDTH] as one head's rows from `first` on, without those past
    LENGTH.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + columns[None, :]
    values = values.to(array.dtype.element_ty)
    if WIDTH == DIM:
        if LENGTH % ROWS == 0:
            tl.store(pointers, values)
        else:
            tl.store(pointers, values, mask=(first + rows < LENGTH)[:, None])
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[:, None] & (columns < DIM)[None, :])


@triton.jit
def _lower(starts, ends, queries, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that each of `queries` sees; query + 1 for padding, so that it never falls along the row."""
    lower = tl.load(starts + queries, mask=queries < LENGTH, other=0)
    end = tl.load(ends + queries, mask=queries < LENGTH, other=0)
    if WINDOW > 0:
        lower = tl.maximum(lower, queries - WINDOW + 1)
    return tl.where(end > queries, lower, queries + 1)


@triton.jit
def _seen(runs, queries, LENGTH: tl.constexpr, RUNS: tl.constexpr):
    """The last key that each of `queries` sees, never falling along the row; runs: read with RUNS alone."""
    if RUNS:
        return tl.maximum(tl.load(runs + queries, mask=queries < LENGTH, other=0) - 1, queries)
    else:
        return queries


@triton.jit
def _seen_by(runs, keys, LENGTH: tl.constexpr, RUNS: tl.constexpr):
    """The first query that sees each of `keys`, never falling along the row; runs: read with RUNS alone."""
    if RUNS:
        return tl.load(runs + keys, mask=keys < LENGTH, other=LENGTH)
    else:
        return keys


@triton.jit
def _upper(ends, keys, LENGTH: tl.constexpr, WINDOW: tl.constexpr):
    """The query after the last that sees each of `keys`; padding gets its own position, positions past the row 0."""
    upper = tl.load(ends + keys, mask=keys < LENGTH, other=0)
    if WINDOW > 0:
        upper = tl.minimum(upper, keys + WINDOW)
    return upper


@triton.jit
def _capped(scores, SCALE: tl.constexpr, CAP: tl.constexpr):
    """(x, slope of the soft cap) of raw products: the score in log2 is x * UNIT, UNIT = (CAP, or SCALE without) *
    log2(e).
    """
    if CAP > 0.0:
        # tanh(y) = 1 - 2 / (1 + exp(2 y)), which has the right limits.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * SCALE / CAP * _LOG2E)))
        return tanh, 1.0 - tanh * tanh
    else:
        return scores, 1.0


@triton.jit
def _attend(
    acc,
    top,
    total,
    query,
    key,
    value,
    seen,
    lower,
    begin,
    end,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax (arXiv 2205.14135) over the keys begin .. end - 1: the updated (acc, top, total).

    acc: float32[QUERIES, WIDTH], weighted sum of values, not yet divided by the sum of weights.
    top, total: float32[QUERIES], largest score (log2) and sum of weights.
    seen, lower: the last and the first keys that the queries see.
    """
    UNIT: tl.constexpr = (CAP if CAP > 0.0 else SCALE) * _LOG2E
    for first in range(begin, end, KEYS):
        k = _block(key, first, LENGTH, STRIDE, DIM, WIDTH, KEYS, MASKED)
        scores, _ = _capped(tl.dot(query, tl.trans(k)), SCALE, CAP)
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = (columns[None, :] <= seen[:, None]) & (columns[None, :] >= lower[:, None])
            scores = tl.where(visible, scores, _MASKED)
        new_top = tl.maximum(top, tl.max(scores, 1) * UNIT)
        weights = tl.exp2(scores * UNIT - new_top[:, None])
        if MASKED:
            # Where a query has seen nothing yet, the fused multiply-add above leaves the rounding of a huge product.
            weights = tl.where(visible, weights, 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = _block(value, first, LENGTH, STRIDE, DIM, WIDTH, KEYS, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        top = new_top
    return acc, top, total


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    starts,
    ends,
    sinks,
    out,
    lse,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    RUNS: tl.constexpr,
    APART: tl.constexpr,
):
    """Writes out and lse (natural logarithm, sink included) of a tile of QUERIES queries of one head; both are 0 at
    padding. Grid: (heads, tiles, B).

      query, key, value, out: [B, LENGTH, HEADS or KV_HEADS, DIM]. lse: float32[B, HEADS, LENGTH].
      starts, ends: int32[B, LENGTH], bounds of each token's document; empty at padding.
      APART: blocks of keys begin with each document, without windows and runs; else with a tile's first document.
      RUNS: whether queries see the keys of their run; its ends follow those of the documents, [2, B, LENGTH].
      sinks: float32[HEADS], a logit without a value; -inf for none.
      WIDTH: DIM as a power of two. KEYS: keys visited at a time.
      SCALE, CAP: factor on scores s, and c of the soft cap c tanh(s / c); 0: none. SCALE must be above 0.
      WINDOW: keys that a query sees, itself included; 0: all of its document.
    """
    head = tl.program_id(0)
    # Late tiles see most: they go first, so that no long one is left for the end.
    base = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    batch = tl.program_id(2).to(tl.int64)
    starts += batch * LENGTH
    ends += batch * LENGTH
    query += (batch * LENGTH * HEADS + head) * DIM
    kv_offset = (batch * LENGTH * KV_HEADS + head // (HEADS // KV_HEADS)) * DIM
    key += kv_offset
    value += kv_offset

    rows = base + tl.arange(0, QUERIES)
    lower = _lower(starts, ends, rows, LENGTH, WINDOW)
    runs = ends + tl.num_programs(2).to(tl.int64) * LENGTH
    seen = _seen(runs, rows, LENGTH, RUNS)
    last = tl.minimum(base + QUERIES, LENGTH) - 1
    stop = _seen(runs, last, LENGTH, RUNS) + 1
    q = _block(query, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES, LENGTH % QUERIES != 0)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    top = tl.full([QUERIES], _MASKED, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if APART:
        # Each document's keys from its own first one on, whatever comes before it in the tile.
        first = base
        while first <= last:
            begin = _lower(starts, ends, first, LENGTH, WINDOW)
            end = tl.minimum(tl.load(ends + first), stop)
            alone = (first == base) & (end == stop)
            full_end = begin + tl.where(alone, tl.maximum(base + 1 - begin, 0) // KEYS * KEYS, 0)
            acc, top, total = _attend(
                acc,
                top,
                total,
                q,
                key,
                value,
                seen,
                lower,
                begin,
                full_end,
                LENGTH,
                KV_HEADS * DIM,
                DIM,
                WIDTH,
                SCALE,
                CAP,
                KEYS,
                False,
            )
            within = tl.minimum(seen, end - 1)  # the last block's keys behind the document are another's
            acc, top, total = _attend(
                acc,
                top,
                total,
                q,
                key,
                value,
                within,
                lower,
                full_end,
                end,
                LENGTH,
                KV_HEADS * DIM,
                DIM,
                WIDTH,
                SCALE,
                CAP,
                KEYS,
                True,
            )
            first = tl.maximum(end, first + 1)
    else:
        # Keys begin .. stop - 1, in blocks from `begin` on. Those between full_begin and full_end no bound crosses.
        begin = _lower(starts, ends, base, LENGTH, WINDOW)
        full_begin = begin + tl.cdiv(_lower(starts, ends, last, LENGTH, WINDOW) - begin, KEYS) * KEYS
        full_end = begin + tl.maximum(_seen(runs, base, LENGTH, RUNS) + 1 - begin, 0) // KEYS * KEYS
        acc, top, total = _attend(
            acc,
            top,
            total,
            q,
            key,
            value,
            seen,
            lower,
            begin,
            tl.minimum(full_begin, stop),
            LENGTH,
            KV_HEADS * DIM,
            DIM,
            WIDTH,
            SCALE,
            CAP,
            KEYS,
            True,
        )
        acc, top, total = _attend(acc, top, total, q, key, value, seen, lower, full_begin, full_end,
                                  LENGTH, KV_HEADS * DIM, DIM, WIDTH, SCALE, CAP, KEYS, False)  # fmt: skip
        acc, top, total = _attend(acc, top, total, q, key, value, seen, lower, tl.maximum(full_begin, full_end), stop,
                                  LENGTH, KV_HEADS * DIM, DIM, WIDTH, SCALE, CAP, KEYS, True)  # fmt: skip

    # A sink is one more term of the sum and has no value; -inf where there is none.
    sink = tl.load(sinks + head) * _LOG2E
    final = tl.maximum(top, sink)
    fade = tl.exp2(top - final)
    total = total * fade + tl.exp2(sink - final)
    # Padding saw nothing: its total is zero.
    real = lower <= rows
    acc = acc * tl.where(real, fade / total, 0.0)[:, None]
    _store(out + (batch * LENGTH * HEADS + head) * DIM, acc, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES)
    lse += (batch * HEADS + head) * LENGTH
    tl.store(lse + rows, tl.where(real, (final + tl.log2(total)) / _LOG2E, 0.0), mask=rows < LENGTH)


@triton.jit
def _to_query(acc, query, dout, key, value, stat, delta, seen, lower, begin, end,
              LENGTH: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
              CAP: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Adds to acc = dq / SCALE [QUERIES, WIDTH] what the keys begin .. end - 1 contribute.

    query, dout: loaded [QUERIES, WIDTH]; key and value point to their head's first row.
    stat, delta: [QUERIES], log-sum-exp in log2 and sum of out * dout.
    seen, lower: the last and the first keys that the queries see.
    """
    UNIT: tl.constexpr = (CAP if CAP > 0.0 else SCALE) * _LOG2E
    for first in range(begin, end, KEYS):
        k = _block(key, first, LENGTH, STRIDE, DIM, WIDTH, KEYS, MASKED)
        v = _block(value, first, LENGTH, STRIDE, DIM, WIDTH, KEYS, MASKED)
        scores, slope = _capped(tl.dot(query, tl.trans(k)), SCALE, CAP)
        weights = tl.exp2(scores * UNIT - stat[:, None])
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = (columns[None, :] <= seen[:, None]) & (columns[None, :] >= lower[:, None])
            weights = tl.where(visible, weights, 0.0)
        dweights = tl.dot(dout, tl.trans(v))
        dscores = weights * (dweights - delta[:, None])
        if CAP > 0.0:
            dscores = dscores * slope
        acc = tl.dot(dscores.to(k.dtype), k, acc)
    return acc


@triton.jit
def query_kernel(query, key, value, out, dout, lse, starts, ends, dquery, delta,
                 LENGTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                 WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
                 QUERIES: tl.constexpr, KEYS: tl.constexpr, RUNS: tl.constexpr):  # fmt: skip
    """Writes dquery and delta, the sum of out * dout over a head, of a tile of QUERIES queries of one head. Grid:
    (heads, tiles, B).

      query, key, value, out, dout, dquery: [B, LENGTH, HEADS or KV_HEADS, DIM]; dout: gradient of out.
      lse, delta: float32[B, HEADS, LENGTH]; lse is the forward's, in the natural logarithm.
      starts, ends: int32[B, LENGTH], bounds of each token's document; empty at padding.
      WIDTH: DIM as a power of two. KEYS: keys visited at a time.
      SCALE, CAP: factor on scores s, and c of the soft cap c tanh(s / c); 0: none.
      WINDOW: keys that a query sees, itself included; 0: all of its document.
      RUNS: whether queries see the keys of their run; its ends follow those of the documents, [2, B, LENGTH].
    """
    head = tl.program_id(0)
    base = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    batch = tl.program_id(2).to(tl.int64)
    starts += batch * LENGTH
    ends += batch * LENGTH
    offset = (batch * LENGTH * HEADS + head) * DIM
    kv_offset = (batch * LENGTH * KV_HEADS + head // (HEADS // KV_HEADS)) * DIM
    key += kv_offset
    value += kv_offset

    rows = base + tl.arange(0, QUERIES)
    lower = _lower(starts, ends, rows, LENGTH, WINDOW)
    runs = ends + tl.num_programs(2).to(tl.int64) * LENGTH
    seen = _seen(runs, rows, LENGTH, RUNS)
    last = tl.minimum(base + QUERIES, LENGTH) - 1
    stop = _seen(runs, last, LENGTH, RUNS) + 1
    begin = _lower(starts, ends, base, LENGTH, WINDOW)
    full_begin = begin + tl.cdiv(_lower(starts, ends, last, LENGTH, WINDOW) - begin, KEYS) * KEYS
    full_end = begin + tl.maximum(_seen(runs, base, LENGTH, RUNS) + 1 - begin, 0) // KEYS * KEYS

    q = _block(query + offset, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES, LENGTH % QUERIES != 0)
    do = _block(dout + offset, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES, LENGTH % QUERIES != 0)
    row_offset = (batch * HEADS + head) * LENGTH
    stat = tl.load(lse + row_offset + rows, mask=rows < LENGTH, other=0.0) * _LOG2E
    o = _block(out + offset, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES, LENGTH % QUERIES != 0)
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + row_offset + rows, d, mask=rows < LENGTH)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    acc = _to_query(acc, q, do, key, value, stat, d, seen, lower, begin, tl.minimum(full_begin, stop),
                    LENGTH, KV_HEADS * DIM, DIM, WIDTH, SCALE, CAP, KEYS, True)  # fmt: skip
    acc = _to_query(acc, q, do, key, value, stat, d, seen, lower, full_begin, full_end,
                    LENGTH, KV_HEADS * DIM, DIM, WIDTH, SCALE, CAP, KEYS, False)  # fmt: skip
    acc = _to_query(acc, q, do, key, value, stat, d, seen, lower, tl.maximum(full_begin, full_end), stop,
                    LENGTH, KV_HEADS * DIM, DIM, WIDTH, SCALE, CAP, KEYS, True)  # fmt: skip
    _store(dquery + offset, acc * SCALE, base, LENGTH, HEADS * DIM, DIM, WIDTH, QUERIES)


@triton.jit
def _to_key(dk, dv, query, dout, k, v, lse, delta, seen_by, upper, begin, end,
            LENGTH: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
            CAP: tl.constexpr, QUERIES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Adds to dk / SCALE and dv, [KEYS, WIDTH] each, what the queries begin .. end - 1 of one head contribute.

    k, v: loaded [KEYS, WIDTH]; query, dout, lse (natural logarithm) and delta point to the head's first token.
    seen_by, upper: [KEYS], the first query that sees each key, and the one after the last.
    """
    UNIT: tl.constexpr = (CAP if CAP > 0.0 else SCALE) * _LOG2E
    for first in range(begin, end, QUERIES):
        rows = first + tl.arange(0, QUERIES)
        q = _block(query, first, LENGTH, STRIDE, DIM, WIDTH, QUERIES, MASKED)
        if MASKED:
            stat = tl.load(lse + rows, mask=rows < LENGTH, other=0.0) * _LOG2E
            d = tl.load(delta + rows, mask=rows < LENGTH, other=0.0)
        else:
            stat = tl.load(lse + rows) * _LOG2E
            d = tl.load(delta + rows)
        scores, slope = _capped(tl.dot(k, tl.trans(q)), SCALE, CAP)
        weights = tl.exp2(scores * UNIT - stat[None, :])
        if MASKED:
            visible = (rows[None, :] >= seen_by[:, None]) & (rows[None, :] < upper[:, None])
            weights = tl.where(visible, weights, 0.0)
        do = _block(dout, first, LENGTH, STRIDE, DIM, WIDTH, QUERIES, MASKED)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        dweights = tl.dot(v, tl.trans(do))
        dscores = weights * (dweights - d[None, :])
        if CAP > 0.0:
            dscores = dscores * slope
        dk = tl.dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def key_kernel(
    query,
    key,
    value,
    dout,
    lse,
    delta,
    ends,
    dkey,
    dvalue,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Writes dkey and dvalue of a tile of KEYS keys: walks the queries that see it, of every query head of its key head
    in turn. Grid: (kv_heads, tiles, B).

      query, key, value, dout, dkey, dvalue: [B, LENGTH, HEADS or KV_HEADS, DIM]; dout: gradient of out.
      lse, delta: float32[B, HEADS, LENGTH], of the forward (natural logarithm) and of query_kernel.
      ends: int32[B, LENGTH], the end of each token's document; its own index at padding.
      RUNS: whether keys are seen from the first token of their run on; these follow `ends`, [2, B, LENGTH].
      WIDTH: DIM as a power of two. QUERIES: queries visited at a time.
      SCALE, CAP: factor on scores s, and c of the soft cap c tanh(s / c); 0: none.
      WINDOW: keys that a query sees, itself included; 0: all of its document.
    """
    kv_head = tl.program_id(0)
    base = tl.program_id(1) * KEYS
    batch = tl.program_id(2).to(tl.int64)
    ends += batch * LENGTH
    kv_offset = (batch * LENGTH * KV_HEADS + kv_head) * DIM

    columns = base + tl.arange(0, KEYS)
    upper = _upper(ends, columns, LENGTH, WINDOW)
    runs = ends + tl.num_programs(2).to(tl.int64) * LENGTH
    seen_by = _seen_by(runs, columns, LENGTH, RUNS)
    begin = _seen_by(runs, base, LENGTH, RUNS)
    last = tl.minimum(base + KEYS, LENGTH) - 1
    # Queries begin .. end - 1, in blocks from `begin` on. Those between full_begin and full_end no bound crosses.
    end = _upper(ends, last, LENGTH, WINDOW)
    full_begin = begin + tl.cdiv(_seen_by(runs, last, LENGTH, RUNS) - begin, QUERIES) * QUERIES
    full_end = begin + (_upper(ends, base, LENGTH, WINDOW) - begin) // QUERIES * QUERIES

    k = _block(key + kv_offset, base, LENGTH, KV_HEADS * DIM, DIM, WIDTH, KEYS, LENGTH % KEYS != 0)
    v = _block(value + kv_offset, base, LENGTH, KV_HEADS * DIM, DIM, WIDTH, KEYS, LENGTH % KEYS != 0)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q = query + (batch * LENGTH * HEADS + head) * DIM
        do = dout + (batch * LENGTH * HEADS + head) * DIM
        stat = lse + (batch * HEADS + head) * LENGTH
        d = delta + (batch * HEADS + head) * LENGTH
        dk, dv = _to_key(dk, dv, q, do, k, v, stat, d, seen_by, upper, begin, tl.minimum(full_begin, end),
                         LENGTH, HEADS * DIM, DIM, WIDTH, SCALE, CAP, QUERIES, True)  # fmt: skip
        dk, dv = _to_key(dk, dv, q, do, k, v, stat, d, seen_by, upper, full_begin, full_end,
                         LENGTH, HEADS * DIM, DIM, WIDTH, SCALE, CAP, QUERIES, False)  # fmt: skip
        dk, dv = _to_key(dk, dv, q, do, k, v, stat, d, seen_by, upper, tl.maximum(full_begin, full_end), end,
                         LENGTH, HEADS * DIM, DIM, WIDTH, SCALE, CAP, QUERIES, True)  # fmt: skip
    _store(dkey + kv_offset, dk * SCALE, base, LENGTH, KV_HEADS * DIM, DIM, WIDTH, KEYS)
    _store(dvalue + kv_offset, dv, base, LENGTH, KV_HEADS * DIM, DIM, WIDTH, KEYS)
