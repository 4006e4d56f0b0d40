"""Data of objectives that train on sampled answers, to learn from rewards or by on-policy distillation.

`Prompt` is a data row's prompt with the row's other columns, which functions that score answers read. `Answer` is an
answer with its prompt's token ids, and `AnswerRows` packs answers, each after its prompt, into the rows of a batch.
`Settings` say how the answers of a run that learns from rewards are sampled, and in how many steps each is trained on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch, Json
from jaxtune.train.objectives.reward_functions import Turns

_FULL, _WELL = 0.8, 0.9  # shares of a row: below which its length is warned of, and that is sought

# The names of the arrays in a batch's `extra`; they are [rows, answers of a row] unless another shape is given. An
# answer's place is its number within its row, from 0.
STARTS = "answer_starts"  # int32: index in the row of the token before the answer's first
LENGTHS = "answer_lengths"  # int32: tokens of the answer; 0 where the row has no answer of that number
ADVANTAGES = "advantages"  # float32
SAMPLED_LOGPS = "sampled_logps"  # float32 [rows, length]: at each position, that of its target under the sampler
OLD_LOGPS = "old_logps"  # float32 [rows, length]: under the model that the generation was sampled with
REFERENCE_LOGPS = "reference_logps"  # float32 [rows, length]: under the reference of the divergence
SHARE = "share"  # float32 [rows]: the row's part of the count by which a mean over the tokens of a generation divides
STEP_TOKENS = "step_tokens"  # float32 [rows]: the row's equal part of the step's own counted tokens


_USUAL, _STEP = 2048, 64  # tokens of a row that is not longer than its documents need; rows have a multiple of 64


def packed_shape(longest: int, answers: int, multiple: int = 1) -> tuple[int, int]:
    """(tokens of a row, number of rows) in which `answers` documents of up to `longest` tokens fill the rows of a step
    well: rows of at most 2,048 tokens, or of one document. multiple: the number of rows is one of it, and if that fills
    the rows too, of 8, 4 or 2, so that devices and micro-batches can share them."""
    shapes = []
    for shared in (8, 4, 2, 1):
        if answers % shared == 0:
            shape = _fullest(longest, answers, math.lcm(multiple, shared))
            shapes.append((math.prod(shape), shape))
            if answers * longest >= _WELL * math.prod(shape):
                return shape
    return min(shapes)[1]


def _fullest(longest: int, answers: int, multiple: int) -> tuple[int, int]:
    """The shape of `packed_shape` with the fewest tokens."""
    shapes = []
    for each in range(1, answers + 1):
        length = math.ceil(each * longest / _STEP) * _STEP
        if each > 1 and length > _USUAL:
            break
        rows = math.ceil(math.ceil(answers / each) / multiple) * multiple
        shapes.append((rows * length, rows, length))
    _, rows, length = min(shapes)
    return length, rows


def fill_warning(longest: int, answers: int, rows: int, length: int) -> list[str]:
    """A sentence if `rows` of data.length = `length` are less than 80 % full even of the longest documents, and another
    length fills them better; else []."""
    fill = answers * longest / (rows * length)
    best, others = packed_shape(longest, answers)
    if fill >= _FULL or answers * longest / (others * best) < fill + 0.05:
        return []
    return [
        f"data.length = {length:,}: the longest prompts and answers, {longest:,} tokens, fill {fill:.0%} of the packed "
        f"rows, and the rest is padding; leave it out, or set {best:,}"
    ]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The prompt of a data row, to which answers are sampled, in a run or in an evaluation by generated answers.
    `prompts.prompt_of` makes it."""

    given: Turns
    """The prompt as reward functions get it: text, or a list of messages."""
    ids: tuple[int, ...]
    """Its token ids, up to where the answer begins."""
    columns: Mapping[str, object]
    """{name: value} of the row's other columns, which functions that score answers and the `reset` of environments may
    read. Tools do not get them."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the answers of a run that learns from rewards are sampled, and how often they are trained on. All names
    except `slots` are TRL's. The answers of one generation are sampled at once, by one state of the weights.

    Raises:
      ValueError: a number of answers, steps, tokens or slots is too small, or the temperature is not above 0.
    """

    num_generations: int = 8
    """The number of answers to each prompt, at least 2; they are a group, within which rewards are compared."""
    max_completion_length: int = 512
    """The most tokens of an answer, with those of what tools returned."""
    temperature: float = 1.0
    """The logits are divided by it when answers are sampled, and when their log-probabilities are computed."""
    top_k: int = 0
    """Only this number of the most probable tokens can be sampled; 0 is all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities add up to top_p can be sampled; 1 is all."""
    min_p: float = 0.0
    """Only tokens whose probability is at least min_p times the highest one can be sampled; 0 is all."""
    repetition_penalty: float = 1.0
    """The penalty on tokens that the prompt or the answer already has: above 1 they become less probable; 1 is none."""

    mask_truncated_completions: bool = False
    """Whether answers that reach max_completion_length without an end are left out of the loss."""

    num_iterations: int = 1
    """The number of steps in which each answer is trained on."""

    steps_per_generation: int = 1
    """The number of steps among which the answers of a generation are divided, so that each trains on a part of
    them."""

    slots: int = 64
    """The most answers that a device samples at a time; fewer are sampled if there is too little memory."""

    def __post_init__(self) -> None:
        """Raises ValueError if a number is below its minimum (2 for num_generations, else 1), or the temperature is not
        above 0."""
        for name in ("max_completion_length", "num_iterations", "steps_per_generation", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.num_generations < 2:
            raise ValueError(f"num_generations = {self.num_generations}: answers are compared, so it takes 2 or more")
        if self.temperature <= 0:
            raise ValueError(f"temperature = {self.temperature}: must be above 0, or all answers to a prompt are one")

    @property
    def steps(self) -> int:
        """The number of optimizer steps from one generation (round of sampling) to the next, in which the answers of
        one round are used: steps_per_generation times num_iterations. The batch source samples anew after as many, and
        GRPO asks by it whether answers are used more than once (`GRPO.reuses`)."""
        return self.steps_per_generation * self.num_iterations


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to a prompt, as it is packed into a batch: one that was sampled, or, in on-policy distillation, perhaps
    the answer that the data set has. Runs that learn from rewards save it in checkpoints."""

    prompt: int
    """The index of its prompt in the batch source's list of all prompts or data rows (`SampledAnswers.prompts`,
    `OwnSamples.asked`)."""
    prompt_ids: tuple[int, ...]
    """The token ids of its prompt, with what an environment may have added to it."""
    ids: tuple[int, ...]
    """The token ids of the answer, with those of what tools returned, and with the token that ended it, if one did."""
    logps: tuple[float, ...]
    """The log-probability of each token that the sampler reported, at the sampling temperature; 0 for tokens that were
    not sampled, and for all tokens in distillation, which does not need them."""
    finish_reason: str
    """Why the answer ended: "stop" if a token ended it, "length" if it reached the most tokens. One of a rollout
    function has "length" whenever its last token is none that ends an answer."""
    sampled: tuple[bool, ...] | None = None
    """For each token of `ids`: True if it is trained on; False if it is left out of the loss, because a tool returned
    it, or because it is not a trained token of the data set's own answer. None: all are trained on.
    `AnswerRows.masks_truncated` can leave out the whole answer besides; this field does not know of it."""
    advantage: float = 0.0
    """How much better its reward is than those of its group, the answers to the same prompt; 0 until the rewards are
    known, and in distillation."""

    @property
    def mask(self) -> np.ndarray:
        """bool[tokens], with an entry for each of `ids`: True where the token is trained on: the model sampled it, or
        it is a trained token of the data set's own answer. It is `sampled`, or all True if that is None.
        `AnswerRows` makes the weights of a batch of it."""
        return np.ones(len(self.ids), bool) if self.sampled is None else np.asarray(self.sampled, bool)

    @property
    def length(self) -> int:
        """The number of tokens of the answer that are trained on; of a sampled one, those that the model sampled.
        Metrics count the answer's tokens by it, which leaves out the results of tools; the loss does so by
        `AnswerRows.counted`, which is 0 for an answer that is left out as a whole."""
        return int(self.mask.sum())

    def to_json(self) -> dict[str, Json]:
        """{name of a field of this class: its value as JSON}, with lists in place of tuples, for a checkpoint, from
        which `from_json` makes the same answer."""
        lists: dict[str, Json] = {
            "prompt_ids": [*self.prompt_ids],
            "ids": [*self.ids],
            "logps": [*self.logps],
            "sampled": None if self.sampled is None else [*self.sampled],
        }
        return {"prompt": self.prompt, "finish_reason": self.finish_reason, "advantage": self.advantage, **lists}

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> Answer:
        """The answer of which `saved` is what `to_json` returned, with tuples in place of lists; the batch source of a
        run that is resumed within a generation makes its answers so."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """Packs answers, each after its prompt, into the rows of a batch, for the batch sources of sampled answers
    (`SampledAnswers`, `OwnSamples`). `packed` makes a batch, and `empty` one of the same form without answers, with
    which the train step is compiled. `OwnSamples` drops the arrays in `extra`, and compiles with `Batch.empty`."""

    rows: int
    """The number of rows of a batch that `packed` makes."""
    length: int
    """The number of tokens of a row."""
    places: int
    """The most answers in a row; the arrays for each answer have the shape [rows, places]."""
    masks_truncated: bool = False
    """True: answers that reached the most tokens without an end are left out of the loss. False: they count."""
    has_old: bool = False
    """Whether batches have an array for the log-probabilities under the model that sampled, filled later
    (OLD_LOGPS)."""
    has_reference: bool = False
    """Whether batches have an array for the log-probabilities under the reference model, filled later
    (REFERENCE_LOGPS)."""

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding without answers, as new numpy arrays, which are then filled; the train step
        is compiled for its shapes, and `packed` begins with it. Its `extra` has zeros for all further arrays that
        batches of answers have, such as advantages."""
        batch = Batch.empty(rows, self.length)
        places, slots = (rows, self.places), (rows, self.length)
        extra = {
            STARTS: np.zeros(places, np.int32),
            LENGTHS: np.zeros(places, np.int32),
            ADVANTAGES: np.zeros(places, np.float32),
            SAMPLED_LOGPS: np.zeros(slots, np.float32),
            SHARE: np.zeros(rows, np.float32),
            STEP_TOKENS: np.zeros(rows, np.float32),
        }
        if self.has_old:
            extra[OLD_LOGPS] = np.zeros(slots, np.float32)
        if self.has_reference:
            extra[REFERENCE_LOGPS] = np.zeros(slots, np.float32)
        return dataclasses.replace(batch, extra=extra)

    def counted(self, answer: Answer) -> int:
        """The number of tokens of an answer that count in the loss: all that are trained on (`Answer.length`); but 0 if
        the answer reached the most tokens and `masks_truncated` is True. An answer of 0 gets no weights in a batch, and
        the batch source counts the tokens of a generation by it, by which a loss may be divided."""
        return 0 if self.masks_truncated and answer.finish_reason == "length" else answer.length

    def packed(self, answers: Sequence[Answer], tokens: float) -> Batch:
        """Packs `answers`, those of one step, into a new batch of numpy arrays. The arrays of log-probabilities under
        other models, if batches have them, are zeros that the caller fills. tokens: a number by which the loss of the
        step may be divided: the counted tokens of the whole generation (round of sampling) / steps_per_generation;
        0 for a batch that is only scored, and in distillation, where nothing is divided by it. The array SHARE
        divides it equally over the rows, so that devices that have some of the rows can add it up. Raises ConfigError
        if an answer fits into no row (`places_of`)."""
        batch = self.empty(self.rows)
        for answer, place in zip(answers, self.places_of(answers), strict=True):
            self._write(batch, *place, answer)
        batch.extra[SHARE][:] = tokens / self.rows
        batch.extra[STEP_TOKENS][:] = sum(map(self.counted, answers)) / self.rows
        return batch

    def places_of(self, answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
        """Where each of `answers` is written, in their order: a list of (row, index in the row of the prompt's first
        token, number of the answer within the row, from 0). The longest answer with its prompt is placed first, each in
        the first row with room. Answers no longer than those by which the number of rows was planned always fit.
        `packed` writes answers by it, and RLOO's batch source finds by it the values of each answer in a packed row.

        Raises:
          ConfigError: one fits into no row, because a rollout function or an environment made prompts longer.
        """
        used, filled = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        sizes = [len(answer.prompt_ids) + len(answer.ids) for answer in answers]
        found = [(0, 0, 0)] * len(answers)
        for index in sorted(range(len(answers)), key=lambda i: (-sizes[i], i)):
            has_room = (used + sizes[index] <= self.length) & (filled < self.places)
            if not has_room.any():
                raise ConfigError(
                    f"data.length = {self.length:,}: the {len(answers):,} answers of a step with their prompts, "
                    f"{sum(sizes):,} tokens, do not fit into its {self.rows:,} rows, whose number was planned by the "
                    "prompts of the data rows. A rollout function or an environment made prompts longer: let it add "
                    f"less, or set data.length, at least {max(sizes):,}, so that a row has no room for two of the "
                    "data's longest prompts with objective.max_completion_length: each answer then has its own row"
                )
            row = int(np.argmax(has_room))
            found[index] = row, int(used[row]), int(filled[row])
            used[row] += sizes[index]
            filled[row] += 1
        return found

    def _write(self, batch: Batch, row: int, at: int, place: int, answer: Answer) -> None:
        """Writes a prompt and its answer, in place, into the arrays of `batch` and its `extra` (all but SHARE and the
        log-probabilities under other models), at a place from `places_of`. `packed` calls it for each answer. The
        weight of a position is 1 if its target (the next token) is a token of the answer that counts in the loss, else
        0.

        Args:
          batch: the batch.
          row: the index of the row.
          at: the index in the row of the prompt's first token.
          place: the number of the answer within the row, from 0.
          answer: the answer, with its prompt.
        """
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
