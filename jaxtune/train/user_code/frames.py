"""Messages to functions' processes: a length and as many bytes. Standard library alone."""

from __future__ import annotations

import socket

_HEAD = 8  # bytes of the length


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
