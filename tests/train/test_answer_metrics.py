"""Evaluation by generation: what answers are worth, during training, after a resume, and in `jaxtune evaluate`."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_model

import jaxtune
from jaxtune.models.config import LayerSpec
from jaxtune.models.ends import end_token_ids
from jaxtune.models.lora import get_peft_model
from jaxtune.train import scoring
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, ConfigError, DataConfig, EvaluationConfig, ModelConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.evaluation.answer_metrics import answer_metrics
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

FUNCTIONS = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]

async def long(completions, prompts, answer):
    assert all(prompt[-1]["role"] == "user" and right for prompt, right in zip(prompts, answer))
    return [len(answer[0]["content"]) for answer in completions]

def fails(completions, answer, **columns):
    return [{"b c": None, "a": 1.0}[right] for right in answer]
"""
ANSWERS = ("a", "b c", "d e f", "g")
ROWS = [
    {"messages": [{"role": "user", "content": f"row {i}"}, {"role": "assistant", "content": ANSWERS[i % 4]}]}
    for i in range(6)
]
NEW = 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def a_model(tokenizer):
    return get_peft_model(tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), r=4, lora_alpha=8)


def config_of(folder, *names: str, run: str = "run", objective=None, **evaluation):
    wanted = dict(generate=names, generate_rows=5, temperature=0.8, max_new_tokens=NEW, sample_rows=2) | evaluation
    data = DataConfig(train=str(folder / "rows.jsonl"), eval=str(folder / "rows.jsonl"), length=64)
    changes = {} if objective is None else {"objective": objective}
    return make_config(
        folder / run,
        data=data,
        evaluation=EvaluationConfig(**wanted),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None),
        **changes,
    )


def _is_of_evaluation(key: str) -> bool:
    return key == "step" or (key.startswith("eval_") and key != "eval_seconds")


def evaluations(folder, run: str = "run") -> list[dict]:
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval_answers/even" in line]
    return [{key: line[key] for key in line if _is_of_evaluation(key)} for line in found]


