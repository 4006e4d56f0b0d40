"""Reward functions, which give sampled answers a number each, and the ready ones.

They have TRL's signature, are called once with all answers of a generation, and return a number for each, or None where
they do not apply:

```python
def short(prompts, completions, completion_ids, **columns):
    return [1.0 if len(ids) < 50 else 0.0 for ids in completion_ids]
```

Completions are text for prompts that are text, else `[{"role": "assistant", "content": text}]`. Columns of the rows
come as lists, by name. `async def` functions run side by side in the run's event loop, others in the main thread.
"""

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
from jaxtune.system import processes
from jaxtune.train.config import ConfigError
from jaxtune.train.config.checks import unique_names
from jaxtune.train.sampled.reward_log import RewardLog
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
    """A reward function failed, took too long, or returned no rewards; ends the run or evaluation."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A generation's answers in the form of reward functions' arguments; lists have an entry for each."""

    prompts: list[Turns]
    """Text or messages."""

    completions: list[Turns]
    """Text if the prompt is; else messages, several if tools were called."""

    completion_ids: list[list[int]]

    columns: dict[str, list[object]]

    further: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further arguments, passed as they are."""

    named: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """The same, only for functions with such a parameter."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Turns],
        columns: Sequence[Mapping[str, object]],
        completion_ids: Sequence[Sequence[int]],
        texts: Sequence[Turns],
    ) -> Sampled:
        """The arguments of reward functions: a text answer to messages becomes a message, and a column that only other
        rows have is None.

          columns: {name: value} of each row.
          texts: the answers, text or messages.
        """
        completions: list[Turns] = [
            text if isinstance(prompt, str) or not isinstance(text, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = dict.fromkeys(name for row_columns in columns for name in row_columns)
        by_name = {name: [row_columns.get(name) for row_columns in columns] for name in names}
        return cls(list(prompts), completions, [list(ids) for ids in completion_ids], by_name)

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, index: int) -> Sampled:
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
    """A run's reward functions. Called with a Sampled: float64[answers, functions], unweighted, NaN where a function
    does not apply; raises RewardError.

    Example:
      rewards = RewardFunctions.named(["rewards.py:is_right", "brevity"], weights=(1.0, 0.1))
      table = rewards(sampled)  # float64[answers, 2]
    """

    functions: tuple[RewardFunction, ...]

    names: tuple[str, ...]

    weights: tuple[float, ...]

    timeout_seconds: float | None = None
    """Of one call; None: no limit."""

    errors: Literal["stop", "skip"] = "stop"
    """"stop" ends the run at an exception; "skip" leaves the failing answers without this reward (NaN): a synchronous
    function is called again answer by answer, of an asynchronous one the whole call is left out. Timeouts and wrong
    results always end it.
    """

    also: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further arguments, for functions that name them or have **parameters."""

    nan_is_none: bool = False
    """Whether NaN counts as None, as in TRL, or ends the run."""

    log: RewardLog = dataclasses.field(default_factory=RewardLog)
    """Takes `log_metric` and `log_extra`."""

    @classmethod
    def of(
        cls,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        isolation: Literal["process"] | None = None,
        **options: Unpack[RewardOptions],
    ) -> RewardFunctions:
        """RewardFunctions named by `__name__` or class; equal names get numbers ("f", "f_2").

        Raises ConfigError without functions or for another number of weights, UserCodeError if another process cannot
        find one.

          weights: None: all 1.
          isolation: "process": those that are not ready ones run in a process without devices, one a file, killed at
          timeout_seconds.
        """
        if not functions:
            raise ConfigError("objective.reward_funcs = []: learning from rewards needs at least one reward function")
        names = unique_names([name_of(function) for function in functions])
        if isolation is not None:
            ready = [*READY.values()]
            functions = [candidate if candidate in ready else Isolated(candidate, ISOLATION) for candidate in functions]
        return cls(tuple(functions), names, (1.0,) * len(functions), **options).weighed(weights)

    def weighed(self, weights: Sequence[float] | None, of_environments: int = 0) -> RewardFunctions:
        """With a weight for each; None: unchanged. The last `of_environments` may be left out: 1. ConfigError for
        another number, or one that is not finite.
        """
        if weights is None:
            return self
        weights, count = tuple(float(weight) for weight in weights), len(self.functions)
        if len(weights) == count - of_environments:
            weights += (1.0,) * of_environments
        if len(weights) != count or not all(abs(weight) <= _LARGEST for weight in weights):
            noun = "reward function" if count == 1 else "reward functions"
            raise ConfigError(
                f"objective.reward_weights = {list(weights)}: there {'is' if count == 1 else 'are'} {count} {noun} "
                f"({', '.join(self.names)}); give each a finite weight, in this order"
            )
        return dataclasses.replace(self, weights=weights)

    @classmethod
    def named(
        cls,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        key: str = _KEY,
        isolation: Literal["process"] | None = None,
        **options: Unpack[RewardOptions],
    ) -> RewardFunctions:
        """RewardFunctions of a recipe's names: `file.py:function`, or ready ones such as exact_match. key: their config
        key. Raises ConfigError.
        """
        return cls.of([load_function(name, key) for name in names], weights, isolation=isolation, **options)

    def __call__(self, sampled: Sampled) -> np.ndarray:
        """Each function gets copies. Asynchronous ones run side by side, others one by one in this thread."""
        sampled = dataclasses.replace(sampled, further=self.also, named=self.log.arguments)
        pending = {
            index: begin(function, _given(function, sampled), name, self.timeout_seconds, lists=True)
            for index, (function, name) in enumerate(zip(self.functions, self.names, strict=True))
            if is_async(function)
        }
        try:
            columns = [self._rewards(index, sampled, pending.get(index)) for index in range(len(self.functions))]
        finally:
            for pending_call in pending.values():
                pending_call.cancel()
        return np.stack(columns, axis=1)

    def _rewards(self, index: int, sampled: Sampled, pending: Pending | None) -> np.ndarray:
        """[answers], the rewards of function `index`, NaN where it does not apply; pending: its running
        call, or None.
        """
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
        return call(function, _given(function, sampled), name, self.timeout_seconds, lists=True)

    def _one_by_one(self, function: RewardFunction, name: str, sampled: Sampled, first: BaseException) -> np.ndarray:
        """Rewards by calls with one answer each, after a call with all raised `first`."""
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
        summary = f"{name} failed for {failed} of {answers} answers, which it does not count for; the first"
        logger.warning("%s", words.described(summary, error))

    def _too_long(self, function: RewardFunction, name: str, sampled: Sampled, error: TooLong) -> RewardError:
        """The error about a timeout; for an isolated function it names the answer that exceeds the limit alone."""
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
    qualifier: str = "",
    line: str = "",
    earlier: BaseException | None = None,
) -> RewardError:
    """The RewardError about an exception, of the shown answer `index`."""
    lines = [_row(sampled, index), line, "objective.reward_errors=skip leaves such answers without this reward"]
    if earlier is not None and words.in_words(earlier) != words.in_words(error):
        lines.append(words.described("the call with all answers raised", earlier))
    reward_error = RewardError(
        words.described(f"reward function {name} failed{qualifier}", error, *filter(None, lines))
    )
    reward_error.__cause__ = earlier or error
    return reward_error


def _row(sampled: Sampled, index: int) -> str:
    prompt, answer = _shortened(sampled.prompts[index]), _shortened(sampled.completions[index])
    return f"  prompt: {prompt}\n  answer: {answer}"


def load_function(name: str, key: str = _KEY) -> RewardFunction:
    """The function that a recipe names: `file.py:function`, by running the file, or a ready one. Raises ConfigError."""
    if ":" not in name:
        if name not in READY:
            raise ConfigError(
                f"{key}: {name!r} is no ready function ({', '.join(READY)}); a function of your own is file.py:function"
            )
        return READY[name]
    return load_from_file(name, key)


def _given(function: RewardFunction, sampled: Sampled) -> dict[str, object]:
    """Copies of the arguments that the function names, or all with **parameters."""
    turns = dict(prompts=sampled.prompts, completions=sampled.completions, completion_ids=sampled.completion_ids)
    parameters = inspect.signature(function).parameters if sampled.named else {}
    named = {name: value for name, value in sampled.named.items() if name in parameters and name not in sampled.columns}
    also = {name: value for name, value in {**named, **sampled.further}.items() if name not in turns}
    of_answers = arguments(function, {**sampled.columns, **turns})
    return own_copies(of_answers, SHARED) | arguments(function, also)


def _checked(name: str, values: Any, count: int, nan_is_none: bool = False) -> np.ndarray:
    """A function's rewards as float64[count], NaN for None. RewardError for another list."""
    unordered = isinstance(values, str | bytes | bytearray | Mapping | Set)
    try:
        value_count = None if unordered else len(values)
    except TypeError:  # an array without dimensions has the method, and no length
        value_count = None
    if value_count != count:
        description = repr(values) if value_count is None else f"{value_count} rewards"
        raise RewardError(
            f"reward function {name} returned {description} for {count} answers; it must return a list of as many"
        )
    return np.array([_number(name, value, nan_is_none) for value in values], np.float64)


def _number(name: str, value, nan_is_none: bool) -> float:
    """A reward as a float, None as NaN; RewardError for what is no finite number. nan_is_none: NaN counts as None."""
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
    text = value if isinstance(value, str) else "\n".join(str(message.get("content", "")) for message in value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ---- ready rewards


def text_of(completion: Turns) -> str:
    """An answer's text; of messages the last one's content, as those before call tools."""
    return completion if isinstance(completion, str) else str((completion or [{}])[-1].get("content") or "")


def with_thoughts(completion: Turns) -> str:
    """The text after <think> tags with a message's `reasoning_content`."""
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
    """The last number in `text`, or None. "1,024" is 1024, "1,2,3" are three. A minus (also U+2212) counts unless it
    follows a digit, letter or closing bracket: "5-3" gives 3. "1/2", "1 1/2", LaTeX fractions and "1e5" are one number.

    ```python
    assert last_number("It costs -$1,024.50") == -1024.5 and last_number("2, 3/4") == 0.75
    ```
    """
    matches = [*_NUMBER.finditer(text)]
    if not matches:
        return None
    last = matches[-1]
    if last["digits"]:
        digit_groups = [*last["digits"]]
    else:
        digit_groups = last["chain"].split("/") if last["chain"] else [last["above"], last["below"]]
    numbers = [float(re.sub(r"[,{}]", "", digits).replace("\u2212", "-")) for digits in digit_groups]
    if len(numbers) == 2 and numbers[1]:
        value = numbers[0] / numbers[1] + float(last["whole"] or last["and"] or 0)
    else:  # also a date, 12/25/2024
        value = numbers[-1]
    return -value if last["minus"] and len(numbers) < 3 else value


def exact_number(completions: list[Turns], answer: list[object], **columns: object) -> list[float | None]:
    """1.0 if an answer's `last_number` equals that of the column `answer`, else 0.0; None if the column has none."""
    expected = [last_number(str(value)) for value in answer]
    return [
        None if number is None else float(last_number(text_of(completion)) == number)
        for completion, number in zip(completions, expected, strict=True)
    ]


def exact_match(completions: list[Turns], answer: list[object], **columns: object) -> list[float]:
    """1.0 if an answer's text equals the column `answer` apart from outer white space, else 0.0."""
    return [
        float(text_of(completion).strip() == str(value).strip())
        for completion, value in zip(completions, answer, strict=True)
    ]


_WITHIN = r"[^<]*(?:<(?!/?(?:think|answer)>)[^<]*)*"  # text without the two tags
_TAGGED = re.compile(rf"\s*<think>{_WITHIN}</think>\s*<answer>{_WITHIN}</answer>\s*")


def tagged_format(completions: list[Turns], **columns: object) -> list[float]:
    """1.0 if a text is one <think>...</think> and one <answer>...</answer>, with nothing but white space around, else
    0.0.
    """
    return [float(_TAGGED.fullmatch(with_thoughts(completion)) is not None) for completion in completions]


def regex(completions: list[Turns], pattern: list[str], **columns: object) -> list[float]:
    """1.0 if the column `pattern` is found in an answer's text, else 0.0. ValueError for a wrong pattern, or one over
    10 s: a process searches and is killed.
    """
    return [float(is_found) for is_found in searched(pattern, [text_of(completion) for completion in completions])]


def brevity(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Tokens of an answer divided by -1000."""
    return [-len(ids) / 1000 for ids in completion_ids]


def rollout_reward(reward: list[float | None], **columns: object) -> list[float | None]:
    """The column `reward` of the rollout function; used if there is no other reward."""
    return list(reward)


def rewarded(
    functions: RewardFunctions, sampled: Sampled
) -> tuple[np.ndarray, dict[str, float], dict[str, list[object]]]:
    """(table [answers, functions], metrics that they log, columns), of several processes by the first one's functions;
    the others get no columns. Collective.
    """
    columns: dict[str, list[object]] = {}

    def by_first() -> list:
        nonlocal columns
        table = functions(sampled)
        metrics, columns = functions.log.taken(len(sampled))
        return [table.tolist(), metrics]

    table, metrics = processes.of_first(by_first)
    return np.asarray(table, np.float64).reshape(len(sampled), -1), metrics, columns


READY: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (exact_number, exact_match, tagged_format, regex, brevity, rollout_reward)
}
