"""MXFP4, as gpt-oss is published: blocks of 32 numbers in four bits that share a power of two (OCP Microscaling Formats
v1.0: e2m1 numbers, e8m0 scales). Two numbers make a byte, the first in the low nibble. Not trained, not written."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas.arguments import Arguments
from jaxtune.pallas.formats.stored import Stored

BLOCK = 32  # numbers that share a scale
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4(Stored):
    """A tensor [..., n] whose last axis, a multiple of 32, is in blocks; a pytree, whose arrays are the leaves.

    Attributes:
      codes: uint8[..., n / 2], two numbers each. scales: uint8[..., n / 32]; a number is TABLE[code] * 2^(scale - 127).
      dtype_name: the dtype that `decode` gives by default.
    """

    codes: jax.Array
    scales: jax.Array
    dtype_name: str = dataclasses.field(default="bfloat16", metadata=dict(static=True))

    @staticmethod
    def from_blocks(blocks: jax.Array, scales: jax.Array, dtype_name: str = "bfloat16") -> MXFP4:
        """Of a checkpoint's uint8[..., n / 32, 16] and uint8[..., n / 32].

        Raises:
          TypeError, ValueError: other dtypes, or shapes that do not fit together.
        """
        check = Arguments("MXFP4.from_blocks")
        check.array("scales", scales, "...", jnp.uint8)
        check.array("blocks", blocks, " ".join(map(str, (*scales.shape, BLOCK // 2))), jnp.uint8)
        return MXFP4(blocks.reshape(*scales.shape[:-1], -1), scales, dtype_name)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def problem(self) -> str | None:
        """Why codes and scales do not fit together, or None."""
        wanted = (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK // 2)
        if tuple(self.codes.shape) != wanted:
            return f"codes are {list(self.codes.shape)}; scales {list(self.scales.shape)} ask for {list(wanted)}"
        if (str(self.codes.dtype), str(self.scales.dtype)) != ("uint8", "uint8"):
            return f"codes are {self.codes.dtype} and scales {self.scales.dtype}; both must be uint8"
        return None

    def cut(self, axis: int) -> int | None:
        return BLOCK if axis == self.ndim - 1 else 1

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """Exact in every dtype that holds the scales. Numbers under 2^-126 are zero.

        A number's exponent is the sum of its code's and its scale's: put together as bits, without a table or a power.
        """
        with jax.named_scope("dequantise"):
            nibbles = (self.codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15
            nibbles = nibbles.astype(jnp.int32).reshape(*self.scales.shape, BLOCK)
            size, sign = nibbles & 7, nibbles >> 3 << 31
            exponent = (size >> 1) + self.scales.astype(jnp.int32)[..., None] - 1
            fraction = jnp.where(size > 1, size & 1, 0) << 22
            bits = jnp.where(exponent < 255, exponent << 23 | fraction, 255 << 23)
            bits = jnp.where((size > 0) & (exponent > 0), bits, 0) | sign
            wide = jax.lax.bitcast_convert_type(bits, jnp.float32)
            return wide.astype(dtype or self.dtype).reshape(self.shape)
