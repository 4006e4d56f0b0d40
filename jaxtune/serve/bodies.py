"""The JSON of a request, checked. Names and defaults are OpenAI's, with top_k, min_p and repetition_penalty of other
servers. What changes nothing here is ignored, what cannot be followed is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxtune.conversations.calls import schemas_of
from jaxtune.conversations.messages import ConversationError, Message, read_messages, read_tools
from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.conversations.templates import TemplateError, checked_arguments
from jaxtune.models.generation.limits import MOST_RANKED
from jaxtune.serve.errors import ApiError
from jaxtune.serve.requests import ParsedRequest, Row
from jaxtune.serve.served import Readable

_MOST_ANSWERS = 128  # to one request
_MOST_STOP = 256  # characters of a stop string, for which each new token is searched
_MOST_SHOWN = 80  # characters of a client's value in an error
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens where it is not a chat
# What clients may say that changes no answer here.
_IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# What is not supported, and the value that asks for nothing.
_NEUTRAL: dict[str, object] = {
    "audio": None,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": None,
    "functions": None,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "suffix": "",
    "verbosity": None,
    "web_search_options": None,
}

# Said of a key that has several types, in place of what is wrong with one of them.
_MUST = {
    "prompt": "must be a text, a list of texts, token ids, or a list of lists of them",
    "stop": f"must be a text of 1 to {_MOST_STOP} characters, or a list of at most 16 of them",
}

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP)]
Objects = Annotated[list[dict[str, object]], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class _StreamOptions(BaseModel):
    """What a stream contains beside the answer; without an effect on an answer that is sent whole."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None  # True: the stream ends with the numbers of tokens; else it has none
    # accepted and ignored: OpenAI then adds random text, which hides the length of chunks from listeners
    include_obfuscation: bool | None = None


