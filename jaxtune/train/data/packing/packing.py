"""Packs whole documents into rows of a fixed length, by best fit decreasing: lengths 6, 5, 4, 3, 2 in rows of 10 give
[6, 4] and [5, 3, 2].

A `Plan` needs lengths alone, so millions cost little; `PackedRows` builds rows from it on demand. A document never
continues in another row: with overflow="split" each piece is a document. Documents of a row do not attend to each other
(`Batch.segment_ids`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from jaxtune.train.data.batches import Batch
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.data.tokens.pictures import RowPictures, patch_budget, rounded, with_room

# The values of data.overflow: documents longer than a row are cut, divided into pieces, left out, or refused.
Overflow = Literal["truncate", "split", "drop", "error"]
OVERFLOW_POLICIES = ("truncate", "split", "drop", "error")


class NothingUsable(ValueError):
    """No token can be trained on. A run leaves out such a window of a stream, unless it is the first; otherwise it
    stops.
    """


@dataclasses.dataclass(frozen=True)
class PictureReport:
    """Counts of the pictures of packed documents."""

    pictures: int
    tokens: tuple[int, int]
    """Fewest and most of a picture."""
    patches: tuple[int, int]
    """Fewest and most of a picture."""
    room: int
    """Patches of a row, padding included."""
    filled: int
    """Patches of all rows, where documents that share a picture have it once."""
    rows: int
    cut: int
    """Documents or pairs left out because a cut at the row's length would cut a picture."""
    too_large: int
    """Documents or pairs left out because they have more patches than a row."""
    left_out: int
    """Documents of both."""

    def __str__(self) -> str:
        fill = self.filled / max(self.rows * self.room, 1)
        return (
            f"{self.pictures:,} pictures of {_span(self.tokens)} tokens and {_span(self.patches)} patches, "
            f"{self.filled:,} patches in {self.rows * self.room:,} slots, {self.room:,} a row (fill {fill:.3f})"
        )

    def warnings(self) -> list[str]:
        """Sentences about documents without a place."""
        sentences = []
        if self.cut:
            sentences.append(
                f"{self.cut:,} rows left out, because data.length ends within one of their pictures, which is "
                "never cut; raise data.length, or lower the pixels of a picture"
            )
        if self.too_large:
            sentences.append(
                f"{self.too_large:,} rows left out, because they have more patches than the {self.room:,} of a "
                "packed row; raise those, or lower the pixels of a picture"
            )
        return sentences


def _span(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,}" if counts[0] == counts[1] else f"{counts[0]:,} to {counts[1]:,}"


