"""The class of tables (`Fitted`) of numbers that were fitted to measurements on devices, such as the time of a kernel
relative to another. From them the planner forecasts time and memory, and layers make the durations by which the stack
distributes copies and collectives. The tables are in models/fitted.py and pallas/formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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
