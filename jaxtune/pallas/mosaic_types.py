"""Names of Mosaic GPU with types that a type checker can follow, because JAX's own annotations are incomplete."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def inline_mgpu(*, arg_types=(), return_type=None) -> Callable[[Callable], Callable]:
    """plgpu.inline_mgpu, a decorator for functions that emit PTX, typed as what it returns: a function of the arrays
    alone. arg_types and return_type are the layouts (or types) of its arguments and result, as plgpu takes them. The
    decorated body has one argument more, the launch context, which comes first and which Pallas passes."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def tiled(dtype, row_bytes: int = 128) -> tuple:
    """The transforms, for plgpu.SMEM, of an array of `dtype` in shared memory that tensor cores read: tiles of 8 rows
    of `row_bytes` (32, 64 or 128), swizzled over the banks."""
    tiling = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(row_bytes)  # type: ignore[abstract]
