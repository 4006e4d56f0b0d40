"""Distillation: a student learns a teacher's next-token distributions.

The loss is the generalised Jensen-Shannon divergence of arXiv 2306.13649 at each trained token, with TRL's names:
`beta` chooses the divergence, and the temperature divides both models' logits, without a factor for its square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.structure import check_cache, require_cached
from jaxtune.models.lora import has_adapter, without_adapter
from jaxtune.train.config import CheckpointConfig, DataConfig, EvaluationConfig, MeshConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.tokens.teacher_values import TEACHER_IDS, TEACHER_LOG_PROBS
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.objective import TeacherColumn
from jaxtune.train.objectives.preference import require_fixed_base
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.objectives.teachers import BASE


def generalized_jsd(
    student_logits: jax.Array, teacher_logits: jax.Array, *, beta: float = 1.0, temperature: float = 1.0
) -> jax.Array:
    """float32[...]: the generalised Jensen-Shannon divergence, in nats, at each token, with gradients of the student
    only, for a user's own loop.

    With m = beta teacher + (1 - beta) student: beta KL(teacher || m) + (1 - beta) KL(student || m); at beta = 0
    KL(teacher || student), at beta = 1 KL(student || teacher). Raises ValueError for an option out of range.

    ```python
    losses = generalized_jsd(student_logits, teacher_logits, beta=0.5)  # [rows, length]
    loss = (losses * weights).sum() / weights.sum()
    ```

      student_logits, teacher_logits: float[..., vocab].
    """
    Distill(beta=beta, temperature=temperature)  # checks the options
    student = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits).astype(jnp.float32) / temperature)

    def kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """KL(p || q) in nats, float32[...], from log-probabilities [..., vocab]."""
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(student, mixture)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How a student's answers are sampled; all names except `slots` and `cache` are TRL's."""

    max_completion_length: int = 512
    """Most tokens of an answer."""
    top_k: int = 0
    """Only this number of most probable tokens; 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that add up to it; 1: all."""
    min_p: float = 0.0
    """Only tokens of at least min_p times the highest probability; 0: all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and answer become less probable; 1: none."""
    slots: int = 64
    """Most answers at a time; fewer if memory is short."""
    cache: str | None = None
    """As of Sampler: "fp8" stores keys and values in half the memory; None: in the model's dtype."""
    temperature: float | None = None
    """None: that of the loss."""

    @property
    def exact(self) -> bool:
        """As of Sampler; the loss compares no log-probabilities with the sampler's."""
        return False

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        check_cache("cache", self.cache)


