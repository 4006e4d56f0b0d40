"""The tools that a model may call while it answers: functions, and the methods of environments.

A tool is a Python function with types and a docstring in Google's style, from which the chat template gets its JSON
schema; it may be `async def`. An environment is an object with a method `reset(**row)`, whose other public methods are
tools; each answer has an environment of its own. It may have a method `get_reward()`, which scores the answer.

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
from jaxtune.train.objectives.reward_functions import Message, RewardFunction, RewardFunctions, RewardOptions, Turns
from jaxtune.train.objectives.tool_formats import Call, Schemas
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
    """An environment: an object of the user's code whose public methods other than `reset` and `get_reward` are the
    tools of one answer. It keeps the state of that answer alone, such as that of a game. Only the method `reset` is
    required; `get_reward` may score the answer. `Tools` gives each answer one."""

    def reset(self, **row: object) -> str | None:
        """Called before an answer is sampled: it sets the environment to its initial state for that answer. The same
        object may have served earlier answers, and all that they left in it must be cleared. row: the columns of the
        data row and the messages as `prompt`, but only those that its parameters name, or all if it has **parameters;
        the column `environment` is left out where it selects one of several environments. A text that it returns is
        added to the last message of the prompt; None adds nothing."""
        ...


@dataclasses.dataclass
class Answered:
    """What the tools answered to the calls of one turn of the model."""

    messages: list[Message]
    """A message of role "tool" for each call, in their order."""
    failures: int
    """How many calls failed: an unknown tool, an exception, or a timeout. The content of such a call's message is the
    text "{'error': ...}"."""
    is_late: bool = False
    """Whether a call took longer than its limit, so that it may still run, or was interrupted anywhere."""


@dataclasses.dataclass
class ToolCalls:
    """The calls of one turn: the synchronous ones are done, the others run in the event loop."""

    tools: Tools
    calls: Sequence[Call]
    outcomes: dict[int, Outcome]
    pending: dict[int, Pending]

    @property
    def done(self) -> bool:
        """Whether `answered` returns without a wait."""
        return all(one.done for one in self.pending.values())

    def answered(self) -> Answered:
        """Waits for the calls, and returns what they answered."""
        outcomes = self.outcomes | {number: one.outcome() for number, one in self.pending.items()}
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
        """Ends the calls, whose answers nobody needs."""
        for one in self.pending.values():
            one.cancel()


class Tools:
    """The tools and environments of a run. A tool is a function that the model may call while it answers. An
    environment is an object that keeps the state of one answer: `reset` is called before the answer is sampled,
    `get_reward`, if it has one, becomes a reward function of the run (`rewards`), and its other public methods are
    tools too.

    `schemas` describes the tools of a row for its prompt, and `parameters` has the types by which calls are parsed.
    While answers are sampled, `reset` gives each answer its environment, `of` returns its tools by name, and `answer`
    calls them. `names` are the names of all tools. Making it makes an environment of each kind, whose methods are read;
    more are made when answers need them.

    Args:
      functions: the tools that every answer has.
      environments: a class or function that is called without arguments and returns an environment; or {name: such a
        callable}, of which the column `environment` of a row selects one; None if answers have no environments.
      timeout_seconds: the longest that one call may take; None is no limit.
      isolation: "process": the functions, but not the environments' methods, run in a process without devices, one for
        the functions of a file, which is killed at timeout_seconds.
      reset_seconds: the longest that `reset` of an environment may take; None is no limit.
    Raises:
      UserCodeError: another process cannot find a function.
      ConfigError: a tool has no types or docstring, or two tools of one answer have one name; an environment has no
        `reset`, or is an object of OpenEnv's client class, whose `step` takes an action object, which a model cannot
        write as JSON.
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
        """The Tools that a recipe asks for: functions and a factory of environments, each as file.py:name. ConfigError:
        one cannot be loaded, or is refused."""
        return cls(
            [load_from_file(name, "objective.tools") for name in functions],
            None if environment is None else load_from_file(environment, "objective.environment_factory"),
            timeout_seconds,
            isolation,
            reset_seconds,
        )

    @property
    def has_environments(self) -> bool:
        """Whether each answer has an environment (True), whose `reset` is called before the answer is sampled and may
        change the prompt, or answers only have the tools that are plain functions (False). `ToolTurns` asks it, before
        it calls `reset` and where room for changed prompts is planned."""
        return bool(self._factories)

    @property
    def code(self) -> dict[str, Callable]:
        """{name for messages: function or class} of tools and environments."""
        kinds = {type(pool[0]) for pool in self._pool.values()}
        return {f"tool {name_of(one)}": one for one in self.functions} | {
            f"environment {kind.__name__}": kind for kind in kinds
        }

    @property
    def names(self) -> list[str]:
        """The sorted names of all tools, which are printed, and stored in checkpoints so that no run resumes with other
        tools."""
        return sorted({name for schemas in self._schemas.values() for name in _parameters(schemas)})

    def schemas(self, columns: Mapping[str, object]) -> list[Message]:
        """The JSON schemas of the tools of a row, in the form that chat templates expect. The row's prompt is made with
        them when rows are read, and again after an environment's `reset` may have changed it. columns: the row's
        columns, {name: value}; only if the run was given environments by name, `environment` is read, which names the
        row's. Raises ConfigError if it is then missing or names none of them."""
        return self._schemas[self._name(columns)]

    def parameters(self, columns: Mapping[str, object]) -> Schemas:
        """{tool's name: JSON schema of its parameters} for the tools of a row, by which `ToolTurns` parses the calls in
        an answer. columns: the row's columns, {name: value}; only if the run was given environments by name,
        `environment` is read, which names the row's. Raises ConfigError if it is then missing or names none of them."""
        return _parameters(self.schemas(columns))

    def rewards(self, functions: RewardFunctions | None, **options: Unpack[RewardOptions]) -> RewardFunctions:
        """The reward functions of the run: `functions`, and for each class of environments with a `get_reward` one
        function that calls it, with weight 1 and the name of the class (made unique). options: fields of
        RewardFunctions, if `functions` is None. Raises ConfigError if there is no reward function at all."""
        kinds = dict.fromkeys(type(pool[0]) for pool in self._pool.values() if hasattr(pool[0], "get_reward"))
        added: list[RewardFunction] = [_reward_of(kind) for kind in kinds]
        if functions is None:
            return RewardFunctions.of(added, **options)
        names = unique_names([*functions.names, *(kind.__name__ for kind in kinds)])
        weights = (*functions.weights, *(1.0 for _ in kinds))
        return dataclasses.replace(functions, functions=(*functions.functions, *added), names=names, weights=weights)

    def reset(self, prompts: Sequence[Turns], columns: Sequence[Mapping[str, object]]) -> list[tuple[object, Turns]]:
        """Gives each answer of a generation an environment of its own and calls its `reset` with copies of the row. The
        same objects serve again in the next generation, so that few are made.

        Args:
          prompts: for each answer, its prompt as messages.
          columns: for each answer, the other columns of its data row, {name: value}. `reset` gets those of them and of
            `prompt` that its parameters name, or all if it has **parameters; but never the column `environment` where
            it selects one of several environments.
        Returns:
          for each answer (its environment, its prompt); a text that `reset` returned is added to the prompt's last
            message.
        Raises:
          UserCodeError: `reset` raised an exception.
          ConfigError: `reset` returned something else than None or a text, or a text for a prompt that is no list of
            messages; a row selects no environment where it must (`_name`); or a new environment is refused
            (`_environment`).
        """
        used: dict[str | None, int] = {}
        found = []
        for prompt, own in zip(prompts, columns, strict=True):
            name = self._name(own)
            index = used.get(name, 0)
            used[name] = index + 1
            if index == len(self._pool[name]):
                self._pool[name].append(_environment(self._factories[name]))
            environment = self._pool[name][index]
            row = {key: value for key, value in own.items() if not (self._several and key == ENVIRONMENT)}
            added = _reset(environment, prompt, row, self._reset_seconds)
            if added:
                last = prompt[-1]
                assert not isinstance(last, str)
                prompt = [*prompt[:-1], {**last, "content": str(last.get("content") or "") + added}]
            found.append((environment, prompt))
        return found

    def replace(self, environment: object) -> None:
        """Has later generations use a new environment instead of one that a late call may still change."""
        for name, pool in self._pool.items():
            for index, one in enumerate(pool):
                if one is environment:
                    pool[index] = _environment(self._factories[name])

    def of(self, environment: object) -> dict[str, Callable]:
        """The tools of one answer, {name: function}: the functions of the run, and the methods of the answer's
        environment. If `environment` is None, the answer has no environment, and only the functions are returned.
        `ToolTurns` calls it before `answer`, which finds in them the tool that a call names."""
        own = () if environment is None else methods(environment)
        return {name_of(tool): tool for tool in (*self.functions, *own)}

    def begin(self, calls: Sequence[Call], tools: Mapping[str, Callable]) -> ToolCalls:
        """Calls the synchronous tools of one turn of the model, one after another, in this thread, and starts the
        asynchronous ones, which run at the same time. An unknown tool, an exception and a timeout are failures, which
        the messages state.

        Args:
          calls: the calls that the model wrote in the turn.
          tools: {name: function}, as `of` returned it for this sampled answer.
        """
        outcomes: dict[int, Outcome] = {}
        later: dict[int, Callable] = {}
        for number, one in enumerate(calls):
            tool = tools.get(one.name)
            if tool is None:
                outcomes[number] = Outcome(error=ValueError(f"Tool {one.name} not found."))
            elif is_async(tool):
                later[number] = tool
            else:
                outcomes[number] = _in_text(call(tool, own_copy(one.arguments), one.name, self.timeout_seconds))
        pending = {
            number: begin(
                _text_later(tool), own_copy(calls[number].arguments), calls[number].name, self.timeout_seconds
            )
            for number, tool in later.items()
        }
        return ToolCalls(self, calls, outcomes, pending)

    def answer(self, calls: Sequence[Call], tools: Mapping[str, Callable]) -> Answered:
        """What the tools of one turn answer, as `begin` calls them."""
        return self.begin(calls, tools).answered()

    def text_of(self, one: Call, outcome: Outcome) -> str:
        """What the model reads of a call. The first failure of a tool is shown."""
        error = outcome.error
        if error is None:
            return str(outcome.value)
        # Of wrong arguments, which a model writes, the traceback has no line of the tool.
        if one.name not in self._failed and (errors.place(error) or isinstance(error, TooLong)):
            self._failed.add(one.name)
            logger.warning("%s", errors.described(f"tool {one.name} failed, which its caller reads; the first", error))
        if isinstance(error, errors.Elsewhere) or not isinstance(error, Exception):
            return str({"error": errors.in_words(error)})
        return str({"error": errors.in_words(error).partition(": ")[2] or errors.in_words(error)})

    def _name(self, columns: Mapping[str, object]) -> str | None:
        """The name of the environment that a row selects by its column `environment`; None if the run was not given
        environments by name: it has one for all rows, or none. It is the key of the row's schemas and environments, by
        which `schemas` and `reset` find them. columns: the row's columns, {name: value}. Raises ConfigError if
        environments have names and the column is missing or has none of them."""
        if not self._several:
            return None
        name = columns.get(ENVIRONMENT)
        if not isinstance(name, str) or name not in self._factories:
            known = ", ".join(map(str, self._factories))
            raise ConfigError(f"a row has environment = {name!r}; objective.environment_factory has {known}")
        return name


