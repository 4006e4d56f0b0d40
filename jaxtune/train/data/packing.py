"""Packs whole documents into rows of a fixed length, by best fit decreasing.

First, a `Plan` assigns each document (or each piece of a document that is split) to a row. `plan_rows` makes it from
lengths alone, so it costs little even for millions of documents. `PackedRows` then builds rows from the plan on demand,
from arrays in memory or from the memory-mapped token cache; its `PackingReport` counts what was packed and cut. `pack`
makes one batch of all rows, for scripts and tests. `NothingUsable` is the error of a set of rows without a trained
token.

A document never continues in another row: with overflow="split", each piece of a long document is a document of its
own. The documents of a row do not attend to each other, because `Batch.segment_ids` separates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from jaxtune.train.data.batches import Batch
from jaxtune.train.data.documents import Document, Documents

# The values of data.overflow: documents longer than a row are cut, divided into pieces, left out, or refused.
Overflow = Literal["truncate", "split", "drop", "error"]
OVERFLOW_POLICIES = ("truncate", "split", "drop", "error")


class NothingUsable(ValueError):
    """Raised by `prepare`, and when a data set is packed, if there is no token that can be trained on; the message says
    why. A run leaves out such a window of a stream (the part that is tokenised at a time) and continues, unless it is
    the first; in all other cases it stops."""


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """Counts of what packing did to a set of documents, for the lines and warnings that a run prints.
    `TokenDataset.rows` also refuses rows without a trained token by it, and checkpoints have the number of trained
    tokens. For preference pairs (pairs.py) documents are counted too, two for each pair."""

    documents: int
    """Documents that packing was given."""
    rows: int
    """Rows made."""
    tokens: int
    """Tokens in the rows, padding not counted."""
    slots: int
    """Tokens and padding in the rows: rows x length."""
    trained_tokens: int
    """Trained targets in the rows."""
    truncated: int
    """Documents that were cut because they are longer than a row (or, with their pair, than its limit), without those
    that were dropped."""
    cut_tokens: int
    """Tokens that were cut off these documents."""
    split: int
    """Documents that were divided into several pieces."""
    dropped: int
    """Documents that are in no row: empty ones, those that lost every trained token when they were cut or divided, and
    with overflow="drop" the long ones; both of each pair that is left out."""
    max_documents: int
    """The most documents (or pieces) in any row; for pairs the number that batches have room for."""
    untrained_pieces: int = 0
    """Pieces of split documents that were left out because none of their tokens is trained on."""

    @property
    def fill(self) -> float:
        """The share of the slots, the positions of all rows, that are tokens and not padding, 0 to 1; 0 without rows.
        `str()` shows it; a run decides nothing by it."""
        return self.tokens / self.slots if self.slots else 0.0

    def __str__(self) -> str:
        """The counts in words, those of rows and slots included; `dropped` is left to `TokenDataset.warnings`."""
        return self._text(f" in {self.rows:,} rows", f" in {self.slots:,} slots (fill {self.fill:.3f})")

    @property
    def of_documents(self) -> str:
        """The counts in words, as in `str()` but without those of rows and of slots (tokens and padding): for
        data.packing=step, where rows are packed again for each step. `StepBatches.described` shows it."""
        return self._text("", "")

    def _text(self, rows: str, slots: str) -> str:
        """The counts in words, for `str()` and `of_documents`. rows, slots: texts such as " in 8 rows", which are
        inserted after the number of documents and after the number of tokens; "" leaves them out."""
        text = f"{self.documents:,} documents{rows}, {self.tokens:,} tokens{slots}, {self.trained_tokens:,} trained"
        if self.truncated:
            text += f"; {self.truncated:,} documents truncated, {self.cut_tokens:,} tokens cut"
        if self.split:
            text += f"; {self.split:,} documents split"
        if self.untrained_pieces:
            text += f", {self.untrained_pieces:,} of their pieces left out because none of their tokens is trained on"
        return text


@dataclasses.dataclass(frozen=True)
class Plan:
    """The assignment of pieces to rows, which `plan_rows` makes, and by which PackedRows and PackedPairs write their
    rows. A piece is a run of tokens of one document (or pair of documents), usually all of it. The arrays have the
    pieces in the order of the rows."""

    length: int
    """The number of tokens in a row."""
    row_starts: np.ndarray
    """int64[rows + 1]: row r has the pieces `row_starts[r]:row_starts[r + 1]`, in order."""
    document: np.ndarray
    """int64[pieces]: the index of the document (or pair) of each piece."""
    offset: np.ndarray
    """int64[pieces]: the index in its document of each piece's first token."""
    count: np.ndarray
    """int64[pieces]: the number of tokens of each piece."""

    @property
    def rows(self) -> int:
        """The number of rows into which the pieces are packed; 0 if nothing was left to pack."""
        return len(self.row_starts) - 1

    @property
    def max_documents(self) -> int:
        """The most pieces in any row; 0 without rows. A piece becomes a document of the row, and a pair two.
        Attention's kernels are compiled for the most documents of a row, which PackedRows and PackedPairs take from
        here unless they are given a number."""
        return int(np.diff(self.row_starts).max(initial=0))

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the number of tokens in each row, the sum of its pieces, padding not counted, in the order of
        the rows. PackedRows and PackedPairs return it as their `lengths`, by which data.packing=step packs its
        steps."""
        ends = np.concatenate([[0], np.cumsum(self.count)])[self.row_starts]
        return np.diff(ends)

    @property
    def full(self) -> bool:
        """Whether every row is a single piece without padding; attention then needs no mask of documents. PackedRows
        takes its `full` from it; PackedPairs does not."""
        return self.rows == len(self.count) and bool((self.count == self.length).all())


def plan_rows(
    lengths: np.ndarray,
    length: int,
    *,
    overflow: Overflow = "truncate",
    packing: bool = True,
    name: Callable[[int], str] = "document {}".format,
    is_trained: Callable[[int, int, int], bool] | None = None,
    max_documents: int | None = None,
) -> Plan:
    """Assigns documents, or pairs of documents, to rows by best fit decreasing: longest first, each into the fullest
    row with enough room. With packing=False each gets the next row. It needs their lengths only. `PackedRows` and
    `pairs.PackedPairs` build their rows from the plan. With data.packing=step it only gives each document or pair a row
    of its own; `steps.StepBatches` then packs these for each step, by first fit.

    The plan is deterministic: equally long documents are taken in the order of their indices. Within a row, pieces are
    in the order of their documents. Documents of length 0 are left out.

    Args:
        lengths: int[n], the number of tokens of each document.
        length: the number of tokens in a row, at least 2.
        overflow: documents longer than a row are cut ("truncate"), divided into pieces ("split"), left out ("drop"), or
            refused ("error").
        packing: True puts several pieces into a row; False gives every piece a row of its own.
        name: gives the name of a document by its index, for the message that refuses it.
        is_trained: takes (document, offset, count) of a piece of a split document, and says whether a token of it is
            trained on; pieces of split documents without one are left out. None keeps all pieces.
        max_documents: the most pieces in a row; None sets no limit.

    Raises:
        ValueError: `length` or `overflow` is not allowed, or `overflow` is "error" and a document is too long.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2 (one token and its target), got {length}")
    if overflow not in OVERFLOW_POLICIES:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOW_POLICIES)}, got {overflow!r}")
    lengths = np.asarray(lengths, np.int64)
    document, offset, count = _pieces(lengths, length, overflow, name)
    if is_trained is not None and overflow == "split":
        pieces = np.stack([document, offset, count], 1)
        split = np.flatnonzero(lengths[document] > length).tolist()
        document, offset, count = np.delete(pieces, [i for i in split if not is_trained(*pieces[i].tolist())], 0).T
    if packing:
        row, rows = _best_fit_decreasing(count, length, max_documents)
    else:
        row, rows = np.arange(len(count)), len(count)
    order = np.argsort(row, kind="stable")  # pieces are in document order already
    row_starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=row_starts[1:])
    return Plan(length, row_starts, document[order], offset[order], count[order])


