"""The interface of objectives, and what they declare to the rest of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import Head
from jaxtune.train.config import CheckpointConfig, ConfigError, DataConfig, EvaluationConfig, MeshConfig
from jaxtune.train.config.checks import require
from jaxtune.train.data.batches import Batch, BatchSource, Drawn
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.sampling import Settings

_LEARNT = 1e-10  # a loss whose gradient may underflow


@dataclasses.dataclass(frozen=True)
class ReferenceColumn:
    """Log-probabilities of answers under the model before its first step, or without its adapter."""

    key: str
    """The config key that asks for it."""


@dataclasses.dataclass(frozen=True)
class TeacherColumn:
    """A teacher's largest log-probabilities at each trained token."""

    key: str
    """The config key that asks for it."""
    teacher: str | None
    """Folder or hub name; "base" or None: the model without its adapter, or the attached teacher."""
    top_k: int | None
    """How many a token, from a pass of the teacher; None: as the file has."""
    file: str | None
    """Of another program; None: a pass of the teacher computes them."""
    temperature: float
    """Divides the teacher's logits in its pass."""


type Column = ReferenceColumn | TeacherColumn


def require_known_rows(column: Column) -> None:
    """Raises ConfigError: rows that a run reads or makes while it trains cannot have the column."""
    raise ConfigError(
        f"{column.key}: needs all rows before the run, and rows that are streamed, mixed or made during it are not "
        "known then; read them all (data.streaming=false, one set), or leave it out"
    )


class Declared(Protocol):
    """What an objective declares beside its loss; nobody asks for its name or class. A subclass inherits the defaults,
    those of a loss over rows that are read.
    """

    row_format: ClassVar[str | None] = None
    """The only format of its rows, of `data.rendering.formats`; None: data.format's."""
    has_row_loss: ClassVar[bool] = True
    """Whether held-out rows have a loss."""
    no_right_answer: ClassVar[str | None] = None
    """Why no row has an answer to compare the model's with; None: rows have one."""
    reads_pictures: ClassVar[bool] = False
    """Whether its rows may have pictures: its `prepare` then takes `pictures` (PictureOptions), too."""

    @property
    def by_micro_batch(self) -> bool:
        """Whether a row's loss depends on the others of its micro-batch."""
        return False

    @property
    def without_pictures(self) -> tuple[str, str] | None:
        """(A setting with which its rows have none although it reads them, what to do instead), such as
        ("objective.on_policy = 1.0", "set objective.on_policy=0").
        """
        return None

    @property
    def label(self) -> str:
        """Its name in messages: that of config.objective, or a user's class."""
        kind = type(self)
        return vars(kind).get("name", kind.__name__)

    @property
    def samples(self) -> bool:
        """Whether the rows of training come from the model while it trains."""
        return False

    @property
    def packed(self) -> Settings | None:
        """How its sampled answers are made and packed into rows, where rows_per_step counts answers; None: it counts
        rows.
        """
        return None

    @property
    def drawn(self) -> Drawn | None:
        """How answers are drawn from the model while it trains; None: none are."""
        return self.packed

    @property
    def reference_runs(self) -> int:
        """Forward passes of a frozen model in each loss."""
        return 0

    @property
    def reference_is_base(self) -> bool:
        """Whether it compares the model with itself without its adapter."""
        return False

    @property
    def needs_rows_before(self) -> Column | None:
        """A column of the rows that is computed before step 0."""
        return None

    def refuses(
        self, data: DataConfig, mesh: MeshConfig | None, evaluation: EvaluationConfig, checkpoint: CheckpointConfig
    ) -> None:
        """Raises ConfigError for a key that does not go together with this objective."""
        if self.needs_rows_before is not None and (data.streaming or data.mixed):
            require_known_rows(self.needs_rows_before)
        require(
            self.no_right_answer is None or not evaluation.exact_match_rows,
            "evaluation.exact_match_rows",
            evaluation.exact_match_rows,
            f"{self.no_right_answer} (objective = {self.label}); leave it out",
        )

    def source(
        self, rows: object, tokenizer: Any, data: DataConfig, *, rows_per_step: int, ends: Sequence[int], seed: int
    ) -> BatchSource:
        """The source of training rows that samples them, from the prompts of `rows` as in `prepare`, for an objective
        that `samples`. Raises ValueError for unusable prompts, or if it has none.

          ends: token ids that end an answer.
        """
        raise ValueError(
            f"objective = {self.label}: it samples its rows, and nothing says how: define its `source`, or give "
            "Trainer a BatchSource that samples them as train_rows"
        )

    def zero_gradient(self, line: Mapping[str, float]) -> str | None:
        """Why a step with these metrics may have no gradient although it trains, in words; else None. Rows that are
        learnt, such as pairs beyond the margin of a hinge loss, have no loss either: its square may underflow in
        float32.
        """
        return "its rows are learnt" if abs(line["loss"]) <= _LEARNT else None

    def wrong_start(self, line: Mapping[str, float]) -> str | None:
        """How the first step's metrics contradict a reference that is still the model itself, in words; else None."""
        return None


class Objective(Declared, Protocol):
    """What a model is trained for. Implementations are frozen, hashable values, because compiled programs depend on
    them.
    """

    unit: ClassVar[str]
    """What the count of `loss` counts, plural, such as "pairs"; the loss of a step is the mean over them. "targets" are
    trained tokens, with losses in nats.
    """
    sums: ClassVar[tuple[str, ...]]
    """Names of `loss`'s further sums for metrics. Those in an attribute `largest` are largest values from 0 on, not
    sums.
    """
    head: ClassVar[Head]
    """Whether the model's head must predict tokens or score texts."""

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Rows, tokenised and cached, as a data set of packed batches.

        Raises ValueError for unusable rows.

          rows: a path, a data set's name, a list of dicts, or an earlier result, which is checked and returned.
          tokenizer: a fast Hugging Face tokenizer.
          vocab_size: all ids must be below it.
          max_rows: None reads all.
        """
        ...

    def check(self, model: Decoder) -> None:
        """Raises ValueError, with what to change, if the objective cannot train this model. Arrays may be
        `jax.ShapeDtypeStruct`s.
        """
        ...

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(Sum of losses, number of `unit`, {name: sum}) of a micro-batch, float32 scalars, traced under jit; gradients
        are of the first.

        They are added up over micro-batches and devices; a step's loss is total over total. forward: runs the model.
        """
        ...

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics of a step or evaluation beside the mean loss. sums: totals with "loss" and "count", arrays under jit
        or floats. The count may be 0: guard divisions.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RunNeeds:
    """What a run's objective and rows need beside a training step."""

    sampler: str | None = None
    """What samples from the model between steps, in words; None: nothing does."""
    reference_runs: int = 0
    """Forward passes of a frozen model in each loss."""
    rows_before: Column | None = None
    """A column of the rows that is computed before step 0."""

    @property
    def samples(self) -> bool:
        return self.sampler is not None

    @classmethod
    def of(cls, objective: Objective, batches: BatchSource | None = None) -> RunNeeds:
        """batches: None: the objective's own."""
        sampler = f"objective = {objective.label}" if objective.samples else None
        if sampler is None and batches is not None and batches.needs_model:
            sampler = f"train_rows = {type(batches).__name__}"
        return cls(sampler, objective.reference_runs, objective.needs_rows_before)
