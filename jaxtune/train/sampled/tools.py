"""The tools that a model may call while it answers: functions, and methods of environments.

A tool has types and a docstring in Google's style, from which its JSON schema is made; it may be `async def`. An
environment, one for each answer, has `reset(**row)`, and its other public methods are tools; `get_reward()`, if there,
scores the answer.

```python
class Counter:
    def reset(self, **row):
        self.count = 0

    def add(self, number: int) -> int:
        '''Adds a number to the count.

        Args:
            number: the number.
        '''
        self.count += number
        return self.count

    def get_reward(self):
        return float(self.count == 10)
```
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, Unpack, runtime_checkable

from jaxtune.train.config import ConfigError
from jaxtune.train.config.checks import unique_names
from jaxtune.train.sampled.reward_functions import Message, RewardFunction, RewardFunctions, RewardOptions, Turns
from jaxtune.train.sampled.tool_formats import Call, Schemas
from jaxtune.train.user_code import errors
from jaxtune.train.user_code.calling import arguments, begin, call, is_async, name_of
from jaxtune.train.user_code.copies import own_copy
from jaxtune.train.user_code.loading import load_from_file
from jaxtune.train.user_code.loop import Outcome, Pending, TooLong, outcome_of
from jaxtune.train.user_code.processes import Isolated

logger = logging.getLogger(__name__)
ENVIRONMENT = "environment"  # the column that selects a row's environment where there are several
ISOLATION = "objective.tool_isolation"
_NOT_TOOLS = ("reset", "get_reward")
_SHOWN = 200  # characters of a prompt in a message


@runtime_checkable
class Environment(Protocol):
    """An object of the user's code with the state of one answer; its public methods but `reset` and `get_reward` are
    tools.
    """

    def reset(self, **row: object) -> str | None:
        """Sets the initial state before an answer. The object may have served earlier answers: clear everything. A
        returned text is added to the prompt's last message.

          row: the row's columns and `prompt`, those that its parameters name, or all with **parameters; not a column
          `environment` that selects one.
        """
        ...


@dataclasses.dataclass
class Answered:
    """Results of one turn's calls."""

    messages: list[Message]
    """Of role "tool", one a call, in order."""
    failures: int
    """Unknown tools, exceptions and timeouts, whose content is "{'error': ...}"."""
    is_late: bool = False
    """Whether a call exceeded its limit, so that it may still run."""


@dataclasses.dataclass
class ToolCalls:
    """One turn's calls: synchronous ones are done, others run in the event loop."""

    tools: Tools
    calls: Sequence[Call]
    outcomes: dict[int, Outcome]
    pending: dict[int, Pending]

    @property
    def done(self) -> bool:
        """Whether `answered` would not wait."""
        return all(pending_call.done for pending_call in self.pending.values())

    def answered(self) -> Answered:
        outcomes = self.outcomes | {number: pending_call.outcome() for number, pending_call in self.pending.items()}
        texts = [self.tools.text_of(call, outcomes[number]) for number, call in enumerate(self.calls)]
        return Answered(
            [
                {"role": "tool", "name": call.name, "content": text}
                for call, text in zip(self.calls, texts, strict=True)
            ],
            sum(outcome.error is not None for outcome in outcomes.values()),
            any(isinstance(outcome.error, TooLong) for outcome in outcomes.values()),
        )

    def cancel(self) -> None:
        for pending_call in self.pending.values():
            pending_call.cancel()


