"""transformers reads exported folders, those of compressed-tensors with its own reader, to the logits of the model."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from llama_cpp_models import made

import jaxtune
from jaxtune.models.quant import convert_qat, prepare_qat


def same_in_transformers(folder, ours, model):
    """transformers reads `folder` and computes what `ours` does, which is not what `model`, not yet rounded, does."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    want = np.asarray(ours(jnp.asarray(tokens)))
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want - np.asarray(model(jnp.asarray(tokens)))).max() > 1e-3


@pytest.mark.parametrize("group", [128, 32])
def test_w4a16(tmp_path, group):
    """Groups of 128 of any model; of one trained with other groups, its own."""
    model = made("qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    rounded = convert_qat(prepare_qat(model, "int4", group))
    jaxtune.export_model(model if group == 128 else rounded, tmp_path / "out", to="w4a16")
    same_in_transformers(tmp_path / "out", rounded, model)


@pytest.mark.parametrize(("to", "name"), [("fp8", "qwen2"), ("mxfp4", "gpt_oss")])
def test_eight_bits_and_mxfp4(tmp_path, to, name):
    model = made(name, hidden_size=128, intermediate_size=128, num_attention_heads=4)
    jaxtune.export_model(model, tmp_path / "out", to=to)
    if to == "fp8":  # the scheme rounds activations too, where they are multiplied: the file has weights alone
        config = json.loads((tmp_path / "out/config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    ours, _ = jaxtune.from_pretrained(tmp_path / "out", dtype="float32")
    same_in_transformers(tmp_path / "out", ours, model)
