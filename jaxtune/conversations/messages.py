"""Reads conversations in the forms that people and programs write to one list of messages.

A message is a dict with `role` (system, user, assistant or tool), `content` (text), and where present
`reasoning_content`, `tool_calls` (arguments as objects), `name`, `tool_call_id`, `train`, `train_detail` and
`pictures`: those for which the characters PICTURE of the content stand, in order. Unknown keys stay, as a template may
read them. Reading a result again changes nothing.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.conversations.call_ids import short_id
from jaxtune.conversations.pictures import (
    PICTURE,
    TAG,
    Picture,
    PictureAccess,
    PictureError,
    is_picture_part,
    picture_of_part,
    read_picture,
)
from jaxtune.conversations.reads import TURN, note
from jaxtune.conversations.thoughts import block_of, in_place, place_of

type Message = dict[str, Any]

# {what speakers are called, in lower case: the role}. Turns of CALLS are the assistant's, with calls in place of text.
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "environment"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_results", "tool_output"), "tool"),
    **dict.fromkeys(("function_response", "function_result", "function_call_output"), "tool"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls", "function_calls"), "assistant"),
}
CALLS = frozenset(("function_call", "tool_call", "tool_calls", "function_calls"))

# Keys of a turn that mean the same; the first that is there is read.
SPEAKER = ("role", "from", "speaker", "author", "sender")
CONTENT = ("content", "value", "text", "message", "parts")
THOUGHT = ("reasoning_content", "thinking", "reasoning", "thought", "reasoning_details")

# Keys that say whether a turn is trained on: what a true value means.
MARKS = {
    **dict.fromkeys(("weight", "loss", "loss_mask", "step_loss_mask", "loss_weight", "loss_scale"), True),
    **dict.fromkeys(("compute_loss", "calculate_loss", "calc_loss", "use_loss", "has_loss", "with_loss"), True),
    **dict.fromkeys(("in_loss", "include_in_loss", "train", "training", "trainable", "is_trainable"), True),
    **dict.fromkeys(("train_on", "train_on_turn", "train_turn", "should_train", "do_train", "to_train"), True),
    **dict.fromkeys(("is_train", "is_trained", "trained", "learn", "learnable", "supervise", "supervised"), True),
    **dict.fromkeys(("is_target", "include_in_training", "response_mask", "assistant_mask", "train_mask"), True),
    **dict.fromkeys(("masked", "is_masked", "mask_loss", "loss_masked", "mask_out", "masked_out", "no_loss"), False),
    **dict.fromkeys(("skip_loss", "ignore_loss", "exclude_from_loss", "no_train", "dont_train"), False),
    **dict.fromkeys(("do_not_train", "not_trained", "skip_train", "skip_training", "exclude"), False),
    **dict.fromkeys(("excluded", "exclude_from_training", "ignore", "ignored", "skip", "context_only"), False),
}
# Keys with the parts of a turn's text that are trained on: [{"begin_offset", "end_offset" (inclusive), "train"}, ...].
DETAILS = ("train_detail", "training_detail", "train_details")
# Keys that change nothing and are left out.
NEUTRAL = frozenset(
    (
        *("id", "message_id", "msg_id", "uuid", "parent_id", "parent", "conversation_id", "turn", "turn_id", "index"),
        *("turn_identifier", "idx", "position", "timestamp", "created", "created_at", "create_time", "updated_at"),
        *("date", "time", "datetime", "model", "model_name", "provider", "lang", "language", "country", "state"),
        *("source", "dataset", "metadata", "meta", "extra", "info", "tokens", "token_count", "num_tokens", "n_tokens"),
        *("length", "usage", "finish_reason", "stop_reason", "logprobs", "rating", "score", "scores", "votes", "rank"),
        *("quality", "labels", "emojis", "hash", "hashed_ip", "header", "status", "object", "synthetic", "deleted"),
        *("review_count", "review_result", "toxic", "toxicity", "detoxify", "redacted", "openai_moderation"),
    )
)
_READ = frozenset(
    ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id", "train", "train_detail", "pictures")
)
_MARKING = re.compile(r"(^|_)(loss|train\w*|learn\w*|mask\w*|weight\w*|superv\w*|grad|gradient)(_|$)")
_TRUTH = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False, "yes": True, "no": False}
_NO_ANSWER = "an answer has a picture: models write text; put it into a turn of the user"
_MARK_IN_TEXT = f"its text has U+{ord(PICTURE):X}, which stands for pictures: leave it out"
_PICTURES = ("images", "image")  # keys of a turn
_SHOWN = re.compile(r'"(images?|image_url|input_image)"')  # in JSON of turns with pictures
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("reasoning", "thinking", "reasoning_text", "reasoning.text", "reasoning.summary")
_THOUGHT_TEXTS = ("text", "value", "thinking", "reasoning", "content", "summary")  # the first with text is read
_CALL_PARTS = ("tool_call", "tool_use", "function_call")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "kwargs")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PRINTED = re.compile(r"^(?:array\()?[\[(]?\s*\{\s*'\w+'\s*:.*[\])}]$", re.DOTALL)
_PRINTED_SPEAKER = re.compile(r"'(?:role|from)'\s*:\s*'(\w+)'")


class ConversationError(ValueError):
    """A conversation that cannot be read; `path` is where, such as (3, "content")."""

    def __init__(self, why: str, *path: int | str):
        super().__init__(why)
        self.why, self.path = why, path

    def inside(self, *path: int | str) -> ConversationError:
        """This error as one of the enclosing value."""
        return ConversationError(self.why, *path, *self.path)

    def __str__(self) -> str:
        location = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).lstrip(".")
        return f"{location}: {self.why}" if location else self.why


def read_messages(value: object, column: str = "messages", pictures: PictureAccess | None = None) -> list[Message]:
    """The messages of a conversation: a list of turns, one turn, columns of turns, or their JSON text.

    Consecutive assistant turns become one message if one of them calls tools. Raises ConversationError with a path that
    begins with `column`.

      pictures: where pictures may be read from; None refuses them.
    """
    messages = []
    for index, turn in enumerate(turns_of(value, column)):
        try:
            messages += [_message(each, pictures) for each in _results_apart(turn)]
        except ConversationError as error:
            raise error.inside(column, index) from None
    messages = _without_channels(messages, column)
    _refuse_selected_questions(messages, column)
    return _joined(messages, column)


def turns_in(value: object, column: str) -> object:
    """A prompt's or answer's cell with turns in JSON text decoded; other texts stay. Raises ConversationError for turns
    printed by Python.

      value: the cell.
      column: its name, for errors.
    """
    if not isinstance(value, str):
        return value
    start = value.lstrip()[:6]
    if not start.startswith(("[", "{", "(", '"[', '"{', "array(")):
        return value
    try:
        decoded = json.loads(value)
        decoded = json.loads(decoded) if isinstance(decoded, str) else decoded
    except (ValueError, RecursionError):
        decoded = None
    inner = decoded.get("messages", decoded) if isinstance(decoded, Mapping) else decoded
    turns = [inner] if isinstance(inner, Mapping) else inner
    if isinstance(turns, list) and turns and all(map(_is_turn, turns)):
        return _loaded(value, "is not JSON", column) if start[0] != '"' else decoded
    try:
        _refuse_printed(value, _is_turn)
    except ConversationError as error:
        raise error.inside(column) from None
    return value


def json_cell(value: object, column: str, begins: str) -> object:
    """A cell, decoded if it is text that begins as JSON of its kind does; blank text is None. Raises ConversationError
    for such text that is no JSON.

      value: the cell.
      column: its name, for errors.
      begins: "[" for a list, "{" for an object.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    return _loaded(value, "is not JSON", column) if value.lstrip().startswith(begins) else value


