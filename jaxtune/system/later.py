"""Modules that are imported at the first use of a name in them."""

from __future__ import annotations

import importlib
import types


class Later(types.ModuleType):
    """Stands for the module of this name."""

    def __getattr__(self, name: str) -> object:
        # Never from sys.modules: another thread may still import it.
        return getattr(importlib.import_module(self.__name__), name)
