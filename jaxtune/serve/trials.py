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
import threading
import warnings
from collections.abc import Callable

from jaxtune.system import children

_STACK_BYTES = 1 << 20  # half of the least that a thread of the server has
_MEMORY_BYTES = 128 << 20
_SECONDS = 2  # of a processor
_WHY = {
    signal.SIGSEGV: "what is defined calls itself too deeply: let fewer definitions call one another",
    signal.SIGBUS: "what is defined calls itself too deeply: let fewer definitions call one another",
    signal.SIGABRT: f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory: give fewer or simpler parts",
    signal.SIGXCPU: f"it takes more than {_SECONDS} s of a processor: give fewer or simpler parts",
}


def tried[T](work: Callable[[], tuple[T, object]]) -> tuple[T, int]:
    """(the first of what `work` returns, bytes of memory that both hold), made in a child. ValueError: `work` raised an
    exception, or ended the child.
    """
    reads, writes = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries' threads, which the child does not use
        child = os.fork()
    if not child:
        os.close(reads)
        _run(work, writes, parent)
    os.close(writes)
    with open(reads, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        why = _WHY.get(signal.Signals(-code)) if code < 0 else None
        raise ValueError(why or f"it ended the process that read it ({code})")
    is_right, value, held = pickle.loads(answer)
    if not is_right:
        raise ValueError(value)
    return value, held


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


def _run(work: Callable[[], tuple[object, object]], writes: int, parent: int) -> None:
    """Of the child, which it ends."""
    try:
        if not children.dies_with(parent):
            return
        faulthandler.disable()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # what a library says as it dies
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
        limit_memory(_MEMORY_BYTES)
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_answer, args=(work, writes))
        thread.start()
        thread.join()
        os._exit(0)
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(1)


def _answer(work: Callable[[], tuple[object, object]], writes: int) -> None:
    try:
        before = _held()
        value, kept = work()
        answer = True, value, max(0, _held() - before)
        del kept
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
        return
    except BaseException as error:
        answer = False, str(error) or type(error).__name__, 0
    with open(writes, "wb") as pipe:
        pipe.write(pickle.dumps(answer))


def _held() -> int:
    with contextlib.suppress(OSError):
        return _pages(1)
    return 0
