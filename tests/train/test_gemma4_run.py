"""Runs of a tiny Gemma 4 with what E2B and E4B have: last layers that take keys and values of earlier ones, and
per-layer embeddings."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tiny import CONFIGS
from tiny_models import adapted_model

from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.hf import Pretrained, from_pretrained, model_from_config, save_pretrained, save_weights
from jaxtune.models.linear import Linear, Lora, frozen
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement import host_table, partition
from jaxtune.models.registry import config_from_hf
from jaxtune.system.waiting import Handover
from jaxtune.train import app
from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    TrainConfig,
)
from jaxtune.train.engine.programs import Engine
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.movables.embeddings import TABLES
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.plan_text import plan_lines
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.test_preference import pair_set, pairs
from tests.train.tiny_runs import assert_same, dataset, documents, make_config

TABLE = TABLES["per_layer"]
TRAIN, HELD_OUT = documents(16, seed=1), documents(6, seed=2)
HF = CONFIGS["gemma4_shared"]


def lora_model():
    return get_peft_model(model_from_config(HF, jax.random.key(0), "float32"), r=4, lora_alpha=8)


# ---- adapters without a gradient


@pytest.mark.full
def test_every_adapter_of_a_model_that_shares_keys_has_a_gradient(tmp_path):
    """The layers that take keys have no adapter of their own for them, and those of the layers that give them train."""
    trainer = Trainer(lora_model(), None, make_config(tmp_path, steps=4), dataset(TRAIN))
    names = [name for name in trainer.names if "k_proj" in name or "v_proj" in name]
    assert {name.split(".")[1] for name in names} == {"0", "1"}
    trainer.train()
    assert len(trainer.history) == 4


@pytest.mark.full
def test_an_adapter_on_keys_that_a_layer_does_not_use_is_named(tmp_path):
    """As if such a layer had got a projection of its own to keys, which nothing reads."""
    model = lora_model()
    unused = Linear(64, 128, bias=False, std=0.02, key=jax.random.key(1), dtype="float32")
    unused.weight, unused.lora = (
        frozen(unused.weight),
        Lora(128, 8, 0.0, jax.random.normal(jax.random.key(2), (4, 64)), jnp.zeros((128, 4))),
    )
    model.layers[3].mixer.k_proj = unused
    config = make_config(tmp_path, steps=4)
    with pytest.raises(TrainingStopped, match=r"the gradient of 1 adapters .*: layers\.3\.mixer\.k_proj\. Leave"):
        Trainer(model, None, config, dataset(TRAIN)).train()


# ---- the table of per-layer embeddings on the host


FEW = HF | {"num_hidden_layers": 2, "layer_types": HF["layer_types"][:2], "num_kv_shared_layers": 0}


def hosted_model(dtype="float32", hf=FEW, **adapter):
    """Of two layers, with an adapter that is not at its start, and with the tables where loading for a run leaves
    them."""
    model = adapted_model(model_from_config(hf, jax.random.key(0), dtype), r=4, lora_alpha=8, **adapter)
    for table in model.tables.values():
        table.set_value(np.asarray(table.get_value()))
    return model


def trainer_of(output, on_host: bool, rows=None, loads=False, model=None, **changes) -> Trainer:
    """A run of which the plan has the tables on the host, or on the device. loads: its weights come after the plan."""
    settings = dict(adapter=AdapterConfig(r=4, lora_alpha=8), micro_batches=2, steps=4, precision="bf16")
    config = make_config(output, **(settings | changes))
    rows = rows or (dataset(TRAIN), dataset(HELD_OUT))
    model, weights = model or hosted_model("bfloat16"), None
    if loads:
        weights = Future()
        weights.set_result(Handover(model))
        graph, state = nnx.split(model)
        model = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state))
    trainer = Trainer(model, None, config, *rows, keeps_model=False, weights=weights)
    assert not trainer.planner.plan.level("embeddings")  # on a CPU device and host have one memory
    sizes = partition.MeshShape.of(trainer.mesh).to_record()
    plan = trainer.planner.plan.at(embeddings=on_host)
    trainer.planner.adopt(plan.to_record() | sizes)
    trainer.engine.follow_plan()
    assert trainer.planner.plan.level("embeddings") == on_host
    return trainer


def metrics_of(trainer):
    timed = ("seconds", "per_second", "memory", "mfu")
    lines = [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in trainer.history]
    assert len(lines) > 1 and all("loss" in line or "eval_loss" in line for line in lines)
    return lines


def same_run(one: Trainer, other: Trainer):
    """Both run, and are equal in every bit. Returns the two trained models."""
    models = one.train(), other.train()
    assert metrics_of(one) == metrics_of(other)
    assert_same(*models)
    return models


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with the table on the host and one with it on the device, and what they trained."""
    folder = tmp_path_factory.mktemp("runs")
    settings = dict(
        evaluation=EvaluationConfig(every_steps=2),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3),
        data=dataclasses.replace(make_config(folder).data, eval="held out"),
    )
    trainers = [trainer_of(folder / name, name == "host", **settings) for name in ("host", "device")]
    return trainers, same_run(*trainers), settings


