"""Imports transformers without torch, beside JAX, and without reading thousands of its files at each start."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import overload

from jaxtune.system import early_import, no_torch, timing
from jaxtune.system.files import atomic_write
from jaxtune.system.sealed import sealed, unsealed

_COPIES = "transformers.tokenization_utils_tokenizers"  # copies the Rust tokenizer that a tokenizer is made of
_LOOKS, _LOOK = "transformers.utils.import_utils", "define_import_structure"  # finds which module has which name
_FORMAT = 1
_thread: threading.Thread | None = None


def begin(runs_code: bool) -> None:
    """Imports what a tokenizer needs in a thread. runs_code: whether code of the user's may run in this process, which
    may use torch; without, transformers never has it (before 5.22 it imports torch for a tokenizer, in nine seconds).
    """
    global _thread
    if _thread is not None:
        return
    if not runs_code:
        no_torch.forbid()

    def load() -> None:
        importlib.import_module("jax")  # first: the devices wait for it, and take Python's lock no more once they start
        with _imported() as transformers:
            _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast

    _thread = early_import.begin(load)


@contextlib.contextmanager
def without_torch() -> Iterator[ModuleType]:
    """A context with transformers, in which importing its modules imports torch only if they use it."""
    if _thread is not None:
        with timing.phase("import", "transformers"):
            _thread.join()
    with _imported() as transformers:
        yield transformers


@contextlib.contextmanager
def _imported() -> Iterator[ModuleType]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns if torch is not installed
    with no_torch.kept_out():
        with timing.phase("import", "transformers"), names_kept():
            import transformers

        yield transformers


@contextlib.contextmanager
def uncopied() -> Iterator[None]:
    """A context in which tokenizers that this thread makes of a tokenizers.Tokenizer take it and no copy, for who does
    not keep it: before 5.23 AutoTokenizer.from_pretrained copies what it has just read, 0.6 s for 128,000 tokens.
    """
    with contextlib.suppress(ImportError):  # of another transformers
        importlib.import_module(_COPIES)
    module, thread = sys.modules.get(_COPIES), threading.get_ident()
    if module is None or getattr(module, "copy", None) is not copy:  # another thread's context, or another transformers
        yield
        return
    kind = importlib.import_module("tokenizers").Tokenizer

    def deepcopy(value: object, *memo: dict) -> object:
        return value if type(value) is kind and threading.get_ident() == thread else copy.deepcopy(value, *memo)

    setattr(module, "copy", _Changed(copy, deepcopy=deepcopy))  # noqa: B010
    try:
        yield
    finally:
        setattr(module, "copy", copy)  # noqa: B010


# ---- which module has which name


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """A context in which importing transformers takes the names of its models' modules from a cache, and looks for a
    package's distribution when it needs one. Without, it reads each of these modules (3,300 files), and before 5.23
    asks for each file of all distributions whether it exists. Does nothing once it is imported.
    """
    if _LOOKS in sys.modules:
        yield
        return
    finder = _Finder(_cache_of_names())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _cache_of_names() -> Path | None:
    """A file for the installed transformers, which may not exist yet; None for one that may change."""
    try:
        installed = metadata.distribution("transformers")
        record = installed.read_text("RECORD") or ""
        root = Path(os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune").expanduser()
    except (metadata.PackageNotFoundError, OSError, RuntimeError):
        return None
    folder = str(installed.locate_file("transformers"))
    imported = importlib.machinery.PathFinder.find_spec("transformers")
    if imported is None or imported.origin is None or "transformers/models/__init__.py" not in record:
        return None
    if os.path.realpath(os.path.dirname(imported.origin)) != os.path.realpath(folder):
        return None
    identity = "\n".join((f"format {_FORMAT}", folder, record))
    return root / "imports" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module that looks for names and packages as Python does, and gives it what takes less time. path: of
    the cache of names; None: there is none.
    """

    def __init__(self, path: Path | None):
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == _LOOKS else None
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                code = loader.get_code(fullname) if isinstance(loader, importlib.abc.InspectLoader) else None
                if code is None:
                    run(module)
                else:
                    exec(code, vars(module), names := _Names(vars(module)))
                    names.end()
                if self._path is not None:
                    setattr(module, _LOOK, _through_cache(getattr(module, _LOOK), self._path))

            spec.loader.exec_module = exec_module
        return spec


class _Names(MutableMapping[str, object]):
    """The names of a module while it runs, in which `importlib` has a packages_distributions of its own."""

    def __init__(self, names: dict[str, object]):
        self._names = names

    def __setitem__(self, name: str, value: object) -> None:
        self._names[name] = _with_distributions_at_need() if value is importlib else value

    def __getitem__(self, name: str) -> object:
        return self._names[name]

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def end(self) -> None:
        """`importlib` is Python's again."""
        for name, value in self._names.items():
            if isinstance(value, _Changed):
                self._names[name] = importlib


class _Changed(ModuleType):
    """A module with other attributes."""

    def __init__(self, module: ModuleType, **changes: object):
        super().__init__(module.__name__, module.__doc__)
        vars(self).update(vars(module) | changes)


def _with_distributions_at_need() -> ModuleType:
    of_packages = _Changed(metadata, packages_distributions=lambda: _Distributions(metadata.packages_distributions))
    return _Changed(importlib, metadata=of_packages)


class _Distributions(Mapping[str, Sequence[str]]):
    """importlib.metadata.packages_distributions(), asked for at need: a package has a distribution of its name."""

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]):
        self._all = functools.cache(find)

    def __getitem__(self, package: str) -> Sequence[str]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            return _Providers(package, self._all)
        return self._all()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class _Providers(Sequence[str]):
    """The names of a package's distributions, of which it has one of its own name; others are asked for at need."""

    def __init__(self, package: str, find: Callable[[], Mapping[str, list[str]]]):
        self._package, self._find = package, find

    def __contains__(self, name: object) -> bool:
        return str(name).replace("_", "-").lower() == self._package.replace("_", "-").lower() or name in self._names()

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        return self._find().get(self._package, [self._package])


type Names = dict[frozenset[str], dict[str, set[str]]]  # {packages that they need: {module: names}}


def _through_cache(look: Callable[..., Names], path: Path) -> Callable[..., Names]:
    """transformers' define_import_structure, with the answer for the folder of all models from `path`."""

    @functools.wraps(look)
    def names_of(module_path: str | Path, prefix: str | None = None) -> Names:
        module_file = Path(module_path)
        if (module_file.parent if module_file.name == "__init__.py" else module_file).name != "models":
            return look(module_path, prefix)
        begin = "" if prefix is None else f"{prefix}."
        return {
            frozenset(needs): {begin + name: set(names) for name, names in modules.items()}
            for needs, modules in _read(path) or _written(look(module_path), path)
        }

    return names_of


type _Stored = list[tuple[list[str], dict[str, list[str]]]]  # as JSON


def _read(path: Path) -> _Stored | None:
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is damaged
        return json.loads(unsealed(path.name, path.read_bytes()))
    return None


def _written(names: Names, path: Path) -> _Stored:
    stored: _Stored = [(sorted(needs), {name: sorted(each) for name, each in names[needs].items()}) for needs in names]
    with contextlib.suppress(OSError):  # the next start looks again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, sealed(path.name, json.dumps(stored).encode()), mode=0o600, durable=False)
    return stored
