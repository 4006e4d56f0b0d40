"""The Triton kernel of fp8_gradients.py."""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import computed, inverse_of, larger, scale_of


@triton.jit
def rounded_pair_kernel(
    a,
    b,
    c,
    d,
    inner,
    sides,
    codes,
    scales,
    block_products,
    dbs,
    ROWS: tl.constexpr,
    WIDTHS: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    RANKS: tl.constexpr,
    THINS: tl.constexpr,
    JOINED: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rounds COLUMNS columns of STEPS tiles of BLOCK rows of an output's gradient to e4m3, each 128 numbers of a row by
    a scale, and multiplies them, not rounded, by B, and, transposed, by the low-rank input. Grid: (blocks of columns of
    all outputs, ranges of rows).

      a, b, c, d: [ROWS, width] of up to four outputs.
      inner, sides: low-rank inputs side by side [ROWS, JOINED]; B's one below the other [TOTAL, RANK].
      block_products: float32[blocks of columns, ROWS, RANK], the products with B.
      dbs: float32[ranges of rows, TOTAL, RANK], the transposed products.
      PLACES, FIRST, THINS: each output's first column, first block of columns, and first column in `inner`.
      codes, scales: e4m3[ROWS, TOTAL], float32[TOTAL / 128, ROWS]. WIDTHS, RANKS: each output's columns and rank.
      WIDTH: RANK, the largest, as a power of two of at least 16.
    """
    arrays = (a, b, c, d)
    block = tl.program_id(0)
    source, size, first_column, block_of, rank, thin_place = a, WIDTHS[0], PLACES[0], block, RANKS[0], THINS[0]
    for index in tl.static_range(1, len(WIDTHS)):
        if block >= FIRST[index]:
            source, size, first_column, block_of = arrays[index], WIDTHS[index], PLACES[index], block - FIRST[index]
            rank, thin_place = RANKS[index], THINS[index]
    columns = block_of * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_output = columns < size
    scaled = block_of * (COLUMNS // 128) + tl.arange(0, COLUMNS // 128)[None, :]
    ranks = tl.arange(0, WIDTH)[None, :]
    real_ranks = ranks < rank
    wide = tl.trans(first_column + columns) * RANK + ranks
    real_wide = tl.trans(in_output) & real_ranks
    side = tl.load(sides + wide, mask=real_wide, other=0.0)
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    number = tl.arange(0, BLOCK)[:, None]
    for step in range(STEPS):
        first = (tl.program_id(1).to(tl.int64) * STEPS + step) * BLOCK
        real_rows = number < ROWS - first
        real = real_rows & in_output
        tile = tl.load(source + first * size + number * size + columns, mask=real, other=0.0)
        thin_places = first * JOINED + thin_place + number * JOINED + ranks
        thin = tl.load(inner + thin_places, mask=real_rows & real_ranks, other=0.0)
        sums = tl.dot(tl.trans(tile), thin, sums)
        in_blocks = tl.reshape(tile.to(tl.float32), [BLOCK, COLUMNS // 128, 128])
        scale = scale_of(tl.reduce(tl.abs(in_blocks), 2, larger, keep_dims=True))
        code = tl.reshape((in_blocks * inverse_of(scale)).to(codes.dtype.element_ty), [BLOCK, COLUMNS])
        # As many codes a thread as it has numbers of the tile.
        tl.store(
            codes + tl.max_contiguous(first * TOTAL + number * TOTAL + first_column + columns, [1, 8]), code, mask=real
        )
        scale_offsets = (first_column // 128 + scaled) * ROWS + first + number
        tl.store(
            scales + scale_offsets, tl.reshape(scale, [BLOCK, COLUMNS // 128]), mask=real_rows & (scaled < size // 128)
        )
        target = block_products + (block.to(tl.int64) * ROWS + first) * RANK + number * RANK + ranks
        tl.store(target, tl.dot(tile, side), mask=real_rows & real_ranks)
        sums = computed(sums)
    tl.store(dbs + tl.program_id(1).to(tl.int64) * (RANK * TOTAL) + wide, sums, mask=real_wide)
