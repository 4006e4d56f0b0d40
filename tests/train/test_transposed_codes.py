"""Runs and plans that keep the transposed codes of frozen FP8 weights."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny import CONFIGS
from tiny_models import adapted_model

from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.hf import model_from_config
from jaxtune.models.linear import Frozen
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas.formats import FP8
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ExportConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    QatConfig,
    TrainConfig,
)
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import TRANSPOSED_CODES, abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.search import Failed, Room, next_plan
from jaxtune.train.trainer import Trainer
from tests.train.test_plan_search import Failing
from tests.train.test_preference import pair_set, pairs
from tests.train.tiny_runs import assert_same, dataset, documents, make_config

TRAIN, HELD_OUT = documents(16, seed=1), documents(6, seed=2)


def fp8_model(name="llama", **adapter):
    """In bfloat16, with FP8 products and an adapter that is not at its start."""
    model = quantize(model_from_config(CONFIGS[name], jax.random.key(0), "bfloat16"), "fp8")
    return adapted_model(compute_in_fp8(model), r=4, lora_alpha=8, **adapter)


def trainer_of(output, kept: bool, rows=None, name="llama", **changes) -> Trainer:
    """A run of which the plan keeps the transposed codes, or does not."""
    settings = dict(adapter=AdapterConfig(r=4, lora_alpha=8), micro_batches=2, steps=4, precision="bf16")
    config = make_config(output, **(settings | changes))
    rows = rows or (dataset(TRAIN), dataset(HELD_OUT))
    trainer = Trainer(fp8_model(name), None, config, *rows, keeps_model=False)
    assert not trainer.planner.plan.transposed_codes  # only a Hopper GPU reads them where they are
    sizes = partition.MeshShape.of(trainer.mesh).to_record()
    plan = dataclasses.replace(trainer.planner.plan, transposed_codes=kept)
    trainer.planner.adopt(plan.to_record() | sizes)
    trainer.engine.follow_plan()
    assert trainer.planner.plan.transposed_codes == kept
    return trainer


def codes_in(tree) -> list[FP8]:
    """The FP8 weights of a state or model."""
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, FP8))
    return [leaf for leaf in leaves if isinstance(leaf, FP8)]


def kept_in(tree) -> list[jax.Array]:
    return [weight.transposed for weight in codes_in(tree) if weight.transposed is not None]


def losses(trainer) -> list:
    found = [[line[key] for key in ("loss", "grad_norm", "eval_loss") if key in line] for line in trainer.history]
    assert any(found)
    return found


def same_run(one: Trainer, other: Trainer):
    models = one.train(), other.train()
    assert losses(one) == losses(other)
    assert_same(*models)
    assert not any(map(kept_in, models))


# ---- runs


@pytest.mark.parametrize("name", ("llama", "qwen3_moe", "gpt_oss"))
def test_a_run_that_keeps_them_is_the_same_run(tmp_path, name):
    """Two micro-batches, evaluations, and the files of its adapter and of the merged model, which have no copy."""
    changes = dict(
        evaluation=EvaluationConfig(every_steps=2),
        data=dataclasses.replace(make_config(tmp_path).data, eval="held out"),
    )
    kept, without = (trainer_of(tmp_path / str(kept), kept, name=name, **changes) for kept in (True, False))
    frozen = kept.model.placed_frozen(kept.engine)
    copies, weights = kept_in(frozen), codes_in(frozen)
    assert len(copies) == len(weights) == len(codes_in(kept.model.given)) > 0
    assert (
        sum(copy.nbytes for copy in copies)
        == kept.planner.cost.codes_bytes
        == kept.planner.cost.fixed[TRANSPOSED_CODES]
    )
    for weight in weights:
        np.testing.assert_array_equal(np.asarray(weight.transposed), np.asarray(weight.codes).swapaxes(-1, -2))
    assert not kept_in(without.model.placed_frozen(without.engine)) and not kept_in(kept.model.given)
    _, _, shapes = kept.model.first_shapes(kept.engine)
    assert [a.shape for a in jax.tree.leaves(shapes)] == [a.shape for a in jax.tree.leaves(frozen)]
    same_run(kept, without)


def test_a_checkpoint_may_be_gone_on_with_either_way(tmp_path):
    """In the run's own plan, in one that cannot keep them, and from the record of an older version."""
    changes = dict(checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3), micro_batches=1)
    trained = trainer_of(tmp_path / "run", True, **changes).train()
    for possible in (True, False):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
        config = make_config(
            tmp_path / "run", adapter=AdapterConfig(r=4, lora_alpha=8), steps=4, precision="bf16", **changes
        )
        again = Trainer(fp8_model(), None, config, dataset(TRAIN), dataset(HELD_OUT), keeps_model=False)
        if not possible:
            again.planner._cost = dataclasses.replace(again.planner._cost, codes_bytes=0.0)
        assert_same(trained, again.train())
        assert again.planner.plan.transposed_codes == possible and len(again.history) == 2
    record = again.planner.plan.to_record()
    assert "transposed_codes" not in record
    cost = again.planner.cost
    assert not StepPlan.from_record(record, cost.num_layers, cost.known).transposed_codes


def test_the_reference_of_dpo_reads_the_same_weights(tmp_path):
    data = dataclasses.replace(make_config(tmp_path).data, length=24)
    changes = dict(objective=ObjectiveConfig("dpo"), data=data, steps=2, micro_batches=1)
    rows = pair_set(pairs(8)), None
    same_run(*(trainer_of(tmp_path / str(kept), kept, rows, **changes) for kept in (True, False)))


def test_every_device_of_a_data_mesh_has_them(tmp_path):
    changes = dict(mesh=MeshConfig(data=2), micro_batches=1, steps=2)
    kept, without = (trainer_of(tmp_path / str(kept), kept, **changes) for kept in (True, False))
    copies = kept_in(kept.model.placed_frozen(kept.engine))
    assert all(len(copy.sharding.device_set) == 2 and copy.is_fully_replicated for copy in copies)
    same_run(kept, without)


def test_they_are_given_up_where_memory_runs_out_in_the_first_step(tmp_path, monkeypatch, capsys):
    """The next plan is the same without them, and their memory is free before it is compiled."""
    trainer, copies, given_up = trainer_of(tmp_path / "failing", True), [], []
    compile_, placed = trainer.engine.compile, trainer.model.placed_frozen
    failures = [None]

    def compiled(*arguments):
        given_up.append([copy.is_deleted() for copy in copies])
        programs = compile_(*arguments)
        return dataclasses.replace(programs, accumulate=Failing(programs.accumulate, failures))

    def placing(engine):
        frozen = placed(engine)
        copies.extend(kept_in(frozen))
        return frozen

    monkeypatch.setattr(trainer.engine, "compile", compiled)
    monkeypatch.setattr(trainer.model, "placed_frozen", placing)
    planned = trainer.planner.plan
    monkeypatch.setattr(trainer.planner, "_next", lambda resident: (forecast_without(trainer.planner, planned), False))
    trained = trainer.train()
    assert "the first step ran out of memory; planning again" in capsys.readouterr().err
    assert given_up[0] == [] and given_up[1] and all(given_up[1])
    assert_same(trained, trainer_of(tmp_path / "plain", False).train())


def forecast_without(planner, plan):
    from jaxtune.train.planning.forecasts import forecast

    return forecast(planner._cost, dataclasses.replace(plan, transposed_codes=False), planner.device)
