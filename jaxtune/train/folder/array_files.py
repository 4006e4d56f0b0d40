"""How Orbax is set up to write and read the arrays of checkpoints. It is imported where it is used: that takes long."""

from __future__ import annotations

import itertools
import logging
import math
import os
from typing import Any

from jaxtune.system import processes

_SAVE_TIMEOUT_SECONDS = 4 * 3600
# Host memory of arrays that are read and not yet on their device. Orbax would read all of them at once: a whole 1B,
# with 15 GB of weights and moments, took 47 GB of host memory to resume.
_READ_AT_ONCE_GB = 2
_operations = itertools.count()  # all processes count the same


def saver() -> Any:
    """Copies arrays to the host, and writes them in a thread of its own. Of several processes it serves one save: what
    they wait for each other with has a name that is used once."""
    import orbax.checkpoint as ocp

    options = _processes()
    return ocp.AsyncCheckpointer(_handler(options), timeout_secs=_SAVE_TIMEOUT_SECONDS, multiprocessing_options=options)


def reader(largest_bytes: int) -> Any:
    """A context that restores, once, with a few arrays in host memory at a time. largest_bytes: of one array."""
    import orbax.checkpoint as ocp

    options = _processes()
    at_once = max(_READ_AT_ONCE_GB, math.ceil(largest_bytes / 1e9) + 1)
    return ocp.Checkpointer(_handler(options, at_once), multiprocessing_options=options)


def _handler(options, read_at_once_gb: int | None = None):
    import orbax.checkpoint as ocp

    # Orbax logs each failure three times with a traceback, and hints that do not concern our users; we raise instead.
    absl_logger = logging.getLogger("absl")
    if _not_from_orbax not in absl_logger.filters:
        absl_logger.addFilter(_not_from_orbax)
    # zstd: 8 % smaller, 4 times as long
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, restore_concurrent_gb=read_at_once_gb, multiprocessing_options=options
    )


def _processes():
    """All processes of a run by their numbers: so named, they wait for each other through the service. Orbax's other
    way is a collective, which waits for the devices, and which the saver's thread would send at any moment."""
    import orbax.checkpoint as ocp

    count = processes.count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)), barrier_sync_key_prefix=f"jaxtune_{next(_operations)}"
    )


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
