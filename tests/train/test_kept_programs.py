"""Programs that a later start loads without tracing them: which, and that they are the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxtune
from jaxtune.models.generation import ready, slots
from jaxtune.models.generation.adapters import Adapter
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.lora import without_adapter
from jaxtune.models.programs import kept as kept_programs
from jaxtune.models.programs import room, surroundings
from jaxtune.models.programs.digests import Digests
from jaxtune.models.programs.kept import Function, Request, programs_of
from jaxtune.system.private_jax import compilation_cache
from jaxtune.system.program_cache import in_use
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import CheckpointConfig, MeshConfig, OptimConfig, ScheduleConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.trainer import Trainer
from tests import patience
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

# ---- programs

MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
WHOLE = NamedSharding(MESH, PartitionSpec())


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=WHOLE)


def arguments_of(tensors: dict) -> tuple:
    """Tensors and the optimizer's state."""
    state = jax.eval_shape(optax.adam(1e-3).init, tensors)
    return tensors, jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), state)


def request_of(**changes) -> Request:
    """(updates, states) of an optimizer of two tensors: trees like arguments, of which some are donated."""
    arguments = arguments_of({"a": shape(3, 2), "b": shape(2)})
    return Request(optax.adam(1e-3).update, arguments, WHOLE, MESH, {}, **changes)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Programs are kept, apart from those of other tests."""
    monkeypatch.setattr(kept_programs, "cache_of_programs", in_use)
    monkeypatch.setattr(kept_programs, "_FORMAT", str(tmp_path))


@pytest.fixture
def lowerings(monkeypatch):
    """The functions that were lowered."""
    functions, lowered = [], Request.lowered

    def lowers(request, traced):
        functions.append(request.function)
        return lowered(request, traced)

    monkeypatch.setattr(Request, "lowered", lowers)
    return functions


def key_of(request: Request) -> str | None:
    return request.key(request.traced(), Digests())


def arrays(request: Request) -> tuple:
    """The same random numbers each time, as a program may take their memory."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda a: jax.device_put(random.normal(size=a.shape).astype(a.dtype), WHOLE), request.arguments)


def bits(tree) -> list:
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def test_a_loaded_program_is_as_the_traced_one(kept, lowerings):
    request = request_of(donated=(1,))
    (traced,) = programs_of([request])
    (loaded,) = programs_of([request])
    assert len(lowerings) == 1
    given, again = arrays(request), arrays(request)
    expected, result = traced(*given), loaded(*again)
    assert jax.tree.structure(expected) == jax.tree.structure(result) and bits(expected) == bits(result)
    assert bits(loaded(*arrays(request))) == bits(expected)  # the second call takes JAX's fast path
    assert [leaf.is_deleted() for leaf in jax.tree.leaves(again)] == [
        leaf.is_deleted() for leaf in jax.tree.leaves(given)
    ]
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(again))
    assert str(loaded.memory_analysis()) == str(traced.memory_analysis())
    assert loaded.as_text() == traced.as_text() and loaded.args_info == traced.args_info
    assert loaded.input_shardings == traced.input_shardings and loaded.output_shardings == traced.output_shardings
    with pytest.raises(TypeError):
        loaded({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}, again[1])


CHANGES = {
    "options": lambda request: {"options": {"xla_allow_excess_precision": False}},
    "donated": lambda request: {"donated": (0,)},
    "shardy": lambda request: {"shardy": True},
    "function": lambda request: {"function": optax.adam(1e-3, b1=0.8).update},
    "rate": lambda request: {"function": optax.adam(2e-3).update},
    "out": lambda request: {"out_shardings": (NamedSharding(MESH, PartitionSpec("data")), WHOLE)},
    "shape": lambda request: {"arguments": arguments_of({"a": shape(3, 3), "b": shape(2)})},
    "dtype": lambda request: {"arguments": arguments_of({"a": shape(3, 2, dtype=jnp.float16), "b": shape(2)})},
    "weak": lambda request: {
        "arguments": arguments_of({"a": shape(3, 2), "b": shape(2).update(weak_type=True)}),
    },
}
MESHES = {"device": ("data", 1), "mesh": ("other", 0)}  # the name of the axis, and the device
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_cpu_enable_fast_math=true",
    "JAXTUNE_TUNING": "x",
    "TRITON_DEBUG": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    "MOSAIC_GPU_LLVM_DEBUG_ONLY": "x",
    "MOSAIC_GPU_NVDISASM_PATH": "/x",
}


