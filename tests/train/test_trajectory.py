"""50 steps of LoRA in fp32 against a stored run of transformers + PEFT + torch's AdamW: the loss of every step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtune.train.data import TokenDataset, prepare
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Documents
from tests.train import trajectory as t

TOLERANCE = 1e-3


def tiny_dataset() -> TokenDataset:
    rows = t.tiny_rows()
    return TokenDataset(Documents.gather(rows), Summary(rows=len(rows), documents=len(rows)), t.LENGTHS["tiny"])


def story_dataset(test_data) -> TokenDataset:
    """Through the real data path: JSONL, tokenizer, BOS and EOS."""
    from transformers import AutoTokenizer

    model, rows = t.stories(test_data)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return prepare(rows, tokenizer, length=t.LENGTHS["stories260K"], num_workers=0)


def compare(case, losses, norms):
    golden = np.load(t.GOLDEN)
    want, want_norms = golden[f"{case}_loss"], golden[f"{case}_grad_norm"]
    assert len(losses) == len(want) == t.STEPS
    assert want[:5].mean() - want[-5:].mean() > 20 * TOLERANCE, "the golden must go somewhere"
    np.testing.assert_allclose(losses, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(norms, want_norms, rtol=2e-2)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_tiny_model(tmp_path, packed):
    folder = t.tiny_checkpoint(tmp_path / "base", "llama")
    compare("tiny", *t.ours(folder, tiny_dataset(), tmp_path / "run", packed))


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_stories260k(test_data, tmp_path, monkeypatch, packed):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    compare("stories260K", *t.ours(t.stories(test_data)[0], story_dataset(test_data), tmp_path / "run", packed))


@pytest.mark.full
def test_gated_delta_nets_train_alike_packed_and_not(tmp_path):
    """State, convolution and attention begin anew with each document, in both directions: but for rounding, packing
    changes neither a loss nor a gradient. docs/measured.md has it of a pretrained model."""
    folder = t.tiny_checkpoint(tmp_path / "base", "qwen3_5")
    losses, norms = zip(*(t.ours(folder, tiny_dataset(), tmp_path / str(p), p, steps=6) for p in (True, False)))
    assert min(norms[0]) > 0.01
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(*norms, rtol=1e-3)


def test_packed_rows_hold_several_documents():
    packed, unpacked = t.step_batches(tiny_dataset(), True), t.step_batches(tiny_dataset(), False)
    assert packed.rows_per_step < unpacked.rows_per_step == t.DOCUMENTS_PER_STEP
    assert packed.batch_at(0).segment_ids.max() >= 2
    for step in (0, 7, 49):
        assert packed.batch_at(step).weights.sum() == unpacked.batch_at(step).weights.sum()
