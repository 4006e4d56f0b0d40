"""Reward functions: names, arguments, async ones, what is no reward, errors and limits of time."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from jaxtune.train.config import ConfigError
from jaxtune.train.sampled.reward_functions import READY, RewardError, RewardFunctions, Sampled, load_function
from tests import patience


def some(count: int = 3, **columns) -> Sampled:
    answers = [f"it is {index}" for index in range(count)]
    return Sampled([f"q{index}" for index in range(count)], answers, [[index] * 3 for index in range(count)], columns)


def test_functions_get_columns_and_give_a_table():
    def right(prompts, completions, answer, **columns):
        assert set(columns) == {"completion_ids", "level"}
        return [float(text.endswith(str(want))) for text, want in zip(completions, answer, strict=True)]

    def narrow(level):
        return [None if value == 1 else value for value in level]

    rewards = RewardFunctions.of([right, narrow], [1.0, 0.5])
    table = rewards(some(answer=[0, 5, 2], level=[3, 1, 2]))
    np.testing.assert_array_equal(table, [[1, 3], [0, np.nan], [1, 2]])
    assert (table.dtype, rewards.names, rewards.weights) == (np.float64, ("right", "narrow"), (1.0, 0.5))


def test_async_functions_run_side_by_side():
    both = threading.Barrier(2, timeout=patience.SECONDS)

    async def first(completions, **columns):
        await asyncio.to_thread(both.wait)
        return [1.0] * len(completions)

    async def second(completions, **columns):
        await asyncio.to_thread(both.wait)
        return [2.0] * len(completions)

    class Third:
        async def __call__(self, completions, **columns):
            return [3.0] * len(completions)

    table = RewardFunctions.of([first, second, Third()])(some())
    np.testing.assert_array_equal(table, [[1, 2, 3]] * 3)


def test_equal_names_get_numbers():
    def same(completions, **columns):
        return [0.0] * len(completions)

    def same_3(completions, **columns):
        return [0.0] * len(completions)

    assert RewardFunctions.of([same, same, same]).names == ("same", "same_2", "same_3")
    assert RewardFunctions.of([same_3, same, same, same]).names == ("same_3", "same", "same_2", "same_4")


def failing(prompts, completions, **columns):
    return [1.0 / (0.0 if prompt == "q1" else 1.0) for prompt in prompts]


def test_an_exception_names_the_answer():
    with pytest.raises(RewardError, match=r"failing failed: ZeroDivisionError.*\n  prompt: q1\n  answer: it is 1"):
        RewardFunctions.of([failing])(some())


def test_answers_that_fail_can_be_skipped():
    table = RewardFunctions.of([failing], errors="skip")(some())
    np.testing.assert_array_equal(table, [[1], [np.nan], [1]])


def test_a_missing_column_of_an_async_function_is_an_error_of_it():
    async def right(completions, answer):
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="right failed: TypeError: .*'answer'\n  prompt: q0"):
        RewardFunctions.of([right])(some())
    assert np.isnan(RewardFunctions.of([right], errors="skip")(some())).all()


def test_a_function_that_ends_python_has_failed():
    def leaves(completions, **columns):
        raise SystemExit(3)

    async def leaves_later(completions, **columns):
        raise SystemExit(3)

    for function in (leaves, leaves_later):
        with pytest.raises(RewardError, match=f"{function.__name__} failed: .*SystemExit: 3"):
            RewardFunctions.of([function])(some())


def test_a_file_with_dataclasses(tmp_path):
    """They look up their module by its name."""
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\nimport dataclasses, pickle\n\n"
        "@dataclasses.dataclass\nclass Rule:\n    reward: float\n\n"
        "def good(completions, **columns):\n"
        "    return [pickle.loads(pickle.dumps(Rule(7.0))).reward] * len(completions)\n"
    )
    np.testing.assert_array_equal(RewardFunctions.named([f"{tmp_path / 'own.py'}:good"])(some()), [[7]] * 3)


def test_a_function_that_takes_too_long_is_named():
    sleep = patience.Sleep()

    def slow(completions, **columns):
        sleep()

    with pytest.raises(RewardError, match="slow took longer than objective.reward_timeout = 0.1 s"):
        RewardFunctions.of([slow], timeout_seconds=0.1)(some())
    assert not sleep.over


@pytest.mark.parametrize(
    "given, told",
    [
        ([1.0], "returned 1 rewards for 3 answers"),
        (1.0, "returned 1.0 for 3 answers"),
        (np.array(1.0), r"returned array\(1.\) for 3 answers"),
        ("abc", "returned 'abc' for 3 answers"),
        ([1.0, "good", 2.0], "returned 'good'"),
        ([1.0, float("inf"), 2.0], "returned inf"),
        ([1.0, float("nan"), 2.0], "returned nan; a reward is a finite number, or None where there is none"),
    ],
)
@pytest.mark.parametrize("errors", ["stop", "skip"])
def test_what_is_no_reward_is_refused(given, told, errors):
    with pytest.raises(RewardError, match=told):
        RewardFunctions.of([lambda **columns: given], errors=errors)(some())


def test_functions_of_files(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def good(completions, **columns):\n    return [7.0] * len(completions)\n")
    rewards = RewardFunctions.named([f"{file}:good", "exact_number"])
    np.testing.assert_array_equal(rewards(some(answer=["#### 0", 1, "none"])), [[7, 1], [7, 1], [7, np.nan]])
    for name, told in [
        (f"{file}:bad", "has no function 'bad'; it has good"),
        (f"{tmp_path / 'none.py'}:good", "there is no file"),
        ("good", "no ready function"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_function(name)
    file.write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="does not run: ModuleNotFoundError"):
        load_function(f"{file}:good")


def test_weights_are_as_many_as_functions():
    with pytest.raises(ConfigError, match="reward_weights"):
        RewardFunctions.of([failing], [1.0, 2.0])
    with pytest.raises(ConfigError, match="at least one"):
        RewardFunctions.of([])


@pytest.mark.parametrize(
    "name, completions, columns, want",
    [
        ("exact_number", ["so 1,234.50", "7 or 8", "none"], dict(answer=["1234.5", "#### 7", 3]), [1, 0, 0]),
        ("exact_match", [" a ", "b"], dict(answer=["a", "c"]), [1, 0]),
        ("tagged_format", ["<think>x</think>\n<answer>1</answer>", "<answer>1</answer>"], {}, [1, 0]),
        ("regex", ["abc", "abd"], dict(pattern=["c$", "c$"]), [1, 0]),
        ("brevity", ["", ""], dict(completion_ids=[[1] * 500, []]), [-0.5, 0]),
    ],
)
def test_ready_rewards(name, completions, columns, want):
    assert READY[name](completions=completions, **columns) == pytest.approx(want)
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    assert READY[name](completions=messages, **columns) == pytest.approx(want)
