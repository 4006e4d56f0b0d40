"""The formats of rows: text, Alpaca, prompt and completion, messages and ShareGPT; and two for preference objectives,
one with a chosen and a rejected answer, one with an answer and a label.

`normalize` converts a row's columns to an `Example`, the one form that `templates.py` renders. `normalize_pair` and
`normalize_labelled` convert the rows of preference objectives to a `Pair` of examples; `workers.py` tokenises what they
return. All of them raise `RowError` with the reason if a row cannot be converted. `detect_format` finds the format of
rows by their columns, `unread` names columns that the format does not read, `refuse_media` refuses rows with images,
video or audio, and `strings` yields all texts in a nested value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxtune.train.data.messages import chat_message, sharegpt_message, tool_schemas
from jaxtune.train.data.row_errors import RowError, check_unicode

# The columns of each row format, in the order in which `format: auto` tries them, the most specific first. A row must
# have one column of each group; if it has several, the first name of the group is read.
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation"),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt", "question"), ("completion", "response", "answer")),
    "text": (("text",),),
}
# The columns with a system message.
SYSTEM = ("system", "system_prompt")
# The format of rows with a chosen and a rejected answer, for dpo, orpo, simpo and reward.
PREFERENCE = "preference"
# The format of rows with one answer and a label that says whether it is desirable, for the objective kto.
LABELLED = "labelled"
# The columns with the prompt of a preference.
_PROMPT = ("prompt", "question", "messages", "conversations")
# The columns that are read in each format, in groups of which a row's first one is read.
_READ = {
    "messages": (*COLUMNS["messages"], SYSTEM, ("tools",)),
    "sharegpt": (*COLUMNS["sharegpt"], SYSTEM, ("tools",)),
    "alpaca": (*COLUMNS["alpaca"], SYSTEM, ("input", "context")),
    "prompt_completion": (*COLUMNS["prompt_completion"], SYSTEM, ("tools",)),
    "text": COLUMNS["text"],
    PREFERENCE: (("chosen",), ("rejected",), _PROMPT, SYSTEM, ("tools",), ("margin",)),
    LABELLED: (("label",), ("completion", "messages"), _PROMPT, SYSTEM, ("tools",)),
}
# The columns of the prompt and its answers, in groups of which a row's first one is read. Tools are described to the
# model in a conversation alone, and not where all of these are text.
_TEXTS = {
    "prompt_completion": COLUMNS["prompt_completion"],
    PREFERENCE: (("chosen",), ("rejected",), _PROMPT),
    LABELLED: (("completion",), _PROMPT),
}
# The columns with images, video and audio, which cannot be trained on, and the tag that represents each in the text.
_MEDIA = {
    "image": "<image>",
    "images": "<image>",
    "video": "<video>",
    "videos": "<video>",
    "audio": "<audio>",
    "audios": "<audio>",
}
FORMATS = ("auto", *COLUMNS, PREFERENCE, LABELLED)

# The prompt with which Stanford's Alpaca was trained (github.com/tatsu-lab/stanford_alpaca); models that were trained
# on such data sets expect exactly this wording.
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
ALPACA_PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A row in the form that chat templates render. `normalize`, `normalize_pair` and `normalize_labelled` make it of
    rows to train on, and `objectives/prompts.py` of prompts to sample from. `templates.RowEncoder` renders and
    tokenises it.

    Either `text` is set; or `messages` (with or without `tools` and `prompt_messages`); or `prompt`, `completion` and
    `messages`: such a row is trained on as plain text if no template was chosen, and else as a conversation. (A prompt
    to sample from has no completion.) Fields that are not set are None, or 0. What the fields say about training holds
    with data.train_on=responses and without marker strings, which find responses in plain text, too.
    """

    text: str | None = None
    """Text that is trained on as a whole, except for the spans of data.mask_spans."""
    prompt: str | None = None
    """Text before the completion, not trained on."""
    completion: str | None = None
    """Text that follows the prompt and is trained on."""
    messages: list[dict[str, Any]] | None = None
    """A conversation in OpenAI's form: dicts with `role` and `content` (text), some with `tool_calls` or
    `reasoning_content`."""
    tools: list[dict[str, Any]] | None = None
    """The JSON schemas of the tools that the conversation may call."""
    prompt_messages: int = 0
    """How many of the messages, from the first and with a system message, are the prompt; responses among them are not
    trained on."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each an example with the prompt before it, for preference objectives. `workers.py`
    makes two documents of it. A labelled row has only one answer, and its other document is empty."""

    chosen: Example | None
    """The preferred or desirable answer; None for a labelled row with an undesirable answer."""
    rejected: Example | None
    """The worse or undesirable answer; None for a labelled row with a desirable answer."""


