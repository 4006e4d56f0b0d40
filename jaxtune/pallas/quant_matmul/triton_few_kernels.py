"""The Triton kernel that multiplies 17 to 64 tokens by a weight in NF4, and the PTX that decodes it in registers."""

import struct

import triton
import triton.language as tl

from jaxtune.pallas.formats import NF4
from jaxtune.pallas.quant_matmul.triton_kernels import _decoded, _looked_up
from jaxtune.pallas.triton_parts import INTERPRETED


def decoding_ptx(table) -> str:
    """Inline PTX that decodes four bytes of codes, $4, to values of `table` in bfloat16, two in each output (the lower
    byte's in the lower half): $0 and $1 of the high four bits of bytes 0 and 1, and 2 and 3; $2 and $3 of the low ones.

    A byte permutation looks up four codes in a table of eight bytes. So the low and the high bytes of the values are
    looked up separately, each in two tables, of which bit 3 of the code selects one.
    """
    bits = [struct.unpack("<I", struct.pack("<f", float(entry)))[0] for entry in table]
    rounded = [(entry_bits + 0x7FFF + (entry_bits >> 16 & 1)) >> 16 for entry_bits in bits]
    lines = [
        "{ .reg .b32 index, upper, mask, below, above, low, high;",
        "and.b32 index, $4, 0x77777777;",
        "shr.b32 upper, $4, 3;",
        "and.b32 upper, upper, 0x11111111;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.b32 index, index, 16;", "shr.b32 upper, upper, 16;"]
        lines.append("prmt.b32 mask, 0x0000FF00, 0, upper;")
        for name, shift in (("low", 0), ("high", 8)):
            plane = bytes(entry_bits >> shift & 255 for entry_bits in rounded)
            words = [f"{word:#x}" for word in struct.unpack("<4I", plane)]
            lines.append(f"prmt.b32 below, {words[0]}, {words[1]}, index;")
            lines.append(f"prmt.b32 above, {words[2]}, {words[3]}, index;")
            lines.append(f"lop3.b32 {name}, below, above, mask, 0xD8;")
        lines += [f"prmt.b32 ${half}, low, high, 0x7351;", f"prmt.b32 ${2 + half}, low, high, 0x6240;"]
    return "\n".join([*lines, "}"])


_PTX = tl.constexpr(decoding_ptx(NF4.table))


@triton.jit
def few_kernel(
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
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [SPLITS, COUNT, OUTER]: COUNT tokens times ROWS rows of W [OUTER, INNER] in NF4, over one of SPLITS runs of
    the columns. Grid: (OUTER / ROWS, SPLITS). INNER is a multiple of 64 * SPLITS, and OUTER one of ROWS, because loads
    of W are not masked.

    x is [2, COUNT, INNER / 2] bfloat16: even columns, then odd ones, as a byte of codes has an even column in its high
    four bits. On a GPU _PTX has the table's values. TOKENS: 32 or 64, at least COUNT.

      codes: uint8[OUTER, INNER / 2]. absmax: float32 or, if NESTED, uint8[OUTER, INNER / 64].
      nested_absmax, nested_map, offset: float32, one for 256 absmax; [256]; []; read only if NESTED. table:
      float32[16].
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    split = tl.program_id(1)
    per_row: tl.constexpr = INNER // 64
    own_blocks: tl.constexpr = per_row // SPLITS
    DTYPE: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    starts = codes + rows.to(tl.int64)[:, None] * (INNER // 2)
    real = (tokens < COUNT)[None, :]
    for block in tl.range(split * own_blocks, (split + 1) * own_blocks, num_stages=STAGES):
        columns = block * 32 + tl.arange(0, 32)
        packed = tl.load(starts + columns[None, :])
        offsets = x + tokens[None, :] * (INNER // 2) + columns[:, None]
        even = tl.load(offsets, mask=real, other=0.0)
        odd = tl.load(offsets + COUNT * (INNER // 2), mask=real, other=0.0)
        numbers = rows.to(tl.int64) * per_row + block
        stored = tl.load(absmax + numbers)
        scales = _decoded(stored, nested_absmax, nested_map, offset, numbers, OUTER * per_row, NESTED)[:, None]
        if INTERPRETED:
            high, low = _looked_up(tl.reshape(packed, (ROWS * 32,)), table)
            high, low = tl.reshape(high, (ROWS, 32)), tl.reshape(low, (ROWS, 32))
        else:
            high, low = tl.inline_asm_elementwise(
                _PTX, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        total = tl.dot((high.to(tl.float32) * scales).to(DTYPE), even, total)
        total = tl.dot((low.to(tl.float32) * scales).to(DTYPE), odd, total)
    offsets = (split * COUNT + tokens[None, :]) * OUTER + rows[:, None]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=real)
