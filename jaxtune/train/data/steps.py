"""Steps that train on a fixed number of documents: `data.packing: step`.

A step trains on as many documents (or pairs) as the config's `rows_per_step` says (the last of an epoch may have
fewer), in an order that does not depend on their lengths, as in trainers that pad every document. But the documents of
a step are packed into common rows, so that little of it is padding. The number of rows that this needs differs from
step to step. Therefore all steps of a run are packed before it begins, from lengths alone, and every batch gets as many
rows as the largest step needs, rounded up for the devices: the shape never changes. `pack_steps` does this and returns
the source of the batches, `StepBatches`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.train.data.batches import Batch, Batches, Order, Rows

if TYPE_CHECKING:
    from jaxtune.train.config import TrainConfig
    from jaxtune.train.data.dataset import TokenDataset

_WIDTH = 64  # the length of rows is a multiple of this number of tokens


class StepBatches(Batches):
    """The source of batches whose steps each train on `per_step` documents (or pairs), packed for each step;
    `pack_steps` makes it. The last step of an epoch may have fewer.

    A batch has `rows_per_step` rows of `length` tokens; both are the same for all steps. The attribute `rows_per_step`
    is not `per_step`, but the number of packed rows that the largest micro-batch of the run needs, rounded up to a
    multiple of `multiple`, times `parts`.

    Args:
        rows: rows of one document or pair each, without packing; an epoch has each of them once.
        per_step: the number of documents or pairs of a step, a multiple of `parts`.
        steps: the number of steps of the run, which are all packed in advance to find the number of rows.
        length: the number of tokens in a row, at least that of the longest document or pair.
        parts: the number of micro-batches of a step. The documents of a step are divided among them in their order, and
            documents of different micro-batches do not share rows. None is one micro-batch.
        multiple: the number of devices that share the rows; the number of rows in a micro-batch is a multiple of this.
        seed: a non-negative integer that decides, with the number of the epoch, the order of the rows.
        order: how an epoch is ordered, a key of `batches.ORDERS`. With "given", all epochs are packed alike.

    Raises:
        ValueError: there are no rows, `per_step` is below 1, or `seed` is negative.
    """

    def __init__(
        self,
        rows: Rows,
        per_step: int,
        steps: int,
        length: int,
        *,
        parts: int | None = None,
        multiple: int = 1,
        seed: int = 0,
        order: Order = "shuffled",
    ):
        """Packs every step of the run once, from lengths alone, to find how many rows the largest needs. The class
        describes the arguments."""
        super().__init__(rows, per_step, seed=seed, order=order)
        self._length, self._parts = length, parts or 1
        self._plan: tuple[int, np.ndarray] | None = None
        most, shared = 0, 0
        for epoch in range(-(-steps // self.steps_per_epoch)):
            made = self._pack_epoch(epoch)[: steps - epoch * self.steps_per_epoch]
            most = max(most, int(made.max()) + 1)
            shared = max(shared, _most_equal(made))
            if order == "given":
                break
        self._rows_of_a_part = -(-most // multiple) * multiple
        self._shared = shared
        self.rows_per_step = self._rows_of_a_part * self._parts

    @property
    def length(self) -> int:
        """The number of tokens in a row of every batch, padding included, as `pack_steps` chose it. It is not
        data.length, which is here the most tokens of one document. Memory is planned and the steps are compiled for
        it."""
        return self._length

    @property
    def max_documents(self) -> int:
        """The most documents in any row of any step, for which attention's kernels are compiled: those of one document
        or pair (1 or 2), times the most that share a row."""
        return self.rows.max_documents * self._shared

    @property
    def full(self) -> bool:
        """False: documents share rows, and rows have padding, so attention needs its mask of documents. The train step
        leaves out the segment ids, of which that mask is made, only where this is True."""
        return False

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays, whose `extra` arrays have room for the most documents
        or pairs that share a row in any step. `batch_at` writes a step's documents into it, and the train step is
        compiled for its shapes, which are those of every step."""
        return self.rows.empty(rows, self._length, self._shared)

    def batch_at(self, step: int, model: object = None) -> Batch:
        """The batch of `step` (from 0), as new numpy arrays, whose documents are packed here, those of each micro-batch
        into the rows of that micro-batch; empty documents are left out. Steps may be asked for in any order, up to the
        number of steps of the run. `model` is not used. Raises ValueError if `step` is negative."""
        epoch, index = divmod(int(step), self.steps_per_epoch)
        numbers, of_row = self.rows_at(step), self._epoch_plan(epoch)[index]
        batch = self.empty(self.rows_per_step)
        for part, rows in enumerate(of_row):
            at = np.zeros(self._rows_of_a_part, np.int64)
            place = np.zeros(self._rows_of_a_part, np.int64)
            for offset, row in enumerate(rows.tolist()):
                if row < 0:
                    continue
                slot, number = part * self._rows_of_a_part + row, int(numbers[part * len(rows) + offset])
                at[row] = self.rows.fill(batch, slot, number, int(at[row]), int(place[row]))
                place[row] += 1
        return batch

    def described(self, total_steps: int) -> list[str]:
        """Two lines for the screen before a run of `total_steps` steps: the counts of documents and tokens
        (`PackingReport.of_documents`), and the numbers of steps, of documents in an epoch, and of packed rows in a
        step."""
        layout = f"packed into {self.rows_per_step:,} rows of {self.length:,} tokens for each step"
        return [
            f"training rows: {self.rows.report.of_documents}",
            f"{total_steps:,} steps; {self.steps_per_epoch:,} in an epoch of {len(self.rows):,} rows, {layout}",
        ]

    def _epoch_plan(self, epoch: int) -> np.ndarray:
        """The plan of epoch number `epoch` (from 0): the row of each document, as `_pack_epoch` returns it, an array
        int64[steps, micro-batches of a step, documents of a micro-batch]. It is -1 for a document that must be skipped,
        because it is empty or the last step does not have it. The plan computed last is kept, because each step needs
        only a small share of it."""
        epoch = 0 if self.order == "given" else epoch
        known = self._plan  # read once, as in Batches._epoch
        if known is None or known[0] != epoch:
            known = self._plan = (epoch, self._pack_epoch(epoch))
        return known[1]

    def _pack_epoch(self, epoch: int) -> np.ndarray:
        """Packs all steps of epoch number `epoch` (from 0) by first fit, the longest document first. Each micro-batch
        is packed separately. The constructor calls it for every epoch of the run (for one if all are alike), to find
        the number of rows, and `_epoch_plan` for the epoch whose batches are made.

        Returns:
            int64[steps of the epoch, micro-batches of a step, documents of a micro-batch]: the index, within its
                micro-batch, of the row that each document is in; -1 for a document that is empty or that the last step
                does not have.
        """
        lengths = np.zeros(self.steps_per_epoch * self._taken, np.int64)
        lengths[: len(self.rows)] = self.rows.lengths[self._epoch(epoch)]
        groups = lengths.reshape(-1, self._taken // self._parts)
        order = np.argsort(-groups, axis=1, kind="stable")
        # First fit leaves at most one row less than half full, which limits the number of rows.
        most = min(groups.shape[1], 2 * int(groups.sum(1).max()) // self._length + 1)
        room = np.full((len(groups), most), self._length)
        found, every = np.empty_like(groups), np.arange(len(groups))
        for place in order.T:
            wanted = groups[every, place]
            row = np.argmax(room >= wanted[:, None], axis=1)
            room[every, row] -= wanted
            found[every, place] = np.where(wanted > 0, row, -1)
        return found.reshape(self.steps_per_epoch, self._parts, -1)


def _most_equal(rows: np.ndarray) -> int:
    """The largest number of equal values in any line along the last axis of `rows` (int64[..., documents]), negative
    ones not counted; at least 1. `rows` are the row numbers that `_pack_epoch` returns, so it is the most documents
    that share a row, for which a batch must have room."""
    ordered = np.sort(rows, axis=-1)
    most = 1
    while most < rows.shape[-1]:
        same = (ordered[..., most:] == ordered[..., : rows.shape[-1] - most]) & (ordered[..., most:] >= 0)
        if not same.any():
            break
        most += 1
    return most


def pack_steps(
    train: TokenDataset, held_out: TokenDataset | None, config: TrainConfig, steps: int
) -> tuple[StepBatches, TokenDataset | None]:
    """Packs all steps of a run with data.packing=step. Rows are as long as the longest document (or pair) of both sets,
    rounded up to a multiple of 64 tokens, but at most data.length, or for pairs twice that (`TokenDataset.longest`).
    `run_rows.source_of` calls it before the run; other values of data.packing do not need it.

    Args:
        train, held_out: data sets with packing="step"; held_out is None if the run evaluates nothing.
        config: of the run; rows_per_step (here the documents or pairs of a step), micro_batches, seed and mesh are
            read.
        steps: the number of steps of the run.

    Returns:
        (the batches of the steps; the held-out rows, to be packed into rows of the same length, or None).

    Raises:
        ValueError: the rows cannot be packed, as `rows` of either data set says.
    """
    needed = max(int(data.rows.lengths.max()) for data in (train, held_out) if data is not None)
    length = min(train.longest, -(-needed // _WIDTH) * _WIDTH)
    batches = StepBatches(
        train.rows,
        config.rows_per_step,
        steps,
        length,
        parts=config.micro_batches,
        multiple=_devices(config),
        seed=config.seed,
        order=train.order,
    )
    return batches, None if held_out is None else held_out.in_rows(length)


def _devices(config: TrainConfig) -> int:
    """The number of devices among which the rows of a micro-batch are divided, so that this number must divide the rows
    evenly: all devices of the mesh in `config`, since both axes divide rows, or all devices of the run if it has none.
    Without a mesh, a single process on a CPU counts as one device."""
    if config.mesh is not None:
        return partition.mesh_shape(*config.mesh.sizes).size
    several = jax.default_backend() != "cpu" or processes.count() > 1  # a single process uses one CPU device
    return jax.device_count() if several else 1
