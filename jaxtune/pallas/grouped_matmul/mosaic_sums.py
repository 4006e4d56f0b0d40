"""Sums over each expert's tiles as a Pallas Mosaic GPU kernel for Hopper, which reads every number once.

As a product with zeros and ones (reference.per_expert), the sums take 128 multiplications per number for 128 experts,
in full float32. Here a program sums a run of numbers over the consecutive tiles of one expert, from the first to the
last.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.grouped_matmul import reference
from jaxtune.pallas.grouped_matmul.layout import Groups, groups_of

_RUNS = (1024, 512)  # numbers of a program: two 16-byte loads of each thread, or one


def _kernel(values_ref, bounds_ref, out_ref, *, run: int):
    """The kernel's body: out_ref [E, n] = values_ref [tiles, n] summed over the tiles from bounds_ref[e] to before
    bounds_ref[e + 1], all float32 or int32 in global memory. A program, which is one warpgroup, has one expert and
    `run` numbers of n."""
    expert = lax.axis_index("expert")
    here = pl.ds(lax.axis_index("run") * run, run)
    layout = plgpu.Layout.WG_STRIDED((run,), 4)

    def add(tile, total):
        return total + plgpu.load(values_ref.at[tile, here], layout=layout, optimized=False)

    zeros = plgpu.layout_cast(jnp.zeros((run,), jnp.float32), layout)
    out_ref[expert, here] = lax.fori_loop(bounds_ref[expert], bounds_ref[expert + 1], add, zeros)


def _sums(values: jax.Array, groups: Groups, run: int) -> jax.Array:
    """values float32[tiles, n] -> float32[E, n]: the sums over each expert's tiles, by the kernel. groups: which
    expert each tile belongs to. run: how many of the n columns a program sums; it divides n."""
    experts = groups.num_experts
    ends = jnp.arange(experts + 1, dtype=jnp.int32)
    bounds = (groups.tile_expert < ends[:, None]).sum(1, dtype=jnp.int32)
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
    """The reason why this GPU must not run the kernel, or None: it is no Hopper, or the kernel's sums differ from the
    reference's on a small case, which is compared at the first call."""
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1129)
        values = jax.random.normal(jax.random.key(0), (groups.tiles, 3 * _RUNS[0]))
        got = [jax.jit(_sums, static_argnums=2)(values, groups, run) for run in _RUNS]
        return got, [reference.per_expert(values, groups)] * len(_RUNS)

    return dispatch.first_use("grouped_matmul", "mosaic_sums", "float32", compare)


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """values float32[tiles, ...] -> float32[E, ...]: the sums over each expert's tiles, by the kernel if this GPU runs
    it and the size of a tile's values divides into its runs, else by reference.per_expert. groups: which expert each
    tile belongs to."""
    size = math.prod(values.shape[1:])
    run = next((run for run in _RUNS if size % run == 0), None)
    if run is None or refusal() is not None:
        return reference.per_expert(values, groups)
    return _sums(values.reshape(groups.tiles, size), groups, run).reshape(-1, *values.shape[1:])
