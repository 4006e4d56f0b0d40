"""Reward functions, which give the answers that a model sampled a number each, and the ready ones.

A reward function has TRL's signature. It is called once with all answers of a generation (one round of sampling) and
returns a number for each, or None where it does not apply:

```python
def short(prompts, completions, completion_ids, **columns):
    return [1.0 if len(ids) < 50 else 0.0 for ids in completion_ids]
```

A prompt that is text has completions that are text; one of messages has `[{"role": "assistant", "content": text}]`. The
columns of the rows come as lists, by name, one value for each answer. A function may be `async def`; such functions run
side by side, in one event loop for the whole run. Others run in the main thread."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from jaxtune.conversations.answers import whole_text
from jaxtune.train.config import ConfigError
from jaxtune.train.config.checks import unique_names
from jaxtune.train.objectives.reward_log import RewardLog
from jaxtune.train.user_code import errors as words
from jaxtune.train.user_code.calling import arguments, begin, call, is_async, name_of
from jaxtune.train.user_code.copies import own_copies
from jaxtune.train.user_code.loading import load_from_file
from jaxtune.train.user_code.loop import Outcome, Pending, TooLong
from jaxtune.train.user_code.patterns import searched
from jaxtune.train.user_code.processes import Isolated

logger = logging.getLogger(__name__)
# A reward function, with the signature that the module's docstring describes.
type RewardFunction = Callable
# A message of a conversation: its role, its content, and what else chat templates read.
type Message = dict[str, Any]
# A prompt or a completion: text, or messages.
type Turns = str | list[Message]
_KEY = "objective.reward_funcs"
ISOLATION = "objective.reward_isolation"
ENVIRONMENTS = "environments"  # the argument with the answers' environments
SHARED = frozenset({ENVIRONMENTS})  # arguments whose entries are objects, of which functions get no copies
_SHOWN = 200  # characters of a prompt or an answer in a message
_LARGEST = float(np.finfo(np.float32).max)  # advantages are float32


class RewardError(words.UserCodeError):
    """A reward function failed, took too long, or returned no rewards. It ends the run or the evaluation."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The answers of a generation (one round of sampling) or of an evaluation with their prompts, in the form of the
    arguments of reward functions. `RewardFunctions` is called with it, and reports of sampled answers read it. All
    lists have one entry for each answer."""

    prompts: list[Turns]
    """The prompt of each answer: text, or a list of messages."""

    completions: list[Turns]
    """The answers: text if the prompt is text; else a list of messages, one of the assistant, or several if tools were
    called."""

    completion_ids: list[list[int]]
    """The token ids of the answers."""

    columns: dict[str, list[object]]
    """{name: the values of the other columns of the data rows, for each answer that of its row}."""

    also: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further arguments by name, which are passed as they are and have no entry for each answer. RewardFunctions sets
    them to its own."""

    named: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """The same, only for functions with a parameter of that name."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Turns],
        columns: Sequence[Mapping[str, object]],
        completion_ids: Sequence[Sequence[int]],
        texts: Sequence[Turns],
    ) -> Sampled:
        """Makes the arguments of reward functions from answers. All arguments have one entry for each answer.

        Args:
          prompts: the prompts, text or messages.
          columns: {name: value} of the other columns of each data row; a column that only other rows have becomes None.
          completion_ids: the token ids of the answers.
          texts: the answers. A text becomes a message of the assistant if its prompt is messages; an answer that is a
            list of messages already, because tools were called in it, stays so.
        """
        completions: list[Turns] = [
            text if isinstance(prompt, str) or not isinstance(text, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = dict.fromkeys(name for own in columns for name in own)
        by_name = {name: [own.get(name) for own in columns] for name in names}
        return cls(list(prompts), completions, [list(ids) for ids in completion_ids], by_name)

    def __len__(self) -> int:
        """The number of answers."""
        return len(self.prompts)

    def only(self, index: int) -> Sampled:
        """A Sampled with only the answer at `index`. `RewardFunctions._one_by_one` calls a function that failed with
        one answer at a time by it."""
        columns = {name: [values[index]] for name, values in self.columns.items()}
        return dataclasses.replace(
            self,
            prompts=[self.prompts[index]],
            completions=[self.completions[index]],
            completion_ids=[self.completion_ids[index]],
            columns=columns,
        )


class RewardOptions(TypedDict, total=False):
    """Fields of RewardFunctions that functions do not decide."""

    timeout_seconds: float | None
    errors: Literal["stop", "skip"]
    also: Mapping[str, object]
    nan_is_none: bool
    log: RewardLog


@dataclasses.dataclass(frozen=True)
class RewardFunctions:
    """The reward functions of a run, with their weights and what happens if one fails. Called with a Sampled, it calls
    them all and returns the rewards, float64[answers, functions], NaN where a function does not apply, or raises
    RewardError. These are not weighted: `weights` are for those who add them up, as advantages and metrics do.
    Evaluations by generated answers score answers by it too.

    Example:
      rewards = RewardFunctions.named(["rewards.py:is_right", "brevity"], weights=(1.0, 0.1))
      table = rewards(sampled)  # float64[answers, 2]
    """

    functions: tuple[RewardFunction, ...]
    """The functions; each gets all answers in one call."""

    names: tuple[str, ...]
    """The unique names of the functions in metrics."""

    weights: tuple[float, ...]
    """The weight of each function's rewards in their sum."""

    timeout_seconds: float | None = None
    """The longest that a call of one function may take; None is no limit."""

    errors: Literal["stop", "skip"] = "stop"
    """What an exception of a function does. "stop" ends the run, "skip" leaves answers for which it is raised without a
    reward of this function (NaN). To know these, a synchronous function is called with one answer at a time; an
    asynchronous one is not called again, and "skip" leaves all answers of its call without. A call that takes too long
    or returns no rewards ends the run in any case."""

    also: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further arguments, {name: value}; each function gets those that its parameters name, or all if it has
    **parameters."""

    nan_is_none: bool = False
    """Whether a reward that is NaN counts as None, as in TRL, or ends the run."""

    log: RewardLog = dataclasses.field(default_factory=RewardLog)
    """Takes what functions log by the arguments `log_metric` and `log_extra`."""

    @classmethod
    def of(
        cls,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        isolation: Literal["process"] | None = None,
        **options: Unpack[RewardOptions],
    ) -> RewardFunctions:
        """RewardFunctions of functions, named by their `__name__` (objects without one: by their class); equal names
        get numbers ("f", "f_2").

        Args:
          functions: at least one.
          weights: a weight for each function; None: all 1.
          isolation: "process": those that are not ready ones run in a process without devices, one for the functions of
            a file, which is killed at timeout_seconds.
          options: other fields.
        Raises:
          ConfigError: there is no function, or another number of weights.
          UserCodeError: another process cannot find a function.
        """
        if not functions:
            raise ConfigError("objective.reward_funcs = []: learning from rewards needs at least one reward function")
        names = unique_names([name_of(function) for function in functions])
        if isolation is not None:
            ready = [*READY.values()]
            functions = [one if one in ready else Isolated(one, ISOLATION) for one in functions]
        return cls(tuple(functions), names, (1.0,) * len(functions), **options).weighed(weights)

    def weighed(self, weights: Sequence[float] | None, of_environments: int = 0) -> RewardFunctions:
        """The same functions with a weight for each, in their order; None: as they are. The last `of_environments` may
        be left out, and then weigh 1. ConfigError: another number of weights, or one that is not finite."""
        if weights is None:
            return self
        weights, count = tuple(float(weight) for weight in weights), len(self.functions)
        if len(weights) == count - of_environments:
            weights += (1.0,) * of_environments
        if len(weights) != count or not all(abs(weight) <= _LARGEST for weight in weights):
            what = "reward function" if count == 1 else "reward functions"
            raise ConfigError(
                f"objective.reward_weights = {list(weights)}: there {'is' if count == 1 else 'are'} {count} {what} "
                f"({', '.join(self.names)}); give each a finite weight, in this order"
            )
        return dataclasses.replace(self, weights=weights)

    @classmethod
    def named(
        cls,
        wanted: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        key: str = _KEY,
        isolation: Literal["process"] | None = None,
        **options: Unpack[RewardOptions],
    ) -> RewardFunctions:
        """RewardFunctions of the names that a recipe has: `file.py:function`, or of ready functions, such as
        exact_match. key: the config key that has them, for errors; other arguments are those of `of`. ConfigError: a
        function cannot be loaded."""
        return cls.of([load_function(name, key) for name in wanted], weights, isolation=isolation, **options)

    def __call__(self, sampled: Sampled) -> np.ndarray:
        """float64[answers, functions], NaN where a function does not apply. Each function has copies of its own.
        Asynchronous functions run side by side, in the run's event loop; the others one by one, in this thread.

        Raises:
          RewardError: a function failed (errors = "stop"), took too long, or returned no list of numbers.
        """
        sampled = dataclasses.replace(sampled, also=self.also, named=self.log.arguments)
        pending = {
            index: begin(function, _given(function, sampled), name, self.timeout_seconds)
            for index, (function, name) in enumerate(zip(self.functions, self.names, strict=True))
            if is_async(function)
        }
        try:
            columns = [self._rewards(index, sampled, pending.get(index)) for index in range(len(self.functions))]
        finally:
            for one in pending.values():
                one.cancel()
        return np.stack(columns, axis=1)

    def _rewards(self, index: int, sampled: Sampled, pending: Pending | None) -> np.ndarray:
        """float64[answers]: the rewards of one function. pending: its call, if it is asynchronous."""
        function, name = self.functions[index], self.names[index]
        outcome = self._outcome(function, name, sampled) if pending is None else pending.outcome()
        if outcome.error is None:
            return _checked(name, outcome.value, len(sampled), self.nan_is_none)
        if isinstance(outcome.error, TooLong):
            raise self._too_long(function, name, sampled, outcome.error)
        if pending is None:
            return self._one_by_one(function, name, sampled, outcome.error)
        if self.errors == "stop":
            line = f"  (the first of {len(sampled)} answers that one call rewards)"
            raise _failed(name, outcome.error, sampled, 0, line=line)
        self._warn(name, outcome.error, len(sampled), len(sampled))
        return np.full(len(sampled), np.nan, np.float32)

    def _outcome(self, function: RewardFunction, name: str, sampled: Sampled) -> Outcome:
        return call(function, _given(function, sampled), name, self.timeout_seconds)

    def _one_by_one(self, function: RewardFunction, name: str, sampled: Sampled, first: BaseException) -> np.ndarray:
        """The rewards of a function that failed with all answers at once, by calls with one answer each. first: what it
        raised then."""
        values = np.full(len(sampled), np.nan, np.float32)
        failed: list[BaseException] = []
        for index in range(len(sampled)):
            outcome = self._outcome(function, name, sampled.only(index))
            error = outcome.error
            if error is None:
                try:
                    values[index] = _checked(name, outcome.value, 1)[0]
                except RewardError as refused:
                    error = refused
            if error is not None:
                failed.append(error)
                if self.errors == "stop":
                    raise _failed(name, error, sampled, index, earlier=first)
        if self.errors == "stop":
            raise _failed(name, first, sampled, 0, "; each answer alone it rewards without an error")
        if failed:
            self._warn(name, failed[0], len(failed), len(sampled))
        return values

    def _warn(self, name: str, error: BaseException, failed: int, answers: int) -> None:
        what = f"{name} failed for {failed} of {answers} answers, which it does not count for; the first"
        logger.warning("%s", words.described(what, error))

    def _too_long(self, function: RewardFunction, name: str, sampled: Sampled, error: TooLong) -> RewardError:
        """The error about a call over its limit. Of an isolated function it names the answer at which a second pass,
        answer by answer, is over the same limit."""
        limit, row = self.timeout_seconds or 0.0, ""
        hint = "raise it, or give the function's own requests a limit"
        if isinstance(function, Isolated):
            hint, until = "its process was ended; raise it", time.monotonic() + limit
            for index in range(len(sampled)):
                seconds = until - time.monotonic()
                alone = sampled.only(index)
                late = call(function, _given(function, alone), name, seconds) if seconds > 0 else Outcome(error=error)
                if isinstance(late.error, TooLong):
                    row = "\n" + _row(sampled, index)
                    break
        elif not is_async(function):
            hint += f"; code that keeps Python's lock is interrupted in a process only: {ISOLATION}=process"
        return RewardError(
            f"reward function {name} took longer than objective.reward_timeout = {limit:g} s{error.detail}; {hint}{row}"
        )


def _failed(
    name: str,
    error: BaseException,
    sampled: Sampled,
    index: int,
    which: str = "",
    line: str = "",
    earlier: BaseException | None = None,
) -> RewardError:
    """The RewardError about an exception. index: of the answer that is shown; which, line: words about it; earlier:
    what the call with all answers raised, if this is of a call with one."""
    lines = [_row(sampled, index), line, "objective.reward_errors=skip leaves such answers without this reward"]
    if earlier is not None and words.in_words(earlier) != words.in_words(error):
        lines.append(words.described("the call with all answers raised", earlier))
    made = RewardError(words.described(f"reward function {name} failed{which}", error, *filter(None, lines)))
    made.__cause__ = earlier or error
    return made


def _row(sampled: Sampled, index: int) -> str:
    prompt, answer = _shortened(sampled.prompts[index]), _shortened(sampled.completions[index])
    return f"  prompt: {prompt}\n  answer: {answer}"


def load_function(name: str, key: str = _KEY) -> RewardFunction:
    """Returns the reward function that a recipe names, for `RewardFunctions.named`. `file.py:function` is loaded by
    running the file; a name without a colon is that of a ready function of this module, such as exact_match. Tools and
    rollout functions are loaded without it.

    Args:
      name: the name.
      key: the config key that has the name, for errors.
    Raises:
      ConfigError: there is no such function, or its file cannot be run.
    """
    if ":" not in name:
        if name not in READY:
            raise ConfigError(
                f"{key}: {name!r} is no ready function ({', '.join(READY)}); a function of your own is file.py:function"
            )
        return READY[name]
    return load_from_file(name, key)


def _given(function: RewardFunction, sampled: Sampled) -> dict[str, object]:
    """Copies of the arguments that the function names, or of all if it has **parameters. Of equal names, a further
    argument hides a column, and prompts, completions and completion_ids hide both."""
    turns = dict(prompts=sampled.prompts, completions=sampled.completions, completion_ids=sampled.completion_ids)
    asked = inspect.signature(function).parameters if sampled.named else {}
    named = {name: value for name, value in sampled.named.items() if name in asked and name not in sampled.columns}
    also = {name: value for name, value in {**named, **sampled.also}.items() if name not in turns}
    of_answers = arguments(function, {**sampled.columns, **turns})
    return own_copies(of_answers, SHARED) | arguments(function, also)


def _checked(name: str, values: Any, count: int, nan_is_none: bool = False) -> np.ndarray:
    """The rewards that the function `name` returned for `count` answers, as float64[count], NaN where it returned None.
    RewardError: they are no ordered collection of `count` entries, or one is neither None nor a number that is finite
    in float32. nan_is_none: NaN counts as None."""
    unordered = isinstance(values, str | bytes | bytearray | Mapping | Set)
    try:
        given = None if unordered else len(values)
    except TypeError:  # an array without dimensions has the method, and no length
        given = None
    if given != count:
        what = repr(values) if given is None else f"{given} rewards"
        raise RewardError(
            f"reward function {name} returned {what} for {count} answers; it must return a list of as many"
        )
    return np.array([_number(name, value, nan_is_none) for value in values], np.float64)


def _number(name: str, value, nan_is_none: bool) -> float:
    """A reward as a float, NaN for None; the arguments and errors are those of `_checked`."""
    if value is None:
        return math.nan
    try:
        number = None if isinstance(value, str | bytes | bytearray) else float(value)
    except OverflowError:  # an integer
        number = math.inf
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise RewardError(f"reward function {name} returned {value!r}; a reward is a number or None")
    if math.isnan(number) and nan_is_none:
        return number
    if not abs(number) <= _LARGEST:  # NaN is not
        most = "" if math.isnan(number) else f" of at most {_LARGEST:.1e}"
        raise RewardError(
            f"reward function {name} returned {number}; a reward is a finite number{most}, or None where there is none"
        )
    return number


def _shortened(value: Turns) -> str:
    """The text of `value`, a prompt or an answer, for the RewardError about a function that failed: the contents of
    messages are joined by line breaks, and a text of more than 200 characters is cut there and gets "..."."""
    text = value if isinstance(value, str) else "\n".join(str(message.get("content", "")) for message in value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ---- ready rewards


def text_of(completion: Turns) -> str:
    """Returns the text of an answer, so that the ready reward functions can read answers of both kinds; evaluations by
    generated answers call it too, for the last message of a question that they show. If `completion` is text, it is
    returned as it is. If it is a list of messages, the content of the last message is returned, because the messages
    before it call tools. An empty list gives ""."""
    return completion if isinstance(completion, str) else str((completion or [{}])[-1].get("content") or "")


def with_thoughts(completion: Turns) -> str:
    """The text of an answer after its thoughts in <think> tags, if it is a message with `reasoning_content`."""
    return completion if isinstance(completion, str) else whole_text((completion or [{}])[-1])


# A minus belongs to a number unless it follows an operand, as in "5-3".
_SIGN = r"(?:(?<![\w)\]}%!])(?P<minus>[-\u2212\u2013\uFE63\uFF0D])\\?[$\u20AC\u00A3\u00A5]?)?"
# Digits, in groups of three by commas or without, decimals and an exponent.
_GROUPED = r"(?<!\d,)\d{1,3}(?>(?:,|\{,\})\d{3})+(?!\d|,\d|\{,\}\d)"
_PLAIN = rf"(?>(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?)"
_NUMBER = re.compile(
    rf"{_SIGN}(?:(?P<whole>\d+)[ ]?(?=\\[dt]?frac[{{\d])|(?P<and>\d+)[ ](?=\d+/\d))?"
    rf"(?:\\[dt]?frac(?:\{{(?P<above>[-\u2212]?{_PLAIN})\}}\{{(?P<below>{_PLAIN})\}}|(?P<digits>\d\d))"
    rf"|(?P<chain>{_PLAIN}(?:/{_PLAIN})*))"
)


def last_number(text: str) -> float | None:
    """The last number in `text`; None if there is none. "1,024" is 1024, but "1,2,3" are three numbers. A minus (also
    U+2212) before the digits counts, unless it follows a digit, a letter or a closing bracket: of "5-3" the last number
    is 3. "1/2", "1 1/2", LaTeX's fractions and exponents ("1e5") are one number; other expressions are not computed.

    ```python
    assert last_number("It costs -$1,024.50") == -1024.5 and last_number("2, 3/4") == 0.75
    ```
    """
    found = [*_NUMBER.finditer(text)]
    if not found:
        return None
    last = found[-1]
    if last["digits"]:
        parts = [*last["digits"]]
    else:
        parts = last["chain"].split("/") if last["chain"] else [last["above"], last["below"]]
    numbers = [float(re.sub(r"[,{}]", "", part).replace("\u2212", "-")) for part in parts]
    if len(numbers) == 2 and numbers[1]:
        value = numbers[0] / numbers[1] + float(last["whole"] or last["and"] or 0)
    else:  # also a date, 12/25/2024
        value = numbers[-1]
    return -value if last["minus"] and len(numbers) < 3 else value


def exact_number(completions: list[Turns], answer: list[object], **columns: object) -> list[float | None]:
    """A ready reward: 1.0 if the `last_number` of an answer's text equals that of the column `answer`, else 0.0; None
    if the column has no number."""
    wanted = [last_number(str(value)) for value in answer]
    return [
        None if number is None else float(last_number(text_of(completion)) == number)
        for completion, number in zip(completions, wanted, strict=True)
    ]


def exact_match(completions: list[Turns], answer: list[object], **columns: object) -> list[float]:
    """A ready reward function, which a recipe names in objective.reward_funcs or evaluation.generate: for each of
    `completions` 1.0 if its text (`text_of`: of messages, the content of the last one) equals str of the row's column
    `answer` apart from white space at the ends, else 0.0. Other columns are ignored."""
    return [
        float(text_of(completion).strip() == str(value).strip())
        for completion, value in zip(completions, answer, strict=True)
    ]


_WITHIN = r"[^<]*(?:<(?!/?(?:think|answer)>)[^<]*)*"  # text without the two tags
_TAGGED = re.compile(rf"\s*<think>{_WITHIN}</think>\s*<answer>{_WITHIN}</answer>\s*")


def tagged_format(completions: list[Turns], **columns: object) -> list[float]:
    """A ready reward: 1.0 if an answer's text is one `<think>...</think>` and one `<answer>...</answer>`, without these
    tags in them and with nothing but white space around, else 0.0."""
    return [float(_TAGGED.fullmatch(with_thoughts(completion)) is not None) for completion in completions]


def regex(completions: list[Turns], pattern: list[str], **columns: object) -> list[float]:
    """A ready reward: 1.0 if the regular expression in the row's column `pattern` is found anywhere in the answer's
    text, else 0.0. ValueError: one is no regular expression, or takes over 10 s: it is searched for in a process that
    is killed then."""
    return [float(found) for found in searched(pattern, [text_of(completion) for completion in completions])]


def brevity(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """A ready reward function, which a recipe names in objective.reward_funcs; it slightly prefers short answers: the
    number of an answer's tokens divided by -1000. completion_ids: the token ids of each answer. All columns are
    ignored."""
    return [-len(ids) / 1000 for ids in completion_ids]


def rollout_reward(reward: list[float | None], **columns: object) -> list[float | None]:
    """A reward function for runs with a rollout function: returns the column `reward` that the rollout function
    returned, a number for each answer, or None where there is none. It is used if a run has no other reward function.
    Other columns are ignored."""
    return list(reward)


READY: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (exact_number, exact_match, tagged_format, regex, brevity, rollout_reward)
}