def detect_format(columns: Iterable[str]) -> str:
    """The row format, a key of `COLUMNS` such as "alpaca", of rows that have these columns (`columns`, their names). Of
    several formats that fit, it is the first in `COLUMNS`; the names alone decide, even if a cell is null. With
    data.format=auto it decides how rows are read, and objectives that sample answers read their prompts by it. Raises
    `RowError` if none fits, or if there are columns chosen and rejected, which need a preference objective."""
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
    """The names of the columns of a row (`value`, its columns by name) that have a value and are not read in this row
    format. `workers.py` collects them for a warning that is shown before training; no row is refused for them. Of
    columns that mean the same (a group in `_READ`), only the first that is not null is read. Null and empty cells
    (texts, lists, objects) do not count. Tools beside a prompt and answers that are all text are not read, nor is a
    prompt beside messages that end with a labelled answer. format: a key of `COLUMNS` such as "alpaca", or PREFERENCE
    or LABELLED."""
    groups = _READ[format]
    if format == LABELLED and value.get("completion") is None and value.get("messages") is not None:
        groups = tuple(group for group in groups if group is not _PROMPT)
    if (texts := _TEXTS.get(format)) and all(isinstance(_column(value, group, False), str) for group in texts):
        groups = tuple(group for group in groups if group != ("tools",))
    read = {next((name for name in group if value.get(name) is not None), "") for group in groups}
    empty = (str, list, tuple, Mapping)
    return [
        name
        for name, cell in value.items()
        if name and name not in read and cell is not None and (cell or not isinstance(cell, empty))
    ]


def refuse_media(value: Mapping[str, Any]) -> None:
    """Raises `RowError` for a row with an image, video or audio column (`_MEDIA`), which cannot be trained on: without
    it, the text would teach another task, and the tag that represents it is plain letters to the tokenizer. value: the
    row's columns by name. The functions that normalize rows, or read prompts, call it first.

    A column that is empty or null does not count. One whose value is a single text is accepted if the other columns
    have no such tag: it is metadata, such as the address of a page's image. A list of texts is refused.
    """
    for name, cell in value.items():
        tag = _MEDIA.get(name.lower()) if isinstance(name, str) else None
        if tag is None or cell is None or (isinstance(cell, str | list | tuple | Mapping) and not cell):
            continue
        tagged = any(tag in text for key, other in value.items() if key != name for text in strings(other))
        if tagged or not isinstance(cell, str):
            raise RowError(
                f"column {name} holds what the text is about{f' ({tag} represents it)' if tagged else ''}; only text "
                "can be trained on: leave such rows out, or that column and its tags where the text makes sense alone"
            )


def strings(value: Any) -> Iterator[str]:
    """Yields every string in `value`, which may be nested lists, tuples and mappings, the keys of mappings included.
    `refuse_media` searches the other columns for tags of images by it, and `RowEncoder` the messages and tools of a
    conversation for special tokens."""
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
    """The `Pair` of a row with a preference (columns chosen and rejected), for dpo, orpo, simpo and reward: the prompt
    with each of its two answers. `workers.py` calls it when it tokenises rows. value: the row's columns by name. Raises
    `RowError` with the reason if the row cannot be used."""
    refuse_media(value)
    return Pair(*(_answered(value, side) for side in ("chosen", "rejected")))


