"""Samples the answers of a generation (one round of sampling), in one turn or with tools called between turns."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxtune.conversations.answers import Completions
from jaxtune.conversations.picture_processors import PictureProcessor, PlacedPicture
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.requests import Constraint, Piece, PromptPictures
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan, prefix_room, room_bytes
from jaxtune.models.vision.pictures import Pictures
from jaxtune.system import waiting
from jaxtune.train.config import ConfigError
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.tokens.pictures import RowPictures, prompt_documents, with_room
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.reward_functions import ENVIRONMENTS, Message, Turns
from jaxtune.train.sampled.tool_formats import ToolFormat
from jaxtune.train.sampled.tools import Answered, ToolCalls, Tools
from jaxtune.train.user_code.loop import wait_for_any

logger = logging.getLogger(__name__)

_MOST_SHOWN = 120  # characters of a prompt in a message


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A data row's prompt."""

    turns: Turns
    """As reward functions get it: text or messages."""
    ids: tuple[int, ...]
    """Up to where the answer begins."""
    columns: Mapping[str, object]
    """The row's other columns, for scoring functions and environments' `reset`."""
    pictures: tuple[PlacedPicture, ...] = ()
    picture_column: str = "images"
    """As which reward functions get them."""

    def shown(self) -> Mapping[str, object]:
        """{column: pictures} for reward functions, RGB images of Pillow. Raises PictureError."""
        images = [placed.picture.decoded() for placed in self.pictures]
        return {self.picture_column: images if self.picture_column.lower() == "images" else images[0]} if images else {}

    def seen(self, processor: PictureProcessor) -> PromptPictures | None:
        """What a sampler gets; None without pictures. Raises ValueError for one that is not what it was."""
        if not self.pictures:
            return None
        documents, row = prompt_documents([self.pictures], processor), RowPictures()
        (patches,), _ = documents.sizes(np.array([len(self.ids)]))
        batch = with_room(Batch.empty(1, len(self.ids)), processor, int(patches))
        documents.write(batch, 0, 0, 0, len(self.ids), row)
        row.wait()
        pictures = Pictures(**jax.tree.map(np.asarray, batch.pictures))
        return PromptPictures(pictures, batch.positions[0])


