"""A socket between a process and its child: messages of a length and as many bytes. Standard library alone."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading

_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_HEAD = 8  # bytes of the length
_PR_SET_PDEATHSIG = 1
_C = ctypes.CDLL(None)


def dies_with(parent: int) -> bool:
    """This process dies with the thread that started it (on Linux); False: `parent` has ended."""
    if sys.platform == "linux":
        _C.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def attach(descriptor: int, parent: int) -> socket.socket | None:
    """The child's end of the socket; the child dies with the thread that started it, and not by its signals. Its own
    forks do, and have no socket. None: `parent` has ended.
    """
    if not dies_with(parent):
        return None
    for number in _SIGNALS:
        signal.signal(number, _nothing)  # SIG_IGN would pass to the child's own processes
    connection = socket.socket(fileno=descriptor)
    _let_forks_end(connection)
    return connection


def _nothing(*_: object) -> None:
    pass


def _let_forks_end(connection: socket.socket) -> None:
    """Forks of this process have no `connection`, and end by its signals, even by one that comes at once."""
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def leave() -> None:
        connection.close()
        for number in _SIGNALS:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=leave)


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(_HEAD, "big"))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None if the other side has ended."""
    head = _exactly(connection, _HEAD)
    return None if head is None else _exactly(connection, int.from_bytes(head, "big"))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        chunk = connection.recv(min(count - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)
