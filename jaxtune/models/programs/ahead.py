"""Kept programs as files, and their executables, loaded while a command still imports and reads files: those that the
last process of the same command over the same model or recipe needed in its beginning, on its first device. Which of
them this one needs, it tells later by their keys.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import jax
from jax.experimental import serialize_executable

from jaxtune.models.programs import surroundings
from jaxtune.system import early_import, invocation, processes, timing
from jaxtune.system.private_jax import compilation_cache
from jaxtune.system.program_cache import ProgramCache, in_use

logger = logging.getLogger(__name__)

_BEGINNING_SECONDS = 120.0  # of a process; what it loads later is not loaded ahead
_MOST = 16  # programs
_THREADS = 4  # that load


@dataclasses.dataclass
class _Process:
    record: str | None = None  # its name
    loading: dict[str, Future[jax.stages.Compiled | None]] = dataclasses.field(default_factory=dict)
    asked: set[str] = dataclasses.field(default_factory=set)
    keys: list[str] = dataclasses.field(default_factory=list)
    written: int = 0  # of the keys
    has_result: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_process = _Process()


def begin(*about: str) -> None:
    """Begins to load in threads. Devices have been started. Nothing in a process that is no command, or one of several.

    about: the model or recipe, which tells the command from others of its name.
    """
    if not invocation.words() or processes.count() > 1 or (cache := in_use()) is None:
        return
    try:
        _process.record = name = _record(about)
        content = cache.get(name)
        keys = [] if content is None else list(map(str, json.loads(content)))[:_MOST]
    except Exception:
        logger.debug("nothing is loaded ahead", exc_info=True)
        return
    devices = jax.local_devices()[:1]
    with _process.lock:
        if _process.has_result:
            return
        known = {*_process.asked, *_process.keys, *_process.loading}
        futures: dict[str, Future[jax.stages.Compiled | None]] = {key: Future() for key in keys if key not in known}
        _process.loading |= futures
    to_load = collections.deque(futures.items())
    for _ in range(min(_THREADS, len(futures))):
        try:
            early_import.begin(functools.partial(_load, to_load, cache, devices))
        except RuntimeError:  # no thread can be started: `take` waits for nothing that has not begun
            logger.debug("no thread loads programs ahead", exc_info=True)
            break


def _load(to_load: collections.deque, cache: ProgramCache, devices: Sequence) -> None:
    while True:
        try:
            key, future = to_load.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            continue
        try:
            with timing.phase("cached", "ahead"):
                future.set_result(load(key, cache, devices))
        except BaseException as error:  # raised again where the program is needed
            future.set_exception(error)


def keep(key: str, program: jax.stages.Compiled, devices: Sequence, cache: ProgramCache) -> None:
    """Writes a program. Python's lock is held for tenths of a second; what fails is logged."""
    try:
        serialized, takes, gives = serialize_executable.serialize(program)
        header = json.dumps([[device.id for device in devices], takes.num_leaves, gives.num_leaves])
        cache.put(key, compilation_cache.compress_executable(header.encode() + b"\n" + serialized))
    except Exception as error:
        logger.warning("a program is compiled anew at the next start: %s: %s", type(error).__name__, error)


def load(key: str, cache: ProgramCache, devices: Sequence) -> jax.stages.Compiled | None:
    """The program of an entry, which takes and gives lists of arrays; None without one for these devices. Raises what
    JAX, XLA or a compressor raises.
    """
    if (content := cache.get(key)) is None:
        return None
    header, _, serialized = compilation_cache.decompress_executable(content).partition(b"\n")
    ids, takes, gives = json.loads(header)
    if ids != [device.id for device in devices]:  # XLA ends the process if their number is another
        return None
    trees = jax.tree.structure((tuple([0] * takes), {})), jax.tree.structure([0] * gives)
    return serialize_executable.deserialize_and_load(serialized, *trees, devices[0].client, devices)


def take(key: str, devices: Sequence) -> jax.stages.Compiled | None:
    """What was loaded ahead for this key on these devices; None: it was not, or could not be."""
    with _process.lock:
        _process.asked.add(key)
        future = _process.loading.pop(key, None)
    if future is None or future.cancel() or list(devices) != jax.local_devices()[:1]:
        return None
    with contextlib.suppress(Exception):  # whoever loads it again meets the error
        return future.result()
    return None


def end() -> None:
    """There is a first result: what nobody has asked for is freed."""
    if _process.has_result:
        return
    with _process.lock:
        _process.has_result = True
        futures = list(_process.loading.values())
        _process.loading.clear()
    for future in futures:
        future.cancel()


def note(programs: Sequence[tuple[str, Sequence]], cache: ProgramCache) -> None:
    """Records programs, (key, devices), for the next process; `cache` has their entries, or soon will."""
    if time.monotonic() - timing.process_start() > _BEGINNING_SECONDS:
        end()
        return
    try:
        first = jax.local_devices()[:1]
        with _process.lock:
            known = {*_process.keys}
            _process.keys += [key for key, devices in programs if key not in known and list(devices) == first]
            name, count = _process.record, len(_process.keys[:_MOST])
            if name is None or count == _process.written:
                return
            _process.written, content = count, json.dumps(_process.keys[:count]).encode()
        if cache.get(name) != content:
            cache.put(name, content)
    except Exception:
        logger.debug("no record of programs is written", exc_info=True)


def _record(about: Sequence[str]) -> str:
    """The name of the command's record."""
    files = [os.path.expanduser(word) for word in about]
    places = [os.path.abspath(file) if os.path.exists(file) else word for file, word in zip(files, about, strict=True)]
    told = invocation.words()[0], places, surroundings.of_start(jax.local_devices())
    return f"ahead-{hashlib.sha256(json.dumps(told).encode()).hexdigest()}"
