"""Sampled answers (Answer), how they are sampled (Settings), and their packing with their prompts into the rows of a
batch (AnswerRows), for objectives that learn from rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtune.train.data.batches import Batch, Json
from jaxtune.train.objectives.reward_functions import Turns

# The names of the arrays in a batch's `extra`; they are [rows, answers of a row] unless another shape is given. An
# answer's place is its number within its row, from 0.
STARTS = "answer_starts"  # int32: index in the row of the token before the answer's first
LENGTHS = "answer_lengths"  # int32: tokens of the answer; 0 where the row has no answer of that number
ADVANTAGES = "advantages"  # float32
SAMPLED_LOGPS = "sampled_logps"  # float32 [rows, length]: at each position, that of its target under the sampler
OLD_LOGPS = "old_logps"  # float32 [rows, length]: under the model that the generation was sampled with
REFERENCE_LOGPS = "reference_logps"  # float32 [rows, length]: under the reference of the divergence
SHARE = "share"  # float32 [rows]: the row's part of the count by which a mean over the tokens of a generation divides


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that answers are sampled for, from one row."""

    given: Turns
    """Text or a list of messages, as reward functions get it."""
    ids: tuple[int, ...]
    """Its token ids, up to the begin of the answer."""
    columns: Mapping[str, object]
    """The row's other columns, for reward functions."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How answers are sampled; names and defaults are TRL's."""

    num_generations: int = 8
    """Answers to each prompt: a group, within which rewards are compared."""
    max_completion_length: int = 512
    """The most tokens of an answer."""
    temperature: float = 1.0
    """The logits are divided by it when answers are sampled, and when their log-probabilities are computed."""
    top_k: int = 0
    """Only this number of the most probable tokens can be sampled; 0 is all."""
    top_p: float = 1.0
    """Only the most probable tokens with this total probability can be sampled."""
    min_p: float = 0.0
    """Only tokens with at least this share of the highest probability can be sampled."""
    repetition_penalty: float = 1.0
    """The penalty on tokens that the prompt or the answer already has; 1 is none."""

    mask_truncated_completions: bool = False
    """Whether answers that reach max_completion_length without an end are left out of the loss."""

    num_iterations: int = 1
    """How often each answer is trained on."""

    steps_per_generation: int = 1
    """The number of steps among which the answers of a generation are divided."""

    slots: int = 64
    """The most answers that are sampled at a time."""

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "num_iterations", "steps_per_generation", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.num_generations < 2:
            raise ValueError(f"num_generations = {self.num_generations}: answers are compared, so it takes 2 or more")
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: must be above 0, or all answers to a prompt are one")

    @property
    def steps(self) -> int:
        """The number of optimizer steps that use the answers of one generation."""
        return self.steps_per_generation * self.num_iterations


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled answer and its advantage."""

    prompt: int
    """The index of its prompt in `SampledAnswers.prompts`."""
    prompt_ids: tuple[int, ...]
    """The token ids before its first one: those of the prompt, which an environment may have added to."""
    ids: tuple[int, ...]
    """Its token ids, with the token that ended it, if one did, and with the tokens of what tools answered."""
    logps: tuple[float, ...]
    """The log-probability of each token that the sampler reported, at the sampling temperature; 0 for tokens that were
    not sampled."""
    finish_reason: str
    """Why it ended: "length" if it reached the most tokens."""
    sampled: tuple[bool, ...] | None = None
    """Whether each token was sampled from the model, and not written by a tool; None: all were. The others have no part
    in the loss."""
    advantage: float = 0.0
    """How much better its reward is than those of its group (`Advantages`); 0 until the rewards are known."""

    @property
    def mask(self) -> np.ndarray:
        """bool[tokens]: `sampled`, or ones if that is None."""
        return np.ones(len(self.ids), bool) if self.sampled is None else np.asarray(self.sampled, bool)

    @property
    def length(self) -> int:
        """The number of its tokens that were sampled."""
        return int(self.mask.sum())

    def to_json(self) -> dict[str, Json]:
        """The fields by name as JSON values, for a checkpoint, from which `from_json` makes the same answer."""
        lists: dict[str, Json] = {
            "prompt_ids": [*self.prompt_ids],
            "ids": [*self.ids],
            "logps": [*self.logps],
            "sampled": None if self.sampled is None else [*self.sampled],
        }
        return {"prompt": self.prompt, "finish_reason": self.finish_reason, "advantage": self.advantage, **lists}

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> Answer:
        """The answer whose `to_json` is `saved`."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """Packs answers, each with its prompt, into the rows of a batch."""

    rows: int
    """The number of rows of a batch."""
    length: int
    """The number of tokens of a row."""
    places: int
    """The most answers of a row."""
    masks_truncated: bool = False
    """Whether answers that reached the most tokens are left out of the loss."""
    has_old: bool = False
    """Whether batches have OLD_LOGPS."""
    has_reference: bool = False
    """Whether batches have REFERENCE_LOGPS."""

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows without answers, as new numpy arrays, with zeros in all the arrays of `extra` that
        batches have."""
        batch = Batch.empty(rows, self.length)
        places, slots = (rows, self.places), (rows, self.length)
        extra = {
            STARTS: np.zeros(places, np.int32),
            LENGTHS: np.zeros(places, np.int32),
            ADVANTAGES: np.zeros(places, np.float32),
            SAMPLED_LOGPS: np.zeros(slots, np.float32),
            SHARE: np.zeros(rows, np.float32),
        }
        if self.has_old:
            extra[OLD_LOGPS] = np.zeros(slots, np.float32)
        if self.has_reference:
            extra[REFERENCE_LOGPS] = np.zeros(slots, np.float32)
        return dataclasses.replace(batch, extra=extra)

    def counted(self, answer: Answer) -> int:
        """The number of tokens of an answer that count in the loss: all that were sampled, or 0 if the answer was cut
        off and such are masked."""
        return 0 if self.masks_truncated and answer.finish_reason == "length" else answer.length

    def packed(self, answers: Sequence[Answer], tokens: float) -> Batch:
        """The batch of these answers, those of one step. tokens: the counted tokens of the generation divided by
        steps_per_generation, by which GRPO can divide the step's loss; they are spread over the rows as SHARE."""
        batch = self.empty(self.rows)
        for answer, place in zip(answers, self.places_of(answers), strict=True):
            self._write(batch, *place, answer)
        batch.extra[SHARE][:] = tokens / self.rows
        return batch

    def places_of(self, answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
        """Where each of `answers` goes: a list of (row, index in the row of the prompt's first token, number of the
        answer within the row), by first fit with the longest first. All of them must fit into the rows of a batch."""
        used, filled = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        sizes = [len(answer.prompt_ids) + len(answer.ids) for answer in answers]
        found = [(0, 0, 0)] * len(answers)
        for index in sorted(range(len(answers)), key=lambda i: (-sizes[i], i)):
            row = int(np.argmax((used + sizes[index] <= self.length) & (filled < self.places)))
            found[index] = row, int(used[row]), int(filled[row])
            used[row] += sizes[index]
            filled[row] += 1
        return found

    def _write(self, batch: Batch, row: int, at: int, place: int, answer: Answer) -> None:
        """Writes a prompt and its answer into row `row` of a batch, from token `at` of the row on, as the answer number
        `place` (from 0) of the row."""
        ids = np.array([*answer.prompt_ids, *answer.ids], np.int32)
        here, begin = slice(at, at + len(ids)), at + len(answer.prompt_ids) - 1
        batch.tokens[row, here] = ids
        batch.targets[row, at : at + len(ids) - 1] = ids[1:]
        batch.segment_ids[row, here] = place + 1
        batch.positions[row, here] = np.arange(len(ids))
        answered = slice(begin, begin + len(answer.ids))
        batch.weights[row, answered] = answer.mask if self.counted(answer) else 0.0
        batch.extra[SAMPLED_LOGPS][row, answered] = answer.logps
        batch.extra[STARTS][row, place], batch.extra[LENGTHS][row, place] = begin, len(answer.ids)
        batch.extra[ADVANTAGES][row, place] = answer.advantage
