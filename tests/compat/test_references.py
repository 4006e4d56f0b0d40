"""References of preference trainers in scripts: kept by the rows themselves, and not by how long they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

import jax

from jaxtune.compat import DPOConfig, DPOTrainer, FastLanguageModel
from jaxtune.models.lora import matrices
from jaxtune.train.data.tokens.documents import Documents, identity


def documents(tokens, mask=None) -> Documents:
    counts = np.array([len(each) for each in tokens])
    flat = np.concatenate([np.asarray(each, np.int32) for each in tokens])
    mask = np.ones(len(flat), np.uint8) if mask is None else np.asarray(mask, np.uint8)
    return Documents(flat, mask, np.cumsum(counts) - counts, counts, counts - 1)


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=5), min_size=1, max_size=4), st.data())
def test_rows_that_differ_in_one_token_or_mask_have_another_identity(tokens, data):
    one = documents(tokens)
    assert identity(one, one.lengths) == identity(documents(tokens), one.lengths)
    row = data.draw(st.integers(0, len(tokens) - 1))
    place = data.draw(st.integers(0, len(tokens[row]) - 1))
    other = [list(each) for each in tokens]
    other[row][place] += 1
    assert identity(documents(other), one.lengths) != identity(one, one.lengths)
    mask = np.ones(len(one.tokens))
    mask[int(one.starts[row]) + place] = 0
    assert identity(documents(tokens, mask), one.lengths) != identity(one, one.lengths)
    assert identity(one, one.lengths, ("a model",)) != identity(one, one.lengths)


def test_sets_of_equal_lengths_have_references_of_their_own(tmp_path):
    """The model is its reference, an adapter that was trained before: the loss of any set is log 2."""
    model, tokenizer = FastLanguageModel.from_pretrained("jaxtune/quickstart/base", max_seq_length=128, dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=["q_proj"])
    for index, (_, matrix) in enumerate(matrices(model.module)):
        if matrix.lora is not None:
            matrix.lora.b[...] = 0.5 * jax.random.normal(jax.random.key(index), matrix.lora.b.shape)
    config = DPOConfig(str(tmp_path), max_steps=1, per_device_train_batch_size=1, save_strategy="no", report_to="none")
    rows = [dict(prompt=f"Say one of {number}", chosen=str(number), rejected="34") for number in (12, 97)]
    trainer = DPOTrainer(model, config, train_dataset=rows[:1], eval_dataset=rows[1:], processing_class=tokenizer)
    for row in rows:
        assert trainer.evaluate([row])["eval_loss"] == pytest.approx(np.log(2), abs=1e-4)
