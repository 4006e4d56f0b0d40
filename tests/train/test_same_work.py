"""The same command, other work: changed columns are refused, changed code is told, and no old result passes for new."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.lora import get_peft_model
from jaxtune.train.config import CheckpointConfig, DataConfig, EvaluationConfig, ObjectiveConfig
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError
from jaxtune.train.folder.folder_lock import process_identity
from jaxtune.train.folder.record import same_run
from jaxtune.train.folder.results import require_own, write_result
from jaxtune.train.folder.run_state import read_state, write_state
from jaxtune.train.folder.translations import VERSION
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.test_tools import OWN, TEMPLATE
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

REWARDS = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def scored(completion_ids, **columns):
    return [1.0] * len(completion_ids)
"""
SAVES = CheckpointConfig(every_steps=1, every_minutes=None)


def trainer_of(folder, objective: dict, rows=None, text: str = REWARDS, template=None, **changes) -> Trainer:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(text)
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    model = get_peft_model(tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), r=4, lora_alpha=8)
    settings = dict(
        steps=2,
        rows_per_step=4,
        objective=ObjectiveConfig("grpo", num_generations=2, max_completion_length=4, **objective),
        data=DataConfig(train="rows", length=192 if template else 32),
        checkpoint=SAVES,
    )
    rows = rows or [{"prompt": text, "answer": n} for n, text in enumerate(("one", "two", "three"))]
    config = make_config(folder / "run", **(settings | changes))
    return Trainer(model, tokenizer, config, rows, rows if config.evaluation.generate else None)


@pytest.mark.full
def test_a_run_from_rewards_tells_changed_code_and_refuses_changed_answers(tmp_path, capsys):
    reward = dict(reward_funcs=(f"{tmp_path}/own.py:even",))
    trainer_of(tmp_path, reward).train()
    trainer_of(tmp_path, reward).train()
    assert "this run is complete: 2 steps" in capsys.readouterr().err
    other = REWARDS.replace("== 0", "== 1")
    with pytest.raises(CheckpointError, match=r"this run is complete \(2 steps\), but the code of reward even has ch"):
        trainer_of(tmp_path, reward, text=other).train()
    rows = [{"prompt": text, "answer": n + 1} for n, text in enumerate(("one", "two", "three"))]
    with pytest.raises(CheckpointError, match="data.columns_crc32: saved"):
        trainer_of(tmp_path, reward, rows=rows).train()
    capsys.readouterr()
    trainer_of(tmp_path, reward, text=other, steps=3).train()
    said = capsys.readouterr()
    assert "changed: the code of reward even: the steps so far had the old one" in said.out + said.err


def test_the_code_of_every_kind_is_known(tmp_path):
    file = f"{tmp_path}/own.py"
    tools = dict(reward_funcs=(f"{file}:even",), tools=(f"{file}:roll",), environment_factory=f"{file}:Game")
    rows = [{"prompt": [{"role": "user", "content": text}], "goal": 1} for text in "abc"]
    evaluation = EvaluationConfig(generate=(f"{file}:scored",), generate_rows=1, max_new_tokens=2, at_end=False)
    own = trainer_of(tmp_path, tools, rows, OWN, TEMPLATE)
    assert {"reward even", "tool roll", "environment Game"} <= own.spec.code.keys()
    assert own.spec.code != trainer_of(tmp_path, tools, rows, OWN.replace("// 2", "// 3"), TEMPLATE).spec.code
    rollout = trainer_of(tmp_path, dict(rollout_func=f"{file}:play"), rows, OWN, TEMPLATE)
    assert "the rollout function" in rollout.spec.code
    data = DataConfig(train="rows", eval="held-out rows", length=32)
    scored = trainer_of(tmp_path, dict(reward_funcs=("brevity",)), evaluation=evaluation, data=data)
    assert scored.spec.code.keys() == {"evaluation scored"}

    @dataclasses.dataclass(frozen=True)
    class Own(SFT):
        pass

    config = make_config(tmp_path / "sft")
    given = Trainer(lora_model(), None, config, dataset(documents(8)), objective=Own())
    assert given.spec.code.keys() == {"objective Own"} and given.record()["code"] == given.spec.code
    assert Trainer(lora_model(), None, config, dataset(documents(8))).spec.code == {}


def test_code_decides_whose_a_complete_result_is(tmp_path):
    def run(best=None, **code):
        record = {"config": {"checkpoint": {"best": best}, "schedule": {"name": "linear", "warmup_ratio": None}}}
        return same_run(record | {"version": VERSION, "data": {"rows": 3}, "code": code})

    write_result(tmp_path / "adapter", run(**{"reward f": "1", "evaluation g": "1"}), 4, lambda folder: None)
    require_own(tmp_path / "adapter", run(**{"reward f": "1", "evaluation g": "2"}), 4)
    require_own(tmp_path / "adapter", run(**{"reward f": "2"}), 8)  # made longer: told when it resumes
    require_own(tmp_path / "adapter", run(**{"reward other": "2"}), 4)  # other names are in the config
    with pytest.raises(ValueError, match="is what it led to, but the code of reward f has changed"):
        require_own(tmp_path / "adapter", run(**{"reward f": "2"}), 4)
    write_result(tmp_path / "best", run("eval_reward", **{"evaluation g": "1"}), 4, lambda folder: None)
    with pytest.raises(ValueError, match="the code of evaluation g has changed"):
        require_own(tmp_path / "best", run("eval_reward", **{"evaluation g": "2"}), 4)


# ---- what a killed run leaves


@pytest.mark.full
def test_metrics_of_a_run_that_was_killed_before_its_first_step_are_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "load_seconds": 2.0}\n{"st')
    trainer = Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(8)))
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1]


def test_a_process_of_another_boot_or_start_is_not_the_runs(tmp_path):
    lock = tmp_path / "checkpoints" / "run.lock"
    write_state(tmp_path, "running", "", 4)
    with Checkpointer(tmp_path / "checkpoints"):
        assert read_state(tmp_path).name == "running"
        owner = json.loads(lock.read_text())
        assert owner["process"] == process_identity(os.getpid())
        for other in (f"another-boot {owner['process'].split()[1]}", f"{owner['process'].split()[0]} 1"):
            lock.write_text(json.dumps(owner | {"process": other}))
            assert read_state(tmp_path).name == "killed"
        lock.write_text(json.dumps(owner))


def test_arrays_of_another_shape_than_recorded_are_damage(tmp_path):
    import jax.numpy as jnp

    from jaxtune.system.sealed import fingerprints
    from jaxtune.train.folder.checkpoint import MANIFEST, META

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros((4, 2)), "v": jnp.zeros(3)}, {})
        checkpointer.wait()
        folder = tmp_path / "step_00000001"
        for shape, dtype in (([2, 4], "float32"), ([4, 2], "bfloat16"), ([8], "float32")):
            meta, manifest = (json.loads((folder / name).read_text()) for name in (META, MANIFEST))
            meta["arrays"]["w"] = {"shape": shape, "dtype": dtype}
            (folder / META).write_text(json.dumps(meta))
            manifest["files"][META] = fingerprints([folder / META])[folder / META]
            (folder / MANIFEST).write_text(json.dumps(manifest))
            with pytest.raises(CheckpointError, match=r"is damaged: w is float32\[4, 2\], and meta.json says"):
                checkpointer.restore()
