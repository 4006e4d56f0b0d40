"""Packs preference pairs into rows, both documents of a pair in the same one.

Documents 2i and 2i + 1 are pair i: the prompt with the chosen answer, then with the rejected one (for kto, the row's
own answer and a mismatched one). A row's pair p is segments 2p + 1 and 2p + 2.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.packing import (
    NothingUsable,
    Overflow,
    PackingReport,
    PicturePlan,
    PlannedRows,
    mean_document,
    plan_rows,
)
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.data.tokens.pictures import RowPictures, with_room

# The names of the arrays that batches of pairs have in Batch.extra; P is the most pairs of a row.
PAIRS = "pairs"  # float32[rows, P]: 1 where there is a pair
LABELS = "labels"  # float32[rows, P]: a number that the objective gives each pair, such as its margin
REFERENCE = "reference"  # float32[rows, P, 2]: log-probabilities of the two answers under the reference model


class PackedPairs(PlannedRows):
    """Packed rows of pairs, built when written into a batch.

    With overflow="truncate" a pair longer than `length` is cut: first its longer document to the shorter one's length,
    then both equally; with `width` each by itself. A pair is left out if a document has no trained token left. With
    `second_yields` the first document is cut to `length` alone, the second to the remaining room, and only the second
    is left out. `kept_lengths`, int64[pairs, 2]: tokens left of each document, 0 if left out.

    Raises ValueError for an odd number of documents, overflow="split", a too long pair (with `width` document) with
    "error", or a pair longer than `width`.

      length: most tokens of a pair and a row's length; with `width`, most tokens of a document.
      packing: False gives each pair a row of its own.
      reference: float32[documents], answers' log-probabilities under the reference; NaN until filled in place.
      labels: float32[pairs], such as margins.
      drops_cut_pairs: leave out pairs that would be cut.
      width: tokens of a row.
      max_documents: most of a row, and the room in batches; None: no limit, and the most of any row.
      patches_per_row: most of a row, and the room in batches; None: chosen by the pairs.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        *,
        overflow: Overflow = "truncate",
        packing: bool = True,
        reference: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        drops_cut_pairs: bool = False,
        second_yields: bool = False,
        width: int | None = None,
        max_documents: int | None = None,
        patches_per_row: int | None = None,
    ):
        if len(documents) % 2:
            raise ValueError(f"there are {len(documents)} documents: pairs need two each")
        if overflow == "split":
            raise ValueError(
                "data.overflow = 'split': a pair cannot be laid out in pieces; set truncate, drop or error"
            )
        self.documents, self.length, self.full = documents, width or length, False
        self.reference, self.labels = reference, labels
        lengths = np.asarray(documents.lengths).reshape(-1, 2)
        if overflow == "error" and (width is not None or second_yields):
            _require_short(documents, lengths, length, second_yields)
        kept_lengths = _fitted(lengths, length, overflow, width is not None, second_yields)
        if drops_cut_pairs:
            kept_lengths = np.where((kept_lengths < lengths).any(1, keepdims=True), 0, kept_lengths)
        self.picture_plan: PicturePlan | None = None
        if PicturePlan.needed(documents, patches_per_row):
            if second_yields:  # a second document that would be cut within a picture is left out alone
                assert documents.pictures is not None
                cut = documents.pictures.cut(kept_lengths.reshape(-1)).reshape(-1, 2)
                kept_lengths = np.where(cut & [False, True], 0, kept_lengths)
            shared, refuses = self.length if packing else 0, overflow == "error"
            plan = PicturePlan(documents, kept_lengths.reshape(-1), shared, patches_per_row, group=2, refuses=refuses)
            self.picture_plan, kept_lengths = plan, np.where(plan.out.reshape(-1, 2), 0, kept_lengths)
        trained = _trained(documents, lengths, kept_lengths)
        out = trained == 0
        dropped = out[:, 0] if second_yields else out.any(1)
        out = out | dropped[:, None] if second_yields else np.stack([dropped, dropped], 1)
        kept_lengths, trained = np.where(out, 0, kept_lengths), np.where(out, 0, trained)
        self.kept_lengths = kept_lengths
        max_pairs = None if max_documents is None else max_documents // 2
        self.plan = plan_rows(
            kept_lengths.sum(1),
            self.length,
            overflow="error",
            packing=packing,
            name=lambda pair: documents.source(2 * pair),
            max_documents=max_pairs,
            patches=None if self.picture_plan is None else self.picture_plan.patches,
            room=self.patches,
        )
        self.max_pairs = max_pairs or self.plan.max_documents
        self.max_documents = 2 * self.max_pairs
        self.without_second = int((out[:, 1] & ~dropped & (lengths[:, 1] > 0)).sum())
        is_cut = (kept_lengths < lengths) & ~dropped[:, None]
        if second_yields:
            is_cut[:, 1] = False
        self.report = PackingReport(
            documents=len(documents),
            rows=self.plan.rows,
            tokens=int(kept_lengths.sum()),
            slots=self.plan.rows * self.length,
            trained_tokens=int(trained.sum()),
            truncated=int(is_cut.sum()),
            cut_tokens=int((lengths - kept_lengths)[is_cut].sum()),
            split=0,
            dropped=2 * int(dropped.sum()),
            max_documents=self.max_documents,
            pictures=None
            if self.picture_plan is None
            else self.picture_plan.report(kept_lengths.reshape(-1), self.plan.rows, int(self.patch_counts.sum())),
        )

    @property
    def document_tokens(self) -> float:
        return mean_document(self.kept_lengths, self.plan.rows * self.length)

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of padding with float32 `extra` arrays of zeros: PAIRS [rows, P] and, if there are any, LABELS [rows,
        P] and REFERENCE [rows, P, 2], with P = max_pairs x shared.

          length: None is that of these rows.
          shared: how many of these rows may share a batch's row.
        """
        most = self.max_pairs * shared
        extra: dict[str, np.ndarray] = {PAIRS: np.zeros((rows, most), np.float32)}
        if self.labels is not None:
            extra[LABELS] = np.zeros((rows, most), np.float32)
        if self.reference is not None:
            extra[REFERENCE] = np.zeros((rows, most, 2), np.float32)
        batch = dataclasses.replace(Batch.empty(rows, length or self.length), extra=extra)
        return batch if self.picture_plan is None else with_room(batch, self.picture_plan.processor, self.patches)

    def fill(self, batch: Batch, slot: int, row: int, offset: int = 0, rows_before: int = 0) -> int:
        """Writes row `row` into row `slot` of a batch in place, from token `offset` on; the index after it.
        rows_before: how many of these rows the slot has already, for distinct segment ids and indices.
        """
        documents, first_pair, pictures = self.documents, rows_before * self.max_pairs, RowPictures()
        for slot_pair, pair in enumerate(self.pairs(row), start=first_pair):
            batch.extra[PAIRS][slot, slot_pair] = 1.0
            if self.labels is not None:
                batch.extra[LABELS][slot, slot_pair] = self.labels[pair]
            pictures.next_group()  # a picture of both documents is in the row once
            for side in (0, 1):
                index, count = 2 * pair + side, int(self.kept_lengths[pair, side])
                offset = documents.write(index, 0, count, batch, slot, offset, 2 * slot_pair + side + 1, pictures)
                if self.reference is not None:
                    batch.extra[REFERENCE][slot, slot_pair, side] = self.reference[index]
        pictures.wait()
        return offset

    def sources(self, row: int) -> list[str]:
        """`file:line` of each pair of a row, in order."""
        return [self.documents.source(2 * pair) for pair in self.pairs(row)]

    def pairs(self, row: int) -> list[int]:
        pieces = slice(self.plan.row_starts[row], self.plan.row_starts[row + 1])
        return [int(pair) for pair in self.plan.document[pieces]]


def _shortened(lengths: np.ndarray, length: int) -> np.ndarray:
    """int64[pairs, 2]: lengths cut to a sum of `length`: the longer document first, then both equally."""
    half, shorter = length // 2, lengths.min(1)
    cut_length = np.where(shorter > half, half, length - shorter)  # of an odd length both lose one token more
    room = np.where(lengths.sum(1) > length, cut_length, lengths.max(1))
    return np.minimum(lengths, room[:, None])


def _require_short(documents: Documents, lengths: np.ndarray, length: int, first_alone: bool) -> None:
    """ValueError for a document, or with `first_alone` a pair's first, of more than `length` tokens."""
    sides, every = (lengths[:, :1], 2) if first_alone else (lengths, 1)
    name = lambda index: documents.source(every * index)  # noqa: E731
    plan_rows(sides.reshape(-1), length, overflow="error", packing=False, name=name)


