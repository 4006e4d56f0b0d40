"""Packs preference pairs into rows. A pair has two documents, which are always in the same row.

Documents 2i and 2i + 1 of a set are pair i: the prompt with the chosen answer, then the prompt with the rejected one.
(For kto, the "chosen" one is the row's own answer, desirable or not, and the "rejected" one a mismatched answer.) A
pair is packed as one piece, so its documents are next to each other: in a row, segment 2p + 1 is the chosen document of
the row's pair p, and segment 2p + 2 the rejected one. `PairDataset` is the data set of pairs, and `PackedPairs` its
packed rows.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.documents import Documents
from jaxtune.train.data.packing import NothingUsable, Overflow, PackingReport, plan_rows

# The names of the arrays that batches of pairs have in Batch.extra; P is the most pairs of a row.
PAIRS = "pairs"  # float32[rows, P]: 1 where there is a pair
LABELS = "labels"  # float32[rows, P]: a number that the objective gives each pair, such as its margin
REFERENCE = "reference"  # float32[rows, P, 2]: log-probabilities of the two answers under the reference model


class PackedPairs:
    """Packed rows of preference pairs, which are built when they are written into a batch (`batches.Rows`);
    `PairDataset.rows` makes them. The attribute `kept`, int64[pairs, 2], is the number of tokens of each document after
    truncation, 0 for a pair that is left out; the name of the file in which a reference's log-probabilities are stored
    depends on it, too. `report` has the counts, a PackingReport, `plan` the assignment of pairs to rows, `length` is
    the number of tokens in a row, and `max_pairs` the most pairs of a row (half of `max_documents`, if that is given).
    `full` is always False.

    With overflow="truncate", a pair that is longer than `length` is cut: first its longer document, to the length of
    the shorter one, then both equally; with `width`, each document is cut by itself. With any overflow, a pair is left
    out if one of its documents has no trained token, or has lost all of them. With `second_yields`, the first document
    is cut to `length` alone, the second to the room that is left, and only the second one is left out.

    Args:
        documents: two documents for each pair.
        length: without `width`, the most tokens of a pair, and the length of a row; with `width`, the most tokens of
            each document.
        overflow: what happens to what is longer: "truncate" or "error".
        packing: True puts several pairs into a row; False gives every pair a row of its own.
        reference: float32[documents] or None, the sum of the log-probabilities of each document's answer under the
            reference model. NaN where it is not computed yet; it is filled in place later.
        labels: float32[pairs] or None, a number that the objective gives each pair, such as its margin.
        whole: True leaves out pairs that would have to be cut; False cuts them.
        second_yields: whether the second documents have only the room that the first ones leave.
        width: the number of tokens in a row, at least that of the longest pair; None: `length` is that of a row.
        max_documents: the most documents that a row may have, at least 2; batches have room for as many. None sets no
            limit, and batches have room for the most of any row.

    Raises:
        ValueError: the number of documents is odd; `overflow` is "split"; it is "error", and a pair, or with `width` a
            document, is longer than `length`; or a pair is longer than `width`.
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
        second_yields: bool = False,
        width: int | None = None,
        max_documents: int | None = None,
    ):
        """Decides how far each pair is cut, plans the packing from the lengths, and counts what it does; no row is
        built yet. The class describes the arguments."""
        if len(documents) % 2:
            raise ValueError(f"there are {len(documents)} documents: pairs need two each")
        if overflow == "split":
            raise ValueError("data.overflow = 'split': a pair cannot be laid out in pieces; set truncate or error")
        self.documents, self.length, self.full = documents, width or length, False
        self.reference, self.labels = reference, labels
        lengths = np.asarray(documents.lengths).reshape(-1, 2)
        if overflow == "error" and (width is not None or second_yields):  # raises for documents that are longer
            sides = lengths[:, :1] if second_yields else lengths
            every = 2 if second_yields else 1
            name = lambda index: documents.source(every * index)  # noqa: E731
            plan_rows(sides.reshape(-1), length, overflow="error", packing=False, name=name)
        if width is not None:
            kept = lengths if overflow == "error" else np.minimum(lengths, length)
        elif second_yields:
            kept = _yielded(lengths, length)
        else:
            kept = lengths if overflow == "error" else _shortened(lengths, length)
        if whole:
            kept = np.where((kept < lengths).any(1, keepdims=True), 0, kept)
        trained = np.array(documents.trained).reshape(-1, 2)
        for pair, side in np.argwhere(kept < lengths):
            mask = documents[2 * int(pair) + int(side)].mask
            trained[pair, side] = np.count_nonzero(mask[1 : kept[pair, side]])
        out = trained == 0
        dropped = out[:, 0] if second_yields else out.any(1)
        out = out | dropped[:, None] if second_yields else np.stack([dropped, dropped], 1)
        kept, trained = np.where(out, 0, kept), np.where(out, 0, trained)
        self.kept = kept
        max_pairs = None if max_documents is None else max_documents // 2
        self.plan = plan_rows(
            kept.sum(1),
            self.length,
            overflow="error",
            packing=packing,
            name=lambda pair: documents.source(2 * pair),
            max_documents=max_pairs,
        )
        self.max_pairs = max_pairs or self.plan.max_documents
        self.max_documents = 2 * self.max_pairs
        self.without_second = int((out[:, 1] & ~dropped).sum())
        cut = (kept < lengths) & ~dropped[:, None]
        if second_yields:
            cut[:, 1] = False
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
        """The number of rows."""
        return self.plan.rows

    @property
    def lengths(self) -> np.ndarray:
        """int64[rows]: the number of tokens in each row, the sum over both documents of its pairs, padding not counted.
        With data.packing=step, where a row is one pair, steps are packed by them (`steps.StepBatches`)."""
        return self.plan.lengths

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of `rows` rows of padding as new numpy arrays, into which `fill` then writes pairs; the train step is
        compiled for its shapes. With P the most pairs of a row of the batch (`max_pairs` x `shared`), its `extra` has
        the float32 arrays PAIRS, [rows, P] (1 where there is a pair), and, if these pairs have them, LABELS, [rows, P]
        (a number for each pair), and REFERENCE, [rows, P, 2] (log-probabilities of the answers), all zeros.

        Args:
            rows: the number of rows of the batch.
            length: the number of tokens in a row of the batch; None is `self.length`, that of these rows.
            shared: how many of these rows may be written into one row of the batch.
        """
        most = self.max_pairs * shared
        extra: dict[str, np.ndarray] = {PAIRS: np.zeros((rows, most), np.float32)}
        if self.labels is not None:
            extra[LABELS] = np.zeros((rows, most), np.float32)
        if self.reference is not None:
            extra[REFERENCE] = np.zeros((rows, most, 2), np.float32)
        return dataclasses.replace(Batch.empty(rows, length or self.length), extra=extra)

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """Writes the pairs of row number `row` of these, in place, into row `slot` of a batch, from token `at` on, and
        returns the index after their last token: both documents of each pair, and its values in `extra` at its index in
        the row. place: how many of these rows were written into the same row of the batch before, so that segment ids
        and indices in `extra` do not overlap. `Batches`, `FedBatches` and `StepBatches` call it; only StepBatches
        writes several of these rows into one."""
        documents, before = self.documents, place * self.max_pairs
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
        """Where the pairs of row number `row` came from, as `file:line`, one for each pair, in the order in which the
        row has them. A run prints it if the loss of a step with this row is not finite."""
        return [self.documents.source(2 * pair) for pair in self.pairs(row)]

    def pairs(self, row: int) -> list[int]:
        """The indices of the pairs that row number `row` has, in the order in which they are in it; pair i is documents
        2i and 2i + 1. `fill` writes these pairs, and objectives/references.py computes their references."""
        pieces = slice(self.plan.row_starts[row], self.plan.row_starts[row + 1])
        return [int(pair) for pair in self.plan.document[pieces]]


def _shortened(lengths: np.ndarray, length: int) -> np.ndarray:
    """int64[pairs, 2]: the lengths of both documents of each pair after truncation, so that their sum is at most
    `length`: the longer one loses tokens first, then both equally. lengths: int64[pairs, 2], the lengths before.
    `PackedPairs` cuts pairs by it with overflow="truncate"."""
    half, shorter = length // 2, lengths.min(1)
    cut = np.where(shorter > half, half, length - shorter)  # of an odd length both lose one token more
    room = np.where(lengths.sum(1) > length, cut, lengths.max(1))
    return np.minimum(lengths, room[:, None])


def _yielded(lengths: np.ndarray, length: int) -> np.ndarray:
    """int64[pairs, 2]: lengths after truncation to `length` tokens a pair, in which the second document has the room
    that the first one leaves."""
    first = np.minimum(lengths[:, 0], length)
    return np.stack([first, np.minimum(lengths[:, 1], length - first)], 1)


@dataclasses.dataclass(frozen=True)
class PairDataset(TokenDataset):
    """Tokenised preference pairs, ready to be packed and batched, which preference objectives make of a TokenDataset
    (`Pairs.prepare`). Documents 2i and 2i + 1 are pair i, the chosen and the rejected answer, each after the prompt;
    for kto, the row's own and a mismatched answer."""

    reference: np.ndarray | None = None
    """float32[documents] or None: the sum of the log-probabilities of each document's answer under the reference model,
    NaN where it is not computed yet."""
    labels: np.ndarray | None = None
    """float32[pairs] or None: a number that the objective gives each pair, its margin or (kto) 1 if its answer is
    desirable, else 0. Batches have it as LABELS."""
    whole: bool = False
    """Whether pairs that would have to be cut are left out (True, for reward) or cut (False)."""
    second_yields: bool = False
    """Whether the second documents, which are not a row's own, have only the room that the first ones leave (True, for
    kto), or both are cut alike."""
    width: int | None = None
    """The number of tokens in a row, if `length` is the most tokens of each document; None if `length` is the most
    tokens of a pair, and of a row. `in_rows` sets it."""

    @functools.cached_property
    def rows(self) -> PackedPairs:  # type: ignore[override]
        """The packed rows of pairs; packing is planned on first access. With packing="step" each row is one pair, and
        `steps.pack_steps` packs them; then, and with `width`, `length` limits each document, and otherwise the pair.
        Raises `NothingUsable` if no pair is left whose documents both have a trained token, and ValueError if
        `overflow` is "split", or is "error" and a document or pair is longer than its limit, or if a pair is longer
        than `width`."""
        rows = PackedPairs(
            self.documents,
            self.length,
            overflow=self.overflow,
            packing=self.packing is True,
            reference=self.reference,
            labels=self.labels,
            whole=self.whole,
            second_yields=self.second_yields,
            width=2 * self.length if self.packing == "step" else self.width,
            max_documents=self.max_documents,
        )
        if not len(rows):
            raise NothingUsable(
                f"no pair has a trained token in both answers within data.length={self.length}; raise it"
            )
        return rows

    def warnings(self) -> list[str]:
        """Those of TokenDataset, and how many pairs were cut because data.length holds both answers."""
        found, rows = super().warnings(), self.rows
        if self.packing == "step" or self.width is not None:
            return found
        room = f"data.length = {self.length:,}, which is the room for both; raise it, or set data.packing: step, with "
        room += "which each answer may have that many"
        if rows.report.truncated and not self.second_yields:
            found.append(f"{rows.report.truncated:,} answers are cut, because the pair is longer than {room}")
        if rows.without_second:
            found.append(
                f"{rows.without_second:,} rows estimate no divergence, because their mismatched answer has no place in "
                f"{room}"
            )
        return found

    @property
    def longest(self) -> int:
        """The most tokens that any pair could have after truncation with packing="step", where `length` limits each of
        its two documents: 2 * length, whatever the pairs are. `pack_steps` makes no row longer than that."""
        return 2 * self.length

    def in_rows(self, slots: int) -> PairDataset:
        """The data set as it is evaluated, or passed once through the reference model. With packing="step" it is a copy
        that is packed into rows of `slots` tokens, because the length of rows is known only when the training steps are
        packed. Callers give at least the tokens of the longest pair; a longer one raises ValueError when the rows are
        packed. Otherwise it is `self`, and `slots` is not used."""
        return self if self.packing != "step" else dataclasses.replace(self, packing=True, width=slots)

    def split(self, eval_rows: float) -> tuple[PairDataset, PairDataset]:
        """Divides the pairs into (train, eval), as data.eval_rows asks, each with the references and labels of its
        pairs. eval_rows: the number of pairs for evaluation, or below 1 a share of them. Those whose first documents
        have the smallest hashes are chosen (`Documents.held_out`); training pairs with the same first document as one
        of them are in neither data set. Raises ValueError if either set would be empty."""
        rest, chosen = self.documents.held_out(np.arange(0, len(self.documents), 2), eval_rows, "pairs")

        def of_pairs(pairs: np.ndarray) -> PairDataset:
            """A copy with only the pairs at the indices `pairs` (int64[n]), in that order."""
            indices = np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1)
            reference = None if self.reference is None else self.reference[indices]
            labels = None if self.labels is None else self.labels[pairs]
            return dataclasses.replace(
                self, documents=self.documents.select(indices), reference=reference, labels=labels
            )

        return of_pairs(rest), of_pairs(chosen)
