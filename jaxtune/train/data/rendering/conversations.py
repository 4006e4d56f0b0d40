"""Renders conversations, and finds where each response begins and ends, and what the template leaves out.

A template with `{% generation %}` marks shows responses. Otherwise one begins after the turns before it, rendered with
the generation prompt, and ends after the turns up to it, if both are prefixes of the whole text. Many templates render
a turn differently once later turns follow (without its thought); then a message is changed, rendered again, and the
texts are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from jaxtune.conversations.messages import for_template
from jaxtune.conversations.pictures import PICTURE
from jaxtune.conversations.templates import Arguments, TemplateError, render
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.train.data.rows.row_errors import RowError

MOST_RESPONSES = 1000  # the most responses of a conversation that is rendered again for each of them

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # finds such a mark in a template
SENTINEL = "\ue000x\ue001"  # a text that no real message has: its characters are for private use
_THOUGHTS = ("reasoning_content", "thinking")  # the keys under which messages have their thoughts
_INLINE = re.compile(r"(<think>)(.*\S.*)(</think>)", re.DOTALL)  # a thought within a message's content


class TextRange(NamedTuple):
    """Characters of a message's own text in the rendered conversation; both None if not found."""

    start: int | None
    end: int | None


class Conversations:
    """Renders conversations with one template, and finds their responses (role "assistant"). `messages` are as in
    `Example.messages`; `tools` are JSON schemas or None.

      special_texts: of `spans.special_texts`, to recognise a part of the generation prompt; None: only a whole one is.
      end_ids: tokens that may end a turn.
      keeps_space: whether a response that later turns change also has the white space behind its end token.
      arguments: variables of the template; None: none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        special_texts: re.Pattern[str] | None,
        end_ids: Set[int],
        keeps_space: bool = False,
        arguments: Arguments | None = None,
    ):
        self.tokenizer, self.template, self._whole = tokenizer, template, keeps_space
        self._special_texts, self._end_ids, self._arguments = special_texts, end_ids, arguments

    def render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        """The text that the template writes for a conversation. Raises RowError if the template fails.

        tools: JSON schemas that the template gets; None: none.
        add_generation_prompt: end with the beginning of an assistant's turn, as a prompt does.
        """
        try:
            return render(
                self.tokenizer,
                self.template,
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                arguments=self._arguments,
            )
        except TemplateError as error:
            raise RowError(str(error)) from None

    def render_marked(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """(Text, character ranges of non-empty `{% generation %}` blocks). Raises RowError if the template fails."""
        text, ranges = self._blocks(messages, tools)
        return text, [(low, high) for low, high in ranges if low < high]

    def marked_by_message(
        self, messages: list[dict], tools: list[dict] | None
    ) -> tuple[str, dict[int, list[tuple[int, int]]]]:
        """(Text, {index of a response: its ranges}), by rendering each response. Raises RowError if blocks cannot be
        assigned.
        """
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
        """(Index in `text` of a message's content, characters that the template strips before it). Raises RowError if
        the template changes it otherwise. messages, tools: those that were rendered to `text`. index: of the message.
        """
        content = messages[index]["content"]
        changed_text = self._rendered_with(messages, tools, index, {**messages[index], "content": SENTINEL})
        if changed_text is not None and changed_text != text:
            low = _common_prefix(text, changed_text)
            written = text[low : len(text) - _common_prefix(text[low:][::-1], changed_text[low:][::-1])]
            if written in (content, content.rstrip()):
                return low, 0
            if written in (content.lstrip(), content.strip()):
                return low, len(content) - len(content.lstrip())
        raise RowError(
            f"messages[{index}].train_detail: the chat template does not write the content as it is, so its parts "
            "cannot be found; mark the whole answer"
        )

    def _blocks(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """(Text, character ranges of `{% generation %}` blocks). Raises RowError if the template fails."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # it is annotated to return str, and returns a pair
                conversations=[for_template(messages, self.template)],
                tools=tools,  # type: ignore[arg-type]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **(self._arguments or {})},
            )
        except Exception as error:
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None
        (text,), (ranges,) = rendered
        return text, list(ranges)

    def render_prefixes(
        self, messages: list[dict], tools: list[dict] | None, first: int
    ) -> tuple[str, list[tuple[int, int]]]:
        """(Text, character range of each response) without `{% generation %}` marks, by up to two renderings a
        response, more where later turns change it.

        Raises RowError if the template fails, a response is not found, or there are more than MOST_RESPONSES. first:
        index of the first possible response, at least 1, as a response needs a prompt.
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
        """Where response `index` begins in `text`, if the turns before it are no prefix. RowError if unknown."""
        before, asking = (self.render(messages[:index], tools, add_generation_prompt=ask) for ask in (False, True))
        opening = asking.removeprefix(before)
        if (
            not opening
        ):  # the response is in the same turn as the message before it, as after a tool's result in Gemma 4
            end = self._unchanged_end(messages, tools, text, index - 1, before)
            if end is not None:
                return end
        text_start = self._text_of(messages, tools, text, index).start
        if opening and opening != asking and text_start is not None:
            low = self._text_of(messages, tools, text, index - 1).end
            for written in (opening, opening.rstrip()):  # a thought that the prompt opens may be written empty
                if low is not None and (prompt_start := text.find(written, low, text_start)) >= 0:
                    return prompt_start + len(written)
            sizes = (size for size in range(len(opening), 0, -1) if text.endswith(opening[:size], 0, text_start))
            shared = opening[: next(sizes, 0)]
            if shared and (shared == opening or (self._special_texts and self._special_texts.search(shared))):
                return text_start
        raise RowError(
            f"the chat template writes the turns before response {index} differently once later turns follow: it "
            "cannot tell the responses; set data.last_response_only=true, or data.instruction_part and "
            "data.response_part, or use a template with {% generation %} marks"
        )

    def _unchanged_end(
        self, messages: list[dict], tools: list[dict] | None, text: str, index: int, turns: str
    ) -> int | None:
        """The index in `text` after message `index`, if `turns`, rendered up to it, has the same there; else None."""
        last = self._text_of(messages[: index + 1], tools, turns, index).end
        low = self._text_of(messages, tools, text, index).end
        if last is None or low is None or not text.startswith(turns[last:], low):
            return None
        return low + len(turns) - last

    def _end(self, messages: list[dict], tools: list[dict] | None, text: str, index: int, turns: str) -> int:
        """Where response `index` ends in `text`, if the turns up to it are no prefix. RowError if unknown."""
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
        special_start, special = min(following)
        end = special_start + len(special)
        return end + len(text[end:]) - len(text[end:].lstrip()) if self._whole else end

    def _text_of(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> TextRange:
        """The range of message `index` in `text`: what differs when its content, thought or calls are changed, one at a
        time.
        """
        low = high = weak = None
        for part_name, changed in _changed(messages[index]):
            changed_text = self._rendered_with(messages, tools, index, changed)
            if changed_text is None or changed_text == text:
                continue
            prefix = _common_prefix(text, changed_text)
            low = prefix if low is None else min(low, prefix)
            end = len(text) - _common_prefix(text[prefix:][::-1], changed_text[prefix:][::-1])
            if part_name in ("name", "added"):
                weak = end if weak is None else min(weak, end)
            else:
                high = end if high is None else max(high, end)
        return TextRange(low, weak if high is None else high)

    def _rendered_with(self, messages: list[dict], tools: list[dict] | None, index: int, changed: dict) -> str | None:
        try:
            return self.render([*messages[:index], changed, *messages[index + 1 :]], tools)
        except RowError:  # some templates refuse a change, such as text beside a call
            return None

    def left_out(self, messages: list[dict], tools: list[dict] | None, text: str) -> str:
        """What the template does not write, in words for a warning, or "": thoughts, <think> blocks, names of calls,
        changed contents, tools. A part counts as written if changing it fails.

          text: what the template wrote for these messages and tools.
        """
        candidates = [
            (index, part_name, changed)
            for index, message in enumerate(messages)
            for part_name, changed in _changed(message)
            if part_name in (*_THOUGHTS, "inline", "name")
            or (part_name == "content" and _is_lost(message["content"], text))
        ]
        missing = []
        if not self._all_written(messages, tools, [(index, part_name) for index, part_name, _ in candidates]):
            for index, part_name, changed in candidates:
                if self._rendered_with(messages, tools, index, changed) == text:
                    name = {"name": "tool_calls", "inline": "<think>"}.get(part_name, part_name)
                    missing.append(f"{name} of message {index} ({messages[index]['role']})")
        if tools:
            try:
                if self.render(messages, None) == text:
                    missing.append("tools")
            except RowError:  # the template needs the tools, so it does not leave them out
                pass
        return ", ".join(missing)

    def _all_written(self, messages: list[dict], tools: list[dict] | None, candidates: list[tuple[int, str]]) -> bool:
        """Whether the template surely writes all `candidates`, (index, name as in `_changed`); False: not known."""
        if not candidates or any(part_name == "content" for _, part_name in candidates):
            return not candidates
        changed = list(messages)
        markers = []
        for number, (index, part_name) in enumerate(candidates):
            markers.append(f"\ue000{number}\ue001")
            changed[index] = dict(_changed(changed[index], markers[-1]))[part_name]
        try:
            text = self.render(changed, tools)
        except RowError:
            return False
        return all(marker in text for marker in markers)


def _is_lost(content: str, text: str) -> bool:
    """Whether a content is missing in `text`; False with a <think> block, which is checked by itself."""
    return not _INLINE.search(content) and any(piece.strip() not in text for piece in content.split(PICTURE))


def _common_prefix(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is much faster than comparing characters
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _changed(message: Mapping[str, Any], replacement: str = SENTINEL) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Name of a part, message with `replacement` in place of that part) for each part of a message.

    Names: a thought's key, "content", "added" (content beside a call that has none), "inline" (text of a <think>
    block), "name" (of the first call), "arguments" (of the last call).
    """
    thoughts = [key for key in _THOUGHTS if isinstance(message.get(key), str) and message[key].strip()]
    if thoughts:  # a template reads one of the two keys
        yield thoughts[0], {**message, **dict.fromkeys(thoughts, replacement)}
    content, calls = message["content"], message.get("tool_calls") or []
    if content.strip():
        yield "content", {**message, "content": replacement}
    elif calls:
        yield "added", {**message, "content": replacement}
    if message["role"] == "assistant" and _INLINE.search(content):
        yield "inline", {**message, "content": _INLINE.sub(rf"\1{replacement}\3", content)}
    if calls:
        named = {**calls[0], "function": {**calls[0]["function"], "name": replacement}}
        yield "name", {**message, "tool_calls": [named, *calls[1:]]}
        with_arguments = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {replacement: replacement}}}
        yield "arguments", {**message, "tool_calls": [*calls[:-1], with_arguments]}
