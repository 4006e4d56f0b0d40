"""Small cases on which routing kernels are compared with reference.py at their first use on a GPU, so that a kernel
that a driver or compiler breaks is refused. A passed check is repeated only when software or kernels change.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.routing import reference

_TOKENS, _K, _HIDDEN = 203, 3, 192


def refusal(name: str, kernels: ModuleType) -> str | None:
    """Why this GPU must not use `kernels`' `spread` (a difference or an error), or None."""

    def compare():
        draw = np.random.default_rng(0)
        x = jnp.asarray(draw.standard_normal((_TOKENS, _HIDDEN)), jnp.bfloat16)
        # Pairs are in rows of any order with empty rows between them; some pairs have no expert.
        pairs, rows = _TOKENS * _K, 1024
        row_of_pair = draw.permutation(rows)[:pairs].astype(np.int32)
        row_of_pair[draw.permutation(pairs)[:40]] = rows
        source = np.full(rows, pairs, np.int32)
        source[row_of_pair[row_of_pair < rows]] = np.flatnonzero(row_of_pair < rows)
        slots = row_of_pair.reshape(_TOKENS, _K)

        def run(module, x, slots, source):
            return [module.spread(x, slots, source)]

        results = jax.jit(lambda *arrays: run(kernels, *arrays))(x, slots, source)
        return results, run(reference, x.astype(jnp.float32), jnp.asarray(slots), jnp.asarray(source))

    return dispatch.first_use("routing", name, "rows", compare)


def sort_refusal(name: str, passes: reference.Passes) -> str | None:
    """Why this GPU must not sort with `passes` (a difference or an error), or None."""

    def compare():
        expert = jnp.asarray(np.random.default_rng(0).integers(0, 97, 900), jnp.int32)  # 96: no expert
        reference_passes = reference.Passes(reference.BLOCK, reference.histogram, reference.slots)

        def run(passes):
            slots, source, groups = jax.jit(lambda e: reference.sort_pairs(e, 96, 8, passes))(expert)
            return slots, source, groups.tile_expert, groups.sizes

        expected = run(reference_passes)
        # first_use's bound is relative, so results are 1 where equal and 2 where not.
        return [1.0 + (result != exact) for result, exact in zip(run(passes), expected, strict=True)], [
            jnp.ones(exact.shape) for exact in expected
        ]

    return dispatch.first_use("routing sort", name, "pairs", compare)
