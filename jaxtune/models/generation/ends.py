"""The tokens at which the text of a model ends, and adding further ones to a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxtune.conversations.ends import answer_ends
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder


def end_token_ids(model: Decoder) -> list[int]:
    """Ids of the tokens that end a text, from the model's generation_config.json, or if that names none, from its
    config.json; [] if neither names any, and for random weights without such files. Generation ends rows at them unless
    its caller names others, runs and evaluations that sample answers end them there too, and an adapter's folder
    records them."""
    if model.source is not None:
        for text in (model.source.generation_config, model.source.config):
            ids = json.loads(text).get("eos_token_id") if text else None
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []


def with_end_token_ids(model: Decoder, tokens: Sequence[int]) -> Decoder:
    """Adds tokens, by their ids, at which the model's texts end, such as those that training taught it; also for the
    folder that it is saved to (its generation_config.json). The model is changed in place, and returned. load_adapter
    and training call it.

    Ids of at least the vocabulary's size are left out, and a model without a Source, which was made from no files,
    stays as it is.
    """
    source, ends = model.source, end_token_ids(model)
    more = [token for token in dict.fromkeys(tokens) if token not in ends and token < model.config.vocab_size]
    if source is None or not more:
        return model
    config = json.loads(source.config)
    others = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    settings = others if source.generation_config is None else json.loads(source.generation_config)
    text = json.dumps(settings | {"eos_token_id": [*ends, *more]}, indent=2) + "\n"
    model.source = dataclasses.replace(source, generation_config=text)
    return model


def ends_of(model: Decoder, tokenizer: Tokenizer) -> list[int]:
    """The ids of the tokens that end an answer of the model, in ascending order; its arrays may be shapes."""
    return answer_ends(tokenizer, end_token_ids(model))


def with_end_tokens(model: Decoder, tokenizer: Tokenizer) -> Decoder:
    """The model, whose texts, and those of folders that it is saved to, end where `ends_of` says; changed in place.

    A model that scores texts, or was built without a config.json, stays as it is, as all do without a tokenizer.
    """
    if tokenizer is None or model.source is None or not model.config.head.is_text:
        return model
    return with_end_token_ids(model, answer_ends(tokenizer))
