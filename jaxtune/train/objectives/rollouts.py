"""The batch source of runs that learn from rewards, by GRPO or RLOO (`SampledAnswers`): answers sampled from the model
that is trained. `Advantages` is the type of the functions that compute advantages for it.

A generation is one round of sampling, whose answers are used for one step or several. It takes some prompts, samples
`num_generations` answers to each, and calls the reward functions. Each step packs its part of the answers into rows,
with advantages and the sampler's log-probabilities in `Batch.extra`. Training and sampling share one copy of the
weights.

The sampling seed of each answer depends only on the run's seed, the number of the generation and the answer's place in
it (`_seed`). So a run that is interrupted and resumed samples the same answers, unless tools or a rollout function of
the user's code behave differently. A checkpoint between two steps of one generation has its answers, so that they are
not sampled again."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.slot_plan import SlotPlan
from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch, BatchSource, Json, Rollout, SampledRows, epoch_order
from jaxtune.train.digests import values_crc32
from jaxtune.train.objectives.answer_report import masked_lines, measured, recorded, screen_lines
from jaxtune.train.objectives.answering import Answering
from jaxtune.train.objectives.packed_answers import (
    OLD_LOGPS,
    REFERENCE_LOGPS,
    SAMPLED_LOGPS,
    Answer,
    AnswerRows,
    Prompt,
    Settings,
    fill_warning,
)
from jaxtune.train.objectives.reward_functions import RewardFunctions, Sampled

_PLACES = 4  # a row has at most this many times the number of longest answers that fit into it
_PRINT_EVERY = 10  # generations between two samples and warnings on the screen


class Advantages(Protocol):
    """A function that computes the advantages of a generation's answers (those of one round of sampling) from their
    rewards: how much better each answer is than the others to its prompt, by which the loss weights its
    log-probabilities. GRPO and RLOO each give SampledAnswers one. It is called with rewards [answers, reward functions]
    (NaN where a function does not apply), and returns float32[answers]. Only if divergences from a reference are
    subtracted from the rewards (RLOO with beta above 0), SampledAnswers also gives it these as kl [answers]."""

    def __call__(self, rewards: np.ndarray, /, kl: np.ndarray | None = None) -> np.ndarray:
        """Returns the advantages, float32[answers]. rewards: [answers, reward functions], NaN where a function does not
        apply to an answer; the answers to one prompt are consecutive. kl: [answers], the divergence of each answer from
        the reference model, if it is to be subtracted from the rewards; else None."""
        ...


# A function that computes the log-probabilities, float32[rows, length], of the targets of packed rows under a model.
type Score = Callable[[Decoder, Batch], np.ndarray]


class SampledAnswers(BatchSource):
    """The batch source of GRPO and RLOO: it samples answers to prompts from the model that is trained, and rewards
    them. A step has `answers_per_step` answers, packed with their prompts into rows of `length` tokens. `rows_per_step`
    is the number of packed rows in which the longest prompts with the longest answers fit, rounded up to a multiple of
    `rows_multiple`. `prompts.sampled_answers` makes it for a run.

    Args:
      prompts: the prompts. They are used epoch after epoch, each once in an epoch, in an order drawn for the epoch.
      rewards: the reward functions.
      settings: the settings of sampling: among them the number of answers to a prompt, and for how many steps the
        answers of a generation (one round of sampling) are used.
      advantages: computes advantages from rewards.
      answering: samples the answers of a generation.
      answers_per_step: the number of answers in a step.
      length: the number of tokens in a row.
      seed: of sampling and of the order of prompts.
      rows_multiple: the number of rows in a step is a multiple of it, so that devices can share them.
      chosen_length: whether `length` was chosen for these prompts (`packed_shape`), and not by the user.
      score: computes the log-probabilities of a batch's tokens under the model that it is given: the one that
        sampled them. If it is not None, batches have them in `Batch.extra[OLD_LOGPS]`.
      reference: computes the log-probabilities of a batch's tokens under the frozen reference of the model that it is
        given. If it is not None, batches have them in `Batch.extra[REFERENCE_LOGPS]`, unless `penalises`.
      penalises: what `reference` is for. True: `advantages` gets the answers' divergences from the reference, and
        subtracts beta times them from the rewards. False: the loss uses the reference's log-probabilities.
      own_reference: whether `reference` is not the model with its adapter off.
    Raises:
      ConfigError: answers_per_step is not a multiple of the number of answers to a prompt, or a prompt leaves no room
        for an answer of max_completion_length tokens.
    """

    sees_model = True  # `batch_at` is given the model, which samples

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
        reference: Score | None = None,
        penalises: bool = False,
        own_reference: bool = False,
        chosen_length: bool = False,
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
        self._reference, self._penalises, self.own_reference = reference, penalises, own_reference
        full = length // (longest + settings.max_completion_length)
        rows = math.ceil(answers_per_step / full)
        self.rows_per_step = math.ceil(rows / rows_multiple) * rows_multiple
        self.rows = AnswerRows(
            self.rows_per_step,
            length,
            min(answers_per_step, _PLACES * full),
            settings.mask_truncated_completions,
            has_old=score is not None,
            has_reference=reference is not None and not penalises,
        )
        self._fill = (
            []
            if chosen_length or answering.changes_prompts
            else fill_warning(longest + settings.max_completion_length, answers_per_step, self.rows_per_step, length)
        )
        at_once = min(settings.slots, answers_per_step * settings.steps_per_generation)
        self.sampled_rows = SampledRows(
            length if answering.changes_prompts else longest + settings.max_completion_length, at_once
        )
        self._generation: tuple[int, list[Answer]] | None = None
        self._made: tuple[int, Batch] | None = None
        self._old: dict[int, np.ndarray] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._rollouts: tuple[int, list[Rollout]] = (-1, [])
        self._warned = -_PRINT_EVERY  # the step whose masks were warned of last
        self._news: list[str] = []
        self._returned: float | None = None  # when the batch of the latest generation's first step was ready

    # ---- the methods of BatchSource

    @property
    def length(self) -> int:
        """The number of tokens in a packed row, padding included, as the constructor was given it (data.length). Memory
        is planned and the steps are compiled for it."""
        return self._length

    @property
    def max_documents(self) -> int:
        """The most documents in a row, for which attention's kernels are compiled; a document is one answer with its
        prompt. It is a limit that packing keeps, and no forecast of lengths: it is fixed before the run, at 4 times the
        number of the longest prompts with the longest answers that fit into a row, or at the number of answers of a
        step, if that is smaller. Short answers that exceed it are packed into other rows."""
        return self.rows.places

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps after which every prompt was used: the generations (rounds of sampling) that this takes,
        times the steps for which each is used. The generations are rounded up; the last one is filled with the first
        prompts of the next order. The run turns the config's `epochs` into steps by it."""
        return -(-len(self.prompts) // self._prompts_per_generation) * self.settings.steps

    @property
    def _prompts_per_generation(self) -> int:
        """The number of prompts that a generation (one round of sampling) has answers for: its answers,
        answers_per_step for each of steps_per_generation steps, divided by num_generations, the answers to a prompt.
        `_chosen` takes this number of prompts, and `steps_per_epoch` divides by it."""
        return self.answers_per_step * self.settings.steps_per_generation // self.settings.num_generations

    def limit_slots(self, plan: SlotPlan) -> None:
        """Sets the most answers that a device samples at a time, and the most layers whose weights its samplers convert
        once for all tokens instead of in each step (mostly the decoding of quantised weights;
        models/generation/converted.py), to those of `plan`, so that sampling has room beside the weights and the
        optimizer. The Trainer calls it once, after it has planned its memory and before the first batch, if device
        memory is limited; without it, the memory that is free decides."""
        self.answering.sampling.plan = plan

    def empty(self, rows: int) -> Batch:
        """A batch of `rows` rows of padding without answers, as new numpy arrays, with all arrays of this source in
        `extra`, zeros, for whose shapes the train step is compiled before any answer is sampled; the batches of steps
        have the same."""
        return self.rows.empty(rows)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """Returns the batch of `step` (from 0). The first step of a generation (the steps that use the answers of one
        round of sampling) samples its answers and calls the reward functions; the other steps use answers that were
        sampled then. A second call for the latest step returns the same batch. model: returns the model as it is before
        the step; it samples the answers, and computes OLD_LOGPS (of the whole generation, when it is sampled) and
        REFERENCE_LOGPS (packed_answers.py) if batches have them. None is enough if nothing must be sampled or computed.
        Raises RewardError if a reward function fails, and ConfigError if the answers do not fit into the rows, or as
        `answering` does."""
        if self._made is not None and self._made[0] == step:
            return self._made[1]
        number, within = divmod(step, self.settings.steps)
        if self._generation is None or self._generation[0] != number:
            assert model is not None, "sees_model is True, so the model is given"
            self._generation = number, self._sampled(number, step, model())
            if self._score is not None:  # of all parts now, as each step changes the model
                parts = range(self.settings.steps_per_generation)
                self._old = {part: self._score(model(), self._part(part)) for part in parts}
        part = within % self.settings.steps_per_generation
        batch = self._part(part)
        if self._score is not None:
            if part not in self._old:  # resumed from a checkpoint of an older jaxtune, which computed them here
                assert model is not None
                self._old[part] = self._score(model(), batch)
            batch.extra[OLD_LOGPS][:] = self._old[part]
        if self._reference is not None and not self._penalises:
            assert model is not None
            batch.extra[REFERENCE_LOGPS][:] = self._reference(model(), batch)
        if within == 0:
            self._returned = time.monotonic()
        self._made = step, batch
        return batch

    def _part(self, part: int) -> Batch:
        """The rows of one part of the current generation's answers, without OLD_LOGPS and REFERENCE_LOGPS, which
        `batch_at` computes for it and adds. part: from 0 to below steps_per_generation. The generation's step of that
        number trains on it, and, with num_iterations above 1, again every step that comes steps_per_generation
        later."""
        assert self._generation is not None
        answers = self._generation[1]
        own = answers[part * self.answers_per_step : (part + 1) * self.answers_per_step]
        counted = sum(self.rows.counted(answer) for answer in answers)
        return self.rows.packed(own, counted / self.settings.steps_per_generation)

    def sources_at(self, step: int) -> list[str]:
        """Returns one text, "answers sampled for step N", for any step, because sampled answers have no file and line.
        The run's monitor prints it when the update of a step is skipped because its loss or gradient is not finite."""
        return [f"answers sampled for step {step}"]

    def position(self, step: int) -> Json:
        """The answers of the current generation (round of sampling) if `step` uses them too, with their
        log-probabilities, as JSON for a checkpoint, so that a resumed run need not sample them again: {"generation":
        its number, "answers": each as `Answer.to_json`, "old": {"0", "1", ...: the OLD_LOGPS of that part of the
        answers, [rows, length]}}. None if `step` samples a new generation, or nothing was sampled yet."""
        if step % self.settings.steps == 0 or self._generation is None:
            return None
        number, answers = self._generation
        kept: list[Json] = [answer.to_json() for answer in answers]
        old: dict[str, Json] = {str(part): values.tolist() for part, values in self._old.items()}
        return {"generation": number, "answers": kept, "old": old}

    def resume(self, step: int, position: Json) -> None:
        """Prepares to continue at `step` in a resumed run: takes the current generation's answers from `position`,
        which `position(step)` returned in the earlier process, so that they are not sampled again. If it is None,
        `step` samples a new generation."""
        self._made = self._generation = None
        if position is None:
            return
        saved: Any = position
        self._generation = saved["generation"], [Answer.from_json(one) for one in saved["answers"]]
        self._old = {int(part): np.asarray(values, np.float32) for part, values in saved["old"].items()}

    def identity(self) -> dict[str, Json]:
        """{"prompts": their number, "tokens_crc32", "columns_crc32": checksums of their tokens and of the other columns
        of their rows, "rewards": the names of the reward functions, and "tools": those of tools, if there are any}."""
        digest = 0
        for prompt in self.prompts:
            digest = zlib.crc32(np.asarray(prompt.ids, np.int32).tobytes(), digest)
        found: dict[str, Json] = {"prompts": len(self.prompts), "tokens_crc32": digest}
        found["columns_crc32"] = values_crc32(dict(prompt.columns) for prompt in self.prompts)
        found["rewards"] = [*self.rewards.names]
        if self.answering.tool_names:
            found["tools"] = [*self.answering.tool_names]
        return found

    def functions(self) -> Mapping[str, Callable]:
        rewards = zip(self.rewards.names, self.rewards.functions, strict=True)
        return {f"reward {name}": function for name, function in rewards} | dict(self.answering.functions)

    def first_prompt(self) -> Sequence[int]:
        """The token ids of the first prompt of the rows, for --check."""
        return self.prompts[0].ids

    def described(self, total_steps: int) -> list[str]:
        """The lines that a run of `total_steps` steps prints before it begins: the prompts, the answers and rewards of
        its steps, and the tools, if there are any."""
        settings, group = self.settings, self.settings.num_generations
        each = f"{self.answers_per_step // group:,} prompts x {group} answers"
        used = (
            "" if settings.steps == 1 else f"; the answers of {settings.steps_per_generation} steps are sampled at once"
        )
        used += "" if settings.num_iterations == 1 else f", and trained on {settings.num_iterations} times"
        return [
            f"prompts: {len(self.prompts):,}, of at most {max(len(p.ids) for p in self.prompts):,} tokens; answers of "
            f"at most {settings.max_completion_length:,}",
            f"{total_steps:,} steps of {each}{used}; rewards: {', '.join(self.rewards.names)}",
            *([f"tools: {', '.join(self.answering.tool_names)}"] if self.answering.tool_names else []),
        ]

    def warnings(self) -> list[str]:
        """That rows of data.length are filled badly, if they are."""
        return self._fill

    def news(self) -> list[str]:
        """Returns the samples and warnings for the screen that were added since the last call, and removes them. A run
        calls it after each step."""
        news, self._news = self._news, []
        return news

    def metrics_at(self, step: int) -> dict[str, float]:
        """The metrics of the generation (round of sampling) that was made for the step, {name: value}, which are given
        out once: those of `answer_report.measured` and of tools ("tools/..."); "sampling_seconds" and "reward_seconds";
        from the process's second generation on "update_seconds", from when the first batch of the generation before was
        ready to this sampling; and, if divergences are subtracted from rewards, "kl", their mean per token. {} if the
        step uses a generation that was sampled for an earlier one. The run writes them to its log."""
        return self._metrics.pop(step, {})

    def rollouts_at(self, step: int) -> list[Rollout]:
        """The answers that were sampled before `step`, given out once; [] if the step uses those of an earlier one."""
        at, rows = self._rollouts
        if at != step:
            return []
        self._rollouts = -1, []
        return rows

    def remarks(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warnings that masks or the correction leave most answers out of the loss, at most every ten steps."""
        texts = masked_lines(line)
        if not texts or step - self._warned < _PRINT_EVERY:
            return []
        self._warned = step
        return texts

    # ---- a generation

    def _chosen(self, number: int) -> list[int]:
        """The indices, in `prompts`, of the prompts of generation `number` (round of sampling, from 0). Generations
        take the prompts of an epoch in the epoch's random order, then those of the next epoch. `_sampled` samples
        answers to them."""
        wanted, count = self._prompts_per_generation, len(self.prompts)
        places = range(number * wanted, (number + 1) * wanted)
        orders = {epoch: epoch_order(count, self.seed, epoch) for epoch in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def _sampled(self, number: int, step: int, model: Decoder) -> list[Answer]:
        """Makes generation `number` (a round of sampling) before `step`: samples answers from `model`, calls the reward
        functions, stores the metrics for `metrics_at(step)`, in every tenth generation also lines for the screen
        (`news`), and returns the answers with their advantages; all answers to one prompt are consecutive. It first
        waits until the step before is done, so that its memory is free. Raises RewardError if a reward function fails,
        and what `answering` raises."""
        # The weights are waited for, so that the memory of the step before is free and counts as room for slots.
        jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        settings, started = self.settings, time.monotonic()
        chosen = [index for index in self._chosen(number) for _ in range(settings.num_generations)]
        prompts = [self.prompts[index] for index in chosen]
        found, metrics = self.answering(
            model, prompts, [_seed(self.seed, number, place) for place in range(len(chosen))]
        )
        made = [
            Answer(
                index,
                one.prompt_ids,
                tuple(one.ids),
                tuple(one.logps),
                one.finish_reason,
                None if one.sampled is None else tuple(one.sampled),
            )
            for index, one in zip(chosen, found, strict=True)
        ]
        sampling = time.monotonic() - started
        sampled = Sampled.of(
            [one.shown for one in found],
            [{**prompt.columns, **one.columns} for prompt, one in zip(prompts, found, strict=True)],
            [one.ids for one in found],
            [one.completion for one in found],
        )
        table = self.rewards(sampled)
        logged, extra = self.rewards.log.taken(len(made))
        kl = self._divergences(model, made) if self._reference is not None and self._penalises else None
        values = self.advantages(table) if kl is None else self.advantages(table, kl=kl)
        made = [dataclasses.replace(answer, advantage=float(v)) for answer, v in zip(made, values, strict=True)]
        times = {"sampling_seconds": sampling, "reward_seconds": time.monotonic() - started - sampling}
        if self._returned is not None:
            times["update_seconds"] = started - self._returned
        self._metrics[step] = logged | measured(made, table, self.rewards, settings) | metrics | times
        self._rollouts = step, recorded(step + 1, sampled, table, made, self.rewards, extra)
        if kl is not None:
            self._metrics[step]["kl"] = float(kl.sum() / max(1, sum(map(self.rows.counted, made))))
        if number % _PRINT_EVERY == 0:
            self._news += screen_lines(sampled, table, made, self.rewards, settings)
        return made

    def _divergences(self, model: Decoder, answers: Sequence[Answer]) -> np.ndarray:
        """float64[answers]: the divergence of each answer from the reference of `model`, beta times which `advantages`
        subtracts from its reward: the sum of log p - log p_ref over the answer's tokens, in nats, where log p is the
        sampler's log-probability at the sampling temperature, before top_k, top_p, min_p and the repetition penalty.
        Tokens that do not count in the loss, such as those that tools wrote, are left out."""
        assert self._reference is not None
        found = np.zeros(len(answers))
        for start in range(0, len(answers), self.answers_per_step):
            own = answers[start : start + self.answers_per_step]
            batch = self.rows.packed(own, 0.0)
            apart = batch.weights * (batch.extra[SAMPLED_LOGPS] - self._reference(model, batch))
            for index, (row, at, _) in enumerate(self.rows.places_of(own)):
                begin = at + len(own[index].prompt_ids) - 1
                found[start + index] = apart[row, begin : begin + len(own[index].ids)].sum()
        return found


def _seed(seed: int, generation: int, place: int) -> int:
    """The sampling seed of an answer: 31 bits that depend on the run's seed, and on the numbers of the generation
    (round of sampling) and of the answer within it (`place`), so that a resumed run samples the same."""
    draw = np.random.Philox(key=np.array([seed, generation], np.uint64), counter=place)
    return int(draw.random_raw(1)[0] >> np.uint64(33))
