"""Capture around any JAX code, and the tables of its trace, on CPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from programs import HIDDEN, ROWS, STEPS, WIDTH, capture_on_cpu, train_step

import jaxtune
from jaxtune.profile import show

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("capture") / "profile"
    shapes = [(jax.ShapeDtypeStruct((WIDTH, HIDDEN), "float32"), jax.ShapeDtypeStruct((HIDDEN, WIDTH), "float32"))]
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    program = train_step.lower(shapes, rows, rows).compile()
    capture_on_cpu(folder, meta={"tokens_per_step": ROWS, "config": {"seed": 1}}, programs={"step": program})
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return show(folder)


def test_the_folder_holds_trace_hlo_memory_and_config(folder):
    record = json.loads((folder / "profile.json").read_text())
    assert record["meta"]["config"] == {"seed": 1}
    assert record["versions"]["jax"] == jax.__version__
    assert record["device"] == "cpu"
    # weights, x and y in; weights and the loss out
    in_bytes = 4 * (2 * WIDTH * HIDDEN + 2 * ROWS * WIDTH)
    assert record["memory"]["step"]["argument_bytes"] == in_bytes
    with gzip.open(folder / "hlo" / "step.txt.gz", "rt") as text:
        assert "HloModule jit_train_step" in text.read(200)


@pytest.mark.full
def test_the_folder_is_small(tmp_path):
    """In a process of its own: XLA puts every program of the process into the trace, and a test run has many."""
    folder = tmp_path / "profile"
    script = f"import sys; sys.path.insert(0, {str(HERE)!r}); import programs; programs.capture_on_cpu({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=HERE.parents[1])
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 1_000_000


def test_every_step_is_found_and_categories_sum_to_it(report):
    assert len(report.steps_ms) == STEPS
    assert sum(row.ms for row in report.categories) == pytest.approx(report.step_ms, rel=1e-6)
    assert {row.name for row in report.categories} >= {"GEMM", "elementwise and norms", "idle"}
    assert not [row.name for row in report.kernels if row.category == "other"]
    assert report.tokens_per_step == ROWS
    assert report.meta["config"] == {"seed": 1}


def test_scopes_and_phases_of_the_program(report):
    places = {(row.name, row.phase) for row in report.scopes}
    assert {("layer/up", "forward"), ("layer/up", "backward"), ("layer/down", "forward")} <= places
    assert ("layer/down", "backward") in places


def test_flops_are_those_of_the_products(report):
    # forward: two products; backward: each one's weight gradient, and one gradient of the hidden values
    one = 2 * ROWS * WIDTH * HIDDEN
    assert report.flops_per_step == 5 * one
    gemms = [row for row in report.kernels if row.category == "GEMM"]
    # XLA runs products side by side on a CPU, and time counts once: one that ran within another's has none of its own.
    assert len(gemms) == 5 and any(row.ms for row in gemms)
    assert all(row.tflops * row.ms * 1e9 == pytest.approx(one, rel=1e-6) for row in gemms if row.ms)


def test_peak_buffers_hold_the_largest_values(report):
    biggest = max(report.buffers, key=lambda row: row["bytes"] // row["count"])
    assert biggest["bytes"] // biggest["count"] == 4 * max(ROWS, WIDTH) * HIDDEN
    assert any("weights" in row["what"] for row in report.buffers)


def test_text_json_and_losses(report):
    text = report.to_text()
    assert f"step {report.step_ms:.2f} ms" in text
    assert "layer/up" in text
    assert json.loads(json.dumps(report.to_dict()))["step_ms"] == report.step_ms


def test_meta_must_be_json(tmp_path):
    with (
        pytest.raises(ValueError, match="meta must hold what JSON can hold"),
        jaxtune.profile.capture(tmp_path / "p", meta={"x": jnp.zeros(3)}),
    ):
        pass
    assert not (tmp_path / "p").exists()


def test_a_folder_with_other_files_is_refused_before_the_block_runs(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(notes.txt\)"), jaxtune.profile.capture(tmp_path):
        pytest.fail("the block ran")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_capture_inside_a_capture_is_refused_and_the_outer_one_survives(tmp_path):
    (tmp_path / "outer" / ".trace-left by a process that was killed").mkdir(parents=True)
    with jaxtune.profile.capture(tmp_path / "outer"):
        with pytest.raises(ValueError, match="cannot capture"), jaxtune.profile.capture(tmp_path / "inner"):
            pytest.fail("the block ran")
        jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    assert show(tmp_path / "outer").step_ms > 0


def test_an_earlier_capture_stays_until_a_new_one_is_there(tmp_path):
    capture_on_cpu(tmp_path / "a", meta={"what": "the first"})
    with jaxtune.profile.capture(tmp_path / "outer"):
        with pytest.raises(ValueError, match="cannot capture"), jaxtune.profile.capture(tmp_path / "a"):
            pytest.fail("the block ran")
        jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    with pytest.raises(ZeroDivisionError), jaxtune.profile.capture(tmp_path / "a"):
        _ = 1 / 0
    assert show(tmp_path / "a").meta == {"what": "the first"}
    capture_on_cpu(tmp_path / "a")
    assert show(tmp_path / "a").meta == {}


def test_an_error_in_the_block_passes_and_leaves_no_trace_running(tmp_path):
    with pytest.raises(ZeroDivisionError), jaxtune.profile.capture(tmp_path / "a"):
        _ = 1 / 0
    capture_on_cpu(tmp_path / "a")
    assert show(tmp_path / "a").steps_ms


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ((192, 192, 256) * 3, 3),  # a step runs the small one twice, then the large one
        ((192, 256, 192, 192, 256), 5),  # no rhythm: each run is a step
    ],
)
def test_steps_of_a_function_compiled_for_two_shapes(tmp_path, sizes, steps):
    """They are two programs of one name."""
    multiply = jax.jit(lambda x: x @ x)
    arrays = {size: jnp.ones((size, size)) for size in sizes}
    jax.block_until_ready([multiply(x) for x in arrays.values()])
    with jaxtune.profile.capture(tmp_path / "a"):
        for size in sizes:
            multiply(arrays[size]).block_until_ready()
    report = show(tmp_path / "a")
    assert len(report.steps_ms) == steps and not report.notes
    assert report.flops_per_step == pytest.approx(sum(2 * size**3 for size in sizes) / steps)


def test_programs_without_a_rhythm_are_said_to_be(tmp_path):
    first, second = jax.jit(jnp.matmul), jax.jit(jnp.inner)
    x = jnp.ones((256, 256))
    jax.block_until_ready((first(x, x), second(x, x)))
    with jaxtune.profile.capture(tmp_path / "a"):
        for function in (first, first, second):
            function(x, x).block_until_ready()
    report = show(tmp_path / "a")
    assert len(report.steps_ms) == 1
    assert report.notes == ["3 program runs without a period, and no step is marked: they are read as one step"]


def test_small_programs_which_a_cpu_runs_on_the_calling_thread_count_too(tmp_path):
    small = jax.jit(lambda x: jnp.sin(x) + 1)
    x = jnp.ones(64)
    small(x).block_until_ready()
    with jaxtune.profile.capture(tmp_path / "a"):
        for _ in range(3):
            small(x).block_until_ready()
    report = show(tmp_path / "a")
    assert len(report.steps_ms) == 3 and [row.count for row in report.kernels] == [1]


def test_the_time_of_loops_and_branches_is_that_of_what_they_run(tmp_path):
    @jax.jit
    def loop(x):
        def body(count, x):
            return jax.lax.cond(count < 4, lambda x: x @ x, lambda x: x @ x + x, x)

        return jax.lax.fori_loop(0, 5, body, x)

    x = jnp.eye(256)
    loop(x).block_until_ready()
    with jaxtune.profile.capture(tmp_path / "a"):
        loop(x).block_until_ready()
    report = show(tmp_path / "a")
    products = [row for row in report.kernels if row.tflops]
    assert sum(row.count for row in products) == 5 and {row.category for row in products} == {"GEMM"}
    assert sum(row.ms for row in products) > 0.5 * report.step_ms and not report.notes


def test_jax_profilers_own_folder_reads_too(tmp_path):
    x = jnp.ones((256, 256))
    multiply = jax.jit(lambda x: x @ x)
    multiply(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            multiply(x).block_until_ready()
    report = show(tmp_path)
    assert report.flops_per_step == 2 * 256**3
    assert len(report.steps_ms) == 3
