"""Objectives that learn from rewards of sampled answers: GRPO with its variants, and RLOO.

The rows of a batch are answers packed with their prompts (rollouts.py), which go through the model once. The losses are
grpo.py's. The log-probabilities are those of the distribution that was sampled from: the temperature is in them.
"""

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
from jaxtune.train.data import Batch, TokenDataset
from jaxtune.train.objectives import grpo, rollouts
from jaxtune.train.objectives.grpo import Answers, Correction, PolicyLoss, group_advantages, rloo_advantages
from jaxtune.train.objectives.preference import require_fixed_base
from jaxtune.train.program.loss import Forward

_MISMATCH = "sampling/sampling_logp_difference/mean"
_RATIO = "sampling/importance_sampling_ratio/mean"


@dataclasses.dataclass(frozen=True)
class GRPO:
    """Group-relative policy optimisation (arXiv 2402.03300) and its variants, by `losses`; see objective.Objective.

    The reference of the divergence is the model with its adapter off, unless the batches have the reference's
    log-probabilities (rollouts.REFERENCE_LOGPS).
    """

    settings: rollouts.Settings = dataclasses.field(default_factory=rollouts.Settings)
    losses: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)

    scale_rewards: grpo.Scale = "group"
    """Whose standard deviation divides the advantages."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Whether the functions' rewards are added up before or after they are scaled."""

    importance_sampling_correction: bool = True
    """Whether the loss is corrected for the difference between the sampler's and the trainer's probabilities."""

    importance_sampling_mode: Correction = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None
    """The ratio's form and its bounds; see grpo.importance_ratio."""

    name: ClassVar[str] = "grpo"
    head: ClassVar[Head] = TEXT

    def __post_init__(self) -> None:
        if self.importance_sampling_mode not in get_args(Correction):
            raise ValueError(
                f"importance_sampling_mode = {self.importance_sampling_mode!r}: must be one of "
                f"{', '.join(get_args(Correction))}"
            )

    @classmethod
    def of(cls, **options: Any) -> GRPO:
        """From options by TRL's names, whichever part they belong to; the others have the defaults of this class."""
        parts: dict[str, Any] = {}
        usual = cls()
        for name, default in (("settings", usual.settings), ("losses", usual.losses)):
            own = {field.name for field in dataclasses.fields(default)}
            parts[name] = dataclasses.replace(default, **{key: v for key, v in options.items() if key in own})
            taken = own - {"max_completion_length"} if name == "settings" else own
            options = {key: value for key, value in options.items() if key not in taken}
        return cls(**parts, **options)

    @property
    def unit(self) -> str:
        """What the loss is a mean over."""
        return {"grpo": "answers", "sapo": "answers", "dr_grpo": "possible_tokens"}.get(self.losses.loss_type, "tokens")

    @property
    def sums(self) -> tuple[str, ...]:
        corrected = (_RATIO,) if self.importance_sampling_correction else ()
        return (*self._measured, "answers", _MISMATCH, *corrected)

    @property
    def _measured(self) -> tuple[str, ...]:
        """Names of the sums that the losses give."""
        return grpo.metric_names(self.losses)

    @property
    def over_generation(self) -> bool:
        """Whether the loss is a mean over the tokens of all steps of a generation, not of this one."""
        return self.losses.loss_type in ("dapo", "cispo")

    @property
    def reference_runs(self) -> int:
        return 1 if self.losses.beta else 0

    @property
    def reuses(self) -> bool:
        """Whether answers are trained on after the model has moved, so that batches need its old probabilities."""
        return self.settings.steps > 1

    @property
    def penalises(self) -> bool:
        """Whether the divergence is taken from the rewards, not added to the loss."""
        return False

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        """float32[answers] of rewards [answers, functions]. kl: the answers' divergences, where rewards count them."""
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
        raise ConfigError(
            f"data.eval, data.eval_rows: {self.name} has no loss on rows that nobody sampled; leave them out, and look "
            "at the reward"
        )

    def check(self, model: Decoder) -> None:
        if self.losses.beta:
            require_fixed_base(self.name, model)
        if not model.config.head.is_text:
            raise ValueError(f"objective = {self.name}: {model.config.head.what}, which cannot answer")

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        temperature = self.settings.temperature
        entropy_gradient = self.losses.entropy_coef != 0
        logps, entropies = forward.log_probs(
            model, forward(model, batch), batch, temperature=temperature, entropy_gradient=entropy_gradient
        )
        reference = batch.extra.get(rollouts.REFERENCE_LOGPS)
        if reference is None and self.reference_runs:
            base = without_adapter(model)
            reference, _ = forward.log_probs(base, forward.frozen(base, batch), batch, temperature=temperature)
            reference = jax.lax.stop_gradient(reference)
        with jax.named_scope("loss"):
            cut = AnswerCuts(batch, self.settings.max_completion_length)
            sampled, own = cut(batch.extra[rollouts.SAMPLED_LOGPS]), cut(logps)
            old = cut(batch.extra[rollouts.OLD_LOGPS]) if rollouts.OLD_LOGPS in batch.extra else None
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
            loss, count, sums = self._sums(answers)
            if self.over_generation:
                count = batch.extra[rollouts.SHARE].sum()
            sums |= {"answers": cut.present.sum(), _MISMATCH: (jnp.abs(then - sampled) * cut.mask).sum()}
            if answers.ratio is not None:
                ratio = jnp.broadcast_to(answers.ratio, cut.mask.shape)
                sums[_RATIO] = (ratio * cut.mask).sum()
            return loss, count, jax.lax.stop_gradient(sums)

    def _sums(self, answers: Answers) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return grpo.grpo_sums(answers, self.losses)

    def _ratio(self, logps: jax.Array, sampled: jax.Array, mask: jax.Array) -> jax.Array | None:
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
        """Means over tokens or ratios, and the number of answers."""
        found = {name: sums[name] for name in (*self._measured, _MISMATCH)}
        if self.importance_sampling_correction:
            found[_RATIO] = sums[_RATIO]
        return grpo.means_of(found) | {"answers": sums["answers"]}