def moved(request: Request, axis: str, device: int) -> Request:
    """To another mesh of one device."""
    mesh = jax.make_mesh((1,), (axis,), axis_types=MESH.axis_types, devices=jax.devices()[device : device + 1])

    def on_mesh(where: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*[axis for _ in where.spec]))

    arguments = jax.tree.map(lambda leaf: leaf.update(sharding=on_mesh(leaf.sharding)), request.arguments)
    out = jax.tree.map(on_mesh, request.out_shardings)
    return dataclasses.replace(request, mesh=mesh, arguments=arguments, out_shardings=out)


NAMES = st.sets(st.sampled_from([*CHANGES, *MESHES, *ENVIRONMENT]))


@given(NAMES, NAMES)
def test_whatever_decides_a_program_is_in_its_key(a, b):
    def key(names) -> str | None:
        request = request_of()
        for name in sorted(set(names) & set(CHANGES)):
            request = dataclasses.replace(request, **CHANGES[name](request))
        for name in sorted(set(names) & set(MESHES))[-1:]:
            request = moved(request, *MESHES[name])
        with pytest.MonkeyPatch.context() as patch:
            for name in set(names) & set(ENVIRONMENT):
                patch.setenv(name, ENVIRONMENT[name])
            return key_of(request)

    def decided(names) -> set:
        """Of changes of one field, the last in order counts."""
        fields = {"rate": "function", "device": "mesh", "dtype": "shape"}
        last = {fields.get(name, "shape" if name == "weak" else name): name for name in sorted(names)}
        return set(last.values())

    assert key(a) is not None
    assert (key(a) == key(b)) == (decided(a) == decided(b))


@pytest.mark.parametrize(
    "setting",
    [
        lambda patch: jax.default_matmul_precision("highest"),
        lambda patch: jax.numpy_dtype_promotion("strict"),
        lambda patch: patch.setattr(surroundings.versions, "of_kernels", lambda: ("jax 0.1",)),
    ],
)
def test_settings_and_versions_are_in_the_key(setting, monkeypatch):
    request = request_of()
    before = key_of(request)
    with setting(monkeypatch) or contextlib.nullcontext():
        assert key_of(request) != before
    monkeypatch.undo()
    assert key_of(request) == before


@pytest.mark.parametrize("kept_ones", [0, 1, 2])
def test_work_meanwhile_is_done_before_the_last_program_is_there(kept, monkeypatch, kept_ones):
    """Programs that are loaded or compiled wait for the work, for at most half a minute; a lone kept one is waited
    for, as others are lowered after it."""
    requests = [request_of(), request_of(donated=(1,))]
    for request in requests[:kept_ones]:
        programs_of([request])
    is_done, in_time = threading.Event(), []

    def late(build):
        def wait(*arguments):
            in_time.append(is_done.wait(patience.SECONDS))
            return build(*arguments)

        return wait

    monkeypatch.setattr(kept_programs, "_compiled", late(kept_programs._compiled))
    if kept_ones == 2:
        monkeypatch.setattr(kept_programs, "_loaded", late(kept_programs._loaded))
    programs_of(requests, is_done.set)
    assert in_time == [True] * (2 if kept_ones != 1 else 1)


@pytest.mark.parametrize("kept_ones", [0, 1, 2])
def test_programs_are_asked_for_their_memory_by_the_threads_that_have_them_first(kept, monkeypatch, kept_ones):
    """Two tenths of a second of a deep one, for which nothing else need wait."""
    requests, asked = [request_of(), request_of(donated=(1,))], []
    for request in requests[:kept_ones]:
        programs_of([request])

    class Noting(room.Secured):
        def memory_analysis(self):
            asked.append(threading.current_thread().name.partition("_")[0])
            return super().memory_analysis()

    monkeypatch.setattr(room, "is_limited", lambda devices: True)
    monkeypatch.setattr(room, "Secured", Noting)
    programs = programs_of(requests)
    assert asked == ["compile"] * 2
    plain = [request.lowered(request.traced()).compile().memory_analysis() for request in requests]
    sizes = [(program.memory_analysis(), memory) for program, memory in zip(programs, plain, strict=True)]
    assert all(a.temp_size_in_bytes == b.temp_size_in_bytes for a, b in sizes)
    assert all(a.output_size_in_bytes == b.output_size_in_bytes > 0 for a, b in sizes)
    function, x = Function(jnp.sin, 0), jnp.ones(3)
    kept_programs.prepare([function.call(x)])
    assert not isinstance(function.program(x), room.Secured)  # which any thread may call


