"""Names of Mosaic GPU with types that a checker can follow, because JAX's own annotations are incomplete."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from jaxtune.pallas.mosaic_modules import plgpu


def inline_mgpu(*, arg_types=(), return_type=None) -> Callable[[Callable], Callable]:
    """plgpu.inline_mgpu: decorates a function that emits PTX, which gets the launch context before the arrays.
    arg_types: register layouts, or types such as plgpu.RefType. return_type: shape, dtype and layout, or None.
    """
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def tiled(dtype, row_bytes: int = 128) -> tuple:
    """(tiling, swizzle) for plgpu.SMEM, the order in which tensor cores read shared memory: tiles of 8 rows of
    row_bytes bytes (32, 64 or 128), swizzled over the banks.
    """
    tiling = plgpu.TilingTransform((8, row_bytes // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(row_bytes)  # type: ignore[abstract]


def smem(shape, dtype, row_bytes: int = 128):
    """An array in shared memory, swizzled as TMA copies it and tensor cores read it (`tiled`)."""
    return plgpu.SMEM(shape, dtype, transforms=tiled(dtype, row_bytes))