class Tools:
    """The tools and environments of a run. Makes an environment of each kind at once, to read its methods, and more
    when needed.

    Raises UserCodeError if another process cannot find a function; ConfigError for a tool without types or docstring,
    two of one name, or an environment without `reset` or of OpenEnv's client class, whose `step` no model can call.

      functions: tools of every answer.
      environments: makes one without arguments, or {name: such a callable}, selected by a row's column `environment`.
      timeout_seconds: of one call; None: no limit.
      isolation: "process": functions, not methods, run in a process without devices, one a file, killed at
      timeout_seconds.
      reset_seconds: of `reset`; None: no limit.
    """

    def __init__(
        self,
        functions: Sequence[Callable] = (),
        environments: Callable | Mapping[str, Callable] | None = None,
        timeout_seconds: float | None = None,
        isolation: Literal["process"] | None = None,
        reset_seconds: float | None = None,
    ):
        self._reset_seconds = reset_seconds
        self.functions, self.timeout_seconds = tuple(functions), timeout_seconds
        if isolation is not None:
            self.functions = tuple(Isolated(function, ISOLATION) for function in functions)
        self._failed: set[str] = set()  # tools whose first failure was shown
        self._several = isinstance(environments, Mapping)
        self._factories: dict[str | None, Callable] = {}
        if isinstance(environments, Mapping):
            self._factories.update(environments)
        elif environments is not None:
            self._factories[None] = environments
        self._pool = {name: [_environment(factory)] for name, factory in self._factories.items()}
        self._schemas = {name: _schemas([*self.functions, *methods(pool[0])]) for name, pool in self._pool.items()}
        self._schemas.setdefault(None, _schemas(self.functions))

    @classmethod
    def named(
        cls,
        functions: Sequence[str],
        environment: str | None,
        timeout_seconds: float | None,
        isolation: Literal["process"] | None = None,
        reset_seconds: float | None = None,
    ) -> Tools:
        """The Tools of a recipe's names, file.py:name. Raises ConfigError."""
        return cls(
            [load_from_file(name, "objective.tools") for name in functions],
            None if environment is None else load_from_file(environment, "objective.environment_factory"),
            timeout_seconds,
            isolation,
            reset_seconds,
        )

    @property
    def has_environments(self) -> bool:
        return bool(self._factories)

    @property
    def code(self) -> dict[str, Callable]:
        """{name for messages: function or class}."""
        kinds = {type(pool[0]) for pool in self._pool.values()}
        return {f"tool {name_of(tool)}": tool for tool in self.functions} | {
            f"environment {kind.__name__}": kind for kind in kinds
        }

    @property
    def names(self) -> list[str]:
        """Sorted names of all tools; a run does not resume with others."""
        return sorted({name for schemas in self._schemas.values() for name in _parameters(schemas)})

    def schemas(self, columns: Mapping[str, object]) -> list[Message]:
        """JSON schemas of a row's tools. Raises ConfigError if the row must name an environment and does not."""
        return self._schemas[self._name(columns)]

    def parameters(self, columns: Mapping[str, object]) -> Schemas:
        """{tool: JSON schema of its parameters} of a row. Raises ConfigError as `schemas`."""
        return _parameters(self.schemas(columns))

    def rewards(self, functions: RewardFunctions | None, **options: Unpack[RewardOptions]) -> RewardFunctions:
        """`functions`, and for each class of environments with `get_reward` one of weight 1 and its name. Raises
        ConfigError without any.
        """
        kinds = dict.fromkeys(type(pool[0]) for pool in self._pool.values() if hasattr(pool[0], "get_reward"))
        added: list[RewardFunction] = [_reward_of(kind) for kind in kinds]
        if functions is None:
            return RewardFunctions.of(added, **options)
        names = unique_names([*functions.names, *(kind.__name__ for kind in kinds)])
        weights = (*functions.weights, *(1.0 for _ in kinds))
        return dataclasses.replace(functions, functions=(*functions.functions, *added), names=names, weights=weights)

    def reset(self, prompts: Sequence[Turns], columns: Sequence[Mapping[str, object]]) -> list[tuple[object, Turns]]:
        """Resets an environment for each answer: (environment, prompt with added text). The same objects serve each
        generation.

        Raises UserCodeError if `reset` fails; ConfigError if it returns neither None nor text, or text for a text
        prompt, or a row selects no environment.
        """
        used_counts: dict[str | None, int] = {}
        resets = []
        for prompt, row_columns in zip(prompts, columns, strict=True):
            name = self._name(row_columns)
            index = used_counts.get(name, 0)
            used_counts[name] = index + 1
            if index == len(self._pool[name]):
                self._pool[name].append(_environment(self._factories[name]))
            environment = self._pool[name][index]
            row = {key: value for key, value in row_columns.items() if not (self._several and key == ENVIRONMENT)}
            added = _reset(environment, prompt, row, self._reset_seconds)
            if added:
                last = prompt[-1]
                assert not isinstance(last, str)
                prompt = [*prompt[:-1], {**last, "content": str(last.get("content") or "") + added}]
            resets.append((environment, prompt))
        return resets

    def replace(self, environment: object) -> None:
        """Replaces an environment that a late call may still change."""
        for name, pool in self._pool.items():
            for index, pooled in enumerate(pool):
                if pooled is environment:
                    pool[index] = _environment(self._factories[name])

    def of(self, environment: object) -> dict[str, Callable]:
        """{name: tool} of an answer with this environment, or None."""
        environment_methods = () if environment is None else methods(environment)
        return {name_of(tool): tool for tool in (*self.functions, *environment_methods)}

    def begin(self, calls: Sequence[Call], tools: Mapping[str, Callable]) -> ToolCalls:
        """Calls a turn's synchronous tools in order, in this thread, and starts the asynchronous ones. Failures become
        messages. tools: {name: function} for this answer, from Tools.of. Asynchronous ones run on; ToolCalls.answered
        waits for them.
        """
        outcomes: dict[int, Outcome] = {}
        later: dict[int, Callable] = {}
        for number, requested_call in enumerate(calls):
            tool = tools.get(requested_call.name)
            if tool is None:
                outcomes[number] = Outcome(error=ValueError(f"Tool {requested_call.name} not found."))
            elif is_async(tool):
                later[number] = tool
            else:
                outcomes[number] = _in_text(
                    call(tool, own_copy(requested_call.arguments), requested_call.name, self.timeout_seconds)
                )
        pending = {
            number: begin(
                _text_later(tool), own_copy(calls[number].arguments), calls[number].name, self.timeout_seconds
            )
            for number, tool in later.items()
        }
        return ToolCalls(self, calls, outcomes, pending)

    def answer(self, calls: Sequence[Call], tools: Mapping[str, Callable]) -> Answered:
        return self.begin(calls, tools).answered()

    def text_of(self, call: Call, outcome: Outcome) -> str:
        """What the model reads of a call; a tool's first failure is logged."""
        error = outcome.error
        if error is None:
            return str(outcome.value)
        # Of wrong arguments, which a model writes, the traceback has no line of the tool.
        if call.name not in self._failed and (errors.place(error) or isinstance(error, TooLong)):
            self._failed.add(call.name)
            logger.warning("%s", errors.described(f"tool {call.name} failed, which its caller reads; the first", error))
        if isinstance(error, errors.Elsewhere) or not isinstance(error, Exception):
            return str({"error": errors.in_words(error)})
        return str({"error": errors.in_words(error).partition(": ")[2] or errors.in_words(error)})

    def _name(self, columns: Mapping[str, object]) -> str | None:
        """The environment that a row selects; None unless there are several by name. Raises ConfigError."""
        if not self._several:
            return None
        name = columns.get(ENVIRONMENT)
        if not isinstance(name, str) or name not in self._factories:
            known_names = ", ".join(map(str, self._factories))
            raise ConfigError(f"a row has environment = {name!r}; objective.environment_factory has {known_names}")
        return name


