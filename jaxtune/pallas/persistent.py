"""What persistent Mosaic kernels share. Such a kernel runs one program for each multiprocessor, which takes every n-th
tile of the output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas import dispatch, gpu_kernel


def cores() -> int:
    """The number of multiprocessors of the device that is compiled for."""
    return 3 if gpu_kernel.interpreter() is not None else dispatch.multiprocessors()


def place(item: jax.Array, row_tiles: int, column_tiles: int, band: int) -> tuple[jax.Array, jax.Array]:
    """(tile of rows, tile of columns) of an item. Items go through bands of rows, within a band down each column of
    tiles first, so that tiles computed at the same time share rows and weights in the L2 cache."""
    number = lax.div(item, jnp.int32(band * column_tiles))
    within = item - number * (band * column_tiles)
    height = jnp.minimum(band, row_tiles - number * band)
    column = lax.div(within, height)
    return number * band + within - column * height, column
