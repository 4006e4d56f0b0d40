"""Which programs a sampler's rows need, and which of them are ready."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jaxtune.models.generation.caches import Caches
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.ready import Decode, Grow, Mark, Ready, Size
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.sampling import Kind, Sampling
from jaxtune.models.generation.slot_plan import length_bucket, next_power
from jaxtune.models.generation.slot_rows import SlotRows, kind_of
from jaxtune.models.programs.kept import Prepared

_USUAL_LENGTH = 512  # tokens of a row for which `prepare` has programs beside those of the longest
_MOST = Kind(True, True, True, True, True)
_DRAWN, _FILTERED = Kind(True, False, False), Kind(True, True, False)


class RowPrograms:
    """The sizes of the programs that prefill and decode a sampler's rows.

    length: the most tokens of a row.
    steps: of a usual round.
    first_at_once: rounds may have one step.
    whole: caches have their whole length from the first row on.
    """

    def __init__(
        self,
        ready: Ready,
        prefills: Prefills,
        rows: SlotRows,
        caches: Caches,
        length: int,
        steps: int,
        first_at_once: bool,
        whole: bool,
    ):
        self._ready, self._prefills, self._rows, self._caches = ready, prefills, rows, caches
        self._length, self._longest, self._steps = length, length_bucket(length), steps
        self._first_at_once, self._whole = first_at_once, whole
        self._kinds: list[Kind] = []  # of the rounds so far, each once
        self._has_begun = False  # the first round's, in a thread

    # ---- before rows come

    def prepare(self) -> Prepared:
        """Loads or compiles those of usual rows, at the same time."""
        capacities = self.usual_capacities()
        rounds = [(self._steps, False)] + [(1, False), (1, True)] * self._first_at_once
        kinds = itertools.product((_FILTERED, _DRAWN), rounds, capacities)
        sizes = [self.decode(kind, *how, capacity) for kind, how, capacity in kinds]
        return self._ready.prepare([*sizes, *itertools.chain(*map(self._of_capacity, capacities))])

    def begin(self, prompt: int, max_new_tokens: int, sampling: Sampling, end_tokens: int) -> None:
        """As Sampler.begin."""
        capacity = length_bucket(self._length if self._whole else prompt + max_new_tokens)
        size = self.decode(sampling.kind, self._steps, False, capacity)
        size = dataclasses.replace(size, ends=max(next_power(end_tokens), size.ends))
        marks = [Mark()] if sampling.kind.penalises else []
        self._ready.begin(size, *self._prefills.of_lone(prompt - 1, capacity), *marks)

    def begin_first_round(self, requests: Sequence[Request]) -> None:
        """Begins to load or compile in a thread the program of the first round, once, if all rows need the same: their
        prompts' is compiled meanwhile.
        """
        needs = {(row.sampling.kind, next_power(len(row.ends)), row.constraint is None) for row in requests}
        if self._has_begun or len(needs) != 1:
            return
        ((kind, ends, is_free),) = needs
        if is_free and not kind.adjusts and not self._first_at_once:
            size = self.decode(kind, self._steps, False)
            size = dataclasses.replace(size, ends=max(ends, size.ends))
            self._has_begun = True
            self._ready.begin(size)

    def usual_capacities(self) -> list[int]:
        """In ascending order."""
        if self._whole:
            return [self._longest]
        return sorted({min(length_bucket(_USUAL_LENGTH), self._longest), self._longest})

    def _of_capacity(self, capacity: int) -> list[Size]:
        """All that must be ready before the slots' caches have this capacity."""
        of_most = [self.decode(_MOST, *how, capacity) for how in ((self._steps, False), (1, True))]
        shorter = {c for c in self.usual_capacities() if c < capacity}
        shorter = {self._caches.capacity} if self._caches.capacity else shorter
        grows = (Grow(len(self._rows.requests), c, capacity) for c in shorter)
        return [*of_most, *self._prefills.usual(capacity), *grows, Mark()]

    # ---- of rows that wait

    def capacity_for(self, limit: int) -> int | None:
        """That of the slots, or a longer one, for rows of so many tokens; None if its programs are not ready."""
        if limit <= self._caches.capacity:
            return self._caches.capacity
        capacities = [capacity for capacity in self.usual_capacities() if capacity >= limit]
        index = self._ready.choose(*map(self._of_capacity, capacities))
        return None if index is None else capacities[index]

    def capacity_of_rows(self, limits: Sequence[int]) -> int:
        """That of caches which grow with the rows."""
        return length_bucket(self._length if self._whole else max(limits))

    def serve(self, request: Request, kind: Kind, masks: bool) -> bool:
        """Whether all are ready that a row needs, in a batch with those in the slots, of this kind. RuntimeError: they
        could not be compiled.
        """
        capacity = self.capacity_for(request.limit)
        return (
            capacity is not None
            and self._decode(request, capacity, kind | request.sampling.kind, masks)
            and self._prefills.serves(request, capacity)
        )

    def _decode(self, request: Request, capacity: int, kind: Kind, masks: bool) -> bool:
        size = self.decode(_MOST, self._steps, False, capacity)
        ends, biases = next_power(len(request.ends)), next_power(len(request.sampling.biases))
        if ends > size.ends or biases > size.biases:  # then no program serves the next rows but those with so many
            size = dataclasses.replace(size, ends=max(ends, size.ends), biases=max(biases, size.biases))
        else:
            size = self.decode(kind, self._steps, False, capacity)
        sizes = [size]
        if masks or request.constraint is not None:
            sizes.append(dataclasses.replace(size, steps=1, masks=True))
        columns = max(biases, self._rows.biases)
        missing = [size for size in sizes if self._ready.decode(size, columns) is None]
        return self._ready.choose(missing) is not None

    # ---- of rounds

    def decode(self, kind: Kind, steps: int, masks: bool, capacity: int | None = None) -> Decode:
        """With the columns that the slots' arrays have. capacity: None: that of the slots."""
        columns = self._rows.ends, self._rows.biases if kind.adjusts else 0
        return Decode(kind, steps, self._caches.capacity if capacity is None else capacity, *columns, masks)

    def of_round(self, steps: int, masks: bool) -> Decode:
        """The program of a round, as small as there is, and with more steps if there is none with so few."""
        exact = self.decode(self.kind_of_slots(), steps, masks)
        size = self._ready.decode(exact, self._rows.biases)
        if size != exact:
            self._ready.choose([exact], ())
        return size or (exact if masks or steps == self._steps else self.of_round(self._steps, masks))

    def kind_of_slots(self) -> Kind:
        """What the rows need, by an earlier round's kind if there was the same; else with what the last round had, so
        that few programs are compiled.
        """
        kind = kind_of(self._rows.taken)
        if self._ready.beside:
            return kind
        if kind not in self._kinds:
            self._kinds.append(kind | self._kinds[-1] if self._kinds else kind)
            kind = self._kinds[-1]
        return kind
