"""Checkpoints without faults: what comes back, where, and when. The faults have tests/faults."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError
from jaxtune.train.folder.record import compare_meta, require_compatible
from jaxtune.train.loop.saving import SavePolicy

DTYPES = [
    *("bool", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64"),
]


def bits(x) -> bytes:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same(left, right):
    """Same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert bits(x) == bits(y), path


def mesh_of(count: int) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "run") as it:
        yield it


def test_every_dtype_bit_for_bit(checkpointer):
    raw = np.random.default_rng(0).integers(0, 256, (5, 96), dtype=np.uint8)
    state = {}
    for name in DTYPES:
        dtype = jnp.dtype(name)
        if name in ("bool", "int4"):
            state[name] = jnp.asarray((raw % 2 if name == "bool" else raw % 16 - 8.0).astype(dtype))
        else:
            state[name] = jnp.asarray(raw.view(dtype))  # every bit pattern: NaN payloads, infinities, -0.0
            assert bits(state[name]) == raw.tobytes()
    state["scalar"] = jnp.int32(7)
    state["empty"] = jnp.zeros((0, 4), jnp.bfloat16)
    state["key"] = jax.random.key(3)
    state["keys"] = jax.random.split(jax.random.key(4, impl="rbg"), 3)
    state["numpy"] = np.arange(5, dtype=np.int64) << 40
    checkpointer.save(1, state, {})

    step, restored, _ = checkpointer.restore(like=state)
    assert step == 1
    assert_same(restored, state)
    assert isinstance(restored["numpy"], np.ndarray)
    assert jax.random.key_impl(restored["keys"]) == jax.random.key_impl(state["keys"])
    assert bits(jax.random.normal(restored["key"], 4)) == bits(jax.random.normal(state["key"], 4))

    _, restored, _ = checkpointer.restore()
    assert_same(restored, state)
    assert all(isinstance(x, np.ndarray) for name, x in restored.items() if not name.startswith("key"))


def test_optimizer_state_and_nesting(checkpointer):
    params = {"layers": [{"a": jnp.ones((3, 4)), "b": None}, {"a": jnp.full((2,), 2.0), "b": jnp.zeros(1)}]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"params": params, "optimizer": optimizer.init(params), "step": jnp.int32(9)}
    meta = {"config": {"lr": 1e-4, "names": ["a", "b"]}, "cursor": 12, "none": None, "text": "é"}
    checkpointer.save(9, state, meta)
    step, restored, restored_meta = checkpointer.restore(like=jax.eval_shape(lambda: state))
    assert (step, restored_meta) == (9, meta)
    assert_same(restored, state)
    assert checkpointer.restore()[1]["params"]["layers"]["1"]["a"].tolist() == [2.0, 2.0]


def test_donated_and_overwritten_buffers_are_saved_as_they_were(checkpointer):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x * 0 - 1, state)

    sharding = NamedSharding(mesh_of(8), PartitionSpec("data"))
    make = {
        "one": lambda i: jnp.arange(1 << 18, dtype=jnp.float32) + i,
        "sharded": lambda i: jax.device_put(jnp.arange(1 << 18, dtype=jnp.int32) + i, sharding),
        "replicated": lambda i: jax.device_put(jnp.arange(1 << 12) + i, NamedSharding(mesh_of(8), PartitionSpec())),
        "host": lambda i: jax.device_put(jnp.arange(1 << 16) + i, sharding.with_memory_kind("pinned_host")),
    }
    for i in (1, 2, 3):
        state = {name: build(i) for name, build in make.items()}
        expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
        kept_out = {"numpy": np.full(1 << 16, i)}
        checkpointer.save(i, state | kept_out, {})
        kept_out["numpy"][:] = -1
        host = state.pop("host")
        host.delete()
        overwritten = step(state)  # at once: the save is still writing
        for _ in range(3):
            overwritten = step(overwritten)
        jax.block_until_ready(overwritten)
        saved_step, restored, _ = checkpointer.restore()
        assert saved_step == i
        assert (restored.pop("numpy") == i).all()
        assert_same(restored, expected)


