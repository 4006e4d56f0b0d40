"""What a Trainer constructs before it trains: optimizer, step's programs, mesh, planner, slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.slot_plan import SlotPlan, slots_for
from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.train.config import ConfigError, MeshConfig, TrainConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.evaluation.answer_metrics import AnswerMetrics
from jaxtune.train.folder.record import require_same_settings
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Objective, RunNeeds, require_whole_weights
from jaxtune.train.optimizer.optim import UpdateBound, embedding_tensors, make_optimizer, update_bound, weight_storage
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.phases import prefill_bytes
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.gradient_sync import gradient_sync_of
from jaxtune.train.program.loss import aux_losses
from jaxtune.train.program.step import StepProgram
from jaxtune.train.program.trained_model import TrainedModel
from jaxtune.train.spec.run_rows import most_documents


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    """Learning rate by updates made, for metrics; None: a given optimizer's is unknown."""
    bound: UpdateBound | None
    """How far an update can move a weight; None: unknown, so a step computes the update first to know whether weights
    stay finite.
    """


def update_rule(
    config: TrainConfig,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
) -> UpdateRule:
    """The config's rule, or that of a given optimizer or schedule. A given optimizer has its own rate: a schedule
    beside it is only shown, and there is no bound.
    """
    if optimizer is not None:
        return UpdateRule(optimizer, schedule, None)
    schedule = schedule or learning_rate_schedule(config.schedule, config.optim.learning_rate, total_steps)
    bound = update_bound(config.optim, config.max_grad_norm)
    return UpdateRule(make_optimizer(config.optim, schedule), schedule, bound)


def step_programs(
    config: TrainConfig,
    model: TrainedModel,
    objective: Objective,
    needs: RunNeeds,
    rule: UpdateRule,
    batches: BatchSource,
    eval_data,
) -> tuple[StepProgram, StepProgram | None]:
    """(step's program, None), or with qat.start above 0 (with rounded weights, before that). Engine fills in plan and
    mesh. ValueError if optim.embedding_learning_rate has no embedding that trains, a coefficient has no loss, or QAT
    cannot observe its rows.
    """
    _require_observable(model, needs)
    rates = [matrix.lora.rate for _, matrix in matrices(model.prepared) if matrix.lora is not None]
    size = sum(leaf.size for leaf in jax.tree.leaves(model.trainable))
    if (embedding_rate := config.optim.embedding_learning_rate) is not None and not any(
        embedding_tensors(model.trainable)
    ):
        raise ValueError(
            f"optim.embedding_learning_rate = {embedding_rate}: neither embed_tokens nor lm_head trains; name them in "
            "adapter.modules_to_save, or unset it"
        )
    program = StepProgram(
        graph=model.graph,
        optimizer=rule.optimizer,
        schedule=rule.schedule,
        objective=objective,
        # A limit would allow cuDNN's attention, whose sums are in no fixed order, so `deterministic` gives none.
        max_documents=None if config.deterministic else most_documents(batches, eval_data),
        max_grad_norm=config.max_grad_norm,
        dropout=any(rate > 0 for rate in rates),
        scale_loss=config.computes_in == "fp16",
        weights=weight_storage(config.optim.weights, config.computes_in, size),
        aux_losses=aux_losses(config, model.prepared),
        bound=rule.bound,
        # The many small tensors of adapters are updated in one program, which is faster.
        by_tensor=rule.bound is not None and not has_adapter(model.given),
        offload=config.optim.offload,
        full=batches.full,
        gradient_sync=gradient_sync_of(config.mesh),
    )
    if config.qat is None or config.qat.start == 0:
        return program, None
    return program, dataclasses.replace(program, graph=model.plain_graph)


def _require_observable(model: TrainedModel, needs: RunNeeds) -> None:
    """ValueError if QAT observes activation scales on the first step's rows and this process lacks some before the run:
    sampled rows, or several processes.
    """
    if model.qat is None or not model.qat.observes:
        return
    requirement = f"qat.format = {model.qat.format} observes activations on the rows of the first step"
    if needs.samples:
        raise ValueError(f"{requirement}, and {needs.sampler} samples them during it: take nvfp4 or mxfp4-mxfp4")
    if processes.count() > 1:
        raise ValueError(f"{requirement}, in a run of one process: this one has {processes.count()}")


