"""The bodies of the Triton kernels of the gated delta rule; triton.py says what they compute, and calls them.

Arrays of tokens are [B, T, heads, dim], contiguous; numbers of tokens that the kernels make themselves are
float32[B, heads, CHUNKS * CHUNK]; matrices of a chunk [B, heads, CHUNKS, CHUNK, CHUNK], states
[B, heads, CHUNKS, VALUE_DIM, KEY_DIM]. No operand on the left of a product is the transpose of a result: Triton 3.4 to
3.7 compile that wrongly for Hopper.
"""

# Triton's annotations do not know its own tensors, and the compiler wants the @triton.jit functions as they stand.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

_EPS = tl.constexpr(1e-6)  # as in reference.py
_LEAST = tl.constexpr(-100.0)  # of a decay: exp of it is nothing in float32, and its sums are exact enough


@triton.jit
def _tokens(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, DIM] of one head from token `first` on; what is past the row is 0."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[:, None], other=0.0)


@triton.jit
def _tokens_turned(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """The transpose of _tokens, loaded as such."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[None, :], other=0.0)


@triton.jit
def _put_tokens(array, values, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    values = values.to(array.dtype.element_ty)
    if LENGTH % CHUNK == 0:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[:, None])


@triton.jit
def _put_tokens_turned(array, values, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
                       CHUNK: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    values = values.to(array.dtype.element_ty)
    if LENGTH % CHUNK == 0:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[None, :])


@triton.jit
def _along(sums, array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """The product of each row of `sums` with its token, which is loaded anew: it would take registers all along."""
    return tl.sum(sums * _tokens(array, first, STRIDE, DIM, LENGTH, CHUNK).to(tl.float32), 1)


@triton.jit
def _matrix(array, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _put_matrix(array, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    pointers = array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, values.to(array.dtype.element_ty))


@triton.jit
def _bounds(starts, ends, first, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """(first token of each token's document, whether it is one); what is past the row is padding."""
    places = first + tl.arange(0, CHUNK)
    start = tl.load(starts + places, mask=places < LENGTH, other=0)
    end = tl.load(ends + places, mask=places < LENGTH, other=0)
    real = places < end
    return tl.where(real, start, places), real


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """The inverse of 1 + lower, float32[CHUNK, CHUNK] with nothing on and above the diagonal.

    Blocks of 16 on the diagonal by elimination, one column at a time; from them those twice as large, by products."""
    BLOCKS: tl.constexpr = CHUNK // 16
    LEVELS: tl.constexpr = 6 if CHUNK == 64 else 5
    apart = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    small = tl.sum(tl.where(apart, tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, 16, 16], tl.float32)
    for step in range(15):
        factors = tl.sum(tl.where(column == step, small, 0.0), 2)
        done = tl.sum(tl.where(row == step, inverse, 0.0), 1)
        inverse -= factors[:, :, None] * done[:, None, :]
    whole = tl.reshape(tl.where(apart, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    for level in tl.static_range(4, LEVELS):
        corners = (row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1)
        corner = tl.dot(whole, tl.where(corners, lower, 0.0), input_precision="tf32")
        whole -= tl.dot(corner, whole, input_precision="tf32")
    return whole


@triton.jit
def chunk_kernel(query, key, decay, beta, starts, ends, inverse, weights, total, kept, read, written, faded,
                 LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """What of a chunk of a value head depends on no state. Grid: (heads, chunks, B)."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
    inside = places < LENGTH
    start, real = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    offset = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    q = _tokens(query + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    k = _tokens(key + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    wide_q = q.to(tl.float32)
    wide_k = k.to(tl.float32)
    unit_q = tl.where(real, tl.rsqrt(tl.sum(wide_q * wide_q, 1) + _EPS) * SCALE, 0.0)
    unit_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + _EPS)

    at = (batch * LENGTH + places) * HEADS + head
    g = tl.maximum(tl.load(decay + at, mask=inside & real, other=0.0), _LEAST)
    b = tl.load(beta + at, mask=inside & real, other=0.0)
    same = (start[:, None] <= places[None, :]) & (places[:, None] >= places[None, :])
    sums = tl.sum(tl.where(same, g[None, :], 0.0), 1)  # of the token's document up to the token, in the chunk
    between = tl.where(same, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0) * (b * unit_k)[None, :]
    since = tl.where(start < first, tl.exp(sums), 0.0)
    is_last = places == first + CHUNK - 1
    last = tl.sum(tl.where(is_last, sums, 0.0), 0)
    last_start = tl.sum(tl.where(is_last, start, 0), 0)
    after = tl.where(places >= last_start, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)

    line = (batch * HEADS + head) * CHUNKS + chunk
    at = line * CHUNK + tl.arange(0, CHUNK)
    tl.store(total + at, sums)
    tl.store(kept + at, since * unit_k)
    tl.store(read + at, since * unit_q)
    tl.store(written + at, after * b * unit_k)
    tl.store(faded + line, tl.sum(tl.where(is_last, since, 0.0), 0))
    attended = tl.dot(q, tl.trans(k)) * between * unit_q[:, None]
    _put_matrix(weights + line * CHUNK * CHUNK, attended, CHUNK, CHUNK)
    alike = tl.dot(k, tl.trans(k)) * between * unit_k[:, None]
    below = places[:, None] > places[None, :]
    _put_matrix(inverse + line * CHUNK * CHUNK, _inverse(tl.where(below, alike, 0.0), CHUNK), CHUNK, CHUNK)


@triton.jit
def forward_kernel(query, key, value, inverse, weights, kept, read, written, faded, out, error, states,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """The states of a value head through a row, WIDTH of their columns, and what is read of them. All is transposed:
    the state is always on the left of its products, and stays in registers. Grid: (parts of values, heads, B)."""
    part = tl.program_id(0) * WIDTH
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    key_offset = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    value_offset = (batch * LENGTH * HEADS + head) * VALUE_DIM + part
    line = (batch * HEADS + head) * CHUNKS
    query += key_offset
    key += key_offset
    value += value_offset
    out += value_offset
    error += value_offset
    state = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for chunk in range(CHUNKS):
        first = chunk * CHUNK
        at = line * CHUNK + first + tl.arange(0, CHUNK)
        k = _tokens(key, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        v = _tokens_turned(value, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        narrow = state.to(k.dtype)
        if SAVE:
            _put_matrix(states + ((line + chunk) * VALUE_DIM + part) * KEY_DIM, narrow, WIDTH, KEY_DIM)
        remembered = tl.dot(narrow, tl.trans(k))
        wanted = v.to(tl.float32) - remembered * tl.load(kept + at)[None, :]
        wrong = tl.dot(wanted.to(k.dtype), tl.trans(solve))
        narrow_wrong = wrong.to(k.dtype)
        if SAVE:
            _put_tokens_turned(error, narrow_wrong, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        result = tl.dot(narrow, tl.trans(q)) * tl.load(read + at)[None, :]
        result = tl.dot(narrow_wrong, tl.trans(attend), result)
        _put_tokens_turned(out, result, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        state = state * tl.load(faded + line + chunk)
        state = tl.dot((wrong * tl.load(written + at)[None, :]).to(k.dtype), k, state)


@triton.jit
def reverse_kernel(query, key, dout, inverse, weights, kept, read, written, faded, dvalue, dstates,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """The gradients of a value head's states, from the row's end, and dvalue; as forward_kernel. dstates: of the state
    after each chunk. Grid: (parts of values, heads, B)."""
    part = tl.program_id(0) * WIDTH
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    key_offset = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    value_offset = (batch * LENGTH * HEADS + head) * VALUE_DIM + part
    line = (batch * HEADS + head) * CHUNKS
    query += key_offset
    key += key_offset
    dout += value_offset
    dvalue += value_offset
    dstate = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for step in range(CHUNKS):
        chunk = CHUNKS - 1 - step
        first = chunk * CHUNK
        at = line * CHUNK + first + tl.arange(0, CHUNK)
        k = _tokens(key, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        do = _tokens_turned(dout, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        narrow = dstate.to(k.dtype)
        _put_matrix(dstates + ((line + chunk) * VALUE_DIM + part) * KEY_DIM, narrow, WIDTH, KEY_DIM)
        derror = tl.dot(narrow, tl.trans(k)) * tl.load(written + at)[None, :]
        derror = tl.dot(do, attend, derror)
        dv = tl.dot(derror.to(k.dtype), solve)
        _put_tokens_turned(dvalue, dv, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        dstate = dstate * tl.load(faded + line + chunk)
        dstate = tl.dot((do.to(tl.float32) * tl.load(read + at)[None, :]).to(k.dtype), q, dstate)
        dstate = tl.dot((dv * -tl.load(kept + at)[None, :]).to(k.dtype), k, dstate)


@triton.jit
def _products(left, right, first, STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr,
              CHUNK: tl.constexpr):  # fmt: skip
    """[CHUNK, CHUNK]: of each token of `left` with each of `right`."""
    sums = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, DIM, WIDTH):
        rows = _tokens(left + part, first, STRIDE, WIDTH, LENGTH, CHUNK)
        columns = _tokens(right + part, first, STRIDE, WIDTH, LENGTH, CHUNK)
        sums = tl.dot(rows, tl.trans(columns), sums)
    return sums


@triton.jit
def _flow(shares):
    """Of each token, what its row has less what its column has: of one matrix, so that they cancel exactly."""
    return tl.sum(shares, 1) - tl.sum(shares, 0)


@triton.jit
def _later(sums, start, places):
    """Of each token, the sum over those of its document in the chunk from itself on: what its decay lies before."""
    reads = (start[:, None] <= places[None, :]) & (places[:, None] >= places[None, :])
    return tl.sum(tl.where(reads, sums[:, None], 0.0), 0)


@triton.jit
def _key_part(dk, reading, to_queries, to_keys, query, key, dvalue, error, states, dstates, kept, written, b, first,
              LENGTH: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
              KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Adds to PART columns of dk what comes from one value head. Also gives, along the keys and over these columns:
    what they read of states, what they write into states, all they write, both without beta; and the states along
    their gradients."""
    k = _tokens(key, first, KEYS, PART, LENGTH, CHUNK)
    dk = tl.dot(reading, k, dk)
    own = tl.sum(dk * k.to(tl.float32), 1)
    into = tl.dot(to_keys, k)
    into = tl.dot(to_queries, _tokens(query, first, KEYS, PART, LENGTH, CHUNK), into)
    through = tl.sum(into * k.to(tl.float32), 1)
    fading = tl.zeros([WIDTH], tl.float32)
    rows = tl.arange(0, WIDTH)[:, None] * KEY_DIM + tl.arange(0, PART)[None, :]
    for part in range(0, VALUE_DIM, WIDTH):
        state = tl.load(states + part * KEY_DIM + rows)
        dstate = tl.load(dstates + part * KEY_DIM + rows)
        fading += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        dv = _tokens(dvalue + part, first, VALUES, WIDTH, LENGTH, CHUNK)
        dk = tl.dot((dv.to(tl.float32) * -kept[:, None]).to(k.dtype), state, dk)
        e = _tokens(error + part, first, VALUES, WIDTH, LENGTH, CHUNK)
        into = tl.dot((e.to(tl.float32) * written[:, None]).to(k.dtype), dstate, into)
    own = tl.sum(dk * k.to(tl.float32), 1) - own
    db = tl.sum(into * k.to(tl.float32), 1)
    dk += into * b[:, None]
    return dk, own, db - through, db, tl.sum(fading, 0)


@triton.jit
def gradient_kernel(query, key, beta, starts, ends, error, dvalue, dout, states, dstates, total,
                    dquery, dkey, ddecay_read, ddecay, dbeta,
                    LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    """The other gradients of a chunk, for one key head and its value heads. Grid: (key_heads, chunks, B).

    A decay's is a sum over the later tokens: what a query or a key that reads has of its own gradient along itself,
    less what a key that writes has. ddecay_read is the part of it that queries make. dquery is made first, then all
    that keys make, for registers hold one of the two."""
    key_head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
    inside = places < LENGTH
    is_last = places == first + CHUNK - 1
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = HEADS * VALUE_DIM
    starts += batch * LENGTH
    ends += batch * LENGTH
    query += (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    key += (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    tokens = (batch * LENGTH + places) * HEADS + key_head * GROUP
    values = (batch * LENGTH * HEADS + key_head * GROUP) * VALUE_DIM
    lines = (batch * HEADS + key_head * GROUP) * CHUNKS + chunk
    q = _tokens(query, first, KEYS, KEY_DIM, LENGTH, CHUNK)
    k = _tokens(key, first, KEYS, KEY_DIM, LENGTH, CHUNK)
    length_q = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + _EPS)
    unit_k = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + _EPS)

    dq = tl.zeros([CHUNK, KEY_DIM], tl.float32)
    along_q = tl.zeros([CHUNK], tl.float32)
    for member in range(GROUP):
        # Bounds are loaded anew for each head: masks kept from one to the next would take registers.
        start, real = _bounds(starts, ends, first, LENGTH, CHUNK)
        unit_q = tl.where(real, length_q * SCALE, 0.0)
        b = tl.load(beta + tokens + member, mask=inside & real, other=0.0)
        sums = tl.load(total + (lines + member * CHUNKS) * CHUNK + tl.arange(0, CHUNK))
        since = tl.where(start < first, tl.exp(sums), 0.0)
        offset = values + member * VALUE_DIM
        reads = (start[:, None] <= places[None, :]) & (places[:, None] >= places[None, :])
        between = tl.where(reads, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
        dweights = _products(dout + offset, error + offset, first, VALUES, VALUE_DIM, WIDTH, LENGTH, CHUNK)
        dweights *= between * (b * unit_k)[None, :] * unit_q[:, None]
        flow = _flow(dweights * tl.dot(q, tl.trans(k)))
        dq = tl.dot(dweights.to(q.dtype), k, dq)
        own = _along(dq, query, first, KEYS, KEY_DIM, LENGTH, CHUNK)
        for part in range(0, VALUE_DIM, WIDTH):
            do = _tokens(dout + offset + part, first, VALUES, WIDTH, LENGTH, CHUNK)
            state = _matrix(states + ((lines + member * CHUNKS) * VALUE_DIM + part) * KEY_DIM, WIDTH, KEY_DIM)
            dq = tl.dot((do.to(tl.float32) * (since * unit_q)[:, None]).to(q.dtype), state, dq)
        along_q = _along(dq, query, first, KEYS, KEY_DIM, LENGTH, CHUNK)
        tl.store(ddecay_read + tokens + member, _later(flow + along_q - own, start, places), mask=inside)
    wide = _tokens(query, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
    dq -= wide * (along_q * length_q * length_q)[:, None]
    _put_tokens(dquery + (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM, dq, first, KEYS, KEY_DIM, LENGTH, CHUNK)

    HALF: tl.constexpr = 64  # of a key
    dk = tl.zeros([CHUNK, HALF], tl.float32)
    dk_rest = tl.zeros([CHUNK, HALF], tl.float32)
    for member in range(GROUP):
        start, real = _bounds(starts, ends, first, LENGTH, CHUNK)
        unit_q = tl.where(real, length_q * SCALE, 0.0)
        b = tl.load(beta + tokens + member, mask=inside & real, other=0.0)
        sums = tl.load(total + (lines + member * CHUNKS) * CHUNK + tl.arange(0, CHUNK))
        since = tl.where(start < first, tl.exp(sums), 0.0)
        last = tl.sum(tl.where(is_last, sums, 0.0), 0)
        last_start = tl.sum(tl.where(is_last, start, 0), 0)
        after = tl.where(places >= last_start, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)
        offset = values + member * VALUE_DIM

        # As a key that reads.
        reads = (start[:, None] <= places[None, :]) & (places[:, None] > places[None, :])
        between = tl.where(reads, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)
        dalike = _products(dvalue + offset, error + offset, first, VALUES, VALUE_DIM, WIDTH, LENGTH, CHUNK)
        dalike *= between * (b * unit_k)[None, :] * -unit_k[:, None]
        flow = _flow(dalike * tl.dot(k, tl.trans(k)))
        reading = dalike.to(q.dtype)
        # As a key that writes, without beta: the same matrices with the keys that write in rows.
        read = (start[None, :] <= places[:, None]) & (places[:, None] <= places[None, :])
        between = tl.where(read, tl.exp(tl.minimum(sums[None, :] - sums[:, None], 0.0)), 0.0) * unit_k[:, None]
        dweights = _products(error + offset, dout + offset, first, VALUES, VALUE_DIM, WIDTH, LENGTH, CHUNK)
        to_queries = (dweights * between * unit_q[None, :]).to(q.dtype)
        between = tl.where(places[:, None] < places[None, :], between, 0.0)
        dalike = _products(error + offset, dvalue + offset, first, VALUES, VALUE_DIM, WIDTH, LENGTH, CHUNK)
        to_keys = (dalike * between * -unit_k[None, :]).to(q.dtype)

        line = (lines + member * CHUNKS) * VALUE_DIM * KEY_DIM
        dk, own, through, db, fading = _key_part(
            dk, reading, to_queries, to_keys, query, key, dvalue + offset, error + offset, states + line,
            dstates + line, since * unit_k, after * unit_k, b, first,
            LENGTH, CHUNK, KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH, HALF)  # fmt: skip
        if KEY_DIM > HALF:
            dk_rest, own_rest, through_rest, db_rest, fading_rest = _key_part(
                dk_rest, reading, to_queries, to_keys, query + HALF, key + HALF, dvalue + offset, error + offset,
                states + line + HALF, dstates + line + HALF, since * unit_k, after * unit_k, b, first,
                LENGTH, CHUNK, KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH, HALF)  # fmt: skip
            own += own_rest
            through += through_rest
            db += db_rest
            fading += fading_rest

        across = tl.sum(through * b, 0) + fading * tl.sum(tl.where(is_last, since, 0.0), 0)
        flow += own - through * b + tl.where(is_last, across, 0.0)
        tl.store(ddecay + tokens + member, tl.where(real, _later(flow, start, places), 0.0), mask=inside)
        tl.store(dbeta + tokens + member, tl.where(real, db, 0.0), mask=inside)
    dkey += (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    along_k = _along(dk, key, first, KEYS, HALF, LENGTH, CHUNK)
    if KEY_DIM > HALF:
        along_k += _along(dk_rest, key + HALF, first, KEYS, HALF, LENGTH, CHUNK)
        wide = _tokens(key + HALF, first, KEYS, HALF, LENGTH, CHUNK).to(tl.float32)
        dk_rest -= wide * (along_k * unit_k * unit_k)[:, None]
        _put_tokens(dkey + HALF, dk_rest, first, KEYS, HALF, LENGTH, CHUNK)
    wide = _tokens(key, first, KEYS, HALF, LENGTH, CHUNK).to(tl.float32)
    dk -= wide * (along_k * unit_k * unit_k)[:, None]
    _put_tokens(dkey, dk, first, KEYS, HALF, LENGTH, CHUNK)
