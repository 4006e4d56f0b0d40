"""A teacher's k log-probabilities for each trained token of packed rows, for distillation without the teacher in
memory.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np

from jaxtune.train.data.batches import Batch
from jaxtune.train.data.documents import Documents
from jaxtune.train.data.packing import PackedRows

# The names of the arrays that batches have in Batch.extra, at the place of the token before the one that is predicted.
TEACHER_IDS = "teacher_ids"  # int32[rows, length, k]: token ids; -1 in places that are not used
TEACHER_LOG_PROBS = "teacher_log_probs"  # float32[rows, length, k]: their log-probabilities in nats


class TeacherValues:
    """Where a teacher's values for each trained token lie in one flat array; a document's first token has none.

    limit: tokens of a document that can be in a row; later ones have no values. None: all.
    k: stored tokens of a distribution.
    stored: [total] of dtype `entry(k)`, in document order, maybe memory-mapped; None until computed or read.
    total: trained tokens of all documents, within `limit`.
    counts: int64[documents], those of each.
    """

    def __init__(self, documents: Documents, limit: int | None, k: int):
        self.documents, self.limit, self.k = documents, limit, k
        self.stored: np.ndarray | None = None
        counts = np.array(documents.trained, np.int64)
        if limit is not None:
            for index in np.flatnonzero(np.asarray(documents.lengths) > limit).tolist():
                counts[index] = np.count_nonzero(documents[index].mask[1:limit])
        self.total, self._starts = int(counts.sum()), np.cumsum(counts) - counts
        self.counts = counts  # int64[documents]: the number of trained tokens of each

    @staticmethod
    def entry(k: int) -> np.dtype[np.void]:
        """The dtype of one token's values: "ids" int32[k], -1 where unused, and "log_probs" float32[k] in nats, 0
        there.
        """
        return np.dtype([("ids", np.int32, (k,)), ("log_probs", np.float32, (k,))])

    def of(self, document: int, offset: int = 0, count: int | None = None) -> slice:
        """The consecutive places in `stored` of a piece's trained tokens, without its first token. count: None, with
        offset 0, is the whole document within `limit`.
        """
        start = int(self._starts[document])
        if count is None:
            return slice(start, start + int(self.counts[document]))
        mask = self.documents[document].mask
        first = start + int(np.count_nonzero(mask[1 : offset + 1]))
        return slice(first, first + int(np.count_nonzero(mask[offset + 1 : offset + count])))


class TaughtRows(PackedRows):
    """Packed rows whose batches also have the teacher's values in `extra` (TEACHER_IDS, TEACHER_LOG_PROBS). values: of
    the same documents; `stored` may be set later.
    """

    def __init__(self, packed: PackedRows, values: TeacherValues):
        """Takes over the attributes of `packed`, so that nothing is packed again."""
        self.__dict__.update(packed.__dict__)
        self.packed, self.values = packed, values

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """As PackedRows, with extra arrays [rows, length, k]: ids -1 (unused) and log-probabilities 0."""
        batch = super().empty(rows, length, shared)
        shape = (*batch.tokens.shape, self.values.k)
        return dataclasses.replace(
            batch, extra={TEACHER_IDS: np.full(shape, -1, np.int32), TEACHER_LOG_PROBS: np.zeros(shape, np.float32)}
        )

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """As PackedRows, with values at the place before each trained token. While `stored` is None ids stay -1."""
        end, plan, stored = super().fill(batch, slot, row, at, place), self.plan, self.values.stored
        if stored is None:
            return end
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            count = int(plan.count[piece])
            where = at + np.flatnonzero(batch.weights[slot, at : at + count])
            entries = stored[self.values.of(int(plan.document[piece]), int(plan.offset[piece]), count)]
            batch.extra[TEACHER_IDS][slot, where] = entries["ids"]
            batch.extra[TEACHER_LOG_PROBS][slot, where] = entries["log_probs"]
            at += count
        return end

    def take(self, row: int, ids: np.ndarray, log_probs: np.ndarray, into: np.ndarray) -> None:
        """Puts the computed values of row `row` into the array `into` ([total], as `stored`). ids, log_probs: [length,
        k] at the place before each predicted token, from a batch with this row alone.
        """
        plan, position = self.plan, 0
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            document, offset, count = (int(array[piece]) for array in (plan.document, plan.offset, plan.count))
            mask = self.documents[document].mask[offset + 1 : offset + count]
            where, stored_slice = position + np.flatnonzero(mask), self.values.of(document, offset, count)
            into["ids"][stored_slice], into["log_probs"][stored_slice] = ids[where], log_probs[where]
            position += count

    def alone(self) -> PackedRows:
        """The same rows without values, for the teacher itself."""
        return copy.copy(self.packed)
