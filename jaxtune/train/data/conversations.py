"""Renders conversations with a chat template, and finds in the text where each response begins and ends
(`Conversations`), because `templates.RowEncoder` trains on responses only. `TextRange` is the place of one message's
text.

It also finds the parts of a conversation that the template does not write into the text, such as a thought, the content
of a message, a tool call or the list of tools, so that a warning can name them.

A template with `{% generation %}` marks says itself where responses are. For other templates, a response begins where
the rendered turns before it (with the generation prompt) end, and ends where the rendered turns up to it end, provided
that both are prefixes of the whole text. Many templates render a turn differently once later turns follow: they leave
out its thought, or end it with another token. Then the text of a message is found by changing the message, rendering
again, and comparing the two texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from jaxtune.conversations.messages import for_template
from jaxtune.conversations.templates import TemplateError, render
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.train.data.row_errors import RowError

MOST_RESPONSES = 1000  # the most responses of a conversation that is rendered again for each of them

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # finds such a mark in a template
SENTINEL = "\ue000x\ue001"  # a text that no real message has: its characters are for private use
_THOUGHTS = ("reasoning_content", "thinking")  # the keys under which messages have their thoughts
_INLINE = re.compile(r"(<think>)(.*\S.*)(</think>)", re.DOTALL)  # a thought within a message's content


class TextRange(NamedTuple):
    """Where a message's own text is in a rendered conversation, as indices of characters. `Conversations._text_of`
    makes it, to find where a response begins and ends. `start` and `end` are both None if the text cannot be found."""

    start: int | None
    """The index of its first character."""
    end: int | None
    """The index after its last character."""


class Conversations:
    """Renders conversations with one chat template, and finds their responses, the messages with the role "assistant".
    `templates.RowEncoder` makes it, and `tool_formats.ToolFormat`, which only renders. `render` gives the text,
    `render_marked` and `render_prefixes` also the places of the responses, and `left_out` what the template does not
    write. In all methods, `messages` are dicts as in `formats.Example.messages`, and `tools` are the JSON schemas of
    tools, or None.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: the template's Jinja text.
        special_texts: a pattern that matches special tokens and marker strings, from `spans.special_texts`, by which
            `_start` recognises a part of the generation prompt; None: only a whole one is recognised.
        end_ids: the ids of the tokens that may end a turn, to find the end of a response that the template renders
            differently once later turns follow.
        whole: whether such a response also has the white space behind that token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        special_texts: re.Pattern[str] | None,
        end_ids: Set[int],
        whole: bool = False,
    ):
        self.tokenizer, self.template, self._whole = tokenizer, template, whole
        self._special_texts, self._end_ids = special_texts, end_ids

    def render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises `RowError` if the template fails on it."""
        try:
            return render(self.tokenizer, self.template, messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise RowError(str(error)) from None

    def render_marked(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """(Text of a conversation, ranges of its responses), for a template with `{% generation %}` marks. The ranges
        are (start, end) indices of characters of all these blocks that are not empty. Raises `RowError` if the template
        fails."""
        text, ranges = self._blocks(messages, tools)
        return text, [(low, high) for low, high in ranges if low < high]

    def marked_by_message(
        self, messages: list[dict], tools: list[dict] | None
    ) -> tuple[str, dict[int, list[tuple[int, int]]]]:
        """(Text of a conversation, {index of a response: its ranges}), as `render_marked`, with a rendering for each
        response. Raises `RowError` if the template does not show which block is whose."""
        text, ranges = self._blocks(messages, tools)
        responses = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(responses) > MOST_RESPONSES:
            raise RowError(
                f"{len(responses):,} responses, some of them marked; there may be {MOST_RESPONSES:,}: divide it"
            )
        by_message, before = {}, 0
        for index in responses:
            count = len(self._blocks(messages[: index + 1], tools)[1])
            by_message[index] = [(low, high) for low, high in ranges[before:count] if low < high]
            before = count
        if before != len(ranges):
            raise RowError("the chat template does not show which response is which, so marks cannot be followed")
        return text, by_message

    def content_range(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> tuple[int, int]:
        """(Index in `text` of the first character of a message's content, number of characters that the template strips
        before it). Raises `RowError` if the template does not write the content as it is."""
        content = messages[index]["content"]
        other = self._rendered_with(messages, tools, index, {**messages[index], "content": SENTINEL})
        if other is not None and other != text:
            low = _common_prefix(text, other)
            shown = text[low : len(text) - _common_prefix(text[low:][::-1], other[low:][::-1])]
            if shown in (content, content.rstrip()):
                return low, 0
            if shown in (content.lstrip(), content.strip()):
                return low, len(content) - len(content.lstrip())
        raise RowError(
            f"messages[{index}].train_detail: the chat template does not write the content as it is, so its parts "
            "cannot be found; mark the whole answer"
        )

    def _blocks(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """(Text of a conversation, ranges of all blocks within `{% generation %}` marks)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # it is annotated to return str, and returns a pair
                conversations=[for_template(messages, self.template)],
                tools=tools,  # type: ignore[arg-type]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None
        (text,), (ranges,) = rendered
        return text, list(ranges)

    def render_prefixes(
        self, messages: list[dict], tools: list[dict] | None, first: int
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the (start, end) character range of each response, in order, for a template
        without `{% generation %}` marks. Each response costs up to two renderings, and more if the template renders its
        turns differently once later turns follow.

        Args:
            messages, tools: the conversation.
            first: the index of the first message that may be a response; at least 1, because a response that opens a
                conversation has no prompt. Responses before it get no range.

        Raises:
            RowError: the template fails, a response cannot be found, or from `first` on there are more than
                `MOST_RESPONSES`, each of which is rendered anew.
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
            end = len(turn) if text.startswith(turn) else self._end(messages, tools, text, index, turn)
            ranges.append((start, end))
        return text, ranges

    def _start(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> int:
        """The index in `text` where the response that is message `index` begins; `text` is the whole conversation
        (messages, tools), rendered. `render_prefixes` calls it where `text` does not begin with the turns before the
        response as rendered alone, with a generation prompt: for templates that render the turns before a response
        differently once later turns follow, or whose generation prompt opens a thought that earlier turns do not have
        (Qwen3.5's).

        If the template writes a generation prompt at this place, the response begins after it; it is searched for
        between the message before and the text of the response. Where only a beginning of the generation prompt, with a
        special token in it, stands directly before that text, the response begins after that. If the template writes no
        generation prompt at this place, these searches are not made: the response begins after what the template writes
        behind the message before it, if that has not changed. Raises `RowError` where the place is not found.
        """
        before, asking = (self.render(messages[:index], tools, add_generation_prompt=ask) for ask in (False, True))
        opening = asking.removeprefix(before)
        if (
            not opening
        ):  # the response is in the same turn as the message before it, as after a tool's result in Gemma 4
            end = self._unchanged_end(messages, tools, text, index - 1, before)
            if end is not None:
                return end
        at = self._text_of(messages, tools, text, index).start
        if opening and opening != asking and at is not None:
            low = self._text_of(messages, tools, text, index - 1).end
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

    def _unchanged_end(
        self, messages: list[dict], tools: list[dict] | None, text: str, index: int, turns: str
    ) -> int | None:
        """The index in `text` after what the template writes behind message `index`, if that is the same in `text`,
        the whole conversation (messages, tools), and in `turns`, the rendered messages up to this one; None if it is
        another, or is not found. `_end` finds the end of a response by it, and `_start` that of the message before."""
        last = self._text_of(messages[: index + 1], tools, turns, index).end
        low = self._text_of(messages, tools, text, index).end
        if last is None or low is None or not text.startswith(turns[last:], low):
            return None
        return low + len(turns) - last

    def _end(self, messages: list[dict], tools: list[dict] | None, text: str, index: int, turns: str) -> int:
        """The index in `text` where the response that is message `index` ends. `render_prefixes` calls it where `text`
        does not begin with the turns up to this one as rendered alone: for templates that render turns differently once
        later ones follow.

        Where the template writes behind the message what it writes there while the message is the last one, the
        response ends after that; elsewhere after the first token that can end a turn (`end_ids`) behind the message's
        own text.

        Args:
            messages, tools: the conversation.
            text: the conversation, rendered.
            index: the number of the message.
            turns: the messages up to this one, rendered.

        Raises:
            RowError: the end is not found.
        """
        unchanged = self._unchanged_end(messages, tools, text, index, turns)
        if unchanged is not None:
            return unchanged
        end = self._text_of(messages, tools, text, index).end
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
        end = at + len(special)
        return end + len(text[end:]) - len(text[end:].lstrip()) if self._whole else end

    def _text_of(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> TextRange:
        """The range of `text` that is the own text of message `index`; `text` is the whole conversation (messages,
        tools), rendered. It is found by changing the message's content, thought or calls, one at a time, and comparing
        the rendered texts: what differs is the message's own. Both ends are None if no change shows in the text.

        The changes "name" and "added" of `_changed` decide the end only if no other change shows it: a template may
        repeat a call's name in the turn of its result, and text that is added beside a call brings line breaks of its
        own.
        """
        low = high = weak = None
        for part, changed in _changed(messages[index]):
            other = self._rendered_with(messages, tools, index, changed)
            if other is None or other == text:
                continue
            same = _common_prefix(text, other)
            low = same if low is None else min(low, same)
            end = len(text) - _common_prefix(text[same:][::-1], other[same:][::-1])
            if part in ("name", "added"):
                weak = end if weak is None else min(weak, end)
            else:
                high = end if high is None else max(high, end)
        return TextRange(low, weak if high is None else high)

    def _rendered_with(self, messages: list[dict], tools: list[dict] | None, index: int, changed: dict) -> str | None:
        """The text of the conversation (messages, tools) with the message `changed` instead of message `index`; None if
        the template fails on it. Comparing it with the unchanged text shows what the template writes of that message:
        `_text_of` finds the place of its text so, and `left_out` a part that is not written."""
        try:
            return self.render([*messages[:index], changed, *messages[index + 1 :]], tools)
        except RowError:  # some templates refuse a change, such as text beside a call
            return None

    def left_out(self, messages: list[dict], tools: list[dict] | None, text: str) -> str:
        """The parts of a conversation (messages, tools) that the template does not write into its text, in words for a
        warning, such as "reasoning_content of message 2 (assistant)"; "" if none is found. `RowEncoder` calls it for
        every conversation; it changes no token and refuses no row. text: the rendered conversation. Checked are the
        thoughts, the `<think>` blocks of responses, the name of each message's first call, contents without such a
        block that do not occur in the text unchanged, and the tools. A part counts as written if the template fails
        when it is changed."""
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
            except RowError:  # the template needs the tools, so it does not leave them out
                pass
        return ", ".join(found)

    def _all_written(self, messages: list[dict], tools: list[dict] | None, parts: list[tuple[int, str]]) -> bool:
        """Whether the template writes every one of these parts of a conversation (messages; tools or None); each part
        is (index of the message, name of the part as `_changed` gives it). True without parts.

        All parts are replaced by markers and rendered at once, which costs one rendering instead of one for each part.
        False means that it is not known, and that the parts must be tried one by one: a marker is missing, the template
        fails, or a part is content. `left_out` asks about content only if the text does not contain it unchanged, so it
        is probably not written, and this rendering would be wasted.
        """
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
    """Whether `content`, that of a message, is not in `text`, a rendered conversation (white space around it does not
    count). It is False for content with a `<think>` block that is not empty, which a template may leave out.
    `left_out`, which calls it, checks such blocks of responses separately."""
    return not _INLINE.search(content) and content.strip() not in text


def _common_prefix(one: str, other: str) -> int:
    """The number of characters of the longest common prefix of the texts `one` and `other`: where two renderings begin
    to differ. `_text_of` finds a message's text by it, from the front and, with reversed texts, from the end."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _changed(message: Mapping[str, Any], other: str = SENTINEL) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name of the part, the message with `other` instead of that part) for each part that a message has.
    Rendering the changed messages shows where a template writes each part, or that it leaves it out.

    The names are the key of a thought ("reasoning_content" or "thinking"; if both are there, the first, and both are
    changed), "content", "added" (content beside a call that had none), "inline" (the text of a `<think>` block within
    an assistant's content), "name" (of the first call) and "arguments" (of the last call, which becomes
    {other: other}).
    """
    thoughts = [key for key in _THOUGHTS if isinstance(message.get(key), str) and message[key].strip()]
    if thoughts:  # a template reads one of the two keys
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
        with_arguments = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {other: other}}}
        yield "arguments", {**message, "tool_calls": [*calls[:-1], with_arguments]}
