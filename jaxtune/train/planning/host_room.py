"""What a step may have in host memory beside residuals, and what it leaves for these: `places` gives the costs with the
tables of embeddings and the optimizer's states in each place where a plan may have them, and `beside_states`
the host memory that residuals may take. `saved_bytes` (of which `trained_bytes` are a part) is what a checkpoint copies
to the host."""

from __future__ import annotations

import dataclasses

from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device, most_pinned_bytes
from jaxtune.train.planning.exchange import SYNC_ERRORS

_HOST_OTHER_BYTES = 4e9  # host memory of Python, its libraries and the compiler


def places(parts: StepCost, device: Device) -> list[StepCost]:
    """The costs with the tables of embeddings, and the optimizer's states of an adapter, in each place where a plan may
    have them; `choose` and longest_row try each. The first are `parts`, the step's costs; what these have on the host
    stays there. Nothing else is moved there if `device` shares its memory with the host, if `parts.table` or
    `parts.states` says that it may not be, or if the host's memory is too small for it beside what a checkpoint copies
    there; nor are tables of which the rows of two steps take as much memory of the device. States are moved alone only
    if they free more memory than the tables, whose rows are looked up while the device computes and cost no time."""
    found = [parts]
    if not device.link:
        return found
    room = device.host_memory_bytes - saved_bytes(parts) - _HOST_OTHER_BYTES
    if not parts.table_on_host and 0.0 < parts.table.bytes <= room:
        hosted = parts.with_table(True)
        found += [hosted] if hosted.table_rows_bytes < parts.table.bytes else []
    if not parts.states_on_host and parts.states.bytes:
        freed = parts.fixed_bytes(1) - found[-1].fixed_bytes(1)
        moved = [one.with_states(True) for one in (found[-1:] if freed >= parts.states.bytes else found)]
        found += [one for one in moved if _pinnable(one, device) >= one.hosted_bytes]
    return found


def _pinnable(parts: StepCost, device: Device) -> float:
    """The host memory that `device` may pin for residuals and optimizer's states, of which `beside_states` tells more.
    parts: the step's costs."""
    taken = saved_bytes(parts) + _HOST_OTHER_BYTES + (parts.table.bytes if parts.table_on_host else 0.0)
    return most_pinned_bytes(device, device.host_memory_bytes - taken)


def beside_states(parts: StepCost, device: Device) -> Device:
    """Returns `device` with less host memory that it may pin (`host_bytes`): what residuals may take beside the
    optimizer's offloaded states, at least 0. The states are subtracted from the most that may be pinned so that XLA's
    pool of pinned memory fits (`most_pinned_bytes`) into what is left of the host's memory (host_memory_bytes) beside
    4 GB for Python and the compiler, tables of embeddings on the host, and the copy of the state that a
    checkpoint makes (`saved_bytes`). Without room for that copy, a run would be killed at its first save. `choose`
    searches with the result, and `fitting` does too. parts: the step's costs."""
    return dataclasses.replace(device, host_bytes=max(_pinnable(parts, device) - parts.hosted_bytes, 0.0))


def trained_bytes(parts: StepCost) -> float:
    """Bytes of the trained parameters on one device, in the dtype in which they are stored, for the forecasts of
    phases, of how many held-out questions fit when they are answered, and of what a save copies to the host. parts: the
    step's costs."""
    return sum(size for name, size in parts.fixed.items() if name.startswith("trainable parameters"))


def saved_bytes(parts: StepCost) -> float:
    """Bytes that a checkpoint saves of one device, and a save copies to host memory: trained parameters, optimizer
    states (also those on the host) and errors of the gradient sync. The planner leaves as much host memory free for it,
    and forecasts the phases "save" and "resume" by it. parts: the step's costs."""
    states = parts.fixed["optimizer states"] + parts.fixed.get(SYNC_ERRORS, 0.0)
    return trained_bytes(parts) + states + parts.hosted_bytes
