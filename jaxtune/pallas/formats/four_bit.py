"""NF4 (QLoRA, arXiv 2305.14314) as bitsandbytes stores it, and its FP4, to which jaxtune does not quantise.

The tensor is flattened row by row and divided into blocks of 64; the last may be shorter. A block has its absmax (the
largest magnitude, float32), and each element the index of the table entry nearest to element / absmax. Two indices make
a byte, the first in the high nibble. Double quantisation stores absmax minus their mean in 8 bits, in blocks of 256, as
indices into a signed dynamic map (arXiv 2110.02861). Codes and float32 absmax equal bitsandbytes' byte for byte; with
double quantisation the offset and nested absmax may differ by rounding errors, and then a few of the 8-bit indices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments, describe
from jaxtune.pallas.formats import blockwise8
from jaxtune.pallas.formats.blockwise8 import dynamic_map, nearest_codes
from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.layout import (
    Arrays,
    Config,
    Export,
    FileTensor,
    Format,
    FoundWeight,
    Headers,
    Layout,
    Read,
    Settings,
    file_tensor,
)
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

BLOCK = 64  # elements that share an absmax
NESTED_BLOCK = blockwise8.BLOCK  # how many absmax share a nested absmax
_TINY = 1e-38  # bitsandbytes' absmax for a last, short block of zeros


@dataclasses.dataclass(frozen=True)
class FourBit(Stored):
    """A tensor of n elements in four bits: an element is an entry of a table of 16 numbers times its block's absmax.

    With double quantisation an absmax is nested_map[index] * nested_absmax + offset; without it these three are None.
    """

    codes: jax.Array  # uint8[ceil(n / 2)], two table indices each, the first in the high four bits
    absmax: jax.Array  # float32[ceil(n / 64)], or with double quantisation uint8, indices into nested_map
    nested_absmax: jax.Array | None  # float32[ceil(n / 64 / 256)], for each 256 absmax, or None
    nested_map: jax.Array | None  # float32[256], what the indices stand for, or None
    offset: jax.Array | None  # float32[], the mean of the absmax, or None
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # of the decoded tensor
    # the dtype that it was quantised from, which `decode` returns by default
    dtype_name: str = dataclasses.field(metadata=dict(static=True))

    # nested_absmax could be divided too, but it is a sixteen-thousandth of the tensor, and each layer would need
    # another gather
    shared = ("nested_absmax", "nested_map", "offset")
    quant_type: ClassVar[str]  # bitsandbytes' name of the format, "nf4" or "fp4"
    table: ClassVar[np.ndarray]  # float32[16], the numbers that the indices stand for

    def problem(self) -> str | None:
        blocks = -(-self.size // BLOCK)
        double = {name: getattr(self, name) for name in ("nested_absmax", "nested_map", "offset")}
        if len({array is None for array in double.values()}) != 1:
            return "of nested_absmax, nested_map and offset some are there and some are None"
        quantised = self.offset is not None
        expected = {
            "codes": ("uint8", (-(-self.size // 2),)),
            "absmax": ("uint8" if quantised else "float32", (blocks,)),
        }
        if quantised:
            shapes = ((-(-blocks // NESTED_BLOCK),), (256,), ())
            expected |= {name: ("float32", shape) for name, shape in zip(double, shapes, strict=True)}
        for name, (dtype, shape) in expected.items():
            array = getattr(self, name)
            if (str(array.dtype), tuple(array.shape)) != (dtype, shape):
                return f"{name} is {describe(array)}; shape {self.shape} asks for {dtype}{list(shape)}"
        return None

    def cuts_rows(self, shards: int) -> bool:
        groups = self.nested_absmax is None or self.size % (BLOCK * NESTED_BLOCK * shards) == 0
        return self.ndim == 2 and groups and self.shard_axes(0, shards) is not None

    def rows_of(self, shard: jax.Array, shards: int) -> Self:
        nested, shape = self.nested_absmax, (self.shape[0] // shards, *self.shape[1:])
        if nested is not None:
            size = len(nested) // shards
            nested = jax.lax.dynamic_slice_in_dim(nested, shard * size, size)
        return dataclasses.replace(self, nested_absmax=nested, shape=shape)

    def block_absmax(self) -> jax.Array:
        """The absmax of each block, float32[ceil(n / 64)], decoded and rounded as bitsandbytes does."""
        if self.nested_absmax is None or self.nested_map is None or self.offset is None:
            return self.absmax
        values = jnp.asarray(self.nested_map).at[self.absmax].get(mode="promise_in_bounds")
        # The barrier prevents a fused multiply-add, because bitsandbytes rounds between product and sum.
        return jax.lax.optimization_barrier(_blocks(values, NESTED_BLOCK, self.nested_absmax)) + self.offset

    @property
    def kind(self) -> str:
        return type(self).__name__ + (", float32 absmax" if self.nested_absmax is None else "")

    def random_like(self, shape: tuple[int, ...], draw: np.random.Generator) -> FourBit:
        like = NF4.encode(jnp.asarray(draw.standard_normal(shape), jnp.bfloat16), self.nested_absmax is not None)
        # FP4 has other entries for the same codes.
        return type(self)(*(getattr(like, field.name) for field in dataclasses.fields(like)))

    @classmethod
    def joined(cls, pieces: Sequence[Self], shape: tuple[int, ...]) -> Self:
        """As Stored.joined, for matrices of whole blocks of 64. Double quantisation stays if all matrices have one
        offset and whole groups of 256 blocks; otherwise (matrices quantised separately) the result has float32 absmax.
        """
        first, nested = pieces[0], (None, None, None)
        whole_groups = first.size % (BLOCK * NESTED_BLOCK) == 0
        if whole_groups and all(piece.offset is not None and piece.offset == first.offset for piece in pieces):
            absmax = np.concatenate([piece.absmax for piece in pieces])
            nested = (
                np.concatenate([np.asarray(piece.nested_absmax) for piece in pieces]),
                first.nested_map,
                first.offset,
            )
        else:
            absmax = np.concatenate([np.asarray(piece.block_absmax()) for piece in pieces])
        leaves: list[Any] = [np.concatenate([piece.codes for piece in pieces]), absmax, *nested]
        return cls(*leaves, shape=shape, dtype_name=first.dtype_name)

    def piece(self, index: int, start: int, rows: int) -> Self:
        """As Stored.piece, for rows that are whole blocks of 64. The absmax stay quantised if the rows begin and end
        with whole groups of 256 blocks; otherwise the result has float32 absmax.
        """
        columns = self.shape[2]
        first, size = (index * self.shape[1] + start) * columns, rows * columns
        blocks = slice(first // BLOCK, (first + size) // BLOCK)
        fields: dict[str, Any] = dict(codes=self.codes[first // 2 : (first + size) // 2], absmax=self.absmax[blocks])
        if self.nested_absmax is not None and self.nested_map is not None and self.offset is not None:
            group = BLOCK * NESTED_BLOCK
            if size % group == 0 and first % group == 0:
                fields["nested_absmax"] = self.nested_absmax[first // group : (first + size) // group]
            else:
                nested = self.nested_absmax[np.arange(blocks.start, blocks.stop) // NESTED_BLOCK]
                values = jnp.asarray(self.nested_map)[fields["absmax"]]
                absmax = jax.lax.optimization_barrier(values * nested) + self.offset
                fields |= dict(absmax=absmax, nested_absmax=None, nested_map=None, offset=None)
        return dataclasses.replace(self, **fields, shape=(rows, columns))

    def block_length(self, axis: int) -> int | None:
        """As Stored.block_length: along the first axis whole blocks of 64 or, with double quantisation, groups of 256
        blocks; None for other axes, because codes are flat in row-major order. `piece` can cut groups.
        """
        row, unit_size = math.prod(self.shape[1:]), BLOCK * (1 if self.offset is None else NESTED_BLOCK)
        return math.lcm(row, unit_size) // row if axis == 0 and row else None

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        with jax.named_scope("dequantise"):
            nibbles = (self.codes[:, None] >> jnp.array([4, 0], jnp.uint8)) & 15
            values = jnp.asarray(self.table).at[nibbles.reshape(-1)[: self.size]].get(mode="promise_in_bounds")
            return _blocks(values, BLOCK, self.block_absmax()).reshape(self.shape).astype(dtype or self.dtype)


def _blocks(values: jax.Array, block: int, scales: jax.Array) -> jax.Array:
    """Multiplies each `block` consecutive numbers of `values` [n] by one entry of `scales` [ceil(n / block)]."""
    size = values.size
    values = _padded(values, block).reshape(-1, block) * scales[:, None]
    return values.reshape(-1)[:size]


def _padded(values: jax.Array, block: int) -> jax.Array:
    padding = -values.size % block
    return jnp.pad(values, (0, padding)) if padding else values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NF4(FourBit):
    """A tensor in NF4, 4-bit NormalFloat (QLoRA): the table has quantiles of the normal distribution, as models'
    weights are distributed about normally.
    """

    quant_type = "nf4"
    table = np.array(
        [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ],
        np.float32,
    )

    @staticmethod
    @on_any_mesh
    def encode(array: jax.Array | np.ndarray, double_quant: bool = True) -> NF4:
        """Quantises a tensor of any shape in bfloat16, float16 or float32; the bytes are equal on every device.

        Quantised absmax decode to nearly bitsandbytes' numbers, as bitsandbytes adds their mean in another order. A
        number that is not finite makes its block meaningless, and with double quantisation the whole tensor.

          double_quant: whether the absmax are quantised too, to 8 bits.
        Raises:
          TypeError: another dtype, or double_quant is not a bool.
          ValueError: an empty array.
        """
        check = Arguments("NF4.encode")
        check.array("array", array, "...", FLOATS)
        if not array.size:
            raise ValueError(f"NF4.encode: array has the shape {array.shape}; it must have an element at least")
        check.is_a("double_quant", double_quant, bool, "True or False")
        return _encode_nf4(jnp.asarray(array), double_quant)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP4(FourBit):
    """A tensor in FP4, the 4-bit float of older bitsandbytes checkpoints: sign, two exponent bits, one fraction bit. It
    is read, trained over and written again, as the format "nf4"; jaxtune does not quantise to it.
    """

    quant_type = "fp4"
    table = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


@functools.partial(jax.jit, static_argnums=1)
def _encode_nf4(array: jax.Array, double_quant: bool) -> NF4:
    """Quantises as bitsandbytes does, bit for bit, in blocks of 64 of the flat array; the last may be shorter."""
    size, shape, dtype = array.size, array.shape, array.dtype
    blocks = _padded(array.reshape(-1), BLOCK).reshape(-1, BLOCK).astype(jnp.float32)
    absmax = jnp.abs(blocks).max(axis=1)
    divisors = jnp.where(absmax == 0, 1, absmax)
    scaled = blocks * divide(jnp.ones_like(divisors), divisors)[:, None]
    if size % BLOCK:
        # As in bitsandbytes, the short block is divided by its absmax, which is never zero.
        scaled = scaled.at[-1].set(divide(blocks[-1], jnp.broadcast_to(divisors[-1], BLOCK)))
        absmax = absmax.at[-1].set(jnp.where(absmax[-1] == 0, _TINY, absmax[-1]))
    bounds = (NF4.table[:-1] + NF4.table[1:]) / np.float32(2)
    # The index is the number of bounds below the element: an element on a bound gets the lower entry.
    nibbles = sum((scaled > bound).astype(jnp.uint8) for bound in bounds)
    pairs = jnp.reshape(nibbles, (-1, 2))
    codes = ((pairs[:, 0] << 4) | pairs[:, 1])[: -(-size // 2)]
    if not double_quant:
        return NF4(codes, absmax, None, None, None, shape, dtype.name)
    offset = _mean(absmax)
    nested = _padded(absmax - offset, NESTED_BLOCK)
    if absmax.size % NESTED_BLOCK:
        nested = jnp.where(jnp.arange(nested.size) < absmax.size, nested, 0)
    nested = nested.reshape(-1, NESTED_BLOCK)
    nested_absmax = jnp.abs(nested).max(axis=1)
    divisors = jnp.where(nested_absmax == 0, 1, nested_absmax)
    nested = nested * divide(jnp.ones_like(divisors), divisors)[:, None]
    steps = dynamic_map(signed=True)
    codes8 = nearest_codes(nested.reshape(-1)[: absmax.size], signed=True)
    return NF4(codes, codes8, nested_absmax, jnp.asarray(steps), offset, shape, dtype.name)


def _mean(values: jax.Array) -> jax.Array:
    """The mean of float32[n]; halves are added to each other, so the order and result are the same on every device."""
    count = values.size
    values = jnp.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while values.size > 1:
        half = values.size // 2
        values = values[:half] + values[half:]
    return divide(values[0], jnp.float32(count))


# ---- in checkpoints

_STATE = ".weight.quant_state.bitsandbytes__"
_PART = re.compile(
    r"(.+)(\.weight(?:|\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map|\.quant_state\.bitsandbytes__\w+))"
)
_KINDS: dict[str, type[FourBit]] = {"nf4": NF4, "fp4": FP4}


class _State(NamedTuple):
    """What bitsandbytes' quant_state, a JSON object stored as a tensor beside a weight, says beyond the headers."""

    quant_type: str  # "nf4" or "fp4"
    dtype_name: str  # the dtype that the weight was quantised from
    offset: float | None  # the mean of the absmax, for double quantisation; None: the absmax are float32


