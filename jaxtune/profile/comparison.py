"""Comparison of two profiles: what became faster or slower by more than the steps of one run differ."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from jaxtune.profile.page import comparison_page
from jaxtune.profile.report import Report, show
from jaxtune.profile.scopes import CATEGORIES
from jaxtune.profile.tables import Change, ComparisonData, KernelRow, ReportData, Share
from jaxtune.profile.text import comparison_text

# Parts of a model, for programs that name their scopes differently; a scope belongs to the first that matches.
_REGIONS = (
    ("idle", re.compile(r"^idle$")),
    ("host link", re.compile(r"^host link$")),
    ("optimizer", re.compile(r"optimizer|accumulate|clip_grad|adam", re.I)),
    ("head and loss", re.compile(r"loss|lm_head|(^|/)head(/|$)|final_norm|cross_entropy|nll", re.I)),
    ("embedding", re.compile(r"embed|layout|rotary", re.I)),
    ("mlp", re.compile(r"mlp|feed_?forward|ffn|moe|expert|expand|contract|(gate|up|down)_proj", re.I)),
    ("attention block", re.compile(r"att|project|(^|/)mix(/|$)|[qkvo]_proj|sdpa", re.I)),
)
# A change below this share of the step is not worth a line, whatever the spread.
_NEGLIGIBLE = 0.0005
# The relative spread that is assumed where a single captured step leaves it unknown.
_UNKNOWN_SPREAD = 0.01


@dataclasses.dataclass
class Comparison(ComparisonData):
    """The differences between two profiles, A (the base) and B."""

    def to_text(self, width: int = 120) -> str:
        """Text for a terminal of `width` columns, with at most 15 scopes or regions and 15 kernels."""
        return comparison_text(self, width)

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return comparison_page(self)

    def __str__(self) -> str:
        return self.to_text()


def compare(a: Report | str | Path, b: Report | str | Path) -> Comparison:
    """Compares two profiles (reports, or folders or files), of which A is the base.

    If both know their tokens per step, B's times are scaled to A's. Rows are for regions of the model (`region`) if the
    programs name their scopes differently. TraceError: one cannot be read; ValueError: a damaged file of ceilings.
    """
    a = a if isinstance(a, Report) else show(a)
    b = b if isinstance(b, Report) else show(b)
    notes = [f"{name}: {note}" for name, report in (("A", a), ("B", b)) for note in report.notes]
    scale = 1.0
    if a.tokens_per_step and b.tokens_per_step and a.tokens_per_step != b.tokens_per_step:
        scale = a.tokens_per_step / b.tokens_per_step
        notes.append(f"B's steps have {b.tokens_per_step:,} tokens, A's {a.tokens_per_step:,}: B is scaled to A's")
    elif bool(a.tokens_per_step) != bool(b.tokens_per_step):
        notes.append(f"{'B' if a.tokens_per_step else 'A'} has no tokens_per_step: steps are compared as they are")
    if a.device != b.device:
        notes.append(f"different devices: {a.device or 'unknown'} and {b.device or 'unknown'}")
    for name, report in (("A", a), ("B", b)):
        if len(report.steps_ms) < 2:
            notes.append(f"{name} has one step: its spread is unknown and taken as {_UNKNOWN_SPREAD:.0%}")
    step = _change("step", "", a.steps_ms, [ms * scale for ms in b.steps_ms], a.step_ms)
    by_scope = _named_alike(a, b)
    comparison = Comparison(
        a=a,
        b=b,
        scale=scale,
        step=step,
        categories=_categories(a, b, scale),
        scopes=_scopes(a, b, scale, by_scope),
        aligned_by="scope" if by_scope else "region",
        kernels=_kernels(a, b, scale),
        sentences=[],
        notes=notes,
    )
    comparison.sentences = _sentences(comparison)
    return comparison


def region(scope: str) -> str:
    """The part of a model that a scope belongs to, such as "mlp", by words in its name, or "elsewhere"."""
    return next((name for name, pattern in _REGIONS if pattern.search(scope)), "elsewhere")


def _change(name: str, phase: str, a: Sequence[float], b: Sequence[float], step_ms: float, detail: str = "") -> Change:
    """A row with its verdict: "same" within the noise, 0.05 % of A's step, or if the times overlap.

    a, b: ms in each step; empty: the profile does not have it.
    """
    mean_a = sum(a) / len(a) if a else 0.0
    mean_b = sum(b) / len(b) if b else 0.0
    diff = mean_b - mean_a
    noise = max(_spread(a, mean_a), _spread(b, mean_b))
    apart = not a or not b or max(a) < min(b) or max(b) < min(a)
    if abs(diff) <= max(noise, _NEGLIGIBLE * step_ms) or not apart:
        verdict = "same"
    elif not any(a) or not any(b):
        verdict = "only in B" if not any(a) else "only in A"
    else:
        verdict = "slower" if diff > 0 else "faster"
    return Change(name, phase, mean_a, mean_b, diff, noise, verdict, detail)


def _spread(values: Sequence[float], mean: float) -> float:
    """The largest less the smallest ms; of one step, whose noise is unknown, 1 % of it."""
    if not values:
        return 0.0
    return max(values) - min(values) if len(values) > 1 else _UNKNOWN_SPREAD * mean


def _scaled(row: Share | KernelRow | None, scale: float) -> list[float]:
    """A row's ms in each step, times `scale`; [] for None."""
    return [] if row is None else [ms * scale for ms in row.per_step_ms]