def methods(environment: object) -> list[Callable]:
    """The methods of an environment that a model may call as tools, bound to it: the public ordinary and static methods
    of its class and the classes that it inherits from, except `reset` and `get_reward`, in the order of their names.
    Class methods and properties do not count. Schemas are made of them, and calls run them."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in found if not name.startswith("_") and name not in _NOT_TOOLS]
    return [getattr(environment, name) for name in names]


def _environment(factory: Callable) -> Environment:
    """Makes a new environment: what `factory` returns, called without arguments. Making a Tools calls it once for each
    factory, and `Tools.reset` when answers need more. Raises ConfigError if the environment has no `reset`, or is an
    object of OpenEnv's client class, whose `step` no model can call."""
    outcome = call(factory, {}, f"environment {name_of(factory)}")
    if outcome.error is not None:
        what = f"objective.environment_factory: {name_of(factory)} failed"
        raise ConfigError(errors.described(what, outcome.error)) from outcome.error
    made = outcome.value
    kind = type(made)
    if any(base.__module__.split(".")[0].startswith("openenv") for base in kind.__mro__):
        raise ConfigError(
            f"objective.environment_factory: {kind.__name__} is a client of OpenEnv, whose step takes an action and is "
            "no tool; write a class with reset and with methods that call the client"
        )
    if not isinstance(made, Environment) or not callable(made.reset):
        raise ConfigError(f"objective.environment_factory: {kind.__name__} has no method reset")
    return made


