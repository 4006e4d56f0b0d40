"""Rows to tokens in chunks, in this process or in several.

The processes are started as commands of their own and fed through pipes. Nothing is forked (JAX may already
run here), and the caller's main module is not imported again, as multiprocessing's spawn would do: a training
script need not guard its main code.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.train.data.formats import RowError, normalize
from jaxtune.train.data.reading import Row
from jaxtune.train.data.templates import Encoded, RowEncoder

ROWS_PER_CHUNK = 512
MANY_ROWS = 16_384  # from here on, processes are worth the seconds that they take to start
FEW_CPUS = 3  # on so few, one process does as well: the tokenizer's own threads use them
MOST_PROCESSES = 16


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents of some rows, flat, and what became of the rest.

    tokens: int32[total]. mask: uint8[total]. lengths, trained: int64[n]. origins: (file, line) of each document.
    problems: (place, reason) of each bad row. untrained: places of rows without a trained token.
    responses, ended: counts, see `templates.Encoded`.
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


def encode_chunk(encoder: RowEncoder, rows: list[Row]) -> Chunk:
    """Normalises, renders and tokenises some rows."""
    outcome: list[Any] = []  # per row: Example, or RowError
    for row in rows:
        try:
            outcome.append(RowError(row.error) if row.value is None else normalize(row.value, row.format))
        except RowError as error:
            outcome.append(error)
    encoded = iter(encoder.encode([example for example in outcome if not isinstance(example, RowError)]))
    documents: list[Encoded] = []
    origins, problems, untrained = [], [], []
    for row, example in zip(rows, outcome, strict=True):
        result = example if isinstance(example, RowError) else next(encoded)
        place = f"{row.file}:{row.number}"
        if isinstance(result, RowError):
            problems.append((place, str(result)))
        elif not result.mask[1:].any():
            untrained.append(place)
        else:
            documents.append(result)
            origins.append((row.file, row.number))
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
    )


def encode_rows(
    rows: Iterable[Row], tokenizer: Any, options: dict[str, Any], num_workers: int | None = None
) -> Iterator[Chunk]:
    """Chunks of all rows, in order.

    Args:
        rows: from `reading.read_rows`.
        tokenizer: a fast Hugging Face tokenizer.
        options: keyword arguments of `RowEncoder`.
        num_workers: processes; None decides by the number of rows and of CPUs, 1 stays in this process.
    """
    encoder = RowEncoder(tokenizer, **options)  # here too, so that a wrong option is an error before any process
    chunks = _chunks(rows)
    if num_workers is None:
        first = list(itertools.islice(chunks, MANY_ROWS // ROWS_PER_CHUNK + 1))
        chunks = itertools.chain(first, chunks)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        many = cpus > FEW_CPUS and len(first) * ROWS_PER_CHUNK > MANY_ROWS
        num_workers = min(cpus, MOST_PROCESSES) if many else 0
    if num_workers < 2:
        return (encode_chunk(encoder, chunk) for chunk in chunks)
    return _encode_in_processes(chunks, tokenizer, options, num_workers)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, ROWS_PER_CHUNK)):
        yield chunk


def _encode_in_processes(
    chunks: Iterable[list[Row]], tokenizer: Any, options: dict[str, Any], count: int
) -> Iterator[Chunk]:
    setup = pickle.dumps((tokenizer, options))
    with contextlib.ExitStack() as stack:
        idle: queue.Queue[_Process] = queue.Queue()
        for _ in range(count):
            process = _Process(setup)
            stack.callback(process.close)
            idle.put(process)
        pool = concurrent.futures.ThreadPoolExecutor(count)
        stack.callback(pool.shutdown, cancel_futures=True)  # before the processes close: at most a chunk each

        def work(chunk: list[Row]) -> Chunk:
            process = idle.get()
            try:
                return process.encode(chunk)
            finally:
                idle.put(process)

        waiting: collections.deque[concurrent.futures.Future[Chunk]] = collections.deque()
        for chunk in chunks:
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Process:
    """One worker: pickles of chunks go in, pickles of results come out."""

    def __init__(self, setup: bytes):
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-P", "-c", "from jaxtune.train.data import workers; workers._serve()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.setup: bytes | None = setup

    def encode(self, rows: list[Row]) -> Chunk:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            if self.setup is not None:
                stdin.write(self.setup)
                self.setup = None
            pickle.dump(rows, stdin)
            stdin.flush()
            result = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
            raise RuntimeError(
                f"a data worker ended with code {code} (killed for memory?); data.num_workers: 1 works in this process"
            ) from None
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.communicate()  # closes its input, which is its sign to leave


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the replies
    tokenizer, options = pickle.load(requests)
    encoder = RowEncoder(tokenizer, **options)
    while True:
        try:
            rows = pickle.load(requests)
        except EOFError:
            return
        try:
            result: Chunk | Exception = encode_chunk(encoder, rows)
        except Exception as error:  # told to the parent, which raises it
            result = error
        pickle.dump(result, replies)
        replies.flush()
