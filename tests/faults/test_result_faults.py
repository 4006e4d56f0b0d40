"""What a finished run says of its results when its folder or its command has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jaxtune import cli
from jaxtune.train.folder.results import read_result
from tests.faults.command import make_folder


def train(folder: Path, *overrides: str) -> int:
    shared = ["checkpoint.every_steps=2", "schedule.name=constant", *overrides]
    return cli.main(["train", str(folder / "recipe.yaml"), *shared])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run of two steps and its checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    make_folder(folder)
    assert train(folder, "steps=2") == 0
    return folder


@pytest.mark.full
def test_other_held_out_rows_are_measured_and_not_mixed_with_those_before(finished, capsys):
    run, other = finished / "run", finished / "other.jsonl"
    before = json.loads((run / "results.json").read_text())["eval_loss"]
    other.write_text(json.dumps({"prompt": "Who are you?", "completion": " I am a bot."}) + "\n")
    capsys.readouterr()
    for steps in (2, 3):
        assert train(finished, f"steps={steps}", f"data.eval={other}") == 0
        told = json.loads((run / "results.json").read_text())["eval_loss"]
        assert f"evaluation loss {told['last']:.4f} over" in "".join(capsys.readouterr())
        assert cli.main(["evaluate", str(run / "config.yaml")]) == 0
        assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(told["last"], abs=1e-6)
        assert abs(told["first"] - before["last"]) > 0.1
    for rows, first in ((other, told["first"]), (finished / "eval.jsonl", None)):
        assert train(finished, "steps=3", f"data.eval={rows}") == 0
        again = json.loads((run / "results.json").read_text())["eval_loss"]
        said = f"this run is complete: {run / 'adapter'}" if rows == other else "evaluation loss"
        assert said in "".join(capsys.readouterr()) and again["first"] == (first or before["first"])


@pytest.mark.full
def test_what_somebody_put_into_a_result_is_not_thrown_away(finished, tmp_path, capsys):
    shutil.copytree(finished / "run", tmp_path / "run")
    merged, where = tmp_path / "run" / "merged", f"output={tmp_path / 'run'}"
    step = read_result(merged).step
    (merged / ".DS_Store").write_text("anybody's")
    (merged / "model-q4.gguf").write_text("mine")
    assert train(finished, where, f"steps={step}") == 0  # complete: nothing is written
    capsys.readouterr()
    assert train(finished, where, f"steps={step + 1}") == cli.USER_ERROR
    assert f"{merged} has to be written again, but contains model-q4.gguf, which" in capsys.readouterr().err
    assert (merged / "model-q4.gguf").read_text() == "mine" and read_result(merged).step == step
    (merged / "model-q4.gguf").unlink()
    assert train(finished, where, f"steps={step + 1}") == 0
    assert read_result(merged).step == step + 1


def test_rows_that_a_run_trained_on_are_not_evaluated_as_held_out(finished, tmp_path, capsys):
    def evaluate(run, *overrides):
        return cli.main(["evaluate", str(run / "config.yaml"), *overrides])

    assert evaluate(finished / "run", "data.eval=null", "data.eval_rows=3") == cli.USER_ERROR
    assert "data.eval_rows = 3: the run held out 0 rows of data.train, so it was trained on" in capsys.readouterr().err
    assert train(finished, "steps=2", "data.eval=null", "data.eval_rows=3", f"output={tmp_path}") == 0
    capsys.readouterr()
    assert evaluate(tmp_path) == 0
    own = json.loads(capsys.readouterr().out)
    assert evaluate(tmp_path, "data.eval=null") == 0  # which the run has: its own rows again
    assert json.loads(capsys.readouterr().out)["eval_targets"] == own["eval_targets"]
    assert evaluate(tmp_path, "data.max_rows=20") == cli.USER_ERROR
    assert "the run held out 3 rows of other rows, or by another template" in capsys.readouterr().err


@pytest.mark.full
def test_other_rows_are_evaluated_where_the_run_took_its_own_out_of_data_train(finished, tmp_path, capsys):
    """As README has it: by the run's exported adapter, and by a checkpoint where there is nothing else yet."""
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Who are you?", "completion": " I am a bot."}) + "\n")
    assert train(finished, "steps=2", "data.eval=null", "data.eval_rows=3", f"output={run}") == 0
    found = []
    for weights in (("adapter", "merged"), ()):
        capsys.readouterr()
        assert cli.main(["evaluate", str(run / "config.yaml"), f"data.eval={other}"]) == 0
        told = capsys.readouterr()
        assert ("checkpoint of step 2" in told.err) == (not weights)
        found.append(json.loads(told.out))
        for name in weights:
            shutil.rmtree(run / name, ignore_errors=True)
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-3)
    assert found[0]["eval_targets"] == found[1]["eval_targets"] < 20  # of the one row
    arguments = ["evaluate", str(run / "config.yaml"), f"data.eval={other}"]
    assert cli.main([*arguments, "data.eval_rows=3"]) == cli.USER_ERROR
    for key in ("exact_match_rows=1", "max_new_tokens=4 exact_match_rows=1"):
        capsys.readouterr()
        assert cli.main([*arguments, *(f"evaluation.{word}" for word in key.split())]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert cli.main([*arguments, "evaluation.generate=[exact_match]"]) == cli.USER_ERROR
    assert "has exported nothing yet" in capsys.readouterr().err
