"""The peers' own trainer packs real documents, and its tokens are counted (benchmarks/peers/trained.py)."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.peers.trained import steps_of, trl_loader

HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def mean_loss(model: torch.nn.Module, ids: list[int], counts: slice) -> float:
    tokens = torch.tensor(ids)[None]
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
    return losses[counts].mean().item()


def test_documents_are_packed_counted_and_kept_apart(tmp_path):
    """Three copies of one document make a row, whose loss is that of the document alone."""
    folder = write_checkpoint(HF, tmp_path / "model")
    document = np.random.default_rng(0).integers(0, 250, 20).tolist()
    (tmp_path / "documents.jsonl").write_text(24 * f"{json.dumps(document)}\n")
    words = {"peer": "trl", "recompute": "false", "load_in": None, "liger": False, "padded": False, "rows": 2}
    words |= {"model": str(folder), "length": 64, "steps": 2, "documents": tmp_path / "documents.jsonl"}
    options = argparse.Namespace(**words)
    model, tokenizer = trl_loader(options)()
    model.float()
    for parameter in model.parameters():  # so large that what is attended to shows in the loss
        parameter.data *= 10 if parameter.ndim == 2 else 1
    alone, joined = mean_loss(model, document, slice(None)), mean_loss(model, 3 * document, slice(20, 39))
    found = steps_of(model, tokenizer, 1, options)
    assert found["packing"] and found["padding_free"] and found["attention"] == "sdpa"
    assert found["tokens_per_step"] == 2 * 60
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(120)
    assert found["losses"][0] == pytest.approx(alone, rel=1e-4)
    assert abs(joined - alone) > 0.02 * alone
