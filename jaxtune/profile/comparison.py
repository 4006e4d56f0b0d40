"""Comparison of two profiles (`compare`): what became faster or slower by more than the steps of one run differ among
themselves. It returns a `Comparison`, which `jaxtune profile compare` prints. `region` names the part of a model that a
scope belongs to, by which programs with different names of scopes are compared."""

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
    """The differences between the profiles of two runs, A (the base) and B, as `compare` found them: what became faster
    or slower in the step, by category, scope and kernel. It adds to the tables in ComparisonData their form as text for
    a terminal (`to_text`, `str`) and as an HTML page."""

    def to_text(self, width: int = 120) -> str:
        """The comparison as plain text for a terminal: both headlines, the notes, sentences on what changed, then the
        tables of the step and its categories, of at most 15 scopes or regions, and of at most 15 kernels that changed.
        width: columns of the terminal, to which the tables are fitted."""
        return comparison_text(self, width)

    def to_html(self) -> str:
        """The comparison as the text of one HTML page, which needs no network or other file; a caller writes it into a
        file."""
        return comparison_page(self)

    def __str__(self) -> str:
        """The comparison as `to_text` gives it, for a terminal of 120 columns."""
        return self.to_text()


def compare(a: Report | str | Path, b: Report | str | Path) -> Comparison:
    """Compares two profiles, of which A is the base: which parts of the step became faster or slower in B. `jaxtune
    profile compare` calls it. If the steps of both have known, but different numbers of tokens, B's times in the rows
    are multiplied by A's number over B's. The rows of scopes are for regions of the model instead (`region`) if the two
    programs name their scopes differently.

    The Comparison's notes are those of both reports. They also say if B's times were scaled, if only one of the two
    profiles knows its tokens, if the devices differ, or if a profile has a single step.

    Args:
      a, b: a report that `show` returned, or the folder or file of a profile.

    Raises:
      TraceError: one of them cannot be read.
      ValueError: the file with a device's measured ceilings is damaged.
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
    """The part of a model that a scope belongs to, such as "mlp" or "optimizer", under one name for every framework;
    "elsewhere" if the scope's name does not tell. It is found by words in the scope's name. `compare` makes its rows
    for regions only where two profiles' scopes have different names (`_named_alike`); the sentences then name regions
    too."""
    return next((name for name, pattern in _REGIONS if pattern.search(scope)), "elsewhere")


def _change(name: str, phase: str, a: Sequence[float], b: Sequence[float], step_ms: float, detail: str = "") -> Change:
    """Makes the row of a comparison for the step or for one category, scope, region or kernel. Its verdict on B is
    "same" if the means differ by no more than the noise, which is the larger of both profiles' `_spread`, or by at most
    0.05 % of A's step, or if the ranges of both profiles' times overlap. Otherwise it is "slower", "faster", or, if one
    profile has no time in it, "only in A" or "only in B". Text and HTML page show it in each row; `--fail-if-slower`
    depends on the step's alone.

    Args:
      name: of the category, scope, region or kernel, or "step".
      phase: of the scope, region or kernel; "" where there is none.
      a: its ms in each step of A; empty: A does not have it.
      b: its ms in each step of B, which may be scaled; empty: B does not have it.
      step_ms: the mean ms of A's steps.
      detail: the scope and shape of a kernel, for display.
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
    """The noise of one profile's times in ms, beyond which `_change` calls a difference a change: the largest minus the
    smallest of `values`, the ms of each step. With one step it is unknown, and 1 % of `mean`, their mean, is assumed;
    without steps it is 0."""
    if not values:
        return 0.0
    return max(values) - min(values) if len(values) > 1 else _UNKNOWN_SPREAD * mean


def _scaled(row: Share | KernelRow | None, scale: float) -> list[float]:
    """The ms of each step that a row of categories, scopes or kernels has, multiplied by `scale` (1 for A's rows, the
    factor on B's times for B's); an empty list for None, a row that the profile does not have, which counts as no
    time."""
    return [] if row is None else [ms * scale for ms in row.per_step_ms]


def _categories(a: ReportData, b: ReportData, scale: float) -> list[Change]:
    """Makes one row of the comparison for each category that either profile has, in the order of CATEGORIES. a, b: the
    reports of both. scale: the factor on B's times, A's tokens per step over B's, or 1."""
    of_a, of_b = ({row.name: row for row in r.categories} for r in (a, b))
    names = [name for name in CATEGORIES if name in of_a or name in of_b]
    return [_change(n, "", _scaled(of_a.get(n), 1.0), _scaled(of_b.get(n), scale), a.step_ms) for n in names]


def _named_alike(a: ReportData, b: ReportData) -> bool:
    """Whether the programs of two reports, `a` and `b`, use the same names of scopes: at least 70 % of the time of each
    profile, idle time aside, is in scopes whose name the other has too, in whatever phase. If True, `compare` makes its
    rows for scopes; if False, for regions."""
    names_a, names_b = ({row.name for row in r.scopes if row.name != "idle"} for r in (a, b))
    for report, others in ((a, names_b), (b, names_a)):
        rows = [row for row in report.scopes if row.name != "idle"]
        shared = sum(row.ms for row in rows if row.name in others)
        if shared < 0.7 * sum(row.ms for row in rows):
            return False
    return True


