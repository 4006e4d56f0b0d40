"""`jaxtune doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.terminal import say


def run(arguments: Sequence[str]) -> int:
    """Look at this machine: driver, GPU, memory, disk, speed, a kernel; and say what to do about what is wrong."""
    parser = common.parser("doctor", run.__doc__)
    parser.add_argument("--quick", action="store_true", help="measure no speeds")
    options = parser.parse_args(arguments)
    from jaxtune.doctor import findings

    wrong = 0
    for finding in findings(measure=not options.quick):
        say(finding.to_text(), flush=True)
        wrong += finding.state == "wrong"
    return int(wrong > 0)
