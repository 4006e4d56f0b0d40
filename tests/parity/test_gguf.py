"""GGUF files in transformers' own reader: it knows llama.cpp's names, orders of rows and keys by itself."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import transformers
from llama_cpp_models import made
from tiny import golden_tokens

pytest.importorskip("gguf")

from jaxtune.export import gguf_file, gguf_tensors
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.models.files.weights import Weights


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"])
def test_logits(name, tmp_path):
    # What transformers' reader does not take from a GGUF file is left out, or has its defaults: rotary scaling,
    # windows, biases, and some sizes.
    plain = dict(
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=64,
        layer_types=None,
    )
    if name in ("gemma2", "gemma3"):  # soft caps and the scale of queries are its defaults, too
        plain |= dict(sliding_window=64, head_dim=256, query_pre_attn_scalar=256)
    if name in ("qwen3", "qwen3_moe"):
        plain |= dict(head_dim=128)
    if name == "qwen3_moe":
        plain |= dict(moe_intermediate_size=768)
    if name == "gemma2":
        plain |= dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    model = made(name, **plain)
    arch = architecture(model.config)
    keys, _ = hyperparameters(model.config, arch)
    fields = {f"{arch.name}.{key}": value for key, value in keys.items()}
    gguf_file.write(tmp_path / "model.gguf", arch.name, fields, gguf_tensors.of_model(Weights(model), arch), "f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    tokens = golden_tokens()
    np.testing.assert_allclose(model(tokens), reference.logits(theirs, tokens), atol=2e-4, rtol=0)