def read_tools(value: object, column: str = "tools") -> list[Message] | None:
    """Tool schemas as {"type": "function", "function": {...}} from a list (also bare or Anthropic's), a single one, or
    JSON text; None without any. Raises ConversationError.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _loaded(value, "is not JSON", column)
    if isinstance(value, Mapping) and value:
        value = value.get("tools", [value])
    if value is None or (isinstance(value, list | tuple | Mapping) and not value):
        return None
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConversationError(f"is not a list of objects but {type(value).__name__}", column)
    return [_schema(tool, column, index) for index, tool in enumerate(value)]


def with_system(messages: list[Message], system: str) -> list[Message]:
    """The messages after a system message, unless it is blank or they have one."""
    begins = bool(messages) and messages[0]["role"] == "system"
    return [{"role": "system", "content": system}, *messages] if system.strip() and not begins else messages


def shows_pictures(value: object) -> bool:
    """Whether a cell of a row is a conversation with pictures, or with parts that stand for those of a column."""
    if isinstance(value, str) and not _SHOWN.search(value):
        return False
    try:
        return isinstance(value, str | Mapping | list | tuple) and any(map(_shows, turns_of(value, "")))
    except ConversationError:
        return False


def _shows(turn: object) -> bool:
    if not isinstance(turn, Mapping) or not any(key in turn for key in SPEAKER):
        return False
    role, content = _role(dict(turn))[0], next((turn[key] for key in CONTENT if turn.get(key) is not None), None)
    if any(turn.get(name) for name in _PICTURES):
        return True
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple) or (role == "tool" and _is_data(content)):
        return False
    return any(map(is_picture_part, parts))


def with_pictures(messages: Sequence[Message], pictures: Sequence[Picture]) -> list[Message]:
    """The messages with a row's pictures: for parts without a payload and tags <image> outside of answers, in order;
    before the first user's text if there are none of either. Raises ConversationError if their numbers differ.
    """
    awaited = sum(picture is None for message in messages for picture in _marked(message))
    may_show = (message["content"] for message in messages if message["role"] != "assistant")
    tags = sum(content.count(TAG) for content in may_show) if pictures else 0
    counted = {awaited: False, awaited + tags: bool(tags)} if awaited else {tags: bool(tags)}
    if pictures and not awaited and not tags:
        if any(TAG in message["content"] for message in messages):
            raise ConversationError(_NO_ANSWER)
        first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ConversationError("there are pictures, and no user's message to which they belong")
        opened = {**messages[first], "content": PICTURE * len(pictures) + messages[first]["content"]}
        opened["pictures"] = [*pictures, *_marked(messages[first])]
        return [*messages[:first], opened, *messages[first + 1 :]]
    if len(pictures) not in counted:
        raise ConversationError(
            f"there are {len(pictures)} pictures for {awaited} parts of the type image without one"
            + (f" and {tags} tags {TAG}" if tags else "")
        )
    waiting = iter(pictures)
    return [_placed(message, waiting, counted[len(pictures)]) for message in messages]


def _placed(message: Message, waiting: Iterator[Picture], reads_tags: bool) -> Message:
    content, pictures = message["content"], iter(_marked(message))
    if message["role"] == "assistant" and _marked(message):
        raise ConversationError(_NO_ANSWER)
    if not _marked(message) and (message["role"] == "assistant" or not (reads_tags and TAG in content)):
        return message
    if len(_marked(message)) != content.count(PICTURE):
        raise ConversationError(_MARK_IN_TEXT)
    placed = []
    for mark in re.findall(f"{PICTURE}|{TAG}" if reads_tags else PICTURE, content):
        picture = next(pictures) if mark == PICTURE else None
        placed.append(next(waiting) if picture is None else picture)
    return {**message, "content": content.replace(TAG, PICTURE) if reads_tags else content, "pictures": placed}


def column_pictures(cell: object, access: PictureAccess, column: str) -> list[Picture]:
    """The pictures of a column: one, a list of them, or the JSON of a list. Raises ConversationError."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = _loaded(cell, "is not JSON", column)
    cells = cell if isinstance(cell, list | tuple) else [cell]
    pictures = []
    for index, value in enumerate(cells):
        try:
            pictures.append(read_picture(value, access))
        except PictureError as error:
            raise ConversationError(str(error), column, *([index] if cells is cell else [])) from None
    return pictures