class _Body(BaseModel):
    """Keys of both kinds of bodies, with OpenAI's meanings. None: not given: one answer, a random seed, temperature 1,
    no filters. top_k (0 and -1: no limit), min_p and repetition_penalty mean what they do in vLLM. At temperature 0 the
    filters have no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str  # the name of a served model
    max_tokens: Positive | None = None  # the most tokens of an answer
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None  # answers to each prompt
    # the random draws of an equal request with an equal seed are equal; only the low 32 bits count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None  # strings that end an answer
    stream: bool | None = None  # True: the answer is sent in chunks while it is made
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # 0: the most likely token is always taken
    # tokens are drawn from the likeliest ones that have this much probability in sum
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # tokens are drawn from this many of the likeliest ones
    min_p: Share | None = None  # tokens less likely than this times the likeliest one are not drawn
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None  # above 1: repetition is rarer


class _Chat(_Body):
    """A body of /v1/chat/completions. max_completion_tokens precedes max_tokens. tool_choice "none" leaves the tools
    out of the prompt; without tools an answer is not searched for calls.
    """

    messages: Annotated[Objects, Field(min_length=1)]  # the conversation that the answer continues
    max_completion_tokens: Positive | None = None  # the most tokens of the answer
    logprobs: bool | None = None  # True: the log-probability of each token of the answer is returned
    # how many of the most likely tokens at the position of each one are returned too; above 0 it needs logprobs
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_RANKED)] | None = None
    tools: Objects | None = None  # in OpenAI's form, as the chat template takes them
    tool_choice: Literal["auto", "none"] | None = None  # "auto", as None: the model may call tools
    chat_template_kwargs: dict[str, object] | None = None  # the template's, as {"enable_thinking": false}
    add_generation_prompt: bool | None = None  # False: the prompt ends with the last message, and no answer begins
    continue_final_message: bool | None = None  # True: the last message is continued


class _Completion(_Body):
    """A body of /v1/completions: `prompt` is a text, token ids, or a list of either. logprobs: how many of the
    likeliest tokens are listed at each position; 0: only the token's own log-probability.
    """

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_ANSWERS, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=_MOST_ANSWERS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_RANKED)] | None = None


type Models = Mapping[str, Readable]
type Lengths = Mapping[str, int]  # {model: the most tokens of a prompt and its answer}


def read_chat(body: object, models: Models, lengths: Lengths) -> ParsedRequest:
    """What a body of /v1/chat/completions, decoded JSON of any type, asks for.

    ApiError: 400: the body is wrong, the chat template is missing or refuses the messages, or the prompt is too long;
    404: no such model.
    """
    checked = _checked(_Chat, body)
    served = _model(checked.model, models)
    tools = _read(read_tools, checked.tools, "tools") if checked.tool_choice != "none" else None
    try:
        arguments = checked_arguments(checked.chat_template_kwargs, "chat_template_kwargs")
    except ValueError as error:
        raise ApiError(400, str(error), "chat_template_kwargs", "invalid_value") from None
    continues = bool(checked.continue_final_message)
    if continues and checked.add_generation_prompt:
        message = "continue_final_message = True: set add_generation_prompt to false, or leave it out"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    begins = not continues and checked.add_generation_prompt is not False
    turns = _read(read_messages, checked.messages, "messages")
    prompt = _conversation(turns, tools, served, arguments, begins, continues, lengths[served.name])
    most = checked.max_completion_tokens or checked.max_tokens
    logprobs = (checked.top_logprobs or 0) if checked.logprobs else None
    if logprobs is None and checked.top_logprobs:
        raise ApiError(400, f"top_logprobs = {checked.top_logprobs}: set logprobs to true too", "top_logprobs")
    schemas = schemas_of(tools) if tools else None
    opening = served.reader(bool(tools)).opening(prompt, continues) if begins or continues else ""
    role = "assistant" if begins else turns[-1]["role"]
    request_values = _parsed_request(checked, [prompt], most, logprobs, chat=True)
    return dataclasses.replace(request_values, schemas=schemas, opening=opening, role=role)


def read_completion(body: object, models: Models, lengths: Lengths) -> ParsedRequest:
    """What a body of /v1/completions, decoded JSON of any type, asks for: n rows for each prompt.

    ApiError: 400: the body is wrong, asks for more than 128 answers, or a prompt is too long; 404: no such model.
    """
    checked = _checked(_Completion, body)
    served = _model(checked.model, models)
    prompt_value = checked.prompt
    texts = [prompt_value] if isinstance(prompt_value, str) else prompt_value
    prompt_list = [texts] if isinstance(texts[0], int) else texts
    if len(prompt_list) * (checked.n or 1) > _MOST_ANSWERS:
        raise ApiError(400, f"prompt and n ask for more than {_MOST_ANSWERS} answers: ask in several requests", "n")
    prompts = [_tokens(prompt, served, lengths[served.name]) for prompt in prompt_list]
    most = checked.max_tokens or _COMPLETION_TOKENS
    return _parsed_request(checked, prompts, most, checked.logprobs, chat=False)


def _checked[B: _Body](kind: type[B], body: object) -> B:
    """The body as `kind`; ApiError (400). Null counts as absent; keys that change no answer are dropped."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    body = {key: value for key, value in body.items() if value is not None and key not in _IGNORED}
    for key in [key for key in body if key in _NEUTRAL]:
        value = body.pop(key)
        if value != _NEUTRAL[key]:
            fix = "leave it out" + (f", or set it to {json.dumps(_NEUTRAL[key])}" if _NEUTRAL[key] is not None else "")
            raise ApiError(400, f"{key} = {_short(value)} is not supported: {fix}", key, "unsupported_parameter")
    for key in body:
        if key not in kind.model_fields:
            near = difflib.get_close_matches(key[:_MOST_STOP], kind.model_fields, 1)
            raise _unknown(key, f"did you mean {near[0]}?" if near else "leave it out")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refused(kind, error) from None


def _refused(kind: type[_Body], error: ValidationError) -> ApiError:
    """The ApiError for the first fault that pydantic found: an unknown, missing or wrong key."""
    fault = error.errors(include_url=False, include_context=False)[0]
    # Of a key with several types the place continues with the name of one of them, which is no key.
    keys = itertools.takewhile(
        lambda step: isinstance(step, int) or (step.isidentifier() and step != "str"), fault["loc"]
    )
    param = ".".join(map(str, keys))
    if fault["type"] == "extra_forbidden":
        return _unknown(".".join(map(str, fault["loc"])), "leave it out")
    if fault["type"] == "missing":
        return ApiError(400, f"{param} is missing", param, "missing_required_parameter")
    why = _MUST.get(param.rpartition(".")[2], fault["msg"])
    return ApiError(400, f"{param} = {_short(fault['input'])}: {why}", param, "invalid_value")


