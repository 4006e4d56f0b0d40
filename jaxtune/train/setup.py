"""What a Trainer constructs before it trains: the optimizer and schedule (`update_rule`, an `UpdateRule`), the step's
programs (`step_programs`), the mesh and the planner (`planned`), and how many answers are sampled at a time
(`with_slots`). `require_sampling`, `require_starts_within` and `_require_observable` refuse what cannot run, and
`profile_facts` is stored with a profile."""

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
from jaxtune.train.answer_metrics import AnswerMetrics
from jaxtune.train.config import ConfigError, MeshConfig, TrainConfig
from jaxtune.train.config.file import config_to_dict
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
from jaxtune.train.planning.phases import prefill_bytes
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.planning.planner import Planner
from jaxtune.train.program.gradient_sync import gradient_sync_of
from jaxtune.train.program.loss import aux_losses
from jaxtune.train.program.step import StepProgram
from jaxtune.train.program.trained_model import TrainedModel


@dataclass(frozen=True)
class UpdateRule:
    """How weights are updated: by the config's optimizer and schedule, or by those that were given to the Trainer.
    `update_rule` makes it, and `step_programs` puts it into the programs."""

    optimizer: optax.GradientTransformation
    """The optimizer, its learning rate included."""
    schedule: optax.Schedule | None
    """The learning rate by the number of updates made, which metrics show; None if an optimizer was given to the
    Trainer without a schedule."""
    bound: UpdateBound | None
    """A limit to how far one update can move a weight. A step decides by it, before the update, whether all new weights
    will be finite; without a limit the step first computes the whole update for this decision. None if no limit is
    known (optim.update_bound), and for an optimizer that was given to the Trainer."""


def update_rule(
    config: TrainConfig,
    total_steps: int,
    optimizer: optax.GradientTransformation | None,
    schedule: optax.Schedule | None,
) -> UpdateRule:
    """The update rule of a run of `total_steps` steps, over which the schedule of the config extends, for the Trainer's
    constructor. optimizer, schedule: those that were given to the Trainer, which replace the config's; None: the
    config's. A schedule without an optimizer gives the rate of the config's optimizer. An optimizer has its own rate:
    with it a schedule is only shown in metrics, none of the config is taken, and there is no bound."""
    if optimizer is not None:
        return UpdateRule(optimizer, schedule, None)
    schedule = schedule or learning_rate_schedule(config.schedule, config.optim.learning_rate, total_steps)
    bound = update_bound(config.optim, config.max_grad_norm)
    return UpdateRule(make_optimizer(config.optim, schedule), schedule, bound)


def step_programs(
    config: TrainConfig, model: TrainedModel, objective: Objective, rule: UpdateRule, batches: BatchSource, eval_data
) -> tuple[StepProgram, StepProgram | None]:
    """Makes the programs of a train step, for the Trainer's constructor, also if it only evaluates. Engine fills in
    their plan and mesh, and compiles them later.

    Args:
      config: the run's.
      model: the model that is trained.
      objective: defines the loss.
      rule: how weights are updated.
      batches: the source of the run's batches.
      eval_data: the TokenDataset of held-out rows, or None. It and `batches` give the most documents in a row, which
        attention's kernels are compiled for, unless config.deterministic is set.
    Returns:
      (the program of a step, None); if qat.start is above 0, (the program of a step with rounded weights, the program
        of a step before that).
    Raises:
      ValueError: optim.embedding_learning_rate is set, and no embedding is trained; a coefficient is set for a loss
        that the model's layers do not have; or QAT would observe rows that are not there (_require_observable).
    """
    _require_observable(model, batches)
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


def _require_observable(model: TrainedModel, batches: BatchSource) -> None:
    """Raises ValueError if QAT rounds activations under scales that it observes on the rows of the first step, and this
    process does not have all of these rows before the run: `batches` samples them from the model during it
    (sees_model), or the run has several processes, of which each has a part of the rows. `model` says whether QAT's
    format observes scales; that the model has some already makes no difference. `step_programs` calls it."""
    if model.qat is None or not model.qat.observes:
        return
    what = f"qat.format = {model.qat.format} observes activations on the rows of the first step"
    if batches.sees_model:
        raise ValueError(f"{what}, and this objective samples its rows during the run: take nvfp4 or mxfp4-mxfp4")
    if processes.count() > 1:
        raise ValueError(f"{what}, in a run of one process: this one has {processes.count()}")


