"""The answers of `jaxtune generate MODEL`. With `--prompts FILE --output FILE`, `answer_file` writes one line of JSON
for each answer (there may be several to a prompt), in the order of the prompts; if the command was stopped, the same
command makes the answers that are missing. With `--prompt TEXT`, which may be repeated, `show` prints the answers to
all prompts once they have ended. For the file `read_rows` reads the prompts, `prompt_ids` tokenises one,
`count_answers` finds how many answers there are already, `in_order` yields the new ones in order, and `append` writes
one (`encoded` as JSON)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.commands import file_record
from jaxtune.conversations.answers import Answer, AnswerReader
from jaxtune.conversations.messages import read_messages, read_tools, turns_in, with_system
from jaxtune.conversations.prompts import prompt_tokens
from jaxtune.conversations.templates import TemplateError
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.generation.requests import text_of
from jaxtune.system import files, terminal
from jaxtune.system.terminal import fitted, say

if TYPE_CHECKING:
    from jaxtune.models.generation.sampler import Sampler

type Row = Mapping[str, Any]
type Tokenizer = Any  # of transformers

CONVERSATIONS = ("messages", "conversations", "prompt")  # the columns of which a row has one
SYSTEM, TOOLS = ("system", "system_prompt"), ("tools", "functions")
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
) -> None:
    """Writes a line to `output` for each answer: the prompt's row with `answer` and `finish_reason`, and
    `reasoning_content` if the answer has thoughts, in the order of the prompts.

    A line is written whole, as soon as its answer and all those before it have ended. Answers of an output that the
    same model and settings made (its record says so) are kept; what an answer draws depends on the seed and its index.

    Args:
      prompts: a JSONL file of objects with `messages` (a conversation) or `prompt` (a text or a conversation).
      output: the JSONL file to write or to continue.
      raw: whether a prompt is a text that is used as it is, without the chat template.
      max_new_tokens: the most tokens of an answer.
      num_answers: the number of answers to each prompt, which are written one below the other.
      slots: the number of answers that decode at once; None: as many as there is memory for, at most 64.
      settings: keyword arguments of Sampler.submit, "seed" among them.

    Raises:
      ValueError: a row that cannot be asked (read_rows and prompt_ids say which), or whose prompt and
        `max_new_tokens` are more than the model's context, with its line; an output that answers other prompts, was
        started with another model or other settings, or that another process is writing; a setting that Sampler
        refuses, or slots that do not fit in memory.
      OSError: a file cannot be read or written.
    """
    from jaxtune.models.generation.sampler import Sampler

    rows = read_rows(prompts)
    asked = []
    for number, row in enumerate(rows, 1):
        ids = prompt_ids(row, tokenizer, raw, f"{prompts}:{number}", template_arguments)
        if len(ids) + max_new_tokens > model.config.context_length:
            raise ValueError(
                f"{prompts}:{number}: the prompt of {len(ids)} tokens and --max-new-tokens {max_new_tokens} are more "
                f"than the model's {model.config.context_length} positions: shorten one of them"
            )
        asked.append(ids)
    total = len(rows) * num_answers
    with open(output, "ab+", buffering=0) as file:
        if not files.hold(file.fileno()):
            raise ValueError(f"{output} is being written by another process: wait for it, or name another output")
        there = count_answers(file, output, rows, num_answers)
        if output.is_file():
            made_by = {"raw": raw, "max_new_tokens": max_new_tokens, "num_answers": num_answers, **settings}
            made_by |= file_record.model_settings(model) | {"end_tokens": end_token_ids(model)}
            file_record.agree(output, made_by, asked, continues=there > 0)
        if there:
            kept = f"{output} has {there} of {total} answers, which are kept as they are"
            say(fitted(f"jaxtune: {kept}", terminal.console(stderr=True)), sys.stderr)
        if there == total:
            return
        sampler = Sampler(model, slots, max(map(len, asked)) + max_new_tokens)
        seed, tokens, began = settings["seed"], 0, time.monotonic()
        left = range(there, total)
        numbers = {}
        for index in left:
            request = dict(settings, seed=seed, index=index, tokenizer=tokenizer)
            numbers[sampler.submit(asked[index // num_answers], max_new_tokens, **request)] = index
        with terminal.counted("answers", total, there) as advance:
            for index, ids, reason in in_order(sampler, numbers, there):
                row = rows[index // num_answers]
                answer = read_answer(tokenizer, row, asked[index // num_answers], ids, raw)
                thoughts = {THOUGHTS: answer.reasoning} if answer.reasoning else {}
                append(file, {**row, ANSWER: answer.content, **thoughts, REASON: reason})
                tokens += len(ids)
                advance(1)
    seconds = time.monotonic() - began
    said = f"{len(left):,} answers of {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s: {output}"
    say(fitted(f"jaxtune: {said}", terminal.console(stderr=True)), sys.stderr)


def in_order(sampler: Sampler, numbers: Mapping[int, int], first: int):
    """Drives a sampler until all requests have ended, and yields their answers in the order of their indices, each as
    soon as those before it have ended too, so that `answer_file` writes lines in order while later rows decode.

    Args:
      sampler: the sampler that has the requests.
      numbers: {number of a request, as Sampler.submit returned it: index of its answer in the output}; indices are
        consecutive.
      first: the smallest index.
    Yields:
      (index, token ids of the answer, why it ended, such as "stop" or "length").
    """
    ids: dict[int, list[int]] = {index: [] for index in numbers.values()}
    ended: dict[int, str] = {}
    while sampler.pending or first in ended:
        while first in ended:
            yield first, ids.pop(first), ended.pop(first)
            first += 1
        for piece in sampler.step():
            ids[numbers[piece.request]] += piece.ids
            if piece.finish_reason is not None:
                ended[numbers[piece.request]] = piece.finish_reason


def read_rows(file: Path) -> list[Row]:
    """Reads a JSONL file of prompts and returns its rows, one dict for each line; blank lines at its end are ignored,
    and one before is an error. `jaxtune generate` calls it before the model is loaded, so that a wrong file is reported
    at once, and `answer_file` calls it again for the rows.

    Raises:
      ValueError: a line that is not a JSON object, or has both or neither of `messages` and `prompt`, or has a column
        `answer` or `finish_reason`, which are added; there are no rows; or the file is not UTF-8.
      OSError: the file cannot be read.
    """
    rows = []
    try:
        text = file.read_text(encoding="utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None
    for number, line in enumerate(text.split("\n") if text else [], 1):
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
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no prompts")
    return rows


def read_answer(tokenizer: Tokenizer, row: Row, prompt: Sequence[int], ids: Sequence[int], raw: bool) -> Answer:
    """The answer `ids` to a row's prompt, whose thoughts are separated where the chat template writes the prompt."""
    if raw or not tokenizer.chat_template:
        return Answer(text_of(tokenizer, ids))
    reader = AnswerReader.of(tokenizer, row.get("tools"))
    return reader.read(ids, opening=reader.opening(prompt))


