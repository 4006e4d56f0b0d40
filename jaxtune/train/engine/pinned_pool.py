"""XLA's pool of pinned host memory, grown while programs compile: locking pages takes 0.7 s/GB."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import jax
import numpy as np

from jaxtune.models.placement.streams import PINNED
from jaxtune.system import timing

logger = logging.getLogger(__name__)

LEAST_BYTES = 2.0**35  # a step that pins less waits for seconds
_PIECE = 2**28


@contextlib.contextmanager
def growing(nbytes: float) -> Iterator[None]:
    """Pins `nbytes` beside the body, and frees them within the pool; does nothing below LEAST_BYTES."""
    if nbytes < LEAST_BYTES:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_pin, args=(nbytes, ended), name="pinning", daemon=True)
    thread.start()
    try:
        yield
        with timing.phase("pinning host memory"):
            thread.join()
    finally:
        ended.set()


def _pin(nbytes: float, ended: threading.Event) -> None:
    device = jax.local_devices()[0]
    zeros, where = np.zeros(_PIECE, np.uint8), jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    pieces: list[jax.Array] = []
    try:
        while len(pieces) * _PIECE < nbytes and not ended.is_set():
            pieces.append(jax.block_until_ready(jax.device_put(zeros, where)))
    except Exception as error:  # no more can be pinned: the step will say what it lacks
        logger.info("host memory was pinned up to %d bytes: %s", len(pieces) * _PIECE, error)
