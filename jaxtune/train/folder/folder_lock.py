"""One run a folder."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import weakref
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"


class FolderLock:
    """Keeps a second run out of a folder: an exclusive `flock` on `run.lock`, which the kernel drops when we die.

    The file says who holds it (pid, host, start time). Makes the folder if it is missing. Raises ValueError.
    """

    _held: weakref.WeakSet[FolderLock] = weakref.WeakSet()

    def __init__(self, folder: Path):
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                # Never through a link: what it points to would be overwritten; and a named pipe is not waited for.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(self.path, flags, 0o644)
                self._lock(descriptor)
                if _same_file(descriptor, self.path):
                    break
                os.close(descriptor)  # the holder removed the file between our open and our lock
            stale = os.read(descriptor, 4096).decode(errors="replace").strip()
            if stale:
                logger.warning("taking over %s from a run that died: %s", self.path, stale)
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(f"{self.path} is a link, which no run makes: remove it") from None
            raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another output folder") from None
        self._descriptor = descriptor
        FolderLock._held.add(self)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 4096).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ValueError(
                f"{self.path.parent} is in use by another run ({owner}); stop it or choose another output folder"
            ) from None
        except OSError as error:
            logger.warning("%s: this file system has no locks (%s); nothing keeps a second run out", self.path, error)

    def release(self) -> None:
        """Gives the folder free; a second call does nothing."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _forget_in_child(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# A forked data worker shares the lock: without this it would keep the folder locked after the run was killed.
os.register_at_fork(after_in_child=lambda: [lock._forget_in_child() for lock in FolderLock._held])