class PicturePlan:
    """The patches of documents, or of groups that share their pictures, and a row's room for them.

    kept_lengths: int64[n], tokens of each document that are packed.
    length: of a row that several may share; 0: each has its own.
    budget: patches of a row, rounded up; None: chosen by these documents.
    group: consecutive documents that share their pictures.
    refuses: whether documents that have no place raise ValueError.
    divided: bool[n], documents that are cut into pieces, as those with pictures are not; None: none.
    """

    def __init__(
        self,
        documents: Documents,
        kept_lengths: np.ndarray,
        length: int,
        budget: int | None,
        *,
        group: int = 1,
        refuses: bool = False,
        divided: np.ndarray | None = None,
    ):
        pictures = documents.pictures
        assert pictures is not None
        self.processor, self._pictures = pictures.made_by, pictures
        cut = pictures.cut(kept_lengths)
        if divided is not None:
            cut = cut | (divided & (pictures.counts > 0))
        cut = cut.reshape(-1, group).any(1)
        kept_lengths = np.where(np.repeat(cut, group), 0, kept_lengths)
        (patches, counts), block = pictures.sizes(kept_lengths, group), self.processor.block
        if budget is None:
            self.room = patch_budget(patches, int(kept_lengths.sum()), length, block)
        else:
            self.room = rounded(budget, block)
        too_large = patches > self.room
        self.patches = np.where(too_large, 0, patches)  # int64[groups]
        self._counts = np.where(too_large, 0, counts)
        self.out = np.repeat(cut | too_large, group)  # bool[n]: documents without a place
        self._cut, self._too_large = int(cut.sum()), int(too_large.sum())
        if refuses and self.out.any():
            first = documents.source(int(np.flatnonzero(self.out)[0]))
            raise ValueError(
                f"data.overflow = 'error': {' '.join(self.report(kept_lengths, 0).warnings())} (first {first})"
            )

    @classmethod
    def needed(cls, documents: Documents, budget: int | None) -> bool:
        """Whether batches of these documents have room for pictures."""
        return documents.pictures is not None and (budget is not None or bool(documents.pictures.counts.any()))

    def report(self, kept_lengths: np.ndarray, rows: int, filled: int = 0) -> PictureReport:
        """kept_lengths: int64[n], tokens of each document that are in the `rows`, which have `filled` patches."""
        documents, placed = self._pictures.placed()
        placed = placed[self._pictures.starts[placed] < kept_lengths[documents]]
        sizes = self._pictures.grids[placed].astype(np.int64).prod(1)
        tokens = (self._pictures.ends - self._pictures.starts)[placed]

        def span(counts: np.ndarray) -> tuple[int, int]:
            return (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)

        return PictureReport(
            pictures=len(placed),
            tokens=span(tokens),
            patches=span(sizes),
            room=self.room,
            filled=filled,
            rows=rows,
            cut=self._cut,
            too_large=self._too_large,
            left_out=int(self.out.sum()),
        )

    def of_rows(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """int64[rows] each: patches, without padding, and pictures."""
        patches, pictures = (
            np.concatenate([[0], np.cumsum(values[plan.document])]) for values in (self.patches, self._counts)
        )
        return np.diff(patches[plan.row_starts]), np.diff(pictures[plan.row_starts])


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """Counts of what packing did. A preference pair counts as two documents."""

    documents: int
    rows: int
    tokens: int
    slots: int
    """Tokens and padding: rows x length."""
    trained_tokens: int
    truncated: int
    """Documents that were cut, without dropped ones."""
    cut_tokens: int
    split: int
    dropped: int
    """Documents in no row: empty, without a trained token after cutting, or too long with overflow="drop"; both of a
    pair.
    """
    max_documents: int
    """Most documents in a row; for pairs the number that batches have room for."""
    untrained_pieces: int = 0
    """Pieces left out because they have no trained token."""
    pictures: PictureReport | None = None
    """None: the documents have none."""

    @property
    def fill(self) -> float:
        """Share of slots that are tokens, 0 to 1; 0 without rows."""
        return self.tokens / self.slots if self.slots else 0.0

    def __str__(self) -> str:
        return self._text(f" in {self.rows:,} rows", f" in {self.slots:,} slots (fill {self.fill:.3f})")

    @property
    def of_documents(self) -> str:
        """The counts without rows and slots, for data.packing=step."""
        return self._text("", "")

    def _text(self, rows: str, slots: str) -> str:
        """The counts in words. rows, slots: inserted after the numbers of documents and of tokens."""
        text = f"{self.documents:,} documents{rows}, {self.tokens:,} tokens{slots}, {self.trained_tokens:,} trained"
        if self.truncated:
            text += f"; {self.truncated:,} documents truncated, {self.cut_tokens:,} tokens cut"
        if self.split:
            text += f"; {self.split:,} documents split"
        if self.untrained_pieces:
            text += f", {self.untrained_pieces:,} of their pieces left out because none of their tokens is trained on"
        return text if self.pictures is None else f"{text}; {self.pictures}"


def mean_document(counts: np.ndarray, slots: int) -> float:
    """BatchSource.document_tokens of documents of `counts` tokens in this many slots, padding included; 0 without."""
    return float((counts.astype(np.float64) ** 2).sum()) / slots if slots else 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Assigns pieces, runs of tokens of one document (or pair), to rows. Arrays are in the order of the rows."""

    length: int
    row_starts: np.ndarray
    """int64[rows + 1]: row r has pieces row_starts[r]:row_starts[r + 1]."""
    document: np.ndarray
    """int64[pieces]: index of the document (or pair)."""
    offset: np.ndarray
    """int64[pieces]: index of the first token in the document."""
    count: np.ndarray
    """int64[pieces]: tokens."""

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def max_documents(self) -> int:
        """Most pieces in a row; 0 without rows. Attention's kernels are compiled for it."""
        return int(np.diff(self.row_starts).max(initial=0))

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: tokens, without padding."""
        ends = np.concatenate([[0], np.cumsum(self.count)])[self.row_starts]
        return np.diff(ends)

    @property
    def document_tokens(self) -> float:
        """BatchSource.document_tokens, of pieces."""
        return mean_document(self.count, self.rows * self.length)

    @property
    def full(self) -> bool:
        """Whether each row is one piece without padding, so that attention needs no mask of documents."""
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
    patches: np.ndarray | None = None,
    room: int = 0,
) -> Plan:
    """Assigns documents (or pairs) to rows by best fit decreasing: longest first, each into the fullest row with room.
    Equal lengths go in index order, so the plan is deterministic; a row's pieces are in document order. Empty documents
    are left out.

    Raises ValueError for wrong arguments, or a long document with overflow="error".

      lengths: int[n], tokens of each document.
      length: tokens of a row, at least 2.
      packing: False gives each piece a row of its own.
      name: a document's name by index, for messages.
      is_trained: of (document, offset, count), whether a split document's piece has a trained token; others are left
      out. None keeps all.
      max_documents: most pieces of a row; None: no limit.
      patches: int64[n], of each document, at most `room`, which a row has; None: none. Documents with patches are
      packed first, by patches, and the others around them.
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
    if packing and patches is not None:
        row, rows = _around_pictures(count, patches[document], length, room, max_documents)
    elif packing:
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
    """(document, offset, count), int64[pieces] in document order; ValueError for a long one with overflow="error"."""
    if overflow == "error":
        too_long = np.flatnonzero(lengths > length)
        if too_long.size:
            first = int(too_long[0])
            raise ValueError(
                f"{too_long.size} documents are longer than data.length={length}, first {name(first)} with "
                f"{lengths[first]} tokens; raise data.length, or set data.overflow to truncate, split or drop"
            )
    if overflow == "split":
        piece_counts = -(-lengths // length)
        document = np.repeat(np.arange(len(lengths)), piece_counts)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(piece_counts) - piece_counts, piece_counts)) * length
        return document, offset, np.minimum(lengths[document] - offset, length)
    document = np.flatnonzero(lengths if overflow != "drop" else (lengths > 0) & (lengths <= length))
    return document, np.zeros(len(document), np.int64), np.minimum(lengths[document], length)


