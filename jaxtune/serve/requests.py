"""A request after its body was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from jaxtune.conversations.calls import Schemas
from jaxtune.conversations.picture_processors import PictureArrays

if TYPE_CHECKING:
    from jaxtune.models.generation.requests import Constraint


@dataclasses.dataclass(frozen=True)
class Row:
    """One answer that is asked for; a request with n=3 has three rows."""

    prompt: list[int]  # token ids
    max_new_tokens: int | None  # the most tokens of the answer; None: as many as the row has room for
    temperature: float  # 0: the most likely token is always taken
    seed: int  # of the request; what a row draws depends on this (its low 32 bits) and `index`
    index: int  # the row's number among those of its request, from 0
    top_k: int  # tokens are drawn from the k most likely ones; 0: from all
    top_p: float  # tokens are drawn from the most likely ones that have this much probability in sum; 1: from all
    min_p: float  # tokens less likely than this times the most likely one are not drawn; 0: all are
    repetition_penalty: float  # above 1: tokens that occurred before become less likely; 1: it does nothing
    stop_strings: tuple[str, ...]  # the answer ends with the token that completes one of them
    # how many of the most likely tokens at the position of each sampled one are returned with log-probabilities
    top_logprobs: int = 0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer contains
    frequency_penalty: float = 0.0  # subtracted from them as often as it contains them
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # {token id: added to its logit}
    min_tokens: int = 0  # tokens of the answer before which nothing ends it
    ignore_eos: bool = False  # the model's own end tokens do not end it
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end it
    grammar: str | None = None  # that the answer follows after its thoughts; of `grammars`
    call_grammar: str | None = None  # that its calls follow from their opening mark on; of `grammars`
    grammar_bytes: int = 0  # that it takes while it is followed
    constraint: Constraint | None = None  # of the grammar, in the process of the sampler
    pictures: PictureArrays | None = None  # of the prompt
    scores_prompt: bool = False  # the log-probabilities of the prompt's tokens are returned before the answer


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """What one request asks for, checked, with all defaults."""

    model: str
    """Its name."""
    rows: list[Row]
    """One for each answer; those to the same prompt follow each other."""
    prompt_tokens: int
    """Of all prompts, each counted once."""
    form: Literal["chat", "completion", "responses"]
    """Of the answer: of /v1/chat/completions, /v1/completions or /v1/responses."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens; a whole answer always has them."""
    logprobs: bool
    schemas: Schemas | None = None
    """Tools whose calls are looked for, {name: JSON schema}; None: none are."""
    opening: str = ""
    """What of an answer the prompt's end has, such as <think>."""
    role: str = "assistant"
    """Whose message a chat's answer is."""
    many_calls: bool = True
    """False: of several calls the first alone is returned."""
    client: str = ""
    """Who asks, as the request says."""
    shown: Mapping[str, object] | None = None
    """What of the request an answer of /v1/responses repeats."""
    echo: tuple[str, ...] = ()
    """Of each row, the text before its answer."""

    @property
    def picture_bytes(self) -> int:
        """Of the pictures' patches, which all rows share."""
        pictures = self.rows[0].pictures
        return 0 if pictures is None else np.asarray(pictures["patches"]).nbytes

    @property
    def grammar_bytes(self) -> int:
        """Of the grammar, which all rows share."""
        return self.rows[0].grammar_bytes


class Usage(NamedTuple):
    """The numbers of tokens of a request."""

    prompt_tokens: int  # of all prompts, each counted once
    answer_tokens: int
    reused: int  # of the prompts, those whose states an earlier prompt had left
    thought_tokens: int = 0  # of the answers' tokens, those of thoughts
