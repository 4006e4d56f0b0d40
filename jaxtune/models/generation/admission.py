"""The queue of a sampler: which of the requests that wait are prefilled and get a free slot."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.caches import Caches
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.ready import Ready
from jaxtune.models.generation.requests import Request, in_turns
from jaxtune.models.generation.row_programs import RowPrograms
from jaxtune.models.generation.sampled_model import SampledModel
from jaxtune.models.generation.sampling import Kind
from jaxtune.models.generation.slot_rows import SlotRows, kind_of


class Admission:
    """Gives requests slots in the order in which they came, clients in turns.

      tokens_per_round: about the most that are prefilled between two rounds.

    Attributes:
      waiting: requests that have no slot, in their order.
    """

    def __init__(
        self,
        programs: device.Programs,
        model: SampledModel,
        rows: SlotRows,
        caches: Caches,
        prefills: Prefills,
        row_programs: RowPrograms,
        ready: Ready,
        tokens_per_round: int,
    ):
        self._programs, self._model, self._rows, self._caches = programs, model, rows, caches
        self._prefills, self._row_programs, self._ready = prefills, row_programs, ready
        self._tokens_per_round = tokens_per_round
        self.waiting: collections.deque[Request] = collections.deque()
        self._unordered = False  # whether clients must take turns anew
        self._refused: list[tuple[Request, str]] = []  # whose programs could not be compiled

    def add(self, request: Request, first: bool = False) -> None:
        """Queues a request and asks for its prefill. first: before all others, for a row whose states are computed
        anew.
        """
        request.slot, request.key = None, self._prefills.add_waiting(request)
        (self.waiting.appendleft if first else self.waiting.append)(request)
        self._unordered |= bool(request.client)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        self._prefills.remove_waiting(request)

    def fill(self, is_first: bool) -> list[tuple[Request, str]]:
        """Prefills prompts and gives ready requests free slots, in order. While at least half of the slots are taken, a
        call prefills about tokens_per_round tokens, so a long prompt may take several. Returns the requests whose
        programs could not be compiled, with errors. is_first: no round was dispatched yet.
        """
        free = self._rows.free
        if not free or not self.waiting:
            return []
        self._take_turns()
        nearest = list(itertools.islice(self._served(grows=True), len(free)))
        self._reserve(nearest)
        weights = self._model.weights
        if is_first and not self._ready.beside and weights.are_arrays and len(weights.leaves[0].devices()) == 1:
            self._row_programs.begin_first_round(nearest)
        budget = self._tokens_per_round if 2 * len(free) <= len(self._rows.requests) else float("inf")
        while free and (request := next(self._served(), None)) is not None:
            batch = self._prefills.ready(request)
            if batch is None:
                if budget <= 0:
                    break
                budget -= self._prefills.advance(
                    weights.leaves, self._served(), len(free), budget, self._caches.capacity
                )
                continue
            placed = []
            while free and request is not None and self._prefills.ready(request) is batch:
                self.waiting.remove(request)
                placed.append((self._prefills.take(request), free[0]))
                self._place(request, free.pop(0))
                request = next(self._served(), None)
            self._caches.states = batch.insert(self._programs, self._caches.states, placed)
        refused, self._refused = self._refused, []
        return refused

    def grow(self, capacity: int) -> None:
        """Gives the slots' caches room for rows of `capacity` tokens."""
        if self._ready.beside and self._caches.states is not None:
            self._prefills.forget_batches()  # the programs that insert them may not be ready
        self._caches.grow(capacity)

    def _take_turns(self) -> None:
        if self._unordered:
            self._unordered = False
            again = [request for request in self.waiting if request.placements]
            new = in_turns(request for request in self.waiting if not request.placements)
            self.waiting = collections.deque([*again, *new])

    def _place(self, request: Request, slot: int) -> None:
        switch = self._prefills.switch
        self._rows.place(request, slot, switch if len(request.tokens) <= switch else device.NEVER)

    def _reserve(self, nearest: Sequence[Request]) -> None:
        """Allocates or grows the slots' caches if `nearest` need it, to the bucket of the longest row."""
        if all(request.limit <= self._caches.capacity for request in nearest):
            return
        if self._ready.beside:
            self.grow(max(self._row_programs.capacity_for(request.limit) or 0 for request in nearest))
        else:
            limits = [request.limit for request in (*self.waiting, *self._rows.taken)]
            self.grow(self._row_programs.capacity_of_rows(limits))

    def _served(self, grows: bool = False) -> Iterator[Request]:
        """Those that wait and whose programs are ready; `grows`: also longer ones than the caches have room for."""
        if not self._ready.beside:
            yield from self.waiting
            return
        kind, masks = kind_of(self._rows.taken), self._rows.follows
        for request in [*self.waiting]:
            if (grows or request.limit <= self._caches.capacity) and self._serves(request, kind, masks):
                yield request

    def _serves(self, request: Request, kind: Kind, masks: bool) -> bool:
        """Whether all is ready that a row needs, in a batch with those in the slots, of this kind."""
        try:
            if request.adapter > self._model.weights.newest:
                self._model.can_switch(self._ready)
                return False  # until the sampler has switched
            return self._row_programs.serve(request, kind, masks)
        except RuntimeError as error:
            if all(refused is not request for refused, _ in self._refused):
                self._refused.append((request, str(error)))
            return False
