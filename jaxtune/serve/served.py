"""What a server offers under one name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxtune.conversations.answers import AnswerReader
from jaxtune.conversations.messages import template_for
from jaxtune.conversations.picture_processors import PictureReader
from jaxtune.conversations.token_bytes import TokenBytes

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.generation.grammars import Grammars
    from jaxtune.models.generation.requests import Constraint
    from jaxtune.serve.requests import ParsedRequest, Row
    from jaxtune.serve.trials import Trials


class Tokenizer(Protocol):
    """What a server needs of transformers' tokenizers; ServedModel copies it deeply."""

    # the chat template, a Jinja text or several by name; None or empty: the tokenizer has none, and chats are refused
    @property
    def chat_template(self) -> object: ...

    def __len__(self) -> int: ...

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


# Settings of generation_config.json that are defaults of requests: what is accepted, and what has no effect.
SETTINGS: dict[str, tuple[Callable[[float], bool], float]] = {
    "temperature": (lambda value: 0 <= value <= 2, 1.0),
    "top_k": (lambda value: value >= 0 and value == int(value), 0),
    "top_p": (lambda value: 0 < value <= 1, 1.0),
    "min_p": (lambda value: 0 <= value <= 1, 0.0),
    "repetition_penalty": (lambda value: 0 < value <= 100, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Readable:
    """What requests to a model are read with, in a process without the model."""

    name: str
    tokenizer: Tokenizer
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of SETTINGS, where requests have none
    pictures: PictureReader | None = None  # None: it reads none
    why_no_pictures: str = "it was loaded without its tower"
    ends: tuple[int, ...] = ()  # ids of the tokens that end an answer
    vocab_size: int = 0  # the model's; 0: there is none, and no answer
    # what clients ask for, (name, kind, values), becomes a grammar in it and is compiled; None: here, untried
    trials: Trials[tuple[str, str, tuple], str] | None = dataclasses.field(default=None, compare=False)
    # {what a client asked for: (grammar, bytes)} that passed its trial here
    passed: dict[tuple[str, str], tuple[str | None, int]] = dataclasses.field(default_factory=dict, compare=False)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Made in seconds. ValueError without llguidance or a fast tokenizer."""
        from jaxtune.models.generation.grammars import Grammars

        return Grammars(self.tokenizer, self.ends, self.vocab_size)

    @functools.cached_property
    def _readers(self) -> dict[bool, AnswerReader]:
        templates = self.tokenizer.chat_template
        return {tools: AnswerReader(self.tokenizer, template_for(templates, tools)) for tools in (False, True)}

    def text(self, ids: Sequence[int], specials: bool = False) -> str:
        """The text of token ids. specials: with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=not specials, clean_up_tokenization_spaces=False)

    def reader(self, tools: bool) -> AnswerReader:
        """Reads answers to conversations with or without tools."""
        return self._readers[tools]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model, with an adapter or without, under the name by which clients ask for it."""

    name: str  # the `model` of a request's body
    model: Decoder  # the base model, or the base model with an adapter, whose tensors may be in host memory
    tokenizer: Tokenizer  # decodes here; `readers` encode
    # for a model with an adapter, the name of its base model, which /v1/models shows as `parent`; None: it is the base
    base: str | None = None
    pictures: PictureReader | None = None  # how they are read, by a model with its tower
    why_no_pictures: str = Readable.why_no_pictures

    @property
    def adapter(self) -> str | None:
        """By which name the sampler has its adapter; None: it has none."""
        return None if self.base is None else self.name

    @functools.cached_property
    def ends(self) -> list[int]:
        """Ids of the tokens that end its answers."""
        from jaxtune.models.ends import end_token_ids

        return end_token_ids(self.model)

    @functools.cached_property
    def readable(self) -> Readable:
        config = getattr(self.model, "config", None)
        follows = {} if config is None else {"ends": tuple(self.ends), "vocab_size": config.vocab_size}
        places = self.defaults, self.pictures, self.why_no_pictures
        return Readable(self.name, self.tokenizer, *places, **follows)

    @functools.cached_property
    def defaults(self) -> dict[str, float]:
        """SETTINGS of the model's generation_config.json that have an effect; those out of range are left out."""
        source = getattr(self.model, "source", None)
        recorded = json.loads(source.generation_config) if source is not None and source.generation_config else {}
        defaults = {}
        for name, (accepts, neutral) in SETTINGS.items():
            value = recorded.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and accepts(value) and value != neutral:
                defaults[name] = value
        return defaults

    @functools.cached_property
    def _grammars(self) -> Grammars:
        from jaxtune.models.generation.grammars import Grammars

        return Grammars(self.tokenizer, self.ends, self.model.config.vocab_size)

    def prepare_grammars(self) -> None:
        """So that the first request with a grammar stops nobody; nothing without llguidance."""
        with contextlib.suppress(ImportError, ValueError):
            _ = self._grammars

    def constrained(self, request_values: ParsedRequest) -> list[Row]:
        """The rows with constraints for their grammars. May take a second. ValueError: a grammar is not followed."""
        rows = request_values.rows
        if all(row.grammar is None and row.call_grammar is None for row in rows):
            return rows
        with_tools, is_chat = request_values.schemas is not None, request_values.form != "completion"
        reader = self.readable.reader(with_tools) if is_chat else None

        def constraint(row: Row) -> Constraint | None:
            if row.call_grammar is not None and reader is not None:
                return self._grammars.of_calls(row.call_grammar, reader, bool(request_values.opening))
            if row.grammar is None:
                return None
            if reader is None:
                return self._grammars.constraint(row.grammar)
            before = reader.before_content(row.prompt, request_values.opening)
            return self._grammars.constraint(row.grammar, *before)

        return [dataclasses.replace(row, constraint=constraint(row)) for row in rows]

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)
