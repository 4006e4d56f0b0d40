"""Answers as OpenAI's JSON: `Answer` makes it from the tokens of a request's rows, whole or as the chunks of a stream.
`_Choice` collects the text, tool calls and log-probabilities of one row; the log-probabilities get a chat's form by
`_chat_logprobs` or a completion's by `_Choice._completion_logprobs`, which name tokens by `_token`."""

from __future__ import annotations

import functools
import secrets
import time

from jaxtune.conversations.answers import Pieces
from jaxtune.models.generation.requests import Piece, text_of
from jaxtune.serve.bodies import Asked
from jaxtune.serve.served import Tokenizer
from jaxtune.serve.texts import Text

type _Ranked = list[list[tuple[str, float]]]  # for each token, the most likely ones in its place: text, log-probability

_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that has no probability: JSON has no infinity


class _Choice:
    """One row of an Answer, which OpenAI's API calls a choice. `add` takes the row's new tokens and returns the text
    that can be sent now. `calls` are the calls of tools in the text, once the row has ended. `logprobs` returns the
    log-probabilities of the tokens that were added since it was last called.

    Args:
      asked: what the request asks for.
      index: the row's index in `asked.rows`.
    Attributes:
      index: the argument `index`.
      tokens: the number of tokens so far, with those whose text is left out (an end token, a stop string).
      reason: why the row ended, OpenAI's finish_reason ("stop", "length", "tool_calls"); None: it has not.
    """

    def __init__(self, asked: Asked, index: int):
        self._asked, self.index = asked, index
        self._tokenizer = asked.served.decoder
        reader, tokenizer = asked.reader, self._tokenizer
        stops, stream, decode = asked.rows[index].stop_strings, None, functools.partial(text_of, tokenizer)
        if reader is not None:
            stream = reader.stream(asked.schemas, asked.opening)
            decode = functools.partial(reader.text, calls=asked.schemas is not None)
        self._text = Text(decode, stops, stream)
        self._ids: list[int] = []  # whose log-probabilities were not given yet
        self._logprobs: list[float] = []
        self._ranked: list[list[tuple[int, float]]] = []  # the most likely tokens at the position of each of these
        self._characters = 0  # before them
        self.tokens = 0
        self.reason: str | None = None

    def add(self, piece: Piece, stream: bool) -> Pieces:
        """Adds the row's new tokens and returns the thoughts and the text that can be sent now.

        Args:
          piece: the new tokens, and why the row ended if it has; then `reason` is set, and `calls` if there are any.
          stream: True: what later tokens cannot change is returned at once. False: all is with the last tokens.
        """
        self.tokens += len(piece.ids)
        if self._asked.logprobs:
            self._ids += piece.ids
            self._logprobs += [max(value, _LEAST_LOGPROB) for value in piece.logprobs]
            self._ranked += piece.top_logprobs or [[] for _ in piece.ids]
        pieces = self._text.add(piece.ids) if stream else self._text.keep(piece.ids)
        if piece.finish_reason is not None:
            pieces += self._text.end()
            self.reason = "tool_calls" if self._text.calls else piece.finish_reason
        return pieces

    @property
    def calls(self) -> list[dict[str, object]]:
        """The calls of tools in the row's text, in OpenAI's form of `tool_calls`. It is empty until the row has ended,
        and if there are none. If there are any, `add` has set `reason` to "tool_calls"."""
        return self._text.calls

    def logprobs(self) -> dict[str, object] | None:
        """OpenAI's `logprobs` object (a chat's and a completion's differ) for all tokens since the last call of this
        method, also those whose text is left out; None if the request did not ask for it. Values below -9999, such as
        minus infinity, are -9999."""
        if not self._asked.logprobs:
            return None
        form = _chat_logprobs if self._asked.chat else self._completion_logprobs
        ranked = [
            [(_token(self._tokenizer, number), max(value, _LEAST_LOGPROB)) for number, value in tokens]
            for tokens in self._ranked
        ]
        found = form([_token(self._tokenizer, number) for number in self._ids], self._logprobs, ranked)
        self._ids, self._logprobs, self._ranked = [], [], []
        return found

    def _completion_logprobs(self, tokens: list[str], logprobs: list[float], ranked: _Ranked) -> dict[str, object]:
        """Makes the `logprobs` object of /v1/completions, in which each key has a list with an entry for each token:
        tokens its text, token_logprobs its log-probability, text_offset the position of its first character in the
        answer, counted over the tokens' texts, and top_logprobs the most likely tokens at its position, as {text:
        log-probability}, in which tokens with equal texts share a key. If the request asked for no most likely tokens,
        top_logprobs is None instead of a list, and `ranked` is not read. It counts the characters, so that the next
        call continues the positions.

        Args:
          tokens: the tokens' texts.
          logprobs: their log-probabilities.
          ranked: for each token the most likely ones at its position, as (text, log-probability).
        """
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(token)
        # Of tokens with the same text the most likely one, which comes first, is kept.
        top = [dict(reversed(one)) for one in ranked] if self._asked.rows[self.index].top_logprobs else None
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _token(tokenizer: Tokenizer, number: int) -> str:
    """The text that `tokenizer` gives for the token with the id `number`, decoded alone: it has U+FFFD for a token that
    is only a part of a character. A special token has its own text, such as <|im_end|>. The log-probabilities of an
    answer name tokens so."""
    return tokenizer.decode([number], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _chat_logprobs(tokens: list[str], logprobs: list[float], ranked: _Ranked) -> dict[str, object]:
    """Makes the `logprobs` object of /v1/chat/completions, {"content": a list with an entry for each token, "refusal":
    None}. An entry has the token's text, its log-probability, its UTF-8 bytes (None for a token that is a part of a
    character), and the same of the most likely tokens at its position.

    Args:
      tokens: the tokens' texts.
      logprobs: their log-probabilities.
      ranked: for each token the most likely ones at its position, as (text, log-probability).
    """

    def entry(token: str, logprob: float) -> dict[str, object]:
        """The entry of one token: its text, log-probability and UTF-8 bytes (None for a part of a character)."""
        whole = "\ufffd" not in token  # a part of a character has no text of its own
        own = list(token.encode("utf-8", "replace")) if whole else None
        return {"token": token, "logprob": logprob, "bytes": own}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*one) for one in top]}
        for token, logprob, top in zip(tokens, logprobs, ranked, strict=True)
    ]
    return {"content": content, "refusal": None}


