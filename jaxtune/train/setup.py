"""What a Trainer makes before its first step: the rule of updates, the step's programs, the mesh and the planner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import optax

from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.folder.run_rows import most_documents
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.optimizer.optim import (
    UpdateBound,
    embedding_tensors,
    make_optimizer,
    update_bound,
    weight_storage,
)
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.loss import aux_losses
from jaxtune.train.program.step import StepProgram
from jaxtune.train.program.trained_model import TrainedModel


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated, as config says or by the parts that were given in its place."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None  # what metrics show; None: the optimizer given has its own
    bound: UpdateBound | None  # what one update can reach; None: nothing is known of an optimizer given


def update_rule(
    config: TrainConfig,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
) -> UpdateRule:
    if optimizer is not None:
        return UpdateRule(optimizer, schedule, None)
    schedule = schedule or learning_rate_schedule(config.schedule, config.optim.learning_rate, total_steps)
    bound = update_bound(config.optim, config.max_grad_norm)
    return UpdateRule(make_optimizer(config.optim, schedule), schedule, bound)


def step_programs(
    config: TrainConfig, model: TrainedModel, objective: Objective, rule: UpdateRule, batches: BatchSource, eval_data
) -> tuple[StepProgram, StepProgram | None]:
    """(the step, the step before weights are rounded, if qat starts after the first one)."""
    rates = [matrix.lora.rate for _, matrix in matrices(model.prepared) if matrix.lora is not None]
    size = sum(leaf.size for leaf in jax.tree.leaves(model.trainable))
    if (own := config.optim.embedding_learning_rate) is not None and not any(embedding_tensors(model.trainable)):
        raise ValueError(
            f"optim.embedding_learning_rate = {own}: neither embed_tokens nor lm_head trains; name them in "
            "adapter.modules_to_save, or unset it"
        )
    program = StepProgram(
        graph=model.graph,
        optimizer=rule.optimizer,
        schedule=rule.schedule,
        objective=objective,
        # None under `deterministic`: a promise would let in cuDNN's attention, whose sums have any order.
        max_documents=None if config.deterministic else most_documents(batches, eval_data),
        max_grad_norm=config.max_grad_norm,
        dropout=any(rate > 0 for rate in rates),
        scale_loss=config.precision == "fp16",
        weights=weight_storage(config.optim.weights, config.precision, size),
        aux_losses=aux_losses(config, model.prepared),
        bound=rule.bound,
        # Not adapters, whose many small tensors are better updated at once.
        by_tensor=rule.bound is not None and not has_adapter(model.given),
        offload=config.optim.offload,
        full=batches.full,
    )
    if config.qat is None or config.qat.start == 0:
        return program, None
    return program, dataclasses.replace(program, graph=model.plain_graph)


def planned(
    config: TrainConfig,
    model: TrainedModel,
    objective: Objective,
    batches: BatchSource,
    optimizer: optax.GradientTransformation | None,
    trains: bool,
) -> tuple[TrainConfig, jax.sharding.Mesh, Planner | ForwardPlanner]:
    """(config with the mesh chosen, the mesh, the planner of its steps or, unless it `trains`, of a forward pass)."""
    config = dataclasses.replace(config, rows_per_step=batches.rows_per_step)
    length, reference_runs = batches.length, objective.reference_runs
    chosen, why = mesh_of(
        config,
        lambda: model.prepared,
        length=length,
        keeps_model=model.keeps_model,
        reference_runs=reference_runs,
        optimizer=optimizer,
    )
    mesh = partition.make_mesh(chosen.data, chosen.fsdp)
    config = dataclasses.replace(config, mesh=chosen)
    config.require_rows_for(mesh.size)
    device = mesh.local_devices[0]
    if not trains:
        return config, mesh, ForwardPlanner(model.prepared, config, length, device)
    planner = Planner(
        model.prepared,
        config,
        device=device,
        note=why,
        length=length,
        keeps_model=model.keeps_model,
        reference_runs=reference_runs,
        optimizer=optimizer,
    )
    return config, mesh, planner