def test_programs_are_written_when_asked(kept, lowerings):
    """Of a rate of their own, so that JAX has no executable of an earlier test either."""
    request = dataclasses.replace(request_of(), function=optax.adam(time.time_ns() % 10**6 * 1e-9).update)
    later: list = []
    (program,) = programs_of([request], later=later)
    assert in_use().get(key_of(request)) is None and len(later) == 1
    later.pop()()
    (loaded,) = programs_of([request], later=later)
    assert len(lowerings) == 1 and bits(loaded(*arrays(request))) == bits(program(*arrays(request)))


class Pending(Callback):
    """How many programs were not written yet when each step was out; raises after `fails`."""

    def __init__(self, fails: int = 0):
        self.trainer, self.fails, self.counts = None, fails, []

    def between(self, moment):
        self.counts.append(len(self.trainer.engine._unwritten))
        if moment.step == self.fails:
            raise RuntimeError("of the user")


def run_with(callback: Pending, folder, **changes) -> None:
    callback.trainer = Trainer(lora_model(), None, make_config(folder, **changes), dataset(documents(24)))
    callback.trainer.callbacks = (callback,)
    callback.trainer.train()


def test_a_run_writes_its_programs_after_its_first_step(kept, lowerings, tmp_path):
    """Also one of a single step, and one that fails in it."""
    pending = Pending()
    run_with(pending, tmp_path / "first", steps=4)
    assert pending.counts[:2] == [2, 2] and not pending.trainer.engine._unwritten and len(lowerings) == 2
    for number, (fails, steps) in enumerate(((1, 4), (0, 1))):
        changes = dict(steps=steps, optim=OptimConfig(learning_rate=1e-3 * (2 + number)))
        pending = Pending(fails)
        with pytest.raises(RuntimeError, match="of the user") if fails else contextlib.nullcontext():
            run_with(pending, tmp_path / f"{number}", **changes)
        lowered = len(lowerings)
        run_with(Pending(), tmp_path / f"{number} again", **changes)
        assert pending.counts == [1] and len(lowerings) == lowered


def test_no_step_waits_for_programs_that_are_written(kept, lowerings, tmp_path, monkeypatch):
    """But the end of the run, also one that fails."""
    keep, in_time, last = kept_programs.ahead.keep, [], threading.Event()

    class Last(Pending):
        def between(self, moment):
            if moment.step == 4:
                last.set()
            super().between(moment)

    def late(*arguments):
        in_time.append(last.wait(patience.SECONDS))
        time.sleep(0.2)
        keep(*arguments)

    monkeypatch.setattr(kept_programs.ahead, "keep", late)
    for number, fails in enumerate((0, 4)):
        last.clear()
        changes = dict(steps=4, optim=OptimConfig(learning_rate=1e-3 * (5 + number)))
        with pytest.raises(RuntimeError, match="of the user") if fails else contextlib.nullcontext():
            run_with(Last(fails), tmp_path / f"{number}", **changes)
        lowered = len(lowerings)
        run_with(Pending(), tmp_path / f"{number} again", **changes)
        assert len(lowerings) == lowered
    assert in_time == [True] * 3  # the second has the first one's `accumulate`


