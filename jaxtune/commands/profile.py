"""The command `jaxtune profile`, with the subcommands show, compare and ceilings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune profile`: a subcommand, its traces, and options. The tables are printed on stdout
# as text, the ceilings as JSON; --json and --html of `show` and `compare` also write files, in place of earlier ones.
# It returns the exit code: 0, also as None, or the 1 of --fail-if-slower. ValueError: a trace or the cache of ceilings
# cannot be read, or --fail-if-slower is no percentage.
def run(arguments: Sequence[str]) -> int | None:
    """Read a profile, compare two, or measure what this device can do.

    With `compare --fail-if-slower` the exit code is 1 if B's step is slower by more than the given share.
    """
    parser = common.parser("profile", run.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|compare|ceilings")
    trace_help = "folder or file: jaxtune's or JAX's XPlane, or a Chrome trace of PyTorch's profiler"
    show = commands.add_parser("show", help="where the time of a step goes", allow_abbrev=False)
    show.add_argument("trace", help=trace_help)
    compare = commands.add_parser("compare", help="what got faster or slower from A to B", allow_abbrev=False)
    compare.add_argument("a", help=trace_help)
    compare.add_argument("b", help="likewise")
    compare.add_argument("--fail-if-slower", metavar="3%", help="exit with 1 if B's step is slower by more than this")
    for command in (show, compare):
        command.add_argument("--json", metavar="FILE", help="also write the tables as JSON")
        command.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    ceilings_help = "GEMM, copy, host link and launch rates, measured once and cached"
    ceilings = commands.add_parser("ceilings", help=ceilings_help, allow_abbrev=False)
    ceilings.add_argument("--remeasure", action="store_true", help="measure again")
    options = parser.parse_args(arguments)

    from jaxtune import profile as profiling

    if options.command == "ceilings":
        say(json.dumps(profiling.ceilings(remeasure=options.remeasure).to_dict(), indent=2))
        return None
    too_slow = False
    if options.command == "show":
        result = profiling.show(options.trace)
    else:
        limit = None if options.fail_if_slower is None else _fraction("--fail-if-slower", options.fail_if_slower)
        result = profiling.compare(options.a, options.b)
        too_slow = limit is not None and result.slower_by > limit
    if options.json:
        Path(options.json).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    if options.html:
        Path(options.html).write_text(result.to_html(), encoding="utf-8")
    say(result.to_text(width=shutil.get_terminal_size((140, 40)).columns), end="")
    return int(too_slow)


def _fraction(option: str, text: str) -> float:
    """ "3%" as 0.03; a number without the sign is refused, because 3 could mean three times."""
    try:
        if not text.endswith("%"):
            raise ValueError
        value = float(text[:-1]) / 100
    except ValueError:
        raise ValueError(f"{option} {text}: write a percentage such as 3%") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{option} {text}: write a percentage such as 3%")
    return value
