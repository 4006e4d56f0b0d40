"""What a step may have elsewhere beside residuals, and the host memory that it leaves for these."""

from __future__ import annotations

import dataclasses

from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device, most_pinned_bytes
from jaxtune.train.planning.movables.movable import Option

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
    if option.pageable_bytes and (not device.link or costs.moved.pageable_bytes > _host_bytes(costs, device)):
        return False
    return not option.pinned_bytes or (device.link > 0 and _pinnable(costs, device) >= costs.moved.pinned_bytes)


def _host_bytes(costs: StepCost, device: Device) -> float:
    """Host memory without a checkpoint's copy: without room for it the first save kills the run."""
    return device.host_memory_bytes - costs.saved_bytes - HOST_OTHER_BYTES


def _pinnable(costs: StepCost, device: Device) -> float:
    """XLA's pool must fit beside everything else."""
    return most_pinned_bytes(device, _host_bytes(costs, device) - costs.moved.pageable_bytes)


def beside_moved(costs: StepCost, device: Device) -> Device:
    """`device` with the host memory that residuals may pin beside what is moved."""
    return dataclasses.replace(device, host_bytes=max(_pinnable(costs, device) - costs.moved.pinned_bytes, 0.0))
