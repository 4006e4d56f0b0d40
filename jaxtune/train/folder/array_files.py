"""The setup of Orbax for the arrays of checkpoints: `saver` makes what writes them, `reader` what reads them, both for
checkpoint.py. Orbax is imported in the functions, because importing it takes long."""

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
    """An Orbax checkpointer for writing: it copies arrays to the host and then writes them in a thread of its own, so
    that training continues meanwhile. The caller waits for that (wait_until_finished) and closes it.

    In a run of several processes all of them make it anew for each save, because they wait for each other at a barrier
    whose name can be used once. With one process a Checkpointer uses one for all of its saves.
    """
    import orbax.checkpoint as ocp

    options = _processes()
    return ocp.AsyncCheckpointer(_handler(options), timeout_secs=_SAVE_TIMEOUT_SECONDS, multiprocessing_options=options)


def reader(largest_bytes: int) -> Any:
    """A context with an Orbax checkpointer for one restore. It limits the arrays that are read and not yet on their
    device to 2 GB of host memory at a time, because Orbax would otherwise read all of them at once. All processes of a
    run must call it (`_processes`).

    Args:
      largest_bytes: the bytes of the largest array, for which there must be room; for a large one the limit is higher.
    """
    import orbax.checkpoint as ocp

    options = _processes()
    at_once = math.ceil(max(READ_AT_ONCE_BYTES, largest_bytes + 1e9) / 1e9)
    return ocp.Checkpointer(_handler(options, at_once), multiprocessing_options=options)


def _handler(options, read_at_once_gb: int | None = None):
    """Orbax's handler for pytrees of arrays, from which a checkpointer is made. As a side effect Orbax's log lines are
    filtered out from now on, because its errors are raised here.

    Args:
      options: Orbax's MultiprocessingOptions, as _processes returns them.
      read_at_once_gb: the most GB of host memory for arrays that are read and not yet on their device; None: Orbax's
        default, which is much larger. It has no effect on writing.
    """
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
    """Orbax's MultiprocessingOptions: in a run of several processes they name all of them, so that the processes wait
    for each other through JAX's coordination service. With one process they are Orbax's defaults.

    Without the names Orbax would wait by a collective operation on the devices. That needs idle devices, and the
    saver's thread would start it while the devices train.

    With several processes each call takes the next number of `_operations` into the name of its barrier. All of them
    must therefore call it equally often and in the same order, for saves and restores alike.
    """
    import orbax.checkpoint as ocp

    count = processes.count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)), barrier_sync_key_prefix=f"jaxtune_{next(_operations)}"
    )


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """A filter for the logger absl, through which Orbax logs: False for a line that code of Orbax logs, which is then
    not shown, because its errors are raised; True for all others. `_handler` adds it."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname
