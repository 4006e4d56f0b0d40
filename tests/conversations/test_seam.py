"""Texts that are tokenised in pieces: their tokens are those of the text, whatever the pieces are."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.conversations import tokenizing
from jaxtune.conversations.tokenizing import tokenize, tokenize_pieces

NAMES = ("gpt-oss", "llama-2", "llama-3.2", "mistral-7b-v0.3", "phi-4", "qwen2.5", "qwen3")
WORDS = [
    "Hello",
    "yes",
    " no",
    "\n",
    "\n\n",
    " ",
    "  ",
    ":",
    "é",
    "世界",
    "🙂",
    "123",
    "<b>",
    "'s",
    "\t",
    "x",
    ". ",
    "▁",
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text("ab :\n1é", min_size=1, max_size=4), min_size=2, max_size=9)


@functools.cache
def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_decode_to_the_text_and_are_its_tokens_where_no_token_is_cut(name, test_data):
    tokenizer = tokenizer_of(test_data / "tokenizers" / name)

    @settings(max_examples=40, deadline=None, database=None)
    @given(TEXTS, st.data())
    def check(words, data):
        text = "".join(words).replace("▁", "_" if name in ("llama-2", "mistral-7b-v0.3") else "▁")
        whole = tokenize(tokenizer, [text])[0]
        shown = tokenizer.decode(whole.ids)
        cuts = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=4)))
        cuts = [cut for cut in cuts if cut < len(text)]
        pieces = tokenize_pieces(tokenizer, text, cuts)
        assert tokenizer.decode(pieces.ids) == shown, (text, cuts)
        assert not any(start < cut < end for cut in cuts for start, end in zip(pieces.starts, pieces.ends, strict=True))
        prompt = tokenize(tokenizer, [text[: cuts[0]]])[0] if cuts else whole
        assert pieces.ids[: len(prompt)].tolist() == prompt.ids.tolist()
        assert tokenize_pieces(tokenizer, text, []).ids.tolist() == whole.ids.tolist()

    check()


@pytest.mark.parametrize("name", ["llama-2", "mistral-7b-v0.3"])
def test_an_answer_after_a_space_gets_no_second_one(name, test_data):
    tokenizer = tokenizer_of(test_data / "tokenizers" / name)
    text = "Question: Is it? Answer: yes, it is"
    pieces = tokenize_pieces(tokenizer, text, [text.index("yes")])
    assert "  " not in tokenizer.decode(pieces.ids)
    assert tokenizer.convert_ids_to_tokens(pieces.ids.tolist())[-5:] == ["▁", "yes", ",", "▁it", "▁is"]


@pytest.mark.parametrize("name", ["llama-2", "mistral-7b-v0.3", "qwen3"])
def test_windows_without_a_token_in_common_have_no_space_between_them(name, test_data, monkeypatch):
    tokenizer = tokenizer_of(test_data / "tokenizers" / name)
    monkeypatch.setattr(tokenizing, "WINDOW", 64)
    monkeypatch.setattr(tokenizing, "OVERLAP", 1)
    text = "One two three, four and five are numbers. " * 12
    found = tokenize(tokenizer, [text])[0]
    assert tokenizer.decode(found.ids) == text
