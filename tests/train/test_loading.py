"""Weights that a thread loads while the run is prepared and compiled: the same run, told of what goes wrong."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from checks import shapes_of
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from random_weights import write_checkpoint
from tiny import CONFIGS
from tiny_models import tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.hf import Pretrained, from_pretrained
from jaxtune.models.lora import get_peft_model, linears, matrices
from jaxtune.models.placement.streams import streamed_layers
from jaxtune.models.programs import kept
from jaxtune.models.registry import config_from_hf
from jaxtune.system import heap
from jaxtune.system.program_cache import use_program_cache
from jaxtune.system.waiting import Handover
from jaxtune.train import app
from jaxtune.train.config import (
    AdapterConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MetricsConfig,
    ModelConfig,
    ObjectiveConfig,
    QatConfig,
)
from jaxtune.train.data.rendering.packaged import PACKAGED
from jaxtune.train.engine import trained_model
from jaxtune.train.engine.programs import Engine
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning import cost
from jaxtune.train.planning.devices import Device, find_device
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec import loading
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import LENGTH, assert_same, dataset, documents, lora_model, make_config

ROOT = Path(__file__).resolve().parents[2]


class Weights(Future):
    """Notes in `order` when it is asked for what it holds."""

    def __init__(self, order: list[str]):
        super().__init__()
        self.order = order

    def result(self, timeout=None):
        self.order.append("weights")
        return super().result(timeout)


def shapes(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), nnx.state(tree))


def on_their_way(tmp_path: Path, name: str, make_model, **changes) -> tuple[Trainer, Weights]:
    """A trainer of shapes, and the future of its model, which also notes when the step is compiled."""
    weights = Weights([])
    config = make_config(tmp_path / name, steps=2, **changes)
    trainer = Trainer(nnx.eval_shape(make_model), None, config, dataset(documents(12)), weights=weights)
    compile_ = trainer.engine.compile

    def noting(*arguments):
        programs = compile_(*arguments)
        weights.order.append("compiled")
        return programs

    trainer.engine.compile = noting
    return trainer, weights


@pytest.mark.full
@pytest.mark.parametrize("arrive", ["before", "after"])
@pytest.mark.parametrize("qat", [None, QatConfig(group_size=32, start=1)])
def test_the_step_is_compiled_before_the_weights_are_waited_for_and_the_run_is_the_same(qat, arrive, tmp_path):
    """Those that have arrived are taken while it compiles."""

    def make_model():
        if qat is None:
            return lora_model(use_dora=True)
        return get_peft_model(tiny_model(hidden_size=32, intermediate_size=64, layers=(LayerSpec(),)), r=4)

    config = make_config(tmp_path / "there", steps=2, qat=qat)
    straight = Trainer(make_model(), None, config, dataset(documents(12)))
    want = straight.train()
    trainer, weights = on_their_way(tmp_path, "coming", make_model, qat=qat)
    model = make_model()
    model.base_fingerprint = "0" * 64
    if arrive == "before":
        weights.set_result(Handover(model))
    else:
        compile_ = trainer.engine.compile

        def compiled_at_last(*arguments):
            programs = compile_(*arguments)
            weights.set_result(Handover(model))
            return programs

        trainer.engine.compile = compiled_at_last
    got = trainer.train()
    assert weights.order == (["weights", "compiled"] if arrive == "before" else ["compiled", "weights"])
    assert_same(got, want)
    assert got.base_fingerprint == model.base_fingerprint
    losses = [[line["loss"] for line in run.history] for run in (trainer, straight)]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_run_makes_its_first_state_while_its_programs_compile(tmp_path, monkeypatch):
    is_made, in_time = threading.Event(), []
    made_state, compiled = TrainedModel._made_state, kept._compiled

    def noted(model, engine):
        state = made_state(model, engine)
        is_made.set()
        return state

    def late(*arguments):
        in_time.append(is_made.wait(patience.SECONDS))
        return compiled(*arguments)

    monkeypatch.setattr(TrainedModel, "_made_state", noted)
    monkeypatch.setattr(kept, "_compiled", late)
    Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(12))).train()
    assert in_time == [True, True]


def test_while_programs_compile_garbage_is_looked_for_and_no_array_stays_that_the_first_step_would_have_freed(
    tmp_path, monkeypatch
):
    """The first step looks only at what is younger than the look beside the last program."""
    looks, counts, settle = [], [], heap.settle

    def settling():
        looks.append(len(counts))
        settle()

    def counting():
        after_the_young = len(jax.live_arrays())
        gc.collect()
        counts.append((after_the_young, len(jax.live_arrays())))

    monkeypatch.setattr(heap, "settle", settling)
    monkeypatch.setattr(heap, "_is_ours", lambda: True)  # the tests themselves have frozen what they imported
    monkeypatch.setattr(gc, "freeze", counting)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    gc.collect()  # what other tests left
    Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(12)), keeps_model=False).train()
    assert looks and set(looks) == {0}
    assert [a == b for a, b in counts] == [True]


@pytest.mark.parametrize("b", [0.0, 1.0])
def test_whether_an_adapter_is_new_is_known_before_its_state_is_made(b, tmp_path, monkeypatch):
    model, is_fresh, asked = lora_model(), trained_model._is_fresh, []
    for _, matrix in matrices(model):
        matrix.lora.b.set_value(jnp.full_like(matrix.lora.b[...], b))
    monkeypatch.setattr(trained_model, "_is_fresh", lambda model: asked.append(1) or is_fresh(model))
    trainer = Trainer(model, None, make_config(tmp_path), dataset(documents(12)))
    trainer.model.make_state(trainer.engine)
    assert len(asked) == 1 and not trainer.model.fresh
    trainer.model.begin(trainer.engine, None)
    assert len(asked) == 1 and trainer.model.fresh == (b == 0.0)


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
def test_a_state_made_early_is_the_first_state_and_only_a_small_one_is(most_bytes, times, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_model, "_EARLY_BYTES", most_bytes)
    states = []
    for calls in (times, 0):
        trainer = Trainer(lora_model(), None, make_config(tmp_path), dataset(documents(12)))
        for _ in range(calls):
            trainer.model.make_state(trainer.engine)
        assert (trainer.model._early_state is not None) == (calls > 0 and most_bytes > 0)
        states.append(trainer.model.begin(trainer.engine, None)[0])
        assert trainer.model._early_state is None
    assert_same(*states)


def test_no_state_made_early_outlives_its_plan(tmp_path, monkeypatch):
    """The next plan compiles without it, and may have optimizer states on the host."""
    trainer, there = Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(12))), []
    tried, model = trainer.engine._compiled_and_need, trainer.model

    def fails_once(*arguments):
        there.append(model._early_state is not None)
        done = tried(*arguments)
        there.append(model._early_state is not None)
        return done if len(there) > 2 else (None, None)

    monkeypatch.setattr(trainer.engine, "_compiled_and_need", fails_once)
    monkeypatch.setattr(trainer.planner, "replan", lambda *arguments, **more: None)
    trainer.train()
    assert there == [False, True, False, True] and model._early_state is None


@pytest.mark.parametrize("text", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: something else"])
def test_a_state_that_finds_no_memory_beside_compiling_is_made_after_it(text, tmp_path, monkeypatch):
    made, calls = TrainedModel._made_state, []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError(text)
        return made(*arguments)

    monkeypatch.setattr(TrainedModel, "_made_state", fails_once)
    trainer = Trainer(lora_model(), None, make_config(tmp_path, steps=1), dataset(documents(12)))
    if "memory" in text:
        trainer.train()
        assert len(calls) == 2
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
            trainer.train()


def test_shapes_known_ahead_are_those_of_the_first_state(tmp_path):
    trainer = Trainer(lora_model(), None, make_config(tmp_path), dataset(documents(12)))
    real = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), trainer.model.first_state(trainer.engine))
    ahead = jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), trainer.model.first_shapes(trainer.engine))
    assert ahead == real


@pytest.mark.full
def test_of_a_model_that_is_freed_no_trained_tensor_is_left(tmp_path):
    """Of any kind of layer: the state holds copies, and adapters of experts are gigabytes."""
    experts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    model = Decoder(config_from_hf(CONFIGS["qwen3_5_moe"]), jax.random.key(0), "float32")
    model = get_peft_model(model, r=4, target_parameters=experts)
    starts = [weakref.ref(array) for array in jax.tree.leaves(nnx.state(model, nnx.Param))]
    trainer = Trainer(model, None, make_config(tmp_path, adapter=None), dataset(documents(12)), keeps_model=False)
    del model
    state = trainer.model.first_state(trainer.engine)[0]
    trainer.model.free_given()
    gc.collect()
    assert len(starts) == len(jax.tree.leaves(state.trainable))
    assert not [start for start in starts if start() is not None]


@pytest.mark.full
@pytest.mark.parametrize("qat", [None, QatConfig(group_size=32, start=1)])
def test_a_run_s_programs_are_compiled_side_by_side(qat, tmp_path, monkeypatch):
    """No compilation ends before all have begun: the evaluation's too, and those of the steps before QAT."""
    names = ["accumulate", "evaluate"] * (1 if qat is None else 2) + ["update"]
    begun = threading.Barrier(len(names), timeout=600)

    def compiled(lowered, compiler_options):
        begun.wait()
        return re.search(r"module @jit_(\w+)", lowered.as_text())[1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    model = tiny_model(hidden_size=32, intermediate_size=64, layers=(LayerSpec(),))
    config, rows = make_config(tmp_path, qat=qat), dataset(documents(12))
    trainer = Trainer(get_peft_model(model, r=4), None, config, rows, rows)
    programs = trainer.engine.compile(*trainer.model.first_shapes(trainer.engine))
    steps = [programs] if qat is None else [programs, programs.before_qat]
    found = [name for step in steps for name in (step.accumulate, step.evaluate)]
    assert [*found, programs.update] == names and all(step.update == "update" for step in steps)


@pytest.mark.full
def test_an_error_of_the_weights_is_the_run_s_and_leaves_the_folder_to_another(tmp_path):
    trainer, weights = on_their_way(tmp_path, "run", lora_model)
    weights.set_exception(ValueError("model.safetensors: ended 5 bytes early"))
    with pytest.raises(ValueError, match="ended 5 bytes early"):
        trainer.train()
    mended, weights = on_their_way(tmp_path, "run", lora_model, seed=1)  # another config in the same folder
    weights.set_result(Handover(lora_model()))
    mended.train()
    assert len(mended.history) == 2


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint with a tokenizer, and rows for it."""
    config = CONFIGS["mistral"]
    write_checkpoint(tmp_path / "model", config, shapes_of(config))
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<s>", "</s>", *(f"w{i}" for i in range(100))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="<s>", eos_token="</s>")
    tokens.save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(f"w{(row + i) % 100}" for i in range(10))} for row in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "model"


def command_config(folder: Path, **changes):
    settings = dict(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(
            train=str(folder.parent / "rows.jsonl"),
            length=LENGTH,
            train_on="all",
            cache_dir=str(folder.parent / "cache"),
        ),
        adapter=AdapterConfig(r=2),
        steps=2,
    )
    return make_config(
        folder.parent / "OUT[/b]\x1b[2J", **(settings | changes)
    )  # a name that rich or a terminal may read


@pytest.mark.full
@pytest.mark.parametrize("load_in", [None, "nf4"])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3_moe", "qwen3_5_moe"])
def test_the_model_on_its_way_has_the_shapes_that_were_said(family, load_in, tmp_path):
    config = CONFIGS[family]
    write_checkpoint(tmp_path / "model", config, shapes_of(config))
    wanted = command_config(tmp_path / "model", model=ModelConfig(path=str(tmp_path / "model"), load_in=load_in))
    pretrained = Pretrained(tmp_path / "model", "float32", load_in)
    ahead = cost.abstract_model(pretrained.config, StepSpec.of(wanted).model)
    head = objective_of(wanted.objective).head
    model = loading.adapted(pretrained.load(), head, wanted.model, wanted.adapter, wanted.seed)
    assert shapes(ahead) == shapes(model)


def _addresses(arrays) -> set[int]:
    there = [array for array in arrays if not array.is_deleted()]
    return {shard.data.unsafe_buffer_pointer() for array in there for shard in array.addressable_shards}


def _first_addresses(monkeypatch) -> list[tuple[set[int], set[int]]]:
    """When sums are made and before each first step: (addresses of the run's arrays, of all arrays that have the shape
    of a trained one).
    """
    seen, before = [], jax.live_arrays()  # of other tests

    def look(trained, used):
        gc.collect()
        alive = [array for array in jax.live_arrays() if (array.shape, array.dtype) in trained]
        seen.append((_addresses(jax.tree.leaves((used, before))), _addresses(alive)))

    def shapes(trainable):
        return {(array.shape, array.dtype) for array in jax.tree.leaves(trainable)}

    def zeros(self, state, real=Engine.zero_sums):
        look(shapes(state.trainable), state)
        return real(self, state)

    def first(self, programs, sums, state, frozen, *arguments, real=Engine.first_step, **options):
        look(shapes(state.field("trainable")), (sums, state, frozen))
        return real(self, programs, sums, state, frozen, *arguments, **options)

    monkeypatch.setattr(Engine, "zero_sums", zeros)
    monkeypatch.setattr(Engine, "first_step", first)
    return seen


def test_random_weights_that_train_have_no_second_copy(folder, monkeypatch):
    random = ModelConfig(from_config=str(folder / "config.json"), tokenizer=str(folder))
    config = command_config(folder, model=random, adapter=None, steps=1)
    seen = _first_addresses(monkeypatch)
    assert app.run(dataclasses.replace(config, data=dataclasses.replace(config.data, template="alpaca"))) == 0
    assert len(seen) == 2 and all(alive <= used for used, alive in seen)


def test_the_command_trains_what_it_loads_and_keeps_no_second_copy(folder, monkeypatch, capsys):
    """The start values of the adapter are freed once they are copied."""
    seen = _first_addresses(monkeypatch)
    rows = dataclasses.replace(command_config(folder).data, template="alpaca")
    config = command_config(folder, data=rows)
    assert app.run(config) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and r"OUT[/b]\x1b[2J/merged" in printed.out
    assert len(seen) == 2 and all(alive <= used for used, alive in seen)
    for name in ("adapter", "merged"):  # what a model was trained with travels with it
        tokenizer = load_tokenizer(Path(config.output) / name)
        assert tokenizer.chat_template == PACKAGED["alpaca"].text
        assert tokenizer("w1 w2")["input_ids"] == load_tokenizer(folder)("w1 w2")["input_ids"]
    assert load_tokenizer(folder).chat_template is None
    trained, _ = from_pretrained(Path(config.output) / "merged", dtype="float32")
    base, _ = from_pretrained(folder, dtype="float32")
    moved = [(a[...] != b[...]).any() for (_, a), (_, b) in zip(_weights(trained), _weights(base), strict=True)]
    assert all(moved)


def _weights(model):
    return [(name, linear.weight) for name, linear in linears(model)]


@pytest.mark.parametrize("how", [{}, {"check": True}, {"plan": True}])
def test_a_package_that_is_missing_is_found_before_anything_is_read(how, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    config = command_config(tmp_path / "no model is here", metrics=MetricsConfig(tensorboard=True))
    with pytest.raises(ValueError, match=r"metrics\.tensorboard needs tensorboardX"):
        app.run(config, **how)


@pytest.mark.parametrize("how", [{}, {"check": True}])
def test_an_output_that_is_no_folder_is_found_before_anything_is_read(how, tmp_path):
    (tmp_path / "file").touch()
    config = dataclasses.replace(command_config(tmp_path / "no model"), output=str(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match=r"output = '.*run': .*file is a file; choose a folder"):
        app.run(config, **how)


def test_a_check_does_not_wait_for_the_weights(folder, monkeypatch):
    loaded = []

    def load(pretrained, cancelled, mesh, stay, streams):
        assert cancelled.wait(600)  # set as soon as the report is made
        loaded.append(True)
        raise CancelledError

    monkeypatch.setattr(Pretrained, "load", load)
    assert app.run(command_config(folder), check=True) == 0
    assert loaded == [True]


def test_rows_that_cannot_be_used_end_the_loading(folder, monkeypatch):
    monkeypatch.setattr(Pretrained, "load", lambda pretrained, cancelled, mesh, stay, streams: cancelled.wait(600))
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        app.run(command_config(folder, data=DataConfig(train="none.jsonl", length=LENGTH)))


def test_layers_are_loaded_into_host_memory_as_far_as_there_is_room(tmp_path):
    """Where weights crowd the device, and where memory.plan says of how many layers; no more than it says."""
    config = CONFIGS["mistral"] | {"num_hidden_layers": 5}
    write_checkpoint(tmp_path, config, shapes_of(config))
    pretrained = Pretrained(tmp_path)
    model = nnx.eval_shape(lambda: Decoder(pretrained.config, jax.random.key(0), "bfloat16"))
    sizes = [2 * sum(a.size for a in jax.tree.leaves(nnx.state(layer)) if a.ndim > 1) for layer in model.layers]
    gpu = dataclasses.replace(find_device("H200"), memory_bytes=1e3)

    def level_of(plan: str | None, device: Device) -> int:
        with mock.patch.object(loading, "_device", lambda: device):
            return loading.streamed_level(MemoryConfig(plan=plan), pretrained, [])

    @given(st.integers(0, 2 * sum(sizes)), st.integers(1, 5))
    def check(room, asked):
        gpu_of_host = dataclasses.replace(gpu, host_memory_bytes=4e9 + 2**30 + room, host_bytes=float(room))
        pinned = [sum(sizes[index] for index in streamed_layers(level, 5)) for level in range(6)]
        most = max(level for level in range(6) if pinned[level] <= room)
        assert level_of(None, gpu_of_host) == most
        assert level_of(None, dataclasses.replace(gpu_of_host, memory_bytes=1e12)) == 0
        assert level_of(None, dataclasses.replace(gpu_of_host, link=0.0)) == 0
        assert level_of("recompute", gpu_of_host) == 0
        plan = f"recompute; tile=512; streamed={asked}"
        if asked <= most:
            assert level_of(plan, gpu_of_host) == asked
        else:
            fix = f"streamed={most} or less, or a host" if most else ": a host"
            with pytest.raises(ValueError, match=f"streamed={asked}' pins .* this device may pin .*{fix}"):
                level_of(plan, gpu_of_host)

    check()


def test_as_few_layers_stream_as_leave_rows_room(tmp_path):
    config = CONFIGS["mistral"] | {"num_hidden_layers": 5}
    write_checkpoint(tmp_path, config, shapes_of(config))
    pretrained, gpu = Pretrained(tmp_path), dataclasses.replace(find_device("H200"), link=1e6)
    weights = pretrained.device_bytes()
    pinned = [weights - pretrained.device_bytes(None, pretrained.streaming(level)) for level in range(6)]

    @given(st.integers(1, 2 * weights), st.booleans())
    def check(free, host_has_room):
        room = 2.0 * weights if host_has_room else 0.0
        device = dataclasses.replace(gpu, host_memory_bytes=4e9 + 2**30 + room, host_bytes=room)
        with (
            mock.patch.object(loading, "_device", lambda: device),
            mock.patch.object(loading.load_memory, "free_bytes", lambda: free),
        ):
            level, seconds = loading.least_streamed_level(pretrained)
        there = [weights - size + min(2 * pinned[5] / 5, size) for size in pinned]
        fits = [level for level in range(6) if there[level] <= loading.load_memory.MOST_TO_ANSWER * free]
        assert level == (fits[0] if fits and host_has_room else 0)
        assert seconds == pytest.approx(pinned[level] / 1e6)

    check()


@pytest.mark.parametrize(
    ("how", "changes", "level"),
    [
        ({}, {}, 1),
        ({"trains": False}, {}, 1),
        ({"trains": False}, {"adapter": None}, 1),  # an evaluation, which freezes the model
        ({"trains": False, "streams": False}, {"adapter": None}, 0),
        ({"trains": False}, {"objective": ObjectiveConfig("dpo")}, 1),
        ({"trains": False}, {"adapter": None, "objective": ObjectiveConfig("dpo")}, 0),  # its base is the reference
        ({"trains": False}, {"adapter": None, "objective": ObjectiveConfig("kto")}, 0),
        (
            {"trains": False},
            {"adapter": None, "objective": ObjectiveConfig("distill", teacher="base", on_policy=0.0)},
            0,
        ),
        ({}, {"adapter": None}, 0),
        ({}, {"qat": QatConfig("int8")}, 0),
        ({"trains": False}, {"evaluation": EvaluationConfig(exact_match_rows=2)}, 0),
    ],
    ids=str,
)
def test_what_streams_is_loaded_into_host_memory(how, changes, level, folder, monkeypatch):
    levels = []

    def load(pretrained, cancelled, mesh, stay, level):
        levels.append(level)
        raise CancelledError

    monkeypatch.setattr(Pretrained, "load", load)
    data = dataclasses.replace(command_config(folder).data, eval="held out")
    settings = {"adapter": AdapterConfig(), "memory": MemoryConfig(plan="recompute; streamed=1"), "data": data}
    config = command_config(folder, **(settings | changes))
    with pytest.raises(CancelledError), loading.loading(config, **how) as (weights, *_):
        weights.result()
    assert levels == [level]


def test_a_cancelled_load_ends(folder):
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        Pretrained(folder).load(cancelled)


# ---- what a start does not do


def test_small_programs_are_cached_too_wherever_the_cache_is(monkeypatch, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    try:
        for folder in (None, str(tmp_path)):
            jax.config.update(names[0], folder)
            jax.config.update(names[1], 1.0)
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
            monkeypatch.delenv(names[1].upper(), raising=False)
            use_program_cache()
            assert [getattr(jax.config, name) for name in names] == [str(tmp_path), 0.0]
        jax.config.update(names[1], 2.0)
        monkeypatch.setenv(names[1].upper(), "2")
        use_program_cache()
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 2.0
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


@pytest.mark.full
def test_the_command_imports_no_torch(folder, tmp_path):
    (tmp_path / "installed" / "torch").mkdir(parents=True)
    (tmp_path / "installed" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    metadata = tmp_path / "installed" / "torch-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    script = (
        "import sys; from importlib.util import find_spec; from pathlib import Path; from jaxtune import cli\n"
        "cli.console(['--help']); from jaxtune.models.files.model_folder import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(folder)!r})); assert 'torch' not in sys.modules and find_spec('torch')\n"
        "print(tokenizer.decode(tokenizer(['w3'])['input_ids'][0]))"
    )
    path = os.pathsep.join([str(tmp_path / "installed"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "w3"
