"""Weights in four bits as the left side of a wgmma, lane by lane: from bytes in shared memory to registers.

What a lane does is written once, over words of 32 bits, and run twice: `Emitted` makes MLIR of it inside a Mosaic
kernel; `Written` computes it in NumPy for all 128 lanes of a warpgroup, so that the interpreter runs the same code,
every address and every selector of a byte permutation included.

A warpgroup's left side is [64, 64]: 64 columns of the output by a step of 64 along K. Lane 4 g + q of warp w holds of
the rows 16 w + g and 16 w + g + 8 the elements 8 i + 2 q and 8 i + 2 q + 1, for i from 0 to 7 (PTX ISA, wgmma register
fragments). Which column of the output such a row stands for is ours to choose, if the result is stored alike: two rows
of a lane are always an even column and the next one, which then make a word of the output.
"""

# MLIR's Python bindings have no useful annotations.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, vector

STEP = 64  # along K
OWN = 64  # columns of the output of a warpgroup
ROWS = 128  # of the output's tile


@dataclasses.dataclass(frozen=True)
class Format:
    """table: float32[16] as bytes, rounded to bfloat16 on use. block: elements that share a scale. high_first: whether
    the first of a byte's two is in its high nibble."""

    table: bytes
    block: int
    high_first: bool

    def planes(self) -> tuple[list[int], list[int]]:
        """The 16 low and the 16 high bytes of the table in bfloat16, as four words each."""
        values = np.frombuffer(self.table, np.float32).astype(jnp.bfloat16).view(np.uint16)
        low, high = ([*map(int, (values >> shift).astype(np.uint8).view(np.uint32))] for shift in (0, 8))
        return low, high


# ---- what a lane does


def column_word(ops, contract: int):
    """Which pair of a warpgroup's 64 columns the lane's two rows are: 2 column_word, and the next one."""
    lane, warp = ops.thread & 31, ops.thread >> 5
    if contract == 2:
        return warp * 8 + (lane >> 2)
    return (warp >> 1) * 16 + (lane >> 2) * 2 + (warp & 1)


def _looked_up(ops, format: Format, codes):
    """Of eight codes, four by four, from the lowest nibble up: (low, high) bytes of their table entries, in words."""
    tables = format.planes()
    index, upper = codes & 0x77777777, (codes >> 3) & 0x11111111
    found = []
    for shift in (0, 16):
        at = index >> shift if shift else index
        mask = ops.permute(0x0000FF00, 0, upper >> shift if shift else upper)  # ones where the code is 8 or more
        both = []
        for first, second, third, fourth in tables:
            below, above = ops.permute(first, second, at), ops.permute(third, fourth, at)
            both.append(below ^ ((below ^ above) & mask))
        found.append(both)
    return found


