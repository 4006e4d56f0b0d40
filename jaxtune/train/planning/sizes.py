"""Bytes of a tree of arrays, from shapes alone, for forecasts before anything is loaded (`nbytes`)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def nbytes(tree) -> float:
    """Bytes of all arrays of a tree, which may be abstract (jax.ShapeDtypeStruct), counted whole and not per device:
    shape times item size, 0 for a tree without arrays. It is a float, as all bytes of the planner's forecasts are.
    Trained weights, optimizer states and a layer's values are counted by it."""
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))
