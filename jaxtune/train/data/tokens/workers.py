"""Tokenises rows in chunks, in a thread of this process or in several processes.

Processes are separate commands that receive pickled work through pipes. They are not forked, because JAX may already
run here, and the caller's main module is not imported again, so a training script needs no guard.

The caller can interrupt at any time. On an interrupt, or when a chunk takes far too long (a template is a program, and
may loop), a process is killed, and a thread gets SystemExit.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import itertools
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from jaxtune.system import waiting
from jaxtune.system.files import PACKAGE
from jaxtune.system.terminal import outlive, printable, say
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.row_errors import attempt
from jaxtune.train.data.rows.row_files import Row
from jaxtune.train.data.tokens.chunks import Chunk, encode_chunk

logger = logging.getLogger(__name__)

# A chunk is complete when it has one of these numbers of rows or characters.
ROWS_PER_CHUNK = 512
CHARACTERS_PER_CHUNK = 8 * 2**20
ROWS_OF_PICTURES = 64  # of a chunk if rows may have pictures, which take far longer than text
MANY_CHUNKS = 32  # from this number on, processes save more time than they take to start
FEW_CPUS = 3  # up to this number of CPUs, one process is as fast, because the tokenizer's own threads use them
MOST_PROCESSES = 16
# A chunk is taken to be stuck after PATIENCE_SECONDS, and one second more for every CHARACTERS_PER_SECOND characters.
# The slowest rows seen take a second for 200,000 characters.
PATIENCE_SECONDS = 600.0
CHARACTERS_PER_SECOND = 10_000


def encode_rows(
    rows: Iterable[Row],
    tokenizer: Any,
    options: dict[str, Any],
    num_workers: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[Chunk]:
    """Tokenises rows, and yields their chunks in order.

    Raises ValueError for wrong options, a tokenizer that can use no row, a killed process, or a chunk that takes too
    long.

      options: keyword arguments of RowEncoder.
      num_workers: processes. 0 or 1, or a tokenizer that cannot be pickled: a thread. None: one a CPU, at most 16, if
      there are more than 3 CPUs and more than 32 chunks (which are read ahead), else a thread.
      poll: called several times a second; what it raises ends the work and passes through.
    """
    encoder = RowEncoder(tokenizer, **options)  # made here too, so that a wrong option raises before processes start
    chunks = _chunks(rows, ROWS_PER_CHUNK if encoder.pictures is None else ROWS_OF_PICTURES)
    if num_workers is None:
        first = list(itertools.islice(chunks, MANY_CHUNKS + 1))
        chunks = itertools.chain(first, chunks)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        uses_processes = cpus > FEW_CPUS and len(first) > MANY_CHUNKS
        num_workers = min(cpus, MOST_PROCESSES) if uses_processes else 1
    if num_workers <= 1:
        return _encode(chunks, 1, lambda: _InProcess(encoder), poll)
    try:
        setup = pickle.dumps((tokenizer, options))
    except Exception as error:  # a script's own class of tokenizers cannot always be pickled
        say(
            f"rows are tokenised in one process, because the tokenizer, a {type(tokenizer).__name__}, cannot be sent "
            f"to others ({printable(error)})"
        )
        return _encode(chunks, 1, lambda: _InProcess(encoder), poll)
    return _encode(chunks, num_workers, lambda: _Process(setup), poll)


def _chunks(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    chunk, size = [], 0
    for row in rows:
        chunk.append(row)
        size += row.size
        if len(chunk) == most or size >= CHARACTERS_PER_CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Encoder(Protocol):
    """Tokenises chunks, in this process or another; `encode` runs in a worker's thread."""

    def encode(self, rows: list[Row]) -> Chunk:
        """Blocks until the chunk is made, and raises its error."""
        ...

    def stopped(self) -> str:
        """The encoder's process in words if a signal such as SIGSTOP stopped it, else ""."""
        ...

    def close(self) -> None:
        """Ends an idle encoder."""
        ...

    def kill(self) -> None:
        """Ends the encoder at once, even at work."""
        ...


class _Worker(threading.Thread):
    """A daemon thread that encodes (rows, future) tasks until it takes None."""

    def __init__(self, encoder: _Encoder, tasks: queue.SimpleQueue):
        super().__init__(name="tokenising", daemon=True)
        self.encoder = encoder
        self.tasks = tasks
        self.start()

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            rows, future = task
            try:
                future.set_result(self.encoder.encode(rows))
            except BaseException as error:  # `_wait_for` raises it
                future.set_exception(error)


