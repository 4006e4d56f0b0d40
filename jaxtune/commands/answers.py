"""The answers of `jaxtune generate`. An output file has a whole line of JSON for each answer, in the order of the
prompts, so that a stopped command continues after them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtune.commands import file_record
from jaxtune.conversations.answers import Answer, AnswerReader
from jaxtune.conversations.messages import (
    ConversationError,
    Message,
    exclusion,
    read_tools,
    shows_pictures,
)
from jaxtune.conversations.picture_processors import PictureReader, picture_arrays
from jaxtune.conversations.pictures import TAG
from jaxtune.conversations.prompts import picture_prompt, prompt_tokens
from jaxtune.conversations.templates import TemplateError
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.generation.requests import Constraint, PromptPictures, text_of
from jaxtune.system import files, terminal
from jaxtune.system.files import read_text
from jaxtune.system.terminal import fitted, say

if TYPE_CHECKING:
    from jaxtune.models.generation.sampler import Sampler

type Row = Mapping[str, Any]
type Tokenizer = Any  # of transformers

CONVERSATIONS = ("messages", "conversations", "prompt")  # the columns of which a row has one
PICTURES = ("images", "image")  # columns of which a row may have one
TOOLS = ("tools", "functions")
ANSWER, REASON = "answer", "finish_reason"  # columns that are added to a row
THOUGHTS = "reasoning_content"  # and that of thoughts, if the answer has any


def answer_file(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Path,
    output: Path,
    *,
    raw: bool,
    max_new_tokens: int,
    num_answers: int,
    slots: int | None,
    settings: Row,
    template_arguments: Row | None = None,
    grammar: str | None = None,
    pictures: PictureReader | None = None,
    cache: str | None = None,
) -> None:
    """Writes a line for each answer: the prompt's row with `answer`, `finish_reason` and, with thoughts,
    `reasoning_content`.

    Each line is written once its answer and all before it have ended. An output that the same model and settings made
    is continued; what an answer draws depends on the seed and its index alone. ValueError, with the line: a row that
    cannot be asked or is too long; an output of other prompts or settings, or in use; slots that do not fit.

      model: answers the prompts.
      tokenizer: of the model.
      prompts: JSONL of objects with `messages` or `prompt`.
      output: JSONL of answers, new or continued.
      raw: a prompt is a text without the chat template.
      max_new_tokens: of each answer.
      num_answers: to each prompt, written one below the other.
      slots: answers that decode at once; None: by memory, at most 64.
      settings: keyword arguments of Sampler.submit, "seed" among them.
      template_arguments: further variables of the chat template, such as enable_thinking; None: none.
      grammar: that each answer follows, after its thoughts; of `grammars`; None: any answer.
      pictures: how those of rows are read, by a model with its tower; None: rows have none.
      cache: as of Sampler.
    """
    from jaxtune.models.generation.prefixes import worthwhile_bytes
    from jaxtune.models.generation.sampler import Sampler

    row_by_line = read_rows(prompts, _note)
    asked_by_line = {
        number: prompt_of(row, tokenizer, raw, f"{prompts}:{number}", template_arguments, pictures)
        for number, row in row_by_line.items()
    }
    _require_room(model, asked_by_line, max_new_tokens, prompts)
    rows, asked = list(row_by_line.values()), list(asked_by_line.values())
    total = len(rows) * num_answers
    with open(output, "ab+", buffering=0) as file:
        if not files.hold(file.fileno()):
            raise ValueError(f"{output} is being written by another process: wait for it, or name another output")
        done_count = count_answers(file, output, rows, num_answers)
        if output.is_file():
            made_by = {"raw": raw, "max_new_tokens": max_new_tokens, "num_answers": num_answers, **settings}
            made_by |= file_record.model_settings(model) | {"end_tokens": end_token_ids(model)}
            made_by |= {} if grammar is None else {"grammar": grammar}
            made_by |= {} if cache is None else {"cache": cache}
            file_record.agree(output, made_by, [prompt.identity for prompt in asked], continues=done_count > 0)
        if done_count:
            _note(f"{output} has {done_count} of {total} answers, which are kept as they are")
        if done_count == total:
            return
        asked_ids = [prompt.ids for prompt in asked]
        longest, prefix_bytes = max(map(len, asked_ids)), worthwhile_bytes(asked_ids[done_count // num_answers :])
        sampler = Sampler(model, slots, longest + max_new_tokens, prefix_bytes=prefix_bytes, cache=cache)
        seed, tokens, start_time = settings["seed"], 0, time.monotonic()
        indices = range(done_count, total)
        numbers = {}
        constraint = _constraints(model, tokenizer, grammar, raw)
        for index in indices:
            ids, of_prompt = asked[index // num_answers]
            request = dict(settings, seed=seed, index=index, tokenizer=tokenizer, pictures=of_prompt)
            request["constraint"] = constraint(rows[index // num_answers], ids)
            numbers[sampler.submit(ids, max_new_tokens, **request)] = index
        with terminal.counted("answers", total, done_count) as advance:
            for index, ids, reason in in_order(sampler, numbers, done_count):
                row = rows[index // num_answers]
                answer = read_answer(tokenizer, row, asked[index // num_answers].ids, ids, raw)
                thoughts = {THOUGHTS: answer.reasoning} if answer.reasoning else {}
                append(file, {**row, ANSWER: answer.content, **thoughts, REASON: reason})
                tokens += len(ids)
                advance(1)
    seconds = time.monotonic() - start_time
    speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    _note(f"{len(indices):,} answers of {speed}: {output}")


def _require_room(model: Decoder, asked: Mapping[int, Prompt], max_new_tokens: int, file: Path) -> None:
    """ValueError for a prompt, by its line of the file, whose answer may not fit the model's positions."""
    positions = model.config.context_length
    for number, prompt in asked.items():
        if len(prompt.ids) + max_new_tokens > positions:
            raise ValueError(
                f"{file}:{number}: the prompt of {len(prompt.ids)} tokens and --max-new-tokens {max_new_tokens} are "
                f"more than the model's {positions} positions: shorten one of them"
            )


