"""Distillation: a student learns the next-token distributions of a teacher. `Distill` is the objective, `Drawing` has
its options of sampling answers, and `generalized_jsd` computes the divergence of two arrays of logits for training
loops of a user's own; a run does not call it.

The loss is the generalised Jensen-Shannon divergence of arXiv 2306.13649 at each trained token, with TRL's names and
conventions (GKDTrainer and DistillationTrainer): `beta` chooses the divergence, and the temperature divides the logits
of both models without a factor for its square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter, without_adapter
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.teacher_values import TEACHER_IDS, TEACHER_LOG_PROBS
from jaxtune.train.objectives.preference import require_fixed_base
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.objectives.teachers import BASE
from jaxtune.train.program.loss import Forward


def generalized_jsd(
    student_logits: jax.Array, teacher_logits: jax.Array, *, beta: float = 1.0, temperature: float = 1.0
) -> jax.Array:
    """Computes the generalised Jensen-Shannon divergence, in nats, between the student's and the teacher's next-token
    distribution at each token, directly from its definition. Gradients are taken of the student's logits only.

    With m = beta teacher + (1 - beta) student it is beta KL(teacher || m) + (1 - beta) KL(student || m). At beta = 0 it
    is defined as the forward divergence KL(teacher || student), at beta = 1 as the reverse one, KL(student || teacher).
    It is for training loops of a user's own. A run computes the same with linear_divergence
    (jaxtune.pallas.linear_cross_entropy), which needs no whole logits.

    ```python
    losses = generalized_jsd(student_logits, teacher_logits, beta=0.5)  # [rows, length]
    loss = (losses * weights).sum() / weights.sum()
    ```

    Args:
      student_logits, teacher_logits: float[..., vocab].
      beta: from 0 to 1.
      temperature: above 0; divides both logits.
    Returns:
      float32[...]
    Raises:
      ValueError: an option is out of its range.
    """
    Distill(beta=beta, temperature=temperature)  # checks the options
    student = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits).astype(jnp.float32) / temperature)

    def kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        """The Kullback-Leibler divergence KL(p || q) in nats, float32[...], of two distributions that are given as
        log-probabilities, `log_p` and `log_q`, float32[..., vocab]."""
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = jnp.logaddexp(teacher + jnp.log(beta), student + jnp.log1p(-beta))
    return beta * kl(teacher, mixture) + (1.0 - beta) * kl(student, mixture)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How a student's answers are sampled for on-policy distillation, by own_samples.OwnSamples. All names except
    `slots` are TRL's.

    Raises:
      ValueError: max_completion_length or slots is below 1. (`Distill` checks the temperature.)
    """

    max_completion_length: int = 512
    """The most tokens of an answer."""
    top_k: int = 0
    """Only this number of the most probable tokens can be sampled; 0 is all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities add up to top_p can be sampled; 1 is all."""
    min_p: float = 0.0
    """Only tokens whose probability is at least min_p times the highest one can be sampled; 0 is all."""
    repetition_penalty: float = 1.0
    """The penalty on tokens that the prompt or the answer already has: above 1 they become less probable; 1 is none."""
    slots: int = 64
    """The most answers that are sampled at a time; fewer are sampled if there is too little memory."""
    temperature: float | None = None
    """The logits are divided by it when answers are sampled. None: by the temperature of the loss."""

    def __post_init__(self) -> None:
        """Raises ValueError if max_completion_length or slots is below 1."""
        for name in ("max_completion_length", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")


@dataclasses.dataclass(frozen=True)
class Distill(SFT):
    """The objective (`objective.Objective`) of distillation: the mean divergence of a student's next-token
    distributions from a teacher's, over the tokens of sampled answers (with on_policy above 0) and over the trained
    tokens of rows for supervised fine-tuning (with on_policy below 1, and in evaluations).

    The teacher is attached to the model that trains (teachers.with_teacher); without one, the model with its adapter
    off is the teacher. With teacher_top_k or teacher_logprobs its largest log-probabilities are stored before the run,
    and the model trains without a teacher.

    Raises:
      ValueError: beta or on_policy is not from 0 to 1, a temperature is not above 0, or on_policy is not 0 with stored
        log-probabilities.
    """

    teacher: str | None = None
    """The teacher's folder or hub name; "base" or None for the model with its adapter off. The train command loads the
    teacher by this name. With a teacher that was attached in Python it may stay None."""

    beta: float = 1.0
    """Which divergence: 0 is the forward Kullback-Leibler divergence, KL(teacher || student), 1 the reverse one, and
    values between them are Jensen-Shannon divergences."""

    temperature: float = 1.0
    """Divides the logits of both models."""

    on_policy: float = 1.0
    """The probability, from 0 to 1, with which a data row's answer is sampled from the student (TRL's `lmbda`); the
    others keep the answer that the data set has. It decides which rows a run makes (own_samples.py); the loss is the
    same for all."""

    drawing: Drawing = dataclasses.field(default_factory=Drawing)
    """How answers are sampled, if on_policy is above 0."""

    teacher_top_k: int | None = None
    """The number of log-probabilities of the teacher that are stored for each trained token before the run, in which
    the teacher is not in memory then; None: it runs beside the student, unless teacher_logprobs is set."""

    teacher_logprobs: str | None = None
    """The file, written by another program, with a teacher's log-probabilities, which take the place of a teacher
    (data/teacher_files.py has the format); None: there is none."""

    name: ClassVar[str] = "distill"  # by which objective.name selects it
    sums: ClassVar[tuple[str, ...]] = ("entropy",)  # names of the sums of `loss` for metrics

    def __post_init__(self) -> None:
        """Checks the options. Raises ValueError if beta or on_policy is not from 0 to 1, a temperature is not above 0,
        or on_policy is not 0 with stored log-probabilities."""
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
        """Makes the objective from options with the names that a config's section `objective` has: those of sampling
        are put into `drawing`, the others into this class. `named.objective_of` makes the objective of a config so; a
        Python script can also use the constructor. sampling_temperature: `drawing.temperature`; None is the temperature
        of the loss. Options that are not given have the defaults. Raises ValueError for an option out of its range, and
        TypeError for an unknown name."""
        own = {field.name for field in dataclasses.fields(Drawing)} - {"temperature"}
        drawn = {key: value for key, value in options.items() if key in own}
        others = {key: value for key, value in options.items() if key not in own}
        drawing = dataclasses.replace(Drawing(temperature=sampling_temperature), **drawn)
        return dataclasses.replace(cls(), drawing=drawing, **others)

    @property
    def sampling_temperature(self) -> float:
        """The temperature at which answers are sampled: that of `drawing`, or, if it is None, that of the loss.
        OwnSamples samples by it; the loss always has its own."""
        return self.temperature if self.drawing.temperature is None else self.drawing.temperature

    @property
    def offline(self) -> bool:
        """Whether the teacher's log-probabilities are there before the first step: the run computes them at its start
        (teacher_top_k), or they are read from another program's file (teacher_logprobs); stored_teachers.py does both.
        False: the teacher runs in each step. `loss`, `check` and `reference_runs` depend on it, and StoredTeacher,
        by which the Trainer adds them to the tokenised rows before the run, does so only if it is True."""
        return self.teacher_top_k is not None or self.teacher_logprobs is not None

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of a frozen model in the computation of each loss: 1, the teacher's, or 0 with
        stored log-probabilities. The planner adds its time to the forecast of a step; nothing else depends on it."""
        return 0 if self.offline else 1

    def check(self, model: Decoder) -> None:
        """Raises ValueError if the model has no teacher attached, and the model with its adapter off cannot be the
        teacher: because `teacher` names another one, the model has no adapter, or its base is trained too. With an
        attached teacher or stored log-probabilities, any model is accepted. The Trainer calls it before anything is
        compiled."""
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
        """The loss of `batch`, a micro-batch: (the sum of the divergences at trained targets, in nats; their number;
        {"entropy": the sum of the student's entropies there}), float32 scalars that are added up over micro-batches and
        devices. forward: runs `model`, the student, and its teacher: `model.teacher`, or, if that is None, the model
        with its adapter off. With stored log-probabilities no teacher runs, and the tokens that are not stored are one
        outcome of the distributions (linear_top_k_divergence). Train steps and evaluations trace it."""
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
        """{"entropy": the mean entropy of the student's distributions at the temperature, in nats}, for the log of
        steps and evaluations, from `sums`, the totals of what `loss` returns by name, with "count"; 0 if there is no
        target."""
        return {"entropy": sums["entropy"] / (sums["count"] + (sums["count"] == 0))}
