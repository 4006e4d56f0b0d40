"""Streams: rows read during the run, from large files or over a network.

Shards are read in an order drawn for the epoch, a window of rows at a time. A window is tokenised and packed like a
small data set, and used in an order drawn for it, while a thread makes the next. Every process reads the whole stream,
so the rows of a step depend neither on devices nor on processes.
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
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.packing import NothingUsable
from jaxtune.train.data.rows.feeds import RowSet
from jaxtune.train.data.rows.reading import Source, Window
from jaxtune.train.data.rows.row_files import Row

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder

WINDOW_CHARACTERS = 64 * 2**20  # a window ends when it has this many characters, even with fewer than buffer_size rows
MOST_NAMED_SHARDS = 1_000  # up to this number, checkpoints have a fingerprint of each shard; above it, one of all
_ENDING_SECONDS = 5.0  # for a thread to end the row that it reads
_LEAST_DOCUMENTS = 8  # batches have room for at least this many documents in a packed row
_SAMPLES, _SAMPLE_BYTES = 16, 4_096  # how many pieces of a file its fingerprint reads, and the bytes of each


@dataclasses.dataclass(frozen=True)
class _Place:
    """A position between two rows of a stream."""

    epoch: int = 0
    shard: int = 0
    """Index in the epoch's order."""
    row: int = 0
    """`Row.number` of the last row before the position; 0: the shard's beginning."""


@dataclasses.dataclass(frozen=True)
class _TokenisedWindow:
    """A window's packed rows."""

    begin: _Place
    end: _Place
    number: int
    rows: Rows
    order: np.ndarray
    """int64[n]: of using the packed rows."""


