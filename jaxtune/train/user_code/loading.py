"""Loads what a recipe names as file.py:name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

from jaxtune.train.config import ConfigError
from jaxtune.train.user_code import errors
from jaxtune.train.user_code.modules import module_of


def load_from_file(name: str, key: str) -> Callable:
    """The function or class that a recipe names as `file.py:name`; a relative path is of the current folder. key: the
    config key, for errors. ConfigError if the form, file or function is wrong, or the file does not run.
    """
    path, separator, attribute = name.rpartition(":")
    if not separator:
        raise ConfigError(f"{key}: {name!r} must be file.py:name, a Python file and what it defines")
    file = Path(os.path.expanduser(path))
    if not os.path.isfile(file):
        raise ConfigError(f"{key}: {name!r}: there is no file {file}")
    try:
        module = module_of(file)
    except (Exception, SystemExit) as error:
        raise ConfigError(errors.described(f"{key}: {file} does not run", error)) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise ConfigError(f"{key}: {file} has no function {attribute!r}; it has {', '.join(functions) or 'none'}")
    return function
