"""Models with more positions than their files say, against transformers, which gets the same keys."""

import json

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tiny import CONFIGS

import jaxtune
from jaxtune.models.files.positions import stretched
from jaxtune.models.hf import model_from_config, save_pretrained

# A base with a scaling of its own, ones without, one by types of layers, and a part of each head.
NAMES = ("llama", "gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "olmo3", "glm4")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, {"rope_type": "yarn"}, None])
def test_logits_of_documents_beyond_the_positions(name, scaling, tmp_path):
    draw = np.random.default_rng(sum(name.encode()) + len(str(scaling)))
    save_pretrained(model_from_config(CONFIGS[name], jax.random.key(1)), tmp_path / "base")
    before = CONFIGS[name]["max_position_embeddings"]
    factor = round(float(draw.uniform(2.0, 6.0)), 2)
    length = int(draw.integers(before + 1, 2 * before))
    scaling = scaling and scaling | {"factor": factor}
    positions = None if scaling else length
    ours, _ = jaxtune.from_pretrained(
        tmp_path / "base", "float32", rope_scaling=scaling, max_position_embeddings=positions
    )
    assert ours.config.context_length >= length
    tokens = draw.integers(0, CONFIGS[name]["vocab_size"], (1, length))
    save_pretrained(ours, tmp_path / "saved")
    said = json.loads((tmp_path / "base/config.json").read_text())
    assert (
        json.loads((tmp_path / "saved/config.json").read_text()).items()
        >= {key: value for key, value in stretched(said, scaling, positions).items() if key != "dtype"}.items()
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    if scaling:  # as a user of transformers scales the base: on what its own config has
        config = transformers.AutoConfig.from_pretrained(tmp_path / "base")
        rope = config.rope_parameters
        if "full_attention" in rope:
            kept = {"rope_theta": rope["full_attention"]["rope_theta"]}
            rope["full_attention"] = kept | scaling | {"original_max_position_embeddings": before}
        else:
            kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
            config.rope_parameters = kept | scaling | {"original_max_position_embeddings": before}
        config.max_position_embeddings = ours.config.max_position_embeddings
        direct = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", config=config, dtype=torch.float32
        )
    else:
        direct = theirs
    got = np.asarray(ours(jnp.asarray(tokens)))
    for model in (theirs, direct):
        with torch.no_grad():
            want = model.eval()(torch.from_numpy(tokens)).logits.numpy()
        np.testing.assert_allclose(got, want, atol=2e-4, rtol=1e-3)
    if scaling:  # the scaling matters
        plain = np.asarray(checks.load(tmp_path / "base")(jnp.asarray(tokens)))
        assert np.abs(plain - got).max() > 1e-3
