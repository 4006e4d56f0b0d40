"""What every trace is read into: kernels and copies of one device, with scope, work and steps."""

from __future__ import annotations

import dataclasses
from typing import Any

# What an event is, by the engine that ran it.
KERNEL, MEMSET, COPY, TO_HOST, TO_DEVICE, COLLECTIVE = "kernel", "memset", "copy", "to_host", "to_device", "collective"


class TraceError(ValueError):
    """The file is no trace that can be read; the message says which, why, and what would do."""


@dataclasses.dataclass(slots=True)
class Event:
    """One piece of work on the device.

    start_ns, end_ns: device clock, from the trace's first event. module: the program, by its number or name. stream:
    its line in the trace. scope: canonical named scope ("layer/mix"); phase: "forward", "recompute", "backward" or "".
    op: the HLO instruction or framework operator that launched it; shape: its operands and result in words. flops,
    moved_bytes: of the whole operator, on its main kernel; 0 where shapes do not tell. dtype: of the operands.
    """

    start_ns: float
    end_ns: float
    name: str
    stream: str
    kind: str = KERNEL
    category: str = ""
    scope: str = ""
    phase: str = ""
    module: str = ""
    op: str = ""
    shape: str = ""
    dtype: str = ""
    flops: float = 0.0
    moved_bytes: float = 0.0
    step: int = -1
    self_ns: float = 0.0  # wall time that is this event's own; see timeline.charge

    @property
    def duration_ns(self) -> float:
        return self.end_ns - self.start_ns


@dataclasses.dataclass
class Buffer:
    """A buffer that is live at the peak of a program."""

    num_bytes: int
    what: str
    kind: str


@dataclasses.dataclass
class Trace:
    """events in order of start; steps are (start_ns, end_ns)."""

    path: str
    framework: str
    device: str
    events: list[Event]
    steps: list[tuple[float, float]]
    num_devices: int = 1
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    peak_memory_bytes: int = 0
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    unmatched_ns: float = 0.0  # kernels of programs whose HLO is known, yet not found in it
