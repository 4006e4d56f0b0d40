"""How the user started jaxtune, so that a proposed command can be typed as that one was."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from pathlib import Path

# `jaxtune launch` starts its processes by itself, and says here what the user had typed.
VARIABLE = "JAXTUNE_INVOCATION"
_SCRIPT = "jaxtune"


def spelled(command: str) -> str:
    """The command line of a jaxtune command, such as "generate FOLDER", as the user spells jaxtune.

    It begins with `jaxtune`, with the path of that script, or with `python -m jaxtune`, whichever started this process;
    `python -m jaxtune.train` stays so for `train`. In a script of the user's own it is what works in this environment.
    """
    name, _, rest = command.partition(" ")
    prefix = os.environ.get(VARIABLE) or prefix_of(sys.orig_argv)
    if prefix.endswith(" -m jaxtune.train"):
        if name == "train":
            return f"{prefix} {rest}".rstrip()
        prefix = prefix.removesuffix(".train")
    return f"{prefix} {command}"


def prefix_of(original: list[str]) -> str:
    """What stands before the name of the command.

    Args:
      original: `sys.orig_argv`, the process' arguments with those that the interpreter took for itself.
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
    """The path from the current folder, for what lies below it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
