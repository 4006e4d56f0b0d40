"""Prompts that are prefilled apart from the slots, once for all rows that begin with them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.slot_plan import capacity_bucket

_SMALLEST = 16  # tokens of a bucket of prompts
_KEPT = 4  # batches of prefilled prompts that can wait for slots at a time


@dataclasses.dataclass(eq=False)
class Batch:
    """Prompts whose states are made."""

    # Of all rows.
    states: device.States
    # The row of each prompt, by Request.key.
    rows: dict[bytes, int]

    def insert(
        self, programs: device.Programs, states: device.States, placed: Sequence[tuple[int, int]]
    ) -> device.States:
        """The slots' states with those of pairs (row of this batch, slot)."""
        arrays = jax.tree.leaves(self.states)
        if not arrays:  # no layer of the model has a mixer
            return states
        size = len(arrays[0])
        for first in range(0, len(placed), size):
            some = [*placed[first : first + size]]
            some += [some[-1]] * (size - len(some))  # one program for any number: a pair may be written again
            rows, slots = (np.array(part, np.int32) for part in zip(*some, strict=True))
            states = programs.insert(states, self.states, rows, slots)
        return states


@dataclasses.dataclass
class _Long:
    """A prompt that is prefilled in several chunks."""

    request: Request
    states: device.States
    # Tokens that are in the states.
    done: int


class Prefills:
    """The prompts of waiting requests, and which of them are ready.

    A prompt longer than `chunk` tokens is prefilled in pieces: its first tokens by a forward pass, as many as leave
    whole chunks, then the chunks.

    Args:
      chunk: tokens that one program prefills. one: whether each prompt is prefilled alone, so that its states do not
        depend on how many others wait.
    Attributes:
      switch: where a longrope model takes its other factors: rows longer than this need other states than shorter ones.
    """

    def __init__(
        self,
        programs: device.Programs,
        structure: device.Structure,
        shapes: Sequence[jax.ShapeDtypeStruct],
        chunk: int,
        one: bool,
    ):
        self._programs, self._structure, self._shapes, self._one = programs, structure, shapes, one
        self._chunk = chunk
        config = structure.config
        originals = (
            rope.original_max_position_embeddings or config.max_position_embeddings
            for rope in config.rotary
            if rope.kind == "longrope"
        )
        self.switch = min(originals, default=device.NEVER)
        self._wanted: collections.Counter[bytes] = collections.Counter()
        self._batches: list[Batch] = []
        self._long: _Long | None = None

    def wanted(self, request: Request) -> bytes:
        """Notes that a request waits for its prompt; gives the key by which requests of equal prompts find each
        other."""
        key = np.asarray(request.tokens, np.int32).tobytes()
        self._wanted[key] += 1
        return key

    def unwanted(self, request: Request) -> None:
        """Notes that a request waits no more; states that nobody waits for are freed."""
        self._wanted[request.key] -= 1
        if self._wanted[request.key] <= 0:
            del self._wanted[request.key]
            self._batches = [b for b in self._batches if any(key in self._wanted for key in b.rows)]
            if self._long is not None and self._long.request.key not in self._wanted:
                self._long = None

    def ready(self, request: Request) -> Batch | None:
        """The batch that has the request's prompt, if it is prefilled."""
        return next((batch for batch in reversed(self._batches) if request.key in batch.rows), None)

    def take(self, request: Request) -> int:
        """The row of the request's prompt in its batch; the request waits no more."""
        batch = self.ready(request)
        assert batch is not None
        self.unwanted(request)
        return batch.rows[request.key]

    def forget(self) -> None:
        """Frees all states, such as those of other weights."""
        self._batches, self._long = [], None

    def advance(self, leaves: Sequence[jax.Array], nearest: Sequence[Request]) -> int:
        """Dispatches one program that prefills for the first of these requests, and perhaps for others of them.

        Args:
          leaves: the model's arrays. nearest: requests that get a slot next.
        Returns:
          tokens that the program computes.
        """
        if self._long is not None:
            return self._go_on(leaves, self._long)
        first = nearest[0]
        count = len(first.tokens) - 1
        if count == 0:
            states = device.empty_states(self._structure, self._shapes, 1, 1)
            self._keep(Batch(states, {first.key: 0}))
            return 1
        if count > self._chunk:
            begin = (count - 1) % self._chunk + 1
            states = self._prefill(leaves, [first], begin, capacity_bucket(count))
            self._long = _Long(first, states, begin)
            return _bucket(begin)
        width = _bucket(count)
        alike = {r.key: r for r in nearest if len(r.tokens) > 1 and _bucket(len(r.tokens) - 1) == width}
        alike = [request for request in alike.values() if self.ready(request) is None]
        rows = max(1, self._chunk // width)
        # One program for many prompts, and one for a single one; else each number of prompts would compile its own.
        chosen = alike[: rows if len(alike) >= rows and not self._one else 1]
        self._keep(Batch(self._prefill(leaves, chosen, width, width), {r.key: i for i, r in enumerate(chosen)}))
        return width * len(chosen)

    def _prefill(self, leaves, requests: Sequence[Request], count: int, capacity: int) -> device.States:
        """The states after at most the first `count` tokens of each request, all but its newest."""
        width = min(_bucket(count), capacity_bucket(capacity))
        tokens = np.zeros((len(requests), width), np.int32)
        lengths, totals = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.int32)
        for row, request in enumerate(requests):
            some = request.tokens[:-1][:count]
            tokens[row, : len(some)] = some
            lengths[row], totals[row] = len(some), len(request.tokens)
        return self._programs.prefill(self._structure, max(capacity, width), leaves, tokens, lengths, totals)

    def _go_on(self, leaves, long: _Long) -> int:
        tokens = np.array([long.request.tokens[long.done : long.done + self._chunk]], np.int32)
        at, totals = np.array([long.done], np.int32), np.array([len(long.request.tokens)], np.int32)
        long.states = self._programs.extend(self._structure, leaves, long.states, tokens, at, totals)
        long.done += self._chunk
        if long.done == len(long.request.tokens) - 1:
            self._long = None
            self._keep(Batch(long.states, {long.request.key: 0}))
        return self._chunk

    def _keep(self, batch: Batch) -> None:
        self._batches = [*self._batches[-(_KEPT - 1) :], batch]


def _bucket(tokens: int) -> int:
    return max(_SMALLEST, 1 << (tokens - 1).bit_length())
