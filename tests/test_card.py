"""`make card` fails where something that people do by default fails, misses its forecast or is slower than it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import card, card_models
from scripts.card_age import age

DEVICE = {"device": "a card", "product_tflops": 500.0}
GOOD = {
    "tokens_per_second": 1000.0,
    "predicted_tokens_per_second": 1100.0,
    "peak_gb": 10.2,
    "predicted_peak_gb": 10.0,
    "losses": [2.0, 1.0],
}
STORED = DEVICE | {"commit": "0123456789", "lines": {"qlora": GOOD, "real": GOOD}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"peak_gb": 10.6}, "peak_gb 10.6, forecast 10"),
        ({"peak_gb": 9.4}, "peak_gb 9.4, forecast 10"),
        ({"peak_gb": 10.6, "peak_is_of_steps": False}, None),
        ({"tokens_per_second": 1300.0}, "tokens_per_second 1,300, forecast 1,100"),
        ({"tokens_per_second": 925.0, "predicted_tokens_per_second": 930.0}, "0.925 of 01234567's"),
    ],
)
def test_a_line_fails_by_its_figures(change, words):
    found = card.faults("qlora", GOOD | change, DEVICE, STORED)
    assert found == [] if words is None else len(found) == 1 and words in found[0]


def test_a_slower_card_of_the_kind_is_no_fault_and_another_kind_is_not_compared():
    slower = GOOD | {"tokens_per_second": 925.0, "predicted_tokens_per_second": 930.0}
    assert card.faults("qlora", slower, DEVICE | {"product_tflops": 460.0}, STORED) == []
    assert card.faults("qlora", slower, DEVICE | {"device": "another"}, STORED) == []


def test_a_real_models_losses_stay():
    assert card.faults("real", GOOD | {"losses": [2.0, 1.01]}, DEVICE, STORED) == []
    assert "losses differ" in card.faults("real", GOOD | {"losses": [2.0, 1.1]}, DEVICE, STORED)[0]


def test_figures_are_of_a_runs_metrics_and_of_its_plans_line(tmp_path):
    steps = [
        {"step": step, "loss": 2.0, "step_seconds": 0.5, "tokens_per_second": 10.0 * step, "peak_memory_bytes": 2e9}
        for step in range(1, 8)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": 0, "load_seconds": 1.0}, *steps])))
    said = "plan: peak 1.90 GB predicted, at most 2.00 measured; 1,234 tokens/s\n  predicted, 55 measured"
    made = card.figures(tmp_path, said)
    assert made["tokens_per_second"] == 55.0 and made["steps"] == 7 and made["peak_gb"] == 2.0
    assert made["predicted_peak_gb"] == 1.9 and not made["peak_is_of_steps"]
    assert made["predicted_tokens_per_second"] == 1234.0


def test_a_line_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    lines = {
        "fails": card.Line(lambda of: of.run("no-such-command") and {}, ()),
        "passes": card.Line(lambda of: {"steps": 1}, ()),
    }
    monkeypatch.setattr(card, "LINES", lines)
    output = tmp_path / "out" / "card.json"
    monkeypatch.setattr("sys.argv", ["card", "--output", str(output), "--work", str(tmp_path / "work")])
    monkeypatch.setattr(card, "device_facts", lambda: {"device": "none", "product_tflops": 1.0, "commit": "unknown"})
    assert card.main() == 1
    record = json.loads(output.read_text())
    assert record["failed"] == ["fails"] and "jaxtune no-such-command ended with" in record["lines"]["fails"]["failed"]
    assert record["lines"]["passes"]["steps"] == 1 and "1 of 2 lines passed" in capsys.readouterr().out


def test_rows_are_of_both_forms(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "answer": "a"}\n{"messages": [{"content": "r"}, {"content": "b"}]}\n')
    assert [*card_models.conversations(rows)] == [("q", "a"), ("r", "b")]
    card_models.write_rows(rows, tmp_path)
    assert json.loads((tmp_path / "pairs.jsonl").read_text().splitlines()[0])["rejected"] == "b"
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 2


def test_the_age_of_a_record_is_told():
    record = {"commit": "f" * 40, "device": "a card", "failed": []}
    assert "this checkout does not have" in age(record)


def test_the_stored_record_has_every_line():
    record = json.loads(Path(card.RESULTS, "card.json").read_text())
    failed = [name for name, line in record["lines"].items() if "failed" in line]
    assert [*record["lines"]] == [*card.LINES] and record["failed"] == failed
