"""The best checkpoint of a run by a metric of its evaluations: kept, found after an interruption, and delivered."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, ConfigError, EvaluationConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.delivery import Delivery
from jaxtune.train.folder.best import best_saved
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.log.metrics import ROWS
from jaxtune.train.scoring import Weights, weights_to_score
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

SCORES = (0.9, 0.1, 0.7, 0.3, float("nan"), 0.5)  # of the evaluations after 0, 1, ... steps
BEST = "eval_score"


class Scored(Callback):
    """Gives each evaluation a score, keeps the weights after each step, and may end the process after a step."""

    def __init__(self, cut_after: int | None = None):
        self.cut_after, self.weights = cut_after, {}

    def evaluated(self, step, metrics):
        metrics[BEST] = SCORES[step]

    def between(self, moment):
        self.weights[moment.step] = jax.device_get(nnx.state(moment.model(), nnx.Param))
        if moment.step == self.cut_after:
            raise KeyboardInterrupt


def trainer_of(folder, scored, **checkpoint) -> Trainer:
    settings = dict(best=BEST, every_steps=1, every_minutes=None, keep=1)
    config = make_config(
        folder,
        steps=5,
        checkpoint=CheckpointConfig(**(settings | checkpoint)),
        evaluation=EvaluationConfig(every_steps=1, at_start=True),
        data=dataclasses.replace(make_config(folder).data, eval="held out"),
    )
    return Trainer(
        lora_model(), None, config, dataset(documents(24)), dataset(documents(4, seed=1)), callbacks=[scored]
    )


def same_weights(model, kept) -> bool:
    pairs = zip(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(kept), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("checkpoint, best", [({}, 2), ({"best_is": "least"}, 1), ({"every_steps": None}, 2)])
def test_the_best_weights_are_the_result_and_their_checkpoint_stays(checkpoint, best, tmp_path, capsys):
    scored = Scored()
    trained = trainer_of(tmp_path, scored, **checkpoint).train()
    assert same_weights(trained, scored.weights[best]) and not same_weights(trained, scored.weights[5])
    assert best in saved_steps(tmp_path / "checkpoints")
    if not checkpoint:
        assert saved_steps(tmp_path / "checkpoints") == [2, 5]
    assert f"the weights after step {best}, where eval_score = {SCORES[best]:.4f} was best" in capsys.readouterr().out
    again = trainer_of(tmp_path, Scored(), **checkpoint).train()  # the run is complete
    assert same_weights(again, scored.weights[best])


@pytest.mark.full
def test_results_name_the_best_checkpoint_and_evaluate_takes_it(tmp_path):
    trainer = trainer_of(tmp_path, scored := Scored())
    config = trainer.config
    trainer.train(delivery=Delivery(trainer, Console(file=io.StringIO())))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["best_checkpoint"] == {"step": 2, "metric": "eval_score", "value": 0.7}
    recipe = str(tmp_path / "config.yaml")
    weights = Weights(config.model, config.adapter, config.qat, config.optim, config.precision)
    found = weights_to_score(weights, config.checkpoint, recipe)
    said = f"{tmp_path / 'adapter'} (step 2 of 5, the best by eval_score, 0.7000)"
    assert found.text.startswith(said) and found.checkpoints is None
    for name in ("adapter", "merged"):  # as in a run that has not ended
        shutil.rmtree(tmp_path / name)
    found = weights_to_score(weights, config.checkpoint, recipe)
    folder = tmp_path / "checkpoints"
    assert found.step == 2 and found.checkpoints == folder
    assert found.text == f"checkpoint of step 2 in {folder} (the best by eval_score, 0.7000; the newest is of step 5)"
    plain = dataclasses.replace(config.checkpoint, best=None)
    found = weights_to_score(weights, plain, recipe, ["checkpoint.best=null"])
    assert found.step is None and found.text == f"checkpoint of step 5 in {folder}"
    _, model = trainer_of(tmp_path, Scored()).evaluate_checkpoint(folder, 2)
    assert same_weights(model, scored.weights[2])


def test_the_best_saved_evaluation_is_that_of_the_last_rows(tmp_path):
    wanted = CheckpointConfig(best="eval_loss", every_minutes=None)
    assert best_saved(tmp_path, wanted) is None
    lines = [
        dict(step=1, eval_loss=0.1, eval_rows="other"),
        dict(step=2, eval_loss="nan", eval_rows="r"),
        dict(step=3, eval_loss=0.5, eval_rows="r"),
        dict(step=4, eval_loss=0.5, eval_rows="r"),
        dict(step=5, eval_loss=0.2, eval_rows="r"),  # its checkpoint is gone
        dict(step=6, loss=0.0),
    ]
    assert ROWS == "eval_rows"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2, 3, 4, 6):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
    assert best_saved(tmp_path, wanted) == {"step": 3, "metric": "eval_loss", "value": 0.5}
    assert best_saved(tmp_path, dataclasses.replace(wanted, best_is="greatest")) == best_saved(tmp_path, wanted)
    assert best_saved(tmp_path, dataclasses.replace(wanted, best=None)) is None


@pytest.mark.full
@pytest.mark.parametrize("cut_after", [2, 3, 4])
def test_a_run_that_was_interrupted_knows_its_best_checkpoint(cut_after, tmp_path):
    scored, after = Scored(cut_after), Scored()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, scored).train()
    trained = trainer_of(tmp_path, after).train()
    assert same_weights(trained, (after.weights | scored.weights)[2])
    assert saved_steps(tmp_path / "checkpoints") == [2, 5]


@pytest.mark.full
def test_a_damaged_best_checkpoint_is_told_and_the_last_weights_are_the_result(tmp_path, capsys):
    scored = Scored(4)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, scored).train()
    (tmp_path / "checkpoints" / "step_00000002" / "meta.json").write_text("{}")
    after = Scored()
    trained = trainer_of(tmp_path, after).train()
    assert same_weights(trained, after.weights[5])
    assert "warning: the weights after step 2" in capsys.readouterr().out


@pytest.mark.full
def test_evaluations_without_the_metric_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint.best = 'eval_other': .* it has eval_loss, eval_targets"):
        trainer_of(tmp_path, Scored(), best="eval_other").train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines  # the evaluation itself is logged


HELD_OUT = dict(data=dataclasses.replace(make_config("x").data, eval="held out"))
REWARDED = dict(objective=ObjectiveConfig("grpo", reward_funcs=("brevity",)))


def test_the_best_checkpoint_can_be_by_the_second_function_of_one_name(tmp_path):
    """Whose metric has a number behind the name."""
    asked = EvaluationConfig(generate=("a.py:right", "b.py:right"))
    for name in ("right", "right_2"):
        best = CheckpointConfig(best=f"eval_answers/{name}")
        make_config(tmp_path, **HELD_OUT, checkpoint=best, evaluation=asked)
    with pytest.raises(ConfigError, match="they have right, right_2"):
        best = CheckpointConfig(best="eval_answers/right_3")
        make_config(tmp_path, **HELD_OUT, checkpoint=best, evaluation=asked)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(checkpoint=dict(best="loss")), "checkpoint.best = 'loss': name a metric as metrics"),
        (dict(checkpoint=dict(best_is="least")), "checkpoint.best_is = 'least': .* set checkpoint.best"),
        (dict(checkpoint=dict(best="eval_loss")), "checkpoint.best = 'eval_loss': needs evaluations"),
        (HELD_OUT | dict(checkpoint=dict(best="eval_answers/regex")), "evaluations have no answers; name functions"),
        (
            HELD_OUT
            | dict(checkpoint=dict(best="eval_answers/regex"), evaluation=EvaluationConfig(generate=("a.py:right",))),
            "checkpoint.best = 'eval_answers/regex': evaluations have no such function; they have right",
        ),
        (
            HELD_OUT
            | REWARDED
            | dict(checkpoint=dict(best="eval_reward"), evaluation=EvaluationConfig(generate=("regex",))),
            r"'eval_reward': evaluations have it with evaluation.generate = \[rewards\]",
        ),
        (
            HELD_OUT | dict(checkpoint={}, evaluation=EvaluationConfig(generate=("rewards",))),
            "rewards are the functions of objective.reward_funcs, and there are none",
        ),
        (
            HELD_OUT | REWARDED | dict(checkpoint={}, evaluation=EvaluationConfig(generate=("rewards", "regex"))),
            "rewards stand alone",
        ),
        (
            HELD_OUT
            | dict(objective=dataclasses.replace(REWARDED["objective"], tools=("a.py:f",)))
            | dict(checkpoint={}, evaluation=EvaluationConfig(generate=("rewards",))),
            "the rewards are for those of objective.tools",
        ),
    ],
)
def test_a_metric_that_evaluations_will_not_have_is_told_at_once(changes, message):
    settings = dict(evaluation=EvaluationConfig()) | changes
    with pytest.raises(ConfigError, match=message):
        make_config("x", **(settings | dict(checkpoint=CheckpointConfig(**changes["checkpoint"]))))


def test_a_reward_is_best_where_it_is_greatest_and_a_loss_where_it_is_least():
    assert CheckpointConfig(best="eval_answers/right").best_is_greatest
    assert not CheckpointConfig(best="eval_loss").best_is_greatest
