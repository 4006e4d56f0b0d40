"""What a quantised sync of gradients takes in the update of two H200s that are not there."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.placement import partition
from jaxtune.train.config import OptimConfig
from jaxtune.train.engine.programs import compiler_options
from jaxtune.train.optimizer.optim import make_optimizer, update_bound
from jaxtune.train.program.gradient_sync import GradientSync
from jaxtune.train.program.step import StepProgram
from tests.gpu.aot.target import H200
from tests.gpu.aot.test_compile_h200 import make_full_model


@pytest.mark.full
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_the_update_takes_what_the_planner_counts(format, feedback):
    """Full fine-tuning in float32: the temporaries are those of the plan, and everything that is given is overwritten,
    so that an update neither copies the gradients nor has two of anything."""
    graph, trainable, _ = nnx.split(make_full_model(1), nnx.Param, ...)
    schedule, optim, sync = optax.constant_schedule(1e-5), OptimConfig(), GradientSync(format, feedback)
    mesh = H200.mesh(2)
    program = StepProgram(
        graph,
        make_optimizer(optim, schedule),
        schedule,
        bound=update_bound(optim, 1.0),
        by_tensor=True,
        mesh=mesh,
        gradient_sync=sync,
    )
    whole = NamedSharding(mesh, partition.WHOLE)

    def placed(tree, where):
        return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), tree, where)

    state = jax.eval_shape(lambda t: program.init(t, 0), trainable)
    where, places = program.shardings(state, whole), program.sums_shardings(trainable, whole)
    sums = placed(jax.eval_shape(program.zero_sums, state.trainable), places)
    state = placed(state, where)
    with H200.lowering(), jax.set_mesh(mesh):
        update = jax.jit(program.update, donate_argnums=(0, 1), out_shardings=(where, places, whole))
        lowered = update.lower(state, sums)
    found = lowered.compile(compiler_options=compiler_options("gpu", deterministic=False)).memory_analysis()
    assert found is not None
    _, taken = sync.bytes_on_device(state.trainable, partition.MeshShape.of(mesh))
    assert found.temp_size_in_bytes <= taken
    assert found.alias_size_in_bytes >= 0.999 * found.argument_size_in_bytes
