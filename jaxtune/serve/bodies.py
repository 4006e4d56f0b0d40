"""The JSON of a request, checked. Names and defaults are OpenAI's, further names are vLLM's. What changes nothing here
is ignored, what cannot be followed is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxtune.conversations.call_turns import ways_to_write
from jaxtune.conversations.calls import Schemas, schemas_of
from jaxtune.conversations.messages import (
    ConversationError,
    Message,
    pictures_of,
    read_messages,
    read_tools,
    shows_pictures,
    template_for,
    with_pictures,
)
from jaxtune.conversations.picture_processors import PictureArrays, picture_arrays
from jaxtune.conversations.pictures import PictureError, is_picture_part
from jaxtune.conversations.prompts import picture_prompt, prompt_tokens, text_tokens
from jaxtune.conversations.templates import Arguments, TemplateError, checked_arguments
from jaxtune.models.generation import grammars
from jaxtune.models.generation.limits import MOST_BIASES, MOST_RANKED, that_count
from jaxtune.serve.errors import ApiError
from jaxtune.serve.requests import ParsedRequest, Row
from jaxtune.serve.served import SETTINGS, Readable
from jaxtune.serve.trials import Trials
from jaxtune.system.terminal import say

_MOST_ANSWERS = 128  # to one request
_MOST_PASSED = 64  # grammars that a reader need not try again
_MOST_STOP = 256  # characters of a stop string, for which each new token is searched
_MOST_STOP_TOKENS = 64
_MOST_SHOWN = 80  # characters of a client's value in an error
_MOST_DIGITS = 9  # of a token id
_MOST_ADDRESSES = 16  # of a request's pictures
_MOST_PATCHES = 65_536  # of a request's pictures: 400 MB in Qwen's
_MOST_NAME, _MOST_PATH = 256, 4096  # characters
_MANY_TOKENS = 2**30
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens where it is not a chat
# What clients may say that changes no answer here.
_IGNORED = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "store",
}
# What is not supported, and the value that asks for nothing.
_NEUTRAL: dict[str, object] = {
    "audio": None,
    "best_of": 1,
    "function_call": None,
    "functions": None,
    "modalities": ["text"],
    "suffix": "",
    "verbosity": "medium",
    "web_search_options": None,
}

# Said of a key that has several types, in place of what is wrong with one of them.
_MUST = {
    "prompt": "must be a text, a list of texts, token ids, or a list of lists of them",
    "stop": f"must be a text of 1 to {_MOST_STOP} characters, or a list of at most 16 of them",
}

Token = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP)]
Objects = Annotated[list[dict[str, object]], Field(fail_fast=True)]
Ids = Annotated[list[Token], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """What a stream contains beside the answer; without an effect on an answer that is sent whole."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None  # True: the stream ends with the numbers of tokens; else it has none
    # accepted and ignored: OpenAI then adds random text, which hides the length of chunks from listeners
    include_obfuscation: bool | None = None


class _JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    # Only `schema` has an effect: answers always follow it.
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class _ResponseFormat(BaseModel):
    """What an answer is, after thoughts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None  # of json_schema


class _StructuredOutputs(BaseModel):
    """The same by vLLM's key: one of them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_: Annotated[dict[str, object] | str | None, Field(alias="json")] = None  # a schema
    regex: str | None = None  # in Rust's syntax
    choice: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    grammar: str | None = None  # in llguidance's Lark
    json_object: bool | None = None


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class _NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: _Function


