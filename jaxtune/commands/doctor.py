"""The command `jaxtune doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.system.terminal import console, fitted, say


# arguments: the words after `jaxtune doctor`: none, --quick, which measures no speeds, or --exact MODEL, which compares
# sampler and training (exact_check.py) and checks nothing else. Each finding is printed on
# stdout as soon as it is known, with what to do, if anything, in a line below it. It returns the exit code, 1 or 0.
# ValueError: the cache of measured speeds is damaged; --quick, or a machine without a GPU, does not read it.
def run(arguments: Sequence[str]) -> int:
    """Check this machine: driver, GPU, memory, disk, speed, attention's results; and say how to fix what is wrong.

    The exit code is 1 if something is found with which training will not work.
    """
    parser = common.parser("doctor", run.__doc__)
    parser.add_argument("--quick", action="store_true", help="measure no speeds")
    parser.add_argument(
        "--exact",
        dest="model",
        metavar="MODEL",
        help="compare the bits of sampler and training forward, operation by operation; the machine is not checked",
    )
    common.add_numbers(parser)
    options = parser.parse_args(arguments)
    if options.model is not None:
        if options.quick:
            parser.error("--quick is of the checks of this machine, which --exact MODEL leaves out")
        from jaxtune.commands import exact_check

        return exact_check.run(options)
    if options.dtype is not None or options.load_in is not None:
        parser.error("--dtype and --load-in are of --exact MODEL")
    from jaxtune.commands.machine_checks import findings

    wrong, screen = 0, console()
    for finding in findings(measure=not options.quick):
        headline, *advice = finding.to_text().split("\n")  # advice is printed below the finding, indented to its text
        say("\n".join([fitted(headline, screen, 6), *(fitted(line, screen, 0) for line in advice)]), flush=True)
        wrong += finding.state == "wrong"
    return int(wrong > 0)
