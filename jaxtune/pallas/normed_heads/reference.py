"""The RMS norm over the last axis (`normed`, and its factor of each row, `inverse_rms`) and the rotation of heads by
their positions (`rotated`) in plain JAX. The rotation has a derivative of its own. The kernels are compared with norm
and rotation, and calls that they refuse run them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def normed(x, weight, eps, offset, float32):
    """The RMS norm of x over its last axis, in x's dtype and shape.

    Args:
      x: [..., size].
      weight: [size].
      eps: the number that is added to the mean square.
      offset: the number that is added to the weight; it is ignored if float32 is False.
      float32: True: the normed numbers times the weight are rounded once, to x's dtype. False: the normed numbers and
        the weight are rounded to x's dtype first, and the product again.
    """
    wide = x.astype(jnp.float32)
    wide = wide * inverse_rms(wide, eps)
    if float32:
        weight = weight.astype(jnp.float32)
        return (wide * (offset + weight if offset else weight)).astype(x.dtype)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


def inverse_rms(x, eps) -> jax.Array:
    """The inverse root mean square of x over its last axis, float32[..., 1], by which the RMS norm multiplies x.
    A caller that is differentiated and reads x in float32 elsewhere gives it that float32 array, so that the gradients
    of both uses are added in float32.

    Args:
      x: [..., size].
      eps: the number that is added to the mean square.
    """
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotated(interleaved, x, cos, sin):
    """Rotates x [B, T, heads, D] by cos and sin, float32[B, T, rotary_dim / 2]: computed in float32, returned in x's
    dtype, with dimensions beyond rotary_dim unchanged. It has a derivative of its own, one pass over memory, where
    jax.vjp would pad and add the gradients of slices; cos and sin get no gradient.

    interleaved: True: the numbers 2i and 2i + 1 of a head are a pair; False: i and i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = (part[:, :, None, :] for part in (cos, sin))
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    parts = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    if interleaved:
        parts = [jnp.stack(parts, axis=-1).reshape(*x.shape[:-1], 2 * half)]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)


def _rotated_fwd(interleaved, x, cos, sin):
    """The forward rule of `rotated`, with its arguments (interleaved, which is static, x [B, T, heads, D], cos and sin
    float32[B, T, rotary_dim / 2]): (x rotated by cos and sin, the residuals (cos, sin) for the backward rule)."""
    return rotated(interleaved, x, cos, sin), (cos, sin)


def _rotated_bwd(interleaved, table, dout):
    """The backward rule of `rotated`. It returns (the gradient of x, None for cos, None for sin); the gradient is dout
    rotated by the opposite angle, [B, T, heads, D] in dout's dtype. It is one pass over memory, where jax.vjp would pad
    the gradients of slices and add them. interleaved: that of the forward. table: the residuals (cos, sin) of the
    forward, float32[B, T, rotary_dim / 2]. dout: the gradient of the rotated x."""
    cos, sin = table
    return rotated(interleaved, dout, cos, -sin), None, None


rotated.defvjp(_rotated_fwd, _rotated_bwd)
