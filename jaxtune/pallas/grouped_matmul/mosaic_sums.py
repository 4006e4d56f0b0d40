"""Sums float32 values of tiles over the tiles of each expert, by a Pallas Mosaic GPU kernel for Hopper. A tile is a run
of rows that belong to one expert; each tile has an array of values, for example its share of the gradient of an
adapter, and the gradient of an expert is the sum over its tiles.

As a matrix product with zeros and ones (reference.per_expert), 128 experts would need 128 multiplications for each
number, in full float32. This kernel reads each number once instead: a program sums 512 or 1,024 neighbouring numbers
over the consecutive tiles of one expert, from the first tile to the last. `per_expert` is the sum; it uses the kernel
unless `refusal` gives a reason or a tile's numbers are no multiple of 512. grouped_matmul's backward sums an adapter's
gradients by it where one of mosaic.py's products is used, but mosaic_contract.py's kernel, which needs no such sums,
failed its check. `of_runs` is the same for other parts than tiles: the chunks of rows of gated_thin.py.
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
    """The kernel's body. values_ref: float32[tiles, n], the values of each tile. bounds_ref: int32[E + 1]; expert e has
    the tiles from bounds_ref[e] to before bounds_ref[e + 1]. out_ref: float32[E, n], which the kernel sets to the sums
    of values_ref over the tiles of each expert. All three are in global memory. A program is one warpgroup and computes
    `run` neighbouring numbers of the n for one expert; `run` divides n."""
    expert = lax.axis_index("expert")
    here = pl.ds(lax.axis_index("run") * run, run)
    layout = plgpu.Layout.WG_STRIDED((run,), 4)

    def add(tile, total):
        return total + plgpu.load(values_ref.at[tile, here], layout=layout, optimized=False)

    zeros = plgpu.layout_cast(jnp.zeros((run,), jnp.float32), layout)
    out_ref[expert, here] = lax.fori_loop(bounds_ref[expert], bounds_ref[expert + 1], add, zeros)


def _sums(values: jax.Array, bounds: jax.Array, run: int) -> jax.Array:
    """Calls the kernel: values float32[tiles, n] -> float32[E, n], for each expert e the sum over the tiles from
    bounds[e] to before bounds[e + 1]; bounds: int32[E + 1]. A program of the grid sums `run` of the n columns for one
    expert; `run` is 512 or 1,024 and divides n. `of_runs` calls it, and `refusal` for its check."""
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
    """Returns the reason, in words, why the kernel must not be used on this GPU, or None if it may be used. The GPU is
    refused if it is no Hopper (Pallas' interpreter needs none), or if the kernel fails on a small case or its sums
    differ there from those of reference.per_expert; the two are compared at the first call (dispatch.first_use). Where
    there is no GPU, as in the interpreter's tests, nothing is compared, and while a run's programs are built the check
    is only queued; the result is then None. `per_expert` calls it."""
    if gpu_kernel.interpreter() is None and dispatch.compute_capability() != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"

    def compare():
        groups = groups_of(jnp.asarray((300, 0, 1, 128, 700), jnp.int32), 1129)
        values = jax.random.normal(jax.random.key(0), (groups.tiles, 3 * _RUNS[0]))
        got = [jax.jit(_sums, static_argnums=2)(values, _bounds(groups), run) for run in _RUNS]
        return got, [reference.per_expert(values, groups)] * len(_RUNS)

    return dispatch.first_use("grouped_matmul", "mosaic_sums", "float32", compare)


def _bounds(groups: Groups) -> jax.Array:
    """int32[E + 1], the number of each expert's first tile, and of the tile after the last."""
    experts = jnp.arange(groups.num_experts + 1, dtype=jnp.int32)
    return (groups.tile_expert < experts[:, None]).sum(1, dtype=jnp.int32)


def per_expert(values: jax.Array, groups: Groups) -> jax.Array:
    """Adds up the values of each expert's tiles: values float32[tiles, ...] -> float32[E, ...]. The kernel does so, by
    `of_runs`, if it supports the number of values; otherwise reference.per_expert does. This function is the argument
    `sums` of reference.contract_rows. groups: say which expert each tile belongs to."""
    if _run_of(values) is None:
        return reference.per_expert(values, groups)
    return of_runs(values, _bounds(groups))


def of_runs(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """values float32[parts, ...] -> float32[E, ...]: for each e the sum of the values from bounds[e] to before
    bounds[e + 1], in this order. bounds: int32[E + 1]. The kernel computes the sums if `refusal` returns None and the
    number of values of a part is a multiple of 512; otherwise a product with zeros and ones in full float32 does. The
    backward of gated_thin.py calls it, for chunks of rows."""
    run = _run_of(values)
    if run is None:
        part = jnp.arange(len(values), dtype=jnp.int32)
        member = (part >= bounds[:-1, None]) & (part < bounds[1:, None])
        return jnp.tensordot(member.astype(jnp.float32), values, 1, precision=jax.lax.Precision.HIGHEST)
    sums = _sums(values.reshape(len(values), -1), bounds, run)
    return sums.reshape(-1, *values.shape[1:])


def _run_of(values: jax.Array) -> int | None:
    """How many numbers a program of the kernel sums, for values float32[parts, ...]; None if the kernel cannot compute
    the sums."""
    size = math.prod(values.shape[1:])
    run = next((run for run in _RUNS if size % run == 0), None)
    return None if run is None or refusal() is not None else run