class StreamedRows(RowSet):
    """A stream, read a window at a time.

    The constructor tokenises a first window in the given order, `first`, which shows whether rows are usable and how
    many documents fit a row; feeds read its rows again. Raises ValueError for a shard that cannot be read, or only
    whole (a JSON array), and if no row of the first window is usable.

      prepare: tokenises a Window, or raises NothingUsable; also called in a feed's thread.
      seed: decides the orders.
      buffer_size: most rows of a window, which 64 Mi characters or an epoch's end also close.
      order: "shuffled" draws an order of shards for each epoch and of rows for each window; "given" keeps both.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        prepare: Callable[[Window], TokenDataset],
        buffer_size: int,
        order: Order = "shuffled",
        seed: int = 0,
    ):
        for source in sources:
            if not source.streams:
                raise ValueError(
                    f"{source.name}: a JSON array is read whole and cannot be streamed; write a row a line (.jsonl) or "
                    "Parquet, or set data.streaming: false"
                )
        self.name, self.sources, self._prepare = name, tuple(sources), prepare
        self.buffer_size, self.order, self._seed = buffer_size, order, seed
        self._feed: _Feed | None = None
        self._begin: Json = None
        self._sources: tuple[int, list[str]] | None = None
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
        self.first = prepare(Window(name, rows, is_later_window=False))
        per_row = self.first.rows.max_documents
        self._max_documents = max(2 * per_row, _LEAST_DOCUMENTS) if self.first.unit.shares_rows else per_row
        self._patches = self.first.rows.patches
        self._first_rows = len(rows)

    @property
    def length(self) -> int:
        return self.first.length

    @property
    def max_documents(self) -> int:
        """The room of batches, and the most of a packed row: twice the first window's most, at least 8, as later
        documents may be shorter; without packing the first window's.
        """
        return self._max_documents

    @property
    def document_tokens(self) -> float:
        """Of the first window."""
        return self.first.rows.document_tokens

    @property
    def patches(self) -> int:
        """Of the first window, unless data.patches_per_row says more."""
        return self._patches

    def with_room(self, documents: int, patches: int) -> StreamedRows:
        """This stream, changed in place. Before the call `empty` has room only for the first window's most."""
        self._max_documents, self._patches = documents, patches
        self.first = self._with_room(self.first)
        return self

    def _with_room(self, data: TokenDataset) -> TokenDataset:
        data = data.with_max_documents(self._max_documents)
        return data.with_patches(self._patches) if self._patches else data

    def empty(self, rows: int) -> Batch:
        return self.first.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The next row, whatever `step`. Waits for its window, and raises the errors of reading it."""
        if self._feed is None:
            self._feed = _Feed(self, self._seed, self._begin)
        batch, (rows, row) = self.empty(1), self._feed.next()
        rows.fill(batch, 0, row)
        self._sources = step, rows.sources(row)
        return batch

    def sources_at(self, step: int) -> list[str]:
        return self._sources[1] if self._sources is not None and self._sources[0] == step else []

    def position(self, step: int) -> Json:
        """Of the next row; None: of the first."""
        return self._begin if self._feed is None else self._feed.position()

    def resume(self, step: int, position: Json) -> None:
        self.close()
        self._begin = position

    def close(self) -> None:
        """Stops reading; the next row is read anew from the position of `resume`."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def identity(self) -> dict[str, Json]:
        """Values by which a resumed run recognises the stream: buffer size, CRC-32 of the first window, and {relative
        path: fingerprint} of the shards; above 1,000 files one digest; for other shards their number.
        """
        values: dict[str, Json] = {
            "buffer_size": self.buffer_size,
            "first_tokens_crc32": self.first.documents.tokens_crc32,
            **({} if self.order == "shuffled" else {"order": self.order}),
        }
        root = os.path.commonpath([os.path.dirname(name) for name in self._fingerprints]) if self._fingerprints else ""
        shards: dict[str, Json] = {os.path.relpath(name, root): mark for name, mark in self._fingerprints.items()}
        if len(shards) > MOST_NAMED_SHARDS:
            text = "\n".join(f"{name} {fingerprint}" for name, fingerprint in shards.items())
            return {**values, "shards": len(self.sources), "shards_digest": _digest(text.encode())}
        return {**values, "shards": shards or len(self.sources)}

    @property
    def about(self) -> str:
        shards = "1 shard" if len(self.sources) == 1 else f"{len(self.sources):,} shards"
        return f"{self.name}, a stream of {shards}; its first {self._first_rows:,} rows give {self.first.report}"

    def warnings(self) -> list[str]:
        """Of the first window; later ones are in `news`."""
        return self.first.warnings()

    def columns(self) -> dict[str, str]:
        """Of the first window."""
        return {self.name: self.first.summary.columns}

    def news(self) -> list[str]:
        """Sentences since the last call about bad rows and finished epochs. All rows of an unusable window count as
        bad.
        """
        with self._lock:
            news, self._news = self._news, []
        return news

    # ---- used by its feeds

    def read(self, source: Source, after: int, epoch: int = 0) -> Iterator[Row]:
        """The rows of a shard numbered above `after`, in pass `epoch`. Raises ValueError if the shard is missing,
        unreadable, or changed since this object was made.
        """
        if self.order == "given" and source.set_epoch is not None:
            source.set_epoch(epoch)
        fingerprint = self._fingerprints.get(source.name)
        try:
            if source.file is not None and _file_fingerprint(source.file) != fingerprint:
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
        """Tokenises and packs a window in a feed's thread, and counts its rows; None if unusable. Raises ValueError if
        its batches have other `extra` arrays than the first window's, or as `prepare`.

          key: the feed's seed, which with `number` decides the order of the rows.
          begin, end: positions in the stream before the window and behind it. number: of the window, from the stream's
          start.
        """
        try:
            data = self._with_room(self._prepare(Window(self.name, rows)))
            packed = data.rows
        except NothingUsable as error:
            self._count(len(rows), len(rows), str(error))
            return None
        if (extra := {*packed.empty(1).extra}) != (first_extra := {*self.empty(1).extra}):
            raise ValueError(
                f"{rows[0].place} and the rows after it: a batch of them has {sorted(extra)}, and one of the first "
                f"rows {sorted(first_extra)}: give a column such as margin to all rows, or to none"
            )
        if packed.patches != self._patches:
            raise ValueError(
                f"{rows[0].place} and the rows after it have pictures, and the first rows of the stream none: set "
                "data.patches_per_row, the patches for which each row has room"
            )
        self._count(len(rows), data.summary.bad_rows, *data.summary.offenders[:1])
        self._tell_pictures(data)
        return _TokenisedWindow(begin, end, number, packed, ORDERS[self.order](len(packed), key, number))

    def _tell_pictures(self, data: TokenDataset) -> None:
        """Adds sentences to `news` about documents whose pictures have no place."""
        sentences = [] if data.report.pictures is None else data.report.pictures.warnings()
        with self._lock:
            self._news += [f"{self.name}: {sentence}" for sentence in sentences]

    def _count(self, rows: int, bad: int, lately: str = "") -> None:
        """Adds a window's counts, and a sentence to `news` if rows are bad. lately: one of them, with the reason."""
        with self._lock:
            self._counts["rows"] += rows
            self._counts["bad"] += bad
            if bad:
                counts = f"{self._counts['bad']:,} of {self._counts['rows']:,}"
                self._news.append(f"{self.name}: {counts} rows left out as bad so far, lately {lately}")

    def note_epoch(self, epoch: int) -> None:
        with self._lock:
            order = "in another order" if self.order == "shuffled" else "in the same order"
            self._news.append(f"{self.name}: every row was read {epoch} times; it begins anew {order}")


