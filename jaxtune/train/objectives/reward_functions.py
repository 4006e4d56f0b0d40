"""Reward functions, which give the answers that a model sampled a number each: loading them by name, calling them, and
handling their errors (`RewardFunctions`, `RewardError`). Their arguments are made as a `Sampled`; `load_function` loads
one, `unique` makes their names differ, `_given` chooses the arguments of a call, and `_checked` checks what it
returned. The ready ones, which a recipe names without a file, are `exact_number`, `exact_match`, `tagged_format`,
`regex`, `brevity` and `rollout_reward`; they read answers by `text_of` and `last_number`.

A reward function has TRL's signature. It is called once with all answers of a generation (one round of sampling) and
returns a number for each, or None where it does not apply:

```python
def short(prompts, completions, completion_ids, **columns):
    return [1.0 if len(ids) < 50 else 0.0 for ids in completion_ids]
```

A prompt that is text has completions that are text; one of messages has `[{"role": "assistant", "content": text}]`. The
columns of the rows come as lists, by name, one value for each answer. A function may be `async def`; such functions run
side by side."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from jaxtune.conversations.answers import whole_text
from jaxtune.train.config import ConfigError
from jaxtune.train.config.checks import unique_names
from jaxtune.train.objectives.user_functions import EventLoop, arguments, in_words, is_async, load_from_file

logger = logging.getLogger(__name__)
# A reward function, with the signature that the module's docstring describes.
type RewardFunction = Callable[..., Any]
# A message of a conversation: its role, its content, and what else chat templates read.
type Message = dict[str, Any]
# A prompt or a completion: text, or messages.
type Turns = str | list[Message]
_KEY = "objective.reward_funcs"
_SHOWN = 200  # characters of a prompt or an answer in a message


class RewardError(ValueError):
    """Raised if a reward function failed, took too long, or returned something that is not a reward. It ends the run or
    the evaluation, and its message names the function. The `jaxtune` command shows this message alone, without the
    traceback of the user's code. With RewardFunctions.errors = "skip" it is not raised for a function that raised an
    exception, but still if a call with all answers takes too long or returns no rewards. Code outside of this module
    treats it as any ValueError."""


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


@dataclasses.dataclass(frozen=True)
class RewardFunctions:
    """The reward functions of a run, with their weights and what happens if one fails. Called with a Sampled, it calls
    them all and returns the rewards, float32[answers, functions], NaN where a function does not apply, or raises
    RewardError. These are not weighted: `weights` are for those who add them up, as advantages and metrics do.
    Evaluations by generated answers score answers by it too.

    Example:
      rewards = RewardFunctions.named(["rewards.py:is_right", "brevity"], weights=(1.0, 0.1))
      table = rewards(sampled)  # float32[answers, 2]
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
    """What an exception of a function does. In both cases the function is then called with one answer at a time: "stop"
    ends the run, and names an answer for which it fails; "skip" continues, and those for which it fails get no reward
    of this function (NaN). A call with all answers that takes too long or returns no rewards always ends the run."""

    also: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further arguments, {name: value}; each function gets those that its parameters name, or all if it has
    **parameters."""

    @classmethod
    def of(
        cls, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None, **options: Any
    ) -> RewardFunctions:
        """Makes RewardFunctions of functions, named by their `__name__` (objects without one: by their class); equal
        names get numbers ("f", "f_2"). Functions of a Python script are given so; `named` loads those of a recipe and
        calls this.

        Args:
          functions: the functions, at least one.
          weights: a weight for each function; None: all 1.
          options: values of other fields of this class: `timeout_seconds` (the longest time of one call), `errors`
            ("stop" or "skip") and `also` ({name: value} of further arguments, of which each function gets those that
            its parameters name).
        Raises:
          ConfigError: there is no function, or another number of weights.
        """
        if not functions:
            raise ConfigError("objective.reward_funcs = []: learning from rewards needs at least one reward function")
        weights = (1.0,) * len(functions) if weights is None else tuple(weights)
        if len(weights) != len(functions):
            raise ConfigError(
                f"objective.reward_weights = {list(weights)}: there are {len(functions)} reward functions; give "
                "each a weight, in their order"
            )
        names = unique_names([getattr(function, "__name__", type(function).__name__) for function in functions])
        return cls(tuple(functions), names, weights, **options)

    @classmethod
    def named(
        cls, wanted: Sequence[str], weights: Sequence[float] | None = None, *, key: str = _KEY, **options: Any
    ) -> RewardFunctions:
        """Loads reward functions by the names that a recipe has, and makes RewardFunctions of them. A name is
        `file.py:function`, or that of a ready function of this module, such as exact_match. Runs that learn from
        rewards call it, and so do evaluations by generated answers (evaluation.generate).

        Args:
          wanted: the names, at least one.
          weights: a weight for each function; None: all 1.
          key: the config key that has the names, for errors.
          options: the fields `timeout_seconds`, `errors` and `also` of this class.
        Raises:
          ConfigError: a function cannot be loaded, or there is another number of weights.
        """
        return cls.of([load_function(name, key) for name in wanted], weights, **options)

    def __call__(self, sampled: Sampled) -> np.ndarray:
        """Calls all functions with the answers in `sampled`: float32[answers, functions], NaN where a function does not
        apply. Async functions run at the same time, in an event loop; the others run one after another, each in a
        thread, which a timeout does not stop. The rows of the result are in the order of `sampled`, its columns in that
        of the functions.

        Raises:
          RewardError: a function failed (errors = "stop"), took too long, or returned no list of numbers.
        """
        sampled = dataclasses.replace(sampled, also=self.also)
        with EventLoop() as loop:
            waiting = [
                loop.start(function, _given(function, sampled)) if is_async(function) else None
                for function in self.functions
            ]
            found = [
                self._rewards(loop, function, name, sampled, future)
                for function, name, future in zip(self.functions, self.names, waiting, strict=True)
            ]
        return np.stack(found, axis=1)

    def _rewards(
        self, loop: EventLoop, function: RewardFunction, name: str, sampled: Sampled, future: Future | None
    ) -> np.ndarray:
        """Calls one function with all answers, or waits for its call: float32[answers], its rewards, NaN where it does
        not apply. If it raises, it is called with one answer at a time (`_one_by_one`). `__call__` calls this for each
        function.

        Args:
          loop: the event loop in which the function runs, so that it can time out.
          function: the reward function.
          name: its name, for messages.
          sampled: the answers.
          future: the future of the function's running call if it is async; None if it is to be called here.
        Raises:
          RewardError: the function failed (errors = "stop"), took too long, or returned no list of numbers.
        """
        future = loop.start(function, _given(function, sampled)) if future is None else future
        try:
            return _checked(name, future.result(self.timeout_seconds), len(sampled))
        except TimeoutError:
            if not future.done():  # the function may raise a TimeoutError of its own
                raise RewardError(
                    f"reward function {name} took longer than objective.reward_timeout = {self.timeout_seconds} s; "
                    "raise it, or give the function's own requests a limit"
                ) from None
            return self._one_by_one(loop, function, name, sampled)
        except RewardError:
            raise
        except Exception:
            return self._one_by_one(loop, function, name, sampled)

    def _one_by_one(self, loop: EventLoop, function: RewardFunction, name: str, sampled: Sampled) -> np.ndarray:
        """The rewards of a function that failed with all answers at once: float32[answers]. It is called with one
        answer at a time to find those that it fails for, or for which it takes too long or returns no number. With
        errors = "skip" these are NaN, and a warning is logged. With "stop" RewardError is always raised: for the first
        such answer, or, if there is none, for the call with all answers.

        Args:
          loop: the event loop in which the function runs.
          function: the reward function.
          name: its name, for messages.
          sampled: the answers.
        """
        values = np.full(len(sampled), np.nan, np.float32)
        failed: list[tuple[int, Exception]] = []
        for index in range(len(sampled)):
            try:
                future = loop.start(function, _given(function, sampled.only(index)))
                values[index] = _checked(name, future.result(self.timeout_seconds), 1)[0]
            except Exception as error:
                failed.append((index, error))
                if self.errors == "stop":
                    break
        if self.errors == "stop":
            index, error = failed[0] if failed else (0, None)
            alone = "" if failed else "; each answer alone it rewards without an error"
            raise RewardError(
                f"reward function {name} failed{alone}: {in_words(error)}\n"
                f"  prompt: {_shortened(sampled.prompts[index])}\n  answer: {_shortened(sampled.completions[index])}\n"
                "objective.reward_errors=skip leaves such answers without this reward"
            ) from error
        if failed:
            logger.warning(
                "%s failed for %d of %d answers, which it does not count for; the first: %s",
                name,
                len(failed),
                len(sampled),
                in_words(failed[0][1]),
            )
        return values


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
    """The keyword arguments with which `function` is called: of the prompts, completions, completion_ids, columns and
    further arguments in `sampled`, those that its parameters name, or all if it has **parameters; so a function need
    not name what it does not use. Of equal names, a further argument hides a column, and prompts, completions and
    completion_ids hide both."""
    given = dict(prompts=sampled.prompts, completions=sampled.completions, completion_ids=sampled.completion_ids)
    return arguments(function, {**sampled.columns, **sampled.also, **given})


def _checked(name: str, values: Any, count: int) -> np.ndarray:
    """Checks what a reward function returned, and returns it as float32[count], NaN where it returned None. Raises
    RewardError if `values` has no length or not `count` entries, is a text or a mapping, or has an entry that is
    neither None nor a finite number (what `float` accepts). RewardFunctions calls it for each call of a function. name:
    the function's name, for the message."""
    try:
        given = None if isinstance(values, str | Mapping) else len(values)
    except TypeError:  # an array without dimensions has the method, and no length
        given = None
    if given != count:
        what = repr(values) if given is None else f"{given} rewards"
        raise RewardError(
            f"reward function {name} returned {what} for {count} answers; it must return a list of as many"
        )
    found = np.full(count, np.nan, np.float32)
    for index, value in enumerate(values):
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(f"reward function {name} returned {value!r}; a reward is a number or None") from None
        if not math.isfinite(number):
            raise RewardError(
                f"reward function {name} returned {number}; a reward is a finite number, or None where there is none"
            )
        found[index] = number
    return found


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


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in `text`, commas between digits ignored ("1,024" is 1024.0); None if there is no number. A minus
    before the digits belongs to it, also in "5-3"; an exponent does not. `exact_number` compares it, as the result of
    an answer, with that of the row's own answer."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def exact_number(completions: list[Turns], answer: list[object], **columns: object) -> list[float | None]:
    """A ready reward function, which a recipe names in objective.reward_funcs or evaluation.generate: for each of
    `completions` 1.0 if the last number in its text (`text_of`) equals the last one in str of the row's column
    `answer`, else 0.0; None if that column has no number, so that the function does not apply. Other columns are
    ignored."""
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


_TAGGED = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def tagged_format(completions: list[Turns], **columns: object) -> list[float]:
    """A ready reward function, which a recipe names in objective.reward_funcs or evaluation.generate: for each of
    `completions` 1.0 if its text (`text_of`) is `<think>...</think><answer>...</answer>` and nothing else but white
    space around these, else 0.0. All columns are ignored."""
    return [float(_TAGGED.fullmatch(with_thoughts(completion)) is not None) for completion in completions]


def regex(completions: list[Turns], pattern: list[str], **columns: object) -> list[float]:
    """A ready reward function, which a recipe names in objective.reward_funcs or evaluation.generate: for each of
    `completions` 1.0 if the row's regular expression (the column `pattern`) is found anywhere in its text (`text_of`),
    else 0.0. Other columns are ignored."""
    return [
        float(re.search(wanted, text_of(completion)) is not None)
        for completion, wanted in zip(completions, pattern, strict=True)
    ]


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
