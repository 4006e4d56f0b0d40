"""Runs with data.packing: step: the same numbers as of one document a row, of fewer rows; and they resume."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxtune.train.config import AdapterConfig, CheckpointConfig, DataConfig, ScheduleConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.trainer import Trainer
from tests.train.test_preference import adapted, pair_set, pairs
from tests.train.tiny_runs import LENGTH, assert_same, dataset, documents, lora_model, make_config


def config_of(folder, packing, **changes):
    settings = dict(
        data=DataConfig(train="rows", eval="rows", length=LENGTH, packing=packing),
        rows_per_step=6,
        steps=5,
        adapter=AdapterConfig(r=4, lora_alpha=8),
        seed=5,
    )
    return make_config(folder, **(settings | changes))


def run(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.history if "loss" in line], trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("micro_batches", [None, 2])
def test_documents_of_a_step_share_rows(tmp_path, micro_batches):
    made, held_out = documents(20, longest=LENGTH // 2), documents(7, seed=9, longest=LENGTH // 2)
    found = {}
    for packing in (False, "step"):
        config = config_of(tmp_path / str(packing), packing, micro_batches=micro_batches)
        sets = (dataset(made, packing=packing), dataset(held_out, packing=packing))
        trainer = Trainer(lora_model(), None, config, *sets)
        found[packing] = run(trainer)
        rows = trainer.batches.rows_per_step
        assert rows == 6 if packing is False else rows < 6
        assert trainer.batches.steps_per_epoch == 4 and trainer.config.rows_per_step == 6
    np.testing.assert_allclose(found["step"][0], found[False][0], rtol=2e-5)
    np.testing.assert_allclose(found["step"][1], found[False][1], rtol=2e-5)


@pytest.mark.full
def test_pairs_of_a_step_share_rows(tmp_path):
    """With a reference that is computed before, once for each pair, and one that is computed in each step."""
    found = {}
    for precomputed in (False, True):
        objective = ObjectiveConfig("dpo", precompute_ref_log_probs=precomputed)
        config = config_of(tmp_path / str(precomputed), "step", objective=objective)
        sets = [dataclasses.replace(pair_set(pairs(count)), packing="step") for count in (8, 3)]
        trainer = Trainer(adapted(), None, config, *sets)
        found[precomputed] = run(trainer)
        assert trainer.batches.length == 2 * trainer.train_data.length
    np.testing.assert_allclose(found[True][0], found[False][0], rtol=1e-5)
    np.testing.assert_allclose(found[True][1], found[False][1], rtol=1e-5)


@pytest.mark.full
def test_such_a_run_goes_on_bit_for_bit(tmp_path):
    def trainer(name, steps):
        config = config_of(
            tmp_path / name,
            "step",
            steps=steps,
            checkpoint=CheckpointConfig(every_steps=2, every_minutes=None),
            schedule=ScheduleConfig("constant", warmup_steps=2, zero_start=True),
        )
        made = dataset(documents(20), packing="step")
        return Trainer(lora_model(), None, config, made, dataset(documents(3, seed=9), packing="step"))

    whole = trainer("whole", 6).train()
    trainer("parts", 4).train()
    assert_same(trainer("parts", 6).train(), whole)
