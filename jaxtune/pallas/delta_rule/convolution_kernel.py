"""Triton kernels of the short convolution, and of the gradient of its input. A program walks along tokens of a row for
some channels, four at a time, and keeps in registers what it needs of the three tokens before or after.
"""

import triton
import triton.language as tl


@triton.jit
def _sum(current, back1, back2, back3, w0, w1, w2, w3, token, start):
    """A token's sum, float32[WIDTH], of x of itself and the three before, from `start` on."""
    total = current.to(tl.float32) * w0
    total += tl.where(token - 1 >= start, back1.to(tl.float32), 0.0) * w1
    total += tl.where(token - 2 >= start, back2.to(tl.float32), 0.0) * w2
    total += tl.where(token - 3 >= start, back3.to(tl.float32), 0.0) * w3
    return total


@triton.jit
def _weights(weight):
    """Of the token itself and of the three before it, float32[WIDTH] each."""
    w0 = tl.load(weight + 3).to(tl.float32)
    w1 = tl.load(weight + 2).to(tl.float32)
    w2 = tl.load(weight + 1).to(tl.float32)
    return w0, w1, w2, tl.load(weight).to(tl.float32)


@triton.jit
def _silu(total, token, end):
    """A token's result from its sum; 0 from `end` on."""
    return tl.where(token < end, total * tl.sigmoid(total), 0.0)


@triton.jit
def _of_sum(dout, current, back1, back2, back3, w0, w1, w2, w3, token, start, end):
    """Gradient of a token's sum, float32[WIDTH], 0 at padding. dout: [WIDTH], of its silu; 0 past the row."""
    total = _sum(current, back1, back2, back3, w0, w1, w2, w3, token, start)
    share = tl.sigmoid(total)
    return tl.where(token < end, dout.to(tl.float32) * (share * (1.0 + total * (1.0 - share))), 0.0)


@triton.jit
def _of_token(token, dsum, after1, after2, after3, w0, w1, w2, w3, start1, start2, start3):
    """Gradient of x of a token, float32[WIDTH], from those of the sums of itself and of the three after it."""
    total = dsum * w0
    total += tl.where(token >= start1, after1, 0.0) * w1
    total += tl.where(token >= start2, after2, 0.0) * w2
    return total + tl.where(token >= start3, after3, 0.0) * w3


@triton.jit
def _load(array, token, stride, LENGTH: tl.constexpr, columns):
    """A token's channels [WIDTH]; 0 outside of the row. `array` points to the row's first token."""
    tokens = token + columns * 0
    inside = (tokens >= 0) & (tokens < LENGTH)
    return tl.load(array + tl.cast(token, tl.int64) * stride, mask=inside, other=0.0)


@triton.jit
def _store(array, values, token, stride, LENGTH: tl.constexpr, columns):
    pointers = array + tl.cast(token, tl.int64) * stride
    tl.store(pointers, values.to(array.dtype.element_ty), mask=token + columns * 0 < LENGTH)


@triton.jit
def _bounds(doc_start, doc_end, token, LENGTH: tl.constexpr):
    """A token's document bounds; (LENGTH, 0) past the row."""
    row_token = tl.minimum(token, LENGTH - 1)
    start = tl.load(doc_start + row_token)
    end = tl.load(doc_end + row_token)
    return tl.where(token < LENGTH, start, LENGTH), tl.where(token < LENGTH, end, 0)