def _note(text: str) -> None:
    say(fitted(f"jaxtune: {text}", terminal.console(stderr=True)), sys.stderr)


def _constraints(
    model: Decoder, tokenizer: Tokenizer, grammar: str | None, raw: bool
) -> Callable[[Row, Sequence[int]], Constraint | None]:
    """Makes the constraint of a row and its prompt."""
    if grammar is None:
        return lambda row, ids: None
    from jaxtune.models.generation.grammars import Grammars

    grammars = Grammars.of(model, tokenizer)

    def constraint(row: Row, ids: Sequence[int]) -> Constraint:
        if raw or not tokenizer.chat_template:
            return grammars.constraint(grammar)
        return grammars.after_thoughts(grammar, ids, AnswerReader.of(tokenizer, tools_of(row)))

    return constraint


def in_order(sampler: Sampler, numbers: Mapping[int, int], first: int):
    """Drives a sampler to its end, and yields (index, token ids, finish reason) in the order of the indices.

    sampler: to which the requests were submitted.
    numbers: {request number: index of its answer}; indices are consecutive from `first`.
    first: the lowest index.

    ValueError: a constraint failed.
    """
    ids: dict[int, list[int]] = {index: [] for index in numbers.values()}
    reasons: dict[int, str] = {}
    while sampler.pending or first in reasons:
        while first in reasons:
            yield first, ids.pop(first), reasons.pop(first)
            first += 1
        for piece in sampler.step():
            if piece.finish_reason == "failed":
                raise ValueError(piece.error)
            ids[numbers[piece.request]] += piece.ids
            if piece.finish_reason is not None:
                reasons[numbers[piece.request]] = piece.finish_reason


