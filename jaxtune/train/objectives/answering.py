"""Samples the answers of a generation (all the answers of one round of sampling): in one turn (`OneTurn`), in turns
between which tools are called (`ToolTurns`), or by a function of the user's code (rollout_function.py). `Answering` is
the interface of the three ways, of which prompts.py makes the one that a run asks for, and the batch source
(rollouts.SampledAnswers) calls it. `Sampling` has the options that they share, and each answer is a `Given`, with calls
of tools a `_Dialogue` while it is sampled; `_extend` adds new tokens to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxtune.conversations.answers import Completions
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.divided import DividedSampler, devices_of
from jaxtune.models.generation.requests import Piece
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan
from jaxtune.system import waiting
from jaxtune.train.config import ConfigError
from jaxtune.train.objectives.packed_answers import Prompt, Settings
from jaxtune.train.objectives.reward_functions import ENVIRONMENTS, Message, Turns
from jaxtune.train.objectives.tool_formats import ToolFormat
from jaxtune.train.objectives.tools import Answered, ToolCalls, Tools
from jaxtune.train.user_code.loop import wait_for_any

_MOST_SHOWN = 120  # characters of a prompt in a message


@dataclasses.dataclass
class Given:
    """One sampled answer to a prompt, filled while it is sampled. Reward functions get `shown`, `completion` and
    `columns` of it, and the rows for training are made from its tokens."""

    prompt_ids: tuple[int, ...]
    """The token ids of the prompt."""
    shown: Turns
    """The prompt, as reward functions get it."""
    ids: list[int] = dataclasses.field(default_factory=list)
    """The token ids of the answer so far, including the tokens that end it or its turns, and those of the texts that
    tools returned."""
    logps: list[float] = dataclasses.field(default_factory=list)
    """For each token of `ids` its log-probability when it was sampled, at the sampling temperature; 0 for tokens that
    tools returned. Those of a rollout function are what it returned."""
    sampled: list[bool] | None = None
    """For each token of `ids`: True if the model sampled it, False if not (a tool returned it). None: all were
    sampled."""
    finish_reason: str = "stop"
    """Why the last sampled turn ended: "length" if it reached the most tokens, "stop" if a token ended it. An answer
    with calls of tools that has no room for what they return has "stop". That of a rollout function has "stop" if its
    last token is one that ends an answer, else "length"."""
    completion: Turns = ""
    """The answer as reward functions get it, set when it is complete: text, or with calls of tools its messages."""
    columns: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Columns that reward functions get in addition to those of the prompt's row, such as the answer's environment."""


