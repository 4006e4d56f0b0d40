"""A table of numbers that were fitted to measurements of devices and not derived from shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Fitted[Numbers]:
    """A table of fitted numbers: {(device, implementation): (numbers, what they were fitted to)}.

    A device without numbers of its own is taken to be like the first device of the table that has the implementation,
    and an implementation without numbers like the table's first row: so the numbers of an H200 rank plans on every card
    until somebody measures that card and adds a row.
    """

    rows: Mapping[tuple[str, str], tuple[Numbers, str]]

    def of(self, implementation: str, device: str) -> Numbers:
        """The numbers for a device of this name, such as "NVIDIA H200" or "RTX 4090"."""
        same = {known: numbers for (known, name), (numbers, _) in self.rows.items() if name == implementation}
        if not same:
            return next(iter(self.rows.values()))[0]
        return next((numbers for known, numbers in same.items() if known in device), next(iter(same.values())))
