"""Tokenises rows in chunks (`encode_rows`; `encode_chunk` makes one `Chunk`). Each `_Worker` is a thread of this
process with an `_Encoder`: `_InProcess` tokenises in that thread, `_Process` in a process that it starts (`_serve`).
The processes are started as separate commands and receive their work through pipes. Nothing is forked, because JAX may
already be running here. The caller's main module is not imported again, as multiprocessing's spawn would do, so a
training script need not guard its main code.

The caller can interrupt the work at any time, because its wait wakes several times a second. On an interrupt, or when a
chunk takes far too long (a template is a program, and may loop), a `_Process` kills its process, and an `_InProcess`
raises SystemExit in its thread, so that the thread exits.
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
from jaxtune.system.waiting import SILENT_SECONDS
from jaxtune.train.data.formats import (
    LABELLED,
    PREFERENCE,
    Example,
    normalize,
    normalize_labelled,
    normalize_pair,
    unread,
)
from jaxtune.train.data.row_errors import RowError, attempt
from jaxtune.train.data.row_files import Row
from jaxtune.train.data.templates import Encoded, RowEncoder

logger = logging.getLogger(__name__)

# A chunk is complete when it has one of these numbers of rows or characters.
ROWS_PER_CHUNK = 512
CHARACTERS_PER_CHUNK = 8 * 2**20
MANY_ROWS = 16_384  # from this number of rows on, processes save more time than they take to start
FEW_CPUS = 3  # up to this number of CPUs, one process is as fast, because the tokenizer's own threads use them
MOST_PROCESSES = 16
POLL_SECONDS = 0.2  # the time between two calls of `poll`
# A chunk is taken to be stuck after PATIENCE_SECONDS, and one second more for every CHARACTERS_PER_SECOND characters.
# The slowest rows seen take a second for 200,000 characters.
PATIENCE_SECONDS = 600.0
CHARACTERS_PER_SECOND = 10_000
# The most that one poll counts as waiting time. A poll takes longer if this process itself was stopped (Ctrl-Z), and
# that time does not count.
MOST_POLL_SECONDS = 2.0
REASON_CHARACTERS = 500  # the most of a bad row's reason that is kept; a message may quote columns of any length


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents made from a chunk of rows (what one worker tokenises at a time), in flat arrays, and lists of rows
    that made none or are warned about. A document is the token ids of one example. A place is the text `file:line` of a
    row, for messages."""

    rows: int
    """The number of rows in the chunk, bad ones included."""
    tokens: np.ndarray
    """int32[total]: the token ids of all documents, one document after another."""
    mask: np.ndarray
    """uint8[total]: 1 where the token is trained on."""
    lengths: np.ndarray
    """int64[n]: the number of tokens of each document."""
    trained: np.ndarray
    """int64[n]: the number of trained tokens of each document, without its first token, which nothing predicts."""
    origins: list[tuple[str, int]]
    """The (file, line) of each document."""
    problems: list[tuple[str, str]]
    """The (place, reason) of each row that cannot be used."""
    untrained: list[str]
    """The places of rows without a trained token after the first (of pairs: in either document); they give none."""
    responses: int
    """The number of responses in the documents."""
    ended: int
    """The number of responses whose trained tokens include one that ends the turn, or that were cut before it."""
    special: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(place, the token or marker) of each row whose messages contain a special token or a marker string as text."""
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(place, what is left out, in words) of each row of whose conversation the template does not write everything."""
    masked: int = 0
    """The number of response tokens that are not trained on because the option `mask_spans` excludes them."""
    cut: int = 0
    """The number of documents of which only the beginning was tokenised."""
    unread: list[str] = dataclasses.field(default_factory=list)
    """The names, each once, of columns in which any row has a value and which its format does not use, and of keys of
    messages that only a template may read."""


# The document of the answer that a labelled row does not have.
_NO_ANSWER = Encoded(np.zeros(0, np.int32), np.zeros(0, bool), 0, 0)


def encode_chunk(encoder: RowEncoder, rows: list[Row]) -> Chunk:
    """Renders and tokenises rows with `encoder`, a worker's task, and returns their chunk. A row that cannot be used,
    or has no trained token after its first, gives no document and is listed with its place. One of a preference format
    gives two, chosen and rejected (empty for the answer that a labelled row lacks). Raises SetupError as `encode`."""
    outcome = [attempt(_examples, row) for row in rows]
    examples = [one for found in outcome if not isinstance(found, RowError) for one in found if one]
    encoded = iter(encoder.encode(examples))
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
        if row.format == PREFERENCE and encoder.train_on == "completion":
            results = outcomes = _begun_alike(results)
        masked += sum(result.masked for result in results)
        if whose := next((result.special for result in results if result.special), ""):
            special.append((place, printable(whose)))
        if what := next((result.left_out for result in results if result.left_out), ""):
            left_out.append((place, printable(what)))
        if not all(result.mask[1:].any() for result in results):
            untrained.append(place)
        else:
            documents += [result if isinstance(result, Encoded) else _NO_ANSWER for result in outcomes]
            origins += [(row.file, row.number)] * len(outcomes)
    columns = [name for row in rows if row.value for name in unread(row.value, row.format)]
    keys = [name for example in examples for name in example.unknown]
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
        unread=list(dict.fromkeys([*columns, *keys])),
    )