@dataclasses.dataclass
class SampledTurns:
    """A sampled answer, filled while it is sampled."""

    prompt_ids: tuple[int, ...]
    shown: Turns
    """The prompt for reward functions."""
    ids: list[int] = dataclasses.field(default_factory=list)
    """The answer's tokens so far, with those that end it or its turns and those of tools' texts."""
    logps: list[float] = dataclasses.field(default_factory=list)
    """Of each of `ids` when sampled, at the sampling temperature; 0 for tools' tokens."""
    sampled: list[bool] | None = None
    """For each of `ids` whether the model sampled it; None: all."""
    finish_reason: str = "stop"
    """"length" if the last turn reached the most tokens, else "stop", also without room for tools' texts."""
    completion: Turns = ""
    """The answer as reward functions get it, set when complete: text or messages."""
    columns: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further columns for reward functions, such as its environment."""


@dataclasses.dataclass
class Sampling:
    """Options and functions shared by the ways of sampling."""

    settings: Settings
    ends: tuple[int, ...]
    """Token ids, ascending."""
    decode: Callable[[Sequence[int]], str]
    """Token ids to text, without special tokens."""
    plan: SlotPlan | None = None
    """Limits answers at a time and converted layers; None: free memory does. Set once the run is planned."""
    completions: Completions | None = None
    """Makes what reward functions get; None: text."""
    processor: PictureProcessor | None = None
    """Of prompts' pictures; None: they have none."""
    constraint: Callable[[int, Prompt], Constraint] | None = None
    """(tokens of the vocabulary, a prompt) -> which tokens an answer to it may make; None: any."""

    @property
    def slots(self) -> int:
        """The most answers that a device samples at a time."""
        return self.settings.slots if self.plan is None else min(self.settings.slots, self.plan.slots)

    @property
    def most_converted(self) -> int | None:
        """The most layers whose weights are converted once for all tokens, the same in each generation and resumed
        process; None: as many as fit.
        """
        return None if self.plan is None else self.plan.converted_layers

    def sampler(self, model: Decoder, prompts: Sequence[Sequence[int]], turns: bool = False) -> Sampler:
        """A sampler for answers to `prompts`, with rows for the longest prompt and answer; the devices that have the
        model share them.

          turns: an answer's prompts begin with the one before: what they share is prefilled once, and each prompt
          alone, so that an answer has the same bits whenever it is submitted. Several at once are faster.
        """
        return Sampler(
            model,
            length=max(len(ids) for ids in prompts) + self.settings.max_completion_length,
            most_slots=Sharing.of(model).slots(len(prompts), self.slots),
            most_converted=self.most_converted,
            prefills_alone=turns,
            exact=self.settings.exact,
            cache=self.settings.cache,
            prefix_bytes=prefix_room(room_bytes()) if turns else None,
        )

    def submit(
        self,
        sampler: Sampler,
        ids: Sequence[int],
        new: int,
        seed: int,
        index: int = 0,
        pictures: PromptPictures | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """Submits a prompt; the number of the request. Log-probabilities are at the sampling temperature, before top_k,
        top_p, min_p and the penalty.

          new: the most tokens.
          index: tells requests with one seed apart, such as an answer's turns.
          ids: the prompt's.
          pictures: of the prompt; None: it has none.
          constraint: which tokens the answer may make; None: any.
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
            pictures=pictures,
            constraint=constraint,
        )

    def completion(self, prompt: Turns, prompt_ids: Sequence[int], ids: Sequence[int]) -> Turns:
        ids = self.without_end(ids)
        return self.decode(ids) if self.completions is None else self.completions(prompt, prompt_ids, ids)

    def without_end(self, ids: Sequence[int]) -> list[int]:
        """`ids` without a last token that ends an answer."""
        return list(ids[:-1] if ids and ids[-1] in self.ends else ids)


class Answering(Protocol):
    """What samples the answers of a generation."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def tool_names(self) -> Sequence[str]:
        """Tools that the model may call; a run does not resume with others."""
        ...

    @property
    def functions(self) -> Mapping[str, Callable]:
        """{name for messages: function or class} of the user code that it calls."""
        ...

    @property
    def changes_prompts(self) -> bool:
        """Whether an answer's prompt may be longer than its row's, as environments or rollout functions change it;
        memory is then planned for data.length.
        """
        ...

    @property
    def repeats_beginnings(self) -> bool:
        """Whether an answer's prompts begin with those before, whose states are stored."""
        ...

    @property
    def one_row_a_prompt(self) -> bool:
        """Whether at most as many rows as prompts are sampled at a time; else any number."""
        ...

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[SampledTurns], dict[str, float]]:
        """Samples one answer to each prompt: (answers in order, metrics by name).

        prompts: each once for each of its answers, consecutive.
        seeds: of each answer.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OneTurn:
    """Samples each answer in one turn; no metrics."""

    sampling: Sampling

    @property
    def tool_names(self) -> Sequence[str]:
        return ()

    @property
    def functions(self) -> Mapping[str, Callable]:
        return {}

    @property
    def changes_prompts(self) -> bool:
        return False

    @property
    def repeats_beginnings(self) -> bool:
        return False

    @property
    def one_row_a_prompt(self) -> bool:
        return True

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[SampledTurns], dict[str, float]]:
        sampler = self.sampling.sampler(model, [prompt.ids for prompt in prompts])
        answers = [SampledTurns(prompt.ids, prompt.turns) for prompt in prompts]
        most, processor = self.sampling.settings.max_completion_length, self.sampling.processor
        constraint = self.sampling.constraint
        requests: dict[int, SampledTurns] = {}
        seen: tuple[Prompt, PromptPictures | None] | None = None
        for prompt, answer, seed in zip(prompts, answers, seeds, strict=True):
            if seen is None or seen[0] is not prompt:  # the answers to a prompt share its pictures
                seen = prompt, None if processor is None else prompt.seen(processor)
            rule = None if constraint is None else constraint(model.config.vocab_size, prompt)
            number = self.sampling.submit(sampler, prompt.ids, most, seed, pictures=seen[1], constraint=rule)
            requests[number] = answer
        while sampler.pending:
            waiting.look()
            for piece in sampler.step():
                _extend(requests[piece.request], piece)
        for answer in answers:
            answer.completion = self.sampling.completion(answer.shown, answer.prompt_ids, answer.ids)
        return answers, {}


def _extend(answer: SampledTurns, piece: Piece) -> None:
    """Adds a sampler's piece to the answer in place."""
    answer.ids += piece.ids
    answer.logps += piece.logprobs
    if answer.sampled is not None:
        answer.sampled += [True] * len(piece.ids)
    if piece.finish_reason == "failed":  # by its grammar
        logger.warning("an answer is cut off: %s", piece.error)
        answer.finish_reason = "length"
    else:
        answer.finish_reason = piece.finish_reason or answer.finish_reason


