"""Runs whose frozen token embedding is on the host, and plans that have it there. Those of per-layer embeddings, by the
same code, are in test_gemma4_run.py."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from step_costs import costs_of
from tiny import CONFIGS

from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.generation.generate import generate
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.registry import config_from_hf
from jaxtune.train import app
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    ModelConfig,
    ObjectiveConfig,
    TrainConfig,
)
from jaxtune.train.engine import trained_model
from jaxtune.train.engine.programs import Engine
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.teachers import with_teacher
from jaxtune.train.planning import devices
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.movables import left_on_host
from jaxtune.train.planning.movables.embeddings import TABLES
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.loading import loading
from tests.train.data.conftest import make_tokenizer
from tests.train.test_gemma4_run import FEW, HELD_OUT, TRAIN, hosted_model, same_run, trainer_of
from tests.train.test_preference import pair_set, pairs
from tests.train.tiny_runs import assert_same, dataset, make_config

UNTIED = CONFIGS["llama_yarn"]
BOTH = FEW | {"tie_word_embeddings": False}  # of Gemma 4: a scaled embedding, and per-layer embeddings


# ---- runs


@pytest.mark.full
@pytest.mark.parametrize("hf", (UNTIED, BOTH), ids=("untied", "both tables"))
def test_a_run_with_the_embedding_on_the_host_is_the_same_run(tmp_path, hf):
    """Packed rows in two micro-batches with dropout and noise, and evaluations: losses, and the trained model."""
    changes = dict(
        evaluation=EvaluationConfig(every_steps=2),
        data=dataclasses.replace(make_config(tmp_path).data, eval="held out"),
        adapter=AdapterConfig(r=4, lora_alpha=8, lora_dropout=0.1),
        neftune_noise_alpha=5.0,
    )
    rows = dataset(TRAIN), dataset(HELD_OUT)
    model = functools.partial(hosted_model, "bfloat16", hf, lora_dropout=0.1)
    hosted, on_device = (
        trainer_of(tmp_path / str(on_host), on_host, rows, model=model(), **changes) for on_host in (True, False)
    )
    models = same_run(hosted, on_device)
    names = {"embedding", "per_layer"} if hf is BOTH else {"embedding"}
    assert hosted.engine.tables.keys() == names and on_device.engine.tables == {}
    assert all(isinstance(table, np.ndarray) for table in hosted.engine.tables.values())
    frozen = [one.model.placed_frozen(one.engine)["embedding"]["weight"].shape[0] for one in (hosted, on_device)]
    assert frozen == [0, hf["vocab_size"]]
    words = "token embedding and table of per-layer embeddings" if hf is BOTH else "token embedding"
    (line,) = [line for line in hosted.planner.lines() if "embedding" in line]
    assert line.startswith(f"  {words} on the host (0.00 GB); {'their' if hf is BOTH else 'its'} rows of each batch")
    for model in models:  # what computes with the model finds its embedding beside the other weights
        assert isinstance(model.embedding.weight.get_value(), jax.Array)
    np.testing.assert_array_equal(*(model(jnp.asarray([[1, 5, 9]])) for model in models))


@pytest.mark.full
def test_the_device_has_the_rows_of_two_steps(tmp_path, monkeypatch):
    """Those of a step are loaded once the step two before is done."""
    load_step, loaded = Engine.load_step, []
    trainer = trainer_of(tmp_path, True, model=hosted_model("bfloat16", UNTIED), steps=6)

    def loading_step(engine, step, *arguments):
        loaded.append((step, len(trainer.history)))
        return load_step(engine, step, *arguments)

    monkeypatch.setattr(Engine, "load_step", loading_step)
    trainer.train()
    assert [step for step, _ in loaded] == list(range(6))
    assert all(done >= step - 1 for step, done in loaded)


@pytest.mark.full
def test_a_checkpoint_may_be_gone_on_with_on_either_side(tmp_path):
    changes = dict(checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3), micro_batches=1)
    whole = trainer_of(tmp_path / "run", True, model=hosted_model("bfloat16", UNTIED), **changes)
    trained = whole.train()
    assert whole.planner.plan.to_record()["embeddings"] == "host"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    again = trainer_of(tmp_path / "run", False, model=hosted_model("bfloat16", UNTIED), **changes)
    again.planner._cost = again.planner._cost.limited({"embeddings": (0, 0)})
    assert_same(trained, again.train())
    assert again.engine.tables == {} and len(again.history) == 2


@pytest.mark.full
@pytest.mark.parametrize("objective", ("distill", "dpo"))
def test_teachers_and_references(tmp_path, objective):
    """A teacher has an embedding of its own, on the device; a reference reads the run's rows."""
    settings = dict(teacher="given", beta=0.5, on_policy=0.0) if objective == "distill" else {}
    data = make_config(tmp_path).data
    changes = dict(
        objective=ObjectiveConfig(objective, **settings),
        data=data if objective == "distill" else dataclasses.replace(data, length=24),
        steps=2,
        micro_batches=1,
    )
    rows = None if objective == "distill" else (pair_set(pairs(8)), None)

    def trainer(on_host: bool):
        model = hosted_model("bfloat16", UNTIED)
        if objective == "distill":
            model = with_teacher(model, model_from_config(UNTIED, jax.random.key(7), "bfloat16"))
        return trainer_of(tmp_path / str(on_host), on_host, rows, model=model, **changes)

    same_run(trainer(True), trainer(False))


