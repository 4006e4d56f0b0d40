"""Reads the prompts of data rows for runs that sample answers (`read_prompts`), and makes the batch source of a run
that learns from rewards (GRPO, RLOO) from them and from the functions of the user's code, its `OwnParts`
(`sampled_answers`). `read_each` and `prompt_of` serve other readers of prompts, such as on-policy distillation, and
evaluations by generated answers read their questions by `read_prompts` too. `_answering` makes
what samples the answers of a run, and `completions_of` what reward functions get of them."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtune.conversations.answers import AnswerReader, Completions
from jaxtune.conversations.messages import ConversationError, read_messages, turns_in
from jaxtune.models.placement import partition
from jaxtune.system.terminal import say
from jaxtune.train.config import ConfigError, DataConfig, TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.sections import Unset
from jaxtune.train.data.formats import Example, detect_format, normalize, refuse_media
from jaxtune.train.data.reading import open_sources
from jaxtune.train.data.row_errors import Excluded, RowError, SetupError, check_unicode
from jaxtune.train.data.templates import RowEncoder, resolve_template
from jaxtune.train.objectives.answering import Answering, OneTurn, Sampling, ToolTurns
from jaxtune.train.objectives.packed_answers import Prompt, Settings, packed_shape
from jaxtune.train.objectives.policy import GRPO, log_probs_of, reference_log_probs
from jaxtune.train.objectives.reward_functions import Message, RewardFunctions, RewardOptions, Turns, rollout_reward
from jaxtune.train.objectives.rollout_function import RolloutFunc, RolloutFunction
from jaxtune.train.objectives.rollouts import SampledAnswers, Score
from jaxtune.train.objectives.tool_formats import ToolFormat
from jaxtune.train.objectives.tools import Tools
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
    beside: str = "objective.max_completion_length data.length leaves",
    tools: Tools | None = None,
    cut: bool = False,
) -> list[Prompt]:
    """Reads and tokenises the prompts of data rows.

    A row has a `prompt`, text or messages, as TRL's rows have. Rows for supervised fine-tuning serve too: the prompt is
    what comes before the last answer, which becomes the column `answer` unless the row has one (`prompt_of` says which
    answers do).

    Args:
      rows: a path, a data set's name, or a list of dicts.
      tokenizer: a fast Hugging Face tokenizer.
      data: the options of reading rows; only its template, columns, max_rows (the most prompts; None: all) and
        on_bad_row have an effect.
      most_tokens: the most tokens that a prompt may have.
      key: the config key that names the rows, for errors.
      beside: words for the error about a prompt that is too long, which reads "beside {beside} room for N": what takes
        the other tokens of a row, and which option limits both.
      tools: the tools that the chat template describes in the prompts; None: there are none.
      cut: whether a longer prompt loses its first tokens, which a line says, instead of being an error.
    Raises:
      ConfigError: no row has a prompt that can be used; or a row cannot be read or its prompt is too long, unless
        data.on_bad_row is "skip", which leaves such rows out. The message names the row's file and line. Also, in any
        case, if a row's column `environment` names none of the environments in `tools`.
      ValueError: there is no such file or data set.
    """
    encoder = RowEncoder(tokenizer, template=data.trained_template, today=data.today)
    if not cut or most_tokens < 1:
        return read_each(rows, data, key, lambda row: prompt_of(row, encoder, most_tokens, beside, tools))
    whole = read_each(rows, data, key, lambda row: prompt_of(row, encoder, sys.maxsize, beside, tools))
    if longer := sum(len(prompt.ids) > most_tokens for prompt in whole):
        say(f"{longer:,} of {len(whole):,} prompts have more than {most_tokens:,} tokens: they lose their first ones")
    return [dataclasses.replace(prompt, ids=prompt.ids[-most_tokens:]) for prompt in whole]


def read_each[T](rows: object, data: DataConfig, key: str, make: Callable[[Mapping[str, object]], T]) -> list[T]:
    """Reads data rows, converts each by `make`, and returns the results in order. `read_prompts` and on-policy
    distillation read their rows by it.

    Args:
      rows: a path, a data set's name, or a list of dicts.
      data: the options of reading rows; only its columns, max_rows (the most results; None: all) and on_bad_row have an
        effect.
      key: the config key that names the rows, for errors.
      make: a function that gets a row, {column: value}, and returns its result, or raises RowError if it cannot be
        used. Other exceptions of it are passed on.
    Raises:
      ConfigError: no row can be used; or one cannot, unless data.on_bad_row is "skip", which leaves such rows out. The
        message names the row's file and line.
      ValueError: there is no such file or data set.
    """
    found: list[T] = []
    left_out: list[str] = []
    excluded: list[str] = []
    sources = open_sources(rows, columns=data.columns)
    for source in sources:
        for row in source.read(0):
            if data.max_rows is not None and len(found) >= data.max_rows:
                break
            try:
                if row.value is None:
                    raise RowError(str(row.error))
                found.append(make(row.value))
            except Excluded as error:
                excluded.append(f"{row.place}: {error}")
            except RowError as error:
                if data.on_bad_row == "error":
                    raise ConfigError(f"{row.place}: {error}; data.on_bad_row=skip leaves such rows out") from None
                left_out.append(f"{row.place}: {error}")
    if excluded:
        say(f"{key}: {len(excluded):,} rows left out by their marks, first {excluded[0]}")
    if not found:
        first = f"; the first: {[*left_out, *excluded][0]}" if left_out or excluded else ""
        where = ", ".join(dict.fromkeys(source.name for source in sources))
        raise ConfigError(f"{key}: {where} has no prompt that could be used{first}")
    return found


def sampled_answers(
    objective: GRPO,
    rows: object,
    tokenizer: Any,
    config: TrainConfig,
    ends: Sequence[int],
    positions: int,
    own: OwnParts | None = None,
) -> SampledAnswers:
    """Makes the batch source of a run that learns from rewards: reads the prompts, and combines them with what samples
    the answers and what rewards them. Rewards are those of `own.rewards`, and those that the environments in
    `own.tools` give by `get_reward`; without `own.rewards` and `own.tools`, the column `reward` that the rollout
    function returns.

    Args:
      objective: GRPO or RLOO.
      rows: the rows with prompts: a path, a data set's name, or a list of dicts.
      tokenizer: a fast Hugging Face tokenizer.
      config: the config of the run.
      ends: the token ids that end an answer.
      positions: the most tokens of a prompt and its answer that the model allows.
      own: the reward functions, tools with environments, rollout function and function for a reference's
        log-probabilities that a Python script gives; None: those that the section config.objective names
        (`OwnParts.named`), which are without the last. The Trainer gives None; only the trainers with TRL's interface
        (compat/rewarded.py) give them.
    Raises:
      ConfigError: a row or a function cannot be used, the lengths in the config leave no room for prompt and answer, or
        config.rows_per_step, the answers of a step, is no multiple of num_generations.
      ValueError: there is no such file or data set.
    """
    data, settings = config.data, objective.settings
    own = OwnParts.named(config.objective) if own is None else own
    rewards, reference = own.all_rewards(), own.reference
    weights = np.asarray(rewards.weights, np.float64)
    if reference is None and objective.penalises:
        reference = functools.partial(reference_log_probs, settings.temperature)
    chooses = own.chooses_length or isinstance(data.length, Unset)
    most = positions if isinstance(data.length, Unset) else min(data.length, positions)
    room = most - settings.max_completion_length
    cut = own.longest_prompt is not None
    room = min(room, own.longest_prompt) if own.longest_prompt is not None else room
    prompts = read_prompts(rows, tokenizer, data, room, tools=own.tools, cut=cut)
    length, multiple = data.length, rows_multiple(config)
    if chooses:
        longest = max(len(prompt.ids) for prompt in prompts) + settings.max_completion_length
        length, multiple = packed_shape(longest, config.rows_per_step, multiple)
        if own.tools is not None or own.rollout is not None:  # they may make prompts longer
            length, multiple = max(length, min(data.length, positions)), rows_multiple(config)
    return SampledAnswers(
        prompts,
        rewards,
        settings,
        functools.partial(objective.advantages, weights=weights),
        _answering(own, settings, tokenizer, config, ends, min(length, positions)),
        answers_per_step=config.rows_per_step,
        length=length,
        chosen_length=chooses,
        seed=config.seed,
        rows_multiple=multiple,
        score=functools.partial(log_probs_of, settings.temperature) if objective.reuses else None,
        reference=reference,
        penalises=objective.penalises,
        own_reference=own.reference is not None,
    )


def rows_multiple(config: TrainConfig) -> int:
    """The number that the packed rows of a step must be a multiple of, so that each device has equally many in each
    micro-batch: the devices of `config.mesh`, whose size -1 is what the other leaves of all, times the micro-batches.
    It is 1 without config.mesh, because the run then chooses a mesh that divides the rows."""
    if config.mesh is None:
        return 1
    return partition.make_mesh(*config.mesh.sizes).size * (config.micro_batches or 1)


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """The functions of the user's code that a run with sampled answers (GRPO, RLOO) calls. A recipe names them, or a
    Python script gives them; `sampled_answers` makes the run's batch source with them."""

    rewards: RewardFunctions | None = None
    """The reward functions of the user, without those of environments; None if there are none."""
    reward_weights: Sequence[float] | None = None
    """A weight for each of `rewards`, then for each class of environments with a reward (which may be left out: 1)."""
    reward_options: RewardOptions = dataclasses.field(default_factory=lambda: RewardOptions())
    """The fields timeout_seconds, errors, ... of RewardFunctions, for rewards that only environments or the rollout
    function give."""
    tools: Tools | None = None
    """The tools that the model may call, and environments, whose methods are tools; None if the model calls none."""
    rollout: RolloutFunc | None = None
    """A function that samples the answers in its own way (rollout_function.py); None: the run samples them itself."""
    most_iterations: int | None = None
    """The most turns of an answer in which tools are called; None is no limit."""
    chooses_length: bool = False
    """Whether data.length only limits a prompt with its answer, and the length of packed rows is chosen."""
    longest_prompt: int | None = None
    """Prompts of more tokens lose their first ones; None: one that leaves no room for an answer is an error."""
    reference: Score | None = None
    """A function that computes log-probabilities under a reference model of the script's (rollouts.Score). None: the
    reference, if one is needed, is the model with its adapter off."""

    @classmethod
    def named(cls, wanted: ObjectiveConfig) -> OwnParts:
        """Loads the functions that a config names: those of the user's code, file.py:name, by running these files, and
        ready reward functions by their names. Reward functions of both kinds are loaded by `load_function`, tools,
        environments and the rollout function by `load_from_file`. wanted: the config's section `objective`. The field
        `reference` of the result is None. `sampled_answers` calls it if no OwnParts were given. Raises ConfigError if a
        function cannot be loaded."""
        options = RewardOptions(timeout_seconds=wanted.reward_timeout, errors=wanted.reward_errors or "stop")
        rewards = None
        if wanted.reward_funcs:
            rewards = RewardFunctions.named(wanted.reward_funcs, isolation=wanted.reward_isolation, **options)
        tools = None
        if wanted.tools or wanted.environment_factory:
            tools = Tools.named(
                wanted.tools or (),
                wanted.environment_factory,
                wanted.tool_timeout,
                wanted.tool_isolation,
                wanted.reset_timeout,
            )
        rollout = None
        if wanted.rollout_func is not None:
            rollout = load_from_file(wanted.rollout_func, "objective.rollout_func")
        return cls(rewards, wanted.reward_weights, options, tools, rollout, wanted.max_tool_calling_iterations)

    def all_rewards(self) -> RewardFunctions:
        """The reward functions of the run: `rewards`, then those of environments; or, without both, the column `reward`
        of the rollout function. ConfigError: there are none, or another number of weights."""
        rewards, own = self.rewards, 0 if self.rewards is None else len(self.rewards.functions)
        if self.tools is not None:
            rewards = self.tools.rewards(rewards, **self.reward_options)
        if rewards is None:
            rewards, own = RewardFunctions.of([rollout_reward], **self.reward_options), 1
        return rewards.weighed(self.reward_weights, len(rewards.functions) - own)


