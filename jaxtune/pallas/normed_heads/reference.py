"""RMS norm over the last axis, and rotation of heads by position, in plain JAX; the rotation has a derivative of its
own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order


def normed(x, weight, eps, offset, float32):
    """RMS norm of x [..., size] over its last axis, in x's dtype.

    offset: added to the weight; ignored unless float32.
    float32: True: the normed numbers times the weight are rounded once. False: both are rounded to x's dtype first,
      and the product again.
    eps: added to the mean square.
    weight: [size].
    """
    if one_order.runs_kernels():
        out: jax.Array = _normed_by_kernel(x, weight, eps, offset, float32)
        return out
    return _normed(x, weight, eps, offset, float32)


def _normed(x, weight, eps, offset, float32):
    x32 = x.astype(jnp.float32)
    x32 = x32 * inverse_rms(x32, eps)
    if float32:
        weight = weight.astype(jnp.float32)
        return (x32 * (offset + weight if offset else weight)).astype(x.dtype)
    return x32.astype(x.dtype) * weight.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _normed_by_kernel(x, weight, eps, offset, float32):
    return one_order.triton.normed(x, weight, eps, offset, float32)


def _normed_fwd(x, weight, eps, offset, float32):
    return _normed_by_kernel(x, weight, eps, offset, float32), (x, weight)


def _normed_bwd(eps, offset, float32, residuals, dout):
    return jax.vjp(lambda x, weight: _normed(x, weight, eps, offset, float32), *residuals)[1](dout)


_normed_by_kernel.defvjp(_normed_fwd, _normed_bwd)


def inverse_rms(x, eps) -> jax.Array:
    """Inverse root mean square of x over its last axis, float32[..., 1].

    A differentiated caller that reads x in float32 elsewhere passes that array, so that both uses' gradients are added
    in float32.
    """
    x32 = x.astype(jnp.float32)
    if one_order.is_exact() and not one_order.runs_kernels():
        return jax.lax.rsqrt(one_order.total(x32 * x32)[..., None] / x.shape[-1] + eps)
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotated(interleaved, x, cos, sin):
    """Rotates x [B, T, heads, D] by cos and sin, float32[B, T, rotary_dim / 2], in float32; result in x's dtype,
    dimensions beyond rotary_dim unchanged. Its derivative is one pass over memory, where jax.vjp would pad and add
    gradients of slices; cos and sin get none.

      interleaved: True: numbers 2i and 2i + 1 of a head are a pair; False: i and i + rotary_dim / 2.
    """
    if one_order.runs_kernels() and not interleaved and 2 * cos.shape[-1] == x.shape[-1]:
        return one_order.triton.heads(x, None, cos, sin, 0.0, 0.0, True)
    half = cos.shape[-1]
    cos, sin = (angles[:, :, None, :] for angles in (cos, sin))
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    halves = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    if interleaved:
        halves = [jnp.stack(halves, axis=-1).reshape(*x.shape[:-1], 2 * half)]
    if x.shape[-1] > 2 * half:
        halves.append(x[..., 2 * half :])
    return jnp.concatenate(halves, axis=-1)


def _rotated_fwd(interleaved, x, cos, sin):
    return rotated(interleaved, x, cos, sin), (cos, sin)


def _rotated_bwd(interleaved, table, dout):
    cos, sin = table
    return rotated(interleaved, dout, cos, -sin), None, None


rotated.defvjp(_rotated_fwd, _rotated_bwd)
