"""The form into which every trace is read: kernels and copies of one device, with scope, work and steps."""

from __future__ import annotations

import dataclasses
from typing import Any

# The kinds of events, by the engine that runs them.
KERNEL, MEMSET, COPY, TO_HOST, TO_DEVICE, COLLECTIVE = "kernel", "memset", "copy", "to_host", "to_device", "collective"


class TraceError(ValueError):
    """No trace can be read from a file; the message says why and what would help."""


@dataclasses.dataclass(slots=True)
class Event:
    """One piece of work on the device: a kernel, a memset, a copy or a collective."""

    start_ns: float  # device clock, counted from the trace's first event
    end_ns: float
    name: str  # of the kernel or copy
    stream: str  # its line in the trace
    kind: str = KERNEL  # one of the kinds above
    category: str = ""  # one of scopes.CATEGORIES
    scope: str = ""  # the named scope, such as "layer/mix"
    phase: str = ""  # "forward", "recompute", "backward" or ""
    module: str = ""  # the program, by its number or name
    op: str = ""  # the HLO instruction or framework operator that launched it
    shape: str = ""  # operands and result in words
    dtype: str = ""  # of the operands
    flops: float = 0.0  # of the whole operator, booked on its main kernel; 0 where shapes do not tell
    moved_bytes: float = 0.0  # bytes read and written by the whole operator, booked on its main kernel
    step: int = -1  # index of its step; -1 outside of all steps
    self_ns: float = 0.0  # wall time booked on this event; see timeline.charge

    @property
    def duration_ns(self) -> float:
        """From start to end, overlaps included."""
        return self.end_ns - self.start_ns


@dataclasses.dataclass
class Buffer:
    """A buffer that is live at the peak of a program."""

    num_bytes: int
    what: str  # the argument or the instruction that it holds the value of
    kind: str  # "argument", "output", "temporary", "constant" or "fragmentation"


@dataclasses.dataclass
class Trace:
    """The work of one device over some steps."""

    path: str  # the trace's file
    framework: str  # "jax" or "torch"
    device: str  # its kind, as the framework names it
    events: list[Event]  # in order of their starts
    steps: list[tuple[float, float]]  # (start_ns, end_ns) of each step
    num_devices: int = 1  # devices in the trace, of which this is the busiest
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the program recorded about itself
    notes: list[str] = dataclasses.field(default_factory=list)  # remarks for the reader of the report
    peak_memory_bytes: int = 0  # the allocator's; 0 where not recorded
    buffers: list[Buffer] = dataclasses.field(default_factory=list)  # those live at the peak of the largest program
    unmatched_ns: float = 0.0  # time of kernels that were not found in the HLO of their program