def _categories(a: ReportData, b: ReportData, scale: float) -> list[Change]:
    """A row for each category of either profile. scale: of B's times."""
    rows_a, rows_b = ({row.name: row for row in r.categories} for r in (a, b))
    names = [name for name in CATEGORIES if name in rows_a or name in rows_b]
    return [_change(n, "", _scaled(rows_a.get(n), 1.0), _scaled(rows_b.get(n), scale), a.step_ms) for n in names]


def _named_alike(a: ReportData, b: ReportData) -> bool:
    """Whether both name scopes alike: 70 % of each one's busy time is in scopes of names that the other has."""
    names_a, names_b = ({row.name for row in r.scopes if row.name != "idle"} for r in (a, b))
    for report, other_names in ((a, names_b), (b, names_a)):
        rows = [row for row in report.scopes if row.name != "idle"]
        shared = sum(row.ms for row in rows if row.name in other_names)
        if shared < 0.7 * sum(row.ms for row in rows):
            return False
    return True


def _scopes(a: ReportData, b: ReportData, scale: float, by_scope: bool) -> list[Change]:
    """A row for each (scope or region, phase), the longest first."""

    def grouped(report: ReportData, factor: float) -> dict[tuple[str, str], list[float]]:
        out: dict[tuple[str, str], list[float]] = {}
        for row in report.scopes:
            key = (row.name if by_scope else region(row.name), row.phase)
            out[key] = _add(out.get(key), _scaled(row, factor))
        return out

    times_a, times_b = grouped(a, 1.0), grouped(b, scale)
    keys = sorted({*times_a, *times_b})
    rows = [_change(*key, times_a.get(key, []), times_b.get(key, []), a.step_ms) for key in keys]
    return sorted(rows, key=lambda row: -max(row.a_ms, row.b_ms))


def _add(total: list[float] | None, values: list[float]) -> list[float]:
    return values if total is None else [x + y for x, y in zip(total, values, strict=True)]


def _kernels(a: ReportData, b: ReportData, scale: float) -> list[Change]:
    """A row for the kernels that do the same work, the largest difference first, paired by category, scope, phase and
    shape.
    """

    def grouped(report: ReportData, factor: float):
        times: dict[tuple, list[float]] = {}
        names: dict[tuple, set[str]] = collections.defaultdict(set)
        for row in report.kernels:
            key = (_identity(row), row.category, row.scope, row.phase, row.shape)
            times[key] = _add(times.get(key), _scaled(row, factor))
            names[key].add(row.name)
        return times, names

    times_a, names_a = grouped(a, 1.0)
    times_b, names_b = grouped(b, scale)
    rows = []
    for key in {**times_a, **times_b}:
        _, _, scope, phase, shape = key
        kernels_a, kernels_b = sorted(names_a.get(key, ())), sorted(names_b.get(key, ()))
        name = (kernels_b or kernels_a)[0]
        if kernels_a and kernels_b and _without_number(kernels_a[0]) != _without_number(kernels_b[0]):
            name = f"{kernels_a[0]} → {kernels_b[0]}"
        detail = " ".join(word for word in (scope, shape) if word)
        rows.append(_change(name, phase, times_a.get(key, []), times_b.get(key, []), a.step_ms, detail))
    return sorted(rows, key=lambda row: -abs(row.diff_ms))


