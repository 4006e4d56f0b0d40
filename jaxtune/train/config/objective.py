"""The section `objective`: what a run trains for, and which options each objective has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from jaxtune.train.config.checks import fraction, not_negative, positive, require
from jaxtune.train.config.model import LoadIn

# How answers are drawn from a model.
_DRAWN = ("max_completion_length", "top_k", "top_p", "min_p", "repetition_penalty", "slots", "cache")
# The options of each objective; setting any other one is an error.
_OPTIONS = {
    "sft": (),
    "dpo": (
        "beta",
        "loss_type",
        "label_smoothing",
        "f_divergence_type",
        "f_alpha_divergence_coef",
        "discopop_tau",
        "precompute_ref_log_probs",
    ),
    "orpo": ("beta",),
    "kto": ("beta", "loss_type", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs"),
    "simpo": ("beta", "simpo_gamma", "label_smoothing"),
    "reward": ("center_rewards_coefficient",),
    "distill": (
        "teacher",
        "teacher_load_in",
        "teacher_top_k",
        "teacher_logprobs",
        "beta",
        "temperature",
        "on_policy",
        "sampling_temperature",
        *_DRAWN,
    ),
}
# The losses of dpo; the second row has those of the log-ratios alone, without f_divergence_type.
PAIR_LOSSES = ("sigmoid", "ipo", "hinge", "exo_pair", "robust", "discopop", "sigmoid_norm")
_OF_RATIOS = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
PAIR_LOSSES += _OF_RATIOS
TOKEN_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")  # of grpo
# What a row of the data set is, of objectives other than over texts.
_EXAMPLES: dict[str, str] = {
    **dict.fromkeys(("dpo", "orpo", "simpo", "reward"), "pairs"),
    **dict.fromkeys(("kto", "grpo", "rloo"), "answers"),
}
# The options that all objectives over rewards of sampled answers share; their defaults are in train/objectives.
_REWARDED = (
    "reward_funcs",
    "reward_weights",
    "reward_timeout",
    "reward_errors",
    "reward_isolation",
    "tools",
    "environment_factory",
    "rollout_func",
    "reset_timeout",
    "tool_timeout",
    "tool_isolation",
    "max_tool_calling_iterations",
)
_SAMPLED = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "regex",
    "json_schema",
    "mask_truncated_completions",
    "num_iterations",
    "steps_per_generation",
    "slots",
    "cache",
    "exact",
    "epsilon",
    "epsilon_high",
    "importance_sampling_correction",
    "importance_sampling_mode",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
)
_OPTIONS |= {
    "grpo": (
        "beta",
        "loss_type",
        *_REWARDED,
        *_SAMPLED,
        "importance_sampling_level",
        "delta",
        "use_bias_correction_kl",
        "top_entropy_quantile",
        "entropy_coef",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "scale_rewards",
        "multi_objective_aggregation",
    ),
    "rloo": ("beta", *_REWARDED, *_SAMPLED, "normalize_advantages", "reward_clip_range"),
}
# The defaults of options that have no effect in some combinations; None for all others.
_DEFAULTS = {
    "epsilon": 0.2,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "use_bias_correction_kl": True,
    "importance_sampling_mode": "sequence_mask",
    "importance_sampling_clip_max": 3.0,
    "scale_rewards": "group",
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
}


def example_of(name: str) -> str:
    """What an example of an objective is, plural: "rows", "pairs" or "answers"."""
    return _EXAMPLES.get(name, "rows")


def without_effect(name: str, options: Mapping[str, object]) -> dict[str, str]:
    """{option: why and what to do} of options that change nothing beside the others and are not at their default."""
    reasons: dict[str, str] = {}

    def idle(condition: bool, why: str, *names: str) -> None:
        for option in names if condition else ():
            if options.get(option) not in (None, _DEFAULTS.get(option)):
                reasons.setdefault(option, f"{why}; leave it out")

    if name in ("grpo", "rloo"):
        tools = options.get("tools") or options.get("environment_factory")
        idle(not tools, "no tools are called", "tool_timeout", "max_tool_calling_iterations")
        idle(not options.get("environment_factory"), "there are no environments", "reset_timeout")
        bounds = ("importance_sampling_mode", "importance_sampling_clip_max", "importance_sampling_clip_min")
        idle(options.get("importance_sampling_correction") is False, "importance_sampling_correction is false", *bounds)
        corrections = "importance_sampling_correction", *bounds
        idle(options.get("exact") is True, "with exact there is nothing to correct", *corrections)
        idle(bool(options.get("rollout_func")), "rollout_func samples by itself", "exact")
    if name == "grpo":
        loss, sums = options.get("loss_type"), options.get("multi_objective_aggregation")
        idle(not options.get("beta"), "without beta there is no divergence", "use_bias_correction_kl")
        idle(loss in ("cispo", "sapo"), f"loss_type = {loss} has no such bound", "delta")
        idle(loss == "sapo", "loss_type = sapo clips by its temperatures", "epsilon", "epsilon_high")
        idle(
            loss == "cispo" and options.get("epsilon_high") is not None,
            "loss_type = cispo is bounded by epsilon_high alone",
            "epsilon",
        )
        idle(loss != "sapo", "loss_type is not sapo", "sapo_temperature_pos", "sapo_temperature_neg")
        idle(sums == "normalize_then_sum", f"multi_objective_aggregation = {sums} scales by itself", "scale_rewards")
    if name == "dpo":
        loss, alpha = options.get("loss_type"), options.get("f_divergence_type") == "alpha_divergence"
        idle(loss in _OF_RATIOS, f"loss_type = {loss} is of the log-ratios", "f_divergence_type")
        idle(not alpha, "f_divergence_type is not alpha_divergence", "f_alpha_divergence_coef")
        idle(loss != "discopop", "loss_type is not discopop", "discopop_tau")
    if name == "distill":
        idle(options.get("on_policy") == 0, "on_policy = 0 samples no answers", "sampling_temperature", *_DRAWN)
    return reasons


def _check_numbers(objective: ObjectiveConfig) -> None:
    if objective.name == "distill":
        fraction("objective.beta", objective.beta)
        positive("objective.temperature", objective.temperature)
        positive("objective.sampling_temperature", objective.sampling_temperature)
        fraction("objective.on_policy", objective.on_policy)
    elif objective.name not in ("grpo", "rloo"):
        positive("objective.beta", objective.beta)
    fraction("objective.label_smoothing", objective.label_smoothing, below_one=True)
    not_negative("objective.simpo_gamma", objective.simpo_gamma)
    if objective.center_rewards_coefficient is not None:
        not_negative("objective.center_rewards_coefficient", objective.center_rewards_coefficient)
    limits = objective.reward_clip_range
    require(limits is None or limits[0] < limits[1], "objective.reward_clip_range", limits, "the first is the least")
    for name in (
        *("desirable_weight", "undesirable_weight", "max_tool_calling_iterations", "teacher_top_k"),
        *("reward_timeout", "reset_timeout", "tool_timeout"),
    ):
        positive(f"objective.{name}", getattr(objective, name))


def _check_names(objective: ObjectiveConfig) -> None:
    """Options that this objective has, and its losses."""
    for field in dataclasses.fields(objective):
        value = getattr(objective, field.name)
        unset = field.name == "name" or value == field.default
        require(
            unset or field.name in _OPTIONS[objective.name],
            f"objective.{field.name}",
            value,
            f"{objective.name} has no such option; leave it out",
        )
    losses = {"dpo": PAIR_LOSSES, "kto": ("apo_zero_unpaired",), "grpo": TOKEN_LOSSES}.get(objective.name, ())
    require(
        objective.loss_type in ("sigmoid", *losses),
        "objective.loss_type",
        objective.loss_type,
        f"{objective.name} has no such loss; see --help",
    )


def _check_sampled(objective: ObjectiveConfig) -> None:
    """What samples answers, and what rewards them."""
    require(
        objective.name not in ("grpo", "rloo")
        or bool(objective.reward_funcs or objective.environment_factory or objective.rollout_func),
        "objective.reward_funcs",
        objective.reward_funcs,
        f"{objective.name} needs at least one, as in [rewards.py:is_right], or an environment with get_reward",
    )
    for grammar in ("regex", "json_schema"):
        for sampled in ("tools", "environment_factory", "rollout_func"):
            require(
                getattr(objective, grammar) is None or not getattr(objective, sampled),
                f"objective.{grammar}",
                getattr(objective, grammar),
                f"answers of objective.{sampled} have turns of several forms; leave one of them out",
            )
    require(
        objective.regex is None or objective.json_schema is None,
        "objective.regex",
        objective.regex,
        "objective.json_schema is set, too, and answers follow one of them; leave the other out",
    )
    require(
        objective.cache is None or not objective.exact,
        "objective.cache",
        objective.cache,
        "with objective.exact training reads keys and values unrounded; leave one of them out",
    )
    require(
        objective.rollout_func is None or not (objective.tools or objective.environment_factory),
        "objective.rollout_func",
        objective.rollout_func,
        "it samples answers itself, with its own tools; leave out objective.tools and environment_factory",
    )
    for key, functions in (("reward_isolation", objective.reward_funcs), ("tool_isolation", objective.tools)):
        require(
            getattr(objective, key) is None or bool(functions),
            f"objective.{key}",
            getattr(objective, key),
            "there are no such functions; environments and rollout functions run in the main thread: leave it out",
        )


def _check_teacher(objective: ObjectiveConfig) -> None:
    require(
        objective.name != "distill" or bool(objective.teacher or objective.teacher_logprobs),
        "objective.teacher",
        objective.teacher,
        "distill needs one: a model's folder or hub name, or base for the model with its adapter off",
    )
    require(
        objective.teacher_load_in is None or objective.teacher != "base",
        "objective.teacher_load_in",
        objective.teacher_load_in,
        "the base is loaded as the model is (model.load_in); leave it out",
    )
    _check_stored(objective)


def _check_stored(objective: ObjectiveConfig) -> None:
    for key in ("teacher", "teacher_load_in", "teacher_top_k"):
        require(
            objective.teacher_logprobs is None or getattr(objective, key) is None,
            f"objective.{key}",
            getattr(objective, key),
            "objective.teacher_logprobs is a file with the teacher's log-probabilities already; leave one of them out",
        )
    require(
        (objective.teacher_top_k is None and objective.teacher_logprobs is None) or objective.on_policy == 0,
        "objective.on_policy",
        1.0 if objective.on_policy is None else objective.on_policy,
        "the teacher's log-probabilities are stored before the run (objective.teacher_top_k, "
        "objective.teacher_logprobs), and answers that are sampled during it are not known then; set 0",
    )


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is trained for. Options have TRL's names and meanings; one that the objective lacks is an error.

    None is the default of the objective's class, which an option's description gives in brackets; so is loss_type =
    "sigmoid" for grpo and kto.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[
        Literal["sft", "dpo", "orpo", "kto", "simpo", "reward", "grpo", "rloo", "distill"],
        "sft; a preference objective over pairs of answers; reward: a model that scores texts; grpo or rloo: learning "
        "from rewards of sampled answers; distill: learning from a teacher's distributions.",
    ] = "sft"
    beta: Annotated[
        float | None,
        "Scale of the rewards (dpo, orpo, kto: 0.1; simpo: 2.0); factor of the divergence (grpo: 0; rloo: 0.05); which "
        "divergence: 0 forward KL, 1 reverse KL, between them Jensen-Shannon (distill: 1).",
    ] = None
    loss_type: Annotated[
        Literal[
            "sigmoid",
            "ipo",
            "hinge",
            "exo_pair",
            "robust",
            "discopop",
            "sigmoid_norm",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "apo_zero_unpaired",
            "grpo",
            "dr_grpo",
            "dapo",
            "bnpo",
            "cispo",
            "sapo",
        ],
        "Loss of a pair, by TRL's names: sigmoid, ipo, hinge, exo_pair, robust, discopop, sigmoid_norm, nca_pair, "
        "bco_pair, sppo_hard, apo_zero or apo_down (dpo), apo_zero_unpaired (kto); how losses of tokens add up: dapo "
        "(default), grpo, dr_grpo, bnpo, cispo or sapo (grpo).",
    ] = "sigmoid"
    label_smoothing: Annotated[
        float, "Probability that a preference is labelled wrongly (dpo: sigmoid, robust, exo_pair; simpo)."
    ] = 0.0
    f_divergence_type: Annotated[
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] | None,
        "The divergence from the reference, which makes scores of log-ratios (dpo: reverse_kl).",
    ] = None
    f_alpha_divergence_coef: Annotated[float | None, "The alpha of alpha_divergence (dpo: 0.5)."] = None
    discopop_tau: Annotated[float | None, "The temperature of discopop (dpo: 0.05)."] = None
    precompute_ref_log_probs: Annotated[
        bool, "Compute the reference's log-probabilities once, before training (dpo, kto)."
    ] = False
    desirable_weight: Annotated[float, "Weight of the losses of desirable answers (kto)."] = 1.0
    undesirable_weight: Annotated[float, "Weight of the losses of other answers (kto)."] = 1.0
    simpo_gamma: Annotated[float, "Margin by which the rewards of a pair should differ (simpo)."] = 0.5
    center_rewards_coefficient: Annotated[
        float | None, "Weight of the square of a pair's summed scores, which centres them (reward); 0.01 is usual."
    ] = None

    teacher: Annotated[
        str | None,
        "The teacher's folder or hub name, or base: the model itself with its adapter off (distill).",
    ] = None
    teacher_load_in: Annotated[LoadIn | None, "The format of the teacher's weights, such as nf4 or fp8 (16 bits)."] = (
        None
    )
    teacher_top_k: Annotated[
        int | None,
        "Store this number of the teacher's largest log-probabilities for each trained token before the run, which "
        "needs no teacher then (distill).",
    ] = None
    teacher_logprobs: Annotated[
        str | None, "A file or folder with a teacher's log-probabilities, in place of a teacher (distill)."
    ] = None

    on_policy: Annotated[
        float | None,
        "The share of rows whose answer is sampled from the model in training; the others keep their own (distill: 1).",
    ] = None
    sampling_temperature: Annotated[
        float | None, "Divides the logits when answers are sampled, in place of temperature (distill)."
    ] = None

    reward_funcs: Annotated[
        tuple[str, ...] | None, "Reward functions: file.py:function, or exact_number, exact_match, tagged_format, ..."
    ] = None
    reward_weights: Annotated[
        tuple[float, ...] | None,
        "A weight for each reward function, then for each class of environments with get_reward; default: 1.",
    ] = None
    reward_timeout: Annotated[float | None, "Seconds that a call of a reward function may take."] = None
    reward_errors: Annotated[
        Literal["stop", "skip"] | None,
        "What an exception of a reward function does: stop (default), or skip the answer.",
    ] = None
    reward_isolation: Annotated[
        Literal["process"] | None,
        "process: reward functions run in a process without GPU that is killed at reward_timeout (in the main thread).",
    ] = None
    tools: Annotated[
        tuple[str, ...] | None, "Functions that the model may call while it answers: file.py:function."
    ] = None
    environment_factory: Annotated[
        str | None, "file.py:Class of environments, whose methods are tools; each answer has its own."
    ] = None
    rollout_func: Annotated[str | None, "file.py:function that samples whole answers, in any turns."] = None
    reset_timeout: Annotated[float | None, "Seconds that reset of an environment may take (no limit)."] = None
    tool_timeout: Annotated[float | None, "Seconds that a call of a tool may take (no limit)."] = None
    tool_isolation: Annotated[
        Literal["process"] | None,
        "process: tools that are functions run in a process without GPU that is killed at tool_timeout (in the main "
        "thread).",
    ] = None
    max_tool_calling_iterations: Annotated[
        int | None, "The most turns of an answer in which tools are called (no limit)."
    ] = None
    num_generations: Annotated[
        int | None, "Answers to each prompt; rows_per_step counts answers (grpo: 8; rloo: 2)."
    ] = None
    max_completion_length: Annotated[int | None, "The most tokens of an answer (512)."] = None
    temperature: Annotated[float | None, "Divides the logits, both in sampling and in the loss (1)."] = None
    top_k: Annotated[int | None, "Sample from this number of likeliest tokens (0: all)."] = None
    top_p: Annotated[float | None, "Sample from the likeliest tokens with this probability in all (1)."] = None
    min_p: Annotated[float | None, "Sample from tokens with this part of the likeliest one's probability (0)."] = None
    repetition_penalty: Annotated[float | None, "Penalty on tokens that an answer or its prompt has already (1)."] = (
        None
    )
    regex: Annotated[
        str | None, "An expression (Rust's syntax) that each answer matches whole, after its thoughts."
    ] = None
    json_schema: Annotated[str | None, "A JSON schema, as text, that each answer follows, after its thoughts."] = None
    mask_truncated_completions: Annotated[
        bool | None, "Answers that reach max_completion_length do not count in the loss (false)."
    ] = None
    num_iterations: Annotated[int | None, "How often each answer is trained on (1)."] = None
    steps_per_generation: Annotated[int | None, "Steps whose answers are sampled at once (1)."] = None
    slots: Annotated[int | None, "The most answers that are sampled at a time (64)."] = None
    cache: Annotated[
        Literal["fp8"] | None,
        "fp8: sampled answers' keys and values are stored in e4m3, in half the memory of 16 bits (the model's dtype).",
    ] = None
    exact: Annotated[
        bool | None,
        "Sampler and training compute the same bits of a token's log-probability, which is measured and needs no "
        "correction (false; a CPU, or Hopper).",
    ] = None
    epsilon: Annotated[float | None, "The ratio of probabilities is clipped below at 1 - epsilon (0.2)."] = None
    epsilon_high: Annotated[float | None, "... and above at 1 + epsilon_high (epsilon); cispo's cap itself."] = None
    delta: Annotated[float | None, "Cap of the ratio for answers of negative advantage (none)."] = None
    importance_sampling_level: Annotated[
        Literal["token", "sequence"] | None, "A ratio for each token (default), or one for an answer (GSPO)."
    ] = None
    importance_sampling_correction: Annotated[
        bool | None, "Correct for the difference between the sampler's and the trainer's probabilities (true)."
    ] = None
    importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None,
        "How that correction is bounded (sequence_mask; with cache token_truncate).",
    ] = None
    importance_sampling_clip_max: Annotated[float | None, "The correction's upper bound (3)."] = None
    importance_sampling_clip_min: Annotated[float | None, "The correction's lower bound (none)."] = None
    use_bias_correction_kl: Annotated[bool | None, "Multiply the divergence by the ratio (true)."] = None
    top_entropy_quantile: Annotated[
        float | None, "The share of tokens, of largest entropy in a micro-batch, that count (1); needs micro_batches."
    ] = None
    entropy_coef: Annotated[float | None, "Factor of the mean entropy that is added to the objective (0)."] = None
    sapo_temperature_pos: Annotated[float | None, "Slope of sapo's clipping for positive advantages (1)."] = None
    sapo_temperature_neg: Annotated[float | None, "Slope of sapo's clipping for other advantages (1.05)."] = None
    scale_rewards: Annotated[
        Literal["group", "batch", "none"] | None, "Whose standard deviation divides advantages (group)."
    ] = None
    multi_objective_aggregation: Annotated[
        Literal["sum_then_normalize", "normalize_then_sum"] | None, "How several rewards become one (the first)."
    ] = None
    normalize_advantages: Annotated[bool | None, "Scale advantages over a generation (rloo: false)."] = None
    reward_clip_range: Annotated[
        tuple[float, float] | None, "The least and the greatest weighted reward of an answer (rloo: no limits)."
    ] = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_names(self)
        _check_sampled(self)
        for name, why in without_effect(self.name, self.options).items():
            require(False, f"objective.{name}", getattr(self, name), why)
        _check_teacher(self)
        require(
            self.loss_type in ("sigmoid", "robust", "exo_pair") or not self.label_smoothing,
            "objective.label_smoothing",
            self.label_smoothing,
            f"objective.loss_type = {self.loss_type} has no label smoothing; leave it out",
        )
        least = {"exo_pair": self.label_smoothing > 0, "robust": self.label_smoothing < 0.5}
        require(
            least.get(self.loss_type, True),
            "objective.label_smoothing",
            self.label_smoothing,
            f"objective.loss_type = {self.loss_type} needs one "
            f"{'above 0' if self.loss_type == 'exo_pair' else 'below 0.5'}",
        )

    @property
    def of_source(self) -> tuple[str, ...]:
        """Options of reward functions, tools and environments, which are for the batch source, not for the class."""
        return _REWARDED

    @property
    def options(self) -> dict[str, Any]:
        """{name: value} of the options that are not None: arguments of the objective's class, and those of `of_source`
        and teacher_load_in, which it does not take. Without "sigmoid" for others than dpo, whose loss it is.
        """
        named = {name: getattr(self, name) for name in _OPTIONS[self.name]}
        if self.name != "dpo" and self.loss_type == "sigmoid":  # the default, which is dpo's
            named.pop("loss_type", None)
        return {name: value for name, value in named.items() if value is not None}


DEFAULT_OBJECTIVE = ObjectiveConfig()
