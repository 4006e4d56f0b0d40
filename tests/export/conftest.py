from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


def byte_tokenizer():
    """A tokenizer over bytes that cuts text as Qwen's does, of 128 tokens, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet[:120])}
    merges = [("t", "h"), ("th", "e")]
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_tokens(["<think>"])
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
    return fast
