"""What a server offers under one name: a model, with an adapter or without, and how it reads and writes text."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxtune.models.decoder import Decoder


class Tokenizer(Protocol):
    """The methods of a tokenizer of transformers that a server needs."""

    chat_template: object

    def __call__(self, text: str, /) -> Mapping[str, list[int]]:
        """{"input_ids": the token ids of a text}, with the special tokens that begin a text, such as BOS."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids, with or without special tokens."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, object]], /, **options: object) -> list[int]:
        """The token ids of a conversation, a list of messages with role and content. `options` are those of
        transformers; with tokenize=True and return_dict=False the result is a list of ids."""
        ...


@dataclasses.dataclass(frozen=True)
class Served:
    """A model under the name by which clients ask for it."""

    name: str
    model: Decoder
    tokenizer: Tokenizer
    # The name of the base, for an adapter.
    base: str | None = None
    # A copy of the tokenizer. One that encodes in one thread cannot decode in another at the same time.
    decoder: Tokenizer = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "decoder", copy.deepcopy(self.tokenizer))
