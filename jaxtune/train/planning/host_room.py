"""What a step may have elsewhere beside residuals, and the host memory that it leaves for these."""

from __future__ import annotations

import dataclasses

from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device, most_pinned_bytes
from jaxtune.train.planning.movables.movable import Option
from jaxtune.train.planning.plan import StepPlan

HOST_OTHER_BYTES = 4e9  # host memory of Python, its libraries and the compiler


def places(costs: StepCost, device: Device) -> list[StepCost]:
    """The costs with each combination of options of movables for which the host has room; the least moved first.
    Nothing moves to the host if `device` shares its memory. What frees device memory and takes time does not move
    without what frees as much in less.
    """
    least = {word: max(costs.limits.get(word, (0, 0))[0], costs.level(word)) for word in costs.movables}
    placed: list[tuple[StepCost, float]] = [(costs.placed(least), 0.0)]
    for word, movable in costs.movables.items():
        further: list[tuple[StepCost, float]] = []
        for base, seconds in placed:
            cheaper = [base.fixed_bytes(1) - other.fixed_bytes(1) for other, time in placed if time <= seconds]
            for option in movable.options(base, device) if movable.able else ():
                at = movable.at(base, option.level)
                if option.level > base.level(word) and costs.may(word, option.level) and _fits(at, option, device):
                    if option.seconds <= 0 or max(cheaper) < -option.device_bytes:
                        further.append((at, seconds + option.seconds))
        placed += further
    return [option for option, _ in placed]


def _fits(costs: StepCost, option: Option, device: Device) -> bool:
    """Whether the host has room for the costs with an option, and the device a link to it."""
    if option.pageable_bytes and (not device.link or _room(device, _beside(costs)) < 0):
        return False
    return not option.pinned_bytes or (device.link > 0 and _pinnable(costs, device) >= costs.moved.pinned_bytes)


def _room(device: Device, beside_bytes: float) -> float:
    return device.host_memory_bytes - HOST_OTHER_BYTES - beside_bytes


def _beside(costs: StepCost) -> float:
    """With a checkpoint's copy: without room for it the first save kills the run."""
    return costs.saved_bytes + costs.moved.pageable_bytes


def _pinnable(costs: StepCost, device: Device) -> float:
    return pinnable_bytes(device, _beside(costs))


def pinnable_bytes(device: Device, beside_bytes: float) -> float:
    """The most bytes that may be pinned for a device while its process has `beside_bytes` of other host memory, and
    Python's: at most 70 % of the host, and XLA's pool fits beside.
    """
    return most_pinned_bytes(device, _room(device, beside_bytes))


def lacking_pinned(costs: StepCost, plan: StepPlan, pinned_bytes: float, device: Device) -> float | None:
    """Bytes that may be pinned where a plan moves something to the host and pins more (`pinned_bytes`); else None."""
    placed = costs.placed(plan.moved)
    if device.name == "cpu" or pinned_bytes <= max(room := _pinnable(placed, device), costs.moved.pinned_bytes):
        return None
    return room


class HostError(ValueError):
    """memory.plan pins more host memory than there is room for."""

    @classmethod
    def of(cls, plan: str, pinned_bytes: float, room_bytes: float, device: Device, fix: str) -> HostError:
        elsewhere = device.usual_host_bytes is not None
        return cls(
            f"memory.plan = {plan!r} pins {pinned_bytes / 1e9:.1f} GB of host memory, of which this device may pin "
            f"{room_bytes / 1e9:.1f} GB of {device.host_memory_bytes / 1e9:.1f} GB: {fix}"
            f"{'; set plan.host_gb if yours has more' if elsewhere else ''}"
        )


def beside_moved(costs: StepCost, device: Device) -> Device:
    """`device` with the host memory that residuals may pin beside what is moved."""
    return dataclasses.replace(device, host_bytes=max(_pinnable(costs, device) - costs.moved.pinned_bytes, 0.0))
