"""What a server offers under one name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxtune.conversations.answers import AnswerReader
from jaxtune.conversations.messages import template_for

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder


class Tokenizer(Protocol):
    """What a server needs of transformers' tokenizers; ServedModel copies it deeply."""

    # the chat template, a Jinja text or several by name; None or empty: the tokenizer has none, and chats are refused
    @property
    def chat_template(self) -> object: ...

    def __call__(self, text: str, /, **options: object) -> Mapping[str, list[int]]:
        """{"input_ids": token ids}"""
        ...

    def decode(
        self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str:
        """The text of token ids.

        skip_special_tokens: leave out special tokens.
        clean_up_tokenization_spaces: remove spaces before punctuation.
        """
        ...

    def apply_chat_template(self, conversation: list[dict[str, object]], /, **options: object) -> str: ...


@dataclasses.dataclass(frozen=True)
class Readable:
    """What requests to a model are read with, in a process without the model."""

    name: str
    tokenizer: Tokenizer

    @functools.cached_property
    def _readers(self) -> dict[bool, AnswerReader]:
        templates = self.tokenizer.chat_template
        return {tools: AnswerReader(self.tokenizer, template_for(templates, tools)) for tools in (False, True)}

    def reader(self, tools: bool) -> AnswerReader:
        """Reads answers to conversations with or without tools."""
        return self._readers[tools]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model, with an adapter or without, under the name by which clients ask for it."""

    name: str  # the `model` of a request's body
    model: Decoder  # the base model, or the base model with an adapter; the command makes the model's sampler of it
    tokenizer: Tokenizer  # decodes here; `readers` encode
    # for a model with an adapter, the name of its base model, which /v1/models shows as `parent`; None: it is the base
    base: str | None = None

    @functools.cached_property
    def readable(self) -> Readable:
        return Readable(self.name, self.tokenizer)

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    def token_text(self, token: int) -> str:
        """The text of one token alone: U+FFFD for a part of a character, a special token's own text."""
        text = self._texts.get(token)
        if text is None:
            text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._texts[token] = text
        return text
