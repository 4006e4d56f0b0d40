"""The tokens at which generation from a trained model ends.

The generation_config.json of a base model usually does not name the token that ends a turn. Without that token,
generation would continue past the end of a turn that fine-tuning has taught, here and in other programs that load the
saved model. `turn_end` finds the token in a tokenizer's chat template. `with_end_tokens` adds it, and the tokenizer's
EOS, to the end tokens of a model, in place, so that the folders that the model is saved to name them too.
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
    """The id of the special token that ends a response in the chat template of a Hugging Face tokenizer, found by
    rendering a short conversation. None if the tokenizer has no template or is not fast, if the template cannot render
    that conversation, or if its responses do not end with a special token. Generation stops at it: that of trained
    models (with_end_tokens), of evaluation.generate, and of training on sampled answers with tools. Exact match finds
    the end of an answer in another way (`evaluate.Question.closing`)."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return None
    encoder = RowEncoder(tokenizer)
    (row,) = encoder.encode([Example(messages=_TURNS)])
    if isinstance(row, RowError) or not row.mask.any():
        return None
    last = int(row.tokens[row.mask][-1])
    return last if last in encoder.end_ids else None


def with_end_tokens(model: Decoder, tokenizer: Any) -> Decoder:
    """Adds the token that ends a response in the tokenizer's chat template, and the tokenizer's EOS, as far as there
    are such tokens, to the tokens at which generation from the model ends. Trainer.train calls it for its result, and
    commands that generate, such as chat and serve, for the model that they load. The model is changed in place and
    returned; folders that it is saved to have these tokens too. Nothing is added if there is no tokenizer (None), if
    the model scores texts, or if it was built without a config.json (its `source` is None)."""
    if tokenizer is None or model.source is None or not model.config.head.is_text:
        return model
    taught = (turn_end(tokenizer), tokenizer.eos_token_id)
    return with_end_token_ids(model, [token for token in taught if token is not None])
