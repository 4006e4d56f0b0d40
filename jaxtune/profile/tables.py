"""The tables of a report and of a comparison, which report.py and comparison.py fill and text.py and page.py show."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtune.profile.device import Ceilings
from jaxtune.profile.roofline import Loss


@dataclasses.dataclass
class Share:
    """The time of one category or scope."""

    name: str
    ms: float  # mean over the steps
    share: float  # of the step
    per_step_ms: list[float]  # one for each captured step
    phase: str = ""  # "forward", "recompute", "backward" or ""


@dataclasses.dataclass
class KernelRow:
    """The calls of one kernel from one scope with one shape."""

    name: str
    category: str
    scope: str
    phase: str
    shape: str  # operands and result in words
    count: float  # calls per step
    ms: float  # per step
    per_step_ms: list[float]
    tflops: float = 0.0  # achieved TFLOP/s; 0 where shapes do not tell
    tbps: float = 0.0  # achieved TB/s; 0 where shapes do not tell
    bound: str = ""  # "compute" or "memory": which ceiling sets the least time
    of_ceiling: float = 0.0  # least time on this device over the time taken; 0 where unknown


@dataclasses.dataclass
class Transfer:
    """Copies over the host link in one direction, or collectives; figures are per step."""

    name: str
    count: float
    ms: float  # time in which at least one of them ran
    hidden_ms: float  # part of it under compute
    exposed_ms: float  # part of it in which no kernel ran
    gb: float
    gb_per_s: float
    waits: list[dict[str, Any]]  # the longest exposed ones: {"ms": exposed time, "op": what was copied}

    @property
    def hidden(self) -> float:
        """The share of their time that ran under compute."""
        return self.hidden_ms / self.ms if self.ms else 0.0

    @property
    def longest_wait(self) -> str:
        """The longest exposed transfer in words; "" without one."""
        return f"{self.waits[0]['ms']:.2f} ms, {self.waits[0]['op']}" if self.waits else ""


@dataclasses.dataclass
class Idle:
    """Time in which nothing ran on the device, as means per step. It is either a launch gap, shorter than a fixed
    limit, or a wait for the host."""

    ms: float
    launch_gaps: float  # number of short gaps between launches
    launch_gap_ms: float  # sum of the short gaps
    wait_ms: float  # sum of the longer gaps, in which the device waited for the host
    # the longest waits: {"ms", "before": the kernel after it, "after": the kernel before it}
    longest: list[dict[str, Any]]


@dataclasses.dataclass
class ReportData:
    """One profile as tables. Times are ms of device time per step, means over the captured steps."""

    path: str  # the trace's file
    framework: str  # "jax" or "torch"
    device: str  # its kind, as the framework names it
    num_devices: int  # devices in the trace, of which the busiest is shown
    versions: dict[str, str]
    meta: dict[str, Any]  # what the program recorded about itself
    notes: list[str]  # remarks on the trace and how it was read
    steps_ms: list[float]  # one for each captured step
    step_ms: float
    tokens_per_step: int | None  # from meta; None where unknown
    categories: list[Share]
    scopes: list[Share]
    kernels: list[KernelRow]
    transfers: list[Transfer]
    idle: Idle
    peak_memory_bytes: int
    buffers: list[dict[str, Any]]  # largest buffers at the peak: {"bytes", "count", "kind", "what"}
    flops_per_step: float  # of all products
    ceilings: Ceilings | None  # the device's rates; None where unknown
    losses: list[Loss]  # the largest first
    timeline: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)  # one step for the HTML page

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON, without the timeline."""
        out = dataclasses.asdict(self)
        del out["timeline"]
        return out


@dataclasses.dataclass
class Change:
    """One row of a comparison."""

    name: str
    phase: str
    a_ms: float  # per step
    b_ms: float  # per step, scaled to A's tokens where the two differ in them
    diff_ms: float  # B minus A
    noise_ms: float  # by how much the steps of the two runs differ among themselves
    verdict: str  # of B against A: "same", "faster", "slower", "only in A" or "only in B"
    detail: str = ""  # scope and shape of a kernel


@dataclasses.dataclass
class ComparisonData:
    """Two profiles side by side."""

    a: ReportData  # the base
    b: ReportData
    scale: float  # factor on B's times: A's tokens per step over B's
    step: Change
    categories: list[Change]
    scopes: list[Change]
    aligned_by: str  # "scope" where both programs use the same scope names, else "region"
    kernels: list[Change]
    sentences: list[str]  # what changed, in words
    notes: list[str]

    @property
    def slower_by(self) -> float:
        """How much slower B's step is, as a fraction of A's; 0 where it is not slower beyond the noise."""
        return max(0.0, self.step.diff_ms / self.step.a_ms) if self.step.verdict == "slower" else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON."""
        out = dataclasses.asdict(self) | {"slower_by": self.slower_by}
        return out | {"a": self.a.to_dict(), "b": self.b.to_dict()}
