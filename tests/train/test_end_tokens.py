"""A model that was taught to end its turns with a token that its base does not know as an end stops there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tiny_models import tiny_model

from jaxtune import from_pretrained, get_peft_model, merge_adapter, save_adapter, save_pretrained
from jaxtune.commands import common
from jaxtune.compat import FastLanguageModel
from jaxtune.conversations.ends import turn_ends
from jaxtune.models.config import LayerSpec
from jaxtune.models.ends import end_token_ids, with_end_tokens
from jaxtune.train.config import DataConfig
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

ROWS = [{"messages": [{"role": "user", "content": "Name one"}, {"role": "assistant", "content": "red"}]}] * 4


def options_for(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(model=str(folder), dtype="float32", load_in=None)


@pytest.mark.full
def test_what_a_run_taught_to_end_a_turn_ends_texts_wherever_it_goes(tmp_path):
    tokenizer = make_tokenizer(eos="<|eos|>")
    eos, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|eos|>", "<|im_end|>"))
    assert turn_ends(tokenizer) == [end]
    save_pretrained(
        tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), tmp_path / "base", tokenizer=tokenizer
    )
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "top_p": 0.8}))
    base, tokenizer = from_pretrained(tmp_path / "base", dtype="float32")
    config = make_config(tmp_path / "run", steps=1, data=DataConfig(train="rows", length=64))
    given = get_peft_model(base, r=2)
    trained = Trainer(given, tokenizer, config, ROWS).train()
    assert end_token_ids(given) == end_token_ids(base) == [eos]
    assert end_token_ids(trained) == [eos, end]

    save_pretrained(merge_adapter(trained), tmp_path / "merged", tokenizer=tokenizer)
    written = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [eos, end], "top_p": 0.8}
    save_adapter(trained, tmp_path / "adapter", tokenizer)
    for folder in ("merged", "adapter"):
        assert end_token_ids(common.load(options_for(tmp_path / folder))[0]) == [eos, end]
    tokenizer.chat_template += "{# its own #}"  # the adapter's is what it was trained with
    tokenizer.save_pretrained(tmp_path / "adapter")
    loaded, its_own = FastLanguageModel.from_pretrained(
        str(tmp_path / "adapter"), max_seq_length=64, load_in_4bit=False
    )
    assert end_token_ids(loaded.module) == [eos, end] and its_own.chat_template == tokenizer.chat_template


def test_an_end_that_is_known_or_no_template_shows_changes_nothing(tmp_path):
    tokenizer = make_tokenizer()
    save_pretrained(tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),)), tmp_path, tokenizer=tokenizer)
    model, tokenizer = from_pretrained(tmp_path, dtype="float32")
    source = model.source
    assert end_token_ids(model) == turn_ends(tokenizer)
    assert with_end_tokens(model, tokenizer).source is source
    tokenizer.chat_template = None
    assert turn_ends(tokenizer) == [] and with_end_tokens(model, None).source is source
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_ends(tokenizer) == [] and with_end_tokens(model, tokenizer).source is source