@dataclasses.dataclass
class Sampling:
    """What the three ways of sampling an answer (`OneTurn`, `ToolTurns`, `RolloutFunction`) share: the options of
    sampling, the tokens that end an answer, and the function that decodes tokens to text. `sampler` makes a sampler. If
    its argument `alone` is True, each prompt is prefilled in a program of its own, so that an answer has the same bits
    whenever it is submitted. `submit` gives a sampler a prompt with these options; its argument `index` distinguishes
    requests with the same seed, such as the turns of an answer. `RolloutFunction` uses neither, as it makes a sampler
    that the user's function calls."""

    settings: Settings
    """The options by which a token is drawn (temperature, top_k, ...), the most tokens of an answer, and the most
    answers that are sampled at a time."""
    ends: tuple[int, ...]
    """The token ids that end an answer, in ascending order."""
    decode: Callable[[Sequence[int]], str]
    """Decodes token ids to text, without special tokens."""
    plan: SlotPlan | None = None
    """The plan of a device's memory, which limits how many answers are sampled at a time, and in how many layers the
    weights are converted once for all tokens (models/generation/converted.py). None: the memory that is free decides.
    `SampledAnswers.limit_slots` sets it once the run is planned."""
    completions: Completions | None = None
    """What reward functions get of an answer; None: its text."""

    @property
    def slots(self) -> int:
        """The most answers that a device samples at a time: the number in the settings, or that of the plan of memory
        if it is smaller. `sampler` has at most as many, and so has the sampler of a rollout function."""
        return self.settings.slots if self.plan is None else min(self.settings.slots, self.plan.slots)

    @property
    def most_converted(self) -> int | None:
        """The most layers whose weights a sampler converts once for all tokens: it decodes quantised linears, and
        casts adapters of experts (models/generation/converted.py). It is the number in the plan of memory, so that
        each generation, and each process that continues the run, converts the same layers. None if there is no plan:
        the sampler then converts as many as fit into the free memory."""
        return None if self.plan is None else self.plan.converted_layers

    def sampler(
        self, model: Decoder, prompts: Sequence[Sequence[int]], alone: bool = False
    ) -> Sampler | DividedSampler:
        """Makes a sampler for answers to `prompts`. Each device samples as many answers at a time (slots) as there is
        free memory for, but at most `self.slots` and no more than its share of the prompts. Rows have room for the
        longest prompt and max_completion_length tokens. If several devices have copies of the weights, they share the
        answers (DividedSampler); the caller uses both kinds of sampler alike.

        Args:
          model: the model to sample from.
          prompts: the token ids of each prompt, at least one.
          alone: True: each prompt is prefilled in a program of its own, so that an answer has the same bits whenever it
            is submitted. False: several prompts are prefilled at once, which is faster.
        """
        longest, devices = max(len(ids) for ids in prompts), devices_of(model)

        def made(model: Decoder) -> Sampler:
            """Makes the sampler of one device, with room for its share of the prompts. model: the copy of the model on
            that device."""
            return Sampler(
                model,
                length=longest + self.settings.max_completion_length,
                most_slots=min(self.slots, -(-len(prompts) // len(devices))),
                most_converted=self.most_converted,
                prefills_alone=alone,
            )

        return made(model) if len(devices) == 1 else DividedSampler(model, devices, len(prompts), made)

    def submit(self, sampler: Sampler | DividedSampler, ids: Sequence[int], new: int, seed: int, index: int = 0) -> int:
        """Submits a prompt to a sampler with the run's options, and returns the number of the request, with which the
        sampler labels the tokens that it returns for it. Their log-probabilities are those at the sampling temperature,
        before top_k, top_p, min_p and the repetition penalty. `OneTurn` calls it for each answer, `ToolTurns` for each
        turn.

        Args:
          sampler: the sampler, as the method `sampler` made it.
          ids: the token ids of the prompt.
          new: the most tokens to sample.
          seed: the sampling seed; `seed` and `index` decide what is drawn.
          index: distinguishes requests with the same seed, such as the turns of an answer.
        """
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

    def completion(self, shown: Turns, prompt_ids: Sequence[int], ids: Sequence[int]) -> Turns:
        """An answer as reward functions get it: text, or a list with a message."""
        ids = self.without_end(ids)
        return self.decode(ids) if self.completions is None else self.completions(shown, prompt_ids, ids)

    def without_end(self, ids: Sequence[int]) -> list[int]:
        """`ids`, the token ids of an answer or of one of its turns, as a list, without the last one if it is a token
        that ends an answer, to be decoded to text (`OneTurn`, rollout functions) or parsed for calls of tools
        (`ToolTurns`). The tokens that are trained on keep the last one."""
        return list(ids[:-1] if ids and ids[-1] in self.ends else ids)


class Answering(Protocol):
    """The interface of what samples the answers of a generation (all the answers of one round of sampling). The classes
    `OneTurn`, `ToolTurns` and `RolloutFunction` have it, and the batch source of GRPO and RLOO (SampledAnswers) calls
    whichever the run asks for in the same way. On-policy distillation and evaluations by generation sample without it.
    A call gets the model, the prompts (each once for each of its answers) and the sampling seed of each answer. It
    returns one `Given` (a sampled answer to one prompt, with its tokens and log-probabilities) for each prompt, and
    {metric's name: value} for the log. The three properties say how it samples, which tools the model may call, and
    whether a prompt may become longer than it is in its data row."""

    @property
    def sampling(self) -> Sampling:
        """The options of sampling, what makes text of tokens, and the plan of its memory, which the batch source sets
        in it once the run's memory is planned (`SampledAnswers.limit_slots`); it reads this property for nothing
        else."""
        ...

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model may call; () if it calls none. They are shown on the screen, and a run
        with other tools cannot resume from this one's checkpoints."""
        ...

    @property
    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the user's code that it calls."""
        ...

    @property
    def changes_prompts(self) -> bool:
        """Whether the prompt of an answer may differ from the prompt in its data row and be longer than it, because a
        tool environment adds text or a rollout function returns its own prompt. True: sampling is planned with room for
        data.length tokens in a row. False: with room for the longest prompt and max_completion_length."""
        ...

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """Samples one answer to each prompt: (the answers, in the order of the prompts; {metric's name: value} for the
        log).

        Args:
          model: the model to sample from.
          prompts: the prompts, each once for each of its answers, one after another.
          seeds: the sampling seed of each answer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OneTurn:
    """Samples each answer in one turn, with the interface of `Answering`: the model writes until a token ends the
    answer or it is max_completion_length long. A run without tools and without a rollout function does so. It has no
    metrics: a call returns {} for them."""

    sampling: Sampling
    """The options of sampling."""

    @property
    def tool_names(self) -> Sequence[str]:
        """(): the model calls no tools, so none are shown before the run or stored in its checkpoints."""
        return ()

    @property
    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the user's code that it calls."""
        return {}

    @property
    def changes_prompts(self) -> bool:
        """False: the prompt of an answer is always that of its data row, so that sampling is planned with room for the
        longest prompt and the longest answer only."""
        return False

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """Samples one answer to each prompt: (the answers in the order of the prompts, {}, as it has no metrics).

        Args:
          model: the model to sample from.
          prompts: the prompts, each once for each of its answers.
          seeds: the sampling seed of each answer, as many as prompts.
        """
        sampler = self.sampling.sampler(model, [prompt.ids for prompt in prompts])
        found = [Given(prompt.ids, prompt.given) for prompt in prompts]
        most = self.sampling.settings.max_completion_length
        requests = {
            self.sampling.submit(sampler, one.prompt_ids, most, seed): one
            for one, seed in zip(found, seeds, strict=True)
        }
        while sampler.pending:
            waiting.look()
            for piece in sampler.step():
                _extend(requests[piece.request], piece)
        for one in found:
            one.completion = self.sampling.completion(one.shown, one.prompt_ids, one.ids)
        return found, {}


def _extend(one: Given, piece: Piece) -> None:
    """Adds to the answer `one`, in place, the tokens and log-probabilities of `piece`, which a step of the sampler
    returned for its request, and marks them as sampled if the answer has such marks. If the piece is the last one
    of its request, it also sets finish_reason. `OneTurn` and `ToolTurns` call it."""
    one.ids += piece.ids
    one.logps += piece.logprobs
    if one.sampled is not None:
        one.sampled += [True] * len(piece.ids)
    one.finish_reason = piece.finish_reason or one.finish_reason


@dataclasses.dataclass
class _Dialogue:
    """An answer with calls of tools, while `ToolTurns` samples its turns. A turn is what the model writes until it
    calls tools or ends."""

    given: Given  # the answer so far
    seed: int  # its sampling seed
    columns: Mapping[str, object]  # of its data row; they say which tools it has, and no tool gets them
    environment: object  # of this answer, whose methods are tools; None: the run has none
    began: int = 0  # the index in given.ids of the current turn's first token
    turns: int = 0  # turns so far in which tools were called
    calls: int = 0  # calls of tools
    failures: int = 0  # calls that failed
    # the model's turns and what tools returned, as messages
    messages: list[Message] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ToolTurns:
    """Samples answers in which the model calls tools (`Answering`): it samples a turn, calls the tools that the turn
    asks for, adds what they returned to the tokens, and samples the next turn.

    Synchronous tools run in this thread, between two rounds of the sampler. While asynchronous tools of an answer run,
    its slot is given to another answer. Its next turn is a new request of the
    sampler, which prefills all its tokens again; each prompt is prefilled alone, so that what is sampled does not
    depend on how long tools take.
    """

    sampling: Sampling
    """The options of sampling, and what makes text of tokens."""
    tools: Tools
    """The tools that the model may call; some may be methods of environments, objects that are reset for each
    answer."""
    format: ToolFormat
    """Parses the calls in the tokens that the model wrote, and makes tokens of what tools returned, in the model's
    format."""
    encode: Callable[[Sequence[Message], Mapping[str, object]], tuple[int, ...]]
    """Maps (messages, a row's columns) to the token ids of the prompt, which includes the schemas of the row's tools.
    It serves prompts to which an environment added text."""
    length: int
    """The most tokens of a prompt with its answer; only prompts to which an environment added text are checked by
    it."""
    most_iterations: int | None = None
    """The most turns of an answer in which tools are called; None is no limit."""

    @property
    def tool_names(self) -> Sequence[str]:
        """The names of the tools that the model may call. They are shown on the screen when the run starts, and stored
        in its checkpoints, from which a run with other tools cannot resume."""
        return self.tools.names

    @property
    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the user's code that it calls."""
        return self.tools.code

    @property
    def changes_prompts(self) -> bool:
        """True if the run has environments, whose `reset` may add text to a prompt, so that sampling is planned with
        room for data.length tokens in a row; False: prompts are those of the data rows."""
        return self.tools.has_environments

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[Given], dict[str, float]]:
        """Samples one answer with calls of tools to each prompt: (the answers in the order of the prompts,
        {"tools/call_frequency": calls per answer, "tools/failure_frequency": the share of calls that failed, 0 without
        calls}). An answer's `completion` is the list of its messages, and its `columns` have its environment, if the
        run has environments. The next turn of an answer begins as soon as its tools have answered, without waiting for
        other answers.

        Args:
          model: the model to sample from.
          prompts: the prompts, each once for each of its answers.
          seeds: the sampling seed of each answer, as many as prompts.
        Raises:
          ConfigError: a text that an environment's `reset` added makes a prompt too long.
        """
        dialogues = self._new_dialogues(prompts, seeds)
        sampler = self.sampling.sampler(model, [one.given.prompt_ids for one in dialogues], alone=True)
        turns: dict[int, _Dialogue] = {}  # by the number of the sampler's request
        called: list[tuple[ToolCalls, _Dialogue]] = []  # whose tools run
        for one in dialogues:
            turns[self._submitted(sampler, one)] = one
        try:
            while sampler.pending or called:
                waiting.look()
                for piece in sampler.step():
                    _extend(turns[piece.request].given, piece)
                    if piece.finish_reason is not None:
                        one = turns.pop(piece.request)
                        if (turn_calls := self._called(one)) is not None:
                            called.append((turn_calls, one))
                if not sampler.pending and called and not any(turn_calls.done for turn_calls, _ in called):
                    wait_for_any([call for turn_calls, _ in called for call in turn_calls.pending.values()], "tools")
                done = [(turn_calls, one) for turn_calls, one in called if turn_calls.done]
                called = [(turn_calls, one) for turn_calls, one in called if not turn_calls.done]
                for turn_calls, one in done:
                    if self._add_results(one, turn_calls.answered()):
                        turns[self._submitted(sampler, one)] = one
        finally:
            for turn_calls, _ in called:
                turn_calls.cancel()
        calls, failures = (sum(getattr(one, name) for one in dialogues) for name in ("calls", "failures"))
        for one in dialogues:
            one.given.completion = one.messages
            if one.environment is not None:
                one.given.columns = {ENVIRONMENTS: one.environment}
        return [one.given for one in dialogues], {
            "tools/call_frequency": calls / len(dialogues),
            "tools/failure_frequency": failures / calls if calls else 0.0,
        }

    def _new_dialogues(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[_Dialogue]:
        """The answers before their first turn, one for each prompt. If the run has environments, each answer gets an
        environment, whose `reset` is called here, and the text that `reset` returned is added to its prompt. Raises
        ConfigError if a prompt then leaves less than max_completion_length of the `length` tokens, or as `Tools.reset`
        does.

        Args:
          prompts: the prompts, each once for each of its answers.
          seeds: the sampling seed of each answer, in the same order.
        """
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

    def _submitted(self, sampler: Sampler | DividedSampler, one: _Dialogue) -> int:
        """Submits the next turn of the answer `one` to `sampler`, and returns the number of the request, with which the
        sampler labels the turn's tokens. `one.began` is set to where the turn begins. The request's prompt is the
        answer's prompt with all tokens of the answer so far, and its most tokens are those that max_completion_length
        leaves. The turn draws with the answer's seed and the number of its turns so far."""
        given, most = one.given, self.sampling.settings.max_completion_length
        one.began = len(given.ids)
        ids = [*given.prompt_ids, *given.ids]
        return self.sampling.submit(sampler, ids, most - len(given.ids), one.seed, one.turns)

    def _called(self, one: _Dialogue) -> ToolCalls | None:
        """Ends a turn of the answer: parses it, adds its message, and makes the calls of tools in it. None if the
        answer is complete, in which case calls in the turn are not made: the turn calls no tool, the answer has had
        most_iterations turns with calls, or it has reached the most tokens."""
        turn = self.sampling.without_end(one.given.ids[one.began :])
        message, calls = self.format.parsed(turn, self.tools.parameters(one.columns))
        one.messages.append(message)
        over = self.most_iterations is not None and one.turns >= self.most_iterations
        if not calls or over or one.given.finish_reason == "length":
            return None
        one.turns += 1
        one.calls += len(calls)
        return self.tools.begin(calls, self.tools.of(one.environment))

    def _add_results(self, one: _Dialogue, answered: Answered) -> bool:
        """Adds what tools returned (`answered`) to the answer `one`, in place: to `one.given` as tokens that were not
        sampled, and to `one.messages`; and adds the failed calls to `one.failures`. Returns True if the next turn is to
        be sampled. Returns False if the answer would have no room for another token of the model: it is then complete,
        and only the failed calls were added."""
        one.failures += answered.failures
        if answered.is_late and one.environment is not None:
            self.tools.replace(one.environment)
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
