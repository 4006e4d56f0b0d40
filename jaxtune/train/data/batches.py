"""Batches, and the sources that give one to each step of a run.

A `Batch` is what a train step computes on. A `BatchSource` makes the batch of each step, and says what a checkpoint
must record so that a resumed run gets the same batches. `Batches` is the source for rows that are all known before the
run. It writes packed rows (the interface `Rows`) into batches, in an order of each epoch that one of the functions in
`ORDERS` (`epoch_order`, `torch_order`, `given_order`) computes from (seed, epoch) alone, so a checkpoint need record
only the number of the step. `SampledRows` is the size of what a source or an evaluation that samples answers from the
model samples at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypedDict

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.generation.slot_plan import SlotPlan


# A value that json.dumps accepts.
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows, which a train step or an evaluation computes on, as a JAX pytree. Every field except the last two is
    an array `[rows, length]`: a numpy array while a source fills it, and a jax array once its rows are placed on the
    devices."""

    tokens: Any
    """int32: token ids; 0 on padding."""
    targets: Any
    """int32: the next token of the same document; 0 where there is none."""
    weights: Any
    """float32: 1 where the target at that position is trained on; 0 on prompts, padding and a document's last token."""
    segment_ids: Any
    """int32: the number of the document in its row, 1..n; 0 on padding."""
    positions: Any
    """int32: the index of the token in its document, from 0; 0 on padding."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arrays `[rows, ...]` by name, which the objective needs, such as the labels of pairs; {} if it needs
    none."""
    table_rows: dict[str, np.ndarray | jax.Array | jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """`[rows, length, size]` by name: the tokens' rows of the model's tables of embeddings (Decoder.tables) that the
    run's plan has on the host; else {}. `Engine.place` fills it in, and sources leave it empty."""

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """`rows` rows of padding, each of `length` tokens, as new numpy arrays (zeros, in the dtypes of the fields);
        `extra` is empty. Sources, and packed rows for them (`Rows.empty`), begin a batch with it and write rows into
        it; a row that is not written stays padding, without any trained token."""
        shape = (rows, length)
        return cls(
            tokens=np.zeros(shape, np.int32),
            targets=np.zeros(shape, np.int32),
            weights=np.zeros(shape, np.float32),
            segment_ids=np.zeros(shape, np.int32),
            positions=np.zeros(shape, np.int32),
        )


@dataclasses.dataclass(frozen=True)
class SampledRows:
    """The size of the batch in which answers are sampled from the model during a run, by a source or an evaluation.
    `setup.with_slots` plans by it how many of the rows fit the memory beside the weights and the optimizer's states."""

    length: int
    """The most tokens of a row, its prompt included."""
    most: int
    """The most rows that are sampled at a time."""


class Rollout(TypedDict, total=False):
    """A sampled answer, a line of rollouts.jsonl (display/rollouts.py)."""

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
    """Gives a run the batch of each of its steps. This is the base class of all sources; its methods have the defaults
    of a source whose batches depend on the number of the step alone.

    `Batches` (below) serves rows that were tokenised before the run, and `feeds.FedBatches` rows that are read during
    the run or mixed from several sets. A source can also ask for the model that is being trained (`sees_model`) and
    make its rows with it, as reinforcement learning does when it samples answers. A `Trainer` accepts any source as its
    `train_rows`.

    A subclass sets `rows_per_step` and defines `length` and `batch_at`, which makes the batch of a step; `empty` makes
    one of padding. Before the first batch, `divide` says which rows this process needs, and `limit_slots` how many
    answers may be sampled at a time. `position` and `resume` are for checkpoints, which also record `identity`;
    `described`, `warnings` and `news` are texts for the screen, and `metrics_at` adds to the log.
    """

    rows_per_step: int
    """The number of rows in each batch, over all devices."""
    sees_model: bool = False
    """Whether `batch_at` is given the model (True), or None in its place (False). With the model, a batch is made only
    after the step before it, and the device waits for it; otherwise batches are made ahead."""
    sampled_rows: SampledRows | None = None
    """The size of the batch in which the source samples answers with the model, by which the run plans memory for them
    (`limit_slots`). None if it samples none."""
    lanes: int = 1
    """1 if each process makes all rows of a batch. Otherwise the number of lanes: blocks of consecutive rows, all of
    the same size, into which a batch is divided, each computed by one device. A process then makes only the rows of its
    own lanes and leaves the others empty."""

    @property
    def length(self) -> int:
        """The number of tokens in a row of every batch, padding included, for which memory is planned and the steps are
        compiled. A subclass defines it; here it raises NotImplementedError."""
        raise NotImplementedError

    @property
    def max_documents(self) -> int | None:
        """The most documents in any row of any step, for which attention's kernels are compiled (for more, if held-out
        rows have more), so that no row may have more. None, the default, if no limit is known; attention that needs
        one, such as cuDNN's, is then not used. A deterministic run takes no limit, even if there is one."""
        return None

    @property
    def full(self) -> bool:
        """Whether every row of every step is one document without padding, by default False. The run asks once, before
        it compiles the step: if True, attention needs no mask of documents."""
        return False

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps in which every row is seen once; None, the default, if it is not known, as for streams
        and mixtures (`feeds.FedBatches`). Sources that sample answers know it from the number of prompts. The run turns
        the config's `epochs` into steps by it, and shows how much of an epoch is done. If it is None, the config must
        set `steps`."""
        return None

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays with the shapes and dtypes of this source's batches.

        The train step is planned and compiled with it, and batches are written into it.
        """
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of a step (counted from 0), as numpy arrays `[rows_per_step, ...]`, which have the rows of all
        devices. A source that has lanes fills only the rows of its process's own lanes (`divide`). A subclass defines
        it; here it raises NotImplementedError.

        The run calls it for every step. Before the run, --check shows a row of step 0. Steps are asked for in ascending
        order, from the step that the run begins or resumes with. The latest one may be asked for again.

        Args:
            step: the number of the step.
            model: given if `sees_model`, otherwise None: returns the model as it is before the step. The step donates
              its trained arrays, so they must not be used afterwards.
        """
        raise NotImplementedError

    def sources_at(self, step: int) -> list[str]:
        """Where the rows of `step`, a recent one, came from, such as `file:line`; [], the default, if that is not
        known. A run shows it if the loss or gradient of the step is not finite."""
        return []

    def limit_slots(self, plan: SlotPlan) -> None:
        """Sets the most rows that a source which samples answers may sample at a time, and the most layers whose
        weights its samplers may convert once instead of in each step (decode, if they are quantised): those of `plan`.
        It is called once the memory of the run is planned, if the source has `sampled_rows`, memory is limited and the
        run trains. By default, for a source that has no `sampled_rows`, it does nothing."""

    def divide(self, lanes: int, own: Sequence[int]) -> None:
        """Tells the source how devices share the rows of a batch; called once, before the first batch. By default
        nothing is done: each process makes all rows.

        Args:
            lanes: the number of blocks of consecutive rows into which a batch is divided, one for each device.
            own: the indices of the blocks whose rows this process needs. A source that sets its attribute `lanes` to
                this number may leave the other rows empty.
        """

    def position(self, step: int) -> Json:
        """What a checkpoint that is written before `step` must record, besides the number of the step, so that `resume`
        continues with the same batches; None, the default, if that number is enough. In a run of several processes, all
        of them call this."""
        return None

    def resume(self, step: int, position: Json) -> None:
        """Called before the first batch when a run is resumed: `step` is the next step. position: what `position(step)`
        returned in the earlier process. A source whose batches depend on the number of the step alone does nothing."""

    def identity(self) -> dict[str, Json]:
        """Values that identify the rows, such as checksums, by name, from which a run recognises its own rows; {} by
        default. They are stored in checkpoints, and a run whose values differ cannot resume, because it would continue
        with other rows. The processes of a run compare them, before `divide` is called, and must all have the same."""
        return {}

    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the code that makes the rows, such as rewards and tools. A run that
        continues says which of them have changed; this package's own are left out."""
        return {f"rows {type(self).__name__}": type(self)}

    def described(self, total_steps: int) -> list[str]:
        """The lines that a run of `total_steps` steps, or --check, prints about its rows before it begins: by default,
        that they are made during the run, and the numbers of steps and of rows in a step."""
        return ["training rows: made during the run", f"{total_steps:,} steps of {self.rows_per_step:,} rows"]

    def first_prompt(self) -> Sequence[int]:
        """The token ids of a prompt to which the source samples answers. --check shows it if `sees_model` is True,
        because there are no rows before the run. Empty by default, if there is none to show."""
        return ()

    def warnings(self) -> list[str]:
        """Warnings about the rows to show before training, with those lines, such as rows that were left out, one
        sentence each; [] by default. They end nothing: what makes rows unusable is raised as an error instead."""
        return []

    def rollouts_at(self, step: int) -> list[Rollout]:
        """The answers that were sampled for `step` (display/rollouts.py), given out once; [] by default."""
        return []

    def remarks(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warnings for the screen about the metrics of `step`, a line of metrics.jsonl; [] by default."""
        return []

    def news(self) -> list[str]:
        """Sentences about what happened to the rows since the last call, such as rows left out, or a sampled answer to
        show, which the run prints; called after each step. [] by default."""
        return []

    def metrics_at(self, step: int) -> dict[str, float]:
        """Values that the source adds to the logged metrics of `step`, by name, such as rewards; called after each
        `batch_at` of the step. {} by default."""
        return {}

    def close(self) -> None:
        """Called when the run ends, also when it fails or is interrupted, so that the source can end its threads and
        close its files. By default it does nothing."""


class Rows(Protocol):
    """The interface of a set of rows that are written into batches on demand, such as `packing.PackedRows`. A row is
    known by its index. `empty` makes a batch of padding, `fill` writes one of the rows into a row of that batch, and
    `sources` says where a row came from. `Batches`, `steps.StepBatches` and `feeds.FedBatches` make batches of such
    rows. With data.packing=step, several of these rows are written into one row of the batch."""

    length: int
    """The number of tokens in a row, padding included."""
    max_documents: int
    """The most documents in any row, or the larger number for which batches have room."""
    full: bool
    """Whether every row is one document without padding."""
    documents: Any
    """The `documents.Documents` that the rows were packed from."""
    report: Any
    """The `packing.PackingReport` of the rows."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]: the number of tokens in each row, padding not counted, in the order of the rows. With
        data.packing=step, the rows of each micro-batch, which the order of the epoch chooses, are packed by them into
        common rows of the batch. All batches of a run have rows of one length, which follows from the largest of these
        numbers in the whole training and held-out sets (`steps.pack_steps`). Other sources do not read them."""
        ...

    def empty(self, rows: int, length: int | None = None, shared: int = 1) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays. Sources make a batch by it, and then call `fill` for
        each row. The program of a step is compiled for its shapes.

        Args:
            rows: the number of rows of the batch.
            length: the number of tokens in a row of the batch; None is `self.length`.
            shared: how many of these rows may be written into one row of the batch; it decides the sizes of `extra`.
        """
        ...

    def fill(self, batch: Batch, slot: int, row: int, at: int = 0, place: int = 0) -> int:
        """Writes one of these rows, with its values in `extra`, into a row of a batch, in place. Sources call it when a
        run asks for the batch of a step.

        Args:
            batch: from `empty`.
            slot: the index of the batch's row that is written into.
            row: the index of the row to write.
            at: the index in the batch's row at which the first token is written.
            place: how many of these rows were written into the same row of the batch before this one.

        Returns:
            The index in the batch's row after the last token written.
        """
        ...

    def sources(self, row: int) -> list[str]:
        """Where the documents of row number `row` came from, as `file:line`, in the order in which the row has them. A
        run prints it if the loss of a step with this row is not finite."""
        ...


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch: int64[rows], a permutation of 0 .. rows - 1 that depends only on `seed` and
    the number `epoch`, each from 0 on. `Batches` ("shuffled") and mixtures shuffle their rows by it. Sources of sampled
    answers order their prompts by it, and streams their shards and the rows of a window.

    It is the same with every version of numpy: numpy guarantees that the raw stream of a bit generator such as Philox
    never changes for a key, which it does not guarantee for `Generator.permutation`.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    return np.argsort(keys, kind="stable")


def torch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation that transformers' Trainer uses for an epoch (from 0), int64[rows]: torch.randperm with seed +
    epoch. So a run that replaces one of transformers' sees the rows in the same order. Only jaxtune.compat, which runs
    scripts written for transformers and TRL, asks for it; no config key does.

    torch.randperm swaps each index i with i + (r mod (rows - i)), where r is the next 32-bit output of the Mersenne
    Twister.
    """
    draws = np.frombuffer(np.random.RandomState((seed + epoch) % 2**32).bytes(4 * rows), "<u4")
    order = list(range(rows))
    for place, chosen in enumerate((np.arange(rows) + draws % np.arange(rows, 0, -1)).tolist()):
        order[place], order[chosen] = order[chosen], order[place]
    return np.asarray(order, np.int64)


def given_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The identity permutation, int64[rows]: rows keep the order in which they were packed. It has the same signature
    as the other orders, and ignores seed and epoch. Evaluations, and passes of a reference model, use it; so does
    jaxtune.compat for a script that wants its rows in sequence."""
    return np.arange(rows)


# The functions that order the rows of an epoch, by name. Each takes (rows, seed, epoch).
Order = Literal["shuffled", "torch", "given"]
ORDERS: dict[str, Callable[[int, int, int], np.ndarray]] = {
    "shuffled": epoch_order,
    "torch": torch_order,
    "given": given_order,
}


class Batches(BatchSource):
    """The source of batches whose rows are all known before the run; each batch has exactly `rows_per_step` rows.

    Step `s` is batch `s % steps_per_epoch` of epoch `s // steps_per_epoch`. An epoch has every row once; its last batch
    is filled up with rows of padding, so that the shape never changes.

    Args:
        rows: the packed rows.
        rows_per_step: the number of rows in a batch, at least 1.
        seed: a non-negative integer that decides, with the number of the epoch, the order of the rows.
        order: how an epoch is ordered, a key of `ORDERS`; evaluation uses "given", the order in which rows were packed.

    Raises:
        ValueError: there are no rows, `rows_per_step` is below 1, or `seed` is negative.
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
        """The number of tokens in a row of every batch, padding included: that of the packed rows. Memory is planned
        and the steps are compiled for it."""
        return self.rows.length

    @property
    def max_documents(self) -> int:
        """The most documents in any row, or the larger number for which batches have room (`Rows.max_documents`).
        Attention's kernels are compiled for it, or for that of the held-out rows if it is larger."""
        return self.rows.max_documents

    @property
    def full(self) -> bool:
        """Whether every row of every batch is one document without padding, so that attention needs no mask of
        documents. False also if the last batch of an epoch is filled up with rows of padding."""
        return self.rows.full and len(self.rows) % self.rows_per_step == 0

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every row is seen once; the last one may have fewer rows. The run turns the
        config's `epochs` into steps by it, and an evaluation has as many batches."""
        return -(-len(self.rows) // self._taken)

    def rows_at(self, step: int) -> np.ndarray:
        """The indices in `rows` of the packed rows that step `step` (from 0) trains on: int64[n]. n is the number that
        the constructor was given as rows_per_step or, in the last step of an epoch, a smaller one. `batch_at` and
        `sources_at` take these rows, and a pass of a reference model stores its values by these indices. Raises
        ValueError if `step` is negative."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, index = divmod(int(step), self.steps_per_epoch)
        order = self._epoch(epoch)
        return order[index * self._taken : (index + 1) * self._taken]

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays, with the `extra` arrays that the packed rows need.
        `batch_at` writes a step's rows into it, and the train step is compiled for its shapes."""
        return self.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of a step (from 0), as new numpy arrays, whose rows are those that `rows_at` names, in that order,
        and padding after them if the last step of an epoch has fewer; steps may be asked for in any order. Runs,
        evaluations and passes of reference models call it. `model` is not used. Raises ValueError if `step` is
        negative."""
        batch = self.empty(self.rows_per_step)
        for slot, row in enumerate(self.rows_at(step)):
            self.rows.fill(batch, slot, int(row))
        return batch

    def sources_at(self, step: int) -> list[str]:
        """Where the documents of the rows of `step`, which may be any step, came from, as `file:line`, in the order of
        the batch. The run prints the first of them if the loss or gradient of the step is not finite."""
        return [source for row in self.rows_at(step) for source in self.rows.sources(int(row))]

    def identity(self) -> dict[str, Json]:
        """What a resumed run must have in common with this one, as checkpoints record it: {"rows": the number of packed
        rows, "tokens_crc32": a checksum of all tokens, "trained_tokens": the number of targets that are trained on,
        "order": the order, unless it is "shuffled"}. A run with other values is not resumed. When the evaluate command
        takes held-out rows out of data.train for exported weights, it refuses the rows if the checksum or the number
        data.eval_rows is not that of the run: the checksum is that of the undivided data.train, so it shows other rows
        or another tokenizer or template, but not another number."""
        return {
            "rows": len(self.rows),
            "tokens_crc32": self.rows.documents.tokens_crc32,
            "trained_tokens": self.rows.report.trained_tokens,
            **({} if self.order == "shuffled" else {"order": self.order}),
        }

    def described(self, total_steps: int) -> list[str]:
        """Two lines for the screen before a run of `total_steps` steps, and for --check: the counts of packing, and the
        numbers of steps and of rows in an epoch."""
        return [
            f"training rows: {self.rows.report}",
            f"{total_steps:,} steps; {self.steps_per_epoch:,} in an epoch of {len(self.rows):,} rows",
        ]

    def _epoch(self, epoch: int) -> np.ndarray:
        """The order of the epoch with this number (from 0), int64[rows]: the indices of the packed rows. `rows_at` asks
        for it at each step, so the order computed last is kept; `StepBatches` packs the steps of an epoch by it. With
        order="given" all epochs have the same."""
        if self.order == "given":
            epoch = 0
        known = self._order  # read once: the loader's thread may replace it with another epoch's meanwhile
        if known is not None and known[0] == epoch:
            return known[1]
        order = ORDERS[self.order](len(self.rows), self.seed, epoch)
        self._order = (epoch, order)
        return order
