"""Runs files of the user's code as modules, each path once. Standard library alone."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_ran: dict[Path, tuple[ModuleType, bytes]] = {}  # by path: the module, and the text that it ran
_imported: dict[Path, dict[str, ModuleType]] = {}  # by folder: what its files imported from it


def module_of(file: Path, name: str | None = None) -> ModuleType:
    """The module of a Python file, which runs once, and again after its text has changed; what it raises passes. Its
    folder's files can be imported. name: of a new module; None: the file's, if free.
    """
    path = file.resolve()
    text = path.read_bytes()
    module, before = _ran.get(path, (None, b""))
    if module is None:
        module, before = _import_of(path), text
    if module is None or text != before:
        module = _run(path, text, name or (module.__name__ if module else _free_name(path)))
    _ran[path] = module, text
    return module


def place_of(function: object) -> tuple[Path, str, str] | None:
    """(path, module, name in it) of what a file of `module_of` defines; else None."""
    for path, (module, _) in _ran.items():
        for name, value in vars(module).items():
            if value is function:
                return path, module.__name__, name
    return None


def _import_of(path: Path) -> ModuleType | None:
    for module in (sys.modules.get("__main__"), *_imported.get(path.parent, {}).values(), sys.modules.get(path.stem)):
        file = getattr(module, "__file__", None)
        if module is not None and file and Path(file).resolve() == path:
            return module
    return None


def _free_name(path: Path) -> str:
    """The file's name, by which others import it, unless another module has it."""
    name = path.stem
    if name.isidentifier() and not name.startswith("__") and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or (spec.origin and Path(spec.origin).resolve() == path):
            return name
    base = name = "jaxtune_user_" + re.sub(r"\W", "_", path.stem)
    number = 1
    while name in sys.modules:
        number += 1
        name = f"{base}_{number}"
    return name


def _run(path: Path, text: bytes, name: str) -> ModuleType:
    """Runs a file's text as module `name`; sys.modules is as before if it fails."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    earlier = sys.modules.get(name)
    with _beside(path.parent):
        sys.modules[name] = module  # where dataclasses and pickle look it up
        try:
            exec(compile(text, str(path), "exec"), module.__dict__)  # no loader: its byte code may be of an older text
        except BaseException:
            del sys.modules[name]
            if earlier is not None:
                sys.modules[name] = earlier
            raise
    return module


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Has the folder first on sys.path, as a script's is; afterwards it is last."""
    folder_modules = _imported.setdefault(folder, {})
    other_modules = [modules for other_folder, modules in _imported.items() if other_folder != folder]
    hidden = {
        name: module
        for modules in other_modules
        for name, module in modules.items()
        if sys.modules.get(name) is module and _has(folder, name.partition(".")[0])
    }
    for name in hidden:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in folder_modules.items() if name not in sys.modules})
    importlib.invalidate_caches()
    before = set(sys.modules.values())
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        folder_modules |= {
            name: module
            for name, module in list(sys.modules.items())
            if module not in before and _is_in(module, folder)
        }
        sys.modules.update(hidden)


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _is_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and folder in Path(file).resolve().parents