def normalize_labelled(value: Mapping[str, Any]) -> Pair:
    """The `Pair` of a row with one answer and a label, for kto; `workers.py` calls it when it tokenises rows. The
    answer is `chosen` if the label is true, else `rejected`, and the other one is None. The answer is the column
    completion, or without one the last turn of the column messages. value: the row's columns by name. Raises `RowError`
    with the reason if the row cannot be used, or its label is not true, false, 1 or 0."""
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
    """The `Example` of a row. Rows to train and evaluate on are converted by it for sft and distillation (`workers.py`;
    preference objectives have functions of their own); so are rows whose prompts answers are sampled to, and the
    held-out questions of exact match. Which of its fields are set depends on the format:

    - text: `text`.
    - messages and sharegpt: `messages` and `tools`.
    - alpaca, and prompt_completion if both columns are text: `prompt`, `completion` and `messages`. For a row of
      prompt_completion with a column question in place of prompt, only `messages`.
    - prompt_completion if one of the columns is a turn or a list of turns: `messages`, `tools` and `prompt_messages`,
      the number of messages before the completion.

    Args:
        value: the row's columns by name.
        format: its row format, a key of `COLUMNS` such as "messages" or "alpaca"; any other is taken for "sharegpt".

    Raises:
        RowError: the row cannot be used; the message has the reason.
    """
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
        if value.get("prompt") is None:  # a question is not laid out to be continued by its answer without a template
            return Example(messages=messages)
        return Example(prompt=_after(system, prompt), completion=completion, messages=messages)
    if format == "messages":
        return _conversation(value, _parsed(_column(value, COLUMNS["messages"][0])), chat_message)
    return _conversation(value, _parsed(_column(value, COLUMNS["sharegpt"][0])), sharegpt_message)


def _answered(value: Mapping[str, Any], side: str) -> Example:
    """The example of a row's prompt with one of its answers, in the formats of TRL and LLaMA-Factory. Raises `RowError`
    if the row lacks the answer, or the prompt of an answer that is text; if a text answer is empty; or if a turn is
    wrong, or the last one is not the assistant's. `normalize_pair` and `normalize_labelled` call it.

    If both are text, the example has both as text and as a conversation. Otherwise it is a conversation only: the turns
    of the prompt (in the column prompt, question, messages or conversations; text is a user's turn), then the answer,
    which is text, a turn or a list of turns. If there is no prompt column, the answer's turns begin with the prompt.

    Args:
      value: the row's columns by name.
      side: the column of the answer: chosen, rejected or completion.
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
    """The example of a prompt (`asked`) and a completion (`answer`) of which at least one is a turn or a list of turns,
    TRL's conversational format, for `normalize`: one conversation, in which only the responses of the completion are
    trained on. Raises `RowError` if the completion is empty, the prompt is an empty list, a turn is wrong, or the
    completion does not end with a turn of the assistant. value: the row's columns by name, for its system message and
    tools."""
    if isinstance(answer, str):
        _not_empty(answer, "response")
        answer = {"role": "assistant", "content": answer}
    answer = _turns(answer)
    if not answer or not _turns(asked):
        raise RowError(f"the {'prompt' if answer else 'completion'} is an empty list of turns")
    example = _asked_and_answered(value, asked, answer, "completion")
    return dataclasses.replace(example, prompt_messages=len(example.messages or ()) - len(answer))


def _asked_and_answered(value: Mapping[str, Any], asked: Any, answer: Any, side: str) -> Example:
    """The example of the conversation of a prompt (`asked`: text, a turn, turns or None) and the turn or turns after it
    (`answer`), for `_answered` and `_prompted`. Raises `RowError` if a turn is wrong, or the last one is not the
    assistant's.

    Args:
        value: the row's columns, of which the system message and the tools are read.
        asked, answer: the prompt and the answer.
        side: the name of the answer's column, for messages.
    """
    example = _conversation(value, [*_turns(asked), *_turns(answer)], sharegpt_message)
    last = example.messages[-1] if example.messages else {}
    if last.get("role") != "assistant":
        raise RowError(f"{side} does not end with an answer of the assistant, but with {last.get('role')}")
    return example


def _parsed(turns: Any) -> Any:
    """The turns of a cell, decoded from JSON if the cell is text, as in CSV files; any other value is returned
    unchanged. `normalize` reads the columns messages and conversations by it. Raises `RowError` if the text is not
    JSON; whether the result is a list of turns is not checked here."""
    if not isinstance(turns, str):
        return turns
    try:
        return json.loads(turns)
    except ValueError:
        raise RowError("the conversation is text, and not the JSON of a list of turns") from None


def _turns(turns: Any) -> list[Any]:
    """A list of turns, from a list (or other iterable) of turns, a single turn, None (no turns), or a text, which
    becomes a user's turn. Raises `RowError` for anything else. The turns themselves are not checked. Prompts and
    answers, which data sets write in any of these forms, become lists by it before they are joined to a conversation,
    also those in the column messages or conversations of a preference or labelled row. Rows of the formats messages and
    sharegpt do not go through it."""
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    if isinstance(turns, Mapping):
        return [turns]
    if not isinstance(turns, Iterable | None):
        raise RowError(f"the conversation is not a list of turns but {type(turns).__name__}")
    return [] if turns is None else list(turns)


def _alpaca_prompt(instruction: str, context: str) -> str:
    """The text of Alpaca's prompt for an instruction and its input (`context`; if that is blank, the prompt without
    input), up to where the response begins. `normalize` makes `Example.prompt` of it, which is used without a template;
    a template gets the plain instruction as a user's turn."""
    if context.strip():
        body = f"{ALPACA_PREAMBLE_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{context}"
    else:
        body = f"{ALPACA_PREAMBLE}\n\n### Instruction:\n{instruction}"
    return f"{body}\n\n### Response:\n"


