"""How the user started jaxtune, so that messages propose commands that work there."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# The environment variable in which `jaxtune launch` tells its processes what the user typed.
VARIABLE = "JAXTUNE_INVOCATION"
_SCRIPT = "jaxtune"
_is_command = False
_words: list[str] = []


def note_command(words: Sequence[str] = ()) -> None:
    """words: of the command, without `jaxtune`."""
    global _is_command
    _is_command, _words[:] = True, words


def words() -> list[str]:
    """Of this process's command; [] if it is none."""
    return list(_words)


def is_command() -> bool:
    """Whether this process runs a command and nothing else; a notebook that calls one is none."""
    return _is_command


def spelled(command: str) -> str:
    """The command line of `command`, such as "generate FOLDER", as this user would type it; what started `jaxtune
    launch` counts in its processes. `python -m jaxtune.train` serves `train` only.
    """
    name, _, arguments = command.partition(" ")
    prefix = os.environ.get(VARIABLE) or prefix_of(sys.orig_argv)
    if prefix.endswith(" -m jaxtune.train"):
        if name == "train":
            return f"{prefix} {arguments}".rstrip()
        prefix = prefix.removesuffix(".train")
    return f"{prefix} {command}"


def prefix_of(original: list[str]) -> str:
    """The words with which the user starts jaxtune: the script `jaxtune`, also in a user's own script, or "PYTHON -m
    jaxtune" or "... -m jaxtune.train". Bare if the shell finds them so, else by path. original: `sys.orig_argv`.
    """
    for flag, module in itertools.pairwise(original):
        if flag == "-m" and module in ("jaxtune", "jaxtune.train", "jaxtune.cli"):
            return f"{shlex.quote(original[0])} -m {module.removesuffix('.cli')}"
    # The first of these is the script, and what follows are its own arguments.
    launchers = (
        argument
        for argument in original[1:]
        if Path(argument).name == _SCRIPT or argument in ("-c", "-m") or argument.endswith(".py")
    )
    launcher = next(launchers, "")
    installed_script = Path(sys.executable).with_name(_SCRIPT)
    by_script = Path(launcher).name == _SCRIPT
    if by_script or installed_script.is_file():
        script = launcher if by_script else str(installed_script)
        return _SCRIPT if shutil.which(_SCRIPT) == os.path.abspath(script) else shlex.quote(_short(script))
    is_python_found = shutil.which("python") == sys.executable
    return f"{'python' if is_python_found else shlex.quote(_short(sys.executable))} -m jaxtune"


def _short(path: str) -> str:
    """The path relative to the current folder if it is below that, with "./" where a shell needs it."""
    if not Path(path).is_relative_to(Path.cwd()):
        return path
    short = os.path.relpath(path)
    return short if os.sep in short else os.path.join(".", short)
