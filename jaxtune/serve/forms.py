"""Answers as OpenAI's JSON: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time

from jaxtune.models.generation.sampler import Piece
from jaxtune.serve.bodies import Asked
from jaxtune.serve.served import Tokenizer
from jaxtune.serve.texts import Text

type _Ranked = list[list[tuple[str, float]]]  # for each token, the most likely ones in its place: text, log-probability

_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that has no probability: JSON has no infinity


class _Choice:
    """One row of the answer, which OpenAI's API calls a choice: its text, log-probabilities and number of tokens.

    Args:
      asked: the request.
      index: the row's index in `asked.rows`.
    """

    def __init__(self, asked: Asked, index: int):
        self._asked, self.index = asked, index
        self._tokenizer = asked.served.decoder
        self._text = Text(self._tokenizer, asked.rows[index].stop_strings, asked.tools)
        self._ids: list[int] = []  # whose log-probabilities were not given yet
        self._logprobs: list[float] = []
        self._ranked: list[list[tuple[int, float]]] = []  # the most likely tokens at the position of each of these
        self._characters = 0  # before them
        self.tokens = 0
        self.reason: str | None = None

    def add(self, piece: Piece, stream: bool) -> str:
        """Adds the tokens of a piece; returns the text that can be sent now.

        In a stream that is the text which later tokens cannot change, and with the last piece all the rest. Otherwise
        it is "" until the last piece, and then the whole text.
        """
        self.tokens += len(piece.ids)
        if self._asked.logprobs:
            self._ids += piece.ids
            self._logprobs += [max(value, _LEAST_LOGPROB) for value in piece.logprobs]
            self._ranked += piece.top_logprobs or [[] for _ in piece.ids]
        text = self._text.add(piece.ids) if stream else self._text.keep(piece.ids)
        if piece.finish_reason is not None:
            text += self._text.end()
            self.reason = "tool_calls" if self._text.calls else piece.finish_reason
        return text

    @property
    def calls(self) -> list[dict[str, object]]:
        """The calls of tools in OpenAI's form, once the row has ended; empty if there are none."""
        return self._text.calls

    def logprobs(self) -> dict[str, object] | None:
        """OpenAI's `logprobs` object (a chat's and a completion's differ) for the tokens since the last call of this
        method; None if the request did not ask for it."""
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
        """`logprobs` of a completion: the tokens' texts, log-probabilities and first characters in the answer, and the
        most likely tokens at the position of each with their log-probabilities."""
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(token)
        top = [dict(one) for one in ranked] if self._asked.rows[self.index].top_logprobs else None
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _token(tokenizer: Tokenizer, number: int) -> str:
    """The text of one token id, special tokens included."""
    return tokenizer.decode([number], skip_special_tokens=False)


def _chat_logprobs(tokens: list[str], logprobs: list[float], ranked: _Ranked) -> dict[str, object]:
    """`logprobs` of a chat: for each token its text, its log-probability, and its UTF-8 bytes (None for a part of a
    character), and the same of the most likely tokens in its place."""

    def entry(token: str, logprob: float) -> dict[str, object]:
        whole = "\ufffd" not in token  # a part of a character has no text of its own
        own = list(token.encode("utf-8", "replace")) if whole else None
        return {"token": token, "logprob": logprob, "bytes": own}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*one) for one in top]}
        for token, logprob, top in zip(tokens, logprobs, ranked, strict=True)
    ]
    return {"content": content, "refusal": None}


class Answer:
    """The answer to one request as OpenAI's JSON, built from the pieces of its rows: either whole (`add`, then
    `whole`), or as a stream (`first_chunks`, `chunks` for each piece, `last_chunks`).

    Args:
      asked: the request.
    """

    def __init__(self, asked: Asked):
        self._asked = asked
        self._choices = [_Choice(asked, index) for index in range(len(asked.rows))]
        self._texts = [""] * len(asked.rows)
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": asked.served.name,
        }

    def add(self, index: int, piece: Piece) -> None:
        """Adds a piece of row `index` to an answer that is sent whole."""
        self._texts[index] += self._choices[index].add(piece, stream=False)

    def whole(self) -> dict[str, object]:
        """The JSON object of the whole answer; called when all rows have ended."""
        choices = []
        for choice, text in zip(self._choices, self._texts, strict=True):
            form: dict[str, object] = {"index": choice.index, "finish_reason": choice.reason}
            if self._asked.chat:
                message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
                if choice.calls:
                    message |= {"content": text or None, "tool_calls": choice.calls}
                form["message"] = message
            else:
                form["text"] = text
            choices.append(form | {"logprobs": choice.logprobs()})
        return self._head | {"choices": choices, "usage": self._usage()}

    def first_chunks(self) -> list[dict[str, object]]:
        """The JSON objects that a stream begins with: for a chat, the role of each choice; else none."""
        if not self._asked.chat:
            return []
        begin = {"role": "assistant", "content": ""}
        return [self._chunk({"index": c.index, "delta": begin, "finish_reason": None}) for c in self._choices]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """The JSON objects that a stream sends for a piece of row `index`: its certain text, its tool calls, and the
        reason why it ended, each if there is any."""
        choice = self._choices[index]
        text, found = choice.add(piece, stream=True), []

        def chunk(delta: dict[str, object], reason: str | None) -> None:
            form: dict[str, object] = {"index": index, "finish_reason": reason}
            form |= {"delta": delta} if self._asked.chat else {"text": delta.get("content", "")}
            found.append(self._chunk(form | {"logprobs": choice.logprobs()}))

        if text:
            chunk({"content": text}, None)
        if choice.calls:
            chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(choice.calls)]}, None)
        if choice.reason is not None:
            chunk({}, choice.reason)
        return found

    def last_chunks(self) -> list[dict[str, object]]:
        """The JSON objects that a stream ends with: the numbers of tokens, if the request asks for them."""
        return [self._head | {"choices": [], "usage": self._usage()}] if self._asked.include_usage else []

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        """The JSON object of a stream's chunk with this one choice."""
        return self._head | {"choices": [choice]} | ({"usage": None} if self._asked.include_usage else {})

    def _usage(self) -> dict[str, int]:
        """OpenAI's `usage`: the numbers of tokens of all prompts, of all answers so far, and of both."""
        asked, made = self._asked.prompt_tokens, sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