def test_a_save_pins_no_host_memory(checkpointer, monkeypatch):
    """XLA keeps what is pinned once, and its pool doubles when it grows."""
    put, kinds = jax.device_put, []

    def noted(x, device=None, **options):
        kinds.append(getattr(device, "memory_kind", None))
        return put(x, device, **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # by which Orbax chooses
    monkeypatch.setattr(jax, "device_put", noted)
    checkpointer.save(1, {"x": jnp.arange(4096.0)}, {})
    checkpointer.wait()
    assert checkpointer.steps() == [1] and "pinned_host" not in kinds


def test_save_returns_before_the_files_are_written(checkpointer, monkeypatch):
    import threading

    import jaxtune.train.folder.checkpoint as module

    go_on = threading.Event()
    real = module.write_manifest
    monkeypatch.setattr(module, "write_manifest", lambda *a: (go_on.wait(), real(*a))[1])
    checkpointer.save(1, {"x": jnp.ones(3)}, {})
    assert checkpointer.steps() == []
    go_on.set()
    checkpointer.wait()
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 2), (2, 8), (8, 1), (1, 8)])
def test_sharded_onto_another_device_count(tmp_path, saved_on, restored_on):
    def place(count, state):
        specs = {"rows": PartitionSpec("data"), "columns": PartitionSpec(None, "data"), "same": PartitionSpec()}
        mesh = mesh_of(count)
        return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in state.items()}

    values = {
        name: jax.random.normal(jax.random.key(i), (16, 24)) for i, name in enumerate(("rows", "columns", "same"))
    }
    state = place(saved_on, values) | {"keys": jax.random.split(jax.random.key(5), 8)}
    target = place(restored_on, values)
    spec = NamedSharding(mesh_of(restored_on), PartitionSpec("data"))
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in target.items()}
    like["keys"] = jax.device_put(state["keys"], spec)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        _, restored, _ = checkpointer.restore(like=like)
    assert_same(restored, state)
    for name, x in restored.items():
        assert x.sharding == like[name].sharding, name
        assert len(x.sharding.device_set) == restored_on


def test_uncommitted_stays_uncommitted(checkpointer):
    """A restored counter must be placed as a fresh one is, or the step would be compiled again."""
    state = {"step": jnp.int32(3), "placed": jax.device_put(jnp.ones(2), jax.devices()[1])}
    checkpointer.save(1, state, {})
    _, restored, _ = checkpointer.restore(like=state)
    assert not restored["step"].committed
    assert restored["placed"].committed and restored["placed"].sharding == state["placed"].sharding


def test_keeps_the_newest(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest() is None
        for step in (5, 10, 15, 123456789):
            checkpointer.save(step, {"x": jnp.full(2, step)}, {"step": step})
        checkpointer.wait()
        assert checkpointer.steps() == [15, 123456789]
        assert checkpointer.latest() == 123456789
        assert checkpointer.restore(step=15)[2] == {"step": 15}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000015", "step_123456789"]


def test_going_back_abandons_later_steps(tmp_path, caplog):
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": jnp.full(2, step)}, {})
        assert checkpointer.restore(step=1)[0] == 1
        checkpointer.save(2, {"x": jnp.full(2, 20)}, {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore()[1]["x"].tolist() == [20, 20]
    assert "step_00000003: this run went back to before it" in caplog.text


def test_old_ones_stay_until_the_new_one_is_complete(tmp_path, monkeypatch):
    import jaxtune.train.folder.checkpoint as module

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(2)}, {})
        checkpointer.wait()
        seen = []
        real, steps = module.put, checkpointer.steps
        monkeypatch.setattr(module, "put", lambda *a: (seen.append(steps()), real(*a), seen.append(steps())))
        checkpointer.save(2, {"x": jnp.ones(2)}, {})
        checkpointer.wait()
        assert seen == [[1], [1, 2]]
        assert checkpointer.steps() == [2]


def test_manifest_lists_every_file(checkpointer):
    checkpointer.save(1, {"x": jnp.ones(3)}, {})
    checkpointer.wait()
    folder = checkpointer.folder / "step_00000001"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    present = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    del present["manifest.json"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == present


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": jnp.ones(2), "n": 3}, r"state\[n\] is a int, not an array; plain values belong into meta"),
        ({"a": jnp.ones(2).astype("uint4")}, r"state\[a\] has dtype uint4, which cannot be stored"),
        ({"a/b": jnp.ones(2)}, "without '/'"),
        ({"a": [], "b": None}, "state holds no array"),
        (jnp.ones(2), "no usable name"),
    ],
)
def test_refuses_what_it_cannot_store(checkpointer, state, message):
    with pytest.raises(CheckpointError, match=message):
        checkpointer.save(1, state, {})
    assert [path.name for path in checkpointer.folder.iterdir()] == ["run.lock"]