def _pieces(
    lengths: np.ndarray, length: int, overflow: Overflow, name: Callable[[int], str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divides documents into pieces, which `plan_rows` then assigns to rows. A document is one piece unless it is
    longer than `length`; then it is cut, split or refused, as `overflow` says. An empty document has no piece.

    Args:
        lengths: int64[n], the number of tokens of each document.
        length: the number of tokens in a row.
        overflow: "truncate", "split", "drop" or "error".
        name: gives the name of a document by its index, for the message.

    Returns:
        (document, offset, count), three arrays int64[pieces] in the order of the documents: the index of each piece's
            document, the index of its first token there, and its number of tokens.

    Raises:
        ValueError: a document is too long and `overflow` is "error".
    """
    if overflow == "error":
        too_long = np.flatnonzero(lengths > length)
        if too_long.size:
            first = int(too_long[0])
            raise ValueError(
                f"{too_long.size} documents are longer than data.length={length}, first {name(first)} with "
                f"{lengths[first]} tokens; raise data.length, or set data.overflow to truncate, split or drop"
            )
    if overflow == "split":
        parts = -(-lengths // length)
        document = np.repeat(np.arange(len(lengths)), parts)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
        return document, offset, np.minimum(lengths[document] - offset, length)
    document = np.flatnonzero(lengths if overflow != "drop" else (lengths > 0) & (lengths <= length))
    return document, np.zeros(len(document), np.int64), np.minimum(lengths[document], length)


def _best_fit_decreasing(count: np.ndarray, length: int, max_pieces: int | None = None) -> tuple[np.ndarray, int]:
    """Returns (the row of every piece, int64[pieces]; the number of rows), by best fit decreasing, for `plan_rows`.

    Rows that have room for tokens and for another piece are kept in one stack for each remaining capacity. A Python
    integer has a bit set for every capacity with such a row, so the fullest row with room for `c` tokens is found as
    the lowest set bit at or above `c`, without a search over rows.

    Args:
        count: int[pieces], the number of tokens of each piece, at most `length`.
        length: the number of tokens in a row.
        max_pieces: the most pieces in a row; None sets no limit.
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
        if left and pieces_of[row] != max_pieces:
            open_rows[left].append(row)
            occupied |= 1 << left
    return row_of, rows


class PackedRows:
    """Packed rows of documents (`batches.Rows`), which are built when they are written into a batch;
    `TokenDataset.rows` makes them. Documents that are empty, or lose all their trained tokens when they are cut, are in
    no row; nor are untrained pieces of a divided document that has trained tokens. A document that never had a trained
    token stays, but a run has none. The attribute `report` has the
    counts, a PackingReport, `plan` the assignment of documents to rows, and `full` says whether every row is one
    document without padding. `empty` makes a batch, `fill` writes a row into it, and `batch` makes one of all rows.

    Args:
        documents: the documents.
        length: the number of tokens in a row.
        overflow: what happens to documents longer than a row: "truncate", "split", "drop" or "error".
        packing: True puts several documents into a row; False gives every document a row of its own.
        max_documents: the most documents in a row. The attribute `max_documents` then has this value even if no row has
            as many. None sets no limit, and the attribute is the most that any row has.

    Raises:
        ValueError: `overflow` is "error" and a document is too long, or an argument is not allowed.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        *,
        overflow: Overflow = "truncate",
        packing: bool = True,
        max_documents: int | None = None,
    ) -> None:
        """Plans the packing from the lengths of the documents, and counts what it does; no row is built yet. The class
        describes the arguments."""
        lengths = np.asarray(documents.lengths)
        too_long = np.flatnonzero(lengths > length)
        trained = np.array(documents.trained)
        truncated = cut_tokens = 0
        if overflow == "truncate" and too_long.size:
            lengths = lengths.copy()
            for index in too_long.tolist():
                kept = int(np.count_nonzero(documents[index].mask[1:length]))
                if trained[index] and not kept:
                    lengths[index] = 0  # no trained token is left, so the document is dropped
                else:
                    truncated += 1
                    cut_tokens += int(lengths[index]) - length
                trained[index] = kept
        if overflow == "drop":
            trained[too_long] = 0
        self.documents = documents
        self.length = length
        self.plan = plan_rows(
            lengths,
            length,
            overflow=overflow,
            packing=packing,
            name=documents.source,
            is_trained=self._is_trained,
            max_documents=max_documents,
        )
        untrained_pieces = 0
        if overflow == "split":
            untrained_pieces = int((-(-lengths // length)).sum()) - len(self.plan.count)
            # The first token of every later piece is not a target, because no token of its row comes before it.
            for index in too_long.tolist():
                trained[index] -= int(np.count_nonzero(documents[index].mask[length::length]))
        self.max_documents = max_documents or self.plan.max_documents
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

    def _is_trained(self, document: int, offset: int, count: int) -> bool:
        """Whether a piece of a split document has a trained target; `plan_rows` leaves out pieces that have none. For a
        document that has no trained target at all, it is True for every piece, so that all are kept, as the document is
        if it is not split. A run has no such documents: `workers.encode_chunk` leaves them out.

        Args:
            document: the index of the document.
            offset, count: the piece is the `count` tokens of the document from token `offset` on.
        """
        documents = self.documents
        first = documents.starts[document] + offset
        return not documents.trained[document] or bool(documents.mask[first + 1 : first + count].any())

    def __len__(self) -> int:
        """The number of rows."""
        return self.plan.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the number of tokens in each row, padding not counted, in the order of the rows. With
        data.packing=step, where a row is one document, steps are packed by them (`steps.StepBatches`)."""
        return self.plan.lengths

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of `rows` rows of padding, each of `length` tokens (None: as long as these rows), as new numpy
        arrays, into which `fill` then writes; the train step is compiled for its shapes. Only StepBatches gives another
        length, that of the rows into which it packs documents. `shared`, an argument of `batches.Rows.empty`, changes
        nothing: these rows have no `extra` arrays."""
        return Batch.empty(rows, length or self.length)

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """Writes row number `row` of these, in place, into row `slot` of a batch, from token `at` on, and returns the
        index after its last token. place: how many of these rows were written into the same row of the batch before;
        segment ids count from 1 + place x `max_documents`, so that those of different rows differ. `Batches`,
        `FedBatches` and `StepBatches` call it; only StepBatches writes several of these rows into one."""
        plan, documents = self.plan, self.documents
        pieces = range(plan.row_starts[row], plan.row_starts[row + 1])
        for segment, piece in enumerate(pieces, start=1 + place * self.max_documents):
            start = int(documents.starts[plan.document[piece]] + plan.offset[piece])
            at = documents.write(start, int(plan.count[piece]), batch, slot, at, segment)
        return at

    def sources(self, row: int) -> list[str]:
        """Where the documents of row number `row` came from, as `file:line` (`Documents.source`), in the order in which
        the row has them. A run prints it if the loss of a step with this row is not finite."""
        plan = self.plan
        pieces = slice(plan.row_starts[row], plan.row_starts[row + 1])
        return [self.documents.source(int(index)) for index in plan.document[pieces]]

    def batch(self) -> Batch:
        """All rows in one batch of numpy arrays `[rows, length]`: row i of the batch is row number i of these. `pack`
        returns it, for scripts and tests; a run makes its batches by `empty` and `fill`, one step at a time."""
        batch = Batch.empty(len(self), self.length)
        for row in range(len(self)):
            self.fill(batch, row, row)
        return batch


def pack(
    documents: Iterable[Document | Sequence[int]], length: int, overflow: Overflow = "truncate", *, packing: bool = True
) -> tuple[Batch, PackingReport]:
    """Packs documents into rows of `length` tokens by best fit decreasing, all at once and in memory, for scripts and
    tests; equal arguments give equal rows. A run does not call it: it packs by `PackedRows`.

    Args:
        documents: `Document`s, or plain sequences of ints, of which every token is trained on.
        length: the number of tokens in a row.
        overflow: documents longer than a row are cut ("truncate"), divided into several pieces ("split"), or refused
            ("error").
        packing: True puts several documents into a row; False gives every document a row of its own (padded mode).

    Returns:
        The packed rows (numpy arrays `[rows, length]`) and a report with every count.

    Raises:
        ValueError: a document is longer than a row and `overflow` is "error"; `length` is below 2, or `overflow` is not
            known; tokens that are not integers; a mask of another length than its tokens.
    """
    rows = PackedRows(Documents.gather(documents), length, overflow=overflow, packing=packing)
    return rows.batch(), rows.report
