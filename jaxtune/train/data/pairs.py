"""Preference pairs packed into rows: two documents each, never apart.

The documents of a set stand in pairs, the chosen answer after its prompt, then the rejected one. A pair is laid out as
one piece, so its documents are neighbours in one row: segment 2 p + 1 of a row is the chosen document of its pair p,
segment 2 p + 2 the rejected one.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxtune.train.data import TokenDataset
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.packing import Documents, NothingUsable, Overflow, PackingReport, plan_rows

PAIRS = "pairs"  # of Batch.extra: float32[rows, most pairs of a row], 1 where there is a pair
LABELS = "labels"  # of Batch.extra: float32[rows, most pairs], what is known of a pair
REFERENCE = "reference"  # of Batch.extra: float32[rows, most pairs, 2], log-probabilities of a reference model


class PackedPairs:
    """Rows of pairs. See `batches.Rows`; arguments as of `packing.PackedRows`.

    A pair that is longer than a row is cut ("truncate"): its longer document is, down to the other's length, and then
    both alike; or, `whole`, it is left out. A pair of which nothing is left to learn from in either document is left
    out. width: slots of a row, where `length` bounds each document and not the pair: the documents are then cut one by
    one.

    reference: float32[documents] or None, sums of log-probabilities that each pair's loss needs of another model;
    NaN where they are yet to be computed, in place. labels: float32[pairs] or None. most: documents in a row at most,
    for which shapes are made whatever the rows have.
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
        whole: bool = False,
        width: int | None = None,
        most: int | None = None,
    ):
        if len(documents) % 2:
            raise ValueError(f"there are {len(documents)} documents: pairs need two each")
        if overflow == "split":
            raise ValueError("data.overflow = 'split': a pair cannot be laid out in pieces; set truncate or error")
        self.documents, self.length, self.full = documents, width or length, False
        self.reference, self.labels = reference, labels
        lengths = np.asarray(documents.lengths).reshape(-1, 2)
        if overflow == "error":
            kept = lengths
            if width is not None:  # refuses documents that are longer
                plan_rows(lengths.reshape(-1), length, overflow="error", packing=False, name=documents.source)
        else:
            kept = _shortened(lengths, length) if width is None else np.minimum(lengths, length)
        if whole:
            kept = np.where((kept < lengths).any(1, keepdims=True), 0, kept)
        trained = np.array(documents.trained).reshape(-1, 2)
        for pair, side in np.argwhere(kept < lengths):
            mask = documents[2 * int(pair) + int(side)].mask
            trained[pair, side] = np.count_nonzero(mask[1 : kept[pair, side]])
        dropped = (trained == 0).any(1)
        kept, trained = np.where(dropped[:, None], 0, kept), np.where(dropped[:, None], 0, trained)
        self.kept = kept
        most_pairs = None if most is None else most // 2
        self.plan = plan_rows(
            kept.sum(1),
            self.length,
            overflow="error",
            packing=packing,
            name=lambda pair: documents.source(2 * pair),
            most=most_pairs,
        )
        self.most_pairs = most_pairs or self.plan.max_documents
        self.max_documents = 2 * self.most_pairs
        cut = (kept < lengths) & ~dropped[:, None]
        self.report = PackingReport(
            documents=len(documents),
            rows=self.plan.rows,
            tokens=int(kept.sum()),
            slots=self.plan.rows * self.length,
            trained_tokens=int(trained.sum()),
            truncated=int(cut.sum()),
            cut_tokens=int((lengths - kept)[cut].sum()),
            split=0,
            dropped=2 * int(dropped.sum()),
            max_documents=self.max_documents,
        )

    def __len__(self) -> int:
        return self.plan.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the slots of each row that are not padding."""
        return self.plan.lengths

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """See `batches.Rows`."""
        most = self.most_pairs * shared
        extra: dict[str, np.ndarray] = {PAIRS: np.zeros((rows, most), np.float32)}
        if self.labels is not None:
            extra[LABELS] = np.zeros((rows, most), np.float32)
        if self.reference is not None:
            extra[REFERENCE] = np.zeros((rows, most, 2), np.float32)
        return dataclasses.replace(Batch.empty(rows, length or self.length), extra=extra)

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """See `batches.Rows`."""
        documents, before = self.documents, place * self.most_pairs
        for place, pair in enumerate(self.pairs(row), start=before):
            batch.extra[PAIRS][slot, place] = 1.0
            if self.labels is not None:
                batch.extra[LABELS][slot, place] = self.labels[pair]
            for side in (0, 1):
                index, count = 2 * pair + side, int(self.kept[pair, side])
                at = documents.write(int(documents.starts[index]), count, batch, slot, at, 2 * place + side + 1)
                if self.reference is not None:
                    batch.extra[REFERENCE][slot, place, side] = self.reference[index]
        return at

    def sources(self, row: int) -> list[str]:
        """Where the pairs of a row came from, as `file:line`."""
        return [self.documents.source(2 * pair) for pair in self.pairs(row)]

    def pairs(self, row: int) -> list[int]:
        """The pairs of a row, in their order, by number."""
        pieces = slice(self.plan.row_starts[row], self.plan.row_starts[row + 1])
        return [int(pair) for pair in self.plan.document[pieces]]


def _shortened(lengths: np.ndarray, length: int) -> np.ndarray:
    """int64[pairs, 2]: the lengths, of which none has a sum over `length`."""
    shorter = np.minimum(lengths.min(1), length // 2)  # that much of the shorter one is always kept
    room = np.where(lengths.sum(1) > length, length - shorter, lengths.max(1))
    return np.minimum(lengths, room[:, None])


@dataclasses.dataclass(frozen=True)
class PairDataset(TokenDataset):
    """Tokenised preferences; see TokenDataset. reference, labels, whole, width: as of PackedPairs."""

    reference: np.ndarray | None = None
    labels: np.ndarray | None = None
    whole: bool = False
    width: int | None = None

    @functools.cached_property
    def rows(self) -> PackedPairs:  # type: ignore[override]
        """The packed rows, planned when first asked for."""
        rows = PackedPairs(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.packing is True,
            reference=self.reference,
            labels=self.labels,
            whole=self.whole,
            width=2 * self.length if self.packing == "step" else self.width,
            most=self.most_documents,
        )
        if not len(rows):
            raise NothingUsable(
                f"no pair has a trained token in both answers within data.length={self.length}; raise it"
            )
        return rows

    @property
    def longest(self) -> int:
        return 2 * self.length

    def in_rows(self, slots: int) -> PairDataset:
        return self if self.packing != "step" else dataclasses.replace(self, packing=True, width=slots)

    def split(self, eval_rows: int) -> tuple[PairDataset, PairDataset]:
        """(train, eval), with `eval_rows` pairs for evaluation, told by their first documents; see
        Documents.held_out."""
        rest, chosen = self.documents.held_out(np.arange(0, len(self.documents), 2), eval_rows, "pairs")

        def side(pairs: np.ndarray) -> PairDataset:
            indices = np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1)
            reference = None if self.reference is None else self.reference[indices]
            labels = None if self.labels is None else self.labels[pairs]
            return dataclasses.replace(
                self, documents=self.documents.select(indices), reference=reference, labels=labels
            )

        return side(rest), side(chosen)
