"""Reads prompts of data rows, and makes the batch source of runs that learn from rewards (GRPO, RLOO)."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtune.conversations.answers import AnswerReader, Completions
from jaxtune.conversations.messages import in_parts, pictures_of, read_messages, turns_in
from jaxtune.conversations.reads import Reads, RowsRead, noted, told
from jaxtune.models.generation.grammars import Grammars, grammar_of
from jaxtune.models.generation.requests import Constraint
from jaxtune.models.placement import partition
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError, DataConfig, MeshConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.packing.answers import packed_shape
from jaxtune.train.data.rendering.formats import (
    ARGUMENTS,
    HISTORY,
    Example,
    asked,
    of_row,
    picture_columns,
)
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.data.rendering.templates import RowEncoder, resolve_template
from jaxtune.train.data.rows.reading import open_sources
from jaxtune.train.data.rows.row_errors import Excluded, RowError, SetupError
from jaxtune.train.objectives.policy import GRPO, log_probs_of, reference_log_probs
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answering import Answering, OneTurn, Prompt, Sampling, ToolTurns
from jaxtune.train.sampled.reward_functions import Message, RewardFunctions, RewardOptions, Turns, rollout_reward
from jaxtune.train.sampled.rollout_function import RolloutFunc, RolloutFunction
from jaxtune.train.sampled.rollouts import SampledAnswers, Score
from jaxtune.train.sampled.tool_formats import ToolFormat
from jaxtune.train.sampled.tools import Tools
from jaxtune.train.user_code.loading import load_from_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "answer"  # the column in which reward functions get a row's own answer


def read_prompts(
    rows: object,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    most_tokens: int,
    key: str = "data.train",
    room_words: str = "objective.max_completion_length data.length leaves",
    tools: Tools | None = None,
    cuts_long: bool = False,
    pictures: PictureOptions | None = None,
) -> RowsRead[Prompt]:
    """Reads and tokenises prompts: a row's `prompt`, text or messages, as in TRL, or of rows for fine-tuning what comes
    before the last answer, which becomes the column `answer` unless there is one.

    Raises ConfigError without a usable prompt, for a bad or too long one (unless on_bad_row is "skip"), or an unknown
    environment; ValueError if there is no such file.

      data: its template, columns, max_rows (most prompts) and on_bad_row count.
      key: the rows' config key, for errors.
      room_words: words for "beside {beside} room for N": what takes a row's other tokens.
      cuts_long: a longer prompt loses its first tokens, unless prompts have pictures.
      pictures: how those of rows are read; None refuses rows with pictures.
      most_tokens: of a prompt. tools: None: the run has none.
    """
    encoder = RowEncoder(tokenizer, template=data.trained_template, today=data.today, pictures=pictures)

    def read(most: int) -> RowsRead[Prompt]:
        return read_each(
            rows,
            data,
            key,
            lambda row, file: prompt_of(row, encoder, most, room_words, tools, file),
            "given to functions alone",
        )

    if not cuts_long or most_tokens < 1 or pictures is not None:
        return read(most_tokens)
    uncut_prompts = read(sys.maxsize)
    if longer := sum(len(prompt.ids) > most_tokens for prompt in uncut_prompts):
        say(
            f"{longer:,} of {len(uncut_prompts):,} prompts have more than {most_tokens:,} tokens: they lose "
            "their first ones"
        )
    uncut_prompts[:] = [dataclasses.replace(prompt, ids=prompt.ids[-most_tokens:]) for prompt in uncut_prompts]
    return uncut_prompts


def read_each[T](
    rows: object,
    data: DataConfig,
    key: str,
    make: Callable[[Mapping[str, object], str], T],
    of_others: str = "not read",
) -> RowsRead[T]:
    """Converts each data row, and the name of its file, by `make`, in order; RowError leaves a row out or stops
    (on_bad_row).

    Raises ConfigError if none or, unless "skip", one is unusable; ValueError if there is no such file. Of `data`,
    columns, max_rows (most results) and on_bad_row count.
    """
    results: RowsRead[T] = RowsRead()
    reads: Reads = {}
    others: list[str] = []
    left_out: list[str] = []
    excluded: list[str] = []
    sources = open_sources(rows, columns=data.columns)
    for source in sources:
        for row in source.read(0):
            if data.max_rows is not None and len(results) >= data.max_rows:
                break
            try:
                if row.value is None:
                    raise RowError(str(row.error))
                with noted() as row_reads:
                    results.append(make(row.value, source.name))
                used, unused = of_row(row.value, row_reads, plain=False)
                reads, others = used | reads, [*dict.fromkeys([*others, *unused])]
            except Excluded as error:
                excluded.append(f"{row.place}: {error}")
            except RowError as error:
                if data.on_bad_row == "error":
                    raise ConfigError(f"{row.place}: {error}; data.on_bad_row=skip leaves such rows out") from None
                left_out.append(f"{row.place}: {error}")
    if excluded:
        say(f"{key}: {len(excluded):,} rows left out by their marks, first {excluded[0]}")
    if not results:
        first = f"; the first: {[*left_out, *excluded][0]}" if left_out or excluded else ""
        where = ", ".join(dict.fromkeys(source.name for source in sources))
        raise ConfigError(f"{key}: {where} has no prompt that could be used{first}")
    results.columns = told(reads, (name for name in others if name not in reads), of_others)
    return results


def sampled_answers(
    objective: GRPO,
    rows: object,
    tokenizer: Any,
    steps: AnswerSteps,
    ends: Sequence[int],
    positions: int,
    user_functions: UserFunctions,
    pictures: PictureOptions | None = None,
) -> SampledAnswers:
    """The batch source of a run that learns from rewards. They are `user_functions.rewards`, then those of
    environments' `get_reward`; without both, the rollout function's column `reward`.

    Raises ConfigError if a row or function cannot be used, lengths leave no room, or rows_per_step is no multiple of
    num_generations; ValueError if there is no such file.

      ends: token ids that end an answer.
      positions: most tokens of prompt and answer that the model allows.
      pictures: how those of prompts are read; None refuses prompts with pictures.
    """
    if pictures is not None:
        user_functions.require_prompts_as_they_are()
    data, settings = steps.data, objective.settings
    rewards, reference = user_functions.all_rewards(), user_functions.reference
    weights = np.asarray(rewards.weights, np.float64)
    if reference is None and objective.penalises:
        reference = functools.partial(reference_log_probs, settings.temperature)
    chooses = user_functions.chooses_length or isinstance(data.length, Unset)
    most = positions if isinstance(data.length, Unset) else min(data.length, positions)
    room = most - settings.max_completion_length
    cuts_prompts = user_functions.longest_prompt is not None
    room = min(room, user_functions.longest_prompt) if user_functions.longest_prompt is not None else room
    prompts = read_prompts(
        rows, tokenizer, data, room, tools=user_functions.tools, cuts_long=cuts_prompts, pictures=pictures
    )
    length, multiple = data.length, steps.rows_multiple
    if chooses:
        longest = max(len(prompt.ids) for prompt in prompts) + settings.max_completion_length
        length, multiple = packed_shape(longest, steps.answers, multiple)
        if user_functions.tools is not None or user_functions.rollout is not None:  # they may make prompts longer
            length, multiple = max(length, min(data.length, positions)), steps.rows_multiple
    return SampledAnswers(
        prompts,
        rewards,
        settings,
        functools.partial(objective.advantages, weights=weights),
        _answering(user_functions, settings, tokenizer, data, ends, min(length, positions), pictures),
        answers_per_step=steps.answers,
        length=length,
        chosen_length=chooses,
        seed=steps.seed,
        rows_multiple=multiple,
        score=functools.partial(log_probs_of, settings.temperature, exact=settings.exact) if objective.reuses else None,
        correction=objective.correction if objective.corrects else None,
        reference=reference,
        penalises=objective.penalises,
        own_reference=user_functions.reference is not None,
        processor=None if pictures is None else pictures.processor,
        patches_per_row=data.patches_per_row,
    )


@dataclasses.dataclass(frozen=True)
class AnswerSteps:
    """How prompts are read, and how many answers a step has."""

    data: DataConfig
    answers: int
    """In a step."""
    micro_batches: int | None
    """None: any number."""
    mesh: MeshConfig | None
    """None: the run chooses one that divides the rows."""
    seed: int

    @property
    def rows_multiple(self) -> int:
        """What a step's packed rows are a multiple of: the mesh's devices times the micro-batches; 1 without a mesh."""
        if self.mesh is None:
            return 1
        return partition.make_mesh(*self.mesh.sizes).size * (self.micro_batches or 1)


@dataclasses.dataclass(frozen=True)
class UserFunctions:
    """The user's functions of a run with sampled answers, from a recipe or a script."""

    rewards: RewardFunctions | None = None
    """Without those of environments."""
    reward_weights: Sequence[float] | None = None
    """For each of `rewards`, then of environments with a reward (may be left out: 1)."""
    reward_options: RewardOptions = dataclasses.field(default_factory=lambda: RewardOptions())
    """Of RewardFunctions, if only environments or the rollout function reward."""
    tools: Tools | None = None
    rollout: RolloutFunc | None = None
    """Samples the answers (rollout_function.py); None: the run does."""
    most_iterations: int | None = None
    """Most turns with calls; None: no limit."""
    chooses_length: bool = False
    """Whether data.length is only a limit, and packed rows' length is chosen."""
    longest_prompt: int | None = None
    """Longer prompts lose their first tokens; None: an error."""
    reference: Score | None = None
    """Log-probabilities under a script's reference; None: the model with its adapter off."""

    @classmethod
    def named(cls, section: ObjectiveConfig) -> UserFunctions:
        """Loads the functions that a config names, by running their files. Raises ConfigError."""
        options = RewardOptions(timeout_seconds=section.reward_timeout, errors=section.reward_errors or "stop")
        rewards = None
        if section.reward_funcs:
            rewards = RewardFunctions.named(section.reward_funcs, isolation=section.reward_isolation, **options)
        tools = None
        if section.tools or section.environment_factory:
            tools = Tools.named(
                section.tools or (),
                section.environment_factory,
                section.tool_timeout,
                section.tool_isolation,
                section.reset_timeout,
            )
        rollout = None
        if section.rollout_func is not None:
            rollout = load_from_file(section.rollout_func, "objective.rollout_func")
        return cls(rewards, section.reward_weights, options, tools, rollout, section.max_tool_calling_iterations)

    def require_prompts_as_they_are(self) -> None:
        """Raises ConfigError for functions between whose turns prompts change."""
        for key, function in (("rollout_func", self.rollout), ("tools or environment_factory", self.tools)):
            if function is not None:
                raise ConfigError(
                    f"objective.{key}: not supported yet in a run with pictures; leave it out, or train on text alone "
                    "(model.pictures=false, and rows without pictures)"
                )

    def all_rewards(self) -> RewardFunctions:
        """All reward functions of the run. Raises ConfigError if there are none, or another number of weights."""
        rewards, own_count = self.rewards, 0 if self.rewards is None else len(self.rewards.functions)
        if self.tools is not None:
            rewards = self.tools.rewards(rewards, **self.reward_options)
        if rewards is None:
            rewards, own_count = RewardFunctions.of([rollout_reward], **self.reward_options), 1
        return rewards.weighed(self.reward_weights, len(rewards.functions) - own_count)


