"""How quantisation-aware training (QAT) rounds activations, the inputs of linears and experts: a function for each
format that rounds them (such as `fp8_by_token`), and one in `within_` that says which of them are in its range;
`between` and `within_stored` are what these compare with, for weights too. `nvfp4_scale` is the scale that NVFP4
observes. models/fake_quant.py assigns the functions to formats and adds the gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import formats
from jaxtune.pallas.formats.division import divide


def int8_by_token(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to symmetric int8 with one scale for each token (each vector of the last axis):
    integers from -128 to 127 times its largest magnitude / 127.5, computed in float32. This is compressed-tensors'
    definition for W4A8 (dynamic, by token), and QAT's format int8-int4. The result has x's dtype.
    `FakeQuant.round_inputs` adds the gradient."""
    wide = x.astype(jnp.float32)
    scale = _token_scales(wide)
    codes = jnp.clip(jnp.round(divide(wide, jnp.broadcast_to(scale, wide.shape))), -128, 127)
    return (codes * scale).astype(x.dtype)


def _token_scales(wide: jax.Array) -> jax.Array:
    """The scales by which int8_by_token rounds activations, float32[..., 1], one for each token (each vector of the
    last axis): its largest magnitude / 127.5, or float32's eps for a token of zeros. wide: float32[..., in], the
    activations."""
    largest = jnp.abs(wide).max(-1, keepdims=True)
    scale = divide(largest, jnp.full_like(largest, 127.5))
    return jnp.where(scale == 0, jnp.finfo(jnp.float32).eps, scale)


