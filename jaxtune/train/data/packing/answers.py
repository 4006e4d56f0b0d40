"""Sampled answers, packed with their prompts into rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch, Json
from jaxtune.train.data.tokens.pictures import DocumentPictures, RowPictures, rounded, with_room

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
    """(Tokens of a row, rows) that `answers` documents of up to `longest` tokens fill well: rows of at most 2,048
    tokens, or of one document. The rows are a multiple of `multiple`, and of 8, 4 or 2 if that fills them too.
    """
    shapes = []
    for shared in (8, 4, 2, 1):
        if answers % shared == 0:
            shape = _fullest(longest, answers, math.lcm(multiple, shared))
            shapes.append((math.prod(shape), shape))
            if answers * longest >= _WELL * math.prod(shape):
                return shape
    return min(shapes)[1]


def _fullest(longest: int, answers: int, multiple: int) -> tuple[int, int]:
    shapes = []
    for per_row in range(1, answers + 1):
        length = math.ceil(per_row * longest / _STEP) * _STEP
        if per_row > 1 and length > _USUAL:
            break
        rows = math.ceil(math.ceil(answers / per_row) / multiple) * multiple
        shapes.append((rows * length, rows, length))
    _, rows, length = min(shapes)
    return length, rows


def fill_warning(longest: int, answers: int, rows: int, length: int) -> list[str]:
    """A sentence if rows of `length` are less than 80 % full even of the longest documents and another length is
    better; else [].
    """
    fill = answers * longest / (rows * length)
    best, best_rows = packed_shape(longest, answers)
    if fill >= _FULL or answers * longest / (best_rows * best) < fill + 0.05:
        return []
    return [
        f"data.length = {length:,}: the longest prompts and answers, {longest:,} tokens, fill {fill:.0%} of the packed "
        f"rows, and the rest is padding; leave it out, or set {best:,}"
    ]


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer as it is packed: sampled, or in distillation perhaps the data's own."""

    prompt: int
    """Index in the source's prompts or rows."""
    prompt_ids: tuple[int, ...]
    """With what an environment added."""
    ids: tuple[int, ...]
    """With tools' texts and the token that ended it, if one did."""
    logps: tuple[float, ...]
    """Of each token, by the sampler at its temperature; 0 if not sampled, and in distillation."""
    finish_reason: str
    """"stop" if a token ended it, else "length"."""
    sampled: tuple[bool, ...] | None = None
    """For each of `ids` whether it is trained on; None: all."""
    advantage: float = 0.0
    """0 until rewards are known, and in distillation."""

    @property
    def mask(self) -> np.ndarray:
        """bool[tokens]: which are trained on."""
        return np.ones(len(self.ids), bool) if self.sampled is None else np.asarray(self.sampled, bool)

    @property
    def length(self) -> int:
        return int(self.mask.sum())

    def to_json(self) -> dict[str, Json]:
        lists: dict[str, Json] = {
            "prompt_ids": [*self.prompt_ids],
            "ids": [*self.ids],
            "logps": [*self.logps],
            "sampled": None if self.sampled is None else [*self.sampled],
        }
        return {"prompt": self.prompt, "finish_reason": self.finish_reason, "advantage": self.advantage, **lists}

    @classmethod
    def from_json(cls, saved: Mapping[str, object]) -> Answer:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class AnswerPictures:
    """The pictures of prompts, and a row's room for them."""

    prompts: DocumentPictures
    """Documents are prompts."""
    patches: int
    """Of a row."""
    most: int
    """Pictures of a row."""
    answers: int
    """Of a row."""

    @classmethod
    def of(
        cls, prompts: DocumentPictures, lengths: np.ndarray, answers: int, group: int, budget: int | None
    ) -> AnswerPictures:
        """With room for `answers` consecutive answers of a row, or as many as have room. Raises ConfigError if a
        prompt has too many patches.

          lengths: int64[prompts], tokens of each.
          group: consecutive answers to one prompt.
          budget: patches of a row; None: as the prompts need.
        """
        (patches, pictures), block = prompts.sizes(lengths), prompts.made_by.block
        largest, most = int(patches.max(initial=0)), int(pictures.max(initial=0))
        if budget is not None and largest > rounded(budget, block):
            raise ConfigError(
                f"data.patches_per_row = {budget:,}: the pictures of a prompt have {largest:,} patches; set at least "
                "as many, or lower data.max_pixels"
            )
        while budget is not None and answers > 1 and _prompts_of(answers, group) * largest > rounded(budget, block):
            answers -= 1
        prompts_of_row = _prompts_of(answers, group)
        room = rounded(prompts_of_row * largest if budget is None else budget, block)
        return cls(prompts, room, prompts_of_row * most, answers)


