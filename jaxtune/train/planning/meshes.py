"""Over which devices a run goes whose config names no mesh: chosen by what each mesh would hold and how fast it is."""

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

# Forecasts of speed are 0.92 to 1.04 of what was measured (README.md): less of a difference says nothing.
_ALIKE = 0.92


def mesh_of(config: TrainConfig, model: Callable[[], Decoder], **changes: Any) -> tuple[MeshConfig, str | None]:
    """(the mesh of a run, why it is this one): what the config names, or one chosen for the GPUs that are here.

    The words are None where there was nothing to choose: a mesh that is named, one device, or CPUs, which are one
    machine however many JAX is told that there are.

    Args:
      model: gives what trains, whose arrays may be abstract; asked where there is a choice. changes: of step_cost.
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
        return step_cost(what, dataclasses.replace(config, mesh=mesh), **changes)

    budget_bytes, on_one_host = devices.budget(config, device), len(found) // processes.hosts()

    def chosen() -> tuple[int, int, str]:
        mesh, why = choose_mesh(cost_on, config, device, budget_bytes, len(found), on_one_host)
        return mesh.data, mesh.fsdp, why

    data, fsdp, why = processes.of_first(chosen)
    return MeshConfig(data, fsdp), why


def choose_mesh(
    cost_on: Callable[[MeshConfig], StepCost],
    config: TrainConfig,
    device: Device,
    budget_bytes: float | None,
    count: int,
    on_one_host: int | None = None,
) -> tuple[MeshConfig, str]:
    """(the fastest mesh of as many of `count` devices as can share the rows, why); of those that forecasts cannot tell
    apart, that which divides least. Weights are divided over the devices of one host, of which it has `on_one_host`
    (None: all), if any such plan fits: nobody has measured what lies between hosts. Where no plan fits any, that which
    needs least: the planner then says what would.

    Args:
      cost_on: the step of the config on a mesh.
    """
    rows = config.rows_per_step // (config.micro_batches or 1)
    used = next(number for number in range(count, 0, -1) if rows % number == 0)
    # What config.py refuses beside mesh.fsdp.
    divides = not (config.optim.offload or config.evaluation.exact_match_rows)
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
    return f"data={mesh.data} fsdp={mesh.fsdp}"


def _figures(forecast: Forecast) -> str:
    return f"{forecast.tokens_per_second:,.0f} tokens/s at {forecast.peak_bytes / 1e9:.1f} GB a device"