@triton.jit
def _part(first, second, third, begin, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """(pointer to the part that has the channels from `begin` on, minus the channels before the part; its channels)."""
    stride = tl.where(begin < FIRST, FIRST, tl.where(begin < FIRST + SECOND, SECOND, THIRD))
    pointer = third - FIRST - SECOND
    if begin < FIRST:
        pointer = first
    elif begin < FIRST + SECOND:
        pointer = second - FIRST
    return pointer, stride


@triton.jit
def convolution_kernel(
    x,
    weight,
    doc_start,
    doc_end,
    first_out,
    second_out,
    third_out,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the parts of the result, forward along TOKENS tokens. Grid: (CHANNELS / WIDTH, LENGTH / TOKENS rounded up,
    B).

      x, weight: [B, LENGTH, CHANNELS], [CHANNELS, 4], the token's own weight last.
      doc_start, doc_end: int32[B, LENGTH], bounds of each token's document.
      first_out, second_out, third_out: [B, LENGTH, FIRST], [.., SECOND], [.., the other channels]; WIDTH divides each.
    """
    THIRD: tl.constexpr = CHANNELS - FIRST - SECOND
    begin = tl.program_id(0) * WIDTH
    first = tl.program_id(1) * TOKENS
    row = tl.cast(tl.program_id(2), tl.int64) * LENGTH
    columns = tl.arange(0, WIDTH)
    x += row * CHANNELS + begin + columns
    doc_start += row
    doc_end += row
    out, stride = _part(
        first_out + row * FIRST, second_out + row * SECOND, third_out + row * THIRD, begin, FIRST, SECOND, THIRD
    )
    out += begin + columns
    w0, w1, w2, w3 = _weights(weight + (begin + columns) * 4)

    b1 = _load(x, first - 1, CHANNELS, LENGTH, columns)
    b2 = _load(x, first - 2, CHANNELS, LENGTH, columns)
    b3 = _load(x, first - 3, CHANNELS, LENGTH, columns)
    for group in range(TOKENS // 4):
        token = first + 4 * group
        x0 = _load(x, token, CHANNELS, LENGTH, columns)
        x1 = _load(x, token + 1, CHANNELS, LENGTH, columns)
        x2 = _load(x, token + 2, CHANNELS, LENGTH, columns)
        x3 = _load(x, token + 3, CHANNELS, LENGTH, columns)
        start0, end0 = _bounds(doc_start, doc_end, token, LENGTH)
        start1, end1 = _bounds(doc_start, doc_end, token + 1, LENGTH)
        start2, end2 = _bounds(doc_start, doc_end, token + 2, LENGTH)
        start3, end3 = _bounds(doc_start, doc_end, token + 3, LENGTH)
        o0 = _silu(_sum(x0, b1, b2, b3, w0, w1, w2, w3, token, start0), token, end0)
        o1 = _silu(_sum(x1, x0, b1, b2, w0, w1, w2, w3, token + 1, start1), token + 1, end1)
        o2 = _silu(_sum(x2, x1, x0, b1, w0, w1, w2, w3, token + 2, start2), token + 2, end2)
        o3 = _silu(_sum(x3, x2, x1, x0, w0, w1, w2, w3, token + 3, start3), token + 3, end3)
        _store(out, o0, token, stride, LENGTH, columns)
        _store(out, o1, token + 1, stride, LENGTH, columns)
        _store(out, o2, token + 2, stride, LENGTH, columns)
        _store(out, o3, token + 3, stride, LENGTH, columns)
        b1, b2, b3 = x3, x2, x1


@triton.jit
def convolution_gradient_kernel(
    x,
    weight,
    doc_start,
    doc_end,
    dfirst,
    dsecond,
    dthird,
    dx,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes dx, backward along TOKENS tokens. A program begins with the four tokens after its own, from which its last
    ones have a share of their gradients. Grid: (CHANNELS / WIDTH, LENGTH / TOKENS rounded up, B).

      x, dx, weight: [B, LENGTH, CHANNELS] twice, [CHANNELS, 4], the token's own weight last.
      doc_start, doc_end: int32[B, LENGTH], bounds of each token's document.
      dfirst, dsecond, dthird: gradients of the parts, [B, LENGTH, FIRST], [.., SECOND], [.., the other channels].
    """
    THIRD: tl.constexpr = CHANNELS - FIRST - SECOND
    begin = tl.program_id(0) * WIDTH
    first = tl.program_id(1) * TOKENS
    row = tl.cast(tl.program_id(2), tl.int64) * LENGTH
    columns = tl.arange(0, WIDTH)
    x += row * CHANNELS + begin + columns
    dx += row * CHANNELS + begin + columns
    doc_start += row
    doc_end += row
    dout, stride = _part(
        dfirst + row * FIRST, dsecond + row * SECOND, dthird + row * THIRD, begin, FIRST, SECOND, THIRD
    )
    dout += begin + columns
    w0, w1, w2, w3 = _weights(weight + (begin + columns) * 4)

    last = first + TOKENS
    x5 = _load(x, last + 1, CHANNELS, LENGTH, columns)
    x6 = _load(x, last + 2, CHANNELS, LENGTH, columns)
    x7 = _load(x, last + 3, CHANNELS, LENGTH, columns)
    d4 = tl.zeros((WIDTH,), tl.float32)
    d5 = tl.zeros((WIDTH,), tl.float32)
    d6 = tl.zeros((WIDTH,), tl.float32)
    start4 = last * 0 + LENGTH
    start5 = last * 0 + LENGTH
    start6 = last * 0 + LENGTH
    for group in range(TOKENS // 4 + 1):
        # The four tokens at 0 to 3; before them -3 to -1, which the next group has at 1 to 3.
        token = last - 4 * group
        b3 = _load(x, token - 3, CHANNELS, LENGTH, columns)
        b2 = _load(x, token - 2, CHANNELS, LENGTH, columns)
        b1 = _load(x, token - 1, CHANNELS, LENGTH, columns)
        x0 = _load(x, token, CHANNELS, LENGTH, columns)
        g0 = _load(dout, token, stride, LENGTH, columns)
        g1 = _load(dout, token + 1, stride, LENGTH, columns)
        g2 = _load(dout, token + 2, stride, LENGTH, columns)
        g3 = _load(dout, token + 3, stride, LENGTH, columns)
        start0, end0 = _bounds(doc_start, doc_end, token, LENGTH)
        start1, end1 = _bounds(doc_start, doc_end, token + 1, LENGTH)
        start2, end2 = _bounds(doc_start, doc_end, token + 2, LENGTH)
        start3, end3 = _bounds(doc_start, doc_end, token + 3, LENGTH)
        d3 = _of_sum(g3, x7, x6, x5, x0, w0, w1, w2, w3, token + 3, start3, end3)
        d2 = _of_sum(g2, x6, x5, x0, b1, w0, w1, w2, w3, token + 2, start2, end2)
        d1 = _of_sum(g1, x5, x0, b1, b2, w0, w1, w2, w3, token + 1, start1, end1)
        d0 = _of_sum(g0, x0, b1, b2, b3, w0, w1, w2, w3, token, start0, end0)
        o3 = _of_token(token + 3, d3, d4, d5, d6, w0, w1, w2, w3, start4, start5, start6)
        o2 = _of_token(token + 2, d2, d3, d4, d5, w0, w1, w2, w3, start3, start4, start5)
        o1 = _of_token(token + 1, d1, d2, d3, d4, w0, w1, w2, w3, start2, start3, start4)
        o0 = _of_token(token, d0, d1, d2, d3, w0, w1, w2, w3, start1, start2, start3)
        if token < last:  # the tokens after the program's own are another's
            _store(dx, o0, token, CHANNELS, LENGTH, columns)
            _store(dx, o1, token + 1, CHANNELS, LENGTH, columns)
            _store(dx, o2, token + 2, CHANNELS, LENGTH, columns)
            _store(dx, o3, token + 3, CHANNELS, LENGTH, columns)
        x5, x6, x7 = b3, b2, b1
        d4, d5, d6 = d0, d1, d2
        start4, start5, start6 = start0, start1, start2
