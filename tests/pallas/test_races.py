"""The search for races finds one, and none where a barrier orders the accesses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel
from tests.pallas import races

SHAPE = (128,)


def handed_over(x, ordered: bool):
    """x by way of shared memory, which one warpgroup writes and another reads."""

    def body(x_ref, out_ref, shared, written):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            shared[...] = x_ref[...]
            plgpu.barrier_arrive(written)

        @pl.when(wg == 1)
        def _():
            if ordered:
                plgpu.barrier_wait(written)
            out_ref[...] = shared[...]
            if not ordered:
                plgpu.barrier_wait(written)

    shared, barrier = plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier(num_arrivals=1)
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=(shared, barrier),
        num_threads=2,
        thread_name="wg",
        interpret=gpu_kernel.interpreter(),
    )
    return run(x)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_read_that_no_barrier_orders_is_found(ordered, capsys):
    x = jnp.arange(128.0)
    with races.detected() as found, gpu_kernel.interpreted():
        got = handed_over(x, ordered)
    assert bool(found) == (not ordered)
    assert ("RACE DETECTED" in capsys.readouterr().out) == (not ordered)
    if ordered:
        np.testing.assert_array_equal(got, x)
