"""Unsloth's load_in_fp8: weights in FP8, and products in FP8."""

import numpy as np
import pytest
from tiny_models import tiny_model

from jaxtune import from_pretrained
from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer
from jaxtune.models.files.quant import computes_in_fp8, quantize, stored_in
from jaxtune.models.hf import save_pretrained
from tests.train.data.conftest import make_tokenizer


def write(folder, load_in=None):
    tokenizer = make_tokenizer()
    model = tiny_model("bfloat16", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, head_dim=16)
    save_pretrained(model if load_in is None else quantize(model, load_in), folder, tokenizer=tokenizer)
    return str(folder)


@pytest.mark.full
def test_weights_and_products_are_in_fp8(tmp_path):
    """Through training, an adapter's folder and a merged model's; the run's config says what it trained over."""
    folder = write(tmp_path / "model")
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=64, load_in_fp8=True)
    assert stored_in(model.module) == "fp8" and computes_in_fp8(model.module)
    model = FastLanguageModel.get_peft_model(model, r=2)
    rows = [{"text": "The cat sat on the mat and looked at the moon."}] * 8
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_steps=3, save_strategy="no", learning_rate=1e-2)
    trainer = SFTTrainer(model, args=args, train_dataset=rows)
    assert (trainer.config().model.load_in, trainer.config().model.compute) == ("fp8", "fp8")
    trainer.train()
    assert np.isfinite([line["loss"] for line in trainer.state.log_history if "loss" in line]).all()
    model.save_pretrained(tmp_path / "adapter")
    for settings in ({}, {"load_in_fp8": True}):
        again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64, **settings)
        assert stored_in(again.module) == "fp8" and computes_in_fp8(again.module)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert stored_in(from_pretrained(tmp_path / "merged")[0]) is None


def test_what_is_stored_in_fp8_stays_so_and_four_bits_are_refused(tmp_path):
    model, _ = FastLanguageModel.from_pretrained(write(tmp_path / "fp8", "fp8"), max_seq_length=64, load_in_fp8=True)
    assert computes_in_fp8(model.module)
    with pytest.raises(ValueError, match="load_in = 'fp8', but its weights are stored in nf4"):
        FastLanguageModel.from_pretrained(write(tmp_path / "nf4", "nf4"), max_seq_length=64, load_in_fp8=True)