def _answering(
    own: OwnParts,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    ends: Sequence[int],
    length: int,
) -> Answering:
    """Makes what samples the answers of a run that learns from rewards: a RolloutFunction if the user's code has one,
    ToolTurns if it has tools, else OneTurn. `sampled_answers` gives it to SampledAnswers.

    Args:
      own: the functions of the user's code.
      settings: how answers are sampled.
      tokenizer: a fast Hugging Face tokenizer.
      config: the config of the run, for its chat template.
      ends: the token ids that end an answer.
      length: the most tokens of a prompt with its answer.
    Raises:
      ConfigError: there are tools, and the chat template cannot write their calls or answers.
    """
    encoder = RowEncoder(tokenizer, template=config.data.trained_template, today=config.data.today)
    completions = completions_of(tokenizer, config.data.trained_template)
    sampling = Sampling(settings, tuple(sorted(set(ends))), completions.decode, completions=completions)
    if own.rollout is not None:

        def encoded(prompt: Turns) -> tuple[int, ...]:
            """The token ids of `prompt`, text or messages, up to where the answer begins, for a rollout function."""
            text = prompt if isinstance(prompt, str) else None
            messages = [{"role": "user", "content": text}] if isinstance(prompt, str) else read_messages(prompt)
            example = Example(prompt=text, messages=messages)
            return tuple(map(int, encoder.encode_prompt(example)))

        return RolloutFunction(own.rollout, sampling, encoded, length)
    if own.tools is None:
        return OneTurn(sampling)
    tools = own.tools

    def with_tools(messages: Sequence[Message], columns: Mapping[str, object]) -> tuple[int, ...]:
        """The token ids of the prompt `messages` with the schemas of the tools of a data row, whose other columns are
        `columns`."""
        example = Example(messages=read_messages(messages), tools=tools.schemas(columns) or None)
        return tuple(map(int, encoder.encode_prompt(example)))

    form = ToolFormat(tokenizer, config.data.trained_template, sampling.ends, config.data.today)
    return ToolTurns(sampling, tools, form, with_tools, length, own.most_iterations)