@pytest.mark.full
def test_a_run_with_the_table_on_the_host_is_the_same_run(runs):
    """Steps of two micro-batches, and evaluations; no device ever has the table."""
    (hosted, on_device), models, _ = runs
    tables = [model.per_layer.weight.get_value() for model in models]
    assert [isinstance(table, np.ndarray) for table in tables] == [True, False]
    assert hosted.engine.tables["per_layer"] is tables[0] and on_device.engine.tables == {}
    frozen = [trainer.model.placed_frozen(trainer.engine)["per_layer"]["weight"].shape for trainer in runs[0]]
    assert frozen == [(0, 48), (160, 48)]
    (line,) = [line for line in hosted.planner.lines() if "per-layer" in line]
    assert line.startswith("  table of per-layer embeddings on the host (0.00 GB); its rows of each batch are copied")
    assert not [line for line in on_device.planner.lines() if "per-layer" in line]


@pytest.mark.full
def test_the_table_is_written_from_the_host(runs, tmp_path):
    for model, name in zip(runs[1], ("host", "device"), strict=True):
        save_weights(merged_weights(model), tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("host", "device")]
    assert files[0] == files[1]
    tokens = jnp.asarray([[1, 5, 9]])
    np.testing.assert_array_equal(*(model(tokens) for model in runs[1]))


