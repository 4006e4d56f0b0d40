"""Starts JAX's devices in a thread, while the main thread imports and reads files: XLA takes most of a GPU's memory at
once, which took one to two seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxtune.system import early_import, host_memory, timing


def begin(then: Callable[[], object]) -> None:
    """Lets XLA pin host memory, and starts the devices; `then` is called in a thread once they are up. What fails is
    said to whoever uses them. Not for one of several processes, which must join the others first.
    """
    host_memory.allow_pinned()
    early_import.begin(functools.partial(_start, then))


def _start(then: Callable[[], object]) -> None:
    import jax
    import numpy as np

    with timing.phase("devices"):
        jax.local_devices()
        early_import.begin(then)
        jax.block_until_ready(jax.device_put(np.zeros(1)))  # a first transfer starts more than the devices do
