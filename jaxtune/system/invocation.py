"""How the user started jaxtune, so that messages propose commands that work there: `spelled` for a command,
`prefix_of` for the words before its name. The forms are `jaxtune`, the path of that script, `PYTHON -m jaxtune` and
`PYTHON -m jaxtune.train`. The processes of `jaxtune launch` get the form of that command in an environment variable."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from pathlib import Path

# The environment variable in which `jaxtune launch` tells its processes what the user typed.
VARIABLE = "JAXTUNE_INVOCATION"
_SCRIPT = "jaxtune"


def spelled(command: str) -> str:
    """The command line of a jaxtune command, such as "generate FOLDER", as the user would type it, for messages.

    It starts with the words that started this process (`prefix_of`), or, in a process of `jaxtune launch`, with those
    that started `jaxtune launch`, from the environment variable VARIABLE. `python -m jaxtune.train` is used for `train`
    only; other commands then start with `python -m jaxtune`.
    """
    name, _, rest = command.partition(" ")
    prefix = os.environ.get(VARIABLE) or prefix_of(sys.orig_argv)
    if prefix.endswith(" -m jaxtune.train"):
        if name == "train":
            return f"{prefix} {rest}".rstrip()
        prefix = prefix.removesuffix(".train")
    return f"{prefix} {command}"


def prefix_of(original: list[str]) -> str:
    """Returns the words with which the user starts jaxtune, before the name of a command. If `python -m` started the
    process, they are "PYTHON -m jaxtune" or "PYTHON -m jaxtune.train", where PYTHON is the interpreter as it was typed.
    If the script `jaxtune` did, or in a user's own script the one of this environment, they are "jaxtune" if the shell
    finds that script under this name, else its path. In an environment without the script they are "PYTHON -m jaxtune",
    where PYTHON is "python" if the shell finds this interpreter under that name, else its path.
    `spelled` begins with them, and `jaxtune launch` gives them to its processes.

    Args:
      original: `sys.orig_argv`: the process's arguments, with those that the interpreter consumed.
    """
    for flag, module in itertools.pairwise(original):
        if flag == "-m" and module in ("jaxtune", "jaxtune.train", "jaxtune.cli"):
            return f"{shlex.quote(original[0])} -m {module.removesuffix('.cli')}"
    # The first of these is the script, and what follows are its own arguments.
    ways = (each for each in original[1:] if Path(each).name == _SCRIPT or each in ("-c", "-m") or each.endswith(".py"))
    started = next(ways, "")
    beside = Path(sys.executable).with_name(_SCRIPT)
    by_script = Path(started).name == _SCRIPT
    if by_script or beside.is_file():
        script = started if by_script else str(beside)
        return _SCRIPT if shutil.which(_SCRIPT) == os.path.abspath(script) else shlex.quote(_short(script))
    known = shutil.which("python") == sys.executable
    return f"{'python' if known else shlex.quote(_short(sys.executable))} -m jaxtune"


def _short(path: str) -> str:
    """Returns a path relative to the current folder if it is an absolute one below that folder, with "./" before the
    name of a file in the folder itself, which a shell would look for elsewhere; otherwise the path unchanged.
    `prefix_of` shortens the path of the script or the interpreter by it."""
    if not Path(path).is_relative_to(Path.cwd()):
        return path
    short = os.path.relpath(path)
    return short if os.sep in short else os.path.join(".", short)
