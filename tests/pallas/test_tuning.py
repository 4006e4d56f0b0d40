"""Measured blocks: found, measured, kept, and left alone when they were made for something else."""

import collections
import json
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, resources

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import targets, tuning
from jaxtune.pallas.attention import mosaic, packed_layout
from jaxtune.pallas.grouped_matmul import mosaic as grouped
from jaxtune.pallas.grouped_matmul import tune as grouped_tune

H200 = "NVIDIA H200"
BUCKET = "head_dim=128"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has an H200, and an empty cache."""
    monkeypatch.setenv("JAXTUNE_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(targets, "device_kind", lambda: H200)
    tuning._entries.cache_clear()
    yield tmp_path
    tuning._entries.cache_clear()


def blocks_of(name):
    return {"name": name}


def slow_and_fast(monkeypatch, seconds):
    """Times whatever blocks are in force by a table instead of a clock."""
    monkeypatch.setattr(tuning, "_milliseconds", lambda programs: [seconds[run()] for run in programs])


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
    query = jnp.zeros((1, 1, 1, dim), jnp.bfloat16)
    layout = packed_layout((1, 1), jnp.ones((1, 1), jnp.int32))
    monkeypatch.setattr(tuning, "_milliseconds", lambda programs: [1.0] * len(programs))
    for kernel in ("forward", "dquery", "dkey"):
        op, bucket = f"attention {kernel}", f"head_dim={dim}"
        packaged = tuning.tuned(op, bucket, jnp.bfloat16)
        assert packaged is not None and mosaic._blocks(kernel, query, layout, None) == mosaic.Blocks(**packaged)
        mine = dict(own=64, step=64, stages=1, turns=True)
        tuning.measure(op, bucket, jnp.bfloat16, [mine], lambda: lambda: None)
        assert mosaic._blocks(kernel, query, layout, None) == mosaic.Blocks(**mine)
    other = query.astype(jnp.float16)
    assert mosaic._blocks("forward", other, layout, None) == mosaic.FORWARD[dim]


def test_blocks_for_a_kind_of_rows_or_window_go_before_those_for_packed_rows(gpu, monkeypatch):
    monkeypatch.setattr(tuning, "_milliseconds", lambda programs: [1.0] * len(programs))
    monkeypatch.setattr(targets, "device_kind", lambda: "NVIDIA H100")  # nothing is packaged for it
    whole = packed_layout((1, 256))
    packed = packed_layout((1, 256), jnp.ones((1, 256), jnp.int32))
    calls = {(None, True): "head_dim=128, whole rows", (100, False): "head_dim=128, window up to 128"}
    calls |= {
        (129, True): "head_dim=128, window up to 256",
        (4096, False): "head_dim=128",
        (None, False): "head_dim=128",
    }
    query = jnp.zeros((1, 256, 2, 96), jnp.bfloat16)  # padded to 128
    before = mosaic.blocks_of(query, packed, None)
    for (window, one_document), bucket in calls.items():
        assert mosaic.bucket(128, one_document, window) == bucket
        assert mosaic.blocks_of(query, whole if one_document else packed, window) == before
    for stages, bucket in enumerate(dict.fromkeys(calls.values()), start=10):
        mine = dict(own=64, step=64, stages=stages, turns=False, lean=True)
        tuning.measure("attention forward", bucket, jnp.bfloat16, [mine], lambda: lambda: None)
    found = {
        call: mosaic.blocks_of(query, whole if call[1] else packed, call[0])["attention forward"]["stages"]
        for call in calls
    }
    assert list(found.values()) == [10, 11, 12, 13, 13]
    assert mosaic.blocks_of(query, packed, None)["attention dkey"] == before["attention dkey"]


def test_a_wrong_candidate_is_passed_over_however_fast(gpu, monkeypatch):
    slow_and_fast(monkeypatch, {"slow": 2.0, "fast": 1.0})
    said = []
    entry = tuning.measure(
        "op",
        BUCKET,
        jnp.bfloat16,
        [blocks_of("slow"), blocks_of("fast")],
        prepare,
        wrong=lambda result: "is wrong" if result == "fast" else None,
        say=said.append,
    )
    assert entry["blocks"] == {"name": "slow"} and entry["tried"][1] == [{"name": "fast"}, "is wrong"]
    slow, fast = f"op, {BUCKET}: name slow: ", f"op, {BUCKET}: name fast: "
    assert said == [slow, "runs\n", fast, "is wrong\n", f"{slow}2.0000 ms\n"]


def test_candidates_take_turns_while_the_clock_falls(monkeypatch):
    """Each run takes longer than the one before it: of two equal programs none seems faster, and the slower one is
    the slower one also where it is the first."""
    clock, called = [0.0], []

    def program(name, seconds):
        def run():
            called.append(name)
            clock[0] += seconds * (1 + 0.01 * len(called))

        return run

    monkeypatch.setattr(tuning.time, "perf_counter", lambda: clock[0])
    first, same, slower = tuning._milliseconds([program("a", 1.0), program("b", 1.0), program("c", 1.2)])
    assert first == pytest.approx(same, rel=0.03) and slower > 1.1 * max(first, same)
    assert called[:4] == ["c"] * 4 and called[12:16] == ["a"] * 4


def test_blocks_are_forced_in_one_thread_only():
    with tuning.forced("op", blocks_of("here")), ThreadPoolExecutor(1) as pool:
        assert tuning.tuned("op", BUCKET, jnp.bfloat16) == blocks_of("here")
        assert pool.submit(tuning.tuned, "op", BUCKET, jnp.bfloat16).result() is None
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) is None


def test_a_file_of_its_own_is_one_that_can_be_packaged(gpu, monkeypatch, tmp_path):
    """The form of tuned/nvidia_h200.json, entries added one by one, the user's cache untouched."""
    slow_and_fast(monkeypatch, {"slow": 2.0, "fast": 1.0})
    path = tmp_path / "new" / "nvidia_h200.json"
    for bucket in (BUCKET, "head_dim=64"):
        tuning.measure("op", bucket, jnp.bfloat16, [blocks_of("slow")], prepare, path=path)
    packaged = json.loads((resources.files("jaxtune.pallas") / "tuned" / "nvidia_h200.json").read_text())
    written = json.loads(path.read_text())
    assert written.keys() == packaged.keys() and written["device"] == packaged["device"] == H200
    assert len(written["entries"]) == 2
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) is None


