"""The form into which every trace is read."""

from __future__ import annotations

import dataclasses
from typing import Any

# The kinds of events, by the engine that runs them.
KERNEL, MEMSET, COPY, TO_HOST, TO_DEVICE, COLLECTIVE = "kernel", "memset", "copy", "to_host", "to_device", "collective"


class TraceError(ValueError):
    """No trace can be read, or its record is damaged; the message says what would help."""


@dataclasses.dataclass(slots=True)
class Event:
    """One piece of work on the device: a kernel, a memset, a copy, a collective; or an operator on the CPU."""

    start_ns: float  # device clock, counted from the trace's first event
    end_ns: float  # on the same clock
    name: str  # of the kernel or copy
    stream: str  # the stream that ran it, as the trace names it
    kind: str = KERNEL  # "kernel", "memset", "copy", "to_host", "to_device" or "collective"
    category: str = ""  # what it is for: one of scopes.CATEGORIES, such as "GEMM" or "loss"
    scope: str = ""  # the named scope, such as "layer/mix"; "" if it has none
    phase: str = ""  # "forward", "recompute" or "backward"; "" where unknown
    module: str = ""  # the program, by its number or name; "" if the trace names none, as PyTorch's
    op: str = ""  # the HLO instruction or framework operator that launched it; "" where unknown
    shape: str = ""  # operands and result, such as "bf16[8,64], bf16[64,32] -> bf16[8,32]"; "" where unknown
    dtype: str = ""  # of the first operand, or of the result if there is none, such as "bf16"; "" where unknown
    flops: float = 0.0  # of the whole operator, booked on its main kernel; 0 for others, and where shapes do not tell
    # bytes read and written by the whole operator, booked on its main kernel; 0 as for flops. For a copy between host
    # and device it is the copied bytes, for one within the device twice these
    moved_bytes: float = 0.0
    step: int = -1  # index of its step; -1 outside of all steps
    self_ns: float = 0.0  # time booked on this event alone, so that no moment counts twice; set by timeline.charge

    @property
    def duration_ns(self) -> float:
        """From its start to its end, also while other events ran."""
        return self.end_ns - self.start_ns


@dataclasses.dataclass
class Buffer:
    """A part of the device's memory that is in use at the peak."""

    num_bytes: int  # its size
    what: str  # the argument or instruction that it holds the value of; words, where it holds that of no single one
    kind: str  # "argument", "output", "temporary", "constant" or "fragmentation"


@dataclasses.dataclass
class Trace:
    """The work of one device over some steps."""

    path: str  # the folder or file that was read, as the user gave it
    framework: str  # "jax" or "torch"
    device: str  # its kind, as the framework names it
    events: list[Event]  # in order of their starts
    steps: list[tuple[float, float]]  # (start_ns, end_ns) of each step, in order, on the events' clock
    num_devices: int = 1  # devices in the trace, of which this is the busiest
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # {package: version}, as recorded
    # what the program recorded about itself, such as {"tokens_per_step": 16384, "what": a text}
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)  # remarks for the reader of the report
    peak_memory_bytes: int = 0  # the allocator's; 0 where not recorded
    buffers: list[Buffer] = dataclasses.field(default_factory=list)  # those live at the peak of the largest program
    unmatched_ns: float = 0.0  # time of kernels and copies that were not found in their program's HLO
