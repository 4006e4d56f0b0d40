"""Names of Mosaic GPU with types that a type checker can follow, because JAX's own annotations are incomplete:
`inline_mgpu` for inline PTX, and `tiled` for the layout of arrays in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def inline_mgpu(*, arg_types=(), return_type=None) -> Callable[[Callable], Callable]:
    """plgpu.inline_mgpu with types that a checker can follow. It makes a decorator for functions that emit PTX within a
    kernel, for what Pallas has no operation; the decorated function is called with the arrays alone. arg_types: for
    each of these arrays its register layout, or a type such as plgpu.RefType. return_type: the shape, dtype and layout
    of the result; None if nothing is returned. The function itself has one more argument, in front of the arrays: the
    launch context, which Pallas passes."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def tiled(dtype, row_bytes: int = 128) -> tuple:
    """The transforms argument of plgpu.SMEM for an array of `dtype` in the order in which tensor cores read shared
    memory: tiles of 8 rows of row_bytes bytes (32, 64 or 128), swizzled over the memory banks. Returns (tiling,
    swizzle). line_matmul.py uses it for codes that single lanes read, so that rows are in different banks."""
    tiling = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(row_bytes)  # type: ignore[abstract]
