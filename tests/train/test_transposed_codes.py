"""Runs and plans that keep the transposed codes of frozen FP8 weights."""

from __future__ import annotations

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from step_costs import costs_of, phase_sections
from tiny import CONFIGS
from tiny_models import adapted_model

from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.hf import model_from_config
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas.formats import FP8
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    QatConfig,
    TrainConfig,
)
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.movables.transposed_codes import TRANSPOSED_CODES
from jaxtune.train.planning.phases import phases_of
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.plan_text import plan_lines
from jaxtune.train.planning.search import Failed, Room, next_plan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.test_plan_search import Failing
from tests.train.test_preference import pair_set, pairs
from tests.train.tiny_runs import assert_same, dataset, documents, make_config

CODES = "transposed_codes"
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
    assert not trainer.planner.plan.level(CODES)  # only a Hopper GPU reads them where they are
    sizes = partition.MeshShape.of(trainer.mesh).to_record()
    plan = trainer.planner.plan.at(transposed_codes=kept)
    trainer.planner.adopt(plan.to_record() | sizes)
    trainer.engine.follow_plan()
    assert trainer.planner.plan.level(CODES) == kept
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


@pytest.mark.full
@pytest.mark.parametrize("name", ("llama", "qwen3_moe", "gpt_oss"))
def test_a_run_that_keeps_them_is_the_same_run(compiled_in_full, tmp_path, name):
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
        == kept.planner.cost.movables[CODES].bytes
        == kept.planner.cost.fixed[TRANSPOSED_CODES]
    )
    for weight in weights:
        np.testing.assert_array_equal(np.asarray(weight.transposed), np.asarray(weight.codes).swapaxes(-1, -2))
    assert not kept_in(without.model.placed_frozen(without.engine)) and not kept_in(kept.model.given)
    _, _, shapes = kept.model.first_shapes(kept.engine)
    assert [a.shape for a in jax.tree.leaves(shapes)] == [a.shape for a in jax.tree.leaves(frozen)]
    same_run(kept, without)


@pytest.mark.full
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
            again.planner._cost = again.planner._cost.limited({CODES: (0, 0)})
        assert_same(trained, again.train())
        assert again.planner.plan.level(CODES) == possible and len(again.history) == 2
    record = again.planner.plan.to_record()
    assert "transposed_codes" not in record
    cost = again.planner.cost
    assert not StepPlan.from_record(record, cost.shape.num_layers, cost.layers.all_residuals).level(CODES)


@pytest.mark.full
def test_the_reference_of_dpo_reads_the_same_weights(tmp_path):
    data = dataclasses.replace(make_config(tmp_path).data, length=24)
    changes = dict(objective=ObjectiveConfig("dpo"), data=data, steps=2, micro_batches=1)
    rows = pair_set(pairs(8)), None
    same_run(*(trainer_of(tmp_path / str(kept), kept, rows, **changes) for kept in (True, False)))


@pytest.mark.full
def test_every_device_of_a_data_mesh_has_them(compiled_in_full, tmp_path):
    changes = dict(mesh=MeshConfig(data=2), micro_batches=1, steps=2)
    kept, without = (trainer_of(tmp_path / str(kept), kept, **changes) for kept in (True, False))
    copies = kept_in(kept.model.placed_frozen(kept.engine))
    assert all(len(copy.sharding.device_set) == 2 and copy.is_fully_replicated for copy in copies)
    same_run(kept, without)


@pytest.mark.full
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
    after = forecast(trainer.planner._cost, planned.at(transposed_codes=0), trainer.planner.device)
    monkeypatch.setattr(trainer.planner, "_next", lambda: (after, False))
    trained = trainer.train()
    assert "the first step ran out of memory; planning again" in capsys.readouterr().err
    assert given_up[0] == [] and given_up[1] and all(given_up[1])
    assert_same(trained, trainer_of(tmp_path / "plain", False).train())


# ---- plans


def config_of(**changes) -> TrainConfig:
    changes = dict(adapter=AdapterConfig()) | changes
    model, data = ModelConfig(path="none", load_in="fp8", compute="fp8"), DataConfig(train="none", length=2048)
    return TrainConfig(model=model, data=data, rows_per_step=8, output="none", **changes)


@functools.cache
def parts_of_8b():
    config = config_of()
    return costs_of(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), config), config


def without(found):
    return found.plan.at(transposed_codes=0)