class Answer:
    """The answer to one request, a chat's or a completion's (asked.chat), as OpenAI's JSON, built from the tokens of
    its rows as they arrive in Pieces (the new tokens of one row).

    For an answer that is sent whole, app._whole calls `add` for each Piece, and `whole` at the end for the JSON object.
    For a stream, app._events yields the JSON objects of `first_chunks`, then those of `chunks` for each Piece, and
    those of `last_chunks` at the end.

    Args:
      asked: what the request asks for.
    """

    def __init__(self, asked: Asked):
        self._asked = asked
        self._choices = [_Choice(asked, index) for index in range(len(asked.rows))]
        self._pieces: list[Pieces] = [[] for _ in asked.rows]
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": asked.served.name,
        }

    def add(self, index: int, piece: Piece) -> None:
        """Adds `piece`, the new tokens of the row with this index in the request, to an answer that is sent whole."""
        self._pieces[index] += self._choices[index].add(piece, stream=False)

    def whole(self) -> dict[str, object]:
        """Returns the JSON object of the whole answer, of a chat or a completion. It may be called once all rows have
        ended. If a chat's message calls tools and has no text, its `content` is null."""
        choices = []
        for choice, pieces in zip(self._choices, self._pieces, strict=True):
            form: dict[str, object] = {"index": choice.index, "finish_reason": choice.reason}
            thoughts, text = ("".join(text for kind, text in pieces if kind == of) for of in ("thought", "content"))
            if self._asked.chat:
                message: dict[str, object] = {"role": self._asked.role, "content": text, "refusal": None}
                if thoughts:
                    message["reasoning_content"] = thoughts
                if choice.calls:
                    message |= {"content": text or None, "tool_calls": choice.calls}
                form["message"] = message
            else:
                form["text"] = text
            choices.append(form | {"logprobs": choice.logprobs()})
        return self._head | {"choices": choices, "usage": self._usage()}

    def first_chunks(self) -> list[dict[str, object]]:
        """The JSON objects that a stream begins with: for a chat, one for each choice, with its role; for a completion,
        []."""
        if not self._asked.chat:
            return []
        begin = {"role": self._asked.role, "content": ""}
        return [self._chunk({"index": c.index, "delta": begin, "finish_reason": None}) for c in self._choices]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """The JSON objects that a stream sends for `piece`, the new tokens of the row with this index in the request:
        for thoughts and text that later tokens cannot change, for the tool calls, and for the reason why the row ended.
        The first of them has the log-probabilities, if they are asked for, of all tokens since the last chunk of the
        row; the others then have none."""
        choice = self._choices[index]
        pieces, found = choice.add(piece, stream=True), []

        def chunk(delta: dict[str, object], reason: str | None) -> None:
            """Adds a chunk with `delta`, the new content, and `reason`, why the row ended (None: it has not), to
            `found`."""
            form: dict[str, object] = {"index": index, "finish_reason": reason}
            form |= {"delta": delta} if self._asked.chat else {"text": delta.get("content", "")}
            found.append(self._chunk(form | {"logprobs": choice.logprobs()}))

        for kind, text in pieces:
            chunk({"content" if kind == "content" else "reasoning_content": text}, None)
        if choice.calls:
            chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(choice.calls)]}, None)
        if choice.reason is not None:
            chunk({}, choice.reason)
        return found

    def last_chunks(self) -> list[dict[str, object]]:
        """The JSON objects that a stream ends with: one with the numbers of tokens if the request asks for it
        (include_usage), else none."""
        return [self._head | {"choices": [], "usage": self._usage()}] if self._asked.include_usage else []

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        """The JSON object of a chunk of a stream; its `usage` is null if the request asks for it (include_usage), and
        else left out. choice: OpenAI's JSON of what is new in one row."""
        return self._head | {"choices": [choice]} | ({"usage": None} if self._asked.include_usage else {})

    def _usage(self) -> dict[str, int]:
        """OpenAI's `usage` object, for `whole` and, in a stream whose request asks for it, for `last_chunks`: the
        number of tokens of all prompts, that of all answers so far, and their sum."""
        asked, made = self._asked.prompt_tokens, sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
