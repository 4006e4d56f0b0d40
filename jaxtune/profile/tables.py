"""The tables of a report and of a comparison: what `text` and `page` show, and `report` and `comparison` make."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtune.profile.device import Ceilings
from jaxtune.profile.roofline import Loss


@dataclasses.dataclass
class Share:
    """Time of a category or scope. ms is the mean over steps; per_step_ms holds each."""

    name: str
    ms: float
    share: float
    per_step_ms: list[float]
    phase: str = ""


@dataclasses.dataclass
class KernelRow:
    """Calls of one kernel from one scope with one shape. count and ms are per step.

    tflops and tbps: achieved; 0 where shapes do not tell. of_ceiling: least time on this device over the time taken;
    0 where unknown. bound: "compute" or "memory", by which ceiling the least time comes from.
    """

    name: str
    category: str
    scope: str
    phase: str
    shape: str
    count: float
    ms: float
    per_step_ms: list[float]
    tflops: float = 0.0
    tbps: float = 0.0
    bound: str = ""
    of_ceiling: float = 0.0


@dataclasses.dataclass
class Transfer:
    """Copies over the host link, or collectives, per step: how much of the time in which they ran was under compute."""

    name: str
    count: float
    ms: float
    hidden_ms: float
    exposed_ms: float
    gb: float
    gb_per_s: float
    waits: list[dict[str, Any]]

    @property
    def hidden(self) -> float:
        """The share of its time that ran under compute."""
        return self.hidden_ms / self.ms if self.ms else 0.0

    @property
    def longest_wait(self) -> str:
        return f"{self.waits[0]['ms']:.2f} ms, {self.waits[0]['op']}" if self.waits else ""


@dataclasses.dataclass
class Idle:
    """Time in which nothing ran, per step: short gaps between launches, and longer waits."""

    ms: float
    launch_gaps: float
    launch_gap_ms: float
    wait_ms: float
    longest: list[dict[str, Any]]


@dataclasses.dataclass
class ReportData:
    """One profile as tables. Times are ms of device time per step, means over the captured steps."""

    path: str
    framework: str
    device: str
    num_devices: int
    versions: dict[str, str]
    meta: dict[str, Any]
    notes: list[str]
    steps_ms: list[float]
    step_ms: float
    tokens_per_step: int | None
    categories: list[Share]
    scopes: list[Share]
    kernels: list[KernelRow]
    transfers: list[Transfer]
    idle: Idle
    peak_memory_bytes: int
    buffers: list[dict[str, Any]]
    flops_per_step: float
    ceilings: Ceilings | None
    losses: list[Loss]
    timeline: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without the timeline (the page holds it)."""
        out = dataclasses.asdict(self)
        del out["timeline"]
        return out


@dataclasses.dataclass
class Change:
    """One row of both profiles. ms per step; b_ms is scaled to A's tokens where the two differ in them.

    noise_ms: what the steps of the runs differ by themselves. verdict: "same", "faster", "slower", "only in A" or
    "only in B", of B against A.
    """

    name: str
    phase: str
    a_ms: float
    b_ms: float
    diff_ms: float
    noise_ms: float
    verdict: str
    detail: str = ""


@dataclasses.dataclass
class ComparisonData:
    """Two profiles side by side, B against A. aligned_by: "scope" where both name their parts alike, else "region"."""

    a: ReportData
    b: ReportData
    scale: float
    step: Change
    categories: list[Change]
    scopes: list[Change]
    aligned_by: str
    kernels: list[Change]
    sentences: list[str]
    notes: list[str]

    @property
    def slower_by(self) -> float:
        """How much slower B's step is, as a fraction of A's; 0 where it is not, or not beyond the noise."""
        return max(0.0, self.step.diff_ms / self.step.a_ms) if self.step.verdict == "slower" else 0.0

    def to_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self) | {"slower_by": self.slower_by}
        return out | {"a": self.a.to_dict(), "b": self.b.to_dict()}
