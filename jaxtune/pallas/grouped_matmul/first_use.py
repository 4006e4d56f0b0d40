"""The small case on which a kernel is compared with the reference at its first use on a GPU (dispatch.first_use)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import mosaic, mosaic_contract, reference
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import FourBit
from jaxtune.pallas.quant_matmul.mosaic import random_like

_SIZES = (200, 0, 1, 128)  # rows of each expert
_SHAPE = (len(_SIZES), 384, 256)
_RANK = 8


def refusal(name: str, product: Callable, weight) -> str | None:
    """Why this GPU must not run `product` (an implementation of reference.product), or None; weight: as stored."""
    kind = None if weight is None else type(weight)

    def compare():
        draw = np.random.default_rng(0)
        groups = groups_of(jnp.asarray(_SIZES, jnp.int32), sum(_SIZES))
        held = np.zeros((groups.rows, 1))
        for start, size in zip(np.asarray(groups.starts()), _SIZES, strict=True):
            held[start : start + size] = 1

        def rows(size):
            return jnp.asarray(draw.standard_normal((groups.rows, size)) * held, jnp.bfloat16)

        values = jnp.asarray(draw.standard_normal(_SHAPE), jnp.bfloat16)
        stored: Any = values if kind is None else random_like(weight, _SHAPE, draw)
        exact = (values if kind is None else stored.decode(jnp.float32)).astype(jnp.float32)
        got, want = [], []
        for contract in (2, 1):
            x, u = rows(_SHAPE[contract]), rows(_RANK)
            sides = (_SHAPE[0], _SHAPE[3 - contract], _RANK)
            side = jnp.asarray(
                draw.standard_normal(sides if contract == 2 else (sides[0], *sides[:0:-1])), jnp.bfloat16
            )
            got.append(jax.jit(product, static_argnums=3)(x, stored, groups, contract, (u, side)))
            wide = (x.astype(jnp.float32), exact, groups, contract)
            want.append(reference.product(*wide, (u.astype(jnp.float32), side.astype(jnp.float32))))
        return got, want

    call = "arrays" if kind is None else kind.__name__
    if isinstance(weight, FourBit) and weight.nested_absmax is None:
        call += ", float32 absmax"
    return dispatch.first_use("grouped_matmul", name, call, compare)


def gather_refusal(dtype) -> str | None:
    """Why this GPU must not run the products that gather their rows, or None."""

    def compare():
        draw = np.random.default_rng(0)
        groups = groups_of(jnp.asarray(_SIZES, jnp.int32), sum(_SIZES))
        count = 150
        tokens = np.full(groups.rows, count, np.int32)
        for start, size in zip(np.asarray(groups.starts()), _SIZES, strict=True):
            tokens[start : start + size] = draw.integers(0, count, size)
        held = jnp.asarray((tokens < count)[:, None], jnp.float32)
        x = jnp.asarray(draw.standard_normal((count, _SHAPE[2])), dtype)
        weight = jnp.asarray(draw.standard_normal(_SHAPE), dtype)
        u = (jnp.asarray(draw.standard_normal((groups.rows, 64)), jnp.float32) * held).astype(dtype)
        side = jnp.asarray(draw.standard_normal((*_SHAPE[:2], 64)), dtype)
        rows = x.astype(jnp.float32).at[tokens].get(mode="fill", fill_value=0)
        got = jax.jit(lambda x, tokens: mosaic.product(x, weight, groups, 2, (u, side), tokens=tokens))(x, tokens)
        want = reference.product(
            rows, weight.astype(jnp.float32), groups, 2, (u.astype(jnp.float32), side.astype(jnp.float32))
        )
        sums = jax.jit(lambda x, tokens: mosaic_contract.contract_rows(u, x, groups, 64, tokens))(x, tokens)
        return [got, sums], [want, reference.contract_rows(u.astype(jnp.float32), rows, groups, jnp.float32)]

    return dispatch.first_use("grouped_matmul", "gather", jnp.dtype(dtype).name, compare)
