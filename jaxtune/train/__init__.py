"""Training: from rows and a model to a trained model. A `TrainConfig` says what to train and how, and a `Trainer` does
it. Both are imported on first use, so that code that needs only a part of this package does not load JAX, which the
module of `Trainer` imports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.train.config import TrainConfig
    from jaxtune.train.trainer import Trainer

__all__ = ["TrainConfig", "Trainer"]

_MODULE_OF = {"TrainConfig": "jaxtune.train.config", "Trainer": "jaxtune.train.trainer"}


def __getattr__(name: str) -> Any:
    """Python calls this function for an attribute that the package does not have yet. If `name` is one of `__all__`, it
    imports the module of that class, stores the class as an attribute of the package, and returns it. So `TrainConfig`
    can be used without JAX, which only the module of `Trainer` loads. Raises AttributeError for any other name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
