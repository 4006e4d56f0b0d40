"""`jaxtune report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


def run(arguments: Sequence[str]) -> None:
    """Write a run as one HTML page: curves, samples, settings; it needs no network."""
    parser = common.parser("report", run.__doc__)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--output", help="the page to write (default: report.html in the run's folder)")
    options = parser.parse_args(arguments)
    from jaxtune.system.files import atomic_write
    from jaxtune.train.display.run_page import run_page

    page = Path(options.output or Path(options.run) / "report.html")
    atomic_write(page, run_page(Path(options.run)))
    say(f"wrote {page}")
