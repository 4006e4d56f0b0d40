"""Grouped products in plain jnp: each tile of rows is multiplied by the weight of its expert. Sums are float32; float32
operands are multiplied in full float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order
from jaxtune.pallas.grouped_matmul.layout import Groups

_THIN = 256  # up to this width, results per tile are stored and then summed by expert


def _precision(dtype):
    """Full float32 for float32, which a GPU would otherwise multiply in TF32; else XLA's default."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rows_of(array: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """array [T, n] at tokens int32[rows] -> [rows, n], zeros for the token T; tokens None: the array itself."""
    return array if tokens is None else array.at[tokens].get(mode="fill", fill_value=0)


def tiled(rows: jax.Array, groups: Groups) -> jax.Array:
    """[tiles * tile_rows, n] -> [tiles, tile_rows, n]."""
    return rows.reshape(groups.tiles, groups.tile_rows, -1)


def per_tile(values: jax.Array, groups: Groups) -> jax.Array:
    """Each tile's expert's value: [E, ...] -> [tiles, ...]. Empty tiles get the last expert's."""
    return values.at[groups.tile_expert].get(mode="clip")


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """The sums of each expert's tiles: float32[tiles, ...] -> float32[E, ...], as a matrix product with zeros and ones,
    so that the order is the same in each run. Tiles without an expert are in no sum.
    """
    experts = jnp.arange(groups.num_experts, dtype=jnp.int32)
    member = (groups.tile_expert == experts[:, None]).astype(jnp.float32)
    return jnp.tensordot(member, values, 1, precision=jax.lax.Precision.HIGHEST)


def thin(x: jax.Array, weight: jax.Array, groups: Groups, contract: int) -> jax.Array:
    """Rows times thin weights of their experts, such as an adapter's A or B: [rows, n] in x's dtype. One batched
    product over the tiles, each with a copy of its expert's weight.

      x: [rows, K], sorted by expert.
      weight: [E, n, K] (contract = 2) or [E, K, n] (contract = 1); cast to x's dtype.
    """
    weight = per_tile(weight.astype(x.dtype), groups)
    if one_order.is_exact() and contract == 2:
        return (
            jax.lax.map(lambda tile: one_order.product(*tile), (tiled(x, groups), weight))
            .astype(x.dtype)
            .reshape(groups.rows, -1)
        )
    out = jax.lax.dot_general(
        tiled(x, groups),
        weight,
        (((2,), (contract,)), ((0,), (0,))),
        precision=_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    return out.reshape(groups.rows, -1)


def product(x: jax.Array, weight: jax.Array, groups: Groups, contract: int, extra=None) -> jax.Array:
    """Each row of x times the weight of its expert, tile by tile: [rows, n] in x's dtype. It supports every call.

    x: [rows, K], sorted by expert.
    weight: [E, n, K] (contract = 2) or [E, K, n] (contract = 1), in x's dtype. Of [E, out, in] contract is 2 in the
    forward, 1 for x's gradient; of [E, in, out] the reverse.
    extra: None, or an adapter's u [rows, r] and [E, n, r] or [E, r, n], whose product, rounded to x's dtype, is
    added: in the forward scale x A^T and B, for x's gradient scale dy B and A. In one order it is part of the sum,
    behind the columns of x, as the kernels compute it.
    """
    exact = one_order.is_exact() and contract == 2
    if exact and extra is not None:
        x, weight = (jnp.concatenate(pair, axis=-1) for pair in ((x, extra[0]), (weight, extra[1].astype(x.dtype))))
        extra = None

    def tile_product(tile):
        rows, expert = tile
        if exact:
            return one_order.product(rows, weight.at[expert].get(mode="clip")).astype(x.dtype)
        return jax.lax.dot_general(
            rows,
            weight.at[expert].get(mode="clip"),
            (((1,), (contract - 1,)), ((), ())),
            precision=_precision(x.dtype),
            preferred_element_type=x.dtype,
        )

    out = jax.lax.map(tile_product, (tiled(x, groups), groups.tile_expert)).reshape(groups.rows, -1)
    if extra is None:
        return out
    u, side = extra
    return out + thin(u, side, groups, contract)


def contract_rows(left: jax.Array, right: jax.Array, groups: Groups, dtype, sums: Callable = per_expert) -> jax.Array:
    """left [rows, p], right [rows, q] -> [E, p, q] in `dtype`: left^T right over each expert's rows, in float32; zeros
    for an expert without rows.

      left, right: sorted by expert. Rows without a token must be zero in one and finite in the other.
      sums: adds up tiles by expert, as `per_expert` does; called if p or q is at most 256, otherwise single tiles'
      products are added one by one.
    """
    left, right = tiled(left, groups), tiled(right, groups)

    def tile_gradient(a, b):
        return jax.lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), precision=_precision(a.dtype), preferred_element_type=jnp.float32
        )

    if min(left.shape[2], right.shape[2]) <= _THIN:
        return sums(jax.vmap(tile_gradient)(left, right), groups).astype(dtype)

    def add(total, tile):
        a, b, expert = tile
        return total.at[expert].add(tile_gradient(a, b), mode="drop"), None

    start = jnp.zeros((groups.num_experts, left.shape[2], right.shape[2]), jnp.float32)
    return jax.lax.scan(add, start, (left, right, groups.tile_expert))[0].astype(dtype)
