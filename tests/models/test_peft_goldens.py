"""Adapter folders that PEFT wrote (tests/parity/regenerate_peft.py), without PEFT or torch."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from peft_cases import GOLDEN_CASES
from safetensors.numpy import load_file
from tiny import golden_tokens
from tiny_models import golden_model, named

from jaxtune import load_adapter, merge_adapter, save_adapter

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "peft"


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_adapter_of_peft(tmp_path, case):
    name, _ = GOLDEN_CASES[case]
    plain = golden_model(name)
    model = load_adapter(plain, GOLDENS / case)
    expected, tokens = np.load(GOLDENS / case / "expected.npz"), jnp.asarray(golden_tokens())
    np.testing.assert_allclose(model(tokens), expected["logits"], atol=1e-4, rtol=0)
    assert np.abs(np.asarray(plain(tokens)) - expected["logits"]).max() > 0.01

    weight = named(merge_adapter(model))[str(expected["merged_name"])].get_value()
    np.testing.assert_allclose(weight, expected["merged"], atol=1e-5, rtol=0)

    save_adapter(model, tmp_path / "again")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (GOLDENS / case, tmp_path / "again"))
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_array_equal(first[key], second[key], err_msg=key)
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (GOLDENS / case, tmp_path / "again")
    )
    assert ours.keys() <= theirs.keys()
    for key in ("peft_type", "task_type", "use_rslora", "use_dora", "bias", "peft_version", "lora_dropout"):
        assert ours[key] == theirs[key], key
    # Resolved into the modules that there are; the patterns' effect is in the shapes and logits above.
    assert load_adapter(plain, tmp_path / "again")(tokens).tolist() == model(tokens).tolist()