def planned(
    config: TrainConfig,
    model: TrainedModel,
    needs: RunNeeds,
    batches: BatchSource,
    optimizer: optax.GradientTransformation | None,
    trains: bool,
) -> tuple[TrainConfig, jax.sharding.Mesh, Planner | ForwardPlanner]:
    """(the config with mesh and rows of a step, mesh, planner); compiles nothing.

      optimizer: None: the config's.
      trains: False: a forward pass is planned.

    ConfigError if this mesh cannot sample, or devices cannot share a micro-batch's rows; PlanError if nothing fits;
    ValueError if the GPU is refused, the mesh does not fit the devices, or the host is too small for optimizer states.
    """
    config = dataclasses.replace(config, rows_per_step=batches.rows_per_step)
    length = batches.length
    mesh_config, why = mesh_of(
        config,
        lambda: model.prepared,
        needs,
        length=length,
        keeps_model=model.keeps_model,
        optimizer=optimizer,
    )
    if needs.sampler is not None:
        require_sampling(needs.sampler, mesh_config)
    mesh = partition.make_mesh(*mesh_config.sizes)
    config = dataclasses.replace(config, mesh=mesh_config)
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
        needs=needs,
        optimizer=optimizer,
    )
    return config, mesh, planner


def require_sampling(sampler: str, mesh: MeshConfig) -> None:
    """ConfigError if nothing can sample from the model: the mesh divides weights, or there are several processes."""
    require_whole_weights(sampler, mesh)
    if (count := processes.count()) > 1:
        raise ConfigError(
            f"{sampler}: {count} processes cannot share the sampling yet; run one process, which can use all GPUs of "
            "its machine (mesh.data)"
        )


def with_slots(
    planner: Planner | ForwardPlanner, model: Decoder, batches: BatchSource, answers: AnswerMetrics | None
) -> tuple[dict[str, SlotPlan], AnswerMetrics | None]:
    """({"answers", "generate": plan of the slots of that phase}, answers) by the memory that is free between two steps;
    limits `batches`, too. A slot is a row of the sampler's batch with its caches. {} without a limit or for a trainer
    that only evaluates. ValueError without room for one slot, or if rows exceed the model's positions.
    """
    plans: dict[str, SlotPlan] = {}
    if planner.budget_bytes is None or not isinstance(planner, Planner):
        return plans, answers
    same_bits = answers is not None and answers.deterministic
    for name, rows, deterministic in (
        ("answers", batches.sampled_rows, False),
        ("generate", answers and answers.sampled_rows, same_bits),
    ):
        if rows is not None:
            used_bytes = planner.cost.fixed_bytes(planner.plan.micro_batches) + prefill_bytes(
                planner.cost, planner.device
            )
            plans[name] = slots_for(model, planner.budget_bytes - used_bytes, rows.length, rows.most, deterministic)
    if "answers" in plans:
        batches.limit_slots(plans["answers"])
    if answers is not None and (plan := plans.get("generate")) is not None:
        answers = dataclasses.replace(answers, most_slots=plan.slots, most_converted=plan.converted_layers)
    return plans, answers


def require_starts_within(total_steps: int, config: TrainConfig, profile_steps: int) -> None:
    """ValueError if profile.start or qat.start is not below the run's steps (with `epochs` unknown before rows are
    read).
    """
    if profile_steps and config.profile.start >= total_steps:
        raise ValueError(f"profile.start = {config.profile.start}: the run has only {total_steps} steps")
    if config.qat is not None and config.qat.start >= total_steps:
        raise ValueError(f"qat.start = {config.qat.start}: the run has only {total_steps} steps")


def profile_facts(config: TrainConfig, batches: BatchSource, planner: Planner) -> dict[str, Any]:
    """{"config", "tokens_per_step" with padding, "what": run and plan in words}, stored with a profile."""
    rows, length, model = batches.rows_per_step, batches.length, config.model
    return {
        "config": config_to_dict(config),
        "tokens_per_step": rows * length,
        "what": f"{model.path or model.from_config}, {config.computes_in}, {rows} x {length:,} tokens a step, plan "
        f"{residuals_text(planner.plan.residuals)}",
    }


def require_fit_for_processes(config: TrainConfig) -> None:
    """ValueError for what several processes cannot do: other configs or packages, sampled answers, optim.offload."""
    if (count := processes.count()) == 1:
        return
    require_same_settings(config_to_dict(config))
    if (sampler := RunNeeds.of(objective_of(config)).sampler) is not None:
        require_sampling(sampler, config.mesh or MeshConfig())
    for key, value in config.evaluation.asking:
        raise ValueError(
            f"{key} = {value}: {count} processes cannot generate at the same time yet; unset it, and generate from "
            "what the run exports"
        )
    if config.optim.offload:
        raise ValueError(
            f"optim.offload = true: states in host memory are those of one process yet, and this run has {count}; "
            "divide them over the devices (mesh.fsdp)"
        )