def pictures_of(message: Message) -> list[Picture]:
    """The pictures for which the characters PICTURE of a message's content stand."""
    return [picture for picture in _marked(message) if picture is not None]


def _marked(message: Message) -> list[Picture | None]:
    """`pictures` of a message that was read here; a row may have another key of that name."""
    pictures = message.get("pictures")
    if not isinstance(pictures, list) or PICTURE not in message["content"]:
        return []
    return pictures if all(isinstance(picture, Picture | None) for picture in pictures) else []


def unknown_keys(messages: Iterable[Mapping[str, object]]) -> list[str]:
    """Keys that only a template may read."""
    return list(dict.fromkeys(key for message in messages for key in message if key not in _READ))


def for_template(messages: Iterable[Message], template: str) -> list[Message]:
    """Messages from `read_messages` without training marks, with thoughts under the key that `template` reads, also
    those at the start of a content, and with ids that it takes.
    """
    if "[TOOL_CALLS]" in template:  # Mistral's, which have a rule for them
        messages = _with_short_ids(messages)
    messages = [_unwrapped(in_place(message, template), template) for message in messages]
    thinking = "reasoning_content" not in template and re.search(r"\bthinking\b", template) is not None
    names = {"reasoning_content": "thinking"} if thinking else {}
    if not thinking and any("reasoning_content" in message for message in messages):
        names = {"reasoning_content": place_of(template).key or "reasoning_content"}
    return [
        {names.get(key, key): value for key, value in in_parts(message).items() if key not in ("train", "train_detail")}
        for message in messages
    ]


def _unwrapped(message: Message, template: str) -> Message:
    """A tool's result without the tags that some rows have around it and the template writes too, as Hermes'."""
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str) or "<tool_response>" not in template:
        return message
    text, (opening, closing) = content.strip(), ("<tool_response>", "</tool_response>")
    if not text.startswith(opening) or not text.endswith(closing) or text.count(opening) > 1:
        return message
    return {**message, "content": text[len(opening) : -len(closing)].strip()}


