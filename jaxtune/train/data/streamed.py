"""Streams: rows that are read during the run, from files too large to be tokenised before it or from data sets that
come over a network.

A stream is a list of shards (`reading.Source`), read one after another in an order drawn for the epoch, a window of
rows at a time. A window is tokenised and packed like a small data set, and its packed rows are used in an order drawn
for the window, while a thread makes the next one. Every process of a run reads and tokenises all of the stream, so that
the rows of a step depend neither on the number of devices nor on that of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxtune.system import lifetimes
from jaxtune.system.terminal import printable
from jaxtune.train.data.batches import ORDERS, Batch, Json, Order, Rows
from jaxtune.train.data.packing import NothingUsable
from jaxtune.train.data.reading import Source, Window
from jaxtune.train.data.row_files import Row

if TYPE_CHECKING:
    from jaxtune.train.data.dataset import TokenDataset

WINDOW_CHARACTERS = 64 * 2**20  # a window ends when it has this many characters, even with fewer than buffer_size rows
MOST_NAMED_SHARDS = 1_000  # up to this number, checkpoints have a fingerprint of each shard; above it, one of all
_ENDING_SECONDS = 5.0  # for a thread to end the row that it reads
_LEAST_DOCUMENTS = 8  # batches have room for at least this many documents in a packed row
_SAMPLES, _SAMPLE_BYTES = 16, 4_096  # how many pieces of a file its fingerprint reads, and the bytes of each


@dataclasses.dataclass(frozen=True)
class _Place:
    """A position between two rows of a stream. Windows begin and end at such positions."""

    epoch: int = 0
    """The number of the epoch, from 0."""
    shard: int = 0
    """The index of the shard in the order of that epoch."""
    row: int = 0
    """`Row.number` of the last row of that shard before the position; 0 is the beginning of the shard."""


@dataclasses.dataclass(frozen=True)
class _TokenisedWindow:
    """The packed rows of a window, the rows that are tokenised and packed at a time."""

    begin: _Place
    """The position before its first row."""
    end: _Place
    """The position after its last row."""
    number: int
    """The number of the window in the run, from 0."""
    rows: Rows
    """Its packed rows."""
    order: np.ndarray
    """int64[n]: the order in which the packed rows are used."""


class StreamedRows:
    """A stream as a set of rows (`feeds.RowSet`) that is read during the run, a window of rows at a time.

    The constructor reads and tokenises a first window, with the shards in the order given: `first`, a data set that
    shows whether the rows can be used, and how many documents fit into a packed row. The feed reads its rows again.

    Args:
        name: the name of the stream in messages.
        sources: its shards, from `reading.open_sources`.
        prepare: tokenises a Window and returns it as a data set, or raises `NothingUsable` if none of it can be trained
            on. The thread of the feed calls it too.
        buffer_size: the most rows of a window. One that reaches 64 Mi characters (`WINDOW_CHARACTERS`) or the end of an
            epoch has fewer.
        order: "shuffled" draws an order of the shards for each epoch and one of the packed rows for each window;
            "given" keeps both as they are.

    Raises:
        ValueError: a shard cannot be read, or only as a whole (a JSON array); or no row of the first window can be
            trained on, or `prepare` refuses it.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        prepare: Callable[[Window], TokenDataset],
        buffer_size: int,
        order: Order = "shuffled",
    ):
        for source in sources:
            if not source.streams:
                raise ValueError(
                    f"{source.name}: a JSON array is read whole and cannot be streamed; write a row a line (.jsonl) or "
                    "Parquet, or set data.streaming: false"
                )
        self.name, self.sources, self._prepare = name, tuple(sources), prepare
        self.buffer_size, self.order = buffer_size, order
        self._fingerprints = {s.name: _file_fingerprint(s.file) for s in sources if s.file is not None}
        self._counts = {"rows": 0, "bad": 0}
        self._news: list[str] = []
        self._lock = threading.Lock()
        rows, size = [], 0
        for row in (row for source in sources for row in self.read(source, 0)):
            rows.append(row)
            size += row.size
            if len(rows) == buffer_size or size >= WINDOW_CHARACTERS:
                break
        self.first = prepare(Window(name, rows, part=False))
        per_row = self.first.rows.max_documents
        self._max_documents = per_row if self.first.packing is not True else max(2 * per_row, _LEAST_DOCUMENTS)
        self._first_rows = len(rows)

    @property
    def length(self) -> int:
        """The number of tokens in a row, padding included, the data.length of the run; FedBatches makes batches with
        rows of this length."""
        return self.first.length

    @property
    def max_documents(self) -> int:
        """The most documents that a packed row may have, for which batches have room. If documents are packed, it is
        twice the most of the first window, and at least 8 (`_LEAST_DOCUMENTS`), because later windows may have shorter
        documents; otherwise it is that of the first window. `with_max_documents` changes it. Later windows are packed
        with at most as many documents in a row."""
        return self._max_documents

    def with_max_documents(self, documents: int) -> StreamedRows:
        """The same stream, changed in place, with room for `documents` documents in a row, a number not below
        `max_documents`. FedBatches always calls it, also for a single set, so that the batches of all sets of a mixture
        and of all windows have equal shapes: before it, `empty` has room only for the most of the first window."""
        self._max_documents = documents
        self.first = self.first.with_max_documents(documents)
        return self

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, each as long as the stream's rows, as new numpy arrays, into which
        FedBatches writes the rows of a step (RowSet.empty)."""
        return self.first.rows.empty(rows)

    def feed(self, seed: int, position: Json) -> StreamFeed:
        """The rows from `position` on, which `StreamFeed.position` returned in the run that is resumed; None: from the
        first row. seed: decides the order of shards and rows."""
        return StreamFeed(self, seed, position)

    def identity(self) -> dict[str, Json]:
        """Values that identify the stream, by name: the buffer size, a checksum of the first window's tokens, and the
        shards: {path: fingerprint}, with paths relative to their common folder; above 1,000 files
        (`MOST_NAMED_SHARDS`), the number of shards and one digest of all these paths and fingerprints; for shards that
        are no files, their number. A run does not resume with other values."""
        known: dict[str, Json] = {
            "buffer_size": self.buffer_size,
            "first_tokens_crc32": self.first.documents.tokens_crc32,
            **({} if self.order == "shuffled" else {"order": self.order}),
        }
        root = os.path.commonpath([os.path.dirname(name) for name in self._fingerprints]) if self._fingerprints else ""
        shards: dict[str, Json] = {os.path.relpath(name, root): mark for name, mark in self._fingerprints.items()}
        if len(shards) > MOST_NAMED_SHARDS:
            text = "\n".join(f"{name} {fingerprint}" for name, fingerprint in shards.items())
            return {**known, "shards": len(self.sources), "shards_digest": _digest(text.encode())}
        return {**known, "shards": shards or len(self.sources)}

    def described(self) -> str:
        """The stream in words: its name, its number of shards (files, or parts of a data set), and the counts of the
        first window, the rows that were read before the run. FedBatches puts it into the lines that are shown before
        the run."""
        shards = "1 shard" if len(self.sources) == 1 else f"{len(self.sources):,} shards"
        return f"{self.name}, a stream of {shards}; its first {self._first_rows:,} rows give {self.first.report}"

    def warnings(self) -> list[str]:
        """Warnings about the rows of the first window, the only ones that are read before the run, such as documents
        that packing dropped, one sentence each; [] if there are none. What is found in later windows comes by
        `news`."""
        return self.first.warnings()

    def news(self) -> list[str]:
        """Sentences about bad rows and finished epochs since the last call, which the run prints after a step. The
        threads of the feeds add them. If nothing of a window can be trained on, all its rows count as bad."""
        with self._lock:
            news, self._news = self._news, []
        return news

    # ---- used by its feeds

    def read(self, source: Source, after: int, epoch: int = 0) -> Iterator[Row]:
        """Yields the rows of a shard whose number is above `after`, in pass `epoch` over the stream. The fingerprint of
        a file is compared first, so that no run mixes two versions of it.

        Raises:
            ValueError: the shard is missing, has changed since this object was made, or cannot be read.
        """
        if self.order == "given" and source.set_epoch is not None:
            source.set_epoch(epoch)
        known = self._fingerprints.get(source.name)
        try:
            if source.file is not None and _file_fingerprint(source.file) != known:
                raise ValueError(
                    f"{source.name}: the file has changed since the run began, so that its rows are not those of the "
                    "run; put the old one back, or begin a new run in another output"
                )
            yield from source.read(after)
        except OSError as error:
            raise ValueError(
                f"{source.name}: cannot be read ({error.strerror or error}); when it is there again, the same command "
                "continues from the last checkpoint"
            ) from None

    def tokenised(self, begin: _Place, end: _Place, number: int, rows: list[Row], key: int) -> _TokenisedWindow | None:
        """Tokenises and packs a window, and counts its rows for the sentences of `news`. Returns None if nothing of it
        can be trained on. The feeds call it in their threads.

        Args:
            begin, end: the positions before its first row and after its last one.
            number: the number of the window in the run, from 0.
            rows: the rows of the window, at least one.
            key: the seed of the feed, from which, with `number`, the order of the packed rows is drawn.

        Raises:
            ValueError: its batches have other `extra` arrays than those of the first window, or `prepare` refuses it by
                another error than `NothingUsable`.
        """
        try:
            made = self._prepare(Window(self.name, rows)).with_max_documents(self._max_documents)
            packed = made.rows
        except NothingUsable as error:
            self._count(len(rows), len(rows), str(error))
            return None
        if (found := {*packed.empty(1).extra}) != (known := {*self.empty(1).extra}):
            raise ValueError(
                f"{rows[0].place} and the rows after it: a batch of them has {sorted(found)}, and one of the first "
                f"rows {sorted(known)}: give a column such as margin to all rows, or to none"
            )
        self._count(len(rows), made.summary.bad_rows, *made.summary.offenders[:1])
        return _TokenisedWindow(begin, end, number, packed, ORDERS[self.order](len(packed), key, number))

    def _count(self, rows: int, bad: int, lately: str = "") -> None:
        """Adds a window's rows to the counts, and a sentence to `news` if some are left out; `tokenised` calls it for
        each window. rows, bad: the numbers of its rows, and of those left out. lately: one of the latter, or why all of
        them are."""
        with self._lock:
            self._counts["rows"] += rows
            self._counts["bad"] += bad
            if bad:
                counts = f"{self._counts['bad']:,} of {self._counts['rows']:,}"
                self._news.append(f"{self.name}: {counts} rows left out as bad so far, lately {lately}")

    def note_epoch(self, epoch: int) -> None:
        """Adds to `news` that every row was read `epoch` times."""
        with self._lock:
            order = "in another order" if self.order == "shuffled" else "in the same order"
            self._news.append(f"{self.name}: every row was read {epoch} times; it begins anew {order}")


def _end_threads(closed: threading.Event, threads: list[threading.Thread]) -> None:
    closed.set()
    for thread in threads:
        thread.join(_ENDING_SECONDS)


class StreamFeed:
    """The packed rows of a stream, without end (`feeds.Feed`). A thread makes the next window while the rows of the
    current one are taken.

    Args:
      stream: the stream.
      key: the seed of the orders of shards and rows.
      position: what `position` returned in the run that is resumed, or None.
    """

    def __init__(self, stream: StreamedRows, key: int, position: Json):
        self._stream, self._key = stream, key
        begin, self._start, self._number, self._taken = _Place(), position, 0, 0
        if isinstance(position, dict):
            epoch, shard, row, self._number, self._taken = (
                int(str(position[name])) for name in ("epoch", "shard", "row", "window", "taken")
            )
            begin = _Place(epoch, shard, row)
        self._closed = threading.Event()
        self._rows = self._read(begin)
        self._end = begin  # the end of the window that was made last
        self._window: _TokenisedWindow | None = None
        self._threads: list[threading.Thread] = []  # the last one
        self._close = lifetimes.ends(self, _end_threads, self._closed, self._threads)
        self._loading = self._load()

    def next(self) -> tuple[Rows, int]:
        """(rows, index): the next row is row `index` of `rows`, the packed rows of a window. Waits if the next window
        is not made yet, and raises the error of the thread that makes it, such as ValueError if a shard cannot be read
        or no row of a whole epoch can be trained on."""
        while self._window is None or self._taken >= len(self._window.order):
            if self._window is not None:
                self._taken = 0
            self._window = self._loading.result()
            self._loading = self._load()
        row = int(self._window.order[self._taken])
        self._taken += 1
        return self._window.rows, row

    def position(self) -> Json:
        """Where to continue, for a checkpoint: the place at which the current window begins, its number, and how many
        of its packed rows were taken: {"epoch", "shard", "row", "window", "taken"}. Before the first row is taken, it
        is the position that the feed was made with."""
        if self._window is None:  # no row was taken yet
            return self._start
        begin = dataclasses.asdict(self._window.begin)
        return {**begin, "window": self._window.number, "taken": self._taken}

    def close(self) -> None:
        """Makes the thread that makes windows stop at the next row that it reads, and waits for that some seconds."""
        self._close()

    def _load(self) -> Future[_TokenisedWindow]:
        """Starts a daemon thread that makes the next window, and returns its future, which also takes the thread's
        error."""
        future: Future[_TokenisedWindow] = Future()

        def work() -> None:
            """The thread's main function: makes the window and sets the future to it, or to the error."""
            try:
                future.set_result(self._make())
            except BaseException as error:  # `next` raises it
                future.set_exception(error)

        self._threads[:] = [threading.Thread(target=work, name="stream", daemon=True)]
        self._threads[0].start()
        return future

    def _make(self) -> _TokenisedWindow:
        """Reads and tokenises windows, starting after the last row that was read, until one has rows that can be
        trained on, and returns it. It runs in the thread of `_load`. Raises ValueError if a shard cannot be read, if a
        window is refused (`StreamedRows.tokenised`), if a whole epoch has no such rows, or after `close`."""
        epoch = self._end.epoch
        while True:
            rows, begin, size = [], self._end, 0
            for place, row in self._rows:
                if self._closed.is_set():
                    raise ValueError(f"{self._stream.name}: the run has ended")
                self._end = place
                if row is None:
                    break
                rows.append(row)
                size += row.size
                if len(rows) == self._stream.buffer_size or size >= WINDOW_CHARACTERS:
                    break
            number, self._number = self._number, self._number + 1
            window = self._stream.tokenised(begin, self._end, number, rows, self._key) if rows else None
            if window is not None:
                return window
            if self._end.epoch > epoch + 1:
                raise ValueError(f"{self._stream.name}: no row can be trained on in a whole pass over the stream")

    def _read(self, begin: _Place) -> Iterator[tuple[_Place, Row | None]]:
        """Yields (the position after the row, the row) for each row after `begin`, over endless epochs, and at the end
        of each (the beginning of the next one, None), so that no window has rows of two epochs."""
        sources = self._stream.sources
        while True:
            order = ORDERS[self._stream.order](len(sources), self._key, begin.epoch)
            for index in range(begin.shard, len(order)):
                source = sources[order[index]]
                for row in self._stream.read(source, begin.row if index == begin.shard else 0, begin.epoch):
                    yield _Place(begin.epoch, index, row.number), row
            begin = _Place(begin.epoch + 1)
            self._stream.note_epoch(begin.epoch)
            yield begin, None


def _file_fingerprint(file: Path) -> str:
    """A string by which a changed file is recognised during a run and when it is resumed: its size, and a digest of 17
    samples of 4 KiB spread over it. Reading the whole file would take too long, so a change outside the samples that
    keeps the size is not noticed.

    Raises:
        ValueError: the file is missing or cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            pieces = []
            for index in range(_SAMPLES + 1):
                stream.seek(max(0, size - _SAMPLE_BYTES) * index // _SAMPLES)
                pieces.append(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ValueError(
            f"{file}: a shard of the stream cannot be read ({printable(error.strerror or error)}); when it is there "
            "again, the same command continues from the last checkpoint"
        ) from None
    return f"{size} bytes {_digest(b''.join(pieces))}"


def _digest(data: bytes) -> str:
    """A hash of `data`, 16 hex digits, for the fingerprint of one shard and for that of a long list of shards."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
