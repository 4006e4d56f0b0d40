"""The small case on which the kernels are compared with the reference at their first use on a GPU."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.routing import reference

_TOKENS, _K, _HIDDEN = 203, 3, 192


def refusal(name: str, kernels: ModuleType) -> str | None:
    """Why this GPU must not run `kernels`, or None."""

    def compare():
        draw = np.random.default_rng(0)
        x = jnp.asarray(draw.standard_normal((_TOKENS, _HIDDEN)), jnp.bfloat16)
        index = jnp.asarray(draw.integers(0, _TOKENS + 30, 1024), jnp.int32).at[-200:].set(_TOKENS)
        index = jnp.minimum(index, _TOKENS)
        slots = jnp.minimum(jnp.asarray(draw.integers(0, 1100, (_TOKENS, _K)), jnp.int32), 1024)

        def run(module, x, index, slots):
            rows = module.rows_of(x, index)
            return rows, module.summed(rows, slots)

        got = jax.jit(lambda *arrays: run(kernels, *arrays))(x, index, slots)
        return got, run(reference, x.astype(jnp.float32), index, slots)

    return dispatch.first_use("routing", name, "rows", compare)