def _begun_alike(pair: list[Encoded]) -> list[Encoded]:
    """Both answers of a pair, of which the completion begins where that of either does, as in TRL."""
    firsts = [int(np.argmax(one.mask)) for one in pair if one.mask.any()]
    begun = []
    for one in pair:
        mask = one.mask.copy()
        if mask.any():
            mask[min(firsts) : int(np.argmax(mask))] = True
        begun.append(dataclasses.replace(one, mask=mask))
    return begun


def _examples(row: Row) -> list[Example] | list[Example | None]:
    """Returns [the example of a row]; or [chosen, rejected], those of its two answers, if its format is PREFERENCE or
    LABELLED, with None for the answer that a labelled row does not have. Raises `RowError` if the row cannot be used.
    `encode_chunk` tokenises them."""
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
    """Tokenises rows, and yields the chunks of all of them in order, each as soon as it is made. `dataset.prepare`
    stores them in the token cache, or in memory if they are not cached.

    Args:
        rows: from `reading.read_rows`.
        tokenizer: a fast Hugging Face tokenizer.
        options: keyword arguments of `RowEncoder`.
        num_workers: the number of processes. With 0 or 1, or a tokenizer that cannot be pickled (a line says so), a
            thread does it. None: a process for each CPU, at most 16, if there are both more than 3 CPUs and more than
            32 chunks (16,384 rows, fewer if they are long), which are read ahead to see it, else a thread.
        poll: called several times a second; what it raises ends the work at once and passes through.

    Raises:
        ValueError: an option is wrong, the encoder can use no row, a process was killed, or a chunk takes too long.
    """
    encoder = RowEncoder(tokenizer, **options)  # made here too, so that a wrong option raises before processes start
    chunks = _chunks(rows)
    if num_workers is None:
        first = list(itertools.islice(chunks, MANY_ROWS // ROWS_PER_CHUNK + 1))
        chunks = itertools.chain(first, chunks)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        many = cpus > FEW_CPUS and len(first) * ROWS_PER_CHUNK > MANY_ROWS
        num_workers = min(cpus, MOST_PROCESSES) if many else 1
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


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields the rows in chunks, what a worker tokenises at a time: lists of 512 rows (`ROWS_PER_CHUNK`) or, if they
    reach that first, of about 8 Mi characters (`CHARACTERS_PER_CHUNK`); the last one may be smaller."""
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
    """The interface of what tokenises chunks of rows, in this process (`_InProcess`) or another (`_Process`). `encode`
    is called in a `_Worker` thread, and the other methods in the thread that waits for chunks."""

    def encode(self, rows: list[Row]) -> Chunk:
        """Tokenises some rows and returns their chunk; blocks until it is made. Raises what the tokenising raised."""
        ...

    def stopped(self) -> str:
        """If the encoder's process was stopped by a signal such as SIGSTOP, and therefore makes no progress: the name
        of that process in words, for a warning and an error of `_wait_for`. Otherwise ""."""
        ...

    def close(self) -> None:
        """Ends the encoder when all chunks are done and it is idle."""
        ...

    def kill(self) -> None:
        """Ends the encoder at once, even while it is working on a chunk, after an error or an interrupt."""
        ...


class _Worker(threading.Thread):
    """A daemon thread that takes (rows, future) from the queue `tasks` and sets the future to the chunk that `encoder`
    makes of the rows, or to its error, until it takes None. It is started at once. `_encode` makes them."""

    def __init__(self, encoder: _Encoder, tasks: queue.SimpleQueue):
        super().__init__(name="tokenising", daemon=True)
        self.encoder = encoder
        self.tasks = tasks
        self.start()

    def run(self) -> None:
        """The thread's main function: takes tasks from the queue until it takes None, and sets the future of each."""
        while (task := self.tasks.get()) is not None:
            rows, future = task
            try:
                future.set_result(self.encoder.encode(rows))
            except BaseException as error:  # `_wait_for` raises it
                future.set_exception(error)


def _encode(
    chunks: Iterable[list[Row]], count: int, make: Callable[[], _Encoder], poll: Callable[[], None]
) -> Iterator[Chunk]:
    """Tokenises chunks of rows with several workers at a time, and yields the results in the order of the chunks.

    Args:
        chunks: chunks of rows, of which at most 2 x `count` + 1 are taken ahead, to limit the memory.
        count: the most workers, each a thread with an encoder of its own; no more are made than there are chunks.
        make: makes the encoder of one worker, which is closed after the last chunk, or killed if the work ends before.
        poll: called for each chunk, and several times a second while one is waited for; what it raises ends the work.
    """
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
    """Waits for the result of one chunk and returns it, and calls `poll` meanwhile.

    Args:
        rows: the rows of the chunk, for messages and to decide how long to wait.
        future: the chunk's future, which a worker sets.
        workers: all workers, to warn if the process of one was stopped by a signal.
        poll: called several times a second; an exception that it raises passes through.

    Raises:
        ValueError: the chunk takes more than 600 s plus 1 s per 10,000 characters; also what its encoder raised. Time
            in which this process itself was stopped does not count.
    """
    size = sum(row.size for row in rows)
    patience = PATIENCE_SECONDS + size / CHARACTERS_PER_SECOND
    waited, last, reported, said = 0.0, time.monotonic(), "", False
    while not future.done():
        concurrent.futures.wait([future], POLL_SECONDS)
        poll()
        now = time.monotonic()
        waited, last = waited + min(now - last, MOST_POLL_SECONDS), now
        stopped = next((words for worker in workers if (words := worker.encoder.stopped())), "")
        if stopped and stopped != reported:
            logger.warning("%s makes no progress, and this run waits for it: kill -CONT continues it", stopped)
        reported = stopped or reported
        if rows and waited > SILENT_SECONDS and not said:
            said = True
            logger.warning("waiting for %s to be tokenised, for %.0f s now", _span(rows), waited)
        if waited > patience and not future.done():
            if stopped:
                raise ValueError(
                    f"{stopped} has not continued for {patience:,.0f} s, and has {_span(rows)} to tokenise"
                )
            raise ValueError(
                f"tokenising {_span(rows)} has taken more than {patience:,.0f} s for {size:,} characters: the chat "
                "template may loop on one of these rows; look for it with data.max_rows, or set another data.template"
            )
    return future.result()


def _span(rows: list[Row]) -> str:
    """The places (`file:line`) of the first and the last of `rows`, at least one, for messages: "rows.jsonl:1 to
    rows.jsonl:512"; of a single row, its place."""
    first, last = (printable(row.place) for row in (rows[0], rows[-1]))
    return first if len(rows) == 1 else f"{first} to {last}"


class _InProcess:
    """The `_Encoder` that tokenises with `encoder` in this process: for one worker, or a tokenizer that cannot be
    pickled. Its attribute `thread` is the id of the thread that encodes, by which `kill` ends it, or None."""

    def __init__(self, encoder: RowEncoder):
        self.encoder = encoder
        self.thread: int | None = None

    def encode(self, rows: list[Row]) -> Chunk:
        """Tokenises some rows in the calling thread and returns their chunk; `kill` can end it."""
        self.thread = threading.get_ident()
        try:
            return encode_chunk(self.encoder, rows)
        finally:
            self.thread = None

    def stopped(self) -> str:
        """Returns "": no signal such as SIGSTOP has stopped the process that asks."""
        return ""

    def close(self) -> None:
        """Does nothing: there is no process to end."""

    def kill(self) -> None:
        """Raises SystemExit in the encoding thread, if any, at its next Python instruction: it ends an endless loop."""
        if (thread := self.thread) is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


class _Process:
    """The `_Encoder` that tokenises in another process, which it starts. It sends pickled rows to the stdin of that
    process and reads pickled chunks or errors from its stdout. setup: the pickled (tokenizer, keyword arguments of
    RowEncoder), which is sent before the first rows."""

    def __init__(self, setup: bytes):
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
        environment |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}  # the parent has shown them already
        code = f"from jaxtune.train.data import workers; workers._serve({os.getpid()})"
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
        """Sends rows to the process and waits for their chunk. Raises ValueError if tokenising raised an error there,
        whose text it has, or if the process ended or was killed."""
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
        """The process in words for a warning, if a signal stopped it (state T in /proc); "" if it runs, or if there is
        no /proc."""
        with contextlib.suppress(OSError):  # the process has ended, or the system has no /proc
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][:1]
            if state in ("T", "t"):
                return f"process {self.process.pid}, which was stopped (SIGSTOP),"
        return ""

    def close(self) -> None:
        """Ends the process by closing its input, and kills it if it does not end within 10 s."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()  # makes the process leave
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Kills the process and closes its pipes. A thread that waits for its answer wakes with an error."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _pickled(rows: list[Row]) -> bytes:
    """The pickle of `rows`, which is sent to a tokenising process. A row with objects that cannot be pickled is sent
    as a bad row, so that it is counted as one and the other rows are used."""
    try:
        return pickle.dumps(rows)
    except Exception:  # rows that a script gives as a list may have any objects
        return pickle.dumps([row if isinstance(attempt(pickle.dumps, row), bytes) else _unsent(row) for row in rows])


def _unsent(row: Row) -> Row:
    """Returns a bad row (without columns, with the reason) to be sent instead of `row`, which cannot be pickled."""
    return dataclasses.replace(row, value=None, error="it holds objects that cannot be sent to another process")


def _serve(parent: int) -> None:
    """The main function of a tokenising process: reads the setup and chunks of rows from stdin, and writes a chunk or
    an error to stdout for each, until stdin ends or the parent process is gone. parent: the parent's process id."""
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
    """Ends this process, with exit code 1, when the process `parent` (its id) is no longer its parent; it runs in a
    thread of a tokenising process and looks once a second. A process that loops in a template would not notice the end
    of its input."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