def _answering(
    user_functions: UserFunctions,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    ends: Sequence[int],
    length: int,
    pictures: PictureOptions | None = None,
) -> Answering:
    """A RolloutFunction, ToolTurns, or OneTurn, by the user's functions. ConfigError if the template lacks calls."""
    encoder = RowEncoder(tokenizer, template=data.trained_template, today=data.today)
    completions = completions_of(tokenizer, data.trained_template)
    processor = None if pictures is None else pictures.processor
    constraint = constraint_of(settings.regex, settings.json_schema, tokenizer, ends, completions)
    sampling = Sampling(
        settings, tuple(sorted(set(ends))), completions.decode, None, completions, processor, constraint
    )
    if user_functions.rollout is not None:

        def encoded(prompt: Turns) -> tuple[int, ...]:
            text = prompt if isinstance(prompt, str) else None
            messages = [{"role": "user", "content": text}] if isinstance(prompt, str) else read_messages(prompt)
            example = Example(prompt=text, messages=messages)
            return tuple(map(int, encoder.encode_prompt(example)))

        return RolloutFunction(user_functions.rollout, sampling, encoded, length)
    if user_functions.tools is None:
        return OneTurn(sampling)
    tools = user_functions.tools

    def with_tools(messages: Sequence[Message], columns: Mapping[str, object]) -> tuple[int, ...]:
        example = Example(messages=read_messages(messages), tools=tools.schemas(columns) or None)
        return tuple(map(int, encoder.encode_prompt(example)))

    form = ToolFormat(tokenizer, data.trained_template, sampling.ends, data.today)
    return ToolTurns(sampling, tools, form, with_tools, length, user_functions.most_iterations)


