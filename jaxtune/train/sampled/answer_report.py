"""What a run that learns from rewards says about a generation: metrics, samples and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxtune.train.data.batches import Rollout
from jaxtune.train.data.packing.answers import Answer
from jaxtune.train.objectives.grpo import Correction, equal_rewards, total_rewards
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.reward_functions import RewardFunctions, Sampled, Turns

_SHOWN = 160  # characters of a prompt or an answer on the screen
_RATIO, _DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
_LEFT_OUT = 0.5  # the share of answers without a part in the loss above which it warns
_WEIGHS_LITTLE = 0.5  # the mean ratio of answers below which it warns
_CUT_OFF, _EQUAL = 0.5, 0.8  # shares of answers cut off, and of groups with equal rewards, above which it warns


def measured(
    answers: Sequence[Answer], table: np.ndarray, rewards: RewardFunctions, settings: Settings
) -> dict[str, float]:
    """Metrics of a generation by TRL's names. Missing rewards do not count; a mean or deviation of too few is 0;
    lengths are of sampled tokens.

      answers: those to one prompt consecutive.
      table: float64[answers, functions], NaN where a function does not apply.
    """
    lengths = np.array([answer.length for answer in answers])
    is_cut = np.array([answer.finish_reason == "length" for answer in answers])
    weights = np.array(rewards.weights)
    total = total_rewards(table, weights)
    scored = total[~np.isnan(total)]
    metrics = {
        "reward": float(scored.mean()) if scored.size else 0.0,
        "reward_std": float(scored.std(ddof=1)) if scored.size > 1 else 0.0,
        "frac_reward_zero_std": float(np.mean(equal_rewards(table, settings.num_generations, weights))),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(is_cut.mean()),
    }
    for column, name in enumerate(rewards.names):
        values = table[:, column][~np.isnan(table[:, column])]
        metrics[f"rewards/{name}/mean"] = float(values.mean()) if values.size else 0.0
        metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return metrics


def screen_lines(
    sampled: Sampled, table: np.ndarray, answers: Sequence[Answer], rewards: RewardFunctions, settings: Settings
) -> list[str]:
    """A sample of largest reward, and warnings if over half of the answers are cut off or over 80 % of groups have
    equal rewards.

      table: float64[answers, functions], NaN where a function does not apply.
    """
    total = total_rewards(table, np.array(rewards.weights))
    best = int(np.nanargmax(np.where(np.isnan(total), -np.inf, total)))
    lines = [
        f"a sample of reward {total[best]:.3f}: {_line(sampled.prompts[best])} -> {_line(sampled.completions[best])}"
    ]
    cut_share = np.mean([answer.finish_reason == "length" for answer in answers])
    if cut_share > _CUT_OFF:
        lines.append(
            f"warning: {cut_share:.0%} of answers reach objective.max_completion_length = "
            f"{settings.max_completion_length}; raise it, ask for shorter answers, or set "
            "objective.mask_truncated_completions"
        )
    equal = np.mean(equal_rewards(table, settings.num_generations, np.array(rewards.weights)))
    if equal > _EQUAL:
        lines.append(
            f"warning: all rewards of a group are equal in {equal:.0%} of groups, which teach little; check the "
            "reward functions, take prompts that are neither too easy nor too hard, or raise "
            "objective.num_generations"
        )
    return lines


def recorded(
    step: int,
    sampled: Sampled,
    table: np.ndarray,
    answers: Sequence[Answer],
    rewards: RewardFunctions,
    extra: Mapping[str, Sequence[object]],
) -> list[Rollout]:
    """A generation as lines of rollouts.jsonl; NaN is no reward.

    step: from 1, the first that trains on them.
    table: float64[answers, functions].
    extra: {column: a value for each answer}, logged by functions.
    """
    total = total_rewards(table, np.array(rewards.weights))
    rows = [
        Rollout(
            step=step,
            row=answer.prompt,
            prompt=sampled.prompts[index],
            answer=sampled.completions[index],
            rewards=dict(zip(rewards.names, table[index].tolist(), strict=True)),
            reward=float(total[index]),
            advantage=answer.advantage,
            tokens=answer.length,
            ended=answer.finish_reason,
        )
        for index, answer in enumerate(answers)
    ]
    for index, row in enumerate(rows if extra else ()):
        row["extra"] = {name: values[index] for name, values in extra.items()}
    return rows


def masked_lines(line: Mapping[str, float]) -> list[str]:
    """Warnings if, by a step's metrics, over half of the answers have no part in the loss."""
    masked, zero = (line.get(name, 0.0) for name in ("completions/masked_ratio", f"{_RATIO}/zero"))
    lines = []
    if masked > _LEFT_OUT:
        lines.append(
            f"warning: {masked:.0%} of answers have no part in the loss, as they reach "
            "objective.max_completion_length (mask_truncated_completions) or have no token of the model; raise it"
        )
    if zero > _LEFT_OUT:
        lines.append(
            f"warning: the correction for the sampler's rounding leaves {zero:.0%} of the answers or tokens out of the "
            f"loss ({_RATIO} from {line.get(f'{_RATIO}/min', 0.0):.2g} to {line.get(f'{_RATIO}/max', 0.0):.2g}); set "
            "objective.importance_sampling_mode: token_truncate, or wider importance_sampling_clip_max and clip_min"
        )
    return lines


def weight_lines(line: Mapping[str, float], correction: Correction | None, cache: str | None) -> list[str]:
    """A warning if ratios of whole answers weigh the loss with less than one half, unless most are 0 (`masked_lines`).

    line: a step's metrics. correction: how the loss corrects; None: not. cache: as of Sampler.
    """
    usual = {"mean": 1.0, "max": 1.0, "zero": 0.0}
    mean, largest, zero = (line.get(f"{_RATIO}/{name}", value) for name, value in usual.items())
    if correction is None or not correction.startswith("sequence") or mean >= _WEIGHS_LITTLE:
        return []
    if largest == 0 or zero > _LEFT_OUT:  # no answer has a part in the loss, or most have none
        return []
    without = "leave objective.cache out" if cache is not None else "set objective.exact (not with rollout_func)"
    return [
        f"warning: objective.importance_sampling_mode = {correction} weighs the loss with {mean:.2g} on average "
        f"({_RATIO}/mean), as the rounding of all tokens of an answer multiplies: set "
        f"objective.importance_sampling_mode: token_truncate, or {without}"
    ]


def mismatch_lines(line: Mapping[str, float], settings: Settings) -> list[str]:
    """A warning if a step with `exact` measured other bits."""
    largest = line.get(f"{_DIFFERENCE}/max", 0.0)
    if not settings.exact or largest == 0.0:
        return []
    return [
        f"warning: objective.exact: log-probabilities of sampler and training differ by up to {largest:.3g} "
        f"({_DIFFERENCE}/max); `jaxtune doctor --exact MODEL` says in which operation"
    ]


def _line(value: Turns) -> str:
    """A prompt or answer (of messages the last) on one line, cut at 160 characters."""
    content = value if isinstance(value, str) else value[-1].get("content", "")
    if isinstance(content, list):  # with pictures
        content = " ".join(str(part.get("text", f"<{part['type']}>")) for part in content)
    text = " ".join(str(content).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
