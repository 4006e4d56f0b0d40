"""The choice of a mesh for a run whose config names none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.system import processes
from jaxtune.train.config import MeshConfig
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.cost import StepCost, step_cost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.host_room import HostError
from jaxtune.train.planning.step_spec import StepSpec

# Two meshes are equally fast if their forecasts differ by less than this ratio: forecasts of speed are 0.92 to 1.04 of
# what was measured (notes/planning.md).
_ALIKE = 0.92


def mesh_of(spec: StepSpec, model: Callable[[], Decoder]) -> tuple[MeshConfig, str | None]:
    """(mesh, reason or None) of a run: the given one, or a choice for its GPUs. Collective; the first process chooses
    for all.

      model: returns the model that trains, perhaps abstract; called if there is a choice.

    No choice, hence no reason: a mesh is given, there is one device, or CPUs. CPUs of one process are one
    machine; those of several share the rows (data=-1). ValueError if the GPU is refused, the host is too small for
    optimizer states or memory.plan is not for this model; no error if nothing fits.
    """
    all_devices, local_device = jax.devices(), jax.local_devices()[0]
    if spec.mesh is not None or len(all_devices) == 1 or (local_device.platform == "cpu" and processes.count() == 1):
        return spec.mesh or MeshConfig(), None
    if local_device.platform == "cpu":
        return MeshConfig(data=-1), None
    trained_model = model()
    limit = processes.smallest((local_device.memory_stats() or {}).get("bytes_limit"))
    device = devices.find_device(local_device.device_kind, limit, sharing=devices.devices_here(len(all_devices)))

    def cost_on(mesh: MeshConfig) -> StepCost:
        return step_cost(trained_model, dataclasses.replace(spec, mesh=mesh))

    budget_bytes, on_one_host = devices.budget(spec.memory, device), len(all_devices) // processes.hosts()

    def chosen() -> tuple[str, tuple[int, ...]]:
        mesh, why = choose_mesh(cost_on, spec, device, budget_bytes, len(all_devices), on_one_host)
        return why, mesh.sizes

    why, sizes = processes.of_first(chosen)
    return MeshConfig(*sizes), why


def choose_mesh(
    cost_on: Callable[[MeshConfig], StepCost],
    spec: StepSpec,
    device: Device,
    budget_bytes: float | None,
    count: int,
    on_one_host: int | None = None,
) -> tuple[MeshConfig, str]:
    """(mesh, reason) with the fastest plan, over as many of `count` devices as share the rows of a step (or set
    micro-batch) equally.

    Of meshes too close to tell apart, the one that divides weights least wins, and within one host if any fits:
    division between hosts is unmeasured. If nothing fits, the mesh that needs least is returned, and the planner then
    raises. HostError if every mesh lacks host memory for memory.plan; ValueError as `mesh_of`.

      cost_on: costs of a step on a mesh.
      on_one_host: devices of one host; None: all.
      budget_bytes: of each device's memory; None: no limit.
    """
    rows = spec.rows // (spec.micro_batches or 1)
    used_devices = next(number for number in range(count, 0, -1) if rows % number == 0)
    # What is refused in combination with mesh.fsdp.
    divides = not spec.optim.offload
    meshes = [
        MeshConfig(used_devices // f, f)
        for f in range(1, used_devices + 1)
        if used_devices % f == 0 and (f == 1 or divides)
    ]
    forecasts: dict[MeshConfig, Forecast] = {}
    errors: dict[MeshConfig, PlanError] = {}
    refused: dict[MeshConfig, HostError] = {}
    for mesh in meshes:
        try:
            forecasts[mesh] = choose(cost_on(mesh), spec, device, budget_bytes)
        except PlanError as error:
            errors[mesh] = error
        except HostError as error:
            refused[mesh] = error
    if len(refused) == len(meshes):
        raise refused[meshes[-1]]
    if forecasts:
        near = count if on_one_host is None else on_one_host
        on_a_host = [mesh for mesh in forecasts if mesh.fsdp <= near] or list(forecasts)
        least = min(forecasts[mesh].device_seconds for mesh in on_a_host)
        alike = [mesh for mesh in on_a_host if forecasts[mesh].device_seconds * _ALIKE <= least]
        best = min(alike, key=lambda mesh: mesh.fsdp)
        words = [f"mesh: {_name(best)}, {_figures(forecasts[best])}"]
    else:
        best = min(errors, key=lambda mesh: errors[mesh].smallest.peak_bytes)
        words = [f"mesh: {_name(best)}"]
    words += [f"{_name(mesh)} {_figures(forecast)}" for mesh, forecast in forecasts.items() if mesh != best]
    words += [f"{_name(mesh)} needs {error.smallest.peak_bytes / 1e9:.1f} GB" for mesh, error in errors.items()]
    words += [f"{_name(mesh)} lacks host memory for memory.plan" for mesh in refused]
    if used_devices < count:
        words.append(
            f"{count - used_devices} of {count} devices are left out: {rows} rows cannot be shared by them all"
        )
    return best, "; ".join(words)


def _name(mesh: MeshConfig) -> str:
    return " ".join(f"{key}={value}" for key, value in mesh.axes.items())


def _figures(forecast: Forecast) -> str:
    return f"{forecast.tokens_per_second:,.0f} tokens/s at {forecast.peak_bytes / 1e9:.1f} GB a device"
