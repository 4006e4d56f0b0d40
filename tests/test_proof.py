"""The proof's page and its arithmetic: what a record says is on the page, and nothing else."""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import sft, table
from benchmarks.proof import arithmetic, curves, formats, page, recorded, rewards, work
from benchmarks.proof.work import ROOT
from tests import patience

_WHERE = {"device": "NVIDIA H100", "versions": {"jax": "0.11.2"}, "commit": "abcdef0123"}


def a_record() -> dict:
    losses = [2.0 - 0.01 * step for step in range(30)]
    sides = {"jaxtune": {"losses": losses}, "peft": {"losses": [loss + 0.001 for loss in losses]}}
    difference = {"mean": 0.001, "largest": 0.0012, "largest_of_200": 0.0012, "mean_signed": -0.001}
    cosine = {"all": 0.99999, "changes": 0.9987, "least_b": 0.91}
    each = {**sides, "steps_compared": 30, "loss_difference": difference, "adapters": {"1": cosine, "100": cosine}}
    settings = {"rank": 16, "rows_per_step": 8, "rate": 2e-4}
    return {**_WHERE, "settings": settings, "precisions": {"fp32": each, "bf16": {**sides, "adapters": {}}}}


def test_the_page_has_what_the_records_have(tmp_path):
    records, docs, peers = tmp_path / "proof", tmp_path / "docs", tmp_path / "peers"
    assert page.main(records, docs, peers) == 1
    records.mkdir()
    (records / "curves.json").write_text(json.dumps(a_record()))
    run = {"held_out": [[0, 1.4], [100, 0.73]], "exit": 0, "losses": [], "products": {"attention": {"cudnn": 4}}}
    runs = {f"{name}_{seed}": run for name in ("bf16", "nf4") for seed in range(2)}
    paired = formats.paired(runs, ["bf16", "nf4"], 2)
    (records / "formats.json").write_text(json.dumps({**_WHERE, "steps": 100, "runs": runs, "paired": paired}))
    series = {"reward": [[step, step / 40] for step in range(40)], "eval_reward": [[0, 0.2], [40, 0.8]]}
    series["sampling/sampling_logp_difference/mean"] = [[0, 0.01], [1, 0.025]]
    resumed = {"same_bits": True, "killed_after": 7}
    reward = {**_WHERE, "steps": 40, "runs": {"bf16_0": {"series": series}}, "resumed": resumed}
    (records / "rewards.json").write_text(json.dumps(reward))
    exact = {"exit": 0, "series": series_of(0.0, 0.5)}
    usual = {"exit": -9, "series": series_of(0.25, 0.4)}
    runs = {"exact_0": exact, "usual_0": usual}
    beside = {name: rewards.figures(run) for name, run in runs.items()}
    (records / "rewards_exact.json").write_text(json.dumps({**_WHERE, "steps": 40, "runs": runs, "beside": beside}))
    assert page.main(records, docs, peers) == 0
    text = (docs / "proof.md").read_text()
    for said in (
        "| exact_0 | 25,600 | 0, 0 | 0.090, 0.690 | 0.100 and 0.300 | 0.500, 0.125 and 0.250 |",
        "| usual_0 | 25,600 | 0.12, 0.25 |",
        "takes 1.25 of the time of one without: medians of the second half.",
        " Ended early, with the status: usual_0 (-9).",
        "| fp32 | 30 | 0.0012 |",
        "| fp32, 100 | 0.99870 | 0.99999 | 0.91000 |",
        "attention: cudnn",
        "0.200, 0.800 | 0.0250",
    ):
        assert said in text, said
    assert "killed after step 7 and resumed ended with the same bits" in text and "DPO" not in text
    for image in re.findall(r"\(images/(\S+)\)", text):
        assert (docs / "images" / image).stat().st_size > 1000
    before = (docs / "images/proof_curves.svg").read_bytes()
    page.main(records, docs, peers)
    assert (docs / "images/proof_curves.svg").read_bytes() == before