def _unknown(key: str, hint: str) -> ApiError:
    key = key[:_MOST_SHOWN]
    return ApiError(400, f"unknown parameter {key}: {hint}", key, "unknown_parameter")


def _short(value: object) -> str:
    """A repr of at most 80 characters: values come from clients and may be of any size."""
    if isinstance(value, list | dict) and len(value) > _MOST_SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value[: _MOST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _model(name: str, models: Models) -> Readable:
    """ApiError 404 for a name that is not served."""
    if name not in models:
        raise ApiError(404, f"model = {_short(name)}: there are {', '.join(models)}", "model", "model_not_found")
    return models[name]


def _tokens(prompt: object, served: Readable, length: int) -> list[int]:
    """Token ids of a text, or of ids as they are; ApiError (400) for lone surrogates, or too many."""
    if not isinstance(prompt, str):
        return _short_enough(list(prompt), length)  # type: ignore[call-overload]
    try:
        return _short_enough(prompt_tokens(served.tokenizer, prompt, max_tokens=length), length)
    except TemplateError:
        raise ApiError(400, "prompt has surrogates, which are no characters: leave them out", "prompt") from None


def _short_enough(ids: list[int], length: int) -> list[int]:
    if len(ids) < length:
        return ids
    message = f"the prompt has more than {length - 1} tokens, and a row with its answer at most {length}: shorten it"
    raise ApiError(400, message, code="context_length_exceeded")


def _conversation(
    turns: list[Message],
    tools: list[Message] | None,
    served: Readable,
    arguments: Mapping[str, object] | None,
    begins: bool,
    continues: bool,
    length: int,
) -> list[int]:
    """Token ids of a chat's prompt; ApiError (400) if the template is missing or refuses the messages, or for more than
    `length` tokens.

    begins, continues: it ends with the beginning of an answer, or within the last message.
    """
    tokenizer = served.tokenizer
    if not tokenizer.chat_template:
        message = f"the tokenizer of {served.name} has no chat template: ask /v1/completions with a text as prompt"
        raise ApiError(400, message, "messages")
    if continues and not turns[-1]["content"].strip():
        message = "continue_final_message = True: the last message has no text to continue"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    try:
        prompt = prompt_tokens(
            tokenizer,
            turns,
            tools=tools,
            arguments=arguments,
            begins_answer=begins,
            continues=continues,
            max_tokens=length,
        )
    except TemplateError as error:
        raise ApiError(
            400, f"the chat template refuses these messages: {_words(error.__cause__ or error)}", "messages"
        ) from error
    return _short_enough(prompt, length)


def _words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 1000 else text[:997] + "..."


def _read[T](read: Callable[[object, str], T], value: object, key: str) -> T:
    """`read`'s result for the value of a key; ApiError (400) names the key in it."""
    try:
        return read(value, key)
    except ConversationError as error:
        path = list(error.path)
        while path and isinstance(path[-1], int):
            path.pop()
        raise ApiError(400, str(error), ".".join(map(str, path)), "invalid_value") from None


def _parsed_request(
    body: _Body,
    prompts: list[list[int]],
    most: int | None,
    logprobs: int | None,
    *,
    chat: bool,
) -> ParsedRequest:
    """The ParsedRequest of a validated body, with the defaults. prompts: token ids, each with `body.n` consecutive
    rows.

    most: new tokens of an answer; None: what the context has room for.
    logprobs: likeliest tokens at each position; None: no log-probabilities.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    draws = temperature > 0  # else filters change nothing, and clients send them all the same
    seed = secrets.randbits(32) if body.seed is None else body.seed
    count = body.n or 1
    rows = [
        Row(
            prompt,
            most,
            temperature,
            seed,
            index,
            top_k=max(body.top_k or 0, 0) if draws else 0,
            top_p=(body.top_p or 1.0) if draws else 1.0,
            min_p=(body.min_p or 0.0) if draws else 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            stop_strings=tuple(stops),
            top_logprobs=logprobs or 0,
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(count))
    ]
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return ParsedRequest(body.model, rows, sum(map(len, prompts)), chat, bool(body.stream), usage, logprobs is not None)
