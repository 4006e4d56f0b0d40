"""The batch source of on-policy distillation: a row is trained on with an answer that the student samples just before
the step or, in a share of cases, with the data's.

What is sampled depends on seed, step and weights alone: an interrupted run continues to the same bits, without records.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan
from jaxtune.system.sealed import crc32
from jaxtune.train.config import ConfigError, DataConfig
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.batches import Batch, BatchSource, Json, Rollout, SampledRows, epoch_order
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.answers import Answer, AnswerRows, fill_warning, packed_shape
from jaxtune.train.data.rendering.formats import detect_format, normalize, refuse_excluded
from jaxtune.train.data.rendering.templates import RowEncoder
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.sampled.prompts import AnswerSteps, prompt_of, read_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PLACES = 4  # a row has at most this many times the number of longest documents that fit into it
_PRINT_EVERY, _CUT_OFF = 10, 0.5  # steps between two samples on the screen; the share of cut answers that is warned of
_SHOWN = 160  # characters of a prompt or an answer on the screen


@dataclasses.dataclass(frozen=True)
class TokenisedRow:
    """A tokenised data row."""

    prompt: tuple[int, ...]
    """Ids up to the answer."""
    own: tuple[int, ...] = ()
    """Prompt and the data's answer; () if all are sampled."""
    mask: tuple[bool, ...] = ()
    """For each of `own` whether it is trained on."""


