"""The class of tables (`Fitted`) of numbers that were fitted to measurements on devices, such as the time of a kernel
relative to another. From them the planner forecasts time and memory, and layers make the durations by which the stack
distributes copies and collectives. The tables are in models/fitted.py and pallas/formats. `device_name` is the device
whose numbers count: this machine's, or within `planned_for` the one for which a plan is made."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

from jaxtune.pallas import dispatch

_planned: contextvars.ContextVar[str | None] = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(device: str | None) -> Iterator[None]:
    """A context in which `device_name` returns `device`, the name of another machine's device for which a plan is made
    (plan.device), such as "RTX 4090"; None: that of this machine, as outside of the context. Which kernels run, and
    with which block sizes, does not depend on it."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def device_name() -> str:
    """The name of the device whose fitted numbers count where layers and costs look them up without being given a
    device: within `planned_for` the planned one, else the GPU that programs are compiled for (dispatch.device_kind);
    "" without a GPU, for which `Fitted.of` returns the first device's numbers."""
    return _planned.get() or dispatch.device_kind() or ""


@dataclasses.dataclass(frozen=True)
class Fitted[Numbers]:
    """A table of fitted numbers, by device and implementation; `of` looks them up. Each table is a constant of
    models/fitted.py or, if it is of one format of weights, of pallas/formats. `Numbers` is the type of an entry, such
    as float.

    A device without numbers gets those of the first device in the table that has the implementation; an implementation
    without numbers gets the first row. The numbers of an H200 thus rank plans on every card until somebody measures
    that card and adds a row. The order of the rows therefore matters.
    """

    # {(a text that the device's name contains, such as "H200", implementation): (numbers, a remark on the measurements
    # to which they were fitted)}
    rows: Mapping[tuple[str, str], tuple[Numbers, str]]

    def of(self, implementation: str, device: str) -> Numbers:
        """Returns the numbers for an implementation on a device, with which the planner forecasts time and memory.

        Args:
          implementation: such as "cudnn" or "xla". One without a row gets the numbers of the table's first row.
          device: the device's name, such as "NVIDIA H200". One without a row of this implementation gets the numbers of
            the implementation's first row.
        """
        same = {known: numbers for (known, name), (numbers, _) in self.rows.items() if name == implementation}
        if not same:
            return next(iter(self.rows.values()))[0]
        return next((numbers for known, numbers in same.items() if known in device), next(iter(same.values())))
