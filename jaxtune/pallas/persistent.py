"""What persistent Mosaic kernels share: a program for each multiprocessor takes every n-th tile of the output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxtune.pallas import dispatch, gpu_kernel


def cores() -> int:
    """Multiprocessors of the device that is compiled for."""
    return 3 if gpu_kernel.interpreter() is not None else dispatch.multiprocessors()


def place(item: jax.Array, row_tiles: int, column_tiles: int, band: int) -> tuple[jax.Array, jax.Array]:
    """(tile of rows, tile of columns) of an item: by bands of rows, down a column of tiles first, so that what runs at
    a time shares rows and weights in L2."""
    number = lax.div(item, jnp.int32(band * column_tiles))
    within = item - number * (band * column_tiles)
    height = jnp.minimum(band, row_tiles - number * band)
    column = lax.div(within, height)
    return number * band + within - column * height, column
