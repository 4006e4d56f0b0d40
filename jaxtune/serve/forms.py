"""Answers as OpenAI's JSON: whole, and as the chunks of a stream."""

from __future__ import annotations

import secrets
import time

from jaxtune.models.generation.sampler import Piece
from jaxtune.serve.bodies import Asked
from jaxtune.serve.served import Tokenizer
from jaxtune.serve.texts import Text

_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that has no probability: JSON has no infinity


class _Choice:
    """One row of the answer."""

    def __init__(self, asked: Asked, index: int):
        self._asked, self.index = asked, index
        self._tokenizer = asked.served.decoder
        self._text = Text(self._tokenizer, asked.rows[index].stop_strings, asked.tools)
        self._ids: list[int] = []  # whose log-probabilities were not given yet
        self._logprobs: list[float] = []
        self._characters = 0  # before them
        self.tokens = 0
        self.reason: str | None = None

    def add(self, piece: Piece, stream: bool) -> str:
        """Adds tokens; returns the text that is certain: all that is left with the last piece, and of a whole answer
        nothing before that."""
        self.tokens += len(piece.ids)
        if self._asked.logprobs:
            self._ids += piece.ids
            self._logprobs += [max(value, _LEAST_LOGPROB) for value in piece.logprobs]
        text = self._text.add(piece.ids) if stream else self._text.keep(piece.ids)
        if piece.finish_reason is not None:
            text += self._text.end()
            self.reason = "tool_calls" if self._text.calls else piece.finish_reason
        return text

    @property
    def calls(self) -> list[dict[str, object]]:
        """Calls of tools, once the row has ended."""
        return self._text.calls

    def logprobs(self) -> dict[str, object] | None:
        """The log-probabilities of the tokens since the last call; None if they were not asked for."""
        if not self._asked.logprobs:
            return None
        form = _chat_logprobs if self._asked.chat else self._completion_logprobs
        found = form([_token(self._tokenizer, number) for number in self._ids], self._logprobs)
        self._ids, self._logprobs = [], []
        return found

    def _completion_logprobs(self, tokens: list[str], logprobs: list[float]) -> dict[str, object]:
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _token(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer.decode([number], skip_special_tokens=False)


def _chat_logprobs(tokens: list[str], logprobs: list[float]) -> dict[str, object]:
    def entry(token: str, logprob: float) -> dict[str, object]:
        whole = "\ufffd" not in token  # a part of a character has no text of its own
        own = list(token.encode("utf-8", "replace")) if whole else None
        return {"token": token, "logprob": logprob, "bytes": own, "top_logprobs": []}

    return {"content": [entry(*one) for one in zip(tokens, logprobs, strict=True)], "refusal": None}


class Answer:
    """The answer to one request, built from the pieces of its rows.

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
        """Adds a piece to a whole answer."""
        self._texts[index] += self._choices[index].add(piece, stream=False)

    def whole(self) -> dict[str, object]:
        """The answer, when all rows have ended."""
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
        """What a stream begins with."""
        if not self._asked.chat:
            return []
        begin = {"role": "assistant", "content": ""}
        return [self._chunk({"index": c.index, "delta": begin, "finish_reason": None}) for c in self._choices]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """What a stream says of a piece."""
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
        """What a stream ends with."""
        return [self._head | {"choices": [], "usage": self._usage()}] if self._asked.include_usage else []

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        return self._head | {"choices": [choice]} | ({"usage": None} if self._asked.include_usage else {})

    def _usage(self) -> dict[str, int]:
        asked, made = self._asked.prompt_tokens, sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
