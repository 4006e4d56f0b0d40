"""Connections of clients: how many there are, and how long the head of a request may take."""

from __future__ import annotations

import asyncio
import math
import resource
import sys
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxtune.system.terminal import say

HEAD_SECONDS = 10.0  # from the connection, or a head's first byte, until the whole head of a request
ACCEPTED_AT_ONCE = 16  # connections, before those that are too many are closed
_MOST = 4096
_SPARED_FILES = 96  # of the process's limit, for everything else
_SAY_SECONDS = 60.0


def most_connections() -> int:
    """By the process's limit of open files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if files == resource.RLIM_INFINITY else max(ACCEPTED_AT_ONCE, min(_MOST, files - _SPARED_FILES))


class Connection(H11Protocol):
    """One over the limit closes the oldest that waits for a request, or itself if all are answered."""

    _said = -math.inf  # when this was last told, of all connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begun, self._unsent = time.monotonic(), 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.abort)
        if len(self.connections) > (most := most_connections()):
            self._close_one(most)

    def _close_one(self, most: int) -> None:
        living = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and not connection._is_closing
        ]
        if len(living) <= most:
            return
        min(
            (connection for connection in living if connection.is_idle),
            key=lambda connection: connection._begun,
            default=self,
        ).transport.abort()
        if time.monotonic() - Connection._said > _SAY_SECONDS:
            Connection._said = time.monotonic()
            say(f"jaxtune: {most} connections are open: each new one closes one without a request", file=sys.stderr)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_head_timer()
        elif self._head_timer is None and not self._is_closing:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Also closes a connection whose client reads nothing more of an answer."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        if not unsent:
            super().timeout_keep_alive_handler()
        elif unsent == before:
            self.transport.abort()
        else:
            self._unsent = unsent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_closing(self) -> bool:
        return self.transport.is_closing()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
