"""Answers as OpenAI's JSON, whole or as the chunks of a stream."""

from __future__ import annotations

import codecs
import functools
import itertools
import operator
import secrets
import time
from collections.abc import Sequence

from jaxtune.conversations.answers import Pieces
from jaxtune.conversations.texts import Text
from jaxtune.models.generation.requests import Piece, text_of
from jaxtune.serve.engine import PromptScores
from jaxtune.serve.errors import ApiError, encoded
from jaxtune.serve.requests import ParsedRequest, Usage
from jaxtune.serve.responses import Response
from jaxtune.serve.served import ServedModel

# for each token, the most likely ones in its place: bytes, log-probability
type _Ranked = list[list[tuple[bytes, float]] | None]

_LEAST_LOGPROB = -9999.0  # OpenAI's for a token that has no probability: JSON has no infinity


class _Choice:
    """One row of an Answer.

    Attributes:
      tokens: so far, with those whose text is left out (an end token, a stop string).
      reason: OpenAI's finish_reason; None: the row has not ended.
      reused: tokens of the prompt whose states an earlier prompt had left, once the row has ended.
    """

    def __init__(self, request_values: ParsedRequest, served: ServedModel, index: int):
        self._asked, self._served, self.index = request_values, served, index
        self._row, stream = request_values.rows[index], None
        self._echo = request_values.echo[index] if request_values.echo else ""  # that was not returned yet
        decode = functools.partial(text_of, served.tokenizer)
        if request_values.form != "completion":
            reader = served.readable.reader(request_values.schemas is not None)
            stream = reader.stream(request_values.schemas, request_values.opening)
            decode = functools.partial(reader.text, calls=request_values.schemas is not None)
        self._text = Text(decode, self._row.stop_strings, stream, self._row.min_tokens)
        self._ids: list[int] = []  # whose log-probabilities were not given yet
        self._logprobs: list[float | None] = []  # None: of a prompt's first token
        # the most likely tokens at the position of each of these
        self._ranked: list[list[tuple[int, float]] | None] = []
        self._shown = self._echo
        self._characters = 0  # before them
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False  # whether a token with text has come, in the prompt or in the answer
        self._passed = self._prompt_tokens = 0  # tokens whose characters are counted; of a prompt that is shown
        self.tokens = self.reused = 0
        self.reason: str | None = None

    def add(self, piece: Piece | PromptScores, stream: bool) -> Pieces:
        """The thoughts and text that can be sent now: with `stream` what is certain, else all with the last tokens."""
        pieces: Pieces = [("content", self._echo)] if self._echo else []
        self._echo = ""
        if isinstance(piece, PromptScores):
            self._ids += self._row.prompt
            self._prompt_tokens = len(self._row.prompt)
            self._logprobs += [None, *(max(value, _LEAST_LOGPROB) for value in piece.logprobs)]
            self._ranked += [None, *piece.top_logprobs]
            return pieces
        self.tokens += len(piece.ids)
        if self._asked.logprobs:
            self._ids += piece.ids
            self._logprobs += [max(value, _LEAST_LOGPROB) for value in piece.logprobs]
            self._ranked += piece.top_logprobs or [[] for _ in piece.ids]
        pieces += self._text.add(piece.ids) if stream else self._text.keep(piece.ids)
        if piece.finish_reason is not None:
            ended = piece.finish_reason == "stop"
            pieces += self._text.end(cut=not ended)
            self.reused = piece.reused
            self.reason = "tool_calls" if ended and self._text.calls else piece.finish_reason
        return pieces

    @property
    def prompt(self) -> Sequence[int]:
        return self._row.prompt

    @property
    def thought_tokens(self) -> int:
        """Of thoughts, once the row has ended."""
        return self._text.thought_tokens

    @property
    def calls(self) -> list[dict[str, object]]:
        """Tool calls in OpenAI's form, once the row has ended."""
        return self._text.calls[: None if self._asked.many_calls else 1]

    def logprobs(self) -> dict[str, object] | None:
        """OpenAI's `logprobs` of all tokens since the last call, at least -9999; None if they are not asked for."""
        if not self._asked.logprobs:
            return None
        tokens, ranked, offsets = [], [], []
        for number, candidates in zip(self._ids, self._ranked, strict=True):
            self._begun = self._begun and self._passed != self._prompt_tokens  # an answer is decoded alone
            bytes_of = self._served.token_bytes if self._begun else self._served.token_bytes.alone
            tokens.append(bytes_of(number))
            ranked.append(
                candidates and [(bytes_of(candidate), max(value, _LEAST_LOGPROB)) for candidate, value in candidates]
            )
            offsets.append(self._characters)
            self._pass(number, tokens[-1])
        is_chat = self._asked.form == "chat"
        form = _chat_logprobs if is_chat else functools.partial(_completion_logprobs, offsets, self._row.top_logprobs)
        result = form(tokens, self._logprobs, ranked)
        self._ids, self._logprobs, self._ranked = [], [], []
        return result

    def _pass(self, token: int, utf8: bytes) -> None:
        """Counts the characters of a token; a special one has none, unless the prompt is shown with it."""
        self._passed += 1
        if token not in self._served.token_bytes.specials:
            self._begun = True
            self._characters += len(self._decoder.decode(utf8))
        elif self._shown.startswith(text := utf8.decode(errors="replace"), self._characters):
            self._characters += len(text)


