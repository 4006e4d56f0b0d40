"""Devices that start beside a command's imports."""

from __future__ import annotations

import threading

import jax

from jaxtune.system import early_devices, host_memory
from tests import patience


def test_what_follows_does_not_wait_for_the_first_transfer(monkeypatch):
    """And not at all for devices that do not start."""
    done, put, real = threading.Event(), threading.Event(), jax.device_put

    def device_put(array):
        assert done.wait(patience.SECONDS)
        put.set()
        return real(array)

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv(host_memory._PINNED_LIMIT, "64")
    monkeypatch.setattr(jax, "device_put", device_put)
    early_devices.begin(done.set)
    assert put.wait(patience.SECONDS)
    begun: list[object] = []
    monkeypatch.setattr(jax, "local_devices", lambda: begun.append(1) or 1 / 0)
    early_devices.begin(lambda: begun.append(2))
    for thread in threading.enumerate():
        if thread.name == "import":
            thread.join(patience.SECONDS)
    assert begun == [1]
