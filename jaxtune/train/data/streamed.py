"""Rows that are read during the run: of files that are too large to be tokenised before it, or of data sets that come
over a network.

A stream is a list of shards (`reading.Source`), which are divided among the lanes: each has whole shards of its own,
and of shards that are left over it takes every `lanes`-th row. A lane reads its shards in an order of its epoch, a
window of rows at a time. A window is tokenised and packed as a small data set is, and its packed rows are given in an
order drawn by its number, while a thread makes the next window. So only two windows are in memory, and a checkpoint
records only where the window in use begins and how many of its rows were given. A resumed run reads that window again
and continues with the same row.
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

from jaxtune.system.terminal import printable
from jaxtune.train.data.batches import Batch, Json, Rows, epoch_order
from jaxtune.train.data.packing import NothingUsable
from jaxtune.train.data.reading import Source, Window
from jaxtune.train.data.row_files import Row

if TYPE_CHECKING:
    from jaxtune.train.data import TokenDataset

WINDOW_CHARACTERS = 64 * 2**20  # a window of long rows ends before it has as many rows as it may
MOST_NAMED_SHARDS = 1_000  # of which a checkpoint keeps a fingerprint each; more have one of all
_LEAST_DOCUMENTS = 8  # that a packed row may have, whatever the first window had
_SAMPLES, _SAMPLE_BYTES = 16, 4_096  # of a file, by which a change is noticed


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place in the rows of a lane: the rows of `epoch` after row number `row` of the shard that is number `shard` in
    the order of the epoch."""

    epoch: int = 0
    shard: int = 0
    row: int = 0


@dataclasses.dataclass(frozen=True)
class _Tokenised:
    """A window: where it begins and ends, its number, and its packed rows in the order in which they are given."""

    begin: _Place
    end: _Place
    number: int
    rows: Rows
    order: np.ndarray


