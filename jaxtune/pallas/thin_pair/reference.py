"""The two thin products in plain JAX, a GEMM each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def thin_pair(dout, b, inner):
    """(dout b [tokens, r], dout^T inner float32[out, r]), in plain JAX.

    dout, b, inner: [tokens, out], [out, r], [tokens, r].
    """
    precision = jax.lax.Precision.HIGHEST if dout.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = functools.partial(jax.lax.dot_general, dout, precision=precision)
    dinner = product(b.astype(dout.dtype), (((1,), (0,)), ((), ())), preferred_element_type=dout.dtype)
    return dinner, product(inner, (((0,), (0,)), ((), ())), preferred_element_type=b.dtype)
