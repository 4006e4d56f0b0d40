"""The formats of rows: text, Alpaca, prompt and completion, messages, ShareGPT; and for preference objectives two
answers, or one with a label.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtune.conversations.messages import (
    NEUTRAL,
    ConversationError,
    Message,
    column_pictures,
    exclusion,
    is_mark,
    json_cell,
    pictures_of,
    read_messages,
    read_tools,
    snake,
    turn_marks,
    turns_in,
    turns_of,
    unknown_keys,
    with_pictures,
    with_system,
)
from jaxtune.conversations.pictures import PICTURE, TAG, PictureAccess
from jaxtune.conversations.reads import TURN, Reads, is_blank, made_of_others, note, unread
from jaxtune.conversations.templates import Arguments, checked_arguments
from jaxtune.train.data.rows.row_errors import Excluded, RowError, check_unicode

type Columns = Mapping[str, Any]  # of a row, by name

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
# The columns with the two answers of a preference, and with one that takes the place of the last turn of `messages`.
CHOSEN, REJECTED = ("chosen", "preferred_output"), ("rejected", "non_preferred_output")
# The columns with the question of a preference: the first that is there is read; or, without one, the only one of the
# second group.
_PROMPT = ("prompt", "question", "messages", "conversations")
_ASKED = ("conversation", "instruction", "query", "request", "input", "context")
# The columns that have a whole conversation.
_WHOLE = ("messages", "conversations", "conversation")
# The column with the turns before a question that is text, as LLaMA-Factory and ms-swift have it.
HISTORY = "history"
# The columns with the schemas of tools.
TOOLS = ("tools", "functions")
# The column with a row's variables of the chat template, as TRL has it.
ARGUMENTS = ("chat_template_kwargs",)
# What the columns are read as, by the first name of their group.
_ROLES = {
    **dict.fromkeys(("messages", "conversations"), "conversation"),
    **dict.fromkeys(("instruction", "input"), "question"),
    "prompt": "prompt",
    "output": "answer",
    "completion": "answer",
    CHOSEN[0]: "preferred answer",
    REJECTED[0]: "rejected answer",
    SYSTEM[0]: "system message",
    TOOLS[0]: "tools",
}
# Roles of what a prompt of text has no place for.
_OF_TEMPLATES = ("tools", "template's variables")
# The columns with images, video and audio, and the tag that represents each in the text.
_MEDIA = {
    "image": TAG,
    "images": TAG,
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
    """A row in the form that templates render: `text`; `messages`; or `prompt` and `completion`, plain without a
    template, with `messages` for one.
    """

    text: str | None = None
    """Trained on as a whole, without data.mask_spans."""
    prompt: str | None = None
    """Not trained on; "" before answers to no question, which are never rendered by a template."""
    completion: str | None = None
    """Follows the prompt, trained on."""
    messages: list[Message] | None = None
    tools: list[Message] | None = None
    arguments: Arguments | None = None
    """Variables of the template, before those of the run."""
    begun: bool = False
    """Whether the last message is the beginning of an answer, which is continued."""
    prompt_messages: int = 0
    """First messages, with a system message, that are the prompt; responses there are not trained on."""
    asked_messages: int = 0
    """Of a preference, messages before its answer; 0: all but the last."""
    unknown: tuple[str, ...] = ()
    """Keys of messages that only a template may read."""
    implied: bool = False
    """Whether the prompt is the common beginning of both answers."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each an example with it."""

    chosen: Example | None
    """The preferred or desirable answer; None for a labelled undesirable one."""
    rejected: Example | None
    """The worse or undesirable answer; None for a labelled desirable one."""


