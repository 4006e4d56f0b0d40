"""Chat templates of a tokenizer: rendering, protected tool text, and the template that is saved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.conversations.messages import Message, for_template
from jaxtune.conversations.thoughts import block_of, opened_thought, place_of
from jaxtune.conversations.tokenizing import Tokenizer, beginning, special_ids

type Arguments = Mapping[str, object]
# Arguments of apply_chat_template, which no template can have.
_RESERVED = frozenset(
    ("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict")
    + ("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs")
)
_NAME = re.compile(r"[A-Za-z_]\w*")


class TemplateError(ValueError):
    """A conversation that the chat template refuses, or a tokenizer without a template."""


def checked_arguments(value: object, key: str) -> Arguments | None:
    """Template arguments, such as {"enable_thinking": False}. Raises ValueError, which names `key`."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f'{key} = {value!r}: must be an object, such as {{"enable_thinking": false}}')
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{key}: {name!r} is not a name that a template can read")
        if name in _RESERVED:
            raise ValueError(f"{key}: {name} is not the template's own argument; leave it out")
    return dict(value)


def render(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Arguments] | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final: bool = False,
    arguments: Arguments | None = None,
) -> str:
    """The text of a conversation. Raises TemplateError if the template refuses it.

    tokenizer: gives the template its special tokens.
    template: Jinja text.
    messages: of the conversation, in order.
    tools: JSON schemas; None: none.
    add_generation_prompt: end with the beginning of an assistant's turn.
    continue_final: the text ends within the last message, also within its thought.
    arguments: further variables, such as enable_thinking; None: none.
    """
    options = dict(arguments or {})
    if continue_final:
        messages, options["continue_final_message"] = _continued(messages, place_of(template).key)
    try:
        return tokenizer.apply_chat_template(
            for_template(messages, template),
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **options,
        )
    except Exception as error:  # a template is a program, which can raise any error
        raise TemplateError(f"the chat template fails: {type(error).__name__}: {error}") from error


def _continued(messages: Sequence[Message], key: str | None) -> tuple[Sequence[Message], str | bool]:
    """(Messages with a thought that the last text begins with apart, what is continued: a key, or True for the text).
    key: under which the template reads thoughts; None: it reads none.
    """
    content = messages[-1].get("content") if messages and key is not None else None
    if (thought := opened_thought(content)) is not None:
        return [*messages[:-1], {**messages[-1], "content": "", "reasoning_content": thought}], key or True
    if block := block_of(content):
        return [*messages[:-1], {**messages[-1], "content": block[1], "reasoning_content": block[0]}], True
    return messages, True


# --- text of tools


def special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the special tokens' texts; None without any."""
    texts = {str(tokenizer.convert_ids_to_tokens(index)) for index in special_ids(tokenizer)}
    longest_first = sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def guarded(messages: Sequence[Message], special: re.Pattern[str] | None) -> tuple[list[Message], str]:
    """The messages with a mark inside each special token's text in tool results, and the mark ("" if none was needed).
    `unguarded` removes them after rendering. special: `special_pattern`.
    """
    messages = list(messages)
    marked_indices = [
        index
        for index, message in enumerate(messages)
        if special is not None
        and message.get("role") == "tool"
        and isinstance(message.get("content"), str)
        and special.search(message["content"])
    ]
    if special is None or not marked_indices:
        return messages, ""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    mark = next(char for char in map(chr, range(0xF8FF, 0xE000, -1)) if char not in text)
    for index in marked_indices:
        content = special.sub(lambda match: match[0][0] + mark + match[0][1:], messages[index]["content"])
        messages[index] = {**messages[index], "content": content}
    return messages, mark


def unguarded(text: str, mark: str) -> tuple[str, list[int]]:
    """The text without marks, and their positions, which no token may span, or it would be special.

    text: rendered from messages that `guarded` returned.
    mark: what `guarded` put into them.
    """
    if not mark:
        return text, []
    first, *later_pieces = text.split(mark)
    joined, cuts = first, []
    for piece in later_pieces:
        cuts.append(len(joined))
        joined += piece
    return joined, cuts


# --- saved templates


_PROBES = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}],
    [{"role": "system", "content": "Hello"}, {"role": "user", "content": "Hello"}],
)


def asking_template(tokenizer: Tokenizer, template: str, arguments: Arguments | None = None) -> str:
    """A template that itself writes the BOS that the tokenizer adds, and has defaults for its variables, for programs
    that add nothing.

      tokenizer: of the model.
      template: Jinja text.
      arguments: {variable: default}; None: none.
    """
    if arguments:
        lines = (
            f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}" for name, value in arguments.items()
        )
        template = "".join(lines) + _at_line_start(template)
    begins, text = beginning(tokenizer), _tried(tokenizer, template)
    if not begins or begins != [tokenizer.bos_token_id] or text is None or text.startswith(tokenizer.bos_token):
        return template

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # Some tokenizers put a space before a text, and none behind BOS.
    space = " " if ids(f"{tokenizer.bos_token} {text}") == [*begins, *ids(text)] else ""
    space = "" if ids(f"{tokenizer.bos_token}{text}") == [*begins, *ids(text)] else space
    bos = "{{ bos_token + ' ' }}" if space else "{{ bos_token }}"
    return bos + _at_line_start(template)


def asking_templates(tokenizer: Tokenizer, arguments: Arguments | None = None) -> Any:
    """The tokenizer's `chat_template` (text, or several by name) through `asking_template`."""
    templates = tokenizer.chat_template
    if isinstance(templates, Mapping):
        return {name: asking_template(tokenizer, text, arguments) for name, text in templates.items()}
    return asking_template(tokenizer, templates, arguments) if templates else templates


def _at_line_start(template: str) -> str:
    """The template to follow other text: leading white space stays at the start of a line."""
    return "{# #}\n" + template if template[:1].isspace() else template


def _tried(tokenizer: Tokenizer, template: str) -> str | None:
    for messages in _PROBES:
        try:
            return render(tokenizer, template, messages)
        except TemplateError:
            continue
    return None