def _without_number(name: str) -> str:
    """ "fusion" for "fusion_12": the compiler's numbers change between compilations."""
    return re.sub(r"([_.]\d+)+$", "", name)


def _identity(row: KernelRow) -> str:
    """The name that pairs a kernel; "" for products and attention, whose kernels libraries name differently."""
    return "" if row.category in ("GEMM", "attention") and row.shape and row.tflops else _without_number(row.name)


# ---- sentences


def _sentences(comparison: ComparisonData) -> list[str]:
    """Sentences on the step, a one-sided recompute, and each category that changed beyond noise, the largest first."""
    a, b, step = comparison.a, comparison.b, comparison.step
    if step.verdict == "same":
        out = [f"No change of the step beyond noise: {step.a_ms:.2f} and {step.b_ms:.2f} ms (± {step.noise_ms:.2f})."]
    else:
        ratio = step.a_ms / step.b_ms if step.diff_ms < 0 else step.b_ms / step.a_ms
        out = [
            f"B's step is {abs(step.diff_ms):.2f} ms {step.verdict}: {step.a_ms:.2f} to {step.b_ms:.2f} ms, "
            f"{ratio:.2f} times."
        ]
        if a.tokens_per_step and b.tokens_per_step:
            token_us = [1e3 * report.step_ms / report.tokens_per_step for report in (a, b) if report.tokens_per_step]
            out[0] += f" A token takes {token_us[0]:.2f} us in A, {token_us[1]:.2f} us in B."
    out += _one_sided(comparison)
    for row in sorted(comparison.categories, key=lambda row: -abs(row.diff_ms)):
        if row.verdict == "same":
            continue
        word = {"only in A": "gone in B", "only in B": "new in B"}.get(row.verdict, row.verdict)
        line = f"{row.name[0].upper() + row.name[1:]}: {abs(row.diff_ms):.2f} ms {word} "
        line += f"({row.a_ms:.2f} to {row.b_ms:.2f} ms)"
        out.append(line + _where(comparison, row) + ".")
    return out


def _one_sided(comparison: ComparisonData) -> list[str]:
    """A sentence if only one profile has a recompute."""
    a, b = (
        scale * sum(row.ms for row in report.scopes if row.phase == "recompute")
        for report, scale in ((comparison.a, 1.0), (comparison.b, comparison.scale))
    )
    if (a > 0) == (b > 0):
        return []
    return [f"Only {'A' if a else 'B'} runs the forward again for the backward (recompute): {max(a, b):.2f} ms a step."]


def _where(comparison: ComparisonData, change: Change) -> str:
    """Where a category's change comes from, as the end of a sentence."""
    if change.name == "idle":
        before, after = comparison.a.idle, comparison.b.idle
        return f", {before.launch_gaps:.0f} and {after.launch_gaps:.0f} launch gaps a step"
    ms_by_place: dict[tuple[str, str], float] = collections.defaultdict(float)
    counts = [0.0, 0.0]
    for side, (report, sign) in enumerate(((comparison.a, -1.0), (comparison.b, comparison.scale))):
        for row in report.kernels:
            if row.category == change.name:
                name = row.scope if comparison.aligned_by == "scope" else region(row.scope)
                ms_by_place[name, row.phase] += sign * row.ms
                counts[side] += row.count
    text = ""
    if ms_by_place:
        (name, phase), ms = max(ms_by_place.items(), key=lambda item: item[1] * change.diff_ms)
        if ms * change.diff_ms > 0:
            text += f", {abs(ms):.2f} ms of it in {name or 'no scope'} {phase}".rstrip()
    if max(counts) > 1.1 * min(counts) and min(counts):
        text += f", {counts[0]:.0f} and {counts[1]:.0f} kernels a step"
    return text
