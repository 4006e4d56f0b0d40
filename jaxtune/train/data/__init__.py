"""Data: from rows of files to tokens, from tokens to packed rows, from packed rows to batches.

The names in `__all__` are imported on first use, so that a process that reads or tokenises rows does not load JAX.
`dataset.prepare` reads, tokenises and caches one set of rows, and returns it as a `TokenDataset`, which packs it and
makes its batches. The other files, in the order in which data flows through them:

- `reading.py` and `row_files.py` read rows from files and data sets.
- `formats.py` and `messages.py` convert the known row formats (text, Alpaca, messages, ...) to one `Example`.
- `templates.py`, `conversations.py`, `tokenizing.py`, `markers.py` and `spans.py` render examples with a chat
  template, tokenise the text, and decide which tokens are trained on; `packaged.py` has templates for base models.
- `workers.py` tokenises rows in chunks, of many rows in several processes; `cache.py` stores the result on disk.
- `packing.py` (and `pairs.py` for preferences) packs the documents (`documents.py`) into rows of fixed length.
- `teacher_values.py` has a teacher's stored log-probabilities beside them; `teacher_files.py` reads these from files
  that another program wrote.
- `batches.py` maps the number of a step to its batch; `steps.py` does so when every step trains on a fixed number of
  documents.
- `streamed.py` does all of this during the run, for a window of rows at a time; `feeds.py` takes the rows of a step
  from streams and from mixtures of several sets.
- `preview.py` shows a packed row in a terminal; `first_look.py` reads the first rows before anything is loaded.

One rule holds everywhere: an error that one row causes affects that row alone (`row_errors.attempt`), and `on_bad_row`
decides whether the run stops or continues without the row.
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
    """Python calls this function for an attribute that the package does not have yet. If `name` is one of `__all__`, it
    imports the module of that object, stores the object as an attribute of the package, and returns the object. So a
    process that only reads or tokenises rows does not load JAX. Raises AttributeError for any other name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
