"""HTML pages of a report and of a comparison. A page is one file that loads nothing; page.js in it draws bars,
timelines and the kernel table.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxtune.profile.scopes import CATEGORIES
from jaxtune.profile.tables import Change, ComparisonData, ReportData, Share
from jaxtune.profile.text import headline, percent

_HERE = Path(__file__).parent


def report_page(report: ReportData) -> str:
    """The page of one profile's report."""
    losses = [loss.text for loss in report.losses[:3]]
    kernels = {
        "sort": "ms",
        "sums": ["ms"],
        "columns": [
            _column("name", "kernel"),
            _column("category", "category"),
            _column("scope", "scope"),
            _column("shape", "shape"),
            _column("count", "calls", 1),
            _column("ms", "ms/step", 3),
            _column("tflops", "TFLOP/s", 0),
            _column("tbps", "TB/s", 2),
            _column("ceiling", "% of ceiling", 1),
        ],
        "rows": [
            [
                r.name,
                r.category,
                f"{r.scope} {r.phase}".strip(),
                r.shape,
                round(r.count, 2),
                round(r.ms, 5),
                round(r.tflops, 2),
                round(r.tbps, 3),
                round(100 * r.of_ceiling, 1),
            ]
            for r in report.kernels
        ],
    }
    body = [
        _words("The three largest losses of time against the device's ceilings", losses, ordered=True),
        _bars(),
        _shares("By category", report.categories, "categories"),
        _timelines(),
        _kernel_table(),
        _shares("By scope", report.scopes, "scopes"),
        _transfers(report),
        _memory(report),
    ]
    return _page("Where the time of a step goes", [("", report)], report.notes, body, kernels)


def comparison_page(comparison: ComparisonData) -> str:
    """The page of a comparison. B's times are scaled, except in its headline and timeline."""
    kernels = {
        "sort": "diff",
        "sums": ["a", "b", "diff"],
        "columns": [
            _column("name", "kernel"),
            _column("phase", "phase"),
            _column("shape", "scope and shape"),
            _column("a", "A ms", 3),
            _column("b", "B ms", 3),
            {**_column("diff", "B - A", 3), "signed": True},
            _column("noise", "noise", 3),
            _column("verdict", ""),
        ],
        "rows": [
            [r.name, r.phase, r.detail, *(round(x, 5) for x in (r.a_ms, r.b_ms, r.diff_ms, r.noise_ms)), r.verdict]
            for r in comparison.kernels
        ],
    }
    body = [
        _words("What changed from A to B", comparison.sentences),
        _bars(),
        _changes("By category", [comparison.step, *comparison.categories], "categories"),
        _timelines(),
        _changes(f"By {comparison.aligned_by}", comparison.scopes, "scopes"),
        _kernel_table(),
    ]
    sides = [("A", comparison.a), ("B", comparison.b)]
    return _page("Two profiles side by side", sides, comparison.notes, body, kernels, {"B": comparison.scale})


def _column(key: str, title: str, digits: int | None = None) -> dict[str, Any]:
    """A column of the kernel table for page.js; digits: decimals of its numbers, None: text."""
    return {"key": key, "title": title, "number": digits is not None, "digits": digits or 0}