def detect_format(columns: Iterable[str]) -> str:
    """The first key of COLUMNS that fits these column names; cells do not count. Raises RowError if none fits, or for
    chosen and rejected, which need a preference objective.
    """
    columns = list(columns)
    if {"chosen", "rejected"} <= set(columns):
        raise RowError("columns chosen and rejected are preference data: set objective=dpo, orpo or simpo")
    for format, groups in COLUMNS.items():
        if all(any(name in columns for name in group) for group in groups):
            return format
    known_formats = "; ".join(
        f"{format}: {' + '.join('|'.join(group) for group in groups)}" for format, groups in COLUMNS.items()
    )
    names = ", ".join(map(str, columns)) or "(none)"
    raise RowError(
        f"columns {names} fit no known form ({known_formats}): rename them, such as data.columns={{prompt: "
        f"{next(iter(columns), 'NAME')}, completion: ...}}"
    )


def of_row(value: Columns, reads: Reads, plain: bool) -> tuple[Reads, list[str]]:
    """(What was read of a row, its columns that were not), of what was noted. plain: it is a prompt and its answer
    without a template, to which no tools are described.
    """
    used = {name: role for name, role in reads.items() if not (plain and role in _OF_TEMPLATES)}
    used = {name: role for name, role in used.items() if name.startswith(TURN) or (role and name in value)}
    return used, unread(value, used)


def refuse_media(value: Columns, access: PictureAccess | None = None) -> None:
    """Raises RowError for a row with an image, video or audio column: without it the text would teach another task, and
    its tag is plain letters.

    Empty columns do not count, nor a single text without tags elsewhere, such as an address. access: of pictures, which
    then may be there.
    """
    for name, cell in value.items():
        tag = _MEDIA.get(name.lower()) if isinstance(name, str) else None
        if tag is None or (tag == TAG and access is not None) or cell is None:
            continue
        if isinstance(cell, str | list | tuple | Mapping) and not cell:
            continue
        tagged = any(tag in text for key, other_cell in value.items() if key != name for text in strings(other_cell))
        if tagged or not isinstance(cell, str):
            raise RowError(
                f"column {name} holds what the text is about{f' ({tag} represents it)' if tagged else ''}; only text "
                f"{'' if access is None else 'and pictures '}can be trained on: leave such rows out, or that column "
                "and its tags where the text makes sense alone"
            )


def picture_columns(value: Columns) -> list[str]:
    """The columns with pictures that are not empty."""
    names = [name for name in value if isinstance(name, str) and _MEDIA.get(name.lower()) == TAG]
    return [name for name in names if not is_blank(value[name])]


def _as_row_errors[T](work: Callable[..., T]) -> Callable[..., T]:

    @functools.wraps(work)
    def wrapped(*arguments: Any) -> T:
        try:
            return work(*arguments)
        except ConversationError as error:
            raise RowError(str(error)) from None

    return wrapped


def _refuse_empty_media(value: Columns, example: Example) -> None:
    """Raises RowError for a tag outside of answers beside its columns, all of them empty."""
    asked_turns = (message["content"] for message in example.messages or () if message["role"] != "assistant")
    texts = [*asked_turns, *filter(None, [example.text])]
    names = [name for name in value if isinstance(name, str) and name.lower() in _MEDIA]
    filled = {_MEDIA[name.lower()] for name in names if not is_blank(value[name])}
    for name in names:
        tag = _MEDIA[name.lower()]
        if tag not in filled and any(tag in text for text in texts):
            raise RowError(
                f"column {name} is empty ({value[name]!r}), and {tag} in the text stands for what is not there: leave "
                "such rows out, or the tag, or the column from all rows where the tag is a word"
            )