def series_of(mismatch: float, seconds: float) -> dict[str, list]:
    """Of a run of rewards of 40 steps, whose first three took longer."""
    rows = {"reward": [step / 50 for step in range(40)], "answers": [64.0] * 40, "completions/mean_length": [10.0] * 40}
    rows |= {f"{rewards.MISMATCH}/mean": [mismatch / 2] * 40, f"{rewards.MISMATCH}/max": [0.0] * 39 + [mismatch]}
    times = {"step": seconds, "sampling": seconds / 4, "update": seconds / 2}
    rows |= {f"{name}_seconds": [99.0] * 3 + [value] * 37 for name, value in times.items()}
    rows["eval_answers/exact_number"] = [0.1, 0.3]
    return {name: [[step, value] for step, value in enumerate(values, 1)] for name, values in rows.items()}


def test_runs_train_in_turns(tmp_path):
    """None trains until all have made their first steps, and then one at a time."""
    turns, training, ended = [recorded.Turn(f"{tmp_path / 'turns'}:3") for _ in range(3)], queue.Queue(), []
    gates = [threading.Event() for _ in turns]

    def run(number):
        moment = MagicMock()
        turns[number].between(moment)
        training.put(number)
        gates[number].wait(patience.SECONDS)
        turns[number].between(moment)
        ended.append((number, moment.wait.call_count))
        os.close(turns[number].lock)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    with pytest.raises(queue.Empty):
        training.get(timeout=0.3)
    turns[2].arrive()  # it ends without a step
    turns[2].arrive()
    first = training.get(timeout=patience.SECONDS)
    with pytest.raises(queue.Empty):
        training.get(timeout=0.3)
    gates[first].set()
    second = training.get(timeout=patience.SECONDS)
    gates[second].set()
    for thread in threads:
        thread.join(patience.SECONDS)
    assert ended == [(first, 1), (second, 1)] and {first, second} == {0, 1}


def test_a_run_without_steps_has_no_figures():
    assert rewards.figures({"exit": 1}) == {"steps": 0, "sampled_tokens": 0}


def test_losses_are_paired_by_seed():
    def run(loss, code=0):
        return {"held_out": [[0, 9.0], [10, loss]], "exit": code}

    runs = {"bf16_0": run(1.0), "bf16_1": run(1.5), "nf4_0": run(1.1), "nf4_1": run(1.9), "int8_0": run(5.0, 1)}
    found = formats.paired(runs, ["bf16", "nf4", "int8"], 2)
    assert found["nf4"]["differences"] == pytest.approx([0.1, 0.4]) and found["nf4"][
        "mean_difference"
    ] == pytest.approx(0.25)
    assert found["int8"] == {"losses": [None, None], "differences": [], "stopped": [(10, 4.0)]}
    assert found["spread_of_seeds"] == pytest.approx(0.5)


def test_a_further_call_keeps_whole_runs_with_their_commit(tmp_path, monkeypatch):
    """Of a record of as many steps; what was stopped, and what it lacks, runs."""
    done, cut = {"held_out": [[0, 9.0], [10, 1.0]], "exit": 0}, {"held_out": [[0, 9.0]], "exit": -9}
    record = {**_WHERE, "steps": 10, "runs": {"bf16_0": done, "nf4_0": cut}}
    (tmp_path / "output").mkdir()
    (tmp_path / "output/formats.json").write_text(json.dumps(record))
    for name in ("train", "test"):
        work.write_rows(tmp_path / f"{name}.jsonl", [{"question": "q", "answer": "a"}])
    ran = []

    def train_all(runs, *rest):
        ran.extend(run.name for run in runs)
        return {run.name: {**done, "held_out": [[0, 9.0], [10, 1.5]]} for run in runs}

    monkeypatch.setattr(formats, "train_all", train_all)
    output = tmp_path / "output"
    formats.run_formats("model", tmp_path, output, 10, 60.0, 1, 1, ["bf16", "nf4", "nf4 v int8"])
    assert ran == ["nf4_0", "nf4_v_int8_0"]
    found = json.loads((output / "formats.json").read_text())
    assert found["runs"]["bf16_0"]["commit"] == "abcdef0123" and "commit" not in found["runs"]["nf4_0"]
    assert found["paired"]["nf4 v int8"]["mean_difference"] == pytest.approx(0.5)
    formats.run_formats("model", tmp_path, output, 20, 60.0, 1, 1, ["bf16"])
    assert ran[-1] == "bf16_0"


