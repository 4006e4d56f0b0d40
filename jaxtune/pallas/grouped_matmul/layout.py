"""The layout of rows sorted by expert, Groups, in which every expert starts at a whole tile of rows, and `groups_of`,
which computes it from the experts' numbers of rows.

A tile of rows then belongs to one expert, whatever the sizes of the groups: kernels need no masks and store whole
tiles, and the rows of an expert are contracted tile by tile. The price is half a tile of empty rows per expert on
average, which are zero; kernels skip the tiles at the end that no expert needs. `divided` is a division of integers of
which XLA makes few operations; routing finds the tokens of rows by it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE_ROWS = 128  # rows that two warpgroups multiply at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which expert each tile of rows belongs to, for a buffer of rows that are sorted by expert. Each expert's rows are
    padded with empty rows to whole tiles of `tile_rows` rows, so that every expert starts at a whole tile. Experts
    without rows have no tile, and tiles that no expert needs are at the end. `groups_of` makes it, for routing.route;
    grouped_matmul, grouped_bias and the products of routing take it."""

    tile_expert: jax.Array  # int32[tiles]: the expert of each tile, ascending; E for the empty tiles at the end
    count: jax.Array  # int32[]: the number of tiles that have an expert
    tile_sizes: jax.Array  # int32[tiles]: how many of each tile's rows, its first ones, are not empty
    sizes: jax.Array  # int32[E]: the number of each expert's rows, without the empty ones
    tile_rows: int = dataclasses.field(metadata=dict(static=True))  # the number of rows of a tile

    @property
    def num_experts(self) -> int:
        """The number of experts, E, those without rows included; it is known while tracing. The gradients of weights
        and adapters have this first dimension."""
        return self.sizes.shape[0]

    @property
    def tiles(self) -> int:
        """The number of tiles of the buffer, including the empty ones at the end; it is known while tracing, whatever
        the routing. Rows that are divided into tiles (reference.tiled) have this first dimension."""
        return self.tile_expert.shape[0]

    @property
    def rows(self) -> int:
        """The number of rows of the sorted buffer, including the empty ones; it is known while tracing. The arrays of
        sorted rows have this first dimension."""
        return self.tiles * self.tile_rows

    def starts(self) -> jax.Array:
        """int32[E]: the index in the sorted buffer of each expert's first row. For an expert without rows it is the row
        after the tiles of the experts before it, which may be past the end of the buffer. The sort of routing places
        rows by it, and the kernel of weights' gradients (mosaic_contract.weight_gradient) reads an expert's rows."""
        return _first_tiles(self.sizes, self.tile_rows) * self.tile_rows


def divided(numbers: jax.Array, by: int) -> jax.Array:
    """Returns numbers // by, in the dtype of `numbers`. numbers: an array of integers that are not negative. by: a
    positive int, the divisor.

    For a power of two it is a shift, else jax.lax.div. `//` tests every number's sign, and XLA makes six operations of
    it. A layer of experts has several divisions, and XLA compiles each separately: `_tiles` divides numbers of rows,
    and routing divides the numbers of pairs to find their tokens.
    """
    divisor = jnp.asarray(by, numbers.dtype)
    if by & (by - 1):
        return jax.lax.div(numbers, divisor)
    return jax.lax.shift_right_logical(numbers, jnp.asarray(by.bit_length() - 1, numbers.dtype))


def _tiles(sizes, tile_rows):
    """int32[E]: how many tiles each expert needs, which is its number of rows over `tile_rows`, rounded up; 0 for an
    expert without rows. `groups_of` and `_first_tiles` number tiles by it. sizes: int32[E], the number of each expert's
    rows. tile_rows: the number of rows of a tile."""
    return divided(sizes + (tile_rows - 1), tile_rows)


def ends_of(counts):
    """int32[E]: the number of the tile after each expert's last one, which is the sum of the tiles of this expert and
    those before it. counts: int32[E], the experts' numbers of tiles (or, for gated_thin.py, of chunks of tiles). The
    cumulative sum is computed by comparisons, of which XLA makes a third of the operations of a windowed sum, in one
    kernel. `groups_of` and `_first_tiles` call it."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] >= index, counts, 0).sum(1, dtype=jnp.int32)


def _first_tiles(sizes, tile_rows):
    """int32[E]: the number of each expert's first tile, counted over the whole buffer; Groups.starts computes rows from
    it. For an expert without rows it is the tile after those of the experts before it. sizes: int32[E], the number of
    each expert's rows. tile_rows: the number of rows of a tile."""
    tiles = _tiles(sizes, tile_rows)
    return ends_of(tiles) - tiles


def groups_of(sizes: jax.Array, max_rows: int, tile_rows: int = TILE_ROWS) -> Groups:
    """Makes the layout of rows that are sorted by expert, from the numbers of rows that experts have. The sort of
    routing.route calls it, and so do the tuner and the checks of kernels, for rows of their own, and `jaxtune info
    --kernels`.

    Args:
      sizes: int32[E], the number of each expert's rows.
      max_rows: an upper bound of the sum of `sizes` that is known while tracing; it is not checked. There are as many
        tiles as any sizes within this bound can need, because shapes must not depend on `sizes`.
      tile_rows: the number of rows of a tile.
    """
    experts = sizes.shape[0]
    # The largest possible sum of ceil(size / tile_rows).
    tiles = min((max_rows + experts * (tile_rows - 1)) // tile_rows, max_rows)
    sizes = sizes.astype(jnp.int32)
    of_group = _tiles(sizes, tile_rows)
    ends = ends_of(of_group)
    index = jnp.arange(tiles, dtype=jnp.int32)
    tile_expert = (index[:, None] >= ends).sum(1, dtype=jnp.int32)  # the number of experts that end before this tile
    lasts = (ends - of_group) * tile_rows + sizes  # the row after each expert's last
    lasts = jnp.append(lasts, 0)  # for the empty tiles
    left = lasts.at[tile_expert].get(mode="promise_in_bounds", wrap_negative_indices=False) - index * tile_rows
    return Groups(tile_expert, ends[-1], jnp.clip(left, 0, tile_rows), sizes, tile_rows)
