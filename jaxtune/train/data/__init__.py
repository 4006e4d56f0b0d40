"""From rows of files to tokens, packed rows, and batches.

`dataset.prepare` reads rows (`reading`), renders and tokenises them (`templates`), caches the tokens (`cache`) and
packs them (`packing`); `streamed` and `feeds` do it during the run. An error of one row affects that row alone;
data.on_bad_row decides whether the run stops.

Names are imported on first use, so that a process that only tokenises does not load JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.train.data.batches import Batch, Batches
    from jaxtune.train.data.cache import Summary
    from jaxtune.train.data.dataset import TokenDataset, prepare
    from jaxtune.train.data.packing import PackedRows, PackingReport

__all__ = ["Batch", "Batches", "PackedRows", "PackingReport", "Summary", "TokenDataset", "prepare"]

_MODULE_OF = {
    "Batch": "batches",
    "Batches": "batches",
    "PackedRows": "packing",
    "PackingReport": "packing",
    "Summary": "cache",
    "TokenDataset": "dataset",
    "prepare": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
