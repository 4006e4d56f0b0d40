"""The command `jaxtune report`, which writes one self-contained HTML page that compares runs: their curves, samples and
settings.

`run` takes the words of the command line after `report`; its docstring is the text that --help prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune report`: the folders of one or more runs, and perhaps --output, the page to write.
# By default it is report.html in the first run's folder. A page that is there already is replaced. ValueError: a folder
# has no run.
def run(arguments: Sequence[str]) -> None:
    """Write runs as one HTML page, over each other: curves, samples, settings; it needs no network."""
    parser = common.parser("report", run.__doc__)
    parser.add_argument("runs", nargs="+", metavar="run", help="folders of runs")
    parser.add_argument("--output", help="the page to write (default: report.html in the first run's folder)")
    options = parser.parse_args(arguments)
    from jaxtune.system.files import atomic_write
    from jaxtune.train.display.run_page import run_page

    folders = [Path(one) for one in options.runs]
    page = Path(options.output or folders[0] / "report.html")
    atomic_write(page, run_page(folders))
    say(f"wrote {page}")
