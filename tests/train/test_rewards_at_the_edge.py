"""Numbers at the edge: equal and huge rewards, what is no reward, the last number of a text, the two tags."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.objectives.grpo import equal_rewards, group_advantages, rloo_advantages
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.sampled.reward_functions import (
    RewardError,
    RewardFunctions,
    Sampled,
    exact_number,
    last_number,
    tagged_format,
)

NAN = math.nan
VARIANTS = {
    **{f"grpo, {scale}": GRPO.of(scale_rewards=scale) for scale in ("group", "batch", "none")},
    "gdpo": GRPO.of(multi_objective_aggregation="normalize_then_sum"),
    "rloo": RLOO.of(),
    "rloo, normalised": RLOO.of(normalize_advantages=True),
}


def advantages(name: str, rewards, group: int, weights=None):
    objective = VARIANTS[name]
    objective = dataclasses.replace(objective, settings=dataclasses.replace(objective.settings, num_generations=group))
    return objective.advantages(np.asarray(rewards), np.ones(np.shape(rewards)[1]) if weights is None else weights)


numbers = st.floats(-3e38, 3e38, allow_nan=False)


@pytest.mark.parametrize("name", VARIANTS)
@given(value=numbers, group=st.integers(2, 12), groups=st.integers(1, 3), missing=st.integers(0, 2))
def test_equal_rewards_have_no_advantage(name, value, group, groups, missing):
    rewards = np.full((group * groups, 1), value)
    rewards[:missing] = NAN
    assert (advantages(name, rewards, group) == 0).all()
    assert equal_rewards(rewards, group).all()


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "gdpo"])
@given(
    parts=st.lists(st.lists(st.integers(-300, 300), min_size=2, max_size=2), min_size=2, max_size=8),
    weights=st.lists(st.sampled_from([0.1, 0.3, 1.0, 7.7]), min_size=2, max_size=2),
)
def test_sums_that_are_equal_but_for_rounding_are_equal(name, parts, weights):
    """Rewards a / w1 and (1000 - a) / w2 of each answer, whose weighted sum is 1000 / 10."""
    rewards = np.array([[a / 10 / weights[0], (1000 - a) / 10 / weights[1]] for a, _ in parts])
    assert (advantages(name, rewards, len(parts), np.array(weights)) == 0).all()


@given(st.lists(st.integers(-50, 50), min_size=3, max_size=10), st.integers(-8, 8))
def test_advantages_are_the_definition_in_whole_numbers(values, power):
    scale = Fraction(10) ** power
    exact = [Fraction(value) * scale for value in values]
    rewards = np.array([[float(value)] for value in exact])
    mean = sum(exact) / len(exact)
    want = [float(value - mean) for value in exact]
    np.testing.assert_allclose(group_advantages(rewards, len(values), scale_rewards="none"), want, rtol=1e-6, atol=0)
    others = [float(value - (sum(exact) - value) / (len(exact) - 1)) for value in exact]
    np.testing.assert_allclose(rloo_advantages(rewards, len(values)), others, rtol=1e-6, atol=0)


def test_huge_rewards():
    np.testing.assert_allclose(group_advantages(np.array([[1e300], [0.0]]), 2), [math.sqrt(0.5), -math.sqrt(0.5)])
    with pytest.raises(ValueError, match="beyond float32"):
        group_advantages(np.array([[1e300], [0.0]]), 2, scale_rewards="none")
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(np.array([[np.inf], [0.0]]), 2)


SAMPLED = Sampled.of(["a", "b"], [{}, {}], [[1], [2]], ["x", "y"])


@pytest.mark.parametrize(
    "values",
    [{0.5, 1.0}, frozenset({0.5, 1.0}), {1: 2, 3: 4}.keys(), b"ab", ["1", "2"], [1e39, 0.0], [10**400, 0], [NAN, 0.0]],
)
def test_what_is_no_reward(values):
    with pytest.raises(RewardError, match="returned"):
        RewardFunctions.of([lambda **_: values])(SAMPLED)


def test_what_is_a_reward():
    for values in (
        (1, 2),
        [True, None],
        np.array([1.5, 2], np.float16),
        {"a": 1.0, "b": 2.0}.values(),
        [3.4e38, 1e-320],
    ):
        assert np.isfinite(RewardFunctions.of([lambda values=values, **_: values])(SAMPLED)[0, 0])
    table = RewardFunctions.of([lambda **_: [NAN, 0.1]], nan_is_none=True)(SAMPLED)
    assert table.dtype == np.float64 and np.isnan(table[0, 0]) and table[1, 0] == 0.1


CASES = {
    "1,024": 1024,
    "1,2,3": 3,
    "1,024,5": 5,
    "1,0245": 245,
    "12,34": 34,
    "2,500,000.": 2500000,
    "$1{,}024$": 1024,
    "5-3": 3,
    "x-3": 3,
    "(2)-3": 3,
    "5 - 3": 3,
    "-3": -3,
    "(-3)": -3,
    "= -3": -3,
    "\u22125": -5,
    "x = \u22125": -5,
    "\u20135": -5,
    "3\u20135": 5,
    "-$5": -5,
    "\\boxed{-7}": -7,
    "**-5**": -5,
    "1/2": 0.5,
    "-3/4": -0.75,
    "1 1/2": 1.5,
    "12/25/2024": 2024,
    "1/0": 0,
    "\\frac{1}{2}": 0.5,
    "-\\frac{3}{4}": -0.75,
    "2\\frac12": 2.5,
    "1e5": 1e5,
    "2.5e-3": 0.0025,
    ".5": 0.5,
    "3.": 3,
    "1.2.3": 3,
    "7 or 8": 8,
    "none": None,
    "": None,
}


@pytest.mark.parametrize("text", CASES)
def test_the_last_number(text):
    assert last_number(text) == CASES[text]
    if CASES[text] is not None:
        assert last_number(f"first 17, then {text} apples") == CASES[text]


@given(st.integers(-(10**12), 10**12), st.sampled_from(["-", "\u2212"]), st.booleans(), st.text(max_size=20))
def test_a_number_is_read_as_it_was_written(value, minus, grouped, before):
    digits = f"{abs(value):,}" if grouped else str(abs(value))
    text = f"{before} {minus if value < 0 else ''}{digits} "
    assert last_number(text) == value
    assert exact_number([text], [str(value)]) == [1.0]


@given(st.text(max_size=60))
def test_any_text_has_a_last_number_or_none(text):
    found = last_number(text)
    assert found is None or isinstance(found, float)


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "<"]), max_size=9)


@given(WORDS)
def test_the_two_tags_stand_once_each(words):
    tags = [word for word in words if len(word) > 1]
    right = tags == ["<think>", "</think>", "<answer>", "</answer>"]
    if right:
        places = [words.index(tag) for tag in tags]
        outside = [*words[: places[0]], *words[places[1] + 1 : places[2]], *words[places[3] + 1 :]]
        right = all(word in (" ", "\n") for word in outside)
    assert tagged_format(["".join(words)]) == [float(right)]


def test_junk_between_the_tags():
    for text in (
        "<think>a</think> junk </think><answer>x</answer>",
        "<think>a</think><answer>x</answer> and <answer>y</answer>",
        "<think><think>a</think><answer>x</answer>",
    ):
        assert tagged_format([text]) == [0.0]
    assert tagged_format(["<think>a < b</think>\n<answer>1</answer>\n"]) == [1.0]
