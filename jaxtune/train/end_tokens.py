"""Where the texts of a trained model end.

A base model's generation_config.json knows no turns. What fine-tuning taught to end one would be talked past, by
generation here and by whoever loads what is saved.
"""

from __future__ import annotations

from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import with_end_token_ids
from jaxtune.train.data.formats import Example
from jaxtune.train.data.row_errors import RowError
from jaxtune.train.data.templates import RowEncoder

_TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]


def turn_end(tokenizer: Any) -> int | None:
    """The special token that ends a response in the tokenizer's chat template, as it is trained; None where there is
    none."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return None
    encoder = RowEncoder(tokenizer)
    (row,) = encoder.encode([Example(messages=_TURNS)])
    if isinstance(row, RowError) or not row.mask.any():
        return None
    last = int(row.tokens[row.mask][-1])
    return last if last in encoder.end_ids else None


def with_end_tokens(model: Decoder, tokenizer: Any) -> Decoder:
    """The model, changed in place: its texts, and those of the folder that it is saved to, also end with what ends a
    response in the tokenizer's chat template, and with its EOS."""
    if tokenizer is None or model.source is None or not model.config.head.is_text:
        return model
    taught = (turn_end(tokenizer), tokenizer.eos_token_id)
    return with_end_token_ids(model, [token for token in taught if token is not None])
