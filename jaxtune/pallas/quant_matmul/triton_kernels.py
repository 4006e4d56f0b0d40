"""Triton kernels for weights in NF4 and FP4, in bitsandbytes' bytes: 32 bytes of codes, the first of two in the high
four bits, share an absmax. With NESTED a stored absmax is an index into a map, whose value is multiplied by a scale
that 256 of them share and shifted by an offset; dequantise_kernel rounds in between, as bitsandbytes does.
"""

import triton
import triton.language as tl


@triton.jit
def _decoded(stored, nested_absmax, nested_map, offset, blocks, COUNT: tl.constexpr, NESTED: tl.constexpr):
    """The float32 absmax of the blocks numbered `blocks`, of COUNT."""
    if NESTED:
        steps = tl.load(nested_map + stored.to(tl.int32))
        nested = tl.load(nested_absmax + blocks // 256, mask=blocks < COUNT, other=0.0)
        return steps * nested + tl.load(offset)
    else:
        return stored


@triton.jit
def _looked_up(packed, table):
    """(values of the high four bits, of the low four bits), float32, of each byte, from shared memory."""
    entries = tl.load(table + tl.arange(0, 16))
    packed = packed.to(tl.int32)
    return tl.gather(entries, packed >> 4, 0), tl.gather(entries, packed & 15, 0)


@triton.jit
def dequantise_kernel(
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    table,
    out,
    SIZE: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Decodes BLOCKS blocks of 64 elements of a tensor of SIZE elements into the flat `out`; the last program may have
    fewer. Grid: (ceil(SIZE / (64 BLOCKS)),).

      codes: uint8[SIZE / 2], the first of two in the high four bits. table: float32[16], their values.
      absmax: a scale for each 64 elements, float32, or uint8 if NESTED: indices into nested_map.
      nested_absmax, nested_map, offset: float32, one for 256 absmax; [256]; []; read only if NESTED.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    remaining = tl.minimum(SIZE - first * 64, BLOCKS * 64).to(tl.int32)  # elements
    WHOLE: tl.constexpr = SIZE % (BLOCKS * 64) == 0  # without masks, loads and stores are wide
    blocks = first + tl.arange(0, BLOCKS)
    count: tl.constexpr = (SIZE + 63) // 64
    stored = tl.load(absmax + blocks, mask=blocks < count, other=0)
    scales = _decoded(stored, nested_absmax, nested_map, offset, blocks, count, NESTED)
    offsets = tl.arange(0, BLOCKS * 32)
    if WHOLE:
        packed = tl.load(codes + first * 32 + offsets)
    else:
        packed = tl.load(codes + first * 32 + offsets, mask=2 * offsets < remaining, other=0)
    high, low = _looked_up(packed, table)
    values = tl.reshape(tl.join(high, low), (BLOCKS, 64)) * scales[:, None]
    values = values.to(out.dtype.element_ty)
    offsets = tl.arange(0, BLOCKS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    if WHOLE:
        tl.store(out + first * 64 + offsets, values)
    else:
        tl.store(out + first * 64 + offsets, values, mask=offsets < remaining)


@triton.jit
def _pair(words, DTYPE: tl.constexpr):
    """The two 16-bit floats of each 32-bit word: (first in memory, second)."""
    even = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return even, odd


@triton.jit
def _tile(codes, absmax, rows, first, INNER: tl.constexpr, OUTER: tl.constexpr, BLOCKS: tl.constexpr):
    """Stored blocks of some rows of W, from `first` on: (codes uint8[rows, BLOCKS, 32], absmax [rows, BLOCKS]), zeros
    outside.
    """
    per_row: tl.constexpr = INNER // 64
    blocks = first + tl.arange(0, BLOCKS)
    mask = (rows < OUTER)[:, None] & (blocks < per_row)[None, :]
    offsets = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    starts = codes + rows.to(tl.int64)[:, None, None] * (INNER // 2)
    packed = tl.load(starts + offsets[None, :, :], mask=mask[:, :, None], other=0)
    return packed, tl.load(absmax + rows.to(tl.int64)[:, None] * per_row + blocks[None, :], mask=mask, other=0)


@triton.jit
def vector_kernel(
    x,
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    table,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out [COUNT, OUTER] = x [COUNT, INNER] W^T for one or two tokens and ROWS rows of W, on the CUDA cores in float32.
    A program takes BLOCKS blocks of 64 columns at a time, and loads the next ones while it multiplies. Grid:
    (ceil(OUTER / ROWS),).

      codes: uint8[OUTER, INNER / 2], the first of two in the high four bits. table: float32[16], their values.
      absmax: [OUTER, INNER / 64], float32, or uint8 if NESTED: indices into nested_map.
      nested_absmax, nested_map, offset: float32, one for 256 absmax; [256]; []; read only if NESTED.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = x.to(tl.pointer_type(tl.uint32))
    per_row: tl.constexpr = INNER // 64  # blocks
    totals = (tl.zeros([ROWS, BLOCKS, 32], tl.float32),) * COUNT
    next_packed, next_scales = _tile(codes, absmax, rows, 0, INNER, OUTER, BLOCKS)
    for first in range(0, per_row, BLOCKS):
        packed, stored = next_packed, next_scales
        next_packed, next_scales = _tile(codes, absmax, rows, first + BLOCKS, INNER, OUTER, BLOCKS)
        blocks = first + tl.arange(0, BLOCKS)
        numbers = rows.to(tl.int64)[:, None] * per_row + blocks[None, :]
        scales = _decoded(stored, nested_absmax, nested_map, offset, numbers, OUTER * per_row, NESTED)[:, :, None]
        high, low = _looked_up(tl.reshape(packed, (ROWS * BLOCKS * 32,)), table)
        high = tl.reshape(high, (ROWS, BLOCKS, 32)) * scales
        low = tl.reshape(low, (ROWS, BLOCKS, 32)) * scales
        offsets = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
        sums = ()
        for token in tl.static_range(COUNT):
            pair = tl.load(words + token * (INNER // 2) + offsets, mask=(blocks < per_row)[:, None], other=0)
            even, odd = _pair(pair, x.dtype.element_ty)
            sums = sums + (totals[token] + high * even.to(tl.float32)[None] + low * odd.to(tl.float32)[None],)
        totals = sums
    for token in tl.static_range(COUNT):
        values = tl.sum(tl.sum(totals[token], 2), 1)
        tl.store(out + token * OUTER + rows, values.to(out.dtype.element_ty), mask=rows < OUTER)


@triton.jit
def matrix_kernel(
    x,
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    table,
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out [COUNT, OUTER] = x [COUNT, INNER] W^T for up to 16 tokens and ROWS rows of W on the tensor cores: elements of
    W are rounded to x's dtype; sums are float32. The last tile that it loads ahead is past the end, and masked. Grid:
    (ceil(OUTER / ROWS),).

      codes: uint8[OUTER, INNER / 2], the first of two in the high four bits. table: float32[16], their values.
      absmax: [OUTER, INNER / 64], float32, or uint8 if NESTED: indices into nested_map.
      nested_absmax, nested_map, offset: float32, one for 256 absmax; [256]; []; read only if NESTED.
      INNER: a multiple of 64. BLOCKS: blocks of 64 columns at a time.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, 16)
    per_row: tl.constexpr = INNER // 64
    DTYPE: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, 16], tl.float32)
    next_packed, next_scales = _tile(codes, absmax, rows, 0, INNER, OUTER, BLOCKS)
    for first in range(0, per_row, BLOCKS):
        packed, stored = next_packed, next_scales
        next_packed, next_scales = _tile(codes, absmax, rows, first + BLOCKS, INNER, OUTER, BLOCKS)
        columns = first * 64 + tl.arange(0, BLOCKS * 64)
        mask = (tokens < COUNT)[None, :] & (columns < INNER)[:, None]
        right = tl.load(x + tokens[None, :] * INNER + columns[:, None], mask=mask, other=0.0)
        numbers = rows.to(tl.int64)[:, None] * per_row + first + tl.arange(0, BLOCKS)[None, :]
        scales = _decoded(stored, nested_absmax, nested_map, offset, numbers, OUTER * per_row, NESTED)[:, :, None]
        high, low = _looked_up(tl.reshape(packed, (ROWS * BLOCKS * 32,)), table)
        left = (tl.reshape(tl.join(high, low), (ROWS, BLOCKS, 64)) * scales).to(DTYPE)
        total = tl.dot(tl.reshape(left, (ROWS, BLOCKS * 64)), right, total)
    offsets = tokens[None, :] * OUTER + rows[:, None]
    tl.store(out + offsets, total.to(DTYPE), mask=(rows < OUTER)[:, None] & (tokens < COUNT)[None, :])
