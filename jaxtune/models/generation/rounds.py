"""The rounds of a sampler: a few decoding steps of all slots, dispatched without waiting and read later."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.caches import Caches
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.ready import Decode
from jaxtune.models.generation.requests import FinishReason, Request, accept_all
from jaxtune.models.generation.row_programs import RowPrograms
from jaxtune.models.generation.sampled_model import SampledModel
from jaxtune.models.generation.slot_rows import SlotRows
from jaxtune.models.programs import ahead
from jaxtune.system import timing

_FEW = 4  # as a share of the slots, the rows among which a new one has a round of one step


@dataclasses.dataclass
class Round:
    """A call of `decode` that was dispatched and is not read yet."""

    emitted: device.Emitted  # its results, which may not have arrived
    steps: int
    # {slot: (the request that it decodes, Request.placements at that time)}. A row that paused in an earlier round
    # makes no tokens in this one; if `placements` is another when this one is read, it has a slot again and is not
    # queued once more
    requests: dict[int, tuple[Request, int]]


class Logits(NamedTuple):
    """Of the next tokens of all slots, which wait for the masks."""

    size: Decode
    values: jax.Array
    rows: device.Rows  # without masks


class NewTokens(NamedTuple):
    """What a row made in a round."""

    request: Request
    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    reason: FinishReason | None = None  # why it ended
    error: str = ""  # of its constraint
    paused: bool = False  # it left its slot, because its states must be computed anew


def wait_for(rounds: collections.deque[Round], prefills: Prefills) -> None:
    """Waits for results that nobody will read."""
    while rounds:
        with contextlib.suppress(Exception):  # a device that has failed has ended too
            jax.tree.map(np.asarray, rounds.popleft().emitted)
    with contextlib.suppress(Exception):
        prefills.forget()


class Rounds:
    """Dispatches rounds and reads them in order.

      steps: of a usual round.
      first_at_once: where a row is new, a round may have one step.

    Attributes:
      dispatched: those that are not read.
    """

    def __init__(
        self,
        programs: device.Programs,
        model: SampledModel,
        rows: SlotRows,
        caches: Caches,
        row_programs: RowPrograms,
        steps: int,
        first_at_once: bool,
    ):
        self._programs, self._model, self._rows, self._caches = programs, model, rows, caches
        self._row_programs, self._steps, self._first_at_once = row_programs, steps, first_at_once
        self.dispatched: collections.deque[Round] = collections.deque()
        # by the capacity, of the logits of rounds with masks
        self._compiled: dict[Decode | int, Callable] = {}
        self._on_host = jax.default_backend() == "cpu"  # where results lie in the host's memory already

    @property
    def are_needed(self) -> bool:
        """Whether a row makes tokens that no round was dispatched for."""
        return any(row.limit > len(row.tokens) + row.ahead for row in self._rows.taken)

    @property
    def is_first(self) -> bool:
        """Whether none was dispatched for these weights."""
        return not self._compiled

    def forget_programs(self) -> None:
        """After a change of the weights, as shapes and dtypes may be others."""
        self._compiled.clear()

    # ---- dispatch

    def dispatch(self, more_come: bool) -> None:
        """Starts a round without waiting; the states are donated. What the host changed of the slots takes effect in
        it.
        """
        size = self._row_programs.of_round(self._steps_of_round(more_come), False)
        rows, caches, weights = self._rows, self._caches, self._model.weights
        sent = rows.seen_of(size.kind), *rows.changes(), rows.sent(size.kind, weights.gated)
        arguments = weights.leaves, caches.states, rows.live, *sent
        if size not in self._compiled:
            decode = self._programs.decode
            self._compiled[size] = decode.program(weights.structure, size.kind, size.steps, *arguments)
        caches.states, rows.live, seen, emitted = self._compiled[size](*arguments)
        self._add(size, seen, emitted)

    def logits(self) -> Logits:
        """Starts a round of one step, whose tokens wait for `choose`."""
        size = self._row_programs.of_round(1, True)
        caches, weights = self._caches, self._model.weights
        rows = self._rows.sent(size.kind, weights.gated)
        arguments = weights.leaves, caches.states, self._rows.live, *self._rows.changes(), rows.delta, rows.adapter
        if size.capacity not in self._compiled:
            self._compiled[size.capacity] = self._programs.logits.program(weights.structure, *arguments)
        caches.states, self._rows.live, values = self._compiled[size.capacity](*arguments)
        return Logits(size, values, rows._replace(delta=None, adapter=None))

    def choose(self, logits: Logits) -> None:
        """Goes on with a round, with the masks of what the rounds before have made, which are read by now."""
        size, rows = logits.size, self._rows
        arguments = logits.values, rows.live, rows.seen_of(size.kind), logits.rows._replace(masks=rows.masks())
        if size not in self._compiled:
            choose = self._programs.choose
            self._compiled[size] = choose.program(self._model.weights.structure, size.kind, *arguments)
        rows.live, seen, emitted = self._compiled[size](*arguments)
        self._add(size, seen, emitted)

    def _add(self, size: Decode, seen: device.Array | None, emitted: device.Emitted) -> None:
        if size.kind.penalises:
            self._rows.seen = seen
        if not self._on_host:
            for array in jax.tree.leaves(emitted):
                array.copy_to_host_async()
        for request in self._rows.taken:
            request.ahead += size.steps
        slots = enumerate(self._rows.requests)
        requests = {slot: (request, request.placements) for slot, request in slots if request is not None}
        self.dispatched.append(Round(emitted, size.steps, requests))

    def _steps_of_round(self, more_come: bool) -> int:
        """One where others come, a new row waits for its first token, or all rows end within few steps."""
        if not self._first_at_once:
            return self._steps
        rows = self._rows.taken
        is_new = any(len(request.tokens) == request.start and not request.ahead for request in rows)
        is_new = is_new and len(rows) <= max(1, len(self._rows.requests) // _FEW)
        most_new = max(request.limit - len(request.tokens) - request.ahead for request in rows)
        return 1 if more_come or is_new or most_new <= self._steps // 4 else self._steps

    # ---- results

    def read(self) -> Iterator[NewTokens]:
        """Waits for the oldest round and yields what each row made that has not ended. A row that paused, because a
        longrope model changes its factors at its length, has no slot any more.
        """
        oldest = self.dispatched.popleft()
        with timing.phase("wait", "the device"):
            tokens, logprobs, counts, ranked = jax.tree.map(np.asarray, oldest.emitted)
        ahead.end()
        rows: dict[int, list[int]] = {}  # slots whose rows have not ended, and their new tokens
        by_slot, logprobs_by_slot = tokens.T.tolist(), logprobs.T.tolist()
        for slot, (request, placements) in oldest.requests.items():
            request.ahead -= oldest.steps
            has_left = request.placements != placements or self._rows.requests[slot] is not request
            if not request.done:  # by a stop string or a cancellation that the device did not know of yet
                rows[slot] = [] if has_left else by_slot[slot][: int(counts[slot])]
        followed = {slot: its for slot in rows if (its := oldest.requests[slot][0].constraint) is not None}
        accepted = dict(zip(followed, accept_all([(followed[slot], rows[slot]) for slot in followed]), strict=True))
        for slot, new_tokens in rows.items():
            request, placements = oldest.requests[slot]
            dropped = getattr(followed.get(slot), "dropped", 0)
            try:
                ids, reason = request.take(new_tokens[: len(new_tokens) - dropped], accepted.get(slot, False))
            except ValueError as error:  # of its constraint
                yield NewTokens(request, [], [], [], "failed", str(error))
                continue
            tops = _ranked_of(ranked, slot, len(ids), request.sampling.top_logprobs)
            # It paused, so that its states are computed anew. In a round that was dispatched before that was known, it
            # made no token either, but has left its slot.
            paused = reason is None and len(new_tokens) < oldest.steps and request.placements == placements
            paused = paused and self._rows.requests[slot] is request
            if dropped and reason is None:
                paused = True
                self._rows.end(slot)
            elif paused:
                self._rows.requests[slot] = None
            yield NewTokens(request, ids, logprobs_by_slot[slot][: len(ids)], tops, reason, paused=paused)


def _ranked_of(ranked, slot: int, count: int, most: int) -> list[list[tuple[int, float]]]:
    """[(token, log-probability) of the `most` likeliest] in each of `count` steps; [] where no row asked."""
    if not most:
        return []
    steps = zip(*(array[:count, slot, :most].tolist() for array in ranked), strict=True)
    return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in steps]
