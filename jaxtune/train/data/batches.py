"""Batches, and the sources that give one to each step of a run.

A source's checkpoint records what a resumed run needs to get the same batches. `Batches` orders the rows of an epoch
from (seed, epoch) alone, so there the number of the step suffices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypedDict

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.generation.division import Sharing
    from jaxtune.models.generation.slot_plan import SlotPlan


# A value that json.dumps accepts.
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows, a pytree of arrays `[rows, length]`: numpy while filled, jax on the devices."""

    tokens: Any
    """int32; 0 on padding."""
    targets: Any
    """int32: next token of the same document, 0 where there is none."""
    weights: Any
    """float32: 1 where the target is trained on; 0 on prompts, padding and each document's last token."""
    segment_ids: Any
    """int32: document in the row, 1..n; 0 on padding."""
    positions: Any
    """int32: index in the document, from 0; 0 on padding. `[rows, length, axes]` with pictures of a family whose
    positions have several axes.
    """
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays `[rows, ...]` that the objective needs, such as labels of pairs."""
    table_rows: dict[str, np.ndarray | jax.Array | jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """`[rows, length, size]`: tokens' rows of embedding tables (Decoder.tables) kept on the host. Filled by
    `Engine.place`.
    """
    pictures: dict[str, np.ndarray | jax.Array | jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """Of the rows; empty without any. With room for P patches a row, a picture's after each other:
    patches float32[rows, P, F]; patch_segments int32[rows, P], the picture's number in its row from 1, 0 on padding;
    patch_grids int32[rows, P, 2], (height, width) of its picture; patch_coordinates int32[rows, P, 2], (row, column);
    picture_features int32[rows, length], the index of a token's feature among those of its row, -1 for text.
    """

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        shape = (rows, length)
        return cls(
            tokens=np.zeros(shape, np.int32),
            targets=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            segment_ids=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
        )


class Drawn(Protocol):
    """How an objective's answers are drawn from the model, as of Sampler."""

    @property
    def max_completion_length(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def cache(self) -> str | None: ...

    @property
    def exact(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """The size of sampling during a run, for which memory is planned."""

    length: int
    """Most tokens of a row, prompt included."""
    count: int | None
    """Rows on all devices; None: any number at a time."""
    most: int
    """On a device at a time."""
    exact: bool = False
    """As of Sampler."""
    prefixes: bool = False
    """Whether states of prompts' beginnings are stored, in `prefix_room`."""
    cache: str | None = None
    """As of Sampler."""

    @classmethod
    def of(cls, drawn: Drawn, length: int, count: int | None, prefixes: bool = False) -> SampledRows:
        """Rows of an objective's answers."""
        return cls(length, count, drawn.slots, drawn.exact, prefixes, drawn.cache)

    def on(self, sharing: Sharing) -> int:
        """The most slots of each device."""
        return self.most if self.count is None else sharing.slots(self.count, self.most)


class Rollout(TypedDict, total=False):
    """A sampled answer, a line of rollouts.jsonl."""

    step: Required[int]
    row: int
    prompt: object
    answer: object
    rewards: dict[str, float]
    reward: float
    advantage: float
    tokens: int
    ended: str
    extra: dict[str, object]


class BatchSource:
    """Gives a run the batch of each step. The defaults are those of a source whose batches depend on the step alone.

    A subclass sets `rows_per_step` and defines `length` and `batch_at`. All processes of a run must get the same rows.
    """

    rows_per_step: int
    """Over all devices."""
    needs_model: bool = False
    """Whether `batch_at` gets the model; then a batch is made after the step before, and the device waits."""
    samples_together: bool = False
    """Whether `batch_at` samples in several processes, with the same calls in each."""
    sampled_rows: SampledRows | None = None
    """Size of its sampling; None if it samples nothing."""

    @property
    def length(self) -> int:
        """Tokens of a row, padding included; defined by subclasses."""
        raise NotImplementedError

    @property
    def max_documents(self) -> int | None:
        """Most documents in any row of any step, a limit that attention is compiled for. None: unknown, and attention
        that needs one, such as cuDNN's, is not used.
        """
        return None

    @property
    def document_tokens(self) -> float | None:
        """Tokens of the document that a token is in, on average over all tokens and padding (as 0), on which the time
        of attention depends. None: unknown.
        """
        return None

    @property
    def patches(self) -> int:
        """Patches for which a row of a batch has room; 0 without pictures."""
        return 0

    @property
    def max_pictures(self) -> int | None:
        """Most pictures in any row of any step; None: unknown."""
        return None if self.patches else 0

    @property
    def full(self) -> bool:
        """Whether each row of every step is one document without padding, and attention needs no mask; asked once."""
        return False

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in which each row is seen once; None: unknown, so the config must set `steps`."""
        return None

    def empty(self, rows: int) -> Batch:
        """A batch of padding with the shapes and dtypes of this source's batches, for which the step is compiled."""
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of a step, from 0: numpy arrays `[rows_per_step, ...]`, the same in every process. Steps ascend;
        the latest may be asked again.

          model: if `needs_model`, returns that before the step, which donates its trained arrays: do not keep them.
        """
        raise NotImplementedError

    def sources_at(self, step: int) -> list[str]:
        """Where the rows of a recent step came from, such as `file:line`, shown if its loss is not finite."""
        return []

    def limit_slots(self, plan: SlotPlan) -> None:
        """Sets how many answers may be sampled at a time and how many layers' weights converted once; called once if
        device memory is limited.
        """

    def position(self, step: int) -> Json:
        """What a checkpoint before `step` must record besides its number; None: nothing. The same in all processes."""
        return None

    def resume(self, step: int, position: Json) -> None:
        """Continues at `step` with what `position(step)` returned in an earlier process."""

    def identity(self) -> dict[str, Json]:
        """Values, such as checksums, that recognise the rows; a run with others does not resume. Equal in all
        processes.
        """
        return {}

    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of code that makes rows; a resumed run says what changed."""
        return {f"rows {type(self).__name__}": type(self)}

    def described(self, total_steps: int) -> list[str]:
        return ["training rows: made during the run", f"{total_steps:,} steps of {self.rows_per_step:,} rows"]

    def first_prompt(self) -> Sequence[int]:
        """Token ids of a prompt that is sampled from, for --check."""
        return ()

    def warnings(self) -> list[str]:
        """Sentences to show before training."""
        return []

    def columns(self) -> dict[str, str]:
        """{a set's name: what is read of its rows, in words}, of rows that the source reads."""
        return {}

    def rollouts_at(self, step: int) -> list[Rollout]:
        """Answers sampled for `step`, given out once."""
        return []

    def remarks(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warnings about a line of metrics.jsonl."""
        return []

    def news(self) -> list[str]:
        """Sentences about the rows since the last call; asked after each step."""
        return []

    def metrics_at(self, step: int) -> dict[str, float]:
        """Metrics that the source adds to those of `step`; asked after `batch_at`."""
        return {}

    def close(self) -> None:
        """Ends threads and closes files; called also after errors."""


class Rows(Protocol):
    """Rows that are written into batches on demand, by index. With data.packing=step several share a batch's row."""

    length: int
    """Tokens of a row, padding included."""
    max_documents: int
    """Most documents of a row, or the larger room of batches."""
    full: bool
    """Whether each row is one document without padding."""
    documents: Any
    report: Any

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]: tokens of each row, without padding."""
        ...

    @property
    def document_tokens(self) -> float:
        """As BatchSource.document_tokens."""
        ...

    @property
    def patches(self) -> int:
        """Patches for which a batch's row has room; 0 without pictures."""
        ...

    @property
    def patch_counts(self) -> np.ndarray:
        """int64[n]: patches of each row, without padding."""
        ...

    @property
    def max_pictures(self) -> int:
        """Most pictures of a row."""
        ...

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of padding, new numpy arrays.

        length: of the batch's rows; None is `self.length`.
        shared: how many of these rows may share one, for the sizes of `extra`.
        """
        ...

    def fill(self, batch: Batch, slot: int, row: int, offset: int = 0, rows_before: int = 0) -> int:
        """Writes row `row`, with its `extra`, into row `slot` of a batch in place, from token `offset` on; the index
        after it. rows_before: how many of these rows the slot has already.
        """
        ...

    def sources(self, row: int) -> list[str]:
        """`file:line` of a row's documents, in order."""
        ...


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """int64[rows]: an epoch's permutation, from seed and epoch (0 on) alone. The same in every version of numpy, which
    guarantees Philox's raw stream but not `Generator.permutation`.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    return np.argsort(keys, kind="stable")


def torch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """int64[rows]: the permutation of transformers' Trainer, torch.randperm with seed + epoch, for scripts that replace
    it.

    torch.randperm swaps index i with i + (r mod (rows - i)), where r is the next 32-bit output of the Mersenne Twister.
    """
    draws = np.frombuffer(np.random.RandomState((seed + epoch) % 2**32).bytes(4 * rows), "<u4")
    order = list(range(rows))
    for index, target in enumerate((np.arange(rows) + draws % np.arange(rows, 0, -1)).tolist()):
        order[index], order[target] = order[target], order[index]
    return np.asarray(order, np.int64)


def given_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """int64[rows]: rows in the order of packing."""
    return np.arange(rows)


# The functions that order the rows of an epoch, by name. Each takes (rows, seed, epoch).
Order = Literal["shuffled", "torch", "given"]
ORDERS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": epoch_order,
    "torch": torch_order,
    "given": given_order,
}


class Batches(BatchSource):
    """Batches of rows that are known before the run. An epoch has each row once; its last batch is filled with padding.

    Raises ValueError without rows, for `rows_per_step` below 1, or a negative seed.

      seed: decides with the epoch the order of the rows.
      order: a key of ORDERS.
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
        return self.rows.length

    @property
    def max_documents(self) -> int:
        return self.rows.max_documents

    @property
    def document_tokens(self) -> float:
        return self.rows.document_tokens

    @property
    def patches(self) -> int:
        return self.rows.patches

    @property
    def max_pictures(self) -> int:
        return self.rows.max_pictures

    @property
    def full(self) -> bool:
        """False also if an epoch's last batch has padding."""
        return self.rows.full and len(self.rows) % self.rows_per_step == 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self._taken)

    def rows_at(self, step: int) -> np.ndarray:
        """int64[n]: indices of the rows of `step`, from 0; fewer in an epoch's last. Raises ValueError if negative."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, index = divmod(int(step), self.steps_per_epoch)
        order = self._epoch(epoch)
        return order[index * self._taken : (index + 1) * self._taken]

    def empty(self, rows: int) -> Batch:
        return self.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of any step, in the order of `rows_at`, with padding behind."""
        batch = self.empty(self.rows_per_step)
        for slot, row in enumerate(self.rows_at(step)):
            self.rows.fill(batch, slot, int(row))
        return batch

    def sources_at(self, step: int) -> list[str]:
        return [source for row in self.rows_at(step) for source in self.rows.sources(int(row))]

    def identity(self) -> dict[str, Json]:
        """The checksum is that of an undivided data.train: it shows other rows, tokenizer or template, but not another
        number held out.
        """
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
        """int64[rows]: an epoch's order; the last one is kept."""
        if self.order == "given":
            epoch = 0
        cached = self._order  # read once: the loader's thread may replace it with another epoch's meanwhile
        if cached is not None and cached[0] == epoch:
            return cached[1]
        order = ORDERS[self.order](len(self.rows), self.seed, epoch)
        self._order = (epoch, order)
        return order
