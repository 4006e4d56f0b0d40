"""How the user started jaxtune, so that messages propose commands in the same form: `spelled` for a command,
`prefix_of` for the words before its name."""

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

    It starts with `jaxtune`, with the path of that script, or with `python -m jaxtune`, whichever started this process
    (or `jaxtune launch`, if that started it); `python -m jaxtune.train` is used for `train` if it started the process.
    In a user's own script it is whatever works in this environment.
    """
    name, _, rest = command.partition(" ")
    prefix = os.environ.get(VARIABLE) or prefix_of(sys.orig_argv)
    if prefix.endswith(" -m jaxtune.train"):
        if name == "train":
            return f"{prefix} {rest}".rstrip()
        prefix = prefix.removesuffix(".train")
    return f"{prefix} {command}"


def prefix_of(original: list[str]) -> str:
    """Returns the words with which the user starts jaxtune, before the name of a command: "jaxtune", if the shell finds
    the script under this name; else the path of that script; "PYTHON -m jaxtune", where PYTHON is the interpreter; or
    "PYTHON -m jaxtune.train", if that started the process. In a user's own script it is the script `jaxtune` of this
    environment, or else the interpreter with the module. Messages that propose a command begin with them.

    Args:
      original: `sys.orig_argv`: the process's arguments, with those that the interpreter consumed.
    """
    for flag, module in itertools.pairwise(original):
        if flag == "-m" and module in ("jaxtune", "jaxtune.train", "jaxtune.cli"):
            return f"{shlex.quote(original[0])} -m {module.removesuffix('.cli')}"
    scripts = [argument for argument in original[1:] if Path(argument).name == _SCRIPT]
    beside = Path(sys.executable).with_name(_SCRIPT)
    if scripts or beside.is_file():
        script = scripts[0] if scripts else str(beside)
        return _SCRIPT if shutil.which(_SCRIPT) == os.path.abspath(script) else shlex.quote(_short(script))
    known = shutil.which("python") == sys.executable
    return f"{'python' if known else shlex.quote(_short(sys.executable))} -m jaxtune"


def _short(path: str) -> str:
    """Returns a path relative to the current folder if it is below that folder; otherwise the path unchanged. It
    shortens the commands that messages propose."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
