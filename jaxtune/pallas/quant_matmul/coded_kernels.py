"""The kernel that multiplies a few rows by weights in eight or four bits, decoded to 16 bits in registers, in Gluon,
the language of Triton in which one chooses each tensor's layout.

Each element of the product is the sum of RANGES float32 sums, in ascending order, of which each is over the ascending
columns of its range, 16 at a time (the steps of the tensor cores). The order within 16 columns does not matter. So a
lane takes 4 that follow each other, a word of codes, and no number changes its lane between shared memory and the
tensor cores. A warp has a range: a weight of few rows has too few warps else, and a tensor core's sums wait for each
other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jaxtune.pallas.decode.few_rows.triton_kernels import _activated_in_steps

# What later versions of Triton call async_load has another name in 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# Formats of eight bits come first, and of those the ones that have a scale for each row.
FP8_ROWS, INT8, FP8_TILES, NVFP4, MXFP4 = range(5)
_INT8, _FP8_TILES, _NVFP4, _MXFP4 = map(gl.constexpr, (INT8, FP8_TILES, NVFP4, MXFP4))
_REGISTERS = "{ .reg .b16 half<2>, part<2>; .reg .b32 low, high, sign, word, other; .reg .f32 a, b;"


def _e4m3_ptx(word: str, scale: str, targets: tuple[str, str], factor: str | None = None) -> list[str]:
    """Four e4m3 codes of a word times a float32, to four bfloat16. factor: of the codes, as two float16."""
    lines = [f"mov.b32 {{half0, half1}}, {word};"]
    for i, target in enumerate(targets):
        lines.append(f"cvt.rn.f16x2.e4m3x2 sign, half{i};")
        lines += [f"mul.rn.f16x2 sign, sign, {factor};"] if factor else []
        lines += ["mov.b32 {part0, part1}, sign;", "cvt.f32.f16 a, part0;", "cvt.f32.f16 b, part1;"]
        lines += [f"mul.rn.f32 a, a, {scale};", f"mul.rn.f32 b, b, {scale};", f"cvt.rn.bf16x2.f32 {target}, b, a;"]
    return lines


def fp8_ptx() -> str:
    """Inline PTX: four e4m3 codes, $2, times the float32 $3, to four bfloat16, $0 and $1."""
    return "\n".join([_REGISTERS, *_e4m3_ptx("$2", "$3", ("$0", "$1")), "}"])


def int8_ptx() -> str:
    """Inline PTX: four int8, $2, times the float32 $3, times 1 / 127, to four bfloat16, $0 and $1. A byte plus 128 is
    the fraction of a number near 2^23.
    """
    lines = [_REGISTERS, "xor.b32 word, $2, 0x80808080;"]
    for pair in range(2):
        for name, byte in (("a", 2 * pair), ("b", 2 * pair + 1)):
            lines += [f"prmt.b32 other, word, 0x4B000000, 0x744{byte};", f"mov.b32 {name}, other;"]
            lines += [f"add.rn.f32 {name}, {name}, 0fCB000080;", f"mul.rn.f32 {name}, {name}, $3;"]
            lines.append(f"mul.rn.f32 {name}, {name}, 0f3C010204;")
        lines.append(f"cvt.rn.bf16x2.f32 ${pair}, b, a;")
    return "\n".join([*lines, "}"])


def e2m1_ptx(scaled: bool) -> str:
    """Inline PTX: four e2m1 codes in each low half of $4 and $5 times the float32 $6 and $7, to four bfloat16 each, $0
    and $1, $2 and $3. scaled: $6 and $7 are 64 times the scales.

    The bits of e2m1 are those of a number of e4m3 that is 1/64 of it.
    """
    lines = [_REGISTERS, "prmt.b32 word, $4, $5, 0x5410;", "shl.b32 low, word, 2;", "and.b32 low, low, 0x1C1C1C1C;"]
    lines += ["shl.b32 sign, word, 4;", "and.b32 sign, sign, 0x80808080;", "or.b32 low, low, sign;"]
    lines += ["shr.b32 high, word, 2;", "and.b32 high, high, 0x1C1C1C1C;"]
    lines += ["and.b32 sign, word, 0x80808080;", "or.b32 high, high, sign;"]
    lines += ["prmt.b32 word, low, high, 0x5140;", "prmt.b32 other, low, high, 0x7362;"]
    lines += [] if scaled else ["mov.b32 high, 0x54005400;"]  # two 64
    factor = None if scaled else "high"
    lines += _e4m3_ptx("word", "$6", ("$0", "$1"), factor) + _e4m3_ptx("other", "$7", ("$2", "$3"), factor)
    return "\n".join([*lines, "}"])


# $1 / $2 rounded to nearest, $3 being 1 / $2: the rounded product with it, corrected by what it leaves.
QUOTIENT_PTX = (
    "{ .reg .f32 guess, rest, minus; mul.rn.f32 guess, $1, $3; neg.f32 minus, guess; fma.rn.f32 rest, minus, $2, $1;"
    "fma.rn.f32 $0, rest, $3, guess; }"
)
_FP8_PTX, _INT8_PTX = gl.constexpr(fp8_ptx()), gl.constexpr(int8_ptx())
_NV_PTX, _MX_PTX, _QUOTIENT_PTX = map(gl.constexpr, (e2m1_ptx(True), e2m1_ptx(False), QUOTIENT_PTX))


@gluon.constexpr_function
def _words_layout(ranges, rows, groups):
    """[ranges, rows, groups, 4] words of four columns as a left operand: lane 4 q + t has word t of the rows q and q +
    8.
    """
    return gl.DistributedLinearLayout(
        [[0, 0, 1 << i, 0] for i in range(groups.bit_length() - 1)]
        + [[0, 8 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)],
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1 << i, 0, 0, 0] for i in range(ranges.bit_length() - 1)],
        [],
        [ranges, rows, groups, 4],
    )


@gluon.constexpr_function
def _scales_layout(ranges, rows, groups):
    """[ranges, rows, groups] scales: lane 4 q + t has the t-th quarter of the groups, of the rows q and q + 8."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1 << i] for i in range((groups // 4).bit_length() - 1)]
        + [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)],
        [[0, 0, groups // 4], [0, 0, groups // 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << i, 0, 0] for i in range(ranges.bit_length() - 1)],
        [],
        [ranges, rows, groups],
    )


@gluon.jit
def _halves(word):
    """The two bfloat16 of a word."""
    return word.to(gl.int16).to(gl.bfloat16, bitcast=True), (word >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _of_two_rows(tile):
    """[ranges, rows, a, b] -> two of [ranges, rows / 16, 8, a, b]: of each 16 rows the first and the last 8."""
    RANGES: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = tile.shape[1]
    A: gl.constexpr = tile.shape[2]
    B: gl.constexpr = tile.shape[3]
    return gl.split(tile.reshape([RANGES, ROWS // 16, 2, 8, A, B]).permute([0, 1, 3, 4, 5, 2]))


@gluon.jit
def _rows_again(first, last):
    RANGES: gl.constexpr = first.shape[0]
    ROWS: gl.constexpr = 16 * first.shape[1]
    A: gl.constexpr = first.shape[3]
    B: gl.constexpr = first.shape[4]
    return gl.join(first, last).permute([0, 1, 5, 2, 3, 4]).reshape([RANGES, ROWS, A, B])


@gluon.jit
def _decoded(words, factors, FORMAT: gl.constexpr, MMA: gl.constexpr):
    """Left operand [ranges, rows, columns] of words [ranges, rows, groups, 4], times factors [ranges, rows, 1 or
    groups, 1].
    """
    if FORMAT < _NVFP4:
        PTX: gl.constexpr = _INT8_PTX if FORMAT == _INT8 else _FP8_PTX
        pair, second_pair = gl.inline_asm_elementwise(
            PTX, "=r,=r,r,r", [words, factors], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        WIDE_PTX: gl.constexpr = _NV_PTX if FORMAT == _NVFP4 else _MX_PTX
        first, last = _of_two_rows(words.to(gl.int32))
        first_factors, last_factors = _of_two_rows(gl.broadcast(words, factors)[1])
        first, second, last, second_last = gl.inline_asm_elementwise(
            WIDE_PTX,
            "=r,=r,=r,=r,r,r,r,r",
            [first, last, first_factors, last_factors],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        pair, second_pair = _rows_again(first, last), _rows_again(second, second_last)
    RANGES: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    DEPTH: gl.constexpr = words.shape[2] * 16
    a, b = _halves(pair)
    c, d = _halves(second_pair)
    tile = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 1, 2, 5, 3, 4]).reshape([RANGES, ROWS, DEPTH])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _columns_of(x_ring, slot, TOKENS: gl.constexpr, MMA: gl.constexpr):
    """Right operand [ranges, columns, TOKENS] of x's in shared memory, [ranges, TOKENS, columns], or of
    a row for all.
    """
    WIDE: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    columns = x_ring.index(slot)
    if len(columns.shape) == 2:
        tile = columns.load(gl.SliceLayout(2, WIDE))[:, :, None]
        ONE: gl.constexpr = tile.shape[0]
        ROW: gl.constexpr = tile.shape[1]
        tile = gl.broadcast(tile, gl.full([ONE, ROW, TOKENS], 0.0, tile.dtype, WIDE))[0]
    else:
        tile = columns.permute([0, 2, 1]).load(WIDE)
    RANGES: gl.constexpr = tile.shape[0]
    DEPTH: gl.constexpr = tile.shape[1]
    tile = tile.reshape([RANGES, DEPTH // 16, 4, 2, 2, TOKENS]).permute([0, 1, 3, 2, 4, 5])
    return gl.convert_layout(tile.reshape([RANGES, DEPTH, TOKENS]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _factors(stored, tensor, inverse, FORMAT: gl.constexpr, DIVIDES: gl.constexpr):
    """What the codes of a step are multiplied by; tensor, inverse: of NVFP4's scale, by 64."""
    if FORMAT < _NVFP4:
        return stored
    elif FORMAT == _MXFP4:
        exponents = stored.to(gl.int32)
        return gl.where(exponents == 0, 0x00400000, exponents << 23).to(gl.float32, bitcast=True)
    elif DIVIDES:
        return gl.inline_asm_elementwise(
            _QUOTIENT_PTX,
            "=r,r,r,r",
            [stored.to(gl.float32), tensor, inverse],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return stored.to(gl.float32) * tensor


@gluon.jit
def coded_kernel(
    x,
    first,
    second,
    third,
    first_scales,
    second_scales,
    third_scales,
    first_tensor,
    second_tensor,
    third_tensor,
    thin,
    first_b,
    second_b,
    third_b,
    out,
    COUNT: gl.constexpr,
    INNER: gl.constexpr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    THIRD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    FORMAT: gl.constexpr,
    DIVIDES: gl.constexpr,
    STRIDE: gl.constexpr,
    RANGES: gl.constexpr,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    RANK: gl.constexpr,
    FIRST_RANK: gl.constexpr,
    SECOND_RANK: gl.constexpr,
    THIRD_RANK: gl.constexpr,
):
    """out [COUNT, FIRST + SECOND + THIRD] = x W^T, W being the weights first [FIRST, INNER], second and third one below
    the other (0 rows if unused). With ACTIVATION out [COUNT, FIRST] is that of the first product times the second.
    Grid: (columns of out / ROWS,).

      first, second, third: codes.
      first_scales, second_scales, third_scales: of rows, tiles or blocks, e4m3 for NVFP4, exponents for MXFP4.
      first_tensor, second_tensor, third_tensor: float32 of NVFP4, one or one for each row.
      COUNT: rows of x, at most TOKENS, 8 or 16. INNER: a multiple of RANGES times DEPTH.
      ACTIVATION: 1: silu; 2: tanh approximation of gelu; 0: none.
      DIVIDES: block scales are divided by the tensor's. STRIDE: 0: one scale (of NVFP4's tensors) for all rows.
      RANGES: of the columns, as many as warps. ROWS: of out, of a program: 16, or 8 with ACTIVATION, or multiples; it
      divides the weights'.
      RANK: not 0: plus thin [COUNT, weights x RANK] times first_b^T, second_b^T, third_b^T, [rows, its rank]; both are
      rounded first, as in training with decoded weights.
    """
    DTYPE: gl.constexpr = x.dtype.element_ty
    ALL: gl.constexpr = 2 * ROWS if ACTIVATION else ROWS  # rows of weights; the second half of them is up's
    GROUPS: gl.constexpr = DEPTH // 16
    RANGE: gl.constexpr = INNER // RANGES
    STEPS: gl.constexpr = RANGE // DEPTH
    BITS: gl.constexpr = 4 if FORMAT >= _NVFP4 else 8
    VECTOR: gl.constexpr = 32 // BITS  # words of 16 bytes
    ACROSS: gl.constexpr = min(32, DEPTH * BITS // 128)  # lanes that copy a row
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [RANGES, 1, 1], [1, 16, 8])
    WORDS: gl.constexpr = _words_layout(RANGES, ALL, GROUPS)
    begin = gl.program_id(0) * ROWS
    codes, scales, tensor, first_row = first, first_scales, first_tensor, begin
    b, rank, of_thin = first_b, 0 * begin + FIRST_RANK, 0 * begin
    if not ACTIVATION:
        if SECOND > 0:
            if begin >= FIRST:
                codes, scales, tensor, first_row = second, second_scales, second_tensor, begin - FIRST
                if RANK > 0:
                    b, rank, of_thin = second_b, 0 * begin + SECOND_RANK, 0 * begin + RANK
        if THIRD > 0:
            if begin >= FIRST + SECOND:
                codes, scales, tensor, first_row = third, third_scales, third_tensor, begin - FIRST - SECOND
                if RANK > 0:
                    b, rank, of_thin = third_b, 0 * begin + THIRD_RANK, 0 * begin + 2 * RANK

    COPY: gl.constexpr = gl.BlockedLayout(
        [1, max(1, ALL * ACROSS // 32), VECTOR], [1, 32 // ACROSS, ACROSS], [RANGES, 1, 1], [2, 1, 0]
    )
    part = gl.arange(0, RANGES, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    row = gl.arange(0, ALL, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    word = gl.arange(0, DEPTH // 4, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    WORD: gl.constexpr = gl.int16 if BITS == 4 else gl.int32
    offsets = (first_row + row % ROWS).to(gl.int64) * (INNER // 4) + part * (RANGE // 4) + word
    lines = codes.to(gl.pointer_type(WORD), bitcast=True) + offsets
    if ACTIVATION:
        lines = gl.where(row < ROWS, lines, second.to(gl.pointer_type(WORD), bitcast=True) + offsets)
    lines = gl.max_contiguous(gl.multiple_of(lines, [1, 1, 16]), [1, 1, VECTOR])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, max(1, 8 // ACROSS), min(8, ACROSS), [2, 1, 0])
    ring = gl.allocate_shared_memory(WORD, [STAGES, RANGES, ALL, DEPTH // 4], SWIZZLED)
    if COUNT == 1:
        X_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [RANGES, 1], [1, 0])
        x_part = gl.arange(0, RANGES, gl.SliceLayout(1, X_ROW))[:, None]
        column = gl.arange(0, DEPTH, gl.SliceLayout(0, X_ROW))[None, :]
        x_lines = gl.max_contiguous(gl.multiple_of(x + x_part * RANGE + column, [1, 16]), [1, 8])
        x_real = None
        x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, RANGES, DEPTH], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    else:
        X_ACROSS: gl.constexpr = min(32, DEPTH // 8)
        X_COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // X_ACROSS, X_ACROSS], [RANGES, 1, 1], [2, 1, 0])
        x_part = gl.arange(0, RANGES, gl.SliceLayout(1, gl.SliceLayout(2, X_COPY)))[:, None, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, X_COPY)))[None, :, None]
        column = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, X_COPY)))[None, None, :]
        x_lines = x + token * INNER + x_part * RANGE + column
        x_lines = gl.max_contiguous(gl.multiple_of(x_lines, [1, 1, 16]), [1, 1, 8])
        x_real = token < COUNT
        x_ring = gl.allocate_shared_memory(
            DTYPE, [STAGES, RANGES, TOKENS, DEPTH], gl.SwizzledSharedLayout(16, 1, 4, [2, 1, 0])
        )
    for index in gl.static_range(STAGES - 1):
        if index < STEPS:
            _copy(ring.index(index), lines + index * (DEPTH // 4))
            _copy(x_ring.index(index), x_lines + index * DEPTH, mask=x_real)
        async_copy.commit_group()

    # Scales [RANGES, ALL, groups] of a step, or [.., .., 1] of rows, which do not change.
    OF_SCALES: gl.constexpr = _scales_layout(RANGES, ALL, GROUPS) if BITS == 4 else gl.SliceLayout(3, WORDS)
    w_part = gl.arange(0, RANGES, gl.SliceLayout(1, gl.SliceLayout(2, OF_SCALES)))[:, None, None]
    w_row = gl.arange(0, ALL, gl.SliceLayout(0, gl.SliceLayout(2, OF_SCALES)))[None, :, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, OF_SCALES)))[None, None, :]
    own_row = first_row + w_row % ROWS
    PER_ROW: gl.constexpr = FORMAT <= _INT8
    BLOCK: gl.constexpr = 16 if FORMAT == _NVFP4 else (32 if FORMAT == _MXFP4 else 128)
    SCALES: gl.constexpr = 0 if PER_ROW else DEPTH // BLOCK
    if PER_ROW:
        places = own_row * STRIDE + w_part * 0
    else:
        line = own_row // 128 if FORMAT == _FP8_TILES else own_row
        places = line * (INNER // BLOCK) + w_part * (RANGE // BLOCK) + group * 16 // BLOCK
    scale_lines = scales + places
    if ACTIVATION:
        scale_lines = gl.where(w_row < ROWS, scale_lines, second_scales + places)
    whole, inverse = 0.0, 0.0
    if FORMAT == _NVFP4:
        scale_lines = gl.max_contiguous(gl.multiple_of(scale_lines, [1, 1, GROUPS]), [1, 1, GROUPS])
        tensor_lines = tensor + own_row * STRIDE
        if ACTIVATION:
            tensor_lines = gl.where(w_row < ROWS, tensor_lines, second_tensor + own_row * STRIDE)
        whole = gl.load(tensor_lines) * (1.0 / 64 if DIVIDES else 64.0)
        inverse = gl.div_rn(gl.full([1, ALL, 1], 1.0, gl.float32, OF_SCALES), whole) if DIVIDES else whole

    stored = gl.load(scale_lines)
    total = gl.full([RANGES, ALL, TOKENS], 0.0, gl.float32, MMA)
    slot = 0
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)  # all groups but those of later steps
        words = ring.index(slot).reshape([RANGES, ALL, GROUPS, 4]).load(WORDS)
        right = _columns_of(x_ring, slot, TOKENS, MMA)
        factors = _factors(stored, whole, inverse, FORMAT, DIVIDES)
        factors = gl.convert_layout(factors, gl.SliceLayout(3, WORDS))[:, :, :, None]
        if not PER_ROW:
            stored = gl.load(scale_lines + gl.minimum(step + 1, STEPS - 1) * SCALES)
        if step + (STAGES - 1) < STEPS:
            free = gl.where(slot == 0, STAGES - 1, slot - 1)
            _copy(ring.index(free), lines + (step + (STAGES - 1)) * (DEPTH // 4))
            _copy(x_ring.index(free), x_lines + (step + (STAGES - 1)) * DEPTH, mask=x_real)
        async_copy.commit_group()
        total = mma_v2(_decoded(words, factors, FORMAT, MMA), right, total)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)

    END: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [RANGES, 1], [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [RANGES * ALL, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(total.reshape([RANGES * ALL, TOKENS]))
    result = _added(sums, 0, ROWS, ALL, RANGES, END)
    target = begin + gl.arange(0, ROWS, gl.SliceLayout(1, END))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, END))[None, :]
    if RANK > 0:
        WIDE: gl.constexpr = RANK * (1 + (SECOND > 0) + (THIRD > 0))
        out_row = target - begin + first_row
        result = result.to(DTYPE).to(gl.float32)
        result += _adapted(thin, b, rank, out_row, token, of_thin, COUNT, RANK, WIDE)
    if ACTIVATION:
        up = _added(sums, ROWS, ROWS, ALL, RANGES, END)
        if RANK > 0:
            rank_of_up = 0 * begin + SECOND_RANK
            up = up.to(DTYPE).to(gl.float32)
            up += _adapted(thin, second_b, rank_of_up, out_row, token, of_thin + RANK, COUNT, RANK, WIDE)
        up = up.to(DTYPE).to(gl.float32)
        result = _activated_in_steps(result.to(DTYPE).to(gl.float32), ACTIVATION, DTYPE) * up
    WIDTH: gl.constexpr = FIRST if ACTIVATION else FIRST + SECOND + THIRD
    gl.store(out + token * WIDTH + target, result.to(DTYPE), mask=token < COUNT)


@gluon.jit
def _added(
    sums, START: gl.constexpr, ROWS: gl.constexpr, ALL: gl.constexpr, RANGES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Rows START to START + ROWS of all ranges' sums [RANGES x ALL, tokens], added in ascending order."""
    result = sums.slice(START, ROWS).load(LAYOUT)
    for index in gl.static_range(1, RANGES):
        result += sums.slice(START + index * ALL, ROWS).load(LAYOUT)
    return result


@gluon.jit
def _adapted(thin, b, rank, row, token, place, COUNT: gl.constexpr, RANK: gl.constexpr, WIDTH: gl.constexpr):
    """An adapter's float32 numbers for `row` and `token`: rows of b [out, rank] times RANK columns of thin [COUNT,
    WIDTH].
    """
    DTYPE: gl.constexpr = thin.dtype.element_ty
    for index in gl.static_range(RANK):
        side = gl.load(b + row * rank + index, mask=row * 0 + index < rank, other=0.0).to(gl.float32)
        inner = gl.load(thin + token * WIDTH + place + index, mask=token < COUNT, other=0.0).to(gl.float32)
        if index == 0:
            total = side * inner
        else:
            total += side * inner
    return total.to(DTYPE).to(gl.float32)
