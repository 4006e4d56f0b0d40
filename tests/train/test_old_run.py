"""A run folder of an older commit, whose checkpoint this version continues.

tests/goldens/run_of_5c3b320.tar.gz has a run that commit 5c3b320 began on the packaged model: its recipe, the
checkpoint after step 2 of 4, and the adapter after step 4. On the CPU that recorded it the continued run gives the same
bits; other CPUs may add products in another order, so the test compares within a tolerance.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxtune
from jaxtune.train.app import run
from jaxtune.train.config.file import load_config

OLD = Path(__file__).parents[1] / "goldens" / "run_of_5c3b320.tar.gz"
LOSSES = {3: 9.76917839050293, 4: 9.108817100524902}  # of the run that was not interrupted


def test_a_run_of_5c3b320_continues_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    with tarfile.open(OLD) as file:
        file.extractall(tmp_path, filter="data")
    for name in ("base", "train.jsonl"):
        os.symlink(Path(jaxtune.__file__).parent / "quickstart" / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert run(load_config("./recipe.yaml", [])) == 0
    assert "resuming from step 2 of 4" in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line and line["step"] > 2}
    assert losses == pytest.approx(LOSSES, rel=1e-5)
    ours, theirs = load_file("run/adapter/adapter_model.safetensors"), load_file("after_4_steps.safetensors")
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