class _Body(BaseModel):
    """Keys of both kinds of bodies, with OpenAI's meanings; top_k (0 and -1: no limit), min_p, repetition_penalty,
    min_tokens, ignore_eos and stop_token_ids are vLLM's. None stands for one answer, a random seed, and settings of the
    model's generation_config.json, else temperature 1 and no filters. At temperature 0 the filters have no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str  # the name of a served model
    max_tokens: Positive | None = None  # the most tokens of an answer
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None  # answers to each prompt
    # the random draws of an equal request with an equal seed are equal; only the low 32 bits count
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None  # strings that end an answer
    stream: bool | None = None  # True: the answer is sent in chunks while it is made
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # 0: the most likely token is always taken
    # tokens are drawn from the likeliest ones that have this much probability in sum
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # tokens are drawn from this many of the likeliest ones
    min_p: Share | None = None  # tokens less likely than this times the likeliest one are not drawn
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None  # above 1: repetition is rarer
    presence_penalty: Penalty | None = None  # subtracted from the logits of tokens that the answer contains
    frequency_penalty: Penalty | None = None  # subtracted from them as often as it contains them
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None  # {"token id": added}
    min_tokens: Annotated[int, Field(ge=0)] | None = None  # of an answer, before which nothing ends it
    ignore_eos: bool | None = None  # True: the model's own end tokens do not end an answer
    # further tokens that do
    stop_token_ids: Annotated[list[Token], Field(max_length=_MOST_STOP_TOKENS, fail_fast=True)] | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    user: str | None = None  # who asks; clients take turns
    safety_identifier: str | None = None  # the same


class _Chat(_Body):
    """A body of /v1/chat/completions. max_completion_tokens precedes max_tokens; tool_choice "none" leaves the tools
    out.
    """

    messages: Annotated[Objects, Field(min_length=1)]  # the conversation that the answer continues
    max_completion_tokens: Positive | None = None  # the most tokens of the answer
    logprobs: bool | None = None  # True: the log-probability of each token of the answer is returned
    # how many of the most likely tokens at the position of each one are returned too; above 0 it needs logprobs
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_RANKED)] | None = None
    tools: Objects | None = None  # in OpenAI's form, as the chat template takes them
    # "auto", as None: the model may call tools; "required" or one tool: it does
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None  # False: of several calls the first is returned
    # how long the model thinks, for templates that read it; "none" turns thinking off where that is all they read
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, object] | None = None  # the template's, as {"enable_thinking": false}
    add_generation_prompt: bool | None = None  # False: the prompt ends with the last message, and no answer begins
    continue_final_message: bool | None = None  # True: the last message is continued


class _Completion(_Body):
    """A body of /v1/completions. logprobs: how many of the likeliest tokens are listed; 0: only the token's own."""

    prompt: (
        str
        | Annotated[Ids, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_ANSWERS, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=_MOST_ANSWERS, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_RANKED)] | None = None
    echo: bool | None = None  # True: the prompt comes before the answer, with its log-probabilities if asked for
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0: only with echo


class _Tokenize(BaseModel):
    """A body of /tokenize, with vLLM's keys: a text, or a conversation in the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None  # None: the first
    prompt: str | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool | None = None  # of a text: False: no BOS
    add_generation_prompt: bool | None = None  # of a conversation: False: no answer begins
    return_token_strs: bool | None = None  # True: the tokens' texts too


class _Detokenize(BaseModel):
    """A body of /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None  # None: the first
    tokens: Ids


