"""Processes that read requests' bodies, each with limits of time and memory: neither a body nor a template or tokenizer
of the model stops the server or another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from jaxtune.conversations.pictures import Picture, PictureError
from jaxtune.serve.errors import ApiError
from jaxtune.serve.reading import Reading
from jaxtune.serve.served import Readable
from jaxtune.serve.turns import Client, Turns, client_of
from jaxtune.system import children
from jaxtune.system.terminal import say

_SECONDS = 30.0  # in which a body must be read
_START_SECONDS = 300.0  # in which a process must have started
_AGAIN_SECONDS = 5.0  # before a process that did not start is started again
_MOST = 4
_MOST_BYTES = 16 << 20  # of a picture that is fetched, as a body that has one may have
_MOST_FETCHING, _MOST_FETCHES = 8, 32  # requests whose pictures are fetched, and addresses, at the same time
_ENTRY = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from jaxtune.serve.reading import serve
serve(int(sys.argv[2]), int(sys.argv[3]))"""
# A thread for each core would take memory, and the processes are several already.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class Readers:
    """They start at once, and read after `serve`; `close` ends them.

    count: None: half as many as CPUs, 2 to 4.
    """

    def __init__(self, count: int | None = None):
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = count or min(_MOST, max(2, cpus // 2))
        self._models = b""
        self._known, self._closed = threading.Event(), threading.Event()
        self._idle: queue.SimpleQueue[_Reader | None] = queue.SimpleQueue()
        self._readers = [_Reader() for _ in range(count)]
        # A process dies with the thread that starts it, so that has to be one that stays.
        self._starts = ThreadPoolExecutor(count, "start of a reader")
        self._reads, self._turns = ThreadPoolExecutor(count, "reader"), Turns(count)
        self._fetches, self._fetch_turns = ThreadPoolExecutor(_MOST_FETCHES, "fetch"), Turns(_MOST_FETCHING)
        for reader in self._readers:
            self._starts.submit(self._start, reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, models: Mapping[str, Readable]) -> None:
        """Gives the processes the models; again after a change, of which each learns before its next request."""
        self._models = pickle.dumps(dict(models))
        self._known.set()

    async def read(
        self,
        path: str,
        data: bytes,
        lengths: Mapping[str, int],
        host: str = "",
        count: Callable[[int], None] = lambda size: None,
    ) -> Reading:
        """What the body of a request to `path` asks for, or the answer. ApiError: its limits, or it is wrong.

        lengths: {model: the most tokens of a prompt and its answer}.
        host: the address of the client, who takes turns with others.
        count: called with the bytes of each picture that is fetched; may raise.
        """
        client, contents = client_of(host, data), dict[str, bytes | str]()
        while True:
            reading = await self._asked((path, data, dict(lengths), contents), client)
            if not isinstance(reading, tuple):
                return reading
            contents |= await self._fetched(reading, client, count)

    async def _fetched(
        self, addresses: Sequence[str], client: Client, count: Callable[[int], None]
    ) -> dict[str, bytes | str]:
        """{address: the picture's file, or why it was not fetched}; meanwhile no process waits."""

        async def content(address: str) -> bytes | str:
            found = await asyncio.get_running_loop().run_in_executor(self._fetches, _content, address)
            count(len(found))
            return found

        await self._turn(self._fetch_turns, client)
        try:
            found = await asyncio.gather(*map(content, addresses))
        finally:
            self._fetch_turns.end(client)
        return dict(zip(addresses, found, strict=True))

    @staticmethod
    async def _turn(turns: Turns, client: Client) -> None:
        turn = turns.ask(client)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel() and not turn.cancelled():
                turns.end(client)
            raise

    async def _asked(self, message: tuple, client: Client) -> Reading | tuple[str, ...]:
        await self._turn(self._turns, client)
        try:
            work = self._reads.submit(self._read, pickle.dumps(message), client)
        except RuntimeError:  # after `close`
            self._turns.end(client)
            raise _stopping() from None
        work.add_done_callback(lambda work: self._turns.end(client) if work.cancelled() else None)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self._closed.set()
        self._known.set()
        for reader in self._readers:
            reader.end()
            self._idle.put(None)
        for threads in (self._starts, self._reads, self._fetches):
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, reader: _Reader, client: Client | None = None) -> None:
        """Starts a process, again until it has the models; then ends the turn of the client whose body ended it."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # too many processes or files; `ask` then gets no answer
                reader.start()
            if self._closed.is_set():
                reader.end()
                return
            self._known.wait()
            if self._closed.is_set():  # before there were any models
                reader.end()
                return
            if reader.has(self._models):
                self._idle.put(reader)
                if client is not None:
                    self._turns.end(client)
                return
            reader.end()
            if not self._closed.wait(_AGAIN_SECONDS):
                say("jaxtune: a process that reads requests did not start; it is started again", file=sys.stderr)

    def _restart(self, reader: _Reader, client: Client | None = None) -> None:
        reader.end()
        with contextlib.suppress(RuntimeError):  # after `close`
            self._starts.submit(self._start, reader, client)

    def _read(self, message: bytes, client: Client) -> Reading | tuple[str, ...]:
        """Ends the client's turn when the process that it had is idle again, be it a new one."""
        while (reader := self._idle.get()) is not None and reader.has_ended:
            self._restart(reader)
        if reader is None or self._closed.is_set():
            self._idle.put(None)
            raise _stopping()
        knows, began = reader.has(self._models), time.monotonic()
        answer = reader.ask(message, _SECONDS) if knows else None
        if answer is None:
            self._restart(reader, client)
            late = time.monotonic() - began >= _SECONDS
            why = f"took longer than {_SECONDS:g} s" if late else "ended the process that read it"
            raise ApiError(400, f"reading the request (its JSON, the chat template, tokens, pictures) {why}: send less")
        self._idle.put(reader)
        self._turns.end(client)
        parsed = pickle.loads(answer)
        if isinstance(parsed, tuple) and isinstance(parsed[0], int):
            raise ApiError(*parsed)
        return parsed


def _content(address: str) -> bytes | str:
    try:
        return Picture(url=address).fetched(_MOST_BYTES).file_bytes()
    except PictureError as error:
        return str(error)


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping: ask again when it is back", code="stopping")


class _Reader:
    """A process and the socket to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._models: bytes | None = None  # that it has

    @property
    def has_ended(self) -> bool:
        process = self._process
        return process is None or process.poll() is not None

    def start(self) -> None:
        """OSError: too many processes or files."""
        self._connection, theirs = socket.socketpair()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, path, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,
            )

    def has(self, models: bytes) -> bool:
        """Whether it has the models, which it gets if need be."""
        if self._models is not models and self.ask(models, _START_SECONDS) is not None:
            self._models = models
        return self._models is models

    def ask(self, message: bytes, seconds: float) -> bytes | None:
        """Its answer; None if it ended, or did not answer within `seconds`."""
        connection = self._connection
        if connection is None:
            return None
        try:
            connection.settimeout(seconds)
            children.send(connection, message)
            return children.receive(connection)
        except OSError:  # TimeoutError is one
            return None

    def end(self) -> None:
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        self._models = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()
