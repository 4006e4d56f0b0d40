"""The text of an answer while its tokens arrive, up to its stop strings."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence

from jaxtune.conversations.answers import AnswerStream, Pieces, overlap
from jaxtune.conversations.calls import Call

_PART_OF_CHARACTER = "\ufffd"  # what a decoder gives for bytes of a character whose other bytes follow


class Text:
    """Makes the thoughts and the text of one answer from its tokens, as pieces that no later token can change.

    The pieces are those of the text that decoding all tokens at once gives, up to the first stop string or call of a
    tool. A token alone cannot be decoded: it may be a part of a character, and the space before it depends on earlier
    tokens. Tokens are given to `add`, or, if the answer is sent whole, to `keep`; `end` is called once after the last.

    Args:
      decode: makes text of token ids.
      stops: strings that end the text and are no part of it.
      stream: tells thoughts, text and calls apart; None: all is text.
    Attributes:
      calls: the calls of tools, as entries of OpenAI's `tool_calls`, once `end` was called; empty before.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], stream: AnswerStream | None = None
    ):
        self._decode, self._stops, self._stream = decode, stops, stream
        self._ids: list[int] = []
        # Of the tokens up to `known` the text is known. It is decoded anew from `begin`, so that a token has the
        # spaces before it that it has in the whole text.
        self._begin = self._known = 0
        self._text = ""  # of the known tokens
        self._read = 0  # characters
        self.calls: list[dict[str, object]] = []

    def add(self, ids: Sequence[int]) -> Pieces:
        """Adds the next token ids of a streamed answer, and returns what is certain and was not returned yet."""
        self._ids += ids
        before = self._decode(self._ids[self._begin : self._known])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(_PART_OF_CHARACTER) or not now.startswith(before):
            return []
        self._text += now[len(before) :]
        self._begin, self._known = self._known, len(self._ids)
        certain = len(self._text)
        for stop in self._stops:
            place = self._text.find(stop, self._read)
            certain = min(certain, len(self._text) - overlap(self._text, stop) if place < 0 else place)
        return self._given(self._text[: max(certain, self._read)])

    def keep(self, ids: Sequence[int]) -> Pieces:
        """Adds token ids of an answer that is sent whole, which `end` returns."""
        self._ids += ids
        return []

    def end(self) -> Pieces:
        """Returns what was not returned yet, and sets `calls`."""
        text = self._decode(self._ids)
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        pieces = self._given(text[: min(places)] if places else text)
        if self._stream is not None:
            pieces += self._stream.end()
            self.calls = [_openai_call(call) for call in self._stream.calls]
        return pieces

    def _given(self, text: str) -> Pieces:
        """Reads what is new in `text`, the text of the answer from its start."""
        new, self._read = text[self._read :], max(self._read, len(text))
        if self._stream is not None:
            return self._stream.add(new)
        return [("content", new)] if new else []


def _openai_call(call: Call) -> dict[str, object]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