def methods(environment: object) -> list[Callable]:
    """An environment's tools: public methods and static methods, also inherited, by name."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS]
    return [getattr(environment, name) for name in names]


def _environment(factory: Callable) -> Environment:
    """A new environment; ConfigError if the factory fails, or gives an object without reset or a client of OpenEnv."""
    outcome = call(factory, {}, f"environment {name_of(factory)}")
    if outcome.error is not None:
        summary = f"objective.environment_factory: {name_of(factory)} failed"
        raise ConfigError(errors.described(summary, outcome.error)) from outcome.error
    environment = outcome.value
    kind = type(environment)
    if any(base.__module__.split(".")[0].startswith("openenv") for base in kind.__mro__):
        raise ConfigError(
            f"objective.environment_factory: {kind.__name__} is a client of OpenEnv, whose step takes an action and is "
            "no tool; write a class with reset and with methods that call the client"
        )
    if not isinstance(environment, Environment) or not callable(environment.reset):
        raise ConfigError(f"objective.environment_factory: {kind.__name__} has no method reset")
    return environment


def _reset(environment: Environment, prompt: Turns, row: Mapping[str, object], seconds: float | None) -> str:
    subject = f"objective.environment_factory: reset of {type(environment).__name__}"
    reset_arguments = arguments(environment.reset, own_copy({"prompt": prompt, **row}))
    outcome = call(environment.reset, reset_arguments, f"reset of {type(environment).__name__}", seconds)
    if isinstance(outcome.error, TooLong):
        raise errors.UserCodeError(f"{subject}: {outcome.error} (objective.reset_timeout)")
    if outcome.error is not None:
        shown_prompt = str(prompt)[:_SHOWN]
        raise errors.UserCodeError(errors.described(f"{subject} failed", outcome.error, f"  prompt: {shown_prompt}"))
    added = outcome.value
    if added is not None and (not isinstance(added, str) or isinstance(prompt, str)):
        raise ConfigError(f"{subject} returned {added!r}; it returns None, or a text that is added to the last message")
    return added or ""


def _in_text(outcome: Outcome) -> Outcome:
    try:
        return outcome if outcome.error is not None else Outcome(str(outcome.value))
    except Exception as error:
        return Outcome(error=error)


def _text_later(tool: Callable) -> Callable:
    async def text(**tool_arguments: object) -> str:
        return str(await tool(**tool_arguments))

    return text


def _reward_of(kind: type) -> RewardFunction:
    """The reward function of environments of exactly this class, None for others; async if their `get_reward` is."""

    async def later(environments, **_):
        calls = [outcome_of(environment.get_reward) for environment in environments if type(environment) is kind]
        outcomes = await asyncio.gather(*calls)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        rewards = iter(outcomes)
        return [next(rewards).value if type(environment) is kind else None for environment in environments]

    def at_once(environments, **_):
        return [environment.get_reward() if type(environment) is kind else None for environment in environments]

    reward = later if is_async(kind.get_reward) else at_once
    reward.__name__ = kind.__name__
    return reward


def _schemas(tools: Sequence[Callable]) -> list[Message]:
    """Tools' JSON schemas by transformers. Raises ConfigError."""
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:
            name = getattr(tool, "__name__", repr(tool))
            raise ConfigError(
                f"objective.tools: {name} has no JSON schema: {error}; a tool has types, and a docstring whose Args "
                "describe each parameter"
            ) from None
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ConfigError(f"objective.tools: {', '.join(names)}: two tools have one name")
    return schemas


def _parameters(schemas: Sequence[Message]) -> Schemas:
    return {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
