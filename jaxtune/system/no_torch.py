"""Keeps libraries from importing torch, which takes four to ten seconds, where they name it and do not use it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        _withdraw(self)
        return getattr(importlib.import_module("torch"), name)

    def __setattr__(self, name: str, value: object) -> None:
        _withdraw(self)
        setattr(importlib.import_module("torch"), name, value)


def _withdraw(module: types.ModuleType | None) -> None:
    if sys.modules.get("torch", ...) is module:
        del sys.modules["torch"]


class _Loaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules that importing torch has loaded while the stand-in was their parent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        module = sys.modules.get(fullname) if fullname.startswith("torch.") else None
        if module is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self)
        spec.loader_state = module, module.__spec__
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return spec.loader_state[0]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state[1]


@contextlib.contextmanager
def torch_on_use():
    """A context in which `import torch` takes no time: the module imports torch when an attribute is looked up, also
    after the context. Does nothing if torch is imported already, or not installed.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None:
        yield
        return
    module = _StandIn("torch")
    # transformers looks for the spec, and inspect for the file of every module.
    vars(module).update(__spec__=spec, __file__=spec.origin)
    sys.modules["torch"], loaded = module, _Loaded()
    sys.meta_path.insert(0, loaded)
    try:
        yield
    finally:
        sys.meta_path.remove(loaded)
        _withdraw(module)


_forbidden = False


def forbid() -> None:
    """torch is hidden in each context of `kept_out` from now on."""
    global _forbidden
    _forbidden = True


def kept_out() -> contextlib.AbstractContextManager[None]:
    """`torch_on_use`, or `torch_hidden` once torch is forbidden."""
    return torch_hidden() if _forbidden else torch_on_use()


@contextlib.contextmanager
def torch_hidden():
    """A context in which `import torch` fails, in all threads. Does nothing if torch is imported already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        _withdraw(None)
