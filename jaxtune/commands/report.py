"""The command `jaxtune report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


def run(arguments: Sequence[str]) -> None:
    """Write runs as one HTML page, over each other: curves, samples, settings; it needs no network."""
    parser = common.parser("report", run.__doc__)
    parser.add_argument("runs", nargs="+", metavar="run", help="folders of runs")
    parser.add_argument(
        "--output",
        help="the page to write (default: report.html in the run's folder; of several runs "
        "comparison.html in the folder that has them all)",
    )
    parser.add_argument("--csv", metavar="FILE", help="write every number of metrics.jsonl to this table, too")
    options = parser.parse_args(arguments)
    from jaxtune.system.files import atomic_write
    from jaxtune.train.display.run_page import comparison, is_ours, run_page
    from jaxtune.train.display.run_table import run_table

    folders = [Path(run_folder) for run_folder in options.runs]
    page = Path(options.output or (folders[0] / "report.html" if len(folders) == 1 else comparison(folders)))
    if not options.output and not is_ours(page):
        raise ValueError(f"{page} is no page of jaxtune report: --output names another file")
    atomic_write(page, run_page(folders))
    say(f"wrote {page}")
    if options.csv:
        atomic_write(options.csv, run_table(folders))
        say(f"wrote {options.csv}")