def _completion_logprobs(
    offsets: list[int], top_logprobs: int, tokens: list[bytes], logprobs: list[float | None], ranked: _Ranked
) -> dict[str, object]:
    """The `logprobs` object of /v1/completions. offsets: characters before each token."""

    def text(token: bytes) -> str:
        try:
            return token.decode()
        except UnicodeDecodeError:  # a part of a character, as OpenAI writes it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    # Of tokens with the same text the most likely one, which comes first, is kept.
    top = [candidates and {text(token): value for token, value in reversed(candidates)} for candidates in ranked]
    texts = [*map(text, tokens)]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top if top_logprobs else None,
        "text_offset": offsets,
    }


def _chat_logprobs(tokens: list[bytes], logprobs: list[float | None], ranked: _Ranked) -> dict[str, object]:
    """The `logprobs` object of /v1/chat/completions."""

    def entry(token: bytes, logprob: float | None) -> dict[str, object]:
        return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*candidate) for candidate in top or ()]}
        for token, logprob, top in zip(tokens, logprobs, ranked, strict=True)
    ]
    return {"content": content, "refusal": None}


class Answer:
    """The answer to one request as OpenAI's JSON. Whole: `add` for each Piece, then `whole`. As a stream:
    `first_chunks`, `chunks` for each Piece, `last_chunks`.
    """

    def __init__(self, request_values: ParsedRequest, served: ServedModel):
        self._asked = request_values
        self._choices = [_Choice(request_values, served, index) for index in range(len(request_values.rows))]
        self._pieces: list[Pieces] = [[] for _ in request_values.rows]
        self._is_chat = request_values.form == "chat"
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self._is_chat and request_values.stream else kind,
            "created": int(time.time()),
            "model": request_values.model,
        }

    @property
    def last_frame(self) -> bytes:
        """What a stream ends with, after `last_chunks`."""
        return b"data: [DONE]\n\n"

    def frame(self, chunk: dict[str, object]) -> bytes:
        """A server-sent event."""
        return b"data: " + encoded(chunk) + b"\n\n"

    def error_frame(self, error: ApiError) -> bytes:
        """What a stream ends with after an error, in place of `last_frame`."""
        return self.frame(error.body())

    @property
    def is_large(self) -> bool:
        """Whether it has log-probabilities, whose JSON takes long."""
        return self._asked.logprobs

    def add(self, index: int, piece: Piece | PromptScores) -> None:
        """Adds new tokens of the row with this index, for an answer that is sent whole."""
        self._pieces[index] += self._choices[index].add(piece, stream=False)

    def whole(self) -> dict[str, object]:
        """The JSON object, once all rows have ended. With tool calls and no text a chat's `content` is null."""
        choices = []
        for choice, pieces in zip(self._choices, self._pieces, strict=True):
            form: dict[str, object] = {"index": choice.index, "finish_reason": choice.reason}
            thoughts, text = (
                "".join(text for kind, text in pieces if kind == wanted_kind) for wanted_kind in ("thought", "content")
            )
            if self._is_chat:
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
        """What a stream begins with: for a chat the role of each choice."""
        if not self._is_chat:
            return []
        begin = {"role": self._asked.role, "content": ""}
        return [self._chunk({"index": c.index, "delta": begin, "finish_reason": None}) for c in self._choices]

    def chunks(self, index: int, piece: Piece | PromptScores) -> list[dict[str, object]]:
        """What a stream sends for new tokens of a row. The first chunk has the log-probabilities since the last one.
        index: the row's among those of the request.
        """
        choice = self._choices[index]
        pieces, chunk_list = choice.add(piece, stream=True), []

        def chunk(delta: dict[str, object], reason: str | None) -> None:
            form: dict[str, object] = {"index": index, "finish_reason": reason}
            form |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
            chunk_list.append(self._chunk(form | {"logprobs": choice.logprobs()}))

        for kind, text in pieces:
            chunk({"content" if kind == "content" else "reasoning_content": text}, None)
        if choice.calls:
            chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(choice.calls)]}, None)
        if choice.reason is not None:
            chunk({}, choice.reason)
        return chunk_list

    def last_chunks(self) -> list[dict[str, object]]:
        """What a stream ends with: the numbers of tokens with include_usage."""
        return [self._head | {"choices": [], "usage": self._usage()}] if self._asked.include_usage else []

    def _chunk(self, choice: dict[str, object]) -> dict[str, object]:
        return self._head | {"choices": [choice]} | ({"usage": None} if self._asked.include_usage else {})

    def _usage(self) -> dict[str, object]:
        usage = self.usage
        details = {"completion_tokens_details": {"reasoning_tokens": usage.thought_tokens}} if self._is_chat else {}
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.answer_tokens,
            "total_tokens": usage.prompt_tokens + usage.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused},
            **details,
        }

    @property
    def usage(self) -> Usage:
        return _usage(self._asked, self._choices)


