"""Rows to tokens in chunks, in a thread of this process or in several processes.

The processes are started as commands of their own and fed through pipes. Nothing is forked (JAX may already
run here), and the caller's main module is not imported again, as multiprocessing's spawn would do: a training
script need not guard its main code.

Who waits for tokens can be stopped at any time: the tokenising goes on elsewhere, and the waiting wakes several times
a second. Then, or when a chunk takes beyond all measure (a template is a program, and may loop), processes are killed
and the thread is left.
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

import numpy as np

from jaxtune.system.terminal import outlive, printable, say
from jaxtune.train.data.formats import (
    LABELLED,
    PREFERENCE,
    Example,
    RowError,
    attempt,
    normalize,
    normalize_labelled,
    normalize_pair,
    unread,
)
from jaxtune.train.data.row_files import Row
from jaxtune.train.data.templates import Encoded, RowEncoder

logger = logging.getLogger(__name__)

ROWS_PER_CHUNK = 512
CHARACTERS_PER_CHUNK = 8 * 2**20
MANY_ROWS = 16_384  # from here on, processes are worth the seconds that they take to start
FEW_CPUS = 3  # on so few, one process does as well: the tokenizer's own threads use them
MOST_PROCESSES = 16
POLL_SECONDS = 0.2
# A chunk that takes longer is stuck. The slowest rows seen take a second for 200,000 characters.
PATIENCE_SECONDS = 600.0
CHARACTERS_PER_SECOND = 10_000
MOST_POLL_SECONDS = 2.0  # that count of a wait for one poll: while we ourselves were stopped (Ctrl-Z), nobody waited
REASON_CHARACTERS = 500  # of what is wrong with a row; a message may quote columns of any length


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents of some rows, flat, and what became of the rest.

    tokens: int32[total]. mask: uint8[total]. lengths, trained: int64[n]. origins: (file, line) of each document.
    problems: (place, reason) of each bad row. untrained: places of rows without a trained token.
    unread: names of columns that hold something, and are not read.
    special: (place, what) of rows whose messages hold special tokens or markers. left_out: (place, what) of rows of
    which the template does not write all. cut: rows cut before they were
    tokenised whole. responses, ended, masked: counts, see `templates.Encoded`.
    """

    rows: int
    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    origins: list[tuple[str, int]]
    problems: list[tuple[str, str]]
    untrained: list[str]
    responses: int
    ended: int
    special: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    masked: int = 0
    cut: int = 0
    unread: list[str] = dataclasses.field(default_factory=list)


_ABSENT = Encoded(np.zeros(0, np.int32), np.zeros(0, bool), 0, 0)


def encode_chunk(encoder: RowEncoder, rows: list[Row]) -> Chunk:
    """Normalises, renders and tokenises some rows. A pair gives two documents, one after the other, or none; an answer
    that it lacks is an empty one."""
    outcome = [attempt(_examples, row) for row in rows]
    encoded = iter(
        encoder.encode([one for found in outcome if not isinstance(found, RowError) for one in found if one])
    )
    documents: list[Encoded] = []
    origins, problems, untrained, special, left_out, masked = [], [], [], [], [], 0
    for row, found in zip(rows, outcome, strict=True):
        outcomes = [found] if isinstance(found, RowError) else [next(encoded) if one else None for one in found]
        place = printable(row.place)
        results = [result for result in outcomes if isinstance(result, Encoded)]
        if error := next((result for result in outcomes if isinstance(result, RowError)), None):
            reason = printable(error)
            problems.append((place, reason[:REASON_CHARACTERS] + " ..." * (len(reason) > REASON_CHARACTERS)))
            continue
        masked += sum(result.masked for result in results)
        if whose := next((result.special for result in results if result.special), ""):
            special.append((place, printable(whose)))
        if what := next((result.left_out for result in results if result.left_out), ""):
            left_out.append((place, printable(what)))
        if not all(result.mask[1:].any() for result in results):
            untrained.append(place)
        else:
            documents += [result if isinstance(result, Encoded) else _ABSENT for result in outcomes]
            origins += [(row.file, row.number)] * len(outcomes)
    return Chunk(
        rows=len(rows),
        tokens=np.concatenate([d.tokens for d in documents]) if documents else np.zeros(0, np.int32),
        mask=np.concatenate([d.mask for d in documents]).astype(np.uint8) if documents else np.zeros(0, np.uint8),
        lengths=np.array([len(d.tokens) for d in documents], np.int64),
        trained=np.array([np.count_nonzero(d.mask[1:]) for d in documents], np.int64),
        origins=origins,
        problems=problems,
        untrained=untrained,
        responses=sum(d.responses for d in documents),
        ended=sum(d.ended for d in documents),
        special=special,
        left_out=left_out,
        masked=masked,
        cut=sum(d.cut for d in documents),
        unread=list(dict.fromkeys(name for row in rows if row.value for name in unread(row.value, row.format))),
    )


