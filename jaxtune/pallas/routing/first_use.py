"""Small cases on which kernels of the routing are compared with reference.py at their first use on a GPU. A kernel that
a driver or compiler breaks is then refused instead of used. `refusal` checks the copy of tokens to rows, `sort_refusal`
the sort; api.implementations and api.sort_implementations ask them."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.routing import reference

_TOKENS, _K, _HIDDEN = 203, 3, 192


def refusal(name: str, kernels: ModuleType) -> str | None:
    """Compares the function `spread` of the module `kernels`, which copies tokens to rows, with that of reference.py,
    on a small case in which some pairs (a token with one of its experts) have no expert and some rows are empty. A
    passed check is not repeated on this kind of GPU until software or kernels change (dispatch.first_use). Returns the
    reason, in words, why this GPU must not use `spread` of `kernels` (a difference or an error), or None if the two
    agree. Where nothing is compared, as without a GPU, or not yet, as within dispatch.built, the result is None. name:
    of the implementation, such as "mosaic"."""

    def compare():
        draw = np.random.default_rng(0)
        x = jnp.asarray(draw.standard_normal((_TOKENS, _HIDDEN)), jnp.bfloat16)
        # Pairs are in rows of any order with empty rows between them; some pairs have no expert.
        pairs, rows = _TOKENS * _K, 1024
        places = draw.permutation(rows)[:pairs].astype(np.int32)
        places[draw.permutation(pairs)[:40]] = rows
        source = np.full(rows, pairs, np.int32)
        source[places[places < rows]] = np.flatnonzero(places < rows)
        slots = places.reshape(_TOKENS, _K)

        def run(module, x, slots, source):
            return [module.spread(x, slots, source)]

        got = jax.jit(lambda *arrays: run(kernels, *arrays))(x, slots, source)
        return got, run(reference, x.astype(jnp.float32), jnp.asarray(slots), jnp.asarray(source))

    return dispatch.first_use("routing", name, "rows", compare)


def sort_refusal(name: str, passes: reference.Passes) -> str | None:
    """Compares the sort of a small case by the kernels in `passes` with one by the functions of reference.py. A passed
    check is not repeated on this kind of GPU until software or kernels change (dispatch.first_use). Returns the reason,
    in words, why this GPU must not use the kernels (a difference or an error), or None if the two agree. Where nothing
    is compared, as without a GPU, or not yet, as within dispatch.built, the result is None. The results of the sort are
    integers, so any difference counts.

    Args:
      name: of the implementation, such as "mosaic".
      passes: the implementation's two kernels and its block size, with which reference.sort_pairs is called.
    """

    def compare():
        expert = jnp.asarray(np.random.default_rng(0).integers(0, 97, 900), jnp.int32)  # 96: no expert
        own = reference.Passes(reference.BLOCK, reference.histogram, reference.slots)

        def run(passes):
            slots, source, groups = jax.jit(lambda e: reference.sort_pairs(e, 96, 8, passes))(expert)
            return slots, source, groups.tile_expert, groups.sizes

        want = run(own)
        # first_use's bound is relative, so results are 1 where equal and 2 where not.
        return [1.0 + (got != exact) for got, exact in zip(run(passes), want, strict=True)], [
            jnp.ones(exact.shape) for exact in want
        ]

    return dispatch.first_use("routing sort", name, "pairs", compare)
