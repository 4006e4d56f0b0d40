"""Each option of the objectives is followed in every combination of functions, tools, environments and rollout
functions, or refused with its key."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pathlib

import pytest

import jaxtune
from jaxtune.train.config import ConfigError, DataConfig, EvaluationConfig, ModelConfig, TrainConfig
from jaxtune.train.config.objective import _DEFAULTS, _OPTIONS, PAIR_LOSSES, ObjectiveConfig, without_effect
from jaxtune.train.objectives.named import PREFERENCES
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.objectives.preference import DPO
from jaxtune.train.sampled.prompts import UserFunctions
from jaxtune.train.sampled.reward_functions import RewardFunctions, Sampled
from jaxtune.train.spec.run_spec import decided_objective

CODE = """
class Game:
    def reset(self, **row):
        pass

    def get_reward(self):
        return 1.0


def tool(a: int) -> int:
    \"\"\"Adds.

    Args:
        a: a number.
    \"\"\"
    return a


def good(completions, **columns):
    return [1.0] * len(completions)


def play(prompts, model):
    return {}
"""
# Another value than the default for each option.
CHANGED = dict(
    beta=0.3,
    loss_type=None,
    label_smoothing=0.1,
    precompute_ref_log_probs=True,
    desirable_weight=2.0,
    undesirable_weight=2.0,
    simpo_gamma=0.7,
    center_rewards_coefficient=0.01,
    num_generations=4,
    max_completion_length=33,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    regex="[0-9]+",
    json_schema="{}",
    mask_truncated_completions=True,
    num_iterations=2,
    steps_per_generation=2,
    slots=3,
    cache="fp8",
    exact=True,
    epsilon=0.3,
    epsilon_high=0.4,
    delta=1.9,
    importance_sampling_level="sequence",
    importance_sampling_correction=False,
    importance_sampling_mode="token_mask",
    importance_sampling_clip_max=2.0,
    importance_sampling_clip_min=0.5,
    use_bias_correction_kl=False,
    top_entropy_quantile=0.5,
    entropy_coef=0.1,
    sapo_temperature_pos=1.2,
    sapo_temperature_neg=1.3,
    scale_rewards="batch",
    multi_objective_aggregation="normalize_then_sum",
    normalize_advantages=True,
    reward_clip_range=(-1.0, 1.0),
    f_divergence_type="forward_kl",
    f_alpha_divergence_coef=0.3,
    discopop_tau=0.1,
    teacher="x",
    teacher_load_in="nf4",
    teacher_top_k=7,
    teacher_logprobs="f",
    on_policy=0.5,
    sampling_temperature=0.8,
)
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "own.py"
    file.write_text(CODE)
    return lambda name: f"{file}:{name}"


def test_each_key_is_read_somewhere():
    """Outside of the config's own checks and of the tables that list options."""
    root = pathlib.Path(jaxtune.__file__).parent / "train"
    text = "\n".join(file.read_text() for file in root.rglob("*.py") if file.name != "objective.py")
    kinds = [*PREFERENCES.values(), GRPO, RLOO]
    taken = {name for kind in kinds for name in inspect.signature(kind).parameters}
    for name in {option for options in _OPTIONS.values() for option in options}:
        assert name in taken or f".{name}" in text, name


def objective(name: str, **options) -> object:
    if name in ("grpo", "rloo"):
        options.setdefault("reward_funcs", ("exact_match",))
    if name == "distill":
        options.setdefault("teacher", "base")
    config = TrainConfig(
        model=ModelConfig(path="x"),
        data=DataConfig("x"),
        objective=ObjectiveConfig(name, **options),
        output="x",
        micro_batches=1,
    )
    return decided_objective(config)


OF_SOURCE = ("reward_", "reset_", "tool", "environment", "rollout", "max_tool", "teacher")


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto", "simpo", "reward", "grpo", "rloo", "distill"])
def test_each_option_changes_the_objective_or_is_refused(name):
    for option in _OPTIONS[name]:
        if option.startswith(OF_SOURCE):
            continue
        another = {"dpo": "hinge", "kto": "apo_zero_unpaired"}.get(name, "cispo")
        value = CHANGED[option] if option != "loss_type" else another
        losses = {"grpo": LOSSES, "dpo": [loss for loss in PAIR_LOSSES if loss != "exo_pair"]}.get(name, (None,))
        for loss in losses if option != "loss_type" else (None,):
            others = {"loss_type": loss} if loss else {}
            others |= {"epsilon_high": 5.0 if loss == "cispo" else None} if name == "grpo" else {}
            others |= (
                {"f_divergence_type": "alpha_divergence"} if "alpha" in option and loss in ("ipo", "hinge") else {}
            )
            others.pop(option, None)
            without = objective(name, **others)
            try:
                changed = objective(name, **others, **{option: value})
            except ConfigError as error:
                assert f"objective.{option}" in str(error)
            else:
                assert changed != without, (option, loss)