def _reset(environment: Environment, prompt: Turns, row: Mapping[str, object], seconds: float | None) -> str:
    """The text that an environment's `reset` adds to the prompt."""
    what = f"objective.environment_factory: reset of {type(environment).__name__}"
    given = arguments(environment.reset, own_copy({"prompt": prompt, **row}))
    outcome = call(environment.reset, given, f"reset of {type(environment).__name__}", seconds)
    if isinstance(outcome.error, TooLong):
        raise errors.UserCodeError(f"{what}: {outcome.error} (objective.reset_timeout)")
    if outcome.error is not None:
        shown = str(prompt)[:_SHOWN]
        raise errors.UserCodeError(errors.described(f"{what} failed", outcome.error, f"  prompt: {shown}"))
    added = outcome.value
    if added is not None and (not isinstance(added, str) or isinstance(prompt, str)):
        raise ConfigError(f"{what} returned {added!r}; it returns None, or a text that is added to the last message")
    return added or ""


def _in_text(outcome: Outcome) -> Outcome:
    """What a tool returned, as text."""
    try:
        return outcome if outcome.error is not None else Outcome(str(outcome.value))
    except Exception as error:
        return Outcome(error=error)


def _text_later(tool: Callable) -> Callable:
    async def text(**given: object) -> str:
        return str(await tool(**given))

    return text