TORN = b'{"device": "NVIDIA H200", "jaxlib": "0.11", "entries": {"op, head'
KEY = "op, head_dim=128, bfloat16"


def record(entries):
    return json.dumps({"device": H200, "jaxlib": metadata.version("jaxlib"), "entries": entries}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TORN, "JSONDecodeError"),
        (b"", "JSONDecodeError"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"[1, 2]", "holds no measured block sizes"),
        (b'{"jaxlib": "0.1"}', "holds no measured block sizes"),
        (b'{"entries": 3}', "holds no measured block sizes"),
        (record({KEY: 3}), "1 entries are ignored"),
        (record({KEY: {"blocks": {"name": [1]}}}), "1 entries are ignored"),
    ],
)
def test_a_file_that_is_torn_or_not_ours_is_said_ignored_and_written_anew(gpu, monkeypatch, caplog, content, words):
    tuning._say_once.cache_clear()
    path = gpu / "nvidia_h200.json"
    path.write_bytes(content)
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) is None
    (line,) = caplog.messages
    assert str(path) in line and words in line
    slow_and_fast(monkeypatch, {"slow": 2.0})
    tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of("slow")], prepare)
    assert tuning.tuned("op", BUCKET, jnp.bfloat16) == blocks_of("slow")
    assert [file.name for file in gpu.iterdir()] == [path.name]


def test_blocks_that_a_kernel_does_not_know_are_said_and_ignored(gpu, caplog):
    tuning._say_once.cache_clear()
    query = jnp.zeros((1, 1, 1, 128), jnp.bfloat16)
    layout = packed_layout((1, 1), jnp.ones((1, 1), jnp.int32))
    foreign = {"attention forward, head_dim=128, bfloat16": {"blocks": {"rows": 64}}}
    (gpu / "nvidia_h200.json").write_bytes(record(foreign))
    assert mosaic._blocks("forward", query, layout, None) == mosaic.FORWARD[128]
    assert "attention forward, head_dim=128, bfloat16" in caplog.text and "rows" in caplog.text


def test_a_cache_that_cannot_be_written_costs_the_next_process_its_measurement_and_no_more(gpu, monkeypatch, caplog):
    slow_and_fast(monkeypatch, {"slow": 2.0})

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning, "atomic_write", full)
    entry = tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of("slow")], prepare)
    assert entry["blocks"] == blocks_of("slow")
    assert "what was measured is not kept" in caplog.text and "No space left" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        tuning.measure("op", BUCKET, jnp.bfloat16, [blocks_of("slow")], prepare, path=gpu / "named.json")


def test_a_result_is_wrong_if_any_of_its_arrays_is():
    wrong, right = tuning.as_the_first(), jnp.arange(4.0)
    assert wrong((right, right, jnp.zeros(2))) is None and wrong((right, 1.01 * right, jnp.zeros(2))) is None
    for other in (1.1 * right, right * jnp.nan):  # in any place
        assert wrong((right, other, jnp.zeros(2))) and wrong((other, right, jnp.zeros(2)))
    assert wrong((right, right, jnp.ones(2)))
    wrong = tuning.as_the_first()
    assert wrong((right * jnp.nan,)) == "has numbers that are not finite"  # and is nothing to compare others with
    assert wrong((right,)) is None and wrong((1.1 * right,))


def test_the_tuner_of_the_grouped_product_times_each_candidate(gpu, monkeypatch):
    """Blocks are looked up when a product is traced: it was traced when it ran, where no candidate is in force."""
    seen = collections.defaultdict(set)

    def product(x, weight, groups, contract):
        del groups
        ahead = not isinstance(weight, jax.Array)
        size, other = 256, 384
        other = other if x.shape[1] == size else size
        blocks = grouped.blocks_for(x.shape[1], other, contract, x.dtype, ahead)
        seen[grouped.bucket(x.shape[1], other, contract, ahead)].add(blocks)
        return jnp.ones((len(x), other), x.dtype)

    monkeypatch.setattr(grouped, "product", product)
    monkeypatch.setattr(grouped_tune, "SHAPES", ((2, 256, 256, 384, False),))
    monkeypatch.setattr(tuning, "_milliseconds", lambda programs: [1.0] * len(programs))
    entries = grouped_tune.tune()
    assert len(entries) == 4 and seen.keys() == entries.keys()
    for bucket, entry in entries.items():
        assert seen[bucket] == {grouped.Blocks(**blocks) for blocks, _ in entry["tried"]} and len(seen[bucket]) > 1