def _with_short_ids(messages: Iterable[Message]) -> list[Message]:
    """The messages with an id of nine letters and digits for each call and result; without ids, results are those of
    the calls before them, in order.
    """
    result, numbers, waiting = [], itertools.count(), []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [short_id(call["id"] if call.get("id") else f"call{next(numbers):05d}") for call in calls]
            waiting = [(number, bool(call.get("id"))) for number, call in zip(ids, calls, strict=True)]
            calls = [{**call, "id": number} for call, number in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            is_known = given is not None and any(number == short_id(given) for number, _ in waiting)
            unnamed = [number for number, has_id in waiting if given is None or not has_id]
            number = unnamed[0] if unnamed and not is_known else short_id(given or f"call{next(numbers):05d}")
            waiting = [item for item in waiting if item[0] != number]
            message = {**message, "tool_call_id": number}
        result.append(message)
    return result


def in_parts(message: Message) -> Message:
    """A message as templates and people take it: with pictures, in parts."""
    if not pictures_of(message):
        return message
    parts = _parts(message["content"])
    return {key: parts if key == "content" else value for key, value in message.items() if key != "pictures"}


def _parts(content: str) -> list[dict[str, str]]:
    pieces = re.split(f"({PICTURE})", content)
    return [{"type": "image"} if text == PICTURE else {"type": "text", "text": text} for text in pieces if text]


def exclusion(columns: Mapping[str, object]) -> str:
    """The column that leaves a row out of training, such as "weight = 0"; "" without one. Raises ConversationError if
    marks disagree.
    """
    trains_by_column = row_marks(columns)
    for name in trains_by_column:
        note(name, "mark")
    if len(set(trains_by_column.values())) > 1:
        raise ConversationError(
            f"columns {', '.join(trains_by_column)} disagree whether the row is trained on: leave one"
        )
    return next((f"{name} = {columns[name]!r}" for name, trains in trains_by_column.items() if not trains), "")


def row_marks(columns: Mapping[str, object]) -> dict[str, bool]:
    """{column: whether it says that the row is trained on}; values that are not true or false are left out."""
    training_truths = {
        name: training_truth for name in columns if (training_truth := _training_truth(str(name))) is not None
    }
    truths = {name: _TRUTH.get(str(columns[name]).strip().lower()) for name in training_truths}
    return {name: truth is training_truths[name] for name, truth in truths.items() if truth is not None}


def turn_marks(cell: object, name: str) -> list[object]:
    """The marks of each turn in a column: a list, an array or their JSON text; [] if it has none. Raises
    ConversationError for marks in another form.
    """
    if _training_truth(name) is None:
        return []
    cell = cell.tolist() if isinstance(cell, np.ndarray) else cell
    if isinstance(cell, str):
        words = [word for word in re.split(r"[\s,;()\[\]{}|]+", cell) if word]
        several = len(words) > 1 and all(map(is_mark, words))
        if several or cell.lstrip().startswith("[") or ("mask" in snake(name) and re.fullmatch("[01]{2,}", cell)):
            cell = _loaded(cell, "is no JSON list with 0 or 1 for each turn", name)
            if not isinstance(cell, list):
                raise ConversationError(f"{_short(cell)}: write a list with 0 or 1 for each turn", name)
    if isinstance(cell, Mapping) and "mask" in snake(name):
        raise ConversationError(f"{_short(cell)}: write a list with 0 or 1 for each turn", name)
    return list(cell) if isinstance(cell, list | tuple) else []


@functools.lru_cache(1024)  # columns are those of all rows
def _training_truth(name: str) -> bool | None:
    """The value with which a column of this name trains on its row; None for a column that says nothing of it."""
    return MARKS.get(snake(name))


def template_for(templates: object, tools: object) -> str | None:
    """The template of a tokenizer's `chat_template`, of several by name the one for conversations with or without
    `tools`; None without one.

      templates: a Jinja text, {name: text}, or None.
      tools: of the conversation; only whether there are any matters.
    """
    if isinstance(templates, Mapping):
        names = ("tool_use", "default") if tools else ("default",)
        templates = next((templates[name] for name in names if templates.get(name)), None)
    return templates if isinstance(templates, str) and templates else None


def check_unicode(text: str) -> None:
    """Raises ConversationError for half of a surrogate pair, which JSON can hold and no tokenizer encodes."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ConversationError("not valid Unicode: half of a surrogate pair")


def _is_turn(value: object) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(value.get(key), str) for key in SPEAKER):
        return False
    return any(key in value for key in (*CONTENT, "tool_calls", "function_call"))


def _refuse_printed(text: str, looks: Callable[[object], bool]) -> None:
    """Raises if the text is a printed Python object, or a list of them, for which `looks` holds."""
    stripped = text.strip()
    if _PRINTED.match(stripped) is None:
        return
    try:
        printed = ast.literal_eval(stripped)
        items = printed if isinstance(printed, list | tuple) else [printed]
        refused = all(map(looks, items))
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # such as one with NumPy arrays
        refused = any(name.lower() in ROLES for name in _PRINTED_SPEAKER.findall(stripped))
    if refused:
        raise ConversationError(
            f"{stripped[:40]!r} ... is a printed Python object, not JSON: write it with json.dumps, or as a list"
        )


def _looks_written(value: object) -> bool:
    return _is_turn(value) or (isinstance(value, Mapping) and ("name" in value or "function" in value))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object's pairs as a dict; ConversationError for a key that comes twice, of which json would keep the last."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConversationError(f"an object has the key {twice!r} twice")
    return dict(pairs)


def _loaded(text: str, why: str, *path: int | str) -> object:
    """The JSON value of a text; ConversationError, which begins with `why`."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except ConversationError as error:
        raise error.inside(*path) from None
    except (ValueError, RecursionError):
        pass
    try:
        _refuse_printed(text, _looks_written)
    except ConversationError as error:
        raise error.inside(*path) from None
    raise ConversationError(f"{why}: {text.strip()[:60]!r}; write it with json.dumps", *path)


def turns_of(value: object, column: str) -> list[object]:
    """The turns of a conversation in any form that `read_messages` takes, not yet read; ConversationError for another
    form.

      value: the cell.
      column: its name, for errors.
    """
    if isinstance(value, str):
        value = _loaded(value, "the conversation is text, and not the JSON of a list of turns", column)
        value = turns_in(value, column)  # JSON text of JSON text
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("messages", "conversations", "conversation") if key in value), None)
        columns = {key: cell for key, cell in value.items() if isinstance(cell, list | tuple)}
        if inner is not None:
            return turns_of(inner, column)
        if any(key in columns for key in SPEAKER):  # a column of each key, as `datasets` gives sequences of objects
            count = max(map(len, columns.values()))
            return [{k: cell[i] for k, cell in columns.items() if i < len(cell)} for i in range(count)]
        return [value]
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConversationError(f"the conversation is not a list of turns but {type(value).__name__}", column)
    return [_decoded_turn(turn) for turn in value]


