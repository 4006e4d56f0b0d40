"""Evaluation by generation: the model answers held-out rows, and functions score each answer.

The functions are reward functions (objectives/reward_functions.py). In a run that learns from rewards they may be its
own rewards (evaluation.generate = [rewards]). The random numbers of an answer depend only on the seed and the row's
index, so all evaluations of a run draw alike. `answer_metrics` makes an `AnswerMetrics` once for a run; a call of it
with the model is one evaluation, and returns an `Answered`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from jaxtune.conversations.answers import Completions
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import ends_of
from jaxtune.models.generation.sampler import Sampler
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.sections import REWARDS
from jaxtune.train.data.batches import SampledRows
from jaxtune.train.digests import values_crc32
from jaxtune.train.objectives.packed_answers import Prompt
from jaxtune.train.objectives.prompts import completions_of, read_prompts
from jaxtune.train.objectives.reward_functions import RewardFunctions, RewardOptions, Sampled, text_of

KEY = "evaluation.generate"  # the config key that names the functions, for messages
SAMPLES = "eval_samples"  # the key of the samples in a line of metrics.jsonl
_MOST_SLOTS = 32  # the most answers that are generated at a time
_SHOWN = 160  # characters of a question or an answer on the screen


@dataclasses.dataclass(frozen=True)
class Answered:
    """The results of an evaluation by generation, in which the model answers held-out rows and functions score the
    answers: the metrics, and some of the answers. `lines` gives both in words, for the screen. A run prints the lines,
    and adds the metrics and the samples to the evaluation's line of metrics.jsonl. The evaluate command prints them
    too, and adds both to its results."""

    metrics: dict[str, float]
    """`eval_answers/NAME`: the mean value of the function NAME over the answers that it applies to and does not fail
    for, NaN if there is none; `eval_reward`, if the functions are the run's own rewards: the mean over all answers of
    the weighted sum of their values, where a missing value counts as 0; `eval_answer_tokens`: the mean number of tokens
    of an answer; `eval_answers_cut_off`: the share of answers that reached evaluation.max_new_tokens without an end."""

    samples: list[dict[str, object]]
    """The answers to the first evaluation.sample_rows rows, each as {"question": text (of a conversation, its last
    message), "given": the model's answer, NAME: the value of the function NAME for this answer, or NaN}."""

    def lines(self) -> list[str]:
        """The metrics and the samples in words, as lines for the screen. The first has the reward, if it was measured,
        the mean value of each function, the mean length of the answers and the share that was cut off; then comes a
        line for each sample, its question and answer. A run prints them after each such evaluation, and the evaluate
        command once; metrics.jsonl has the numbers and samples themselves."""
        of_functions = [f"{name.partition('/')[2]} {value:.4f}" for name, value in self.metrics.items() if "/" in name]
        if "eval_reward" in self.metrics:
            of_functions.insert(0, f"reward {self.metrics['eval_reward']:.4f}")
        length, cut = self.metrics["eval_answer_tokens"], self.metrics["eval_answers_cut_off"]
        found = [f"{', '.join(of_functions)} (answers of {length:.1f} tokens, {cut:.0%} cut off)"]
        for sample in self.samples:
            found.append(f"  {_line(sample['question'])!r} -> {_line(sample['given'])!r}")
        return found


@dataclasses.dataclass(frozen=True)
class AnswerMetrics:
    """Generates a model's answers to the questions of held-out rows, and scores them. `answer_metrics` makes it once
    for a Trainer; each evaluation of a run calls it with the model and gets the results, an `Answered`. The evaluate
    command calls that of its Trainer. `identity` is a checksum of the questions' tokens only, and `sampled_rows` the
    size, in tokens and rows, of what is generated at a time.

    Example:
      metrics = answer_metrics(config, config.data.eval, tokenizer, model)
      metrics(model).metrics  # {"eval_answers/exact_number": 0.5, ...}
    """

    prompts: Sequence[Prompt]
    """The questions as token ids, each with the other columns of its row, such as the right answer, which functions may
    read."""

    functions: RewardFunctions
    """The functions that score answers. Each gets all answers in one call; if it fails, it gets them one by one."""

    max_new_tokens: int
    """The most tokens of an answer."""

    temperature: float
    """The temperature of sampling; 0 takes the most probable token each time."""

    ends: Sequence[int]
    """The token ids that end an answer."""

    completion: Completions
    """What functions get of an answer."""

    seed: int
    """The seed of sampling."""

    sample_rows: int
    """How many answers, those to the first questions, the results have as samples, for the screen and metrics.jsonl."""

    most_slots: int
    """The most answers that are generated at a time: 32, or fewer if memory is short (`setup.with_slots`)."""

    deterministic: bool
    """True: an answer has the same bits whatever else is generated at the same time, which is slower. False: they may
    differ."""

    are_rewards: bool = False
    """Whether the functions are the rewards that the run learns from; if so, their weighted sum is measured too."""

    most_converted: int | None = None
    """The most layers whose weights a sampler converts once for all tokens (models/generation/converted.py); None: as
    many as fit into the free memory. `setup.with_slots` sets it if memory is limited. With `deterministic` none are
    converted."""

    @property
    def identity(self) -> str:
        """8 hex digits that identify these questions, by their tokens and the other columns of their rows, with which
        their answers are scored."""
        columns = values_crc32(dict(prompt.columns) for prompt in self.prompts)
        return f"{zlib.crc32(repr([prompt.ids for prompt in self.prompts]).encode(), columns):08x}"

    @property
    def sampled_rows(self) -> SampledRows:
        """The size of what is generated at a time: the most tokens of a row (the longest question and an answer) and
        the most rows. `setup.with_slots` plans by it how many answers fit beside the weights and the optimizer's
        states, and a call of the object makes its sampler of this size."""
        longest = max(len(prompt.ids) for prompt in self.prompts)
        return SampledRows(longest + self.max_new_tokens, min(self.most_slots, len(self.prompts)))

    def __call__(self, model: Decoder) -> Answered:
        """Generates answers to all questions with `model`, and scores them. Returns the metrics, and the first
        `sample_rows` answers. An answer for which a function raises an exception has no value of that function (NaN).

        Raises:
          RewardError: a function returned something other than a list of numbers, or took too long.
        """
        rows = self.sampled_rows
        sampler = Sampler(
            model,
            length=rows.length,
            most_slots=rows.most,
            most_converted=self.most_converted,
            deterministic=self.deterministic,
        )
        rows = list(
            sampler.run(
                [prompt.ids for prompt in self.prompts],
                self.max_new_tokens,
                self.temperature,
                self.seed,
                eos_token_ids=self.ends,
            )
        )
        del sampler  # frees its caches before the functions run
        answers = [[token for token in row.ids if token not in self.ends] for row in rows]
        completions = [self.completion(one.given, one.ids, ids) for one, ids in zip(self.prompts, answers, strict=True)]
        sampled = Sampled.of(
            [prompt.given for prompt in self.prompts],
            [prompt.columns for prompt in self.prompts],
            [row.ids for row in rows],
            completions,
        )
        table = self.functions(sampled)
        logged, _ = self.functions.log.taken(len(sampled))
        found = {f"eval_answers/{name}": _mean(table[:, column]) for column, name in enumerate(self.functions.names)}
        if self.are_rewards:  # as in the objective, a function that does not apply to an answer adds nothing
            weighted = np.nan_to_num(table) * np.asarray(self.functions.weights)
            found["eval_reward"] = float(weighted.sum(1).mean())
        found |= {f"eval_{name}": value for name, value in logged.items()}
        found["eval_answer_tokens"] = float(np.mean([len(row.ids) for row in rows]))
        found["eval_answers_cut_off"] = float(np.mean([row.finish_reason == "length" for row in rows]))
        samples = [
            {
                "question": question if isinstance(question, str) else text_of(question[-1:]),
                "given": text_of(answer),
                **dict(zip(self.functions.names, values.tolist(), strict=True)),
            }
            for question, answer, values in list(zip(sampled.prompts, completions, table, strict=True))[
                : self.sample_rows
            ]
        ]
        return Answered(found, samples)


def answer_metrics(
    config: TrainConfig, rows: object, tokenizer, model: Decoder, rewards: RewardFunctions | None = None
) -> AnswerMetrics | None:
    """Makes the evaluation by generation that config.evaluation.generate asks for, of the first
    evaluation.generate_rows held-out rows; returns None if it names no function. Trainer calls it when it is made.
    Nothing is generated yet. If a function raises an exception for an answer, the answer gets no value of it and the
    run continues, whatever objective.reward_errors says. objective.reward_timeout limits each call.

    Args:
      config: the config of the run.
      rows: the held-out rows: a path, a data set's name, or a list of dicts.
      tokenizer: a Hugging Face tokenizer with the chat template of the run.
      model: the run's model, of which the context length and the end tokens are read; its arrays may be
        `jax.ShapeDtypeStruct`s.
      rewards: the reward functions of the batch source that was given to the Trainer, as jaxtune.compat does; they
        score the answers if evaluation.generate = [rewards], and are not used otherwise. None: no such source was
        given, and those that config.objective names are loaded here.
    Raises:
      ConfigError: a function cannot be loaded, or no row has a question; or a row has none, or its question leaves no
        room for an answer, unless data.on_bad_row is "skip", which leaves such rows out.
      ValueError: there is no such file or data set.
    """
    wanted = config.evaluation
    if not wanted.generate:
        return None
    are_rewards, given = wanted.generate == (REWARDS,), config.objective
    options, isolation = RewardOptions(timeout_seconds=given.reward_timeout, errors="skip"), given.reward_isolation
    if not are_rewards:
        functions = RewardFunctions.named(wanted.generate, key=KEY, isolation=isolation, **options)
    elif rewards is None:
        names = given.reward_funcs or ()
        functions = RewardFunctions.named(names, given.reward_weights, isolation=isolation, **options)
    else:
        functions = dataclasses.replace(rewards, errors="skip")
    most = model.config.context_length - wanted.max_new_tokens
    data = dataclasses.replace(config.data, max_rows=wanted.generate_rows)
    beside = "evaluation.max_new_tokens the model's positions leave"
    return AnswerMetrics(
        read_prompts(rows, tokenizer, data, most, "data.eval", beside),
        functions,
        wanted.max_new_tokens,
        wanted.temperature,
        ends_of(model, tokenizer),
        completions_of(tokenizer, config.data.trained_template),
        config.seed,
        wanted.sample_rows,
        _MOST_SLOTS,
        config.deterministic,
        are_rewards,
    )


def _mean(values: np.ndarray) -> float:
    """The mean of those of `values` (float[n], a function's scores of all answers) that are not NaN; NaN if there are
    none. A score is NaN if the function does not apply to the answer, or failed for it. A metric `eval_answers/NAME` is
    such a mean; `eval_reward` is computed otherwise."""
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else float("nan")


def _line(value: object) -> str:
    """`value`, a question or an answer that `Answered.lines` shows on the screen, as text on one line: white space
    becomes single spaces, and a text of more than 160 characters is cut there and gets "..."."""
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
