"""The bodies of the Triton kernels of the gated delta rule; triton.py describes and calls them, in this order. The
forward has numbers_kernel (factors of tokens), chunk_kernel (the two matrices of a chunk) and forward_kernel (states
and outputs); the backward has reverse_kernel (gradients of states and values), pairs_kernel (gradients of the two
matrices), dquery_kernel, dkey_kernel, and rates_kernel (gradients of decay and beta). All get the same compile-time
constants (forward_kernel also SAVE), so that some do not use all of them. KEY_DIM and VALUE_DIM are the same number.
Helpers named ..._turned load or store transposes.

Arrays of tokens are [B, T, heads, dim], contiguous; helpers get a pointer to one head's first token, and STRIDE, the
numbers from token to token. Numbers per token that the kernels compute are float32[B, heads, CHUNKS * CHUNK] (ddecay
and dbeta, the results, are [B, T, heads]), matrices of a chunk [B, heads, CHUNKS, CHUNK, CHUNK], states [B, heads,
CHUNKS, VALUE_DIM, KEY_DIM]. triton.Made explains those of the first two kernels. No left operand of a product is the
transpose of a matrix that the kernel computed, because Triton 3.4 to 3.7 compile that wrongly for Hopper.
"""

import triton
import triton.language as tl

_EPS = tl.constexpr(1e-6)  # as in reference.py
_LEAST = tl.constexpr(-100.0)  # the smallest decay: its exp is 0 in float32, and its sums are exact enough


@triton.jit
def _tokens(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Loads the vectors of a chunk's tokens, such as queries: [CHUNK, DIM] of one head, to whose first token `array`
    points, from token `first` on; tokens past the row (LENGTH) are 0. STRIDE: numbers from token to token."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[:, None] * STRIDE + tl.arange(0, DIM)[None, :]
    if LENGTH % CHUNK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(first + rows < LENGTH)[:, None], other=0.0)


@triton.jit
def _tokens_turned(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Loads the vectors of CHUNK tokens of one head, such as values, from token `first` on, as the transpose [DIM,
    CHUNK], for forward_kernel, reverse_kernel and dkey_kernel, which compute transposed results. `array` points to the
    head's first token, STRIDE is the numbers from token to token; tokens past the row (LENGTH) are 0."""
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
    """Loads the vectors (queries or keys) of PIECE neighbouring tokens of a chunk of CHUNK tokens of one head,
    transposed: [DIM, PIECE], from the chunk's token `begin` on. dkey_kernel multiplies such a part of the tokens at a
    time. `array` points to the head's first token, `first` is the chunk's first token, STRIDE the numbers from token to
    token; tokens past the row (LENGTH) are 0, but the chunk's end is not checked: begin + PIECE is at most CHUNK."""
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
    """Stores values [CHUNK, DIM], such as gradients, as the vectors of the tokens of one head from token `first` on, in
    the dtype of `array`, without those past the row (LENGTH). `array` points to the head's first token, STRIDE is the
    numbers from token to token."""
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
    """Stores the transpose of values [DIM, CHUNK] as the vectors of the tokens of one head from token `first` on, in
    the dtype of `array`, without those past the row (LENGTH). `array` points to the head's first token, STRIDE is the
    numbers from token to token. Kernels that compute transposed results use it."""
    rows = tl.arange(0, CHUNK)
    pointers = array + tl.cast(first, tl.int64) * STRIDE + rows[None, :] * STRIDE + tl.arange(0, DIM)[:, None]
    values = values.to(array.dtype.element_ty)
    if LENGTH % CHUNK == 0:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(first + rows < LENGTH)[None, :])