def prompt_ids(
    row: Row, tokenizer: Tokenizer, raw: bool, place: str, template_arguments: Row | None = None
) -> list[int]:
    """The token ids of the prompt that a row asks the model.

    `messages` or `conversations` are a conversation in any form that rows have, of which a last message of the
    assistant is left out; the chat template also gets the row's `tools`. A `prompt` is such a conversation, or a text,
    which is the message of a user. With `raw`, or if the tokenizer has no chat template, a text is tokenised as it is,
    and a conversation is an error.

    Args:
      row: the row.
      tokenizer: the model's.
      raw: True: no chat template is applied. False: it is, if the tokenizer has one.
      place: where the row is, "FILE:LINE" or "--prompt", for errors.
      template_arguments: further variables of the chat template.
    Raises:
      ValueError: the row cannot be read, its text gives no token, its conversation has no message to answer, it has a
        conversation where no chat template is applied, or the template refuses it.
    """
    column = next(name for name in CONVERSATIONS if name in row)
    plain = raw or not tokenizer.chat_template
    try:
        asked = turns_in(row[column], column) if column == "prompt" else row[column]
        if column == "prompt" and isinstance(asked, str):
            if plain:
                ids = prompt_tokens(tokenizer, asked)
                if not ids:
                    raise ValueError("the prompt is empty")
                return ids
            asked = {"role": "user", "content": asked}
        system = next((text for name in SYSTEM if isinstance(text := row.get(name), str)), "")
        messages = with_system(read_messages(asked, column), system)
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise ValueError(f"{column!r} has no message to answer: give a text, or a list of messages")
        if plain:
            why = "--raw takes texts only" if raw else "the tokenizer has no chat template"
            raise ValueError(f"it has messages, and {why}: give a text as 'prompt'")
        name = next((name for name in TOOLS if row.get(name) is not None), TOOLS[0])
        return prompt_tokens(tokenizer, messages, tools=read_tools(row.get(name), name), arguments=template_arguments)
    except TemplateError as error:
        raise ValueError(f"{place}: the chat template refuses these messages: {error.__cause__ or error}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def count_answers(file: FileIO, name: Path, rows: Sequence[Row], num_answers: int) -> int:
    """Returns the number of whole lines, each with one answer, that an output has already, so that a stopped command
    continues after them. Line n (from 0) belongs to row n // num_answers: it must be that row with an answer. A last
    line that is not whole, which a killed process left, must agree with that row's JSON, without the last brace, as far
    as the shorter of the two goes: it may have a part of the answer. It is cut off the file.

    Args:
      file: the output, opened for reading and appending.
      name: its path, for errors.
      rows: the rows of the prompts.
      num_answers: the number of answers to each of them.
    Raises:
      ValueError: a line is not an answer to the row that it belongs to, or there are more lines than answers; the file
        is left unchanged.
    """
    file.seek(0)
    *whole, rest = file.read().split(b"\n")
    for number, line in enumerate([*whole, rest] if rest else whole):
        row = rows[number // num_answers] if number < len(rows) * num_answers else {}
        try:
            if number == len(whole):  # what a killed process left
                begin = encoded(row)[:-1]
                right = begin[: len(line)] == line[: len(begin)]
            else:
                found = json.loads(line)
                # As JSON, because a row with NaN is not equal to itself.
                found.pop(THOUGHTS, None)
                same = encoded({**found, ANSWER: None, REASON: None}) == encoded({**row, ANSWER: None, REASON: None})
                right = ANSWER in found and same
        except (ValueError, TypeError):
            right = False
        if not right:
            raise ValueError(
                f"{name}:{number + 1} is no answer to these prompts with --num-answers {num_answers}: name another "
                "output"
            )
    file.truncate(sum(len(line) + 1 for line in whole))
    return len(whole)


def encoded(row: Row) -> bytes:
    """Returns a row of prompts or answers as JSON in UTF-8, one line without the newline, as the output file has it.
    `append` writes an answer so, and `count_answers` compares with it the file's last line if that was cut off. Lone
    surrogates, which UTF-8 cannot encode, are written as escapes."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")


def append(file: FileIO, row: Row) -> None:
    """Appends a row, an answer with its prompt, to the output file as a line of JSON. After a short write the rest is
    written. If a write raises, the file is cut back to its old length and the error is raised, so that the file has
    whole lines only, unless the process is killed here (`count_answers`). file: opened for appending, unbuffered.

    Raises:
      OSError: the line cannot be written, for example because the disk is full.
    """
    line = encoded(row) + b"\n"
    end = file.seek(0, os.SEEK_END)
    try:
        done = 0
        while done < len(line):
            done += file.write(line[done:])
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
) -> None:
    """Prints the model's answers to the prompts of --prompt on stdout, after all of them have ended. If there are
    several prompts, a line with the prompt is above each answer.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      prompts: the texts of the prompts.
      raw: True: a prompt is tokenised as it is; False: it is a user's message in the chat template, if the tokenizer
        has one.
      settings: keyword arguments of jaxtune.generate, by name, such as {"max_new_tokens": 64}.
    Raises:
      ValueError: a prompt gives no token, the chat template refuses it, or jaxtune.generate refuses its length or a
        setting.
    """
    import jaxtune

    asked = [prompt_ids({"prompt": prompt}, tokenizer, raw, "--prompt", template_arguments) for prompt in prompts]
    answers = jaxtune.generate(model, asked, tokenizer=tokenizer, **settings)
    for prompt, ids, answer in zip(prompts, asked, answers, strict=True):
        if len(prompts) > 1:
            say(f"--- {prompt}")
        say(read_answer(tokenizer, {}, ids, answer, raw).shown)