def read_rows(file: Path, note: Callable[[str], None] = lambda text: None) -> dict[int, Row]:
    """Rows of a JSONL file of prompts, by their lines from 1, in order, without those that their marks
    leave out; blank lines are skipped.

    ValueError: a line is no object, has not exactly one prompt, or has a column that is added; no rows; no UTF-8.
    """
    rows: dict[int, Row] = {}
    excluded: list[str] = []
    try:
        text = read_text(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number} is not JSON: {error}") from None
        if not isinstance(row, dict) or sum(name in row for name in CONVERSATIONS) != 1:
            raise ValueError(
                f"{file}:{number}: each line must be an object with either 'messages' or 'prompt' (or 'conversations')"
            )
        for column in (ANSWER, REASON, THOUGHTS):
            if column in row:
                raise ValueError(
                    f"{file}:{number} has a column {column!r}, which is what is added: give it another name"
                )
        try:
            mark = exclusion(row)
        except ConversationError as error:
            raise ValueError(f"{file}:{number}: {error}") from None
        if mark:
            excluded.append(f"{file}:{number}: {mark}")
        else:
            rows[number] = row
    if excluded:
        note(f"{len(excluded):,} rows left out by their marks, first {excluded[0]}")
    if not rows:
        raise ValueError(f"{file} has no prompts")
    return rows


def read_answer(tokenizer: Tokenizer, row: Row, prompt: Sequence[int], ids: Sequence[int], raw: bool) -> Answer:
    """The answer to a row's prompt, with its thoughts apart where the chat template writes the prompt.

    tokenizer: of the model.
    row: of the prompts; only its `tools` are read.
    prompt: the prompt's token ids.
    ids: the answer's.
    raw: the prompt was a plain text.
    """
    if raw or not tokenizer.chat_template:
        return Answer(text_of(tokenizer, ids))
    reader = AnswerReader.of(tokenizer, tools_of(row))
    return reader.read(ids, opening=reader.opening(prompt))


def tools_of(row: Row) -> list[Message] | None:
    """The schemas of a row's tools; ConversationError."""
    name = next((name for name in TOOLS if row.get(name) is not None), TOOLS[0])
    return read_tools(row.get(name), name)


def has_pictures(row: Row) -> bool:
    """Whether a row has pictures in its messages or in a column; a single text counts where a tag stands for it."""
    columns = [row[name] for name in PICTURES if row.get(name)]
    tagged = any(TAG in json.dumps(row[name], ensure_ascii=False) for name in CONVERSATIONS if name in row)
    return any(tagged or not isinstance(cell, str) for cell in columns) or any(map(shows_pictures, row.values()))


class Prompt(NamedTuple):
    """With which a model is asked."""

    ids: list[int]
    pictures: PromptPictures | None = None

    @property
    def identity(self) -> list[int | str]:
        return [*self.ids, *([] if self.pictures is None else [self.pictures.key().hex()])]


def prompt_of(
    row: Row,
    tokenizer: Tokenizer,
    raw: bool,
    location: str,
    template_arguments: Row | None = None,
    pictures: PictureReader | None = None,
) -> Prompt:
    """A row's prompt; ValueError, with `location`, if it cannot be asked.

    The row is read as for training (`formats.asked`), but that a text is a user's message. With `raw`, or without a
    chat template, a text is tokenised as it is, and a conversation is an error.
      row: of the prompts, with `messages` or `prompt`.
      tokenizer: of the model.
      location: "FILE:LINE" or "--prompt", for errors.
      template_arguments: further variables of the chat template, such as enable_thinking; None: none.
      pictures: how they are read; None: rows have none.
    """
    from jaxtune.train.data.rendering.formats import asked

    plain = raw or not tokenizer.chat_template
    processor, access = (None, None) if pictures is None else (pictures.processor, pictures.access)
    try:
        example, _ = asked(row, access)
        if plain and (example.prompt is None or example.tools or example.arguments):
            refusal = "--raw takes texts only" if raw else "the tokenizer has no chat template"
            raise ValueError(f"it has messages, pictures or tools, and {refusal}: give a text as 'prompt'")
        if plain:
            ids = prompt_tokens(tokenizer, example.prompt or "")
            if not ids:
                raise ValueError("the prompt is empty")
            return Prompt(ids)
        tokens, placed = picture_prompt(
            tokenizer,
            example.messages or (),
            processor,
            tools=example.tools,
            arguments={**(template_arguments or {}), **(example.arguments or {})},
            continues=example.begun,
        )
        return Prompt(tokens.tolist(), PromptPictures.of(picture_arrays(len(tokens), placed, processor)))
    except TemplateError as error:
        raise ValueError(f"{location}: the chat template refuses these messages: {error.__cause__ or error}") from error
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None


