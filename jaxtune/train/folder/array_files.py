"""Orbax for the arrays of checkpoints, imported late because it takes long."""

from __future__ import annotations

import itertools
import logging
import math
import os
from typing import Any

from jaxtune.system import processes

_SAVE_TIMEOUT_SECONDS = 4 * 3600
# Host memory for arrays that are read and not yet on their device. By default Orbax reads all of them at once: resuming
# full fine-tuning of a 1B model, with 15 GB of weights and moments, took 47 GB of host memory.
READ_AT_ONCE_BYTES = 2e9
_operations = itertools.count()  # numbers saves and restores; all processes count the same


def saver() -> Any:
    """An Orbax checkpointer that copies arrays to the host and writes them in a thread; wait (wait_until_finished),
    then close. Several processes make it anew for each save, as they meet at a barrier whose name serves once.
    """
    import orbax.checkpoint as ocp

    options = _processes()
    return ocp.AsyncCheckpointer(_handler(options), timeout_secs=_SAVE_TIMEOUT_SECONDS, multiprocessing_options=options)


def reader(largest_bytes: int) -> Any:
    """A context for one restore that has at most 2 GB of arrays in host memory at a time, or what the largest needs.
    Collective (`_processes`).
    """
    import orbax.checkpoint as ocp

    options = _processes()
    at_once = math.ceil(max(READ_AT_ONCE_BYTES, largest_bytes + 1e9) / 1e9)
    return ocp.Checkpointer(_handler(options, at_once), multiprocessing_options=options)


def _handler(options, read_at_once_gb: int | None = None):
    """Filters Orbax's log lines from now on. read_at_once_gb: host memory for arrays not yet on their device."""
    import orbax.checkpoint as ocp

    # Orbax logs each failure three times with a traceback, and hints that do not concern our users. We raise instead.
    absl_logger = logging.getLogger("absl")
    if _not_from_orbax not in absl_logger.filters:
        absl_logger.addFilter(_not_from_orbax)
    # Without zstd: it makes files 8 % smaller and takes 4 times as long. Without pinned host memory, which Orbax would
    # copy arrays to on a GPU: XLA never gives it back, and its pool grows by doubling, so that saving 15 GB after a
    # resume took 40 GB.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        restore_concurrent_gb=read_at_once_gb,
        multiprocessing_options=options,
        enable_pinned_host_transfer=False,
    )


def _processes():
    """Orbax's options, by which processes wait without collectives; all must call equally often, in one order."""
    import orbax.checkpoint as ocp

    count = processes.count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)), barrier_sync_key_prefix=f"jaxtune_{next(_operations)}"
    )


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
