"""Sums float32 values of tiles (runs of rows of one expert) over each expert's tiles, by a Pallas Mosaic GPU kernel for
Hopper.

A matrix product with zeros and ones (reference.per_expert) multiplies each number 128 times for 128 experts. This
kernel reads it once: a program sums 512 or 1,024 neighbouring numbers over one expert's consecutive tiles.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.grouped_matmul import reference
from jaxtune.pallas.grouped_matmul.layout import Groups, groups_of
from jaxtune.pallas.mosaic_modules import plgpu

_RUNS = (1024, 512)  # numbers of a program: two 16-byte loads of each thread, or one


def _kernel(values_ref, bounds_ref, out_ref, *, run: int):
    """out_ref float32[E, n]: for each expert the sum of values_ref [tiles, n] from bounds_ref[e] to before bounds_ref[e
    + 1].
    """
    expert = lax.axis_index("expert")
    run_slice = pl.ds(lax.axis_index("run") * run, run)
    layout = plgpu.Layout.WG_STRIDED((run,), 4)

    def add(tile, total):
        return total + plgpu.load(values_ref.at[tile, run_slice], layout=layout, optimized=False)

    zeros = plgpu.layout_cast(jnp.zeros((run,), jnp.float32), layout)
    out_ref[expert, run_slice] = lax.fori_loop(bounds_ref[expert], bounds_ref[expert + 1], add, zeros)


def _sums(values: jax.Array, bounds: jax.Array, run: int) -> jax.Array:
    """values float32[tiles, n] -> float32[E, n]; bounds: int32[E + 1]; `run`, 512 or 1,024, divides n."""
    experts = len(bounds) - 1
    return gpu_kernel.kernel(
        functools.partial(_kernel, run=run),
        "expert_sums",
        gpu_kernel.interpreter(),
        out_type=jax.ShapeDtypeStruct((experts, values.shape[1]), jnp.float32),
        grid=(experts, values.shape[1] // run),
        grid_names=("expert", "run"),
        # No memory is both read and written, so nothing has to wait.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(values, bounds)


def refusal() -> str | None:
    """The reason why the kernel must not run on this GPU; None if it may or nothing is compared, as without a GPU."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1129)
        values = jax.random.normal(jax.random.key(0), (groups.tiles, 3 * _RUNS[0]))
        results = [jax.jit(_sums, static_argnums=2)(values, _bounds(groups), run) for run in _RUNS]
        return results, [reference.per_expert(values, groups)] * len(_RUNS)

    return dispatch.first_use("grouped_matmul", "mosaic_sums", "float32", compare)


def _bounds(groups: Groups) -> jax.Array:
    """int32[E + 1], each expert's first tile, and the tile after the last."""
    experts = jnp.arange(groups.num_experts + 1, dtype=jnp.int32)
    return (groups.tile_expert < experts[:, None]).sum(1, dtype=jnp.int32)


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """The sums of each expert's tiles: float32[tiles, ...] -> float32[E, ...]; plain JAX where the kernel cannot."""
    if _run_of(values) is None:
        return reference.per_expert(values, groups)
    return of_runs(values, _bounds(groups))


def of_runs(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """float32[parts, ...] -> float32[E, ...]: sums from bounds[e] to before bounds[e + 1], in this order; bounds:
    int32[E + 1]. Where the kernel cannot, a product with zeros and ones in full float32 sums.
    """
    run = _run_of(values)
    if run is None:
        index = jnp.arange(len(values), dtype=jnp.int32)
        member = (index >= bounds[:-1, None]) & (index < bounds[1:, None])
        return jnp.tensordot(member.astype(jnp.float32), values, 1, precision=jax.lax.Precision.HIGHEST)
    sums = _sums(values.reshape(len(values), -1), bounds, run)
    return sums.reshape(-1, *values.shape[1:])


def _run_of(values: jax.Array) -> int | None:
    """How many numbers a program sums; None if the kernel cannot."""
    size = math.prod(values.shape[1:])
    run = next((run for run in _RUNS if size % run == 0), None)
    return None if run is None or refusal() is not None else run