def constraint_of(
    regex: str | None,
    json_schema: str | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    completions: Completions,
) -> Callable[[int, Prompt], Constraint] | None:
    """Sampling.constraint of the objective's keys. ConfigError for a grammar that is not followed."""
    if regex is None and json_schema is None:
        return None
    try:
        grammar = grammar_of(json_schema, regex)
    except ValueError as error:
        key, value = ("regex", regex) if json_schema is None else ("json_schema", json_schema)
        raise ConfigError(f"objective.{key} = {value!r}: {error}") from None
    assert grammar is not None
    compiled = functools.cache(lambda vocab_size: Grammars(tokenizer, list(ends), vocab_size))

    def constraint(vocab_size: int, prompt: Prompt) -> Constraint:
        grammars, reader = compiled(vocab_size), completions.reader
        if reader is None or (isinstance(prompt.turns, str) and not completions.renders_texts):
            return grammars.constraint(grammar)
        return grammars.after_thoughts(grammar, prompt.ids, reader)

    return constraint


def completions_of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Completions:
    """What reward functions get of answers in a chat template, as data.template names it."""
    try:
        reader = AnswerReader(tokenizer, resolve_template(tokenizer, template))
    except SetupError:  # prompts are text alone
        reader = None
    return Completions(
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)), reader, template is not None
    )


