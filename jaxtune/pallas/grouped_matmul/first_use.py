"""The small case on which a kernel of the grouped product is compared with plain JAX at its first use on a GPU, so that
a kernel that gives wrong results there is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import reference
from jaxtune.pallas.grouped_matmul.layout import groups_of

_SIZES = (200, 0, 1, 128)  # rows of each expert
_SHAPE = (len(_SIZES), 384, 256)
_RANK = 8
_TOKENS = 150


def refusal(name: str, product: Callable, weight, *, gathering: bool = False) -> str | None:
    """Why this GPU must not run `product` (an error, or a difference from reference.product), or None.

    product: as reference.product; if `gathering`, with another argument, tokens.
    weight: a quantised weight, whose format a random weight gets; None: an array.
    gathering: also compare rows gathered from tokens, and narrow products.
    """

    def compare():
        draw = np.random.default_rng(0)
        groups = groups_of(jnp.asarray(_SIZES, jnp.int32), sum(_SIZES))
        occupied = np.zeros((groups.rows, 1))
        for start, size in zip(np.asarray(groups.starts()), _SIZES, strict=True):
            occupied[start : start + size] = 1

        def rows(size):
            return jnp.asarray(draw.standard_normal((groups.rows, size)) * occupied, jnp.bfloat16)

        tokens = jnp.asarray(np.where(occupied[:, 0], draw.integers(0, _TOKENS, groups.rows), _TOKENS), jnp.int32)

        values = jnp.asarray(draw.standard_normal(_SHAPE), jnp.bfloat16)
        stored: Any = values if weight is None else weight.random_like(_SHAPE, draw)
        results, cases = [], []
        for contract in (2, 1):
            x, u = rows(_SHAPE[contract]), rows(_RANK)
            sides = (_SHAPE[0], _SHAPE[3 - contract], _RANK)
            side = jnp.asarray(
                draw.standard_normal(sides if contract == 2 else (sides[0], *sides[:0:-1])), jnp.bfloat16
            )
            results.append(jax.jit(product, static_argnums=3)(x, stored, groups, contract, (u, side)))
            cases.append((x, stored, contract, (u, side), None))
            if gathering:
                x = x[:_TOKENS]
                results.append(jax.jit(product, static_argnums=3)(x, stored, groups, contract, (u, side), tokens))
                cases.append((x, stored, contract, (u, side), tokens))
                for columns in (64, 128) if contract == 2 else ():  # as thin products have, in other tiles
                    narrow = values[:, :columns]
                    results.append(jax.jit(product, static_argnums=3)(x, narrow, groups, 2, None, tokens))
                    cases.append((x, narrow, 2, None, tokens))

        def exact(case, contract):
            x, weight, extra, row_tokens = case
            wide = (weight if isinstance(weight, jax.Array) else weight.decode(jnp.float32)).astype(jnp.float32)
            thin = None if extra is None else tuple(operand.astype(jnp.float32) for operand in extra)
            return reference.product(reference.rows_of(x, row_tokens).astype(jnp.float32), wide, groups, contract, thin)

        contracts = [contract for _, _, contract, _, _ in cases]
        arrays = [(x, weight, extra, row_tokens) for x, weight, _, extra, row_tokens in cases]
        expected = dispatch.exactly(lambda arrays: [exact(*case) for case in zip(arrays, contracts, strict=True)])(
            arrays
        )
        return results, expected

    call = ("arrays" if weight is None else weight.kind) + (", gathering" if gathering else "")
    return dispatch.first_use("grouped_matmul", name, call, compare)
