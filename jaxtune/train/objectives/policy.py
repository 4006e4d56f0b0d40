"""Objectives that learn from the rewards of sampled answers: GRPO with its variants, and RLOO.

A batch's rows are packed prompts with answers. Log-probabilities are of the sampling distribution: logits are divided
by the temperature.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.exactness import require_exact
from jaxtune.models.generation.structure import require_cached
from jaxtune.models.heads import TEXT, Head
from jaxtune.models.lora import without_adapter
from jaxtune.models.placement import partition
from jaxtune.pallas import one_order
from jaxtune.train.config import CheckpointConfig, ConfigError, DataConfig, EvaluationConfig, MeshConfig
from jaxtune.train.config.checks import require
from jaxtune.train.config.sections import OF_ANSWERS
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.answers import (
    ADVANTAGES,
    LENGTHS,
    OLD_LOGPS,
    REFERENCE_LOGPS,
    SAMPLED_LOGPS,
    SHARE,
    STARTS,
    STEP_TOKENS,
)
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.objectives import grpo
from jaxtune.train.objectives.grpo import Answers, Correction, PolicyLoss, group_advantages, rloo_advantages
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.objective import Declared
from jaxtune.train.objectives.preference import require_fixed_base
from jaxtune.train.objectives.sampling import Settings

# Metrics about the difference between the sampler's and the trainer's probabilities, by TRL's names.
_MISMATCH = "sampling/sampling_logp_difference/mean"
_FURTHEST = "sampling/sampling_logp_difference/max"
_RATIO = "sampling/importance_sampling_ratio/mean"
_HIGHEST, _LOWEST = "sampling/importance_sampling_ratio/max", "sampling/importance_sampling_ratio/min"
# The share of ratios (of answers, or of tokens) that the correction set to 0, and of answers no token of which counts.
ZEROED, MASKED = "sampling/importance_sampling_ratio/zero", "completions/masked_ratio"
# Keys of `data` without an effect on prompts, and their defaults.
_OF_ROWS = {
    "format": "auto",
    "train_on": "responses",
    "instruction_part": None,
    "response_part": None,
    "last_response_only": False,
    "mask_spans": None,
    "packing": True,
    "overflow": "truncate",
}


@dataclasses.dataclass(frozen=True)
class GRPO(Declared):
    """Group-relative policy optimisation (arXiv 2402.03300) and variants: answers that are better than the others to
    their prompt become more probable.

    The divergence's reference is the model with its adapter off, unless batches have REFERENCE_LOGPS. Raises ValueError
    for an unknown importance_sampling_mode.
    """

    settings: Settings = dataclasses.field(default_factory=Settings)

    losses: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)

    scale_rewards: grpo.Scale = "group"
    """Deviation that divides advantages: of the prompt's "group", the generation ("batch"), or "none"; unused with
    "normalize_then_sum".
    """

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Add up functions' rewards, then normalise; or normalise each first, add up, and normalise over the generation."""

    importance_sampling_correction: bool = True
    """Correct for the difference between sampler's and trainer's probabilities."""

    importance_sampling_mode: Correction | None = None
    """A ratio a token or an answer; "..._truncate" clips to the bounds, "..._mask" sets 0 beyond. None becomes
    "token_truncate" with settings.cache, else "sequence_mask".
    """
    importance_sampling_clip_max: float | None = 3.0
    """None: no bound."""
    importance_sampling_clip_min: float | None = None
    """None: no bound."""

    name: ClassVar[str] = "grpo"  # by which objective.name selects it
    head: ClassVar[Head] = TEXT  # the model must have a head that predicts tokens
    has_row_loss: ClassVar[bool] = False
    reads_pictures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "importance_sampling_mode", self.correction)
        if self.importance_sampling_mode not in get_args(Correction):
            raise ValueError(
                f"importance_sampling_mode = {self.importance_sampling_mode!r}: must be one of "
                f"{', '.join(get_args(Correction))}"
            )

    @classmethod
    def of(cls, **options: Any) -> GRPO:
        """The objective from flat options with TRL's names. Raises ValueError, TypeError for an unknown name."""
        sections: dict[str, Any] = {}
        defaults = cls()
        for name, default in (("settings", defaults.settings), ("losses", defaults.losses)):
            field_names = {field.name for field in dataclasses.fields(default)}
            sections[name] = dataclasses.replace(
                default, **{key: v for key, v in options.items() if key in field_names}
            )
            used_names = field_names - {"max_completion_length"} if name == "settings" else field_names
            options = {key: value for key, value in options.items() if key not in used_names}
        return cls(**sections, **options)

    @property
    def by_micro_batch(self) -> bool:
        """Whether tokens are chosen among those of a micro-batch, by entropy."""
        return self.losses.top_entropy_quantile < 1.0

    @property
    def unit(self) -> str:
        """ "answers", "possible_tokens" (dr_grpo) or "tokens", by loss type; with `over_generation` not the step's own
        number.
        """
        return {"grpo": "answers", "sapo": "answers", "dr_grpo": "possible_tokens"}.get(self.losses.loss_type, "tokens")

    @property
    def corrects(self) -> bool:
        """Whether a ratio corrects for the sampler's log-probabilities, which may differ from the trainer's."""
        return self.importance_sampling_correction and not self.settings.exact

    @property
    def correction(self) -> Correction:
        """The mode of that ratio."""
        return self.importance_sampling_mode or grpo.default_correction(self.settings.cache)

    @property
    def sums(self) -> tuple[str, ...]:
        corrected = (_RATIO, ZEROED, "corrected", _HIGHEST, _LOWEST) if self.corrects else ()
        return (*self._measured, "answers", MASKED, _MISMATCH, _FURTHEST, *corrected)

    @property
    def largest(self) -> tuple[str, ...]:
        """Those of `sums` that are largest values of micro-batches and devices, from 0 on."""
        return (_FURTHEST, *((_HIGHEST, _LOWEST) if self.corrects else ()))

    @property
    def _measured(self) -> tuple[str, ...]:
        """Names of `_sums`'s sums."""
        return grpo.metric_names(self.losses)

    @property
    def over_generation(self) -> bool:
        """Whether the loss is divided by the mean tokens of a generation's steps, so that each token of it counts
        alike.
        """
        return self.losses.loss_type in ("dapo", "cispo")

    @property
    def samples(self) -> bool:
        return True

    @property
    def packed(self) -> Settings:
        return self.settings

    @property
    def reference_runs(self) -> int:
        return 1 if self.losses.beta else 0

    @property
    def reference_is_base(self) -> bool:
        return self.losses.beta != 0

    @property
    def reuses(self) -> bool:
        """Whether a generation serves several steps, so that batches need OLD_LOGPS."""
        return self.settings.steps > 1

    @property
    def penalises(self) -> bool:
        """Whether `advantages` subtracts the divergence from rewards."""
        return False

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        """float32[answers], by `group_advantages`.

        rewards: float[answers, functions], NaN where a function does not apply; a prompt's answers are consecutive.
        weights: float[functions].
        kl: unused here.
        """
        return group_advantages(
            rewards,
            self.settings.num_generations,
            weights=weights,
            scale_rewards=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
        )

    def prepare(
        self,
        rows: Any,
        tokenizer: Any,
        data: DataConfig,
        *,
        vocab_size: int,
        max_rows: int | None,
        pictures: PictureOptions | None = None,
    ) -> TokenDataset:
        """Raises ConfigError: there is no loss on rows that nobody sampled."""
        raise ConfigError(
            f"data.eval, data.eval_rows: {self.name} has no loss on rows that nobody sampled; leave them out, and look "
            "at the reward"
        )

    def refuses(
        self, data: DataConfig, mesh: MeshConfig | None, evaluation: EvaluationConfig, checkpoint: CheckpointConfig
    ) -> None:
        super().refuses(data, mesh, evaluation, checkpoint)
        for key, default in _OF_ROWS.items():
            require(
                getattr(data, key) == default,
                f"data.{key}",
                getattr(data, key),
                f"objective = {self.label} reads only the prompts of rows, and packs sampled answers; leave it out",
            )
        fsdp = (mesh or MeshConfig()).fsdp
        require(
            not self.settings.exact or fsdp == 1,
            "mesh.fsdp",
            fsdp,
            "objective.exact needs whole weights on each device; set mesh.fsdp=1 and mesh.data, or leave exact out",
        )
        best = checkpoint.best
        require(
            best is None or best.startswith(OF_ANSWERS),
            "checkpoint.best",
            best,
            f"evaluations have no loss with {self.label}; name functions in evaluation.generate, and set "
            "eval_answers/NAME, of which NAME is one of them",
        )

    def zero_gradient(self, line: Mapping[str, float]) -> str | None:
        """Also where ratios are clipped, which only weights do that have changed since the answers were sampled (those
        above `delta` are in no metric), and where answers are masked: their loss is the mean of their advantages, whose
        sum is 0 but for rounding.
        """
        if line.get("clip_ratio/region_mean", 0.0) > 0.0:
            return "the ratios of all answers that have an advantage are clipped"
        if self.settings.mask_truncated_completions and line.get("completions/clipped_ratio", 0.0) > 0.0:
            return "its answers reach max_completion_length, and have no part in the loss"
        return super().zero_gradient(line)

    def check(self, model: Decoder) -> None:
        """Raises ValueError without a head that predicts tokens, if beta is not 0, without a fixed reference, with
        `exact` for what it does not cover, or for a cache that the model has not.
        """
        require_cached(model, "objective.cache", self.settings.cache)
        if self.settings.exact:
            require_exact(model, "objective", trains=True)
        if self.losses.beta:
            require_fixed_base(self.name, model)
        if not model.config.head.is_text:
            raise ValueError(f"objective = {self.name}: {model.config.head.description}, which cannot answer")

    def loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """As Objective.loss: (sum of losses, their count, sums for metrics). The count is that of `unit`, or with
        `over_generation` the batch's SHARE. Old log-probabilities are OLD_LOGPS, else the model's own without gradient.
        """
        temperature = self.settings.temperature
        entropy_gradient = self.losses.entropy_coef != 0
        with one_order.exact(self.settings.exact):
            logps, entropies = forward.log_probs(
                model, forward(model, batch), batch, temperature=temperature, entropy_gradient=entropy_gradient
            )
        reference = batch.extra.get(REFERENCE_LOGPS)
        if reference is None and self.reference_runs:
            base = without_adapter(model)
            reference, _ = forward.log_probs(base, forward.frozen(base, batch), batch, temperature=temperature)
            reference = jax.lax.stop_gradient(reference)
        with jax.named_scope("loss"):
            cuts = AnswerCuts(batch, self.settings.max_completion_length)
            sampled, own_logps = cuts(batch.extra[SAMPLED_LOGPS]), cuts(logps)
            old = cuts(batch.extra[OLD_LOGPS]) if OLD_LOGPS in batch.extra else None
            trainer_logps = jax.lax.stop_gradient(own_logps) if old is None else old
            answers = Answers(
                own_logps,
                cuts.mask,
                cuts.advantages,
                cuts(entropies),
                old_logps=old,
                ref_logps=None if reference is None else cuts(reference),
                ratio=self._ratio(trainer_logps, sampled, cuts.mask),
                present=cuts.present,
            )
            scale = 1.0
            if self.over_generation:
                share = batch.extra[SHARE].sum()
                scale = share / jnp.maximum(batch.extra[STEP_TOKENS].sum(), 1e-6)
            loss, count, sums = self._sums(answers, scale)
            if self.over_generation:
                count = share
            return loss, count, jax.lax.stop_gradient(sums | self._compared(answers, cuts, trainer_logps, sampled))

    def _compared(
        self, answers: Answers, cuts: AnswerCuts, trainer_logps: jax.Array, sampled: jax.Array
    ) -> dict[str, jax.Array]:
        """Sums about masks and the sampler's probabilities. trainer_logps, sampled: float32[answers, tokens]."""
        apart, trained = jnp.abs(trainer_logps - sampled) * cuts.mask, (cuts.mask > 0).any(-1)
        sums = {"answers": cuts.present.sum(), MASKED: (cuts.present * ~trained).sum()}
        sums |= {_MISMATCH: apart.sum(), _FURTHEST: apart.max(initial=0.0)}
        if (ratio := answers.ratio) is not None:
            sums[_RATIO] = (jnp.broadcast_to(ratio, cuts.mask.shape) * cuts.mask).sum()
            is_counted = trained[:, None] if ratio.shape[1] == 1 else cuts.mask > 0
            sums |= {ZEROED: (is_counted & (ratio == 0)).sum(), "corrected": is_counted.sum()}
            # The smallest ratio is that of the largest exp(-ratio), which begins at 0 as the other one does.
            sums |= {
                _HIGHEST: (is_counted * ratio).max(initial=0.0),
                _LOWEST: (is_counted * jnp.exp(-ratio)).max(initial=0.0),
            }
        return sums

    def _sums(self, answers: Answers, scale: jax.Array | float) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(Sum of losses, divisor, {metric: sum}), float32 scalars."""
        return grpo.grpo_sums(answers, self.losses, scale)

    def _ratio(self, logps: jax.Array, sampled: jax.Array, mask: jax.Array) -> jax.Array | None:
        """float32[answers, tokens or 1], of `importance_ratio`; None without correction."""
        if not self.corrects:
            return None
        return grpo.importance_ratio(
            logps,
            sampled,
            mask,
            mode=self.correction,
            clip_max=self.importance_sampling_clip_max,
            clip_min=self.importance_sampling_clip_min,
        )

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        token_sums = {name: sums[name] for name in (*self._measured, _MISMATCH)}
        answers = sums["answers"]
        other_metrics = {
            "answers": answers,
            MASKED: sums[MASKED] / (answers + (answers == 0)),
            _FURTHEST: sums[_FURTHEST],
        }
        if self.corrects:
            token_sums[_RATIO], count = sums[_RATIO], sums["corrected"]
            lowest = sums[_LOWEST]
            other_metrics |= {
                ZEROED: sums[ZEROED] / (count + (count == 0)),
                _HIGHEST: sums[_HIGHEST],
                _LOWEST: 0.0 - jnp.log(jnp.where(lowest > 0, lowest, 1.0)),
            }
        return grpo.means_of(token_sums) | other_metrics


@dataclasses.dataclass(frozen=True)
class RLOO(GRPO):
    """REINFORCE leave-one-out (arXiv 2402.14740): an answer is one action, compared with the mean reward of the others
    to its prompt.

    `losses.beta` times its divergence, the sum of log p - log p_ref over counted tokens with the sampler's p, is
    subtracted from the reward.
    """

    settings: Settings = dataclasses.field(default_factory=lambda: Settings(num_generations=2))

    losses: PolicyLoss = dataclasses.field(default_factory=lambda: PolicyLoss(beta=0.05))
    """Only epsilon, epsilon_high and beta count."""

    normalize_advantages: bool = False
    """To mean 0 and deviation 1 over a generation."""

    reward_clip_range: tuple[float, float] | None = None
    """The least and greatest weighted reward of an answer."""

    name: ClassVar[str] = "rloo"  # by which objective.name selects it

    @property
    def over_generation(self) -> bool:
        return False

    @property
    def unit(self) -> str:
        return "answers"

    @property
    def _measured(self) -> tuple[str, ...]:
        """Without "kl", which is measured with the rewards."""
        return grpo.metric_names(PolicyLoss())

    @property
    def reference_runs(self) -> int:
        """The reference runs once a generation, in no loss."""
        return 0

    @property
    def penalises(self) -> bool:
        return self.losses.beta > 0

    def advantages(self, rewards: np.ndarray, weights: np.ndarray, kl: np.ndarray | None = None) -> np.ndarray:
        """By `rloo_advantages`. kl: float[answers], beta times which is subtracted from rewards. rewards, weights: as
        `group_advantages`.
        """
        return rloo_advantages(
            rewards,
            self.settings.num_generations,
            weights=weights,
            kl=kl,
            beta=self.losses.beta,
            normalize=self.normalize_advantages,
            clip=self.reward_clip_range,
        )

    def _sums(self, answers: Answers, scale: jax.Array | float) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        return grpo.rloo_sums(answers, self.losses)


class AnswerCuts:
    """Copies answers out of packed rows. Called with values [rows, length], at each position its target's, it returns
    [answers, tokens], 0 after an answer's end, with places for the most answers of each row.

      tokens: most of an answer.
      mask: float32[answers, tokens], 1 at tokens that count.
      present: float32[answers], 0 where a row has fewer answers.
      advantages: float32[answers].
    """

    def __init__(self, batch: Batch, tokens: int):
        starts, lengths = batch.extra[STARTS], batch.extra[LENGTHS]
        offsets = jnp.arange(min(tokens, batch.tokens.shape[1]))
        self._slots = jnp.minimum(starts[..., None] + offsets, batch.tokens.shape[1] - 1)
        self._there = (offsets < lengths[..., None]).reshape(-1, len(offsets))
        self.present = (lengths > 0).reshape(-1).astype(jnp.float32)
        self.advantages = batch.extra[ADVANTAGES].reshape(-1)
        self.mask = self(batch.weights)

    def __call__(self, values: jax.Array) -> jax.Array:
        rows, most_answers, tokens = self._slots.shape
        flat = self._slots.reshape(rows, most_answers * tokens)
        answer_values = jnp.take_along_axis(values, flat, axis=1, mode="promise_in_bounds").reshape(-1, tokens)
        return jnp.where(self._there, answer_values, 0.0)


_SCORED_ROWS = 4  # rows whose log-probabilities are computed in one call


def log_probs_of(temperature: float, model: Decoder, batch: Batch, *, exact: bool = False) -> np.ndarray:
    """float32[rows, length], numpy, in nats: log-probabilities of a batch's targets, 0 where the weight is 0, 4 rows at
    a time, of divided weights on each device. temperature: divides the logits. exact: as of Settings.
    """
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    division, rows = Division.of(leaves), len(batch.tokens)
    at_once = _SCORED_ROWS if division is None else _SCORED_ROWS * division.devices
    log_probs = np.zeros(batch.tokens.shape, np.float32)
    for start in range(0, rows, at_once):
        row_indices = np.minimum(np.arange(start, start + at_once), rows - 1)
        some_rows = jax.tree.map(operator.itemgetter(row_indices), dataclasses.replace(batch, extra={}))
        with one_order.exact(exact):
            if division is None:
                values = np.asarray(_row_log_probs(graph, temperature, state, some_rows))
            else:
                values = partition.on_host(_divided_log_probs(graph, temperature, treedef, division, leaves, some_rows))
        count = min(at_once, rows - start)
        log_probs[start : start + count] = values[:count]
    return np.where(batch.weights > 0, log_probs, 0.0).astype(np.float32)


def reference_log_probs(temperature: float, model: Decoder, batch: Batch) -> np.ndarray:
    """`log_probs_of` under `model` with its adapter off."""
    return log_probs_of(temperature, without_adapter(model), batch)


_AS_STEPS = {"xla_allow_excess_precision": False}


def _log_probs(graph, temperature, state, batch: Batch) -> jax.Array:
    """float32[rows, length]"""
    model = nnx.merge(graph, state)
    forward = Forward()
    return forward.log_probs(model, forward.frozen(model, batch), batch, temperature=temperature)[0]


# Compiled for each shape, graph and temperature.
_row_log_probs = jax.jit(_log_probs, static_argnums=(0, 1), compiler_options=_AS_STEPS)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=_AS_STEPS)
def _divided_log_probs(graph, temperature, treedef, division: Division, leaves, batch: Batch) -> jax.Array:
    """`_log_probs` over the devices that divide the model's arrays, each of which has some of the rows."""

    def local(leaves, batch):
        return _log_probs(graph, temperature, jax.tree.unflatten(treedef, leaves), batch)

    marked = division.marked(leaves)
    over = partition.divided(local, division.mesh, (partition.specs(marked), partition.ROWS), partition.ROWS)
    return over(marked, batch)