@_as_row_errors
def illustrated(value: Columns, example: Example, access: PictureAccess | None) -> Example:
    """The example with the pictures of the row's columns, as a conversation if it has any. Raises RowError."""
    _refuse_empty_media(value, example)
    names = picture_columns(value)
    text = example.text
    if access is None or (text is not None and TAG not in text and all(isinstance(value[name], str) for name in names)):
        return example  # a text may have an address beside it
    if len(names) > 1:
        raise RowError(f"columns {' and '.join(names)} both have pictures: leave one")
    messages = example.messages or []
    if not names and not any(PICTURE in message["content"] for message in messages):
        return example
    if text is not None:
        raise RowError(f"column {names[0]} has pictures, and a text has no place for them: write messages")
    for name in names:
        note(name, "pictures")
    pictures = [picture for name in names for picture in column_pictures(value[name], access, name)]
    messages = with_pictures(messages, pictures)
    if not any(map(pictures_of, messages)):
        return dataclasses.replace(example, messages=messages)
    return dataclasses.replace(example, messages=messages, prompt=None, completion=None)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, element in value.items():
            yield from strings(name)
            yield from strings(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from strings(element)


@_as_row_errors
def refuse_excluded(value: Columns) -> None:
    """Raises Excluded for a row that its columns leave out, such as `weight: 0`."""
    if mark := exclusion(value):
        raise Excluded(mark)


@_as_row_errors
def normalize_pair(value: Columns, access: PictureAccess | None = None) -> Pair:
    """The Pair of a row with two answers. Raises RowError if unusable, or if they answer different questions. access:
    of pictures; None refuses them.
    """
    refuse_media(value, access)
    if value.get("rejected_response") is not None and _column(value, CHOSEN, False) is None:
        turns = read_messages(_column(value, ("messages",)), "messages", access)
        note("rejected_response", "rejected answer")
        rejected = _cell(value, ("rejected_response",))
        made = {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected}
        with made_of_others(made):
            answers = _answered({**value, **made}, {side: made[side] for side in ("chosen", "rejected")}, access)
    else:
        chosen, rejected = (_cell(value, names) for names in (CHOSEN, REJECTED))
        answers = _answered(value, {"chosen": chosen, "rejected": rejected}, access)
    return Pair(*(illustrated(value, example, access) for example in answers))


@_as_row_errors
def normalize_labelled(value: Columns, access: PictureAccess | None = None) -> Pair:
    """The Pair of a row with one answer (completion, or the last of messages) and a label; the other side is None.
    Raises RowError. access: of pictures; None refuses them.
    """
    refuse_media(value, access)
    label = _column(value, ("label",))
    if value.get("completion") is None and value.get("messages") is not None:  # the answer ends the conversation
        note("messages", "conversation")
        turns = _read(value, value["messages"], "messages", access)
        made = {"prompt": turns[:-1], "completion": turns[-1:]}
        with made_of_others(made):
            [example] = _answered({**value, **made}, {"completion": made["completion"]}, access)
    else:
        [example] = _answered(value, {"completion": _cell(value, ("completion",))}, access)
    example = illustrated(value, example, access)
    if label not in (True, False):  # 1 and 0 are equal to them
        raise RowError(f"label = {label!r}: must be true for a desirable completion, or false")
    return Pair(example, None) if label else Pair(None, example)


@_as_row_errors
def normalize(value: Columns, format: str, access: PictureAccess | None = None) -> Example:
    """The Example of a row of a format of COLUMNS. Raises RowError. access: of pictures; None refuses them."""
    refuse_media(value, access)
    return illustrated(value, _example(value, format, access), access)


@_as_row_errors
def asked(value: Columns, access: PictureAccess | None = None) -> tuple[Example, str | None]:
    """(The question of a row, its own answer if it has one), for those who answer it: as `normalize` reads it, without
    the answer. `prompt` needs none; turns in it that end with one of the assistant are a begun answer.

    Raises RowError if unusable, Excluded for a row that its marks leave out. access: of pictures; None refuses them.
    """
    refuse_excluded(value)
    cell = turns_in(value.get("prompt"), "prompt")
    cell = [cell] if isinstance(cell, Mapping) else cell
    names = ("completion", "response") if isinstance(cell, str) else ("completion",)
    completion = turns_in(next((value[name] for name in names if _is_answer(value.get(name))), None), "completion")
    if (cell is not None and completion is None) or (isinstance(cell, str) and isinstance(completion, str)):
        refuse_media(value, access)
        note("prompt", "prompt")
        if completion is not None:
            note(next(name for name in names if value.get(name) is not None), "answer")
        if isinstance(cell, str):
            check_unicode(cell)
            example = _exchange(value, cell, None, _history(value, access), cell)
            return illustrated(value, example, access), completion
        example = illustrated(value, _conversation(value, _read(value, cell, "prompt", access)), access)
        last = (example.messages or [])[-1]
        if last["role"] == "assistant" and last.get("tool_calls"):
            raise RowError("its prompt ends with calls of the assistant: put the tools' results behind them")
        return dataclasses.replace(example, begun=last["role"] == "assistant"), None
    if cell is None:
        whole = [format for format in ("messages", "sharegpt") if _column(value, COLUMNS[format][0], False) is not None]
        format = (*whole, "")[0] or detect_format(value)
    else:
        format = "prompt_completion"
    example = normalize(value, format, access)
    if example.text is not None:
        raise RowError("it is one text, and has no prompt to answer: give it a column `prompt`")
    messages, answer = list(example.messages or ()), None
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
    messages = messages[: example.prompt_messages or None]
    if not messages:
        raise RowError("it has no message to answer: give a text, or a list of messages")
    return dataclasses.replace(example, messages=messages, completion=None), answer


def _is_answer(completion: object) -> bool:
    """Whether a completion beside a prompt is an answer, a text or turns, and no column for reward functions."""
    turns = completion if isinstance(completion, list) else [completion]
    return bool(turns) and (isinstance(completion, str) or all(isinstance(turn, Mapping) for turn in turns))


def _example(value: Columns, format: str, access: PictureAccess | None) -> Example:
    if format == "text":
        text = _text(value, ("text",))
        _refuse_marks(value, "its turns")
        _not_empty(text, "text")
        return Example(text=text)
    if format == "alpaca":
        instruction = _text(value, COLUMNS["alpaca"][0])
        context = _text(value, ("input", "context"), required=False)
        output = _text(value, COLUMNS["alpaca"][1])
        _not_empty(instruction, "instruction")
        _not_empty(output, "response")
        question = f"{instruction}\n\n{context}" if context.strip() else instruction
        return _exchange(value, question, output, _history(value, access), _alpaca_prompt(instruction, context))
    if format == "prompt_completion":
        question, answer = (_cell(value, group) for group in COLUMNS["prompt_completion"])
        if any(isinstance(side, Iterable) and not isinstance(side, str) for side in (question, answer)):
            return _prompted(value, question, answer, access)
        prompt, completion = (_text(value, group) for group in COLUMNS["prompt_completion"])
        _not_empty(completion, "response")
        # A question is not laid out to be continued by its answer without a template.
        plain = None if value.get("prompt") is None else prompt
        return _exchange(value, prompt, completion, _history(value, access), plain)
    names = COLUMNS["messages" if format == "messages" else "sharegpt"][0]
    cell = _column(value, names)
    return _conversation(value, _read(value, cell, _name(value, names), access))


def _answered(value: Columns, answers: Mapping[str, Any], access: PictureAccess | None) -> list[Example]:
    """An example for each of {column: text or turns}. RowError for an empty answer, or without one question."""
    for side, answer in answers.items():
        if isinstance(answer, str):
            check_unicode(answer)
            _not_empty(answer, f"{side} response")
    names = _question_columns(value)
    question = _question(value, names, access)
    texts = [answer for answer in answers.values() if isinstance(answer, str)]
    if len(texts) == len(answers) and isinstance(question, str | None):
        if question is None and all(_SPOKEN.match(text) for text in texts):  # transcripts, as Anthropic's HH has them
            said = {side: _transcript(text) for side, text in answers.items()}
            return _in_conversation(value, None, "", said, access)
        implied = question is None
        if question is None:
            if len(texts) < 2 or _has_other_text(value):
                raise RowError(
                    f"{next(iter(answers))} is text, and there is no prompt before it; {_other_columns(value)}"
                )
            question = _common_question(texts)
            if not question:  # texts without a question, as a reward model scores them whole
                before = _after(_text(value, SYSTEM, required=False), "")
                return [Example(prompt=before, completion=text, implied=True) for text in texts]
            texts = [text[len(question) :] for text in texts]
        else:
            check_unicode(question)
            _not_empty(question, names[0])
            texts = _without_question(question, texts)
        before = None if implied else _history(value, access)
        examples = [_exchange(value, question, text, before, question) for text in texts]
        return [dataclasses.replace(example, implied=implied) for example in examples]
    return _in_conversation(value, question, names[0] if names else "", answers, access)


_SPOKEN = re.compile(r"\s*Human:")
_SPEAKERS = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def _transcript(text: str) -> list[Message]:
    _, *segments = _SPEAKERS.split(text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": utterance.strip()}
        for speaker, utterance in zip(segments[::2], segments[1::2], strict=True)
    ]


def _is_long(question: str) -> bool:
    """Whether a text may be a question that answers repeat; a greeting may get the same word back."""
    return len(question.split()) > 1 or len(question.strip()) >= 16


def _without_question(question: str, answers: Sequence[str]) -> list[str]:
    """The answers without the question, if all begin with it."""
    if not _is_long(question) or not all(
        text.startswith(question) and text[len(question) :].strip() for text in answers
    ):
        return list(answers)
    rests = [text[len(question) :] for text in answers]
    cuts_word = any(question[-1].isalnum() and tail[0].isalnum() for tail in rests)  # within a word
    return list(answers) if cuts_word else rests


def _has_other_text(value: Columns) -> bool:
    """Whether a column beside the answers has a text, which may be their question under another name."""
    known_columns = (*CHOSEN, *REJECTED, *SYSTEM)
    return any(
        isinstance(cell, str) and cell.strip() and name not in known_columns and snake(name) not in NEUTRAL
        for name, cell in value.items()
    )


def _common_question(answers: Sequence[str]) -> str:
    """The text, up to a word's end, with which both answers of a preference begin; "" if it may be no question."""
    size = next(
        (index for index, chars in enumerate(zip(*answers, strict=False)) if len(set(chars)) > 1),
        min(map(len, answers)),
    )
    while size and answers[0][size - 1].isalnum() and any(text[size : size + 1].isalnum() for text in answers):
        size -= 1  # within a word
    question = answers[0][:size].rstrip(" ")
    if not _is_long(question) or not all(text[len(question) :].strip() for text in answers):
        return ""
    return question


def _history_cell(value: Columns) -> Sequence[Any] | None:
    """The list in HISTORY, also from JSON; None without one. Raises ConversationError for a broken list."""
    cell = json_cell(value.get(HISTORY), HISTORY, "[")
    return cell if isinstance(cell, list | tuple) else None


def _history(value: Columns, access: PictureAccess | None) -> list[Message] | None:
    """Turns before the question, from [question, answer] pairs or turns; None without the column."""
    cell = _history_cell(value)
    if cell is None:
        return None
    note(HISTORY, "earlier turns")
    if all(isinstance(turn, Mapping) for turn in cell):
        turns = read_messages(cell, HISTORY, access)
    else:
        turns = []
        for index, pair in enumerate(cell):
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise RowError(f"{HISTORY}[{index}] is neither a pair of texts, [question, answer], nor a turn")
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    for turn in turns:
        check_unicode(turn["content"])
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            _not_empty(turn["content"], f"response in {HISTORY}")
    return turns


def _in_conversation(
    value: Columns, question_cell: Any, column: str, answers: Mapping[str, Any], access: PictureAccess | None
) -> list[Example]:
    """The examples of `_answered` where question or an answer is turns."""
    question = [] if question_cell is None else _turns(value, question_cell, column, "user", access)
    conversations = {side: _turns(value, answer, side, "assistant", access) for side, answer in answers.items()}
    for side, turns in conversations.items():
        last = turns[-1]["role"] if turns else "nothing"
        if last != "assistant":
            raise RowError(f"{side} does not end with an answer of the assistant, but with {last}")
    tellings = [_begins_with_question(turns) for turns in conversations.values()]
    sizes = {side: len(turns) for side, turns in conversations.items()}  # of the answers
    if all(tellings):
        if not any(turn["role"] == "user" for turn in _common(list(conversations.values()))):
            raise RowError(f"{' and '.join(conversations)} begin with different questions: they must answer one")
        for side, turns in conversations.items():
            _check_repeated(question, turns, column, side)
            sizes[side] = len(turns) - (
                len(_common(list(conversations.values()))) if len(conversations) > 1 else len(turns) - 1
            )
        system = [turn for turn in question[:1] if turn["role"] == "system"]
        conversations = {s: [*([] if t[0]["role"] == "system" else system), *t] for s, t in conversations.items()}
    elif any(tellings):
        raise RowError(f"{' and '.join(conversations)}: one begins with its question, and the other does not")
    else:
        if not any(turn["role"] == "user" for turn in question):
            raise RowError(f"{next(iter(conversations))} has no question before it; {_other_columns(value)}")
        before = _history(value, access) if isinstance(question_cell, str) else None
        conversations = {
            side: _following([*(before or ()), *question], turns, side) for side, turns in conversations.items()
        }
    examples = {side: _conversation(value, turns) for side, turns in conversations.items()}
    return [
        dataclasses.replace(example, asked_messages=max(0, len(example.messages or ()) - sizes[side]))
        for side, example in examples.items()
    ]


def _begins_with_question(turns: Sequence[Message]) -> bool:
    return next((turn["role"] for turn in turns if turn["role"] != "system"), "") == "user"


def _check_repeated(question: Sequence[Message], turns: Sequence[Message], column: str, side: str) -> None:
    """Raises RowError if an answer's turns begin with another question than the column's."""
    asked_turns = [_said(turn) for turn in question if turn["role"] != "system"]
    if asked_turns and question[-1]["role"] == "assistant":  # the whole conversation, with an answer
        asked_turns.pop()
    heard = [_said(turn) for turn in turns if turn["role"] != "system"]
    last = max((index for index, turn in enumerate(heard) if turn[0] == "user"), default=0)
    if asked_turns and asked_turns not in (
        heard[: len(asked_turns)],
        heard[max(last + 1 - len(asked_turns), 0) : last + 1],
    ):
        raise RowError(
            f"{side} begins with another question than column {column}: leave out that column, or the turns before the "
            "answer"
        )
    systems = [
        [turn["content"] for turn in conversation[:1] if turn["role"] == "system"] for conversation in (question, turns)
    ]
    if all(systems) and systems[0] != systems[1]:
        raise RowError(f"{side} begins with another system message than column {column}: leave one out")


def _said(turn: Message) -> tuple[object, ...]:
    return turn["role"], turn["content"].strip(), turn.get("tool_calls"), *pictures_of(turn)


def _common(conversations: Sequence[Sequence[Message]]) -> list[Message]:
    count = 0
    for turns in zip(*conversations, strict=False):
        if any(_said(turn) != _said(turns[0]) for turn in turns):
            break
        count += 1
    return list(conversations[0][:count])


def _following(prompt_turns: list[Message], answer: list[Message], side: str) -> list[Message]:
    """A prompt's turns and those after. Raises RowError if the prompt ends with a begun answer."""
    if prompt_turns and answer and prompt_turns[-1]["role"] == answer[0]["role"] == "assistant":
        raise RowError(
            f"the last turn before {side} and its first one are one message of the assistant: join them in {side}, or "
            "in a list `messages` whose train_detail says which part is trained on"
        )
    return [*prompt_turns, *answer]


def _prompted(value: Columns, question_cell: Any, answer: Any, access: PictureAccess | None) -> Example:
    """A prompt and a completion, at least one in turns, as one conversation. RowError."""
    if isinstance(answer, str):
        _not_empty(answer, "response")
    _refuse_marks(value, "prompt and completion")
    names = [_name(value, group) for group in COLUMNS["prompt_completion"]]
    turns = _turns(value, answer, names[1], "assistant", access)
    question = _turns(value, question_cell, names[0], "user", access)
    if not turns or not question:
        raise RowError(f"the {'prompt' if turns else 'completion'} is an empty list of turns")
    if turns[-1]["role"] != "assistant":
        raise RowError(f"completion does not end with an answer of the assistant, but with {turns[-1]['role']}")
    asked_turns = [_said(turn) for turn in question]
    # The question may be there twice.
    if len(turns) > len(question) and [_said(turn) for turn in turns[: len(asked_turns)]] == asked_turns:
        turns = turns[len(asked_turns) :]
    example = _conversation(value, _following(question, turns, names[1]))
    return dataclasses.replace(example, prompt_messages=len(example.messages or ()) - len(turns))


def _question_columns(value: Columns) -> list[str]:
    prompt_columns = [name for name in _PROMPT if value.get(name) is not None]
    if prompt_columns:
        return prompt_columns[:1]
    other_columns = [name for name in _ASKED if not is_blank(value.get(name))]
    alpaca = other_columns in (["instruction", "input"], ["instruction", "context"])
    return other_columns if alpaca or (len(other_columns) == 1 and other_columns != ["context"]) else []


def _question(value: Columns, names: Sequence[str], access: PictureAccess | None) -> Any:
    if not names:
        return None
    if len(names) > 1:
        return "\n\n".join(_text(value, (name,)) for name in names)
    [name] = names
    note(name, "question")
    return _read(value, value[name], name, access) if name in _WHOLE else turns_in(value[name], name)


def _other_columns(value: Columns) -> str:
    known_columns = (*CHOSEN, *REJECTED, "completion", "label", *SYSTEM, *TOOLS)
    names = [str(name) for name in value if name not in known_columns]
    choice = f" to one of {', '.join(names)}" if names else ""
    return f"set data.columns={{prompt: ...}}{choice}, or put the question into a column prompt"


def _turns(value: Columns, cell: Any, column: str, role: str, access: PictureAccess | None) -> list[Message]:
    """Messages of turns in any form, or of text that a speaker of this role says."""
    if isinstance(cell, str):
        check_unicode(cell)
        return [{"role": role, "content": cell}]
    return _read(value, cell, column, access) if cell is not None else []


def _read(value: Columns, cell: Any, column: str, access: PictureAccess | None) -> list[Message]:
    """Messages of a column, with marks from columns such as `loss_mask: [0, 1]`."""
    turns = turns_of(cell, column)
    for name, marks in (_marks(value) if column in _WHOLE else {}).items():
        if len(marks) != len(turns):
            raise RowError(f"column {name} has {len(marks)} marks, and {column} {len(turns)} turns: give one for each")
        marked = zip(turns, marks, strict=True)
        note(name, "marks of turns")
        turns = [{name: mark, **turn} if isinstance(turn, Mapping) else turn for turn, mark in marked]
    return read_messages(turns, column, access)


def _marks(value: Columns) -> dict[str, Sequence[Any]]:
    """Columns that mark each turn as trained on or not."""
    lists = {name: turn_marks(cell, name) for name, cell in value.items() if isinstance(name, str)}
    return {name: marks for name, marks in lists.items() if marks}


def _refuse_marks(value: Columns, what: str) -> None:
    """Raises RowError for marks of turns beside what has none; lists of other values may be anything."""
    if marks := [name for name, cells in _marks(value).items() if all(map(is_mark, cells))]:
        raise RowError(f"column {marks[0]} marks turns: put {what} into one list `messages`")


def _alpaca_prompt(instruction: str, context: str) -> str:
    """Alpaca's prompt up to the response, with input unless `context` is blank."""
    if context.strip():
        body = f"{ALPACA_PREAMBLE_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{context}"
    else:
        body = f"{ALPACA_PREAMBLE}\n\n### Instruction:\n{instruction}"
    return f"{body}\n\n### Response:\n"


def _after(system: str, prompt: str) -> str:
    """The system message, unless blank, an empty line, and the prompt."""
    return f"{system}\n\n{prompt}" if system.strip() else prompt


def _exchange(
    value: Columns, question: str, answer: str | None, before: Sequence[Message] | None, plain: str | None
) -> Example:
    """A question of text and its answer, if any, with the row's other columns. before: earlier turns, or None; plain:
    the prompt without a template, which has no place for those turns; None: it needs a template.
    """
    if answer is not None:
        _refuse_marks(value, "question and answer")
    system = _text(value, SYSTEM, required=False)
    turns = [*(before or ()), {"role": "user", "content": question}]
    turns += [] if answer is None else [{"role": "assistant", "content": answer}]
    text = None if plain is None or before is not None else _after(system, plain)
    return Example(
        prompt=text,
        completion=None if text is None else answer,
        messages=_with_system(value, turns),
        tools=_tools(value),
        arguments=_arguments(value),
    )


def _with_system(value: Columns, messages: list[Message]) -> list[Message]:
    """The messages after the system message of the row's column. RowError if they begin with another one."""
    system = _text(value, SYSTEM, required=False)
    own = messages[0]["content"] if messages[0]["role"] == "system" else system
    if system.strip() and own.strip() != system.strip():
        raise RowError(f"its turns begin with another system message than column {_name(value, SYSTEM)}: leave one out")
    return with_system(messages, system)


def _name(value: Columns, names: tuple[str, ...]) -> str:
    return next((name for name in names if value.get(name) is not None), names[0])


def _cell(value: Columns, names: tuple[str, ...]) -> Any:
    return turns_in(_column(value, names), _name(value, names))


def _column(value: Columns, names: tuple[str, ...], required: bool = True) -> Any:
    """The first of `names` that is not null; without one RowError, or None."""
    for name in names:
        if value.get(name) is not None:
            if not is_blank(value[name]):
                note(name, _ROLES.get(names[0], name))
            return value[name]
    if required:
        if empty := [name for name in names if name in value]:
            raise RowError(f"column {empty[0]} is null")
        raise RowError(f"no column {' or '.join(names)}; it has {', '.join(map(str, value)) or 'none'}")
    return None


def _text(value: Columns, names: tuple[str, ...], required: bool = True) -> str:
    """As `_column`, of text; without one RowError, or "". Raises RowError for turns and other values."""
    cell = _column(value, names, required)
    if cell is None:
        return ""
    if not isinstance(cell, str):
        raise RowError(
            f"column {next(n for n in names if value.get(n) is not None)} is not text but {type(cell).__name__}"
        )
    check_unicode(cell)
    if names != ("text",) and not isinstance(turns_in(cell, _name(value, names)), str):
        raise RowError(f"column {_name(value, names)} holds turns: put them into a column messages, or set data.format")
    return cell


def _not_empty(text: str, noun: str) -> None:
    if not text.strip():
        raise RowError(f"empty {noun}")


def _conversation(value: Columns, messages: list[Message]) -> Example:
    """The example of a conversation with the row's system message and tools. RowError if it is empty."""
    if not messages:
        raise RowError("empty conversation")
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            others = ", ".join(unknown_keys([message]))
            _not_empty(message["content"], f"response, and its {others} not read" if others else "response")
    messages = _with_system(value, messages)
    names = [f"messages[].{key}" for key in unknown_keys(messages)]
    return Example(messages=messages, tools=_tools(value), arguments=_arguments(value), unknown=tuple(names))


def _arguments(value: Columns) -> Arguments | None:
    """A row's variables of the chat template; null ones, with which tables fill rows, are left out."""
    [name] = ARGUMENTS
    try:
        arguments = checked_arguments(json_cell(value.get(name), name, "{"), name)
    except ValueError as error:
        raise RowError(str(error)) from None
    if arguments is not None:
        note(name, "template's variables")
    return {key: cell for key, cell in (arguments or {}).items() if cell is not None} or None


def _tools(value: Columns) -> list[Message] | None:
    """Schemas of a row's tools; OpenAI's preferences have them in `input`."""
    inner = value.get("input")
    if _column(value, TOOLS, False) is None and isinstance(inner, Mapping):
        value = inner
        note("input", "tools")
    return read_tools(_column(value, TOOLS, False), _name(value, TOOLS))
