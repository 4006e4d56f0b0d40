"""The layout of rows sorted by expert, in which every expert starts at a whole tile of rows: kernels need no masks and
store whole tiles. The price is half a tile of empty rows per expert on average, which are zero; kernels skip the tiles
at the end that no expert needs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE_ROWS = 128  # rows that two warpgroups multiply at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which expert each tile of a buffer of sorted rows belongs to. Experts without rows have no tile, and tiles that
    no expert needs are at the end. Its shapes do not depend on the routing.
    """

    tile_expert: jax.Array  # int32[tiles]: the expert of each tile, ascending; E for the empty tiles at the end
    count: jax.Array  # int32[]: the number of tiles that have an expert
    tile_sizes: jax.Array  # int32[tiles]: how many of each tile's rows, its first ones, are not empty
    sizes: jax.Array  # int32[E]: the number of each expert's rows, without the empty ones
    tile_rows: int = dataclasses.field(metadata=dict(static=True))  # the number of rows of a tile

    @property
    def num_experts(self) -> int:
        return self.sizes.shape[0]

    @property
    def tiles(self) -> int:
        """Including the empty ones at the end."""
        return self.tile_expert.shape[0]

    @property
    def rows(self) -> int:
        """Including the empty ones."""
        return self.tiles * self.tile_rows

    def starts(self) -> jax.Array:
        """int32[E]: each expert's first row. For an expert without rows it is the row after the tiles of the experts
        before it, which may be past the end.
        """
        return _first_tiles(self.sizes, self.tile_rows) * self.tile_rows


def floor_divided(numbers: jax.Array, denominator: int) -> jax.Array:
    """numbers // by, for integers that are not negative. `//` tests every number's sign, of which XLA makes six
    operations.
    """
    divisor = jnp.asarray(denominator, numbers.dtype)
    if denominator & (denominator - 1):
        return jax.lax.div(numbers, divisor)
    return jax.lax.shift_right_logical(numbers, jnp.asarray(denominator.bit_length() - 1, numbers.dtype))


def _tiles(sizes, tile_rows):
    return floor_divided(sizes + (tile_rows - 1), tile_rows)


def ends_of(counts):
    """int32[E], the cumulative sum of the experts' counts of tiles. Comparisons compute it, of which XLA makes a third
    of the operations of a windowed sum, in one kernel.
    """
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] >= index, counts, 0).sum(1, dtype=jnp.int32)


def _first_tiles(sizes, tile_rows):
    tiles = _tiles(sizes, tile_rows)
    return ends_of(tiles) - tiles


def groups_of(sizes: jax.Array, max_rows: int, tile_rows: int = TILE_ROWS) -> Groups:
    """The layout of rows that experts have in `sizes`, int32[E].

    max_rows: an upper bound of the sum of `sizes`, known while tracing and not checked: there are as many tiles as
    any sizes within it can need, because shapes must not depend on `sizes`.
    tile_rows: rows of a tile; each expert's rows are padded to whole tiles.
    """
    experts = sizes.shape[0]
    # The largest possible sum of ceil(size / tile_rows).
    tiles = min((max_rows + experts * (tile_rows - 1)) // tile_rows, max_rows)
    sizes = sizes.astype(jnp.int32)
    tiles_of_expert = _tiles(sizes, tile_rows)
    ends = ends_of(tiles_of_expert)
    index = jnp.arange(tiles, dtype=jnp.int32)
    tile_expert = (index[:, None] >= ends).sum(1, dtype=jnp.int32)  # the number of experts that end before this tile
    lasts = (ends - tiles_of_expert) * tile_rows + sizes  # the row after each expert's last
    lasts = jnp.append(lasts, 0)  # for the empty tiles
    remaining_rows = (
        lasts.at[tile_expert].get(mode="promise_in_bounds", wrap_negative_indices=False) - index * tile_rows
    )
    return Groups(tile_expert, ends[-1], jnp.clip(remaining_rows, 0, tile_rows), sizes, tile_rows)
