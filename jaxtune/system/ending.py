"""How the processes of a run end at the same time.

A failing process reports it, and the others, perhaps in a collective that never ends, print its message and exit with
its code.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from typing import Any

from jaxtune.system import waiting
from jaxtune.system.processes import all_of, count, first, index, service_client
from jaxtune.system.terminal import printable

logger = logging.getLogger(__name__)
_ENDED, _HEARD = "jaxtune/ended", "jaxtune/heard/"
_WORDS_SECONDS = 10.0  # how long a failing process and the first one wait for each other before they exit
# What the first process leaves the others between their report that they have heard and their exit: JAX aborts a
# process whose service ends, with another exit code.
_EXIT_SECONDS = 1.0
_POLL_SECONDS = 0.05
_GONE = "the run is complete; at its end another process was gone already"


class _Run:
    """This process's state in its run; never instantiated."""

    watcher: threading.Thread | None = None  # runs `_watch`; None before `join` and in a run of one process
    leaving = False  # whether this process is ending by `leave`, so that the watcher must not end it
    patience_seconds = 0.0  # from the end of a whole run until all must have left it
    last_words = ""  # the message that the others print if this process fails; "": they print its exit code


def last_words(text: str) -> None:
    """An error's message or a signal, printed by the other processes if this one leaves with another code than 0."""
    _Run.last_words = text


def leave(code: int) -> None:
    """Ends this process's part in the run. With code 0 it waits for all and returns. Otherwise it reports the last
    words and exits at once, as an orderly shutdown would wait for the others; the first process, which has the service,
    first waits up to 11 seconds until all have read them.
    """
    if _Run.watcher is None:
        return
    client = service_client()
    if code == 0:
        all_of(None)  # a barrier, as the first process may still be writing
        _Run.leaving = True
        if first():
            client.key_value_set(_ENDED, json.dumps({"process": 0, "code": 0}))
        _Run.watcher.join()
        import jax

        # The first one, with whose service the others would be aborted, leaves after them.
        patience_seconds = _Run.patience_seconds + (2 * _EXIT_SECONDS if first() else 0.0)
        without_all = threading.Timer(patience_seconds, _leave_without_all)
        without_all.daemon = True
        without_all.start()
        try:
            # Waits for all: JAX aborts one that still uses the service when the first one ends.
            jax.distributed.shutdown()
        except RuntimeError as error:
            logger.warning("%s: %s", _GONE, error)
        finally:
            without_all.cancel()
        return
    _Run.leaving = True
    words = _Run.last_words or f"exit code {code}"
    message = {"process": index(), "host": socket.gethostname(), "code": code, "words": words}
    with contextlib.suppress(Exception):  # another process reported first, or the service is gone
        client.key_value_set(_ENDED, json.dumps(message))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(Exception):
        _heard(client)
    if first():  # the service ends with this process
        with contextlib.suppress(Exception):
            waiting.until(lambda: len(client.key_value_dir_get(_HEARD)) >= count(), _WORDS_SECONDS, _POLL_SECONDS)
        time.sleep(_EXIT_SECONDS)
    os._exit(code)


# Set by nsys, compute-sanitizer and coverage, whose handlers write their reports at an ordinary end.
_WATCHERS = "CUDA_INJECTION64_PATH", "LD_PRELOAD", "COVERAGE_PROCESS_START"


def _is_watched() -> bool:
    return any(map(os.environ.get, _WATCHERS))


def leave_devices() -> None:
    """The end of a single process that ends by `end_now` frees no device and no cache of JAX's one by one."""
    # Not by count(), which is 1 in each of several processes once `leave` has shut the service down.
    if "jax" in sys.modules and _Run.watcher is None and not _is_watched():
        from jaxtune.system.private_jax import clean_up

        atexit.unregister(clean_up)


def end_now(codes: list[int]) -> None:
    """Ends this process with the one code in a list, if there is one, without Python's finalization, unless a profiler
    watches it.
    """
    if codes and not _is_watched():
        _exit(codes[0])


def _exit(code: int) -> None:
    """Ends this process; what it wrote is written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _heard(client: Any) -> None:
    client.key_value_set(f"{_HEARD}{index()}", "", allow_overwrite=True)


def _leave_without_all() -> None:
    """Ends this process before JAX aborts it, which has missed another one's heartbeats."""
    logger.warning(_GONE)
    _exit(0)


def watch(heartbeat_seconds: float) -> None:
    """Starts the thread that ends this process if another one fails. heartbeat_seconds: after which JAX misses one; the
    last heartbeat may be half of them old.
    """
    _Run.patience_seconds = heartbeat_seconds / 3
    _Run.watcher = threading.Thread(target=_watch, name="others", daemon=True)
    _Run.watcher.start()


def _watch() -> None:
    """The thread that ends this process, with the same code, if another one fails, or with code 1 if the first one
    disappears: a collective would wait forever. The first process first gets 10 seconds to finish writing. JAX handles
    other ones that disappear.
    """
    from jax.errors import JaxRuntimeError

    client = service_client()
    while not _Run.leaving:
        try:
            report = json.loads(client.blocking_key_value_get(_ENDED, 3_600_000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            if not _Run.leaving and not first():
                _end("the first process is gone. The same command continues from the last checkpoint.", 1)
            return
        if report["code"] == 0:
            return
        if first():  # it may be ending for the same reason, and still be writing to disk
            waiting.until(lambda: _Run.leaving, _WORDS_SECONDS, _POLL_SECONDS)
        if not _Run.leaving and report["process"] != index():
            with contextlib.suppress(JaxRuntimeError):
                _heard(client)
            _end(f"process {report['process']} on {report['host']} ended: {report['words']}", report["code"])


def _end(text: str, code: int) -> None:
    """Prints the reason and exits without the orderly shutdown, which would wait for the others."""
    with contextlib.suppress(OSError):
        os.write(2, f"jaxtune: process {index()} ends, because {printable(text)}\n".encode())
    os._exit(code)
