"""Steps over several GPUs beside each alone: what is run, what is kept of it, and what a floor says of it."""

import json

import pytest

from benchmarks import table
from benchmarks.train import mesh

STEP = """
import argparse, json, math, os, pathlib, sys, time
parser = argparse.ArgumentParser()
for name in ("output", "cache", "fsdp", "rows"):
    parser.add_argument("--" + name)
options, rest = parser.parse_known_args()
with open({calls!r}, "a") as file:
    print(json.dumps([options.rows, options.fsdp, os.environ.get("CUDA_VISIBLE_DEVICES")]), file=file)
if "--hang" in rest:
    time.sleep(600)
if "--fail" in rest:
    sys.exit("no memory")
card = int(os.environ.get("CUDA_VISIBLE_DEVICES", 0))
record = dict.fromkeys({kept!r}) | dict(device="a GPU", versions={{"jax": "1"}}, commit="0123456", time="now")
record |= dict(micro_batches=1)
record |= dict(vocab_size=1000, first_loss=math.log(1000), smallest_grad_norm_by_step_2=1.0)
record |= dict(tokens_per_second_per_gpu=100 - card if options.fsdp is None else 95, losses=[1.0])
record |= dict(peak_memory_gb_of_each=[50.0 + card] if options.fsdp is None else [40.0, 30.0])
pathlib.Path(options.output).write_text(json.dumps(record))
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function of cases to (exit status, [(rows, fsdp, card) of each process], the record)."""
    calls, output, step = tmp_path / "calls.txt", tmp_path / "out.json", tmp_path / "benchmarks/train/step.py"
    step.parent.mkdir(parents=True)
    step.write_text(STEP.format(calls=str(calls), kept=[key for key in mesh.KEPT if key not in ("failed", "parts")]))
    monkeypatch.setattr(mesh, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(**cases):
        monkeypatch.setattr(mesh, "CASES", cases)
        monkeypatch.setattr(table, "MESH_CASES", cases)
        calls.write_text("")
        status = mesh.main(["--output", str(output)])
        return status, [json.loads(line) for line in calls.read_text().splitlines()], json.loads(output.read_text())

    return run


ALONE = mesh.Case("a step", "", rows=4)
DIVIDED = mesh.Case("a step", "", 4, "fsdp", "alone", floor=0.95, memory=0.8)


def test_a_mesh_is_held_against_the_slower_card_alone(call, capsys):
    status, calls, record = call(alone=ALONE, divided=DIVIDED)
    assert (status, sorted(calls, key=str)) == (0, [["4", None, "0"], ["4", None, "1"], ["8", "2", None]])
    assert record["ratios"] == {"divided": {"speed": 95 / 99, "memory": 40 / 51}}
    assert record["commit"] == record["cases"]["divided"][0]["commit"] == "0123456"
    assert "(missed)" not in "".join(table.mesh_table(record)[:-1])
    status, calls, _ = call(alone=ALONE, divided=DIVIDED)
    assert (status, calls) == (0, [])  # what is measured is not measured again
    with pytest.raises(SystemExit):
        mesh.main(["alnoe", "--output", "unused"])
    assert "no case of this name: alnoe; there are alone, divided" in capsys.readouterr().err


def test_a_missed_floor_or_a_full_memory_fails(call, capsys):
    tight = mesh.Case("a step", "", 4, "fsdp", "alone", floor=0.97, memory=0.7, least=96)
    status, _, _ = call(alone=ALONE, divided=tight)
    words = capsys.readouterr().out
    assert status == 1
    assert "divided: 95 tokens/s a GPU, at least 96" in words
    assert "divided: 0.960 of the speed alone, floor 0.97" in words and "0.78 of the memory alone, at most 0.7" in words


@pytest.mark.full
def test_a_case_that_fails_or_takes_too_long_leaves_the_rest_their_time(call, capsys):
    slow = mesh.Case("a step", "--hang", 4, "fsdp", limit=2)
    broken = mesh.Case("a step", "--fail", 4, "fsdp")
    status, _, record = call(slow=slow, broken=broken, alone=ALONE)
    assert status == 1
    assert {name: [run.get("failed") for run in runs] for name, runs in record["cases"].items()} == {
        "slow": ["its time ran out; "],
        "broken": ["exit status 1; no memory"],
        "alone": [None, None],
    }