class _Unload(BaseModel):
    """A body of /v1/unload_lora_adapter, with vLLM's keys."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: Annotated[str, Field(min_length=1, max_length=_MOST_NAME)]
    lora_int_id: int | None = None  # ignored


class _Load(_Unload):
    """A body of /v1/load_lora_adapter."""

    lora_path: Annotated[str, Field(min_length=1, max_length=_MOST_PATH)]  # from the server's folder of adapters


type Models = Mapping[str, Readable]
type Lengths = Mapping[str, int]  # {model: the most tokens of a prompt and its answer}


def read_chat(body: object, models: Models, lengths: Lengths) -> ParsedRequest:
    """What a body of /v1/chat/completions, decoded JSON of any type, asks for.

    ApiError: 400: the body is wrong, the chat template is missing or refuses the messages, or the prompt is too long;
    404: no such model.
    """
    values = checked(_Chat, body)
    served = _model(values.model, models)
    tools = _read(read_tools, values.tools, "tools") if values.tool_choice != "none" else None
    template = template_for(served.tokenizer.chat_template, tools) or ""
    if tools and template and "tools" not in template:
        message = f"the chat template of {served.name} has no place for tools: leave them out"
        raise ApiError(400, message, "tools", "unsupported_parameter")
    arguments = _arguments(values, served.name, template)
    continues = bool(values.continue_final_message)
    if continues and values.add_generation_prompt:
        message = "continue_final_message = True: set add_generation_prompt to false, or leave it out"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    begins = not continues and values.add_generation_prompt is not False
    turns = _turns(values.messages, served)
    prompt, pictures = _conversation(turns, tools, served, arguments, begins, continues, lengths[served.name])
    most = values.max_completion_tokens or values.max_tokens
    logprobs = (values.top_logprobs or 0) if values.logprobs else None
    if logprobs is None and values.top_logprobs:
        raise ApiError(400, f"top_logprobs = {values.top_logprobs}: set logprobs to true too", "top_logprobs")
    schemas = schemas_of(tools) if tools else None
    opening = served.reader(bool(tools)).opening(prompt, continues) if begins or continues else ""
    role = "assistant" if begins else turns[-1]["role"]
    request_values = _parsed_request(values, served, [prompt], most, logprobs, "chat")
    if pictures is not None:
        pictures = _decoded(pictures)
        rows = [dataclasses.replace(row, pictures=pictures) for row in request_values.rows]
        request_values = dataclasses.replace(request_values, rows=rows)
    many_calls = values.parallel_tool_calls is not False
    grammar = None
    if isinstance(values.tool_choice, _NamedTool) or values.tool_choice == "required":
        grammar = _call_grammar(values.tool_choice, schemas or {}, served, many_calls)
    elif schemas and (first := request_values.rows[0]).grammar is not None:
        grammar = _or_calls(_Grammar(first.grammar, first.grammar_bytes), schemas, served, many_calls)
    elif schemas and all(_is_strict(tool) for tool in tools or ()):
        grammar = _begun_calls(schemas, served)
    if grammar is not None:
        rows = [dataclasses.replace(row, **grammar._asdict()) for row in request_values.rows]
        request_values = dataclasses.replace(request_values, rows=rows)
    return dataclasses.replace(request_values, schemas=schemas, opening=opening, role=role, many_calls=many_calls)


def _arguments(body: _Chat, name: str, template: str) -> Arguments | None:
    """The template's further variables; ApiError (400) for a wrong name, or an effort that it does not read."""
    arguments = _variables(body.chat_template_kwargs)
    effort = body.reasoning_effort
    if effort is None:
        return arguments
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **(arguments or {})}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none", **(arguments or {})}
    message = f"reasoning_effort = {effort!r}: the chat template of {name} does not read it: leave it out"
    raise ApiError(400, message, "reasoning_effort", "unsupported_parameter")


def _call_grammar(choice: _NamedTool | str, schemas: Schemas, served: Readable, many: bool) -> _Grammar:
    """Of answers that call one of the tools, or the one that is named; ApiError (400)."""
    names = [choice.function.name] if isinstance(choice, _NamedTool) else [*schemas]
    if not names or any(name not in schemas for name in names):
        message = f"tool_choice = {_short(names[0]) if names else 'required'}: no such tool in tools"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    chosen = {name: schemas[name] for name in names}
    lark = served.reader(True).call_grammar(chosen, many and not isinstance(choice, _NamedTool))
    if lark is None:
        message = f"tool_choice: the calls of {served.name} are messages, which cannot be required: use auto"
        raise ApiError(400, message, "tool_choice", "unsupported_parameter")
    return _followed("grammar", (lark,), "tools", served)


class _Grammar(NamedTuple):
    """What a row has of one."""

    grammar: str | None = None
    grammar_bytes: int = 0
    call_grammar: str | None = None


def _is_strict(tool: Message) -> bool:
    """Whether a tool's calls follow its schema: OpenAI's `strict`, which is true here without a word."""
    function = tool.get("function", tool)
    return not isinstance(function, Mapping) or function.get("strict") is not False


