"""Reports and comparisons as tables of text for a terminal."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from rich.table import Table

from jaxtune.profile.tables import ComparisonData, ReportData
from jaxtune.system import terminal

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 15  # rows of a long table
_WIDE = 110  # a terminal with at least this many columns shows the kernels' shapes too


def _console(width: int) -> Console:
    """A Console that writes into a string, also in a silent process."""
    return terminal.console(file=io.StringIO(), width=width, soft_wrap=False)


def _table(title: str, *columns: str) -> Table:
    """An empty Table. A heading that begins with "<" (not shown) is a column of text, others hold numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for column in columns:
        name = column.lstrip("<")
        table.add_column(
            name,
            justify="left" if column.startswith("<") else "right",
            overflow="fold",
            no_wrap=not column.startswith("<"),
        )
    return table


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def percent(value: float) -> str:
    """ "50.0 %" for 0.5."""
    return f"{100 * value:.1f} %"


def bar(share: float, width: int = 24) -> str:
    return "█" * round(share * width)


def _short(shape: str) -> str:
    """A shape cut to two operands and one result: "bf16[8,64] bf16[64,32] > bf16[8,32]"."""
    operands, _, result = shape.partition(" -> ")
    inputs = re.findall(r"[a-z]\w*\[[\d,]*\]", operands)[:2]
    results = re.findall(r"[a-z]\w*\[[\d,]*\]", result)[:1]
    return " ".join(inputs) + (f" > {results[0]}" if results else "")


def headline(report: ReportData) -> list[str]:
    """Two or three lines: the profile, what it ran, and the step's time ± half the range, tokens/s and TFLOP/s."""
    spread = (max(report.steps_ms) - min(report.steps_ms)) / 2
    line = f"step {report.step_ms:.2f} ms"
    if len(report.steps_ms) > 1:
        line += f" ± {spread:.2f} over {len(report.steps_ms)} steps"
    if report.tokens_per_step:
        line += f", {report.tokens_per_step / report.step_ms * 1e3:,.0f} tokens/s"
    if report.flops_per_step:
        rate = report.flops_per_step / report.step_ms / 1e9
        line += f", {rate:.0f} TFLOP/s in products" if rate >= 1 else f", {rate * 1e3:.1f} GFLOP/s in products"
    device_words = report.device or "device unknown"
    if report.num_devices > 1:
        device_words += f" (the busiest of {report.num_devices})"
    versions = ", ".join(f"{name} {report.versions[name]}" for name in ("jax", "torch") if name in report.versions)
    program_words = report.meta.get("what")
    what_lines = [program_words] if isinstance(program_words, str) and program_words else []
    return [f"{report.path}: {device_words}, {versions or report.framework}", *what_lines, line]


def report_text(report: ReportData, width: int) -> str:
    """The report as plain text, for a terminal of `width` columns, with the largest rows of each table."""
    console = _console(width)
    for line in headline(report):
        console.print(line)
    for note in report.notes:
        console.print(f"note: {note}")
    if report.losses:
        console.print("\nThe three largest losses of time against the device's ceilings")
        for number, loss in enumerate(report.losses[:3], 1):
            console.print(f"  {number}. {loss.text}")
    console.print(_categories(report))
    console.print(_scopes(report))
    console.print(_kernels(report, width >= _WIDE))
    if report.transfers:
        console.print(_transfers(report))
    _print_idle(console, report)
    if report.peak_memory_bytes:
        _print_memory(console, report)
    if report.ceilings is not None:
        c = report.ceilings
        rates = (
            f"bf16 {c.gemm_bf16_tflops:.0f} TFLOP/s, FP8 {c.gemm_fp8_tflops:.0f} TFLOP/s, copy {c.copy_tbps:.2f} TB/s"
        )
        console.print(f"\nCeilings ({c.source}): {rates}")
    return _text(console)


def _categories(report: ReportData) -> Table:
    table = _table("\nBy category", "<category", "ms/step", "share", "<")
    for row in report.categories:
        table.add_row(row.name, f"{row.ms:.2f}", percent(row.share), bar(row.share))
    table.add_row(
        "sum", f"{sum(r.ms for r in report.categories):.2f}", percent(sum(r.share for r in report.categories)), ""
    )
    return table


