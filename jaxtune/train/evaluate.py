"""Exact match: the share of held-out questions whose greedy answer equals the expected one. `exact_match` has the model
answer rows; `questions_of` makes a `Question` of each row, with its prompt, which is tokenised as in training, also to
check before training that every row can be asked. `_after` drops the thought before an answer."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import ends_of
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.data.formats import Example, normalize
from jaxtune.train.data.templates import RowEncoder, trained_tokenizer


def exact_match(
    model: Decoder,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int = 64,
    template: str | None = None,
    batch_size: int = 32,
    today: str | None = None,
) -> tuple[float, list[tuple[str, str, str]]]:
    """Generates the last assistant message of each row greedily, and compares it with the row's own. `jaxtune train`
    and `jaxtune evaluate` measure exact match by it (evaluation.exact_match_rows). The reward function of the same name
    is another one (objectives/reward_functions.py).

    Prompts are tokenised as in training, up to the begin of the answer, which ends where answers end everywhere
    (`ends_of`). White space around it is ignored. So is, in the generated and in the row's own answer, everything up to
    the last mark that the template writes before an answer (`Question.mark`), such as the end of a thought (</think>)
    or the name of a channel.

    Args:
      model: the model.
      tokenizer: a fast Hugging Face tokenizer.
      rows: {"messages": [..., {"role": "assistant", "content": expected}]}, with or without "tools"; or examples from
        `formats.normalize` that end with an answer.
      max_new_tokens: the most tokens that are generated for a row, a thought before the answer included.
      template: a chat template, as data.template names it: a packaged one, a .jinja file, or Jinja text. None is the
        tokenizer's own, and takes the prompt of an example that has one as plain text.
      batch_size: the most prompts that are answered at a time; fewer if the memory has no room.
      today: the day that the template writes, as data.today; None: the day of asking.
    Returns:
      (the share of right answers, [(question, expected, answer)] in the order of `rows`). The question is the content
      of the message before the answer; expected and answer are the texts that were compared.
    Raises:
      ValueError: there are no rows, batch_size is not positive, a row does not end with a message and the assistant's
        answer to it, or a prompt and max_new_tokens are more than the model's positions.
    """
    if not rows:
        raise ValueError("exact_match: there are no rows")
    if batch_size < 1:
        raise ValueError(f"exact_match: batch_size = {batch_size}: must be positive")
    questions = questions_of(tokenizer, rows, max_new_tokens, template, model.config.context_length, today)
    ends = set(ends_of(model, trained_tokenizer(tokenizer, template)))
    longest = max(len(one.prompt) for one in questions) + max_new_tokens
    sampler = Sampler(model, length=longest, most_slots=min(batch_size, len(rows)))
    answers = []
    for row in sampler.run([one.prompt for one in questions], max_new_tokens, eos_token_ids=sorted(ends)):
        ids = _after(tokenizer, row.ids, questions[row.index].mark)
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        answers.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
    right = sum(answer == one.expected for answer, one in zip(answers, questions, strict=True))
    found = [(one.question, one.expected, answer) for one, answer in zip(questions, answers, strict=True)]
    return right / len(rows), found


class Question(NamedTuple):
    """A held-out row as a question to the model: the prompt as tokens, the right answer, and what the chat template
    writes around an answer, by which the answer is found in what the model generates."""

    prompt: list[int]
    """The token ids up to where the answer begins."""
    question: str
    """The text of the message before the answer."""
    expected: str
    """The row's answer, which is the right one, from behind the last `mark` in it, without white space around it."""
    mark: str
    """The last word (between white space) of the text that the template writes behind the generation prompt, directly
    before an answer, such as the end of a thought (</think>); "" if there is none. What the model generates up to its
    last occurrence is ignored."""


def questions_of(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any] | Example],
    max_new_tokens: int,
    template: str | None,
    positions: int,
    today: str | None = None,
) -> list[Question]:
    """Makes a Question of each row, in their order. `exact_match` asks them; `app.sampled_by` calls it before training,
    so that a row that cannot be asked is reported then, and to plan the memory for the longest prompt.

    Args:
      tokenizer: a fast Hugging Face tokenizer.
      rows: {"messages": [...]} or examples from `formats.normalize`; each ends with an answer, the expected one.
      max_new_tokens: the most tokens that are generated for a row, for which a prompt must leave room.
      template: a chat template, as data.template names it: a packaged one, a .jinja file, or Jinja text; None is the
        tokenizer's own, and takes the prompt of an example that has one as plain text.
      positions: the most tokens of prompt and answer that the model allows.
      today: the day that the template writes, as data.today; None: the day of asking.
    Raises:
      ValueError: a row does not end with a message and the assistant's answer to it, or its prompt is too long.
    """
    encoder = RowEncoder(tokenizer, template=template, today=today)
    questions = []
    for index, row in enumerate(rows):
        example = row if isinstance(row, Example) else normalize(row, "messages")
        messages = example.messages or []
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(f"exact_match: row {index} does not end with a question and the assistant's answer")
        prompt = encoder.encode_prompt(example).tolist()
        if len(prompt) + max_new_tokens > positions:
            raise ValueError(
                f"exact_match: the {len(prompt)} tokens of question {index} and max_new_tokens = {max_new_tokens} "
                f"are more than the model's {positions} positions: shorten one of them"
            )
        before = encoder.before_answer(example)
        mark = "".join(before.split()[-1:])
        answer = messages[-1]["content"]
        expected = (answer.rpartition(mark)[2] if mark else answer).strip()
        questions.append(Question(prompt, messages[-2]["content"], expected, mark))
    return questions


def _after(tokenizer: Tokenizer, ids: list[int], mark: str) -> list[int]:
    """The token ids of `ids` after the last occurrence of the text `mark` in their text: the answer without a thought
    that comes before it, and that may contain the mark too. All ids if `mark` is "" or does not occur. `exact_match`
    compares only these. `tokenizer` decodes them."""

    def count(length: int) -> int:
        """How often the mark that precedes an answer occurs in the text of the first `length` of the sampled token ids.
        `_after` finds by bisection the shortest `length` that has all of them, after which the answer begins."""
        return tokenizer.decode(ids[:length]).count(mark)

    found = count(len(ids)) if mark else 0
    return ids[bisect.bisect_left(range(len(ids) + 1), found, key=count) :] if found else ids
