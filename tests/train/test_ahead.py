"""Executables of kept programs that a command loads before it asks for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxtune
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.programs import ahead
from jaxtune.models.programs import kept as kept_programs
from jaxtune.models.programs.digests import Digests
from jaxtune.models.programs.kept import Request, programs_of
from jaxtune.system import early_import, invocation, processes, program_cache
from jaxtune.system.private_jax import compilation_cache
from jaxtune.system.program_cache import ProgramCache, in_use
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

_ASK = """
import sys
from jaxtune.system import timing
timing._SHOWN = 0
from jaxtune import cli
cli.process(["generate"])
"""


def on(*devices: int, size: int = 8) -> Request:
    """A program for these of the devices; no mesh for a single one."""
    if len(devices) == 1:
        where, mesh = SingleDeviceSharding(jax.devices()[devices[0]]), None
    else:
        chosen = [jax.devices()[device] for device in devices]
        mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=chosen)
        where = NamedSharding(mesh, PartitionSpec("x"))
    return Request(jax.nn.relu, (jax.ShapeDtypeStruct((size, 8), jnp.float32, sharding=where),), where, mesh, {})


def ran(*requests: Request) -> None:
    """Prepares the programs, and compares what they give."""
    for request, program in zip(requests, programs_of(requests), strict=True):
        values = np.linspace(-1, 1, request.arguments[0].size, dtype=np.float32).reshape(request.arguments[0].shape)
        result = program(jax.device_put(values, request.arguments[0].sharding))
        np.testing.assert_array_equal(result, np.maximum(values, 0))


@pytest.fixture
def start(monkeypatch, tmp_path) -> Callable[..., None]:
    """Makes this process one that has just been started, with these words. Its loads begin at once."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    jaxtune.use_program_cache()
    compilation_cache.reset_cache()  # JAX's is of the other folder
    monkeypatch.setattr(kept_programs, "cache_of_programs", in_use)
    monkeypatch.setattr(ahead.timing, "process_start", ahead.time.monotonic)

    def start(*words: str) -> None:
        jax.clear_caches()
        monkeypatch.setattr(ahead, "_process", ahead._Process())
        monkeypatch.setattr(invocation, "_words", list(words))

    yield start
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The name of the thread that loads, for each executable that is loaded."""
    loaded, load = [], ahead.load

    def loads(key, cache, devices):
        executable = load(key, cache, devices)
        loaded.append(threading.current_thread().name)
        return executable

    monkeypatch.setattr(ahead, "load", loads)
    return loaded


def begun(*about: str) -> None:
    """`begin`, and what it loads is there."""
    ahead.begin(*about)
    for future in list(ahead._process.loading.values()):
        with contextlib.suppress(Exception):
            future.result(60)


def test_only_programs_of_the_first_device_are_loaded_ahead(start, loads):
    """XLA ends a process that loads a program of another number of devices."""
    requests = [on(0), on(1), on(0, 1), on(1, 0)]
    for _ in range(2):
        start("train", "recipe")
        begun("recipe")
        ran(*requests)
    assert loads.count("import") == 1 and len(loads) == len(requests)


@pytest.mark.parametrize("devices", [(0,), (1,), (0, 1), (1, 0)])
def test_an_entry_is_loaded_on_its_own_devices_only(start, devices):
    start()
    request = on(*devices)
    ran(request)
    cache, key = in_use(), request.key(request.traced(), Digests())
    for others in ((0,), (1,), (0, 1), (1, 0)):
        loaded = ahead.load(key, cache, [jax.devices()[device] for device in others])
        assert (loaded is not None) == (others == devices)


def test_the_library_of_kernels_is_named(start, monkeypatch, tmp_path):
    """Else XLA compiles the kernels of each loaded program again."""
    (library := tmp_path / "libmosaic_gpu_runtime.so").touch()
    bindings = types.SimpleNamespace(__file__=str(tmp_path / "_mosaic_gpu_ext.so"))
    monkeypatch.setitem(
        sys.modules, f"{program_cache.lib.__name__}.mosaic_gpu", types.SimpleNamespace(_mosaic_gpu_ext=bindings)
    )
    monkeypatch.setenv(program_cache._MOSAIC, "")  # taken away again after the test
    monkeypatch.delenv(program_cache._MOSAIC)
    program_cache.name_mosaic_library.cache_clear()
    try:
        jaxtune.use_program_cache()
    finally:
        program_cache.name_mosaic_library.cache_clear()
    assert os.environ[program_cache._MOSAIC] == str(library)


WORDS = st.text() | st.sampled_from(["x" * 300, "~nobody-of-this-name/x", "~", "\0", "/" * 5000, "\udcff"])


@given(st.lists(WORDS, max_size=2))
def test_no_word_of_a_user_fails_a_record(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "_process", ahead._Process())
        patch.setattr(invocation, "_words", ["generate", *words])
        patch.setattr(kept_programs, "cache_of_programs", in_use)
        ahead.begin(*words)
        ran(on(0))


@pytest.mark.parametrize("content", [b"[1, 2", b"7", b"null", b"[]", b'{"a": 1}', b'["step-1", null]', b"\xff"])
def test_no_content_of_a_record_fails_a_command(start, content, monkeypatch):
    start("generate")
    in_use().put(ahead._record(["model"]), content)
    begun("model")
    ran(on(0))
    monkeypatch.setattr(ProgramCache, "put", lambda *_: os.stat("nowhere"))
    ran(on(0, size=16))


@pytest.mark.parametrize("startable", range(3))
def test_programs_are_loaded_at_need_where_no_thread_can_be_started(start, loads, monkeypatch, startable):
    requests = [on(0, size=size) for size in (8, 16, 24, 32, 40)]
    start("generate")
    ahead.begin("model")
    ran(*requests)
    start("generate")
    begins, real = [], early_import.begin

    def begin(load):
        if len(begins) == startable:
            raise RuntimeError("can't start new thread")
        begins.append(load)
        return real(load)

    monkeypatch.setattr(early_import, "begin", begin)
    ahead.begin("model")
    ran(*requests)
    assert len(begins) == startable and len(loads) == len(requests)


def test_few_threads_load(start, loads):
    requests = [on(0, size=size) for size in range(8, 88, 8)]
    start("generate")
    ahead.begin("model")
    ran(*requests)
    start("generate")
    gate, real = threading.Event(), ahead.load

    def load(*arguments):
        gate.wait(patience.SECONDS)
        return real(*arguments)

    def importing() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "import"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "load", load)
        before = importing()
        ahead.begin("model")
        assert len(importing() - before) == 4
        gate.set()
        ran(*requests)


ENVIRONMENTS = {
    "model": lambda patch: "other",
    "command": lambda patch: patch.setattr(invocation, "_words", ["chat"]),
    "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "jaxlib": lambda patch: patch.setattr(ahead.surroundings.versions, "of_kernels", lambda: ("jaxlib 0.1",)),
    "devices": lambda patch: patch.setattr(jax, "local_devices", lambda: jax.devices()[:2]),
}


@pytest.mark.parametrize("changed", ENVIRONMENTS)
def test_a_record_is_of_one_model_and_machine(start, loads, monkeypatch, changed):
    start("generate")
    begun("model")
    ran(on(0))
    start("generate")
    with monkeypatch.context() as patch:
        begun(ENVIRONMENTS[changed](patch) or "model")
    assert not loads
    start("generate", "--prompt", "another one")
    begun("model")
    assert len(loads) == 1


def test_what_was_asked_for_or_has_no_use_any_more_is_not_loaded(start, loads, monkeypatch):
    requests = [on(0, size=size) for size in (8, 16)]
    start("generate")
    begun("model")
    ran(*requests)
    start("generate")
    ran(requests[0])
    begun("model")
    assert [thread == "import" for thread in loads] == [False, True]
    start("generate")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "count", lambda: 2)
        begun("model")
    assert not ahead._process.loading


def answers(folder: Path) -> None:
    with Sampler(lora_model(layers=1), slots=1, length=32) as sampler:
        list(sampler.run([[1, 2, 3]], 2))


def trains(folder: Path) -> None:
    Trainer(lora_model(layers=1), None, make_config(folder, steps=1), dataset(documents(8))).train()


@pytest.mark.parametrize("work", [answers, trains])
def test_what_nobody_takes_goes_with_the_first_result(start, tmp_path, work):
    start("generate")
    begun("model")
    ran(on(0))
    start("generate")
    begun("model")
    assert ahead._process.loading
    work(tmp_path / "output")
    assert not ahead._process.loading
    begun("model")
    assert not ahead._process.loading


def test_a_command_loads_ahead_what_it_needed_the_last_time(tmp_path):
    """And does without what is gone, damaged, or not a program."""
    base = Path(jaxtune.__file__).parent / "quickstart" / "base"
    environment = os.environ | {"PYTHONPATH": str(base.parents[2]), "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    def answered() -> tuple[str, set[str]]:
        """(The answer, how programs were made, by the table.)"""
        command = [sys.executable, "-c", _ASK, str(base), "--prompt", "2 + 3?", "--max-new-tokens", "2", "--timing"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr
        table = done.stderr.partition("main thread")[2]
        return done.stdout, {word for word in ("ahead", "compiling") if word in table}

    first, how = answered()
    assert how == {"compiling"}
    for _ in range(2):
        assert answered() == (first, {"ahead"})
    (record,) = tmp_path.glob("ahead-*")
    (executable, *_) = tmp_path.glob("program-*")
    executable.write_bytes(executable.read_bytes()[:-1])
    assert answered()[0] == first
    record.write_bytes(b"[1, 2")
    assert answered()[0] == first
    assert answered() == (first, {"ahead"})
