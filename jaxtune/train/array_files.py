"""How Orbax is set up to write and read the arrays of checkpoints. It is imported where it is used: that takes long."""

from __future__ import annotations

import logging
import os
from typing import Any

from jaxtune import processes

_SAVE_TIMEOUT_SECONDS = 4 * 3600


def saver() -> Any:
    """Copies arrays to the host, and writes them in a thread of its own."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(_handler(), timeout_secs=_SAVE_TIMEOUT_SECONDS, multiprocessing_options=_processes())


def reader() -> Any:
    """A context that restores."""
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(_handler(), multiprocessing_options=_processes())


def _handler():
    import orbax.checkpoint as ocp

    # Orbax logs each failure three times with a traceback, and hints that do not concern our users; we raise instead.
    absl_logger = logging.getLogger("absl")
    if _not_from_orbax not in absl_logger.filters:
        absl_logger.addFilter(_not_from_orbax)
    # zstd: 8 % smaller, 4 times as long
    return ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=_processes())


def _processes():
    """All processes of a run by their numbers: so named, they wait for each other through the service. Orbax's other
    way is a collective, which waits for the devices, and which the saver's thread would send at any moment."""
    import orbax.checkpoint as ocp

    count = processes.count()
    return ocp.options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
