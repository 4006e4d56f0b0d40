"""A persistent cache of compiled programs (`ProgramCache`) that verifies each program before it runs; commands turn it
on with `use_program_cache`. JAX gets its own ProgramCache from `_checked_cache`; `in_use` returns another one over the
same folder, for the record of plans that were too large.

JAX's own cache trusts what it finds in its folder: a flipped bit gives another program, and a torn entry stays torn.
Here every entry has a checksum of its key and content, so that a damaged or swapped entry is removed, reported, and
compiled again.

    KEY.zlib.program    8 bytes that name the format, SHA-256 of key and content, content (KEY.zstd.program likewise)

Entries are machine code that will run, so only their owner can read and write them. An entry that belongs to another
user, or that others may write, is not used."""

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
    """Makes JAX cache compiled programs between runs, each verified before it runs: in the folder that JAX is
    configured with or JAX_COMPILATION_CACHE_DIR names, else in ~/.cache/jaxtune/xla. Small programs are cached too, and
    XLA's own caches are turned off, unless JAX's environment variables for these are set. Commands call it before they
    compile; further calls change nothing."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path.home() / ".cache" / "jaxtune" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if _SMALLEST not in os.environ:
        # Small programs are cached too: a start has dozens, and on a GPU each takes a tenth of a second to compile.
        jax.config.update(_SMALLEST.lower(), 0.0)
    if _XLA_CACHES not in os.environ:
        # XLA's own caches are turned off, as it does not verify their files; cached programs include its measurements.
        jax.config.update(_XLA_CACHES.lower(), "none")
    if compilation_cache.get_file_cache is not _checked_cache:
        # JAX has no public way to replace its cache; this is the function with which it creates its own.
        compilation_cache.get_file_cache = _checked_cache
        compilation_cache.reset_cache()  # an earlier program may have created JAX's own cache


def in_use() -> ProgramCache | None:
    """A ProgramCache over the folder that JAX is configured with for compiled programs, mostly by use_program_cache;
    None if programs are not cached. KnownFailures (planning/known.py) asks for it, to store its record of plans that
    were too large beside the programs; JAX reads and stores the programs through the object that `_checked_cache`
    makes. The folder is created if it is missing."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or not jax.config.jax_enable_compilation_cache:
        return None
    return ProgramCache(Path(folder), jax.config.jax_compilation_cache_max_size)


def _checked_cache(path: str) -> tuple[CacheInterface, str]:
    """Returns (a ProgramCache in the folder `path`, `path`). use_program_cache puts it in place of JAX's function with
    this signature, whose cache trusts its files; JAX calls it when it first needs its cache."""
    return ProgramCache(Path(path), jax.config.jax_compilation_cache_max_size), path


class ProgramCache(CacheInterface):
    """A cache of compiled programs in a folder, with the interface that JAX expects: `get` and `put` of bytes by key.
    It checks each entry when it is read; JAX's own cache does not. JAX stores compiled programs in it, and
    KnownFailures its record of plans that were too large.

    Args:
      folder: the folder; it is created, for its owner alone, if it is missing. Temporary files in it that killed
        processes left more than a day ago are deleted.
      max_bytes: the most bytes of all entries; the least recently used ones are removed to make room. -1: no limit.
    """

    def __init__(self, folder: Path, max_bytes: int = -1):
        self._path, self.max_bytes = folder, max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f".*{_SUFFIX}.*.tmp"):  # left by a killed process, unless it is recent
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < time.time() - 24 * 3600:
                    left.unlink()

    def get(self, key: str) -> bytes | None:
        """The content that was stored under a key; None if there is no undamaged entry that belongs to this user. JAX
        calls it before it compiles a program, and compiles only if it gets None. An entry that is damaged, or that
        another user owns or may write, is removed, and one that cannot be read is left; a warning in the log reports
        both."""
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
            with contextlib.suppress(OSError):  # another process removed it, or the folder is read-only
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks it as the most recently used
        return content

    def put(self, key: str, value: bytes) -> None:
        """Stores the bytes `value` under `key` (JAX calls it with a program that it has compiled), replacing earlier
        ones, in a file that appears only when it is whole; entries that were used least recently are removed to make
        room, and nothing is stored if these bytes alone exceed max_bytes. Raises OSError if the file cannot be
        written."""
        entry = _entry(key, value)
        if self._make_room(len(entry)):
            atomic_write(self._file(key), entry, mode=0o600, durable=False)

    def _file(self, key: str) -> Path:
        """The path of the file of the entry `key`, which may not exist. Its ending names the compression that JAX uses,
        so that a process that uses another one does not take the entry for its own."""
        # zstandard may be installed or removed between two runs, and JAX's key does not always tell how it compressed.
        found = getattr(compilation_cache, "zstd", None) or getattr(compilation_cache, "zstandard", None)
        return self._path / f"{key}.{'zlib' if found is None else 'zstd'}{_SUFFIX}"

    def _make_room(self, need_bytes: int) -> bool:
        """Removes least recently used entries from the cache's folder, as many as must go, so that all entries and a
        new one of `need_bytes` do not exceed max_bytes; returns whether it then fits. Nothing is removed if there is no
        limit (True), or if the entry alone exceeds it (False). `put` calls it, and stores nothing if it returns
        False."""
        if self.max_bytes < 0:
            return True
        if need_bytes > self.max_bytes:
            return False
        found = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + need_bytes <= self.max_bytes:
                break
            total -= size
            path.unlink(missing_ok=True)
        return True


def _entry(key: str, content: bytes) -> bytes:
    """The bytes of an entry's file, which `put` writes and `get` compares: the format (8 bytes), the SHA-256 of key and
    content (32 bytes), the content."""
    digest = hashlib.sha256(key.encode() + b"\0")
    digest.update(content)
    return _FORMAT + digest.digest() + content


def _read(path: Path) -> tuple[bytes, str | None]:
    """(the bytes of the file `path`, None), or (b"", the reason in words why it must not be trusted): it is no plain
    file, or another user's, or others may write it. `get` reads an entry by it. It follows no link and does not block
    on a named pipe. Raises OSError if the file is missing, is a link or cannot be read."""
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