def _examples(row: Row) -> list[Example] | list[Example | None]:
    if row.value is None:
        raise RowError(row.error)
    if row.format in (PREFERENCE, LABELLED):
        pair = (normalize_pair if row.format == PREFERENCE else normalize_labelled)(row.value)
        return [pair.chosen, pair.rejected]
    return [normalize(row.value, row.format)]


def encode_rows(
    rows: Iterable[Row],
    tokenizer: Any,
    options: dict[str, Any],
    num_workers: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[Chunk]:
    """Chunks of all rows, in order.

    Args:
        rows: from `reading.read_rows`.
        tokenizer: a fast Hugging Face tokenizer.
        options: keyword arguments of `RowEncoder`.
        num_workers: processes; None decides by the number of rows and of CPUs, 0 or 1 stays in this process.
        poll: called several times a second; what it raises ends the work at once.

    Raises:
        ValueError: an option is wrong, a process was killed, or a chunk is stuck.
    """
    encoder = RowEncoder(tokenizer, **options)  # here too, so that a wrong option is an error before any process
    chunks = _chunks(rows)
    if num_workers is None:
        first = list(itertools.islice(chunks, MANY_ROWS // ROWS_PER_CHUNK + 1))
        chunks = itertools.chain(first, chunks)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        many = cpus > FEW_CPUS and len(first) * ROWS_PER_CHUNK > MANY_ROWS
        num_workers = min(cpus, MOST_PROCESSES) if many else 1
    if num_workers <= 1:
        return _encode(chunks, 1, lambda: _Here(encoder), poll)
    try:
        setup = pickle.dumps((tokenizer, options))
    except Exception as error:  # of a class that a script made; the tokens are the same wherever they are made
        say(
            f"rows are tokenised in one process, because the tokenizer, a {type(tokenizer).__name__}, cannot be sent "
            f"to others ({printable(error)})"
        )
        return _encode(chunks, 1, lambda: _Here(encoder), poll)
    return _encode(chunks, num_workers, lambda: _Process(setup), poll)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk, size = [], 0
    for row in rows:
        chunk.append(row)
        size += row.size
        if len(chunk) == ROWS_PER_CHUNK or size >= CHARACTERS_PER_CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Encoder(Protocol):
    """What encodes chunks: `encode` is called in a thread of its own; the others in the caller's."""

    def encode(self, rows: list[Row]) -> Chunk: ...

    def stopped(self) -> str:
        """Which process of it was stopped and stands still, in words; or ""."""
        ...

    def close(self) -> None:
        """After the last chunk."""
        ...

    def kill(self) -> None:
        """In the middle of one."""
        ...


class _Worker(threading.Thread):
    """A thread that takes (rows, future) from a queue until it takes None. A daemon: nobody waits for it to end."""

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
            except BaseException as error:  # told to whoever waits for the chunk
                future.set_exception(error)


def _encode(
    chunks: Iterable[list[Row]], count: int, make: Callable[[], _Encoder], poll: Callable[[], None]
) -> Iterator[Chunk]:
    """The chunks in order, by up to `count` workers, of which no more are made than there are chunks."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    workers: list[_Worker] = []
    waiting: collections.deque[tuple[list[Row], concurrent.futures.Future[Chunk]]] = collections.deque()
    done = False
    try:
        for rows in chunks:
            poll()
            if len(workers) < count:
                workers.append(_Worker(make(), tasks))
            waiting.append((rows, concurrent.futures.Future()))
            tasks.put(waiting[-1])
            if len(waiting) > 2 * count:
                yield _wait_for(*waiting.popleft(), workers, poll)
        while waiting:
            yield _wait_for(*waiting.popleft(), workers, poll)
        done = True
    finally:
        with contextlib.suppress(queue.Empty):
            while not done:
                tasks.get_nowait()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.encoder.close() if done else worker.encoder.kill()
        for worker in workers:
            worker.join(timeout=1)  # none should still run while the interpreter shuts down


def _wait_for(
    rows: list[Row],
    future: concurrent.futures.Future[Chunk],
    workers: list[_Worker],
    poll: Callable[[], None],
) -> Chunk:
    """The result of a chunk, the next in order; `poll` is called all the while."""
    size = sum(row.size for row in rows)
    patience = PATIENCE_SECONDS + size / CHARACTERS_PER_SECOND
    waited, last, told = 0.0, time.monotonic(), ""
    while not future.done():
        concurrent.futures.wait([future], POLL_SECONDS)
        poll()
        now = time.monotonic()
        waited, last = waited + min(now - last, MOST_POLL_SECONDS), now
        stopped = next((words for worker in workers if (words := worker.encoder.stopped())), "")
        if stopped and stopped != told:
            logger.warning("%s stands still, and this run waits for it: kill -CONT wakes it", stopped)
        told = stopped or told
        if waited > patience and not future.done():
            if stopped:
                raise ValueError(f"{stopped} has not gone on for {patience:,.0f} s, and has {_span(rows)} to tokenise")
            raise ValueError(
                f"tokenising {_span(rows)} has taken more than {patience:,.0f} s for {size:,} characters: the chat "
                "template may loop on one of these rows; look for it with data.max_rows, or set another data.template"
            )
    return future.result()


def _span(rows: list[Row]) -> str:
    first, last = (printable(row.place) for row in (rows[0], rows[-1]))
    return first if len(rows) == 1 else f"{first} to {last}"


class _Here:
    """Encodes in this process."""

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
        """Nothing: whoever asks runs."""
        return ""

    def close(self) -> None:
        """Nothing: there is no process to end."""

    def kill(self) -> None:
        """Raises SystemExit in the thread, where its Python code goes on next: a template's loop ends so."""
        if (thread := self.thread) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


class _Process:
    """A process that encodes: pickles of chunks go in, pickles of results come out."""

    def __init__(self, setup: bytes):
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
        environment |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # they were given in the parent
        code = f"from jaxtune.train.data import workers; workers._serve({os.getpid()})"
        # A process group of its own: the terminal's Ctrl-C is the parent's to handle.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self.setup: bytes | None = setup

    def encode(self, rows: list[Row]) -> Chunk:
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
            ended = f"was killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with {code}"
            raise ValueError(
                f"a process that tokenises {ended} while it had {_span(rows)}; set data.num_workers lower "
                "(1 tokenises in the process that trains)"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result

    def stopped(self) -> str:
        with contextlib.suppress(OSError):  # it is gone, or the system has no such folder
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][:1]
            if state in ("T", "t"):
                return f"process {self.process.pid}, which was stopped (SIGSTOP),"
        return ""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()  # its sign to leave
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Ends the process; the thread that waits for it is told by its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _pickled(rows: list[Row]) -> bytes:
    try:
        return pickle.dumps(rows)
    except Exception:  # rows of a list may hold anything; what no pickle takes costs its row
        return pickle.dumps([row if isinstance(attempt(pickle.dumps, row), bytes) else _unsent(row) for row in rows])


def _unsent(row: Row) -> Row:
    return dataclasses.replace(row, value=None, error="it holds objects that cannot be sent to another process")


def _serve(parent: int) -> None:
    """Answers requests until there are no more, or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the replies
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has all it wants
        tokenizer, options = pickle.load(requests)
        encoder = RowEncoder(tokenizer, **options)
        while True:
            rows = pickle.load(requests)
            try:
                result: Chunk | Exception = encode_chunk(encoder, rows)
            except Exception as error:  # told to the parent, which raises it
                result = ValueError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            pickle.dump(result, replies)
            replies.flush()


def _leave_with(parent: int) -> None:
    """A process that hangs in a template reads no end of its input; it leaves when its parent has."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
