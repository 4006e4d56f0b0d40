"""The batch source of GRPO and RLOO: answers sampled from the model that is trained.

A generation is one round of sampling for one step or several: some prompts, `num_generations` answers to each, and
their rewards. Each step packs its part, with advantages and the sampler's log-probabilities in `Batch.extra`. Training
and sampling share the weights.

An answer's seed depends on run, generation and place alone, so a resumed run samples the same, unless user code
differs. A checkpoint within a generation has its answers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.slot_plan import SlotPlan
from jaxtune.system.sealed import crc32
from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch, BatchSource, Json, Rollout, SampledRows, epoch_order
from jaxtune.train.data.packing.answers import (
    OLD_LOGPS,
    REFERENCE_LOGPS,
    SAMPLED_LOGPS,
    Answer,
    AnswerPictures,
    AnswerRows,
    fill_warning,
)
from jaxtune.train.data.tokens.pictures import prompt_documents
from jaxtune.train.digests import values_crc32
from jaxtune.train.objectives.grpo import Correction
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answer_report import (
    masked_lines,
    measured,
    mismatch_lines,
    recorded,
    screen_lines,
    weight_lines,
)
from jaxtune.train.sampled.answering import Answering, OneTurn, Prompt
from jaxtune.train.sampled.reward_functions import RewardFunctions, Sampled, rewarded

_PLACES = 4  # a row has at most this many times the number of longest answers that fit into it
_PRINT_EVERY = 10  # generations between two samples and warnings on the screen


class Advantages(Protocol):
    """Computes a generation's advantages."""

    def __call__(self, rewards: np.ndarray, /, kl: np.ndarray | None = None) -> np.ndarray:
        """float32[answers].

        rewards: [answers, functions], NaN where a function does not apply; a prompt's answers are consecutive.
        kl: [answers], divergences to subtract from rewards; else None.
        """
        ...


# A function that computes the log-probabilities, float32[rows, length], of the targets of packed rows under a model.
type Score = Callable[[Decoder, Batch], np.ndarray]