@dataclasses.dataclass(frozen=True)
class Distill(SFT):
    """The objective of distillation: the mean divergence from a teacher over the tokens of sampled answers (on_policy
    above 0) and the trained tokens of rows (below 1, and in evaluations).

    The teacher is attached to the model (teachers.with_teacher); else it is the model with its adapter off. With
    teacher_top_k or teacher_logprobs its largest log-probabilities are stored before the run, and none runs. Raises
    ValueError for an option out of range, or stored values with on_policy above 0.
    """

    teacher: str | None = None
    """Folder or hub name; "base" or None: the model with its adapter off, or one attached in Python."""

    beta: float = 1.0
    """0: KL(teacher || student), 1: KL(student || teacher), between: Jensen-Shannon."""

    temperature: float = 1.0
    """Divides both models' logits."""

    on_policy: float = 1.0
    """Probability, 0 to 1, that a row's answer is sampled (TRL's `lmbda`) and not the data's."""

    drawing: Drawing = dataclasses.field(default_factory=Drawing)

    teacher_top_k: int | None = None
    """Log-probabilities stored for each trained token before the run; None: the teacher runs beside the student."""

    teacher_logprobs: str | None = None
    """Another program's file with them (data/tokens/teacher_files.py)."""

    name: ClassVar[str] = "distill"  # by which objective.name selects it
    sums: ClassVar[tuple[str, ...]] = ("entropy",)  # names of the sums of `loss` for metrics

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta = {self.beta}: must be from 0 to 1")
        if not 0.0 <= self.on_policy <= 1.0:
            raise ValueError(f"on_policy = {self.on_policy}: must be from 0 to 1")
        if min(self.temperature, self.sampling_temperature) <= 0:
            raise ValueError(f"temperature = {self.temperature}: must be above 0, as that of sampling")
        if self.offline and self.on_policy:
            raise ValueError(
                f"on_policy = {self.on_policy}: a teacher's log-probabilities are stored before the run, and answers "
                "that are sampled during it are not known then; set it to 0"
            )

    @classmethod
    def of(cls, sampling_temperature: float | None = None, **options: object) -> Distill:
        """The objective from a config's flat options; those of sampling go into `drawing`. Raises ValueError, TypeError
        for an unknown name. sampling_temperature: None: that of the loss.
        """
        drawing_names = {field.name for field in dataclasses.fields(Drawing)} - {"temperature"}
        drawing_options = {key: value for key, value in options.items() if key in drawing_names}
        loss_options = {key: value for key, value in options.items() if key not in drawing_names}
        drawing = dataclasses.replace(Drawing(temperature=sampling_temperature), **drawing_options)
        return dataclasses.replace(cls(), drawing=drawing, **loss_options)

    @property
    def sampling_temperature(self) -> float:
        return self.temperature if self.drawing.temperature is None else self.drawing.temperature

    @property
    def offline(self) -> bool:
        """Whether the teacher's log-probabilities are there before the first step."""
        return self.teacher_top_k is not None or self.teacher_logprobs is not None

    @property
    def drawn(self) -> Drawing | None:
        return self.drawing if self.samples else None

    @property
    def without_pictures(self) -> tuple[str, str] | None:
        if self.samples:
            return f"objective.on_policy = {self.on_policy}", "set objective.on_policy=0"
        return None if (column := self.needs_rows_before) is None else (column.key, "leave it out")

    @property
    def reference_runs(self) -> int:
        return 0 if self.offline else 1

    @property
    def reference_is_base(self) -> bool:
        return self.teacher in (None, BASE) and self.teacher_logprobs is None

    @property
    def samples(self) -> bool:
        return self.on_policy > 0

    @property
    def needs_rows_before(self) -> TeacherColumn | None:
        if not self.offline:
            return None
        key = "objective.teacher_top_k" if self.teacher_logprobs is None else "objective.teacher_logprobs"
        return TeacherColumn(key, self.teacher, self.teacher_top_k, self.teacher_logprobs, self.temperature)

    def refuses(
        self, data: DataConfig, mesh: MeshConfig | None, evaluation: EvaluationConfig, checkpoint: CheckpointConfig
    ) -> None:
        super().refuses(data, mesh, evaluation, checkpoint)

    def check(self, model: Decoder) -> None:
        """Raises ValueError without an attached teacher if the model with its adapter off cannot be it, or for a cache
        that the model has not.
        """
        if self.samples:
            require_cached(model, "objective.cache", self.drawing.cache)
        if model.teacher is not None or self.offline:
            return
        if self.teacher not in (None, BASE):
            raise ValueError(
                f"objective.teacher = {self.teacher!r}: the model has no teacher attached; the train command loads and "
                "attaches it, and in Python with_teacher(model, teacher) does (jaxtune.train.objectives.teachers)"
            )
        if not has_adapter(model):
            raise ValueError(
                f"objective.teacher = {self.teacher!r}: the teacher is the model with its adapter off, and this one "
                "has no adapter: set adapter: {}, or name a teacher's folder"
            )
        require_fixed_base(self.name, model)

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Sum of divergences at trained targets in nats; with stored values the other tokens are one outcome
        (linear_top_k_divergence). Returns as Objective.loss.
        """
        if self.offline:
            hidden, stored = forward(model, batch), (batch.extra[TEACHER_IDS], batch.extra[TEACHER_LOG_PROBS])
            loss, entropy = forward.top_k_divergence(
                model, hidden, *stored, batch.weights, beta=self.beta, temperature=self.temperature
            )
            return loss, batch.weights.sum(), {"entropy": entropy}
        teacher = without_adapter(model) if model.teacher is None else model.teacher
        hidden, of_teacher = forward(model, batch), forward.frozen(teacher, batch)
        loss, entropy = forward.divergence(
            model, hidden, teacher, of_teacher, batch.weights, beta=self.beta, temperature=self.temperature
        )
        return loss, batch.weights.sum(), {"entropy": entropy}

    def metrics(self, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """{"entropy": mean of the student's distributions at the temperature, in nats}."""
        return {"entropy": sums["entropy"] / (sums["count"] + (sums["count"] == 0))}
