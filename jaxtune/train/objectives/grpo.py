"""The losses of reinforcement learning from rewards: GRPO, its variants and RLOO, as functions of arrays. The
objectives (policy.py) call the sums; `grpo_loss` and `rloo_loss` are for training loops of a user's own.

No function depends on a model. `group_advantages` and `rloo_advantages` compute advantages from rewards on the host
(`total_rewards` weighs and adds them). `importance_ratio` corrects for a sampler whose probabilities differ from the
trainer's. `grpo_loss` and `rloo_loss` are the losses of a batch of `Answers`, given as arrays [answers, tokens], with
the options `PolicyLoss`; `grpo_sums` and `rloo_sums` give them as sums, which a train step adds up, and `means_of`
makes metrics of the sums, whose names `metric_names` gives. `_policy_losses` clips ratios, `_of_high_entropy` selects
tokens, and `_aggregated` adds up the losses of tokens. Names, defaults and values are TRL 1.16's.

Papers: GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, SAPO 2511.20347,
RLOO 2402.14740, entropy masks 2506.01939."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

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
    """The weighted sum of each answer's rewards, float64[answers]; NaN for an answer without any reward.

    Args:
      rewards: float[answers, functions]; NaN, which adds nothing, where a function does not apply.
      weights: float[functions], the factor of each function; None: all 1.
    """
    rewards = np.asarray(rewards, np.float64)
    weighed = rewards if weights is None else rewards * np.asarray(weights, np.float64)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(weighed, axis=1))


def equal_rewards(rewards: np.ndarray, num_generations: int, weights: np.ndarray | None = None) -> np.ndarray:
    """bool[groups]: whether the weighted sums of a group's rewards differ by no more than rounding (1e-12 of the
    largest terms), or at most one answer of the group has a reward. The arguments are those of `group_advantages`."""
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
    """GRPO's advantages, float32[answers]: an answer's reward minus the mean of its group, all answers to one prompt,
    divided by a standard deviation (unbiased, plus 1e-4). Equal rewards give 0 exactly.

    An answer without any reward has advantage 0 and is left out of all means and standard deviations. The only answer
    of a group that has a reward has advantage 0, too.

    Args:
      rewards: [answers, functions], NaN where a function does not apply. The answers of a group are consecutive.
      num_generations: the number of answers in a group.
      weights: [functions], the factors in the sum of the functions' rewards, which "normalize_then_sum" normalises
        before; None: all 1.
      scale_rewards: the divisor: "group" is the standard deviation within the group, "batch" that over all answers, and
        "none" divides by nothing. Not used with "normalize_then_sum".
      aggregation: "sum_then_normalize" adds up the functions' rewards first. "normalize_then_sum" normalises the
        rewards of each function within its group, adds them up, and normalises the sums over the batch (GDPO, arXiv
        2601.05242).
    Raises:
      ValueError: the answers do not divide into groups, `rewards` is not two-dimensional, an option is not one of
        those above, or an advantage is beyond float32.
    """
    rewards = _in_groups("group_advantages", rewards, num_generations)
    if scale_rewards not in get_args(Scale):
        raise ValueError(f"scale_rewards = {scale_rewards!r}: must be one of {', '.join(get_args(Scale))}")
    if aggregation == "sum_then_normalize":
        total = total_rewards(rewards, weights)
        found = _centred(total, equal_rewards(rewards, num_generations, weights))
        if scale_rewards == "group":
            found = found / (_deviation(found, 1) + _SMALL)
        elif scale_rewards == "batch":
            all_equal = equal_rewards(rewards, len(rewards), weights)
            found = found / (_deviation(_centred(total, all_equal), None) + _SMALL)
    elif aggregation == "normalize_then_sum":
        columns = [rewards[:, i : i + 1] for i in range(rewards.shape[1])]
        centred = [_centred(own[:, 0], equal_rewards(own, num_generations)) for own in columns]
        scaled = [own / (_deviation(own, 1) + _SMALL) for own in centred]
        total = total_rewards(np.stack([own.reshape(-1) for own in scaled], axis=1), weights)
        total = np.where(np.isnan(rewards).all(axis=1), np.nan, total)
        found = total / (_deviation(total, None) + _SMALL)  # whose mean is 0, as that of each function in each group
    else:
        raise ValueError(f"aggregation = {aggregation!r}: must be 'sum_then_normalize' or 'normalize_then_sum'")
    return _as_advantages(found)


def rloo_advantages(
    rewards: np.ndarray,
    num_generations: int,
    *,
    weights: np.ndarray | None = None,
    kl: np.ndarray | None = None,
    beta: float = 0.0,
    normalize: bool = False,
) -> np.ndarray:
    """RLOO's advantages, float32[answers]: an answer's reward minus the mean reward of the other answers of its group,
    all answers to one prompt. An answer without any reward, or without another scored one in its group, has advantage
    0. Equal rewards give 0 exactly.

    Args:
      rewards: [answers, functions], NaN where a function does not apply. The answers of a group are consecutive.
      num_generations: the number of answers in a group.
      weights: [functions], the factors of the functions' rewards; None: all 1.
      kl: float[answers], for each answer the sum over its tokens of log p - log p_ref; beta times it is subtracted
        from the reward. None subtracts nothing.
      beta: the factor of `kl`.
      normalize: whether the advantages are normalised to mean 0 and standard deviation 1 over the batch.
    Raises:
      ValueError: the answers do not divide into groups, `rewards` is not two-dimensional, or an advantage is beyond
        float32.
    """
    rewards = _in_groups("rloo_advantages", rewards, num_generations)
    total = total_rewards(rewards, weights)
    if kl is not None and beta:
        total = total - beta * np.asarray(kl, np.float64)
        equal = equal_rewards(total[:, None], num_generations)
    else:
        equal = equal_rewards(rewards, num_generations, weights)
    centred = _centred(total, equal)
    scored = (~np.isnan(centred)).sum(axis=1, keepdims=True)
    # An answer's distance from the mean of the others is n / (n - 1) times that from the mean of all.
    found = np.where(scored > 1, centred * scored / np.maximum(scored - 1, 1), np.nan)
    if normalize:
        found = found / (_deviation(found, None) + _SMALL)  # the mean is 0
    return _as_advantages(found)


def _in_groups(name: str, rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """`rewards` as float64[answers, functions]; ValueError, which begins with `name`, if they are no whole groups or
    infinite."""
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
    """float64[groups, answers]: the answers' `total` minus the mean of their group; 0 in the groups that are `equal`.
    NaN stays NaN, and counts in no mean."""
    groups = total.reshape(len(equal), -1)
    above = groups - np.fmin.reduce(groups, axis=1, keepdims=True)  # which loses the digits that all have
    count = np.maximum((~np.isnan(groups)).sum(axis=1, keepdims=True), 1)
    centred = above - np.nansum(above, axis=1, keepdims=True) / count
    return np.where(equal[:, None] & ~np.isnan(groups), 0.0, centred)


def _deviation(centred: np.ndarray, axis: int | None) -> np.ndarray:
    """The unbiased standard deviation of values of mean 0 that are not NaN, along `axis` (None: of all), with reduced
    axes kept as size 1. NaN for fewer than two values."""
    count = (~np.isnan(centred)).sum(axis=axis, keepdims=True)
    largest = np.fmax.reduce(np.abs(centred), axis=axis, keepdims=True, initial=0.0)
    largest = np.where(largest > 0, largest, 1.0)  # by which squares neither overflow nor vanish
    squares = np.nansum((centred / largest) ** 2, axis=axis, keepdims=True)
    return np.where(count > 1, largest * np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)


def _as_advantages(values: np.ndarray) -> np.ndarray:
    """float32[answers] of `values`, 0 for NaN; ValueError if one is too large."""
    with np.errstate(over="ignore"):
        found = np.nan_to_num(values.reshape(-1), nan=0.0, posinf=np.inf, neginf=-np.inf).astype(np.float32)
    if not np.isfinite(found).all():
        raise ValueError(
            f"advantages of up to {np.abs(values[~np.isnan(values)]).max():.3g} are beyond float32; give smaller "
            "rewards or weights, or set scale_rewards"
        )
    return found


# ---- losses, on the device


def importance_ratio(
    logps: jax.Array,
    sampled_logps: jax.Array,
    mask: jax.Array,
    *,
    mode: Correction = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> jax.Array:
    """The ratio of the trainer's probabilities of sampled tokens to the sampler's, bounded, and without gradient.

    The losses multiply the policy's term by it (`Answers.ratio`), which corrects for a sampler that rounds differently
    (truncated importance sampling).

    Args:
      logps: float32[answers, tokens], log-probabilities under the trainer's model at the time of sampling.
      sampled_logps: float32[answers, tokens], log-probabilities that the sampler reported; NaN where it reported none,
        and such a token has the ratio 1.
      mask: float32[answers, tokens], 1 at tokens that count in the loss, 0 at others and at padding.
      mode: "token_..." gives a ratio for each token, "sequence_..." one for each answer (of the product of its tokens'
        probabilities). "..._truncate" clips ratios to the bounds; "..._mask" sets ratios beyond the bounds to 0.
      clip_max, clip_min: the largest and the smallest ratio; None is no bound.
    Returns:
      float32[answers, tokens] with a mode "token_...", float32[answers, 1] with "sequence_...".
    Raises:
      ValueError: the mode is not known.
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
    """The options of `grpo_loss` and `grpo_sums` (and, of these, epsilon and epsilon_high of `rloo_sums`), with TRL's
    names and defaults. `bound_above` is epsilon_high, or epsilon if that is None.

    Raises:
      ValueError: an option is out of its range; the message names it. entropy_coef may have any value.
    """

    loss_type: LossType = "dapo"
    """The kind of loss, and how the losses of tokens become one number. "dapo" and "bnpo": clipped ratios, the mean
    over all tokens of a batch. "grpo": clipped ratios, the mean of the answers' means. "dr_grpo": clipped ratios, the
    sum divided by the number of answers times max_completion_length. "cispo": the log-probability times the capped
    ratio, the mean over all tokens. "sapo": ratios with a soft clipping, the mean of the answers' means. In a run,
    "dapo" and "cispo" divide the sum over a step's tokens by the mean number of tokens of the steps that share a
    generation, the answers that are sampled at once (GRPO.over_generation)."""

    importance_sampling_level: Level = "token"
    """With "token", each token has its own ratio of new to old probability; with "sequence", all tokens of an answer
    have the geometric mean of their ratios (GSPO)."""

    epsilon: float = 0.2
    """The ratio is clipped below at 1 - epsilon; "cispo" and "sapo" have no such bound."""

    epsilon_high: float | None = None
    """The ratio is clipped above at 1 + epsilon_high; with "cispo", at epsilon_high itself, so "cispo" needs a value
    above 1. None: the value of epsilon, also with "cispo". "sapo" does not use it."""

    delta: float | None = None
    """An upper bound of the ratio in the term without clipping, which takes effect for negative advantages (two-sided
    clipping). It should be above 1 + epsilon_high, or it bounds positive ones too. None: no bound. "cispo" and "sapo"
    do not use it."""

    beta: float = 0.0
    """The factor of the KL divergence from the reference model, which is added to the loss; 0: there is none. RLOO
    subtracts beta times the divergence from the rewards instead (policy.RLOO)."""

    use_bias_correction_kl: bool = True
    """True: the divergence of each token is multiplied by the ratio of new to old probability, not clipped, and so
    differentiated through it too. False: it is not."""

    top_entropy_quantile: float = 1.0
    """The share of tokens that count in the policy's loss, above 0: those with the largest entropy of the batch (in a
    run, of a device's rows of a micro-batch); 1 is all. The loss's divisor counts the other tokens too."""

    entropy_coef: float = 0.0
    """The factor of the mean entropy, over the tokens that top_entropy_quantile selects, subtracted from the loss."""

    sapo_temperature_pos: float = 1.0
    """The factor t, above 0, in "sapo"'s soft clipping of a ratio r for positive advantages, 4 / t * sigmoid(t * (r -
    1)): a larger t clips closer to 1."""

    sapo_temperature_neg: float = 1.05
    """The same factor of "sapo", above 0, for advantages that are not positive."""

    max_completion_length: int = 512
    """The number of tokens for each answer by which "dr_grpo" divides."""

    def __post_init__(self) -> None:
        """Checks the options; raises ValueError for the first one that is out of its range, and names it."""
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
        """epsilon_high, or epsilon if that is None: the number that sets the upper bound of the ratio, which is at most
        1 + this number, and with "cispo" at most this number. "sapo" does not use it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclasses.dataclass(frozen=True)
class Answers:
    """A batch of sampled answers, as arrays that the losses take; GRPO.loss makes one of each micro-batch. They are
    float32[answers, tokens] unless another shape is given; an answer's tokens come first, then padding."""

    logps: jax.Array
    """The tokens' log-probabilities under the model that is trained. Gradients are taken through them."""
    mask: jax.Array
    """1 at tokens that count in the loss."""
    advantages: jax.Array
    """float32[answers]: from `group_advantages` or `rloo_advantages`."""
    entropies: jax.Array
    """At each token the entropy, in nats, of the distribution by which `logps` has its log-probability."""
    old_logps: jax.Array | None = None
    """The log-probabilities under the model that sampled. None takes `logps` without gradient, which is the same in the
    first step after sampling."""
    ref_logps: jax.Array | None = None
    """The log-probabilities under the reference model; GRPO's losses need them if beta is not 0."""
    ratio: jax.Array | None = None
    """float32[answers, tokens or 1]: the factors of `importance_ratio`, which correct for a sampler that rounds
    differently; None: the losses are not corrected."""
    present: jax.Array | None = None
    """float32[answers]: 0 where a row of the arrays has no answer; None if all have one. An answer whose mask is all
    zeros, because it was cut off, is present."""

    @property
    def counted(self) -> jax.Array:
        """float32[answers]: 1 where a row of the arrays has an answer, else 0. It is `present`, or ones if that is
        None. `grpo_sums` and `rloo_sums` count answers by it."""
        return jnp.ones(len(self.mask), jnp.float32) if self.present is None else self.present


