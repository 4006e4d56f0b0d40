"""The Triton kernels of fp8_rounding.py. A row of the result consists of rows of up to four arrays side by side."""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import codes_of, scales_of_rows


@triton.jit
def _sources(rows, tokens, ROWS: tl.constexpr, SOURCES: tl.constexpr, GATHERED: tl.constexpr):
    """(the arrays' rows for `rows` of the result, whether each exists); a row without a source is zero."""
    if GATHERED:
        rows = tl.load(tokens + rows, mask=rows < ROWS, other=SOURCES)
        return rows.to(tl.int64), rows < SOURCES
    return rows.to(tl.int64), rows < ROWS


@triton.jit
def _mask(exists, numbers, ROOM: tl.constexpr, WIDTH: tl.constexpr):
    """Which numbers of a piece of WIDTH columns exist, if the array has ROOM more columns."""
    if ROOM < WIDTH:
        exists = exists & (numbers < ROOM)
    return exists


@triton.jit
def _read(arrays, sources, exists, WIDTHS: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    numbers = tl.arange(0, WIDTH)[None, :]
    pieces = ()
    for index in tl.static_range(len(PIECES)):
        offsets = arrays[PIECES[index][0]] + sources * WIDTHS[PIECES[index][0]] + (PIECES[index][1] + numbers)
        mask = _mask(exists, numbers, PIECES[index][3], WIDTH)
        pieces = pieces + (tl.load(offsets, mask=mask, other=0.0),)
    return pieces


@triton.jit
def to_fp8_rows_kernel(
    a,
    b,
    c,
    d,
    factors,
    experts,
    tokens,
    codes,
    scales,
    ROWS: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WIDTHS: tl.constexpr,
    TOTAL: tl.constexpr,
    PIECES: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rounds STEPS tiles of BLOCK rows, each row with one scale, and reads a tile while it rounds the one before. Grid:
    (ROWS / (STEPS BLOCK), rounded up,).

      a, b, c, d: [SOURCES, width] each, as many as WIDTHS. codes, scales: e4m3[ROWS, TOTAL], float32[ROWS].
      factors: if SCALED, float32[EXPERTS, TOTAL].
      experts: if GROUPED, int32[ROWS / TILE_ROWS]; a program has rows of one expert.
      tokens: if GATHERED, int32[ROWS]; SOURCES for zeros.
      PIECES: of each WIDTH columns (array, first column in it, first column of the result, columns that the array has
      from there).
    """
    arrays = (a, b, c, d)
    numbers = tl.arange(0, WIDTH)[None, :]
    columns = tl.broadcast_to(numbers, [BLOCK, WIDTH])  # loaded in the layout of the rows
    start = tl.program_id(0) * (STEPS * BLOCK)
    expert = 0
    if GROUPED:
        expert = tl.minimum(tl.load(experts + start // TILE_ROWS), EXPERTS - 1)
    rows = start + tl.arange(0, BLOCK)[:, None]
    sources, exists = _sources(rows, tokens, ROWS, SOURCES, GATHERED)
    following = _read(arrays, sources, exists, WIDTHS, PIECES, WIDTH)
    for step in range(STEPS):
        pieces = following
        if STEPS > 1:
            sources, exists = _sources(rows + BLOCK, tokens, ROWS, SOURCES, GATHERED)
            following = _read(arrays, sources, exists & (step + 1 < STEPS), WIDTHS, PIECES, WIDTH)
        wide = ()
        largest = tl.zeros([BLOCK, WIDTH], tl.float32)
        for index in tl.static_range(len(PIECES)):
            number = tl.cast(pieces[index], tl.float32)
            if SCALED:
                offsets = factors + expert * TOTAL + (PIECES[index][2] + columns)
                mask = _mask(columns >= 0, columns, PIECES[index][3], WIDTH)
                number *= tl.load(offsets, mask=mask, other=0.0, eviction_policy="evict_last")
            wide = wide + (number,)
            largest = tl.maximum(largest, tl.abs(number), propagate_nan=tl.PropagateNan.ALL)
        scale = scales_of_rows(largest)
        real = rows < ROWS
        tl.store(scales + rows, scale, mask=real)
        targets = codes + rows.to(tl.int64) * TOTAL + numbers
        for index in tl.static_range(len(PIECES)):
            mask = _mask(real, numbers, PIECES[index][3], WIDTH)
            tl.store(targets + PIECES[index][2], codes_of(wide[index], scale, codes), mask=mask)
        rows += BLOCK


@triton.jit
def _round_blocks(
    array,
    tokens,
    codes,
    scales,
    first,
    ROWS: tl.constexpr,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    PLACE: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rounds STEPS times BLOCK blocks of `array` [SOURCES, SIZE], counted row after row, from `first` on."""
    numbers = tl.arange(0, 128)[None, :]
    pieces = ()
    for step in tl.static_range(STEPS):
        block = first + step * BLOCK + tl.arange(0, BLOCK)[:, None]
        column = block % tl.cdiv(SIZE, 128) * 128
        sources, exists = _sources(block // tl.cdiv(SIZE, 128), tokens, ROWS, SOURCES, GATHERED)
        if SIZE % 128:
            exists = exists & (column + numbers < SIZE)
        offsets = array + sources * SIZE + column + numbers
        pieces = pieces + (tl.load(offsets, mask=exists, other=0.0),)
    for step in tl.static_range(STEPS):
        block = first + step * BLOCK + tl.arange(0, BLOCK)[:, None]
        column, row = block % tl.cdiv(SIZE, 128) * 128, block // tl.cdiv(SIZE, 128)
        number = tl.cast(pieces[step], tl.float32)
        scale = scales_of_rows(tl.abs(number))
        tl.store(scales + (PLACE + column) // 128 * ROWS + row, scale, mask=row < ROWS)
        targets = codes + row.to(tl.int64) * TOTAL + (PLACE + column) + numbers
        tl.store(targets, codes_of(number, scale, codes), mask=row < ROWS)


@triton.jit
def to_fp8_blocks_kernel(
    a,
    b,
    c,
    d,
    tokens,
    codes,
    scales,
    ROWS: tl.constexpr,
    SOURCES: tl.constexpr,
    WIDTHS: tl.constexpr,
    PLACES: tl.constexpr,
    TOTAL: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rounds blocks of 128 numbers of a row, each with one scale: a program STEPS tiles of BLOCK blocks that follow
    each other in an array, row after row.

      codes, scales: e4m3[ROWS, TOTAL], float32[TOTAL / 128, ROWS].
      PLACES: each array's first column in the result, a multiple of 128.
      a, b, c, d: [SOURCES, width] each, as many as WIDTHS.
      tokens: if GATHERED, int32[ROWS], each row's source; SOURCES for zeros.
    """
    arrays = (a, b, c, d)
    program = tl.program_id(0)
    for index in tl.static_range(len(WIDTHS)):
        if (program >= 0) & (program < tl.cdiv(ROWS * tl.cdiv(WIDTHS[index], 128), STEPS * BLOCK)):
            _round_blocks(
                arrays[index],
                tokens,
                codes,
                scales,
                program * (STEPS * BLOCK),
                ROWS,
                SOURCES,
                WIDTHS[index],
                TOTAL,
                PLACES[index],
                GATHERED,
                BLOCK,
                STEPS,
            )
        program -= tl.cdiv(ROWS * tl.cdiv(WIDTHS[index], 128), STEPS * BLOCK)
