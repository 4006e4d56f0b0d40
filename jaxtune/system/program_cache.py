"""A persistent cache of compiled programs that verifies each before it runs; JAX's own trusts its files, and a flipped
bit gives another program. A damaged or swapped entry is removed, reported and compiled anew.

    KEY.zlib.program    a sealed file (KEY.zstd.program likewise)

Entries are machine code: of other users, or writable by others, they are not used.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib
import logging
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxtune.system import early_import, sources, timing
from jaxtune.system.disk import note_use, remove_oldest
from jaxtune.system.files import atomic_write, remove_temporary
from jaxtune.system.private_jax import CacheInterface, compilation_cache, config, lib
from jaxtune.system.sealed import sealed, unsealed

logger = logging.getLogger(__name__)

_OLD_FORMAT = b"jaxtune1"
_SUFFIX = ".program"
_SMALLEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_XLA_CACHES = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
_MOSAIC = "MOSAIC_GPU_RUNTIME_LIB_PATH"
_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


def use_program_cache() -> None:
    """Makes JAX cache programs between runs, verified, in its configured folder or ~/.cache/jaxtune/xla. Call it before
    anything compiles. JAX's environment variables win.
    """
    timing.follow_jax()
    early_import.begin(sources.digest)  # a key needs it
    name_mosaic_library()
    if jax.config.jax_compilation_cache_dir is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path.home() / ".cache" / "jaxtune" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if _SMALLEST not in os.environ:
        # Small programs are cached too: a start has dozens, and on a GPU each takes a tenth of a second to compile.
        jax.config.update(_SMALLEST.lower(), 0.0)
    if _XLA_CACHES not in os.environ:
        # XLA's own caches are turned off, as it does not verify their files; cached programs include its measurements.
        jax.config.update(_XLA_CACHES.lower(), "none")
    if not is_used_by_jax():
        # JAX has no public way to replace its cache; this is the function with which it creates its own.
        compilation_cache.get_file_cache = _checked_cache
        compilation_cache.reset_cache()  # an earlier program may have created JAX's own cache


@functools.cache
def name_mosaic_library() -> None:
    """As JAX does when it imports Mosaic. Without, a program from a cache compiles its Mosaic kernels again."""
    with contextlib.suppress(ImportError):  # no plugin for GPUs
        bindings = importlib.import_module(f"{lib.__name__}.mosaic_gpu")._mosaic_gpu_ext
        library = Path(bindings.__file__).with_name("libmosaic_gpu_runtime.so")
        if library.exists():
            os.environ.setdefault(_MOSAIC, str(library))


def in_use() -> ProgramCache | None:
    """A cache over the folder that JAX is configured with, created if missing; None if programs are not cached, or it
    cannot be created, which is logged.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        return ProgramCache(Path(folder), jax.config.jax_compilation_cache_max_size)
    except OSError as error:
        logger.warning("programs are compiled anew at every start: %s: %s", folder, error.strerror)
        return None


def _checked_cache(path: str) -> tuple[CacheInterface, str]:
    """Takes the place of JAX's function with this signature."""
    return ProgramCache(Path(path), jax.config.jax_compilation_cache_max_size), path


def is_used_by_jax() -> bool:
    """Whether `use_program_cache` was called."""
    return compilation_cache.get_file_cache is _checked_cache


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context in which JAX neither looks for what this thread compiles nor caches it: XLA cannot write a program for
    a CPU that it has read.
    """
    token = _apart.set(True)
    try:
        with config.persistent_cache_min_compile_time_secs(math.inf):
            yield
    finally:
        _apart.reset(token)


class ProgramCache(CacheInterface):
    """Bytes by key, in the interface that JAX expects, each entry checked when it is read. The folder is created for
    its owner alone; temporary files of killed processes go after a day.

      max_bytes: of all entries; the least recently used go. -1: no limit.
    """

    def __init__(self, folder: Path, max_bytes: int = -1):
        self.folder = self._path = folder  # JAX reads `_path` to say which cache it resets
        self.max_bytes = max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_temporary(folder, f"*{_SUFFIX}", idle_seconds=24 * 3600)

    def get(self, key: str) -> bytes | None:
        """The content of a key; None without an undamaged entry of this user. A bad entry is removed, an unreadable one
        left; both are logged.
        """
        path = self._file(key)
        if _apart.get():
            return None
        try:
            content = _content(key, path.name, _read(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("compiled program %s cannot be read (%s): compiling it anew", path, error.strerror)
            return None
        except ValueError as error:
            logger.warning("compiled program %s is not used: %s; compiling it anew", path, error)
            with contextlib.suppress(OSError):  # another process removed it, or the folder is read-only
                path.unlink()
            return None
        note_use(path)
        return content

    def has(self, key: str) -> bool:
        """Whether there is an entry; it may be damaged."""
        return self._file(key).exists()

    def put(self, key: str, value: bytes) -> None:
        """Stores bytes, in a file that appears only when it is whole. Nothing is stored if they exceed max_bytes.
        OSError if it cannot be written.
        """
        path = self._file(key)
        entry = sealed(path.name, value)
        if 0 <= self.max_bytes < len(entry):
            return
        if self.max_bytes >= 0:
            entries = self.folder.glob(f"*{_SUFFIX}")
            remove_oldest(entries, lambda remaining, _: remaining + len(entry) > self.max_bytes)
        atomic_write(path, entry, mode=0o600, durable=False)

    def _file(self, key: str) -> Path:
        """The entry's path, whose ending names JAX's compression."""
        # zstandard may be installed or removed between two runs, and JAX's key does not always tell how it compressed.
        zstd = getattr(compilation_cache, "zstd", None) or getattr(compilation_cache, "zstandard", None)
        return self.folder / f"{key}.{'zlib' if zstd is None else 'zstd'}{_SUFFIX}"


def _content(key: str, name: str, entry: bytes) -> bytes:
    """Of an entry, also as 0.2.0 wrote it: format, SHA-256 of key and content, content. ValueError if it is damaged."""
    start = len(_OLD_FORMAT) + 32
    content = entry[start:]
    if entry[:start] == _OLD_FORMAT + hashlib.sha256(key.encode() + b"\0" + content).digest():
        return content
    return unsealed(name, entry)


def _read(path: Path) -> bytes:
    """ValueError if the file must not be trusted. Follows no link and does not block on a named pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no plain file")
        if status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to another user ({status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("others may write it")
        return file.read()