class _OpenRows:
    """Rows with room, in a stack for each remaining capacity; a bit for each stack finds the fullest
    without a search.
    """

    def __init__(self, capacity: int):
        self._stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._occupied = 0
        self._refusals: collections.Counter[int] = collections.Counter()

    def put(self, row: int, capacity: int) -> None:
        self._stacks[capacity].append(row)
        self._occupied |= 1 << capacity

    def fullest(self, needed: int, accepts: Callable[[int], bool] | None = None) -> tuple[int, int] | None:
        """(Row, its capacity), which is taken out, or None. A row that `accepts` refuses for a 32nd time is closed."""
        candidates = self._occupied >> needed << needed
        while candidates:
            bit = candidates & -candidates
            candidates ^= bit
            stack = self._stacks[capacity := bit.bit_length() - 1]
            for index in range(len(stack) - 1, -1, -1):
                row = stack[index]
                accepted = accepts is None or accepts(row)
                self._refusals[row] += not accepted
                if not accepted and self._refusals[row] < 32:
                    continue
                stack.pop(index)
                if not stack:
                    self._occupied ^= bit
                if accepted:
                    return row, capacity
        return None


def _best_fit_decreasing(
    count: np.ndarray,
    length: int,
    max_pieces: int | None = None,
    row_tokens: Sequence[int] = (),
    pieces: Sequence[int] = (),
) -> tuple[np.ndarray, int]:
    """(Row of each piece, int64[pieces]; number of rows).

    count: int[pieces], tokens, at most `length`.
    row_tokens, pieces: tokens and number of pieces of rows that are there already.
    """
    order = np.argsort(-count, kind="stable")
    row_of = np.empty(len(count), np.int64)
    open_rows = _OpenRows(length)
    pieces_of = list(pieces)

    def reopen(row: int, remaining: int) -> None:
        if remaining and pieces_of[row] != max_pieces:
            open_rows.put(row, remaining)

    for row, tokens in enumerate(row_tokens):
        reopen(row, length - tokens)
    for piece, tokens in zip(order.tolist(), count[order].tolist(), strict=True):
        row, capacity = open_rows.fullest(tokens) or (len(pieces_of), length)
        if row == len(pieces_of):
            pieces_of.append(0)
        row_of[piece] = row
        pieces_of[row] += 1
        reopen(row, capacity - tokens)
    return row_of, len(pieces_of)