def _reward_of(kind: type) -> RewardFunction:
    """Makes the reward function of one class of environments (`kind`). Called with `environments`, those of all
    answers, it calls `get_reward` of each one of exactly that class, and returns a list with a reward for each answer,
    None where the environment is of another class. It is async if `get_reward` is, and has the name of the class.
    `Tools.rewards` adds it to the reward functions of the run."""

    async def later(environments, **_):
        calls = [outcome_of(one.get_reward) for one in environments if type(one) is kind]
        outcomes = await asyncio.gather(*calls)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        rewards = iter(outcomes)
        return [next(rewards).value if type(one) is kind else None for one in environments]

    def at_once(environments, **_):
        return [one.get_reward() if type(one) is kind else None for one in environments]

    found = later if is_async(kind.get_reward) else at_once
    found.__name__ = kind.__name__
    return found


def _schemas(tools: Sequence[Callable]) -> list[Message]:
    """The JSON schemas of functions (tools), [{"type": "function", "function": {...}}, ...], in their order, by which
    chat templates describe them to the model; transformers makes them from types and docstrings. They are made once,
    when a Tools is made. Raises ConfigError if a tool has no types or no docstring, or two have one name."""
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as error:
            name = getattr(tool, "__name__", repr(tool))
            raise ConfigError(
                f"objective.tools: {name} has no JSON schema: {error}; a tool has types, and a docstring whose Args "
                "describe each parameter"
            ) from None
    names = [schema["function"]["name"] for schema in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"objective.tools: {', '.join(names)}: two tools have one name")
    return found


def _parameters(schemas: Sequence[Message]) -> Schemas:
    """{tool's name: JSON schema of its parameters}, taken from `schemas`, what `_schemas` returned; {} for a tool
    without parameters' schema. `Tools.parameters` returns it, and `Tools.names` takes only the names from it."""
    return {one["function"]["name"]: one["function"].get("parameters", {}) for one in schemas}
