"""A teacher's stored log-probabilities beside packed rows, for distillation without the teacher in memory: for each
trained token of the rows, the k most probable tokens of the teacher's distribution (or fewer, if a file has fewer) and
their log-probabilities. `TeacherValues` says where each document's values are in one array, and `TaughtRows` are
packed rows whose batches have them."""

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
    """The places of a teacher's k log-probabilities for each trained token of a set of documents, in one flat array,
    which may be a memory-mapped file. A document's first token is never predicted and has none. It is made before the
    values are known; `objectives.stored_teachers` sets `stored` before the first step or evaluation, and `of` says
    which of it is a piece's.

    Attributes:
        documents: the documents.
        limit: the number of tokens of a document that can be in a row; the trained tokens behind them have no values.
            None: all.
        k: the number of stored tokens of a distribution.
        stored: [total] of the dtype `entry(k)`, the values in the order of the documents; None until they are computed
            or read.
        total: the number of trained tokens of all documents, within `limit` and without first tokens.
        counts: int64[documents], the number of these tokens in each document.
    """

    def __init__(self, documents: Documents, limit: int | None, k: int):
        """Counts the trained tokens of each document, and reads the masks of those longer than `limit` for it. The
        class describes the arguments."""
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
        """The dtype of the values of one token: "ids" int32[k], -1 in places that are not used, and "log_probs"
        float32[k], natural logarithms, 0 there. `objectives.stored_teachers` makes the array of all values by it, in
        memory or in a file, and checks that the file of an earlier run has it."""
        return np.dtype([("ids", np.int32, (k,)), ("log_probs", np.float32, (k,))])

    def of(self, document: int, offset: int = 0, count: int | None = None) -> slice:
        """The places in `stored` of a piece's trained tokens, which are consecutive. The piece is the `count` tokens
        (None: all that can be in a row) of document number `document` from token `offset` on; its first token is not
        predicted, and is left out. Without a count, `offset` must be 0. `TaughtRows` finds by it the values of the
        pieces in a packed row, and `TeacherFile.read` those of a whole document."""
        start = int(self._starts[document])
        if count is None:
            return slice(start, start + int(self.counts[document]))
        mask = self.documents[document].mask
        first = start + int(np.count_nonzero(mask[1 : offset + 1]))
        return slice(first, first + int(np.count_nonzero(mask[offset + 1 : offset + count])))


class TaughtRows(PackedRows):
    """The packed rows `packed`, whose batches also have the teacher's `values` of their trained tokens in `extra`
    (TEACHER_IDS and TEACHER_LOG_PROBS). `TokenDataset.rows` makes it. `fill` reads the values from `values.stored`; in
    the pass that computes them, the teacher runs on `alone()`, the same rows without values, and `take` stores its
    results. values: those of the same documents; its `stored` is read whenever a row is written, so it may be set
    later."""

    def __init__(self, packed: PackedRows, values: TeacherValues):
        """Takes over all attributes of `packed`, so that nothing is packed again."""
        self.__dict__.update(packed.__dict__)
        self.packed, self.values = packed, values

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of `rows` rows of padding, each of `length` tokens (None: as long as these rows), as new numpy
        arrays, into which `fill` then writes; the train step is compiled for its shapes. Its `extra` has TEACHER_IDS,
        -1 everywhere (no place is used), and TEACHER_LOG_PROBS, zeros, each [rows, length, k]. `shared`, how many of
        these rows may be written into one row of the batch, changes nothing."""
        batch = super().empty(rows, length, shared)
        shape = (*batch.tokens.shape, self.values.k)
        return dataclasses.replace(
            batch, extra={TEACHER_IDS: np.full(shape, -1, np.int32), TEACHER_LOG_PROBS: np.zeros(shape, np.float32)}
        )

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """Writes row number `row` of these in place into row `slot` of a batch from token `at` on, with the teacher's
        values of its trained tokens in `extra` (TEACHER_IDS and TEACHER_LOG_PROBS, [rows, length, k], at the place of
        the token before), and returns the index after its last token. place: how many of these rows were written into
        the same row of the batch before; segment ids count from 1 + place x `max_documents`. As long as `values.stored`
        is None, as when rows are only shown, the ids in `extra` stay -1 (unused)."""
        end, plan, stored = super().fill(batch, slot, row, at, place), self.plan, self.values.stored
        if stored is None:
            return end
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            count = int(plan.count[piece])
            where = at + np.flatnonzero(batch.weights[slot, at : at + count])
            found = stored[self.values.of(int(plan.document[piece]), int(plan.offset[piece]), count)]
            batch.extra[TEACHER_IDS][slot, where] = found["ids"]
            batch.extra[TEACHER_LOG_PROBS][slot, where] = found["log_probs"]
            at += count
        return end

    def take(self, row: int, ids: np.ndarray, log_probs: np.ndarray, into: np.ndarray) -> None:
        """Puts the values of row number `row`, which the teacher has just computed, into the array `into`, in place:
        `[values.total]`, as `TeacherValues.stored` has them. ids, log_probs: [length, k], at the place of the token
        before the one that is predicted, as a batch with this row alone has it. `objectives.stored_teachers` calls it
        for each row of the teacher's pass; values that are read from a file do not go through it."""
        plan, at = self.plan, 0
        for piece in range(plan.row_starts[row], plan.row_starts[row + 1]):
            document, offset, count = (int(each[piece]) for each in (plan.document, plan.offset, plan.count))
            mask = self.documents[document].mask[offset + 1 : offset + count]
            where, place = at + np.flatnonzero(mask), self.values.of(document, offset, count)
            into["ids"][place], into["log_probs"][place] = ids[where], log_probs[where]
            at += count

    def alone(self) -> PackedRows:
        """The same rows without the teacher's values, whose batches have no `extra`: a shallow copy of `packed`, on
        which the teacher itself is run to compute the values."""
        return copy.copy(self.packed)
