"""Steps that train on a fixed number of documents: data.packing=step.

The documents of a step do not depend on lengths, as in trainers that pad each document, but are packed into common
rows. Every batch gets the rows of the run's largest step, rounded up for the devices, so its shape never changes; this
needs lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtune.models.placement import partition
from jaxtune.system import processes
from jaxtune.train.data.batches import Batch, Batches, Order, Rows

if TYPE_CHECKING:
    from jaxtune.train.config import MeshConfig
    from jaxtune.train.data.dataset import TokenDataset

_WIDTH = 64  # the length of rows is a multiple of this number of tokens


class StepBatches(Batches):
    """Batches whose steps each train on `per_step` documents (or pairs), packed for each step; an epoch's last may have
    fewer.

    A batch has `rows_per_step` rows of `length` tokens: what the largest micro-batch needs, rounded up to `multiple`,
    times `micro_batches`. Raises ValueError without rows, for `per_step` below 1, or a negative seed.

      rows: one document or pair each.
      per_step: a multiple of `micro_batches`.
      steps: of the run; all are packed in advance.
      length: at least the tokens of the longest document or pair.
      micro_batches: micro-batches of a step, which share no rows; None: one.
      multiple: devices that share a micro-batch's rows.
      order: with "given" all epochs are packed alike.
    """

    def __init__(
        self,
        rows: Rows,
        per_step: int,
        steps: int,
        length: int,
        *,
        micro_batches: int | None = None,
        multiple: int = 1,
        seed: int = 0,
        order: Order = "shuffled",
    ):
        super().__init__(rows, per_step, seed=seed, order=order)
        self._length, self._parts = length, micro_batches or 1
        self._plan: tuple[int, np.ndarray] | None = None
        most, shared = 0, 0
        for epoch in range(-(-steps // self.steps_per_epoch)):
            row_numbers = self._pack_epoch(epoch)[: steps - epoch * self.steps_per_epoch]
            most = max(most, int(row_numbers.max()) + 1)
            shared = max(shared, _most_equal(row_numbers))
            if order == "given":
                break
        self._rows_of_a_part = -(-most // multiple) * multiple
        self._shared = shared
        self.rows_per_step = self._rows_of_a_part * self._parts

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; not data.length, which limits one document here."""
        return self._length

    @property
    def max_documents(self) -> int:
        """Most documents in a row of any step."""
        return self.rows.max_documents * self._shared

    @property
    def document_tokens(self) -> float:
        """Of full steps."""
        of_rows = self.rows.document_tokens * self.rows.length * self._taken
        return of_rows / (self.rows_per_step * self._length)

    @property
    def max_pictures(self) -> int:
        return self.rows.max_pictures * self._shared

    @property
    def full(self) -> bool:
        """False: rows are shared and padded."""
        return False

    def empty(self, rows: int) -> Batch:
        """A batch of padding, with room in `extra` for all documents that may share a row."""
        return self.rows.empty(rows, self._length, self._shared)

    def batch_at(self, step: int, model: object = None) -> Batch:
        """The batch of `step`, from 0, in any order of steps. Raises ValueError if negative."""
        epoch, index = divmod(int(step), self.steps_per_epoch)
        numbers, of_row = self.rows_at(step), self._epoch_plan(epoch)[index]
        batch = self.empty(self.rows_per_step)
        for micro_batch, rows in enumerate(of_row):
            token_ends = np.zeros(self._rows_of_a_part, np.int64)
            row_counts = np.zeros(self._rows_of_a_part, np.int64)
            for offset, row in enumerate(rows.tolist()):
                if row < 0:
                    continue
                slot, number = micro_batch * self._rows_of_a_part + row, int(numbers[micro_batch * len(rows) + offset])
                token_ends[row] = self.rows.fill(batch, slot, number, int(token_ends[row]), int(row_counts[row]))
                row_counts[row] += 1
        return batch

    def described(self, total_steps: int) -> list[str]:
        layout = f"packed into {self.rows_per_step:,} rows of {self.length:,} tokens for each step"
        return [
            f"training rows: {self.rows.report.of_documents}",
            f"{total_steps:,} steps; {self.steps_per_epoch:,} in an epoch of {len(self.rows):,} rows, {layout}",
        ]

    def _epoch_plan(self, epoch: int) -> np.ndarray:
        """`_pack_epoch` of an epoch; the last one is kept."""
        epoch = 0 if self.order == "given" else epoch
        cached = self._plan  # read once, as in Batches._epoch
        if cached is None or cached[0] != epoch:
            cached = self._plan = (epoch, self._pack_epoch(epoch))
        return cached[1]

    def _pack_epoch(self, epoch: int) -> np.ndarray:
        """Packs an epoch's micro-batches by first fit, longest first: int64[steps, micro-batches, documents], -1 if
        empty.
        """
        lengths = np.zeros(self.steps_per_epoch * self._taken, np.int64)
        lengths[: len(self.rows)] = self.rows.lengths[self._epoch(epoch)]
        groups = lengths.reshape(-1, self._taken // self._parts)
        patches = np.zeros_like(lengths)
        patches[: len(self.rows)] = self.rows.patch_counts[self._epoch(epoch)]
        patches = patches.reshape(groups.shape)
        order = np.argsort(-groups, axis=1, kind="stable")
        # First fit leaves at most one row less than half full, which limits the number of rows.
        most = min(groups.shape[1], 2 * int(groups.sum(1).max()) // self._length + 1)
        most = groups.shape[1] if self.rows.patches else most
        room = np.full((len(groups), most), self._length)
        patch_room = np.full((len(groups), most), self.rows.patches)
        row_numbers, every = np.empty_like(groups), np.arange(len(groups))
        for documents in order.T:
            sizes, patch_sizes = groups[every, documents], patches[every, documents]
            row = np.argmax((room >= sizes[:, None]) & (patch_room >= patch_sizes[:, None]), axis=1)
            room[every, row] -= sizes
            patch_room[every, row] -= patch_sizes
            row_numbers[every, documents] = np.where(sizes > 0, row, -1)
        return row_numbers.reshape(self.steps_per_epoch, self._parts, -1)


def _most_equal(rows: np.ndarray) -> int:
    """The largest number of equal values, at least 1, along the last axis of `rows`; negative ones do not count."""
    ordered = np.sort(rows, axis=-1)
    most = 1
    while most < rows.shape[-1]:
        is_equal = (ordered[..., most:] == ordered[..., : rows.shape[-1] - most]) & (ordered[..., most:] >= 0)
        if not is_equal.any():
            break
        most += 1
    return most


def pack_steps(
    train: TokenDataset,
    held_out: Sequence[TokenDataset],
    steps: int,
    examples: int,
    micro_batches: int | None,
    mesh: MeshConfig | None,
    seed: int,
) -> tuple[StepBatches, list[TokenDataset]]:
    """Packs all steps of a run: (their batches, sets of held-out rows in rows of the same length). Raises ValueError as
    `rows`. examples: of a step.

    Rows are as long as the longest document or pair of all sets, in multiples of 64 tokens, at most `train.longest`.
    """
    longest = max(int(data.rows.lengths.max()) for data in (train, *held_out))
    length = min(train.longest, -(-longest // _WIDTH) * _WIDTH)
    batches = StepBatches(
        train.rows,
        examples,
        steps,
        length,
        micro_batches=micro_batches,
        multiple=_devices(mesh),
        seed=seed,
        order=train.order,
    )
    return batches, [data.in_rows(length) for data in held_out]


def _devices(mesh: MeshConfig | None) -> int:
    """The devices that share a micro-batch's rows: of the mesh, or of the run; one for a single process on CPU."""
    if mesh is not None:
        return partition.mesh_shape(*mesh.sizes).size
    several = jax.default_backend() != "cpu" or processes.count() > 1  # a single process uses one CPU device
    return jax.device_count() if several else 1
