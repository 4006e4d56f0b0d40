"""Losses of reinforcement learning from rewards, GRPO, its variants and RLOO, as functions of arrays.

Advantages are computed from rewards on the host. Losses take `Answers`, [answers, tokens], and give sums that a step
adds up; `grpo_loss` and `rloo_loss` are for a user's own loop. Names, defaults and values are TRL 1.16's.

Papers: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, SAPO 2511.20347,
RLOO 2402.14740, entropy masks 2506.01939.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.placement import partition

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"]
Level = Literal["token", "sequence"]
# Whose standard deviation divides the advantages.
Scale = Literal["group", "batch", "none"]
# The forms of the importance ratio; see `importance_ratio`.
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_SMALL = 1e-4  # added to a standard deviation before a division by it
_ROUNDING = 1e-12  # rewards that differ by less of the largest one are equal

# ---- advantages, on the host, in float64


def total_rewards(rewards: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """float64[answers]: weighted sums; NaN for an answer without any reward.

    rewards: float[answers, functions], NaN where a function does not apply.
    weights: float[functions]; None: all 1.
    """
    rewards = np.asarray(rewards, np.float64)
    weighed = rewards if weights is None else rewards * np.asarray(weights, np.float64)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(weighed, axis=1))


def equal_rewards(rewards: np.ndarray, num_generations: int, weights: np.ndarray | None = None) -> np.ndarray:
    """bool[groups]: whether a group's sums differ by rounding only (1e-12 of the largest terms), or at most one answer
    has a reward. Arguments as `group_advantages`; NaN is no reward.
    """
    groups = total_rewards(rewards, weights).reshape(-1, num_generations)
    terms = np.abs(rewards if weights is None else rewards * np.asarray(weights, np.float64))
    largest = np.nansum(terms, axis=1).reshape(groups.shape).max(axis=1)
    return ~(np.fmax.reduce(groups, axis=1) - np.fmin.reduce(groups, axis=1) > _ROUNDING * largest)


def group_advantages(
    rewards: np.ndarray,
    num_generations: int,
    *,
    weights: np.ndarray | None = None,
    scale_rewards: Scale = "group",
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> np.ndarray:
    """GRPO's advantages, float32[answers]: reward minus the group's mean, over a standard deviation (unbiased, plus
    1e-4). For rewards 1, 0, 0, 0 they are about 1.5, -0.5, -0.5, -0.5; equal ones give 0 exactly.

    Answers without a reward get 0 and count nowhere; so does a group's only one with a reward. Raises ValueError for
    incomplete groups, wrong shapes or options, or values beyond float32.

      rewards: [answers, functions], NaN where a function does not apply; groups are consecutive.
      num_generations: answers of a group.
      weights: [functions]; None: all 1.
      scale_rewards: deviation of the "group", the "batch", or "none"; unused with "normalize_then_sum".
      aggregation: "normalize_then_sum" normalises each function's rewards in its group, adds them up weighted, and
      normalises over the batch (GDPO, arXiv 2601.05242).
    """
    rewards = _in_groups("group_advantages", rewards, num_generations)
    if scale_rewards not in get_args(Scale):
        raise ValueError(f"scale_rewards = {scale_rewards!r}: must be one of {', '.join(get_args(Scale))}")
    if aggregation == "sum_then_normalize":
        total = total_rewards(rewards, weights)
        advantages = _centred(total, equal_rewards(rewards, num_generations, weights))
        if scale_rewards == "group":
            advantages = advantages / (_deviation(advantages, 1) + _SMALL)
        elif scale_rewards == "batch":
            all_equal = equal_rewards(rewards, len(rewards), weights)
            advantages = advantages / (_deviation(_centred(total, all_equal), None) + _SMALL)
    elif aggregation == "normalize_then_sum":
        columns = [rewards[:, i : i + 1] for i in range(rewards.shape[1])]
        centred = [_centred(column[:, 0], equal_rewards(column, num_generations)) for column in columns]
        scaled = [column / (_deviation(column, 1) + _SMALL) for column in centred]
        total = total_rewards(np.stack([column.reshape(-1) for column in scaled], axis=1), weights)
        total = np.where(np.isnan(rewards).all(axis=1), np.nan, total)
        advantages = total / (_deviation(total, None) + _SMALL)  # the mean is 0, as each function's in each group
    else:
        raise ValueError(f"aggregation = {aggregation!r}: must be 'sum_then_normalize' or 'normalize_then_sum'")
    return _as_advantages(advantages)


def rloo_advantages(
    rewards: np.ndarray,
    num_generations: int,
    *,
    weights: np.ndarray | None = None,
    kl: np.ndarray | None = None,
    beta: float = 0.0,
    normalize: bool = False,
    clip: tuple[float, float] | None = None,
) -> np.ndarray:
    """RLOO's advantages, float32[answers]: reward minus the mean of the group's others. 0 without a reward or another
    scored answer; equal ones give 0 exactly. Raises ValueError as `group_advantages`.

      rewards, weights: as `group_advantages`.
      kl: float[answers], sums of log p - log p_ref; beta times it is subtracted from the reward.
      clip: the least and greatest weighted reward, before `kl`; None: no limits.
      normalize: to mean 0 and deviation 1 over the batch.
      num_generations: consecutive answers of one prompt, a group.
    """
    rewards = _in_groups("rloo_advantages", rewards, num_generations)
    total = total_rewards(rewards, weights)
    if clip is not None:
        total = np.clip(total, *clip)
    if (kl is not None and beta) or clip is not None:
        total = total - (0.0 if kl is None else beta * np.asarray(kl, np.float64))
        equal = equal_rewards(total[:, None], num_generations)
    else:
        equal = equal_rewards(rewards, num_generations, weights)
    centred = _centred(total, equal)
    scored = (~np.isnan(centred)).sum(axis=1, keepdims=True)
    # An answer's distance from the mean of the others is n / (n - 1) times that from the mean of all.
    advantages = np.where(scored > 1, centred * scored / np.maximum(scored - 1, 1), np.nan)
    if normalize:
        advantages = advantages / (_deviation(advantages, None) + _SMALL)  # the mean is 0
    return _as_advantages(advantages)


def _in_groups(name: str, rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """float64[answers, functions]; ValueError, beginning with `name`, for incomplete groups or infinite rewards."""
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2:
        raise ValueError(f"{name}: rewards has shape {rewards.shape}; it must be [answers, functions]")
    if num_generations < 1 or len(rewards) % num_generations:
        raise ValueError(
            f"{name}: {len(rewards)} answers are not groups of num_generations = {num_generations}; "
            "give every prompt the same number of answers"
        )
    if np.isinf(rewards).any():
        raise ValueError(f"{name}: rewards has infinite numbers; a reward is finite, or NaN where there is none")
    return rewards


def _centred(total: np.ndarray, equal: np.ndarray) -> np.ndarray:
    """float64[groups, answers]: `total` minus the group's mean, 0 in `equal` groups; NaN stays and does not count."""
    groups = total.reshape(len(equal), -1)
    above = groups - np.fmin.reduce(groups, axis=1, keepdims=True)  # which loses the digits that all have
    count = np.maximum((~np.isnan(groups)).sum(axis=1, keepdims=True), 1)
    centred = above - np.nansum(above, axis=1, keepdims=True) / count
    return np.where(equal[:, None] & ~np.isnan(groups), 0.0, centred)


