"""Traces recorded on an H200 (record.py beside this file): exact tables, and what must hold of any trace."""

from __future__ import annotations

import json

import pytest
from golden import DATA, GOLDEN, figures_of

from jaxtune.profile import compare, xplane
from jaxtune.profile.reading import read
from jaxtune.profile.report import Report, make_report, show
from jaxtune.profile.timeline import TRANSFERS


def golden(name: str) -> str:
    """The name, or a skip that .ci/allowed_skips.txt has to list: a trace that is still to be recorded."""
    if not (DATA / GOLDEN[name]).is_file():
        pytest.skip(f"{GOLDEN[name]} is not recorded yet: run tests/profile/record.py on a GPU")
    return name


@pytest.fixture(scope="module", params=list(GOLDEN))
def name(request) -> str:
    return golden(request.param)


@pytest.fixture(scope="module")
def report(name) -> Report:
    return show(DATA / GOLDEN[name])


def test_the_traces_are_small():
    assert sum(f.stat().st_size for f in DATA.iterdir()) <= 2_000_000


def test_exact_tables(name, report):
    expected = json.loads((DATA / "expected.json").read_text())
    assert figures_of(report) == expected[name]


def test_categories_sum_to_the_step_and_leave_nothing_over(report):
    assert "H200" in report.device
    assert len(report.steps_ms) >= 2
    assert sum(row.ms for row in report.categories) == pytest.approx(report.step_ms, rel=0.02)
    assert sum(row.ms for row in report.scopes) == pytest.approx(report.step_ms, rel=0.02)
    shares = {row.name: row.share for row in report.categories}
    assert shares.get("other", 0.0) <= 0.02
    assert shares["GEMM"] > 0.02


def test_scopes_of_ours():
    report = show(DATA / GOLDEN["ours"])
    # A product's scope ends with its linear: layer/mix/o_proj counts as layer/mix too.
    places = {(name, row.phase) for row in report.scopes for name in (row.name, row.name.rsplit("/", 1)[0])}
    for part in ("project", "attend", "mix", "expand", "contract"):
        assert {(f"layer/{part}", "forward"), (f"layer/{part}", "backward")} <= places
    assert {"loss", "optimizer"} <= {scope for scope, _ in places}
    unnamed = sum(row.share for row in report.scopes if row.name == "(no scope)")
    assert unnamed <= 0.02
    assert not any("not found in the HLO" in note for note in report.notes)


def test_flops_of_ours_are_those_of_the_model():
    """Frozen linears: 2 products (forward, input gradient); adapters: 3; head: 2; attention: 2 + 5, causal half."""
    rows, length, layers, hidden, inner, heads, kv_heads, head_dim, vocab = 8, 1024, 2, 768, 2048, 12, 4, 64, 4096
    tokens, kv = rows * length, kv_heads * head_dim
    linears = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    linears += [(hidden, inner), (hidden, inner), (inner, hidden)]
    products = sum(2 * a * b for a, b in linears)
    adapters = sum(3 * 16 * (a + b) for a, b in linears)
    attention = 7 * rows * heads * length * length * head_dim  # 7 products, 2 FLOPs each, half of them
    expected = layers * (2 * tokens * (products + adapters) + attention) + 2 * 2 * tokens * hidden * vocab
    # The first layer's input needs no gradient, and adapters may pad their rank.
    assert show(DATA / GOLDEN["ours"]).flops_per_step == pytest.approx(expected, rel=0.1)


def test_torch_products_and_attention_have_flops():
    report = show(DATA / GOLDEN[golden("torch")])
    timed = [row for row in report.kernels if row.category in ("GEMM", "attention")]
    known = sum(row.ms for row in timed if row.tflops)
    assert known > 0.8 * sum(row.ms for row in timed)
    assert {"mlp", "attention"} <= {part for row in report.scopes for part in row.name.split("/")}
    assert {"forward", "backward"} <= {row.phase for row in report.scopes}


@pytest.mark.parametrize(
    ("place", "kept", "whole"), [("first", slice(60, None), slice(1, 3)), ("last", slice(None, -60), slice(0, 2))]
)
def test_a_step_that_the_capture_cuts_is_left_out(monkeypatch, place, kept, whole):
    """As where it begins or ends while a step runs: the others are read as in the whole trace."""
    expected = show(DATA / GOLDEN["ours"])
    all_of = xplane._device_events
    monkeypatch.setattr(
        xplane, "_device_events", lambda plane: sorted(all_of(plane), key=lambda raw: raw.start_ns)[kept]
    )
    report = show(DATA / GOLDEN["ours"])
    assert report.steps_ms == pytest.approx(expected.steps_ms[whole])
    found = {(row.name, row.phase): row.per_step_ms for row in report.scopes}
    assert found == {(row.name, row.phase): pytest.approx(row.per_step_ms[whole]) for row in expected.scopes}
    assert any(f"the {place} step has 37" in note and "others 432 or more" in note for note in report.notes)


def test_a_run_against_itself_has_no_change(name):
    file = DATA / GOLDEN[name]
    comparison = compare(file, file)
    rows = [comparison.step, *comparison.categories, *comparison.scopes, *comparison.kernels]
    assert {row.verdict for row in rows} == {"same"}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_kernel_made_slower_is_named_with_its_milliseconds(name, rank):
    """Every call of one kernel takes longer, by more than the run's own noise; what follows is later by as much."""
    file = DATA / GOLDEN[name]
    base = show(file)
    target = [row for row in base.kernels if row.category not in ("copies to device", "copies to host")][rank]
    noise_ms = max(max(times) - min(times) for times in (base.steps_ms, target.per_step_ms))
    late_ns = 30_000 + 2e6 * noise_ms / target.count
    trace = read(file)
    calls = set()
    shift = 0.0
    for event in trace.events:
        begun = event.start_ns
        slower = _is(event, target)
        event.start_ns += shift
        event.end_ns += shift
        if slower:
            calls.add(begun)
            event.end_ns += late_ns
            shift += late_ns
    moved = [sum(late_ns for call in calls if call < moment) for step in trace.steps for moment in step]
    trace.steps = [(s + moved[2 * i], e + moved[2 * i + 1]) for i, (s, e) in enumerate(trace.steps)]
    comparison = compare(base, make_report(trace))
    added_ms = late_ns * target.count / 1e6
    worst = comparison.kernels[0]
    assert target.name in worst.name
    assert worst.verdict == "slower"
    assert worst.diff_ms == pytest.approx(added_ms, rel=0.02)
    assert comparison.step.diff_ms == pytest.approx(added_ms, rel=0.02)
    assert comparison.step.verdict == "slower"


def _is(event, row) -> bool:
    from jaxtune.profile.scopes import short_name

    mine = (short_name(event.name), event.scope, event.phase, event.shape)
    return event.kind not in TRANSFERS and event.step >= 0 and mine == (row.name, row.scope, row.phase, row.shape)
