"""Bodies of the Triton kernels of the gated delta rule, in the order of their calls.

Arrays of tokens are [B, T, heads, dim]; helpers get a pointer to one head's first token, and STRIDE, numbers from token
to token; tokens past the row (LENGTH) are 0. Numbers per token are float32[B, heads, CHUNKS * CHUNK], matrices of a
chunk [B, heads, CHUNKS, CHUNK, CHUNK], states [B, heads, CHUNKS, VALUE_DIM, KEY_DIM], KEY_DIM = VALUE_DIM;
triton.ChunkFactors explains their names. Helpers named ..._turned load or store transposes. No left operand of a
product is the transpose of a matrix that the kernel computed, because Triton 3.4 to 3.7 compile that wrongly for
Hopper.
"""

import triton
import triton.language as tl

_EPS = tl.constexpr(1e-6)  # as in reference.py
_LEAST = tl.constexpr(-100.0)  # the smallest decay: its exp is 0 in float32, and its sums are exact enough


@triton.jit
def _tokens(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, DIM] of one head's tokens from `first` on."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[:, None], other=0.0)


@triton.jit
def _tokens_turned(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Transpose [DIM, CHUNK] of `_tokens`."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[None, :], other=0.0)


@triton.jit
def _piece_turned(
    array,
    first,
    begin,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Transpose [DIM, PIECE] of a chunk's tokens from its token `begin` on; begin + PIECE is at most CHUNK,
    unchecked.
    """
    rows = begin + tl.arange(0, PIECE)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[None, :], other=0.0)


@triton.jit
def _put_tokens(
    array, values, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Stores [CHUNK, DIM] as one head's tokens from `first` on, in array's dtype."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    values = values.to(array.dtype.element_ty)
    if LENGTH % CHUNK == 0:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[:, None])


@triton.jit
def _put_tokens_turned(
    array, values, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Stores [DIM, CHUNK] transposed, as `_put_tokens`."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    values = values.to(array.dtype.element_ty)
    if LENGTH % CHUNK == 0:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[None, :])


@triton.jit
def _dot_with_tokens(
    sums, array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr
):
    """float32[CHUNK]: inner product of each row of `sums` [CHUNK, DIM] with its token's vector."""
    return tl.sum(sums * _tokens(array, first, STRIDE, DIM, LENGTH, CHUNK).to(tl.float32), 1)


@triton.jit
def _inverse_length(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """float32[CHUNK]: 1 over the length of each token's vector; 1000 for a vector of 0."""
    vectors = _tokens(array, first, STRIDE, DIM, LENGTH, CHUNK).to(tl.float32)
    return tl.rsqrt(tl.sum(vectors * vectors, 1) + _EPS)


@triton.jit
def _matrix(array, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Contiguous [ROWS, COLUMNS] at `array`."""
    return tl.load(array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _turned(array, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose [COLUMNS, ROWS] of the contiguous matrix at `array`."""
    return tl.load(array + tl.arange(0, COLUMNS)[:, None] + tl.arange(0, ROWS)[None, :] * COLUMNS)


@triton.jit
def _put_matrix(array, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores [ROWS, COLUMNS] at `array`, in its dtype."""
    pointers = array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, values.to(array.dtype.element_ty))


@triton.jit
def _bounds(starts, ends, first, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """(int32[CHUNK], each token's document's first token, its own at padding; bool[CHUNK], False at padding) from
    `first` on.
    """
    positions = first + tl.arange(0, CHUNK)
    start = tl.load(starts + positions, mask=positions < LENGTH, other=0)
    end = tl.load(ends + positions, mask=positions < LENGTH, other=0)
    real = positions < end
    return tl.where(real, start, positions), real


@triton.jit
def _visible_pairs(start, positions):
    """bool[CHUNK, CHUNK]: whether a token (row) sees another of the chunk (column); padding sees itself only."""
    return (start[:, None] <= positions[None, :]) & (positions[:, None] >= positions[None, :])


@triton.jit
def _decay_between(sums, visible):
    """float32[CHUNK, CHUNK]: what share of what one token (column) wrote is there when another (row) reads.

    sums: float32[CHUNK], logarithms of decays, summed over each token's document within the chunk, up to the token.
    """
    return tl.where(visible, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit
def _decay_to_end(sums, start, positions, is_last):
    """float32[CHUNK]: factor of what each token writes in the state after the chunk; 0 for earlier documents."""
    last = tl.sum(tl.where(is_last, sums, 0.0), 0)
    last_start = tl.sum(tl.where(is_last, start, 0), 0)
    return tl.where(positions >= last_start, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)


@triton.jit
def _sum_from_begin(before, before_begins, token, begins):
    """Combines neighbouring runs (sum, whether a document begins in it) for a scan along each document."""
    return tl.where(begins != 0, token, before + token), before_begins | begins


@triton.jit
def _sum_to_end(after, after_ends, token, ends):
    """Combines neighbouring runs (sum, whether a document ends in it) for a scan from the last token back."""
    return tl.where(ends != 0, token, token + after), after_ends | ends


@triton.jit
def numbers_kernel(query, key, decay, beta, starts, ends,
                   total, share, unit_q, unit_k, kept, read, written, reach, faded,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """ChunkFactors' numbers of a chunk's tokens, for all value heads of a key head. They have a kernel of their own,
    because in a kernel with matrix products a thread would compute each number 16 times. Decays below -100 count as
    -100. Grid: (key_heads, chunks, B).

      query, key: [B, LENGTH, KEY_HEADS, KEY_DIM]. decay, beta: float32[B, LENGTH, HEADS].
      starts, ends: int32[B, LENGTH], bounds of each token's document.
      total, share, unit_q, unit_k, kept, read, written, reach: written, float32[B, HEADS, CHUNKS * CHUNK]; faded: [B,
      HEADS, CHUNKS]. triton.ChunkFactors says what they are.
      SCALE: 1 / sqrt(KEY_DIM). VALUE_DIM, WIDTH: not used.
    """
    key_head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    positions = first + tl.arange(0, CHUNK)
    inside = positions < LENGTH
    is_last = positions == first + CHUNK - 1
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    start, real = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    offset = (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    query_factor = _inverse_length(query + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    query_factor = tl.where(real, query_factor * SCALE, 0.0)
    key_factor = _inverse_length(key + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    for member in range(GROUP):
        head = key_head * GROUP + member
        tokens = (batch * LENGTH + positions) * HEADS + head
        g = tl.maximum(tl.load(decay + tokens, mask=inside & real, other=0.0), _LEAST)
        b = tl.load(beta + tokens, mask=inside & real, other=0.0)
        sums, _ = tl.associative_scan((g, (positions == start).to(tl.int32)), 0, _sum_from_begin)
        since = tl.where(start < first, tl.exp(sums), 0.0)
        after = _decay_to_end(sums, start, positions, is_last) * key_factor
        line = (batch * HEADS + head) * CHUNKS + chunk
        offsets = line * CHUNK + tl.arange(0, CHUNK)
        tl.store(total + offsets, sums)
        tl.store(share + offsets, b)
        tl.store(unit_q + offsets, query_factor)
        tl.store(unit_k + offsets, key_factor)
        tl.store(kept + offsets, since * key_factor)
        tl.store(read + offsets, since * query_factor)
        tl.store(written + offsets, after * b)
        tl.store(reach + offsets, after)
        tl.store(faded + line, tl.sum(tl.where(is_last, since, 0.0), 0))


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """Inverse of 1 + lower, float32[CHUNK, CHUNK], lower strictly lower triangular, CHUNK 64 or 32,
    by doubling blocks.
    """
    LEVELS: tl.constexpr = 6 if CHUNK == 64 else 5
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row >> 1 == column >> 1, -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        inverse16 = inverse.to(tl.float16)
        # Shifted before they are combined: for most, the compiler knows the result for a whole warp.
        corner = tl.dot(inverse16, tl.where((row >> level) ^ (column >> level) == 1, lower, 0.0).to(tl.float16))
        inverse -= tl.dot(corner.to(tl.float16), inverse16)
    return inverse


@triton.jit
def chunk_kernel(
    query,
    key,
    starts,
    ends,
    total,
    share,
    unit_q,
    unit_k,
    inverse,
    weights,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ChunkFactors' matrices `inverse` and `weights` of a chunk of a value head, in key's dtype. Grid: (heads, chunks,
    B).

      query, key: [B, LENGTH, KEY_HEADS, KEY_DIM]. starts, ends: int32[B, LENGTH], bounds of documents.
      total, share, unit_q, unit_k: from numbers_kernel.
      inverse, weights: written, [B, HEADS, CHUNKS, CHUNK, CHUNK].
      VALUE_DIM, SCALE, WIDTH: not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    positions = first + tl.arange(0, CHUNK)
    offset = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    line = (batch * HEADS + head) * CHUNKS + chunk
    offsets = line * CHUNK + tl.arange(0, CHUNK)
    q = _tokens(query + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    k = _tokens(key + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    sums = tl.load(total + offsets)
    columns = tl.load(share + offsets) * tl.load(unit_k + offsets)
    start, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    between = _decay_between(sums, _visible_pairs(start, positions)) * columns[None, :]
    attended = tl.dot(q, tl.trans(k)) * between * tl.load(unit_q + offsets)[:, None]
    _put_matrix(weights + line * CHUNK * CHUNK, attended, CHUNK, CHUNK)
    alike = tl.dot(k, tl.trans(k)) * between * tl.load(unit_k + offsets)[:, None]
    below = positions[:, None] > positions[None, :]
    _put_matrix(inverse + line * CHUNK * CHUNK, _inverse(tl.where(below, alike, 0.0), CHUNK), CHUNK, CHUNK)


@triton.jit
def _walk(
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where a program's WIDTH columns are: (first column, offset of the key head, of value's columns, number of its
    first chunk).
    """
    first_column = tl.program_id(0) * WIDTH
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    keys = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    return (
        first_column,
        keys,
        (batch * LENGTH * HEADS + head) * VALUE_DIM + first_column,
        (batch * HEADS + head) * CHUNKS,
    )


@triton.jit
def forward_kernel(query, key, value, inverse, weights, kept, read, written, faded, out, error, states,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """States of a value head along a row, WIDTH of their columns, and the outputs that queries read from them. The
    state is float32, rounded to key's dtype for products; all is transposed, so that the state, always the left
    operand, stays in registers. Grid: (VALUE_DIM / WIDTH, heads, B).

      SAVE: also stores `error` (z, before the factor beta, in value's shape and dtype) and `states` (before each chunk,
        in key's dtype); otherwise these are not written.
      query, key, value, out: [B, LENGTH, KEY_HEADS, KEY_DIM] twice, [B, LENGTH, HEADS, VALUE_DIM] twice.
      inverse, weights, kept, read, written, faded: ChunkFactors, of chunk_kernel and numbers_kernel.
      LENGTH, CHUNKS, CHUNK: tokens of a row, its chunks, tokens of one. SCALE: not used.
    """
    first_column, keys, values, line = _walk(LENGTH, CHUNKS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH)
    state = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for chunk in range(CHUNKS):
        first = chunk * CHUNK
        offsets = line * CHUNK + first + tl.arange(0, CHUNK)
        # Triton prefetches only operands of products, so these are loaded before the products that wait.
        reading = tl.load(read + offsets)
        fade = tl.load(faded + line + chunk)
        k = _tokens(key + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        v = _tokens_turned(value + values, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        state16 = state.to(k.dtype)
        if SAVE:
            _put_matrix(states + ((line + chunk) * VALUE_DIM + first_column) * KEY_DIM, state16, WIDTH, KEY_DIM)
        recalled = tl.dot(state16, tl.trans(k))
        target = v.to(tl.float32) - recalled * tl.load(kept + offsets)[None, :]
        errors = tl.dot(target.to(k.dtype), tl.trans(solve))
        errors16 = errors.to(k.dtype)
        if SAVE:
            _put_tokens_turned(error + values, errors16, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        result = tl.dot(state16, tl.trans(q)) * reading[None, :]
        result = tl.dot(errors16, tl.trans(attend), result)
        _put_tokens_turned(out + values, result, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        state = state * fade
        state = tl.dot((errors * tl.load(written + offsets)[None, :]).to(k.dtype), k, state)


@triton.jit
def reverse_kernel(query, key, dout, inverse, weights, kept, read, written, faded, dvalue, dstates,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """dvalue, and dstates, the gradients of the states after each chunk, in key's dtype, from the row's end back, WIDTH
    columns of a value head. Reads the arrays of forward_kernel (triton.ChunkFactors); dvalue and dstates are written.
    Grid: (VALUE_DIM / WIDTH, heads, B).

      query, key: [B, LENGTH, KEY_HEADS, KEY_DIM]. dout, dvalue: [B, LENGTH, HEADS, VALUE_DIM]; dout is 0 at padding.
      inverse, weights, kept, read, written, faded: ChunkFactors. SCALE: not used.
      dstates: [B, HEADS, CHUNKS, VALUE_DIM, KEY_DIM]. LENGTH, CHUNKS, CHUNK: tokens, chunks, tokens of one.
    """
    first_column, keys, values, line = _walk(LENGTH, CHUNKS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH)
    dstate = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for step in range(CHUNKS):
        chunk = CHUNKS - 1 - step
        first = chunk * CHUNK
        offsets = line * CHUNK + first + tl.arange(0, CHUNK)
        writing = tl.load(written + offsets)
        fade = tl.load(faded + line + chunk)
        k = _tokens(key + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        do = _tokens_turned(dout + values, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        dstate16 = dstate.to(k.dtype)
        _put_matrix(dstates + ((line + chunk) * VALUE_DIM + first_column) * KEY_DIM, dstate16, WIDTH, KEY_DIM)
        derror = tl.dot(dstate16, tl.trans(k)) * writing[None, :]
        derror = tl.dot(do, attend, derror)
        dv = tl.dot(derror.to(k.dtype), solve)
        _put_tokens_turned(dvalue + values, dv, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        dstate = dstate * fade
        dstate = tl.dot((do.to(tl.float32) * tl.load(read + offsets)[None, :]).to(k.dtype), q, dstate)
        dstate = tl.dot((dv * -tl.load(kept + offsets)[None, :]).to(k.dtype), k, dstate)


@triton.jit
def pairs_kernel(query, key, starts, ends, error, dvalue, dout, total, share, unit_q, unit_k,
                  to_weights, to_system, pair_terms, dbeta,
                 LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Gradients of a value head's two matrices of a chunk, and their contributions to ddecay and dbeta. Grid: (heads,
    chunks, B).

      to_weights, to_system: matrices in key's dtype, gradients of the inner products of queries with keys, and of keys
        with keys, as they are in memory.
      pair_terms: contribution to ddecay, before its sum over the token and the later ones; dbeta: to dbeta.
      error, dvalue: of forward_kernel and reverse_kernel.
      query, key: [B, LENGTH, KEY_HEADS, KEY_DIM]. starts, ends: int32[B, LENGTH], bounds of documents.
      dout: gradient of the output, [B, LENGTH, HEADS, VALUE_DIM].
      total, share, unit_q, unit_k: ChunkFactors. WIDTH: columns of a step. SCALE: not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    positions = first + tl.arange(0, CHUNK)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = HEADS * VALUE_DIM
    keys = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    query += keys
    key += keys
    values = (batch * LENGTH * HEADS + head) * VALUE_DIM
    error += values
    dvalue += values
    dout += values
    line = (batch * HEADS + head) * CHUNKS + chunk
    offsets = line * CHUNK + tl.arange(0, CHUNK)
    attended = tl.zeros([CHUNK, CHUNK], tl.float32)
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in range(0, KEY_DIM, WIDTH):
        q = _tokens(query + column, first, KEYS, WIDTH, LENGTH, CHUNK)
        k = _tokens(key + column, first, KEYS, WIDTH, LENGTH, CHUNK)
        do = _tokens(dout + column, first, VALUES, WIDTH, LENGTH, CHUNK)
        e = _tokens(error + column, first, VALUES, WIDTH, LENGTH, CHUNK)
        dv = _tokens(dvalue + column, first, VALUES, WIDTH, LENGTH, CHUNK)
        attended = tl.dot(q, tl.trans(k), attended)
        alike = tl.dot(k, tl.trans(k), alike)
        pairs = tl.dot(do, tl.trans(e), pairs)
        system = tl.dot(dv, tl.trans(e), system)
    b = tl.load(share + offsets)
    start, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    decays = (
        _decay_between(tl.load(total + offsets), _visible_pairs(start, positions)) * tl.load(unit_k + offsets)[None, :]
    )
    pairs *= decays * tl.load(unit_q + offsets)[:, None]
    _put_matrix(to_weights + line * CHUNK * CHUNK, pairs * b[None, :], CHUNK, CHUNK)
    system *= tl.where(positions[:, None] > positions[None, :], decays, 0.0) * -tl.load(unit_k + offsets)[:, None]
    _put_matrix(to_system + line * CHUNK * CHUNK, system * b[None, :], CHUNK, CHUNK)
    # Both sums are over one float32 matrix, so that pairs on the same side of a decay cancel exactly.
    shares = pairs * attended + system * alike
    columns = tl.sum(shares, 0)
    tl.store(pair_terms + offsets, tl.sum(shares * b[None, :], 1) - columns * b)
    tl.store(dbeta + offsets, columns)


@triton.jit
def dquery_kernel(
    query,
    key,
    dout,
    states,
    read,
    to_weights,
    dquery,
    query_terms,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dquery of a chunk, before normalisation, summed over a key head's value heads. Factors per token are applied to
    rows of a product's result, so that its operands are used as they are in memory. Grid: (key_heads, chunks, B).

      query_terms: for each token and value head, the query times the gradient that it gets from reading the states.
      query, key, dquery: [B, LENGTH, KEY_HEADS, KEY_DIM]. dout: [B, LENGTH, HEADS, VALUE_DIM].
      states: of forward_kernel. read: of ChunkFactors. to_weights: of pairs_kernel.
      WIDTH: columns of a step. SCALE: not used.
    """
    key_head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = HEADS * VALUE_DIM
    keys = (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    query += keys
    values = (batch * LENGTH * HEADS + key_head * GROUP) * VALUE_DIM
    lines = (batch * HEADS + key_head * GROUP) * CHUNKS + chunk
    dq = tl.zeros([CHUNK, KEY_DIM], tl.float32)
    for member in range(GROUP):
        line = lines + member * CHUNKS
        offsets = line * CHUNK + tl.arange(0, CHUNK)
        member_dq = tl.zeros([CHUNK, KEY_DIM], tl.float32)
        for column in range(0, VALUE_DIM, WIDTH):
            do = _tokens(dout + values + member * VALUE_DIM + column, first, VALUES, WIDTH, LENGTH, CHUNK)
            state = _matrix(states + (line * VALUE_DIM + column) * KEY_DIM, WIDTH, KEY_DIM)
            member_dq = tl.dot(do, state, member_dq)
        member_dq *= tl.load(read + offsets)[:, None]
        tl.store(query_terms + offsets, _dot_with_tokens(member_dq, query, first, KEYS, KEY_DIM, LENGTH, CHUNK))
        dq += member_dq
        k = _tokens(key + keys, first, KEYS, KEY_DIM, LENGTH, CHUNK)
        dq = tl.dot(_matrix(to_weights + line * CHUNK * CHUNK, CHUNK, CHUNK), k, dq)
    queries = _tokens(query, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
    dq -= queries * (tl.sum(dq * queries, 1) / (tl.sum(queries * queries, 1) + _EPS))[:, None]
    _put_tokens(dquery + keys, dq, first, KEYS, KEY_DIM, LENGTH, CHUNK)


@triton.jit
def dkey_kernel(query, key, error, dvalue, states, dstates, kept, written, to_weights, to_system,
                dkey, recall_terms, write_terms, carry_terms,
                LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """dkey of a chunk, before normalisation, summed over a key head's value heads; transposed, so that eight warps
    share its rows. One loop runs over all value heads, and within each over WIDTH columns of their states and an equal
    share of the chunk's tokens, so that operands are prefetched from one value head to the next. Grid: (key_heads,
    chunks, B).

      recall_terms, write_terms: for each token, its key times the state before the chunk times dvalue, and times
      dstates times error.
      carry_terms: float32[B, heads, CHUNKS], inner product of the state before a chunk with dstates.
      query, key, dkey: [B, LENGTH, KEY_HEADS, KEY_DIM].
      error, dvalue, states, dstates: of forward_kernel and reverse_kernel. kept, written: of ChunkFactors.
      to_weights, to_system: of pairs_kernel. WIDTH: columns of a step. SCALE: not used.
    """
    key_head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = HEADS * VALUE_DIM
    PARTS: tl.constexpr = VALUE_DIM // WIDTH
    PIECE: tl.constexpr = CHUNK // PARTS
    keys = (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    query += keys
    key += keys
    values = (batch * LENGTH * HEADS + key_head * GROUP) * VALUE_DIM
    lines = (batch * HEADS + key_head * GROUP) * CHUNKS + chunk
    transposed_offsets = tl.arange(0, PIECE)[:, None] + tl.arange(0, CHUNK)[None, :] * CHUNK
    dk = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    write_sums = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    read_sums = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    state_products = tl.zeros([KEY_DIM, WIDTH], tl.float32)
    for step in range(GROUP * PARTS):
        member = step // PARTS
        column_block = step % PARTS
        line = lines + member * CHUNKS
        offset = values + member * VALUE_DIM + column_block * WIDTH
        state = _turned(states + (line * VALUE_DIM + column_block * WIDTH) * KEY_DIM, WIDTH, KEY_DIM)
        dstate = _turned(dstates + (line * VALUE_DIM + column_block * WIDTH) * KEY_DIM, WIDTH, KEY_DIM)
        dv = _tokens_turned(dvalue + offset, first, VALUES, WIDTH, LENGTH, CHUNK)
        e = _tokens_turned(error + offset, first, VALUES, WIDTH, LENGTH, CHUNK)
        state_products += state.to(tl.float32) * dstate.to(tl.float32)
        read_sums = tl.dot(state, dv, read_sums)
        write_sums = tl.dot(dstate, e, write_sums)
        begin = column_block * PIECE
        k = _piece_turned(key, first, begin, KEYS, KEY_DIM, LENGTH, CHUNK, PIECE)
        q = _piece_turned(query, first, begin, KEYS, KEY_DIM, LENGTH, CHUNK, PIECE)
        square = line * CHUNK * CHUNK
        dk = tl.dot(k, _matrix(to_system + square + begin * CHUNK, PIECE, CHUNK), dk)
        dk = tl.dot(k, tl.load(to_system + square + begin + transposed_offsets), dk)
        dk = tl.dot(q, _matrix(to_weights + square + begin * CHUNK, PIECE, CHUNK), dk)
        if column_block == PARTS - 1:
            offsets = line * CHUNK + tl.arange(0, CHUNK)
            tl.store(carry_terms + line, tl.sum(tl.sum(state_products, 0), 0))
            keys_wide = _tokens_turned(key, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
            tl.store(write_terms + offsets, tl.sum(write_sums * keys_wide, 0))
            tl.store(recall_terms + offsets, tl.sum(read_sums * keys_wide, 0))
            dk += write_sums * tl.load(written + offsets)[None, :] - read_sums * tl.load(kept + offsets)[None, :]
            write_sums = tl.zeros([KEY_DIM, CHUNK], tl.float32)
            read_sums = tl.zeros([KEY_DIM, CHUNK], tl.float32)
            state_products = tl.zeros([KEY_DIM, WIDTH], tl.float32)
    unnormed_keys = _tokens_turned(key, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
    dk -= unnormed_keys * (tl.sum(dk * unnormed_keys, 0) / (tl.sum(unnormed_keys * unnormed_keys, 0) + _EPS))[None, :]
    _put_tokens_turned(dkey + keys, dk, first, KEYS, KEY_DIM, LENGTH, CHUNK)


@triton.jit
def rates_kernel(share, starts, ends, kept, faded, reach, pair_terms, dbeta_of_pairs, query_terms,
                 recall_terms, write_terms, carry_terms, ddecay, dbeta,
                 LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """ddecay and dbeta of a chunk of a value head, float32[B, T, heads], 0 at padding. Grid: (heads, chunks, B).

    ddecay sums over a token and the later ones of its document and chunk: reading queries' and keys' inner products
    with their own gradients, minus those of writing keys. What goes through the state into later chunks is added at the
    chunk's last token.

      share, kept, faded, reach: of ChunkFactors. starts, ends: int32[B, LENGTH], bounds of documents.
      pair_terms, dbeta_of_pairs: `pair_terms` and `dbeta` of pairs_kernel. query_terms: of dquery_kernel.
      recall_terms, write_terms, carry_terms: of dkey_kernel. KEY_HEADS, KEY_DIM, VALUE_DIM, SCALE, WIDTH: not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    positions = first + tl.arange(0, CHUNK)
    tokens = (batch * LENGTH + positions) * HEADS + head
    line = (batch * HEADS + head) * CHUNKS + chunk
    offsets = line * CHUNK + tl.arange(0, CHUNK)
    b = tl.load(share + offsets)
    _, real = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    state_write = tl.load(write_terms + offsets) * tl.load(reach + offsets)
    token_terms = (
        tl.load(pair_terms + offsets)
        + tl.load(query_terms + offsets)
        - tl.load(recall_terms + offsets) * tl.load(kept + offsets)
        - state_write * b
    )
    state_term = tl.sum(state_write * b, 0) + tl.load(carry_terms + line) * tl.load(faded + line)
    token_terms += tl.where(positions == first + CHUNK - 1, state_term, 0.0)
    following, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first + 1, LENGTH, CHUNK)
    later, _ = tl.associative_scan((token_terms, (following > positions).to(tl.int32)), 0, _sum_to_end, reverse=True)
    tl.store(ddecay + tokens, tl.where(real, later, 0.0), mask=positions < LENGTH)
    tl.store(
        dbeta + tokens, tl.where(real, tl.load(dbeta_of_pairs + offsets) + state_write, 0.0), mask=positions < LENGTH
    )