@dataclasses.dataclass(frozen=True)
class RLOO(GRPO):
    """REINFORCE leave-one-out (arXiv 2402.14740): an answer is one action, whose reward is compared to the others'.

    `losses.beta` times the answer's divergence from the reference, the sum of log p - log p_ref over its tokens when it
    was sampled, is taken from its reward.
    """

    settings: rollouts.Settings = dataclasses.field(default_factory=lambda: rollouts.Settings(num_generations=2))

    losses: PolicyLoss = dataclasses.field(default_factory=lambda: PolicyLoss(beta=0.05))

    normalize_advantages: bool = False
    """Whether the advantages are scaled by their mean and deviation over a generation."""

    name: ClassVar[str] = "rloo"

    @property
    def over_generation(self) -> bool:
        return False

    @property
    def unit(self) -> str:
        return "answers"

    @property
    def _measured(self) -> tuple[str, ...]:
        return tuple(name for name in super()._measured if name != "kl")  # which is measured with the rewards

    @property
    def reference_runs(self) -> int:
        return 0  # in a step; the reference runs once a generation

    @property
    def penalises(self) -> bool:
        return self.losses.beta > 0

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        return rloo_advantages(
            rewards,
            self.settings.num_generations,
            weights=weights,
            kl=kl,
            beta=self.losses.beta,
            normalize=self.normalize_advantages,
        )

    def _sums(self, answers: Answers) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return grpo.rloo_sums(answers, self.losses)


class AnswerCuts:
    """Cuts the answers out of packed rows: [rows, length] -> [rows x places, tokens].

    Attributes:
      mask: float32[answers, tokens], 1 at tokens that count. present, advantages: float32[answers].
    """

    def __init__(self, batch: Batch, tokens: int):
        starts, lengths = batch.extra[rollouts.STARTS], batch.extra[rollouts.LENGTHS]
        within = jnp.arange(min(tokens, batch.tokens.shape[1]))
        self._slots = jnp.minimum(starts[..., None] + within, batch.tokens.shape[1] - 1)
        self._there = (within < lengths[..., None]).reshape(-1, len(within))
        self.present = (lengths > 0).reshape(-1).astype(jnp.float32)
        self.advantages = batch.extra[rollouts.ADVANTAGES].reshape(-1)
        self.mask = self(batch.weights)

    def __call__(self, values: jax.Array) -> jax.Array:
        """The values of answers' tokens, 0 behind an answer. values: [rows, length]."""
        rows, places, tokens = self._slots.shape
        flat = self._slots.reshape(rows, places * tokens)
        cut = jnp.take_along_axis(values, flat, axis=1, mode="promise_in_bounds").reshape(-1, tokens)
        return jnp.where(self._there, cut, 0.0)


_SCORED_ROWS = 4  # whose log-probabilities are computed at a time


def log_probs_of(temperature: float, model: Decoder, batch: Batch) -> np.ndarray:
    """float32[rows, length]: log-probabilities of a batch's targets under a model, 0 where nothing is trained on."""
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
    """As log_probs_of, under the model with its adapter off."""
    return log_probs_of(temperature, without_adapter(model), batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _row_log_probs(graph, temperature, state, tokens, targets, segment_ids, positions) -> jax.Array:
    model = nnx.merge(graph, state)
    batch = Batch(tokens, targets, jnp.zeros(tokens.shape), segment_ids, positions)
    forward = Forward()
    return forward.log_probs(model, forward.frozen(model, batch), batch, temperature=temperature)[0]