def _around_pictures(
    count: np.ndarray, patches: np.ndarray, length: int, room: int, max_pieces: int | None
) -> tuple[np.ndarray, int]:
    """As `_best_fit_decreasing`, with a second limit.

    patches: int64[pieces], at most `room`.
    """
    with_pictures = np.flatnonzero(patches)
    order = with_pictures[np.lexsort((-count[with_pictures], -patches[with_pictures]))]
    row_of = np.empty(len(count), np.int64)
    open_rows = _OpenRows(room)
    row_tokens: list[int] = []
    pieces_of: list[int] = []
    for piece, tokens, size in zip(order.tolist(), count[order].tolist(), patches[order].tolist(), strict=True):
        row, capacity = open_rows.fullest(size, lambda row, tokens=tokens: row_tokens[row] + tokens <= length) or (
            len(row_tokens),
            room,
        )
        if row == len(row_tokens):
            row_tokens.append(0)
            pieces_of.append(0)
        row_of[piece] = row
        row_tokens[row] += tokens
        pieces_of[row] += 1
        if pieces_of[row] != max_pieces:
            open_rows.put(row, capacity - size)
    text = np.flatnonzero(patches == 0)
    row_of[text], rows = _best_fit_decreasing(count[text], length, max_pieces, row_tokens, pieces_of)
    return row_of, rows