def _usage(asked: ParsedRequest, choices: Sequence[_Choice]) -> Usage:
    """Each prompt counts once."""
    answers = (next(group) for _, group in itertools.groupby(choices, lambda choice: choice.prompt))
    reused = sum(choice.reused for choice in answers)
    tokens, thoughts = (sum(map(operator.attrgetter(name), choices)) for name in ("tokens", "thought_tokens"))
    return Usage(asked.prompt_tokens, tokens, reused, thoughts)


class ResponsesAnswer:
    """The same of /v1/responses."""

    is_large = False
    last_frame = b""

    def __init__(self, request_values: ParsedRequest, served: ServedModel):
        self._asked, self._choice = request_values, _Choice(request_values, served, 0)
        self._response = Response(request_values)

    def add(self, index: int, piece: Piece | PromptScores) -> None:
        self._feed(piece, stream=False)

    def whole(self) -> dict[str, object]:
        return self._response.whole

    @property
    def usage(self) -> Usage:
        return _usage(self._asked, [self._choice])

    def first_chunks(self) -> list[dict[str, object]]:
        return self._response.begin()

    def chunks(self, index: int, piece: Piece | PromptScores) -> list[dict[str, object]]:
        return self._feed(piece, stream=True)

    def last_chunks(self) -> list[dict[str, object]]:
        return []

    def frame(self, chunk: dict[str, object]) -> bytes:
        return f"event: {chunk['type']}\n".encode() + b"data: " + encoded(chunk) + b"\n\n"

    def error_frame(self, error: ApiError) -> bytes:
        return self.frame(self._response.failed(error))

    def _feed(self, piece: Piece | PromptScores, stream: bool) -> list[dict[str, object]]:
        choice, events = self._choice, []
        for kind, text in choice.add(piece, stream):
            events += self._response.add(kind, text)
        if choice.reason is not None:
            events += self._response.end(choice.calls, choice.reason, self.usage)
        return events


def answer_to(request_values: ParsedRequest, served: ServedModel) -> Answer | ResponsesAnswer:
    return (ResponsesAnswer if request_values.form == "responses" else Answer)(request_values, served)
