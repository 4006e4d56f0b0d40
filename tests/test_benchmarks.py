"""The table maker refuses records that prove nothing, and the README's figures are those of the stored records."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import honest
from benchmarks.table import Rejected, load

ROOT = Path(__file__).resolve().parents[1]
GOOD = {
    "benchmark": "train/step",
    "vocab_size": 1000,
    "first_loss": math.log(1000) + 0.5,
    "smallest_grad_norm_by_step_2": 1e-9,
}


def test_a_good_record_is_taken():
    assert honest(GOOD) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_loss": 1.0}, "not near ln V"),
        ({"first_loss": math.nan}, "not near ln V"),
        ({"smallest_grad_norm_by_step_2": 0.0}, "no gradient"),
        ({"smallest_grad_norm_by_step_2": math.nan}, "no gradient"),
    ],
)
def test_a_record_that_proves_nothing_is_rejected(tmp_path, change, words):
    record = GOOD | change
    assert words in honest(record)
    (tmp_path / "step.json").write_text(json.dumps(record))
    with pytest.raises(Rejected, match=words):
        load(tmp_path)


@pytest.mark.parametrize("key", ["first_loss", "smallest_grad_norm_by_step_2", "vocab_size"])
def test_a_record_without_its_proof_is_rejected(key):
    assert honest({k: v for k, v in GOOD.items() if k != key}) == f"{key} is missing"


def test_the_readme_shows_the_stored_records():
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_packing_metadata_compares_is_one_model_and_differs_in_what_it_says(tmp_path):
    """The same loss in every way; XLA merges what is built in every layer, unless it is kept apart."""
    options = ["--tiny", "--models", "qwen3-0.6b", "--layers", "2", "--rows", "1", "--length", "128", "--rounds", "1"]
    command = [sys.executable, "benchmarks/train/packing_metadata.py", "--output", str(tmp_path / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    arms = model["arms"]
    assert list(arms) == ["once", "per_layer", "per_layer_kept", "per_layer_host"]
    assert len({round(arm["loss"], 5) for arm in arms.values()}) == 1
    scans = [arm["scans_in_program"] for arm in arms.values()]
    assert scans[0] == scans[1] < scans[2]
