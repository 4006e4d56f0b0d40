"""Rows whose calls of tools follow a grammar, from the mark that opens calls to their end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxtune.conversations.answers import Mark
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.system.terminal import say

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TAIL = 64  # tokens in which a mark is looked for that is no token of its own
_SECONDS = 1.0  # of a processor, that the calls of a row may take: other rows wait meanwhile


class Compiled:
    """A grammar's matcher before its first token."""

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher


class Watched:
    """The marks that a family's answers have, in the tokens of one tokenizer.

    opens: the mark before calls. thoughts: those around thoughts, or none.

    Attributes:
      ends: tokens that may complete a mark.
    """

    def __init__(self, tokenizer: Tokenizer, opens: Mark, *thoughts: Mark):
        self._tokenizer, self.opens, self.thoughts = tokenizer, opens, thoughts
        names, ends = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), set()
        for mark in (opens, *thoughts):
            sign = mark.text[-1] if mark.text[-1].isascii() else ""  # other letters have other names in vocabularies
            named = (token for token, name in enumerate(names) if sign in str(name))
            ends.update(named if mark.token is None else [mark.token])
        self.ends = frozenset(ends)

    def completes(self, mark: Mark, ids: Sequence[int]) -> bool:
        """Whether the last of some tokens completes a mark."""
        if mark.token is not None:
            return ids[-1] == mark.token
        return self._text(ids).count(mark.text) > self._text(ids[:-1]).count(mark.text)

    def of_mark(self, mark: Mark, ids: Sequence[int]) -> list[int]:
        """The last of some tokens, from the one in which a mark begins."""
        starts = range(len(ids) - 1, 0, -1)
        first = next((start for start in starts if mark.text in self._text(ids[start:])), 0)
        return [*ids[first if mark.token is None else -1 :]]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class CallConstraint:
    """A `requests.Waiting`: of any text and thoughts, with calls of a grammar. One that takes too long is left.

    first: of the text up to the mark, and of calls; it is copied.
    width, bits: words of a mask, and of llguidance's, which may have more.
    watched: the marks of the answer.
    thinks: whether the row begins within thoughts.
    """

    def __init__(self, first: Compiled, width: int, bits: int, watched: Watched, thinks: bool):
        self._first, self._width, self._bits, self._watched, self._thinks = first, width, bits, watched, thinks
        self._tail: list[int] = []  # before a mark
        self._matcher: LLMatcher | None = None  # of the calls that have begun
        self._masked = False  # whether it has masked a token of theirs
        self._seconds = _SECONDS  # that are left
        self.dropped = 0

    @property
    def waits(self) -> bool:
        return self._matcher is None

    def mask(self) -> np.ndarray | None:
        if self._matcher is None:
            return None
        from llguidance.numpy import fill_next_token_bitmask

        began, bits = time.thread_time(), np.zeros((1, self._bits), np.int32)
        fill_next_token_bitmask(self._matcher, bits, 0)
        if not self._goes_on(began):
            return None
        self._masked = True
        return bits[0].view(np.uint32)[: self._width]

    def accept(self, tokens: Sequence[int]) -> bool:
        self.dropped = 0
        if self._matcher is None and self._watched.ends.isdisjoint(tokens):
            self._tail += tokens
            return False
        for place, token in enumerate(tokens):
            if self._matcher is None:
                self._look(token)
            elif not self._take(token):
                self.dropped = len(tokens) - place
                break
        return False

    def _look(self, token: int) -> None:
        watched = self._watched
        self._tail = [*self._tail[1 - _TAIL :], token]
        if token not in watched.ends:
            return
        if watched.thoughts and watched.completes(watched.thoughts[self._thinks], self._tail):
            self._thinks, self._tail = not self._thinks, []
        elif not self._thinks and self._seconds > 0 and watched.completes(watched.opens, self._tail):
            matcher, begun = self._first.matcher.deep_copy(), watched.of_mark(watched.opens, self._tail)
            if matcher.try_consume_tokens(begun) == len(begun):
                self._matcher, self._masked = matcher, False
            self._tail = []

    def _take(self, token: int) -> bool:
        """Whether the row keeps a token of a call; of those that were made before the mark was known some are not."""
        matcher, began = self._matcher, time.thread_time()
        assert matcher is not None
        taken = matcher.try_consume_tokens([token]) == 1
        if not self._goes_on(began) or (not taken and self._masked):
            self._matcher = None
            return True
        if taken and matcher.is_accepting():
            self._matcher = None
        return taken

    def _goes_on(self, began: float) -> bool:
        """Whether the grammar is followed on; else any token may come."""
        assert self._matcher is not None
        self._seconds -= time.thread_time() - began
        if self._seconds > 0 and not self._matcher.is_error():
            return True
        say("jaxtune: the grammar of a call takes too long to follow: the row goes on without it", sys.stderr)
        self._matcher, self._seconds = None, 0.0
        return False
