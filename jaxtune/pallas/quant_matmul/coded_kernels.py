"""The Triton kernel that multiplies a few rows by weights in eight or four bits, decoded to 16 bits in registers.

Each element of the product is one float32 sum over ascending columns, 16 at a time, which are the steps of the tensor
cores: the sum that a product with the decoded weight has. Triton gives a thread 4 (of eight bits) or 8 (of four bits)
numbers in a row for each operand, of which a step takes two, and two from the other half of a block of 32 or 64. So
columns of both operands are permuted, for the steps to have 16 columns that follow each other.
"""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import INTERPRETED

# Formats of eight bits come first, and of those the ones that have a scale for each row.
FP8_ROWS, INT8, FP8_TILES, NVFP4, MXFP4 = range(5)
_INT8, _FP8_TILES, _NVFP4, _MXFP4 = map(tl.constexpr, (INT8, FP8_TILES, NVFP4, MXFP4))


def e2m1_ptx(exponents: bool) -> str:
    """Inline PTX: two bytes of e2m1 codes, $2, the first of two in the low four bits, times the scale $3, to two
    bfloat16 a word, $0 and $1. exponents: the scale is two bfloat16, powers of two; else a float32.

    A byte permutation looks up the low, and another the high bytes of four codes' magnitudes; signs are added.
    """
    lines = ["{ .reg .b32 index, sign, low, high, zero, w<2>; .reg .f32 a, b;"]
    lines += ["and.b32 index, $2, 0x7777;", "shr.b32 sign, $2, 3;", "and.b32 sign, sign, 0x1111;"]
    lines += ["prmt.b32 sign, 0x00008000, 0, sign;"]
    # the bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    lines += ["prmt.b32 low, 0xC0800000, 0xC0804000, index;", "prmt.b32 high, 0x3F3F3F00, 0x40404040, index;"]
    lines += ["or.b32 high, high, sign;", "prmt.b32 w0, low, high, 0x5140;", "prmt.b32 w1, low, high, 0x7362;"]
    if exponents:
        lines.append("mov.b32 zero, 0x80008000;")
        lines += [f"fma.rn.bf16x2 ${word}, w{word}, $3, zero;" for word in range(2)]
    else:
        for word in range(2):
            lines += [f"shl.b32 low, w{word}, 16;", f"and.b32 high, w{word}, 0xFFFF0000;"]
            lines += ["mov.b32 a, low;", "mov.b32 b, high;", "mul.rn.f32 a, a, $3;", "mul.rn.f32 b, b, $3;"]
            lines.append(f"cvt.rn.bf16x2.f32 ${word}, b, a;")
    return "\n".join([*lines, "}"])


def int8_ptx() -> str:
    """Inline PTX: four int8, $4, to float32, $0 to $3: a byte plus 128 is the fraction of a number near 2^23."""
    lines = ["{ .reg .b32 bytes, word; .reg .f32 number;", "xor.b32 bytes, $4, 0x80808080;"]
    for byte in range(4):
        lines += [f"prmt.b32 word, bytes, 0x4B000000, 0x744{byte};", "mov.b32 number, word;"]
        lines.append(f"add.rn.f32 ${byte}, number, 0fCB000080;")
    return "\n".join([*lines, "}"])


# $1 / $2 rounded to nearest, $3 being 1 / $2: the rounded product with it, corrected by what it leaves.
QUOTIENT_PTX = (
    "{ .reg .f32 guess, rest, minus; mul.rn.f32 guess, $1, $3; neg.f32 minus, guess; fma.rn.f32 rest, minus, $2, $1;"
    "fma.rn.f32 $0, rest, $3, guess; }"
)
_E2M1_PTX, _MX_PTX, _INT8_PTX = tl.constexpr(e2m1_ptx(False)), tl.constexpr(e2m1_ptx(True)), tl.constexpr(int8_ptx())
_QUOTIENT_PTX = tl.constexpr(QUOTIENT_PTX)