def _begun_calls(schemas: Schemas, served: Readable) -> _Grammar:
    """The grammar of calls behind their opening mark, or none where it is not followed, of which a line is logged."""
    lark = served.reader(True).begun_call_grammar(schemas)
    if lark is None or not served.vocab_size:
        return _Grammar()
    try:
        grammar = _followed("calls", (lark,), "tools", served)
    except ApiError as error:
        say(f"jaxtune: calls of {', '.join(schemas)[:_MOST_SHOWN]} follow no grammar: {error}", sys.stderr)
        grammar = _Grammar()
        served.passed["calls", json.dumps((lark,))] = None, 0  # it is not tried again
    return _Grammar(None, grammar.grammar_bytes, grammar.grammar)


def _or_calls(answer: _Grammar, schemas: Schemas, served: Readable, many: bool) -> _Grammar:
    """The grammar of an answer, or of calls in its place; ApiError (400)."""
    grammar, reader = answer.grammar or "", served.reader(True)
    calls, any_calls = reader.call_grammar(schemas, many), reader.any_call_grammar()
    choices = [choice for choice in (calls, any_calls) if choice is not None]
    for choice in choices[:-1]:
        with contextlib.suppress(ApiError):  # a schema of arguments that is not followed
            return _followed("either", (grammar, choice), "tools", served)
    if not choices:
        return answer  # calls come before what follows the grammar
    return _followed("either", (grammar, choices[-1]), "tools", served)


def _grammar(body: _Body, served: Readable) -> _Grammar:
    """Of an answer's content; ApiError (400)."""
    form, outputs = body.response_format, body.structured_outputs
    if outputs is not None:
        asked = {kind: value for kind, value in outputs.model_dump(exclude_none=True).items() if value is not False}
        if len(asked) != 1 or form is not None:
            message = "structured_outputs: give one of json, regex, choice and grammar, and no response_format"
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        [(kind, value)] = asked.items()
        return _followed(kind, (value,), "structured_outputs", served)
    if form is None or form.type == "text":
        return _Grammar()
    if (form.type == "json_schema") != (form.json_schema is not None):
        message = f"response_format.json_schema: goes with type json_schema, and the type is {form.type}"
        raise ApiError(400, message, "response_format", "invalid_value")
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    return _followed("json_schema", (schema,), "response_format", served)


# {how a client asks for it: what makes it}
_GRAMMARS: dict[str, Callable[..., str]] = {
    "json_": lambda value: grammars.json_grammar(json.loads(value) if isinstance(value, str) else value),
    "json_schema": grammars.json_grammar,
    "json_object": lambda _: grammars.json_grammar({"type": "object"}),
    "regex": grammars.regex_grammar,
    "choice": grammars.choice_grammar,
    "grammar": grammars.lark_grammar,
    "either": grammars.either,
    "calls": grammars.calls_grammar,
}


def with_trials(models: Models) -> Models:
    """The models with one process that tries what clients ask for; their vocabularies are made here, in seconds."""

    def work(asked: tuple[str, str, tuple]) -> tuple[str, object]:
        name, kind, values = asked
        grammar = _GRAMMARS[kind](*values)
        return grammar, models[name].grammars.begun(grammar)

    trials = Trials(work)
    models = {name: dataclasses.replace(model, trials=trials, passed={}) for name, model in models.items()}
    for model in models.values():
        with contextlib.suppress(ImportError, ValueError):
            _ = model.vocab_size and model.grammars
    if any(model.vocab_size for model in models.values()):
        with contextlib.suppress(ValueError):
            trials((next(iter(models)), "regex", ("a",)))  # its process is there before the first client asks
    return models