def _encode(
    chunks: Iterable[list[Row]], count: int, make: Callable[[], _Encoder], poll: Callable[[], None]
) -> Iterator[Chunk]:
    """Tokenises chunks with at most `count` workers, and yields results in order; make: makes an encoder."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    workers: list[_Worker] = []
    queued: collections.deque[tuple[list[Row], concurrent.futures.Future[Chunk]]] = collections.deque()
    is_done = False
    try:
        for rows in chunks:
            poll()
            if len(workers) < count:
                workers.append(_Worker(make(), tasks))
            queued.append((rows, concurrent.futures.Future()))
            tasks.put(queued[-1])
            if len(queued) > 2 * count:
                yield _wait_for(*queued.popleft(), workers, poll)
        while queued:
            yield _wait_for(*queued.popleft(), workers, poll)
        is_done = True
    finally:
        with contextlib.suppress(queue.Empty):
            while not is_done:
                tasks.get_nowait()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.encoder.close() if is_done else worker.encoder.kill()
        for worker in workers:
            worker.join(timeout=1)  # none should still run while the interpreter shuts down


def _wait_for(
    rows: list[Row],
    future: concurrent.futures.Future[Chunk],
    workers: list[_Worker],
    poll: Callable[[], None],
) -> Chunk:
    """Waits for a chunk's future, and calls `poll` meanwhile. ValueError after 600 s and 1 s for each 10,000
    characters.
    """
    size, reported = sum(row.size for row in rows), ""
    patience = PATIENCE_SECONDS + size / CHARACTERS_PER_SECOND

    def stopped() -> str:
        return next((words for worker in workers if (words := worker.encoder.stopped())), "")

    def look() -> None:
        nonlocal reported
        poll()
        if (words := stopped()) and words != reported:
            reported = words
            logger.warning("%s makes no progress, and this run waits for it: kill -CONT continues it", words)

    try:
        return waiting.result(future, f"{_span(rows)} to be tokenised", patience, look)
    except TimeoutError:
        if future.done():
            return future.result()
        if words := stopped():
            raise ValueError(
                f"{words} has not continued for {patience:,.0f} s, and has {_span(rows)} to tokenise"
            ) from None
        raise ValueError(
            f"tokenising {_span(rows)} has taken more than {patience:,.0f} s for {size:,} characters: the chat "
            "template may loop on one of these rows; look for it with data.max_rows, or set another data.template"
        ) from None


def _span(rows: list[Row]) -> str:
    first, last = (printable(row.place) for row in (rows[0], rows[-1]))
    return first if len(rows) == 1 else f"{first} to {last}"


class _InProcess:
    """Encodes in a thread of this process. `thread` is that thread's id while it encodes, for `kill`."""

    def __init__(self, encoder: RowEncoder):
        self.encoder = encoder
        self.thread: int | None = None

    def encode(self, rows: list[Row]) -> Chunk:
        self.thread = threading.get_ident()
        try:
            return encode_chunk(self.encoder, rows)
        finally:
            self.thread = None

    def stopped(self) -> str:
        return ""

    def close(self) -> None:
        """There is no process to end."""

    def kill(self) -> None:
        """Raises SystemExit in the encoding thread at its next Python instruction, which ends an endless loop."""
        if (thread := self.thread) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


class _Process:
    """Encodes in a process that it starts, with pickles through its stdin and stdout."""

    def __init__(self, setup: bytes):
        root = str(PACKAGE.resolve().parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
        environment |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # the parent has shown them already
        code = f"from {__name__} import _serve; _serve({os.getpid()})"
        # It gets a process group of its own, so that a Ctrl-C in the terminal reaches only the parent, which handles
        # it.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self.setup: bytes | None = setup

    def encode(self, rows: list[Row]) -> Chunk:
        """Raises ValueError with the error's text from there, or if the process ended or was killed."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            if self.setup is not None:
                stdin.write(self.setup)
                self.setup = None
            stdin.write(_pickled(rows))
            stdin.flush()
            result = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
            ending = (
                f"was killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with {code}"
            )
            raise ValueError(
                f"a process that tokenises {ending} while it had {_span(rows)}; set data.num_workers lower "
                "(1 tokenises in the process that trains)"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result

    def stopped(self) -> str:
        """Reads /proc; "" without it."""
        with contextlib.suppress(OSError):  # the process has ended, or the system has no /proc
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][:1]
            if state in ("T", "t"):
                return f"process {self.process.pid}, which was stopped (SIGSTOP),"
        return ""

    def close(self) -> None:
        """Closes the process's input, and kills it after 10 s."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()  # makes the process leave
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Kills the process; a thread that waits for it wakes with an error."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _pickled(rows: list[Row]) -> bytes:
    """The pickle of `rows`; a row that cannot be pickled becomes a bad row."""
    try:
        return pickle.dumps(rows)
    except Exception:  # rows that a script gives as a list may have any objects
        return pickle.dumps([row if isinstance(attempt(pickle.dumps, row), bytes) else _unsent(row) for row in rows])


def _unsent(row: Row) -> Row:
    return dataclasses.replace(row, value=None, error="it holds objects that cannot be sent to another process")


def _serve(parent: int) -> None:
    """The main function of a tokenising process, until stdin ends or the process `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that a library prints must not get among the replies
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent needs no more
        tokenizer, options = pickle.load(requests)
        encoder = RowEncoder(tokenizer, **options)
        while True:
            rows = pickle.load(requests)
            try:
                result: Chunk | Exception = encode_chunk(encoder, rows)
            except Exception as error:  # sent to the parent, which raises it
                result = ValueError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            pickle.dump(result, replies)
            replies.flush()


def _leave_with(parent: int) -> None:
    """Exits when `parent` is gone; a loop in a template would not notice the end of input."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
