"""The tables of a report and of a comparison, which report.py and comparison.py fill and text.py and page.py show."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtune.profile.device import Ceilings
from jaxtune.profile.roofline import Loss


@dataclasses.dataclass
class Share:
    """The time of one category or scope, a row of the report's tables "By category" and "By scope"."""

    name: str  # the category's or scope's, "(no scope)", or "idle"
    ms: float  # mean over the steps
    share: float  # `ms` divided by the step's ms
    per_step_ms: list[float]  # its ms in each captured step
    phase: str = ""  # "forward", "recompute" or "backward"; "" for a category and for idle time


@dataclasses.dataclass
class KernelRow:
    """The calls of one kernel from one scope with one shape, a row of the report's table of kernels."""

    name: str  # the kernel's, shortened by scopes.readable
    category: str  # one of scopes.CATEGORIES, such as "GEMM"
    scope: str  # the named scope, such as "layer/mlp"; "" if it has none
    phase: str  # "forward", "recompute" or "backward"; "" where unknown
    shape: str  # operands and result in words, such as "bf16[8,64], bf16[64,32] -> bf16[8,32]"
    count: float  # calls per step
    ms: float  # mean per step, of the time booked on these calls alone
    per_step_ms: list[float]  # the same in each captured step
    tflops: float = 0.0  # achieved TFLOP/s; 0 where shapes do not tell
    tbps: float = 0.0  # achieved TB/s; 0 where shapes do not tell
    bound: str = ""  # "compute" or "memory": which ceiling sets the least time; "" where unknown
    of_ceiling: float = 0.0  # least time on this device over the time taken; 0 where unknown


@dataclasses.dataclass
class Transfer:
    """All copies to the device, all copies to the host, or all collectives of a profile, a row of the report's table of
    transfers. Figures are means per step. A transfer is exposed while it runs and no kernel, memset or copy within the
    device does: the step waits for it."""

    name: str  # "copies to device", "copies to host" or "collectives"
    count: float  # number of them
    ms: float  # time in which at least one of them ran
    hidden_ms: float  # part of it in which kernels, memsets or copies within the device ran too
    exposed_ms: float  # the other part, in which none of these ran
    gb: float  # GB moved; 0 where unknown
    gb_per_s: float  # GB/s while at least one of them ran; 0 where the bytes are unknown
    # the at most five longest exposed ones: {"ms": exposed time, "op": its instruction or kernel, "scope", "step"}
    waits: list[dict[str, Any]]

    @property
    def hidden(self) -> float:
        """The share of `ms` in which the device did other work too (kernels, memsets, copies within the device), from 0
        to 1; collectives and copies from or to the host do not count as such. It is 0 if `ms` is 0."""
        return self.hidden_ms / self.ms if self.ms else 0.0

    @property
    def longest_wait(self) -> str:
        """The longest exposed transfer in words, its ms and its operator: "1.20 ms, copy-start.3"; "" if none is
        exposed. A transfer is exposed while no kernel, memset or copy within the device runs, so that the step waits
        for it."""
        return f"{self.waits[0]['ms']:.2f} ms, {self.waits[0]['op']}" if self.waits else ""


@dataclasses.dataclass
class Idle:
    """Time within the steps in which nothing ran on the device, as means per step. It is either launch gaps, shorter
    than 20 us, or longer waits for the host."""

    ms: float  # all idle time
    launch_gaps: float  # number of short gaps between launches
    launch_gap_ms: float  # sum of the short gaps
    wait_ms: float  # sum of the longer gaps, in which the device waited for the host
    # the at most five longest waits: {"ms", "step", "before": the kernel after the wait, "after": the kernel before it}
    longest: list[dict[str, Any]]


@dataclasses.dataclass
class ReportData:
    """The tables of the report on one profile, without functions that show them (Report adds these). Times are ms of
    device time per step, means over the captured steps."""

    path: str  # the folder or file that was read, as the user gave it
    framework: str  # "jax" or "torch"
    device: str  # its kind, as the framework names it
    num_devices: int  # devices in the trace, of which the busiest is shown
    versions: dict[str, str]  # {package: version}, as recorded
    meta: dict[str, Any]  # what the program recorded about itself, such as {"tokens_per_step": 16384}
    notes: list[str]  # remarks on the trace and how it was read
    steps_ms: list[float]  # ms of each captured step
    step_ms: float  # their mean
    tokens_per_step: int | None  # as the program recorded it in meta; None where unknown
    categories: list[Share]  # those that occur, in the order of scopes.CATEGORIES; idle time last
    scopes: list[Share]  # one for each scope and phase, the largest first; idle time last
    kernels: list[KernelRow]  # the largest first
    transfers: list[Transfer]  # one for each of the three kinds that occurs
    idle: Idle  # the time in which nothing ran
    peak_memory_bytes: int  # the allocator's; else the sum of the buffers at the peak
    buffers: list[dict[str, Any]]  # largest buffers at the peak: {"bytes", "count", "kind", "what"}
    flops_per_step: float  # FLOPs of all products in a step whose shapes are known
    ceilings: Ceilings | None  # the device's rates; None where unknown
    losses: list[Loss]  # the largest first
    timeline: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)  # one step for the HTML page

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict of JSON values, for programs (`jaxtune profile --json` writes it); `timeline`, which
        only the HTML page draws, is left out."""
        out = dataclasses.asdict(self)
        del out["timeline"]
        return out


@dataclasses.dataclass
class Change:
    """One row of a comparison of two profiles, A (the base) and B: the times of the step or of one category, scope or
    kernel in both. Times are means over the captured steps."""

    name: str  # of the category, scope or kernel, or "step"
    phase: str  # of the scope or kernel; "" for others
    a_ms: float  # A's ms per step; 0 where A does not have it
    b_ms: float  # B's ms per step, scaled to A's tokens where the two differ in them
    diff_ms: float  # B minus A
    # the longest step's ms less the shortest's (1 % of the mean for a single step), of the run with the larger value
    noise_ms: float
    verdict: str  # of B against A: "same", "faster", "slower", "only in A" or "only in B"
    detail: str = ""  # scope and shape of a kernel


@dataclasses.dataclass
class ComparisonData:
    """The tables of a comparison of two profiles, A (the base) and B, without functions that show them (Comparison adds
    these)."""

    a: ReportData  # the base
    b: ReportData  # its times are not scaled
    scale: float  # factor on B's times: A's tokens per step over B's; 1 where one of them is unknown
    step: Change  # of the whole step
    categories: list[Change]  # in the order of scopes.CATEGORIES
    scopes: list[Change]  # by scope or region (see aligned_by) and phase, the largest first
    aligned_by: str  # "scope" where both programs use the same scope names, else "region"
    kernels: list[Change]  # the largest difference first
    sentences: list[str]  # what changed, in words
    notes: list[str]  # remarks on both profiles and on how they were compared

    @property
    def slower_by(self) -> float:
        """How much slower B's step is, as a fraction of A's time: 0.03 for 3 %. It is 0 where B is faster, or not
        slower beyond the noise. Programs that check for regressions read it."""
        return max(0.0, self.step.diff_ms / self.step.a_ms) if self.step.verdict == "slower" else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The comparison as a dict of JSON values, for programs, with `slower_by` and without both timelines, which
        only the HTML page draws."""
        out = dataclasses.asdict(self) | {"slower_by": self.slower_by}
        return out | {"a": self.a.to_dict(), "b": self.b.to_dict()}
