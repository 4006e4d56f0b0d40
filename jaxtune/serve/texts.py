"""The text of an answer while its tokens arrive, up to its stop strings, and the calls of tools in it: `Text`. By
`_overlap` it finds the end of a text in which a stop string or a call may begin."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence

from jaxtune.models.generation.requests import text_of
from jaxtune.serve.served import Tokenizer

_PART_OF_CHARACTER = "\ufffd"  # what a decoder gives for bytes of a character whose other bytes follow
# How Hermes' template, Qwen's and others' mark a call: a JSON object with name and arguments.
_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)


class Text:
    """Makes the text of one answer (a row, forms._Choice) from its tokens. Of a streamed answer, text is returned as
    soon as no later token can change it.

    The returned texts, joined, are the text that decoding all tokens at once gives, up to the first stop string or,
    with `tools`, the first call of a tool. A token alone cannot be decoded: it may be a part of a character, and the
    space before it depends on earlier tokens.

    If the answer is streamed, its tokens are given to `add`, which returns the text that is certain so far. If it is
    not, they are given to `keep`, which only stores them. In both cases `end` is called once after the last token: it
    returns the rest of the text (after `keep`, all of it) and sets `calls`.

    Args:
      tokenizer: decodes the tokens; special tokens are left out of the text.
      stops: strings that end the text and are no part of it.
      tools: True: calls of tools are looked for, and the text ends where the first call begins. False: all is text.
    Attributes:
      calls: the calls of tools, as entries of OpenAI's `tool_calls`, once `end` was called; empty before, and if there
        are none.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], tools: bool):
        self._tokenizer, self._stops = tokenizer, stops
        self._marks = (*stops, _CALL) if tools else tuple(stops)
        self._tools = tools
        self._ids: list[int] = []
        # Of the tokens up to `known` the text is known. It is decoded anew from `begin`, so that a token has the
        # spaces before it that it has in the whole text.
        self._begin = self._known = 0
        self._text = ""  # of the known tokens
        self._given = 0  # characters
        self.calls: list[dict[str, object]] = []

    def add(self, ids: Sequence[int]) -> str:
        """Adds the next token ids of a streamed answer, and returns the text that is certain and was not returned yet,
        which may be "". An incomplete character at the end is not certain, nor is text in which a stop string or, with
        `tools`, a call of a tool may begin: a later `add` returns them once the next tokens complete the character, or
        do not continue the string or call. From where a whole stop string or <tool_call> begins, nothing is returned
        before `end`, which decides on it."""
        self._ids += ids
        before = text_of(self._tokenizer, self._ids[self._begin : self._known])
        now = text_of(self._tokenizer, self._ids[self._begin :])
        if now.endswith(_PART_OF_CHARACTER) or not now.startswith(before):
            return ""
        self._text += now[len(before) :]
        self._begin, self._known = self._known, len(self._ids)
        certain = len(self._text)
        for mark in self._marks:
            found = self._text.find(mark, self._given)
            begins = len(self._text) - _overlap(self._text, mark) if found < 0 else found
            certain = min(certain, begins)
        return self._give(self._text[: max(certain, self._given)])

    def keep(self, ids: Sequence[int]) -> str:
        """Adds token ids without decoding them, and returns "": for an answer that is not streamed, whose text `end`
        returns as a whole."""
        self._ids += ids
        return ""

    def end(self) -> str:
        """Called once after the last token: sets `calls`, the calls of tools in the answer, and returns the text that
        was not returned yet (after `keep`, all of it), up to the first stop string or the first of these calls."""
        text = text_of(self._tokenizer, self._ids)
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        text = text[: min(found)] if found else text
        if self._tools:
            text = self._split(text)
        return self._give(text)

    def _give(self, text: str) -> str:
        """Returns the end of `text` that was not returned yet, and counts it as returned. text: the text of the answer
        from its start, as far as it can be returned."""
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece

    def _split(self, text: str) -> str:
        """Sets `calls` from the <tool_call> marks in a text, in OpenAI's form with new ids, and returns the text before
        the first of them; other text between and after the calls is dropped. If no mark is followed by braces, or
        one is not followed by a JSON object with a name, the whole text is returned and `calls` stays empty. `end`
        calls it."""
        begin = text.find(_CALL)
        if begin < 0:
            return text
        calls = []
        for found in _CALLS.finditer(text, begin):
            try:
                call = json.loads(found[1])
                name, arguments = call["name"], call.get("arguments", {})
            except (ValueError, KeyError, RecursionError):
                return text
            function = {"name": str(name), "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        if not calls or _CALL in _CALLS.sub("", text[begin:]):
            return text
        self.calls = calls
        return text[:begin]


def _overlap(text: str, mark: str) -> int:
    """The number of characters at the end of a text that may be the beginning of `mark`, a stop string or the mark of a
    call, but not the whole of it; 0 if there are none. Text.add does not return them before the next tokens show
    whether the mark continues."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
