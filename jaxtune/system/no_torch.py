"""Keeps libraries from importing torch, which takes four to ten seconds, where they name it and do not use it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types


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
    sys.modules["torch"] = module
    try:
        yield
    finally:
        _withdraw(module)


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