def _deviation(centred: np.ndarray, axis: int | None) -> np.ndarray:
    """Unbiased standard deviation of values of mean 0 but NaN along `axis` (None: all); NaN for fewer than two."""
    count = (~np.isnan(centred)).sum(axis=axis, keepdims=True)
    largest = np.fmax.reduce(np.abs(centred), axis=axis, keepdims=True, initial=0.0)
    largest = np.where(largest > 0, largest, 1.0)  # by which squares neither overflow nor vanish
    squares = np.nansum((centred / largest) ** 2, axis=axis, keepdims=True)
    return np.where(count > 1, largest * np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def _as_advantages(values: np.ndarray) -> np.ndarray:
    """float32[answers], 0 for NaN; ValueError beyond float32."""
    with np.errstate(over="ignore"):
        advantages = np.nan_to_num(values.reshape(-1), nan=0.0, posinf=np.inf, neginf=-np.inf).astype(np.float32)
    if not np.isfinite(advantages).all():
        raise ValueError(
            f"advantages of up to {np.abs(values[~np.isnan(values)]).max():.3g} are beyond float32; give smaller "
            "rewards or weights, or set scale_rewards"
        )
    return advantages


# ---- losses, on the device


def default_correction(cache: str | None) -> Correction:
    """The mode where none is set. Of keys and values in few bits the product over an answer falls with its length, and
    the loss with it. cache: as of Sampler.
    """
    return "sequence_mask" if cache is None else "token_truncate"


def importance_ratio(
    logps: jax.Array,
    sampled_logps: jax.Array,
    mask: jax.Array,
    *,
    mode: Correction = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> jax.Array:
    """Bounded ratio of the trainer's to the sampler's probabilities, without gradient (truncated importance sampling):
    float32[answers, tokens], or [answers, 1] for "sequence_...".

    Raises ValueError for an unknown mode.

      logps: float32[answers, tokens], of the trainer's model at sampling.
      sampled_logps: of the sampler; NaN gives the ratio 1.
      mask: 1 at tokens that count.
      mode: a ratio a token or an answer (of the product); "..._truncate" clips to the bounds, "..._mask" sets 0 beyond.
      clip_max, clip_min: None is no bound.
    """
    if mode not in get_args(Correction):
        raise ValueError(f"importance_sampling_mode = {mode!r}: must be one of {', '.join(get_args(Correction))}")
    difference = jnp.nan_to_num((logps - sampled_logps) * mask, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdims=True)
    ratio = jnp.exp(difference)
    if mode.endswith("truncate"):
        return jax.lax.stop_gradient(jnp.clip(ratio, clip_min, clip_max))
    outside = jnp.zeros(ratio.shape, bool)
    if clip_min is not None:
        outside |= ratio < clip_min
    if clip_max is not None:
        outside |= ratio > clip_max
    return jax.lax.stop_gradient(jnp.where(outside, 0.0, ratio))


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Options of the losses, with TRL's names; RLOO uses the epsilons. Raises ValueError for one out of range."""

    loss_type: LossType = "dapo"
    """"dapo", "bnpo": clipped ratios, mean over tokens. "grpo": mean of answers' means. "dr_grpo": sum / (answers *
    max_completion_length). "cispo": log-probability times capped ratio, mean over tokens. "sapo": soft clipping, mean
    of answers' means. In a run "dapo" and "cispo" divide by the mean tokens of a generation's steps
    (GRPO.over_generation).
    """

    importance_sampling_level: Level = "token"
    """"token": a ratio each; "sequence": the geometric mean of the answer's (GSPO)."""

    epsilon: float = 0.2
    """Clips below at 1 - epsilon; not "cispo" and "sapo"."""

    epsilon_high: float | None = None
    """Clips above at 1 + epsilon_high, with "cispo" at itself (so above 1). None: epsilon. Not "sapo"."""

    delta: float | None = None
    """Upper bound of the unclipped term, for negative advantages (two-sided clipping); should be above 1 +
    epsilon_high. None: none. Not "cispo" and "sapo".
    """

    beta: float = 0.0
    """Factor of the KL divergence in the loss; RLOO subtracts it from rewards."""

    use_bias_correction_kl: bool = True
    """Multiply a token's divergence by its unclipped ratio, with gradient."""

    top_entropy_quantile: float = 1.0
    """Share of tokens, those of largest entropy in the batch (a run: in a micro-batch, over all devices), that count;
    the divisor counts all.
    """

    entropy_coef: float = 0.0
    """Factor of the selected tokens' mean entropy, subtracted from the loss."""

    sapo_temperature_pos: float = 1.0
    """t in "sapo"'s 4 / t * sigmoid(t * (r - 1)) for positive advantages: larger clips closer to 1."""

    sapo_temperature_neg: float = 1.05
    """The same for others."""

    max_completion_length: int = 512
    """Divisor of "dr_grpo"."""

    def __post_init__(self) -> None:
        for name, allowed in (("loss_type", get_args(LossType)), ("importance_sampling_level", get_args(Level))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if not 0.0 < self.top_entropy_quantile <= 1.0:
            raise ValueError(f"top_entropy_quantile = {self.top_entropy_quantile}: must be above 0 and at most 1")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be above 0")
        for name in ("epsilon", "epsilon_high", "delta", "beta", "max_completion_length"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name in ("delta", "max_completion_length"))):
                raise ValueError(f"{name} = {value}: must not be negative, nor is 0 a bound or a length")

    @property
    def bound_above(self) -> float:
        """epsilon_high, else epsilon: the ratio's upper bound, above 1 or with "cispo" itself."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclasses.dataclass(frozen=True)
class Answers:
    """A batch of sampled answers: float32[answers, tokens] unless said otherwise, padding last."""

    logps: jax.Array
    """Under the trained model; gradients go through them."""
    mask: jax.Array
    """1 at tokens that count."""
    advantages: jax.Array
    """float32[answers]"""
    entropies: jax.Array
    """Of each token's distribution, in nats."""
    old_logps: jax.Array | None = None
    """Under the model that sampled; None: `logps` without gradient."""
    ref_logps: jax.Array | None = None
    """Under the reference; needed if beta is not 0."""
    ratio: jax.Array | None = None
    """float32[answers, tokens or 1]: of `importance_ratio`; None: no correction."""
    present: jax.Array | None = None
    """float32[answers]: 0 where there is no answer; None: all. A fully masked answer is present."""

    @property
    def counted(self) -> jax.Array:
        """float32[answers]: `present`, or ones."""
        return jnp.ones(len(self.mask), jnp.float32) if self.present is None else self.present


def grpo_loss(answers: Answers, options: PolicyLoss = PolicyLoss()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(Loss, {metric: mean}), float32 scalars, for a user's own loop. Raises ValueError if beta is not 0 without
    ref_logps.

    ```python
    answers = Answers(logps, mask, jnp.asarray(group_advantages(rewards, num_generations=8)), entropies)
    loss, metrics = grpo_loss(answers, PolicyLoss(loss_type="dr_grpo", max_completion_length=256))
    ```
    """
    loss, count, sums = grpo_sums(answers, options)
    return loss / jnp.maximum(count, 1.0), means_of(sums)


def means_of(sums: dict[str, Any]) -> dict[str, Any]:
    """{metric: mean} of sums, maybe of several batches: over "ratios" for metrics of clipping, else over "tokens"; 0
    without any.
    """
    counts = {name: sums[name] for name in ("tokens", "ratios")}
    return {
        name: value / (count + (count == 0))
        for name, value in sums.items()
        if name not in counts
        for count in [counts["ratios" if name in _BY_RATIO else "tokens"]]
    }


_CLIPPED: tuple[str, ...] = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
# Metrics that have one value for each ratio, which is one for each token or each answer. The others are means over
# tokens.
_BY_RATIO = (*_CLIPPED, "cispo_clip_ratio")


def metric_names(options: PolicyLoss) -> tuple[str, ...]:
    """The names of `grpo_sums`'s sums, needed before the loss is traced."""
    clipped = {"cispo": ("cispo_clip_ratio",), "sapo": ()}.get(options.loss_type, _CLIPPED)
    return ("tokens", "ratios", "entropy", *(("kl",) if options.beta else ()), *clipped)


def grpo_sums(
    answers: Answers, options: PolicyLoss, entropy_scale: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(Sum of losses, its divisor, {metric: sum}), float32 scalars that may be added up over batches.

    The divisor is answers ("grpo", "sapo"), answers times max_completion_length ("dr_grpo"), or masked tokens. Raises
    ValueError if beta is not 0 without ref_logps.

      entropy_scale: what the caller divides the loss by, over the count, so that the entropy's term stays a mean.
      options: the loss's form, beta, clipping and divisor.
    """
    mask, advantages = answers.mask.astype(jnp.float32), answers.advantages[:, None]
    old = jax.lax.stop_gradient(answers.logps) if answers.old_logps is None else answers.old_logps
    log_ratio = answers.logps - old
    per_answer = jnp.maximum(mask.sum(-1, keepdims=True), 1.0)
    if options.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / per_answer
    ratio = jnp.exp(log_ratio)
    losses, clipped = _policy_losses(answers.logps, ratio, advantages, options)
    selected_mask = mask
    if options.top_entropy_quantile < 1.0:
        selected_mask = mask * _of_high_entropy(answers.entropies, mask, options.top_entropy_quantile)
        losses = losses * selected_mask
    if answers.ratio is not None:
        losses = losses * answers.ratio
    losses = jnp.broadcast_to(losses, mask.shape)
    ratio_mask = mask if options.importance_sampling_level == "token" else answers.counted[:, None]
    sums = {"tokens": mask.sum(), "ratios": ratio_mask.sum(), "entropy": (answers.entropies * mask).sum()}
    if options.beta:
        if answers.ref_logps is None:
            raise ValueError(
                f"beta = {options.beta}: the divergence needs ref_logps, the reference's log-probabilities"
            )
        apart = answers.ref_logps - answers.logps
        kl = jnp.exp(apart) - apart - 1.0
        kl = kl * ratio if options.use_bias_correction_kl else kl
        losses = losses + options.beta * kl
        sums["kl"] = (kl * mask).sum()
    sums |= {name: (value * ratio_mask).sum() for name, value in clipped.items()}
    loss, count = _aggregated(losses * mask, per_answer, answers, options)
    if options.entropy_coef:
        mean = (answers.entropies * selected_mask).sum() / jnp.maximum(selected_mask.sum(), 1.0)
        loss = loss - options.entropy_coef * mean * count * entropy_scale
    return loss, count, jax.lax.stop_gradient(sums)


def _aggregated(losses, per_answer, answers: Answers, options: PolicyLoss) -> tuple[jax.Array, jax.Array]:
    """(Sum, divisor) by loss_type.

    losses: float32[answers, tokens], 0 outside the mask.
    per_answer: float32[answers, 1], counted tokens, at least 1.
    """
    if options.loss_type in ("grpo", "sapo"):
        return (losses / per_answer).sum(), answers.counted.sum()
    if options.loss_type == "dr_grpo":
        return losses.sum(), answers.counted.sum() * options.max_completion_length
    return losses.sum(), answers.mask.astype(jnp.float32).sum()


def rloo_sums(answers: Answers, options: PolicyLoss) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """(Sum of losses, answers, {metric: sum}), float32 scalars that may be added up.

    An answer is one action: -min(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantage), times
    answers.ratio, with the ratio of its tokens' product. Where answers.ratio has one for each token, these weigh the
    gradients of the tokens' log-probabilities. No KL term: `rloo_advantages` subtracts it.
    """
    mask, logps = answers.mask.astype(jnp.float32), answers.logps
    old = jax.lax.stop_gradient(logps) if answers.old_logps is None else answers.old_logps
    weights = answers.ratio
    if weights is not None and weights.shape == mask.shape:
        logps, weights = logps + (weights - 1.0) * (logps - jax.lax.stop_gradient(logps)), None
    ratio = jnp.exp(((logps - old) * mask).sum(-1, keepdims=True))
    losses, clipped = _policy_losses(
        answers.logps, ratio, answers.advantages[:, None], dataclasses.replace(options, loss_type="grpo", delta=None)
    )
    if weights is not None:
        losses = losses * weights
    is_present = answers.counted[:, None]
    sums = {"tokens": mask.sum(), "ratios": is_present.sum(), "entropy": (answers.entropies * mask).sum()}
    sums |= {name: (value * is_present).sum() for name, value in clipped.items()}
    return (losses * is_present).sum(), is_present.sum(), jax.lax.stop_gradient(sums)


def rloo_loss(answers: Answers, options: PolicyLoss = PolicyLoss()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(Mean loss, {metric: mean}), for a user's own loop, with advantages of `rloo_advantages`. Only the epsilons
    count.
    """
    loss, count, sums = rloo_sums(answers, options)
    return loss / jnp.maximum(count, 1.0), means_of(sums)


def _policy_losses(logps, ratio, advantages, options: PolicyLoss) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(Losses, {metric: where clipping takes effect, by the advantage's sign}), [answers, tokens or 1], padding
    included.

      ratio: float32[answers, tokens or 1], new over old.
      advantages: float32[answers, 1].
    """
    low, high = options.epsilon, options.bound_above
    if options.loss_type == "cispo":
        capped = jax.lax.stop_gradient(jnp.minimum(ratio, high))
        return -capped * advantages * logps, {"cispo_clip_ratio": (ratio > high) & (advantages > 0)}
    if options.loss_type == "sapo":
        slope = jnp.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        return -jax.nn.sigmoid(slope * (ratio - 1.0)) * 4.0 / slope * advantages, {}
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    ratio = ratio if options.delta is None else jnp.minimum(ratio, options.delta)
    below, above = (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)
    shares = dict(zip(_CLIPPED, (below, above, below | above), strict=True))
    return -jnp.minimum(ratio * advantages, clipped * advantages), shares


def _of_high_entropy(entropies: jax.Array, mask: jax.Array, share: float) -> jax.Array:
    """float32[answers, tokens]: 1 at the `share` of masked tokens, of all devices, with the largest entropies."""
    entropies = jax.lax.stop_gradient(entropies)
    bound = jnp.nanquantile(partition.gathered(jnp.where(mask > 0, entropies, jnp.nan)), 1.0 - share)
    return ((entropies * mask >= bound) & (mask > 0)).astype(jnp.float32)
