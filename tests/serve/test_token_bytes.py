"""Log-probabilities beside tokens whose bytes, joined, are the text, with offsets in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.conversations.token_bytes import TokenBytes
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.requests import Piece
from jaxtune.serve.bodies import read_chat, read_completion
from jaxtune.serve.engine import PromptScores
from jaxtune.serve.forms import Answer
from tests.serve.running import stub_model
from tests.train.data.conftest import make_tokenizer

NAMES = ("gpt-oss", "llama-2", "llama-3.2", "mistral-7b-v0.3", "phi-4", "qwen2.5", "qwen3")
FOLDER = Path(os.environ["JAXTUNE_TEST_DATA"]) / "tokenizers" if "JAXTUNE_TEST_DATA" in os.environ else None


def sentence_piece():
    """A tiny tokenizer like Llama 2's: spaces in front of words, one before the text, bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdogrks", "▁a", "▁b", "ar", "ks"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "r"), ("k", "s")]
    model = models.BPE(
        {word: number for number, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = "{{ messages[0].content }}"
    return made


TOKENIZERS = {"byte-level": make_tokenizer(), "SentencePiece": sentence_piece()}
TOKENIZERS |= {name: load_tokenizer(FOLDER / name) for name in NAMES if FOLDER}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(["hé ", "😀", " a", "a dog barks", "\n", "漢字", "x", "  ", "ü"]), min_size=1).map("".join)
)
def test_bytes_tokens_and_offsets_are_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    served = stub_model("m", None, tokenizer)
    models, lengths = {"m": served.readable}, {"m": 9999}
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    ranked = [[(number, -1.0), (5, -2.0)] for number in ids]
    piece = Piece(0, ids, [-1.0] * len(ids), "length", ranked)

    tokenizer.chat_template = tokenizer.chat_template or "{{ messages[0].content }}"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    answer = Answer(read_chat(body, models, lengths), served)
    answer.add(0, piece)
    [choice] = answer.whole()["choices"]
    entries = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert joined == whole == choice["message"]["content"]
    assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [entry["bytes"] for entry in entries]

    answer = Answer(read_completion({"model": "m", "prompt": "x", "logprobs": 2}, models, lengths), served)
    answer.add(0, piece)
    [choice] = answer.whole()["choices"]
    given_offsets = choice["logprobs"]["text_offset"]
    for token, offset, entry in zip(choice["logprobs"]["tokens"], given_offsets, entries, strict=True):
        if token.startswith("bytes:"):
            assert bytes(entry["bytes"])[:1] in choice["text"][offset].encode() or bytes(entry["bytes"])[0] > 127
        else:
            assert choice["text"][offset : offset + len(token)] == token
    assert given_offsets == sorted(given_offsets)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_offsets_of_a_prompt_that_is_shown(name):
    served = stub_model("m", None, tokenizer := TOKENIZERS[name])
    models, lengths, text = {"m": served.readable}, {"m": 9999}, "hé 😀 x"
    body = {"model": "m", "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0}
    asked = read_completion(body, models, lengths)
    ids = asked.rows[0].prompt
    answer = Answer(asked, served)
    answer.add(0, PromptScores([-1.0] * (len(ids) - 1), [[] for _ in ids[1:]]))
    new = tokenizer("x", add_special_tokens=False)["input_ids"][-1]
    answer.add(0, Piece(0, [new], [-1.0], "length", [[]]))
    [choice] = answer.whole()["choices"]
    values = choice["logprobs"]
    starts = {
        token.strip(): offset for token, offset in zip(values["tokens"][:-1], values["text_offset"], strict=False)
    }
    assert choice["text"][values["text_offset"][-1] :] == values["tokens"][-1]
    assert values["text_offset"][-1] == len(text) and starts["x"] in (4, 5) and choice["text"].startswith(text)


def test_words_of_sentence_piece_keep_their_spaces():
    of = TokenBytes(tokenizer := TOKENIZERS["SentencePiece"])
    ids = tokenizer.convert_tokens_to_ids(["▁a", "a", "<0xF0>", "</s>"])
    assert [*map(of, ids)] == [b" a", b"a", b"\xf0", b"</s>"] and of.alone(ids[0]) == b"a"