def _followed(kind: str, asked: tuple, key: str, served: Readable) -> _Grammar:
    """The grammar of a kind, after it was made and compiled in a process that may die, once for clients who ask for the
    same; ApiError (400).
    """
    try:
        if served.trials is None:
            return _Grammar(_GRAMMARS[kind](*asked))
        known = kind, json.dumps(asked)
        if known not in served.passed:
            passed = served.trials((served.name, kind, asked))
            if len(served.passed) >= _MOST_PASSED:
                served.passed.clear()
            served.passed[known] = passed
        return _Grammar(*served.passed[known])
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, f"{key}: {_words(error)}", key, "invalid_value") from None


def _variables(values: Mapping[str, object] | None) -> Arguments | None:
    try:
        return checked_arguments(values, "chat_template_kwargs")
    except ValueError as error:
        raise ApiError(400, str(error), "chat_template_kwargs", "invalid_value") from None


def read_completion(body: object, models: Models, lengths: Lengths) -> ParsedRequest:
    """What a body of /v1/completions, decoded JSON of any type, asks for: n rows for each prompt.

    ApiError: 400: the body is wrong, asks for more than 128 answers, or a prompt is too long; 404: no such model.
    """
    values = checked(_Completion, body)
    served = _model(values.model, models)
    prompt_value = values.prompt
    texts = [prompt_value] if isinstance(prompt_value, str) else prompt_value
    prompt_list = [texts] if isinstance(texts[0], int) else texts
    if len(prompt_list) * (values.n or 1) > _MOST_ANSWERS:
        raise ApiError(400, f"prompt and n ask for more than {_MOST_ANSWERS} answers: ask in several requests", "n")
    prompts = [_tokens(prompt, served, lengths[served.name]) for prompt in prompt_list]
    most = _COMPLETION_TOKENS if values.max_tokens is None else values.max_tokens
    if most == 0 and not values.echo:
        raise ApiError(400, "max_tokens = 0: needs echo, or ask for tokens", "max_tokens", "invalid_value")
    request_values = _parsed_request(values, served, prompts, most, values.logprobs, "completion")
    if not values.echo:
        return request_values
    shown = [
        prompt if isinstance(prompt, str) else served.text(ids)
        for prompt, ids in zip(prompt_list, prompts, strict=True)
    ]
    rows = [dataclasses.replace(row, scores_prompt=values.logprobs is not None) for row in request_values.rows]
    echo = tuple(text for text in shown for _ in range(values.n or 1))
    return dataclasses.replace(request_values, rows=rows, echo=echo)


def read_tokenize(body: object, models: Models, lengths: Lengths) -> dict[str, object]:
    """The answer to a body of /tokenize. ApiError: as `read_chat`."""
    values = checked(_Tokenize, body)
    served = _model(values.model or next(iter(models)), models)
    if (values.prompt is None) == (values.messages is None):
        raise ApiError(400, "prompt and messages: give one of them", "prompt", "invalid_value")
    length = lengths[served.name]
    if values.messages is None:
        ids = _tokens(values.prompt, served, length, begins=values.add_special_tokens is not False)
    else:
        begins = values.add_generation_prompt is not False
        tools = _read(read_tools, values.tools, "tools")
        turns, arguments = _turns(values.messages, served), _variables(values.chat_template_kwargs)
        ids, _ = _conversation(turns, tools, served, arguments, begins, False, length)
    texts = {"token_strs": [served.text([token], True) for token in ids]} if values.return_token_strs else {}
    return {"count": len(ids), "max_model_len": length, "tokens": ids, **texts}


def read_detokenize(body: object, models: Models, lengths: Lengths) -> dict[str, object]:
    """The answer to a body of /detokenize. ApiError: as `read_completion`."""
    values = checked(_Detokenize, body)
    served = _model(values.model or next(iter(models)), models)
    size = len(served.tokenizer)
    if wrong := next((token for token in values.tokens if not 0 <= token < size), None):
        raise ApiError(400, f"tokens: {wrong} is outside the vocabulary of {size}", "tokens", "invalid_value")
    return {"prompt": served.text(_short_enough(values.tokens, lengths[served.name] + 1), True)}


