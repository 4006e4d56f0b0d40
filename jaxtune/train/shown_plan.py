"""`jaxtune train --plan` without weights and rows, from the model's shapes, for a device of this or another machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
from jax.sharding import AbstractMesh

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.files.positions import stretched
from jaxtune.models.files.quant import require_stated
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf, tower_config, weights_stored_in
from jaxtune.pallas.fitted import planned_for
from jaxtune.system import timing
from jaxtune.system.terminal import fitted
from jaxtune.train.config import ConfigError, MeshConfig, TrainConfig
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.batches import SampledRows
from jaxtune.train.data.packing.answers import packed_shape
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.planning import choice, cost, devices, fitting, plan_text, search, teacher_pass
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.meshes import mesh_of
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec import checks
from jaxtune.train.spec.pictures import refusal
from jaxtune.train.spec.setup import slots_between

if TYPE_CHECKING:
    from rich.console import Console

    from jaxtune.train.trainer import Trainer

_ASSUMED_PROMPT = 512  # tokens of the longest prompt, where rows are not read


@timing.during("plan", "", "planning")
def show_plan(config: TrainConfig, objective: Objective, console: Console) -> None:
    """Prints the plan of a run from shapes alone, for the config's device or this machine's, on a mesh that is chosen
    here if the config names none: placements, memory, time, longest row; then sampling, a teacher's pass, and the run's
    time.

    ValueError for an unknown model or device, no GPU, adapter.path (the adapter's settings are needed), a model that
    cannot be trained so, or rows that devices cannot share; PlanError if no plan fits. objective: the config's.
    """
    if config.adapter is not None and config.adapter.path is not None:
        raise ValueError(
            f"adapter.path = {config.adapter.path!r}: a plan without weights needs the adapter's settings: set "
            "adapter.path=null and adapter.r"
        )
    device = None if config.plan.device is None else _elsewhere(config.mesh, config.plan.device, config.plan.host_gb)
    if device is None and jax.local_devices()[0].platform == "cpu":
        raise ValueError(
            "plan.device is not set, and this machine has no GPU: name one, such as plan.device='RTX 4090'"
        )
    reads = bool(config.model.pictures)
    hf = find_config(config.model.from_config or config.model.path or "", published=not reads)
    hf = stretched(hf, config.model.rope_scaling, config.model.max_position_embeddings)
    tower = tower_config(hf) if reads else None
    if reads and not config.data.patches_per_row:
        raise ConfigError("data.patches_per_row is not set: a plan without rows needs the patches of a row's pictures")
    if reads and (words := refusal(objective, config.qat)):
        raise ConfigError(words)
    shape, stored_in = config_from_hf(hf), weights_stored_in(hf)
    require_stated(f"model.path = {config.model.path!r}", hf, config.model.load_in)
    config = replace(config, model=replace(config.model, load_in=config.model.load_in or stored_in))
    sizes = (-1,) if config.mesh is None else config.mesh.sizes
    sharing = None if -1 in sizes else math.prod(sizes)  # devices of a known mesh
    shared = config.shared_by(sharing or (1 if device is not None else jax.device_count()))
    spec = StepSpec.of(shared, objective, tower=tower)
    sampled = None
    if (drawn := objective.drawn) is not None:
        longest = _ASSUMED_PROMPT + drawn.max_completion_length
        open_length = isinstance(config.data.length, Unset)
        open_count = config.objective.rollout_func is not None  # which asks for any number of rows
        generations = 1 if objective.packed is None else objective.packed.steps_per_generation
        answers = None if open_count else spec.rows * generations
        most = longest if open_length else spec.length
        turns = bool(config.objective.tools or config.objective.environment_factory)
        sampled = SampledRows.of(drawn, most, answers, turns)
        if open_length:
            length, rows = packed_shape(longest, spec.rows, (sharing or 1) * (config.micro_batches or 1))
            spec = replace(spec, rows=rows, length=length)
            text = f"rows are not read: prompts of at most {_ASSUMED_PROMPT} tokens are assumed; set data.length"
            console.print(fitted(f"{text} for others", console), markup=False, highlight=False)
    with planned_for(config.plan.device):
        model = cost.abstract_model(shape, spec.model)
        trained = TrainedModel(model, config.numbers, config.qat, config.seed, keeps_model=False, weights=None)
        checks.require_trainable(objective, trained, config.optim.embedding_learning_rate)
        if device is None:
            mesh, why = mesh_of(spec, lambda: model)
            if why is not None:
                console.print(fitted(why, console), markup=False, highlight=False)
            device, count = _here(mesh)
            spec = spec.on(mesh, count)
        forecast, costs = _print_plan(spec, trained, model, shape, device, sampled, console)
        for line in teacher_pass.pass_lines(spec, shape, device, config.plan.device is not None):
            console.print(fitted(line, console), markup=False, highlight=False)
    price, devices = config.plan.dollars_per_hour, costs.shape.devices
    console.print(plan_text.finish_line(forecast, config.steps, price, devices, objective.samples))


def _print_plan(
    spec: StepSpec,
    trained: TrainedModel,
    model: Decoder,
    shape: DecoderConfig,
    device: Device,
    sampled: SampledRows | None,
    console: Console,
) -> tuple[Forecast, cost.StepCost]:
    """Prints the best plan, the longest row, and sampling between two steps; returns it with the step's costs."""
    budget_bytes = devices.budget(spec.memory, device)
    assert budget_bytes is not None  # a device with a data sheet has a memory
    costs = cost.step_cost(model, spec)
    try:
        forecast, _ = search.next_plan(
            costs, spec, device, search.Room(budget_bytes, devices.limit(spec.memory, device))
        )
    except choice.PlanError as error:
        fixes = fitting.fitting_settings(shape, spec, device, budget_bytes)
        raise choice.PlanError(error.smallest, budget_bytes, fixes) from None
    longest = fitting.longest_row(costs, spec, device, budget_bytes)
    plan_text.plan_elsewhere(forecast, costs, device, budget_bytes, longest, shape.context_length, console)
    if sampled is not None:  # rows are not read here, so that prompts are taken to be as long as there is room
        placed, plan = costs.placed(forecast.plan.moved), forecast.plan
        mesh = AbstractMesh(tuple(spec.mesh_shape), tuple(axis.name for axis in partition.AXES))
        slots = slots_between(placed, plan, device, budget_bytes, trained.sampled(plan, mesh), sampled)
        console.print(f"  sampling between two steps: {slots}", markup=False, highlight=False)
    return forecast, costs


def _elsewhere(mesh: MeshConfig | None, name: str, host_gb: float | None) -> Device:
    """A device of another machine. ValueError if it is unknown, or the mesh is to have all devices."""
    for key, size in ({} if mesh is None else mesh.axes).items():
        if size == -1:
            raise ValueError(f"mesh.{key} = -1: how many devices plan.device has beside it is not known: give a number")
    return devices.find_device(name, host_gb=host_gb)


def _here(mesh: MeshConfig) -> tuple[Device, int]:
    """(a device of this machine with its share of the host's memory, the mesh's number); ValueError for fewer."""
    devices_of_run = partition.make_mesh(*mesh.sizes)
    first = devices_of_run.local_devices[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    size = devices_of_run.size
    return devices.find_device(first.device_kind, limit, sharing=devices.devices_here(size)), size


def show_memory(trainer: Trainer, console: Console) -> dict[str, float]:
    """Prints the plan, compiles its step (and further ones until one fits), and prints predicted and compiled memory.
    Returns {"predicted", "compiled" and, if limited, "limit": GB}. PlanError if nothing fits.
    """
    planner = trainer.planner

    def show(line: str) -> None:
        console.print(fitted(line, console), markup=False, highlight=False)

    for line in planner.lines():
        show(line)
    programs = trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, show)
    if planner.device.name != "cpu":  # the speed of a CPU is not known
        show(trainer.finish_line(0))
    for line in [*trainer.memory_notes(), *trainer.pass_notes(), *trainer.disk_notes()]:
        show(line)
    need = planner.compiled_bytes(programs.accumulate, programs.update)
    return plan_text.memory_plan(planner.forecast, need, programs.seconds, planner.budget_bytes, console)
