"""/v1/responses: its body as that of a chat, and its answers."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxtune.serve import bodies
from jaxtune.serve.bodies import Lengths, Models, Objects, Positive
from jaxtune.serve.errors import ApiError
from jaxtune.serve.requests import ParsedRequest, Usage

# What is not supported, and the value that asks for nothing.
_NEUTRAL: dict[str, object] = {
    "background": False,
    "conversation": None,
    "previous_response_id": None,
    "prompt": None,
    "top_logprobs": 0,
    "truncation": "disabled",
}


# Parts of items that no answer has here.
_Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class _Reasoning(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    effort: str | None = None
    summary: str | None = None  # no answer has one
    generate_summary: str | None = None


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    verbosity: Literal["medium"] | None = None  # which is no other than none
    format: dict[str, object] | None = None  # as a chat's response_format, with the schema's keys beside the type


class _Responses(BaseModel):
    """A body, with OpenAI's meanings; keys that a chat has too are checked as its."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    input: str | Annotated[Objects, Field(min_length=1)]
    instructions: str | None = None  # the system message
    max_output_tokens: Positive | None = None
    tools: Objects | None = None
    text: _Text | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of built-in tools, which there are none of
    include: list[_Included] | None = None
    stream_options: bodies.StreamOptions | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, object] | None = None
    user: str | None = None
    safety_identifier: str | None = None


