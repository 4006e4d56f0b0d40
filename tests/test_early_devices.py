"""Devices that start beside a command's imports."""

from __future__ import annotations

import ctypes
import threading

import jax
import pytest

from jaxtune.system import early_devices


@pytest.mark.parametrize(
    ("platforms", "wakes"), [(None, True), ("cuda,cpu", True), ("GPU", True), ("cpu", False), ("tpu,cpu", False)]
)
@pytest.mark.parametrize("has_driver", [True, False])
def test_the_driver_is_woken_where_its_gpus_may_be_used(monkeypatch, platforms, wakes, has_driver):
    """And devices start whatever becomes of it."""
    calls, done = [], threading.Event()

    class Driver:
        def __init__(self, name: str):
            if not has_driver:
                raise OSError(f"{name}: cannot open shared object file")

        def cuInit(self, flags: int) -> int:
            calls.append(flags)
            return 100

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    early_devices.begin(done.set)
    assert done.wait(60)
    for thread in threading.enumerate():
        if thread.name == "import":
            thread.join(60)
    assert calls == [0] * (wakes and has_driver)


def test_what_follows_does_not_wait_for_the_first_transfer(monkeypatch):
    """And not at all for devices that do not start."""
    done, put, real = threading.Event(), threading.Event(), jax.device_put

    def device_put(array):
        assert done.wait(60)
        put.set()
        return real(array)

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(jax, "device_put", device_put)
    early_devices.begin(done.set)
    assert put.wait(60)
    begun: list[object] = []
    monkeypatch.setattr(jax, "local_devices", lambda: begun.append(1) or 1 / 0)
    early_devices.begin(lambda: begun.append(2))
    for thread in threading.enumerate():
        if thread.name == "import":
            thread.join(60)
    assert begun == [1]
