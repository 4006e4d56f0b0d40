"""tokenizer_config.json of a saved tokenizer: its base's own, in which only what changed is written, so that the
versions of transformers that load the base load it too.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtune.models.families.common.key import Config, Fields

NAME = "tokenizer_config.json"
_ATTRIBUTE = "jaxtune_base_settings"  # of a loaded tokenizer; copies have it too
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What transformers 5 writes of how it loaded the files, and keys that `merged` writes in another form.
_OF_LOADING = {"local_files_only", "backend", "is_local", "name_or_path", "tokenizer_file"}
_OWN_FORM = {*_TOKENS, "tokenizer_class", "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"}
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def remember(tokenizer: object, settings: Config) -> None:
    """Keeps the base's tokenizer_config.json with a tokenizer that was loaded from it."""
    setattr(tokenizer, _ATTRIBUTE, dict(settings))


def merged(tokenizer: object, written: Config) -> Fields:
    """The tokenizer_config.json to save.

    written: what this version of transformers wrote.
    """
    base: Config = getattr(tokenizer, _ATTRIBUTE, {})
    result = {key: value for key, value in base.items() if key not in ("chat_template", "auto_map")}
    if isinstance(base.get("extra_special_tokens"), list):  # version 4 knows a dict there
        del result["extra_special_tokens"]
    result |= {key: value for key, value in written.items() if key not in _OF_LOADING | _OWN_FORM}
    for key in _TOKENS:
        token = getattr(tokenizer, key, None)
        if token != _text(base.get(key)):
            result[key] = token
    name = base.get("tokenizer_class", written.get("tokenizer_class"))
    # A name that only transformers 5 has is of a tokenizer.json alone; it knows the older one, too.
    result["tokenizer_class"] = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name
    template = getattr(tokenizer, "chat_template", None)
    if "chat_template" in base and isinstance(template, str):  # also in chat_template.jinja
        result["chat_template"] = template
    result |= _special(base, written)
    if "added_tokens_decoder" in base:
        result["added_tokens_decoder"] = _added(base["added_tokens_decoder"], tokenizer)
    return result


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, Mapping) else token


def _special(base: Config, written: Config) -> Fields:
    """Special tokens without a role: transformers 5 writes them as a list under the key of a dict of version 4."""
    now = written.get("extra_special_tokens", [])
    if not isinstance(now, list):
        return {"extra_special_tokens": now}
    named = [_text(token) for token in base.get("additional_special_tokens") or []]
    if isinstance(base.get("extra_special_tokens"), Mapping):
        named += [_text(token) for token in base["extra_special_tokens"].values()]
    more = [token for token in now if _text(token) not in named]
    return {"additional_special_tokens": [*(base.get("additional_special_tokens") or []), *more]} if more else {}


def _added(base: Config, tokenizer: object) -> Fields:
    """The base's entries, and those of tokens that were added or changed."""
    result = dict(base)
    for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        entry = {"content": str(token)} | {flag: getattr(token, flag) for flag in _FLAGS}
        if dict(base.get(str(number), {})) != entry:
            result[str(number)] = entry
    return result
