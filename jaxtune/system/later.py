"""Modules that are imported at the first use of a name in them."""

from __future__ import annotations

import importlib
import sys
import types


class Later(types.ModuleType):
    """Stands for the module of this name."""

    def __getattr__(self, name: str) -> object:
        module = sys.modules.get(self.__name__) or importlib.import_module(self.__name__)
        return getattr(module, name)