_PASSED = ("model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PASSED += ("seed", "chat_template_kwargs", "user", "safety_identifier", "tools")


def read_responses(body: object, models: Models, lengths: Lengths) -> ParsedRequest:
    """What a body of /v1/responses, decoded JSON of any type, asks for. ApiError: as `read_chat`."""
    checked = bodies.checked(_Responses, body, _NEUTRAL)
    for index, tool in enumerate(checked.tools or ()):
        if tool.get("type") != "function":
            message = f"tools.{index}: a {tool.get('type')} is not supported: give functions"
            raise ApiError(400, message, f"tools.{index}", "unsupported_parameter")
    chat: dict[str, object] = {key: getattr(checked, key) for key in _PASSED}
    system = [{"role": "system", "content": checked.instructions}] if checked.instructions else []
    items = [{"role": "user", "content": checked.input}] if isinstance(checked.input, str) else _turns(checked.input)
    chat["messages"] = [*system, *items]
    chat["max_completion_tokens"] = checked.max_output_tokens
    chat["reasoning_effort"] = None if checked.reasoning is None else checked.reasoning.effort
    choice = checked.tool_choice
    named = isinstance(choice, dict)
    chat["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}} if named else choice
    form = None if checked.text is None else checked.text.format
    if form is not None:
        schema = {key: value for key, value in form.items() if key != "type"}
        chat["response_format"] = {"type": form.get("type")} | ({"json_schema": schema} if schema else {})
    request_values = bodies.read_chat(chat, models, lengths)
    row = request_values.rows[0]
    shown = {
        "instructions": checked.instructions,
        "max_output_tokens": checked.max_output_tokens,
        "metadata": body.get("metadata") or {} if isinstance(body, Mapping) else {},
        "parallel_tool_calls": checked.parallel_tool_calls is not False,
        "temperature": row.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": checked.tools or [],
        "top_p": row.top_p,
    }
    return dataclasses.replace(request_values, form="responses", shown=shown)


def _turns(items: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """Messages of a chat. A reasoning belongs to the assistant's next item."""
    turns: list[dict[str, object]] = []
    thoughts = ""
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            parts = parts if isinstance(parts, list) else []
            thoughts += "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            continue
        if kind == "message":
            turn = {key: item[key] for key in ("role", "content") if key in item}
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            turn = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        else:
            message = f"input.{index}: an item of type {str(kind)[:80]!r} is not supported"
            raise ApiError(400, message, f"input.{index}.type", "invalid_value")
        if thoughts and turn.get("role") == "assistant":
            turn["reasoning_content"], thoughts = thoughts, ""
        turns.append(turn)
    return turns


class Response:
    """The `response` object of one answer, and the events of its stream."""

    def __init__(self, request_values: ParsedRequest):
        self._head: dict[str, object] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request_values.model,
            "error": None,
            "previous_response_id": None,
            "truncation": "disabled",
            **(request_values.shown or {}),
        }
        self._output: list[dict[str, object]] = []
        self._open: dict[str, object] | None = None  # the item that gets text, whose text is in `_text`
        self._text: list[str] = []
        self._number = -1  # of the last event

    def begin(self) -> list[dict[str, object]]:
        response = self._response("in_progress", None, None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def add(self, kind: str, text: str) -> list[dict[str, object]]:
        """More text of a kind, "content" or "thought"."""
        name = "message" if kind == "content" else "reasoning"
        events = []
        if self._open is None or self._open["type"] != name:
            events += [*self._close(), *self._begin(name)]
        self._text.append(text)
        return [*events, self._part_event("delta", delta=text)]

    def end(self, calls: Iterable[dict[str, object]], reason: str | None, usage: Usage) -> list[dict[str, object]]:
        """The last events: calls, in the form of a chat, and the whole response, as in `whole` too."""
        events = self._close()
        for call in calls:
            function = call["function"]
            assert isinstance(function, dict)
            item = {
                "type": "function_call",
                "id": f"fc_{secrets.token_hex(12)}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
            location = {"output_index": len(self._output), "item_id": item["id"]}
            begun = item | {"arguments": "", "status": "in_progress"}
            events.append(self._event("response.output_item.added", output_index=len(self._output), item=begun))
            name = "response.function_call_arguments"
            events.append(self._event(f"{name}.delta", **location, delta=item["arguments"]))
            events.append(self._event(f"{name}.done", **location, name=item["name"], arguments=item["arguments"]))
            events.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
            self._output.append(item)
        status = "incomplete" if reason == "length" else "completed"
        self.whole = self._response(status, reason, usage)
        return [*events, self._event(f"response.{status}", response=self.whole)]

    def failed(self, error: ApiError) -> dict[str, object]:
        """The last event of a stream that fails, with a chat's `error` too, at which the openai package raises."""
        return self._event("error", code=error.code, message=error.message, param=error.param, **error.body())

    def _response(self, status: str, reason: str | None, usage: Usage | None) -> dict[str, object]:
        details = {"reason": "max_output_tokens"} if reason == "length" else None
        form = self._head | {"status": status, "incomplete_details": details, "output": list(self._output)}
        return form | {
            "usage": usage
            and {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": 0},
                "output_tokens": usage.answer_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
                "total_tokens": usage.prompt_tokens + usage.answer_tokens,
            }
        }

    def _begin(self, name: str) -> list[dict[str, object]]:
        item: dict[str, object] = {"type": name, "id": f"{name[:3]}_{secrets.token_hex(12)}", "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if name == "message" else {"summary": [], "content": []}
        self._open, self._text = item, []
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return [added, self._part_event("added", part=self._part())]

    def _close(self) -> list[dict[str, object]]:
        if self._open is None:
            return []
        text, part = "".join(self._text), self._part()
        events = [self._part_event("text.done", text=text), self._part_event("done", part=part)]
        item = self._open | {"status": "completed", "content": [part]}
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        return events

    @property
    def _is_message(self) -> bool:
        return self._open is not None and self._open["type"] == "message"

    def _part(self) -> dict[str, object]:
        text = "".join(self._text)
        if self._is_message:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _part_event(self, event: str, **values: object) -> dict[str, object]:
        """Of the open item: a part that is "added" or "done", or a text's "delta" or "text.done"."""
        assert self._open is not None
        kind = "output_text" if self._is_message else "reasoning_text"
        name = "content_part." + event if event in ("added", "done") else f"{kind}.{event.removeprefix('text.')}"
        extra = {"logprobs": []} if kind == "output_text" and name.startswith(kind) else {}
        location = {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{name}", **location, **values, **extra)

    def _event(self, name: str, /, **values: object) -> dict[str, object]:
        self._number += 1
        return {"type": name, "sequence_number": self._number, **values}