def read_load(body: object, models: Models, lengths: Lengths) -> dict[str, object]:
    """{"lora_name", "lora_path"} of a body of /v1/load_lora_adapter. ApiError: 400: it is wrong."""
    values = checked(_Load, body, {"load_inplace": False, "is_3d_lora_weight": False})
    if not values.lora_name.isprintable():
        raise ApiError(
            400, f"lora_name = {_short(values.lora_name)}: has characters that are not printable", "lora_name"
        )
    return {"lora_name": values.lora_name, "lora_path": values.lora_path}


def read_unload(body: object, models: Models, lengths: Lengths) -> dict[str, object]:
    """{"lora_name"} of a body of /v1/unload_lora_adapter. ApiError: 400: it is wrong."""
    return {"lora_name": checked(_Unload, body, {}).lora_name}


def checked[B: BaseModel](kind: type[B], body: object, neutral: Mapping[str, object] = _NEUTRAL) -> B:
    """The body as `kind`; ApiError (400). Null counts as absent; keys that change no answer are dropped.

    neutral: {unsupported key: the value that asks for nothing}.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    body = {key: value for key, value in body.items() if value is not None and key not in _IGNORED}
    for key in [key for key in body if key in neutral]:
        value = body.pop(key)
        if value != neutral[key]:
            fix = "leave it out" + (f", or set it to {json.dumps(neutral[key])}" if neutral[key] is not None else "")
            raise ApiError(400, f"{key} = {_short(value)} is not supported: {fix}", key, "unsupported_parameter")
    for key in body:
        if key not in kind.model_fields:
            near = difflib.get_close_matches(key[:_MOST_STOP], kind.model_fields, 1)
            raise _unknown(key, f"did you mean {near[0]}?" if near else "leave it out")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> ApiError:
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


def _tokens(prompt: object, served: Readable, length: int, begins: bool = True) -> list[int]:
    """Token ids of a text, or of ids as they are; ApiError (400) for lone surrogates, or too many. begins: with BOS."""
    if not isinstance(prompt, str):
        return _short_enough(list(prompt), length)  # type: ignore[call-overload]
    try:
        make = prompt_tokens if begins else text_tokens
        return _short_enough(make(served.tokenizer, prompt, max_tokens=length), length)
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
) -> tuple[list[int], PictureArrays | None]:
    """(Token ids, pictures) of a chat's prompt; ApiError (400) for what the template refuses, or too many tokens."""
    tokenizer = served.tokenizer
    processor = None if served.pictures is None else served.pictures.processor
    if not tokenizer.chat_template:
        message = f"the tokenizer of {served.name} has no chat template: ask /v1/completions with a text as prompt"
        raise ApiError(400, message, "messages")
    if continues and not turns[-1]["content"].strip():
        message = "continue_final_message = True: the last message has no text to continue"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    template, refusals = template_for(tokenizer.chat_template, tools) or "", []
    for form in ways_to_write(turns, template):
        try:
            prompt, pictures = picture_prompt(
                tokenizer,
                form,
                processor,
                tools=tools,
                arguments=arguments,
                begins_answer=begins,
                continues=continues,
                max_tokens=length,
            )
            break
        except TemplateError as error:
            refusals.append(error)
        except PictureError as error:
            raise ApiError(400, f"messages: {_words(error)}", "messages", "invalid_value") from None
    else:
        message = f"the chat template refuses these messages: {_words(refusals[0].__cause__ or refusals[0])}"
        raise ApiError(400, message, "messages") from refusals[0]
    return _short_enough(prompt.tolist(), length), picture_arrays(len(prompt), pictures, processor)


class Unfetched(Exception):
    """A body is read when the pictures behind its addresses are there."""

    def __init__(self, addresses: Sequence[str]):
        super().__init__()
        self.addresses = tuple(dict.fromkeys(addresses))
        if len(self.addresses) > _MOST_ADDRESSES:
            message = f"messages: {len(self.addresses)} addresses of pictures; a request may have {_MOST_ADDRESSES}"
            raise ApiError(400, message, "messages", "invalid_value")


