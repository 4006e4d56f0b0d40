"""Bytes of trees of arrays, from shapes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def nbytes(tree) -> float:
    """Bytes of all arrays of a tree, which may be abstract; whole arrays, not per device."""
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))
