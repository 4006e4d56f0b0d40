"""The batch source of runs that learn from rewards: answers sampled from the model that is trained.

Each generation takes some prompts, samples `num_generations` answers to each, calls the reward functions, and packs the
answers into rows, with advantages and the sampler's log-probabilities in `Batch.extra`. Training and sampling share one
copy of the weights.

The sampled tokens depend only on the seed, the number of the generation and the weights, so a run that is interrupted
and resumed has the same answers. A generation that is used for several steps is stored in checkpoints.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch, BatchSource, Json, epoch_order
from jaxtune.train.objectives.grpo import total_rewards
from jaxtune.train.objectives.reward_functions import RewardFunctions, Sampled, Turns

# The names of the arrays in a batch's `extra`; they are [rows, answers of a row] unless another shape is given. An
# answer's place is its number within its row, from 0.
STARTS = "answer_starts"  # int32: index in the row of the token before the answer's first
LENGTHS = "answer_lengths"  # int32: tokens of the answer; 0 where the row has no answer of that number
ADVANTAGES = "advantages"  # float32
SAMPLED_LOGPS = "sampled_logps"  # float32 [rows, length]: at each position, that of its target under the sampler
OLD_LOGPS = "old_logps"  # float32 [rows, length]: under the model that the generation was sampled with
REFERENCE_LOGPS = "reference_logps"  # float32 [rows, length]: under the reference of the divergence
SHARE = "share"  # float32 [rows]: the row's part of the count by which a mean over the tokens of a generation divides
_PLACES = 4  # a row has at most this many times the number of longest answers that fit into it
_SHOWN = 160  # characters of a prompt or an answer on the screen
_CUT_OFF, _EQUAL = 0.5, 0.8  # shares of answers cut off, and of groups with equal rewards, above which it warns
_WARNED_EVERY = 10  # generations between two samples and warnings on the screen


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
    ids: tuple[int, ...]
    """Its token ids, with the token that ended it, if one did."""
    logps: tuple[float, ...]
    """The log-probability of each token that the sampler reported, at the sampling temperature."""
    finish_reason: str
    """Why it ended: "length" if it reached the most tokens."""
    advantage: float = 0.0
    """How much better its reward is than those of its group (`Advantages`); 0 until the rewards are known."""


class Advantages(Protocol):
    """A function that computes the advantages of a generation's answers from their rewards."""

    def __call__(self, rewards: np.ndarray, /, kl: np.ndarray | None = None) -> np.ndarray:
        """float32[answers] from rewards [answers, functions], NaN where a function does not apply. The answers of a
        group are consecutive. kl: [answers], their divergences from the reference if rewards are reduced by them."""
        ...


# A function that computes the log-probabilities, float32[rows, length], of the targets of packed rows under a model.
type Score = Callable[[Decoder, Batch], np.ndarray]


