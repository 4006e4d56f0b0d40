"""TRL's DistillationTrainer and GKDTrainer: their arguments, and runs of both."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxtune import compat
from jaxtune.compat import arguments
from jaxtune.models.decoder import Decoder
from jaxtune.train.sampled.own_samples import OwnSamples
from tests.docs.test_reward_scripts import adapted

PROMPTS = [{"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(4)]
CHATS = [{"messages": [*row["prompt"], {"role": "assistant", "content": f"{n}"}]} for n, row in enumerate(PROMPTS)]


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch):
    monkeypatch.setattr(arguments, "_printed", set())


def trainer_of(kind: Any, rows, model=None, teacher: Any = "base", held_out=None, **settings):
    usual: dict[str, Any] = dict(max_steps=1, per_device_train_batch_size=2)
    args = kind.config_type(**(usual | settings))
    return kind(model or adapted(), teacher, args=args, train_dataset=rows, eval_dataset=held_out)


@pytest.mark.full
def test_arguments_become_the_objectives_options(workplace):
    made = trainer_of(
        compat.DistillationTrainer,
        PROMPTS,
        beta=0.5,
        temperature=0.7,
        max_completion_length=4,
        top_k=-1,
        min_p=None,
        gradient_accumulation_steps=2,
        log_completions=True,
    )
    config, objective = made.config(), made.config().objective
    assert (objective.name, objective.teacher, objective.on_policy) == ("distill", "base", 1.0)
    assert (objective.beta, objective.temperature, objective.top_k, objective.min_p) == (0.5, 0.7, 0, 0.0)
    assert (config.rows_per_step, config.data.packing, config.optim.learning_rate) == (4, True, 5e-5)
    assert compat.DistillationConfig().beta == 1.0 and compat.DistillationConfig().max_completion_length == 512
    made = trainer_of(compat.GKDTrainer, CHATS, max_new_tokens=4, lmbda=0.3)
    objective = made.config().objective
    assert (objective.beta, objective.temperature, objective.sampling_temperature) == (0.5, 1.0, 0.9)
    assert (objective.on_policy, objective.max_completion_length) == (0.3, 4)
    assert made.config().data.last_response_only
    objective = trainer_of(compat.GKDTrainer, CHATS, lmbda=0.0).config().objective
    assert (objective.on_policy, objective.sampling_temperature, objective.max_completion_length) == (0.0, None, None)


@pytest.mark.parametrize("lmbda", [0.0, 1.0, None])
def test_a_models_cache_is_that_of_sampled_answers(lmbda, workplace):
    student = adapted()
    student.cache = "fp8"
    if lmbda is None:
        trainer = trainer_of(compat.DistillationTrainer, PROMPTS, student, max_completion_length=4)
    else:
        trainer = trainer_of(compat.GKDTrainer, CHATS, student, lmbda=lmbda, max_new_tokens=4)
    assert trainer.config().objective.cache == (None if lmbda == 0 else "fp8")
    source = trainer._prepared.batches if lmbda != 0 else None
    assert source is None or source.sampled_rows.cache == "fp8"


@pytest.mark.full
@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_gkd_learns_from_a_teacher(workplace, lmbda):
    settings = dict(max_steps=2, max_new_tokens=4, lmbda=lmbda, learning_rate=1e-2, eval_strategy="steps", eval_steps=2)
    teacher, _ = compat.FastLanguageModel.from_pretrained("base", 64, load_in_4bit=False, dtype="float32")
    teacher.module = Decoder(teacher.module.config, jax.random.key(9), "float32")
    trainer = trainer_of(compat.GKDTrainer, CHATS, adapted(), teacher, CHATS[:2], **settings)
    trainer.train()
    assert isinstance(trainer._prepared.batches, OwnSamples) == (lmbda > 0)
    lines = trainer.state.log_history
    assert all(np.isfinite(line["loss"]) and line["loss"] > 0 for line in lines if "loss" in line)
    assert any("eval_loss" in line for line in lines) and trainer.model.module.teacher is None
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.full
def test_the_base_is_the_teacher_of_a_model_without_one(workplace, capsys):
    trainer = trainer_of(compat.DistillationTrainer, PROMPTS, adapted(trained=True), None, max_completion_length=4)
    assert "the teacher is the model with its adapter off" in capsys.readouterr().out
    trainer.train()
    [line] = [line for line in trainer.state.log_history if "loss" in line]
    assert line["loss"] > 0 and line["completions/mean_length"] > 0 and line["entropy"] > 0


@pytest.mark.full
def test_prompts_may_be_a_path(workplace, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    trainer = trainer_of(compat.DistillationTrainer, tmp_path / "prompts.jsonl", max_completion_length=4)
    trainer.train()
    assert trainer.state.global_step == 1


def test_what_is_not_followed_is_named(workplace):
    kind = compat.DistillationTrainer
    with pytest.raises(ValueError, match="vllm_structured_outputs_regex"):
        trainer_of(kind, PROMPTS, vllm_structured_outputs_regex="a+")
    with pytest.raises(ValueError, match="seq_kd = True is not supported.*lmbda=0"):
        trainer_of(compat.GKDTrainer, CHATS, seq_kd=True)
    with pytest.raises(ValueError, match="tools = .* is not supported"):
        kind(adapted(), "base", compat.DistillationConfig(), PROMPTS, tools=[print])
    with pytest.raises(ValueError, match="no column `prompt`"):
        trainer_of(kind, [{"text": "no prompt"}])
    with pytest.raises(ValueError, match="teacher_model is a int"):
        trainer_of(kind, PROMPTS, teacher=3)
    teacher, _ = compat.FastLanguageModel.from_pretrained("base", 64, load_in_4bit=False, dtype="float32")
    small = dataclasses.replace(teacher.module.config, vocab_size=40)
    teacher.module = Decoder(small, jax.random.key(9), "float32")
    with pytest.raises(ValueError, match="the student's vocabulary has .* and the teacher's 40"):
        trainer_of(kind, PROMPTS, teacher=teacher)
    whole, _ = compat.FastLanguageModel.from_pretrained("base", 64, dtype="float32", full_finetuning=True)
    with pytest.raises(ValueError, match="there is no teacher"):
        trainer_of(kind, PROMPTS, whole, None)
