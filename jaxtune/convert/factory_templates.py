"""LLaMA-Factory's templates in Jinja: its rows' text, with {% generation %} around what it trains on."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict


class Form(TypedDict, total=False):
    """What a template writes: pieces of a turn (texts with {{content}}, or tokens), and its options."""

    format_prefix: list[str | dict[str, str]]
    format_system: list[str | dict[str, str]]
    format_user: list[str | dict[str, str]]
    format_assistant: list[str | dict[str, str]]
    default_system: str
    thought_words: list[str]
    stop_words: list[str]
    efficient_eos: bool
    replace_eos: bool
    template_class: str


@functools.cache
def forms() -> dict[str, Form]:
    """Its templates by name."""
    path = Path(__file__).parent / "schemas" / "llama_factory_templates.json"
    return json.loads(path.read_text(encoding="utf-8"))


def thinks(form: Form) -> bool:
    return "Reasoning" in form.get("template_class", "")


def begins_with_bos(form: Form) -> bool:
    first = [*form.get("format_prefix", []), *form.get("format_user", [])][:1]
    return first == [{"special": "bos_token"}] or "<s>" in first


def joins(form: Form) -> bool:
    """Whether an answer follows its prompt's last word, with no token or line break between: they become tokens
    together, and apart in the program.
    """
    last = (form.get("format_user") or ["{{content}}"])[-1]
    return isinstance(last, str) and not last.endswith((">", "]", "\n"))


def jinja(form: Form, system: str | None, thinking: bool | None, last_only: bool) -> str:
    """The text of a chat template.

    form: of the template, one of `forms`.
    system: the message of rows without one; None: the template's own.
    thinking: True: an empty thought is trained on; False: all thoughts are left out; None: neither.
    last_only: earlier answers lose their thoughts.
    """
    user = _joined(form.get("format_user") or ["{{content}}"], "asked", form)
    answer = list(form.get("format_assistant") or ["{{content}}"])
    if "format_assistant" not in form and not form.get("efficient_eos"):
        answer.append({"special": "eos_token"})
    fused = form.get("template_class") == "Llama2Template"
    system_turn = _joined(form.get("format_system") or ["{{content}}"], "system", form)
    end = _joined([{"special": "eos_token"}], "", form)
    lines = [
        "{%- if tools %}{{ raise_exception('the template has no place for tools') }}{% endif %}",
        "{%- set first = messages and messages[0].role == 'system' %}",
        "{%- set system = (messages[0].content if first else '') or "
        + _text(form.get("default_system", "") if system is None else system)
        + " %}",
        "{{- " + _joined(form.get("format_prefix") or [], "", form) + " }}",
        "" if fused else "{{- " + system_turn + " if system else '' }}",
        "{%- for message in (messages[1:] if first else messages) %}",
        "{%- if message.role == 'user' %}",
        "{%- set asked = "
        + (f"({system_turn} if loop.first and system else '') + " if fused else "")
        + "message.content %}",
        "{{- " + user + " }}",
        "{%- elif message.role == 'assistant' and not message.tool_calls %}",
        "{%- set content = message.content %}",
        *(_thought(form, thinking, last_only) if thinks(form) else ["{%- generation %}"]),
        "{{- " + _joined(answer, "content", form) + " }}",
        "{{- " + end + " if loop.last else '' }}" if form.get("efficient_eos") else "",
        "{%- endgeneration %}",
        "{%- else %}{{ raise_exception('the template has no place for ' + message.role + ' and calls') }}{% endif %}",
        "{%- endfor %}",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _thought(form: Form, thinking: bool | None, last_only: bool) -> list[str]:
    """What stands before an answer without a thought, and where its training begins."""
    opening, closing = form.get("thought_words") or ["<think>\n", "\n</think>\n\n"]
    empty = closing if form.get("template_class") == "Glm47ReasoningTemplate" else opening + closing
    a, b = _text(opening), _text(closing)
    stripped = (
        f"((content.split({a})[0] + content.split({b})[1:] | join({b})) "
        f"if {a} in content and {b} in content else content).lstrip('\\n')"
    )
    drops = "true" if thinking is False else "not loop.last" if last_only else "false"
    bare = f"{_text(opening.strip())} not in content and {_text(closing.strip())} not in content"
    write = "{%- if " + bare + (" and loop.last" if last_only else "") + " %}{{ " + _text(empty) + " }}{% endif %}"
    lines = ["{%- if " + drops + " %}{% set content = " + stripped + " %}{% endif %}"] if drops != "false" else []
    return [*lines, "{%- generation %}", write] if thinking else [*lines, write, "{%- generation %}"]


def _joined(pieces: Sequence[str | dict[str, str]], content: str, form: Form) -> str:
    """A Jinja expression of a turn's pieces, with the variable `content` for its text."""
    words = []
    for piece in pieces:
        if isinstance(piece, dict):
            words.append(_token(piece, form))
        else:
            before, placeholder, after = piece.partition("{{content}}")
            words += [_text(before)] if before else []
            words += [content] if placeholder else []
            words += [_text(after)] if after else []
    return "(" + (" + ".join(words) or "''") + ")"


def _token(piece: dict[str, str], form: Form) -> str:
    name = piece.get("special")
    if name == "eos_token" and form.get("replace_eos"):
        return _text((form.get("stop_words") or [""])[0])
    if name in ("bos_token", "eos_token"):
        return f"({name} or '')"
    return _text(piece.get("token", ""))


def _text(text: str) -> str:
    """A Jinja literal."""
    return json.dumps(text, ensure_ascii=False)