def prompt_of(
    value: Mapping[str, object],
    encoder: RowEncoder,
    most_tokens: int,
    room_words: str,
    tools: Tools | None = None,
    file: str = "",
) -> Prompt:
    """A row's prompt, tokenised as in training, with its other columns: text if the column `prompt` is text, as in TRL,
    else messages. An answer (a last assistant message, or the completion) becomes the column `answer` unless there is
    one.

    Raises RowError for a missing, empty, too long or invalid prompt, media columns, or a text with tools, which a
    template cannot describe there; ConfigError for an unknown environment.

      room_words: words for "beside {beside} room for N".
      file: name of the row's, beside which its pictures may be.
    """
    access = None if encoder.pictures is None else encoder.pictures.access(file)
    example, answer = asked(value, access)
    columns = {name: column for name, column in value.items() if name not in ("prompt", "messages", "conversations")}
    if answer is not None:
        columns.setdefault(ANSWER, answer)
    prompt: Turns = [in_parts(message) for message in example.messages or ()]
    cell = turns_in(value.get("prompt"), "prompt")
    if isinstance(cell, str) and not value.get(HISTORY) and not any(map(pictures_of, example.messages or ())):
        prompt = cell if example.prompt is None else example.prompt  # with the column of a system message
    if encoder.is_plain(example):
        _refuse_beside_text(example)
    if tools is not None:
        if isinstance(prompt, str):
            raise RowError("its prompt is a text; a prompt with objective.tools is a list of messages")
        if example.begun:
            raise RowError("its prompt ends with a begun answer, which cannot be continued with objective.tools")
        if example.arguments:
            raise RowError(f"{ARGUMENTS[0]} cannot be followed with objective.tools: set data.template_arguments")
        example = dataclasses.replace(example, tools=tools.schemas(columns) or None)
    tokens, pictures = encoder.encode_asked(example)
    ids = tuple(tokens.tolist())
    if not ids:
        raise RowError("its prompt is empty")
    if len(ids) > most_tokens:
        raise RowError(f"its prompt has {len(ids):,} tokens, and beside {room_words} room for {most_tokens:,}")
    names = picture_columns(columns) if access is not None else []
    columns = {name: column for name, column in columns.items() if name not in names}
    return Prompt(prompt, ids, columns, pictures, *names)


def _refuse_beside_text(example: Example) -> None:
    """Raises RowError for what a prompt without a chat template cannot show."""
    for name, cell in (("tools", example.tools), (ARGUMENTS[0], example.arguments)):
        if cell:
            raise RowError(
                f"column {name} beside a prompt of text, which only a chat template can follow: set data.template, "
                "make the prompt a list of messages, or leave the column out"
            )
