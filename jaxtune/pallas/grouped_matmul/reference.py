"""Grouped products in plain jnp: rows are sorted by expert and divided into tiles of rows that belong to one expert,
and each tile is multiplied by the weight of its expert. Sums are float32; float32 operands are multiplied in full
float32.

Products with an adapter's A or B, which are thin (one side is the rank), are one batched product over the tiles. All
implementations except mosaic.py use the function `thin` for them.

`product` multiplies rows by weights, and `contract_rows` computes the gradients of weights and adapters. `rows_of`
gathers rows of tokens, and `tiled` divides rows into tiles; `per_tile` copies values of experts to their tiles, and
`per_expert` adds values of tiles up by expert.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.pallas.grouped_matmul.layout import Groups

_THIN = 256  # up to this width, results per tile are stored and then summed by expert


def _precision(dtype):
    """The precision of matrix products of operands in `dtype`, for jax.lax.dot_general: full float32 for float32, which
    a GPU would otherwise multiply in TF32, and XLA's default for other dtypes. `thin`, `product` and `contract_rows`
    call it."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rows_of(array: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Gathers the rows that a grouped product multiplies: array [T, n] at tokens int32[rows] -> [rows, n]. A token of T
    stands for an empty row, which is padding and becomes zeros. If tokens is None, the array's rows are sorted by
    expert already, and it is returned unchanged. The gradients of weights and adapters and the products in FP8 use it
    where no kernel gathers."""
    return array if tokens is None else array.at[tokens].get(mode="fill", fill_value=0)


def tiled(rows: jax.Array, groups: Groups) -> jax.Array:
    """Reshapes rows [tiles * tile_rows, n] to [tiles, tile_rows, n], so that products and sums can treat each tile with
    the values of its expert. The rows must be sorted by expert and padded already, so that all rows of a tile belong to
    one expert. `groups` gives the number of tiles and the rows of a tile; the expert of each tile is
    groups.tile_expert, which is not needed here."""
    return rows.reshape(groups.tiles, groups.tile_rows, -1)


def per_tile(values: jax.Array, groups: Groups) -> jax.Array:
    """Copies a value of each expert, such as its weight, to each of its tiles: values [E, ...] -> [tiles, ...].
    `groups` says which expert each tile of rows belongs to. Empty tiles, which have no expert, get the last expert's
    value. Thin products multiply by the copies, grouped_bias adds them, and fp8_experts.py scales rows by them."""
    return values.at[groups.tile_expert].get(mode="clip")


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """values float32[tiles, ...] -> float32[E, ...]: the sums of the values of each expert's tiles; groups.tile_expert
    is the expert of each tile. It is a matrix product with zeros and ones, so that the order of the sums, and with it
    the result, is the same in each run. Tiles without an expert are in no sum. It adds up the tiles' shares of
    gradients: those of biases, and in contract_rows those of adapters and small weights."""
    experts = jnp.arange(groups.num_experts, dtype=jnp.int32)
    member = (groups.tile_expert == experts[:, None]).astype(jnp.float32)
    return jnp.tensordot(member, values, 1, precision=jax.lax.Precision.HIGHEST)


def thin(x: jax.Array, weight: jax.Array, groups: Groups, contract: int) -> jax.Array:
    """Multiplies rows by thin weights, such as an adapter's A or B, each row by the weight of its expert: -> [rows, n]
    in x's dtype. It is one batched product over the tiles, for which each tile gets a copy of its expert's weight; a
    thin weight is small enough for that. `product` calls it, and so do the forward and the backward of grouped_matmul.

    Args:
      x: [rows, K], sorted by expert as `groups` says.
      weight: [E, n, K] if contract is 2, or [E, K, n] if contract is 1; it is cast to x's dtype.
      groups: which expert each tile of rows belongs to.
      contract: the axis of `weight` that is summed over, K's: 1 or 2.
    """
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
    """Multiplies each row of x [rows, K] by the weight of its expert, tile by tile: -> [rows, n] in x's dtype. This
    implementation supports every call. The others have these arguments too, and some have more.

    Args:
      x: rows sorted by expert as `groups` says.
      weight: [E, n, K] if contract is 2, or [E, K, n] if contract is 1, in x's dtype.
      groups: which expert each tile of rows belongs to.
      contract: the axis of `weight` that is summed over, K's: for weights [E, out, in] it is 2 in the forward and 1 for
        the gradient of x; for transposed ones [E, in, out] it is 1 and 2.
      extra: None, or two operands of an adapter, whose product, rounded to x's dtype, is added to the result: u [rows,
        r] in x's dtype, and for each expert [E, n, r] (contract = 2) or [E, r, n] (contract = 1). In the forward they
        are scale x A^T and B, for the gradient of x scale dy B and A.
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
    """left [rows, p], right [rows, q] -> [E, p, q] in `dtype`: for each expert, left^T right over the rows of that
    expert. This is the gradient of an expert's weight, or of an adapter's A or of its B transposed, from the rows that
    were multiplied and the gradients of their products. An expert without rows gets zeros. The backward of
    grouped_matmul calls it where no kernel of mosaic_contract.py does this.

    Args:
      left, right: rows sorted by expert and padded as `groups` says. Rows without a token must be zero in one of the
        two and finite in the other.
      groups: which expert each tile of rows belongs to.
      dtype: of the result; sums are float32.
      sums: a function like `per_expert` of (values float32[tiles, p, q], groups), which returns the sums over each
        expert's tiles, float32[E, p, q]. It is used if p or q is at most 256: then the products of single tiles are
        stored first. Otherwise they are added to the result one by one.
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
