"""Numbers of the cases that compare kernels with the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def normal_array(seed: int, *shape: int, dtype) -> jax.Array:
    """Normal random numbers; the same seed gives the same."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def in_float32(arrays):
    """The pytree with its floating-point arrays in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays)
