"""Weights in four bits, as bitsandbytes stores them: NF4 (QLoRA, arXiv 2305.14314), and FP4 to read.

The tensor is flattened row by row and cut into blocks of 64, the last of which may be shorter. A block has its absmax
(the largest magnitude, float32), and each element the index of the table entry nearest to element / absmax. Two
indices make a byte, the first in the high nibble. Double quantisation stores the absmax in 8 bits: less their mean, in
blocks of 256, as indices into a signed dynamic map (arXiv 2110.02861). bitsandbytes' own bytes, everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import FLOATS, Arguments, describe
from jaxtune.pallas.formats import blockwise8
from jaxtune.pallas.formats.blockwise8 import dynamic_map, nearest_codes
from jaxtune.pallas.formats.division import divide
from jaxtune.pallas.formats.stored import Stored
from jaxtune.pallas.meshes import on_any_mesh

BLOCK = 64  # elements that share an absmax
NESTED_BLOCK = blockwise8.BLOCK  # absmax that share a nested absmax
_TINY = 1e-38  # what bitsandbytes stores as the absmax of a last, short block of zeros


@dataclasses.dataclass(frozen=True)
class FourBit(Stored):
    """A tensor in four bits; a pytree, whose arrays are the leaves.

    Attributes:
      codes: uint8[ceil(n / 2)], two table indices each; n is the number of elements.
      absmax: one a block: float32[ceil(n / 64)], or uint8, with double quantisation.
      nested_absmax: float32[one for 256 absmax], nested_map: float32[256], offset: float32[]: double quantisation's,
        or all None.
      shape: of the tensor. dtype_name: the dtype that it was quantised from.
    """

    codes: jax.Array
    absmax: jax.Array
    nested_absmax: jax.Array | None
    nested_map: jax.Array | None
    offset: jax.Array | None
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    dtype_name: str = dataclasses.field(metadata=dict(static=True))

    # nested_absmax could be cut: it is a sixteen-thousandth of the tensor, and a gather of its own in each layer.
    shared = ("nested_absmax", "nested_map", "offset")
    quant_type: ClassVar[str]
    table: ClassVar[np.ndarray]

    def problem(self) -> str | None:
        blocks = -(-self.size // BLOCK)
        double = {name: getattr(self, name) for name in ("nested_absmax", "nested_map", "offset")}
        if len({part is None for part in double.values()}) != 1:
            return "of nested_absmax, nested_map and offset some are there and some are None"
        quantised = self.offset is not None
        wanted = {"codes": ("uint8", (-(-self.size // 2),)), "absmax": ("uint8" if quantised else "float32", (blocks,))}
        if quantised:
            shapes = ((-(-blocks // NESTED_BLOCK),), (256,), ())
            wanted |= {name: ("float32", shape) for name, shape in zip(double, shapes, strict=True)}
        for name, (dtype, shape) in wanted.items():
            part = getattr(self, name)
            if (str(part.dtype), tuple(part.shape)) != (dtype, shape):
                return f"{name} is {describe(part)}; shape {self.shape} asks for {dtype}{list(shape)}"
        return None

    def block_absmax(self) -> jax.Array:
        """float32[ceil(n / 64)]"""
        if self.nested_absmax is None or self.nested_map is None or self.offset is None:
            return self.absmax
        values = jnp.asarray(self.nested_map).at[self.absmax].get(mode="promise_in_bounds")
        # The barrier keeps the sum from being contracted into the product: bitsandbytes rounds between them.
        return jax.lax.optimization_barrier(_blocks(values, NESTED_BLOCK, self.nested_absmax)) + self.offset

    def cut(self, axis: int) -> int | None:
        """Along the first axis: of whole blocks, and of whole blocks of absmax where these are quantised."""
        row, whole = math.prod(self.shape[1:]), BLOCK * (1 if self.offset is None else NESTED_BLOCK)
        return math.lcm(row, whole) // row if axis == 0 and row else None

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """Table entry times absmax in float32, then cast."""
        with jax.named_scope("dequantise"):
            nibbles = (self.codes[:, None] >> jnp.array([4, 0], jnp.uint8)) & 15
            values = jnp.asarray(self.table).at[nibbles.reshape(-1)[: self.size]].get(mode="promise_in_bounds")
            return _blocks(values, BLOCK, self.block_absmax()).reshape(self.shape).astype(dtype or self.dtype)


def _blocks(values: jax.Array, block: int, scales: jax.Array) -> jax.Array:
    """values [n], each times the scale of its block."""
    size = values.size
    values = _padded(values, block).reshape(-1, block) * scales[:, None]
    return values.reshape(-1)[:size]


def _padded(values: jax.Array, block: int) -> jax.Array:
    short = -values.size % block
    return jnp.pad(values, (0, short)) if short else values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NF4(FourBit):
    """4-bit NormalFloat: quantiles of the normal distribution."""

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
        """Quantises a tensor of any shape in bfloat16, float16 or float32, on the device that it lies on; the bytes are
        the same on every one.

        Elements are taken as float32. Values that are not finite make a block of nonsense, and with double
        quantisation a tensor: `offset` is then not finite either.

        Raises:
          TypeError: array is none of these. ValueError: it is empty.
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
    """4-bit float of older bitsandbytes checkpoints: sign, two bits of exponent, one of fraction; decoded only."""

    quant_type = "fp4"
    table = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


@functools.partial(jax.jit, static_argnums=1)
def _encode_nf4(array: jax.Array, double_quant: bool) -> NF4:
    size, shape, dtype = array.size, array.shape, array.dtype
    blocks = _padded(array.reshape(-1), BLOCK).reshape(-1, BLOCK).astype(jnp.float32)
    absmax = jnp.abs(blocks).max(axis=1)
    divisors = jnp.where(absmax == 0, 1, absmax)
    scaled = blocks * divide(jnp.ones_like(divisors), divisors)[:, None]
    if size % BLOCK:
        # As bitsandbytes: the short block is divided, and its absmax is never zero.
        scaled = scaled.at[-1].set(divide(blocks[-1], jnp.broadcast_to(divisors[-1], BLOCK)))
        absmax = absmax.at[-1].set(jnp.where(absmax[-1] == 0, _TINY, absmax[-1]))
    bounds = (NF4.table[:-1] + NF4.table[1:]) / np.float32(2)
    # The number of bounds below: an element on a bound takes the lower entry.
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
    """The mean, added up in halves: the order is the same on every device."""
    count = values.size
    values = jnp.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while values.size > 1:
        half = values.size // 2
        values = values[:half] + values[half:]
    return divide(values[0], jnp.float32(count))
