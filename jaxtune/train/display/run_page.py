"""A run as an HTML page: its curves, samples and settings. The page loads nothing; all figures are in its text."""

from __future__ import annotations

import html
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from jaxtune.train.display import metrics as m
from jaxtune.train.folder.run_folder import CONFIG, RESULTS

_WHEN = ("before", "after")  # keys of samples made before and after training
# The keys of a line of metrics.jsonl that a page shows, in addition to those that end in "_seconds".
_DRAWN = {
    "step",
    "steps",
    "loss",
    "eval_loss",
    m.ROWS,
    "learning_rate",
    "tokens_per_second",
    "peak_memory_bytes",
    "skipped",
    "plan",
}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 190, 62, 24
STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #5b636d; --line: #dfe2e6; --page: #fbfbfa; --panel: #fff;
  --first: #2e5e8c; --second: #d08770; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a2abb6; --line: #323841; --page: #14171b;
  --panel: #1b1f25; --first: #6d97ec; --second: #f0a040; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 20px; margin: 0 0 8px; } h2 { font-size: 15px; margin: 28px 0 8px; }
.grid { margin-top: 14px; display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 14px; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
tr + tr > * { border-top: 1px solid var(--line); } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
p { margin: 0; } .in { padding-left: 1.5em; }
.first { stroke: var(--first); fill: none; stroke-width: 1.6; } .second { stroke: var(--second); fill: none; }
.second-dot { fill: var(--second); } .soft { color: var(--soft); }
"""


class Run:
    """The page's part for one run's folder. When asked again, it reads only the lines added since, and draws only if
    something changed.

    Args:
      folder: of the run.
      name: prefix of the ids of HTML elements, if several runs share a page.
    """

    def __init__(self, folder: Path, name: str = ""):
        self.folder, self.name = folder, name
        self._lines: list[dict[str, Any]] = []
        self._file, self._read = (0, 0), 0  # device and inode of metrics.jsonl, bytes of whole lines read
        self._seen: Any = None
        self._body = ""

    def body(self) -> str:
        """The HTML of the run.

        Raises:
          ValueError: the folder has no run.
        """
        path = self.folder / m.JSONL
        if not path.is_file():
            raise ValueError(f"{self.folder} is not a run's folder: there is no {m.JSONL} in it")
        seen = [_state(self.folder / name) for name in (m.JSONL, RESULTS, CONFIG)]
        if seen != self._seen:
            self._body = _body(self.folder, self.name, self._metrics(path))
            self._seen = seen
        return self._body

    def _metrics(self, path: Path) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of which only new ones are read."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._read:  # a resumed run has replaced the file
                self._lines, self._read, self._file = [], 0, identity
            file.seek(self._read)
            *whole, rest = file.read().split(b"\n")
        self._read += sum(len(text) + 1 for text in whole)
        self._lines += _drawn(whole)
        return [*self._lines, *_drawn([rest])]


def _state(path: Path) -> Any:
    """A value that changes when a file does: its inode, size and time of modification; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _drawn(texts: Sequence[bytes]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl reduced to what the page shows, because all lines of a long run would fill the memory."""
    lines = [line for text in texts if (line := m.parsed(text)) is not None]
    return [{key: line[key] for key in line if key in _DRAWN or key.endswith("_seconds")} for line in lines]


def run_page(folder: Path) -> str:
    """The HTML page of a run's folder.

    Raises:
      ValueError: the folder has no run.
    """
    body = Run(folder).body()
    title = f"{folder.resolve().name} - jaxtune"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>\n" + f"{body}\n</main></body></html>\n"
    )


def _body(folder: Path, name: str, lines: Sequence[dict[str, Any]]) -> str:
    """The HTML of a run from its metrics and the files of its folder; `name` as in Run."""
    results = _json(folder / RESULTS)
    losses = [("training", _points(lines, "loss")), ("evaluation", _points(lines, "eval_loss"))]
    parts = [
        f"<h1>{_text(folder.resolve().name)}</h1>",
        _table(_facts(lines, results), f"{name}facts"),
        '<div class="grid">',
        _chart(f"{name}loss", "loss", losses),
        _chart(f"{name}rate", "learning rate", [("learning rate", _points(lines, "learning_rate"))]),
        _chart(f"{name}speed", "tokens/s", [("tokens/s", _points(lines, "tokens_per_second"))]),
        _chart(f"{name}memory", "peak memory, GB", [("peak", _points(lines, "peak_memory_bytes", 1e-9))]),
        "</div>",
        _plan(lines, name),
        _samples(results, name),
        "<h2>Settings</h2>",
        f'<pre id="{name}config">{_text(_read(folder / CONFIG))}</pre>',
    ]
    return "\n".join(part for part in parts if part)


def _text(value: Any) -> str:
    """A value as escaped HTML."""
    return html.escape(str(value))


def _read(path: Path) -> str:
    """The text of a file; "" if it is missing."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty if there is none."""
    try:
        found = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _points(lines: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> list[tuple[int, float]]:
    """(step, value times `scale`) of the lines that have a number for this key."""
    found: Iterator[tuple[int, Any]] = ((line["step"], line.get(key)) for line in lines)
    return [(step, float(value) * scale) for step, value in found if type(value) is float or _is_number(value)]


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a number that a float can represent; JSON's integers have any size."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _seconds(line: dict[str, Any]) -> float:
    """The wall time that a line adds to the run (monitor.py): of its steps, or of a pause and its parts."""
    if _is_number(line.get("step_seconds")):
        steps = line.get("steps", 1)
        return line["step_seconds"] * steps if _is_number(steps) else 0.0
    return sum(line[key] for key in line if key.endswith("_seconds") and _is_number(line[key]))


def _facts(lines: Sequence[dict[str, Any]], results: dict[str, Any]) -> list[tuple[str, str]]:
    """The main results of a run, as (name, value in words)."""
    facts: list[tuple[str, str]] = []
    if lines:
        facts.append(("steps", f"{lines[-1]['step']:,}"))
        seconds = sum(map(_seconds, lines))  # without the time between a kill and its resume
        facts.append(("time", m.duration(seconds) if math.isfinite(seconds) else "-"))
    rows = next((line.get(m.ROWS) for line in reversed(lines) if "eval_loss" in line), None)
    alike = [line for line in lines if line.get(m.ROWS, rows) == rows]  # evaluations of other rows are not comparable
    for key, name in (("loss", "training loss, first and last"), ("eval_loss", "evaluation loss, first and last")):
        if points := _points(alike, key):
            facts.append((name, f"{points[0][1]:.4f}, {points[-1][1]:.4f}"))
    matches = [(when, float(results[when]["exact_match"])) for when in _WHEN if _scored(results, when)]
    if matches:
        facts.append(("exact match", ", ".join(f"{100 * score:.1f} % {when} training" for when, score in matches)))
    if speeds := [value for _, value in _points(lines, "tokens_per_second")]:
        facts.append(("speed, median", f"{statistics.median(speeds):,.0f} tokens/s"))
    if peaks := [value for _, value in _points(lines, "peak_memory_bytes", 1e-9)]:
        facts.append(("peak memory", f"{max(peaks):.2f} GB"))
    skipped = [value for _, value in _points(lines, "skipped")]
    if skipped and skipped[-1]:
        facts.append(("updates skipped, as they were not finite", f"{skipped[-1]:.0f}"))
    return facts


def _scored(results: dict[str, Any], when: str) -> bool:
    """Whether the results have an exact-match score for this moment."""
    return isinstance(results.get(when), dict) and _is_number(results[when].get("exact_match"))


def _table(rows: Sequence[Sequence[str]], name: str, head: Sequence[str] = ()) -> str:
    """An HTML table with the id `name`."""
    cells = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    first = "<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>" if head else ""
    return f'<table id="{name}">{first}{cells}</table>'


def _plan(lines: Sequence[dict[str, Any]], name: str) -> str:
    """The plan in force, in words. A run that was resumed, or that ran out of memory, may have had other plans
    before."""
    plans = [line["plan"] for line in lines if isinstance(line.get("plan"), list)]
    if not plans or not plans[-1]:
        return ""
    said = "".join(f"<p{' class=in' * str(line).startswith(' ')}>{_text(str(line).strip())}</p>" for line in plans[-1])
    return f'<h2>Plan</h2>\n<div id="{name}plan">{said}</div>'


def _samples(results: dict[str, Any], name: str) -> str:
    """A table of held-out questions with the expected answers and the model's, before and after training."""
    before, after = (_asked(results[when].get("samples")) if _scored(results, when) else [] for when in _WHEN)
    if not after:
        return ""
    said = {question: given for question, _, given in before}
    rows = [(question, expected, said.get(question, "-"), given) for question, expected, given in after]
    head = ("question", "expected", "before training", "after training")
    return "<h2>Samples</h2>\n" + _table(rows, f"{name}samples", head)


def _asked(samples: Any) -> list[tuple[str, str, str]]:
    """(question, expected answer, given answer) of the samples that have them."""
    found = [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []
    keys = ("question", "expected", "given")
    whole = [sample for sample in found if all(key in sample for key in keys)]
    return [(str(sample["question"]), str(sample["expected"]), str(sample["given"])) for sample in whole]


def _number(value: float) -> str:
    """A number short enough for an axis: 17,540, 3.706, 2.00e-04."""
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.2e}"
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:.4g}"


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points that a chart draws: of more points than it has columns, the first, last, lowest and highest of each
    column, with which the line looks the same."""
    if len(points) <= 4 * _WIDTH:
        return points
    each = -(-len(points) // _WIDTH)
    found = []
    for start in range(0, len(points), each):
        column = points[start : start + each]
        few = {column[0], column[-1], min(column, key=_value), max(column, key=_value)}
        found += sorted(few, key=column.index)
    return found


def _value(point: tuple[int, float]) -> float:
    """The value of a (step, value) point."""
    return point[1]


def _chart(name: str, caption: str, series: Sequence[tuple[str, list[tuple[int, float]]]]) -> str:
    """An SVG chart of the finite values over the steps, empty without any. A second series is drawn with dots, as it
    has few points."""
    series = [(label, _thinned([point for point in values if math.isfinite(point[1])])) for label, values in series]
    points = [point for _, values in series for point in values]
    if not points:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    low, high = (low, high) if high > low else (low - abs(low or 1) / 2, high + abs(high or 1) / 2)

    def at(step: int, value: float) -> tuple[float, float]:
        """The coordinates of a point."""
        x = _LEFT + (_WIDTH - _LEFT - 10) * (step - first) / max(1, last - first)
        return round(x, 1), round(8 + (_HEIGHT - 8 - _BOTTOM) * (high - value) / (high - low), 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(caption)} by step">']
    for value in (high, (high + low) / 2, low):
        _, y = at(first, value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y}" y2="{y}" stroke="var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(value)}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(f'<text x="{at(step, low)[0]}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {step:,}</text>')
    for style, (_, values) in zip(("first", "second"), series, strict=False):
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in values))
        parts.append(f'<polyline class="{style}" points="{path}"/>')
        if style == "second" or len(values) == 1:
            dots = (at(*point) for point in values)
            parts += [f'<circle class="second-dot" cx="{x}" cy="{y}" r="3"/>' for x, y in dots]
    named = ", ".join(
        f"{label} {'(line)' if i == 0 else '(dots)'}" for i, (label, values) in enumerate(series) if values
    )
    note = f' <span class="soft">{_text(named)}</span>' if len(series) > 1 else ""
    return f'<figure id="{name}"><figcaption>{_text(caption)}{note}</figcaption>{"".join(parts)}</svg></figure>'