@pytest.mark.full
@pytest.mark.parametrize("on_host", (True, False))
def test_a_run_goes_on_wherever_the_table_is(runs, tmp_path, on_host):
    """From the checkpoint of a run with the table on the host, whose plan it takes if it can."""
    (hosted, _), (trained, _), settings = runs
    shutil.copytree(hosted.output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    resumed = trainer_of(tmp_path / "run", on_host=False, **settings)
    if not on_host:
        resumed.planner._cost = resumed.planner._cost.limited({"embeddings": (0, 0)})
    assert_same(trained, resumed.train())
    assert resumed.planner.plan.level("embeddings") == on_host and resumed.steps_done == 4


@pytest.mark.full
def test_devices_that_share_the_rows(tmp_path):
    changes = dict(mesh=MeshConfig(data=2), steps=2, micro_batches=1, loads=True)
    same_run(*(trainer_of(tmp_path / str(on_host), on_host, **changes) for on_host in (True, False)))


@pytest.mark.full
def test_a_preference_run_and_its_reference(tmp_path):
    """The reference is computed by passes over the rows before the first step, or in each step."""
    for precompute in (False, True):
        changes = dict(
            objective=ObjectiveConfig("dpo", precompute_ref_log_probs=precompute),
            data=dataclasses.replace(make_config(tmp_path).data, length=24),
            steps=2,
            micro_batches=1,
        )
        sets = (pair_set(pairs(8)), None)
        folder = tmp_path / str(precompute)
        same_run(*(trainer_of(folder / str(on_host), on_host, sets, **changes) for on_host in (True, False)))


def test_a_pass_without_the_rows_is_refused():
    model = hosted_model()
    graph, state = nnx.split(model)
    model = nnx.merge(graph, host_table.without_rows(state, host_table.tables_of(state, model.tables)))
    with pytest.raises(ValueError, match="the table of per-layer embeddings is on the host: this pass must be given"):
        model(jnp.asarray([[1, 5, 9]]))


def test_loading_leaves_the_table_on_the_host(tmp_path):
    """In bits and digest as on the device, and it is not counted among the device's bytes."""
    model = model_from_config(HF, jax.random.key(0), "float32")
    save_pretrained(model, tmp_path / "model")
    pretrained = Pretrained(tmp_path / "model", "bfloat16")
    hosted, whole = pretrained.load(stay=[TABLE]), pretrained.load()
    assert_same(hosted, whole)
    table = hosted.per_layer.weight.get_value()
    assert isinstance(table, np.ndarray) and isinstance(whole.per_layer.weight.get_value(), jax.Array)
    assert hosted.base_digest == whole.base_digest
    assert pretrained.device_bytes() - pretrained.device_bytes(stay=[TABLE]) == table.nbytes
    model.per_layer.weight.set_value(model.per_layer.weight.get_value().at[-1, -1].set(jnp.nan))
    save_pretrained(model, tmp_path / "broken")
    with pytest.raises(ValueError, match="not finite in bfloat16: model.embed_tokens_per_layer.weight"):
        Pretrained(tmp_path / "broken", "bfloat16").load(stay=[TABLE])


# ---- where the plan has the table


SETTINGS = dict(
    model=ModelConfig(path="none"), data=DataConfig(train="none", length=2048), rows_per_step=8, output="none"
)


@functools.cache
def e4b(load_in=None, adapter=True):
    config = TrainConfig(**SETTINGS, adapter=AdapterConfig() if adapter else None)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, load_in=load_in))
    return abstract_model(config_from_hf(PUBLISHED["google/gemma-4-E4B-it"]), StepSpec.of(config).model), config


def e4b_costs(load_in=None, adapter=True):
    model, config = e4b(load_in, adapter)
    return step_cost(model, StepSpec.of(config))


def chosen(budget, load_in=None, parts=None):
    model, config = e4b(load_in)
    return choose(parts or step_cost(model, StepSpec.of(config)), StepSpec.of(config), find_device("H200"), budget)


@pytest.mark.full
def test_the_plan_has_the_table_on_the_host_if_that_is_faster():
    ample, short = chosen(None), chosen(22e9)
    assert not ample.plan.level("embeddings") and "embeddings" not in ample.plan.to_record()
    assert short.plan.level("embeddings") and short.peak_bytes <= 22e9
    parts = e4b_costs()
    assert parts.movables["embeddings"].bytes == 262_144 * 42 * 256 * 2
    there = chosen(22e9, parts=parts.limited({"embeddings": (0, 0)}))
    assert there.step_seconds > short.step_seconds
    record = json.loads(json.dumps(short.plan.to_record()))
    assert record["embeddings"] == "host"
    assert StepPlan.from_record(record, parts.shape.num_layers, parts.layers.all_residuals) == short.plan
    rows = 2 * 8 * 2048 * 42 * 256 * 2  # of two steps
    assert short.parts["rows of embeddings on the host"] == rows
    assert ample.parts["frozen weights"] - short.parts["frozen weights"] == parts.movables["embeddings"].bytes


@pytest.mark.full
def test_the_plan_has_the_table_on_the_host_if_nothing_else_fits():
    parts = e4b_costs("nf4").limited({"optimizer_states": (0, 0)})  # the optimizer's stay on the device
    with pytest.raises(PlanError):
        chosen(10e9, "nf4", parts.limited({"embeddings": (0, 0)}))
    assert chosen(10e9, "nf4", parts).plan.level("embeddings")