def completions_of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> Completions:
    """What reward functions get of answers to prompts in a chat template, as data.template names it."""
    try:
        reader = AnswerReader(tokenizer, resolve_template(tokenizer, template))
    except SetupError:  # prompts are text alone
        reader = None
    return Completions(
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)), reader, template is not None
    )


def prompt_of(
    value: Mapping[str, object], encoder: RowEncoder, most_tokens: int, beside: str, tools: Tools | None = None
) -> Prompt:
    """The prompt of a data row, tokenised as in training, with the row's columns other than prompt, messages and
    conversations. If the row has an answer too, that becomes the column `answer`, unless there is one: the last message
    if it is the assistant's, or the row's completion, of which, if it is messages, the last one counts. `read_prompts`
    calls it for each row, and on-policy distillation does so only for the tokens of the prompt.

    Args:
      value: the row, {column: value}.
      encoder: tokenises with the chat template of the run.
      most_tokens: the most tokens that the prompt may have.
      beside: words for the error about a prompt that is too long, which reads "beside {beside} room for N".
      tools: the tools that the chat template describes in the prompt, or None.
    Raises:
      RowError: the row has no prompt, or it is empty, too long or no valid Unicode; the row has an image, video or
        audio column; or there are tools and the prompt is a text, in which the template cannot describe them.
      ConfigError: the row's column `environment` names none of the run's environments.
    """
    refuse_media(value)
    try:
        given = turns_in(value.get("prompt"), "prompt")
    except ConversationError as error:
        raise RowError(str(error)) from None
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, str) and not _answered(value):
        check_unicode(given)
        example = Example(prompt=given, messages=[{"role": "user", "content": given}])  # a template shows the latter
    elif isinstance(given, list) and not _is_answer(value.get("completion")):
        example = normalize({**value, "messages": given}, "messages")
    else:
        example = normalize(value, detect_format(value))
    columns = {name: column for name, column in value.items() if name not in ("prompt", "messages", "conversations")}
    shown: Turns
    if isinstance(given, str) and not example.completion and example.text is None:
        shown = given
    elif example.messages is not None:
        messages = list(example.messages)
        if messages and messages[-1]["role"] == "assistant":
            columns.setdefault(ANSWER, messages.pop()["content"])
        shown = messages = messages[: example.prompt_messages or None]
        example = dataclasses.replace(example, messages=messages)
    elif example.text is not None:
        raise RowError("it is one text, and has no prompt to answer: give it a column `prompt`")
    else:
        shown = example.prompt or ""
        if example.completion:
            columns.setdefault(ANSWER, example.completion)
            example = dataclasses.replace(example, completion="")
    if tools is not None:
        if isinstance(shown, str):
            raise RowError("its prompt is a text; a prompt with objective.tools is a list of messages")
        example = dataclasses.replace(example, tools=tools.schemas(columns) or None)
    ids = tuple(int(token) for token in encoder.encode_prompt(example))
    if not ids:
        raise RowError("its prompt is empty")
    if len(ids) > most_tokens:
        raise RowError(f"its prompt has {len(ids):,} tokens, and beside {beside} room for {most_tokens:,}")
    return Prompt(shown, ids, columns)


def _is_answer(completion: object) -> bool:
    """Whether a column `completion`, beside a prompt of messages, is an answer in a form of fine-tuning data: a text, a
    turn or a list of turns. Any other value is only a column for reward functions. `prompt_of` calls it to tell whether
    the row is one of fine-tuning data."""
    turns = completion if isinstance(completion, list) else [completion]
    return bool(turns) and (isinstance(completion, str) or all(isinstance(turn, Mapping) for turn in turns))


def _answered(value: Mapping[str, object]) -> bool:
    """Whether the data row `value`, {column: value}, has a column `completion` or `response` (even if it is None), as
    rows for supervised fine-tuning do. `prompt_of` calls it for rows whose prompt is a text: one with such a column is
    read as a row for supervised fine-tuning, and its completion becomes the column ANSWER."""
    return any(name in value for name in ("completion", "response"))
