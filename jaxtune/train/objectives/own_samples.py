"""The batch source of on-policy distillation: a data row is trained on with an answer that the student samples just
before the step, or, in a share of cases, with the answer that the data set has. `OwnSamples` is the source, and
`own_samples` makes it of a run's rows; `_Reading` makes an `Asked` of each. `_draws` decides which answers are sampled;
the others are the data set's (`_with_own_answer`).

With the same rows and options, what is sampled depends on the seed, the number of the step and the weights alone, so an
interrupted run continues to the same bits, and a checkpoint needs to record nothing."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan
from jaxtune.train.config import ConfigError, DataConfig, TrainConfig
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.batches import Batch, BatchSource, Json, Rollout, SampledRows, epoch_order
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.formats import detect_format, normalize, refuse_excluded
from jaxtune.train.data.row_errors import RowError
from jaxtune.train.data.templates import RowEncoder
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.packed_answers import Answer, AnswerRows, fill_warning, packed_shape
from jaxtune.train.objectives.prompts import prompt_of, read_each, rows_multiple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PLACES = 4  # a row has at most this many times the number of longest documents that fit into it
_PRINT_EVERY, _CUT_OFF = 10, 0.5  # steps between two samples on the screen; the share of cut answers that is warned of
_SHOWN = 160  # characters of a prompt or an answer on the screen


@dataclasses.dataclass(frozen=True)
class Asked:
    """A data row of an on-policy distillation, tokenised: the prompt that the student answers, and the same prompt with
    the answer that the data set has."""

    prompt: tuple[int, ...]
    """The token ids up to the begin of the answer."""
    own: tuple[int, ...] = ()
    """The token ids of the prompt and the data set's answer; () if all answers are sampled, so that it is not
    needed."""
    mask: tuple[bool, ...] = ()
    """For each token of `own`, whether it is trained on."""


class OwnSamples(BatchSource):
    """The batch source (`BatchSource`) of on-policy distillation. A step has `documents` data rows, packed into rows of
    `length` tokens. Each has an answer that is sampled from the student or, with probability 1 - objective.on_policy,
    the answer that the data set has. `rows_per_step` is the number of packed rows of a step, in which `documents` of
    the longest data rows with their answers fit; the option rows_per_step of the config is `documents` instead.
    `own_samples` makes the source for a run.

    Args:
      rows: the data rows; an epoch uses each once, in an order drawn for the epoch.
      objective: its `drawing` has the options of sampling, and its `on_policy` the share of answers that are sampled.
      documents: the number of data rows in a step.
      length: the number of tokens in a packed row.
      seed: decides what is sampled, which answers are sampled, and the order of the data rows.
      decode: a function that makes text of token ids, to show a sample on the screen.
      ends: the token ids that end an answer.
      rows_multiple: the number of rows in a step is a multiple of it, so that devices can share them.
      chosen_length: whether `length` was chosen for these rows (`packed_shape`), and not by the user.
    Raises:
      ConfigError: the longest prompt with max_completion_length more tokens is longer than a packed row.
    """

    sees_model = True  # `batch_at` is given the model, which samples

    def __init__(
        self,
        rows: Sequence[Asked],
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
        self.asked, self.objective, self.documents, self.seed = rows, objective, documents, seed
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
        self.sampled_rows = SampledRows(longest + most, min(objective.drawing.slots, documents))
        self._plan: SlotPlan | None = None
        self._rows = AnswerRows(self.rows_per_step, length, min(documents, _PLACES * full))
        self._decode, self._ends = decode, sorted(ends)
        self._made: tuple[int, Batch] | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        self._rollouts: tuple[int, list[Rollout]] = (-1, [])
        self._news: list[str] = []

    @property
    def length(self) -> int:
        """The number of tokens in a packed row, padding included, as the constructor was given it (data.length). Memory
        is planned and the steps are compiled for it."""
        return self._rows.length

    @property
    def max_documents(self) -> int:
        """The most data rows, each with its answer, in one packed row, for which attention's kernels are compiled. It
        is 4 times the number of the longest ones that fit into a packed row, but at most `documents`. Packing keeps to
        it, however short the answers are that are sampled during the run."""
        return self._rows.places

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which every data row is used once, rounded up. The run turns the config's `epochs`
        into steps by it; the last step of an epoch may also have rows of the next one."""
        return -(-len(self.asked) // self.documents)

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding, as new numpy arrays, without `extra`, for whose shapes the train step is
        compiled before any answer is sampled; the batches of steps have the same."""
        return Batch.empty(rows, self.length)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of `step` (from 0). It is made at the first call, which samples its answers; a second call for the
        same step, if none for another came between, returns the same batch. Its `extra` is empty. model: a function
        that returns the model as it is before that step, which samples; None is enough if the batch was made before. A
        run calls it before each step."""
        if self._made is None or self._made[0] != step:
            assert model is not None, "sees_model is True, so the model is given"
            batch = self._rows.packed(self._answers(step, model), 0.0)
            self._made = step, dataclasses.replace(batch, extra={})
        return self._made[1]

    def sources_at(self, step: int) -> list[str]:
        """Returns one text, "answers sampled for step N", for any step, because sampled answers have no file and line.
        It is printed when the update of a step is skipped because its loss or gradient is not finite."""
        return [f"answers sampled for step {step}"]

    def resume(self, step: int, position: Json) -> None:
        """Forgets the batch that was made last, when a run is resumed at `step`, so that the step's answers are sampled
        by the model that was restored. `position` is None, as nothing is recorded: what a step draws depends on the
        seed and its number alone."""
        self._made = None

    def identity(self) -> dict[str, Json]:
        """{"prompts": the number of data rows, "tokens_crc32": a checksum of their tokens and masks}, which checkpoints
        record, so that a run with other rows is not resumed from them."""
        digest = 0
        for row in self.asked:
            digest = zlib.crc32(np.asarray([*row.prompt, -1, *row.own], np.int32).tobytes(), digest)
            digest = zlib.crc32(bytes(row.mask), digest)
        return {"prompts": len(self.asked), "tokens_crc32": digest}

    def first_prompt(self) -> Sequence[int]:
        """The token ids of the first row's prompt, for --check."""
        return self.asked[0].prompt

    def described(self, total_steps: int) -> list[str]:
        """Two lines that a run of `total_steps` steps prints about its rows before it begins: the number of data rows
        and how answers to them are sampled; and the number of steps and of data rows in each."""
        share, longest = self.objective.on_policy, max(len(row.prompt) for row in self.asked)
        which = "all answers are sampled from the student" if share == 1 else f"{share:.0%} of answers are sampled"
        most = f"with at most {self.objective.drawing.max_completion_length:,} tokens"
        return [
            f"rows: {len(self.asked):,}, with prompts of at most {longest:,} tokens; {which}, {most}",
            f"{total_steps:,} steps of {self.documents:,} rows of the data, packed into rows of {self.length:,} tokens",
        ]

    def warnings(self) -> list[str]:
        """That rows of data.length are filled badly, if they are."""
        return self._fill

    def limit_slots(self, plan: SlotPlan) -> None:
        """Sets how many answers are sampled at a time, and how many layers' weights are converted once for all."""
        self._plan = plan

    def news(self) -> list[str]:
        """Returns the lines for the screen that `_tell` added since the last call, and removes them. A run calls it
        after each step."""
        news, self._news = self._news, []
        return news

    def metrics_at(self, step: int) -> dict[str, float]:
        """The metrics of the answers of `step`, which are logged with the step's, {name: value}: "on_policy", the share
        of answers that was sampled, and, if any was, TRL's completions/* (the lengths of these, in tokens, and the
        share that was cut off) and "sampling_seconds". They are returned once; {} at a second call, or if the step's
        batch was not made."""
        return self._metrics.pop(step, {})

    def rollouts_at(self, step: int) -> list[Rollout]:
        """The answers that were sampled for `step`, given out once."""
        at, rows = self._rollouts
        self._rollouts = (-1, []) if at == step else self._rollouts
        return rows if at == step else []

    # ---- a step

    def _chosen(self, step: int) -> list[int]:
        """The indices of the data rows of `step`, in order, for which `_answers` makes answers. Steps take the rows of
        an epoch in the order that was drawn for it, then those of the next epoch, so one step may have rows of two
        epochs."""
        count, places = len(self.asked), range(step * self.documents, (step + 1) * self.documents)
        orders = {epoch: epoch_order(count, self.seed, epoch) for epoch in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def _answers(self, step: int, model: Callable[[], Decoder]) -> list[Answer]:
        """The data rows of `step` with their answers, in the order of the step. Which answers are sampled is drawn by
        the seed and the step; the others are those of the data set. The share of sampled ones is kept for `metrics_at`.
        model: a function that returns the model that samples; it is not called if no answer is sampled. `batch_at`
        packs the answers."""
        chosen = self._chosen(step)
        draws = [_draws(self.seed, step, place) for place in range(len(chosen))]
        places = [place for place, (_, draw) in enumerate(draws) if draw < self.objective.on_policy]
        found = [_with_own_answer(index, self.asked[index]) for index in chosen]
        self._metrics[step] = {"on_policy": len(places) / len(chosen)}
        if places:
            sampled = self._sampled(model(), step, [chosen[at] for at in places], [draws[at][0] for at in places])
            for place, answer in zip(places, sampled, strict=True):
                found[place] = answer
        return found

    def _sampled(self, model: Decoder, step: int, chosen: Sequence[int], seeds: Sequence[int]) -> list[Answer]:
        """Samples answers to the prompts of some data rows of a step, and returns them in the order of `chosen`.
        `_answers` calls it for those rows whose answers are to be sampled. Their metrics are kept for `metrics_at`, and
        in every tenth step one of them is kept for the screen.

        Args:
          model: the student, as it is before the step.
          step: the number of the step, from 0.
          chosen: the indices of the data rows.
          seeds: the sampling seed of each answer.
        """
        # The weights are waited for, so that the memory of the step before is free and counts as room for slots.
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        how, started = self.objective.drawing, time.monotonic()
        prompts = [self.asked[index].prompt for index in chosen]
        longest = max(map(len, prompts)) + how.max_completion_length
        slots = how.slots if self._plan is None else min(how.slots, self._plan.slots)
        sampler = Sampler(
            model,
            length=longest,
            most_slots=min(slots, len(chosen)),
            most_converted=None if self._plan is None else self._plan.converted_layers,
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
        found = [
            Answer(index, prompt, tuple(row.ids), (0.0,) * len(row.ids), row.finish_reason)
            for index, prompt, row in zip(chosen, prompts, rows, strict=True)
        ]
        del sampler, rows  # frees the caches, for which the step has no room
        lengths = np.array([answer.length for answer in found])
        cut = float(np.mean([answer.finish_reason == "length" for answer in found]))
        self._metrics[step] |= {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": cut,
            "sampling_seconds": time.monotonic() - started,
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
                for answer in found
            ],
        )
        if step % _PRINT_EVERY == 0:
            self._tell(found[0], cut)
        return found

    def _tell(self, answer: Answer, cut: float) -> None:
        """Adds lines for the screen, which `news` returns: `answer`, one of the sampled answers (the end of its prompt
        and its begin, at most 160 characters of each), and a warning if more than half of the answers are cut off. cut:
        the share of answers that reached the most tokens, from 0 to 1."""
        asked, given = (" ".join(self._decode(ids).split()) for ids in (answer.prompt_ids, answer.ids))
        self._news.append(f"a sample: {asked[-_SHOWN:]} -> {given[:_SHOWN]}")
        if cut > _CUT_OFF:
            self._news.append(
                f"warning: {cut:.0%} of answers reach objective.max_completion_length = "
                f"{self.objective.drawing.max_completion_length}; raise it, or ask for shorter answers"
            )


def own_samples(
    objective: Distill,
    rows: object,
    tokenizer: PreTrainedTokenizerFast,
    config: TrainConfig,
    ends: Sequence[int],
    positions: int,
) -> OwnSamples:
    """Reads and tokenises the rows of an on-policy distillation, and makes its batch source of them. `Reader.sampled`
    calls it when the Trainer is made.

    Args:
      objective: the objective, whose on_policy is above 0.
      rows: the rows: a path, a data set's name, or a list of dicts.
      tokenizer: a fast Hugging Face tokenizer.
      config: the config of the run, whose rows_per_step is the number of data rows in a step.
      ends: the token ids that end an answer.
      positions: the most tokens of a prompt and its answer that the model allows.
    Raises:
      ConfigError: a row cannot be used (unless data.on_bad_row is "skip"), no row can, data.length is too short, or the
        rows are tokenised already, so that their prompts are not known.
      ValueError: there is no such file or data set.
    """
    if isinstance(rows, TokenDataset):
        raise ConfigError(
            f"objective.on_policy = {objective.on_policy}: rows that are tokenised already have no prompts to answer; "
            "give the rows themselves, or set objective.on_policy: 0"
        )
    data, free = config.data, isinstance(config.data.length, Unset)
    length = positions if free else min(data.length, positions)
    reads = _Reading(tokenizer, data, length, length - objective.drawing.max_completion_length, objective.on_policy < 1)
    asked, row, multiple = read_each(rows, data, "data.train", reads), data.length, rows_multiple(config)
    if free:
        longest = max(max(len(one.prompt) + objective.drawing.max_completion_length, len(one.own)) for one in asked)
        row, multiple = packed_shape(longest, config.rows_per_step, multiple)
    return OwnSamples(
        asked,
        objective,
        documents=config.rows_per_step,
        length=row,
        chosen_length=free,
        seed=config.seed,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        ends=ends,
        rows_multiple=multiple,
    )


class _Reading:
    """A function that makes an Asked (tokenised prompt and answer) of a data row, given as {column: value}, and raises
    RowError if the row cannot be used; `own_samples` reads the rows with it.

    Args:
      tokenizer: a fast Hugging Face tokenizer.
      data: the options of templates and masks.
      length: the most tokens of a prompt with the data set's answer.
      most_tokens: the most tokens of a prompt.
      answered: True: every row must have an answer, which is tokenised too. False: only the prompt is tokenised,
        because all answers are sampled.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, data: DataConfig, length: int, most_tokens: int, answered: bool
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
        self._length, self._most_tokens, self._answered = length, most_tokens, answered

    def __call__(self, row: Mapping[str, object]) -> Asked:
        """The Asked of a row, given as columns by name. Raises RowError if the row cannot be used: it has no prompt,
        the prompt or the whole is too long, or it has no answer and needs one."""
        beside = "objective.max_completion_length data.length leaves"
        prompt = prompt_of(row, self._encoder, self._most_tokens, beside).ids
        if not self._answered:
            return Asked(prompt)
        refuse_excluded(row)
        [encoded] = self._encoder.encode([normalize(row, detect_format(row))])
        if isinstance(encoded, RowError):
            raise encoded
        if not encoded.mask[1:].any():
            raise RowError("it has no answer of its own, which objective.on_policy below 1 trains on too")
        if len(encoded.tokens) > self._length:
            raise RowError(f"with its answer it has {len(encoded.tokens):,} tokens, more than {self._length:,}")
        return Asked(prompt, tuple(encoded.tokens.tolist()), tuple(encoded.mask.tolist()))


def _with_own_answer(index: int, row: Asked) -> Answer:
    """Makes the Answer that is packed into a batch from the data row `row` and the answer that the data set has for it.
    The tokens before the first trained one are the prompt (at least one token, because the first of a row has nothing
    that predicts it), and the answer begins with that token; `Answer.sampled` is the rest of the row's mask. If
    objective.on_policy is 1, only prompts were tokenised (`row.own` is empty): prompt and answer are then empty, and
    this Answer is replaced by a sampled one. index: the row's index."""
    first = row.mask.index(True, 1) if row.own else 0
    ids = row.own[first:]
    return Answer(index, row.own[:first], ids, (0.0,) * len(ids), "stop", sampled=row.mask[first:])


def _draws(seed: int, step: int, place: int) -> tuple[int, float]:
    """Two numbers drawn for one answer: (its sampling seed, of 31 bits; a number from 0 to below 1, and the answer is
    sampled if it is below on_policy). seed: the run's. step: the step's number. place: the index of the answer in the
    step. They depend on these alone, so that a resumed run draws the same."""
    raw = np.random.Philox(key=np.array([seed, step], np.uint64), counter=place).random_raw(2)
    return int(raw[0] >> np.uint64(33)), float(raw[1] >> np.uint64(11)) / 2.0**53