@pytest.mark.full
def test_a_plan_keeps_them_where_memory_is_left():
    """And has all else as it would have without them."""
    parts, config = parts_of_8b()
    device, size = find_device("H200"), 32 * 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    assert parts.movables[CODES].bytes == size
    for budget, kept in ((None, True), (70e9, True), (62e9, False), (60e9, False), (24e9, False), (16e9, False)):
        plain = choose(parts.limited({CODES: (0, 0)}), StepSpec.of(config), device, budget)
        found = choose(parts, StepSpec.of(config), device, budget)
        assert found.plan.level(CODES) == kept and without(found) == plain.plan
        assert found.peak_bytes - plain.peak_bytes == (size if kept else 0)
        assert found.parts.get(TRANSPOSED_CODES, 0) == (size if kept else 0)
        assert not kept or 0.99 < found.step_seconds / plain.step_seconds < 0.995
    fixed = dataclasses.replace(config, memory=MemoryConfig(plan="keep"), micro_batches=2)
    assert choose(parts, StepSpec.of(fixed), device, None).plan.level(CODES)
    one, two = (choose(parts, StepSpec.of(dataclasses.replace(fixed, micro_batches=n)), device, None) for n in (1, 2))
    seconds = [
        -parts.movables[CODES].seconds(parts.placed(found.plan.moved), device).micro_batch for found in (one, two)
    ]
    assert seconds[0] == seconds[1] == pytest.approx(0.005, rel=0.1)  # for each micro-batch
    lines = plan_lines(two, parts, device, None)
    assert "  codes of FP8 weights are kept transposed, too (6.98 GB, 0.010 s a step less)" in lines


@pytest.mark.full
def test_a_plan_keeps_none_where_they_would_not_be_read_or_memory_is_better_spent():
    parts, config = parts_of_8b()
    shape = config_from_hf(CONFIGS["llama"])

    def bytes_of(config: TrainConfig) -> float:
        return costs_of(shape, config).movables[CODES].bytes

    assert bytes_of(config) > 0 and bytes_of(config_of(mesh=MeshConfig(data=2))) == bytes_of(config)
    decoded = dataclasses.replace(config, model=dataclasses.replace(config.model, compute=None))
    rewards = config_of(objective=ObjectiveConfig("grpo", reward_funcs=("exact_match",)))
    divided = config_of(mesh=MeshConfig(fsdp=2))
    for other in (decoded, rewards, divided, config_of(qat=QatConfig("fp8"))):
        assert bytes_of(other) == 0.0
    assert not choose(parts, StepSpec.of(config), find_device("B200"), None).plan.level(CODES)


@pytest.mark.full
def test_a_plan_that_does_not_fit_as_compiled_is_tried_without_them():
    parts, config = parts_of_8b()
    device = find_device("H200")
    first, _ = next_plan(parts, StepSpec.of(config), device, Room(70e9, 71e9))
    assert first.plan.level(CODES)
    failed = Failed(first.plan, first.peak_bytes, 72e9)
    second, smallest = next_plan(parts, StepSpec.of(config), device, Room(70e9, 71e9), [failed])
    assert second.plan == without(first) and not smallest


@pytest.mark.full
def test_weights_that_are_placed_get_none_later(tmp_path, monkeypatch):
    """Memory ran out in the first step: only those that are there may stay."""
    for kept in (True, False):
        planner = trainer_of(tmp_path / str(kept), kept).planner
        found = planner.forecast, False
        monkeypatch.setattr(planner, "_next", lambda found=found: found)
        planner.replan("it was too large", None, lambda line: None, placed=True)
        assert not planner._cost.level(CODES) and planner._cost.may(CODES, 1) == kept


def test_phases_between_steps_count_them(tmp_path):
    """Those whose programs get the copies; the others come before or after."""
    data = dataclasses.replace(make_config(tmp_path).data, eval="held out")
    found = []
    for kept in (True, False):
        trainer = trainer_of(tmp_path / str(kept), kept, data=data)
        model, planner = trainer.model, trainer.planner
        of_plan = (planner.cost, planner.forecast, planner.device, *phase_sections(trainer.config))
        phases = phases_of(model.prepared, model.trainable, *of_plan)
        found.append({phase.name: phase.device_bytes for phase in phases})
    more = {
        name for name, size in found[0].items() if size - found[1][name] == trainer.planner.cost.movables[CODES].bytes
    }
    assert more == {"step", "evaluate", "save"} & found[0].keys()
    assert all(size == found[1][name] for name, size in found[0].items() if name not in more)
