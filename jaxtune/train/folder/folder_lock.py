"""A lock (`FolderLock`) by which one run at a time uses a folder, so that two do not overwrite each other's
checkpoints."""

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
    """An exclusive `flock` on the file `run.lock` in `folder`, which the kernel releases when the process dies. It is
    taken when the object is made, without waiting; `release` releases it and removes the file. A Checkpointer has one
    on its folder; of a run of several processes only that of the first one has.

    The file says which run has the lock (pid, host, start time). The folder is created if it is missing, and a file
    that a dead process left is taken over, with a warning in the log. On a file system without locks, only a warning is
    logged.

    Raises:
      ValueError: another run has the lock, the folder cannot be written, or the file is a link.
    """

    _locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()
    """All locks of this process, so that a forked process can close the files that it inherits."""

    def __init__(self, folder: Path):
        """Creates `folder` if it is missing, takes the lock, and writes into its file which process has it. A file that
        a dead process left is taken over, with a warning in the log."""
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
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
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
        """Locks the open file `descriptor`, without waiting. If another run has it locked, it closes the file and
        raises ValueError, which names that run. On a file system without locks it only logs a warning. The constructor
        calls it."""
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
        """Releases the lock and removes its file, so that another run can use the folder; a second call does
        nothing."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _forget_in_child(self) -> None:
        """Closes the lock's file in a forked process, such as a data worker, which inherits it and would otherwise keep
        the folder locked when its parent is gone. The parent keeps the lock. Python calls it after each fork."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def process_identity(pid: int) -> str | None:
    """What tells a process of this machine from all others that ever have its pid: the boot, and its start in clock
    ticks since then. None where /proc does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return f"{boot} {stat.rpartition(b')')[2].split()[19].decode()}"  # of 52 fields the 22nd; the name may hold ")"
    except (OSError, ValueError, IndexError):
        return None


def _same_file(descriptor: int, path: Path) -> bool:
    """Whether the open file `descriptor` is the file that is now at `path`. False if that is another file, or there is
    none, because a run that ended has removed the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# A forked data worker inherits the lock, and would keep the folder locked after the run was killed.
os.register_at_fork(after_in_child=lambda: [lock._forget_in_child() for lock in FolderLock._locks])
