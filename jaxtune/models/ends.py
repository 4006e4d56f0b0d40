"""The tokens at which the texts of a model end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxtune.conversations.ends import answer_ends
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder


def end_token_ids(model: Decoder) -> list[int]:
    """Ids of the tokens that end a text, from generation_config.json, else config.json; may be empty."""
    if model.source is not None:
        for text in (model.source.generation_config, model.source.config):
            ids = json.loads(text).get("eos_token_id") if text else None
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []


def with_end_token_ids(model: Decoder, tokens: Sequence[int]) -> Decoder:
    """Adds end tokens to the model, and to the generation_config.json that it is saved with; in place. Ids beyond the
    vocabulary are left out; a model made from no files stays as it is.
    """
    source, ends = model.source, end_token_ids(model)
    new_ends = [token for token in dict.fromkeys(tokens) if token not in ends and token < model.config.vocab_size]
    if source is None or not new_ends:
        return model
    config = json.loads(source.config)
    special_ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    settings = special_ids if source.generation_config is None else json.loads(source.generation_config)
    text = json.dumps(settings | {"eos_token_id": [*ends, *new_ends]}, indent=2) + "\n"
    model.source = dataclasses.replace(source, generation_config=text)
    return model


def ends_of(model: Decoder, tokenizer: Tokenizer) -> list[int]:
    """Ascending ids of the tokens that end an answer; the model's arrays may be shapes."""
    return answer_ends(tokenizer, end_token_ids(model))


def with_end_tokens(model: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Makes the model's texts end where `ends_of` says, also after saving; in place. Needs a tokenizer, a config.json
    and a head for text, else nothing changes.
    """
    if tokenizer is None or model.source is None or not model.config.head.is_text:
        return model
    return with_end_token_ids(model, answer_ends(tokenizer))
