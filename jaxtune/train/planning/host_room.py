"""What a step may have in host memory beside residuals, and what it leaves for residuals."""

from __future__ import annotations

import dataclasses

from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device, most_pinned_bytes
from jaxtune.train.planning.exchange import SYNC_ERRORS

_HOST_OTHER_BYTES = 4e9  # host memory of Python, its libraries and the compiler


def places(parts: StepCost, device: Device) -> list[StepCost]:
    """The costs with tables of embeddings and an adapter's states in each place where a plan may have them; `parts`
    itself first. Nothing moves if `device` shares the host's memory, or the host is too small beside a checkpoint's
    copy. States move without the tables only if they free more: the tables' rows are looked up while the device
    computes.
    """
    options = [parts]
    if not device.link:
        return options
    room = device.host_memory_bytes - saved_bytes(parts) - _HOST_OTHER_BYTES
    if not parts.table_on_host and 0.0 < parts.table.bytes <= room:
        hosted = parts.with_table(True)
        options += [hosted] if hosted.table_rows_bytes < parts.table.bytes else []
    if not parts.states_on_host and parts.states.bytes:
        freed = parts.fixed_bytes(1) - options[-1].fixed_bytes(1)
        moved = [option.with_states(True) for option in (options[-1:] if freed >= parts.states.bytes else options)]
        options += [option for option in moved if _pinnable(option, device) >= option.hosted_bytes]
    return options


def _pinnable(costs: StepCost, device: Device) -> float:
    used_bytes = saved_bytes(costs) + _HOST_OTHER_BYTES + (costs.table.bytes if costs.table_on_host else 0.0)
    return most_pinned_bytes(device, device.host_memory_bytes - used_bytes)


def beside_states(parts: StepCost, device: Device) -> Device:
    """`device` with the host memory that residuals may pin beside offloaded optimizer states. XLA's pool must fit
    beside 4 GB for Python and the compiler, tables, and a checkpoint's copy: without its room the first save kills the
    run.
    """
    return dataclasses.replace(device, host_bytes=max(_pinnable(parts, device) - parts.hosted_bytes, 0.0))


def trained_bytes(parts: StepCost) -> float:
    """Bytes of the trained parameters on one device, in their stored dtype."""
    return sum(size for name, size in parts.fixed.items() if name.startswith("trainable parameters"))


def saved_bytes(parts: StepCost) -> float:
    """Bytes of one device that a checkpoint copies to host memory."""
    states = parts.fixed["optimizer states"] + parts.fixed.get(SYNC_ERRORS, 0.0)
    return trained_bytes(parts) + states + parts.hosted_bytes