def _turns(messages: list[dict[str, object]], served: Readable) -> list[Message]:
    """The messages of a chat; ApiError (400) for one that cannot be read, or a picture that the model cannot."""
    for index, message in enumerate(messages):
        content = message.get("content") if shows_pictures([message]) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if is_picture_part(part):
                _check_picture(part, f"messages.{index}.content.{number}", served)

    def read(value: object, key: str) -> list[Message]:
        if served.pictures is None:
            return read_messages(value, key)
        return with_pictures(read_messages(value, key, served.pictures.access), ())

    turns = _read(read, messages, "messages")
    addresses = [picture.url for turn in turns for picture in pictures_of(turn) if picture.url is not None]
    if addresses and served.pictures is not None and served.pictures.access.contents is not None:
        raise Unfetched(addresses)
    return turns


def _check_picture(part: Mapping[str, object], key: str, served: Readable) -> None:
    if served.pictures is None:
        message = f"{key}: {served.name} reads no pictures ({served.why_no_pictures}): send text alone"
        raise ApiError(400, message, key, "unsupported_parameter")
    if part.get("file_id") is not None:
        raise ApiError(400, f"{key}: file_id is not supported: send a data URL as image_url", key, "invalid_value")
    address = part.get("image_url")
    detail = address.get("detail") if isinstance(address, Mapping) else None
    detail = part.get("detail") if detail is None else detail
    if detail not in (None, "auto", "high"):
        message = (
            f"{key}: detail = {_short(detail)}: the server's --max-pixels is the size of all pictures: leave it out"
        )
        raise ApiError(400, message, f"{key}.detail", "unsupported_parameter")


def _decoded(pictures: PictureArrays) -> PictureArrays:
    """With their patches; ApiError (400) for too many."""
    count = pictures["patches"].shape[1]
    if count > _MOST_PATCHES:
        message = (
            f"messages: {count:,} patches of pictures; a request may have {_MOST_PATCHES:,}: send fewer or smaller"
        )
        raise ApiError(400, message, "messages", "invalid_value")
    return {**pictures, "patches": np.asarray(pictures["patches"])}


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
    served: Readable,
    prompts: list[list[int]],
    most: int | None,
    logprobs: int | None,
    form: Literal["chat", "completion"],
) -> ParsedRequest:
    """The ParsedRequest of a validated body, with the defaults.

    prompts: token ids, each with `body.n` consecutive rows.
    logprobs: likeliest tokens at each position; None: no log-probabilities.
    """
    settings = {name: getattr(body, name) for name in SETTINGS if getattr(body, name) is not None}
    settings = {name: neutral for name, (_, neutral) in SETTINGS.items()} | {**served.defaults, **settings}
    settings = that_count(settings)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    grammar = _grammar(body, served)
    seed = secrets.randbits(32) if body.seed is None else body.seed
    rows = [
        Row(
            prompt,
            most,
            float(settings["temperature"]),
            seed,
            index,
            top_k=max(int(settings["top_k"]), 0),
            top_p=float(settings["top_p"]),
            min_p=float(settings["min_p"]),
            repetition_penalty=float(settings["repetition_penalty"]),
            stop_strings=tuple(stops),
            top_logprobs=logprobs or 0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_biases(body.logit_bias or {}),
            min_tokens=min(body.min_tokens or 0, most or _MANY_TOKENS),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            **grammar._asdict(),
        )
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n or 1))
    ]
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    count = sum(map(len, prompts))
    client = body.safety_identifier or body.user or ""
    asks = logprobs is not None
    return ParsedRequest(body.model, rows, count, form, bool(body.stream), usage, asks, client=client)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not token.isascii() or not token.isdecimal() or len(token) > _MOST_DIGITS:
            message = f"logit_bias: {_short(token)} is no token id: ask /tokenize for a text's"
            raise ApiError(400, message, "logit_bias", "invalid_value")
    return {int(token): bias for token, bias in biases.items()}
