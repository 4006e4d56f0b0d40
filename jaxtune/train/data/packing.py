"""Packing: whole documents into rows of a fixed length, best fit decreasing.

Two halves. The plan says which piece of which document lies in which row; it is made from lengths alone, so
it costs little even for millions of documents. Rows are then built from the plan on demand, from arrays in
memory or from the memory-mapped token cache. A document never crosses a row, and a row's documents never see
each other: that is the business of `Batch.segment_ids`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from jaxtune.train.data.batches import Batch

Overflow = Literal["truncate", "split", "error"]
OVERFLOW_POLICIES = ("truncate", "split", "error")


class NothingUsable(ValueError):
    """Rows of which no token can be trained on; the message says why."""


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens of one document: `tokens` int32[n]; `mask` bool[n], True where the token is trained on."""

    tokens: np.ndarray
    mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class Documents:
    """Many documents in flat arrays, which may be memory-mapped files. A selection shares the flat arrays.

    tokens: int32[total]. mask: bool or uint8[total], nonzero where trained on. starts, lengths: int64[n].
    trained: int64[n], trained targets of each document (its first token is never a target).
    origins: int64[n, 2] or None: index into `files`, and the line or row number in it.
    """

    tokens: np.ndarray
    mask: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    origins: np.ndarray | None = None
    files: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def tokens_crc32(self) -> int:
        """Of the flat tokens, which a selection shares; read once, all of them."""
        return zlib.crc32(np.ascontiguousarray(self.tokens))

    @property
    def identity(self) -> str:
        """What tells these documents from those of another file."""
        return f"{self.tokens_crc32:08x}"

    def __getitem__(self, index: int) -> Document:
        start, length = self.starts[index], self.lengths[index]
        return Document(self.tokens[start : start + length], self.mask[start : start + length].astype(bool))

    def source(self, index: int) -> str:
        """Where a document came from, as `file:line`."""
        if self.origins is None:
            return f"document {index}"
        file, line = self.origins[index]
        return f"{self.files[file]}:{line}"

    def select(self, indices: np.ndarray) -> Documents:
        """The documents at `indices` (int[n]), in that order."""
        return dataclasses.replace(
            self,
            starts=self.starts[indices],
            lengths=self.lengths[indices],
            trained=self.trained[indices],
            origins=None if self.origins is None else self.origins[indices],
        )

    def write(self, start: int, count: int, batch: Batch, slot: int, at: int, segment: int) -> int:
        """Writes tokens `start:start + count` into row `slot` of a numpy batch, as segment `segment` from slot `at` of
        the row on; returns the place after them."""
        end, tokens = at + count, self.tokens[start : start + count]
        batch.tokens[slot, at:end] = tokens
        batch.targets[slot, at : end - 1] = tokens[1:]
        batch.weights[slot, at : end - 1] = self.mask[start + 1 : start + count] != 0
        batch.segment_ids[slot, at:end] = segment
        batch.positions[slot, at:end] = np.arange(count)
        return end

    def held_out(self, firsts: np.ndarray, eval_rows: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """(rest, chosen): places in `firsts`, of which `eval_rows` are chosen by a hash of their documents' tokens.

        Neither the order nor a seed plays a part, and equal documents never stand on both sides: those that would are
        left out of the rest. firsts: int[n], a document of each row, or of what else `what` calls it in plural.
        """
        if not 0 < eval_rows < len(firsts):
            raise ValueError(
                f"data.eval_rows={eval_rows} must lie between 1 and {len(firsts) - 1}, one less than the {what}"
            )
        hashes = self._hashes(firsts)
        chosen = np.sort(np.argsort(hashes, kind="stable")[:eval_rows])
        rest = np.flatnonzero(~np.isin(hashes, hashes[chosen]))
        if not rest.size:
            raise ValueError(f"all training {what} equal {what} held out for evaluation; lower data.eval_rows")
        return rest, chosen

    def _hashes(self, indices: np.ndarray) -> np.ndarray:
        """uint64[n]: a hash of the tokens of each of these documents."""
        hashes = np.empty(len(indices), np.uint64)
        for place, index in enumerate(indices.tolist()):
            data = self.tokens[self.starts[index] : self.starts[index] + self.lengths[index]].tobytes()
            hashes[place] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return hashes

    def also_in(self, other: Documents) -> int:
        """How many of the documents, which are not empty, stand in another set too, token for token."""
        own, candidates = np.flatnonzero(self.lengths), np.flatnonzero(other.lengths)
        for share in (0.5, 0.9, 0.99):  # a few tokens tell most documents apart, and cost far less than all
            marks, theirs = self._marks(own, share), other._marks(candidates, share)
            own, candidates = own[np.isin(marks, theirs)], candidates[np.isin(theirs, marks)]
        return int(np.isin(self._hashes(own), other._hashes(candidates)).sum())

    def _marks(self, indices: np.ndarray, share: float) -> np.ndarray:
        """int64[n]: of each of these documents, its length and the token at a share of it."""
        lengths = self.lengths[indices]
        return lengths << 32 | self.tokens[self.starts[indices] + (share * lengths).astype(np.int64)]

    @classmethod
    def gather(cls, documents: Iterable[Document | Sequence[int]]) -> Documents:
        """From `Document`s, or plain sequences of ints, of which every token is trained on."""
        tokens, masks = [], []
        for index, document in enumerate(documents):
            if isinstance(document, Document):
                ids, mask = np.asarray(document.tokens), np.asarray(document.mask).astype(bool)
            else:
                ids = np.asarray(document)
                mask = np.ones(ids.shape, bool)
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise ValueError(f"document {index}: tokens must be integers [n], got {ids.dtype} {list(ids.shape)}")
            if mask.shape != ids.shape:
                raise ValueError(f"document {index}: {ids.size} tokens but a mask of shape {list(mask.shape)}")
            tokens.append(ids.astype(np.int32))
            masks.append(mask)
        lengths = np.array([ids.size for ids in tokens], np.int64)
        return cls(
            tokens=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            mask=np.concatenate(masks) if masks else np.zeros(0, bool),
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            trained=np.array([mask[1:].sum() for mask in masks], np.int64),
        )


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """What packing did. Counts of documents, rows, tokens and slots (tokens and padding).

    documents: given. rows: made. tokens: real tokens in the rows. slots: rows x length. trained_tokens: sum of
    the weights. truncated: documents cut at `length`, `cut_tokens` the tokens that fell away with the cut.
    split: documents laid out as several pieces, `untrained_pieces` those of them that were left out, because no token
    of theirs is trained on. dropped: documents left out: empty ones, and those whose cuts took every token that was
    trained on. max_documents: the most documents (or pieces) in any row.
    """

    documents: int
    rows: int
    tokens: int
    slots: int
    trained_tokens: int
    truncated: int
    cut_tokens: int
    split: int
    dropped: int
    max_documents: int
    untrained_pieces: int = 0

    @property
    def fill(self) -> float:
        """Real tokens over slots, 0 to 1."""
        return self.tokens / self.slots if self.slots else 0.0

    def __str__(self) -> str:
        return self._text(f" in {self.rows:,} rows", f" in {self.slots:,} slots (fill {self.fill:.3f})")

    @property
    def of_documents(self) -> str:
        """In words, but for the rows, which are made anew for each step."""
        return self._text("", "")

    def _text(self, rows: str, slots: str) -> str:
        text = f"{self.documents:,} documents{rows}, {self.tokens:,} tokens{slots}, {self.trained_tokens:,} trained"
        if self.truncated:
            text += f"; {self.truncated:,} documents truncated, {self.cut_tokens:,} tokens cut"
        if self.split:
            text += f"; {self.split:,} documents split"
        if self.untrained_pieces:
            text += f", {self.untrained_pieces:,} of their pieces left out: no token of theirs is trained on"
        return text


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which pieces lie in which row. Row `r` holds the pieces `row_starts[r]:row_starts[r + 1]`, in order.

    row_starts: int64[rows + 1]. document: int64[pieces], index of the document. offset, count: int64[pieces],
    the tokens `offset:offset + count` of it.
    """

    length: int
    row_starts: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    count: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def max_documents(self) -> int:
        return int(np.diff(self.row_starts).max(initial=0))

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the tokens of each row."""
        ends = np.concatenate([[0], np.cumsum(self.count)])[self.row_starts]
        return np.diff(ends)

    @property
    def full(self) -> bool:
        """Whether every row is one document, or a piece of one, without padding."""
        return self.rows == len(self.count) and bool((self.count == self.length).all())


def plan_rows(
    lengths: np.ndarray,
    length: int,
    *,
    overflow: Overflow = "truncate",
    packing: bool = True,
    name: Callable[[int], str] = "document {}".format,
    teaches: Callable[[int, int, int], bool] | None = None,
    most: int | None = None,
) -> Plan:
    """Plans rows of `length` slots for documents of `lengths` (int[n]); documents of length 0 get no place.

    Best fit decreasing: longest first, each piece into the fullest row that still has room. Ties go by the
    document's index, so the plan is deterministic; within a row, pieces stand in the order of their documents.
    `packing=False` gives every piece a row of its own. Documents longer than a row are cut ("truncate"), laid
    out as several pieces ("split"), or refused ("error"); `name` gives the name of a document in that message.
    `teaches` (document, offset, count) says which pieces of split ones get a place; by default all do. `most` is the
    largest number of pieces in a row; None sets no limit.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2 (one token and its target), got {length}")
    if overflow not in OVERFLOW_POLICIES:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOW_POLICIES)}, got {overflow!r}")
    lengths = np.asarray(lengths, np.int64)
    document, offset, count = _pieces(lengths, length, overflow, name)
    if teaches is not None and overflow == "split":
        pieces = np.stack([document, offset, count], 1)
        idle = [i for i in np.flatnonzero(lengths[document] > length).tolist() if not teaches(*pieces[i].tolist())]
        document, offset, count = np.delete(pieces, idle, 0).T
    if packing:
        row, rows = _best_fit_decreasing(count, length, most)
    else:
        row, rows = np.arange(len(count)), len(count)
    order = np.argsort(row, kind="stable")  # pieces are in document order already
    row_starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=row_starts[1:])
    return Plan(length, row_starts, document[order], offset[order], count[order])


def _pieces(
    lengths: np.ndarray, length: int, overflow: Overflow, name: Callable[[int], str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, offset, count) of every piece, in document order."""
    if overflow == "error":
        too_long = np.flatnonzero(lengths > length)
        if too_long.size:
            first = int(too_long[0])
            raise ValueError(
                f"{too_long.size} documents are longer than data.length={length}, first {name(first)} with "
                f"{lengths[first]} tokens; raise data.length, or set data.overflow to truncate or split"
            )
    if overflow == "split":
        parts = -(-lengths // length)
        document = np.repeat(np.arange(len(lengths)), parts)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
        return document, offset, np.minimum(lengths[document] - offset, length)
    document = np.flatnonzero(lengths)
    return document, np.zeros(len(document), np.int64), np.minimum(lengths[document], length)


def _best_fit_decreasing(count: np.ndarray, length: int, most: int | None = None) -> tuple[np.ndarray, int]:
    """The row of every piece (int64[pieces]) and the number of rows, each of `most` pieces at most.

    Open rows are kept in one stack per remaining capacity. A Python integer has a bit set for every capacity
    with an open row, so the fullest row with room for `c` tokens is its lowest set bit at or above `c`: no
    search over rows.
    """
    order = np.argsort(-count, kind="stable")
    row_of = np.empty(len(count), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]
    occupied = 0
    rows = 0
    pieces_of: list[int] = []
    for piece, needed in zip(order.tolist(), count[order].tolist(), strict=True):
        candidates = occupied >> needed
        if candidates:
            capacity = needed + (candidates & -candidates).bit_length() - 1
            stack = open_rows[capacity]
            row = stack.pop()
            if not stack:
                occupied ^= 1 << capacity
        else:
            capacity, row = length, rows
            rows += 1
            pieces_of.append(0)
        row_of[piece] = row
        pieces_of[row] += 1
        left = capacity - needed
        if left and pieces_of[row] != most:
            open_rows[left].append(row)
            occupied |= 1 << left
    return row_of, rows


class PackedRows:
    """Rows of a plan, built from their documents when asked for. See `batches.Rows`.

    Args:
        documents: the documents; flat arrays, perhaps memory-mapped.
        length: slots in a row.
        overflow: what happens to documents longer than a row: "truncate", "split" or "error".
        packing: False gives every document a row of its own.
        most: documents in a row at most, which `max_documents` then says whatever the rows have; None sets no limit.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        *,
        overflow: Overflow = "truncate",
        packing: bool = True,
        most: int | None = None,
    ) -> None:
        lengths = np.asarray(documents.lengths)
        too_long = np.flatnonzero(lengths > length)
        trained = np.array(documents.trained)
        truncated = cut_tokens = 0
        if overflow == "truncate" and too_long.size:
            lengths = lengths.copy()
            for index in too_long.tolist():
                kept = int(np.count_nonzero(documents[index].mask[1:length]))
                if trained[index] and not kept:
                    lengths[index] = 0  # nothing is left to learn from: it would cost a place and teach nothing
                else:
                    truncated += 1
                    cut_tokens += int(lengths[index]) - length
                trained[index] = kept
        self.documents = documents
        self.length = length
        self.plan = plan_rows(
            lengths, length, overflow=overflow, packing=packing, name=documents.source, teaches=self._teaches, most=most
        )
        untrained_pieces = 0
        if overflow == "split":
            untrained_pieces = int((-(-lengths // length)).sum()) - len(self.plan.count)
            # The first token of every later piece has nobody to predict it.
            for index in too_long.tolist():
                trained[index] -= int(np.count_nonzero(documents[index].mask[length::length]))
        self.max_documents = most or self.plan.max_documents
        self.full = self.plan.full
        self.report = PackingReport(
            documents=len(documents),
            rows=self.plan.rows,
            tokens=int(self.plan.count.sum()),
            slots=self.plan.rows * length,
            trained_tokens=int(trained.sum()),
            truncated=truncated,
            cut_tokens=cut_tokens,
            split=len(too_long) if overflow == "split" else 0,
            dropped=len(documents) - len(np.unique(self.plan.document)),
            max_documents=self.plan.max_documents,
            untrained_pieces=untrained_pieces,
        )

    def _teaches(self, document: int, offset: int, count: int) -> bool:
        """Whether a piece of a split document has a target that is trained on, or none of the document has."""
        documents = self.documents
        first = documents.starts[document] + offset
        return not documents.trained[document] or bool(documents.mask[first + 1 : first + count].any())

    def __len__(self) -> int:
        return self.plan.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the slots of each row that are not padding."""
        return self.plan.lengths

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """See `batches.Rows`."""
        return Batch.empty(rows, length or self.length)

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """See `batches.Rows`."""
        plan, documents = self.plan, self.documents
        pieces = range(plan.row_starts[row], plan.row_starts[row + 1])
        for segment, piece in enumerate(pieces, start=1 + place * self.max_documents):
            start = int(documents.starts[plan.document[piece]] + plan.offset[piece])
            at = documents.write(start, int(plan.count[piece]), batch, slot, at, segment)
        return at

    def sources(self, row: int) -> list[str]:
        """Where the documents of a row came from, as `file:line`."""
        plan = self.plan
        pieces = slice(plan.row_starts[row], plan.row_starts[row + 1])
        return [self.documents.source(int(index)) for index in plan.document[pieces]]

    def batch(self) -> Batch:
        """Every row at once, in the order of the plan: numpy arrays `[rows, length]`."""
        batch = Batch.empty(len(self), self.length)
        for row in range(len(self)):
            self.fill(batch, row, row)
        return batch


def pack(
    documents: Iterable[Document | Sequence[int]], length: int, overflow: Overflow = "truncate", *, packing: bool = True
) -> tuple[Batch, PackingReport]:
    """Packs documents into rows of `length` slots by best fit decreasing, deterministically.

    Args:
        documents: `Document`s, or plain sequences of ints, of which every token is trained on.
        length: slots in a row.
        overflow: documents longer than a row are cut ("truncate"), laid out as several pieces ("split"), or
            refused ("error").
        packing: False gives every document a row of its own (padded mode).

    Returns:
        The packed rows (numpy arrays `[rows, length]`) and a report with every count.

    Raises:
        ValueError: a document is longer than a row and `overflow` is "error"; tokens that are not integers; a
            mask of another length than its tokens.
    """
    rows = PackedRows(Documents.gather(documents), length, overflow=overflow, packing=packing)
    return rows.batch(), rows.report