def _decoded_turn(turn: object) -> object:
    return turns_in(turn, "") if isinstance(turn, str) else turn


def _results_apart(turn: object) -> list[object]:
    """A turn, with Anthropic's results of tools in its content as turns of their own before it."""
    if not isinstance(turn, Mapping):
        return [turn]
    parts = turn.get("content")
    if not isinstance(parts, list | tuple) or not any(map(_is_result, parts)):
        return [turn]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content") or ""}
        for part in filter(_is_result, parts)
    ]
    others = [part for part in parts if not _is_result(part)]
    return [*results, *([{**turn, "content": others}] if others else [])]


def _is_result(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def _message(turn: object, access: PictureAccess | None) -> Message:
    """A turn of any of the known forms as a Message; ConversationError for one that cannot be read."""
    if not isinstance(turn, Mapping):
        raise ConversationError(f"a turn is not an object but {type(turn).__name__}")
    extra = {key: cell for key, cell in turn.items() if cell is not None}  # tables fill keys of other turns with None
    for key in extra:
        check_unicode(str(key))
    role, calling = _role(extra)
    key = next((key for key in CONTENT if key in extra), None)
    content = extra.pop(key, None) if key is not None else None
    if key is not None:
        note(TURN + key, "calls" if calling else "content")
    message: Message = {"role": role, "content": ""}
    calls: list[Message] = []
    for name in ("function_call", "tool_calls"):  # the first is OpenAI's older key
        written = extra.pop(name, None)
        if written is not None and not isinstance(written, bool):
            note(TURN + name, "calls")
            calls = _within(name, _calls, written)[1] or calls
    thoughts = _thoughts(extra)
    if calling and not calls:
        message["content"], calls = _within(key or "content", _calls, content)
        if not calls:
            raise ConversationError("a turn of a call has no call", key or "content")
    elif content is not None:
        text, thought, content_calls, pictures = _within(key, _content, content, role, access)
        message["content"], calls = text, content_calls or calls
        if pictures and role == "assistant":
            raise ConversationError(_NO_ANSWER, str(key))
        if pictures:
            message["pictures"] = pictures
        if access is not None and (column := next((name for name in _PICTURES if extra.get(name)), None)):
            note(TURN + column, "pictures")
            [message] = with_pictures([message], column_pictures(extra.pop(column), access, column))
        elif role != "assistant":
            _refuse_unshown(turn, message["content"])
        thoughts = [*thoughts, thought] if thought.strip() else thoughts
    elif role in ("user", "system"):
        raise ConversationError(f"a message of the role {role} has no content")
    if thoughts and role == "assistant" and (block := block_of(message["content"])):  # as some write it twice
        if any(snake(name) in DETAILS for name in extra):
            raise ConversationError("its thought is written twice, and its spans count the first: leave one out")
        thoughts = [*thoughts, *filter(str.strip, block[:1])]
        message["content"] = block[1]
    if len({text.strip() for text in thoughts}) > 1:
        raise ConversationError(f"it has several thoughts ({', '.join(THOUGHT)}): leave one")
    _within(key or "content", check_unicode, message["content"])
    if thoughts:
        message["reasoning_content"] = thoughts[0]
    if calls and role != "assistant":
        raise ConversationError(f"a message of the role {role} calls tools: only the assistant does", "tool_calls")
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        for key, name in (("tool_name", "name"), ("call_id", "tool_call_id")):
            if name not in extra and key in extra:
                extra[name] = extra.pop(key)
    marks = _marks(extra, message)
    for name in extra:
        if name in NEUTRAL or name in ("name", "tool_call_id"):
            note(f"{TURN}{name}", "" if name in NEUTRAL else name)
    return message | {name: cell for name, cell in extra.items() if name not in NEUTRAL} | marks


def _refuse_unshown(turn: Mapping[str, object], content: str) -> None:
    """Raises ConversationError for pictures of a turn that are not read: they are empty beside a tag, or the model has
    no eyes for them; a single text without a tag, such as an address, may be of something else.
    """
    for name in (name for name in _PICTURES if name in turn):
        cell = turn[name]
        is_empty = cell is None or (isinstance(cell, str | list | tuple | Mapping) and not cell)
        if is_empty and TAG in content:
            raise ConversationError(f"is empty, and {TAG} in the text stands for a picture: leave one out", name)
        if not is_empty and (TAG in content or not isinstance(cell, str)):
            raise ConversationError("pictures, of which this model reads none", name)


def _within[T](key: str | None, read: Callable[..., T], *values: object) -> T:
    try:
        return read(*values)
    except ConversationError as error:
        raise error.inside(str(key)) from None


def _role(extra: Message) -> tuple[str, bool]:
    """(Role, whether the content is calls); removes the speaker's key from `extra`."""
    key = next((key for key in SPEAKER if key in extra), None)
    if key is None:
        raise ConversationError(f"a message has no role; it has {', '.join(map(str, extra)) or 'nothing'}")
    speaker = extra.pop(key)
    note(TURN + key, "role")
    if not isinstance(speaker, str):
        raise ConversationError(f"a role is text, not {type(speaker).__name__}", key)
    name = speaker.strip().lower().replace("-", "_").replace(" ", "_")
    if name not in ROLES:
        raise ConversationError(
            f"{_short(speaker)} is no known role: rename it to system, user, assistant or tool", key
        )
    return ROLES[name], name in CALLS


def _content(
    value: object, role: str, access: PictureAccess | None
) -> tuple[str, str, list[Message], list[Picture | None]]:
    """(Text with PICTURE for pictures, thought, calls, pictures) of text, a list of typed parts, or a tool's result."""
    if isinstance(value, str):
        return value, "", [], []
    if role == "tool" and _is_data(value):
        return json.dumps(value, ensure_ascii=False, default=str), "", [], []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise ConversationError(f"content is neither text nor a list of parts but {type(value).__name__}")
    texts, thoughts, calls, pictures = [], [], [], []
    for index, part in enumerate(value):
        if access is not None and is_picture_part(part):
            try:
                pictures.append(picture_of_part(part, access))
            except PictureError as error:
                raise ConversationError(str(error), index) from None
            texts.append(PICTURE)
            continue
        kind, text = _part(part)
        if kind in _THOUGHT_PARTS or (isinstance(part, Mapping) and part.get("thought") is True):  # as Gemini marks it
            thoughts.append(_within_item(index, part))
        elif kind in _CALL_PARTS:
            written = part if text is None else text
            calls += _calls(written)[1]
        elif text is None or kind not in _TEXT_PARTS:
            raise ConversationError(
                f"a part of the type {kind[:80]} in content; only text can be read" + " and pictures" * bool(access),
                index,
            )
        else:
            texts.append(text)
    joined = "".join(texts)
    if pictures and joined.count(PICTURE) != len(pictures):
        raise ConversationError(_MARK_IN_TEXT)
    return joined, "".join(thoughts), calls, pictures


def _is_data(value: object) -> bool:
    """Whether a tool's result is data, not typed parts of text."""
    items = value if isinstance(value, list | tuple) else [value]
    return not all(isinstance(part, str) or (isinstance(part, Mapping) and "type" in part) for part in items)


def _part(part: object) -> tuple[str, str | None]:
    """(Type, text or None) of a part of a content."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        return type(part).__name__, None
    kind = str(part.get("type") or ("text" if isinstance(part.get("text"), str) else "without a type"))
    cells = [part[key] for key in ("text", "value", "content", kind) if key in part]
    text = next((cell for cell in cells if cell is not None), None)
    if text is None and kind in _TEXT_PARTS:
        text = ""
    return kind, text if isinstance(text, str) else None


def _thoughts(extra: Message) -> list[str]:
    """The thoughts of a turn, removed from `extra`."""
    keys = [key for key in THOUGHT if key in extra]
    for key in keys:
        note(TURN + key, "thoughts")
    read = [_within(key, _thought, extra.pop(key)) for key in keys]
    return [text for text in read if text.strip()]


def _thought(value: object) -> str:
    """The text of a thought: text, a part, or a list of both, nested too; ConversationError for another value."""
    if isinstance(value, str):
        return value
    if value is None or value is False or value == {}:
        return ""
    if isinstance(value, list | tuple):
        return "".join(_within_item(index, item) for index, item in enumerate(value))
    if not isinstance(value, Mapping):
        raise ConversationError(f"a thought is text or parts of text, not {type(value).__name__}")
    kind = value.get("type")
    names = [name for name in _THOUGHT_TEXTS if name in value]
    if kind not in (None, *_TEXT_PARTS, *_THOUGHT_PARTS, "summary_text") or not names:
        raise ConversationError(f"a thought's part of the type {_short(kind)} has no known text: give it as text")
    texts = [_within(name, _thought, value[name]) for name in names]
    text = next(filter(str.strip, texts), texts[0])
    if not text.strip() and value.get("encrypted_content"):
        raise ConversationError("the thought is encrypted: leave it out, or the row")
    return text


def _within_item(index: int, item: object) -> str:
    try:
        return _thought(item)
    except ConversationError as error:
        raise error.inside(index) from None


def _calls(value: object) -> tuple[str, list[Message]]:
    """(Text before the calls, calls) of a call, a list, or their JSON text, also in <tool_call> marks."""
    text = ""
    if isinstance(value, str):
        if "<tool_call>" in value:
            text = value.partition("<tool_call>")[0].strip()
            value = [block for block in _TAGGED.findall(value) if block.strip()]
        else:
            value = _several(value)
    if isinstance(value, Mapping):
        value = [value]
    if value is None or (isinstance(value, Sequence) and not value):
        return text, []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConversationError(f"calls are not a list but {type(value).__name__}")
    return text, [_call(call) for call in value]


def _several(text: str) -> object:
    """The JSON value of a text, or a list of those that follow one another in it; ConversationError for other text."""
    values, decoder, tail = [], json.JSONDecoder(object_pairs_hook=_unique), text.strip()
    while tail:
        try:
            value, end = decoder.raw_decode(tail)
        except ConversationError:
            raise
        except (ValueError, RecursionError):
            _refuse_printed(text, _looks_written)
            raise ConversationError(f"a tool call is not JSON: {text.strip()[:60]!r}") from None
        values.append(value)
        tail = tail[end:].lstrip(" \t\r\n;,")
    return values[0] if len(values) == 1 else values


def _call(call: object) -> Message:
    """A call in the templates' form: {"id" (if any), "type": "function", "function": {"name", "arguments"}}."""
    if isinstance(call, str):
        call = _loaded(call, "a tool call is not JSON")
    if not isinstance(call, Mapping):
        raise ConversationError(f"a tool call is not an object but {type(call).__name__}")
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    name = function if isinstance(function, str) else inner.get("name") or inner.get("tool_name")
    if not isinstance(name, str) or not name.strip():
        raise ConversationError("a tool call has no name")
    written = next((inner[key] for key in _ARGUMENTS if inner.get(key) is not None), None)
    number = next((call[key] for key in ("id", "call_id", "tool_call_id") if call.get(key) is not None), None)
    first = {} if number is None else {"id": number}
    return {**first, "type": "function", "function": {"name": name, "arguments": _arguments(written, name)}}


def _arguments(value: object, name: str) -> dict[str, object]:
    """The arguments of a call, from an object, its JSON text, a list of pairs, or nothing; else ConversationError."""
    for _ in range(2):  # JSON text of JSON text is written too
        if isinstance(value, str):
            value = _loaded(value, f"the arguments of the tool call {name} are not JSON") if value.strip() else None
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):  # what a map of a table becomes
        pairs = [(item["key"], item["value"]) if _is_entry(item) else item for item in value]
        if all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            return _unique([(pair[0], pair[1]) for pair in pairs])
    raise ConversationError(f"the arguments of the tool call {name} are not an object but {type(value).__name__}")