class PlannedRows:
    """Sizes of rows that are planned and not yet filled."""

    plan: Plan
    picture_plan: PicturePlan | None

    def __len__(self) -> int:
        return self.plan.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: tokens of each row, without padding."""
        return self.plan.lengths

    @property
    def document_tokens(self) -> float:
        return self.plan.document_tokens

    @property
    def patches(self) -> int:
        """Patches for which a row has room; 0 without pictures."""
        return 0 if self.picture_plan is None else self.picture_plan.room

    @property
    def largest_patches(self) -> int:
        """Most patches of a document or pair, which a row has room for; 0 without pictures."""
        return 0 if self.picture_plan is None else int(self.picture_plan.patches.max(initial=0))

    @property
    def patch_counts(self) -> np.ndarray:
        """int64[rows]: patches of each row, without padding."""
        return self._picture_sizes()[0]

    @property
    def max_pictures(self) -> int:
        """Most pictures of a row."""
        return int(self._picture_sizes()[1].max(initial=0))

    def _picture_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """int64[rows] each: patches of rows, and pictures; zeros without pictures."""
        zeros = np.zeros(self.plan.rows, np.int64)
        return (zeros, zeros) if self.picture_plan is None else self.picture_plan.of_rows(self.plan)


class PackedRows(PlannedRows):
    """Packed rows of documents, built when written into a batch. Documents that are empty, or lose all trained tokens
    when cut, are in no row, nor are untrained pieces; a document that never had one stays.

    `report` has the counts, and `full` says whether each row is one document without padding. Raises ValueError for a
    long document with overflow="error", or wrong arguments.

      length: tokens of a row.
      packing: False gives each document a row of its own.
      max_documents: most of a row, and the room in batches; None: no limit, and the most of any row.
      patches_per_row: most of a row, and the room in batches; None: chosen by the documents.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        *,
        overflow: Overflow = "truncate",
        packing: bool = True,
        max_documents: int | None = None,
        patches_per_row: int | None = None,
    ) -> None:
        lengths = np.asarray(documents.lengths)
        trained = np.array(documents.trained)
        self.picture_plan = _picture_plan(documents, length, overflow, packing, patches_per_row)
        if self.picture_plan is not None:
            lengths = np.where(self.picture_plan.out, 0, lengths)
            trained[self.picture_plan.out] = 0
        too_long = np.flatnonzero(lengths > length)
        truncated = cut_tokens = 0
        if overflow == "truncate" and too_long.size:
            lengths = lengths.copy()
            for index in too_long.tolist():
                kept_trained = int(np.count_nonzero(documents[index].mask[1:length]))
                if trained[index] and not kept_trained:
                    lengths[index] = 0  # no trained token is left, so the document is dropped
                else:
                    truncated += 1
                    cut_tokens += int(lengths[index]) - length
                trained[index] = kept_trained
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
            patches=None if self.picture_plan is None else self.picture_plan.patches,
            room=self.patches,
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
            pictures=self._picture_report(),
        )

    def _picture_report(self) -> PictureReport | None:
        if self.picture_plan is None:
            return None
        kept_lengths = np.zeros(len(self.documents), np.int64)
        kept_lengths[self.plan.document] = self.plan.count  # documents with pictures are one piece
        return self.picture_plan.report(kept_lengths, self.plan.rows, int(self.patch_counts.sum()))

    def _is_trained(self, document: int, offset: int, count: int) -> bool:
        """Whether a piece of a split document has a trained target; True if the document has none at all."""
        documents = self.documents
        first = documents.starts[document] + offset
        return not documents.trained[document] or bool(documents.mask[first + 1 : first + count].any())

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of padding, [rows, length], for `fill`. length: None is that of these rows; `shared` changes nothing
        here.
        """
        batch = Batch.empty(rows, length or self.length)
        return batch if self.picture_plan is None else with_room(batch, self.picture_plan.processor, self.patches)

    def fill(self, batch: Batch, slot: int, row: int, offset: int = 0, rows_before: int = 0) -> int:
        """Writes row `row` into row `slot` of a batch in place, from token `offset` on; the index after it.
        rows_before: how many of these rows the slot has already, for distinct segment ids.
        """
        plan, documents, pictures = self.plan, self.documents, RowPictures()
        pieces = range(plan.row_starts[row], plan.row_starts[row + 1])
        for segment, piece in enumerate(pieces, start=1 + rows_before * self.max_documents):
            document, first, count = (int(array[piece]) for array in (plan.document, plan.offset, plan.count))
            offset = documents.write(document, first, count, batch, slot, offset, segment, pictures)
            pictures.next_group()
        pictures.wait()
        return offset

    def sources(self, row: int) -> list[str]:
        """`file:line` of the documents of a row, in order."""
        plan = self.plan
        pieces = slice(plan.row_starts[row], plan.row_starts[row + 1])
        return [self.documents.source(int(index)) for index in plan.document[pieces]]

    def batch(self) -> Batch:
        batch = self.empty(len(self))
        for row in range(len(self)):
            self.fill(batch, row, row)
        return batch


def _picture_plan(
    documents: Documents, length: int, overflow: Overflow, packing: bool, budget: int | None
) -> PicturePlan | None:
    if not PicturePlan.needed(documents, budget):
        return None
    lengths = np.asarray(documents.lengths)
    is_long = lengths > length
    kept_lengths = {"truncate": np.minimum(lengths, length), "drop": np.where(is_long, 0, lengths)}.get(
        overflow, lengths
    )
    refuses, divided = overflow == "error", is_long if overflow == "split" else None
    shared = length if packing else 0
    return PicturePlan(documents, kept_lengths, shared, budget, refuses=refuses, divided=divided)


def pack(
    documents: Iterable[Document | Sequence[int]], length: int, overflow: Overflow = "truncate", *, packing: bool = True
) -> tuple[Batch, PackingReport]:
    """Packs documents in memory, for scripts and tests; (batch [rows, length], report). Arguments and errors as
    PackedRows.

      documents: plain sequences of ints are trained on completely.
      packing: False: each document gets a row of its own.
    """
    rows = PackedRows(Documents.gather(documents), length, overflow=overflow, packing=packing)
    return rows.batch(), rows.report