@pytest.mark.full
def test_a_returned_model_generates_wherever_its_embedding_is(tmp_path, monkeypatch):
    """Without room for it on the device, the embedding stays on the host."""
    model = hosted_model("float32", UNTIED)
    prompt = [[1, 5, 9, 4]]
    here = generate(model, prompt, max_new_tokens=4)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(trained_model.partition, "put", full)
        assert isinstance(trained_model.with_embedding_on_device(model).embedding.weight.get_value(), np.ndarray)
    placed = trained_model.with_embedding_on_device(model)
    assert isinstance(placed.embedding.weight.get_value(), jax.Array)
    assert generate(placed, prompt, max_new_tokens=4) == here


def test_a_pass_without_the_rows_is_refused():
    model = hosted_model("float32", UNTIED)
    model.embedding.weight.set_value(np.zeros((0, 64), np.float32))
    assert model.needs_rows
    with pytest.raises(ValueError, match="the token embedding is on the host: this pass must be given its rows"):
        model(jnp.asarray([[1, 5, 9]]))


# ---- loading


@pytest.mark.full
def test_the_command_trains_with_the_embedding_on_the_host(tmp_path, monkeypatch):
    """From the files to the merged model, whose embedding is the base's."""
    hf = UNTIED | {"vocab_size": 8192}
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
    with loading(config) as (weights, _, _):
        assert isinstance(weights.result().take().embedding.weight.get_value(), np.ndarray)
    with loading(config, trains=False) as (_, _, loaded):  # for evaluations, whose passes have no plan for it
        pass
    assert isinstance(loaded.embedding.weight.get_value(), jax.Array)
    apart = dataclasses.replace(find_device("cpu"), link=1e9)  # as if the host had a memory of its own
    monkeypatch.setattr(devices, "find_device", lambda *arguments, **options: apart)
    with loading(config) as (_, _, model):
        needed = choose(step_cost(model, StepSpec.of(config)), StepSpec.of(config), apart, None)
    assert not needed.plan.level("embeddings")
    budget_gb = (needed.peak_bytes - 8192 * 64 * 2 / 2) / 2**30
    config = dataclasses.replace(config, memory=MemoryConfig(plan="keep", budget_gb=budget_gb))
    tables, place = [], Engine.place

    def placing(engine, *arguments):
        tables.append(engine.tables["embedding"])
        return place(engine, *arguments)

    monkeypatch.setattr(Engine, "place", placing)
    assert app.run(config) == 0
    assert len(tables) == 2 and all(isinstance(table, np.ndarray) for table in tables)
    merged, base = (from_pretrained(folder)[0] for folder in (tmp_path / "run" / "merged", tmp_path / "base"))
    np.testing.assert_array_equal(*(model.embedding.weight.get_value() for model in (merged, base)))
    assert not jnp.array_equal(*(model.layers[0].mixer.q_proj.weight.get_value() for model in (merged, base)))


