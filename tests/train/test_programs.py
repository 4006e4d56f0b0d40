"""What the engine does around the compiler."""

import dataclasses
import functools
import gc
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxtune.models.programs.compiling import compiled
from jaxtune.pallas import dispatch
from jaxtune.system import heap
from jaxtune.train.callbacks import Callback
from jaxtune.train.engine.xla_options import compiler_options, launch_options, update_options
from jaxtune.train.program.step import StepProgram
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import dataset, documents, lora_model, make_config


@pytest.fixture
def engine(tmp_path):
    rows = dataset(documents(8))
    trainer = Trainer(lora_model(), None, make_config(tmp_path), rows)
    return trainer.engine, trainer.model.first_shapes(trainer.engine)


@pytest.mark.full
@pytest.mark.parametrize("name", ["accumulate", "update"])
def test_checks_that_a_program_asks_for_begin_before_it_is_compiled(engine, monkeypatch, name):
    begun, seen, collected = threading.Event(), {}, []
    function, compiled = getattr(StepProgram, name), jax.stages.Lowered.compile

    @functools.wraps(function)
    def traced(*arguments):
        collected.append(gc.isenabled())
        monkeypatch.setattr(dispatch, "_pending", [begun.set])  # as dispatch.first_use holds a check
        return function(*arguments)

    def compile_it(lowered, *arguments, **options):
        module = lowered.compiler_ir().operation.attributes["sym_name"].value
        if module == f"jit_{name}":
            seen[name] = begun.wait(patience.SECONDS)
        return compiled(lowered, *arguments, **options)

    monkeypatch.setattr(StepProgram, name, traced)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_it)
    engine[0].compile(*engine[1])
    assert seen[name]
    assert collected == [False] and gc.isenabled()


@pytest.mark.full
def test_collections_visit_nothing_that_is_older_than_the_steps(tmp_path, monkeypatch):
    """And after the run everything again, unless the caller has frozen objects, as the tests do."""
    monkeypatch.setattr(heap, "_depth", 0)  # of the tests
    counts = []

    class Watch(Callback):
        def between(self, moment):
            counts.append(gc.get_freeze_count())

    def run(name):
        rows = dataset(documents(8))
        Trainer(lora_model(), None, make_config(tmp_path / name, steps=1), rows, callbacks=(Watch(),)).train()
        counts.append(gc.get_freeze_count())

    gc.unfreeze()
    run("first")
    gc.freeze()
    run("second")
    during, after, *of_caller = counts
    assert during > 10_000 and after == 0, counts
    assert min(of_caller) > 10_000, counts


def test_a_program_whose_algorithms_find_no_memory_to_be_timed_in_is_compiled_without_timing_them():
    """As on an H200 with a card's memory that the weights of an 8B filled: XLA wanted a gigabyte for the head's."""
    asked = []

    def compile_it(compiler_options):
        asked.append(compiler_options)
        if compiler_options.get("xla_gpu_autotune_level") != 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
        return "program"

    options = compiler_options("gpu", deterministic=False)
    assert compiled(SimpleNamespace(compile=compile_it), options) == "program"
    assert asked == [options, options | {"xla_gpu_autotune_level": 0}]

    asked.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiled(SimpleNamespace(compile=lambda compiler_options: raised(asked, "INTERNAL: of the test")), options)
    assert len(asked) == 1


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("seconds", [0.03, 0.11, 0.9])
def test_short_steps_are_launched_as_whole_graphs_unless_somebody_says_otherwise(tmp_path, monkeypatch, asked, seconds):
    config = make_config(tmp_path, whole_graphs=asked)
    engine = Trainer(lora_model(), None, config, dataset(documents(8))).engine
    recorded = engine.options
    assert not engine.whole_graphs  # on a CPU
    forecast = dataclasses.replace(engine.planner.forecast, device_seconds=seconds, host_seconds=0.001)
    monkeypatch.setattr(engine.planner, "forecast", forecast)
    devices = np.array([SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(engine, "mesh", SimpleNamespace(devices=devices, size=1, shape=engine.mesh.shape))
    assert engine.whole_graphs == (seconds < 0.1 if asked is None else asked)
    monkeypatch.setattr(engine, "mesh", SimpleNamespace(devices=np.repeat(devices, 2), size=2))
    assert engine.whole_graphs == bool(asked)  # what was not measured is asked for
    assert not launch_options(True).keys() & recorded.keys()  # a resumed run may be launched otherwise


def test_options_of_an_adapters_update_are_xlas_and_of_a_gpu_alone():
    options = update_options("gpu", by_tensor=False)
    assert jax.jit(lambda x: 2 * x).lower(1.0).compile(compiler_options=options)(3.0) == 6.0
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(lambda x: 3 * x).lower(1.0).compile(compiler_options={next(iter(options)): "NO_BOOL"})
    assert not options.keys() & compiler_options("gpu", deterministic=False).keys()
    assert update_options("gpu", by_tensor=True) == update_options("cpu", by_tensor=False) == {}


def test_options_of_graphs_are_xlas_and_flags_of_the_user_stay(monkeypatch):
    options = launch_options(True)
    assert jax.jit(lambda x: 2 * x).lower(1.0).compile(compiler_options=options)(3.0) == 6.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
        jax.jit(lambda x: 3 * x).lower(1.0).compile(compiler_options={next(iter(options)): "NO_SUCH_COMMAND"})
    for name in options:
        monkeypatch.setenv("XLA_FLAGS", f"--{name}=1")
        assert launch_options(True) == {}
    assert launch_options(False) == {}


def raised(asked, message):
    asked.append(message)
    raise jax.errors.JaxRuntimeError(message)
