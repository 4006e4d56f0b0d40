"""Hugging Face tokenizers from the metadata of GGUF files."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from jaxtune.models.families.common.key import Config

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTED + "|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTED + "|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {(how text is divided into words, whether a word that is in the vocabulary is not merged): tokenizer.ggml.pre}
WORDS = {
    (("split", _GPT4_WORDS % "{1,3}"), True): "llama-bpe",
    (("split", _GPT4_WORDS % "{1,3}"), False): "dbrx",
    (("split", _GPT4_WORDS % ""), False): "qwen2",
    (("split", _O200K_WORDS), False): "gpt-4o",
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "smollm",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # SentencePiece writes a space so
NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}  # Phi-3's tokenizer keeps whitespace after these
# Other names of tokenizer.ggml.pre for the same.
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_COMPOSED = {"qwen2"}  # whose tokenizers compose characters first (NFC), which llama.cpp leaves out
_BEGINS = {"llama-bpe"}  # that put BOS first unless the file says otherwise, as "llama" does


def require_known(file: str, fields: Config) -> None:
    """Raises ValueError unless `tokenizer_of` supports the model and pre-tokenizer."""
    model, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    fix = "set model.tokenizer (in Python: load the tokenizer yourself) to a folder with the model's tokenizer.json"
    if model not in ("llama", "gpt2"):
        raise ValueError(f"{file}: tokenizer.ggml.model = {model!r} is not supported, only 'llama' and 'gpt2'; {fix}")
    if model == "gpt2" and _ALIASES.get(str(words), words) not in WORDS.values():
        supported = ", ".join(dict.fromkeys((*WORDS.values(), *_ALIASES)))
        raise ValueError(f"{file}: tokenizer.ggml.pre = {words!r} is not supported, only {supported}; {fix}")


def tokenizer_of(file: str, fields: Config) -> PreTrainedTokenizerFast:
    """The fast tokenizer with its chat templates. Raises ValueError if it is not supported, or metadata do not fit each
    other.
    """
    require_known(file, fields)
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type")
    types = types or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{file}: {len(tokens)} tokens, and {len(types)} types of tokens; convert the model again")
    spm = fields["tokenizer.ggml.model"] == "llama"
    if spm:  # runs of spaces that SentencePiece lists as the user's are pieces that merge first
        pairs = zip(tokens, types, strict=True)
        types = [NORMAL if SPACE in token and kind == USER_DEFINED else kind for token, kind in pairs]
    backend = _sentencepiece_tokenizer(fields, tokens, types) if spm else _byte_level_tokenizer(fields, tokens, types)

    def text(key: str) -> str | None:
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[int(number)] if number is not None and 0 <= int(number) < len(tokens) else None

    named = {"bos": text("bos"), "eos": text("eos"), "unk": text("unknown"), "pad": text("padding")}
    strips = spm and re.search("phi-?3", str(fields.get("general.name")), re.IGNORECASE) is not None
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=strips and token not in NOT_STRIPPED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    backend.add_tokens(added)
    words = str(fields.get("tokenizer.ggml.pre"))
    begins = fields.get("tokenizer.ggml.add_bos_token", spm or _ALIASES.get(words, words) in _BEGINS)
    backend.post_processor = _processor(
        named["bos"] if begins else None, named["eos"] if fields.get("tokenizer.ggml.add_eos_token") else None, backend
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": value for name, value in named.items() if value is not None},
    )
    tokenizer.chat_template = _templates(fields)
    return tokenizer


def _byte_level_tokenizer(fields: Config, tokens: list[str], types: list[int]) -> Tokenizer:
    """A byte-level tokenizer ("gpt2")."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = _ALIASES.get(str(fields["tokenizer.ggml.pre"]), fields["tokenizer.ggml.pre"])
    steps, ignores = next(rule for rule, name in WORDS.items() if name == words)
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignores))
    if words in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    if steps[0] == "split":
        cuts = [pre_tokenizers.Split(Regex(steps[1]), "isolated"), byte_level(use_regex=False)]
    else:
        cuts = [pre_tokenizers.Digits(individual_digits=True)] * ("digits" in steps) + [byte_level(use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(fields: Config, tokens: list[str], types: list[int]) -> Tokenizer:
    """A tokenizer of SentencePiece's kind ("llama"); scores order its merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    merges = merges_of(tokens, types, fields["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def merges_of(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make the pieces of a vocabulary, by the piece's score, then by the longest beginning.

    tokens, types, scores: of the vocabulary's length, as the file has them; types are gguf.TokenType's.
    """
    ordinary = {token: scores[number] for number, token in enumerate(tokens) if types[number] == NORMAL}
    merges = [
        (score, split, len(token) - split, token)
        for token, score in ordinary.items()
        for split in range(1, len(token))
        if token[:split] in ordinary and token[split:] in ordinary
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:split], token[split:]) for _, split, _, token in merges]


def _processor(begin: str | None, end: str | None, tokenizer: Tokenizer) -> TemplateProcessing | None:
    """Adds BOS and EOS; None if neither is wanted."""
    from tokenizers import processors

    if begin is None and end is None:
        return None
    ends = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token is not None]
    before, after = [f"{begin}:0"] * (begin is not None), [f"{end}:0"] * (end is not None)
    single = [*before, "$A:0", *after]
    pair = [*single, *(step.replace(":0", ":1").replace("$A", "$B") for step in single)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)


def _templates(fields: Config) -> str | dict[str, str] | None:
    """The chat template, or {name: template} where there are several."""
    default = fields.get("tokenizer.chat_template")
    named = {name: fields.get(f"tokenizer.chat_template.{name}") for name in fields.get("tokenizer.chat_templates", [])}
    named = {name: template for name, template in named.items() if template is not None}
    return {**({"default": default} if default else {}), **named} if named else default
