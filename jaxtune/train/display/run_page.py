"""The HTML page of runs: page.js draws their figures. A written page holds everything and loads nothing."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxtune.train.display.run_figures import JsonObject, RunFiles

_ENDING = " - jaxtune</title>"


def run_page(folders: Sequence[Path]) -> str:
    """The page of the runs in `folders`, with all figures in it; ValueError: a folder has no run."""
    pages = [RunFiles(folder).page() for folder in folders]
    return page(", ".join(run["name"] for run in pages), pages)


def comparison(folders: Sequence[Path]) -> Path:
    """comparison.html in the deepest folder that has all runs, so that each keeps its own report.html."""
    parents = [str(folder.resolve().parent) for folder in folders]
    page = Path(os.path.commonpath(parents)) / "comparison.html"
    return Path(os.path.relpath(page)) if page.is_relative_to(Path.cwd()) else page


def is_ours(page: Path) -> bool:
    """Whether a file may be replaced: it is missing, or a page that jaxtune wrote."""
    return not page.exists() or _ENDING in page.read_text(encoding="utf-8", errors="replace")


def page(title: str, runs: Sequence[JsonObject] | None) -> str:
    """The page's text. runs: the figures in it (RunFiles.page); None: it asks watch.py's server every two seconds."""
    script, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    data = ""
    if runs is not None:
        # Within a script element only "</script" and "<!--" have a meaning, so that no text of a run can end it.
        text = json.dumps(runs, ensure_ascii=False).replace("<", "\\u003c")
        data = f'<script type="application/json" id="data">{text}</script>\n'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{html.escape(title)}{_ENDING}
<style>
{style}</style></head><body><div id="note"></div><main>
<noscript>This page draws its figures with JavaScript, which is turned off.</noscript>
<div id="runs" class="runs"></div>
<div id="figures"></div>
<div class="controls" hidden>
<label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>
<label><input id="log" type="checkbox"> logarithmic values</label>
<label id="shares"><input id="share" type="checkbox"> steps as a share of the run</label>
<button id="numbers" type="button">numbers as CSV</button>
</div>
<div id="charts" class="grid"></div>
<div id="below"></div>
</main>
{data}<script>
{script}</script></body></html>
"""
