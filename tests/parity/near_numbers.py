"""Numbers for the comparisons of a decoding step's kernels, and the bound within which results must agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, scale=1.0, dtype=jnp.float16):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def near(got, want, bound=2e-3):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)