def _fitted(lengths: np.ndarray, length: int, overflow: Overflow, apart: bool, second_yields: bool) -> np.ndarray:
    """int64[pairs, 2]: what `overflow` leaves of the lengths. apart: each document may have `length` tokens."""
    if second_yields and not apart:
        fitted = _yielded(lengths, length)
    elif overflow == "error":
        fitted = lengths
    else:
        fitted = np.minimum(lengths, length) if apart else _shortened(lengths, length)
    is_cut = (fitted < lengths)[:, :1] if second_yields else (fitted < lengths).any(1, keepdims=True)
    return np.where(is_cut, 0, fitted) if overflow == "drop" else fitted


def _trained(documents: Documents, lengths: np.ndarray, kept_lengths: np.ndarray) -> np.ndarray:
    """int[pairs, 2]: trained tokens of what is left of each document."""
    trained = np.array(documents.trained).reshape(-1, 2)
    for pair, side in np.argwhere(kept_lengths < lengths):
        mask = documents[2 * int(pair) + int(side)].mask
        trained[pair, side] = np.count_nonzero(mask[1 : kept_lengths[pair, side]])
    return trained


def _yielded(lengths: np.ndarray, length: int) -> np.ndarray:
    """int64[pairs, 2]: lengths cut to `length` a pair; the second document has the room that the first leaves."""
    first = np.minimum(lengths[:, 0], length)
    return np.stack([first, np.minimum(lengths[:, 1], length - first)], 1)


