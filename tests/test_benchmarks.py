"""The table maker refuses records that prove nothing, and the README's figures are those of the stored records."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.random_model import random_model
from benchmarks.record import honest
from benchmarks.shapes import SHAPES
from benchmarks.table import Rejected, load
from jaxtune.models.hf import model_from_config
from jaxtune.models.quant import quantize

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


@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_a_random_model_made_by_layers_is_the_one_made_at_once(load_in):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
    shape = SHAPES["qwen3-32b"] | sizes | dict(num_key_value_heads=2, head_dim=16)
    wanted = model_from_config(shape, jax.random.key(3), "bfloat16")
    if load_in:
        wanted = quantize(wanted, load_in)
    made = random_model(shape, jax.random.key(3), load_in)
    assert made.config == wanted.config
    made_state, wanted_state = nnx.state(made), nnx.state(wanted)
    assert jax.tree.structure(made_state) == jax.tree.structure(wanted_state)
    jax.tree.map(np.testing.assert_array_equal, made_state, wanted_state)