def count_answers(file: FileIO, name: Path, rows: Sequence[Row], num_answers: int) -> int:
    """Whole lines that an output has already; ValueError, with the file unchanged, if one does not belong to its row.

    Line n (from 0) must be row n // num_answers with an answer. A last line that a killed process cut off must agree
    with its row as far as it goes, and is removed.

      file: the output, open for reading and writing; a cut last line is removed from it.
      rows: of the prompts. name: of the file, for errors.
      num_answers: to each prompt.
    """
    file.seek(0)
    *lines, cut_line = file.read().split(b"\n")
    for number, line in enumerate([*lines, cut_line] if cut_line else lines):
        row = rows[number // num_answers] if number < len(rows) * num_answers else {}
        try:
            if number == len(lines):  # what a killed process left
                begin = encoded(row)[:-1]
                right = begin[: len(line)] == line[: len(begin)]
            else:
                written = json.loads(line)
                # As JSON, because a row with NaN is not equal to itself.
                written.pop(THOUGHTS, None)
                agrees = encoded({**written, ANSWER: None, REASON: None}) == encoded(
                    {**row, ANSWER: None, REASON: None}
                )
                right = ANSWER in written and agrees
        except (ValueError, TypeError):
            right = False
        if not right:
            raise ValueError(
                f"{name}:{number + 1} is no answer to these prompts with --num-answers {num_answers}: name another "
                "output"
            )
    file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def encoded(row: Row) -> bytes:
    """JSON in UTF-8 without a newline; lone surrogates, which UTF-8 lacks, are escapes."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")


def append(file: FileIO, row: Row) -> None:
    """Appends a line. If a write fails (OSError), the file is cut back, so that it has whole lines only.

    file: opened for appending, unbuffered.
    """
    line = encoded(row) + b"\n"
    end = file.seek(0, os.SEEK_END)
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(end)
        raise


def show(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    raw: bool,
    settings: Row,
    template_arguments: Row | None = None,
    images: Sequence[str] = (),
    pictures: PictureReader | None = None,
) -> None:
    """Prints the answers to the prompts of --prompt, after all have ended.

    model: answers the prompts.
    tokenizer: of the model.
    prompts: texts.
    raw: they are taken without the chat template.
    settings: keyword arguments of jaxtune.generate.
    template_arguments: further variables of the chat template, such as enable_thinking; None: none.
    images: pictures of each prompt.
    pictures: how they are read; None: there are none.
    """
    import jaxtune

    asked = [
        prompt_of({"prompt": prompt, "images": images}, tokenizer, raw, "--prompt", template_arguments, pictures)
        for prompt in prompts
    ]
    of_prompts = [prompt.pictures for prompt in asked]
    answers = jaxtune.generate(
        model, [prompt.ids for prompt in asked], tokenizer=tokenizer, pictures=of_prompts, **settings
    )
    for text, prompt, answer in zip(prompts, asked, answers, strict=True):
        if len(prompts) > 1:
            say(f"--- {text}")
        say(read_answer(tokenizer, {}, prompt.ids, answer, raw).shown)