def planned(
    config: TrainConfig,
    model: TrainedModel,
    objective: Objective,
    batches: BatchSource,
    optimizer: optax.GradientTransformation | None,
    trains: bool,
) -> tuple[TrainConfig, jax.sharding.Mesh, Planner | ForwardPlanner]:
    """Chooses the mesh, and makes the planner of the steps' memory, for the Trainer's constructor. It compiles nothing.

    Args:
      config: the run's; its mesh may be None, and is then chosen.
      model: the model, from whose shapes memory is forecast.
      objective: says how often a frozen model runs in each loss.
      batches: says the shape of a step's batch.
      optimizer: an optimizer given to the Trainer, whose states count in the forecast; None is the config's.
      trains: True: training steps are planned, by a Planner. False: only a forward pass is, by a ForwardPlanner.
    Returns:
      (the config with the chosen mesh and the rows of a step of `batches`, the mesh, the planner).
    Raises:
      ConfigError, a ValueError: answers cannot be sampled on this mesh; or the rows of a micro-batch cannot be divided
        evenly among the devices.
      PlanError, a ValueError: no training step fits the memory.
      ValueError: the GPU is refused; the mesh does not fit the devices that there are; or the host's memory is too
        small for the optimizer's states.
    """
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
    if batches.sees_model:
        require_sampling(config, chosen)
    mesh = partition.make_mesh(*chosen.sizes)
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


def require_sampling(config: TrainConfig, mesh: MeshConfig) -> None:
    """Raises ConfigError if the run's objective cannot sample its answers on this mesh, because the mesh divides
    weights (fsdp), or because the run has several processes. It is called only for objectives that train on answers
    which the model samples, such as GRPO: by `planned`, and in a run of several processes by the train and evaluate
    commands before they read anything. config: has the objective's name, for the message."""
    config.require_whole_weights(mesh)
    name = config.objective.name
    if (count := processes.count()) > 1:
        raise ConfigError(
            f"objective.name = {name}: {count} processes cannot share the sampling yet; run one process, which "
            "can use all GPUs of its machine (mesh.data)"
        )


def with_slots(
    planner: Planner | ForwardPlanner, model: Decoder, batches: BatchSource, answers: AnswerMetrics | None
) -> tuple[dict[str, SlotPlan], AnswerMetrics | None]:
    """Plans in how many slots a run samples answers, and in how many layers the weights are converted once for all
    tokens (models/generation/converted.py), by the memory that its weights and its optimizer leave between two steps,
    and limits `batches` to these numbers if it samples. A slot is a row of the sampler's batch, with its caches.

    Args:
      planner: of the run's steps.
      model: the model; its arrays may be shapes.
      batches: the source of the run's batches, which may sample.
      answers: the evaluation in which the model answers questions, or None.
    Returns:
      ({"answers" (if `batches` samples) and "generate" (if `answers` is given): the plan of the slots of that phase},
        which Trainer.memory_notes shows, empty if memory has no limit, nothing is sampled, or the trainer only
        evaluates; `answers` with the numbers of the plan "generate", or as it was given if there is none).
    Raises:
      ValueError: there is no room for one slot, or rows of answers have more tokens than the model has positions.
    """
    found: dict[str, SlotPlan] = {}
    if planner.budget_bytes is None or not isinstance(planner, Planner):
        return found, answers
    same_bits = answers is not None and answers.deterministic
    for name, rows, deterministic in (
        ("answers", batches.sampled_rows, False),
        ("generate", answers and answers.sampled_rows, same_bits),
    ):
        if rows is not None:
            used = planner.cost.fixed_bytes(planner.plan.micro_batches) + prefill_bytes(planner.cost, planner.device)
            found[name] = slots_for(model, planner.budget_bytes - used, rows.length, rows.most, deterministic)
    if "answers" in found:
        batches.limit_slots(found["answers"])
    if answers is not None and (plan := found.get("generate")) is not None:
        answers = dataclasses.replace(answers, most_slots=plan.slots, most_converted=plan.converted_layers)
    return found, answers


def require_starts_within(total_steps: int, config: TrainConfig, profile_steps: int) -> None:
    """Raises ValueError if profile.start or qat.start of `config` is not below `total_steps`, the run's, so that
    nothing would be traced or rounded. The Trainer calls it once the rows are read, because with `epochs` the config
    does not know the number of steps. profile_steps: the number of steps to trace; with 0, profile.start is not
    checked."""
    if profile_steps and config.profile.start >= total_steps:
        raise ValueError(f"profile.start = {config.profile.start}: the run has only {total_steps} steps")
    if config.qat is not None and config.qat.start >= total_steps:
        raise ValueError(f"qat.start = {config.qat.start}: the run has only {total_steps} steps")


def profile_facts(config: TrainConfig, batches: BatchSource, planner: Planner) -> dict[str, Any]:
    """The facts about a run that are stored with its profile, so that a profile can be read without the run:
    {"config": nested dict, "tokens_per_step": tokens of a step of `batches` with padding, "what": the run in words,
    with the plan of `planner`}."""
    rows, length, model = batches.rows_per_step, batches.length, config.model
    return {
        "config": config_to_dict(config),
        "tokens_per_step": rows * length,
        "what": f"{model.path or model.from_config}, {config.computes_in}, {rows} x {length:,} tokens a step, plan "
        f"{residuals_text(planner.plan.residuals)}",
    }
