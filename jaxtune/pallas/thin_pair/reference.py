"""The two thin products of an adapter's backward in plain JAX. XLA calls the vendor's matrix product (GEMM) for each,
and each reads the gradient of the output."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def thin_pair(dout, b, inner):
    """Returns (dout b in dout's dtype, dout^T inner in b's dtype), the two products of api.thin_pair, each computed by
    one GEMM with float32 sums. Operands in float32 are multiplied in full float32, not in TF32. The arguments are those
    of api.thin_pair."""
    precision = jax.lax.Precision.HIGHEST if dout.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = functools.partial(jax.lax.dot_general, dout, precision=precision)
    dinner = product(b.astype(dout.dtype), (((1,), (0,)), ((), ())), preferred_element_type=dout.dtype)
    return dinner, product(inner, (((0,), (0,)), ((), ())), preferred_element_type=b.dtype)
