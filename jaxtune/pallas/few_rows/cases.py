"""The numbers of the small cases on which this package's kernels (api.py, experts.py) are compared with the reference
at their first use on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def drawn(seed: int, *shape: int, dtype) -> jax.Array:
    """An array of this shape and dtype with normal random numbers, an operand of the small case on which a kernel is
    compared with the reference. seed: of the random key; the same seed gives the same numbers."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def wide(arrays):
    """Returns a pytree of arrays with its floating-point arrays cast to float32 and the others unchanged, because the
    reference's results for a check are computed in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays)
