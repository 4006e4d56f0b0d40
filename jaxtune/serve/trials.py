"""Work of native code on a client's text, done first in a process that may die: a child with less of everything than
the server's own threads have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import socket
import threading
import warnings
from collections.abc import Callable

from jaxtune.system import children

_STACK_BYTES = 1 << 20  # half of the least that a thread of the server has
_MEMORY_BYTES = 128 << 20
_KEPT_BYTES = 8 << 20  # that a child may hold for its next work, whose memory is counted by what it takes more
_SECONDS = 2  # of a processor
_WHY = {
    signal.SIGSEGV: "what is defined calls itself too deeply: let fewer definitions call one another",
    signal.SIGBUS: "what is defined calls itself too deeply: let fewer definitions call one another",
    signal.SIGABRT: f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory: give fewer or simpler parts",
    signal.SIGXCPU: f"it takes more than {_SECONDS} s of a processor: give fewer or simpler parts",
}


class Trials[Asked, T]:
    """`work`, which gives a value and what is to be kept with it, in a child that is forked when one is needed: at the
    first call, after one that ended it, and when it holds much.
    """

    def __init__(self, work: Callable[[Asked], tuple[T, object]]):
        self._work, self._child, self._connection = work, 0, None

    def __call__(self, asked: Asked) -> tuple[T, int]:
        """(the value, bytes of memory that both hold). ValueError: `work` raised an exception, or ended the child."""
        connection = self._connection or self._forked()
        answer = None
        with contextlib.suppress(OSError):
            children.send(connection, pickle.dumps(asked))
            answer = children.receive(connection)
        if answer is None:
            code = self._ended()
            why = _WHY.get(signal.Signals(-code)) if code < 0 else None
            raise ValueError(why or f"it ended the process that read it ({code})")
        is_right, value, held, stays = pickle.loads(answer)
        if not stays:
            self._ended()
        if not is_right:
            raise ValueError(value)
        return value, held

    def close(self) -> None:
        """Ends the child."""
        if self._connection is not None:
            self._ended()

    def _forked(self) -> socket.socket:
        self._connection, theirs = socket.socketpair()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries' threads, which the child does not use
            self._child = os.fork()
        if not self._child:
            _run(self._work, theirs, parent)
        theirs.close()
        return self._connection

    def _ended(self) -> int:
        """Lets the child end; its exit code."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        _, status = os.waitpid(self._child, 0)
        return os.waitstatus_to_exitcode(status)


def limit_memory(nbytes: int) -> None:
    """Allows so much private memory more than is taken now; only where /proc tells that."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = _pages(5) + nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _pages(column: int) -> int:
    """Bytes of /proc/self/statm's column; OSError."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _run[Asked](work: Callable[[Asked], tuple[object, object]], connection: socket.socket, parent: int) -> None:
    """Of the child, which it ends."""
    try:
        if not children.dies_with(parent):
            return
        faulthandler.disable()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # what a library says as it dies
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.stack_size(_STACK_BYTES)
        first = _held()
        while (message := children.receive(connection)) is not None:
            seconds = int(sum(os.times()[:2])) + 1 + _SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            limit_memory(_MEMORY_BYTES)
            thread = threading.Thread(target=_answer, args=(work, message, connection, first))
            thread.start()
            thread.join()
        os._exit(0)
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(1)


def _answer[Asked](
    work: Callable[[Asked], tuple[object, object]], message: bytes, connection: socket.socket, first: int
) -> None:
    """first: bytes that the child held when it was forked."""
    try:
        before = _held()
        value, kept = work(pickle.loads(message))
        answer = True, value, max(0, _held() - before)
        del kept
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
        return
    except BaseException as error:
        answer = False, str(error) or type(error).__name__, 0
    children.send(connection, pickle.dumps((*answer, _held() - first < _KEPT_BYTES)))


def _held() -> int:
    with contextlib.suppress(OSError):
        return _pages(1)
    return 0
