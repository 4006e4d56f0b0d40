"""The tables of a report and of a comparison. Times are ms of the device per step."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtune.profile.device import Ceilings
from jaxtune.profile.roofline import Loss


@dataclasses.dataclass
class Share:
    """The time of one category or scope."""

    name: str  # the category's or scope's, "(no scope)", or "idle"
    ms: float  # mean over the steps, of the time booked on its events alone (Event.self_ns); idle time is the rest
    share: float  # `ms` divided by the step's ms
    per_step_ms: list[float]  # its ms in each captured step
    phase: str = ""  # "forward", "recompute" or "backward"; "" for a category, for idle time and where unknown


@dataclasses.dataclass
class KernelRow:
    """The calls of one kernel, copy or collective with one category, scope, phase and shape."""

    name: str  # the kernel's or copy's, shortened by scopes.short_name
    category: str  # one of scopes.CATEGORIES, such as "GEMM"
    scope: str  # the named scope, such as "layer/mlp"; "" if it has none
    phase: str  # "forward", "recompute" or "backward"; "" where unknown
    shape: str  # operands and result, such as "bf16[8,64], bf16[64,32] -> bf16[8,32]"; "" where unknown
    count: float  # calls per step
    ms: float  # mean per step, of the time booked on these calls alone (Event.self_ns)
    per_step_ms: list[float]  # the same in each captured step
    tflops: float = 0.0  # achieved TFLOP/s; 0 for transfers and where shapes do not tell
    tbps: float = 0.0  # achieved TB/s, of a transfer over its whole duration; 0 where the bytes are unknown
    bound: str = ""  # "compute" or "memory": which ceiling sets the least time; "" for transfers and where unknown
    of_ceiling: float = 0.0  # least time on this device over the time taken; 0 for transfers and where unknown


@dataclasses.dataclass
class Transfer:
    """All copies to the device, to the host, or collectives, per step. A transfer is exposed while no kernel, memset or
    copy within the device runs: the step waits for it.
    """

    name: str  # "copies to device", "copies to host" or "collectives"
    count: float  # number of them
    ms: float  # time in which at least one of them ran
    hidden_ms: float  # part of it in which kernels, memsets or copies within the device ran too
    exposed_ms: float  # the other part, in which none of these ran
    gb: float  # GB moved; 0 where unknown
    gb_per_s: float  # GB/s while at least one of them ran; 0 where the bytes are unknown
    # the at most five for which a step waited longest, the longest first: {"ms": the exposed ms booked on this one
    # transfer (Event.self_ns), "op": its instruction, or else its kernel, "scope", "step": the index of its step}
    waits: list[dict[str, Any]]

    @property
    def hidden(self) -> float:
        """The share of `ms` in which the device did other work."""
        return self.hidden_ms / self.ms if self.ms else 0.0

    @property
    def longest_wait(self) -> str:
        """The longest exposed time of one transfer, in words: "1.20 ms, copy-start.3"."""
        return f"{self.waits[0]['ms']:.2f} ms, {self.waits[0]['op']}" if self.waits else ""


@dataclasses.dataclass
class Idle:
    """Time within steps in which nothing ran, per step. A stretch shorter than 20 us is a launch gap, else a wait."""

    ms: float  # all idle time
    launch_gaps: float  # number of short gaps between launches
    launch_gap_ms: float  # sum of the short gaps
    wait_ms: float  # sum of the longer gaps, in which the device waited for the host
    # the at most five longest waits, the longest first: {"ms", "step": the index of its step, "before": the operator or
    # kernel that ran next, "" at the end of the step; "after": the one that ran last, "" at the start of the step}
    longest: list[dict[str, Any]]


@dataclasses.dataclass
class ReportData:
    """The tables of the report on one profile, without the methods that show them; means over the captured steps."""

    path: str  # the folder or file that was read, as the user gave it
    framework: str  # "jax" or "torch"
    device: str  # its kind, as the framework names it
    num_devices: int  # devices in the trace, of which the busiest is shown
    versions: dict[str, str]  # {package: version}, as recorded
    meta: dict[str, Any]  # what the program recorded about itself, such as {"tokens_per_step": 16384}
    notes: list[str]  # remarks on the trace and how it was read, sentences
    steps_ms: list[float]  # ms of each captured step
    step_ms: float  # their mean
    tokens_per_step: int | None  # as the program recorded it in meta; None where unknown
    categories: list[Share]  # those that occur, in the order of scopes.CATEGORIES; idle time last
    scopes: list[Share]  # one for each scope and phase, those with the most ms first; idle time last
    kernels: list[KernelRow]  # all of them, those with the most ms first
    transfers: list[Transfer]  # one for each of the three kinds that occurs
    idle: Idle  # the time in which nothing ran
    peak_memory_bytes: int  # the allocator's; else the sum of the buffers at the peak; 0 where both are unknown
    # the at most 12 largest groups of buffers at the peak: {"bytes": their sum, "count": their number, "kind", "what":
    # as in trace.Buffer}
    buffers: list[dict[str, Any]]
    flops_per_step: float  # FLOPs of all products in a step, those of attention included, whose shapes are known
    ceilings: Ceilings | None  # the device's rates; None where unknown
    losses: list[Loss]  # what a step could save, the largest first
    timeline: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)  # the middle step, for the HTML page

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the timeline."""
        out = dataclasses.asdict(self)
        del out["timeline"]
        return out


@dataclasses.dataclass
class Change:
    """A row of a comparison: means over the captured steps of A and B, and the verdict on B."""

    name: str  # of the category, scope, region or kernel ("A's → B's" if these differ), or "step"
    phase: str  # of the scope, region or kernel; "" for others
    a_ms: float  # A's ms per step; 0 where A does not have it
    b_ms: float  # B's ms per step, times ComparisonData.scale; 0 where B does not have it
    diff_ms: float  # B minus A
    # the spread of these times among the steps of one profile: its largest ms less its smallest (1 % of the mean for a
    # single step), of the profile in which that is larger
    noise_ms: float
    verdict: str  # of B against A: "same", "faster", "slower", "only in A" or "only in B"
    detail: str = ""  # scope and shape of a kernel; "" for others


@dataclasses.dataclass
class ComparisonData:
    """The tables of a comparison, without the methods that show them."""

    a: ReportData  # the base
    b: ReportData  # its times are not scaled
    scale: float  # factor on B's times: A's tokens per step over B's; 1 where one of them is unknown or both are equal
    step: Change  # of the whole step
    categories: list[Change]  # in the order of scopes.CATEGORIES
    # one for each phase of each scope, or of each region, a part of the model found by words in the scope's name
    # (comparison.region); those that take longest in A or in B first
    scopes: list[Change]
    aligned_by: str  # of what `scopes` are: "scope" where both programs use the same scope names, else "region"
    kernels: list[Change]  # one for the kernels of either profile that do the same work, the largest difference first
    sentences: list[str]  # what changed, in words
    notes: list[str]  # remarks on both profiles and on how they were compared

    @property
    def slower_by(self) -> float:
        """How much slower B's step is, as a fraction of A's; 0 within the noise."""
        return max(0.0, self.step.diff_ms / self.step.a_ms) if self.step.verdict == "slower" else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with `slower_by` and without timelines."""
        out = dataclasses.asdict(self) | {"slower_by": self.slower_by}
        return out | {"a": self.a.to_dict(), "b": self.b.to_dict()}
