"""How waits for other processes end, and how a process leaves a run of several, where the service is gone."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest
from jax.errors import JaxRuntimeError

from jaxtune.system import ending, processes


class Gone:
    """The client of a service that is gone, in which a signal ends each wait."""

    def key_value_set(self, *_, **__): ...

    def key_value_increment(self, *_):
        raise JaxRuntimeError("UNAVAILABLE: Socket closed")

    def blocking_key_value_get(self, *_):
        raise KeyboardInterrupt("SIGTERM")

    key_value_try_get = blocking_key_value_get


def written():
    with processes.written_by_first(Path("unused")):
        pass


@pytest.mark.parametrize(
    "wait",
    [
        lambda: processes.all_of(1),
        lambda: processes.all_within(1, 600),
        lambda: processes.of_first(dict),
        lambda: processes.agree(None, False),
        lambda: processes.meet(Future(), lambda: None, lambda: None, lambda: False),
        written,
    ],
)
def test_a_signal_ends_a_wait_as_itself(wait, monkeypatch):
    """Its KeyboardInterrupt has the exit code, which an error of the service would hide."""
    monkeypatch.setattr(processes, "service_client", Gone)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        wait()


def test_a_finished_run_ends_well_though_another_process_is_gone(monkeypatch, caplog):
    def fails():
        raise JaxRuntimeError("INTERNAL: Shutdown barrier has failed")

    watcher = threading.Thread(target=int)
    watcher.start()
    monkeypatch.setattr(ending._Run, "watcher", watcher)
    monkeypatch.setattr(ending._Run, "leaving", False)
    monkeypatch.setattr(ending, "service_client", Gone)
    monkeypatch.setattr(ending, "all_of", lambda value: [value] * 2)
    monkeypatch.setattr(jax.distributed, "shutdown", fails)
    ending.leave(0)
    assert "Shutdown barrier has failed" in caplog.text


@pytest.mark.parametrize("several", [False, True])
def test_a_process_alone_leaves_its_devices_as_they_are(several, monkeypatch):
    """One of several frees them also after `leave`, when there is no service to say so."""
    dropped = []
    monkeypatch.setattr(ending, "_is_watched", lambda: False)
    monkeypatch.setattr(ending.atexit, "unregister", dropped.append)
    monkeypatch.setattr(ending._Run, "watcher", threading.Thread() if several else None)
    assert processes.count() == 1
    ending.leave_devices()
    assert len(dropped) == (not several)
