"""The choice of a mesh for a run whose config names none (`mesh_of`), by what each possible mesh would need and how
fast it would be (`choose_mesh`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.system import processes
from jaxtune.train.config import MeshConfig, TrainConfig
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast

# Two meshes are equally fast if their forecasts differ by less than this ratio: forecasts of speed are 0.92 to 1.04 of
# what was measured (README.md).
_ALIKE = 0.92


def mesh_of(config: TrainConfig, model: Callable[[], Decoder], **changes: Any) -> tuple[MeshConfig, str | None]:
    """The mesh of a run and the reason for it: what the config names, or a choice for the GPUs of the run. The
    trainer, the loading of weights and --plan call it. All processes must call it, and the first one chooses for all.

    Args:
      config: the run's.
      model: a function that returns the model that trains, whose arrays may be abstract; it is called only if there is
        a choice.
      changes: further arguments of step_cost, such as the optimizer.
    Returns:
      (mesh, reason in words); the reason is None if there was no choice: the config names a mesh, there is one device,
        or the devices are CPUs. The CPUs that JAX shows in one process are one machine, and get a mesh of one device;
        those of several processes share the rows (data=-1).
    Raises:
      ValueError: the GPU is refused; the host's memory is too small for the optimizer's states; or config.memory.plan
        is not for this model. It is no error here if no plan fits.
    """
    found, here = jax.devices(), jax.local_devices()[0]
    if config.mesh is not None or len(found) == 1 or (here.platform == "cpu" and processes.count() == 1):
        return config.mesh or MeshConfig(), None
    if here.platform == "cpu":
        return MeshConfig(data=-1), None
    what = model()
    limit = processes.smallest((here.memory_stats() or {}).get("bytes_limit"))
    device = devices.find_device(here.device_kind, limit, sharing=devices.devices_here(len(found)))

    def cost_on(mesh: MeshConfig) -> StepCost:
        """The costs of a step of the run on `mesh`."""
        return step_cost(what, dataclasses.replace(config, mesh=mesh), **changes)

    budget_bytes, on_one_host = devices.budget(config, device), len(found) // processes.hosts()

    def chosen() -> tuple[str, tuple[int, ...]]:
        """(the reason, the sizes of the chosen mesh), values that processes can exchange."""
        mesh, why = choose_mesh(cost_on, config, device, budget_bytes, len(found), on_one_host)
        return why, mesh.sizes

    why, sizes = processes.of_first(chosen)
    return MeshConfig(*sizes), why


def choose_mesh(
    cost_on: Callable[[MeshConfig], StepCost],
    config: TrainConfig,
    device: Device,
    budget_bytes: float | None,
    count: int,
    on_one_host: int | None = None,
) -> tuple[MeshConfig, str]:
    """The mesh with the fastest plan by forecast, over as many of `count` devices as can share the rows of a step
    equally, or those of a micro-batch if config.micro_batches is set. `mesh_of` calls it in the first process.

    Meshes that divide weights are left out for runs that cannot divide them: with optim.offload, or if the model
    generates during the run. Of meshes whose forecasts are too close to tell apart, the one that divides weights over
    the fewest devices is chosen. Weights are divided only within one host if any such plan fits, because dividing them
    between hosts has not been measured. If no plan fits on any mesh, the one that needs the least memory is returned,
    and the planner then raises an error that says what would fit.

    Args:
      cost_on: a function that returns the costs of a step on a mesh.
      config: the run's.
      device: one of the devices, which are all alike.
      budget_bytes: its memory; None: no limit.
      count: number of devices.
      on_one_host: number of devices of one host; None: all are on one host.
    Returns:
      (mesh, reason in words); the reason also says how fast the other meshes would be or what they need, and how many
        devices are left out.
    Raises:
      ValueError: the host's memory is too small for the optimizer's states; or config.memory.plan is not for this
        model.
    """
    rows = config.rows_per_step // (config.micro_batches or 1)
    used = next(number for number in range(count, 0, -1) if rows % number == 0)
    # Settings that config.py refuses in combination with mesh.fsdp.
    divides = not (config.optim.offload or config.evaluation.asking or config.objective.samples)
    meshes = [MeshConfig(used // f, f) for f in range(1, used + 1) if used % f == 0 and (f == 1 or divides)]
    found: dict[MeshConfig, Forecast] = {}
    errors: dict[MeshConfig, PlanError] = {}
    for mesh in meshes:
        try:
            found[mesh] = choose(cost_on(mesh), config, device, budget_bytes)
        except PlanError as error:
            errors[mesh] = error
    if found:
        near = count if on_one_host is None else on_one_host
        on_a_host = [mesh for mesh in found if mesh.fsdp <= near] or list(found)
        least = min(found[mesh].step_seconds for mesh in on_a_host)
        alike = [mesh for mesh in on_a_host if found[mesh].step_seconds * _ALIKE <= least]
        best = min(alike, key=lambda mesh: mesh.fsdp)
        words = [f"mesh: {_name(best)}, {_figures(found[best])}"]
    else:
        best = min(errors, key=lambda mesh: errors[mesh].smallest.peak_bytes)
        words = [f"mesh: {_name(best)}"]
    words += [f"{_name(mesh)} {_figures(forecast)}" for mesh, forecast in found.items() if mesh != best]
    words += [f"{_name(mesh)} needs {error.smallest.peak_bytes / 1e9:.1f} GB" for mesh, error in errors.items()]
    if used < count:
        words.append(f"{count - used} of {count} devices are left out: {rows} rows cannot be shared by them all")
    return best, "; ".join(words)


def _name(mesh: MeshConfig) -> str:
    """The sizes of the axes of `mesh` in words, such as "data=2 fsdp=4", for the reason that is printed with a chosen
    mesh."""
    return " ".join(f"{key}={value}" for key, value in mesh.axes.items())


def _figures(forecast: Forecast) -> str:
    """The predicted speed (tokens/s) and memory (GB a device) of a forecast as text, for the words about a mesh."""
    return f"{forecast.tokens_per_second:,.0f} tokens/s at {forecast.peak_bytes / 1e9:.1f} GB a device"
