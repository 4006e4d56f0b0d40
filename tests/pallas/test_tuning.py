"""Measured blocks: found, measured, kept, and left alone when they were made for something else."""

import json

import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch, tuning
from jaxtune.pallas.attention import mosaic

H200 = "NVIDIA H200"
BUCKET = "head_dim=128"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has an H200, and an empty cache."""
    monkeypatch.setenv("JAXTUNE_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "device_kind", lambda: H200)
    tuning._entries.cache_clear()
    yield tmp_path
    tuning._entries.cache_clear()


def blocks_of(name):
    return {"name": name}


def slow_and_fast(monkeypatch, seconds):
    """Times whatever blocks are in force by a table instead of a clock."""
    monkeypatch.setattr(tuning, "_milliseconds", lambda run: seconds[run()])


def prepare():
    found = tuning.tuned("op", BUCKET, jnp.bfloat16)
    if found["name"] == "broken":
        raise ValueError("does not fit")
    return lambda: found["name"]


def test_the_fastest_candidate_is_kept_for_the_next_process(gpu, monkeypatch):
    slow_and_fast(monkeypatch, {"slow": 2.0, "fast": 1.0})
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) is None
    entry = tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of(n) for n in ("slow", "broken", "fast")], prepare)
    assert entry["blocks"] == {"name": "fast"} and entry["milliseconds"] == 1.0
    assert entry["tried"][1] == [{"name": "broken"}, "ValueError: does not fit"]
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) == {"name": "fast"}
    assert tuning.tuned("op", BUCKET, jnp.float16) is None
    assert tuning.tuned("op", "head_dim=64", jnp.bfloat16) is None
    stored = json.loads((gpu / "nvidia_h200.json").read_text())
    assert stored["device"] == H200 and stored["entries"] == {"op, head_dim=128, bfloat16": entry}


def test_no_candidate_that_runs_is_an_error(gpu):
    with pytest.raises(RuntimeError, match="op, head_dim=128: no candidate runs on NVIDIA H200.*does not fit"):
        tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of("broken")], prepare)
    assert not list(gpu.iterdir())


def test_measurements_of_another_jaxlib_are_left_alone(gpu):
    entries = {"op, head_dim=128, bfloat16": {"blocks": {"name": "old"}}}
    (gpu / "nvidia_h200.json").write_text(json.dumps({"device": H200, "jaxlib": "0.1", "entries": entries}))
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) is None


def test_without_a_gpu_there_is_nothing_to_find_or_measure():
    assert tuning.tuned("attention forward", BUCKET, jnp.bfloat16) is None
    with pytest.raises(RuntimeError, match="there is no GPU here to measure blocks on"):
        tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of("fast")], prepare)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_packaged_blocks_of_an_h200_are_blocks_and_the_users_go_first(gpu, monkeypatch, dim):
    kernels = {"forward": mosaic.FORWARD, "dquery": mosaic.BACKWARD_QUERY, "dkey": mosaic.BACKWARD_KEY}
    query = jnp.zeros((1, 1, 1, dim), jnp.bfloat16)
    for kernel, heuristic in kernels.items():
        op, bucket = f"attention {kernel}", f"head_dim={dim}"
        packaged = tuning.tuned(op, bucket, jnp.bfloat16)
        assert packaged is not None and mosaic._blocks(kernel, heuristic, query) == mosaic.Blocks(**packaged)
        mine = dict(own=64, step=64, stages=1, turns=True)
        monkeypatch.setattr(tuning, "_milliseconds", lambda run: 1.0)
        tuning.measure(op, bucket, jnp.bfloat16, [mine], lambda: lambda: None)
        assert mosaic._blocks(kernel, heuristic, query) == mosaic.Blocks(**mine)
    other = query.astype(jnp.float16)
    assert mosaic._blocks("forward", mosaic.FORWARD, other) == mosaic.FORWARD[dim]
