"""Training: from rows and a model to a trained model. Both names are imported on first use, so that TrainConfig does
not load JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.train.config import TrainConfig
    from jaxtune.train.trainer import Trainer

__all__ = ["TrainConfig", "Trainer"]

_MODULE_OF = {"TrainConfig": "jaxtune.train.config", "Trainer": "jaxtune.train.trainer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
