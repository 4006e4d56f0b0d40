"""Executables of kept programs, loaded while a command still imports and reads files: those that the last process of
the same command over the same model or recipe needed in its beginning. Which of them this one needs, it tells later by
their keys.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from jaxtune.pallas import gpu_kernel
from jaxtune.system import early_import, invocation, timing
from jaxtune.system.private_jax import compilation_cache, xla_client
from jaxtune.system.program_cache import ProgramCache, in_use, sources

_BEGINNING_SECONDS = 120.0  # of a process; what it loads later is not loaded ahead
_MOST = 16  # programs


# Of XLA, with its entry, as `kept` describes it, and a list of its devices.
Executable = collections.namedtuple("Executable", "entry loaded devices")


class _Process:
    """Of this one; never instantiated."""

    loading: dict[str, Future[Executable | None]] = {}
    keys: list[str] = []
    lock = threading.Lock()


def begin() -> None:
    """Begins to load in threads. Devices have been started. Nothing in a process that is no command."""
    if (name := _record()) is None or (cache := in_use()) is None or (content := cache.get(name)) is None:
        return
    keys, devices = list(map(str, json.loads(content)))[:_MOST], jax.local_devices()[:1]
    with _Process.lock:
        for key in keys:
            _Process.loading[key] = future = Future()
            early_import.begin(functools.partial(_load, future, key, cache, devices))


def _load(future: Future[Executable | None], key: str, cache: ProgramCache, devices: Sequence) -> None:
    try:
        with timing.phase("cached", "ahead"):
            content = cache.get(key)
            future.set_result(None if content is None else load(json.loads(content), cache, devices))
    except BaseException as error:  # raised again where the program is needed
        future.set_exception(error)


def load(entry: Mapping, cache: ProgramCache, devices: Sequence) -> Executable | None:
    """The executable of an entry; None if it is gone. Raises what JAX, XLA or a compressor raises."""
    if (compressed := cache.get(entry["executable"])) is None:
        return None
    device = next(device for device in devices if device.process_index == jax.process_index())
    with ThreadPoolExecutor(8, "kernels") as pool:
        kernels = [{name: _setting(value) for name, value in kernel.items()} for kernel in entry["kernels"]]
        gpu_kernel.compile_beside(kernels, device, pool)
        serialized, _ = compilation_cache.extract_executable_and_time(
            compilation_cache.decompress_executable(compressed)
        )
        placed = xla_client.DeviceList(tuple(devices))
        return Executable(entry, device.client.deserialize_executable(serialized, placed), placed)


def _setting(value: Mapping[str, str] | int | bool) -> bytes | int | bool:
    return base64.b64decode(value["base64"]) if isinstance(value, Mapping) else value


def take(key: str, devices: Sequence) -> Executable | None:
    """What was loaded ahead for this key on these devices; None: it was not, or could not be."""
    with _Process.lock:
        future = _Process.loading.pop(key, None)
    if future is None or list(devices) != jax.local_devices()[:1]:
        return None
    with contextlib.suppress(Exception):  # whoever loads it again meets the error
        return future.result()
    return None


def note(keys: Sequence[str], cache: ProgramCache) -> None:
    """Records the keys of programs, for the next process; `cache` has their entries."""
    age = time.monotonic() - timing.process_start()
    with _Process.lock:
        if age > _BEGINNING_SECONDS:
            _Process.loading.clear()  # nobody has asked for it
            return
        new = [key for key in keys if key not in _Process.keys]
        _Process.keys += new
        content = json.dumps(_Process.keys[:_MOST]).encode()
    if new and (name := _record()) is not None and cache.get(name) != content:
        with contextlib.suppress(OSError):
            cache.put(name, content)


def _record() -> str | None:
    """The name of the command's record; None for a process that is no command."""
    command, *words = invocation.words()[:2] or [""]
    if not words:
        return None
    place = str(Path(words[0]).expanduser().absolute()) if Path(words[0]).expanduser().exists() else words[0]
    return f"ahead-{hashlib.sha256(json.dumps([command, place, sources()]).encode()).hexdigest()}"