class OwnSamples(BatchSource):
    """A step has `documents` data rows (the config's rows_per_step), each with an answer sampled from the student or,
    with probability 1 - on_policy, the data's; `rows_per_step` packed rows of `length` tokens hold the longest.

    Raises ConfigError if the longest prompt leaves no room for max_completion_length.

      rows: each once an epoch, in a drawn order.
      ends: token ids that end an answer.
      rows_multiple: packed rows of a step are a multiple of it.
      chosen_length: whether `packed_shape` and not the user chose `length`.
    """

    needs_model = True  # `batch_at` is given the model, which samples
    samples_together = True

    def __init__(
        self,
        rows: Sequence[TokenisedRow],
        objective: Distill,
        *,
        documents: int,
        length: int,
        seed: int,
        decode: Callable[[Sequence[int]], str],
        ends: Sequence[int],
        rows_multiple: int = 1,
        chosen_length: bool = False,
    ):
        self.rows, self.objective, self.documents, self.seed = rows, objective, documents, seed
        most, longest = objective.drawing.max_completion_length, max(len(row.prompt) for row in rows)
        if longest + most > length:
            raise ConfigError(
                f"data.length = {length}: the longest prompt has {longest} tokens, and an answer may have "
                f"objective.max_completion_length = {most}; a row holds both: set at least {longest + most}, or "
                "shorten one of them"
            )
        document = max(longest + most, max(len(row.own) for row in rows))
        full = length // document
        self.rows_per_step = math.ceil(documents / full / rows_multiple) * rows_multiple
        self._fill = [] if chosen_length else fill_warning(document, documents, self.rows_per_step, length)
        self.sampled_rows = SampledRows.of(objective.drawing, longest + most, documents)
        self._plan: SlotPlan | None = None
        self._rows = AnswerRows(self.rows_per_step, length, min(documents, _PLACES * full))
        self._decode, self._ends = decode, sorted(ends)
        self._made: tuple[int, Batch] | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        self._rollouts: tuple[int, list[Rollout]] = (-1, [])
        self._news: list[str] = []

    @property
    def length(self) -> int:
        return self._rows.length

    @property
    def max_documents(self) -> int:
        """4 times the longest ones that fit a packed row, at most `documents`; packing keeps to it however short
        answers are.
        """
        return self._rows.most_answers

    @property
    def steps_per_epoch(self) -> int:
        """Rounded up: an epoch's last step may have rows of the next."""
        return -(-len(self.rows) // self.documents)

    def empty(self, rows: int) -> Batch:
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """Samples at the first call for a step; without `extra`. model: may be None if the batch is made."""
        if self._made is None or self._made[0] != step:
            assert model is not None, "needs_model is True, so the model is given"
            batch = self._rows.packed(self._answers(step, model), 0.0)
            self._made = step, dataclasses.replace(batch, extra={})
        return self._made[1]

    def sources_at(self, step: int) -> list[str]:
        return [f"answers sampled for step {step}"]

    def resume(self, step: int, position: Json) -> None:
        """Forgets the last batch, so that the restored model samples anew."""
        self._made = None

    def identity(self) -> dict[str, Json]:
        ids = (np.asarray([*row.prompt, -1, *row.own], np.int32).tobytes() for row in self.rows)
        digest = crc32(piece + bytes(row.mask) for piece, row in zip(ids, self.rows, strict=True))
        return {"prompts": len(self.rows), "tokens_crc32": digest}

    def first_prompt(self) -> Sequence[int]:
        return self.rows[0].prompt

    def described(self, total_steps: int) -> list[str]:
        share, longest = self.objective.on_policy, max(len(row.prompt) for row in self.rows)
        sampled_share = (
            "all answers are sampled from the student" if share == 1 else f"{share:.0%} of answers are sampled"
        )
        most = f"with at most {self.objective.drawing.max_completion_length:,} tokens"
        return [
            f"rows: {len(self.rows):,}, with prompts of at most {longest:,} tokens; {sampled_share}, {most}",
            f"{total_steps:,} steps of {self.documents:,} rows of the data, packed into rows of {self.length:,} tokens",
        ]

    def columns(self) -> dict[str, str]:
        return {"prompts": getattr(self.rows, "columns", "")}

    def warnings(self) -> list[str]:
        return self._fill

    def limit_slots(self, plan: SlotPlan) -> None:
        self._plan = plan

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def metrics_at(self, step: int) -> dict[str, float]:
        """ "on_policy", the sampled share, and of sampled answers TRL's completions/* and "sampling_seconds"; given out
        once.
        """
        return self._metrics.pop(step, {})

    def rollouts_at(self, step: int) -> list[Rollout]:
        rollout_step, rows = self._rollouts
        self._rollouts = (-1, []) if rollout_step == step else self._rollouts
        return rows if rollout_step == step else []

    # ---- a step

    def _chosen(self, step: int) -> list[int]:
        count, positions = len(self.rows), range(step * self.documents, (step + 1) * self.documents)
        orders = {
            epoch: epoch_order(count, self.seed, epoch) for epoch in {position // count for position in positions}
        }
        return [int(orders[position // count][position % count]) for position in positions]

    def _answers(self, step: int, model: Callable[[], Decoder]) -> list[Answer]:
        """The rows of `step` with their answers; `model` is not called if none is sampled."""
        row_indices = self._chosen(step)
        draws = [_draws(self.seed, step, position) for position in range(len(row_indices))]
        sampled_positions = [position for position, (_, draw) in enumerate(draws) if draw < self.objective.on_policy]
        answers = [_with_own_answer(index, self.rows[index]) for index in row_indices]
        self._metrics[step] = {"on_policy": len(sampled_positions) / len(row_indices)}
        if sampled_positions:
            sampled = self._sampled(
                model(),
                step,
                [row_indices[sampled_position] for sampled_position in sampled_positions],
                [draws[sampled_position][0] for sampled_position in sampled_positions],
            )
            for position, answer in zip(sampled_positions, sampled, strict=True):
                answers[position] = answer
        return answers

    def _sampled(self, model: Decoder, step: int, row_indices: Sequence[int], seeds: Sequence[int]) -> list[Answer]:
        """Samples answers to these rows, in order, and keeps metrics and lines. seeds: of each answer."""
        # The weights are waited for, so that the memory of the step before is free and counts as room for slots.
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        how, start_time = self.objective.drawing, time.monotonic()
        prompts = [self.rows[index].prompt for index in row_indices]
        longest = max(map(len, prompts)) + how.max_completion_length
        slots = how.slots if self._plan is None else min(how.slots, self._plan.slots)
        sampler = Sampler(
            model,
            length=longest,
            most_slots=Sharing.of(model).slots(len(row_indices), slots),
            most_converted=None if self._plan is None else self._plan.converted_layers,
            cache=how.cache,
        )
        rows = sampler.run(
            prompts,
            how.max_completion_length,
            self.objective.sampling_temperature,
            seed=list(seeds),
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
            repetition_penalty=how.repetition_penalty,
            eos_token_ids=self._ends,
        )
        answers = [
            Answer(index, prompt, tuple(row.ids), (0.0,) * len(row.ids), row.finish_reason)
            for index, prompt, row in zip(row_indices, prompts, rows, strict=True)
        ]
        del sampler, rows  # frees the caches, for which the step has no room
        lengths = np.array([answer.length for answer in answers])
        cut_share = float(np.mean([answer.finish_reason == "length" for answer in answers]))
        self._metrics[step] |= {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": cut_share,
            "sampling_seconds": time.monotonic() - start_time,
        }
        self._rollouts = (
            step,
            [
                {
                    "step": step + 1,
                    "row": answer.prompt,
                    "prompt": self._decode(answer.prompt_ids),
                    "answer": self._decode(answer.ids),
                    "tokens": answer.length,
                    "ended": answer.finish_reason,
                }
                for answer in answers
            ],
        )
        if step % _PRINT_EVERY == 0:
            self._tell(answers[0], cut_share)
        return answers

    def _tell(self, answer: Answer, cut_share: float) -> None:
        """Lines for `news`: a sample, and a warning if more than half of the answers are cut."""
        prompt_text, answer_text = (" ".join(self._decode(ids).split()) for ids in (answer.prompt_ids, answer.ids))
        self._news.append(f"a sample: {prompt_text[-_SHOWN:]} -> {answer_text[:_SHOWN]}")
        if cut_share > _CUT_OFF:
            self._news.append(
                f"warning: {cut_share:.0%} of answers reach objective.max_completion_length = "
                f"{self.objective.drawing.max_completion_length}; raise it, or ask for shorter answers"
            )


def own_samples(
    objective: Distill,
    rows: object,
    tokenizer: PreTrainedTokenizerFast,
    steps: AnswerSteps,
    ends: Sequence[int],
    positions: int,
) -> OwnSamples:
    """Reads a run's rows and makes its source.

    Raises ConfigError for an unusable row (unless on_bad_row is "skip"), too short data.length, or tokenised rows,
    whose prompts are unknown; ValueError if there is no such file.

      ends: token ids that end an answer.
      positions: most tokens of prompt and answer that the model allows.
      rows: a path, data set's name, or list of dicts.
    """
    if isinstance(rows, TokenDataset):
        raise ConfigError(
            f"objective.on_policy = {objective.on_policy}: rows that are tokenised already have no prompts to answer; "
            "give the rows themselves, or set objective.on_policy: 0"
        )
    data, free = steps.data, isinstance(steps.data.length, Unset)
    length = positions if free else min(data.length, positions)
    reads = _Reading(tokenizer, data, length, length - objective.drawing.max_completion_length, objective.on_policy < 1)
    asked_rows, row, multiple = read_each(rows, data, "data.train", reads), data.length, steps.rows_multiple
    if free:
        longest = max(
            max(len(asked_row.prompt) + objective.drawing.max_completion_length, len(asked_row.own))
            for asked_row in asked_rows
        )
        row, multiple = packed_shape(longest, steps.answers, multiple)
    return OwnSamples(
        asked_rows,
        objective,
        documents=steps.answers,
        length=row,
        chosen_length=free,
        seed=steps.seed,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        ends=ends,
        rows_multiple=multiple,
    )


class _Reading:
    """Makes a TokenisedRow of a row of columns. RowError for a row that cannot be asked, is too long, or has no answer
    where one is trained on.

    length: most tokens with the data's answer.
    most_tokens: of a prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, data: DataConfig, length: int, most_tokens: int, needs_answer: bool
    ):
        names = (
            "template",
            "today",
            "train_on",
            "instruction_part",
            "response_part",
            "last_response_only",
            "mask_spans",
        )
        self._encoder = RowEncoder(tokenizer, **{name: getattr(data, name) for name in names})
        self._length, self._most_tokens, self._answered = length, most_tokens, needs_answer

    def __call__(self, row: Mapping[str, object], file: str) -> TokenisedRow:
        room_words = "objective.max_completion_length data.length leaves"
        prompt = prompt_of(row, self._encoder, self._most_tokens, room_words, file=file).ids
        if not self._answered:
            return TokenisedRow(prompt)
        refuse_excluded(row)
        [encoded] = self._encoder.encode([normalize(row, detect_format(row))])
        if isinstance(encoded, RowError):
            raise encoded
        if not encoded.mask[1:].any():
            raise RowError("it has no answer of its own, which objective.on_policy below 1 trains on too")
        if len(encoded.tokens) > self._length:
            raise RowError(f"with its answer it has {len(encoded.tokens):,} tokens, more than {self._length:,}")
        return TokenisedRow(prompt, tuple(encoded.tokens.tolist()), tuple(encoded.mask.tolist()))


def _with_own_answer(index: int, row: TokenisedRow) -> Answer:
    """The data's answer, from the first trained token on; empty if only prompts were tokenised."""
    first = row.mask.index(True, 1) if row.own else 0
    ids = row.own[first:]
    return Answer(index, row.own[:first], ids, (0.0,) * len(ids), "stop", sampled=row.mask[first:])


def _draws(seed: int, step: int, position: int) -> tuple[int, float]:
    """(Sampling seed of 31 bits, number in [0, 1): sampled if below on_policy), the same for the same arguments."""
    raw = np.random.Philox(key=np.array([seed, step], np.uint64), counter=position).random_raw(2)
    return int(raw[0] >> np.uint64(33)), float(raw[1] >> np.uint64(11)) / 2.0**53
