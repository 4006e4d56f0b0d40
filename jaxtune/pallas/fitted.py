"""Tables of numbers that were fitted to measurements on devices, such as relative times of kernels, for forecasts of
time and memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

from jaxtune.pallas import targets

_planned: contextvars.ContextVar[str | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(device: str | None) -> Iterator[None]:
    """A context in which `device_name` returns `device` (plan.device), such as "RTX 4090"; None: this machine's.
    Kernels and block sizes do not change.
    """
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def device_name() -> str:
    """The device whose fitted numbers count: that of `planned_for`, else the GPU that is compiled for, or ""."""
    return _planned.get() or targets.device_kind() or ""


@dataclasses.dataclass(frozen=True)
class Fitted[Numbers]:
    """A table of fitted numbers by device and implementation. A device without numbers gets those of the first row with
    its implementation, and an implementation without any the first row's: an H200's rank plans on every card until it
    is measured. The order of rows therefore matters.
    """

    # {(a text that the device's name contains, such as "H200", implementation): (numbers, a remark on the measurements
    # to which they were fitted)}
    rows: Mapping[tuple[str, str], tuple[Numbers, str]]

    def of(self, implementation: str, device: str) -> Numbers:
        """The numbers of an implementation, such as "cudnn", on a device, such as "NVIDIA H200"."""
        by_device = {label: numbers for (label, name), (numbers, _) in self.rows.items() if name == implementation}
        if not by_device:
            return next(iter(self.rows.values()))[0]
        return next(
            (numbers for label, numbers in by_device.items() if label in device), next(iter(by_device.values()))
        )
