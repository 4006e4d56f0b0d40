"""Conversations to text by a chat template, where in the text each response lies, and what the text lacks.

A template with `{% generation %}` marks says itself where responses are. For others, a response lies between the prompt
that asks for it and its turn's end, where both are beginnings of the whole text. Many templates write a turn otherwise
once later ones follow: they leave its thought out, or end it with another token. What of the text a message makes shows
then when the message is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from jaxtune.train.data.formats import RowError

MOST_RESPONSES = 1000  # of a conversation that is rendered anew for each of them

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "\ue000x\ue001"  # private-use characters: in no real message
_THOUGHTS = ("reasoning_content", "thinking")
_INLINE = re.compile(r"(<think>)(.*\S.*)(</think>)", re.DOTALL)


class Conversations:
    """Renders conversations.

    Args:
        tokenizer: a fast Hugging Face tokenizer. template: Jinja text.
        special_texts: finds what makes a turn; see spans.special_texts. end_ids: tokens that may end a turn.
    """

    def __init__(self, tokenizer: Any, template: str, special_texts: re.Pattern[str] | None, end_ids: Set[int]):
        self.tokenizer, self.template = tokenizer, template
        self._special_texts, self._end_ids = special_texts, end_ids

    def render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates are programs: any error of theirs is this row's
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None

    def render_marked(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """Rendered once, with the ranges of the template's `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns a pair
                conversations=[messages],
                tools=tools,  # type: ignore[arg-type]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None
        (text,), (ranges,) = rendered
        return text, [(low, high) for low, high in ranges if low < high]

    def render_prefixes(
        self, messages: list[dict], tools: list[dict] | None, first: int
    ) -> tuple[str, list[tuple[int, int]]]:
        """For a template without marks: a response lies between the prompt that asks for it and its turn's end.

        A response that opens a conversation has no prompt and is not trained on. first: the first message that may be a
        response.
        """
        responses = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if len(responses) > MOST_RESPONSES:
            raise RowError(
                f"{len(responses):,} responses; a template without {{% generation %}} marks is rendered anew for each, "
                f"so a conversation may have {MOST_RESPONSES:,}; divide it"
            )
        text = self.render(messages, tools)
        ranges = []
        for index in responses:
            prompt = self.render(messages[:index], tools, add_generation_prompt=True)
            start = len(prompt) if text.startswith(prompt) else self._start(messages, tools, text, index)
            turn = text if index == len(messages) - 1 else self.render(messages[: index + 1], tools)
            end = len(turn) if text.startswith(turn) else self._end(messages, tools, text, index)
            ranges.append((start, end))
        return text, ranges

    def _start(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> int:
        """Where response `index` begins in `text`, for templates that write the turns before it otherwise once later
        ones follow, or whose prompt opens a thought that earlier turns have not (Qwen3.5's): after what a prompt asks
        with, which stands between the message before and what the response makes of the text; or, where a part of it
        stands there, with that."""
        before, asking = (self.render(messages[:index], tools, add_generation_prompt=ask) for ask in (False, True))
        opening = asking.removeprefix(before)
        at, _ = self._made_by(messages, tools, text, index)
        if opening and opening != asking and at is not None:
            _, low = self._made_by(messages, tools, text, index - 1)
            if low is not None and (place := text.find(opening, low, at)) >= 0:
                return place + len(opening)
            sizes = (size for size in range(len(opening), 0, -1) if text.endswith(opening[:size], 0, at))
            shared = opening[: next(sizes, 0)]
            if shared and (shared == opening or (self._special_texts and self._special_texts.search(shared))):
                return at
        raise RowError(
            f"the chat template writes the turns before response {index} differently once later turns follow: it "
            "cannot tell the responses; set data.last_response_only=true, or data.instruction_part and "
            "data.response_part, or use a template with {% generation %} marks"
        )

    def _end(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> int:
        """Where response `index` ends in `text`, for templates that write a turn otherwise while it is the last one:
        after the first special token that follows what the response makes of the text."""
        _, end = self._made_by(messages, tools, text, index)
        if end is None:
            raise RowError(
                f"the chat template changes response {index} once later turns follow, and its end cannot be found; "
                "set data.instruction_part and data.response_part, or use a template with {% generation %} marks"
            )
        specials = [self.tokenizer.convert_ids_to_tokens(int(token)) for token in self._end_ids]
        following = [(text.find(special, end), special) for special in specials if special in text[end:]]
        if not following:
            raise RowError(f"the chat template ends response {index} with no special token")
        at, special = min(following)
        return at + len(special)

    def _made_by(
        self, messages: list[dict], tools: list[dict] | None, text: str, index: int
    ) -> tuple[int | None, int | None]:
        """(where begins, where ends) what of `text` changes with what message `index` says; None where that does not
        show. A call's name may be told again with its result, and text that is added brings its own line breaks: they
        show the end only where nothing else does."""
        low = high = weak = None
        for part, changed in _changed(messages[index]):
            other = self._rendered_with(messages, tools, index, changed)
            if other is None or other == text:
                continue
            same = _shared(text, other)
            low = same if low is None else min(low, same)
            end = len(text) - _shared(text[same:][::-1], other[same:][::-1])
            if part in ("name", "added"):
                weak = end if weak is None else min(weak, end)
            else:
                high = end if high is None else max(high, end)
        return low, weak if high is None else high

    def _rendered_with(self, messages: list[dict], tools: list[dict] | None, index: int, changed: dict) -> str | None:
        try:
            return self.render([*messages[:index], changed, *messages[index + 1 :]], tools)
        except RowError:  # some templates refuse a change, such as text beside a call
            return None

    def left_out(self, messages: list[dict], tools: list[dict] | None, text: str) -> str:
        """What of a conversation its text lacks, as the template does not write it, or ""."""
        asked = [
            (index, part, changed)
            for index, message in enumerate(messages)
            for part, changed in _changed(message)
            if part in (*_THOUGHTS, "inline", "name") or (part == "content" and _is_lost(message["content"], text))
        ]
        found = []
        if not self._all_written(messages, tools, [(index, part) for index, part, _ in asked]):
            for index, part, changed in asked:
                if self._rendered_with(messages, tools, index, changed) == text:
                    name = {"name": "tool_calls", "inline": "<think>"}.get(part, part)
                    found.append(f"{name} of message {index} ({messages[index]['role']})")
        if tools:
            try:
                if self.render(messages, None) == text:
                    found.append("tools")
            except RowError:  # then they matter
                pass
        return ", ".join(found)

    def _all_written(self, messages: list[dict], tools: list[dict] | None, parts: list[tuple[int, str]]) -> bool:
        """Whether the text has each of these parts of messages, told by changing all of them at once; where templates
        refuse that, or where it leads to another text than the conversation's, they are not known to be there."""
        if not parts or any(part == "content" for _, part in parts):
            return not parts
        changed = list(messages)
        wanted = []
        for number, (index, part) in enumerate(parts):
            wanted.append(f"\ue000{number}\ue001")
            changed[index] = dict(_changed(changed[index], wanted[-1]))[part]
        try:
            text = self.render(changed, tools)
        except RowError:
            return False
        return all(each in text for each in wanted)


def _is_lost(content: str, text: str) -> bool:
    """Whether a message's content may be lacking in a text. A thought within it is a part of its own."""
    return not _INLINE.search(content) and content.strip() not in text


def _shared(one: str, other: str) -> int:
    """Characters with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _changed(message: Mapping[str, Any], other: str = SENTINEL) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the part, the message with `other` in its place), for each part of a message that says something."""
    thoughts = [key for key in _THOUGHTS if isinstance(message.get(key), str) and message[key].strip()]
    if thoughts:  # of two names, a template reads one
        yield thoughts[0], {**message, **dict.fromkeys(thoughts, other)}
    content, calls = message["content"], message.get("tool_calls") or []
    if content.strip():
        yield "content", {**message, "content": other}
    elif calls:
        yield "added", {**message, "content": other}
    if message["role"] == "assistant" and _INLINE.search(content):
        yield "inline", {**message, "content": _INLINE.sub(rf"\1{other}\3", content)}
    if calls:
        named = {**calls[0], "function": {**calls[0]["function"], "name": other}}
        yield "name", {**message, "tool_calls": [named, *calls[1:]]}
        told = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {other: other}}}
        yield "arguments", {**message, "tool_calls": [*calls[:-1], told]}