def fast_fragment(ops, format: Format, codes, scales, columns: int):
    """The lane's 16 words [8 i][2 rows] where K is the axis along which codes lie.

    codes: uint8[columns, 32]. scales: bfloat16[64 / block, columns].
    """
    quad = ops.thread & 3
    column = ops.warpgroup * OWN + column_word(ops, 2) * 2
    own_byte = quad * 0x11 + 0x40  # of two words, the byte that holds the lane's two elements
    pairs = [ops.load(scales, (column + part * columns) * 2, 1)[0] for part in range(STEP // format.block)]
    registers: list[Any] = [None] * 16
    for row in range(2):
        start = (column + row) * (STEP // 2)
        words = [*ops.load(codes, start, 4), *ops.load(codes, start + 16, 4)]  # a word for each i
        for part in range(2):
            a, b, c, d = words[4 * part : 4 * part + 4]
            packed = ops.permute(ops.permute(a, b, own_byte), ops.permute(c, d, own_byte), 0x5410)
            pair = pairs[part * 32 // format.block]
            scale = ops.permute(pair, pair, 0x3232 if row else 0x1010)
            for half, (low, high) in enumerate(_looked_up(ops, format, packed)):
                for byte in range(2):
                    first, second = 2 * byte, 2 * byte + 1
                    if format.high_first:
                        first, second = second, first
                    selector = first | (first + 4) << 4 | second << 8 | (second + 4) << 12
                    value = ops.permute(low, high, selector)
                    registers[(4 * part + 2 * half + byte) * 2 + row] = ops.times(value, scale)
    return registers


def slow_fragment(ops, format: Format, codes, scales, columns: int):
    """As fast_fragment, where codes lie along the output's columns: two of them share a byte.

    codes: uint8[64, columns / 2]. scales: bfloat16[columns / block, 64].
    """
    lane, warp = ops.thread & 31, ops.thread >> 5
    quad, pair_of_warps = lane & 3, warp >> 1
    start = ops.warpgroup * (OWN // 2) + pair_of_warps * 16
    # Two warps share 32 columns, 16 bytes. A transposing load gives each lane two bytes of two neighbours along K.
    own_byte = (warp & 1) * 0x1111 + 0x6420
    block = ops.warpgroup if format.block == OWN else ops.warpgroup * 2 + pair_of_warps
    registers: list[Any] = [None] * 16
    for half in range(2):
        words = ops.load_transposed(codes, (lane + 32 * half) * (columns // 2) + start)
        for two in range(2):
            packed = ops.permute(words[2 * two], words[2 * two + 1], own_byte)
            for part, (low, high) in enumerate(_looked_up(ops, format, packed)):
                number = 4 * half + 2 * two + part
                (scale,) = ops.load(scales, (block * STEP + quad * 2 + 8 * number) * 2, 1)
                for row in range(2):
                    nibble = row ^ format.high_first
                    selector = nibble | (nibble + 4) << 4 | (nibble + 2) << 8 | (nibble + 6) << 12
                    registers[number * 2 + row] = ops.times(ops.permute(low, high, selector), scale)
    return registers


def stored_words(ops, values, contract: int):
    """Yields (byte address, word) of the lane's part of the output [128, 64], 16-bit, as wgmma left it: [64, 128].

    values: float32 of the lane, in the order of the accumulator's registers: [16 i][2 rows][2]. The output lies in
    tiles of 8 rows of 128 bytes, swizzled: the number of 16 bytes in a row is xored with the row's in its tile.
    """
    quad, word = ops.thread & 3, column_word(ops, contract)
    values = iter(values)
    for number in range(ROWS // 8):
        upper, lower = [next(values), next(values)], [next(values), next(values)]
        for index in range(2):
            row = quad * 2 + index
            address = row * 128 + ((word * 4) ^ (row * 16)) + number * 1024
            yield address, ops.narrow(upper[index], lower[index])


# ---- in NumPy, for all lanes


class Written:
    """Words of all 128 lanes of a warpgroup: uint32[128]; memory: uint8[bytes]."""

    def __init__(self, warpgroup):
        self.thread = np.arange(128, dtype=np.uint32)
        self.warpgroup = np.uint32(warpgroup)

    def permute(self, low, high, selector):
        # Bit 3 of a selector's nibble would repeat a sign: no selector here has it.
        low, high, selector = np.broadcast_arrays(*(np.asarray(word, np.uint32) for word in (low, high, selector)))
        both = np.stack([low, high], -1).view(np.uint8)
        index = np.stack([(selector >> np.uint32(4 * byte)) & np.uint32(15) for byte in range(4)], -1)
        return np.take_along_axis(both, index.astype(np.int64), -1).view(np.uint32)[..., 0]

    def times(self, a, b):
        return (a[:, None].view(jnp.bfloat16) * b[:, None].view(jnp.bfloat16)).view(np.uint32)[:, 0]

    def narrow(self, low, high):
        return np.stack([low, high], -1).astype(jnp.bfloat16).view(np.uint32)[:, 0]

    def load(self, memory, address, count: int):
        assert not (address % (4 * count)).any()
        return [memory.view(np.uint32)[(address >> 2) + np.uint32(index)] for index in range(count)]

    def load_transposed(self, memory, address):
        """ldmatrix.x4.trans: lane 8 j + r says where row r of matrix j lies, 8 numbers of 16 bits; lane 4 g + q gets
        column g of the rows 2 q and 2 q + 1 of each."""
        assert not (address % 16).any()
        starts = (address >> 1).reshape(4, 4, 8)  # warps, matrices, rows
        matrices = memory.view(np.uint16)[starts[..., None] + np.arange(8, dtype=np.uint32)].astype(np.uint32)
        both = matrices[:, :, 0::2] | matrices[:, :, 1::2] << np.uint32(16)  # [warps, matrices, q, g]
        return list(both.transpose(1, 0, 3, 2).reshape(4, 128))


def written_fragment(format: Format, codes, scales, columns: int, contract: int, warpgroup):
    """bfloat16[64, 64]: what the lanes hold, as a matrix."""
    fragment = fast_fragment if contract == 2 else slow_fragment

    def run(codes, scales, warpgroup):
        codes, scales = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (codes, scales))
        words = np.stack(fragment(Written(warpgroup), format, codes, scales, columns))
        pairs = words.view(jnp.bfloat16).reshape(8, 2, 4, 8, 4, 2)  # i, row, w, g, q, element
        return pairs.transpose(2, 1, 3, 0, 4, 5).reshape(OWN, STEP)

    return jax.pure_callback(run, jax.ShapeDtypeStruct((OWN, STEP), jnp.bfloat16), codes, scales, warpgroup)


def written_rows(acc, contract: int):
    """[128, 64] of the accumulator float32[64, 128], through the addresses that the lanes store to; bfloat16."""

    def run(acc):
        values = np.asarray(acc).reshape(4, 2, 8, 16, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, 128)
        memory = np.zeros(ROWS * OWN // 2, np.uint32)
        for address, word in stored_words(Written(0), values, contract):
            memory[address >> 2] = word
        row, place = np.arange(8)[:, None], np.arange(8)
        tiles = memory.reshape(ROWS // 8, 8, 8, 4)[:, row, place ^ row]  # tile, row, 16 bytes, word
        return np.ascontiguousarray(tiles).view(jnp.bfloat16).reshape(ROWS, OWN)

    return jax.pure_callback(run, jax.ShapeDtypeStruct((ROWS, OWN), jnp.bfloat16), acc)


# ---- in MLIR, for the lane that runs it


def _i32():
    return ir.IntegerType.get_signless(32)


def _value(word):
    if isinstance(word, Word):
        return word.value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), word - (1 << 32) if word >> 31 else word))


@dataclasses.dataclass(frozen=True)
class Word:
    """32 bits of a lane, with the operators of an unsigned integer."""

    value: Any

    def __add__(self, other):
        return Word(arith.addi(self.value, _value(other)))

    def __mul__(self, other):
        return Word(arith.muli(self.value, _value(other)))

    def __and__(self, other):
        return Word(arith.andi(self.value, _value(other)))

    def __xor__(self, other):
        return Word(arith.xori(self.value, _value(other)))

    def __rshift__(self, amount: int):
        return Word(arith.shrui(self.value, _value(amount)))


class Emitted:
    """Words of one lane; memory: a memref in shared memory."""

    def __init__(self):
        number = Word(arith.index_castui(_i32(), gpu.thread_id(gpu.Dimension.x)))
        self.thread, self.warpgroup = number & 127, number >> 7

    def permute(self, low, high, selector):
        # PTX's first operand is the low word.
        return Word(utils.prmt(_value(low), _value(high), _value(selector)))

    def times(self, a, b):
        return Word(utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", a.value, b.value, result_types=_i32()))

    def narrow(self, low, high):
        return Word(utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=_i32()))

    def _pointer(self, memory, address):
        return utils.getelementptr(utils.memref_ptr(memory), [address.value], ir.IntegerType.get_signless(8))

    def load(self, memory, address, count: int):
        found = llvm.load(ir.VectorType.get((count,), _i32()), self._pointer(memory, address), alignment=4 * count)
        return [Word(_item(found, index)) for index in range(count)]

    def load_transposed(self, memory, address):
        found = nvvm.ldmatrix(
            self._pointer(memory, address),
            layout=nvvm.MMALayout.col,
            num=4,
            shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
            elt_type=nvvm.LdStMatrixEltType.B16,
        )
        return [Word(llvm.extractvalue(_i32(), found, [index])) for index in range(4)]


def _item(array, index: int):
    return vector.extract(array, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def emitted_fragment(format: Format, codes_smem, scales_smem, columns: int, contract: int):
    """bfloat16[64, 64] in registers, the left side of a wgmma."""
    fragment = fast_fragment if contract == 2 else slow_fragment
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((OWN, STEP), jnp.bfloat16, layout),
    )
    def decode(_, codes, scales):
        words = fragment(Emitted(), format, codes, scales, columns)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        whole = layout.to_mgpu()
        registers = np.empty(whole.registers_shape((OWN, STEP)), object)
        assert registers.size == len(words)
        for place, word in zip(np.ndindex(registers.shape), words, strict=True):
            registers[place] = utils.bitcast(word.value, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=whole, _is_signed=None)

    return decode(codes_smem, scales_smem)


def store_rows(acc, out_smem, transforms, contract: int):
    """Stores the accumulator float32[64, 128] of a warpgroup as its [128, 64] of the output, in bfloat16."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)))
    def store(_, acc, out):
        values = [_item(register, index) for register in acc.registers.flat for index in range(2)]
        ops = Emitted()
        for address, word in stored_words(ops, values, contract):
            llvm.store(word.value, ops._pointer(out, address))

    store(acc, out_smem)
