"""Prompts and answers are texts where a row's `prompt` is a text, and messages where it is not, in each place that
calls the user's functions.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.train.config import DataConfig, EvaluationConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.rendering.formats import normalize
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.evaluation.answer_metrics import answer_metrics
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.sampled.prompts import AnswerSteps, UserFunctions, read_prompts, sampled_answers
from jaxtune.train.sampled.reward_functions import RewardFunctions
from tests.train.data.conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "red or blue"}]
ANSWER = [{"role": "assistant", "content": "blue"}]
TEXTS = {
    "alone": {"prompt": "red or blue"},
    "a completion": {"prompt": "red or blue", "completion": " blue"},
    "a response": {"prompt": "red or blue", "response": " blue"},
    "no completion": {"prompt": "red or blue", "completion": None},
    "other completions": {"prompt": "red or blue", "completion": ["blue", "red"]},
    "completion of turns": {"prompt": "red or blue", "completion": ANSWER},
    "a system message": {"prompt": "red or blue", "completion": " blue", "system": "choose"},
}
MESSAGES = {
    "prompt": {"prompt": QUESTION},
    "prompt and completion": {"prompt": QUESTION, "completion": ANSWER},
    "messages": {"messages": QUESTION + ANSWER},
    "turns before": {"prompt": "red or blue", "completion": " blue", "history": [["add", "two"]]},
}
PLACES = ("grpo", "rloo", "rollout function", "evaluation.generate")


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=len(make_tokenizer()), layers=(LayerSpec(),))


def noting(place: str, rows: list[dict], model, folder) -> list[tuple[object, object]]:
    """(prompt, completion) that functions get of rows, in any order."""
    tokenizer, seen = make_tokenizer(), []

    def rewards(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.5] * len(prompts)

    def rollout(prompts, sampler):
        ids = [sampler.encode(prompt) for prompt in prompts]
        seen.extend((prompt, None) for prompt in prompts)
        return {"prompt_ids": ids, "completion_ids": [[9, 8]] * len(ids), "logprobs": [[-1.0, -1.0]] * len(ids)}

    functions, data = RewardFunctions.of([rewards]), DataConfig(train="x", eval="x", length=64)
    if place == "evaluation.generate":
        settings = EvaluationConfig(generate=("brevity",), generate_rows=len(rows), max_new_tokens=2)
        metrics = answer_metrics(settings, data, rows, tokenizer, model)
        assert metrics is not None
        dataclasses.replace(metrics, functions=functions)(model)
        return seen
    name = "rloo" if place == "rloo" else "grpo"
    settings = ObjectiveConfig(name, reward_funcs=("brevity",), num_generations=2, max_completion_length=2, beta=0.0)
    objective = objective_of(settings)
    of_user = UserFunctions(functions, rollout=rollout if place == "rollout function" else None)
    steps = AnswerSteps(data, 2 * len(rows), None, None, seed=0)
    source = sampled_answers(objective, rows, tokenizer, steps, (1,), 64, of_user)
    source.batch_at(0, lambda: model)
    return seen


@pytest.mark.parametrize("place", PLACES)
def test_texts_stay_texts_and_messages_messages(model, tmp_path, place):
    texts, messages = (noting(place, [*rows.values()], model, tmp_path) for rows in (TEXTS, MESSAGES))
    count = {"evaluation.generate": 1, "rollout function": 4}.get(place, 2)  # this one is seen by its rewards too
    assert (len(texts), len(messages)) == (count * len(TEXTS), count * len(MESSAGES))
    for prompt, completion in texts:
        assert isinstance(prompt, str) and prompt.endswith("red or blue")
        assert completion is None or isinstance(completion, str)
    for prompt, completion in messages:
        assert isinstance(prompt, list) and prompt[-1] == QUESTION[0]
        assert completion is None or [turn["role"] for turn in completion] == ["assistant"]


WORDS = st.text("abc ", min_size=1, max_size=9).filter(str.strip)


@given(WORDS, WORDS, WORDS | st.none(), st.sampled_from(["completion", "response"]), st.sampled_from([None, "chatml"]))
def test_a_text_prompt_has_the_tokens_that_training_gives_it(prompt, answer, system, column, template):
    """Beside its answer as alone, but for a system message; the answer becomes a column."""
    tokenizer = make_tokenizer()
    row = {"prompt": prompt, column: answer} | ({} if system is None else {"system": system})
    data = DataConfig(train="x", template=template)
    [read] = read_prompts([row], tokenizer, data, 99)
    example = normalize(row, "prompt_completion")
    trained = RowEncoder(tokenizer, template=template).encode_prompt(example)
    assert read.ids == tuple(trained.tolist()) and read.columns["answer"] == answer
    assert read.turns == (prompt if system is None else example.prompt)
    if system is None:
        [alone] = read_prompts([{"prompt": prompt}], tokenizer, data, 99)
        assert (alone.turns, alone.ids) == (read.turns, read.ids)