def _is_entry(item: object) -> bool:
    return isinstance(item, Mapping) and item.keys() == {"key", "value"}


def _schema(tool: object, column: str, index: int) -> Message:
    """A tool as a function's schema, from an object or its JSON; ConversationError, with `column`, else."""
    if isinstance(tool, str):
        tool = _loaded(tool, "a tool is not JSON", column, index)
    if not isinstance(tool, Mapping):
        raise ConversationError(f"is not a list of objects: a tool is {type(tool).__name__}", column)
    if isinstance(tool.get("function"), Mapping):
        return dict(tool)
    function = dict(tool)
    if "input_schema" in function:
        function["parameters"] = function.pop("input_schema")
    if function.get("type") == "function":  # OpenAI's later form has the name beside the type
        del function["type"]
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _loaded(function["parameters"], "parameters are not JSON", column, index)
    return {"type": "function", "function": function}


def _marks(extra: Message, message: Message) -> Message:
    """The training marks of a turn as {"train", "train_detail"}, removed from `extra`."""
    truths: dict[str, bool] = {}
    details = None
    for key in list(extra):
        name = snake(key)
        if name in MARKS:
            value = _truth(extra[key], key)
            note(TURN + key, "mark")
            del extra[key]
            truths[key] = value is MARKS[name]
        elif name in DETAILS:
            note(TURN + key, "marks of the content")
            details = _within(key, _details, extra.pop(key), message["content"])
        elif message["role"] == "assistant" and name not in NEUTRAL and _MARKING.search(name) and is_mark(extra[key]):
            raise ConversationError(
                f"{_short(extra[key])} seems to say whether the answer is trained on, and this key is unknown: name it "
                "loss_mask (1 trains on it) or masked (true leaves it out)",
                key,
            )
    if len(set(truths.values())) > 1:
        raise ConversationError(f"{', '.join(truths)} disagree whether the turn is trained on: leave one")
    marks: Message = {"train": next(iter(truths.values()))} if truths else {}
    if details is not None and marks.get("train", True):
        marks["train_detail"] = details
    return marks


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def snake(key: object) -> str:
    """A key in lower case with underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower().replace("-", "_")


def is_mark(value: object) -> bool:
    """Whether a value says that something is trained on, or is not."""
    return str(value).strip().lower() in _TRUTH


def _truth(value: object, key: str) -> bool:
    """What a flag says: true, false, yes, no, 1 or 0, in any case; else ConversationError about `key`."""
    truth = _TRUTH.get(str(value).strip().lower())
    if truth is None:
        raise ConversationError(f"{_short(value)}: answers are trained on or not; write true or false (1 or 0)", key)
    return truth


def _details(value: object, content: str) -> list[Message]:
    """The checked spans of a text that are trained on or not, in order."""
    if isinstance(value, str):
        value = _loaded(value, "is not JSON")
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise ConversationError(f"is not a list of spans but {type(value).__name__}")
    spans = []
    for index, span in enumerate(value):
        if not isinstance(span, Mapping) or "train" not in span:
            raise ConversationError("a span has begin_offset, end_offset and train", index)
        low, high = span.get("begin_offset"), span.get("end_offset")
        if not isinstance(low, int) or not isinstance(high, int):
            raise ConversationError("a span has begin_offset, end_offset and train", index)
        if not 0 <= low <= high < len(content):
            raise ConversationError(f"the span {low} to {high} is not within the {len(content)} characters", index)
        spans.append({"begin_offset": low, "end_offset": high, "train": _truth(span["train"], "train")})
    return sorted(spans, key=lambda span: span["begin_offset"])


def _refuse_selected_questions(messages: Sequence[Message], column: str) -> None:
    """Raises if marks select a turn that is no answer; marks that are all true select nothing."""
    marked = [message.get("train", True) for message in messages if "train" in message or "train_detail" in message]
    if all(marked) and not any("train_detail" in message for message in messages):
        return
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and (message.get("train") or "train_detail" in message):
            raise ConversationError(
                f"its marks train on a turn of the role {message['role']}; only answers are trained on: mark it false, "
                "or leave the mark out",
                column,
                index,
            )


def _without_channels(messages: list[Message], column: str) -> list[Message]:
    """The messages with gpt-oss's channels followed: what the assistant says in `analysis` is the thought of its next
    message. Raises ConversationError for a turn of a channel, or to a recipient, that is no message.
    """
    result: list[Message] = []
    thought: Message | None = None
    for index, message in enumerate(messages):
        is_answer, channel = message["role"] == "assistant", message.get("channel")
        recipient = message.get("recipient")
        if is_answer and isinstance(recipient, str) and recipient not in ("", "all", "user", "assistant"):
            why = f"{_short(recipient)}: a turn to a tool is a call: write it as tool_calls"
            raise ConversationError(why, column, index, "recipient")
        is_known = channel in ("analysis", "commentary", "final") and message["role"] in ("assistant", "tool")
        if is_known:
            note(f"{TURN}channel", "channel")
            message = {key: value for key, value in message.items() if key != "channel"}
        if is_answer and channel == "commentary" and "tool_calls" not in message:
            raise ConversationError("'commentary' without tool_calls is no answer", column, index, "channel")
        is_thought = is_answer and channel == "analysis" and "tool_calls" not in message
        try:
            if thought is not None:
                message = _after_thought(thought, message)
        except ConversationError as error:
            raise error.inside(column, index) from None
        if is_thought:
            own = message.get("reasoning_content")
            thought = {**message, "reasoning_content": "\n\n".join(filter(None, (own, message["content"])))}
            continue
        thought = None
        result.append(message)
    if thought is not None:
        raise ConversationError("it ends in the channel 'analysis', a thought without an answer", column)
    return result


def _after_thought(thought: Message, message: Message) -> Message:
    """An assistant's message with the thought of the turn before it."""
    if message["role"] != "assistant":
        raise ConversationError("a thought (channel 'analysis') is before it, and no answer of the assistant")
    if thought.get("train", True) != message.get("train", True) or "train_detail" in thought:
        raise ConversationError("it and its thought (channel 'analysis') are marked differently: mark both alike")
    texts = [text for text in (thought["reasoning_content"], message.get("reasoning_content")) if text]
    return {**message, "reasoning_content": "\n\n".join(dict.fromkeys(texts))}


