"""Scales and codes of GGUF's types Q8_0, Q4_0 and Q5_0, one scale for a block of 32 numbers; in float32 those of the
gguf package's quantize.

A number is a scale, stored with float16's 11 significant bits, times a code: too many bits for bfloat16's 8. QAT in 16
bits shortens scales until every product is exact: to five bits for Q4_0, to powers of two for Q8_0. On normally
distributed weights this makes the error of Q4_0 0.3 % larger, and that of Q8_0 54 %.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas.formats.division import divide


def inverse(scales: jax.Array) -> jax.Array:
    """1 / scales, and 0 where a scale is 0, so that a block of zeros gets the code that stands for zero."""
    return jnp.where(scales == 0, 0, divide(jnp.ones_like(scales), jnp.where(scales == 0, 1, scales)))


def _shortened(scales: jax.Array, fraction_bits: int, up: bool) -> jax.Array:
    """Rounds float32 scales to 1 + fraction_bits (0 to 22) significant bits; up: away from zero,
    else to the nearest.
    """
    dropped = 23 - fraction_bits
    increment = (1 << dropped) - 1 if up else 1 << (dropped - 1)
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    return lax.bitcast_convert_type((bits + increment) & -(1 << dropped), jnp.float32)


def q8_0_codes(blocks: jax.Array, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Quantises blocks float32[..., 32] for Q8_0: (scales float32[..., 1], codes float32[..., 32] from -127 to 127). A
    number is scale * code; files round the scale to float16 afterwards.

      dtype: in which the products must be exact. "float32": a scale is the largest magnitude / 127; otherwise the
        smallest power of two that is not below that.
    """
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    scales = divide(largest, jnp.full_like(largest, 127))
    if dtype != "float32":
        scales = _shortened(scales, 0, up=True)
    numbers = blocks * inverse(scales)
    size = jnp.abs(numbers)
    floored = jnp.floor(size)
    return scales, jnp.sign(numbers) * (floored + jnp.floor(2 * (size - floored)))  # halves away from zero


def signed_codes(blocks: jax.Array, middle: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Quantises blocks float32[..., 32] for Q4_0 and Q5_0: (scales float32[..., 1], codes float32[..., 32], at least 0
    and below 2 * middle). A number is scale * (code - middle); files round scales to float16 afterwards. The first
    number of the largest magnitude gets the code 0, so the scale has the opposite sign.

      middle: the code of zero, 8 for Q4_0 and 16 for Q5_0.
      dtype: in which the products must be exact. "float32": scales are not rounded; otherwise to five significant bits,
        enough for Q4_0 only.
    """
    largest_index = jnp.abs(blocks).argmax(-1, keepdims=True)
    indices = lax.broadcasted_iota(largest_index.dtype, blocks.shape, blocks.ndim - 1)
    # A masked sum in place of a gather, which a mesh would not divide.
    scales = jnp.where(indices == largest_index, blocks, 0).sum(-1, keepdims=True) / -middle
    if dtype != "float32":
        scales = _shortened(scales, 4, up=False)
    # The largest magnitude is at most middle + 1. The bound, which changes no number, prevents a fused multiply-add,
    # because gguf rounds between product and sum.
    numbers = jnp.clip(blocks * inverse(scales), -middle - 1, middle + 1) + jnp.float32(middle + 0.5)
    return scales, jnp.clip(jnp.trunc(numbers), 0, 2 * middle - 1)