def test_what_has_no_effect_is_named():
    for name, options, idle in [
        ("grpo", dict(loss_type="cispo", epsilon_high=5.0, epsilon=0.1, delta=2.0), {"epsilon", "delta"}),
        ("grpo", dict(loss_type="sapo", epsilon=0.1, epsilon_high=0.3), {"epsilon", "epsilon_high"}),
        ("grpo", dict(sapo_temperature_pos=2.0), {"sapo_temperature_pos"}),
        ("grpo", dict(use_bias_correction_kl=False), {"use_bias_correction_kl"}),
        ("grpo", dict(multi_objective_aggregation="normalize_then_sum", scale_rewards="batch"), {"scale_rewards"}),
        (
            "rloo",
            dict(importance_sampling_correction=False, importance_sampling_clip_min=0.1),
            {"importance_sampling_clip_min"},
        ),
        ("rloo", dict(rollout_func="x.py:f", tool_timeout=3.0), {"tool_timeout"}),
        ("grpo", dict(tools=("x",), reset_timeout=3.0), {"reset_timeout"}),
        ("distill", dict(teacher="base", on_policy=0.0, top_k=3), {"top_k"}),
        ("grpo", dict(loss_type="sapo", sapo_temperature_pos=2.0, epsilon=0.2, tools=("x",), tool_timeout=1.0), set()),
    ]:
        assert set(without_effect(name, options)) == idle
        for option in idle:
            with pytest.raises(ConfigError, match=f"objective.{option} = "):
                ObjectiveConfig(
                    name,
                    **({"reward_funcs": ("a",)} if name != "distill" else {})
                    | options
                    | dict.fromkeys(idle - {option}),
                )
    made, pairs = GRPO.of(), DPO()
    for option, value in _DEFAULTS.items():
        assert getattr(made, option, getattr(made.losses, option, getattr(pairs, option, None))) == value


@pytest.mark.parametrize(
    "key, value", [("train_on", "all"), ("packing", False), ("overflow", "error"), ("format", "text")]
)
def test_keys_of_rows_are_refused_where_only_prompts_are_read(key, value):
    config = TrainConfig(
        model=ModelConfig(path="x"),
        data=DataConfig("x", **{key: value}),
        objective=ObjectiveConfig("grpo", reward_funcs=("exact_match",)),
        output="x",
    )
    with pytest.raises(ConfigError, match=f"data.{key} = "):
        decided_objective(config)
    with pytest.raises(ConfigError, match="evaluation.temperature = 0.5"):
        TrainConfig(
            model=ModelConfig(path="x"), data=DataConfig("x"), evaluation=EvaluationConfig(temperature=0.5), output="x"
        )


COMBINATIONS = [
    dict(reward_funcs=funcs, tools=tools, environment_factory=environment, rollout_func=rollout)
    for funcs, tools, environment, rollout in itertools.product(
        (None, ("good", "good")), (None, ("tool",)), (None, "Game"), (None, "play")
    )
]


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_options_of_rewards_hold_for_every_source_of_rewards(code, number):
    parts = COMBINATIONS[number]
    named = {
        key: None if value is None else code(value) if isinstance(value, str) else tuple(map(code, value))
        for key, value in parts.items()
    }
    environments = 1 if parts["environment_factory"] else 0
    count = len(parts["reward_funcs"] or ()) + environments or 1
    try:
        wanted = ObjectiveConfig(
            "grpo", **named, reward_timeout=7.0, reward_errors="skip", reward_weights=(0.5,) * count
        )
        rewards = UserFunctions.named(wanted).all_rewards()
    except ConfigError as error:
        apart = parts["rollout_func"] and (parts["tools"] or environments)
        nothing = not (parts["reward_funcs"] or environments or parts["rollout_func"])
        assert apart or nothing, error
        return
    assert (rewards.timeout_seconds, rewards.errors, rewards.weights) == (7.0, "skip", (0.5,) * count)
    if environments and parts["reward_funcs"]:
        own = dataclasses.replace(wanted, reward_weights=(0.5, 0.25))
        assert UserFunctions.named(own).all_rewards().weights == (0.5, 0.25, 1.0)
    with pytest.raises(ConfigError, match="objective.reward_weights"):
        UserFunctions.named(dataclasses.replace(wanted, reward_weights=(0.5,) * (count + 1))).all_rewards()


def test_weights_are_finite():
    for weights in ([float("nan")], [float("inf")], [1e39]):
        with pytest.raises(ConfigError, match="finite weight"):
            RewardFunctions.of([len], weights)
    with pytest.raises(ConfigError, match="reward_timeout"):
        ObjectiveConfig("grpo", reward_funcs=("a",), reward_timeout=0.0)


def test_functions_log_metrics_and_columns():
    def logs(completions, log_metric, log_extra):
        log_metric("digits", 1.0)
        log_metric("digits", 2.0)
        log_extra("upper", [text.upper() for text in completions])
        log_extra("wrong", [1])
        return [0.0] * len(completions)

    async def later(log_metric, completions):
        log_metric("later", 5)
        return [0.0] * len(completions)

    def takes_all(completions, **columns):
        assert set(columns) == {"prompts", "completion_ids"}
        return [0.0] * len(completions)

    rewards = RewardFunctions.of([logs, later, takes_all])
    rewards(Sampled.of(["a", "b"], [{}, {}], [[1], [2]], ["x", "y"]))
    assert rewards.log.taken(2) == ({"digits": 1.5, "later": 5.0}, {"upper": ["X", "Y"]})
    assert rewards.log.taken(2) == ({}, {})