@triton.jit
def _along(sums, array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """For `asked` of dquery_kernel only: returns float32[CHUNK]: the inner product of each row of `sums` [CHUNK, DIM],
    a gradient, with the vector of its token (a query), which is loaded again, because keeping it would take registers.
    `array` points to the head's first token, `first` is the number of the chunk's first token in the row, STRIDE the
    numbers from token to token; tokens past the row (LENGTH) are 0."""
    return tl.sum(sums * _tokens(array, first, STRIDE, DIM, LENGTH, CHUNK).to(tl.float32), 1)


@triton.jit
def _inverse_length(array, first, STRIDE: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """For numbers_kernel: returns float32[CHUNK]: 1 over the length of each token's vector, a query or a key of DIM
    numbers, by which it is normalised. `array` points to the head's first token, `first` is the number of the chunk's
    first token in the row, STRIDE the numbers from token to token; vectors of tokens past the row (LENGTH) count as 0.
    As 1e-6 is added to the squared length, a vector of 0 gives 1000."""
    wide = _tokens(array, first, STRIDE, DIM, LENGTH, CHUNK).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + _EPS)


@triton.jit
def _matrix(array, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a chunk's matrix, or a part of a state: the contiguous matrix [ROWS, COLUMNS] that `array`, a pointer to
    global memory, points to, into registers, in its dtype and row by row."""
    return tl.load(array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _turned(array, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads, for dkey_kernel, a part of a state or of its gradient: the contiguous matrix [ROWS, COLUMNS] that `array`
    points to as its transpose [COLUMNS, ROWS], which is the left operand of a product."""
    return tl.load(array + tl.arange(0, COLUMNS)[:, None] + tl.arange(0, ROWS)[None, :] * COLUMNS)


@triton.jit
def _put_matrix(array, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores values [ROWS, COLUMNS] as the contiguous matrix that `array`, a pointer to global memory, points to, cast
    to its dtype: the inverse of `_matrix`."""
    pointers = array + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(pointers, values.to(array.dtype.element_ty))


@triton.jit
def _bounds(starts, ends, first, LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Returns, for CHUNK tokens from number `first` on, (int32[CHUNK] the number in the row of the first token of each
    token's document, bool[CHUNK] True for a token of a document, False for padding). Padding, which includes tokens
    past the row's LENGTH, gets its own number. starts and ends point to the row's document bounds, int32[T]."""
    places = first + tl.arange(0, CHUNK)
    start = tl.load(starts + places, mask=places < LENGTH, other=0)
    end = tl.load(ends + places, mask=places < LENGTH, other=0)
    real = places < end
    return tl.where(real, start, places), real


@triton.jit
def _reads(start, places):
    """bool[CHUNK, CHUNK]: whether a token (row) sees another token of the chunk (column): the earlier ones of its
    document and itself; padding sees itself only. start and places are int32[CHUNK], the first tokens of the tokens'
    documents, and the tokens' own numbers in the row. chunk_kernel and pairs_kernel mask decays by it."""
    return (start[:, None] <= places[None, :]) & (places[:, None] >= places[None, :])


@triton.jit
def _left(sums, seen):
    """Returns float32[CHUNK, CHUNK]: the decay from one token of a chunk to another, the factor that is left of what
    the first (column) wrote into the state when the second (row) reads it, from 0 to 1; 0 where not `seen`.

    sums: float32[CHUNK], the logarithms of decays, summed over each token's document within the chunk, up to the token.
    seen: bool[CHUNK, CHUNK] from _reads, whether the token of the row sees that of the column.
    """
    return tl.where(seen, tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit
def _after(sums, start, places, is_last):
    """Returns float32[CHUNK]: the factor with which what each token writes is in the state after the chunk; 0 for
    tokens of other documents than that of the chunk's last token. numbers_kernel makes the factors `written` and
    `reach` of it.

    sums: float32[CHUNK], the logarithms of decays, summed over each token's document within the chunk, up to the token.
    start, places: int32[CHUNK], the number in the row of the first token of each token's document, and of the token.
    is_last: bool[CHUNK], True for the chunk's last token only.
    """
    last = tl.sum(tl.where(is_last, sums, 0.0), 0)
    last_start = tl.sum(tl.where(is_last, start, 0), 0)
    return tl.where(places >= last_start, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)


@triton.jit
def _sum_from_begin(before, before_begins, token, begins):
    """Combines two neighbouring runs of tokens, for tl.associative_scan, which sums a number from the start of each
    token's document to the token. A run is (sum, flag): (before, before_begins) is the left one, (token, begins) the
    right one. A flag that is not 0 says that a document begins in the run; a sum to the left of a document's first
    token is dropped. Returns the combined run."""
    return tl.where(begins != 0, token, before + token), before_begins | begins


@triton.jit
def _sum_to_end(after, after_ends, token, ends):
    """Combines two neighbouring runs of tokens, for tl.associative_scan from the last token back, which sums a number
    from each token to the end of its document. A run is (sum, flag): (after, after_ends) is the right one, (token,
    ends) the left one. A flag that is not 0 says that a document ends in the run; a sum to the right of a document's
    last token is dropped. Returns the combined run."""
    return tl.where(ends != 0, token, token + after), after_ends | ends


@triton.jit
def numbers_kernel(query, key, decay, beta, starts, ends,
                   total, share, unit_q, unit_k, kept, read, written, reach, faded,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Computes the numbers of a chunk's tokens for all value heads of a key head, which do not depend on a state. They
    have a kernel of their own, because a kernel with matrix products has layouts in which a thread would compute each
    number 16 times. It is the forward's first kernel. Grid: (key_heads, chunks, B).

    It writes, float32[B, heads, CHUNKS * CHUNK]: total (the sum of decays of the token and those before it in its
    document and chunk), share (beta, 0 at padding), unit_q (SCALE over the query's length, 0 at padding) and unit_k (1
    over the key's length), kept and read (the factors with which the token's key and query read the state before the
    chunk, which contain unit_k and unit_q), written (the factor on the token's error times its key in the state after
    the chunk, which contains beta and unit_k) and reach (written without beta); and float32[B, heads, CHUNKS] faded,
    the factor of the state before the chunk in that after it, 0 unless the chunk's last token belongs to a document
    that began before the chunk. Decays below -100 count as -100.

    query and key are [B, T, key_heads, K], decay (the logarithm of the factor on the state) and beta float32[B, T,
    heads], starts and ends the document bounds, int32[B, T]. The compile-time constants are the sizes: LENGTH tokens of
    a row in CHUNKS chunks of CHUNK, KEY_HEADS of KEY_DIM, HEADS value heads; SCALE is 1 / sqrt(K); VALUE_DIM and WIDTH
    are not used.
    """
    key_head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
    inside = places < LENGTH
    is_last = places == first + CHUNK - 1
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    start, real = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    offset = (batch * LENGTH * KEY_HEADS + key_head) * KEY_DIM
    of_query = _inverse_length(query + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    of_query = tl.where(real, of_query * SCALE, 0.0)
    of_key = _inverse_length(key + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    for member in range(GROUP):
        head = key_head * GROUP + member
        tokens = (batch * LENGTH + places) * HEADS + head
        g = tl.maximum(tl.load(decay + tokens, mask=inside & real, other=0.0), _LEAST)
        b = tl.load(beta + tokens, mask=inside & real, other=0.0)
        sums, _ = tl.associative_scan((g, (places == start).to(tl.int32)), 0, _sum_from_begin)
        since = tl.where(start < first, tl.exp(sums), 0.0)
        after = _after(sums, start, places, is_last) * of_key
        line = (batch * HEADS + head) * CHUNKS + chunk
        at = line * CHUNK + tl.arange(0, CHUNK)
        tl.store(total + at, sums)
        tl.store(share + at, b)
        tl.store(unit_q + at, of_query)
        tl.store(unit_k + at, of_key)
        tl.store(kept + at, since * of_key)
        tl.store(read + at, since * of_query)
        tl.store(written + at, after * b)
        tl.store(reach + at, after)
        tl.store(faded + line, tl.sum(tl.where(is_last, since, 0.0), 0))


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """For chunk_kernel: returns the inverse of 1 + lower, float32[CHUNK, CHUNK]. lower: float32[CHUNK, CHUNK], strictly
    lower triangular (zeros on and above the diagonal). CHUNK is 64, or 32. It starts with blocks of 2 on the diagonal,
    from which blocks twice as large follow. Factors of products are float16, which has TF32's 11 bits: no element of
    the inverse exceeds 1 in size, because keys are normalised and beta and decay factors are at most 1."""
    LEVELS: tl.constexpr = 6 if CHUNK == 64 else 5
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    whole = tl.where(row == column, 1.0, tl.where(row >> 1 == column >> 1, -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        narrow = whole.to(tl.float16)
        # Shifted before they are combined: for most, the compiler knows the result for a whole warp.
        corner = tl.dot(narrow, tl.where((row >> level) ^ (column >> level) == 1, lower, 0.0).to(tl.float16))
        whole -= tl.dot(corner.to(tl.float16), narrow)
    return whole


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
    """Computes the two matrices of a chunk of a value head that triton.Made has: inverse, that of the matrix 1 + B of
    triton.py (there B is not the batch), and weights, with which queries read the chunk's own tokens, both [B, heads,
    CHUNKS, CHUNK, CHUNK] and stored in key's dtype. It is the forward's second kernel. Grid: (heads, chunks, B).

    query and key are [B, T, key_heads, K], starts and ends the document bounds, int32[B, T]; of numbers_kernel's
    results it reads total (sums of decays), share (beta), unit_q (1 / sqrt(K) over the lengths of queries) and unit_k
    (1 over those of keys). The compile-time constants are the sizes: LENGTH tokens of a row in CHUNKS chunks of CHUNK,
    KEY_HEADS of KEY_DIM, HEADS value heads; VALUE_DIM, SCALE and WIDTH are not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
    offset = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    line = (batch * HEADS + head) * CHUNKS + chunk
    at = line * CHUNK + tl.arange(0, CHUNK)
    q = _tokens(query + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    k = _tokens(key + offset, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
    sums = tl.load(total + at)
    columns = tl.load(share + at) * tl.load(unit_k + at)
    start, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    between = _left(sums, _reads(start, places)) * columns[None, :]
    attended = tl.dot(q, tl.trans(k)) * between * tl.load(unit_q + at)[:, None]
    _put_matrix(weights + line * CHUNK * CHUNK, attended, CHUNK, CHUNK)
    alike = tl.dot(k, tl.trans(k)) * between * tl.load(unit_k + at)[:, None]
    below = places[:, None] > places[None, :]
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
    """For forward_kernel and reverse_kernel, whose programs walk along a row with WIDTH columns of a value head:
    returns where the data of a program is: (the number of its first column of the values, the offset of its key head's
    first token in query and key, that of its columns' first token in value and out, the number of its first chunk among
    those of all rows and heads). Offsets count numbers of an array. Grid: (VALUE_DIM / WIDTH, heads, B).

    The compile-time constants are the sizes: LENGTH tokens of a row in CHUNKS chunks, KEY_HEADS of KEY_DIM, HEADS of
    VALUE_DIM.
    """
    part = tl.program_id(0) * WIDTH
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    keys = (batch * LENGTH * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    return part, keys, (batch * LENGTH * HEADS + head) * VALUE_DIM + part, (batch * HEADS + head) * CHUNKS


@triton.jit
def forward_kernel(query, key, value, inverse, weights, kept, read, written, faded, out, error, states,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """Computes the states of a value head along a row, WIDTH of their columns, and the outputs `out` [B, T, heads, V]
    that queries read from them. It is the forward's third kernel; the state is float32, and is rounded to key's dtype
    for products. Everything is transposed: the state is always the left operand of its products, and stays in
    registers. Grid: (VALUE_DIM / WIDTH, heads, B).

    SAVE: True: it also stores `error` (the errors z of tokens before their factor beta, in value's shape and dtype) and
    `states` (those before each chunk, [B, heads, CHUNKS, VALUE_DIM, KEY_DIM], in key's dtype) for the backward; False:
    these two are not written. query and key are [B, T, key_heads, K], value [B, T, heads, V]; inverse, weights, kept,
    read, written and faded are the fields of triton.Made, which explains them: the matrices of chunks, and the factors
    with which tokens and chunks read and change the state. The compile-time constants are the sizes: LENGTH tokens of a
    row in CHUNKS chunks of CHUNK, KEY_HEADS of KEY_DIM, HEADS of VALUE_DIM; SCALE is not used.
    """
    part, keys, values, line = _walk(LENGTH, CHUNKS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH)
    state = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for chunk in range(CHUNKS):
        first = chunk * CHUNK
        at = line * CHUNK + first + tl.arange(0, CHUNK)
        # Triton prefetches only operands of products, so these are loaded before the products that wait.
        reading = tl.load(read + at)
        fade = tl.load(faded + line + chunk)
        k = _tokens(key + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        v = _tokens_turned(value + values, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        narrow = state.to(k.dtype)
        if SAVE:
            _put_matrix(states + ((line + chunk) * VALUE_DIM + part) * KEY_DIM, narrow, WIDTH, KEY_DIM)
        recalled = tl.dot(narrow, tl.trans(k))
        wanted = v.to(tl.float32) - recalled * tl.load(kept + at)[None, :]
        wrong = tl.dot(wanted.to(k.dtype), tl.trans(solve))
        narrow_wrong = wrong.to(k.dtype)
        if SAVE:
            _put_tokens_turned(error + values, narrow_wrong, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        result = tl.dot(narrow, tl.trans(q)) * reading[None, :]
        result = tl.dot(narrow_wrong, tl.trans(attend), result)
        _put_tokens_turned(out + values, result, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        state = state * fade
        state = tl.dot((wrong * tl.load(written + at)[None, :]).to(k.dtype), k, state)


@triton.jit
def reverse_kernel(query, key, dout, inverse, weights, kept, read, written, faded, dvalue, dstates,
                   LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                   HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Computes the gradients of a value head's states from the row's end back, WIDTH of their columns, and dvalue [B,
    T, heads, V] in dout's dtype. It is the backward's first kernel. dstates are the gradients of the states after each
    chunk, in the shape and dtype of forward_kernel's `states`. Grid: (VALUE_DIM / WIDTH, heads, B).

    query and key are [B, T, key_heads, K]; dout is the gradient of the output, [B, T, heads, V]; inverse, weights,
    kept, read, written and faded are the fields of triton.Made, which explains them: the matrices of chunks, and the
    factors with which tokens and chunks read and change the state. The compile-time constants are the sizes: LENGTH
    tokens of a row in CHUNKS chunks of CHUNK, KEY_HEADS of KEY_DIM, HEADS of VALUE_DIM; SCALE is not used.
    """
    part, keys, values, line = _walk(LENGTH, CHUNKS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH)
    dstate = tl.zeros([WIDTH, KEY_DIM], tl.float32)
    for step in range(CHUNKS):
        chunk = CHUNKS - 1 - step
        first = chunk * CHUNK
        at = line * CHUNK + first + tl.arange(0, CHUNK)
        writing = tl.load(written + at)
        fade = tl.load(faded + line + chunk)
        k = _tokens(key + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        q = _tokens(query + keys, first, KEY_HEADS * KEY_DIM, KEY_DIM, LENGTH, CHUNK)
        do = _tokens_turned(dout + values, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        solve = _matrix(inverse + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        attend = _matrix(weights + (line + chunk) * CHUNK * CHUNK, CHUNK, CHUNK)
        narrow = dstate.to(k.dtype)
        _put_matrix(dstates + ((line + chunk) * VALUE_DIM + part) * KEY_DIM, narrow, WIDTH, KEY_DIM)
        derror = tl.dot(narrow, tl.trans(k)) * writing[None, :]
        derror = tl.dot(do, attend, derror)
        dv = tl.dot(derror.to(k.dtype), solve)
        _put_tokens_turned(dvalue + values, dv, first, HEADS * VALUE_DIM, WIDTH, LENGTH, CHUNK)
        dstate = dstate * fade
        dstate = tl.dot((do.to(tl.float32) * tl.load(read + at)[None, :]).to(k.dtype), q, dstate)
        dstate = tl.dot((dv * -tl.load(kept + at)[None, :]).to(k.dtype), k, dstate)


@triton.jit
def pairs_kernel(query, key, starts, ends, error, dvalue, dout, total, share, unit_q, unit_k,
                  to_weights, to_system, flow, dbeta,
                 LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Computes the gradients of a value head's two matrices of a chunk (triton.Made's weights, and the matrix of which
    its `inverse` is the inverse), from the products of queries and keys with keys, and what these contribute to the
    gradients of decay and beta. It is the backward's second kernel. Grid: (heads, chunks, B).

    It stores to_weights and to_system, [B, heads, CHUNKS, CHUNK, CHUNK] in key's dtype: the gradients of the inner
    products of queries with keys and of keys with keys, as they are in memory, from which the two matrices were made.
    dquery_kernel and dkey_kernel multiply keys and queries by them. It also stores, float32[B, heads, CHUNKS * CHUNK],
    flow, the contribution to ddecay before its sum over the token itself and the later ones, and dbeta, that to beta's
    gradient. rates_kernel adds to both what comes through the states, and makes the sum.

    It reads query and key [B, T, key_heads, K]; the document bounds starts and ends, int32[B, T]; [B, T, heads, V]
    forward_kernel's error, reverse_kernel's dvalue (the gradient of value) and dout (that of the output); and of
    triton.Made total (sums of decays), share (beta), unit_q (1 / sqrt(K) over the lengths of queries) and unit_k (1
    over those of keys). The compile-time constants are the sizes: LENGTH tokens of a row in CHUNKS chunks of CHUNK,
    KEY_HEADS of KEY_DIM, HEADS of VALUE_DIM; WIDTH columns are read at a time, and SCALE is not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
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
    at = line * CHUNK + tl.arange(0, CHUNK)
    attended = tl.zeros([CHUNK, CHUNK], tl.float32)
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, KEY_DIM, WIDTH):
        q = _tokens(query + part, first, KEYS, WIDTH, LENGTH, CHUNK)
        k = _tokens(key + part, first, KEYS, WIDTH, LENGTH, CHUNK)
        do = _tokens(dout + part, first, VALUES, WIDTH, LENGTH, CHUNK)
        e = _tokens(error + part, first, VALUES, WIDTH, LENGTH, CHUNK)
        dv = _tokens(dvalue + part, first, VALUES, WIDTH, LENGTH, CHUNK)
        attended = tl.dot(q, tl.trans(k), attended)
        alike = tl.dot(k, tl.trans(k), alike)
        pairs = tl.dot(do, tl.trans(e), pairs)
        system = tl.dot(dv, tl.trans(e), system)
    b = tl.load(share + at)
    start, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    left = _left(tl.load(total + at), _reads(start, places)) * tl.load(unit_k + at)[None, :]
    pairs *= left * tl.load(unit_q + at)[:, None]
    _put_matrix(to_weights + line * CHUNK * CHUNK, pairs * b[None, :], CHUNK, CHUNK)
    system *= tl.where(places[:, None] > places[None, :], left, 0.0) * -tl.load(unit_k + at)[:, None]
    _put_matrix(to_system + line * CHUNK * CHUNK, system * b[None, :], CHUNK, CHUNK)
    # Both sums are over one float32 matrix, so that pairs on the same side of a decay cancel exactly.
    shares = pairs * attended + system * alike
    columns = tl.sum(shares, 0)
    tl.store(flow + at, tl.sum(shares * b[None, :], 1) - columns * b)
    tl.store(dbeta + at, columns)


@triton.jit
def dquery_kernel(
    query,
    key,
    dout,
    states,
    read,
    to_weights,
    dquery,
    asked,
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
    """Computes dquery of a chunk, [B, T, key_heads, K] in query's dtype, the gradient of queries before they are
    normalised, a sum over all value heads of a key head. It also stores `asked`, float32[B, heads, CHUNKS * CHUNK], for
    each token and value head the inner product of the query with the gradient that it gets from reading the states,
    which rates_kernel adds to the decays' gradients. Grid: (key_heads, chunks, B).

    Factors per token are applied to rows of a product's result, so that its operands can be used as they are in memory.
    It reads query, key, dout (the output's gradient), forward_kernel's states, `read` of triton.Made (the factors with
    which queries read the state before a chunk), and pairs_kernel's to_weights. The compile-time constants are the
    sizes: LENGTH tokens of a row in CHUNKS chunks of CHUNK, KEY_HEADS of KEY_DIM, HEADS of VALUE_DIM; WIDTH columns are
    read at a time, and SCALE is not used.
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
        at = line * CHUNK + tl.arange(0, CHUNK)
        part = tl.zeros([CHUNK, KEY_DIM], tl.float32)
        for column in range(0, VALUE_DIM, WIDTH):
            do = _tokens(dout + values + member * VALUE_DIM + column, first, VALUES, WIDTH, LENGTH, CHUNK)
            state = _matrix(states + (line * VALUE_DIM + column) * KEY_DIM, WIDTH, KEY_DIM)
            part = tl.dot(do, state, part)
        part *= tl.load(read + at)[:, None]
        tl.store(asked + at, _along(part, query, first, KEYS, KEY_DIM, LENGTH, CHUNK))
        dq += part
        k = _tokens(key + keys, first, KEYS, KEY_DIM, LENGTH, CHUNK)
        dq = tl.dot(_matrix(to_weights + line * CHUNK * CHUNK, CHUNK, CHUNK), k, dq)
    wide = _tokens(query, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
    dq -= wide * (tl.sum(dq * wide, 1) / (tl.sum(wide * wide, 1) + _EPS))[:, None]
    _put_tokens(dquery + keys, dq, first, KEYS, KEY_DIM, LENGTH, CHUNK)


@triton.jit
def dkey_kernel(query, key, error, dvalue, states, dstates, kept, written, to_weights, to_system,
                dkey, lost, gained, fading,
                LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """Computes dkey of a chunk, [B, T, key_heads, K] in key's dtype, the gradient of keys before they are normalised, a
    sum over all value heads of a key head. The sum is computed transposed, so that eight warps share its rows, and
    stored as keys are. Grid: (key_heads, chunks, B).

    One loop runs over all value heads, and within each over WIDTH columns of their states and an equal share of the
    chunk's tokens. The operands of all products are prefetched, also from one value head to the next.

    For each value head it stores what rates_kernel adds to the gradients of decays and beta: `lost` and `gained`,
    float32[B, heads, CHUNKS * CHUNK], for each token the inner product of its key with the state before the chunk times
    dvalue, and with dstates times the error; and `fading`, float32[B, heads, CHUNKS], for each chunk the inner product
    of the state before it with dstates. It reads query, key, error and states (of forward_kernel), dvalue (the gradient
    of value), dstates (the gradients of the states after each chunk), kept and written of triton.Made (the factors with
    which keys read and errors enter the state), and pairs_kernel's to_weights and to_system. The compile-time constants
    are the sizes: LENGTH tokens of a row in CHUNKS chunks of CHUNK, KEY_HEADS of KEY_DIM, HEADS of VALUE_DIM; SCALE is
    not used.
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
    column = tl.arange(0, PIECE)[:, None] + tl.arange(0, CHUNK)[None, :] * CHUNK
    dk = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    into = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    back = tl.zeros([KEY_DIM, CHUNK], tl.float32)
    both = tl.zeros([KEY_DIM, WIDTH], tl.float32)
    for step in range(GROUP * PARTS):
        member = step // PARTS
        part = step % PARTS
        line = lines + member * CHUNKS
        offset = values + member * VALUE_DIM + part * WIDTH
        state = _turned(states + (line * VALUE_DIM + part * WIDTH) * KEY_DIM, WIDTH, KEY_DIM)
        dstate = _turned(dstates + (line * VALUE_DIM + part * WIDTH) * KEY_DIM, WIDTH, KEY_DIM)
        dv = _tokens_turned(dvalue + offset, first, VALUES, WIDTH, LENGTH, CHUNK)
        e = _tokens_turned(error + offset, first, VALUES, WIDTH, LENGTH, CHUNK)
        both += state.to(tl.float32) * dstate.to(tl.float32)
        back = tl.dot(state, dv, back)
        into = tl.dot(dstate, e, into)
        begin = part * PIECE
        k = _piece_turned(key, first, begin, KEYS, KEY_DIM, LENGTH, CHUNK, PIECE)
        q = _piece_turned(query, first, begin, KEYS, KEY_DIM, LENGTH, CHUNK, PIECE)
        square = line * CHUNK * CHUNK
        dk = tl.dot(k, _matrix(to_system + square + begin * CHUNK, PIECE, CHUNK), dk)
        dk = tl.dot(k, tl.load(to_system + square + begin + column), dk)
        dk = tl.dot(q, _matrix(to_weights + square + begin * CHUNK, PIECE, CHUNK), dk)
        if part == PARTS - 1:
            at = line * CHUNK + tl.arange(0, CHUNK)
            tl.store(fading + line, tl.sum(tl.sum(both, 0), 0))
            whole = _tokens_turned(key, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
            tl.store(gained + at, tl.sum(into * whole, 0))
            tl.store(lost + at, tl.sum(back * whole, 0))
            dk += into * tl.load(written + at)[None, :] - back * tl.load(kept + at)[None, :]
            into = tl.zeros([KEY_DIM, CHUNK], tl.float32)
            back = tl.zeros([KEY_DIM, CHUNK], tl.float32)
            both = tl.zeros([KEY_DIM, WIDTH], tl.float32)
    wide = _tokens_turned(key, first, KEYS, KEY_DIM, LENGTH, CHUNK).to(tl.float32)
    dk -= wide * (tl.sum(dk * wide, 0) / (tl.sum(wide * wide, 0) + _EPS))[None, :]
    _put_tokens_turned(dkey + keys, dk, first, KEYS, KEY_DIM, LENGTH, CHUNK)


@triton.jit
def rates_kernel(share, starts, ends, kept, faded, reach, flow, dbeta_of_pairs, asked, lost, gained, fading,
                 ddecay, dbeta,
                 LENGTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr,
                 HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Computes ddecay, the gradient of `decay` (the logarithm of the factor on the state), and dbeta of a chunk of a
    value head, float32[B, T, heads], 0 at padding, the last of the backward's kernels. Grid: (heads, chunks, B).

    ddecay of a token is a sum over it and the later tokens (a scan from the last token back): the reading queries' and
    keys' inner products with their own gradients, minus those of the writing keys. The sum ends with the document or
    the chunk; what goes through the state into later chunks is added at the chunk's last token. It reads share (beta),
    kept, faded and reach of triton.Made, the document bounds (starts, ends), and what the kernels before it stored for
    each token: flow and dbeta_of_pairs (flow and dbeta of pairs_kernel), asked (of dquery_kernel), lost and gained, and
    for each chunk fading (of dkey_kernel). The compile-time constants are the sizes: LENGTH tokens of a row in CHUNKS
    chunks of CHUNK, HEADS value heads; KEY_HEADS, KEY_DIM, VALUE_DIM, SCALE and WIDTH are not used.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    places = first + tl.arange(0, CHUNK)
    tokens = (batch * LENGTH + places) * HEADS + head
    line = (batch * HEADS + head) * CHUNKS + chunk
    at = line * CHUNK + tl.arange(0, CHUNK)
    b = tl.load(share + at)
    _, real = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first, LENGTH, CHUNK)
    through = tl.load(gained + at) * tl.load(reach + at)
    own = tl.load(flow + at) + tl.load(asked + at) - tl.load(lost + at) * tl.load(kept + at) - through * b
    across = tl.sum(through * b, 0) + tl.load(fading + line) * tl.load(faded + line)
    own += tl.where(places == first + CHUNK - 1, across, 0.0)
    following, _ = _bounds(starts + batch * LENGTH, ends + batch * LENGTH, first + 1, LENGTH, CHUNK)
    later, _ = tl.associative_scan((own, (following > places).to(tl.int32)), 0, _sum_to_end, reverse=True)
    tl.store(ddecay + tokens, tl.where(real, later, 0.0), mask=places < LENGTH)
    tl.store(dbeta + tokens, tl.where(real, tl.load(dbeta_of_pairs + at) + through, 0.0), mask=places < LENGTH)
