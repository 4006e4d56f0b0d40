"""Serves the application with uvicorn until a signal, after which answers have some seconds to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn

from jaxtune.serve import connections, signals
from jaxtune.serve.app import make_app
from jaxtune.serve.engine import Engine
from jaxtune.serve.errors import ApiError
from jaxtune.serve.loading import AdapterFolder
from jaxtune.serve.readers import Readers
from jaxtune.system.loopback import is_loopback
from jaxtune.system.terminal import say

_IDLE_SECONDS = 30  # after which a connection without a request is closed
_CLOSING_SECONDS = 5  # after the grace: for last words to clients that read
_THREAD_SECONDS = 5.0  # for the threads to end what they are at
_SLICE_SECONDS = 0.1
_SWITCH_SECONDS = 0.0005  # of Python's threads: within 5 ms, the default, the device would wait for the engine's thread
_BACKLOG = 1024  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an IP address or a name's first one, at `port` (0: a free one); else ValueError."""
    try:
        [(family, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host {host} --port {port} is not available ({error}): choose another, or port 0 for a free one"
        ) from None


class Server(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or SIGHUP; a SIGHUP that is ignored, as under nohup, stays so.

    After the first signal no new requests are accepted, and answers have `grace` seconds, then get an error. A second
    one ends the server without them.

    Args:
      listener: on a loopback address, requests of another Host or Origin are refused; closed at the shutdown.
      key: the API key of all requests but those for / and /health; None: no key.
      seconds: until an answer has been made and read; else error 504.
      folder: of adapters that clients may load; None: they may not.
    Attributes:
      second: the second signal, or a later one.
    """

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        key: str | None,
        seconds: float,
        grace: float,
        readers: Readers,
        folder: AdapterFolder | None = None,
    ):
        self._engine, self._listener, self._grace = engine, listener, grace
        self.second: signal.Signals | None = None
        config = uvicorn.Config(
            make_app(engine, key, is_loopback(listener.getsockname()[0]), seconds, readers, folder),
            loop="asyncio",
            http=connections.Connection,
            backlog=connections.ACCEPTED_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # faults are reported by the application
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=int(grace) + 1 + _CLOSING_SECONDS,
        )
        super().__init__(config)

    def run_until_signal(self) -> None:
        """Serves until a signal, and returns when all answers have ended, after `grace` seconds with error 503.

        If the engine's thread has not ended five seconds later, as in a compile, which nothing interrupts, or at a
        second signal, this ends the process: exit code 0, or 128 plus the second's number. KeyboardInterrupt: after a
        second signal.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        with signals.handled(self.handle_exit):
            self.run(sockets=[self._listener])
            if not self._engine_ended():
                signals.leave(0 if self.second is None else 128 + self.second)
        if self.second is not None:
            raise KeyboardInterrupt(self.second.name)

    def _engine_ended(self) -> bool:
        """Ends the engine's thread; False if it is still at work after some seconds."""
        deadline, earlier = time.monotonic() + _THREAD_SECONDS, self.second
        while time.monotonic() < deadline and self.second is earlier:
            if self._engine.close(_SLICE_SECONDS):
                return True
        return False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the server without the answers, but not SIGHUP, which a shell and the system
        both send.
        """
        if not self.should_exit:
            self.should_exit = True
        elif sig != signal.SIGHUP:
            self.second = signal.Signals(sig)
            self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also prints the server's address."""
        await super().startup(sockets)
        self._listener.listen(_BACKLOG)  # uvicorn's backlog is also what is accepted at once
        host, port = self._listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"{address}/v1, and a page to chat: {address}/  (Ctrl-C ends it)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the answers; uvicorn cancels what still runs some seconds after `grace`."""
        say(f"jaxtune: stopping; answers have {self._grace:g} s to end", file=sys.stderr)
        ends = [asyncio.ensure_future(ending) for ending in (self._end_of_grace(), self._end_at_once())]
        try:
            await super().shutdown(sockets)
        finally:
            for ending in ends:
                ending.cancel()

    async def _end_of_grace(self) -> None:
        await asyncio.sleep(self._grace)
        self._engine.end(ApiError(503, "the server is stopping: ask again when it is back", code="stopping"))

    async def _end_at_once(self) -> None:
        """Closes every connection at a second signal, because uvicorn ends only when all are closed."""
        while not self.force_exit:
            await asyncio.sleep(0.1)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
