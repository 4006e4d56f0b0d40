"""A Hugging Face tokenizer as GGUF metadata. llama.cpp implements "llama", which merges characters by scores as
SentencePiece does (byte_fallback), and "gpt2", which merges bytes within words by a fixed set of patterns. Any other is
refused: the model would read other tokens than in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jaxtune.models.families.common.key import Fields
from jaxtune.models.files.gguf_tokens import (
    BYTE,
    BYTE_TOKEN,
    CONTROL,
    NORMAL,
    NOT_STRIPPED,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
)


def strips_as_phi3(tokenizer: Any) -> bool:
    """Whether it drops whitespace after its added tokens, except <unk>, <s> and <|endoftext|>, as Phi-3's does, and has
    these and </s>. llama.cpp does so if and only if general.name contains "phi-3" or "phi3".
    """
    marks = [token for token in tokenizer.added_tokens_decoder.values() if token.content not in NOT_STRIPPED]
    return {"</s>", *NOT_STRIPPED} <= tokenizer.get_vocab().keys() and all(token.rstrip for token in marks)


def tokenizer_fields(
    tokenizer: Any, vocab_size: int, ends: Iterable[tuple[str, str]] = (), shown_tokens: Iterable[str] = ()
) -> Fields:
    """{GGUF's key: value} of a fast tokenizer and its chat template.

      tokenizer: a Hugging Face tokenizer; None: ValueError.
      vocab_size: rows of the embedding; those without a token become unused tokens.
      ends: (llama.cpp's key, text) of end tokens that it does not recognise.
      shown_tokens: special tokens that llama.cpp is to write into answers, such as marks of tool calls.

    Raises ValueError without a tokenizer or tokenizer.json, for another type than BPE, no merges, one that llama.cpp
    lacks, or a token beyond vocab_size.
    """
    if tokenizer is None:
        raise ValueError("gguf: the model has no tokenizer, and llama.cpp needs one: copy its files into the folder")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"gguf: {type(tokenizer).__name__} has no tokenizer.json: save it as a fast tokenizer")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ValueError(f"gguf: a tokenizer of type {model['type']} cannot be written; only BPE can")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if not merges:
        raise ValueError("gguf: the tokenizer has no merges, and llama.cpp loads no BPE tokenizer without any")
    tokens, types = _tokens(content, vocab_size)
    for number in (tokens.index(text) for text in shown_tokens if text in tokens):
        types[number] = USER_DEFINED
    if model.get("byte_fallback"):
        fields = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(tokens, merges),
            "tokenizer.ggml.add_space_prefix": _space_prefix(content),
        }
    else:
        fields = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _words(content),
            "tokenizer.ggml.merges": merges,
        }
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            fields[f"tokenizer.ggml.{key}_token_id"] = int(number)
    fields |= {f"tokenizer.ggml.{key}_token_id": tokens.index(text) for key, text in ends if text in tokens}
    ids = tokenizer("a")["input_ids"]
    fields["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    fields["tokenizer.ggml.add_eos_token"] = tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id
    return fields | _templates(tokenizer.chat_template)


def _tokens(content: Fields, vocab_size: int) -> tuple[list[str], list[int]]:
    """(texts, types), `vocab_size` each; ValueError for a token beyond the embedding."""
    model = content["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= vocab_size:
        raise ValueError(f"gguf: the tokenizer has token {max(texts)}, and the model's vocabulary is {vocab_size}")

    def kind(number: int) -> int:
        if number not in texts:
            return UNUSED
        if model.get("byte_fallback") and texts[number] == model.get("unk_token"):
            return UNKNOWN
        if number in added:
            return CONTROL if added[number]["special"] else USER_DEFINED
        return BYTE if model.get("byte_fallback") and BYTE_TOKEN.fullmatch(texts[number]) else NORMAL

    return [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)], [kind(i) for i in range(vocab_size)]


def _sequence(section: Fields | None, kinds: str) -> list[Fields]:
    if section is None:
        return []
    return section[kinds] if section["type"] == "Sequence" else [section]


def _words(content: Fields) -> str:
    """tokenizer.ggml.pre: llama.cpp's name of the pattern of words. ValueError if it has none."""
    steps = []
    for step in _sequence(content["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            steps += ["split", step["pattern"].get("Regex")]
        elif step["type"] == "Digits" and step["individual_digits"]:
            steps.append("digits")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            steps += ["gpt2"] * step["use_regex"]
        else:
            steps.append(step["type"])
    normalizers = {step["type"] for step in _sequence(content["normalizer"], "normalizers")} - {"NFC"}
    splitting = (tuple(steps), bool(content["model"].get("ignore_merges")))
    if normalizers or splitting not in WORDS:
        raise ValueError(
            f"gguf: llama.cpp has no tokenizer that divides text into words as this one does (pre_tokenizer "
            f"{json.dumps(content['pre_tokenizer'])[:200]}, normalizer {json.dumps(content['normalizer'])[:100]}); "
            f"it has {', '.join(WORDS.values())}. Other formats, such as --to merged, can have any tokenizer"
        )
    return WORDS[splitting]


def _space_prefix(content: Fields) -> bool:
    """Whether ▁ (U+2581) is put before the first word. ValueError for a step that llama.cpp lacks."""
    prefixed, replaced = False, False
    steps = _sequence(content["normalizer"], "normalizers") + _sequence(content["pre_tokenizer"], "pretokenizers")
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefixed = True
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": " "}, SPACE):
            replaced = True
        elif step["type"] == "Metaspace" and step["replacement"] == SPACE:
            prefixed, replaced = step["prepend_scheme"] != "never", True
        elif not (
            step["type"] == "Split" and step["pattern"] == {"String": " "}
        ):  # Gemma's, which splits nothing, as all spaces were replaced before
            raise ValueError(f"gguf: llama.cpp has no tokenizer with {json.dumps(step)[:200]}")
    if not replaced:
        raise ValueError(f"gguf: llama.cpp's tokenizer writes spaces as {SPACE}, and this one does not")
    return prefixed


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """llama.cpp merges the pair with the highest score, so these fall with the merges' places."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault(merge.replace(" ", ""), len(ranks))
    return [float(-ranks.get(token, len(ranks))) for token in tokens]


def _templates(template: str | dict[str, str] | None) -> Fields:
    """template: a Jinja text, several as {name: text}, or None."""
    if template is None or isinstance(template, str):
        return {"tokenizer.chat_template": template} if template else {}
    fields: Fields = {f"tokenizer.chat_template.{name}": t for name, t in template.items() if name != "default"}
    if fields:
        fields["tokenizer.chat_templates"] = [name for name in template if name != "default"]
    return fields | ({"tokenizer.chat_template": template["default"]} if "default" in template else {})
