"""The bodies of the Triton kernels over weights in four bits; triton.py says what they do and calls them.

The bytes are bitsandbytes' own (formats.py): 32 bytes of codes, two a byte, share an absmax. With NESTED an absmax is
an index into a map, times a scale that 256 of them share, plus an offset, with a rounding in between.
"""

# Triton's annotations do not know its own tensors, and the compiler wants the @triton.jit functions as they stand.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def _decoded(stored, nested_absmax, nested_map, offset, blocks, COUNT: tl.constexpr, NESTED: tl.constexpr):
    """float32 absmax of the blocks of these numbers, of COUNT in all, from what is stored of them."""
    if NESTED:
        steps = tl.load(nested_map + stored.to(tl.int32))
        nested = tl.load(nested_absmax + blocks // 256, mask=blocks < COUNT, other=0.0)
        return steps * nested + tl.load(offset)
    else:
        return stored


@triton.jit
def dequantise_kernel(codes, absmax, nested_absmax, nested_map, offset, table, out,
                      SIZE: tl.constexpr, NESTED: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """BLOCKS blocks of a tensor of SIZE elements. Grid: (ceil(SIZE / (64 BLOCKS)),)."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    left = tl.minimum(SIZE - first * 64, BLOCKS * 64).to(tl.int32)  # elements
    WHOLE: tl.constexpr = SIZE % (BLOCKS * 64) == 0  # without masks, loads and stores are wide
    blocks = tl.arange(0, BLOCKS)
    count: tl.constexpr = (SIZE + 63) // 64
    stored = tl.load(absmax + first + blocks, mask=first + blocks < count, other=0)
    scales = _decoded(stored, nested_absmax, nested_map, offset, first + blocks, count, NESTED)
    places = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    if WHOLE:
        packed = tl.load(codes + first * 32 + places).to(tl.int32)
    else:
        packed = tl.load(codes + first * 32 + places, mask=2 * places < left, other=0).to(tl.int32)
    high = tl.load(table + (packed >> 4)) * scales[:, None]
    low = tl.load(table + (packed & 15)) * scales[:, None]
    values = tl.reshape(tl.join(high, low), (BLOCKS, 64))
    places = blocks[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = values.to(out.dtype.element_ty)
    if WHOLE:
        tl.store(out + first * 64 + places, values)
    else:
        tl.store(out + first * 64 + places, values, mask=places < left)


@triton.jit
def _pair(words, DTYPE: tl.constexpr):
    """The two 16-bit floats of each 32-bit word, in the order of memory."""
    even = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return even, odd


@triton.jit
def _tile(codes, absmax, rows, first, INNER: tl.constexpr, OUTER: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes [rows, BLOCKS, 32] and absmax [rows, BLOCKS] of rows of W from block `first` of a row on, as stored."""
    per_row: tl.constexpr = INNER // 64
    blocks = first + tl.arange(0, BLOCKS)
    mask = (rows < OUTER)[:, None] & (blocks < per_row)[None, :]
    places = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    starts = codes + rows.to(tl.int64)[:, None, None] * (INNER // 2)
    packed = tl.load(starts + places[None, :, :], mask=mask[:, :, None], other=0)
    return packed, tl.load(absmax + rows.to(tl.int64)[:, None] * per_row + blocks[None, :], mask=mask, other=0)


@triton.jit
def vector_kernel(x, codes, absmax, nested_absmax, nested_map, offset, table, out,
                  INNER: tl.constexpr, OUTER: tl.constexpr, NESTED: tl.constexpr,
                  ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """out [M, OUTER] = x [M, INNER] W^T on the ordinary cores, ROWS rows of W for one row of x. Grid: (tiles, M)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1)
    words = x.to(tl.pointer_type(tl.uint32)) + row * (INNER // 2)
    per_row: tl.constexpr = INNER // 64  # blocks
    total = tl.zeros([ROWS, BLOCKS, 32], tl.float32)
    next_packed, next_scales = _tile(codes, absmax, rows, 0, INNER, OUTER, BLOCKS)
    for first in range(0, per_row, BLOCKS):
        packed, stored = next_packed.to(tl.int32), next_scales
        next_packed, next_scales = _tile(codes, absmax, rows, first + BLOCKS, INNER, OUTER, BLOCKS)
        blocks = first + tl.arange(0, BLOCKS)
        places = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
        pair = tl.load(words + places, mask=(blocks < per_row)[:, None], other=0)
        even, odd = _pair(pair, x.dtype.element_ty)
        numbers = rows.to(tl.int64)[:, None] * per_row + blocks[None, :]
        scales = _decoded(stored, nested_absmax, nested_map, offset, numbers, OUTER * per_row, NESTED)
        high = tl.load(table + (packed >> 4)) * even.to(tl.float32)[None, :, :]
        low = tl.load(table + (packed & 15)) * odd.to(tl.float32)[None, :, :]
        total += (high + low) * scales[:, :, None]
    sums = tl.sum(tl.sum(total, 2), 1)
    tl.store(out + row * OUTER + rows, sums.to(out.dtype.element_ty), mask=rows < OUTER)


@triton.jit
def matrix_kernel(x, codes, absmax, nested_absmax, nested_map, offset, table, out, COUNT: tl.constexpr,
                  INNER: tl.constexpr, OUTER: tl.constexpr, NESTED: tl.constexpr,
                  ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """out [COUNT, OUTER] = x [COUNT, INNER] W^T on the tensor cores, COUNT up to 16. Even and odd columns of W are
    multiplied apart, as the bytes hold them. Grid: (tiles,)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    members = tl.arange(0, 16)
    words = x.to(tl.pointer_type(tl.uint32))
    inside = (rows < OUTER)[:, None]
    per_row: tl.constexpr = INNER // 64
    WIDTH: tl.constexpr = BLOCKS * 32
    DTYPE: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, 16], tl.float32)
    next_packed, next_scales = _tile(codes, absmax, rows, 0, INNER, OUTER, BLOCKS)
    for first in range(0, per_row, BLOCKS):
        packed, stored = next_packed.to(tl.int32), next_scales
        next_packed, next_scales = _tile(codes, absmax, rows, first + BLOCKS, INNER, OUTER, BLOCKS)
        columns = first * 32 + tl.arange(0, WIDTH)
        pair = tl.load(
            words + members[None, :] * (INNER // 2) + columns[:, None],
            mask=(members < COUNT)[None, :] & (columns < INNER // 2)[:, None],
            other=0,
        )
        even, odd = _pair(pair, DTYPE)
        numbers = rows.to(tl.int64)[:, None] * per_row + first + tl.arange(0, BLOCKS)[None, :]
        scales = _decoded(stored, nested_absmax, nested_map, offset, numbers, OUTER * per_row, NESTED)[:, :, None]
        high = (tl.load(table + (packed >> 4)) * scales).to(DTYPE)
        low = (tl.load(table + (packed & 15)) * scales).to(DTYPE)
        total = tl.dot(tl.reshape(high, (ROWS, WIDTH)), even, total)
        total = tl.dot(tl.reshape(low, (ROWS, WIDTH)), odd, total)
    places = members[None, :] * OUTER + rows[:, None]
    tl.store(out + places, total.to(DTYPE), mask=inside & (members < COUNT)[None, :])
