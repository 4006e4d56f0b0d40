"""Reports and comparisons of profiles as tables of text for a terminal: `report_text` and `comparison_text`. The HTML
pages (page.py) use `headline`, the lines above the tables, and `percent`, a fraction as text, too. `bar` draws the bars
in the table of categories."""

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
    """A rich Console of `width` columns that writes into a string, which `_text` returns. It does so also in a silent
    process (terminal.be_silent), which is any but the first process of a run."""
    return terminal.console(file=io.StringIO(), width=width, soft_wrap=False)


def _table(title: str, *columns: str) -> Table:
    """Makes an empty rich Table. title: the line above it. columns: the headings; a column whose heading begins with
    "<" (which is not shown) holds text, is aligned to the left and is wrapped, while others hold numbers, are aligned
    to the right and are not wrapped."""
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
    """What was printed to a console that `_console` made, as text without spaces at the ends of lines, and with a
    newline at its end."""
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def percent(value: float) -> str:
    """A fraction (`value`) as text, with one decimal: 0.5 gives "50.0 %". The tables of reports write shares so, on the
    terminal and in HTML."""
    return f"{100 * value:.1f} %"


def bar(share: float, width: int = 24) -> str:
    """A bar of block characters whose length is this share (0 to 1) of `width` characters, for the table of categories
    on the terminal; page.js draws the bars of HTML pages."""
    return "█" * round(share * width)


def _short(shape: str) -> str:
    """A kernel's shape, "operands -> results" as in KernelRow, cut to two operands and the first result, which identify
    a product and fit a terminal: "bf16[8,64] bf16[64,32] > bf16[8,32]". "" for a shape without arrays. The table of
    kernels shows it."""
    operands, _, result = shape.partition(" -> ")
    parts = re.findall(r"[a-z]\w*\[[\d,]*\]", operands)[:2]
    results = re.findall(r"[a-z]\w*\[[\d,]*\]", result)[:1]
    return " ".join(parts) + (f" > {results[0]}" if results else "")


def headline(report: ReportData) -> list[str]:
    """The lines above all tables of a report, two or three: the profile's path, device and versions; what it ran (if
    its meta says so); and the step's mean time (with several steps, ± half the difference between the longest and the
    shortest), with tokens per second and TFLOP/s of the products where they are known. The texts and the HTML pages
    begin with it."""
    spread = (max(report.steps_ms) - min(report.steps_ms)) / 2
    line = f"step {report.step_ms:.2f} ms"
    if len(report.steps_ms) > 1:
        line += f" ± {spread:.2f} over {len(report.steps_ms)} steps"
    if report.tokens_per_step:
        line += f", {report.tokens_per_step / report.step_ms * 1e3:,.0f} tokens/s"
    if report.flops_per_step:
        rate = report.flops_per_step / report.step_ms / 1e9
        line += f", {rate:.0f} TFLOP/s in products" if rate >= 1 else f", {rate * 1e3:.1f} GFLOP/s in products"
    where = report.device or "device unknown"
    if report.num_devices > 1:
        where += f" (the busiest of {report.num_devices})"
    versions = ", ".join(f"{name} {report.versions[name]}" for name in ("jax", "torch") if name in report.versions)
    what = report.meta.get("what")
    ran = [what] if isinstance(what, str) and what else []
    return [f"{report.path}: {where}, {versions or report.framework}", *ran, line]


