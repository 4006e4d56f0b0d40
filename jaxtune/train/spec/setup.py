"""From a decided run to its plan: the step's programs, mesh, planner, slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.slot_plan import SlotPlan, prefix_room, slots_for
from jaxtune.models.lora import has_adapter, matrices
from jaxtune.models.placement import partition
from jaxtune.models.placement.streams import arriving_bytes
from jaxtune.train.config import ModelConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.data.batches import BatchSource, SampledRows
from jaxtune.train.engine.programs import Engine
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.evaluation.answer_metrics import AnswerMetrics
from jaxtune.train.objectives.loss import aux_losses
from jaxtune.train.optimizer.optim import ELEMENTWISE, weight_storage
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.phases import prefill_bytes
from jaxtune.train.planning.plan import StepPlan, residuals_text
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.gradient_sync import gradient_sync_of
from jaxtune.train.program.step import StepProgram
from jaxtune.train.spec.run_rows import most_documents, most_pictures
from jaxtune.train.spec.run_spec import RunRows, RunSpec

# Trained numbers of a run whose tensors are stacked: a save or an evaluation copies them and their states.
_STACKED_NUMBERS = 12_000_000


def engine_of(spec: RunSpec, rows: RunRows, model: TrainedModel, trains: bool) -> Engine:
    """The engine of a run, with its plan; compiles nothing. trains: False: a forward pass is planned.

    ConfigError if devices cannot share a micro-batch's rows; PlanError if nothing fits;
    ValueError if the GPU is refused, the mesh does not fit the devices, or the host is too small for optimizer states.
    """
    programs, config, prepared = step_programs(spec, rows, model), spec.config, model.prepared
    mesh_config, why = mesh_of(spec.step, lambda: prepared)
    mesh = partition.make_mesh(*mesh_config.sizes)
    step, device = spec.step.on(mesh_config, mesh.size), mesh.local_devices[0]
    planner = Planner(prepared, step, device, why) if trains else ForwardPlanner(prepared, step, device)
    held_out, qat_start = rows.held_out and rows.held_out.rows, config.qat.start if config.qat else 0
    of_config = (config.deterministic, qat_start, config_to_dict(config))
    return Engine(*programs, planner, mesh, rows.batches, held_out, *of_config)


def step_programs(spec: RunSpec, rows: RunRows, model: TrainedModel) -> tuple[StepProgram, StepProgram | None]:
    """(step's program, None), or with qat.start above 0 (with rounded weights, before that). Engine fills in plan and
    mesh. ValueError if a coefficient has no loss.
    """
    config, rule, prepared = spec.config, spec.update, model.prepared
    rates = [matrix.lora.rate for _, matrix in matrices(prepared) if matrix.lora is not None]
    size = sum(leaf.size for leaf in jax.tree.leaves(model.trainable))
    weights = weight_storage(config.optim.weights, config.computes_in, size)
    program = StepProgram(
        graph=model.graph,
        optimizer=rule.optimizer,
        schedule=rule.schedule,
        objective=spec.objective,
        # A limit would allow cuDNN's attention, whose sums are in no fixed order, so `deterministic` gives none.
        max_documents=None if config.deterministic else most_documents(rows.batches, rows.held_out),
        max_pictures=None if config.deterministic else most_pictures(rows.batches, rows.held_out),
        max_grad_norm=config.max_grad_norm,
        noise_alpha=config.neftune_noise_alpha,
        dropout=any(rate > 0 for rate in rates),
        scale_loss=config.computes_in == "fp16",
        weights=weights,
        aux_losses=aux_losses(config.loss_coefficients, prepared),
        bound=rule.bound,
        # The many small tensors of adapters are updated in one program, which is faster.
        by_tensor=rule.bound is not None and not has_adapter(model.given),
        offload=config.optim.offload,
        stackable=rule.bound is not None
        and has_adapter(model.given)
        and config.optim.name in ELEMENTWISE
        and weights == "fp32"
        and size <= _STACKED_NUMBERS,
        full=rows.batches.full,
        gradient_sync=gradient_sync_of(config.mesh),
    )
    if config.qat is None or config.qat.start == 0:
        return program, None
    return program, dataclasses.replace(program, graph=model.plain_graph)


def with_slots(
    planner: Planner | ForwardPlanner,
    sampled: Callable[[], Decoder],
    batches: BatchSource,
    answers: AnswerMetrics | None,
) -> tuple[dict[str, SlotPlan], AnswerMetrics | None]:
    """({"answers", "generate": plan of the slots of that phase}, answers) by the memory that is free between two steps;
    limits `batches`, too. A slot is a row of the sampler's batch with its caches. {} without a limit or for a trainer
    that only evaluates. ValueError without room for one slot, or if rows exceed the model's positions.

    sampled: the shapes of the model that samples, with shardings.
    """
    plans: dict[str, SlotPlan] = {}
    if planner.budget_bytes is None or not isinstance(planner, Planner):
        return plans, answers
    same_bits = answers is not None and answers.deterministic
    for name, rows, converts in (
        ("answers", batches.sampled_rows, True),
        ("generate", answers and answers.sampled_rows, not same_bits),
    ):
        if rows is not None:
            plans[name] = slots_between(
                planner.cost, planner.plan, planner.device, planner.budget_bytes, sampled(), rows, converts
            )
    if "answers" in plans:
        batches.limit_slots(plans["answers"])
    if answers is not None and (plan := plans.get("generate")) is not None:
        answers = dataclasses.replace(answers, most_slots=plan.slots, most_converted=plan.converted_layers)
    return plans, answers


def slots_between(
    costs: StepCost,
    plan: StepPlan,
    device: Device,
    budget_bytes: float,
    model: Decoder,
    rows: SampledRows,
    converts: bool = True,
) -> SlotPlan:
    """The slots of each device between two steps of a run. Raises as slots_for.

    costs: with everything where the plan has it.
    model: the shapes of the one that samples, with shardings.
    converts: whether weights may be converted if the devices allow it.
    """
    free = budget_bytes - costs.fixed_bytes(plan.micro_batches) - prefill_bytes(costs, device)
    sharing, arriving = Sharing.of(model), arriving_bytes(model.layers)
    can_convert = converts and sharing.weights_are_whole and not arriving
    prefix_bytes = max(prefix_room(free), 0) if rows.prefixes else 0
    return slots_for(
        model,
        free - arriving,
        rows.length,
        rows.on(sharing),
        converts=can_convert,
        exact=rows.exact,
        prefix_bytes=prefix_bytes,
        cache=rows.cache,
    )


def profile_facts(
    settings: dict[str, Any], model: ModelConfig, computes_in: str, batches: BatchSource, planner: Planner
) -> dict[str, Any]:
    """{"config": settings, "tokens_per_step" with padding, "what": run and plan in words}, stored with a profile."""
    rows, length = batches.rows_per_step, batches.length
    return {
        "config": settings,
        "tokens_per_step": rows * length,
        "what": f"{model.path or model.from_config}, {computes_in}, {rows} x {length:,} tokens a step, plan "
        f"{residuals_text(planner.plan.residuals)}",
    }
