"""Exact match: the share of held-out questions whose greedy answer equals the expected one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.conversations.picture_processors import PictureArrays, picture_arrays
from jaxtune.conversations.pictures import PICTURE, TAG
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.prefixes import worthwhile_bytes
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.data.rendering.formats import Example, normalize
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rendering.templates import RowEncoder, trained_tokenizer


def exact_match(
    model: Decoder,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int = 64,
    template: str | None = None,
    batch_size: int = 32,
    today: str | None = None,
    pictures: PictureOptions | None = None,
) -> tuple[float, list[tuple[str, str, str]]]:
    """Generates each row's last assistant message greedily and compares: (share of right answers, [(question, expected,
    answer)]). Prompts are tokenised as in training. White space around an answer is ignored, and all up to the last
    mark that the template writes before it, such as </think>.

      rows: {"messages": [..., {"role": "assistant", "content": expected}]}, perhaps with "tools"; or
      `formats.normalize`'s examples.
      max_new_tokens: thoughts included.
      template: as data.template; None: the tokenizer's.
      batch_size: prompts at a time on a device; fewer if memory is short.
      today: the day that the template writes; None: now.
      pictures: how those of rows are read; None: they have none.

    ValueError without rows, for a row without an answer, or if a prompt and max_new_tokens exceed the model's
    positions.
    """
    if not rows:
        raise ValueError("exact_match: there are no rows")
    if batch_size < 1:
        raise ValueError(f"exact_match: batch_size = {batch_size}: must be positive")
    positions = model.config.context_length
    questions = questions_of(tokenizer, rows, max_new_tokens, template, positions, today, pictures)
    ends = set(ends_of(model, trained_tokenizer(tokenizer, template)))
    longest = max(len(question.prompt) for question in questions) + max_new_tokens
    prompts = [question.prompt for question in questions]
    slots = Sharing.of(model).slots(len(rows), batch_size)
    sampler = Sampler(model, length=longest, most_slots=slots, prefix_bytes=worthwhile_bytes(prompts))
    answers = []
    seen = [PromptPictures.of(question.pictures) for question in questions]
    for row in sampler.run(prompts, max_new_tokens, eos_token_ids=sorted(ends), pictures=seen):
        ids = _after(tokenizer, row.ids, questions[row.index].mark)
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    right = sum(answer == question.expected for answer, question in zip(answers, questions, strict=True))
    compared = [
        (question.question, question.expected, answer) for question, answer in zip(questions, answers, strict=True)
    ]
    return right / len(rows), compared


class Question(NamedTuple):
    """A held-out row as a question."""

    prompt: list[int]
    question: str
    expected: str
    """The right answer from behind its last `mark`, stripped."""
    mark: str
    """The last word that the template writes behind the generation prompt, such as </think>, or ""; generated text up
    to its last occurrence is ignored.
    """
    pictures: PictureArrays | None = None


def questions_of(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int,
    template: str | None,
    positions: int,
    today: str | None = None,
    pictures: PictureOptions | None = None,
) -> list[Question]:
    """A Question of each row. positions: the most tokens of prompt and answer. Other arguments and ValueError as in
    `exact_match`.
    """
    encoder = RowEncoder(tokenizer, template=template, today=today, pictures=pictures)
    processor = None if pictures is None else pictures.processor
    questions = []
    for index, row in enumerate(rows):
        access = None if pictures is None else pictures.access("")
        example = row if isinstance(row, Example) else normalize(row, "messages", access)
        messages = example.messages or []
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(f"exact_match: row {index} does not end with a question and the assistant's answer")
        prompt, placed = encoder.encode_asked(example)
        if len(prompt) + max_new_tokens > positions:
            raise ValueError(
                f"exact_match: the {len(prompt)} tokens of question {index} and max_new_tokens = {max_new_tokens} "
                f"are more than the model's {positions} positions: shorten one of them"
            )
        before = encoder.before_answer(example)
        mark = "".join(before.split()[-1:])
        answer = messages[-1]["content"]
        expected = (answer.rpartition(mark)[2] if mark else answer).strip()
        shown, arrays = messages[-2]["content"].replace(PICTURE, TAG), picture_arrays(len(prompt), placed, processor)
        questions.append(Question(prompt.tolist(), shown, expected, mark, arrays))
    return questions


def _after(tokenizer: Tokenizer, ids: list[int], mark: str) -> list[int]:
    """Token ids after the last `mark` in their text; all if it does not occur."""

    def count(length: int) -> int:
        return tokenizer.decode(ids[:length]).count(mark)

    mark_count = count(len(ids)) if mark else 0
    return ids[bisect.bisect_left(range(len(ids) + 1), mark_count, key=count) :] if mark_count else ids
