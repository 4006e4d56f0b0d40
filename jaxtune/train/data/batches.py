"""Batches of packed rows, in an order that one integer describes.

`Batch` is what the train step eats. `Batches` is a map from a global step to a `Batch`: the order of an
epoch is a permutation computed from (seed, epoch) alone, so the data cursor of a run is its step number,
and resuming reads nothing that was read before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows. Every field but `extra` is `[rows, length]`, a numpy or a jax array; the class is a JAX pytree.

    tokens: int32, token ids; 0 on padding.
    targets: int32, the next token of the same document; 0 where there is none.
    weights: float32, 1 where the target of that slot is trained on; 0 on prompts, padding and the last token
        of a document.
    segment_ids: int32, 1..n within a row, one number a document; 0 is padding.
    positions: int32, restarts at 0 in every document; 0 on padding.
    extra: what an objective's own rows hold beside these, by name, `[rows, ...]`.
    """

    tokens: Any
    targets: Any
    weights: Any
    segment_ids: Any
    positions: Any
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """`rows` rows of padding, as fresh numpy arrays."""
        shape = (rows, length)
        return cls(
            tokens=np.zeros(shape, np.int32),
            targets=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            segment_ids=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
        )


class Rows(Protocol):
    """Rows that can be built on demand, such as `packing.PackedRows`."""

    length: int
    max_documents: int
    full: bool
    documents: Any  # packing.Documents, which they are made of

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]: the slots of each row that are not padding."""
        ...

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of `rows` rows of padding, as fresh numpy arrays; of rows of another length, which `shared` of these
        rows share."""
        ...

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """Writes row number `row` into row `slot` of an empty batch, from slot `at` of that row on, where `place` of
        these rows stand before it; returns the slot after it."""
        ...

    def sources(self, row: int) -> list[str]:
        """Where the documents of a row came from, as `file:line`."""
        ...


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: int64[rows], a permutation that depends on nothing but its arguments.

    Philox's raw stream is fixed by its key for good (numpy promises that for bit generators, not for
    `Generator.permutation`), so the order also survives a newer numpy.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    return np.argsort(keys, kind="stable")


def torch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """As epoch_order, the permutation that transformers' Trainer takes: torch.randperm by seed + epoch.

    That exchanges each place with one from it on, drawn by the remainder of the Mersenne Twister's next 32 bits.
    """
    draws = np.frombuffer(np.random.RandomState((seed + epoch) % 2**32).bytes(4 * rows), "<u4")
    order = list(range(rows))
    for place, chosen in enumerate((np.arange(rows) + draws % np.arange(rows, 0, -1)).tolist()):
        order[place], order[chosen] = order[chosen], order[place]
    return np.asarray(order, np.int64)


def given_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the plan, in every epoch."""
    return np.arange(rows)


# How an epoch's rows are ordered, by name.
Order = Literal["shuffled", "torch", "given"]
ORDERS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": epoch_order,
    "torch": torch_order,
    "given": given_order,
}


class Batches:
    """`batch_at(step)` for every step of a run, each of exactly `rows_per_step` rows.

    Step `s` is batch `s % steps_per_epoch` of epoch `s // steps_per_epoch`. An epoch holds every row once; its
    last batch is filled up with empty rows, so that the shape never changes.

    Args:
        rows: the packed rows.
        rows_per_step: rows in a batch.
        seed: with the epoch's number, decides the order; a non-negative integer.
        order: of an epoch; "given" (evaluation) keeps that of the plan.
    """

    def __init__(self, rows: Rows, rows_per_step: int, *, seed: int = 0, order: Order = "shuffled"):
        if rows_per_step < 1:
            raise ValueError(f"rows_per_step must be at least 1, got {rows_per_step}")
        if not len(rows):
            raise ValueError("there are no rows to make batches of")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.rows = rows
        self.rows_per_step = self._taken = rows_per_step
        self.seed = seed
        self.order = order
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def length(self) -> int:
        """Slots in a row."""
        return self.rows.length

    @property
    def max_documents(self) -> int:
        """The largest number of documents in any row of the set: static, whatever the step."""
        return self.rows.max_documents

    @property
    def full(self) -> bool:
        """Whether every row of every step is one document without padding: static, whatever the step."""
        return self.rows.full and len(self.rows) % self.rows_per_step == 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self._taken)

    def rows_at(self, step: int) -> np.ndarray:
        """The numbers of the rows that step `step` trains on: int64[n], fewer in an epoch's last step."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, index = divmod(int(step), self.steps_per_epoch)
        order = self._epoch(epoch)
        return order[index * self._taken : (index + 1) * self._taken]

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as fresh numpy arrays: the shapes of what a step computes."""
        return self.rows.empty(rows)

    def batch_at(self, step: int) -> Batch:
        """The batch of a global step (counted from 0), as numpy arrays `[rows_per_step, length]`."""
        batch = self.empty(self.rows_per_step)
        for slot, row in enumerate(self.rows_at(step)):
            self.rows.fill(batch, slot, int(row))
        return batch

    def sources_at(self, step: int) -> list[str]:
        """Where the documents of a step came from (`file:line`), in the order of the batch: for messages."""
        return [source for row in self.rows_at(step) for source in self.rows.sources(int(row))]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self.order == "given":
            epoch = 0
        known = self._order  # read once: the loader's thread and the loop's may ask for different epochs
        if known is not None and known[0] == epoch:
            return known[1]
        order = ORDERS[self.order](len(self.rows), self.seed, epoch)
        self._order = (epoch, order)
        return order