def _joined(messages: list[Message], column: str) -> list[Message]:
    """The messages, with each run of assistant turns that calls tools as one."""
    result: list[Message] = []
    start = 0
    while start < len(messages):
        end = start + 1
        while end < len(messages) and _continues(messages[end - 1], messages[end]):
            end += 1
        run = messages[start:end]
        if len(run) > 1 and any("tool_calls" in message for message in run):
            try:
                run = [_one(run)]
            except ConversationError as error:
                raise error.inside(column, start) from None
        result += run
        start = end
    return result


def _continues(before: Message, message: Message) -> bool:
    are_answers = before["role"] == message["role"] == "assistant"
    return are_answers and before.get("name") == message.get("name")


def _one(run: list[Message]) -> Message:
    """Neighbouring turns of the assistant as one message, with train_detail where their train flags differ."""
    merged: Message = {"role": "assistant", "content": ""}
    spans: list[Message] = []
    marks = [message.get("train", True) for message in run]
    differ = len(set(marks)) > 1 or any("train_detail" in message for message in run)
    for message, train in zip(run, marks, strict=True):
        merged |= {key: value for key, value in message.items() if key not in _READ}
        if message.get("name") is not None:
            merged["name"] = message["name"]
        text = message["content"]
        start = len(merged["content"]) + (2 if text and merged["content"] else 0)
        if text:
            merged["content"] += ("\n\n" if merged["content"] else "") + text
            details = message.get("train_detail") or [{"begin_offset": 0, "end_offset": len(text) - 1, "train": train}]
            spans += [
                {**span, "begin_offset": span["begin_offset"] + start, "end_offset": span["end_offset"] + start}
                for span in details
            ]
        if thought := message.get("reasoning_content"):
            merged["reasoning_content"] = "\n\n".join(filter(None, (merged.get("reasoning_content"), thought)))
        if "tool_calls" in message:
            merged["tool_calls"] = [*merged.get("tool_calls", []), *message["tool_calls"]]
        if differ and not train and ("tool_calls" in message or "reasoning_content" in message):
            raise ConversationError(
                "text and calls of one message are marked differently, and its calls or thoughts cannot be left out "
                "alone: mark all of them, or leave the row out"
            )
    if differ:
        return merged | {"train": True} | ({"train_detail": spans} if spans else {})
    return merged | ({"train": marks[0]} if any("train" in message for message in run) else {})
