"""Thoughts written into an answer's text, and where a chat template reads thoughts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

_OPENING, _CLOSING = "<think>", "</think>"
_KEYS = ("reasoning_content", "thinking", "reasoning", "thought")
_SPECIALS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
_THOUGHT, _ANSWER = "\ue000t\ue001", "\ue000a\ue001"  # texts that no template writes


class Place(NamedTuple):
    """What a template does with thoughts."""

    key: str | None
    """Of an answer's turn, under which it reads them; None: it reads none."""
    splits: bool
    """Whether it takes a <think> block of the text for one, or leaves it out."""
    writes: bool
    """Whether its own text has <think>: then a block is no stranger in it."""


def block_of(content: object) -> tuple[str, str] | None:
    """(Thought, text behind it) of an answer that begins with a <think> block; None without one."""
    text = content.lstrip() if isinstance(content, str) else ""
    thought, closing, behind = text.removeprefix(_OPENING).partition(_CLOSING)
    return (thought.strip("\n"), behind.lstrip("\n")) if closing and text.startswith(_OPENING) else None


def opened_thought(content: object) -> str | None:
    """The beginning of a thought of an answer that ends within one; None for another."""
    text = content.lstrip() if isinstance(content, str) else ""
    return text.removeprefix(_OPENING).lstrip("\n") if text.startswith(_OPENING) and _CLOSING not in text else None


@functools.lru_cache(64)
def place_of(template: str) -> Place:
    """Found by rendering an answer in each form."""
    inline = _rendered(template, {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"})
    for key in _KEYS:
        keyed = _rendered(template, {"content": _ANSWER, key: _THOUGHT})
        if _THOUGHT in keyed:
            return Place(key, "".join(inline.split()) == "".join(keyed.split()), "<think>" in keyed)
    return Place(None, _THOUGHT not in inline, "think>" in template)


def in_place(message: Mapping[str, object], template: str) -> dict[str, object]:
    """An answer with the thought that its text begins with under the key that the template reads, unless it splits
    such a text itself, and loses nothing of it.
    """
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or _CLOSING not in content:
        return dict(message)
    place, block = place_of(template), block_of(content)
    if place.key is None or message.get("reasoning_content"):
        return dict(message)
    if place.splits and block and content.count(_CLOSING) == 1 and content.count(_OPENING) == 1:
        return dict(message)
    if block is None and _OPENING not in content.partition(_CLOSING)[0]:  # a thought that the prompt opened
        block = block_of(_OPENING + content)
    thought, text = block or ("", content)  # one that splits takes the last of several, and leaves out what is before
    if not place.splits and not thought.strip():
        return {**message, "content": text}
    return {**message, "content": text, "reasoning_content": thought}


def has_stray_block(message: Mapping[str, object], template: str) -> bool:
    """Whether an answer begins with a thought that the template writes as words: it has no place for thoughts, or the
    thought has no end.
    """
    content = message.get("content") if message.get("role") == "assistant" else None
    if opened_thought(content) is not None:
        return True
    block = block_of(content)
    if block is None or not block[0].strip():
        return False
    return place_of(template) == Place(None, splits=False, writes=False)


def _rendered(template: str, answer: Mapping[str, str]) -> str:
    """The text of a short conversation; "" if the template refuses it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", **answer}]
    try:
        texts, _ = render_jinja_template(conversations=[conversation], chat_template=template, **_SPECIALS)
    except Exception:  # a template is a program, which can raise any error
        return ""
    return str(texts[0])
