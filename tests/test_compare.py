"""Two commits' train steps, or one and its stored records: what is run, in what order, and what fails."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks import processes
from benchmarks.cases import STEPS

STEP = """
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--cache")
options, rest = parser.parse_known_args()
here = pathlib.Path(__file__).resolve().parents[2]
with open({calls!r}, "a") as file:
    print(json.dumps([here.name, rest, options.cache, os.environ["PYTHONPATH"].split(os.pathsep)]), file=file)
speeds = json.loads((here / "speeds.json").read_text())
speed = speeds.pop(0)
(here / "speeds.json").write_text(json.dumps(speeds))
if speed is None:
    sys.exit("no memory")
record = dict(commit=os.environ["JAXTUNE_COMMIT"], tokens_per_second=speed, peak_memory_gb=1.0)
pathlib.Path(options.output).write_text(json.dumps(record))
"""
AHEAD = """
import pathlib, sys
pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
pathlib.Path(sys.argv[1], "x").touch()
"""


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """A function of both sides' speeds, run by run (None: it fails), to (call the command, the calls of step.py)."""
    calls = tmp_path / "calls.txt"
    facts = {"device": "a GPU", "versions": {"jax": "1"}, "commit": "0123456789"}
    monkeypatch.setattr(command, "ROOT", tmp_path / "new")
    monkeypatch.setattr(processes, "ROOT", tmp_path / "new")
    monkeypatch.setattr(command, "device_facts", lambda: dict(facts))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(command.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))

    def make(**speeds):
        for side, values in speeds.items():
            folder = tmp_path / side / "benchmarks/train"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "step.py").write_text(STEP.format(calls=str(calls)))
            (folder / "compile_ahead.py").write_text(AHEAD)
            (tmp_path / side / "speeds.json").write_text(json.dumps(values))

        def call(*options):
            calls.write_text("")
            status = command.main([str(tmp_path / "out"), *options])
            return status, [json.loads(line) for line in calls.read_text().splitlines()]

        return call

    return make


def test_two_commits_take_turns_and_the_medians_are_compared(trees, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'new'}:/elsewhere")
    call = trees(old=[100.0, 110.0], new=[104.0, 108.0])
    status, calls = call("8b_24gb", "--old", str(tmp_path / "old"))
    assert status == 0
    assert [side for side, *_ in calls] == ["new", "old", "new", "old"]
    for side, arguments, cache, paths in calls:
        assert arguments == processes.step_arguments(STEPS["8b_24gb"], "")
        assert cache.endswith(f"/{side}") and (tmp_path / "temporary/jaxtune_benchmarks" / side / "x").exists()
        assert paths == [str(tmp_path / side), "/elsewhere"]  # never the other side's files
    record = json.loads((tmp_path / "out/commits.json").read_text())
    assert (record["commit"], record["old_commit"]) == ("0123456", "old")
    assert record["ratios"] == {"8b_24gb": 106.0 / 105.0}
    runs = record["cases"]["8b_24gb"]
    assert [(run["side"], run["round"]) for run in runs] == [("new", 1), ("old", 1), ("new", 2), ("old", 2)]

    status, calls = call("8b", "--old", str(tmp_path / "old"), "--rounds", "1")
    assert [side for side, *_ in calls] == ["new", "old"]


def test_a_slower_commit_fails(trees, tmp_path):
    call = trees(old=[100.0, 100.0], new=[99.0, 99.0])
    assert call("8b", "--old", str(tmp_path / "old"), "--cold")[0] == 1
    assert not (tmp_path / "temporary/jaxtune_benchmarks").exists()  # nothing was compiled beforehand


def test_a_call_goes_on_where_the_last_one_stopped(trees, tmp_path, capsys):
    old = ("--old", str(tmp_path / "old"))
    call = trees(old=[100.0, 100.0], new=[None, 100.0, 100.0])
    assert call("8b", *old, "--seconds", "0")[0] == 1
    assert "out of time" in capsys.readouterr().out
    status, calls = call("8b", *old)
    assert status == 0 and len(calls) == 4  # the median of what there is
    assert "no memory" in capsys.readouterr().out
    status, calls = call("8b", *old)
    assert status == 0 and [side for side, *_ in calls] == ["new"]
    assert call("8b", *old) == (0, [])
    (tmp_path / "old").rename(tmp_path / "older")
    with pytest.raises(SystemExit, match="old_commit is 'old' there and 'older' here"):
        call("8b", "--old", str(tmp_path / "older"))


@pytest.mark.parametrize(("speed", "status"), [(97.5, 0), (96.0, 1)])
def test_a_stored_record_is_held_against(trees, tmp_path, monkeypatch, speed, status):
    stored = tmp_path / "steps.json"
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    record = {"device": "a GPU", "tokens_per_second": 100.0}
    stored.write_text(json.dumps({"8b": record, "8b_nf4": record}))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/steps.json").write_text(json.dumps({"8b_nf4": record}))
    call = trees(new=[speed, 50.0, None])
    assert call("8b")[0] == status
    assert call("8b_long")[0] == 0  # which has no stored record yet
    records = json.loads((tmp_path / "out/steps.json").read_text())
    assert records["8b_nf4"] == record and records["8b"]["tokens_per_second"] == speed  # it can take the store's place
    assert records["8b_long"]["tokens_per_second"] == 50 and call("8b", "8b_long") == (status, [])  # of this commit
    (tmp_path / "out/steps.json").write_text(json.dumps({"8b_long": records["8b_long"] | {"commit": "older"}}))
    assert call("8b_long")[0] == 1
    stored.write_text(json.dumps({"8b": record | {"device": "another GPU"}}))
    with pytest.raises(SystemExit, match="'another GPU', this device is 'a GPU'"):
        call("8b")


def test_what_is_not_there_is_named(tmp_path, capsys):
    for words, said in (
        (["x", "9b"], "no 9b: known are steps, kernels, "),
        (["x"], "at least one NAME"),
        (["x", "8b", "moe", "--old", "y"], "--old compares steps, and moe is none"),
    ):
        with pytest.raises(SystemExit):
            command.main(words)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"no benchmarks/train/step\.py"):
        processes.commit_of(tmp_path)
