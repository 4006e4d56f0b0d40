"""Differences between versions of packages that kernels use, in one place: jax-triton 0.3 (triton 3.6) and 0.4 (triton
3.7)."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import jax

from jaxtune.pallas import dispatch, meshes


def triton_refusal() -> str | None:
    """The reason why Triton kernels cannot run here (no NVIDIA GPU, an old one, or no jax-triton); None if they can.
    The refusal of every Triton implementation begins with it."""
    capability = dispatch.compute_capability()
    if capability is None:
        return "no NVIDIA GPU"
    if capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if not _has_jax_triton():
        return "jax-triton is not installed: pip install '.[cuda13]', or '.[cuda12]', in jaxtune's clone brings it"
    return None


@functools.cache
def _has_jax_triton() -> bool:
    """Whether jax-triton is installed."""
    return importlib.util.find_spec("jax_triton") is not None


def triton_call(
    kernel: Any,
    arguments: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    warps: int,
    stages: int,
    contract: bool = True,
    **constants: int | float,
) -> list[jax.Array]:
    """Calls a Triton kernel, a function under triton.jit that takes pointers to `arguments` and to the outputs, and
    `constants`. On a mesh of several devices each device calls it on plain local arrays.

    Args:
      kernel: the function.
      arguments: its input arrays.
      out_types: shapes and dtypes of its outputs.
      grid: number of programs along each axis.
      warps, stages: Triton's num_warps and num_stages.
      contract: whether products and sums may be fused into multiply-adds.
      constants: its compile-time constants.
    Returns:
      the outputs, one for each of out_types.
    """
    import jax_triton

    capability = dispatch.compute_capability()
    assert capability is not None
    parameters = inspect.signature(jax_triton.triton_call).parameters
    options: dict[str, Any] = {"out_type" if "out_type" in parameters else "out_shape": list(out_types)}
    if not contract:
        if "backend_options" in parameters:
            options["backend_options"] = {"enable_fp_fusion": False}
        else:
            options["enable_fp_fusion"] = False
    call = functools.partial(
        jax_triton.triton_call,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=10 * capability[0] + capability[1],
        name=kernel.__name__,
        **options,
        **constants,
    )
    return meshes.on_each_device(call)(*arguments)
