"""Compiled programs kept between runs, and checked before they run.

JAX keeps what it compiled in a folder and takes what it finds there on trust: a flipped bit is another program, and a
torn entry stays torn. Here every entry carries a checksum of its key and its content, so that a damaged or swapped one
is removed, said, and compiled anew.

    KEY.zlib.program    8 bytes that name the format, SHA-256 of key and content, content (KEY.zstd.program likewise)

Entries are machine code that will run: they can be read and written by their owner only, and one that belongs to
another user, or that others may write, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from pathlib import Path

import jax

from jaxtune.system.files import atomic_write
from jaxtune.system.private_jax import CacheInterface, compilation_cache

logger = logging.getLogger(__name__)

_FORMAT = b"jaxtune1"
_SUFFIX = ".program"
_SMALLEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_XLA_CACHES = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"


def use_program_cache() -> None:
    """Keeps compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path.home() / ".cache" / "jaxtune" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if _SMALLEST not in os.environ:
        # Small ones too: a start has dozens, and on a GPU each takes a tenth of a second to compile.
        jax.config.update(_SMALLEST.lower(), 0.0)
    if _XLA_CACHES not in os.environ:
        # Files that XLA itself writes and reads, unchecked. What it measured is part of the programs kept here.
        jax.config.update(_XLA_CACHES.lower(), "none")
    if compilation_cache.get_file_cache is not _checked_cache:
        # JAX has no public way to bring one's own cache; this is where it makes its own.
        compilation_cache.get_file_cache = _checked_cache
        compilation_cache.reset_cache()  # one that a program of before has begun


def in_use() -> ProgramCache | None:
    """The cache that use_program_cache set up; None where programs are not kept."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache:
        return None
    return ProgramCache(Path(folder), jax.config.jax_compilation_cache_max_size)


def _checked_cache(path: str) -> tuple[CacheInterface, str]:
    return ProgramCache(Path(path), jax.config.jax_compilation_cache_max_size), path


class ProgramCache(CacheInterface):
    """What JAX asks of a cache: `get` and `put` of bytes by key.

    Args:
      folder: made, for its owner alone, if it is missing.
      max_bytes: the entries that were used last and fit stay; -1: all stay.
    """

    def __init__(self, folder: Path, max_bytes: int = -1):
        self._path, self.max_bytes = folder, max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f".*{_SUFFIX}.*.tmp"):  # of a process that was killed, unless it is at work still
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < time.time() - 24 * 3600:
                    left.unlink()

    def get(self, key: str) -> bytes | None:
        """The content, or None where there is none that is whole, of this key and of this user."""
        path = self._file(key)
        try:
            entry, problem = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("compiled program %s cannot be read (%s): compiling it anew", path, error.strerror)
            return None
        content = entry[len(_FORMAT) + 32 :]
        if problem is None and entry != _entry(key, content):
            problem = "its checksum is not that of its key and content"
        if problem is not None:
            logger.warning("compiled program %s is not used: %s; compiling it anew", path, problem)
            with contextlib.suppress(OSError):  # another process was quicker, or the folder is not ours to change
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last
        return content

    def put(self, key: str, value: bytes) -> None:
        """Keeps the content, in the place of what was there."""
        entry = _entry(key, value)
        if self._make_room(len(entry)):
            atomic_write(self._file(key), entry, mode=0o600, durable=False)

    def _file(self, key: str) -> Path:
        # zstandard may be installed or removed between two runs, and JAX's key does not always tell how it compressed.
        found = getattr(compilation_cache, "zstd", None) or getattr(compilation_cache, "zstandard", None)
        return self._path / f"{key}.{'zlib' if found is None else 'zstd'}{_SUFFIX}"

    def _make_room(self, need_bytes: int) -> bool:
        """Removes the entries that were not used for longest; whether one of need_bytes then fits."""
        if self.max_bytes < 0:
            return True
        if need_bytes > self.max_bytes:
            return False
        found = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # other processes remove entries too
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + need_bytes <= self.max_bytes:
                break
            total -= size
            path.unlink(missing_ok=True)
        return True


def _entry(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode() + b"\0")
    digest.update(content)
    return _FORMAT + digest.digest() + content


def _read(path: Path) -> tuple[bytes, str | None]:
    """The bytes of a file, and why they are not to be trusted; never through a link, nor waiting at a named pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b"", "it is no plain file"
        if status.st_uid != os.geteuid():
            return b"", f"it belongs to another user ({status.st_uid})"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return b"", "others may write it"
        return file.read(), None