def _scopes(report: ReportData) -> Table:
    table = _table("\nBy scope", "<scope", "<phase", "ms/step", "share")
    scopes, idle_rows = ([r for r in report.scopes if (r.name == "idle") == idle] for idle in (False, True))
    more_scopes = scopes[_SHOWN:]
    for row in scopes[:_SHOWN]:
        table.add_row(row.name, row.phase, f"{row.ms:.2f}", percent(row.share))
    if more_scopes:
        ms, share = sum(r.ms for r in more_scopes), sum(r.share for r in more_scopes)
        table.add_row(f"({len(more_scopes)} more)", "", f"{ms:.2f}", percent(share))
    for row in idle_rows:  # idle time is shown whatever its share
        table.add_row(row.name, row.phase, f"{row.ms:.2f}", percent(row.share))
    return table


def _kernels(report: ReportData, shapes: bool) -> Table:
    shape_column = ["<shape"] if shapes else []
    columns = ["<kernel", "<scope", *shape_column, "calls", "ms/step", "TFLOP/s", "TB/s", "of ceiling"]
    table = _table("\nTop kernels", *columns)
    for row in report.kernels[:_SHOWN]:
        where = f"{row.scope} {row.phase}".strip()
        rates = f"{row.tflops:.0f}" if row.tflops >= 1 else "", f"{row.tbps:.2f}" if row.tbps >= 0.005 else ""
        of_ceiling = percent(row.of_ceiling) if row.of_ceiling else ""
        shape = [_short(row.shape)] if shapes else []
        table.add_row(row.name[:40], where, *shape, f"{row.count:g}", f"{row.ms:.2f}", *rates, of_ceiling)
    return table


def _transfers(report: ReportData) -> Table:
    columns = "<", "count", "ms/step", "under compute", "exposed ms", "GB", "GB/s", "<longest wait"
    table = _table("\nTransfers", *columns)
    for row in report.transfers:
        table.add_row(
            row.name,
            f"{row.count:g}",
            f"{row.ms:.2f}",
            percent(row.hidden),
            f"{row.exposed_ms:.2f}",
            f"{row.gb:.3f}" if row.gb else "",
            f"{row.gb_per_s:.1f}" if row.gb else "",
            row.longest_wait,
        )
    return table


def _print_idle(console: Console, report: ReportData) -> None:
    idle = report.idle
    gaps = f"{idle.launch_gaps:.0f} launch gaps of {idle.launch_gap_ms:.2f} ms in all, waits of {idle.wait_ms:.2f} ms"
    console.print(f"\nIdle: {idle.ms:.2f} ms/step: {gaps}")
    for wait in idle.longest[:3]:
        console.print(f"  {wait['ms']:.3f} ms after {wait['after'] or '?'}, before {wait['before'] or '?'}")


def _print_memory(console: Console, report: ReportData) -> None:
    peak = f"\nPeak memory {report.peak_memory_bytes / 1e9:.2f} GB; largest at the peak of the largest program:"
    console.print(peak)
    table = _table("", "GB", "buffers", "<kind", "<what")
    for row in report.buffers[:8]:
        table.add_row(f"{row['bytes'] / 1e9:.3f}", str(row["count"]), row["kind"], row["what"])
    console.print(table)


def comparison_text(comparison: ComparisonData, width: int) -> str:
    """The comparison as plain text, for a terminal of `width` columns; a difference within noise is in parentheses."""
    console = _console(width)
    for name, report in (("A", comparison.a), ("B", comparison.b)):
        console.print(f"{name}: " + "\n   ".join(headline(report)))
    for note in comparison.notes:
        console.print(f"note: {note}")
    console.print()
    for sentence in comparison.sentences:
        console.print(sentence)
    tables = (
        ("\nBy category", [comparison.step, *comparison.categories], 0),
        (f"\nBy {comparison.aligned_by}", comparison.scopes, _SHOWN),
        ("\nKernels that changed", [row for row in comparison.kernels if row.verdict != "same"], _SHOWN),
    )
    for title, rows, most in tables:
        if not rows:
            continue
        columns = ("A ms", "B ms", "B - A", "noise", "<")
        table = _table(title, "<", "<phase", *columns)
        for row in rows[: most or None]:
            change = f"{row.diff_ms:+.2f}" if row.verdict != "same" else f"({row.diff_ms:+.2f})"
            name = row.name if not row.detail else f"{row.name[:60]}\n  {row.detail[:100]}"
            figures = (f"{row.a_ms:.2f}", f"{row.b_ms:.2f}", change, f"{row.noise_ms:.2f}")
            table.add_row(name, row.phase, *figures, row.verdict)
        console.print(table)
    return _text(console)
