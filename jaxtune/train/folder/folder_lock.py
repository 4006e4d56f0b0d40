"""A lock by which one run at a time uses a folder."""

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
    """An exclusive `flock` on run.lock, taken at once or never; the kernel releases it when the process dies. The file
    says who has it. A dead process's file is taken over; on a file system without locks a warning is logged. ValueError
    if another run has it, the folder cannot be written, or the file is a link.
    """

    _locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()
    """Of this process, so that a forked one can close the files that it inherits."""

    def __init__(self, folder: Path):
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                # A link is not followed, because its target would be overwritten; a named pipe does not block.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(self.path, flags, 0o644)
                self._lock(descriptor)
                if _same_file(descriptor, self.path):
                    break
                os.close(descriptor)  # its owner removed the file between our open and our lock
            stale = os.read(descriptor, 4096).decode(errors="replace").strip()
            if stale:
                logger.warning("taking over %s from a run that died: %s", self.path, stale)
            start_time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": start_time}
            if (identity := process_identity(os.getpid())) is not None:
                owner["process"] = identity
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(f"{self.path} is a link, which no run creates: remove it") from None
            raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another output folder") from None
        self._descriptor = descriptor
        FolderLock._locks.add(self)

    def _lock(self, descriptor: int) -> None:
        """ValueError names the run that has the lock; the file is closed then."""
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
        """Releases the lock and removes its file; a second call does nothing."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _forget_in_child(self) -> None:
        """Closes the inherited file in a forked process, which would keep the folder locked after its parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def process_identity(pid: int) -> str | None:
    """What tells a process from all others that ever have its pid: boot and start in clock ticks. None where /proc does
    not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return f"{boot} {stat.rpartition(b')')[2].split()[19].decode()}"  # of 52 fields the 22nd; the name may hold ")"
    except (OSError, ValueError, IndexError):
        return None


def _same_file(descriptor: int, path: Path) -> bool:
    """False if the file at `path` is another or gone, as its owner removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# A forked data worker inherits the lock, and would keep the folder locked after the run was killed.
os.register_at_fork(after_in_child=lambda: [lock._forget_in_child() for lock in FolderLock._locks])
