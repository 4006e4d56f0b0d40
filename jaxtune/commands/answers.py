"""`jaxtune generate MODEL --prompts FILE --output FILE`: answers to a file of prompts, one line for each answer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.models.decoder import Decoder
from jaxtune.system import files, terminal
from jaxtune.system.terminal import fitted, say

if TYPE_CHECKING:
    from jaxtune.models.generation.sampler import Sampler

type Row = Mapping[str, Any]
type Tokenizer = Any  # of transformers

ANSWER, REASON = "answer", "finish_reason"  # columns that are added to a row


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
) -> None:
    """Writes a line for each answer, in the order of the prompts: the prompt's row with `answer` and `finish_reason`.

    Lines are written whole, as answers end. Where the output has lines of these prompts already, the answers after them
    are made: what a row draws depends on the seed and its place only.

    Args:
      prompts: JSONL, of objects with `messages` or `prompt`; see prompt_ids. num_answers: of each prompt. slots: rows
        that decode at once. settings: of Sampler.submit.
    Raises:
      ValueError: a row that cannot be asked, with its line; an output of other prompts, or one that another process
        writes.
    """
    from jaxtune.models.generation.sampler import Sampler

    rows = read_rows(prompts)
    asked = []
    for number, row in enumerate(rows, 1):
        ids = prompt_ids(row, tokenizer, raw, f"{prompts}:{number}")
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
        if there:
            kept = f"{output} has {there} of {total} answers, which are kept as they are"
            say(fitted(f"jaxtune: {kept}; their settings are not compared", terminal.console(stderr=True)), sys.stderr)
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
                text = tokenizer.decode(ids, skip_special_tokens=True)
                append(file, {**rows[index // num_answers], ANSWER: text, REASON: reason})
                tokens += len(ids)
                advance(1)
    seconds = time.monotonic() - began
    said = f"{len(left):,} answers of {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s: {output}"
    say(fitted(f"jaxtune: {said}", terminal.console(stderr=True)), sys.stderr)


def in_order(sampler: Sampler, numbers: Mapping[int, int], first: int):
    """(index, ids, why it ended) of each request, by index from `first` on. numbers: {request: index}."""
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
    """The rows of a file of prompts; lines of white space at its end do not count.

    Raises:
      ValueError: a line that is not a JSON object, or has neither `messages` nor `prompt`, or has an answer; no rows.
    """
    rows = []
    text = file.read_text(encoding="utf-8").rstrip()
    for number, line in enumerate(text.split("\n") if text else [], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number} is not JSON: {error}") from None
        if not isinstance(row, dict) or ("messages" in row) == ("prompt" in row):
            raise ValueError(f"{file}:{number}: each line must be an object with either 'messages' or 'prompt'")
        for column in (ANSWER, REASON):
            if column in row:
                raise ValueError(
                    f"{file}:{number} has a column {column!r}, which is what is added: give it another name"
                )
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no prompts")
    return rows


def prompt_ids(row: Row, tokenizer: Tokenizer, raw: bool, place: str) -> list[int]:
    """The token ids that a row asks the model with.

    `messages` are a conversation, of which a last message of the assistant is left out; `tools` beside it are given to
    the chat template. `prompt` is the message of a user, or such a list of messages; with `raw`, or without a chat
    template, it is the text itself.

    Args:
      place: of the row, for errors.
    Raises:
      ValueError: it is none of these.
    """
    asked = row.get("messages", row.get("prompt"))
    if isinstance(asked, str):
        if raw or not tokenizer.chat_template:
            ids = tokenizer(asked)["input_ids"]
            if not ids:
                raise ValueError(f"{place}: the prompt is empty")
            return ids
        asked = [{"role": "user", "content": asked}]
    right = isinstance(asked, list) and all(isinstance(turn, dict) and "role" in turn for turn in asked)
    if right and asked and asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    if not right or not asked:
        raise ValueError(f"{place}: a prompt must be a text, or a list of messages with role and content")
    if raw or not tokenizer.chat_template:
        why = "--raw takes texts only" if raw else "the tokenizer has no chat template"
        raise ValueError(f"{place}: it has messages, and {why}: give a text as 'prompt'")
    try:
        return tokenizer.apply_chat_template(
            asked, tools=row.get("tools"), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template raises what it likes, such as of roles that do not alternate
        raise ValueError(f"{place}: the chat template refuses these messages: {error}") from error


def count_answers(file: FileIO, name: Path, rows: Sequence[Row], num_answers: int) -> int:
    """How many answers an output has; what a kill or a full disk left of a line at its end is cut off.

    Args:
      file: the output, opened for reading and appending. name: of it. rows: of the prompts.
    Raises:
      ValueError: it is no file of answers to these prompts; it is left as it is.
    """
    file.seek(0)
    *whole, rest = file.read().split(b"\n")
    for number, line in enumerate([*whole, rest] if rest else whole):
        row = rows[number // num_answers] if number < len(rows) * num_answers else {}
        try:
            if line is rest:
                begin = encoded(row)[:-1]
                right = begin[: len(line)] == line[: len(begin)]
            else:
                found = json.loads(line)
                right = ANSWER in found and {**found, ANSWER: None, REASON: None} == {**row, ANSWER: None, REASON: None}
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
    """A row as a line of JSON, without the line's end."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")


def append(file: FileIO, row: Row) -> None:
    """Adds a line to an unbuffered file, or nothing where the disk has no room for all of it."""
    line = encoded(row) + b"\n"
    end = file.seek(0, os.SEEK_END)
    try:
        done = 0
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        file.truncate(end)
        raise


def show(model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], raw: bool, settings: Row) -> None:
    """Prints the answers to prompts that were given one by one."""
    import jaxtune

    asked = [prompt_ids({"prompt": prompt}, tokenizer, raw, "--prompt") for prompt in prompts]
    answers = jaxtune.generate(model, asked, tokenizer=tokenizer, **settings)
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(prompts) > 1:
            say(f"--- {prompt}")
        say(tokenizer.decode(answer, skip_special_tokens=True))
