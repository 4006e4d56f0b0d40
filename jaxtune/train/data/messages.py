"""The turns of a conversation, converted to messages in the form that chat templates expect; `formats.py` makes the
conversations of rows by it.

Data sets write turns as OpenAI's API does (`role`, `content`, `tool_calls`) or as ShareGPT does (`from`, `value`). Both
become dicts with a chat role and text, and with calls whose arguments are decoded if they were JSON text:
`chat_message` converts a turn of the first form, `sharegpt_message` one of either, and `tool_schemas` the tools of a
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtune.train.data.row_errors import RowError, check_unicode

# The names of speakers in ShareGPT's data sets, and the chat role of each.
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

# Speakers that some data sets of messages also write as `role`. Those of calls are not among them: their turns have the
# JSON of a call and not text.
_SPEAKERS = {name: role for name, role in ROLES.items() if not name.endswith("_call")}


def chat_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Converts `turn`, a turn in OpenAI's form, to a new message in the form that chat templates expect. `formats.py`
    reads rows of the format messages by it, and `sharegpt_message` calls it for turns with the key `role`.

    - The content becomes text, "" if the turn has only tool calls. If it is a list of typed parts, their texts are
      joined. Parts of the type "reasoning" become `reasoning_content`. Parts of the type "tool_call" become
      `tool_calls`, and the turn's own calls are dropped then.
    - The name of a speaker becomes a role ("human" becomes "user"); other roles stay.
    - Each tool call becomes {"id" (if it has one), "type": "function", "function": {"name", "arguments": object}}. The
      older key `function_call` becomes `tool_calls`; it is dropped if the turn has calls under that key too.
    - Other keys stay, without those that are None.

    Raises `RowError` if the turn cannot be used: it has no role, or neither content nor calls; the content is neither
    text nor a list; a part is of another type, such as an image; a call is wrong; or the content is not valid Unicode.
    """
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise RowError(f"a message has no role; it has {', '.join(map(str, turn)) or 'nothing'}")
    # In tables (Parquet, datasets), a message has None in the columns that only other messages use.
    message = {name: part for name, part in turn.items() if part is not None}
    message["role"] = role = _SPEAKERS.get(role.lower(), role)
    if call := message.pop("function_call", None):  # OpenAI's older name for a single call
        message["tool_calls"] = message.get("tool_calls") or [call]
    content = message.pop("content", None)
    if content is None and not message.get("tool_calls"):
        raise RowError(f"a message of the role {role} has no content")
    if isinstance(content, str | None):
        message["content"] = content or ""
    elif isinstance(content, Iterable) and not isinstance(content, Mapping):
        message |= _joined_parts(content)
    else:
        raise RowError(f"content is neither text nor a list of parts but {type(content).__name__}")
    check_unicode(message["content"])
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list | tuple):
            raise RowError(f"tool_calls is not a list but {type(message['tool_calls']).__name__}")
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _joined_parts(parts: Iterable[object]) -> dict[str, Any]:
    """The keys of a message whose content is `parts`, a list of typed parts such as {"type": "text", "text": ...}, for
    `chat_message`: "content" as text, and "reasoning_content" (text) and "tool_calls" (a list) if there are such parts.
    Parts of the types text, input_text and output_text are content. The text of a part is under its key "text" or else
    "value"; that of a part "tool_call" is the JSON of a call. The texts of several parts are joined without a
    separator. Raises `RowError` for a part of another type, such as an image, or a wrong call."""
    texts, reasoning, calls = [], [], []
    targets = {"text": texts, "input_text": texts, "output_text": texts, "reasoning": reasoning, "tool_call": calls}
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
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


def sharegpt_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a turn in ShareGPT's form ({from, value}) to a message in the form that chat templates expect ({"role",
    "content", ...}); a turn with the key `role` is in OpenAI's form, and `chat_message` converts it. `formats.py` reads
    sharegpt rows by it, and the turns of prompts, completions and preferences, which have either form. The value of the
    speaker function_call or tool_call is the JSON of a call, which becomes `tool_calls`. Of the other keys of a
    ShareGPT turn only weight, train and training stay (none for a call), by which `spans.refuse_left_out` finds answers
    that are not to be trained on. Raises `RowError` if the speaker is not one of
    ROLES (such as human, gpt or system), or the turn is wrong otherwise."""
    if "role" in turn:  # some files name the column as ShareGPT does and its parts as OpenAI does
        return chat_message(turn)
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
    """Converts a call to the form that chat templates expect: {"id" (if it has one), "type": "function", "function":
    {"name", "arguments": object}}. The call may be given as it is in OpenAI's API or as {"name", "arguments"}, and it
    and its arguments as JSON text. Missing, empty and null arguments become {}; that arguments are an object is not
    checked. All calls in turns, of OpenAI's and of ShareGPT's form, are converted by it. Raises `RowError` if the JSON
    is not valid, or the call has no name."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError:
            raise RowError("a tool call is not JSON") from None
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) or {}
        except ValueError:
            raise RowError(f"the arguments of the tool call {function['name']} are not JSON") from None
    rest = {name: part for name, part in call.items() if name in ("id",) and part is not None}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tool_schemas(tools: Any) -> list[dict[str, Any]] | None:
    """The schemas of tools that chat templates expect, each {"type": "function", "function": schema}, from `tools`, the
    value of a row's column of that name: a list of schemas or its JSON text. A schema that has this form already stays
    as it is. `formats.py` makes `Example.tools` by it. The tools of objective.tools, which a model calls while it
    samples, do not come from a column and are not converted here. None if there are no tools (null, an empty list or
    blank text). Raises `RowError` if the text is not JSON, or the value is not a list of objects."""
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
