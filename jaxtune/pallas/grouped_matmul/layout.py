"""Rows sorted by expert, where every expert starts at a whole tile.

A tile of rows then belongs to one expert, whatever the sizes of the groups: kernels mask nothing and store whole
tiles, and the rows of an expert are contracted tile by tile. The price is half a tile of rows an expert on average,
which are zeros and take part in nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE_ROWS = 128  # what two warpgroups multiply at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which expert each tile of rows belongs to.

    Attributes:
      tile_expert: int32[tiles], rising; the experts' number E for the tiles at the end that hold nothing.
      count: int32[], tiles that hold something.
      tile_sizes: int32[tiles], rows of each tile that hold something, the first of it.
      sizes: int32[E], rows of each expert.
      tile_rows: rows of a tile.
    """

    tile_expert: jax.Array
    count: jax.Array
    tile_sizes: jax.Array
    sizes: jax.Array
    tile_rows: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_experts(self) -> int:
        return self.sizes.shape[0]

    @property
    def tiles(self) -> int:
        return self.tile_expert.shape[0]

    @property
    def rows(self) -> int:
        """Rows of the sorted buffer, those that hold nothing included."""
        return self.tiles * self.tile_rows

    def starts(self) -> jax.Array:
        """int32[E]: the first row of each expert."""
        return _first_tiles(self.sizes, self.tile_rows) * self.tile_rows


def divided(numbers: jax.Array, by: int) -> jax.Array:
    """numbers // by of integers that are not negative.

    A power of two is a shift. `//` asks for every number's sign, and of a signed division XLA makes six operations;
    a layer of experts has several, and XLA compiles each of them anew.
    """
    divisor = jnp.asarray(by, numbers.dtype)
    if by & (by - 1):
        return jax.lax.div(numbers, divisor)
    return jax.lax.shift_right_logical(numbers, jnp.asarray(by.bit_length() - 1, numbers.dtype))


def _tiles(sizes, tile_rows):
    """How many tiles each group has."""
    return divided(sizes + (tile_rows - 1), tile_rows)


def _ends(counts):
    """The cumulative sum of a count for each expert: by comparisons, for which XLA takes a third of the operations of a
    sum over windows, and one kernel."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] >= index, counts, 0).sum(1, dtype=jnp.int32)


def _first_tiles(sizes, tile_rows):
    tiles = _tiles(sizes, tile_rows)
    return _ends(tiles) - tiles


def groups_of(sizes: jax.Array, max_rows: int, tile_rows: int = TILE_ROWS) -> Groups:
    """The layout of groups of these sizes, int32[E], that sum to at most max_rows."""
    experts = sizes.shape[0]
    # sum of ceil(size / tile_rows), at its largest
    tiles = min((max_rows + experts * (tile_rows - 1)) // tile_rows, max_rows)
    sizes = sizes.astype(jnp.int32)
    of_group = _tiles(sizes, tile_rows)
    ends = _ends(of_group)
    index = jnp.arange(tiles, dtype=jnp.int32)
    tile_expert = (index[:, None] >= ends).sum(1, dtype=jnp.int32)  # how many experts end before this tile
    lasts = (ends - of_group) * tile_rows + sizes  # the row after each expert's last
    lasts = jnp.append(lasts, 0)  # of the tiles that hold nothing
    left = lasts.at[tile_expert].get(mode="promise_in_bounds", wrap_negative_indices=False) - index * tile_rows
    return Groups(tile_expert, ends[-1], jnp.clip(left, 0, tile_rows), sizes, tile_rows)