def _after(system: str, prompt: str) -> str:
    """The text of a prompt in which the system message comes first: `system`, an empty line, and `prompt`. If `system`
    is blank, it is `prompt` alone. It is `Example.prompt`, which is used without a template."""
    return f"{system}\n\n{prompt}" if system.strip() else prompt


def _exchange(system: str, user: str, assistant: str) -> list[dict[str, Any]]:
    """The messages of a conversation of one question (`user`) and its answer (`assistant`), after the system message if
    `system` is not blank. It is `Example.messages` of a row whose prompt and answer are text."""
    first = [{"role": "system", "content": system}] if system.strip() else []
    return [*first, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _column(value: Mapping[str, Any], names: tuple[str, ...], required: bool = True) -> Any:
    """The value of the first of the columns `names` that is not null in the row `value`; data sets name the same column
    differently. If all are missing or null, it raises `RowError` (required) or returns None (not required). It is for
    columns that may have turns or a label; `_text` reads those that must be text."""
    for name in names:
        if value.get(name) is not None:
            return value[name]
    if required:
        if empty := [name for name in names if name in value]:
            raise RowError(f"column {empty[0]} is null")
        raise RowError(f"no column {' or '.join(names)}; it has {', '.join(map(str, value)) or 'none'}")
    return None


def _text(value: Mapping[str, Any], names: tuple[str, ...], required: bool = True) -> str:
    """The text in the first of the columns `names` that is not null in the row `value`; data sets name the same column
    differently. If all are missing or null, it raises `RowError` (required) or returns "" (not required). It also
    raises `RowError` if the value is not text, or is invalid Unicode. Blank text is returned as it is; `_not_empty`
    refuses it where it matters."""
    found = _column(value, names, required)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise RowError(
            f"column {next(n for n in names if value.get(n) is not None)} is not text but {type(found).__name__}"
        )
    check_unicode(found)
    return found


def _not_empty(text: str, what: str) -> None:
    """Raises `RowError` if `text` is only white space. `normalize` and the other functions that convert rows refuse by
    it an empty response, an empty text, and an empty instruction of Alpaca's. what: its name in the message, such as
    "response"."""
    if not text.strip():
        raise RowError(f"empty {what}")


def _conversation(value: Mapping[str, Any], turns: Any, read: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Example:
    """The example of a conversation. `normalize` calls it for rows of messages and sharegpt, and `_asked_and_answered`
    for a prompt and its answer. The text in the row's column system or system_prompt (`SYSTEM`), if any, becomes its
    first message, unless it begins with a system message. Raises `RowError` if it is empty, no list, or has a wrong
    turn; if a response is empty and calls no tool; or if the system message or the tools cannot be used.

    Args:
        value: the row's columns, of which the system message and the tools are read.
        turns: the conversation's turns, as the row has them.
        read: converts a turn to a message: `chat_message` or `sharegpt_message`.
    """
    if isinstance(turns, str) or not isinstance(turns, Iterable):
        raise RowError(f"the conversation is not a list of turns but {type(turns).__name__}")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise RowError(f"a turn is not an object but {type(turn).__name__}")
        messages.append(read(turn))
    if not messages:
        raise RowError("empty conversation")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            _not_empty(message["content"], "response")
    system = _text(value, SYSTEM, required=False)
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Example(messages=messages, tools=tool_schemas(value.get("tools")))
