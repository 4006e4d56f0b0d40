"""A widened model is the same function."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp_models import made
from tiny_models import named

from jaxtune.models.files import quant
from jaxtune.models.hf import from_pretrained, save_pretrained
from scripts.real_model import widened

ROOT = Path(__file__).resolve().parents[2]


def logits(model, tokens):
    graph, state = nnx.split(model)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_same_logits(name):
    model = made(name, "float32", num_hidden_layers=2, **({"layer_types": None} if name == "qwen3" else {}))
    shapes = {key: variable.get_value().shape for key, variable in named(model).items()}

    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(st.integers(2, 8), st.lists(st.integers(3, 127), min_size=8, max_size=8))
    def check(times, tokens):
        wide = widened(model, times)
        rows = jnp.asarray([tokens])
        small = logits(model, rows)
        np.testing.assert_allclose(logits(wide, rows), small, atol=3e-5 * np.abs(small).max())
        assert wide.config.num_heads == times * model.config.num_heads and not wide.config.tie_embeddings
        assert named(wide)["model.layers.0.mlp.up_proj.weight"].get_value().shape == tuple(
            times * size for size in shapes["model.layers.0.mlp.up_proj.weight"]
        )

    check()


def test_what_cannot_be_widened():
    with pytest.raises(ValueError, match="a gemma2 model cannot be widened; only llama"):
        widened(made("gemma2", "float32"), 2)
    packed = quant.quantize(made("llama", "bfloat16", num_hidden_layers=1), "nf4")
    with pytest.raises(ValueError, match=r"is a NF4: load the model in 16 or 32 bits"):
        widened(packed, 2)


@pytest.mark.full
def test_the_script(tmp_path):
    save_pretrained(made("llama", "float32", num_hidden_layers=1), tmp_path / "small")
    command = [sys.executable, "scripts/real_model.py", tmp_path / "small", "--widen", "2", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "wide"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "hidden size 128" in done.stdout
    assert json.loads((tmp_path / "wide/config.json").read_text())["num_attention_heads"] == 8
    small, wide = (from_pretrained(tmp_path / which, "float32")[0] for which in ("small", "wide"))
    rows = jnp.asarray([[5, 9, 17, 3]])
    np.testing.assert_allclose(logits(wide, rows), logits(small, rows), atol=1e-4)
