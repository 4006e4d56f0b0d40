"""The five forms of rows: text, Alpaca, prompt and completion, messages, ShareGPT; and those of preferences.

`normalize` turns a row's columns into an `Example`, the one shape that `templates.py` knows, and `normalize_pair` a
preference into two of them, or they say why they cannot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# The columns of each form, most specific first: the order in which `format: auto` tries them. Every group needs
# one of its names; the first name that is there is taken.
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation"),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt", "question"), ("completion", "response", "answer")),
    "text": (("text",),),
}
# Columns that say how the model is to behave, before all else.
SYSTEM = ("system", "system_prompt")
# Rows of preference objectives alone: an answer and a worse one.
PREFERENCE = "preference"
# Of those alone too: one answer, and a label that says whether it is desirable.
LABELLED = "labelled"
_PROMPT = ("prompt", "question", "messages", "conversations")
_READ = {
    "messages": (*COLUMNS["messages"], SYSTEM, ("tools",)),
    "sharegpt": (*COLUMNS["sharegpt"], SYSTEM, ("tools",)),
    "alpaca": (*COLUMNS["alpaca"], SYSTEM, ("input", "context")),
    "prompt_completion": (*COLUMNS["prompt_completion"], SYSTEM, ("tools",)),
    "text": COLUMNS["text"],
    PREFERENCE: (("chosen",), ("rejected",), _PROMPT, SYSTEM, ("tools",), ("margin",)),
    LABELLED: (("label",), ("completion", "messages"), _PROMPT, SYSTEM, ("tools",)),
}
# Columns of what only a model with an encoder for it can read, and what stands for it in a row's text.
_MEDIA = {
    "image": "<image>",
    "images": "<image>",
    "video": "<video>",
    "videos": "<video>",
    "audio": "<audio>",
    "audios": "<audio>",
}
FORMATS = ("auto", *COLUMNS, PREFERENCE, LABELLED)

# ShareGPT's speakers, as the data sets of that form name them, and the chat roles they stand for.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
    "function": "tool",
}

# Those of them that others write as `role`, too, whose turns are text.
_SPEAKERS = {name: role for name, role in ROLES.items() if not name.endswith("_call")}

# The wording with which Stanford's Alpaca was trained (github.com/tatsu-lab/stanford_alpaca), which models
# and data sets of that form expect.
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
ALPACA_PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


class RowError(ValueError):
    """One row cannot be used. The message says why; who catches it knows the place."""


class SetupError(ValueError):
    """No row of this form can be used, and none of them is to blame: the tokenizer or the options lack something."""


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments)` does for one row, or a `RowError`: whatever one row can do costs that row.

    Errors of a kind that nobody foresaw are told by their name. A `SetupError` is not the row's, and is raised.
    """
    try:
        return work(*arguments)
    except RowError as error:
        return error
    except SetupError:
        raise
    except RecursionError:
        return RowError("nested too deeply")
    except Exception as error:
        return RowError(f"cannot be used: {type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True)
class Example:
    """A row in the shape the templates know. Set are `text`; or `messages` (and `tools`); or all but `text`:
    a prompt with its completion can be trained on as it stands or as a conversation.

    messages: role and content, content a string; perhaps tool_calls and reasoning_content. asked: so many of them are
    the prompt, whose responses are not trained on.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    asked: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """A row with two answers to one prompt, or one of them."""

    chosen: Example | None
    rejected: Example | None


def detect_format(columns: Iterable[str]) -> str:
    """The form (a key of `COLUMNS`) of rows with these columns. Raises `RowError` where they fit none."""
    columns = list(columns)
    if {"chosen", "rejected"} <= set(columns):
        raise RowError("columns chosen and rejected are preference data: set objective=dpo, orpo or simpo")
    for format, groups in COLUMNS.items():
        if all(any(name in columns for name in group) for group in groups):
            return format
    known = "; ".join(
        f"{format}: {' + '.join('|'.join(group) for group in groups)}" for format, groups in COLUMNS.items()
    )
    raise RowError(f"columns {', '.join(map(str, columns)) or '(none)'} fit no known form ({known})")


def unread(value: Mapping[str, Any], format: str) -> list[str]:
    """The columns of a row that hold something, and of which nothing is read in this form."""
    groups = _READ[format]
    read = {next((name for name in group if value.get(name) is not None), "") for group in groups}
    empty = (str, list, tuple, Mapping)
    return [
        name
        for name, cell in value.items()
        if name and name not in read and cell is not None and (cell or not isinstance(cell, empty))
    ]


def refuse_media(value: Mapping[str, Any]) -> None:
    """Raises RowError for a row with a picture, a video or a sound beside its text: without that its text is another
    task, and a tag that stands for it is nothing but letters. A text alone in such a column, without a tag, is what a
    row says of itself, such as the address of a page's picture."""
    for name, cell in value.items():
        tag = _MEDIA.get(name.lower()) if isinstance(name, str) else None
        if tag is None or cell is None or (isinstance(cell, str | list | tuple | Mapping) and not cell):
            continue
        tagged = any(tag in text for key, other in value.items() if key != name for text in strings(other))
        if tagged or not isinstance(cell, str):
            raise RowError(
                f"column {name} holds what the text is about{f' ({tag} stands for it)' if tagged else ''}; only text "
                "can be trained on: leave such rows out, or that column and its tags where the text makes sense alone"
            )


def strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from strings(name)
            yield from strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings(part)


def normalize_pair(value: Mapping[str, Any]) -> Pair:
    """The `Pair` of a row of the form PREFERENCE. Raises `RowError` with the reason where it cannot be one."""
    refuse_media(value)
    return Pair(*(_answered(value, side) for side in ("chosen", "rejected")))


def normalize_labelled(value: Mapping[str, Any]) -> Pair:
    """As normalize_pair, of a row of the form LABELLED: a pair of which one answer is missing."""
    refuse_media(value)
    label = _column(value, ("label",))
    if value.get("completion") is None and value.get("messages") is not None:  # the answer ends the conversation
        turns = _turns(value["messages"])
        value = {**value, "prompt": turns[:-1], "completion": turns[-1:]}
    example = _answered(value, "completion")
    if label not in (True, False):  # 1 and 0 are equal to them
        raise RowError(f"label = {label!r}: must be true for a desirable completion, or false")
    return Pair(example, None) if label else Pair(None, example)


def normalize(value: Mapping[str, Any], format: str) -> Example:
    """The `Example` of a row of the given form, a key of `COLUMNS`. Raises `RowError` with the reason where it cannot
    be one."""
    refuse_media(value)
    if format == "text":
        text = _text(value, ("text",))
        _not_empty(text, "text")
        return Example(text=text)
    if format == "alpaca":
        instruction = _text(value, COLUMNS["alpaca"][0])
        context = _text(value, ("input", "context"), required=False)
        output = _text(value, COLUMNS["alpaca"][1])
        _not_empty(instruction, "instruction")
        _not_empty(output, "response")
        asked = f"{instruction}\n\n{context}" if context.strip() else instruction
        system = _text(value, SYSTEM, required=False)
        return Example(
            prompt=_after(system, _alpaca_prompt(instruction, context)),
            completion=output,
            messages=_exchange(system, asked, output),
        )
    if format == "prompt_completion":
        asked, answer = (_column(value, group) for group in COLUMNS["prompt_completion"])
        if any(isinstance(part, Iterable) and not isinstance(part, str) for part in (asked, answer)):
            return _prompted(value, asked, answer)
        prompt, completion = (_text(value, group) for group in COLUMNS["prompt_completion"])
        _not_empty(completion, "response")
        system = _text(value, SYSTEM, required=False)
        messages = _exchange(system, prompt, completion)
        if value.get("prompt") is None:  # a question says nothing of how its answer begins: only a template can
            return Example(messages=messages)
        return Example(prompt=_after(system, prompt), completion=completion, messages=messages)
    if format == "messages":
        return _conversation(value, _parsed(_column(value, COLUMNS["messages"][0])), _message)
    return _conversation(value, _parsed(_column(value, COLUMNS["sharegpt"][0])), _sharegpt_message)


def _answered(value: Mapping[str, Any], side: str) -> Example:
    """A preference's prompt with one of its answers, in the forms of TRL and LLaMA-Factory.

    chosen and rejected are text, after a prompt that is text; or a turn or a list of turns, after a prompt that is a
    list of turns (prompt, messages or conversations) or stands in them.
    """
    answer, asked = _column(value, (side,)), _column(value, _PROMPT, False)
    if isinstance(answer, str):
        check_unicode(answer)
        _not_empty(answer, f"{side} response")
        if asked is None:
            raise RowError(f"{side} is text, and there is no prompt before it")
        if isinstance(asked, str):
            check_unicode(asked)
            system = _text(value, SYSTEM, required=False)
            return Example(prompt=_after(system, asked), completion=answer, messages=_exchange(system, asked, answer))
        answer = [{"role": "assistant", "content": answer}]
    return _asked_and_answered(value, asked, answer, side)


def _prompted(value: Mapping[str, Any], asked: Any, answer: Any) -> Example:
    """A prompt and a completion of which one is turns, or both (TRL's conversational form): one conversation, of which
    the completion's responses alone are trained on."""
    if isinstance(answer, str):
        _not_empty(answer, "response")
        answer = {"role": "assistant", "content": answer}
    answer = _turns(answer)
    if not answer or not _turns(asked):
        raise RowError(f"the {'prompt' if answer else 'completion'} is an empty list of turns")
    example = _asked_and_answered(value, asked, answer, "completion")
    return dataclasses.replace(example, asked=len(example.messages or ()) - len(answer))


def _asked_and_answered(value: Mapping[str, Any], asked: Any, answer: Any, side: str) -> Example:
    """The conversation of a prompt, which may be text, and the turns after it. side: the column of these."""
    example = _conversation(value, [*_turns(asked), *_turns(answer)], _sharegpt_message)
    last = example.messages[-1] if example.messages else {}
    if last.get("role") != "assistant":
        raise RowError(f"{side} does not end with an answer of the assistant, but with {last.get('role')}")
    return example


def _parsed(turns: Any) -> Any:
    """The turns of a cell that holds their JSON, as those of CSV files do."""
    if not isinstance(turns, str):
        return turns
    try:
        return json.loads(turns)
    except ValueError:
        raise RowError("the conversation is text, and not the JSON of a list of turns") from None


def _turns(turns: Any) -> list[Any]:
    """A list of turns; of one turn; of a text, which a user asks."""
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    if isinstance(turns, Mapping):
        return [turns]
    if not isinstance(turns, Iterable | None):
        raise RowError(f"the conversation is not a list of turns but {_kind(turns)}")
    return [] if turns is None else list(turns)


def _alpaca_prompt(instruction: str, context: str) -> str:
    if context.strip():
        body = f"{ALPACA_PREAMBLE_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{context}"
    else:
        body = f"{ALPACA_PREAMBLE}\n\n### Instruction:\n{instruction}"
    return f"{body}\n\n### Response:\n"


def _after(system: str, prompt: str) -> str:
    """A prompt that is given as it stands, after the system message, if there is one."""
    return f"{system}\n\n{prompt}" if system.strip() else prompt


def _exchange(system: str, user: str, assistant: str) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system.strip() else []
    return [*first, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _column(value: Mapping[str, Any], names: tuple[str, ...], required: bool = True) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    if required:
        if empty := [name for name in names if name in value]:
            raise RowError(f"column {empty[0]} is null")
        raise RowError(f"no column {' or '.join(names)}; it has {', '.join(map(str, value)) or 'none'}")
    return None


def _text(value: Mapping[str, Any], names: tuple[str, ...], required: bool = True) -> str:
    found = _column(value, names, required)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise RowError(f"column {next(n for n in names if value.get(n) is not None)} is not text but {_kind(found)}")
    check_unicode(found)
    return found


def check_unicode(text: str) -> None:
    # JSON can spell half of a surrogate pair ("\ud83d"); no tokenizer can encode it.
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise RowError("not valid Unicode: half of a surrogate pair")


def _not_empty(text: str, what: str) -> None:
    if not text.strip():
        raise RowError(f"empty {what}")


def _kind(value: Any) -> str:
    return type(value).__name__


def _conversation(value: Mapping[str, Any], turns: Any, read: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Example:
    if isinstance(turns, str) or not isinstance(turns, Iterable):
        raise RowError(f"the conversation is not a list of turns but {_kind(turns)}")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise RowError(f"a turn is not an object but {_kind(turn)}")
        messages.append(read(turn))
    if not messages:
        raise RowError("empty conversation")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            _not_empty(message["content"], "response")
    system = _text(value, SYSTEM, required=False)
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Example(messages=messages, tools=_tools(value.get("tools")))


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"a message has no role; it has {', '.join(map(str, turn)) or 'nothing'}")
    # Tables (Parquet, datasets) fill the columns that a message does not have with None.
    message = {name: part for name, part in turn.items() if part is not None}
    message["role"] = role = _SPEAKERS.get(role.lower(), role)
    if message.get("function_call"):  # OpenAI's older form of one call
        message.setdefault("tool_calls", [message.pop("function_call")])
    content = message.pop("content", None)
    if content is None and not message.get("tool_calls"):
        raise RowError(f"a message of the role {role} has no content")
    if isinstance(content, str | None):
        message["content"] = content or ""
    elif isinstance(content, Iterable) and not isinstance(content, Mapping):
        message |= _joined_parts(content)
    else:
        raise RowError(f"content is neither text nor a list of parts but {_kind(content)}")
    check_unicode(message["content"])
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list | tuple):
            raise RowError(f"tool_calls is not a list but {_kind(message['tool_calls'])}")
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _joined_parts(parts: Iterable[Any]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    targets = {"text": texts, "input_text": texts, "output_text": texts, "reasoning": reasoning, "tool_call": calls}
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        text = (part.get("text") or part.get("value") or "") if isinstance(part, Mapping) else ""
        target = targets.get(str(kind))
        if target is None or not isinstance(text, str):
            raise RowError(f"a part of the type {kind} in content; only text can be trained on")
        target.append(text)
    message: dict[str, Any] = {"content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _sharegpt_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in turn:  # some files name the column as ShareGPT does and its parts as OpenAI does
        return _message(turn)
    speaker, content = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or not isinstance(content, str):
        raise RowError(f"a turn needs `from` and `value` as text; it has {', '.join(map(str, turn)) or 'nothing'}")
    role = ROLES.get(speaker.lower())
    if role is None:
        raise RowError(f"unknown speaker {speaker!r}; known: {', '.join(ROLES)}")
    check_unicode(content)
    if speaker.lower() in ("function_call", "tool_call"):
        return {"role": role, "content": "", "tool_calls": [_tool_call(content)]}
    return {"role": role, "content": content} | {
        key: turn[key] for key in ("weight", "train", "training") if turn.get(key) is not None
    }


def _tool_call(call: Any) -> dict[str, Any]:
    """A call as chat templates take it: {type, function: {name, arguments: object}}."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError:
            raise RowError("a tool call is not JSON") from None
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise RowError(f"the arguments of the tool call {function['name']} are not JSON") from None
    rest = {name: part for name, part in call.items() if name in ("id",) and part is not None}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas, given as a list or as its JSON, each in the {type: function, function: ...} wrapping."""
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError("column tools is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("column tools is not a list of objects")
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]
