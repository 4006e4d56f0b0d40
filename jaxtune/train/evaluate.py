"""Exact match: greedy answers to held-out questions, compared word for word."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.data.formats import Example, normalize
from jaxtune.train.data.templates import RowEncoder


def exact_match(
    model: Decoder,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int = 64,
    template: str | None = None,
    batch_size: int = 32,
) -> tuple[float, list[tuple[str, str, str]]]:
    """Asks the model for the last assistant message of each row.

    Prompts are tokenised as in training, up to where the answer begins. An answer ends at the first special token of
    the tokenizer or end token of the model; white space around it does not count, nor what comes before the mark that
    the template writes before an answer, and that mark: the end of a thought (</think>), the name of a channel. Where
    that mark has special tokens, so have thoughts before it: a turn then ends only as the template ends it, or at an
    end token of the model.

    Args:
      rows: {"messages": [..., {"role": "assistant", "content": expected}]}, perhaps with "tools"; or what
        formats.normalize made of a row of any form that ends with an answer.
      template: as data.template; None is the tokenizer's own, and gives the prompt of an Example that has one as it is.
      batch_size: the most prompts that are answered at a time; fewer where memory has no room for them.
    Returns:
      (share of right answers, [(question, expected, answer)] in the order of rows); the question is the content of
      the message before the answer.
    Raises:
      ValueError: no rows; a row that does not end with an assistant's message; a prompt too long for the model.
    """
    if not rows:
        raise ValueError("exact_match: there are no rows")
    if batch_size < 1:
        raise ValueError(f"exact_match: batch_size = {batch_size}: must be positive")
    prompts, questions, expected, marks, closing = asked(
        tokenizer, rows, max_new_tokens, template, model.config.context_length
    )
    encoder = RowEncoder(tokenizer)
    within = {token for mark in set(marks) for token in _tokens(tokenizer, mark)}
    ends = (encoder.end_ids - within) | set(end_token_ids(model))
    closes = {_first(_tokens(tokenizer, text), ends) for text in set(closing)} - {None}
    turn_ends = closes | set(end_token_ids(model)) if closes and within & encoder.end_ids else ends
    longest = max(map(len, prompts)) + max_new_tokens
    sampler = Sampler(model, length=longest, most_slots=min(batch_size, len(rows)))
    answers = []
    for row in sampler.run(prompts, max_new_tokens, eos_token_ids=sorted(turn_ends)):
        ids = _after(tokenizer, row.ids, marks[row.index])
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    right = sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True))
    return right / len(rows), list(zip(questions, expected, answers, strict=True))


def asked(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int,
    template: str | None,
    positions: int,
) -> tuple[list[list[int]], list[str], list[str], list[str], list[str]]:
    """(prompts, questions, right answers, marks before them or "", what the template writes after them) of rows, as of
    exact_match, for a model of so many positions.

    Raises:
      ValueError: a row that cannot be asked.
    """
    encoder = RowEncoder(tokenizer, template=template)
    prompts, questions, expected, marks, closing = [], [], [], [], []
    for index, row in enumerate(rows):
        example = row if isinstance(row, Example) else normalize(row, "messages")
        messages = example.messages or []
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(f"exact_match: row {index} does not end with a question and the assistant's answer")
        prompts.append(encoder.encode_prompt(example).tolist())
        if len(prompts[-1]) + max_new_tokens > positions:
            raise ValueError(
                f"exact_match: the {len(prompts[-1])} tokens of question {index} and max_new_tokens = {max_new_tokens} "
                f"are more than the model's {positions} positions: shorten one of them"
            )
        questions.append(messages[-2]["content"])
        before, after = encoder.around_answer(example)
        marks.append("".join(before.split()[-1:]))
        closing.append(after)
        answer = messages[-1]["content"]
        expected.append((answer.rpartition(marks[-1])[2] if marks[-1] else answer).strip())
    return prompts, questions, expected, marks, closing


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _first(ids: Sequence[int], of: Set[int]) -> int | None:
    return next((token for token in ids if token in of), None)


def _after(tokenizer: Any, ids: list[int], mark: str) -> list[int]:
    """The tokens after the last place where their text has the mark; all of them where it has none."""
    for first in range(len(ids), 0, -1) if mark and mark in tokenizer.decode(ids) else ():
        if mark in tokenizer.decode(ids[:first]) and mark not in tokenizer.decode(ids[: first - 1]):
            return ids[first:]
    return ids