DAMAGES = {
    "a flipped bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "cut": lambda content: content[: len(content) // 2],
    "of another key": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_said_and_compiled_anew(kept, lowerings, caplog, damage):
    request, other = request_of(), request_of(donated=(0,))
    programs_of([request, other])
    cache = in_use()
    path, foreign = (cache._file(key_of(it)) for it in (request, other))
    change = DAMAGES[damage]
    path.write_bytes(foreign.read_bytes() if change is None else change(path.read_bytes()))
    jax.clear_caches()  # as in another process
    (anew,) = programs_of([request])
    assert len(lowerings) == 3 and f"{path} is not used" in caplog.text
    assert bits(anew(*arrays(request))) == bits(programs_of([request])[0](*arrays(request)))
    assert len(lowerings) == 3


@pytest.mark.parametrize("content", [b"", b"[]", b"[[0], 1, 1]", b"[[0], 1, 1]\n", b'[[0], "x", {}]\n\x80', b"null\n1"])
def test_no_content_of_an_entry_breaks_a_start(kept, lowerings, content):
    """Entries that are sealed but wrong, as another version might write them."""
    cache, request = in_use(), request_of()
    (right,) = programs_of([request])
    for entry in (content, compilation_cache.compress_executable(content)):
        cache.put(key_of(request), entry)
        lowered = len(lowerings)
        (anew,) = programs_of([request])
        assert bits(anew(*arrays(request))) == bits(right(*arrays(request)))
        assert len(lowerings) == lowered + 1


# ---- functions with static arguments


def powers(mesh_like: str, exponent: int, state: dict, scale, more):
    """state: donated."""
    del mesh_like
    raised = jax.tree.map(lambda a: a**exponent * scale, state)
    return raised, (sum(a.sum() for a in jax.tree.leaves(raised)), None if more is None else more + 1)


def operands(size: int, dtype, more: bool) -> tuple:
    state = {"a": jnp.arange(size).astype(dtype), "b": (jnp.ones((2, size), dtype),)}
    return state, np.float32(1.5) if dtype == jnp.float32 else np.int32(2), jnp.zeros(3) if more else None


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([jnp.float32, jnp.int32]), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=5)
def test_a_function_gives_what_jit_gives_and_is_lowered_once_for_equal_calls(calls):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_programs, "cache_of_programs", in_use)
        patch.setattr(kept_programs, "_FORMAT", f"of functions {time.time()}")
        lowered, real = [], Request.lowered
        patch.setattr(Request, "lowered", lambda request, traced: lowered.append(request) or real(request, traced))
        for _ in range(2):  # the second as another process, which has none in memory
            function = Function(powers, 2, donated=(0,))
            for exponent, size, dtype, more in calls:
                arguments = operands(size, dtype, more)
                results = function("x", exponent, *arguments)
                expected = jax.jit(powers, static_argnums=(0, 1))("x", exponent, *operands(size, dtype, more))
                assert jax.tree.structure(results) == jax.tree.structure(expected) and bits(results) == bits(expected)
                assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arguments[0]))
            assert len(lowered) == len(set(calls))


def test_a_program_that_is_begun_has_the_caller_s_contexts(kept):
    """In a thread they are JAX's defaults."""
    x = jnp.ones(3, jnp.int32)
    for is_wide in (True, False):
        function = Function(jnp.sum, 0)
        with jax.enable_x64(is_wide):
            kept_programs.begin([function.call(x)])
            for thread in threading.enumerate():
                if thread.name.startswith("prepare"):
                    thread.join(patience.SECONDS)
            assert function.has(function.call(x)) == (not is_wide)
            assert function(x).dtype == jax.jit(jnp.sum)(x).dtype == (jnp.int64 if is_wide else jnp.int32)


def test_a_function_runs_where_its_arguments_are(kept, lowerings, monkeypatch):
    function = Function(powers, 2)
    for device in jax.devices()[:2] * 2:
        raised, _ = function("x", 2, *jax.device_put(operands(2, jnp.float32, False), device))
        assert raised["a"].devices() == {device}
    assert len(lowerings) == 2
    arguments = operands(4, jnp.float32, False)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spread = jax.device_put(arguments, NamedSharding(mesh, PartitionSpec()))
    assert bits(function("x", 2, *spread)) == bits(powers("x", 2, *arguments)) and len(lowerings) == 2
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
    assert bits(function("x", 2, *jax.device_put(arguments, on_host))) == bits(powers("x", 2, *arguments))


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.3, "top_logprobs": 2}, {"adapter": "one"}],
    ids=["plain", "more", "adapters of rows"],
)
def test_a_sampler_of_loaded_programs_samples_the_same(kept, lowerings, monkeypatch, options):
    model, prompts = lora_model(layers=2), [[1, 2, 3], [4] * 20, [5]]
    adapters = {"one": Adapter.of(model)} if "adapter" in options else {}
    model = without_adapter(model) if adapters else model

    def sampled() -> list:
        slots.programs.cache_clear()
        with Sampler(model, slots=2, length=64, adapters=adapters) as sampler:
            rows = list(sampler.run(prompts, 20, temperature=1.0, seed=3, **options))
        return [(row.ids, row.logprobs, row.top_logprobs) for row in rows]

    compiled = sampled()
    count = len(lowerings)
    assert count >= 3 and sampled() == compiled and len(lowerings) == count
    monkeypatch.setattr(kept_programs, "cache_of_programs", lambda: None)
    assert sampled() == compiled and len(lowerings) == count
    slots.programs.cache_clear()


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 2}, {"temperature": 0.0}])
def test_the_program_that_is_begun_is_that_of_the_first_round(kept, lowerings, monkeypatch, options):
    begun, begin = [], ready.begin
    monkeypatch.setattr(ready, "begin", lambda calls: (begun.extend(calls), begin(calls)))
    slots.programs.cache_clear()
    with Sampler(lora_model(layers=2), slots=2, length=64) as sampler:
        list(sampler.run([[1, 2, 3], [4, 5]], 9, **{"temperature": 1.0, "seed": 3} | options))
    (call,) = begun
    assert call.function.has(call)
    assert len([function for function in lowerings if "function decode" in str(function)]) == 1
    slots.programs.cache_clear()


