"""The command `jaxtune doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.system.terminal import console, fitted, say


# arguments: the words after `jaxtune doctor`: none, or --quick, which measures no speeds. Each finding is printed on
# stdout as soon as it is known, with what to do, if anything, in a line below it. It returns the exit code, 1 or 0.
# ValueError: the cache of measured speeds is damaged; --quick, or a machine without a GPU, does not read it.
def run(arguments: Sequence[str]) -> int:
    """Check this machine: driver, GPU, memory, disk, speed, attention's results; and say how to fix what is wrong.

    The exit code is 1 if something is found with which training will not work.
    """
    parser = common.parser("doctor", run.__doc__)
    parser.add_argument("--quick", action="store_true", help="measure no speeds")
    options = parser.parse_args(arguments)
    from jaxtune.commands.machine_checks import findings

    wrong, screen = 0, console()
    for finding in findings(measure=not options.quick):
        headline, *advice = finding.to_text().split("\n")  # advice is printed below the finding, indented to its text
        say("\n".join([fitted(headline, screen, 6), *(fitted(line, screen, 0) for line in advice)]), flush=True)
        wrong += finding.state == "wrong"
    return int(wrong > 0)
