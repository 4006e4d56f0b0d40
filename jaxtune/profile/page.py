"""HTML pages of a report (`report_page`) and of a comparison (`comparison_page`), as text. A page is one file that
contains all numbers and loads nothing; a script in it, page.js, draws bars, timelines and the kernel table. `_page`
makes the whole document, `_column` describes a column of the kernel table, and the other functions make the sections of
a page."""

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
    """Makes the HTML page of one profile's report and returns its text: the three largest losses, the step's time by
    category and scope, its timeline, kernels, transfers and memory. Report.to_html calls it."""
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
    """Returns the HTML text of a page that shows `comparison`, that of the profiles of two runs, A and B. The page says
    in words what changed from A to B. Its tables have the times of both by category, by scope (or by region of the
    model, if the programs name their scopes differently) and by kernel, and it draws bars and timelines of both.
    Transfers and memory are not on it. B's times are multiplied by `comparison.scale`, except in its headline and
    timeline. Comparison.to_html calls it."""
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
    """Describes a column of the kernel table for page.js, as a dict of JSON values: {"key", "title", "number": whether
    it has numbers, "digits"}.

    Args:
      key: the column's identifier, by which the table is sorted and summed; a row is a list with a value for each
        column, in their order, and has no keys. page.js shows "shape" below "name", without its heading, and colours
        "verdict".
      title: its heading.
      digits: decimals of its numbers; None: it has text, and "digits" is 0.
    """
    return {"key": key, "title": title, "number": digits is not None, "digits": digits or 0}


def _page(
    title: str,
    sides: Sequence[tuple[str, ReportData]],
    notes: Iterable[str],
    body: Iterable[str],
    kernels: dict[str, Any],
    scales: dict[str, float] | None = None,
) -> str:
    """Makes the whole HTML document and returns its text; styles, script and numbers are inside it.

    Args:
      title: its heading.
      sides: (label, report) of the one or two profiles; a label is "A", "B" or "" for a single one.
      notes: remarks below the heading, as plain text.
      body: the sections, as HTML.
      kernels: the kernel table for page.js: "columns" (of `_column`), "rows" (lists of values, in the order of the
        columns), "sort" (the key it is sorted by first) and "sums" (keys of columns that are summed).
      scales: {label: factor on the times in that profile's bar}, 1 where missing; None: 1 for all. Headline and
        timeline are not scaled, and `body` and `kernels` are shown as they are.
    """
    heads, data_sides = [], []
    for label, report in sides:
        scale = (scales or {}).get(label, 1.0)
        first, *more = headline(report)
        name = f"<b>{label}</b> " if label else ""
        lines = "".join(f'<br><span class="soft">{html.escape(line)}</span>' for line in more)
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
    """The HTML of a list of sentences, `lines` (plain text), below the heading `title`; "" without sentences. The page
    of a report lists its three largest losses so, that of a comparison what changed. ordered: True numbers them, False
    puts a dot before each."""
    if not lines:
        return ""
    tag = "ol" if ordered else "ul"
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="words"><b>{html.escape(title)}</b><{tag} id="words">{items}</{tag}></div>\n'


def _bars() -> str:
    """The empty section, as HTML, in which page.js draws a bar for each profile: the mean step, divided into its
    categories. The pages of reports and of comparisons have it."""
    return '<h2>One step, by category</h2>\n<div id="bars"></div>\n<ul class="legend" id="legend"></ul>\n'


def _timelines() -> str:
    """The empty section, as HTML, in which page.js draws the middle step of each profile on a time axis, with a line
    for each stream. The pages of reports and of comparisons have it."""
    return (
        '<h2>One step, by stream</h2>\n<p class="soft">The wheel zooms, dragging moves.</p><div id="timelines"></div>\n'
    )


def _kernel_table() -> str:
    """The HTML of the section "Kernels": a field for a filter and an empty table, which page.js fills."""
    return (
        '<h2>Kernels</h2>\n<div class="tools"><input type="search" id="filter" aria-label="filter" '
        'placeholder="filter: words of name, scope, category, shape"><span class="soft" id="found"></span></div>\n'
        '<div class="scroll"><table id="kernels"><thead><tr></tr></thead><tbody></tbody></table></div>\n'
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], id: str) -> str:
    """The HTML of a table below a heading, for all tables but that of kernels, which page.js fills.

    Args:
      title: the heading.
      head: the name of each column; columns of numbers are aligned to the right, those with one of a few known names,
        such as "scope" or "", to the left.
      rows: the cells of each row, as plain text.
      id: the id of the HTML element, by which tests find the table.
    """
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
    """The HTML table of the time of each category or scope of a report, for the page of a single profile; that of a
    comparison has `_changes`. title: its heading. shares: its rows. id: the id of the HTML element, "categories" or
    "scopes", which also decides the name of the first column."""
    rows = [(row.name, row.phase, f"{row.ms:.2f}", percent(row.share)) for row in shares]
    return _table(title, ("scope" if id == "scopes" else "category", "phase", "ms/step", "share"), rows, id)


def _changes(title: str, rows: Sequence[Change], id: str) -> str:
    """The HTML table of a comparison's step and categories, or of its scopes or regions. The last cell of a row is the
    verdict, coloured as "faster", "slower" or "same"; "only in A" has the colour of "faster", "only in B" that of
    "slower". title: its heading. rows: the changes. id: the id of the HTML element."""
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
    """The HTML section on a report's waits, which only the page of a single profile has: a sentence on idle time, below
    the table of copies over the host link and collectives if there are any."""
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
    """The HTML table of a report's largest buffers (at most 12 groups) that are live at the peak of the program that
    needs the most memory, with the peak memory in its heading; "" where the buffers are unknown. Only the page of a
    single profile has it."""
    if not report.buffers:
        return ""
    rows = [(r["what"], r["kind"], str(r["count"]), f"{r['bytes'] / 1e9:.3f}") for r in report.buffers]
    title = f"Memory: peak {report.peak_memory_bytes / 1e9:.2f} GB; live at the peak of the largest program"
    return _table(title, ("what", "kind", "buffers", "GB"), rows, "memory")