@dataclasses.dataclass
class _Dialogue:
    """An answer with tool calls while it is sampled; a turn ends with calls or the answer."""

    answer: SampledTurns  # the answer so far
    seed: int  # its sampling seed
    columns: Mapping[str, object]  # of its data row; they say which tools it has, and no tool gets them
    environment: object  # of this answer, whose methods are tools; None: the run has none
    began: int = 0  # the index in answer.ids of the current turn's first token
    turns: int = 0  # turns so far in which tools were called
    calls: int = 0  # calls of tools
    failures: int = 0  # calls that failed
    # the model's turns and what tools returned, as messages
    messages: list[Message] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ToolTurns:
    """Samples answers in which the model calls tools: a turn, its calls, their results as tokens, the next turn.

    Synchronous tools run in this thread, between rounds of the sampler. While asynchronous tools run, another answer
    has the slot; the next turn prefills what follows the last turn's prompt. Each prompt is prefilled alone, so that
    results do not depend on how long tools take.
    """

    sampling: Sampling
    tools: Tools
    format: ToolFormat
    encode: Callable[[Sequence[Message], Mapping[str, object]], tuple[int, ...]]
    """(Messages, row's columns) to the prompt's ids with tool schemas, for prompts to which an environment added text.
    """
    length: int
    most_iterations: int | None = None
    """Most turns with calls; None: no limit."""

    @property
    def tool_names(self) -> Sequence[str]:
        return self.tools.names

    @property
    def functions(self) -> Mapping[str, Callable]:
        return self.tools.code

    @property
    def changes_prompts(self) -> bool:
        return self.tools.has_environments

    @property
    def repeats_beginnings(self) -> bool:
        return True

    @property
    def one_row_a_prompt(self) -> bool:
        return True

    def __call__(
        self, model: Decoder, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> tuple[list[SampledTurns], dict[str, float]]:
        """Metrics are "tools/call_frequency" (calls an answer) and "tools/failure_frequency" (share that failed)."""
        dialogues = self._new_dialogues(prompts, seeds)
        sampler = self.sampling.sampler(model, [dialogue.answer.prompt_ids for dialogue in dialogues], turns=True)
        turns: dict[int, _Dialogue] = {}  # by the number of the sampler's request
        called: list[tuple[ToolCalls, _Dialogue]] = []  # whose tools run
        for dialogue in dialogues:
            turns[self._submitted(sampler, dialogue)] = dialogue
        try:
            while sampler.pending or called:
                waiting.look()
                for piece in sampler.step():
                    _extend(turns[piece.request].answer, piece)
                    if piece.finish_reason is not None:
                        dialogue = turns.pop(piece.request)
                        if (turn_calls := self._called(dialogue)) is not None:
                            called.append((turn_calls, dialogue))
                if not sampler.pending and called and not any(turn_calls.done for turn_calls, _ in called):
                    wait_for_any([call for turn_calls, _ in called for call in turn_calls.pending.values()], "tools")
                finished_calls = [(turn_calls, dialogue) for turn_calls, dialogue in called if turn_calls.done]
                called = [(turn_calls, dialogue) for turn_calls, dialogue in called if not turn_calls.done]
                for turn_calls, dialogue in finished_calls:
                    if self._add_results(dialogue, turn_calls.answered()):
                        turns[self._submitted(sampler, dialogue)] = dialogue
        finally:
            for turn_calls, _ in called:
                turn_calls.cancel()
        calls, failures = (sum(getattr(dialogue, name) for dialogue in dialogues) for name in ("calls", "failures"))
        for dialogue in dialogues:
            dialogue.answer.completion = dialogue.messages
            if dialogue.environment is not None:
                dialogue.answer.columns = {ENVIRONMENTS: dialogue.environment}
        return [dialogue.answer for dialogue in dialogues], {
            "tools/call_frequency": calls / len(dialogues),
            "tools/failure_frequency": failures / calls if calls else 0.0,
        }

    def _new_dialogues(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[_Dialogue]:
        """The answers before their first turn, with their environments reset. ConfigError for too little room."""
        if not self.tools.has_environments:
            return [
                _Dialogue(SampledTurns(prompt.ids, prompt.turns, sampled=[]), seed, prompt.columns, None)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
        reset = self.tools.reset([prompt.turns for prompt in prompts], [prompt.columns for prompt in prompts])
        dialogues = []
        for prompt, seed, (environment, messages) in zip(prompts, seeds, reset, strict=True):
            ids = prompt.ids
            if messages != prompt.turns:
                assert not isinstance(messages, str)
                ids = self.encode(messages, prompt.columns)
            room = self.length - self.sampling.settings.max_completion_length
            if len(ids) > room:
                raise ConfigError(
                    f"data.length = {self.length}: with what {type(environment).__name__}.reset added, a prompt has "
                    f"{len(ids):,} tokens, and beside objective.max_completion_length room for {room:,}: "
                    f"{str(messages)[:_MOST_SHOWN]}"
                )
            dialogues.append(_Dialogue(SampledTurns(ids, messages, sampled=[]), seed, prompt.columns, environment))
        return dialogues

    def _submitted(self, sampler: Sampler, dialogue: _Dialogue) -> int:
        """Submits the next turn, with all tokens so far as its prompt; the request's number."""
        answer, most = dialogue.answer, self.sampling.settings.max_completion_length
        dialogue.began = len(answer.ids)
        ids = [*answer.prompt_ids, *answer.ids]
        return self.sampling.submit(sampler, ids, most - len(answer.ids), dialogue.seed, dialogue.turns)

    def _called(self, dialogue: _Dialogue) -> ToolCalls | None:
        """Ends a turn and begins its calls; None if the answer is complete: no calls, the most turns or tokens."""
        turn = self.sampling.without_end(dialogue.answer.ids[dialogue.began :])
        cut = dialogue.answer.finish_reason == "length"
        message, calls = self.format.parsed(turn, self.tools.parameters(dialogue.columns), cut)
        dialogue.messages.append(message)
        over = self.most_iterations is not None and dialogue.turns >= self.most_iterations
        if not calls or over or cut:
            return None
        dialogue.turns += 1
        dialogue.calls += len(calls)
        return self.tools.begin(calls, self.tools.of(dialogue.environment))

    def _add_results(self, dialogue: _Dialogue, results: Answered) -> bool:
        """Adds tools' results in place; False if no room for another token is left, and the answer is complete."""
        dialogue.failures += results.failures
        if results.is_late and dialogue.environment is not None:
            self.tools.replace(dialogue.environment)
        suffix = self.format.suffix(results.messages)
        answer = dialogue.answer
        if len(answer.ids) + len(suffix) >= self.sampling.settings.max_completion_length:
            return False
        answer.ids += suffix
        answer.logps += [0.0] * len(suffix)
        assert answer.sampled is not None
        answer.sampled += [False] * len(suffix)
        dialogue.messages += results.messages
        return True
