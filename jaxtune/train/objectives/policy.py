"""Objectives that learn from the rewards of sampled answers: `GRPO` with its variants, and `RLOO`. `AnswerCuts` copies
answers out of packed rows for their losses, and `log_probs_of` and `reference_log_probs` compute log-probabilities
outside of the train step.

The rows of a batch are prompts with sampled answers, packed (packed_answers.py); one forward pass computes a row. The
losses are those of grpo.py. Log-probabilities are those of the sampling distribution: logits are divided by the
temperature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import TEXT, Head
from jaxtune.models.lora import without_adapter
from jaxtune.train.config import ConfigError, DataConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.objectives import grpo, packed_answers
from jaxtune.train.objectives.grpo import Answers, Correction, PolicyLoss, group_advantages, rloo_advantages
from jaxtune.train.objectives.preference import require_fixed_base
from jaxtune.train.program.loss import Forward

# Metrics about the difference between the sampler's and the trainer's probabilities, by TRL's names.
_MISMATCH = "sampling/sampling_logp_difference/mean"
_FURTHEST = "sampling/sampling_logp_difference/max"
_RATIO = "sampling/importance_sampling_ratio/mean"
_HIGHEST, _LOWEST = "sampling/importance_sampling_ratio/max", "sampling/importance_sampling_ratio/min"
# The share of ratios (of answers, or of tokens) that the correction set to 0, and of answers no token of which counts.
ZEROED, MASKED = "sampling/importance_sampling_ratio/zero", "completions/masked_ratio"


@dataclasses.dataclass(frozen=True)
class GRPO:
    """The objective (`objective.Objective`) of group-relative policy optimisation (arXiv 2402.03300) and its variants:
    the answers to a prompt that are better than the others become more probable.

    The reference of the KL divergence is the model with its adapter off, unless the batches have the reference's
    log-probabilities (packed_answers.REFERENCE_LOGPS). The batch source adds those only if it was given a reference
    (`OwnParts.reference`), as only the trainers of jaxtune.compat may do. `of` makes the objective of the options in a
    config, which have TRL's names.

    Raises:
      ValueError: importance_sampling_mode is not known.
    """

    settings: packed_answers.Settings = dataclasses.field(default_factory=packed_answers.Settings)
    """How answers are sampled."""

    losses: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)
    """The options of the loss, which choose the variant."""

    scale_rewards: grpo.Scale = "group"
    """The standard deviation of rewards by which advantages are divided: that over the answers to one prompt ("group"),
    that over all answers of a generation ("batch"), or "none": they are not divided. It is not used if
    multi_objective_aggregation is "normalize_then_sum"."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With "sum_then_normalize", the rewards of several functions are added up, and the sum is normalised. With
    "normalize_then_sum", those of each function are normalised first, then added up, and the sums are normalised over
    all answers of the generation."""

    importance_sampling_correction: bool = True
    """Whether the loss is corrected for the difference between the sampler's and the trainer's probabilities."""

    importance_sampling_mode: Correction = "sequence_mask"
    """With "token_..." the correction's ratio is that of each token, with "sequence_..." one for each answer. With
    "..._truncate" ratios beyond the bounds are clipped to them, with "..._mask" they become 0."""
    importance_sampling_clip_max: float | None = 3.0
    """The upper bound of the correction's ratio; None is no bound."""
    importance_sampling_clip_min: float | None = None
    """The lower bound of the correction's ratio; None is no bound."""

    name: ClassVar[str] = "grpo"  # by which objective.name selects it
    head: ClassVar[Head] = TEXT  # the model must have a head that predicts tokens

    def __post_init__(self) -> None:
        """Raises ValueError if importance_sampling_mode is not known."""
        if self.importance_sampling_mode not in get_args(Correction):
            raise ValueError(
                f"importance_sampling_mode = {self.importance_sampling_mode!r}: must be one of "
                f"{', '.join(get_args(Correction))}"
            )

    @classmethod
    def of(cls, **options: Any) -> GRPO:
        """Makes the objective from options with TRL's names, in one flat set: each is put into `settings`, `losses` or
        this class, whichever has a field of that name (max_completion_length into both of the first two).
        `named.objective_of` makes the objective of a config so. Options that are not given have the defaults of this
        class. Raises ValueError for an option out of its range, and TypeError for an unknown name."""
        parts: dict[str, Any] = {}
        defaults = cls()
        for name, default in (("settings", defaults.settings), ("losses", defaults.losses)):
            own = {field.name for field in dataclasses.fields(default)}
            parts[name] = dataclasses.replace(default, **{key: v for key, v in options.items() if key in own})
            taken = own - {"max_completion_length"} if name == "settings" else own
            options = {key: value for key, value in options.items() if key not in taken}
        return cls(**parts, **options)

    @property
    def unit(self) -> str:
        """What the mean loss is a mean over, in plural: "answers" (loss types grpo and sapo), "possible_tokens"
        (dr_grpo: answers times max_completion_length) or "tokens" (the others). A step's metrics have the count of
        `loss` under this name; if `over_generation`, that is not the step's own number of tokens."""
        return {"grpo": "answers", "sapo": "answers", "dr_grpo": "possible_tokens"}.get(self.losses.loss_type, "tokens")

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums for metrics that `loss` returns, beside the loss and the count. The train step adds
        them up over micro-batches and devices, except those in `largest`."""
        corrected = (_RATIO, ZEROED, "corrected", _HIGHEST, _LOWEST) if self.importance_sampling_correction else ()
        return (*self._measured, "answers", MASKED, _MISMATCH, _FURTHEST, *corrected)

    @property
    def largest(self) -> tuple[str, ...]:
        """Those of `sums` that are the largest value of micro-batches and devices, from 0 on, and no sum."""
        return (_FURTHEST, *((_HIGHEST, _LOWEST) if self.importance_sampling_correction else ()))

    @property
    def _measured(self) -> tuple[str, ...]:
        """The names of the sums for metrics that `_sums` returns; `loss` adds a few more, `sums` has the names of all.
        `metrics` makes means of them, which it divides by "tokens" or "ratios"."""
        return grpo.metric_names(self.losses)

    @property
    def over_generation(self) -> bool:
        """Which count `loss` divides by. True (loss types dapo and cispo): the loss of a step is divided by the mean
        number of tokens over the steps that share a generation of answers (those of one round of sampling), so that
        every token of the generation counts alike. False: it is divided by the count of the step itself."""
        return self.losses.loss_type in ("dapo", "cispo")

    @property
    def reference_runs(self) -> int:
        """The number of forward passes of the reference in the computation of each loss, whose time the planner adds to
        its forecast: 0 if beta is 0, else 1 (also if the batches have the reference's log-probabilities, and it does
        not run). `loss` runs no reference if it is 0."""
        return 1 if self.losses.beta else 0

    @property
    def reuses(self) -> bool:
        """True: a generation of answers (those of one round of sampling) is used in several steps, so the weights
        change after it was sampled, and batches need the log-probabilities of the model that sampled:
        `prompts.sampled_answers` has the batch source compute them (OLD_LOGPS). False: each generation is used in one
        step."""
        return self.settings.steps > 1

    @property
    def penalises(self) -> bool:
        """Whether `advantages` subtracts the KL divergence from the reference from the rewards, for which the batch
        source runs the reference when it samples: True only in RLOO with beta above 0. Here False: if beta is not 0,
        the divergence is added to the loss."""
        return False

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        """The advantages of the answers of a generation (one round of sampling), float32[answers], by
        `group_advantages` with the options of this object. The batch source calls it when the answers of a generation
        have their rewards.

        Args:
          rewards: float[answers, functions], NaN where a function does not apply; the answers of a prompt are
            consecutive.
          weights: float[functions], the factors of the functions' rewards.
          kl: not used here; RLOO subtracts it (float32[answers]) from the rewards.
        """
        return group_advantages(
            rewards,
            self.settings.num_generations,
            weights=weights,
            scale_rewards=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
        )

    def prepare(
        self, rows: Any, tokenizer: Any, data: DataConfig, *, vocab_size: int, max_rows: int | None
    ) -> TokenDataset:
        """Always raises ConfigError. The interface asks for this method to tokenise `rows` whose loss is computed, and
        the loss of this objective is only defined for sampled answers, so it has no held-out rows. None of its
        arguments is used: rows, tokenizer, data, vocab_size and max_rows are those of `Objective.prepare`."""
        raise ConfigError(
            f"data.eval, data.eval_rows: {self.name} has no loss on rows that nobody sampled; leave them out, and look "
            "at the reward"
        )

    def check(self, model: Decoder) -> None:
        """Raises ValueError if the model has no head that predicts tokens; or if beta is not 0 and the model with its
        adapter off cannot be the reference, because it has no adapter, or weights beside it train whose original is not
        kept (`require_fixed_base`). The Trainer calls it before anything is compiled."""
        if self.losses.beta:
            require_fixed_base(self.name, model)
        if not model.config.head.is_text:
            raise ValueError(f"objective = {self.name}: {model.config.head.what}, which cannot answer")

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The loss of `batch`, a micro-batch of packed answers (`rollouts.SampledAnswers`): (sum of the losses, the
        count that it is divided by, {name: sum} for each name in `sums`), float32 scalars that are added up over
        micro-batches and devices. The count is the number of `unit` in the micro-batch, or, if `over_generation`, the
        sum of the batch's SHARE. forward: runs `model`, and its reference if the loss needs it and the batch has no
        REFERENCE_LOGPS. The old log-probabilities are those in the batch (OLD_LOGPS), or, if it has none, the model's
        own without gradient."""
        temperature = self.settings.temperature
        entropy_gradient = self.losses.entropy_coef != 0
        logps, entropies = forward.log_probs(
            model, forward(model, batch), batch, temperature=temperature, entropy_gradient=entropy_gradient
        )
        reference = batch.extra.get(packed_answers.REFERENCE_LOGPS)
        if reference is None and self.reference_runs:
            base = without_adapter(model)
            reference, _ = forward.log_probs(base, forward.frozen(base, batch), batch, temperature=temperature)
            reference = jax.lax.stop_gradient(reference)
        with jax.named_scope("loss"):
            cut = AnswerCuts(batch, self.settings.max_completion_length)
            sampled, own = cut(batch.extra[packed_answers.SAMPLED_LOGPS]), cut(logps)
            old = cut(batch.extra[packed_answers.OLD_LOGPS]) if packed_answers.OLD_LOGPS in batch.extra else None
            then = jax.lax.stop_gradient(own) if old is None else old
            answers = Answers(
                own,
                cut.mask,
                cut.advantages,
                cut(entropies),
                old_logps=old,
                ref_logps=None if reference is None else cut(reference),
                ratio=self._ratio(then, sampled, cut.mask),
                present=cut.present,
            )
            scale = 1.0
            if self.over_generation:
                share = batch.extra[packed_answers.SHARE].sum()
                scale = share / jnp.maximum(batch.extra[packed_answers.STEP_TOKENS].sum(), 1e-6)
            loss, count, sums = self._sums(answers, scale)
            if self.over_generation:
                count = share
            return loss, count, jax.lax.stop_gradient(sums | self._compared(answers, cut, then, sampled))

    def _compared(self, answers: Answers, cut: AnswerCuts, then: jax.Array, sampled: jax.Array) -> dict[str, jax.Array]:
        """The sums about masks and about the sampler's probabilities. then, sampled: float32[answers, tokens],
        log-probabilities under the model that sampled, by the trainer and by the sampler."""
        apart, trained = jnp.abs(then - sampled) * cut.mask, (cut.mask > 0).any(-1)
        sums = {"answers": cut.present.sum(), MASKED: (cut.present * ~trained).sum()}
        sums |= {_MISMATCH: apart.sum(), _FURTHEST: apart.max(initial=0.0)}
        if (ratio := answers.ratio) is not None:
            sums[_RATIO] = (jnp.broadcast_to(ratio, cut.mask.shape) * cut.mask).sum()
            counted = trained[:, None] if ratio.shape[1] == 1 else cut.mask > 0
            sums |= {ZEROED: (counted & (ratio == 0)).sum(), "corrected": counted.sum()}
            # The smallest ratio is that of the largest exp(-ratio), which begins at 0 as the other one does.
            sums |= {
                _HIGHEST: (counted * ratio).max(initial=0.0),
                _LOWEST: (counted * jnp.exp(-ratio)).max(initial=0.0),
            }
        return sums

    def _sums(self, answers: Answers, scale: jax.Array | float) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(sum of the losses, the count that divides it, {metric: sum} for each name in `_measured`) of a batch of
        answers: float32 scalars, here by GRPO's loss. scale: `grpo_sums`' entropy_scale."""
        return grpo.grpo_sums(answers, self.losses, scale)

    def _ratio(self, logps: jax.Array, sampled: jax.Array, mask: jax.Array) -> jax.Array | None:
        """The factors that correct the loss for a sampler that rounds differently from the trainer
        (`grpo.importance_ratio`): float32[answers, tokens or 1]. None if `importance_sampling_correction` is off.
        `loss` calls it.

        Args:
          logps: float32[answers, tokens], log-probabilities under the trainer's model at the time of sampling.
          sampled: float32[answers, tokens], the log-probabilities that the sampler reported.
          mask: float32[answers, tokens], 1 at tokens that count.
        """
        if not self.importance_sampling_correction:
            return None
        return grpo.importance_ratio(
            logps,
            sampled,
            mask,
            mode=self.importance_sampling_mode,
            clip_max=self.importance_sampling_clip_max,
            clip_min=self.importance_sampling_clip_min,
        )

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of a step for the log, {name: number}: means over tokens (such as the entropy) or over the ratios
        of new to old probabilities (such as the share that was clipped), with TRL's names, and "answers", the number of
        answers. sums: the totals of what `loss` returns, by name."""
        found = {name: sums[name] for name in (*self._measured, _MISMATCH)}
        answers = sums["answers"]
        others = {"answers": answers, MASKED: sums[MASKED] / (answers + (answers == 0)), _FURTHEST: sums[_FURTHEST]}
        if self.importance_sampling_correction:
            found[_RATIO], count = sums[_RATIO], sums["corrected"]
            lowest = sums[_LOWEST]
            others |= {
                ZEROED: sums[ZEROED] / (count + (count == 0)),
                _HIGHEST: sums[_HIGHEST],
                _LOWEST: 0.0 - jnp.log(jnp.where(lowest > 0, lowest, 1.0)),
            }
        return grpo.means_of(found) | others


