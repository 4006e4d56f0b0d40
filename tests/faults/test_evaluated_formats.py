"""`jaxtune evaluate` scores an adapter over what it was trained over, unless it is told otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import jaxtune
from jaxtune import cli
from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.trained_over import TrainedOver
from tests.faults.command import make_folder
from tests.test_cli_adapters import same_files


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run over NF4: adapter, merged model and checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    make_folder(folder)
    shared = ["steps=2", "checkpoint.every_steps=2", "model.load_in=nf4", "precision=fp32"]
    assert cli.main(["train", str(folder / "recipe.yaml"), *shared]) == 0
    return folder


@pytest.mark.full
def test_the_command_s_adapter_and_merged_model_are_one_model(finished, tmp_path):
    over = trained_over.read(finished / "run/adapter")
    assert over is not None and (over.load_in, over.dtype) == ("nf4", "float32")
    assert trained_over.of_run(finished / "run/adapter") == TrainedOver(load_in="nf4", dtype="float32")
    assert cli.main(["export", str(finished / "run/adapter"), str(tmp_path / "out")]) == 0
    assert same_files(tmp_path / "out", finished / "run/merged")


@pytest.mark.full
def test_evaluate_takes_the_base_of_the_adapter(finished, tmp_path, capsys):
    def loss(*arguments: str) -> float:
        assert cli.main(["evaluate", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["eval_loss"]

    config, recipe = str(finished / "run/config.yaml"), str(finished / "recipe.yaml")
    adapter = f"adapter={{path: {finished / 'run/adapter'}}}"
    trained = json.loads((finished / "run/results.json").read_text())["eval_loss"]["last"]
    plain = ["precision=fp32", adapter]
    assert loss(config) == loss(recipe, *plain) == pytest.approx(trained, abs=1e-6)
    other = loss(recipe, *plain, "--load-in", "stored")
    assert other == loss(recipe, *plain, "model.load_in=null") != pytest.approx(trained, abs=1e-5)

    # The merged model alone: in 16 bits, or in four where the card is small.
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/adapter")
    merged = str(tmp_path / "run/config.yaml")
    assert loss(merged) == pytest.approx(trained, abs=1e-4)
    rounded = loss(merged, "--load-in", "nf4")
    assert rounded != pytest.approx(trained, abs=1e-5) and rounded == pytest.approx(trained, abs=0.5)

    shutil.rmtree(tmp_path / "run/merged")
    assert cli.main(["evaluate", merged, "--load-in", "nf4"]) == cli.USER_ERROR
    assert "--load-in nf4: what is scored is a checkpoint of step 2" in capsys.readouterr().err


@pytest.mark.full
def test_training_on_over_another_format_is_told(finished, tmp_path, caplog):
    adapter = finished / "run/adapter"
    arguments = ["steps=1", "precision=fp32", f"adapter={{path: {adapter}}}", f"output={tmp_path / 'run'}"]
    assert cli.main(["train", str(finished / "recipe.yaml"), *arguments, "--check"]) == 0
    assert (
        f"{adapter}: it was trained over weights in four bits (NF4), and this base's are not quantised" in caplog.text
    )
    caplog.clear()
    assert cli.main(["train", str(finished / "recipe.yaml"), *arguments, "model.load_in=nf4", "--check"]) == 0
    assert "it was trained over" not in caplog.text


def test_the_merged_model_loads_in_the_run_s_precision(finished, tmp_path):
    assert cli.main(["export", str(finished / "run/merged"), str(tmp_path / "out"), "--to", "fp8"]) == 0
    assert jaxtune.from_pretrained(tmp_path / "out", dtype="float32")[0].config
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"
