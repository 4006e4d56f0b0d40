"""How the answers of a generation are sampled: in one turn, in turns between which tools are called, or by a function
of the user's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.sampler import Piece, Sampler
from jaxtune.train.config import ConfigError
from jaxtune.train.objectives.packed_answers import Prompt, Settings
from jaxtune.train.objectives.reward_functions import Message, Turns
from jaxtune.train.objectives.tool_formats import ToolFormat
from jaxtune.train.objectives.tools import ENVIRONMENTS, Answered, Tools
from jaxtune.train.objectives.user_functions import EventLoop

_MOST_SHOWN = 120  # characters of a prompt in a message


@dataclasses.dataclass
class Given:
    """An answer that was given to a prompt, before it has a reward."""

    prompt_ids: tuple[int, ...]
    """The token ids of the prompt."""
    shown: Turns
    """The prompt, as reward functions get it."""
    ids: list[int] = dataclasses.field(default_factory=list)
    """The token ids of the answer, with what tools answered."""
    logps: list[float] = dataclasses.field(default_factory=list)
    """The log-probability of each token; 0 for tokens that were not sampled."""
    sampled: list[bool] | None = None
    """Whether each token was sampled; None: all were."""
    finish_reason: str = "stop"
    """Why it ended: "length" if it reached the most tokens."""
    completion: Turns = ""
    """The answer as reward functions get it: text, or the messages of its turns."""
    columns: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further columns for reward functions."""


