"""The packaged base model is the same model in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jaxtune

PACKAGE = Path(jaxtune.__file__).parent / "quickstart"


@pytest.mark.full
def test_packaged_model_in_transformers():
    ours, tokenizer = jaxtune.from_pretrained(PACKAGE / "base", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(PACKAGE / "base", dtype=torch.float32)
    rows = [json.loads(line) for line in (PACKAGE / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:8]]
    for row in rows:
        tokens = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits.numpy()
        np.testing.assert_allclose(ours(jnp.asarray([tokens])), expected, atol=1e-4, rtol=0)
