"""Executables of kept programs, loaded while a command still imports and reads files: those that the last process of
the same command over the same model or recipe needed in its beginning, on its first device. Which of them this one
needs, it tells later by their keys.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax

from jaxtune.models.programs import surroundings
from jaxtune.pallas import dispatch
from jaxtune.system import early_import, invocation, processes, timing
from jaxtune.system.private_jax import compilation_cache, xla_client
from jaxtune.system.program_cache import ProgramCache, in_use, name_mosaic_library

logger = logging.getLogger(__name__)

_BEGINNING_SECONDS = 120.0  # of a process; what it loads later is not loaded ahead
_MOST = 16  # programs
_THREADS = 4  # that load


# Of XLA, with its entry, as `kept` describes it, and a list of its devices.
Executable = collections.namedtuple("Executable", "entry loaded devices")


@dataclasses.dataclass
class _Process:
    record: str | None = None  # its name
    loading: dict[str, Future[Executable | None]] = dataclasses.field(default_factory=dict)
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
        futures: dict[str, Future[Executable | None]] = {key: Future() for key in keys if key not in known}
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
                content = cache.get(key)
                future.set_result(None if content is None else load(json.loads(content), cache, devices))
        except BaseException as error:  # raised again where the program is needed
            future.set_exception(error)


def load(entry: Mapping, cache: ProgramCache, devices: Sequence) -> Executable | None:
    """The executable of an entry; None if it is gone, of other devices, or with kernels that have not passed their
    checks here. Raises what JAX, XLA or a compressor raises.
    """
    # XLA ends the process if their number is another.
    if entry["devices"] != [device.id for device in devices] or not dispatch.have_passed(entry["checks"]):
        return None
    if (compressed := cache.get(entry["executable"])) is None:
        return None
    serialized, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(compressed))
    name_mosaic_library()  # the user may have set JAX's cache alone
    placed = xla_client.DeviceList(tuple(devices))
    return Executable(entry, devices[0].client.deserialize_executable(serialized, placed), placed)


def take(key: str, devices: Sequence) -> Executable | None:
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