def _end_threads(closed: threading.Event, threads: list[threading.Thread]) -> None:
    closed.set()
    for thread in threads:
        thread.join(_ENDING_SECONDS)


class _Feed:
    """The packed rows of a stream, without end, from `position` on; a thread makes the next window."""

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
        self._close = lifetimes.end_with(self, _end_threads, self._closed, self._threads)
        self._loading = self._load()

    def next(self) -> tuple[Rows, int]:
        """Waits for the next window if needed, and raises its thread's error."""
        while self._window is None or self._taken >= len(self._window.order):
            if self._window is not None:
                self._taken = 0
            self._window = self._loading.result()
            self._loading = self._load()
        row = int(self._window.order[self._taken])
        self._taken += 1
        return self._window.rows, row

    def position(self) -> Json:
        """{"epoch", "shard", "row", "window", "taken"}: where the current window begins, its number, and rows taken."""
        if self._window is None:  # no row was taken yet
            return self._start
        begin = dataclasses.asdict(self._window.begin)
        return {**begin, "window": self._window.number, "taken": self._taken}

    def close(self) -> None:
        """Stops the thread at its next row, and waits some seconds."""
        self._close()

    def _load(self) -> Future[_TokenisedWindow]:
        future: Future[_TokenisedWindow] = Future()

        def work() -> None:
            try:
                future.set_result(self._make())
            except BaseException as error:  # `next` raises it
                future.set_exception(error)

        self._threads[:] = [threading.Thread(target=work, name="stream", daemon=True)]
        self._threads[0].start()
        return future

    def _make(self) -> _TokenisedWindow:
        """The next window with usable rows. ValueError for an unreadable shard, or a whole unusable epoch."""
        epoch = self._end.epoch
        while True:
            rows, begin, size = [], self._end, 0
            for position, row in self._rows:
                if self._closed.is_set():
                    raise ValueError(f"{self._stream.name}: the run has ended")
                self._end = position
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
        """(Position after the row, row) after `begin`, over endless epochs; None for the row at each epoch's end."""
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
    """Size, and a digest of 17 samples of 4 KiB: other changes that keep the size are not noticed."""
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


@dataclasses.dataclass(frozen=True)
class InOrder:
    """An IterableDataset that is trained on in its own order, as transformers does: nothing is shuffled here."""

    rows: object


def is_stream(rows: object, streaming: bool = False) -> bool:
    """Whether rows are read during the run: by data.streaming, or an IterableDataset of `datasets`."""
    if isinstance(rows, InOrder):
        return True
    return streaming or (hasattr(rows, "features") and hasattr(rows, "num_shards") and not hasattr(rows, "__len__"))