@triton.jit
def _quotient(wide, divisor):
    if INTERPRETED:
        return tl.div_rn(wide, divisor)
    divisor = tl.broadcast_to(divisor, wide.shape)
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), divisor)
    return tl.inline_asm_elementwise(_QUOTIENT_PTX, "=r,r,r,r", [wide, divisor, inverse], tl.float32, True, 1)


@triton.jit
def _e2m1(codes):
    """float32 of the low four bits: sign, two of exponent, one of fraction."""
    return ((codes & 7) << 22 | (codes & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _permuted(tile, ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr):
    """[ROWS, DEPTH] in the order of the module's docstring; STEPS: of a block."""
    fragments = tl.reshape(tile, (ROWS, DEPTH // (16 * STEPS), STEPS, 4, 2, 2))
    return tl.reshape(tl.permute(fragments, (0, 1, 4, 3, 2, 5)), (ROWS, DEPTH))


@triton.jit
def _eight_bits(
    codes, scales, rows, step, FORMAT: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr, DTYPE: tl.constexpr
):
    """[rows, DEPTH] of a weight in eight bits. scales: float32[rows]."""
    stored = tl.load(codes + rows.to(tl.int64)[:, None] * INNER + step * DEPTH + tl.arange(0, DEPTH)[None, :])
    if FORMAT == _INT8:
        if INTERPRETED:
            wide = stored.to(tl.float32)
        else:
            wide = tl.inline_asm_elementwise(_INT8_PTX, "=r,=r,=r,=r,r", [stored], tl.float32, True, 4)
        return (wide * scales[:, None] * (1.0 / 127)).to(DTYPE)
    else:
        return (stored.to(tl.float32) * scales[:, None]).to(DTYPE)


@triton.jit
def _halves(word):
    """The two bfloat16 of a word."""
    return word.to(tl.int16).to(tl.bfloat16, bitcast=True), (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _four_bits(
    codes,
    scales,
    rows,
    step,
    FORMAT: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, DEPTH] of a weight in four bits, permuted. scales: float32[ROWS, blocks], or int32 exponents."""
    BLOCK: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    WORDS: tl.constexpr = DEPTH // 4  # of four codes
    columns = step * WORDS + tl.arange(0, WORDS)
    words = tl.load(codes.to(tl.pointer_type(tl.int16)) + rows.to(tl.int64)[:, None] * (INNER // 4) + columns[None, :])
    words = words.to(tl.int32) & 0xFFFF
    wide = tl.broadcast_to(scales[:, :, None], (ROWS, DEPTH // BLOCK, BLOCK // 4))
    wide = tl.reshape(wide, (ROWS, WORDS))
    if INTERPRETED:
        if FORMAT == _MXFP4:
            wide = (wide << 23).to(tl.float32, bitcast=True)
        first, second = (_e2m1(words) * wide).to(DTYPE), (_e2m1(words >> 4) * wide).to(DTYPE)
        third, fourth = (_e2m1(words >> 8) * wide).to(DTYPE), (_e2m1(words >> 12) * wide).to(DTYPE)
    else:
        if FORMAT == _NVFP4:
            pair, second_pair = tl.inline_asm_elementwise(
                _E2M1_PTX, "=r,=r,r,r", [words, wide], (tl.int32, tl.int32), True, 1
            )
        else:
            exponents = tl.where(wide == 0, 0x00400040, wide << 23 | wide << 7)  # two bfloat16 of 2^(wide - 127)
            pair, second_pair = tl.inline_asm_elementwise(
                _MX_PTX, "=r,=r,r,r", [words, exponents], (tl.int32, tl.int32), True, 1
            )
        first, second = _halves(pair)
        third, fourth = _halves(second_pair)
    fragments = tl.join(tl.join(first, second), tl.join(third, fourth))
    fragments = tl.reshape(fragments, (ROWS, DEPTH // 64, 4, 4, 2, 2))
    return tl.reshape(tl.permute(fragments, (0, 1, 5, 3, 2, 4)), (ROWS, DEPTH))


@triton.jit
def _scales(
    scales,
    tensor,
    rows,
    step,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    STRIDE: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """What the codes of a step are multiplied by."""
    if FORMAT == _FP8_TILES:  # of one tile, because 128 is a multiple of a program's rows, and DEPTH is 128
        return tl.load(scales + rows // 128 * (INNER // 128) + step)
    elif FORMAT <= _INT8:
        return tl.load(scales + rows * STRIDE)
    else:
        BLOCKS: tl.constexpr = DEPTH // (16 if FORMAT == _NVFP4 else 32)
        lines = rows.to(tl.int64)[:, None] * (INNER // DEPTH * BLOCKS)
        stored = tl.load(scales + lines + step * BLOCKS + tl.arange(0, BLOCKS)[None, :])
        if FORMAT == _MXFP4:
            return stored.to(tl.int32)
        elif DIVIDES:
            return _quotient(stored.to(tl.float32), tl.load(tensor + rows * STRIDE)[:, None])
        else:
            return stored.to(tl.float32) * tl.load(tensor + rows * STRIDE)[:, None]


@triton.jit
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
    out,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    LEFT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [COUNT, FIRST + SECOND + THIRD] = x W^T, W being the weights first [FIRST, INNER], second and third one below
    the other (0 rows if unused). Grid: (rows of W / ROWS,).

      first, second, third: codes.
      first_scales, second_scales, third_scales: of rows, tiles or blocks, e4m3 for NVFP4, exponents for MXFP4.
      first_tensor, second_tensor, third_tensor: float32 of NVFP4, one or one for each row.
      COUNT: rows of x, at most TOKENS. INNER: a multiple of DEPTH. ROWS: of W, of a program; it divides the weights'.
      DIVIDES: block scales are divided by the tensor's. STRIDE: 0: one scale (of NVFP4's tensors) for all rows.
      LEFT: the weight is the left side of the tensor cores' product.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin = tl.program_id(0) * ROWS
    codes, scales, tensor, first_row = first, first_scales, first_tensor, begin
    if SECOND > 0:
        if begin >= FIRST:
            codes, scales, tensor, first_row = second, second_scales, second_tensor, begin - FIRST
    if THIRD > 0:
        if begin >= FIRST + SECOND:
            codes, scales, tensor, first_row = third, third_scales, third_tensor, begin - FIRST - SECOND
    rows = first_row + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if LEFT:
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        total = tl.zeros([TOKENS, ROWS], tl.float32)
    if FORMAT <= _INT8:
        factors = _scales(scales, tensor, rows, 0, FORMAT, DIVIDES, STRIDE, INNER, DEPTH)
    for step in tl.range(0, INNER // DEPTH, num_stages=STAGES):
        if FORMAT > _INT8:
            factors = _scales(scales, tensor, rows, step, FORMAT, DIVIDES, STRIDE, INNER, DEPTH)
        columns = step * DEPTH + tl.arange(0, DEPTH)
        tile = tl.load(x + tokens[:, None] * INNER + columns[None, :], mask=(tokens < COUNT)[:, None], other=0.0)
        if FORMAT > _FP8_TILES:
            weight = _four_bits(codes, factors, rows, step, FORMAT, INNER, ROWS, DEPTH, DTYPE)
            tile = _permuted(tile, TOKENS, DEPTH, 4)
        else:
            weight = _permuted(_eight_bits(codes, factors, rows, step, FORMAT, INNER, DEPTH, DTYPE), ROWS, DEPTH, 2)
            tile = _permuted(tile, TOKENS, DEPTH, 2)
        if LEFT:
            total = tl.dot(weight, tl.trans(tile), total)
        else:
            total = tl.dot(tile, tl.trans(weight), total)
    if LEFT:
        total = tl.trans(total)
    offsets = tokens[:, None] * (FIRST + SECOND + THIRD) + begin + tl.arange(0, ROWS)[None, :]
    tl.store(out + offsets, total.to(DTYPE), mask=(tokens < COUNT)[:, None])
