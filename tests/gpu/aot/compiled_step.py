"""The train step of a published shape, compiled for a GPU that is not there, beside what the planner says of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks.shapes import SHAPES
from jaxtune.models.placement.streams import memory_kinds
from jaxtune.models.registry import config_from_hf, tower_config
from jaxtune.train.config import AdapterConfig, DataConfig, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.engine.programs import finished
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.optimizer.optim import make_optimizer, update_bound, weight_storage
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.planning import cost, forecasts
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.movables.streamed import Streamed
from jaxtune.train.planning.plan import StepPlan, parse_plan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.step import StepProgram
from tests.gpu.aot.target import Target


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Bytes of a step at its peak: memory_analysis of its programs with what lies beside their arguments, and the
    planner's. text: the program that adds up gradients, as it is compiled."""

    compiled: float
    predicted: float
    text: str


VISION = {
    "depth": 3,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
}


def _batch(rows: int, length: int, patches: int) -> Batch:
    batch = Batch.empty(rows, length)
    return dataclasses.replace(batch, pictures=pictures_of(rows, length, patches)) if patches else batch


def pictures_of(rows: int, length: int, patches: int) -> dict[str, jax.ShapeDtypeStruct]:
    sizes = {"patches": (1536,), "patch_segments": (), "patch_grids": (2,), "patch_coordinates": (2,)}
    pictures = {name: jax.ShapeDtypeStruct((rows, patches, *tail), jnp.int32) for name, tail in sizes.items()}
    pictures["patches"] = pictures["patches"].update(dtype=jnp.float32)
    return pictures | {"picture_features": jax.ShapeDtypeStruct((rows, length), jnp.int32)}


def placed_frozen(frozen: nnx.State, target: Target, where: SingleDeviceSharding) -> nnx.State:
    """Shapes on the target's device, or in its host's memory where weights stream."""

    def placed(array, kind):
        sharding = where if kind is None else target.on_host(where)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    variables = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    kinds = [kind for variable in variables for kind in memory_kinds(variable)]
    return jax.tree.unflatten(jax.tree.structure(frozen), map(placed, jax.tree.leaves(frozen), kinds))


def step_peaks(
    target: Target,
    shape: str,
    layers: int,
    rows: int,
    length: int,
    rank: int,
    load_in: Any,
    plan: str,
    dropout: float = 0.0,
    patches: int = 0,
    tower: Literal["frozen", "all"] = "frozen",
) -> Peaks:
    """Of `layers` layers of a shape in one micro-batch. rank: of LoRA on all linears and experts, with this dropout;
    0: all trains. patches: of pictures in a row, of three layers of Qwen3.5-9B's tower; 0: there is none."""
    hf = SHAPES[shape] | {"num_hidden_layers": layers}
    text = {"model_type": "qwen3_5_text", "hidden_size": hf["hidden_size"]}
    vision = tower_config({"model_type": "qwen3_5", "text_config": text, "vision_config": VISION}) if patches else None
    experts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") if config_from_hf(hf).moe is not None else None
    config = TrainConfig(
        model=ModelConfig(path=shape, load_in=load_in, tower=tower if patches else None),
        data=DataConfig(train="none", length=length, patches_per_row=patches or None),
        adapter=AdapterConfig(r=rank, lora_dropout=dropout, target_parameters=experts) if rank else None,
        rows_per_step=rows,
        steps=10,
        micro_batches=1,
        memory=MemoryConfig(plan=plan),
    )
    optim = OptimConfig()
    if not rank:  # as the whole model would have it
        whole = nnx.split(
            cost.abstract_model(config_from_hf(SHAPES[shape]), StepSpec.of(config).model), nnx.Param, ...
        )[1]
        storage = weight_storage(optim.weights, config.computes_in, sum(a.size for a in jax.tree.leaves(whole)))
        optim = dataclasses.replace(optim, weights=storage)
    config = dataclasses.replace(config, optim=optim)
    spec = StepSpec.of(config, tower=vision)
    model = cost.abstract_model(config_from_hf(hf), spec.model)
    parts = cost.step_cost(model, spec)
    residuals, counted = parse_plan(plan, layers, parts.layers.all_residuals)
    step_plan = StepPlan(residuals, 1, 2**26 // parts.shape.vocab_size)
    streamed = counted.get(Streamed.word, 0)
    keeps = parts.movables["transposed_codes"].able and not streamed
    step_plan = step_plan.at(transposed_codes=keeps, **{Streamed.word: streamed})
    parts = parts.placed(step_plan.moved)
    schedule = learning_rate_schedule(config.schedule, 1e-4, 10)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    program = StepProgram(
        graph,
        make_optimizer(optim, schedule),
        schedule,
        plan=step_plan.residuals,
        max_documents=1,
        max_pictures=4,
        chunk_tokens=step_plan.chunk_tokens,
        weights=optim.weights or "fp32",
        bound=update_bound(optim, config.max_grad_norm),
        by_tensor=config.adapter is None,
        dropout=dropout > 0,
    )
    where = target.sharding()

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    frozen = finished(placed_frozen(Streamed.declared(model, frozen, streamed), target, where), step_plan)
    state = placed(jax.eval_shape(lambda t: program.init(t, 0), trainable))
    sums = placed(jax.eval_shape(program.zero_sums, state.trainable))
    batch, index = placed(_batch(rows, length, patches)), placed(jax.ShapeDtypeStruct((), jnp.int32))
    options = compiler_options("gpu", deterministic=False, merges=config.adapter is not None)
    with target.lowering():
        lowered = (
            jax.jit(program.accumulate, donate_argnums=0).lower(sums, state, frozen, batch, index),
            jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums),
        )
    programs = [one.compile(compiler_options=options) for one in lowered]
    found = [one.memory_analysis() for one in programs]
    needs = [m.temp_size_in_bytes + max(m.output_size_in_bytes - m.alias_size_in_bytes, 0) for m in found]
    predicted = forecasts.forecast(parts, step_plan, find_device(target.kind)).peak_bytes
    return Peaks(parts.fixed_bytes(1) + max(needs), predicted, programs[0].as_text())
