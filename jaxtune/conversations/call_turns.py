"""Turns with calls in forms that a chat template takes which refuses others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jaxtune.conversations.messages import Message


def _single(messages: Sequence[Message]) -> list[Message]:
    """Each call in a turn of its own, with its result behind it, where each call has one."""
    result, at = [], 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        answers = [*itertools.takewhile(lambda turn: turn.get("role") == "tool", messages[at:])]
        if len(calls) < 2 or len(answers) != len(calls):
            result.append(message)
            continue
        at += len(answers)
        by_id = {answer.get("tool_call_id"): answer for answer in answers}
        if {call.get("id") for call in calls} == by_id.keys() and len(by_id) == len(calls):
            answers = [by_id[call.get("id")] for call in calls]
        for number, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            first = message if number == 0 else {"role": message["role"], "content": ""}
            result += [{**first, "tool_calls": [call]}, answer]
    return result


def _calls_alone(messages: Sequence[Message]) -> list[Message]:
    """The words of turns with calls among their thoughts."""
    result = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            thoughts = "\n\n".join(filter(None, (message.get("reasoning_content"), message["content"])))
            message = {**message, "content": "", "reasoning_content": thoughts}
        result.append(message)
    return result


def ways_to_write(messages: Sequence[Message], template: str) -> Iterator[list[Message]]:
    """The messages, and further forms of them that a template may take where it refuses the first: with one call in a
    turn, with calls apart from words.
    """
    messages = list(messages)
    first = _single(messages) if "tool_calls[0]" in template else messages  # of several calls it writes one
    forms: list[list[Message]] = []
    for form in (first, _single(messages), _calls_alone(first), _calls_alone(_single(messages))):
        if form not in forms:
            forms.append(form)
            yield form
