"""One row that the sampling engine continues: what was asked for, and its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from jaxtune.models.generation.sampling import Sampling


class Decodes(Protocol):
    """A tokenizer, as far as stop strings need one."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of tokens."""
        ...


FinishReason = Literal["stop", "length", "cancelled"]


class StopStrings:
    """Ends a row with the token that completes one of some strings in its new text.

    Args:
      strings: at least one, none of them empty. tokenizer: with `decode`, of a list of token ids.
    Raises:
      ValueError: there is no tokenizer, or an empty string.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Decodes | None, what: str = "generate"):
        if tokenizer is None or not all(strings):
            lacks = "give the tokenizer that turns tokens into text" if tokenizer is None else "one of them is empty"
            raise ValueError(f"{what}: stop_strings = {list(strings)!r}: {lacks}")
        self._strings, self._tokenizer = list(strings), tokenizer
        # A string can begin in earlier tokens. A character has at most four tokens (its bytes); some have none.
        self._reach = 4 * max(map(len, strings)) + 8

    def end(self, new: Sequence[int], looked_at: int) -> int | None:
        """How many of a row's new tokens there are up to the one that completes a string; None where none does.

        Args:
          looked_at: how many of them were looked at before, without one.
        """
        if not self._in(new[max(0, looked_at - self._reach) :]):
            return None
        return next((count for count in range(looked_at + 1, len(new) + 1) if self._in(new[:count])), None)

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens)
        return any(string in text for string in self._strings)


@dataclasses.dataclass(eq=False)
class Request:
    """A row that is waiting, decoding, or done."""

    # The sampler's name for it.
    number: int
    # The prompt, and what was made after it.
    tokens: list[int]
    # Tokens of the prompt.
    start: int
    # The row ends when it has this many tokens.
    limit: int
    sampling: Sampling
    # A row draws by its seed, its index under this seed, and its step.
    seed: int
    index: int
    # Tokens that end it.
    ends: frozenset[int]
    stops: StopStrings | None
    # Where it decodes; None while it waits.
    slot: int | None = None
    # How often it was placed in a slot.
    placed: int = 0
    # Rounds that decode it and were not read yet.
    rounds: int = 0
    # What its states are made of, by which rows of one prompt find each other; set while it waits.
    key: bytes = b""
    done: bool = False

    def take(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Adds what the device made: (the tokens that count, why the row ends or None)."""
        known = len(self.tokens) - self.start
        self.tokens += tokens
        if self.stops is not None and tokens:
            end = self.stops.end(self.tokens[self.start :], known)
            if end is not None:
                del self.tokens[self.start + end :]
                return self.tokens[self.start + known :], "stop"
        if tokens and tokens[-1] in self.ends:
            return tokens, "stop"
        return tokens, "length" if len(self.tokens) >= self.limit else None


def checked_prompt(prompt: Sequence[int], vocab_size: int, name: str) -> list[int]:
    """A prompt as a list of token ids.

    Args:
      name: of the prompt in errors, such as "generate: prompt 3".
    Raises:
      ValueError: it is not a list of token ids of this vocabulary, or it is empty.
    """
    row = np.asarray(prompt)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(f"{name} is not a list of token ids; encode text with the tokenizer first")
    if row.size == 0:
        raise ValueError(f"{name} is empty; it needs at least one token, such as BOS")
    if row.min() < 0 or row.max() >= vocab_size:
        bad = int(row.min() if row.min() < 0 else row.max())
        raise ValueError(f"{name} holds token id {bad}, outside the vocabulary of {vocab_size}")
    return row.tolist()


def checked_length(prompt: Sequence[int], max_new_tokens: int | None, positions: int, name: str, whose: str) -> int:
    """How many tokens a row has at most, its prompt included.

    Args:
      max_new_tokens: None: as many as there are positions for. positions: that there are. name: of the prompt, as in
        checked_prompt. whose: what has these positions, such as "the model has".
    Raises:
      ValueError: not a positive number; more tokens than positions.
    """
    if max_new_tokens is None:
        max_new_tokens = max(positions - len(prompt), 1)
    if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
        raise ValueError(f"{name.partition(':')[0]}: max_new_tokens = {max_new_tokens!r}: must be a positive integer")
    if len(prompt) + max_new_tokens > positions:
        raise ValueError(
            f"{name} of {len(prompt)} tokens and max_new_tokens = {max_new_tokens} need "
            f"{len(prompt) + max_new_tokens} positions; {whose} {positions}: shorten one of them"
        )
    return len(prompt) + int(max_new_tokens)