# Report.to_text calls it. The tables are by category, scope, kernel (with shapes from 110 columns on) and transfer;
# below them are idle time, memory and the device's ceilings. At most three losses, 15 scopes (further ones as one row,
# and then idle time), 15 kernels, three waits and 8 rows of memory are shown. Losses, transfers, memory and ceilings
# are left out where the report has none. The text ends with a newline.
def report_text(report: ReportData, width: int) -> str:
    """The report as plain text, for a terminal of `width` columns: a headline, notes, losses and tables."""
    console = _console(width)
    for line in headline(report):
        console.print(line)
    for note in report.notes:
        console.print(f"note: {note}")
    if report.losses:
        console.print("\nThe three largest losses of time against the device's ceilings")
        for number, loss in enumerate(report.losses[:3], 1):
            console.print(f"  {number}. {loss.text}")

    table = _table("\nBy category", "<category", "ms/step", "share", "<")
    for row in report.categories:
        table.add_row(row.name, f"{row.ms:.2f}", percent(row.share), bar(row.share))
    table.add_row(
        "sum", f"{sum(r.ms for r in report.categories):.2f}", percent(sum(r.share for r in report.categories)), ""
    )
    console.print(table)

    table = _table("\nBy scope", "<scope", "<phase", "ms/step", "share")
    scopes, idle_rows = ([r for r in report.scopes if (r.name == "idle") == idle] for idle in (False, True))
    rest = scopes[_SHOWN:]
    for row in scopes[:_SHOWN]:
        table.add_row(row.name, row.phase, f"{row.ms:.2f}", percent(row.share))
    if rest:
        table.add_row(f"({len(rest)} more)", "", f"{sum(r.ms for r in rest):.2f}", percent(sum(r.share for r in rest)))
    for row in idle_rows:  # idle time is shown whatever its share
        table.add_row(row.name, row.phase, f"{row.ms:.2f}", percent(row.share))
    console.print(table)

    wide = width >= _WIDE
    shape_column = ["<shape"] if wide else []
    columns = ["<kernel", "<scope", *shape_column, "calls", "ms/step", "TFLOP/s", "TB/s", "of ceiling"]
    table = _table("\nTop kernels", *columns)
    for row in report.kernels[:_SHOWN]:
        where = f"{row.scope} {row.phase}".strip()
        rates = f"{row.tflops:.0f}" if row.tflops >= 1 else "", f"{row.tbps:.2f}" if row.tbps >= 0.005 else ""
        reached = percent(row.of_ceiling) if row.of_ceiling else ""
        shape = [_short(row.shape)] if wide else []
        table.add_row(row.name[:40], where, *shape, f"{row.count:g}", f"{row.ms:.2f}", *rates, reached)
    console.print(table)

    if report.transfers:
        table = _table(
            "\nTransfers", "<", "count", "ms/step", "under compute", "exposed ms", "GB", "GB/s", "<longest wait"
        )
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
        console.print(table)

    idle = report.idle
    gaps = f"{idle.launch_gaps:.0f} launch gaps of {idle.launch_gap_ms:.2f} ms in all, waits of {idle.wait_ms:.2f} ms"
    console.print(f"\nIdle: {idle.ms:.2f} ms/step: {gaps}")
    for wait in idle.longest[:3]:
        console.print(f"  {wait['ms']:.3f} ms after {wait['after'] or '?'}, before {wait['before'] or '?'}")
    if report.peak_memory_bytes:
        console.print(
            f"\nPeak memory {report.peak_memory_bytes / 1e9:.2f} GB; largest at the peak of the largest program:"
        )
        table = _table("", "GB", "buffers", "<kind", "<what")
        for row in report.buffers[:8]:
            table.add_row(f"{row['bytes'] / 1e9:.3f}", str(row["count"]), row["kind"], row["what"])
        console.print(table)
    if report.ceilings is not None:
        c = report.ceilings
        rates = (
            f"bf16 {c.gemm_bf16_tflops:.0f} TFLOP/s, FP8 {c.gemm_fp8_tflops:.0f} TFLOP/s, copy {c.copy_tbps:.2f} TB/s"
        )
        console.print(f"\nCeilings ({c.source}): {rates}")
    return _text(console)


def comparison_text(comparison: ComparisonData, width: int) -> str:
    """The comparison of two profiles as plain text for a terminal of `width` columns: both headlines, notes, sentences
    on what changed, and tables of the step and its categories, of at most 15 scopes or regions, and of at most 15
    kernels that changed. A difference with the verdict "same" is in parentheses. Comparison.to_text calls it."""
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
