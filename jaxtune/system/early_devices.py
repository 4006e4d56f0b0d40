"""Starts JAX's devices in a thread, while the main thread imports and reads files: CUDA's context takes a second."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

from jaxtune.system import early_import, host_memory, timing


def begin(then: Callable[[], object]) -> None:
    """Lets XLA pin host memory, and starts the devices; `then` is called in a thread once they are up. What fails is
    said to whoever uses them. Not for one of several processes, which must join the others first.
    """
    host_memory.allow_pinned()
    early_import.begin(_wake)
    early_import.begin(functools.partial(_start, then))


def _wake() -> None:
    """Initialises NVIDIA's driver beside the import of JAX: two seconds where no process keeps the GPUs up."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower().split(",")
    if {"", "cuda", "gpu"} & {*platforms}:
        with timing.phase("devices", "driver"):
            ctypes.CDLL("libcuda.so.1").cuInit(0)


def _start(then: Callable[[], object]) -> None:
    import jax
    import numpy as np

    with timing.phase("devices"):
        jax.local_devices()
        early_import.begin(then)
        jax.block_until_ready(jax.device_put(np.zeros(1)))  # a first transfer starts more than the devices do