@pytest.mark.full
def test_a_run_says_what_its_answers_are_worth_and_resumes_to_the_same_numbers(folder, capsys):
    tokenizer = make_tokenizer()
    names = (f"{folder}/mine.py:even", f"{folder}/mine.py:long", "exact_match")
    often = dict(every_steps=1, at_start=True, at_end=True)
    trained = Trainer(a_model(tokenizer), tokenizer, config_of(folder, *names, **often)).train()
    found = evaluations(folder)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    assert all(math.isfinite(line["eval_loss"]) for line in found)
    shown = capsys.readouterr()
    assert "step 4: even 0." in shown.out + shown.err and "'row 0' -> " in shown.out + shown.err

    prompts = [
        tokenizer.apply_chat_template(r["messages"][:1], add_generation_prompt=True, return_dict=False) for r in ROWS
    ]
    ends = [*end_token_ids(trained), tokenizer.eos_token_id]
    ids = jaxtune.generate(trained, prompts[:5], NEW, 0.8, seed=0, eos_token_ids=ends)
    last = found[-1]
    assert last["eval_answers/even"] == pytest.approx(np.mean([np.mean([t % 2 == 0 for t in row]) for row in ids]))
    texts = [tokenizer.decode([t for t in row if t not in ends], skip_special_tokens=True) for row in ids]
    assert last["eval_answers/long"] == pytest.approx(np.mean([len(text) for text in texts]))
    assert last["eval_answers/exact_match"] == 0 and last["eval_answer_tokens"] == np.mean([len(row) for row in ids])
    assert [sample["given"] for sample in last["eval_samples"]] == texts[:2]
    assert last["eval_samples"][0].keys() == {"question", "given", "even", "long", "exact_match"}
    assert len({line["eval_answers/even"] for line in found}) > 1, "the weights change, and so do the answers"

    class Cut(Callback):
        def between(self, moment):
            if moment.step == 3:
                raise KeyboardInterrupt

    again = config_of(folder, *names, run="cut", **often)
    with pytest.raises(KeyboardInterrupt):
        Trainer(a_model(tokenizer), tokenizer, again, callbacks=(Cut(),)).train()
    resumed = Trainer(a_model(tokenizer), tokenizer, again).train()
    assert evaluations(folder, "cut") == found
    for one, other in zip(jax.tree.leaves(nnx.state(trained)), jax.tree.leaves(nnx.state(resumed)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def learning(folder):
    objective = ObjectiveConfig(
        "grpo", reward_funcs=(f"{folder}/mine.py:even",), num_generations=2, max_completion_length=NEW
    )
    return config_of(folder, f"{folder}/mine.py:even", objective=objective, at_start=True, at_end=True)


@pytest.mark.full
def test_learning_from_rewards_is_evaluated_by_answers_alone(folder, learning):
    tokenizer = make_tokenizer()
    rewards = dataclasses.replace(learning.objective, reward_weights=(0.5,))
    best = dataclasses.replace(learning.checkpoint, best="eval_reward")
    often = dataclasses.replace(learning.evaluation, generate=("rewards",))
    config = dataclasses.replace(learning, steps=2, objective=rewards, evaluation=often, checkpoint=best)
    Trainer(a_model(tokenizer), tokenizer, config).train()
    found = evaluations(folder)
    assert [line["step"] for line in found] == [0, 2] and "eval_loss" not in found[0]
    assert all(line["eval_reward"] == pytest.approx(0.5 * line["eval_answers/even"]) for line in found)
    # An evaluation that a kill has cut off is made when the same command runs again; one that is there is not.
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for kept, new in ((lines, 0), ([line for line in lines if '"step": 2' not in line or "eval_" not in line], 1)):
        file.write_text("".join(kept))
        Trainer(a_model(tokenizer), tokenizer, config).train()
        assert len(evaluations(folder)) == 2 and len(file.read_text().splitlines()) >= len(kept) + new
    assert evaluations(folder) == found


def test_an_answer_that_a_function_fails_for_does_not_count(folder, caplog):
    tokenizer = make_tokenizer()
    config = config_of(folder, f"{folder}/mine.py:fails", "brevity", temperature=0.0)
    model = a_model(tokenizer)
    metrics = answer_metrics(config.evaluation, config.data, config.data.eval, tokenizer, model)
    assert metrics is not None
    found = metrics(model)
    assert found.metrics["eval_answers/fails"] == 1.0  # rows 0 and 4; of row 1 it says nothing
    assert math.isnan(found.samples[1]["fails"]) and found.metrics["eval_answers/brevity"] < 0
    assert "fails failed for 2 of 5 answers" in caplog.text and "KeyError" in caplog.text


def test_evaluate_has_the_metrics_of_what_it_scores(folder):
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),))
    jaxtune.save_pretrained(model, folder / "model", tokenizer=tokenizer)
    config = config_of(folder, f"{folder}/mine.py:even")
    config = dataclasses.replace(config, model=ModelConfig(path=str(folder / "model")))
    results = scoring.evaluate(config)
    loaded, _ = jaxtune.from_pretrained(folder / "model", dtype="float32")
    metrics = answer_metrics(config.evaluation, config.data, config.data.eval, tokenizer, loaded)
    assert metrics is not None
    expected = metrics(loaded)
    assert results["eval_answers/even"] == expected.metrics["eval_answers/even"]
    assert results["eval_samples"] == expected.samples and math.isfinite(results["eval_loss"])
    json.dumps(results, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(names=("exact",)), r"evaluation.generate: 'exact' is no ready function \(exact_number"),
        (dict(names=("none.py:f",)), "evaluation.generate: 'none.py:f': there is no file"),
        (dict(max_new_tokens=10_000), "rows:?.*its prompt has .* tokens, and beside evaluation.max_new_tokens"),
        (dict(generate_rows=0), "evaluation.generate_rows = 0"),
        (dict(temperature=-1.0), "evaluation.temperature = -1"),
        (dict(objective=ObjectiveConfig("reward")), "evaluation.generate = .*a reward model writes no answers"),
    ],
)
def test_what_cannot_be_asked_is_said_before_training(folder, changes, message):
    names = changes.pop("names", ("exact_match",))
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=message):
        Trainer(a_model(tokenizer), tokenizer, config_of(folder, *names, **changes))


def test_a_recipe_and_a_command_line_name_functions(folder):
    recipe = folder / "recipe.yaml"
    recipe.write_text("model: {path: m}\ndata: {train: a, eval: b}\nevaluation: {generate: [regex, 'my.py:good']}\n")
    assert load_config(str(recipe)).evaluation.generate == ("regex", "my.py:good")
    assert load_config(str(recipe), ["evaluation.generate=[brevity]"]).evaluation.generate == ("brevity",)
    assert load_config(str(recipe), ["evaluation.generate=[]"]).evaluation.asking == []


def test_rows_to_ask_are_needed(folder):
    with pytest.raises(ConfigError, match="evaluation.generate = .*needs held-out rows to ask"):
        make_config(folder, evaluation=EvaluationConfig(generate=("exact_match",)))
