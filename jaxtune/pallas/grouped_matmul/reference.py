"""Grouped products in plain jnp, tile by tile, each with its expert's weight. Accumulation is in fp32; fp32 operands
are multiplied in full fp32.

Thin products, those with an adapter's A or B, are one batched product over the tiles. All implementations except
mosaic.py use them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.pallas.grouped_matmul.layout import Groups

_THIN = 256  # up to this width, results per tile are stored and then summed by expert


def _precision(dtype):
    """The precision of matrix products of operands in this dtype: full float32 for float32, XLA's default otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rows_of(array: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Gathers rows: array [T, n] at tokens int32[rows], with zeros where a token is T (an empty row); the array itself
    if tokens is None, because its rows are sorted already."""
    return array if tokens is None else array.at[tokens].get(mode="fill", fill_value=0)


def tiled(rows: jax.Array, groups: Groups) -> jax.Array:
    """Reshapes rows [tiles * tile_rows, n] to [tiles, tile_rows, n]. The rows must be sorted by expert and padded
    already, so that all rows of a tile belong to one expert, which is `groups.tile_expert`; `groups` gives only the
    sizes here."""
    return rows.reshape(groups.tiles, groups.tile_rows, -1)


def per_tile(values: jax.Array, groups: Groups) -> jax.Array:
    """values [E, ...] -> [tiles, ...]: for each tile of rows of `groups` the value of its expert. Empty tiles, which
    have no expert, get the last expert's; their rows are zero."""
    return values.at[groups.tile_expert].get(mode="clip")


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """values float32[tiles, ...] -> float32[E, ...]: sums over each expert's tiles in `groups`, as a matrix product,
    which has a fixed order."""
    experts = jnp.arange(groups.num_experts, dtype=jnp.int32)
    member = (groups.tile_expert == experts[:, None]).astype(jnp.float32)
    return jnp.tensordot(member, values, 1, precision=jax.lax.Precision.HIGHEST)


def thin(x: jax.Array, weight: jax.Array, groups: Groups, contract: int) -> jax.Array:
    """The product of rows x [rows, K], sorted as `groups` says, with thin weights, such as an adapter's A or B: each
    expert's weight is [E, n, K] (contract = 2) or [E, K, n] (contract = 1) -> [rows, n] in x's dtype. It is one
    batched product over the tiles, for which each tile gets a copy of its expert's weight."""
    weight = per_tile(weight.astype(x.dtype), groups)
    out = jax.lax.dot_general(
        tiled(x, groups),
        weight,
        (((2,), (contract,)), ((0,), (0,))),
        precision=_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    return out.reshape(groups.rows, -1)


def product(x: jax.Array, weight: jax.Array, groups: Groups, contract: int, extra=None) -> jax.Array:
    """The grouped product, tile by tile: x [rows, K] times each expert's weight [E, n, K] (contract = 2) or [E, K, n]
    (contract = 1) -> [rows, n] in x's dtype.

    Args:
      x: rows sorted as `groups` says.
      weight: an array in x's dtype.
      groups: of the rows.
      contract: the axis of the weight that is summed over.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's.
    """

    def one(tile):
        rows, expert = tile
        return jax.lax.dot_general(
            rows,
            weight.at[expert].get(mode="clip"),
            (((1,), (contract - 1,)), ((), ())),
            precision=_precision(x.dtype),
            preferred_element_type=x.dtype,
        )

    out = jax.lax.map(one, (tiled(x, groups), groups.tile_expert)).reshape(groups.rows, -1)
    if extra is None:
        return out
    u, side = extra
    return out + thin(u, side, groups, contract)


def contract_rows(left: jax.Array, right: jax.Array, groups: Groups, dtype, sums: Callable = per_expert) -> jax.Array:
    """left [rows, p], right [rows, q] -> [E, p, q] in `dtype`: left_e^T right_e over the rows of each expert of
    `groups`, the gradient of a weight or an adapter.

    Empty rows must be zero on one side and finite on the other. If a side is thin, products of tiles are stored and
    `sums` adds them by expert, as `per_expert` does.
    """
    left, right = tiled(left, groups), tiled(right, groups)

    def one(a, b):
        return jax.lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), precision=_precision(a.dtype), preferred_element_type=jnp.float32
        )

    if min(left.shape[2], right.shape[2]) <= _THIN:
        return sums(jax.vmap(one)(left, right), groups).astype(dtype)

    def add(total, tile):
        a, b, expert = tile
        return total.at[expert].add(one(a, b), mode="drop"), None

    start = jnp.zeros((groups.num_experts, left.shape[2], right.shape[2]), jnp.float32)
    return jax.lax.scan(add, start, (left, right, groups.tile_expert))[0].astype(dtype)