class BitsAndBytes(Layout):
    """The layout of bitsandbytes' Linear4bit, in NF4 or FP4.

    Beside `X.weight` (the codes, as bytes of any dtype) there are `X.weight.absmax`, `.quant_map`, with double
    quantisation `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or `__fp4`), the bytes
    of a JSON object with shape, dtype, block sizes and, with double quantisation, the offset.
    """

    title = "bitsandbytes' in four bits"
    codes = ".weight"
    codes_dtype = "U8"
    scale_keys = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
    raw = (".weight",)  # whatever dtype the header gives the codes, their bytes are read
    digests_pieces = True
    expert_note = (
        "experts in four bits are written as the linears of transformers 4, which jaxtune loads again and transformers "
        "5 does not: it has no experts in four bits (dequantize writes 16)"
    )

    def recognises(self, settings: Settings) -> bool:
        four_bit = settings.get("load_in_4bit", settings.get("_load_in_4bit"))
        return settings.get("quant_method") == "bitsandbytes" and bool(four_bit)

    def key_of(self, name: str) -> tuple[str, str] | None:
        """As Layout.key_of, by a pattern, because quant_state's key ends in nf4 or fp4. A plain weight's X.weight has a
        key too; `claims` tells them apart.
        """
        match = _PART.fullmatch(name)
        return None if match is None else (match[1], match[2])

    def claims(self, tensors: Headers) -> bool:
        """As Layout.claims: there is a tensor besides `.weight`. If the codes are missing, `describe` raises."""
        return any(key != self.codes for key in tensors)

    def describe(self, name: str, tensors: Headers, read: Read) -> FoundWeight:
        """As Layout.describe, with a _State as `details`. ValueError, too, for a damaged or unsupported quant_state."""
        codes = tensors.get(self.codes)
        if codes is None:
            header = next(iter(tensors.values()))
            raise ValueError(f"{header.file}: {header.name} is there, but {name} is missing")
        where = f"{codes.file}: {name}"
        keys = [key for key in tensors if key.startswith(_STATE)]
        if len(keys) != 1:
            raise ValueError(f"{where}: has {len(keys)} quant_state tensors, not one; fetch or save it again")
        quant_type = keys[0].removeprefix(_STATE)
        if quant_type not in _KINDS:
            raise ValueError(f"{where}: quant_type {quant_type!r} is not supported; supported: {', '.join(_KINDS)}")
        try:
            state = json.loads(read(keys[0]).tobytes())
            shape, dtype_name = tuple(map(int, state["shape"])), str(state["dtype"])
            nested = ".weight.nested_absmax" in tensors
            sizes = (state["blocksize"], state["nested_blocksize"] if nested else NESTED_BLOCK)
            offset = float(state["nested_offset"]) if nested else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: its quant_state is damaged ({type(error).__name__}: {error})") from None
        if sizes != (BLOCK, NESTED_BLOCK):
            raise ValueError(f"{where}: block sizes {sizes} are not supported; supported: {(BLOCK, NESTED_BLOCK)}")
        if dtype_name not in FLOATS:
            raise ValueError(f"{where}: quantised from {dtype_name}, which is not supported")
        blocks = -(-math.prod(shape) // BLOCK)
        expected = {
            ".weight.absmax": ("U8", blocks) if nested else ("F32", 4 * blocks),
            ".weight.quant_map": ("F32", 64),
        }
        if nested:
            groups = -(-blocks // NESTED_BLOCK)
            expected |= {".weight.nested_absmax": ("F32", 4 * groups), ".weight.nested_quant_map": ("F32", 4 * 256)}
        expected[self.codes] = (codes.dtype, -(-math.prod(shape) // 2))
        for key, (dtype, size_bytes) in expected.items():
            header = tensors.get(key)
            if header is None or (header.dtype, header.size_bytes) != (dtype, size_bytes):
                flaw = "is missing" if header is None else f"has {header.size_bytes} bytes of {header.dtype}"
                raise ValueError(
                    f"{where}{key.removeprefix(self.codes)} {flaw}; a four-bit tensor {shape} needs {size_bytes} bytes "
                    f"of {dtype}"
                )
        return FoundWeight(name, tensors, shape, _State(quant_type, dtype_name, offset))

    def read(self, weight: FoundWeight, arrays: Arrays, dtype_name: str) -> FourBit:
        """As Layout.read; dtype_name is not used, because quant_state has the dtype. ValueError if quant_map is not the
        type's table.
        """
        state = weight.details
        assert isinstance(state, _State)
        kind = _KINDS[state.quant_type]
        if not np.allclose(arrays[".weight.quant_map"], kind.table, rtol=0, atol=1e-6):
            raise ValueError(f"{weight.where}.quant_map is not the table of {state.quant_type}")
        nested = map(arrays.get, (".weight.nested_absmax", ".weight.nested_quant_map"))
        offset = None if state.offset is None else np.float32(state.offset)
        leaves: list[Any] = [arrays[self.codes], arrays[".weight.absmax"], *nested, offset]
        return kind(*leaves, shape=weight.shape, dtype_name=state.dtype_name)

    def joining(self, pieces: Sequence[FoundWeight], per_expert: int) -> str | None:
        first = pieces[0]
        if len({piece.details.quant_type for piece in pieces if isinstance(piece.details, _State)}) > 1:
            return "of its experts' matrices some are in four bits of another type"
        if math.prod(first.shape) % BLOCK:
            return (
                f"{list(first.shape)} is not whole blocks of {BLOCK} four-bit numbers: experts like that can only be "
                "loaded from 16 bits"
            )
        return None

    def digested(self, weight: FoundWeight) -> list[tuple[str, str]]:
        """As Layout.digested: the weight's name labels the codes; the others follow in alphabetical order, without
        ".weight.".
        """
        companion_keys = sorted(key for key in weight.tensors if key != self.codes)
        return [(weight.name, self.codes), *((key.removeprefix(".weight."), key) for key in companion_keys)]

    def splitting(self, weight: Stored, rows: int) -> str | None:
        if rows * weight.shape[2] % BLOCK == 0:
            return None
        return f"is in four bits, and its pieces of {rows} x {weight.shape[2]} are not whole blocks of {BLOCK}"

    def header_number(self, weight: Stored, make: Callable[[], Stored]) -> float | None:
        """The offset of double quantisation, or None: quant_state has it in decimal digits, so that tensor's size
        depends on it. `make` is called only where `weight.offset` is no jax.Array.
        """
        assert isinstance(weight, FourBit)
        if weight.offset is None:
            return None
        quantised = weight if isinstance(weight.offset, jax.Array) else make()
        assert isinstance(quantised, FourBit) and quantised.offset is not None
        return float(jax.device_get(quantised.offset))

    def tensors(self, weight: Stored, number: float | None) -> dict[str, FileTensor]:
        assert isinstance(weight, FourBit)
        table = type(weight).table
        state: dict[str, Any] = {"quant_type": weight.quant_type, "blocksize": BLOCK, "dtype": weight.dtype_name}
        state["shape"] = list(weight.shape)
        codes = FileTensor((weight.codes.size, 1), np.dtype(weight.codes.dtype), lambda w: w.codes.reshape(-1, 1))
        entries = {
            self.codes: codes,
            ".weight.absmax": file_tensor(weight.absmax, lambda w: w.absmax),
            ".weight.quant_map": file_tensor(table, lambda w: table),
        }
        if weight.offset is not None:
            entries[".weight.nested_absmax"] = file_tensor(weight.nested_absmax, lambda w: w.nested_absmax)
            entries[".weight.nested_quant_map"] = file_tensor(weight.nested_map, lambda w: w.nested_map)
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": number}
        content = np.frombuffer(json.dumps(state).encode(), np.uint8)
        entries[f"{_STATE}{weight.quant_type}"] = file_tensor(content, lambda w: content)
        return entries

    def config(self, weights: Sequence[Stored], plain: list[str], dtype: str) -> Config:
        """As Layout.config; the first weight decides the type that the entry names and whether absmax are quantised."""
        first = weights[0]
        assert isinstance(first, FourBit)
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": first.quant_type,
            "bnb_4bit_use_double_quant": first.offset is not None,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": plain,
        }


FORMAT = Format(
    name="nf4",
    title="in four bits (NF4)",
    kinds=(NF4, FP4),
    layouts=(BitsAndBytes(),),
    flag="load_in_4bit",
    export=Export(
        "bnb-4bit",
        without_experts="transformers 5 has no experts in four bits, so it could not load the result",
    ),
)
