"""What persistent Mosaic kernels share. They have a fixed number of programs for each multiprocessor; of n programs, p
computes tiles p, p + n, ...
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas import gpu_kernel, targets


def cores() -> int:
    """Multiprocessors of the GPU that is compiled for; 3 in the interpreter, so that programs have different numbers of
    tiles. Raises RuntimeError without a GPU.
    """
    return 3 if gpu_kernel.interpreter() is not None else targets.multiprocessors()


def tile_position(item: jax.Array, row_tiles: int, column_tiles: int, band: int) -> tuple[jax.Array, jax.Array]:
    """(row, column) of tile `item`, int32[]. Tiles are numbered by bands of `band` neighbouring rows of tiles, within a
    band down one column after another, so that tiles computed at the same time share rows and weights in the L2 cache.
    The last band may be lower.

      item: below row_tiles * column_tiles; past it the position is meaningless.
    """
    number = lax.div(item, jnp.int32(band * column_tiles))
    index_in_band = item - number * (band * column_tiles)
    height = jnp.minimum(band, row_tiles - number * band)
    column = lax.div(index_in_band, height)
    return number * band + index_in_band - column * height, column
