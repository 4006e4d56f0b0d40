"""Evaluation by generation: the model answers held-out rows, and reward functions score the answers. An answer's random
numbers depend only on the seed and the row's index, so all evaluations of a run draw alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxtune.conversations.answers import Completions
from jaxtune.conversations.picture_processors import PictureProcessor, picture_arrays
from jaxtune.conversations.pictures import TAG
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.prefixes import begin_alike
from jaxtune.models.generation.requests import Constraint, PromptPictures
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import prefix_room, room_bytes
from jaxtune.system.sealed import crc32
from jaxtune.train.config import DataConfig, EvaluationConfig
from jaxtune.train.config.objective import DEFAULT_OBJECTIVE, ObjectiveConfig
from jaxtune.train.config.sections import REWARDS
from jaxtune.train.data.batches import SampledRows
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.digests import values_crc32
from jaxtune.train.sampled.answering import Prompt
from jaxtune.train.sampled.prompts import completions_of, constraint_of, read_prompts
from jaxtune.train.sampled.reward_functions import RewardFunctions, RewardOptions, Sampled, Turns, rewarded, text_of

KEY = "evaluation.generate"  # the config key that names the functions, for messages
SAMPLES = "eval_samples"  # the key of the samples in a line of metrics.jsonl
_MOST_SLOTS = 32  # the most answers that a device generates at a time
_SHOWN = 160  # characters of a question or an answer on the screen


@dataclasses.dataclass(frozen=True)
class Answered:
    """The results of an evaluation by generation: metrics, and some answers."""

    metrics: dict[str, float]
    """`eval_answers/NAME`: mean of function NAME over answers that it scores, NaN if none; `eval_reward` if they are
    the run's rewards: mean weighted sum, a missing value counts 0; `eval_answer_tokens`: mean tokens;
    `eval_answers_cut_off`: share that reached evaluation.max_new_tokens.
    """

    samples: list[dict[str, object]]
    """The first answers: {"question" (of a conversation, its last message), "given": the answer, NAME: value or NaN}.
    """

    def lines(self) -> list[str]:
        of_functions = [f"{name.partition('/')[2]} {value:.4f}" for name, value in self.metrics.items() if "/" in name]
        if "eval_reward" in self.metrics:
            of_functions.insert(0, f"reward {self.metrics['eval_reward']:.4f}")
        length, cut_off = self.metrics["eval_answer_tokens"], self.metrics["eval_answers_cut_off"]
        lines = [f"{', '.join(of_functions)} (answers of {length:.1f} tokens, {cut_off:.0%} cut off)"]
        for sample in self.samples:
            lines.append(f"  {_line(sample['question'])!r} -> {_line(sample['given'])!r}")
        return lines


@dataclasses.dataclass(frozen=True)
class AnswerMetrics:
    """Generates answers to held-out questions and scores them; a call with the model is one evaluation.

    Example:
      metrics = answer_metrics(EvaluationConfig(generate=("exact_number",)), data, data.eval, tokenizer, model)
      metrics(model).metrics  # {"eval_answers/exact_number": 0.5, ...}
    """

    prompts: Sequence[Prompt]
    """With the other columns of their rows, which functions may read."""

    functions: RewardFunctions
    """Each gets all answers in one call; if it fails, one by one."""

    max_new_tokens: int

    temperature: float
    """0: the most probable token."""

    ends: Sequence[int]

    completion: Completions
    """What functions get of an answer."""

    seed: int

    sample_rows: int
    """First answers that become samples."""

    most_slots: int
    """Answers of a device at a time: 32, or fewer if memory is short."""

    deterministic: bool
    """An answer has the same bits whatever else is generated at a time; slower."""

    are_rewards: bool = False
    """The run learns from these functions; their weighted sum is measured, too."""

    most_converted: int | None = None
    """Layers whose weights a sampler converts once (models/generation/converted.py); None: as many as fit. None are
    with `deterministic`.
    """

    processor: PictureProcessor | None = None
    """Of questions' pictures; None: they have none."""

    constraint: Callable[[int, Prompt], Constraint] | None = None
    """(the model's vocabulary, a question) -> which tokens its answer may have; None: any."""

    @property
    def identity(self) -> str:
        """8 hex digits of the questions' tokens, pictures and other columns."""
        columns = values_crc32(dict(prompt.columns) for prompt in self.prompts)
        pictures = [placed.digest for prompt in self.prompts for placed in prompt.pictures]
        return f"{crc32([repr([prompt.ids for prompt in self.prompts]).encode(), *pictures], columns):08x}"

    @property
    def sampled_rows(self) -> SampledRows:
        """The most tokens of a row and rows at a time."""
        longest = max(len(prompt.ids) for prompt in self.prompts)
        prefixes = not self.deterministic and begin_alike(prompt.ids for prompt in self.prompts)
        return SampledRows(longest + self.max_new_tokens, len(self.prompts), self.most_slots, prefixes=prefixes)

    def __call__(self, model: Decoder) -> Answered:
        """Answers and scores all questions; a function that raises gives NaN. RewardError for no list of numbers."""
        rows = self.sampled_rows
        sampler = Sampler(
            model,
            length=rows.length,
            most_slots=rows.on(Sharing.of(model)),
            most_converted=self.most_converted,
            deterministic=self.deterministic,
            prefix_bytes=prefix_room(room_bytes()) if rows.prefixes else None,
        )
        rows = list(
            sampler.run(
                [prompt.ids for prompt in self.prompts],
                self.max_new_tokens,
                self.temperature,
                self.seed,
                eos_token_ids=self.ends,
                pictures=[
                    PromptPictures.of(picture_arrays(len(prompt.ids), prompt.pictures, self.processor))
                    for prompt in self.prompts
                ],
                constraints=None
                if self.constraint is None
                else [self.constraint(model.config.vocab_size, prompt) for prompt in self.prompts],
            )
        )
        del sampler  # frees its caches before the functions run
        answers = [[token for token in row.ids if token not in self.ends] for row in rows]
        completions = [
            self.completion(question_prompt.turns, question_prompt.ids, ids)
            for question_prompt, ids in zip(self.prompts, answers, strict=True)
        ]
        sampled = Sampled.of(
            [prompt.turns for prompt in self.prompts],
            [{**prompt.columns, **prompt.shown()} for prompt in self.prompts],
            [row.ids for row in rows],
            completions,
        )
        table, logged, _ = rewarded(self.functions, sampled)
        metrics = {f"eval_answers/{name}": _mean(table[:, column]) for column, name in enumerate(self.functions.names)}
        if self.are_rewards:  # as in the objective, a function that does not apply to an answer adds nothing
            weighted = np.nan_to_num(table) * np.asarray(self.functions.weights)
            metrics["eval_reward"] = float(weighted.sum(1).mean())
        metrics |= {f"eval_{name}": value for name, value in logged.items()}
        metrics["eval_answer_tokens"] = float(np.mean([len(row.ids) for row in rows]))
        metrics["eval_answers_cut_off"] = float(np.mean([row.finish_reason == "length" for row in rows]))
        samples = [
            {
                "question": _question(question),
                "given": text_of(answer),
                **dict(zip(self.functions.names, values.tolist(), strict=True)),
            }
            for question, answer, values in list(zip(sampled.prompts, completions, table, strict=True))[
                : self.sample_rows
            ]
        ]
        return Answered(metrics, samples)