class StreamedRows:
    """A stream as a set of rows; see `feeds.RowSet`.

    Args:
        name: of the stream, for messages.
        sources: its shards, from `reading.open_sources`.
        prepare: makes a data set of a Window.
        buffer_size: rows of a window.

    The first window is made at once, of the shards as they come: it shows whether the rows can be used, and how many
    documents share a row.

    Raises:
        ValueError: the rows cannot be used, or one of the shards cannot be read a part at a time.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        prepare: Callable[[Window], TokenDataset],
        buffer_size: int,
    ):
        for source in sources:
            if not source.streams:
                raise ValueError(
                    f"{source.name}: a JSON array is read whole and cannot be streamed; write a row a line (.jsonl) or "
                    "Parquet, or set data.streaming: false"
                )
        self.name, self.sources, self._prepare = name, tuple(sources), prepare
        self.buffer_size = buffer_size
        self._marks = {source.name: _mark(source.file) for source in sources if source.file is not None}
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
        self._most = per_row if self.first.packing is not True else max(2 * per_row, _LEAST_DOCUMENTS)
        self._first_rows = len(rows)

    @property
    def length(self) -> int:
        return self.first.length

    @property
    def max_documents(self) -> int:
        return self._most

    def with_most(self, documents: int) -> StreamedRows:
        self._most = documents
        self.first = self.first.with_most(documents)
        return self

    def empty(self, rows: int) -> Batch:
        return self.first.rows.empty(rows)

    def feed(self, lane: int, lanes: int, seed: int, position: Json) -> StreamFeed:
        return StreamFeed(self, lane, lanes, seed + (lane << 32), position)

    def identity(self) -> dict[str, Json]:
        known: dict[str, Json] = {
            "buffer_size": self.buffer_size,
            "first_tokens_crc32": self.first.documents.tokens_crc32,
        }
        root = os.path.commonpath([os.path.dirname(name) for name in self._marks]) if self._marks else ""
        marks: dict[str, Json] = {os.path.relpath(name, root): mark for name, mark in self._marks.items()}
        if len(marks) > MOST_NAMED_SHARDS:
            text = "\n".join(f"{name} {mark}" for name, mark in marks.items())
            return {**known, "shards": len(self.sources), "shards_digest": _digest(text.encode())}
        return {**known, "shards": marks or len(self.sources)}

    def described(self) -> str:
        shards = "1 shard" if len(self.sources) == 1 else f"{len(self.sources):,} shards"
        return f"{self.name}, a stream of {shards}; its first {self._first_rows:,} rows give {self.first.report}"

    def warnings(self) -> list[str]:
        return self.first.warnings()

    def news(self) -> list[str]:
        with self._lock:
            news, self._news = self._news, []
        return news

    # ---- what its feeds use

    def read(self, source: Source, after: int) -> Iterator[Row]:
        """The rows of a shard whose number is above `after`.

        Raises:
            ValueError: it is gone, has changed since the run began, or cannot be read.
        """
        known = self._marks.get(source.name)
        try:
            if source.file is not None and _mark(source.file) != known:
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

    def tokenised(self, begin: _Place, end: _Place, number: int, rows: list[Row], key: int) -> _Tokenised | None:
        """A window of rows; None where nothing of it can be trained on."""
        try:
            made = self._prepare(Window(self.name, rows)).with_most(self._most)
            packed = made.rows
        except NothingUsable:
            with self._lock:
                self._counts["rows"] += len(rows)
            return None
        if (found := {*packed.empty(1).extra}) != (known := {*self.empty(1).extra}):
            raise ValueError(
                f"{rows[0].place} and the rows after it: a batch of them has {sorted(found)}, and one of the first "
                f"rows {sorted(known)}: give a column such as margin to all rows, or to none"
            )
        with self._lock:
            self._counts["rows"] += len(rows)
            if made.summary.bad_rows:
                self._counts["bad"] += made.summary.bad_rows
                self._news.append(
                    f"{self.name}: {self._counts['bad']:,} of {self._counts['rows']:,} rows left out as bad so far, "
                    f"lately {made.summary.offenders[0]}"
                )
        return _Tokenised(begin, end, number, packed, epoch_order(len(packed), key, number))

    def tell_of_epoch(self, epoch: int, lane: int) -> None:
        """An epoch of a lane has ended."""
        with self._lock:
            of = "" if lane == 0 else f" by device {lane}"
            self._news.append(f"{self.name}: every row was read {epoch} times{of}; it begins anew in another order")


class StreamFeed:
    """The rows of a stream for one lane; see `feeds.Feed`."""

    def __init__(self, stream: StreamedRows, lane: int, lanes: int, key: int, position: Json):
        self._stream, self._lane, self._lanes, self._key = stream, lane, lanes, key
        whole = len(stream.sources) - len(stream.sources) % lanes
        self._shards = [(source, False) for source in stream.sources[lane:whole:lanes]]
        self._shards += [(source, lanes > 1) for source in stream.sources[whole:]]
        begin, self._start, self._number, self._taken = _Place(), position, 0, 0
        if isinstance(position, dict):
            epoch, shard, row, self._number, self._taken = (
                int(str(position[name])) for name in ("epoch", "shard", "row", "window", "taken")
            )
            begin = _Place(epoch, shard, row)
        self._closed = threading.Event()
        self._rows = self._read(begin)
        self._end = begin  # of the window that was made last
        self._window: _Tokenised | None = None
        self._loading = self._load()

    def next(self) -> tuple[Rows, int]:
        while self._window is None or self._taken >= len(self._window.order):
            if self._window is not None:
                self._taken = 0
            self._window = self._loading.result()
            self._loading = self._load()
        row = int(self._window.order[self._taken])
        self._taken += 1
        return self._window.rows, row

    def position(self) -> Json:
        if self._window is None:  # no row was given yet
            return self._start
        begin = dataclasses.asdict(self._window.begin)
        return {**begin, "window": self._window.number, "taken": self._taken}

    def close(self) -> None:
        self._closed.set()

    def _load(self) -> Future[_Tokenised]:
        """The next window, which a thread makes that does not keep the process alive."""
        future: Future[_Tokenised] = Future()

        def work() -> None:
            try:
                future.set_result(self._make())
            except BaseException as error:  # is raised where the window is needed
                future.set_exception(error)

        threading.Thread(target=work, name="stream", daemon=True).start()
        return future

    def _make(self) -> _Tokenised:
        """The next window of which something can be trained on."""
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
                raise ValueError(
                    f"{self._stream.name}: no row can be trained on in a whole pass over what device {self._lane} of "
                    f"{self._lanes} reads; there may be fewer rows than devices"
                )

    def _read(self, begin: _Place) -> Iterator[tuple[_Place, Row | None]]:
        """(the place after it, each row) from a place on; None in place of a row where an epoch ends, so that no window
        has rows of two."""
        while True:
            order = epoch_order(len(self._shards), self._key, begin.epoch)
            for index in range(begin.shard, len(order)):
                source, shared = self._shards[order[index]]
                for row in self._stream.read(source, begin.row if index == begin.shard else 0):
                    if not shared or row.number % self._lanes == self._lane:
                        yield _Place(begin.epoch, index, row.number), row
            begin = _Place(begin.epoch + 1)
            self._stream.tell_of_epoch(begin.epoch, self._lane)
            yield begin, None


def _mark(file: Path) -> str:
    """What a change of a file shows in: its size, and a digest of pieces all over it.

    Raises:
        ValueError: it is gone or cannot be read.
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
    return hashlib.blake2b(data, digest_size=8).hexdigest()
