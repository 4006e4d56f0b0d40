"""compressed-tensors' own reader over an exported folder, as transformers calls it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from llama_cpp_models import made

import jaxtune
from jaxtune.models.quant import convert_qat, prepare_qat


@pytest.mark.parametrize("group", [128, 32])
def test_logits_are_those_of_the_rounded_model(tmp_path, group):
    """Groups of 128 of any model; of one trained with other groups, its own."""
    model = made("qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=4)
    rounded = convert_qat(prepare_qat(model, "int4", group))
    jaxtune.export_model(model if group == 128 else rounded, tmp_path / "out", to="w4a16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits.numpy()
    want = np.asarray(rounded(jnp.asarray(tokens)))
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want - np.asarray(model(jnp.asarray(tokens)))).max() > 1e-3
