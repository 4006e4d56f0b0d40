"""The scales and codes of GGUF's types Q8_0 (`q8_0_codes`), Q4_0 and Q5_0 (`signed_codes`), which have one scale for a
block of 32 numbers. Export encodes with them. Quantisation-aware training (QAT) rounds with those of Q8_0 and Q4_0, so
that a file contains the numbers of the training.

In float32 they are those of the gguf package's quantize. A file stores a scale with the 11 significant bits of float16,
and a number is the scale times a code, for which the 8 bits of bfloat16 are too few. QAT in 16 bits therefore shortens
scales until every product is exact: to five bits for Q4_0, whose codes have three, and to powers of two for Q8_0, whose
codes have seven. Of normally distributed weights this makes the error of Q4_0 0.3 % larger, and that of Q8_0 54 %.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas.formats.division import divide


def inverse(scales: jax.Array) -> jax.Array:
    """Returns 1 / scales, float32[...] in the shape of `scales`, and 0 where a scale is 0. Numbers are multiplied by it
    to get their codes here and in export, so that those of a block of zeros are the code that stands for zero."""
    return jnp.where(scales == 0, 0, divide(jnp.ones_like(scales), jnp.where(scales == 0, 1, scales)))


def _shortened(scales: jax.Array, kept: int, up: bool) -> jax.Array:
    """Rounds float32 scales of any shape and sign to 1 + `kept` significant bits; `kept` is 0 to 22. A shortened scale
    has exact products with codes in 16 bits. up: True: to the next number of no smaller magnitude; False: to the
    nearest, and to that of larger magnitude from the middle between two. q8_0_codes and signed_codes call it for a
    16-bit `dtype`."""
    dropped = 23 - kept
    more = (1 << dropped) - 1 if up else 1 << (dropped - 1)
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    return lax.bitcast_convert_type((bits + more) & -(1 << dropped), jnp.float32)


def q8_0_codes(blocks: jax.Array, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Quantises blocks float32[..., 32] for GGUF's type Q8_0: export writes these scales and codes, and
    quantisation-aware training rounds to their products.

    Args:
      blocks: the numbers.
      dtype: the name of the dtype in which the products of scales and codes must be exact; a 16-bit one for weights
        that were trained so. With "float32" a scale is the largest magnitude / 127; with others it is the smallest
        power of two that is not below that (0 for a block of zeros).

    Returns:
      (scales float32[..., 1], which files round to float16; codes float32[..., 32], whole numbers from -127 to 127). A
      number is scale * code. Codes are computed with these scales, before files round them.
    """
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    scales = divide(largest, jnp.full_like(largest, 127))
    if dtype != "float32":
        scales = _shortened(scales, 0, up=True)
    numbers = blocks * inverse(scales)
    size = jnp.abs(numbers)
    whole = jnp.floor(size)
    return scales, jnp.sign(numbers) * (whole + jnp.floor(2 * (size - whole)))  # halves away from zero


def signed_codes(blocks: jax.Array, middle: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Quantises blocks float32[..., 32] for GGUF's types Q4_0 and Q5_0, which export writes; quantisation-aware
    training rounds to the numbers of Q4_0. The number of the largest magnitude (the first of several) gets the code 0,
    so a scale has the opposite sign of that number. In a block of zeros the scale is 0, and all codes are `middle`.

    Args:
      blocks: the numbers.
      middle: the code of zero, 8 for Q4_0 and 16 for Q5_0.
      dtype: the name of the dtype in which the products of scales and codes must be exact; a 16-bit one for weights
        that were trained so. With "float32" scales are not rounded; with others they are, to five significant bits,
        enough for Q4_0. Products of Q5_0 would not be exact in bfloat16, so its dtype must be "float32".

    Returns:
      (scales float32[..., 1], which files round to float16; codes float32[..., 32], whole numbers from 0 to 2 * middle
      - 1). A number is scale * (code - middle). Codes are computed with these scales, before files round them.
    """
    at = jnp.abs(blocks).argmax(-1, keepdims=True)
    places = lax.broadcasted_iota(at.dtype, blocks.shape, blocks.ndim - 1)
    # A masked sum in place of a gather, which a mesh would not divide.
    scales = jnp.where(places == at, blocks, 0).sum(-1, keepdims=True) / -middle
    if dtype != "float32":
        scales = _shortened(scales, 4, up=False)
    # The largest magnitude is at most middle + 1. The bound, which changes no number, prevents a fused multiply-add,
    # because gguf rounds between product and sum.
    numbers = jnp.clip(blocks * inverse(scales), -middle - 1, middle + 1) + jnp.float32(middle + 0.5)
    return scales, jnp.clip(jnp.trunc(numbers), 0, 2 * middle - 1)
