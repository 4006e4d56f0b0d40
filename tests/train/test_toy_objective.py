"""An objective says in one file what it is, where its rows come from and what runs beside it, and the rest follows: the
plan, checks, a checkpoint. This is shown of a toy in tests/train/toy_objective.py, which nothing else knows."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.heads import SCORE
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import CheckpointConfig, DataConfig, OptimConfig
from jaxtune.train.config.objective import _OPTIONS, ObjectiveConfig
from jaxtune.train.objectives.named import PREFERENCES
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.run_spec import decided_objective
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import assert_same, make_config
from tests.train.toy_objective import Answers, BetterAnswers

TOKENIZER = make_tokenizer()
PROMPTS = [f"Add {n}: " for n in range(6)]


def trainer_of(folder, rows: object = None, objective: SFT | None = None, **changes) -> Trainer:
    file = folder.parent / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    settings = dict(
        data=DataConfig(train=str(file), length=24),
        optim=OptimConfig(learning_rate=3e-2),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3),
    )
    model = get_peft_model(tiny_model(layers=(LayerSpec(),), vocab_size=len(TOKENIZER)), r=4, lora_alpha=8)
    config = make_config(folder, **settings | changes)
    return Trainer(model, TOKENIZER, config, rows, objective=objective or BetterAnswers(wanted=len(TOKENIZER) // 2))


def test_it_is_declared_planned_and_checked(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    needs = trainer.spec.step.needs
    assert needs.sampler == "objective = BetterAnswers" and needs.reference_runs == 1
    assert trainer.planner.cost.reference_runs == 1 and isinstance(trainer.batches, Answers)
    assert trainer.batches.identity() == {"prompts": [list(TOKENIZER(prompt)["input_ids"]) for prompt in PROMPTS]}
    with pytest.raises(ValueError, match="objective = BetterAnswers: its prompts are one set of rows"):
        trainer_of(tmp_path / "run", [([{"prompt": "a"}], 1.0)])


def test_it_learns_and_goes_on_bit_for_bit(tmp_path):
    whole = trainer_of(tmp_path / "run", steps=6)
    trained, lines = whole.train(), whole.history
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6) and lines[-1]["kl"] > 1e-4
    assert whole.batches.rewards[5] > whole.batches.rewards[0]
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    resumed = trainer_of(tmp_path / "run", steps=6)
    assert_same(resumed.train(), trained)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in lines[4:]]
    with pytest.raises(ValueError, match=r"this run cannot continue that checkpoint(.|\n)*own.objective"):
        trainer_of(tmp_path / "run", steps=6, objective=BetterAnswers(wanted=3)).train()


def test_a_config_names_it_by_two_entries(tmp_path, monkeypatch):
    monkeypatch.setitem(_OPTIONS, "better", ())
    monkeypatch.setitem(PREFERENCES, "better", BetterAnswers)
    config = make_config(tmp_path, objective=ObjectiveConfig("better"))
    assert decided_objective(config) == BetterAnswers() and StepSpec.of(config).needs.samples


def test_an_objective_that_samples_and_says_not_how_is_told_what_to_define(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Silent(SFT):
        samples = True

    with pytest.raises(ValueError, match="objective = Silent: it samples its rows, and nothing says how: define its"):
        trainer_of(tmp_path / "run", objective=Silent())


def test_a_step_is_that_of_the_users_objective_wherever_one_is_given(tmp_path):
    """And not of config.objective: its head, what it samples, and what runs beside."""

    @dataclasses.dataclass(frozen=True)
    class Scoring(BetterAnswers):
        head = SCORE

    config = make_config(tmp_path)
    plain, own = StepSpec.of(config), StepSpec.of(config, Scoring())
    assert plain.model.head.is_text and own.model.head == SCORE
    assert own.needs.samples and own.generates and not plain.generates
    [of_teacher] = trainer_of(tmp_path / "run").stored._planned.args
    assert of_teacher.needs.samples