@pytest.mark.full
def test_a_slow_host_or_one_with_little_memory_gets_no_table(monkeypatch):
    device = find_device("H200")
    model, config = e4b()
    parts = step_cost(model, StepSpec.of(config))
    for other in (dataclasses.replace(device, host_memory_bytes=8e9), dataclasses.replace(device, link=0.0)):
        assert not choose(parts, StepSpec.of(config), other, 22e9).plan.level("embeddings")
    monkeypatch.setattr("jaxtune.train.planning.movables.embeddings._LOOKUP_RATE", 1e7)
    assert not chosen(22e9).plan.level("embeddings")


@pytest.mark.full
def test_tables_that_stay_on_the_device():
    """One that trains, of a run that samples, of weights that are divided, or given on the device."""
    model, config = e4b()
    asked = dataclasses.replace(config.data, eval="held out")
    generates = dataclasses.replace(config, data=asked, evaluation=EvaluationConfig(exact_match_rows=8))
    divided = dataclasses.replace(config, mesh=MeshConfig(fsdp=2))
    samples = dataclasses.replace(config, objective=ObjectiveConfig("grpo", reward_funcs=("exact_match",)))
    for other in (generates, divided, samples):
        assert step_cost(model, StepSpec.of(other)).movables["embeddings"].bytes == 0.0
    assert (
        step_cost(model, StepSpec.of(dataclasses.replace(config, mesh=MeshConfig(data=2)))).movables["embeddings"].bytes
        > 0.0
    )
    assert step_cost(lora_model(), StepSpec.of(config)).movables["embeddings"].bytes == 0.0
    assert step_cost(hosted_model(), StepSpec.of(config)).movables["embeddings"].bytes > 0.0
    parts = e4b_costs(adapter=False)
    assert parts.movables["embeddings"].bytes == 0.0 and parts.movables["embeddings"].trains
    forecast = choose(parts, StepSpec.of(e4b(adapter=False)[1]), find_device("H200"), None)
    assert "  table of per-layer embeddings on the device: it is trained" in plan_lines(
        forecast, parts, find_device("H200"), None
    )


@pytest.mark.full
def test_the_command_trains_with_the_table_on_the_host(tmp_path, monkeypatch):
    """From the files to the merged model, whose table is the base's."""
    hf = FEW | {"vocab_size": 512, "vocab_size_per_layer_input": 8192}
    save_pretrained(model_from_config(hf, jax.random.key(0)), tmp_path / "base", make_tokenizer())
    rows = [{"text": f"a{number} b c d e f"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config(
        tmp_path / "run",
        model=ModelConfig(path=str(tmp_path / "base")),
        data=DataConfig(train=str(tmp_path / "rows.jsonl"), length=16),
        adapter=AdapterConfig(r=2),
        memory=MemoryConfig(plan="keep"),
        micro_batches=1,
        steps=2,
        precision="bf16",
    )
    apart = dataclasses.replace(find_device("cpu"), link=1e9)  # as if the host had a memory of its own
    monkeypatch.setattr(devices, "find_device", lambda *arguments, **options: apart)
    with loading(config) as (_, _, model):
        needed = choose(step_cost(model, StepSpec.of(config)), StepSpec.of(config), apart, None)
    assert not needed.plan.level("embeddings")
    table_bytes = 8192 * 2 * 24 * 2
    budget_gb = (needed.peak_bytes - table_bytes / 2) / 2**30
    config = dataclasses.replace(config, memory=MemoryConfig(plan="keep", budget_gb=budget_gb))
    shown = Console(file=io.StringIO(), width=200)
    tables, place = [], Engine.place

    def placing(engine, *arguments):
        tables.append(engine.tables.get("per_layer"))
        return place(engine, *arguments)

    monkeypatch.setattr(Engine, "place", placing)
    assert app.run(config, console=shown) == 0
    assert len(tables) == 2 and all(isinstance(table, np.ndarray) for table in tables)
    merged, base = (from_pretrained(folder)[0] for folder in (tmp_path / "run" / "merged", tmp_path / "base"))
    np.testing.assert_array_equal(*(model.per_layer.weight.get_value() for model in (merged, base)))
    assert not jnp.array_equal(*(model.layers[0].mixer.q_proj.weight.get_value() for model in (merged, base)))
