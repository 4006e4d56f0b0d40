"""Tokenizers in GGUF: what llama.cpp would make of a text is what the tokenizer makes of it, or there is no file."""

from __future__ import annotations

import itertools
import json

import pytest

from jaxtune.export.gguf_tokenizer import tokenizer_fields
from jaxtune.models.files.model_folder import load_tokenizer

# How the real tokenizers cut text, by llama.cpp's names; None: by SentencePiece's characters.
REAL = {
    "gpt-oss": "gpt-4o",
    "llama-3.2": "llama-bpe",
    "phi-4": "dbrx",
    "qwen2.5": "qwen2",
    "qwen3": "qwen2",
    "llama-2": None,
    "mistral-7b-v0.3": None,
}
TEXTS = ["Hello, world!", "two  spaces and 1234", "Grüße aus Köln\n\n中文 🙂", "don't\tTAB"]


def key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def merged_by_scores(text: str, fields) -> list[int]:
    """As llama.cpp's "llama" tokenizer does it: of all neighbours that make a token, those of the highest score merge
    first, the leftmost of equals; what is no token is spelled in bytes."""
    ids = {token: index for index, token in enumerate(fields[key("tokens")])}
    scores = fields[key("scores")]
    text = (" " if fields[key("add_space_prefix")] else "") + text
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name, test_data):
    folder = test_data / "tokenizers" / name
    tokenizer = load_tokenizer(folder)
    size = len(tokenizer) + 3
    fields = tokenizer_fields(tokenizer, size)
    tokens, types = fields[key("tokens")], fields[key("token_type")]
    assert len(tokens) == len(types) == size
    assert tokens[-3:] == [f"[PAD{i}]" for i in range(size - 3, size)] and types[-3:] == [5, 5, 5]
    assert [tokens[i] for i in range(0, size - 3, 997)] == tokenizer.convert_ids_to_tokens(range(0, size - 3, 997))
    assert fields[key("eos_token_id")] == tokenizer.eos_token_id
    assert types[tokenizer.eos_token_id] == 3  # control
    assert fields.get("tokenizer.chat_template") == tokenizer.chat_template
    assert fields[key("add_bos_token")] == (tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id)
    if REAL[name] is not None:
        assert (fields[key("model")], fields[key("pre")]) == ("gpt2", REAL[name])
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        assert fields[key("merges")][::9999] == [" ".join(pair) for pair in model["merges"][::9999]]
        return
    assert fields[key("model")] == "llama" and fields[key("unknown_token_id")] == tokenizer.unk_token_id
    assert types[tokenizer.unk_token_id] == 2 and types[tokens.index("<0x0A>")] == 6
    for text in TEXTS:  # before a text that begins with one, Metaspace puts no other space, as SentencePiece does
        assert merged_by_scores(text, fields) == tokenizer(text, add_special_tokens=False)["input_ids"], text


def test_added_tokens_that_are_not_special_are_the_users(tokenizer):
    fields = tokenizer_fields(tokenizer, 128)
    types = dict(zip(fields[key("tokens")], fields[key("token_type")], strict=True))
    assert (types["<think>"], types["<|end|>"], types["the"]) == (4, 3, 1)
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template


def test_special_tokens_that_answers_show(tokenizer):
    """Such as Gemma 4's marks of tool calls, which llama.cpp's parsers look for in the text; others stay hidden."""
    fields = tokenizer_fields(tokenizer, 128, shown_tokens=("<|end|>", "<|tool_call>"))
    types = dict(zip(fields[key("tokens")], fields[key("token_type")], strict=True))
    assert (types["<|end|>"], types["<|pad|>"]) == (4, 3)


def changed(tokenizer, change):
    """A tokenizer whose tokenizer.json is another one."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    change(parts)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["pre_tokenizer"]["pretokenizers"].pop(0),
            "no tokenizer that divides text into words as this one does",
        ),
        (
            lambda p: p["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\d|\D+"),
            "divides text into words as this one",
        ),
        (lambda p: p.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda p: p["model"].update(ignore_merges=True), "divides text into words as this one does"),
        (lambda p: p["model"].update(merges=[]), "has no merges, and llama.cpp loads no BPE tokenizer without any"),
        (lambda p: p["model"].update(byte_fallback=True), r"llama.cpp has no tokenizer with \{"),
        (
            lambda p: p.update(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}, added_tokens=[]),
            "of type Unigram cannot be written",
        ),
    ],
)
def test_tokenizers_that_llama_cpp_has_not(change, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenizer_fields(changed(tokenizer, change), 128)


def test_no_tokenizer_and_one_that_is_too_large(tokenizer):
    with pytest.raises(ValueError, match="the model has no tokenizer, and llama.cpp needs one"):
        tokenizer_fields(None, 128)
    with pytest.raises(ValueError, match=r"the tokenizer has token \d+, and the model's vocabulary is 100"):
        tokenizer_fields(tokenizer, 100)
