"""The layout of rows sorted by expert, in which every expert starts at a whole tile.

A tile of rows then belongs to one expert, whatever the sizes of the groups: kernels need no masks and store whole
tiles, and the rows of an expert are contracted tile by tile. The price is half a tile of empty rows per expert on
average, which are zero.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE_ROWS = 128  # rows that two warpgroups multiply at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which expert each tile of rows belongs to, for rows that are sorted by expert and padded so that every expert
    starts at a whole tile."""

    tile_expert: jax.Array  # int32[tiles], ascending; the number of experts E for empty tiles at the end
    count: jax.Array  # int32[]: number of tiles that are not empty
    tile_sizes: jax.Array  # int32[tiles]: rows of each tile that are not empty; they are the first ones
    sizes: jax.Array  # int32[E]: rows of each expert
    tile_rows: int = dataclasses.field(metadata=dict(static=True))  # rows of a tile

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.sizes.shape[0]

    @property
    def tiles(self) -> int:
        """The number of tiles, empty ones included."""
        return self.tile_expert.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the sorted buffer, empty ones included."""
        return self.tiles * self.tile_rows

    def starts(self) -> jax.Array:
        """int32[E]: the index of each expert's first row in the sorted buffer; an expert without rows has that of the
        next expert."""
        return _first_tiles(self.sizes, self.tile_rows) * self.tile_rows


def divided(numbers: jax.Array, by: int) -> jax.Array:
    """numbers // by, for integers that are not negative.

    For a power of two it is a shift. `//` tests every number's sign, and XLA makes six operations of a signed division.
    A layer of experts has several, and XLA compiles each separately.
    """
    divisor = jnp.asarray(by, numbers.dtype)
    if by & (by - 1):
        return jax.lax.div(numbers, divisor)
    return jax.lax.shift_right_logical(numbers, jnp.asarray(by.bit_length() - 1, numbers.dtype))


def _tiles(sizes, tile_rows):
    """int32[E]: how many tiles of `tile_rows` rows each expert takes, for groups of these sizes, int32[E]: sizes /
    tile_rows, rounded up."""
    return divided(sizes + (tile_rows - 1), tile_rows)


def _ends(counts):
    """int32[E]: for each expert the number of tiles of all experts up to and with it, which is the number of the tile
    after its last. counts: int32[E], the experts' numbers of tiles. It is a cumulative sum by comparisons, which take
    XLA a third of the operations of a windowed sum, and one kernel."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] >= index, counts, 0).sum(1, dtype=jnp.int32)


def _first_tiles(sizes, tile_rows):
    """int32[E]: the number of the first tile of each group, for groups of these sizes, int32[E], in tiles of
    `tile_rows` rows."""
    tiles = _tiles(sizes, tile_rows)
    return _ends(tiles) - tiles


def groups_of(sizes: jax.Array, max_rows: int, tile_rows: int = TILE_ROWS) -> Groups:
    """Makes the layout of rows that are sorted by expert, from the numbers of rows that experts have.

    Args:
      sizes: int32[E], the rows of each expert.
      max_rows: a static upper bound of their sum, from which the number of tiles follows, as shapes must not depend on
        sizes.
      tile_rows: rows of a tile.
    """
    experts = sizes.shape[0]
    # The largest possible sum of ceil(size / tile_rows).
    tiles = min((max_rows + experts * (tile_rows - 1)) // tile_rows, max_rows)
    sizes = sizes.astype(jnp.int32)
    of_group = _tiles(sizes, tile_rows)
    ends = _ends(of_group)
    index = jnp.arange(tiles, dtype=jnp.int32)
    tile_expert = (index[:, None] >= ends).sum(1, dtype=jnp.int32)  # the number of experts that end before this tile
    lasts = (ends - of_group) * tile_rows + sizes  # the row after each expert's last
    lasts = jnp.append(lasts, 0)  # for the empty tiles
    left = lasts.at[tile_expert].get(mode="promise_in_bounds", wrap_negative_indices=False) - index * tile_rows
    return Groups(tile_expert, ends[-1], jnp.clip(left, 0, tile_rows), sizes, tile_rows)