def test_refuses_meta_that_is_not_json(checkpointer):
    with pytest.raises(CheckpointError, match=r"meta of step 1 is not JSON-able: .*ndarray"):
        checkpointer.save(1, {"x": jnp.ones(2)}, {"a": np.ones(2)})


def test_refuses_another_structure(checkpointer):
    checkpointer.save(1, {"w": jnp.ones((2, 3)), "old": jnp.ones(1), "h": jnp.ones(4)}, {})
    like = {"w": jnp.ones((2, 4)), "new": jnp.ones(1), "h": jnp.ones(4, jnp.bfloat16)}
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(like=like)
    assert "step_00000001 does not fit this run" in str(caught.value)
    for part in (
        "h: saved as float32[4], this run has bfloat16[4]",
        "new: not in the checkpoint",
        "old: in the checkpoint, not in this run",
        "w: saved as float32[2, 3], this run has float32[2, 4]",
    ):
        assert part in str(caught.value)


def test_nothing_there(checkpointer):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpointer.restore()
    with pytest.raises(CheckpointError, match="keep=0: at least 1"):
        Checkpointer(checkpointer.folder / "other", keep=0)


def test_nothing_of_orbax_is_logged(checkpointer, caplog):
    with caplog.at_level(logging.WARNING):
        checkpointer.save(1, {"x": jnp.ones(2)}, {})
        checkpointer.restore(like={"x": jnp.ones(2)})
    assert caplog.records == []


def test_policy_by_steps_and_minutes():
    by_steps = SavePolicy(every_steps=10)
    assert [step for step in range(31) if by_steps.should_save(step, 0.0)] == [10, 20, 30]
    by_minutes = SavePolicy(every_minutes=2)
    assert [step for step in range(12) if by_minutes.should_save(step, 1000.0 + 30 * step)] == [4, 8]
    both = SavePolicy(every_steps=5, every_minutes=2)  # a save by step starts the minutes anew
    assert [step for step in range(12) if both.should_save(step, 30.0 * step)] == [4, 5, 9, 10]
    never = SavePolicy()
    assert not any(never.should_save(step, 1e6 * step) for step in range(10))


def test_compare_meta():
    saved = {
        "config": {"lora": {"r": 16, "alpha": 16}, "lr": 1e-4, "eval": 5, "shape": [1, 2]},
        "device": "H200",
        "old": 1,
    }
    current = {"config": {"lora": {"r": 8, "alpha": 16.0}, "lr": 2e-4, "eval": 5, "shape": (1, 2)}, "device": "A100"}
    refused, harmless = compare_meta(saved, current, incompatible=["config.lora", "config.lr"])
    assert [(d.key, d.saved, d.current) for d in refused] == [("config.lora.r", 16, 8), ("config.lr", 1e-4, 2e-4)]
    assert [(d.key, d.saved, d.current) for d in harmless] == [("device", "H200", "A100"), ("old", 1, "(absent)")]
    with pytest.raises(CheckpointError) as caught:
        require_compatible(saved, current, ["config.lora", "config.lr"])
    assert "config.lora.r: saved 16, now 8" in str(caught.value)
    assert "config.lr: saved 0.0001, now 0.0002" in str(caught.value)
    assert "device" not in str(caught.value)
    assert [d.key for d in require_compatible(saved, current, ["config.lo"])] == [
        "config.lora.r",
        "config.lr",
        "device",
        "old",
    ]
    assert compare_meta({"a": float("nan"), "b": {}}, {"a": float("nan"), "b": {}}, ["a"]) == ([], [])


def test_a_record_without_a_key_is_read_as_having_its_default():
    """A version without qat.gradients wrote it, whose default is a string."""
    saved = {"config": {"qat": {"format": "int4", "start": 0}}}
    for gradients, refused in (("straight_through", []), ("clipped", ["config.qat.gradients"])):
        current = {"config": {"qat": saved["config"]["qat"] | {"gradients": gradients}}}
        found, harmless = compare_meta(saved, current, ["config.qat"])
        assert [difference.key for difference in found] == refused and not harmless
