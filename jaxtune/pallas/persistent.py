"""Functions that persistent Mosaic kernels share: `cores`, the number of multiprocessors, by which they choose the
number of their programs, and `place`, the position of a tile in the output of a matrix product. Such a kernel has one
program, or a fixed number of them, for each multiprocessor; with n programs, program p computes items p, p + n, ... of
the work, in a matrix product the tiles of the output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas import dispatch, gpu_kernel


def cores() -> int:
    """The number of multiprocessors of the GPU that is compiled for. Most persistent kernels have this number of
    programs, and some a multiple of it. It is 3 in Pallas' interpreter, so that in tests programs have different
    numbers of tiles. Outside of the interpreter it raises RuntimeError if there is no GPU and none is compiled for
    (dispatch.multiprocessors)."""
    return 3 if gpu_kernel.interpreter() is not None else dispatch.multiprocessors()


def place(item: jax.Array, row_tiles: int, column_tiles: int, band: int) -> tuple[jax.Array, jax.Array]:
    """Converts the number of a tile of the output to its position: (number of its row of tiles, number of its column of
    tiles), both int32[].

    Tiles are numbered band by band. A band is `band` neighbouring rows of tiles; within a band the numbers go down one
    column of tiles after another. So tiles that are computed at the same time share rows and weights in the L2 cache.

    Args:
      item: int32[], the number of the tile, 0 to row_tiles * column_tiles - 1.
      row_tiles, column_tiles: the number of tiles along each axis of the output.
      band: the number of rows of tiles in a band; the last band may have fewer.
    """
    number = lax.div(item, jnp.int32(band * column_tiles))
    within = item - number * (band * column_tiles)
    height = jnp.minimum(band, row_tiles - number * band)
    column = lax.div(within, height)
    return number * band + within - column * height, column