class SampledAnswers(BatchSource):
    """Samples answers to prompts and rewards them. A step has `answers_per_step`, packed with their prompts into
    `rows_per_step` rows of `length`, which hold the longest.

    Raises ConfigError unless answers_per_step is a multiple of num_generations, and each prompt leaves room for an
    answer.

      prompts: each once an epoch, in a drawn order.
      rows_multiple: packed rows of a step are a multiple of it.
      chosen_length: whether `packed_shape` and not the user chose `length`.
      score: log-probabilities under the model that sampled; then batches have OLD_LOGPS.
      correction: how the loss corrects for the sampler's probabilities, for warnings; None: not.
      reference: those under its frozen reference; then batches have REFERENCE_LOGPS, unless `penalises`.
      penalises: `advantages` gets divergences from the reference, to subtract from rewards; else the loss uses them.
      own_reference: whether the reference is not the model with its adapter off.
      processor: of the prompts' pictures; None: they have none.
      patches_per_row: patches for which a row has room; None: as the prompts need.
    """

    needs_model = True  # `batch_at` is given the model, which samples

    @property
    def samples_together(self) -> bool:
        return isinstance(self.answering, OneTurn)

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rewards: RewardFunctions,
        settings: Settings,
        advantages: Advantages,
        answering: Answering,
        *,
        answers_per_step: int,
        length: int,
        seed: int,
        rows_multiple: int = 1,
        score: Score | None = None,
        correction: Correction | None = None,
        reference: Score | None = None,
        penalises: bool = False,
        own_reference: bool = False,
        chosen_length: bool = False,
        processor: PictureProcessor | None = None,
        patches_per_row: int | None = None,
    ):
        group, longest = settings.num_generations, max(len(prompt.ids) for prompt in prompts)
        if answers_per_step % group:
            raise ConfigError(
                f"rows_per_step = {answers_per_step}: these are the answers of a step, which come in groups of "
                f"objective.num_generations = {group}; set a multiple of it"
            )
        if longest + settings.max_completion_length > length:
            raise ConfigError(
                f"data.length = {length}: the longest prompt has {longest} tokens, and an answer may have "
                f"objective.max_completion_length = {settings.max_completion_length}; a row holds both: set at least "
                f"{longest + settings.max_completion_length}, or shorten one of them"
            )
        self.prompts, self.rewards, self.settings, self.advantages = prompts, rewards, settings, advantages
        self.answers_per_step, self.seed = answers_per_step, seed
        self._length, self.answering, self._score = length, answering, score
        self._correction: Correction | None = correction
        self._reference, self._penalises, self.own_reference = reference, penalises, own_reference
        full, pictures = length // (longest + settings.max_completion_length), None
        if processor is not None and (patches_per_row is not None or any(prompt.pictures for prompt in prompts)):
            documents = prompt_documents([prompt.pictures for prompt in prompts], processor)
            sizes = np.array([len(prompt.ids) for prompt in prompts])
            pictures = AnswerPictures.of(documents, sizes, min(full, answers_per_step), group, patches_per_row)
            full = pictures.answers
        rows = math.ceil(answers_per_step / full)
        self.rows_per_step = math.ceil(rows / rows_multiple) * rows_multiple
        self.rows = AnswerRows(
            self.rows_per_step,
            length,
            min(answers_per_step, _PLACES * full) if pictures is None else full,
            settings.mask_truncated_completions,
            has_old=score is not None,
            has_reference=reference is not None and not penalises,
            pictures=pictures,
        )
        self._fill = (
            []
            if chosen_length or answering.changes_prompts
            else fill_warning(longest + settings.max_completion_length, answers_per_step, self.rows_per_step, length)
        )
        self.sampled_rows = SampledRows.of(
            settings,
            length if answering.changes_prompts else longest + settings.max_completion_length,
            answers_per_step * settings.steps_per_generation if answering.one_row_a_prompt else None,
            answering.repeats_beginnings,
        )
        self._generation: tuple[int, list[Answer]] | None = None
        self._made: tuple[int, Batch] | None = None
        self._old: dict[int, np.ndarray] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._rollouts: tuple[int, list[Rollout]] = (-1, [])
        self._warned: dict[str, int] = {}  # {warning: the step of its last}
        self._news: list[str] = []
        self._returned: float | None = None  # when the batch of the latest generation's first step was ready

    # ---- the methods of BatchSource

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_documents(self) -> int:
        """A limit that packing keeps: 4 times the longest answers with prompts that fit a row, at most those of a step.
        Further short ones go to other rows.
        """
        return self.rows.most_answers

    @property
    def patches(self) -> int:
        return 0 if self.rows.pictures is None else self.rows.pictures.patches

    @property
    def max_pictures(self) -> int:
        return 0 if self.rows.pictures is None else self.rows.pictures.most

    @property
    def steps_per_epoch(self) -> int:
        """Generations are rounded up: the last takes prompts of the next epoch."""
        return -(-len(self.prompts) // self._prompts_per_generation) * self.settings.steps

    @property
    def _prompts_per_generation(self) -> int:
        return self.answers_per_step * self.settings.steps_per_generation // self.settings.num_generations

    def limit_slots(self, plan: SlotPlan) -> None:
        self.answering.sampling.plan = plan

    def empty(self, rows: int) -> Batch:
        return self.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """A generation's first step samples and rewards its answers; later ones use them. model: may be None if nothing
        must be sampled or computed.

        Raises RewardError if a reward function fails, ConfigError if answers do not fit the rows.
        """
        if self._made is not None and self._made[0] == step:
            return self._made[1]
        number, step_within = divmod(step, self.settings.steps)
        if self._generation is None or self._generation[0] != number:
            assert model is not None, "needs_model is True, so the model is given"
            self._generation = number, self._sampled(number, step, model())
            if self._score is not None:  # of all parts now, as each step changes the model
                part_indices = range(self.settings.steps_per_generation)
                self._old = {part_index: self._score(model(), self._part(part_index)) for part_index in part_indices}
        part_index = step_within % self.settings.steps_per_generation
        batch = self._part(part_index)
        if self._score is not None:
            if part_index not in self._old:  # resumed from a checkpoint of an older jaxtune, which computed them here
                assert model is not None
                self._old[part_index] = self._score(model(), batch)
            batch.extra[OLD_LOGPS][:] = self._old[part_index]
        if self._reference is not None and not self._penalises:
            assert model is not None
            batch.extra[REFERENCE_LOGPS][:] = self._reference(model(), batch)
        if step_within == 0:
            self._returned = time.monotonic()
        self._made = step, batch
        return batch

    def _part(self, part_index: int) -> Batch:
        """The packed answers of one of the generation's steps, without OLD_LOGPS and REFERENCE_LOGPS."""
        assert self._generation is not None
        answers = self._generation[1]
        part_answers = answers[part_index * self.answers_per_step : (part_index + 1) * self.answers_per_step]
        counted_tokens = sum(self.rows.counted(answer) for answer in answers)
        return self.rows.packed(part_answers, counted_tokens / self.settings.steps_per_generation)

    def sources_at(self, step: int) -> list[str]:
        return [f"answers sampled for step {step}"]

    def position(self, step: int) -> Json:
        """The current generation, if `step` uses it too: {"generation": number, "answers": as `Answer.to_json`, "old":
        {part: OLD_LOGPS [rows, length]}}; else None.
        """
        if step % self.settings.steps == 0 or self._generation is None:
            return None
        number, answers = self._generation
        saved_answers: list[Json] = [answer.to_json() for answer in answers]
        old: dict[str, Json] = {str(part_index): values.tolist() for part_index, values in self._old.items()}
        return {"generation": number, "answers": saved_answers, "old": old}

    def resume(self, step: int, position: Json) -> None:
        """With None `step` samples a new generation."""
        self._made = self._generation = None
        if position is None:
            return
        saved: Any = position
        self._generation = saved["generation"], [Answer.from_json(answer) for answer in saved["answers"]]
        self._old = {int(part_index): np.asarray(values, np.float32) for part_index, values in saved["old"].items()}

    def identity(self) -> dict[str, Json]:
        digest = crc32(np.asarray(prompt.ids, np.int32).tobytes() for prompt in self.prompts)
        values: dict[str, Json] = {"prompts": len(self.prompts), "tokens_crc32": digest}
        values["columns_crc32"] = values_crc32(dict(prompt.columns) for prompt in self.prompts)
        if self.rows.pictures is not None:
            values["pictures_crc32"] = crc32([self.rows.pictures.prompts.fingerprint()])
        values["rewards"] = [*self.rewards.names]
        if self.answering.tool_names:
            values["tools"] = [*self.answering.tool_names]
        return values

    def functions(self) -> Mapping[str, Callable]:
        rewards = zip(self.rewards.names, self.rewards.functions, strict=True)
        return {f"reward {name}": function for name, function in rewards} | dict(self.answering.functions)

    def first_prompt(self) -> Sequence[int]:
        return self.prompts[0].ids

    def described(self, total_steps: int) -> list[str]:
        settings, group = self.settings, self.settings.num_generations
        per_step = f"{self.answers_per_step // group:,} prompts x {group} answers"
        reuse = (
            "" if settings.steps == 1 else f"; the answers of {settings.steps_per_generation} steps are sampled at once"
        )
        reuse += "" if settings.num_iterations == 1 else f", and trained on {settings.num_iterations} times"
        return [
            f"prompts: {len(self.prompts):,}, of at most {max(len(p.ids) for p in self.prompts):,} tokens; answers of "
            f"at most {settings.max_completion_length:,}",
            f"{total_steps:,} steps of {per_step}{reuse}; rewards: {', '.join(self.rewards.names)}",
            *([f"tools: {', '.join(self.answering.tool_names)}"] if self.answering.tool_names else []),
        ]

    def columns(self) -> dict[str, str]:
        return {"prompts": getattr(self.prompts, "columns", "")}

    def warnings(self) -> list[str]:
        return self._fill

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def metrics_at(self, step: int) -> dict[str, float]:
        """Metrics of the generation made for `step`, given out once: `measured`, "tools/...", "..._seconds" (of
        "update_seconds" from the last generation's first batch to this sampling), and mean "kl" per token if rewards
        are penalised.
        """
        return self._metrics.pop(step, {})

    def rollouts_at(self, step: int) -> list[Rollout]:
        rollout_step, rows = self._rollouts
        if rollout_step != step:
            return []
        self._rollouts = -1, []
        return rows

    def remarks(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warns that most answers are out of the loss or weigh little, or that `exact` does not hold; each at most
        every ten steps.
        """
        warnings = {
            "masked": masked_lines(line),
            "weights": weight_lines(line, self._correction, self.settings.cache),
            "mismatch": mismatch_lines(line, self.settings),
        }
        last = {name: self._warned.get(name, -_PRINT_EVERY) for name in warnings}
        due = [name for name, texts in warnings.items() if texts and step - last[name] >= _PRINT_EVERY]
        self._warned |= dict.fromkeys(due, step)
        return [text for name in due for text in warnings[name]]

    # ---- a generation

    def _chosen(self, number: int) -> list[int]:
        prompt_count, count = self._prompts_per_generation, len(self.prompts)
        positions = range(number * prompt_count, (number + 1) * prompt_count)
        orders = {
            epoch: epoch_order(count, self.seed, epoch) for epoch in {position // count for position in positions}
        }
        return [int(orders[position // count][position % count]) for position in positions]

    def _sampled(self, number: int, step: int, model: Decoder) -> list[Answer]:
        """Samples and rewards generation `number` before `step`, and keeps its metrics and lines. RewardError."""
        # The weights are waited for, so that the memory of the step before is free and counts as room for slots.
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        settings, start_time = self.settings, time.monotonic()
        prompt_indices = [index for index in self._chosen(number) for _ in range(settings.num_generations)]
        prompts = [self.prompts[index] for index in prompt_indices]
        samples, metrics = self.answering(
            model, prompts, [_seed(self.seed, number, position) for position in range(len(prompt_indices))]
        )
        answers = [
            Answer(
                index,
                sample.prompt_ids,
                tuple(sample.ids),
                tuple(sample.logps),
                sample.finish_reason,
                None if sample.sampled is None else tuple(sample.sampled),
            )
            for index, sample in zip(prompt_indices, samples, strict=True)
        ]
        sampling = time.monotonic() - start_time
        shown = {index: self.prompts[index].shown() for index in set(prompt_indices)}
        sampled = Sampled.of(
            [sample.shown for sample in samples],
            [
                {**prompt.columns, **shown[index], **sample.columns}
                for index, prompt, sample in zip(prompt_indices, prompts, samples, strict=True)
            ],
            [sample.ids for sample in samples],
            [sample.completion for sample in samples],
        )
        table, logged, extra = rewarded(self.rewards, sampled)
        kl = self._divergences(model, answers) if self._reference is not None and self._penalises else None
        values = self.advantages(table) if kl is None else self.advantages(table, kl=kl)
        answers = [dataclasses.replace(answer, advantage=float(v)) for answer, v in zip(answers, values, strict=True)]
        times = {"sampling_seconds": sampling, "reward_seconds": time.monotonic() - start_time - sampling}
        if self._returned is not None:
            times["update_seconds"] = start_time - self._returned
        self._metrics[step] = logged | measured(answers, table, self.rewards, settings) | metrics | times
        self._rollouts = step, recorded(step + 1, sampled, table, answers, self.rewards, extra)
        if kl is not None:
            self._metrics[step]["kl"] = float(kl.sum() / max(1, sum(map(self.rows.counted, answers))))
        if number % _PRINT_EVERY == 0:
            self._news += screen_lines(sampled, table, answers, self.rewards, settings)
        return answers

    def _divergences(self, model: Decoder, answers: Sequence[Answer]) -> np.ndarray:
        """float64[answers]: sum of log p - log p_ref over counted tokens, in nats, at the sampler's temperature."""
        assert self._reference is not None
        divergences = np.zeros(len(answers))
        for start in range(0, len(answers), self.answers_per_step):
            step_answers = answers[start : start + self.answers_per_step]
            batch = self.rows.packed(step_answers, 0.0)
            apart = batch.weights * (batch.extra[SAMPLED_LOGPS] - self._reference(model, batch))
            for index, (row, prompt_start, _) in enumerate(self.rows.places_of(step_answers)):
                begin = prompt_start + len(step_answers[index].prompt_ids) - 1
                divergences[start + index] = apart[row, begin : begin + len(step_answers[index].ids)].sum()
        return divergences


def _seed(seed: int, generation: int, position: int) -> int:
    """An answer's sampling seed, 31 bits."""
    draw = np.random.Philox(key=np.array([seed, generation], np.uint64), counter=position)
    return int(draw.random_raw(1)[0] >> np.uint64(33))
