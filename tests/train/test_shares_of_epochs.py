"""Evaluations and saves as shares, the end of a run that no longer becomes better, and keys that replace each other."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.callbacks import Between, Callback
from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import load_config
from jaxtune.train.config.sections import CheckpointConfig, EvaluationConfig, GuardConfig, in_steps
from jaxtune.train.evaluation.early_stop import EarlyStop
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config


@pytest.mark.parametrize("section", [EvaluationConfig, CheckpointConfig])
def test_shares_become_steps(section):
    assert in_steps(section(every_steps=7), 100, None).every_steps == 7
    assert in_steps(section(every_steps=0.1), 95, None).every_steps == 10
    assert in_steps(section(every_epochs=0.25), 100, 10).every_steps == 3
    assert in_steps(section(every_epochs=1.0), 100, 10).every_epochs is None
    assert in_steps(section(), 100, None).every_steps is None
    with pytest.raises(ConfigError, match="epochs cannot be counted"):
        in_steps(section(every_epochs=0.5), 100, None)
    for wrong in ({"every_steps": 1.5}, {"every_steps": 2, "every_epochs": 1.0}, {"every_epochs": 0.0}):
        with pytest.raises(ConfigError, match="every_"):
            section(**wrong)


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_a_share_is_made_as_often_as_it_says(steps, times):
    every = in_steps(EvaluationConfig(every_epochs=1 / times), steps, steps).every_steps
    assert isinstance(every, int) and every >= 1 and (every - 1) * times < steps <= every * times


@given(
    st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_a_run_ends_after_as_many_evaluations_without_improvement(values, patience, min_change, greatest):
    best, count, expected = None, 0, None
    for step, value in enumerate(values, start=1):
        better = not math.isnan(value) and (best is None or (value > best if greatest else value < best))
        count = 0 if better and (best is None or abs(value - best) > min_change) else count + 1
        best = value if better else best
        if expected is None and count >= patience:
            expected = step
    assert _stopped(values, patience, min_change, greatest) == expected


def _stopped(values, patience, min_change, greatest, output=None, rows=None):
    """The step at which a run with these evaluations ends; None: it does not."""
    guards = GuardConfig(patience=patience, min_change=min_change, metric_is="greatest" if greatest else "least")
    callback = EarlyStop(guards, EvaluationConfig(every_steps=1), output or Path("/nowhere"), rows)
    for step, value in enumerate(values, start=1):

        def evaluate(step=step, value=value) -> float:
            callback.evaluated(step, {"eval_loss": value})
            return value

        moment = Between(step, False, wait=print, evaluate=evaluate, save=print, model=print)
        callback.between(moment)
        if moment.stopped:
            return step
    return None


def test_other_held_out_rows_begin_a_count_of_their_own(tmp_path):
    """A resumed run may have another data.eval; its values are not judged by the old rows' best."""
    lines = [{"step": step, "eval_loss": value, "eval_rows": "aaaaaaaa"} for step, value in ((-1, 1.0), (0, 0.9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _stopped([2.0, 1.9, 1.8], 2, 0.0, False, tmp_path, "bbbbbbbb") is None
    assert _stopped([2.0, 1.9, 1.8], 2, 0.0, False, tmp_path, "aaaaaaaa") == 2


def test_patience_needs_evaluations_and_their_metric():
    callback = EarlyStop(GuardConfig(patience=1, metric="eval_reward"), EvaluationConfig(every_steps=1), None, None)
    with pytest.raises(ConfigError, match=r"guards.metric = 'eval_reward': .* it has eval_loss"):
        callback.evaluated(1, {"eval_loss": 1.0})
    with pytest.raises(ConfigError, match="guards.metric"):
        GuardConfig(patience=1, metric="loss")


def _recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{path: m}}\ndata: {{train: a.jsonl, eval_rows: 4}}\n{text}")
    return str(path)


def test_an_override_replaces_its_counterpart(tmp_path):
    recipe = _recipe(tmp_path, "epochs: 3\nschedule: {warmup_ratio: 0.1}\nevaluation: {every_epochs: 0.5}\n")
    config = load_config(recipe, ["steps=6", "schedule.warmup_steps=2", "evaluation.every_steps=3"])
    assert (config.steps, config.epochs) == (6, None)
    assert (config.schedule.warmup_steps, config.schedule.warmup_ratio) == (2, None)
    assert (config.evaluation.every_steps, config.evaluation.every_epochs) == (3, None)
    config = load_config(_recipe(tmp_path, "steps: 6\n"), ["epochs=2"])
    assert (config.steps, config.epochs) == (None, 2)
    assert load_config(_recipe(tmp_path, "steps: 6\n"), ["epochs=null"]).steps == 6
    with pytest.raises(ConfigError, match="steps = 6 and epochs = 2.0 are both set"):
        load_config(recipe, ["steps=6", "epochs=2"])
    with pytest.raises(ConfigError, match=r"guards.patience.*needs evaluations"):
        load_config(_recipe(tmp_path, "guards: {patience: 2}\n"))


class _Worse(Callback):
    """Says of each evaluation that it is worse than the one before."""

    def evaluated(self, step, metrics):
        metrics["eval_worse"] = float(-step)


@pytest.mark.full
def test_a_run_with_shares_and_patience(tmp_path):
    """It evaluates and saves after each fifth of its steps and ends at the third; continued, it goes on counting."""
    config = make_config(
        tmp_path / "run",
        steps=10,
        checkpoint=CheckpointConfig(every_steps=0.2, every_minutes=None, keep=9),
        evaluation=EvaluationConfig(every_steps=0.2, at_end=False),
        guards=GuardConfig(patience=2, metric="eval_worse"),
        data=dataclasses.replace(make_config(tmp_path).data, eval="held out"),
    )
    rows, held_out = dataset(documents(24)), dataset(documents(4, seed=1))

    def trainer() -> Trainer:
        return Trainer(lora_model(), None, config, rows, held_out, callbacks=[_Worse()])

    first = trainer()
    first.train()
    assert [line["step"] for line in first.history if "eval_loss" in line] == [2, 4, 6]
    assert first.steps_done == 6 and saved_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]
    again = trainer()
    again.train()
    assert again.steps_done == 8
