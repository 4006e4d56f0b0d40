"""A request after its body was read."""

from __future__ import annotations

import dataclasses

from jaxtune.conversations.calls import Schemas


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


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """What one request asks for, checked, with all defaults."""

    model: str
    """Its name."""
    rows: list[Row]
    """One for each answer; those to the same prompt follow each other."""
    prompt_tokens: int
    """Of all prompts, each counted once."""
    chat: bool
    """/v1/chat/completions or /v1/completions."""
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
