"""Two profiles: a run against itself, against one with a slower kernel, against other batch sizes and programs."""

from __future__ import annotations

import json

import pytest
from programs import torch_trace

from jaxtune.profile import compare, show
from jaxtune.profile.comparison import region
from jaxtune.system import terminal


@pytest.fixture
def base(tmp_path):
    return torch_trace().write(tmp_path / "a.json")


def test_a_run_against_itself_has_no_change(base):
    comparison = compare(base, base)
    rows = [comparison.step, *comparison.categories, *comparison.scopes, *comparison.kernels]
    assert {row.verdict for row in rows} == {"same"}
    assert len(comparison.sentences) == 1
    assert comparison.sentences[0].startswith("No change")
    assert comparison.slower_by == 0


def test_a_slower_kernel_is_named_with_its_milliseconds(tmp_path, base):
    slow = torch_trace(slower={"nvjet_tst_256x128": 70.0}).write(tmp_path / "b.json")
    comparison = compare(base, slow)
    changes = [row for row in comparison.kernels if row.verdict != "same"]
    assert [(row.name, row.phase, row.verdict) for row in changes] == [("nvjet_tst_256x128", "backward", "slower")]
    assert changes[0].diff_ms == pytest.approx(0.070)
    assert comparison.step.diff_ms == pytest.approx(0.070)
    assert [row.name for row in comparison.categories if row.verdict != "same"] == ["GEMM"]
    assert comparison.slower_by == pytest.approx(0.070 / 0.380)
    assert "GEMM: 0.07 ms slower (0.21 to 0.28 ms), 0.07 ms of it in mlp backward" in comparison.sentences[1]
    back = compare(slow, base)
    assert back.step.verdict == "faster"
    assert back.slower_by == 0


def test_what_only_one_side_does_is_said(tmp_path, base):
    without = torch_trace()
    without.rows = [
        row for row in without.rows if row["name"] != "void at::native::vectorized_elementwise_kernel<4, silu>(int)"
    ]
    comparison = compare(base, without.write(tmp_path / "b.json"))
    (ms,) = [row.ms for row in comparison.a.scopes if row.phase == "recompute"]
    assert ms > 0 and comparison.sentences[1] == (
        f"Only A runs the forward again for the backward (recompute): {ms:.2f} ms a step."
    )
    assert any(text.startswith("Only B runs") for text in compare(tmp_path / "b.json", base).sentences)
    assert not any(text.startswith("Only") for text in compare(base, base).sentences)


def test_a_difference_within_the_spread_of_the_steps_is_noise(tmp_path):
    noisy_a, noisy_b = torch_trace(steps=3), torch_trace(steps=3)
    for trace, late in ((noisy_a, (0.0, 12.0, 3.0)), (noisy_b, (9.0, 2.0, 11.0))):
        _lengthen(trace, "nvjet_tst_128x256", late)
    comparison = compare(noisy_a.write(tmp_path / "a.json"), noisy_b.write(tmp_path / "b.json"))
    (row,) = [row for row in comparison.kernels if row.name == "nvjet_tst_128x256"]
    assert row.diff_ms == pytest.approx((22 - 15) / 3 / 1e3)
    assert row.verdict == "same"
    assert row.noise_ms == pytest.approx(0.012)


def _lengthen(trace, name, late):
    """Makes the n-th kernel of that name longer by late[n] us and moves what follows."""
    count = 0
    for row in sorted((r for r in trace.rows if r["cat"] == "kernel" and r["name"] == name), key=lambda r: r["ts"]):
        after = row["ts"] + row["dur"]
        row["dur"] += late[count]
        for other in trace.rows:
            if other["cat"] in ("kernel", "gpu_memcpy") and other is not row and other["ts"] >= after - 20:
                other["ts"] += late[count]
        count += 1
    assert count == len(late)


def test_another_number_of_tokens_is_scaled(base):
    a, b = show(base), show(base)
    a.tokens_per_step, b.tokens_per_step = 1000, 4000
    comparison = compare(a, b)
    assert comparison.scale == 0.25
    assert comparison.step.b_ms == pytest.approx(a.step_ms / 4)
    assert comparison.step.verdict == "faster"
    assert any("scaled" in note for note in comparison.notes)
    assert "A token takes 0.38 us in A, 0.10 us in B" in comparison.sentences[0]


def test_what_is_said_of_a_profile_is_said_of_it_in_a_comparison(base):
    a, b = show(base), show(base)
    a.tokens_per_step, b.notes = 1000, ["no shapes in it"]
    notes = ["B: no shapes in it", "B has no tokens_per_step: steps are compared as they are"]
    assert compare(a, b).notes == notes
    assert all(f"note: {note}" in compare(a, b).to_text() for note in notes)


def test_texts_are_made_in_silent_processes_too(base, monkeypatch):
    """Those of a run of several are silent, but for the first."""
    made = [show(base), compare(base, base)]
    texts = [(one.to_text(), str(one)) for one in made]
    monkeypatch.setattr(terminal, "_silent", False)  # restored at the end
    terminal.be_silent()
    assert [(one.to_text(), str(one)) for one in made] == texts


def test_other_scopes_meet_in_regions(tmp_path, base):
    renamed = torch_trace()
    names = {"mlp": "expand", "attention": "attend"}
    for row in renamed.rows:
        row["name"] = names.get(row["name"], row["name"])
    comparison = compare(base, renamed.write(tmp_path / "b.json"))
    assert comparison.aligned_by == "region"
    assert {(row.name, row.phase, row.verdict) for row in comparison.scopes} == {
        ("attention block", "forward", "same"),
        ("mlp", "forward", "same"),
        ("mlp", "backward", "same"),
        ("mlp", "recompute", "same"),
        ("head and loss", "forward", "same"),
        ("optimizer", "forward", "same"),
        ("idle", "", "same"),
    }


def test_one_step_says_that_its_spread_is_unknown(tmp_path, base):
    comparison = compare(base, torch_trace(steps=1).write(tmp_path / "b.json"))
    assert any("B has one step" in note for note in comparison.notes)
    assert comparison.step.verdict == "same"


def test_json_holds_both_sides(base):
    content = json.loads(json.dumps(compare(base, base).to_dict()))
    assert content["a"]["step_ms"] == content["b"]["step_ms"] == content["step"]["a_ms"]
    assert content["slower_by"] == 0


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("layer/expand", "mlp"),
        ("layer/project", "attention block"),
        ("layer/attend", "attention block"),
        ("layer/mix", "attention block"),
        ("loss", "head and loss"),
        ("LlamaMLP/Linear", "mlp"),
        ("LlamaAttention", "attention block"),
        ("attention_norm", "attention block"),
        ("embed", "embedding"),
        ("host link", "host link"),
        ("accumulate", "optimizer"),
        ("add", "elsewhere"),
        ("", "elsewhere"),
    ],
)
def test_regions(scope, name):
    assert region(scope) == name