def _scopes(a: ReportData, b: ReportData, scale: float, by_scope: bool) -> list[Change]:
    """One row for each (scope, phase) of either profile, or for each (region, phase) if `by_scope` is false, because
    the programs name their scopes differently; those that take longest in A or in B come first. Idle time has a row. a,
    b: the reports of both. scale: the factor on B's times."""

    def grouped(report: ReportData, factor: float) -> dict[tuple[str, str], list[float]]:
        """Returns {(scope or region, phase): its ms in each step of `report`, times `factor`}; the scopes of one region
        are added up."""
        out: dict[tuple[str, str], list[float]] = {}
        for row in report.scopes:
            key = (row.name if by_scope else region(row.name), row.phase)
            out[key] = _add(out.get(key), _scaled(row, factor))
        return out

    of_a, of_b = grouped(a, 1.0), grouped(b, scale)
    keys = sorted({*of_a, *of_b})
    rows = [_change(*key, of_a.get(key, []), of_b.get(key, []), a.step_ms) for key in keys]
    return sorted(rows, key=lambda row: -max(row.a_ms, row.b_ms))


def _add(total: list[float] | None, values: list[float]) -> list[float]:
    """Adds up, step by step, the times of rows of one profile that are compared as one. values: the ms of a row in each
    step. total: the sums so far, with as many steps; None before the first row, and then `values` itself is
    returned."""
    return values if total is None else [x + y for x, y in zip(total, values, strict=True)]


def _kernels(a: ReportData, b: ReportData, scale: float) -> list[Change]:
    """One row for each kernel of either profile, the largest difference first. Kernels that do the same work share a
    row, in which the times of all that a profile has are added up. Its name is B's, A's if B has none, or "A's → B's"
    if the two differ by more than a number at the end.

    Matrix products and attention of known shape and FLOPs are paired by category, scope, phase and shape, whatever
    kernel the library chose; other kernels also by their name, without the number that the compiler appended. a, b: the
    reports of both. scale: the factor on B's times.
    """

    def grouped(report: ReportData, factor: float):
        """Returns two dicts by the key that pairs kernels (their name without number, or "", category, scope, phase and
        shape): {key: the ms in each step of `report`, times `factor`} and {key: the kernels' names}."""
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
        before, after = sorted(names_a.get(key, ())), sorted(names_b.get(key, ()))
        name = (after or before)[0]
        if before and after and _without_number(before[0]) != _without_number(after[0]):
            name = f"{before[0]} → {after[0]}"
        detail = " ".join(part for part in (scope, shape) if part)
        rows.append(_change(name, phase, times_a.get(key, []), times_b.get(key, []), a.step_ms, detail))
    return sorted(rows, key=lambda row: -abs(row.diff_ms))


def _without_number(name: str) -> str:
    """A kernel's name without the numbers that the compiler appends, which change between compilations: "fusion_12"
    becomes "fusion". By such names the kernels of two profiles are paired; a report on one profile keeps the
    numbers."""
    return re.sub(r"([_.]\d+)+$", "", name)


def _identity(row: KernelRow) -> str:
    """The name by which, with category, scope, phase and shape, the kernel of `row` is paired with the other profile's:
    its own without the compiler's number. It is "" for matrix products and attention of known shape and FLOPs, because
    libraries give kernels of the same work different names."""
    return "" if row.category in ("GEMM", "attention") and row.shape and row.tflops else _without_number(row.name)


# ---- sentences


def _sentences(comparison: ComparisonData) -> list[str]:
    """Sums up a comparison in sentences, a list of plain text for `Comparison.sentences`: on the change of the step's
    time, then on a recompute that only one of the profiles has, then on each category that changed beyond noise, the
    largest difference first."""
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
            each = [1e3 * report.step_ms / report.tokens_per_step for report in (a, b) if report.tokens_per_step]
            out[0] += f" A token takes {each[0]:.2f} us in A, {each[1]:.2f} us in B."
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
    """A list of one sentence if only one of the two profiles of `comparison` runs the forward again for the backward
    (recompute), with its ms per step, which for B are scaled to A's tokens; else an empty list. `_sentences` adds
    it."""
    a, b = (
        scale * sum(row.ms for row in report.scopes if row.phase == "recompute")
        for report, scale in ((comparison.a, 1.0), (comparison.b, comparison.scale))
    )
    if (a > 0) == (b > 0):
        return []
    return [f"Only {'A' if a else 'B'} runs the forward again for the backward (recompute): {max(a, b):.2f} ms a step."]


def _where(comparison: ComparisonData, change: Change) -> str:
    """Says where in the profiles of `comparison` the change of a category, `change`, comes from: ", 3.20 ms of it in
    layer/mlp backward", the scope or region and phase that changed most in the same direction; and how many kernels of
    the category a step of each profile has, not scaled, if both have some and the numbers differ by more than 10 %. For
    idle time it says the numbers of launch gaps instead. The text is appended to the category's sentence; it may be
    ""."""
    if change.name == "idle":
        before, after = comparison.a.idle, comparison.b.idle
        return f", {before.launch_gaps:.0f} and {after.launch_gaps:.0f} launch gaps a step"
    places: dict[tuple[str, str], float] = collections.defaultdict(float)
    counts = [0.0, 0.0]
    for side, (report, sign) in enumerate(((comparison.a, -1.0), (comparison.b, comparison.scale))):
        for row in report.kernels:
            if row.category == change.name:
                name = row.scope if comparison.aligned_by == "scope" else region(row.scope)
                places[name, row.phase] += sign * row.ms
                counts[side] += row.count
    text = ""
    if places:
        (name, phase), ms = max(places.items(), key=lambda item: item[1] * change.diff_ms)
        if ms * change.diff_ms > 0:
            text += f", {abs(ms):.2f} ms of it in {name or 'no scope'} {phase}".rstrip()
    if max(counts) > 1.1 * min(counts) and min(counts):
        text += f", {counts[0]:.0f} and {counts[1]:.0f} kernels a step"
    return text