def test_cosines_are_of_what_changed():
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    draw = np.random.default_rng(0)
    start = {f"{name}.A": curves.start_of_a(name, (4, 32)) for name in names}
    ours = start | {f"{name}.B": draw.normal(size=(16, 4)) for name in names}
    assert curves.cosines(ours, ours) == pytest.approx({"all": 1, "changes": 1, "least_b": 1})
    other = {key: -value if key.endswith(".B") else value for key, value in ours.items()}
    found = curves.cosines(ours, other)
    assert found["changes"] == pytest.approx(-1) and found["least_b"] == pytest.approx(-1)
    assert found["all"] > -0.99


def test_the_same_start_everywhere():
    first, again = (curves.start_of_a("model.layers.0.self_attn.q_proj", (8, 64)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first).max() <= 64**-0.5 and not np.array_equal(first, curves.start_of_a("other", (8, 64)))


@given(st.integers(0, 1000), st.integers(1, 60))
def test_arithmetic_is_right(seed, count):
    for row in arithmetic.rows(count, seed):
        question, answer = (message["content"] for message in row["messages"])
        first, sign, second = re.search(r"(\d+) ([-+*]) (\d+)", question).groups()
        assert str(eval(f"{first} {sign} {second}")) == answer
        assert arithmetic.score(answer, answer) == 1.0
        assert arithmetic.score(f"{question} {answer}.", answer) == 0.5
        assert arithmetic.score(f"It is {int(answer) + 1}", answer) == 0.0 == arithmetic.score("none", answer)
        assert arithmetic.correct([[{"content": answer}]], answer=[answer]) == [1.0]


def test_rows_of_questions(tmp_path):
    for name, count in (("train", 3), ("test", 9)):
        rows = ({"question": f"q{n}", "answer": f"a{n}"} for n in range(count))
        work.write_rows(tmp_path / f"{name}.jsonl", rows)
    train, held_out = work.questions(tmp_path, tmp_path / "out", held_out=4)
    assert [len(work.read_rows(file)) for file in (train, held_out)] == [3, 4]
    assert work.read_rows(train)[1] == {"messages": work.conversation("q1", "a1")}


def peers_record(tmp_path, speeds: dict[str, tuple[float, float]], whole: tuple[float, float], within=0.95) -> dict:
    """A record of {setting: (tokens/s, GB)}, and of jaxtune, whose peaks are `within` of the budget."""
    beside = sft.Beside(tmp_path, tmp_path / "model", 1.0, 5)
    for name, (speed, peak) in speeds.items():
        tried = [
            {"micro_batch": 8, "failed": "OutOfMemoryError: of 80 GB"},
            {"micro_batch": 4, "tokens_per_second": speed, "peak_memory_gb": peak},
            {"micro_batch": 2, "tokens_per_second": 0.9 * speed, "peak_memory_gb": 0.7 * peak},
        ]
        output = tmp_path / f"{name}.json"
        output.write_text(json.dumps({"tried": tried, "versions": {"unsloth": "2026.10.9"}}))
        beside.add("bf16", next(peer for peer in sft.PEERS if peer.name == name), output, None, 60.0)
    cases = beside.record["cases"]["bf16"]
    cases["jaxtune whole card"] = dict(tokens_per_second=whole[0], peak_memory_gb=whole[1], micro_batches=1)
    for name, budget in beside.budgets("bf16").items():
        if budget is not None and not beside.covered("bf16", name):
            cases[f"jaxtune {name}"] = {"tokens_per_second": 0.9 * whole[0], "peak_memory_gb": within * budget}
    beside.ratios()
    return json.loads(beside.call.output.read_text())


def test_the_page_and_the_readme_say_both_settings_of_a_peer(tmp_path):
    speeds = {"unsloth unsloth": (10000.0, 21.0), "unsloth false": (16000.0, 81.0), "unsloth true": (9000.0, 25.0)}
    record = peers_record(tmp_path / "run", speeds, (20000.0, 68.0))
    cases = record["cases"]["bf16"]
    assert cases["unsloth unsloth"]["fastest"]["micro_batch"] == 4
    assert [cases[name]["beside"]["ratio"] for name in speeds] == pytest.approx([1.8, 1.25, 2.0])
    assert cases["unsloth false"]["beside"]["peak_memory_gb"] == 68.0  # the whole card's run is within that peak
    docs, peers = tmp_path / "docs", tmp_path / "peers"
    peers.mkdir()
    (peers / "card.json").write_text(json.dumps(record))
    grpo = {"8b": {"whole_step": {"seconds": 5.94, "peak_memory_gb": 71.0}}, "trl_8b": {}}
    (peers / "grpo_card.json").write_text(json.dumps({**_WHERE, "cases": grpo}))
    case = {"tokens_per_second": 7000.0, "peak_memory_gb": 44.0, "what": "a shape", "source": "a/b.json"}
    cases = {"a": case | {"published_tokens_per_second": 6229}, "b": {"failed": "no time"}}
    (peers / "published_card.json").write_text(json.dumps({**_WHERE, "cases": cases}))
    (tmp_path / "README.md").write_text(f"a {page.BEGIN}old{page.END} b\n")
    assert page.main(tmp_path / "none", docs, peers) == 0
    text, readme = (docs / "proof.md").read_text(), (tmp_path / "README.md").read_text()
    assert (
        "| 10,000 | 21.0 | 18,000 | 19.9 | **1.80** |" in text
        and "| 16,000 | 81.0 | 20,000 | 68.0 | **1.25** |" in text
    )
    assert "1.80 (16 bits)" in readme and "1.25 (16 bits)" in readme and "old" not in readme and readme.endswith(" b\n")
    drawn = (docs / "images" / page.PICTURE).read_text()
    for bar in ("recomputing</text>", "kept activations</text>", "all memory</text>", "16,000", "10,000", "18,000"):
        assert bar in drawn, bar


def test_packed_rows_have_their_own_part(tmp_path):
    """Their record is not the one that the README shows; jaxtune's rate is of real tokens."""
    (tmp_path / "rows.jsonl").write_text("[1, 2, 3]\n[4, 5, 6, 7, 8]\n")
    beside = sft.Beside(tmp_path, tmp_path / "model", 1.0, 5, tmp_path / "rows.jsonl")
    assert beside.record["settings"]["documents"] == "2 of rows.jsonl, 4 tokens on average, packed"
    tried = [{"micro_batch": 8, "tokens_per_second": 100.0, "peak_memory_gb": 80.0}]
    (tmp_path / "trl.json").write_text(json.dumps({"tried": tried}))
    beside.add("bf16", next(peer for peer in sft.PEERS if peer.name == "trl true"), tmp_path / "trl.json", None, 60.0)
    found = {"tokens_per_second": 500.0, "real_tokens_per_second": 200.0, "peak_memory_gb": 60.0, "micro_batches": 1}
    beside.call.ahead = lambda cases: None
    beside.call.run = lambda *arguments: dict(found)
    beside.ours([("bf16", "whole card")])
    beside.ratios()
    peers = tmp_path / "peers"
    for folder in (peers, tmp_path / "docs"):
        folder.mkdir()
    (peers / beside.call.output.name).write_text(beside.call.output.read_text())
    assert page.main(tmp_path / "none", tmp_path / "docs", peers) == 0
    text = (tmp_path / "docs/proof.md").read_text()
    assert "## Packed rows beside Unsloth and TRL" in text and "## Beside Unsloth" not in text
    assert "| 100 | 80.0 | 200 | 60.0 | **2.00** |" in text


def test_no_ratio_without_a_run_within_the_peak(tmp_path):
    record = peers_record(tmp_path, {"unsloth unsloth": (10000.0, 21.0)}, (20000.0, 68.0), within=1.01)
    assert "beside" not in record["cases"]["bf16"]["unsloth unsloth"]
    assert table.lines(record)[2].endswith("| 21.0 | - | - | - |") and table.sentences(record) == ""


def test_the_readme_shows_the_stored_record_of_peers():
    found = {name: one for name, one in page._read(page.PEERS).items() if one.get("benchmark") == "peers"}
    for file, text in (page.of_readme(page._shown(found), page.DOCS) if found else {}).items():
        assert file.read_text(encoding="utf-8") == text, f"{file.relative_to(ROOT)}: python -m benchmarks.proof page"
