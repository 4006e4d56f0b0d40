"""Batches, and the sources that give one to each step of a run.

A `Batch` is what a train step computes on. A `BatchSource` gives the batch of each step, and says what a checkpoint has
to record so that a resumed run gets the same ones. `Batches` is the source of rows that are all known before the run:
the order of an epoch is a permutation computed from (seed, epoch) alone, so its position is the number of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder


# What json.dumps takes.
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None


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


class BatchSource:
    """Gives a run the batch of each of its steps. This is the base of all sources; the defaults are those of a source
    that needs nothing of what the methods are for.

    `Batches` (below) gives rows that were tokenised before the run, `feeds.FedBatches` rows that are read while it goes
    on, mixed from several sets. A source may also see the model that trains, and make its rows with it (`sees_model`):
    that is how reinforcement learning samples. A `Trainer` takes any source as its `train_rows`.

    Attributes:
        rows_per_step: rows in each batch, over all devices.
        length: slots in a row.
        max_documents: the most documents in any row of any step; None promises nothing, and costs faster attention.
        full: whether every row of every step is one document without padding.
        sees_model: whether `batch_at` is given the model. The batch of a step can then not be made while the step
            before it is computed, and the device waits for it.
        lanes: equal parts that the rows of a batch are made in, one part after another along its first axis; each
            device, or group of devices, that shares the rows takes its rows from one lane.
        steps_per_epoch: steps in which every row is seen once; None where nobody knows, and `steps` must be set.
    """

    rows_per_step: int
    sees_model: bool = False
    lanes: int = 1

    @property
    def length(self) -> int:
        raise NotImplementedError

    @property
    def max_documents(self) -> int | None:
        return None

    @property
    def full(self) -> bool:
        return False

    @property
    def steps_per_epoch(self) -> int | None:
        return None

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as fresh numpy arrays: the shapes of what a step computes."""
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of a step (counted from 0), as numpy arrays `[rows_per_step, ...]`.

        Steps are asked for in ascending order, from the one that the run begins or resumes with; the last one may be
        asked for again.

        Args:
            model: where `sees_model`, gives the model as it is before the step; its trained arrays are used up by the
                step.
        """
        raise NotImplementedError

    def sources_at(self, step: int) -> list[str]:
        """Where the rows of a step that was made lately came from, such as `file:line`: for messages."""
        return []

    def divide(self, lanes: int, own: Sequence[int]) -> None:
        """Called once, before the first batch: `lanes` equal parts of the rows are computed on by different devices,
        and this process needs the parts `own`. A source that sets `lanes` may leave the rows of all others empty."""

    def position(self, step: int) -> Json:
        """What a checkpoint before `step` has to record, so that `resume` continues with the same batches; None
        where the number of the step is all that is needed. With several processes, all of them call this."""
        return None

    def resume(self, step: int, position: Json) -> None:
        """Makes `step` the next one, from what `position` returned for it."""

    def identity(self) -> dict[str, Json]:
        """What the rows are known by: a resume is refused where any of it has changed."""
        return {}

    def described(self, total_steps: int) -> list[str]:
        """What a run of `total_steps` steps says of its rows, line by line."""
        return ["training rows: made during the run", f"{total_steps:,} steps of {self.rows_per_step:,} rows"]

    def warnings(self) -> list[str]:
        """What somebody who gave these rows should know before training, a sentence each."""
        return []

    def news(self) -> list[str]:
        """What happened to the rows since this was asked the last time, a sentence each; asked after each step."""
        return []

    def metrics_at(self, step: int) -> dict[str, float]:
        """Numbers for the metrics of a step that was made, asked for once."""
        return {}

    def close(self) -> None:
        """Called when the run ends, however it does."""


class Rows(Protocol):
    """Rows that can be built on demand, such as `packing.PackedRows`."""

    length: int
    max_documents: int
    full: bool
    documents: Any  # packing.Documents, which they are made of
    report: Any  # packing.PackingReport

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


class Batches(BatchSource):
    """The source of rows that are known before the run; each batch has exactly `rows_per_step` rows.

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
        return self.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """See BatchSource; any step may be asked for at any time."""
        batch = self.empty(self.rows_per_step)
        for slot, row in enumerate(self.rows_at(step)):
            self.rows.fill(batch, slot, int(row))
        return batch

    def sources_at(self, step: int) -> list[str]:
        """Where the documents of a step came from (`file:line`), in the order of the batch."""
        return [source for row in self.rows_at(step) for source in self.rows.sources(int(row))]

    def identity(self) -> dict[str, Json]:
        return {
            "rows": len(self.rows),
            "tokens_crc32": self.rows.documents.tokens_crc32,
            "trained_tokens": self.rows.report.trained_tokens,
            **({} if self.order == "shuffled" else {"order": self.order}),
        }

    def described(self, total_steps: int) -> list[str]:
        return [
            f"training rows: {self.rows.report}",
            f"{total_steps:,} steps; {self.steps_per_epoch:,} in an epoch of {len(self.rows):,} rows",
        ]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self.order == "given":
            epoch = 0
        known = self._order  # read once: the loader's thread and the loop's may ask for different epochs
        if known is not None and known[0] == epoch:
            return known[1]
        order = ORDERS[self.order](len(self.rows), self.seed, epoch)
        self._order = (epoch, order)
        return order