class Answering(Protocol):
    """Samples the answers of a generation."""

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model may call."""
        ...

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """(an answer to each prompt, metrics of the generation).

        Args:
          model: the model to sample from.
          prompts: the prompts, each once for each of its answers, one after another.
          seeds: the sampling seed of each answer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options with which every answer is sampled, and what turns tokens into text."""

    settings: Settings
    """The sampling options."""
    ends: tuple[int, ...]
    """The token ids that end an answer, in ascending order."""
    decode: Callable[[Sequence[int]], str]
    """Decodes token ids to text, without special tokens."""

    def sampler(self, model: Decoder, prompts: Sequence[Sequence[int]], alone: bool = False) -> Sampler:
        """A sampler for answers to prompts of token ids, with as many slots as memory is free for. alone: prefills each
        prompt in a program of its own, so that an answer has the same bits whenever it is submitted."""
        longest = max(len(ids) for ids in prompts)
        return Sampler(
            model,
            length=longest + self.settings.max_completion_length,
            most_slots=min(self.settings.slots, len(prompts)),
            prefills_alone=alone,
        )

    def submit(self, sampler: Sampler, ids: Sequence[int], new: int, seed: int, index: int = 0) -> int:
        """Submits a prompt of token ids to a sampler for at most `new` tokens; returns the number of the request. seed,
        index: decide what is drawn."""
        settings = self.settings
        return sampler.submit(
            ids,
            new,
            settings.temperature,
            seed,
            index=index,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            eos_token_ids=self.ends,
            scaled_logprobs=True,
        )

    def without_end(self, ids: Sequence[int]) -> list[int]:
        """Token ids without their last one if that ends an answer."""
        return list(ids[:-1] if ids and ids[-1] in self.ends else ids)


@dataclasses.dataclass(frozen=True)
class OneTurn:
    """Samples each answer in one turn (`Answering`)."""

    sampling: Sampling
    """The options of sampling."""

    @property
    def tool_names(self) -> Sequence[str]:
        """No names: the model calls no tools."""
        return ()

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """(an answer to each prompt, no metrics); see `Answering`."""
        sampler = self.sampling.sampler(model, [prompt.ids for prompt in prompts])
        found = [Given(prompt.ids, prompt.given) for prompt in prompts]
        most = self.sampling.settings.max_completion_length
        requests = {
            self.sampling.submit(sampler, one.prompt_ids, most, seed): one
            for one, seed in zip(found, seeds, strict=True)
        }
        while sampler.pending:
            for piece in sampler.step():
                _extend(requests[piece.request], piece)
        for one in found:
            one.completion = self.sampling.decode(self.sampling.without_end(one.ids))
        return found, {}


def _extend(one: Given, piece: Piece) -> None:
    """Adds the tokens of a piece to an answer, and the reason if it ended."""
    one.ids += piece.ids
    one.logps += piece.logprobs
    if one.sampled is not None:
        one.sampled += [True] * len(piece.ids)
    one.finish_reason = piece.finish_reason or one.finish_reason


@dataclasses.dataclass
class _Dialogue:
    """An answer while its turns are sampled."""

    given: Given
    seed: int
    columns: Mapping[str, object]
    environment: object
    began: int = 0  # the index in given.ids of the current turn's first token
    turns: int = 0  # turns in which tools were called
    calls: int = 0
    failures: int = 0
    messages: list[Message] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ToolTurns:
    """Samples answers in which the model calls tools (`Answering`): it samples a turn, calls the tools that the turn
    asks for, adds what they answered to the tokens, and samples the next turn.

    While the tools of an answer run, its slot is given to another answer. Its next turn is a new request of the
    sampler, which prefills all its tokens again; each prompt is prefilled alone, so that what is sampled does not
    depend on how long tools take.
    """

    sampling: Sampling
    """The options of sampling."""
    tools: Tools
    """The tools, and the environments."""
    format: ToolFormat
    """How the model writes calls, and how the template writes what tools answer."""
    encode: Callable[[Sequence[Message], Mapping[str, object]], tuple[int, ...]]
    """(messages, a row's columns) -> the token ids of the prompt with the schemas of the row's tools."""
    length: int
    """The most tokens of a prompt with its answer."""
    most_iterations: int | None = None
    """The most turns of an answer in which tools are called; None is no limit."""

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model may call."""
        return self.tools.names

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """(an answer to each prompt, the frequencies of calls and of failures); see `Answering`."""
        dialogues = self._begun(prompts, seeds)
        sampler = self.sampling.sampler(model, [one.given.prompt_ids for one in dialogues], alone=True)
        turns: dict[int, _Dialogue] = {}  # by the number of the sampler's request
        waiting: dict[Future[Answered], _Dialogue] = {}
        for one in dialogues:
            turns[self._submitted(sampler, one)] = one
        with EventLoop() as loop:
            while sampler.pending or waiting:
                for piece in sampler.step():
                    _extend(turns[piece.request].given, piece)
                    if piece.finish_reason is not None:
                        one = turns.pop(piece.request)
                        if (future := self._called(loop, one)) is not None:
                            waiting[future] = one
                if waiting and not sampler.pending:
                    wait(waiting, return_when=FIRST_COMPLETED)
                for future in [future for future in waiting if future.done()]:
                    one = waiting.pop(future)
                    if self._goes_on(one, future.result()):
                        turns[self._submitted(sampler, one)] = one
        calls, failures = (sum(getattr(one, name) for one in dialogues) for name in ("calls", "failures"))
        for one in dialogues:
            one.given.completion = one.messages
            if one.environment is not None:
                one.given.columns = {ENVIRONMENTS: one.environment}
        return [one.given for one in dialogues], {
            "tools/call_frequency": calls / len(dialogues),
            "tools/failure_frequency": failures / calls if calls else 0.0,
        }

    def _begun(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[_Dialogue]:
        """The answers before their first turn, with an environment each, if the run has environments. Raises
        ConfigError if a text that `reset` added makes a prompt too long."""
        if not self.tools.has_environments:
            return [
                _Dialogue(Given(prompt.ids, prompt.given, sampled=[]), seed, prompt.columns, None)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
        reset = self.tools.reset([prompt.given for prompt in prompts], [prompt.columns for prompt in prompts])
        found = []
        for prompt, seed, (environment, messages) in zip(prompts, seeds, reset, strict=True):
            ids = prompt.ids
            if messages != prompt.given:
                assert not isinstance(messages, str)
                ids = self.encode(messages, prompt.columns)
            room = self.length - self.sampling.settings.max_completion_length
            if len(ids) > room:
                raise ConfigError(
                    f"data.length = {self.length}: with what {type(environment).__name__}.reset added, a prompt has "
                    f"{len(ids):,} tokens, and beside objective.max_completion_length room for {room:,}: "
                    f"{str(messages)[:_MOST_SHOWN]}"
                )
            found.append(_Dialogue(Given(ids, messages, sampled=[]), seed, prompt.columns, environment))
        return found

    def _submitted(self, sampler: Sampler, one: _Dialogue) -> int:
        """Submits the next turn of an answer; returns the number of the request."""
        given, most = one.given, self.sampling.settings.max_completion_length
        one.began = len(given.ids)
        ids = [*given.prompt_ids, *given.ids]
        return self.sampling.submit(sampler, ids, most - len(given.ids), one.seed, one.turns)

    def _called(self, loop: EventLoop, one: _Dialogue) -> Future[Answered] | None:
        """Ends a turn: adds its message, and starts the calls of tools that it has. Returns the future of what the
        tools answer, or None if the answer is complete."""
        turn = self.sampling.without_end(one.given.ids[one.began :])
        message, calls = self.format.parsed(turn, self.tools.parameters(one.columns))
        one.messages.append(message)
        over = self.most_iterations is not None and one.turns >= self.most_iterations
        if not calls or over or one.given.finish_reason == "length":
            return None
        one.turns += 1
        one.calls += len(calls)
        return loop.run(self.tools.answer(calls, self.tools.of(one.environment)))

    def _goes_on(self, one: _Dialogue, answered: Answered) -> bool:
        """Adds what tools answered to an answer. Returns False, and adds nothing, if that leaves no room for a token of
        the model; the answer is then complete."""
        one.failures += answered.failures
        suffix = self.format.suffix(answered.messages)
        given = one.given
        if len(given.ids) + len(suffix) >= self.sampling.settings.max_completion_length:
            return False
        given.ids += suffix
        given.logps += [0.0] * len(suffix)
        assert given.sampled is not None
        given.sampled += [False] * len(suffix)
        one.messages += answered.messages
        return True
