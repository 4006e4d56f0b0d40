"""The text of an answer while its tokens arrive, up to its stop strings."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence

from jaxtune.conversations.answers import AnswerStream, Pieces, overlap
from jaxtune.conversations.call_ids import new_id
from jaxtune.conversations.calls import Call, json_text

_CHARACTER_BYTES = 4  # at most, each perhaps a token
_MOST_UNFINISHED = 16  # tokens without the end of a character: they are no text that could still become one
_PART_OF_CHARACTER = "\ufffd"  # what a decoder gives for bytes of a character whose other bytes follow


class Text:
    """Thoughts and text of one answer as pieces that no later token can change, up to the first stop string or call.

    A token alone cannot be decoded: it may be a part of a character, and its leading space depends on earlier tokens.
    Call `add` for each, or `keep` if the answer is sent whole, then `end` once.

    Args:
      stops: end the text and are no part of it.
      least: tokens in which no stop is looked for.
      stream: tells thoughts, text and calls apart; None: all is text.
    Attributes:
      calls: entries of OpenAI's `tool_calls`, after `end`.
      thought_tokens: how many tokens are of thoughts, after `end`.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        stream: AnswerStream | None = None,
        least: int = 0,
    ):
        self._decode, self._stops, self._stream, self._least = decode, stops, stream, least if stops else 0
        self._ids: list[int] = []
        # Of the tokens up to `_known` the text is known. It is decoded anew from `_begin`, so that a token has the
        # spaces before it that it has in the whole text.
        self._begin = self._known = 0
        self._text = ""  # of the known tokens
        self._read = 0  # characters
        self.calls: list[dict[str, object]] = []
        self.thought_tokens = 0

    def add(self, ids: Sequence[int]) -> Pieces:
        """Adds token ids, and returns what is certain and was not returned yet."""
        self._ids += ids
        if not self._decoded(len(self._ids)):
            if len(self._ids) - self._known <= _MOST_UNFINISHED:
                return []
            self._decoded(len(self._ids) - _CHARACTER_BYTES, broken=True)
        certain = len(self._text)
        if self._least >= len(self._ids):
            return self._new_pieces(self._text)
        start = self._stops_from
        for stop in self._stops:
            offset = self._text.find(stop, max(self._read, start))
            certain = min(certain, len(self._text) - overlap(self._text, stop) if offset < 0 else offset)
        return self._new_pieces(self._text[: max(certain, self._read)])

    def _decoded(self, end: int, broken: bool = False) -> bool:
        """Makes the text of the tokens up to `end` known, unless its last character is unfinished and not broken."""
        before = self._decode(self._ids[self._begin : self._known])
        decoded = self._decode(self._ids[self._begin : end])
        if not broken and (decoded.endswith(_PART_OF_CHARACTER) or not decoded.startswith(before)):
            return False
        self._text += decoded[len(before) :]
        self._begin, self._known = self._known, end
        return True

    def keep(self, ids: Sequence[int]) -> Pieces:
        """Adds token ids of an answer that `end` returns."""
        self._ids += ids
        return []

    def end(self, cut: bool = False) -> Pieces:
        """Returns what was not returned yet, and sets `calls`. cut: the row did not end by itself."""
        text = self._text if self._known == len(self._ids) else self._decode(self._ids)
        start = self._stops_from
        offsets = [offset for offset in (text.find(stop, start) for stop in self._stops) if offset >= 0]
        pieces = self._new_pieces(text[: min(offsets)] if offsets else text)
        if self._stream is not None:
            pieces += self._stream.end(cut)
            self.calls = [_openai_call(call) for call in self._stream.calls]
            spans = [(self._tokens_of(begin), self._tokens_of(end)) for begin, end in self._stream.thinking]
            self.thought_tokens = sum(end - begin for begin, end in spans)
        return pieces

    def _tokens_of(self, characters: int) -> int:
        """How many tokens have so many characters, which the last of them may end."""
        sizes = range(len(self._ids) + 1)
        return bisect.bisect_left(
            sizes, characters, key=lambda count: len(self._decode(self._ids[:count])), hi=len(self._ids)
        )

    @functools.cached_property
    def _stops_from(self) -> int:
        """The first character in which a stop may begin, once there are `least` tokens."""
        return len(self._decode(self._ids[: self._least])) if self._least else 0

    def _new_pieces(self, text: str) -> Pieces:
        """The new pieces of `text`, the answer's text from its start."""
        new, self._read = text[self._read :], max(self._read, len(text))
        if self._stream is not None:
            return self._stream.add(new)
        return [("content", new)] if new else []


def _openai_call(call: Call) -> dict[str, object]:
    function = {"name": call.name, "arguments": json_text(call.arguments)}
    return {"id": new_id(), "type": "function", "function": function}