@dataclasses.dataclass(frozen=True)
class PairDataset(TokenDataset):
    """Tokenised preference pairs: documents 2i and 2i + 1 are the chosen and rejected answers after the prompt; for kto
    the row's own and a mismatched one.
    """

    reference: np.ndarray | None = None
    """float32[documents]: log-probability of each answer under the reference model, NaN until computed."""
    labels: np.ndarray | None = None
    """float32[pairs]: its margin, or for kto 1 if desirable, else 0."""
    drops_cut_pairs: bool = False
    """Whether pairs that would be cut are left out (reward)."""
    second_yields: bool = False
    """Whether second documents have only the room that first ones leave (kto)."""
    width: int | None = None
    """Tokens of a row, if `length` limits each document; None if it limits the pair and the row."""

    @functools.cached_property
    def rows(self) -> PackedPairs:  # type: ignore[override]
        """The packed pairs, planned on first access; one a row with packing="step". Raises NothingUsable if no pair is
        left, and ValueError as PackedPairs.
        """
        rows = PackedPairs(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.unit.shares_rows,
            reference=self.reference,
            labels=self.labels,
            drops_cut_pairs=self.drops_cut_pairs,
            second_yields=self.second_yields,
            width=self.longest if self.unit.counts_examples else self.width,
            max_documents=self.max_documents,
            patches_per_row=self.patches_per_row,
        )
        if not len(rows):
            raise NothingUsable(
                f"no pair has a trained token in both answers within data.length={self.length}; raise it"
            )
        return rows

    def warnings(self) -> list[str]:
        """Those of TokenDataset, and how many pairs were cut because data.length holds both answers."""
        sentences, rows = super().warnings(), self.rows
        if self.unit.counts_examples or self.width is not None:
            return sentences
        room = f"data.length = {self.length:,}, which is the room for both; raise it, or set data.packing: step, with "
        room += "which each answer may have that many"
        if rows.report.truncated and not self.second_yields:
            sentences.append(f"{rows.report.truncated:,} answers are cut, because the pair is longer than {room}")
        if rows.without_second:
            sentences.append(
                f"{rows.without_second:,} rows estimate no divergence, because their mismatched answer has no place in "
                f"{room}"
            )
        return sentences

    @property
    def longest(self) -> int:
        return 2 * self.length

    def in_rows(self, slots: int) -> PairDataset:
        """As TokenDataset; a pair longer than `slots` raises ValueError when packed."""
        return dataclasses.replace(self, packing=True, width=slots) if self.unit.counts_examples else self

    def split(self, eval_rows: float) -> tuple[PairDataset, PairDataset]:
        """As TokenDataset, with references and labels. A pair is known by its first document."""
        firsts = np.arange(0, len(self.documents), 2)
        training, held_out, copies = self.documents.held_out(firsts, eval_rows, "pairs")

        def of_pairs(pairs: np.ndarray) -> PairDataset:
            indices = np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1)
            reference = None if self.reference is None else self.reference[indices]
            labels = None if self.labels is None else self.labels[pairs]
            return dataclasses.replace(
                self, documents=self.documents.select(indices), reference=reference, labels=labels
            )

        return dataclasses.replace(of_pairs(training), copies=copies), of_pairs(held_out)