@dataclasses.dataclass(frozen=True)
class RLOO(GRPO):
    """The objective of REINFORCE leave-one-out (arXiv 2402.14740): an answer is one action, whose reward is compared
    with the mean reward of the other answers to the prompt.

    `losses.beta` times the answer's divergence from the reference is subtracted from its reward. The divergence is the
    sum of log p - log p_ref over its tokens that count in the loss, where p is the sampler's probability of a token.
    """

    settings: packed_answers.Settings = dataclasses.field(
        default_factory=lambda: packed_answers.Settings(num_generations=2)
    )
    """How answers are sampled, by default 2 to each prompt."""

    losses: PolicyLoss = dataclasses.field(default_factory=lambda: PolicyLoss(beta=0.05))
    """Only epsilon, epsilon_high and beta are used in the loss and the rewards: the bounds of clipping, and the factor
    of the divergence."""

    normalize_advantages: bool = False
    """True: the advantages are normalised to mean 0 and standard deviation 1 over a generation. False: they are not."""

    name: ClassVar[str] = "rloo"  # by which objective.name selects it

    @property
    def over_generation(self) -> bool:
        """False: the loss of a step is divided by the number of its own answers, and not by a count over the steps that
        share a generation (round of sampling)."""
        return False

    @property
    def unit(self) -> str:
        """What the mean loss is a mean over, in plural: "answers". The metrics of a step have their number under this
        name; the loss itself does not depend on it."""
        return "answers"

    @property
    def _measured(self) -> tuple[str, ...]:
        """The names of the sums for metrics that `_sums` returns, of which `sums` is made: those of GRPO with clipped
        ratios, whatever `losses` say, which choose no other loss here, and without "kl", because the batch source
        measures the divergence with the rewards."""
        return grpo.metric_names(PolicyLoss())

    @property
    def reference_runs(self) -> int:
        """0, because no loss runs the reference. If beta is above 0, it runs once for each generation (round of
        sampling), when the rewards are computed."""
        return 0

    @property
    def penalises(self) -> bool:
        """True if beta is above 0: the batch source runs the reference over each generation (round of sampling), and
        gives each answer's divergence to `advantages`, which subtracts beta times it from the reward. False: the
        reference is not needed, and does not run."""
        return self.losses.beta > 0

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        """RLOO's advantages, float32[answers]: an answer's reward minus the mean of the other answers to its prompt. If
        normalize_advantages is True, they then get mean 0 and standard deviation 1 over all answers. An answer without
        any reward, or without another one with a reward in its group, has advantage 0. The batch source calls it for
        each generation.

        Args:
          rewards: float[answers, functions], NaN where a function does not apply; the answers of a prompt are
            consecutive.
          weights: float[functions], the factors of the functions' rewards.
          kl: float[answers], the divergence of each answer from the reference, of which beta times is subtracted from
            its reward; None subtracts nothing.
        """
        return rloo_advantages(
            rewards,
            self.settings.num_generations,
            weights=weights,
            kl=kl,
            beta=self.losses.beta,
            normalize=self.normalize_advantages,
        )

    def _sums(self, answers: Answers, scale: jax.Array | float) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(sum of RLOO's losses, number of answers, {metric: sum} for each name in `_measured`) of a batch of answers:
        float32 scalars."""
        return grpo.rloo_sums(answers, self.losses)


class AnswerCuts:
    """Copies the answers out of packed rows, because the losses take an array with a row for each answer. `GRPO.loss`
    makes one of each micro-batch. Called with an array [rows, length] that has at each position the value of its target
    (the next token), it returns the values of all tokens of the answers, also of those that do not count in the loss:
    [answers, tokens], 0 after the end of an answer. `answers` is the number of rows times the most answers of a row.

    Args:
      batch: a batch of rollouts.SampledAnswers, whose `extra` says where in the rows the answers are.
      tokens: the most tokens of an answer; the arrays that are returned have at most `length` of them.
    Attributes:
      mask: float32[answers, tokens], 1 at tokens that count in the loss.
      present: float32[answers], 1 for an answer; 0 if the packed row has fewer answers than the most.
      advantages: float32[answers], their advantages.
    """

    def __init__(self, batch: Batch, tokens: int):
        starts, lengths = batch.extra[packed_answers.STARTS], batch.extra[packed_answers.LENGTHS]
        within = jnp.arange(min(tokens, batch.tokens.shape[1]))
        self._slots = jnp.minimum(starts[..., None] + within, batch.tokens.shape[1] - 1)
        self._there = (within < lengths[..., None]).reshape(-1, len(within))
        self.present = (lengths > 0).reshape(-1).astype(jnp.float32)
        self.advantages = batch.extra[packed_answers.ADVANTAGES].reshape(-1)
        self.mask = self(batch.weights)

    def __call__(self, values: jax.Array) -> jax.Array:
        """The values of answers' tokens, [answers, tokens], 0 after the end of an answer. values: [rows, length], at
        each position that of its target, the next token."""
        rows, places, tokens = self._slots.shape
        flat = self._slots.reshape(rows, places * tokens)
        cut = jnp.take_along_axis(values, flat, axis=1, mode="promise_in_bounds").reshape(-1, tokens)
        return jnp.where(self._there, cut, 0.0)


_SCORED_ROWS = 4  # rows whose log-probabilities are computed in one call


def log_probs_of(temperature: float, model: Decoder, batch: Batch) -> np.ndarray:
    """The log-probabilities of the targets (next tokens) of a batch under a model: float32[rows, length], a numpy
    array, in nats, 0 where the weight is 0. It runs outside of the train step, 4 rows at a time; with the temperature
    bound by functools.partial it is what the batch source calls for OLD_LOGPS (`rollouts.Score`), if `GRPO.reuses`.

    Args:
      temperature: divides the logits.
      model: the model.
      batch: packed rows, numpy arrays.
    """
    graph, state = nnx.split(model)
    rows = len(batch.tokens)
    found = np.zeros(batch.tokens.shape, np.float32)
    for start in range(0, rows, _SCORED_ROWS):
        taken = np.minimum(np.arange(start, start + _SCORED_ROWS), rows - 1)
        arrays = [a[taken] for a in (batch.tokens, batch.targets, batch.segment_ids, batch.positions)]
        values = np.asarray(_row_log_probs(graph, temperature, state, *arrays))
        count = min(_SCORED_ROWS, rows - start)
        found[start : start + count] = values[:count]
    return np.where(batch.weights > 0, found, 0.0).astype(np.float32)


def reference_log_probs(temperature: float, model: Decoder, batch: Batch) -> np.ndarray:
    """The log-probabilities of the targets (next tokens) of a batch under the reference, which is `model` with its
    adapter off: float32[rows, length], a numpy array, 0 where the weight is 0. With the temperature bound, RLOO's batch
    source gets the divergence of answers from it (`rollouts.Score`).

    Args:
      temperature: divides the logits.
      model: the model that trains, with its adapter.
      batch: packed rows, numpy arrays.
    """
    return log_probs_of(temperature, without_adapter(model), batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _row_log_probs(graph, temperature, state, tokens, targets, segment_ids, positions) -> jax.Array:
    """Computes the log-probability of each target of some rows under a model, float32[rows, length]. It is compiled
    once for each shape, graph and temperature. `log_probs_of` calls it for a few rows at a time.

    Args:
      graph, state: the nnx.GraphDef and nnx.State of the model.
      temperature: a float that the logits are divided by.
      tokens, targets, segment_ids, positions: int32[rows, length], the arrays of a `Batch`; a target is the token that
        follows.
    """
    model = nnx.merge(graph, state)
    batch = Batch(tokens, targets, jnp.zeros(tokens.shape), segment_ids, positions)
    forward = Forward()
    return forward.log_probs(model, forward.frozen(model, batch), batch, temperature=temperature)[0]