def int8_by_token_asymmetric(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to int8 with one scale and one zero point for each token (each vector of the last
    axis), as torchao's Int8DynamicActivationInt4WeightConfig does, for QAT's format int8-int4-asymmetric: the scale is
    (max - min) / 255, where min is at most 0 and max at least 0, and the zero point -128 - round(min / scale). Computed
    in float32; the result has x's dtype. `FakeQuant.round_inputs` adds the gradient."""
    wide = x.astype(jnp.float32)
    scale, zero = _token_zero_points(wide)
    # torchao multiplies by the reciprocal of the scale.
    inverse = divide(jnp.ones_like(scale), scale)
    codes = jnp.clip(jnp.round(wide * inverse) + zero, -128, 127)
    return ((codes - zero) * scale).astype(x.dtype)


def _token_zero_points(wide: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scales and zero points by which int8_by_token_asymmetric rounds activations, both float32[..., 1], one for
    each token (each vector of the last axis). With min at most 0 and max at least 0, a scale is (max - min) / 255, at
    least float32's eps, and a zero point -128 - round(min / scale), a whole number from -128 to 127. wide: float32[...,
    in], the activations."""
    low = jnp.minimum(wide.min(-1, keepdims=True), 0)
    high = jnp.maximum(wide.max(-1, keepdims=True), 0)
    scale = jnp.maximum(divide(high - low, jnp.full_like(low, 255)), jnp.finfo(jnp.float32).eps)
    return scale, jnp.clip(-128 - jnp.round(divide(low, scale)), -128, 127)


def fp8_by_token(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in] to e4m3 with one float32 scale for each token (each vector of the last axis), its
    largest magnitude / 448, as servers do with FP8 checkpoints whose activation scales are dynamic. QAT's format fp8
    rounds so. The result has x's dtype. `FakeQuant.round_inputs` adds the gradient."""
    return formats.FP8.encode(x.reshape(-1, x.shape[-1])).decode(x.dtype).reshape(x.shape)


def mxfp4_activations(x: jax.Array) -> jax.Array:
    """Rounds activations [..., in], `in` a multiple of 32, to MXFP4 with a scale for each block of 32 numbers, as
    compressed-tensors does in its scheme MXFP4 (MXFP4.encode_activations), for QAT's format mxfp4-mxfp4. The result has
    x's dtype. `FakeQuant.round_inputs` adds the gradient."""
    return formats.MXFP4.encode_activations(x).decode(x.dtype)


def nvfp4_activations(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Rounds activations [..., in], `in` a multiple of 16, to NVFP4 with a scale in e4m3 for each block of 16 numbers
    under the observed scale of the whole tensor, as compressed-tensors does in its scheme NVFP4
    (NVFP4.encode_activations), for QAT's format nvfp4-nvfp4. Numbers beyond what that scale allows, 448 * 6 / scale,
    become that bound. The result has x's dtype. `FakeQuant.round_inputs` adds the gradient. scale: float32[],
    input_global_scale of compressed-tensors' files, the observed scale (`nvfp4_scale`), by which the scales of blocks
    are divided."""
    return formats.NVFP4.encode_activations(x, scale).decode(x.dtype)


def nvfp4_scale(largest: jax.Array, dtype: str) -> jax.Array:
    """The scale for `nvfp4_activations`, float32[], of activations in `dtype` (its name) whose largest magnitude is
    `largest`, float32[]: 448 * 6 * (1 / largest), whose quotient and product are rounded to `dtype`; 1 where that is
    infinite, as for activations of zero. models/observed_inputs.py computes a linear's scale by it (Rounding.observed).
    """
    return formats.NVFP4.global_scale(largest, jnp.dtype(dtype))


# ---- the ranges, beyond which numbers are clipped


def between(numbers: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `numbers`: whether each number is between the least and the largest number
    of its grid. Clipped gradients of QAT pass only to those; the functions `within_...` here and in fake_quant.py call
    it. A number beyond a bound by no more than 2^-22 of the bound counts as between, because the rounding of a float32
    scale may add that. numbers: float32[...]. low, high: the bounds, float32, whose shapes broadcast to that of
    `numbers`."""
    slack = np.float32(2**-22)
    return (numbers >= low - slack * jnp.abs(low)) & (numbers <= high + slack * jnp.abs(high))


def within_stored(stored: formats.Stored, numbers: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `numbers`: whether each number's magnitude is at most the largest that a
    format of quantised weights has with the number's scale, compared as `between` does; clipped gradients pass only to
    those. stored: the numbers, encoded in the format, which must be one to which QAT rounds (Stored.largest). numbers:
    of any floating-point dtype."""
    largest = stored.largest()
    return between(numbers.astype(jnp.float32), -largest, largest)


def within_int8_by_token(x: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `x`, activations [..., in]: whether each number is between -128 and 127
    times the scale of int8_by_token; clipped gradients pass only to those. A token's largest magnitude is at 127.5
    scales, so a positive number of that magnitude is not in the range."""
    wide = x.astype(jnp.float32)
    scale = _token_scales(wide)
    return between(wide, -128 * scale, 127 * scale)


def within_int8_by_token_asymmetric(x: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `x`, activations [..., in]: whether each number is in the range of
    int8_by_token_asymmetric, from (-128 - zero point) to (127 - zero point) times the token's scale; clipped gradients
    pass only to those. The rounded zero point moves that range by up to half a scale to one side, so that the numbers
    nearest to the other end can be outside."""
    wide = x.astype(jnp.float32)
    scale, zero = _token_zero_points(wide)
    return between(wide, (-128 - zero) * scale, (127 - zero) * scale)


def within_fp8_by_token(x: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `x`, activations [..., in]: whether each number is in the range of
    fp8_by_token. All are, because the scale of each token follows from its largest magnitude. Quantisation-aware
    training with clipped gradients calls it, as it does for every format."""
    rows = x.reshape(-1, x.shape[-1])
    return within_stored(formats.FP8.encode(rows), rows).reshape(x.shape)


def within_mxfp4_activations(x: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `x`, activations [..., in]: whether each number is between -6 and 6 times
    the scale of its block of 32 numbers in MXFP4; clipped gradients pass only to those. Scales are powers of two, and a
    block's largest numbers can be outside, because they are below 7 times the scale, not below 6 times."""
    return within_stored(formats.MXFP4.encode_activations(x), x)


def within_nvfp4_activations(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns a bool array of the shape of `x`, activations [..., in]: whether each number is between -6 and 6 times
    the scale of its block of 16 numbers in NVFP4; clipped gradients pass only to those. Numbers are outside where the
    block's scale was rounded down to e4m3, and where they are larger than all that were observed, beyond 448 * 6 /
    scale. scale: float32[], the observed scale of the whole tensor, as in `nvfp4_activations`."""
    return within_stored(formats.NVFP4.encode_activations(x, scale), x)
