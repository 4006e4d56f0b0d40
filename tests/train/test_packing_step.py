"""Runs with data.packing: step: the same numbers as of one document a row, of fewer rows; and they resume."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.config import AdapterConfig, CheckpointConfig, ConfigError, DataConfig, MeshConfig, ScheduleConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.step_unit import StepUnit
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


def test_devices_share_the_rows_that_examples_fill_and_not_the_examples(tmp_path):
    """Nine documents need not divide by two devices, as their rows do; nine rows must."""
    for packing, wrong in (("step", None), (True, "mesh.data = 2: must divide the 9 rows"), (False, "mesh.data = 2")):
        with contextlib.nullcontext() if wrong is None else pytest.raises(ConfigError, match=wrong):
            config = config_of(tmp_path / str(packing), packing, rows_per_step=9, mesh=MeshConfig(data=2))
            made = dataset(documents(20, longest=LENGTH // 2), packing=packing)
            trainer = Trainer(lora_model(), None, config, made, made)
            assert trainer.batches.rows_per_step % 2 == 0


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_a_plan_before_rows_are_read_has_rows_for_all_devices(per_micro_batch, micro_batches, devices):
    counts = dict(rows_per_step=per_micro_batch * micro_batches, micro_batches=micro_batches)
    config = config_of("out", "step", **counts).shared_by(devices)
    added = config.rows_per_step - counts["rows_per_step"]
    assert config.rows_per_step % (devices * micro_batches) == 0 and 0 <= added < devices * micro_batches
    packed = config_of("out", True, **counts)
    assert packed.shared_by(devices) is packed


@given(st.sampled_from(["rows", "pairs", "answers"]), st.booleans(), st.booleans())
def test_the_unit_of_other_trainers_is_the_example(example, packs, known):
    """Only rows of text are packed if asked; a padded row is one example, which a step then has a number of, too."""
    unit = StepUnit.of_trainers(example, packs, known)
    assert unit.shares_rows == (packs and example == "rows")
    assert unit.counts_examples == (known and not unit.shares_rows)
    assert not (unit.shares_rows and unit.counts_examples)


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
