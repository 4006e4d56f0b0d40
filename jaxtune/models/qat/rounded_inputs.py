"""How quantisation-aware training rounds activations [..., in]: a function for each format that returns x's dtype,
without a gradient, and `within_...`, which says which numbers are in its range (clipped gradients pass only to those).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import formats
from jaxtune.pallas.formats.division import divide


def int8_by_token(x: jax.Array) -> jax.Array:
    """Rounds to symmetric int8: integers from -128 to 127 times the token's largest magnitude / 127.5, computed in
    float32, as compressed-tensors has it for W4A8 (dynamic, by token).
    """
    wide = x.astype(jnp.float32)
    scale = _token_scales(wide)
    codes = jnp.clip(jnp.round(divide(wide, jnp.broadcast_to(scale, wide.shape))), -128, 127)
    return (codes * scale).astype(x.dtype)


def _token_scales(wide: jax.Array) -> jax.Array:
    """float32[..., 1]; float32's eps for a token of zeros."""
    largest = jnp.abs(wide).max(-1, keepdims=True)
    scale = divide(largest, jnp.full_like(largest, 127.5))
    return jnp.where(scale == 0, jnp.finfo(jnp.float32).eps, scale)


def int8_by_token_asymmetric(x: jax.Array) -> jax.Array:
    """Rounds to int8 with a zero point for each token, as torchao's Int8DynamicActivationInt4WeightConfig, computed in
    float32: the scale is (max - min) / 255, with min at most 0 and max at least 0, and the zero point -128 - round(min
    / scale).
    """
    wide = x.astype(jnp.float32)
    scale, zero = _token_zero_points(wide)
    # torchao multiplies by the reciprocal of the scale.
    inverse = divide(jnp.ones_like(scale), scale)
    codes = jnp.clip(jnp.round(wide * inverse) + zero, -128, 127)
    return ((codes - zero) * scale).astype(x.dtype)


def _token_zero_points(wide: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scales of at least float32's eps, zero points from -128 to 127), both float32[..., 1]."""
    low = jnp.minimum(wide.min(-1, keepdims=True), 0)
    high = jnp.maximum(wide.max(-1, keepdims=True), 0)
    scale = jnp.maximum(divide(high - low, jnp.full_like(low, 255)), jnp.finfo(jnp.float32).eps)
    return scale, jnp.clip(-128 - jnp.round(divide(low, scale)), -128, 127)


def fp8_by_token(x: jax.Array) -> jax.Array:
    """Rounds to e4m3 with a float32 scale for each token, largest magnitude / 448, as servers do for FP8 checkpoints
    with dynamic scales.
    """
    return formats.FP8.encode(x.reshape(-1, x.shape[-1])).decode(x.dtype).reshape(x.shape)


def mxfp4_activations(x: jax.Array) -> jax.Array:
    """Rounds to MXFP4 with a scale for each block of 32 numbers, as in compressed-tensors' scheme MXFP4."""
    return formats.MXFP4.encode_activations(x).decode(x.dtype)


def nvfp4_activations(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Rounds to NVFP4 with an e4m3 scale for each block of 16 numbers, as in compressed-tensors' scheme NVFP4. Numbers
    beyond 448 * 6 / scale become that bound.

      scale: float32[], the tensor's observed scale (input_global_scale), which divides the scales of blocks.
    """
    return formats.NVFP4.encode_activations(x, scale).decode(x.dtype)


# ---- the ranges, beyond which numbers are clipped: each a bool array, True within


def between(numbers: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """bool in the shape of `numbers`: low <= number <= high, with a slack of 2^-22 of the bound, which the rounding of
    a float32 scale may add.

      numbers: float32, any shape.
      low, high: the bounds, which broadcast to it.
    """
    slack = np.float32(2**-22)
    return (numbers >= low - slack * jnp.abs(low)) & (numbers <= high + slack * jnp.abs(high))


def within_stored(stored: formats.Stored, numbers: jax.Array) -> jax.Array:
    """`stored` is `numbers` in a format that has Stored.largest, the bound under each number's scale."""
    largest = stored.largest()
    return between(numbers.astype(jnp.float32), -largest, largest)


def within_int8_by_token(x: jax.Array) -> jax.Array:
    """A token's largest magnitude is at 127.5 scales, so a positive number of that magnitude is outside."""
    wide = x.astype(jnp.float32)
    scale = _token_scales(wide)
    return between(wide, -128 * scale, 127 * scale)


def within_int8_by_token_asymmetric(x: jax.Array) -> jax.Array:
    """The rounded zero point moves the range by up to half a scale, so that numbers nearest to the other end can be
    outside.
    """
    wide = x.astype(jnp.float32)
    scale, zero = _token_zero_points(wide)
    return between(wide, (-128 - zero) * scale, (127 - zero) * scale)


def within_fp8_by_token(x: jax.Array) -> jax.Array:
    """All numbers are within, because each scale follows from the token's largest magnitude."""
    rows = x.reshape(-1, x.shape[-1])
    return within_stored(formats.FP8.encode(rows), rows).reshape(x.shape)


def within_mxfp4_activations(x: jax.Array) -> jax.Array:
    """Scales are powers of two: a block's largest numbers may be between 6 and 7 scales, which is outside."""
    return within_stored(formats.MXFP4.encode_activations(x), x)


def within_nvfp4_activations(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Numbers are outside where the block's scale was rounded down to e4m3, or beyond 448 * 6 / scale."""
    return within_stored(formats.NVFP4.encode_activations(x, scale), x)