def _page(
    title: str,
    sides: Sequence[tuple[str, ReportData]],
    notes: Iterable[str],
    body: Iterable[str],
    kernels: dict[str, Any],
    scales: dict[str, float] | None = None,
) -> str:
    """The whole document.

    sides: (label, report); a label is "A", "B" or "".
    kernels: "columns", "rows", "sort" (the first key) and "sums" (keys of summed columns).
    scales: {label: factor on the times of that bar}.
    """
    heads, data_sides = [], []
    for label, report in sides:
        scale = (scales or {}).get(label, 1.0)
        first, *further_lines = headline(report)
        name = f"<b>{label}</b> " if label else ""
        lines = "".join(f'<br><span class="soft">{html.escape(line)}</span>' for line in further_lines)
        heads.append(f"<div>{name}{html.escape(first)}{lines}</div>")
        data_sides.append(
            {
                "label": label,
                "step_ms": round(report.step_ms * scale, 4),
                "categories": [[row.name, round(row.ms * scale, 4)] for row in report.categories],
                "timeline": report.timeline,
            }
        )
    data = {"categories": list(CATEGORIES), "sides": data_sides, "kernels": kernels}
    # "<" could end the script element, so JSON strings contain its escape instead.
    payload = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    notes_html = "".join(f'<p class="soft">note: {html.escape(note)}</p>' for note in notes)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<div class="sides">{"".join(heads)}</div>
{notes_html}
{"".join(body)}
</main>
<script type="application/json" id="data">{payload}</script>
<script>
{(_HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _words(title: str, lines: Sequence[str], ordered: bool = False) -> str:
    if not lines:
        return ""
    tag = "ol" if ordered else "ul"
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="words"><b>{html.escape(title)}</b><{tag} id="words">{items}</{tag}></div>\n'


def _bars() -> str:
    return '<h2>One step, by category</h2>\n<div id="bars"></div>\n<ul class="legend" id="legend"></ul>\n'


def _timelines() -> str:
    return (
        '<h2>One step, by stream</h2>\n<p class="soft">The wheel zooms, dragging moves.</p><div id="timelines"></div>\n'
    )


def _kernel_table() -> str:
    return (
        '<h2>Kernels</h2>\n<div class="tools"><input type="search" id="filter" aria-label="filter" '
        'placeholder="filter: words of name, scope, category, shape"><span class="soft" id="found"></span></div>\n'
        '<div class="scroll"><table id="kernels"><thead><tr></tr></thead><tbody></tbody></table></div>\n'
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], id: str) -> str:
    """A table below a heading; columns of numbers are aligned to the right."""
    words = {"category", "scope", "phase", "", "what", "kind", "longest wait"}
    kinds = ["" if name in words else ' class="n"' for name in head]
    cells = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(head, kinds))
    lines = [
        "<tr>" + "".join(f"<td{kind}>{html.escape(text)}</td>" for text, kind in zip(row, kinds)) + "</tr>"
        for row in rows
    ]
    return (
        f'<h2>{html.escape(title)}</h2>\n<div class="scroll"><table id="{id}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def _shares(title: str, shares: Sequence[Share], id: str) -> str:
    """The table of categories or scopes, which `id` says."""
    rows = [(row.name, row.phase, f"{row.ms:.2f}", percent(row.share)) for row in shares]
    return _table(title, ("scope" if id == "scopes" else "category", "phase", "ms/step", "share"), rows, id)


def _changes(title: str, rows: Sequence[Change], id: str) -> str:
    """A comparison's table, with coloured verdicts."""
    head = ("", "", "A ms", "B ms", "B - A", "noise", "")
    table = _table(title, head, [], id)
    lines = []
    for row in rows:
        kind = {"only in A": "faster", "only in B": "slower"}.get(row.verdict, row.verdict)
        figures = (f"{row.a_ms:.2f}", f"{row.b_ms:.2f}", f"{row.diff_ms:+.2f}", f"{row.noise_ms:.2f}")
        lines.append(
            f"<tr><td>{html.escape(row.name)}</td><td>{html.escape(row.phase)}</td>"
            + "".join(f'<td class="n">{figure}</td>' for figure in figures)
            + f'<td class="{kind}">{row.verdict}</td></tr>'
        )
    return table.replace("<tbody></tbody>", f"<tbody>{''.join(lines)}</tbody>")


def _transfers(report: ReportData) -> str:
    idle = report.idle
    text = (
        f"<p>Idle {idle.ms:.2f} ms a step: {idle.launch_gaps:.0f} launch gaps of {idle.launch_gap_ms:.2f} ms in all, "
        f"waits of {idle.wait_ms:.2f} ms.</p>"
    )
    if not report.transfers:
        return f"<h2>Waits</h2>\n{text}\n"
    rows = []
    for row in report.transfers:
        rows.append(
            (
                row.name,
                f"{row.count:g}",
                f"{row.ms:.2f}",
                percent(row.hidden),
                f"{row.exposed_ms:.2f}",
                f"{row.gb_per_s:.1f}" if row.gb else "",
                row.longest_wait,
            )
        )
    head = ("", "count", "ms/step", "under compute", "exposed ms", "GB/s", "longest wait")
    return _table("Transfers and waits", head, rows, "transfers") + text


def _memory(report: ReportData) -> str:
    if not report.buffers:
        return ""
    rows = [(r["what"], r["kind"], str(r["count"]), f"{r['bytes'] / 1e9:.3f}") for r in report.buffers]
    title = f"Memory: peak {report.peak_memory_bytes / 1e9:.2f} GB; live at the peak of the largest program"
    return _table(title, ("what", "kind", "buffers", "GB"), rows, "memory")