# ---- where the plan has the embedding


def config_of(load_in=None, **changes) -> TrainConfig:
    changes = dict(adapter=AdapterConfig()) | changes
    model, data = ModelConfig(path="none", load_in=load_in), DataConfig(train="none", length=2048)
    return TrainConfig(model=model, data=data, rows_per_step=8, output="none", **changes)


@functools.cache
def parts_of_8b():
    config = config_of("nf4")
    return costs_of(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), config), config


@pytest.mark.full
def test_the_plan_has_the_embedding_on_the_host_where_memory_is_short():
    parts, config = parts_of_8b()
    device = find_device("H200")
    size, rows = 128_256 * 4096 * 2, 2 * 8 * 2048 * 4096 * 2  # of the table, and of two steps
    table = parts.movables["embeddings"]
    assert (table.bytes, table.names) == (size, ("embedding",))
    ample, short = (choose(parts, StepSpec.of(config), device, budget) for budget in (None, 15e9))
    there = choose(parts.limited({"embeddings": (0, 0)}), StepSpec.of(config), device, 15e9)
    assert not ample.plan.level("embeddings") and short.plan.level("embeddings")
    assert there.step_seconds > 1.002 * short.step_seconds
    assert short.parts["rows of embeddings on the host"] == rows
    assert there.parts["frozen weights"] - short.parts["frozen weights"] == size


@pytest.mark.full
def test_an_embedding_that_gains_less_than_its_rows_take_stays():
    parts, config = parts_of_8b()
    many = parts.reshaped(rows=32)
    forecast = choose(many, StepSpec.of(dataclasses.replace(config, rows_per_step=32)), find_device("H200"), 15e9)
    assert parts.movables["embeddings"].bytes < 2 * 32 * 2048 * 4096 * 2 and not forecast.plan.level("embeddings")


@pytest.mark.full
def test_embeddings_that_stay_on_the_device():
    """Tied to the head, trained, of a run that samples, or of a model that its caller keeps there."""
    shapes = {name: config_from_hf(hf) for name, hf in (("untied", UNTIED), ("tied", CONFIGS["llama"]))}

    def bytes_of(name: str, config: TrainConfig) -> float:
        return costs_of(shapes[name], config).movables["embeddings"].bytes

    def loaded(config: TrainConfig, tied: bool) -> list[str]:
        tied = tied and objective_of(config.objective).head.is_text
        return left_on_host(config.adapter, StepSpec.of(config).generates, tied)

    lora = config_of()
    assert bytes_of("untied", lora) == 128 * 64 * 2
    assert bytes_of("tied", lora) == 0.0
    scores = config_of(objective=ObjectiveConfig("reward"))
    assert bytes_of("tied", scores) == 128 * 64 * 2  # its head is another
    whole = config_of(adapter=AdapterConfig(modules_to_save=("embed_tokens",)))
    samples = config_of(objective=ObjectiveConfig("grpo", reward_funcs=("exact_match",)))
    for config in (whole, samples, config_of(adapter=None)):
        assert bytes_of("untied", config) == 0.0 and TABLES["embedding"] not in loaded(config, tied=False)
    assert [TABLES["embedding"] in loaded(lora, tied) for tied in (True, False)] == [False, True]
    assert TABLES["embedding"] in loaded(scores, tied=True)
    model = hosted_model("float32", UNTIED)
    assert step_cost(model, StepSpec.of(lora)).movables["embeddings"].bytes > 0.0
    graph, state = nnx.split(model)
    assert step_cost(nnx.merge(graph, jax.device_put(state)), StepSpec.of(lora)).movables["embeddings"].bytes == 0.0