def grpo_loss(answers: Answers, options: PolicyLoss = PolicyLoss()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the loss of a batch of answers by the variant of GRPO that `options` choose, by default "dapo"; its metrics,
    {name: mean}), float32 scalars, for training loops of a user's own; a run adds up `grpo_sums`. Gradients are those
    of `answers.logps` and, if options.entropy_coef is not 0, `answers.entropies`. Raises ValueError if beta is not 0
    and the answers have no ref_logps.

    ```python
    answers = Answers(logps, mask, jnp.asarray(group_advantages(rewards, num_generations=8)), entropies)
    loss, metrics = grpo_loss(answers, PolicyLoss(loss_type="dr_grpo", max_completion_length=256))
    ```
    """
    loss, count, sums = grpo_sums(answers, options)
    return loss / jnp.maximum(count, 1.0), means_of(sums)


def means_of(sums: dict[str, Any]) -> dict[str, Any]:
    """Divides each sum by the count that belongs to it, and returns {metric: mean}. sums: the dict that `grpo_sums` or
    `rloo_sums` returns, perhaps added up over several batches and with further sums over tokens (`GRPO.metrics`). Its
    entries "tokens" and "ratios" are the counts and are left out of the result: metrics of clipping are means over
    ratios (one for each token or each answer), all others are means over tokens. A mean whose count is 0 is 0."""
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
    """The names of the sums that `grpo_sums` returns with `options`. An objective must state them before its loss is
    traced, because the train step adds them up."""
    clipped = {"cispo": ("cispo_clip_ratio",), "sapo": ()}.get(options.loss_type, _CLIPPED)
    return ("tokens", "ratios", "entropy", *(("kl",) if options.beta else ()), *clipped)


def grpo_sums(
    answers: Answers, options: PolicyLoss, entropy_scale: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """GRPO's loss of a batch of answers as sums: (sum of the losses, the count that divides it, {metric: sum}), float32
    scalars, so that several batches can be added up. `options` choose the variant of the loss. Gradients are taken of
    the first; the metrics, named by `metric_names`, pass none.

    The loss of several batches is the total of the first divided by the total of the second; `means_of` makes metrics
    of the totals. The count is the number of answers with the loss types "grpo" and "sapo", the number of answers times
    max_completion_length with "dr_grpo", and the number of tokens in the mask with the others.

    Args:
      entropy_scale: what the caller divides the loss by, over the total count: the entropy's term is multiplied by it,
        so that it stays entropy_coef times a mean.
    Raises:
      ValueError: beta is not 0, and there are no ref_logps.
    """
    mask, advantages = answers.mask.astype(jnp.float32), answers.advantages[:, None]
    old = jax.lax.stop_gradient(answers.logps) if answers.old_logps is None else answers.old_logps
    log_ratio = answers.logps - old
    per_answer = jnp.maximum(mask.sum(-1, keepdims=True), 1.0)
    if options.importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdims=True) / per_answer
    ratio = jnp.exp(log_ratio)
    losses, clipped = _policy_losses(answers.logps, ratio, advantages, options)
    counted = mask
    if options.top_entropy_quantile < 1.0:
        counted = mask * _of_high_entropy(answers.entropies, mask, options.top_entropy_quantile)
        losses = losses * counted
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
        mean = (answers.entropies * counted).sum() / jnp.maximum(counted.sum(), 1.0)
        loss = loss - options.entropy_coef * mean * count * entropy_scale
    return loss, count, jax.lax.stop_gradient(sums)


def _aggregated(losses, per_answer, answers: Answers, options: PolicyLoss) -> tuple[jax.Array, jax.Array]:
    """Adds up the losses of tokens for `grpo_sums`: (sum, count), two float32 scalars whose quotient is the loss of
    `options.loss_type`.

    Args:
      losses: float32[answers, tokens], 0 outside of the mask.
      per_answer: float32[answers, 1], the number of tokens of each answer that count, at least 1.
      answers: its mask, and which of its rows have an answer, are used.
      options: its loss_type and max_completion_length are used.
    """
    if options.loss_type in ("grpo", "sapo"):
        return (losses / per_answer).sum(), answers.counted.sum()
    if options.loss_type == "dr_grpo":
        return losses.sum(), answers.counted.sum() * options.max_completion_length
    return losses.sum(), answers.mask.astype(jnp.float32).sum()


def rloo_sums(answers: Answers, options: PolicyLoss) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """RLOO's loss of a batch of answers as sums: (sum of the losses, number of answers, {metric: sum}), float32
    scalars, so that several batches can be added up; `means_of` makes metrics of the sums.

    An answer is one action, whose ratio is that of the product of its tokens' probabilities. Its loss is -min(ratio *
    advantage, clip(ratio, 1 - epsilon, 1 + epsilon_high) * advantage), times answers.ratio if that is given; nothing
    else of `options` is used. The loss has no KL term, because `rloo_advantages` subtracted the divergence from the
    rewards. The advantages in `answers` should come from there. The metrics are the sums of tokens, ratios, entropy and
    clipped ratios.
    """
    mask = answers.mask.astype(jnp.float32)
    old = jax.lax.stop_gradient(answers.logps) if answers.old_logps is None else answers.old_logps
    ratio = jnp.exp(((answers.logps - old) * mask).sum(-1, keepdims=True))
    losses, clipped = _policy_losses(
        answers.logps, ratio, answers.advantages[:, None], dataclasses.replace(options, loss_type="grpo", delta=None)
    )
    if answers.ratio is not None:
        losses = losses * answers.ratio
    counted = answers.counted[:, None]
    sums = {"tokens": mask.sum(), "ratios": counted.sum(), "entropy": (answers.entropies * mask).sum()}
    sums |= {name: (value * counted).sum() for name, value in clipped.items()}
    return (losses * counted).sum(), counted.sum(), jax.lax.stop_gradient(sums)


def rloo_loss(answers: Answers, options: PolicyLoss = PolicyLoss()) -> tuple[jax.Array, dict[str, jax.Array]]:
    """RLOO's loss of a batch of answers, and its metrics: (the mean of the answers' losses, {name: mean}), float32
    scalars, for training loops of a user's own; a run adds up `rloo_sums`. Of `options` only epsilon and epsilon_high
    are used. The advantages in `answers` should come from `rloo_advantages`."""
    loss, count, sums = rloo_sums(answers, options)
    return loss / jnp.maximum(count, 1.0), means_of(sums)


def _policy_losses(logps, ratio, advantages, options: PolicyLoss) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The policy's clipped losses, and which ratios were clipped: (losses, {metric: True where clipping takes effect,
    which depends on the advantage's sign}), each [answers, tokens or 1]; with "sapo" there are no metrics. Padding is
    not masked here. `grpo_sums` and `rloo_sums` call it.

    Args:
      logps: float32[answers, tokens], log-probabilities under the model that is trained.
      ratio: float32[answers, tokens or 1], new over old probabilities.
      advantages: float32[answers, 1].
      options: "cispo" uses bound_above, "sapo" the two sapo_temperatures, other loss types epsilon, bound_above, delta.
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
    """float32[answers, tokens], without gradient: 1 at the tokens with the largest entropies of these answers, which
    are those that count with the option top_entropy_quantile, else 0. `grpo_sums` multiplies its mask by it.

    Args:
      entropies: float32[answers, tokens].
      mask: float32[answers, tokens], 1 at the tokens that are compared.
      share: the share of these tokens that get a 1, from 0 to 1; more get one if entropies are equal.
    """
    entropies = jax.lax.stop_gradient(entropies)
    bound = jnp.nanquantile(jnp.where(mask > 0, entropies, jnp.nan), 1.0 - share)
    return ((entropies * mask >= bound) & (mask > 0)).astype(jnp.float32)