def _prompts_of(answers: int, group: int) -> int:
    """The most prompts of a row of consecutive answers, `group` to each."""
    if answers % group == 0 or group % answers == 0:
        return max(answers // group, 1)
    return (answers - 2) // group + 2


@dataclasses.dataclass(frozen=True)
class AnswerRows:
    """Packs answers, each after its prompt, into batches."""

    rows: int
    length: int
    most_answers: int
    """Most answers of a row."""
    masks_truncated: bool = False
    """Leave answers without an end out of the loss."""
    has_old: bool = False
    """Whether batches have OLD_LOGPS, filled later."""
    has_reference: bool = False
    """Whether batches have REFERENCE_LOGPS, filled later."""
    pictures: AnswerPictures | None = None
    """None: prompts have none."""

    def empty(self, rows: int) -> Batch:
        """A batch of padding, with zeros in `extra`."""
        batch = Batch.empty(rows, self.length)
        answer_shape, slots = (rows, self.most_answers), (rows, self.length)
        extra = {
            STARTS: np.zeros(answer_shape, np.int32),
            LENGTHS: np.zeros(answer_shape, np.int32),
            ADVANTAGES: np.zeros(answer_shape, np.float32),
            SAMPLED_LOGPS: np.zeros(slots, np.float32),
            SHARE: np.zeros(rows, np.float32),
            STEP_TOKENS: np.zeros(rows, np.float32),
        }
        if self.has_old:
            extra[OLD_LOGPS] = np.zeros(slots, np.float32)
        if self.has_reference:
            extra[REFERENCE_LOGPS] = np.zeros(slots, np.float32)
        batch = dataclasses.replace(batch, extra=extra)
        return (
            batch if self.pictures is None else with_room(batch, self.pictures.prompts.made_by, self.pictures.patches)
        )

    def counted(self, answer: Answer) -> int:
        """Tokens that count in the loss; 0 for an answer that `masks_truncated` leaves out."""
        return 0 if self.masks_truncated and answer.finish_reason == "length" else answer.length

    def packed(self, answers: Sequence[Answer], tokens: float) -> Batch:
        """A batch of one step's answers; log-probabilities of other models are zeros for the caller to fill. Raises
        ConfigError if an answer fits no row.

          tokens: by which the loss may be divided, counted tokens of the generation / steps_per_generation; SHARE
          spreads it over the rows.
        """
        batch, pictures = self.empty(self.rows), [RowPictures() for _ in range(self.rows)]
        for answer, placement in zip(answers, self.places_of(answers), strict=True):
            self._write(batch, *placement, answer, pictures[placement[0]])
        for row in pictures:
            row.wait()
        batch.extra[SHARE][:] = tokens / self.rows
        batch.extra[STEP_TOKENS][:] = sum(map(self.counted, answers)) / self.rows
        return batch

    def places_of(self, answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
        """(Row, index of the prompt's first token, number in the row) of each answer, by first fit, longest first, or
        with pictures in order, so that a row has those of few prompts. Raises ConfigError if one fits no row, as a
        rollout function or environment made prompts longer than planned.
        """
        used_tokens, answer_counts = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        sizes = [len(answer.prompt_ids) + len(answer.ids) for answer in answers]
        placements, order = [(0, 0, 0)] * len(answers), sorted(range(len(answers)), key=lambda i: (-sizes[i], i))
        for index in order if self.pictures is None else range(len(answers)):
            has_room = (used_tokens + sizes[index] <= self.length) & (answer_counts < self.most_answers)
            if self.pictures is not None:
                has_room &= np.arange(self.rows) == index // self.most_answers
            if not has_room.any():
                raise ConfigError(
                    f"data.length = {self.length:,}: the {len(answers):,} answers of a step with their prompts, "
                    f"{sum(sizes):,} tokens, do not fit into its {self.rows:,} rows, whose number was planned by the "
                    "prompts of the data rows. A rollout function or an environment made prompts longer: let it add "
                    f"less, or set data.length, at least {max(sizes):,}, so that a row has no room for two of the "
                    "data's longest prompts with objective.max_completion_length: each answer then has its own row"
                )
            row = int(np.argmax(has_room))
            placements[index] = row, int(used_tokens[row]), int(answer_counts[row])
            used_tokens[row] += sizes[index]
            answer_counts[row] += 1
        return placements

    def _write(
        self, batch: Batch, row: int, prompt_start: int, number: int, answer: Answer, pictures: RowPictures
    ) -> None:
        """Writes a prompt and answer in place, where `places_of` puts them. A position's weight is 1 if its target
        counts.
        """
        ids = np.array([*answer.prompt_ids, *answer.ids], np.int32)
        document_slice, begin = slice(prompt_start, prompt_start + len(ids)), prompt_start + len(answer.prompt_ids) - 1
        batch.tokens[row, document_slice] = ids
        batch.targets[row, prompt_start : prompt_start + len(ids) - 1] = ids[1:]
        batch.segment_ids[row, document_slice] = number + 1
        if self.pictures is None:
            batch.positions[row, document_slice] = np.arange(len(ids))
        else:
            self.pictures.prompts.write(batch, row, prompt_start, answer.prompt, len(ids), pictures)
        answer_slice = slice(begin, begin + len(answer.ids))
        batch.weights[row, answer_slice] = answer.mask if self.counted(answer) else 0.0
        batch.extra[SAMPLED_LOGPS][row, answer_slice] = answer.logps
        batch.extra[STARTS][row, number], batch.extra[LENGTHS][row, number] = begin, len(answer.ids)
        batch.extra[ADVANTAGES][row, number] = answer.advantage