# ---- runs


def trained(output: Path, **changes) -> tuple[list, list]:
    """(losses, bits of the adapter) of a run with an evaluation."""
    config = make_config(output, steps=3, optim=OptimConfig(learning_rate=1e-2), **changes)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval="held out"))
    trainer = Trainer(lora_model(layers=2), None, config, dataset(documents(24)), dataset(documents(6, seed=1)))
    weights = nnx.state(trainer.train(), nnx.Param)
    return [line.get("loss") for line in trainer.history], bits(weights)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(2, 2)], ids=["one device", "four"])
def test_a_run_of_kept_programs_gives_the_same_bits(kept, lowerings, tmp_path, mesh):
    first = trained(tmp_path / "first", mesh=mesh)
    names = [function.__name__ for function in lowerings]
    assert names == ["accumulate", "update", "evaluate"]
    assert trained(tmp_path / "second", mesh=mesh) == first and len(lowerings) == 3
    other = trained(tmp_path / "third", mesh=mesh, schedule=ScheduleConfig(name="linear"))
    assert [function.__name__ for function in lowerings[3:]] == ["update"] and other != first


_IMPORTS = """
import contextlib, importlib, os, pkgutil
import jax, jaxtune
from jaxtune.models.programs import surroundings
from jaxtune.pallas import versions

before, environment = surroundings.of(jax.local_devices()), dict(os.environ)
names = ["jax.experimental.mosaic.gpu", "jax.experimental.pallas.triton", "orbax.checkpoint", "transformers"]
names += [module.name for module in pkgutil.walk_packages(jaxtune.__path__, "jaxtune.")]
for name in names:
    if not name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of an extra
            importlib.import_module(name)
versions.of_kernels.cache_clear()
print(environment != dict(os.environ), before == surroundings.of(jax.local_devices()))
"""


_KEY = """
import jax
from jaxtune.models.programs import digests, surroundings
print(digests.Digests().of(surroundings.of(jax.local_devices())).hex())
"""


def test_another_toolkit_gives_another_key(tmp_path):
    """It has another compiler of kernels, whose version no package tells."""

    def key(**environment: str) -> str:
        before = {name: value for name, value in os.environ.items() if name != "CUDA_ROOT"}
        environment = before | {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])} | environment
        done = subprocess.run([sys.executable, "-c", _KEY], capture_output=True, text=True, env=environment, check=True)
        return done.stdout

    keys = [key(), key(CUDA_ROOT=str(tmp_path / "a")), key(CUDA_ROOT=str(tmp_path / "b"))]
    assert len({*keys}) == 3 and key() == keys[0]


def test_no_import_changes_a_key():
    """Mosaic names its folders in the environment, at its first use: after a program that was traced."""
    environment = {name: value for name, value in os.environ.items() if name not in surroundings._OF_MOSAIC}
    environment["PYTHONPATH"] = str(Path(jaxtune.__file__).parents[1])
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr


def test_a_run_that_samples_writes_its_programs_at_a_save(kept, lowerings, tmp_path, monkeypatch):
    """Sampling would wait for Python's lock."""
    monkeypatch.setattr(BatchSource, "needs_model", True)
    pending = Pending()
    run_with(pending, tmp_path, steps=5, checkpoint=CheckpointConfig(every_steps=3, every_minutes=None))
    assert pending.counts == [2, 2, 2, 0, 0]