def answer_metrics(
    settings: EvaluationConfig,
    data: DataConfig,
    rows: object,
    tokenizer,
    model: Decoder,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
    rewards: RewardFunctions | None = None,
    *,
    seed: int = 0,
    deterministic: bool = False,
    pictures: PictureOptions | None = None,
) -> AnswerMetrics | None:
    """The evaluation that settings.generate asks for, of the first generate_rows held-out rows; None if it names no
    function. Nothing is generated yet.

      rows: a path, data set's name, or list of dicts.
      model: may have shapes.
      rewards: of a batch source given to the Trainer, for generate = [rewards]; None: the objective's.
      pictures: how those of rows are read; None refuses rows with pictures.

    ConfigError if a function cannot be loaded, no row has a question, or one cannot be asked (unless data.on_bad_row is
    "skip"); ValueError without such rows.
    """
    if not settings.generate:
        return None
    are_rewards = settings.generate == (REWARDS,)
    options, isolation = (
        RewardOptions(timeout_seconds=objective.reward_timeout, errors="skip"),
        objective.reward_isolation,
    )
    if not are_rewards:
        functions = RewardFunctions.named(settings.generate, key=KEY, isolation=isolation, **options)
    elif rewards is None:
        names = objective.reward_funcs or ()
        functions = RewardFunctions.named(names, objective.reward_weights, isolation=isolation, **options)
    else:
        functions = dataclasses.replace(rewards, errors="skip")
    most = model.config.context_length - settings.max_new_tokens
    ends, completions = ends_of(model, tokenizer), completions_of(tokenizer, data.trained_template)
    grammar = (objective.regex, objective.json_schema) if are_rewards else (None, None)
    data = dataclasses.replace(data, max_rows=settings.generate_rows)
    room_words = "evaluation.max_new_tokens the model's positions leave"
    return AnswerMetrics(
        read_prompts(rows, tokenizer, data, most, "data.eval", room_words, pictures=pictures),
        functions,
        settings.max_new_tokens,
        settings.temperature,
        ends,
        completions,
        seed,
        settings.sample_rows,
        _MOST_SLOTS,
        deterministic,
        are_rewards,
        processor=None if pictures is None else pictures.processor,
        constraint=constraint_of(*grammar, tokenizer, ends, completions),
    )


def _question(turns: Turns) -> str:
    """A text, or the last message's, with tags for pictures."""
    content = turns if isinstance(turns, str) else turns[-1].get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", TAG) for part in content)


def _mean(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean(dtype=np.float64)) if scored.size else float("nan")


def _line(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