class SampledAnswers(BatchSource):
    """The batch source of GRPO and RLOO: it samples answers to prompts from the model that is trained, and rewards
    them. A step has `answers_per_step` answers, packed with their prompts into rows of `length` tokens.

    Args:
      prompts: the prompts; an epoch uses each once, in an order drawn for the epoch.
      rewards: the reward functions.
      settings: how answers are sampled.
      advantages: computes advantages from rewards.
      answers_per_step: the number of answers in a step.
      length: the number of tokens in a row.
      seed: of sampling and of the order of prompts.
      decode: decodes token ids to text.
      ends: the token ids that end an answer.
      score: computes log-probabilities under the model that it is given. If it is set, batches have OLD_LOGPS.
      reference: computes log-probabilities under the reference of the model that it is given. If it is set, batches
        have REFERENCE_LOGPS, or, if `penalises`, `advantages` gets the divergences of the answers.
      penalises: whether divergences are subtracted from rewards.
    Raises:
      ConfigError: answers_per_step is not a multiple of a group, or a prompt leaves no room for an answer.
    """

    sees_model = True

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rewards: RewardFunctions,
        settings: Settings,
        advantages: Advantages,
        *,
        answers_per_step: int,
        length: int,
        seed: int,
        decode: Callable[[Sequence[int]], str],
        ends: Sequence[int],
        score: Score | None = None,
        reference: Score | None = None,
        penalises: bool = False,
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
        self._length, self._decode, self._ends, self._score = length, decode, sorted(ends), score
        self._reference, self._penalises = reference, penalises
        full = length // (longest + settings.max_completion_length)
        self.rows_per_step = -(-answers_per_step // full)
        self.places = min(answers_per_step, _PLACES * full)
        self._generation: tuple[int, list[Answer]] | None = None
        self._made: tuple[int, Batch] | None = None
        self._old: dict[int, np.ndarray] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._news: list[str] = []

    # ---- the methods of BatchSource

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_documents(self) -> int:
        """The most answers, each with its prompt, that a row is given."""
        return self.places

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.prompts) // self._prompts_per_generation) * self.settings.steps

    @property
    def _prompts_per_generation(self) -> int:
        """The number of prompts that a generation samples answers for."""
        return self.answers_per_step * self.settings.steps_per_generation // self.settings.num_generations

    def empty(self, rows: int) -> Batch:
        batch = Batch.empty(rows, self.length)
        places, slots = (rows, self.places), (rows, self.length)
        extra = {
            STARTS: np.zeros(places, np.int32),
            LENGTHS: np.zeros(places, np.int32),
            ADVANTAGES: np.zeros(places, np.float32),
            SAMPLED_LOGPS: np.zeros(slots, np.float32),
            SHARE: np.zeros(rows, np.float32),
        }
        if self._score is not None:
            extra[OLD_LOGPS] = np.zeros(slots, np.float32)
        if self._reference is not None and not self._penalises:
            extra[REFERENCE_LOGPS] = np.zeros(slots, np.float32)
        return dataclasses.replace(batch, extra=extra)

    def batch_at(self, step: int, model: Callable[[], Decoder] | None = None) -> Batch:
        """The batch of a step. The first step of a generation samples its answers, with the model before that step."""
        if self._made is not None and self._made[0] == step:
            return self._made[1]
        number, within = divmod(step, self.settings.steps)
        if self._generation is None or self._generation[0] != number:
            assert model is not None, "sees_model is True, so the model is given"
            self._generation, self._old = (number, self._sampled(number, step, model())), {}
        answers = self._generation[1]
        part = within % self.settings.steps_per_generation
        own = answers[part * self.answers_per_step : (part + 1) * self.answers_per_step]
        batch = self._packed(own, sum(self._counted(answer) for answer in answers) / self.settings.steps_per_generation)
        if self._score is not None:
            if part not in self._old:
                assert model is not None
                self._old[part] = self._score(model(), batch)
            batch.extra[OLD_LOGPS][:] = self._old[part]
        if self._reference is not None and not self._penalises:
            assert model is not None
            batch.extra[REFERENCE_LOGPS][:] = self._reference(model(), batch)
        self._made = step, batch
        return batch

    def sources_at(self, step: int) -> list[str]:
        return [f"answers sampled for step {step}"]

    def position(self, step: int) -> Json:
        """The answers of the generation that `step` still uses, with their log-probabilities, as JSON for a checkpoint;
        None if `step` samples a new one."""
        if step % self.settings.steps == 0 or self._generation is None:
            return None
        number, answers = self._generation
        kept: list[Json] = [[a.prompt, [*a.ids], [*a.logps], a.finish_reason, a.advantage] for a in answers]
        old: dict[str, Json] = {str(part): values.tolist() for part, values in self._old.items()}
        return {"generation": number, "answers": kept, "old": old}

    def resume(self, step: int, position: Json) -> None:
        self._made = self._generation = None
        if position is None:
            return
        assert isinstance(position, dict)
        saved: Any = position
        answers = [
            Answer(p, tuple(ids), tuple(logps), reason, value) for p, ids, logps, reason, value in saved["answers"]
        ]
        self._generation = saved["generation"], answers
        self._old = {int(part): np.asarray(values, np.float32) for part, values in saved["old"].items()}

    def identity(self) -> dict[str, Json]:
        digest = 0
        for prompt in self.prompts:
            digest = zlib.crc32(np.asarray(prompt.ids, np.int32).tobytes(), digest)
        return {"prompts": len(self.prompts), "tokens_crc32": digest, "rewards": list(self.rewards.names)}

    def described(self, total_steps: int) -> list[str]:
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
        ]

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    def metrics_at(self, step: int) -> dict[str, float]:
        """The metrics of the generation that was sampled for the step; none if the step used an earlier one."""
        return self._metrics.pop(step, {})

    # ---- a generation

    def _chosen(self, number: int) -> list[int]:
        """The indices of the prompts of generation `number`. Generations take the prompts of an epoch in the order of
        its permutation, then those of the next epoch."""
        wanted, count = self._prompts_per_generation, len(self.prompts)
        places = range(number * wanted, (number + 1) * wanted)
        orders = {epoch: epoch_order(count, self.seed, epoch) for epoch in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def _sampled(self, number: int, step: int, model: Decoder) -> list[Answer]:
        """Makes generation `number` before `step`: samples answers from `model`, calls the reward functions, keeps the
        metrics for `metrics_at(step)`, and returns the answers with their advantages, prompt by prompt."""
        settings, started = self.settings, time.monotonic()
        prompts = [index for index in self._chosen(number) for _ in range(settings.num_generations)]
        longest = max(len(self.prompts[index].ids) for index in prompts)
        sampler = Sampler(
            model,
            length=longest + settings.max_completion_length,
            most_slots=min(settings.slots, len(prompts)),
        )
        rows = sampler.run(
            [self.prompts[index].ids for index in prompts],
            settings.max_completion_length,
            settings.temperature,
            seed=[_seed(self.seed, number, place) for place in range(len(prompts))],
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            eos_token_ids=self._ends,
            scaled_logprobs=True,
        )
        made = [
            Answer(index, tuple(row.ids), tuple(row.logprobs), row.finish_reason)
            for index, row in zip(prompts, rows, strict=True)
        ]
        del sampler  # frees its caches, for which the step has no room
        sampling = time.monotonic() - started
        sampled = self._as_rewarded(made)
        table = self.rewards(sampled)
        kl = self._divergences(model, made) if self._reference is not None and self._penalises else None
        values = self.advantages(table) if kl is None else self.advantages(table, kl=kl)
        made = [dataclasses.replace(answer, advantage=float(v)) for answer, v in zip(made, values, strict=True)]
        times = {"sampling_seconds": sampling, "reward_seconds": time.monotonic() - started - sampling}
        self._metrics[step] = self._measured(made, table) | times
        if kl is not None:
            self._metrics[step]["kl"] = float(kl.sum() / max(1, sum(map(self._counted, made))))
        self._tell(number, sampled, table, made)
        return made

    def _divergences(self, model: Decoder, answers: Sequence[Answer]) -> np.ndarray:
        """float32[answers]: the divergence of each answer from the reference of `model`, the sum of log p - log p_ref
        over its tokens that count, where p is the sampler's probability."""
        assert self._reference is not None
        found = np.zeros(len(answers), np.float32)
        for start in range(0, len(answers), self.answers_per_step):
            own = answers[start : start + self.answers_per_step]
            batch = self._packed(own, 0.0)
            apart = batch.weights * (batch.extra[SAMPLED_LOGPS] - self._reference(model, batch))
            for index, (row, at, _) in enumerate(self._places(own)):
                begin = at + len(self.prompts[own[index].prompt].ids) - 1
                found[start + index] = apart[row, begin : begin + len(own[index].ids)].sum()
        return found

    def _as_rewarded(self, answers: Sequence[Answer]) -> Sampled:
        """The answers in the form that reward functions get: texts and token ids, with the prompts and columns."""
        prompts = [self.prompts[answer.prompt] for answer in answers]
        return Sampled.of(
            [prompt.given for prompt in prompts],
            [prompt.columns for prompt in prompts],
            [answer.ids for answer in answers],
            [self._decode(self._without_end(answer)) for answer in answers],
        )

    def _without_end(self, answer: Answer) -> tuple[int, ...]:
        """Returns the answer's token ids without its last one if that is an end-of-sequence token (one of `_ends`).
        Reward functions get the text of these tokens."""
        return answer.ids[:-1] if answer.ids and answer.ids[-1] in self._ends else answer.ids

    def _measured(self, answers: Sequence[Answer], table: np.ndarray) -> dict[str, float]:
        """The metrics of a generation, by TRL's names. table: float32[answers, functions], the rewards."""
        lengths = np.array([len(answer.ids) for answer in answers])
        cut = np.array([answer.finish_reason == "length" for answer in answers])
        total = total_rewards(table, np.array(self.rewards.weights)).reshape(-1, self.settings.num_generations)
        scored = total[~np.isnan(total)]
        found = {
            "reward": float(scored.mean()) if scored.size else 0.0,
            "reward_std": float(scored.std(ddof=1)) if scored.size > 1 else 0.0,
            "frac_reward_zero_std": float(np.mean(_equal_groups(total))),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(cut.mean()),
        }
        for column, name in enumerate(self.rewards.names):
            values = table[:, column][~np.isnan(table[:, column])]
            found[f"rewards/{name}/mean"] = float(values.mean()) if values.size else 0.0
            found[f"rewards/{name}/std"] = float(values.std(ddof=1)) if values.size > 1 else 0.0
        return found

    def _tell(self, number: int, sampled: Sampled, table: np.ndarray, answers: Sequence[Answer]) -> None:
        """Adds the best answer of generation `number` and warnings to `news`, once every `_WARNED_EVERY` generations.
        sampled, answers: the answers, as reward functions got them and with their reasons of ending. table:
        float32[answers, functions], the rewards."""
        if number % _WARNED_EVERY:
            return
        total = total_rewards(table, np.array(self.rewards.weights))
        best = int(np.nanargmax(np.where(np.isnan(total), -np.inf, total)))
        self._news.append(
            f"a sample of reward {total[best]:.3f}: {_line(sampled.prompts[best])} -> "
            f"{_line(sampled.completions[best])}"
        )
        cut = np.mean([answer.finish_reason == "length" for answer in answers])
        if cut > _CUT_OFF:
            self._news.append(
                f"warning: {cut:.0%} of answers reach objective.max_completion_length = "
                f"{self.settings.max_completion_length}; raise it, ask for shorter answers, or set "
                "objective.mask_truncated_completions"
            )
        equal = np.mean(_equal_groups(total.reshape(-1, self.settings.num_generations)))
        if equal > _EQUAL:
            self._news.append(
                f"warning: all rewards of a group are equal in {equal:.0%} of groups, which teach nothing; check the "
                "reward functions, take prompts that are neither too easy nor too hard, or raise "
                "objective.num_generations"
            )

    # ---- rows

    def _counted(self, answer: Answer) -> int:
        """The number of tokens of an answer that count in the loss: all, or 0 if it was cut off and such are masked."""
        masked = self.settings.mask_truncated_completions and answer.finish_reason == "length"
        return 0 if masked else len(answer.ids)

    def _packed(self, answers: Sequence[Answer], tokens: float) -> Batch:
        """The batch of these answers, those of one step. tokens: the counted tokens of the generation divided by
        steps_per_generation, by which GRPO can divide the step's loss; they are spread over the rows as SHARE."""
        batch = self.empty(self.rows_per_step)
        for answer, place in zip(answers, self._places(answers), strict=True):
            self._write(batch, *place, answer)
        batch.extra[SHARE][:] = tokens / self.rows_per_step
        return batch

    def _places(self, answers: Sequence[Answer]) -> list[tuple[int, int, int]]:
        """Where each answer goes: (row, index in the row of the prompt's first token, number of the answer within the
        row), by first fit with the longest first."""
        used, filled = np.zeros(self.rows_per_step, np.int64), np.zeros(self.rows_per_step, np.int64)
        sizes = [len(self.prompts[answer.prompt].ids) + len(answer.ids) for answer in answers]
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
        prompt = self.prompts[answer.prompt].ids
        ids = np.array([*prompt, *answer.ids], np.int32)
        here, begin = slice(at, at + len(ids)), at + len(prompt) - 1
        batch.tokens[row, here] = ids
        batch.targets[row, at : at + len(ids) - 1] = ids[1:]
        batch.segment_ids[row, here] = place + 1
        batch.positions[row, here] = np.arange(len(ids))
        answered = slice(begin, begin + len(answer.ids))
        batch.weights[row, answered] = float(self._counted(answer) > 0)
        batch.extra[SAMPLED_LOGPS][row, answered] = answer.logps
        batch.extra[STARTS][row, place], batch.extra[LENGTHS][row, place] = begin, len(answer.ids)
        batch.extra[ADVANTAGES][row, place] = answer.advantage


def _equal_groups(total: np.ndarray) -> np.ndarray:
    """bool[groups]: whether all rewards of a group are equal, or missing. total: float32[groups, answers]."""
    low, high = np.where(np.isnan(total), np.inf, total).min(1), np.where(np.isnan(total), -np.inf, total).max(1)
    return ~(high - low > 1e-8)


def _seed(seed: int, generation: int, place: int) -> int:
    """The sampling seed of an answer: 31 bits that depend on the run's seed, and on the numbers of the generation and
    of the answer within it (`place`), so that a resumed run samples the same."""
    draw = np.random.Philox(key=np.array([seed, generation], np.uint64), counter=place)
    return int(draw.random_raw(1)[0] >> np.uint64(33))


def _line(value: Turns) -> str:
    """The text of a prompt's last turn or an answer on one line, cut after `_SHOWN` characters."""
    text = value if isinstance(value, str) else value[-1].get("content", "")
    text = " ".join(str(text).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
