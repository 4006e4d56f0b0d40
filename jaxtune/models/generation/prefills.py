"""Prefills prompts, once for all waiting rows with the same prompt, and keeps their states until slots take them. Of
more than four batches the oldest is dropped; its prompts are prefilled again if rows wait for them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.ready import Extend, Insert, Pack, Prefill, Ready, Size
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.slot_plan import length_bucket, next_power
from jaxtune.models.generation.structure import Structure
from jaxtune.models.layers.attention import Attention

_SMALLEST = 16  # prompts are padded to at least this many tokens
_SHORTEST_PACKED = 128  # from this padded length on, prompts are packed; caches of shorter ones are as long as this
_KEPT = 4  # how many batches of prefilled prompts can wait for slots at a time
_NO_SLOT = np.iinfo(np.int32).max  # a slot to which nothing is copied
_LEAST_USUAL, _STEP = 32, 4  # widths that are compiled ahead: the longest, and each a quarter of the one before
_AHEAD = 2  # with fewer of them, prompts are prefilled for which no slot is free yet


@dataclasses.dataclass(eq=False)
class Batch:
    """Prefilled prompts with their states (what mixers keep of earlier tokens, such as keys and values)."""

    states: device.States  # those of all rows of the batch: arrays whose first axis is the row
    rows: dict[bytes, int]  # {Request.key: row of the batch that has this prompt}

    def insert(
        self, programs: device.Programs, states: device.States, placed: Sequence[tuple[int, int]]
    ) -> device.States:
        """Copies states of this batch into the states of all slots, and returns these.

        programs: the sampler's compiled functions.
        states: of all slots, which are donated.
        placed: pairs (row of this batch, slot).
        """
        arrays = jax.tree.leaves(self.states)
        if not arrays:  # no layer of the model has a mixer
            return states
        size = len(arrays[0])
        for first in range(0, len(placed), size):
            pairs = [*placed[first : first + size]]
            pairs += [(0, _NO_SLOT)] * (size - len(pairs))  # so that one program serves any number
            rows, slots = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
            states = programs.insert(states, self.states, rows, slots)
        return states


@dataclasses.dataclass
class _Long:
    """A prompt that is being prefilled in several chunks."""

    request: Request  # a waiting request with this prompt; others may have the same
    states: device.States  # the states after its first `done` tokens
    done: int  # how many tokens of the prompt have been prefilled


class Prefills:
    """Prefills the prompts of waiting requests before a slot is free, and keeps their states.

    If all mixers are attention and layers exchange nothing, one program packs prompts into one row of `chunk` tokens,
    or half as many, or `at_once` while most slots are free. They must fill half of it, and round up to the same power
    of two. Other prompts are padded rows; one longer than `chunk` takes a program for its first tokens and one for each
    whole chunk.

    A program also takes prompts that get no slot yet, unless `one_at_a_time`: slots become free one at a time, and a
    program of few tokens takes about as long as one of several times as many.

      structure, shapes: the model without its arrays, and their shapes in the order of jax.tree.leaves.
      one_at_a_time: each prompt is prefilled alone, so that its states do not depend on other prompts.
      ready: where the program for a prompt's length is not compiled, a longer one's is used; not with one_at_a_time.

    Attributes:
      switch: the row length above which a longrope model needs other states, or slots.NEVER.
    """

    def __init__(
        self,
        programs: device.Programs,
        structure: Structure,
        shapes: Sequence[jax.ShapeDtypeStruct],
        chunk: int,
        at_once: int,
        one_at_a_time: bool,
        ready: Ready,
    ):
        self._programs, self._structure, self._shapes, self._one = programs, structure, shapes, one_at_a_time
        self._chunk, self._at_once, self._ready = chunk, at_once, ready
        layers = structure.model(shapes).layers
        mixers = [mixer for layer in layers for mixer in layer.mixers.values()]
        alone = not any(layer.takes or layer.gives for layer in layers)
        self._packs = not one_at_a_time and alone and all(type(mixer) is Attention for mixer in mixers)
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

    def add_waiting(self, request: Request) -> bytes:
        """Counts a request among those that wait for its prompt. Returns the prompt's key for request.key; equal
        prompts share it.
        """
        key = np.asarray(request.tokens, np.int32).tobytes()
        if request.pictures is not None:
            key += request.pictures.key()
        self._wanted[key] += 1
        return key

    def remove_waiting(self, request: Request) -> None:
        """Registers that a request no longer waits. Drops prompts for which nobody waits."""
        self._wanted[request.key] -= 1
        if self._wanted[request.key] <= 0:
            del self._wanted[request.key]
            self._batches = [b for b in self._batches if any(key in self._wanted for key in b.rows)]
            if self._long is not None and self._long.request.key not in self._wanted:
                self._long = None

    def ready(self, request: Request) -> Batch | None:
        """The batch with the request's prompt; None if it is not prefilled, or was dropped."""
        return next((batch for batch in reversed(self._batches) if request.key in batch.rows), None)

    def take(self, request: Request) -> int:
        """Registers that a request with a ready prompt gets a slot; returns its row in the batch, which may be dropped.
        Call `ready` first, and copy the row (Batch.insert) before the slot decodes.
        """
        batch = self.ready(request)
        assert batch is not None
        self.remove_waiting(request)
        return batch.rows[request.key]

    def forget(self) -> None:
        """Waits for all prefilled states and frees them."""
        jax.block_until_ready([batch.states for batch in self._batches])
        if self._long is not None:
            jax.block_until_ready(self._long.states)
        self._batches, self._long = [], None

    def advance(
        self, leaves: Sequence[jax.Array], waiting: Iterable[Request], free: int, budget: float, capacity: int
    ) -> int:
        """Dispatches one program: the next chunk of a long prompt, or the first waiting prompt and others alike.
        Returns its tokens with padding; 1 for a prompt of one token, which needs none.

          leaves: the model's arrays, in the order of jax.tree.leaves.
          waiting: in the order of slots; the first is not ready.
          free: how many of them get a slot now, at least one.
          budget: tokens that may be prefilled before the next round.
          capacity: tokens of the slots' caches.
        """
        if self._long is not None:
            return self._next_chunk(leaves, self._long)
        # As many as a program can take, unless prompts would wait in too many batches (_keep drops the oldest).
        ahead = 2 * self._chunk // _SHORTEST_PACKED if len(self._batches) < _AHEAD and not self._one else 0
        nearest = list(itertools.islice(waiting, max(free, ahead)))
        first = nearest[0]
        count = len(first.tokens) - 1
        if count == 0:
            shapes = device.states_shape(self._structure, tuple(self._shapes), 1, 1)
            states = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
            self._keep(Batch(states, {first.key: 0}))
            return 1
        if first.pictures is not None:
            self._keep(Batch(self._prefill(leaves, [first], count, _padded(count), _padded(count)), {first.key: 0}))
            return _padded(count)
        width, room = self._chosen(count, capacity) or (_padded(count), length_bucket(count))
        if count > self._chunk:
            begin = self._begin(count)
            self._long = _Long(first, self._prefill(leaves, [first], begin, room, width), begin)
            return width
        alike = [r for r in nearest if r.pictures is None and len(r.tokens) > 1]
        candidates = {r.key: r for r in alike if _padded(len(r.tokens) - 1) <= capacity}
        candidates = [request for request in candidates.values() if self.ready(request) is None]
        if self._packs and _SHORTEST_PACKED <= next_power(count) <= self._chunk // 2:
            alike = [request for request in candidates if next_power(len(request.tokens) - 1) == next_power(count)]
            if (size := self._packed(leaves, alike, next_power(count), budget, capacity)) is not None:
                return size
            candidates = [first]
        alike = [request for request in candidates if _padded(count) <= _padded(len(request.tokens) - 1) <= width]
        rows = max(1, self._chunk // width)
        # Either a full batch or a single prompt; every other number of prompts would need a program of its own.
        full = len(alike) >= rows and not self._one
        full = full and self._ready.choose(_batch_sizes(rows, width, capacity), ()) == 0
        batch_requests = alike[: rows if full else 1]
        states = self._prefill(leaves, batch_requests, width, width, width)
        self._keep(Batch(states, {r.key: i for i, r in enumerate(batch_requests)}))
        return width * len(batch_requests)

    def serves(self, request: Request, capacity: int) -> bool:
        """Whether the programs for a prompt are compiled; otherwise they are being compiled. RuntimeError: in vain."""
        count = len(request.tokens) - 1
        if count == 0:
            return self._ready.choose([Insert(capacity, 1, 1)]) is not None
        return request.pictures is not None or self._chosen(count, capacity) is not None

    def usual(self, capacity: int) -> list[Size]:
        """The programs that serve all prompts whose rows fit into `capacity`, each longer than it by at most some
        times; the slowest first.
        """
        sizes: list[Size] = [Insert(capacity, 1, 1)]
        width = min(_padded(self._chunk), capacity)
        if capacity > self._chunk:
            sizes += self._long_sizes(width, capacity, capacity)
        power = _SHORTEST_PACKED
        while self._packs and power <= self._chunk // 2 and power // 2 < capacity:
            for size in dict.fromkeys((self._at_once, self._chunk)):
                sizes += self._pack_sizes(size, min(power, capacity), capacity)
            power *= 2
        while True:
            rows = {1} if self._packs or self._one else {1, max(1, self._chunk // width)}
            for count in sorted(rows):
                sizes += _batch_sizes(count, width, capacity)
            if width <= _LEAST_USUAL:
                return sorted(sizes, key=_tokens, reverse=True)
            width = _padded(width // _STEP)

    def _chosen(self, count: int, capacity: int) -> tuple[int, int] | None:
        """(width of the program for a prompt, or for the first part of a long one; the capacity of its states); None
        if none is compiled.
        """
        long = count > self._chunk
        least, most = (self._begin(count), self._chunk) if long else (count, min(self._chunk, capacity))
        widths = [_padded(least)]
        while not self._one and widths[-1] < most:
            widths.append(_padded(widths[-1] + 1))
        rooms = [length_bucket(count), capacity] if long and not self._one else [length_bucket(count)]
        pairs = [(width, room if long else width) for width in widths for room in rooms]
        sizes = (self._long_sizes(*pair, capacity) if long else _batch_sizes(1, pair[0], capacity) for pair in pairs)
        index = self._ready.choose(*sizes)
        return None if index is None else pairs[index]

    def _begin(self, count: int) -> int:
        """The tokens of a long prompt before its whole chunks."""
        return (count - 1) % self._chunk + 1

    def _long_sizes(self, width: int, room: int, capacity: int) -> list[Size]:
        return [Prefill(1, width, room), Extend(self._chunk, room), Insert(capacity, 1, room)]

    def _pack_sizes(self, size: int, width: int, capacity: int) -> list[Size]:
        rows = _rows_of_pack(size, width)
        return [Pack(size, width, rows), Insert(capacity, rows, width)]

    def _packed(self, leaves, alike: Sequence[Request], power: int, budget: float, capacity: int) -> int | None:
        """Packs the first of `alike`, prompts of power / 2 + 1 to `power` tokens: the row's tokens, or None if they are
        too few.
        """
        # (tokens of a row, the least that prompts must fill of it): the largest row must leave room for none.
        sizes = [(self._at_once, self._at_once - power)] if self._chunk < self._at_once <= budget else []
        sizes += [(size, size / 2) for size in (self._chunk, self._chunk // 2)]
        for size, least in sizes:
            packed = self._fitting(alike, 2 * size // power, size)
            lengths = [len(request.tokens) - 1 for request in packed]
            if len(packed) > 1 and sum(lengths) >= least:
                width = min(power, capacity) if self._ready.beside else _padded(max(lengths))
                if self._ready.choose(self._pack_sizes(size, width, capacity), ()) != 0:
                    continue
                states = self._pack(leaves, packed, width, size)
                self._keep(Batch(states, {request.key: row for row, request in enumerate(packed)}))
                return size
        return None

    def _prefill(self, leaves, requests: Sequence[Request], count: int, capacity: int, width: int) -> device.States:
        """States after `count` tokens of each request, never its newest, which the first decoding step reads; padded to
        `width`. One with pictures is alone.
        """
        tokens = np.zeros((len(requests), width), np.int32)
        lengths, totals = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.int32)
        for row, request in enumerate(requests):
            prompt = request.tokens[:-1][:count]
            tokens[row, : len(prompt)] = prompt
            lengths[row], totals[row] = len(prompt), len(request.tokens)
        arguments = leaves, tokens, lengths, totals
        if (pictures := requests[0].pictures) is not None:
            patches = length_bucket(pictures.pictures.patch_segments.shape[1])
            arguments = *arguments, *pictures.padded(tokens.shape[1], patches)
        return self._programs.prefill(self._structure, capacity, *arguments)

    def _fitting(self, requests: Sequence[Request], most: int, size: int) -> list[Request]:
        lengths = itertools.accumulate(len(request.tokens) - 1 for request in requests)
        return [r for r, end in zip(requests[:most], lengths, strict=False) if end <= size]

    def _pack(self, leaves, requests: Sequence[Request], width: int, size: int) -> device.States:
        """The states after prompts that are packed in one row of `size` tokens, each without its last token. width: of
        their caches.
        """
        tokens = np.zeros((1, size), np.int32)
        room = _rows_of_pack(size, width)
        starts, lengths, totals = np.full(room, size, np.int32), *np.zeros((2, room), np.int32)
        offset = 0
        for row, request in enumerate(requests):
            count = len(request.tokens) - 1
            tokens[0, offset : offset + count] = request.tokens[:-1]
            starts[row], lengths[row], totals[row] = offset, count, count + 1
            offset += count
        return self._programs.pack(self._structure, width, leaves, tokens, starts, lengths, totals)

    def _next_chunk(self, leaves, long: _Long) -> int:
        """Dispatches the next chunk of a long prompt, whose states are donated. Returns its tokens."""
        tokens = np.array([long.request.tokens[long.done : long.done + self._chunk]], np.int32)
        start, totals = np.array([long.done], np.int32), np.array([len(long.request.tokens)], np.int32)
        long.states = self._programs.extend(self._structure, leaves, long.states, tokens, start, totals)
        long.done += self._chunk
        if long.done == len(long.request.tokens) - 1:
            self._long = None
            self._keep(Batch(long.states, {long.request.key: 0}))
        return self._chunk

    def _keep(self, batch: Batch) -> None:
        self._batches = [*self._batches[-(_KEPT - 1) :], batch]


def _padded(tokens: int) -> int:
    return length_bucket(tokens, _SMALLEST)


def _rows_of_pack(size: int, width: int) -> int:
    """The most prompts of a packed row."""
    return 2 * size // next_power(width)


def _batch_sizes(rows: int, width: int, capacity: int) -> list[Size]:
    return [Prefill(rows, width, width), Insert(capacity, rows, width)]


def _tokens(size: Size) -> int:
    """By which its program takes long to compile."""
    match size:
        case Prefill(rows, width):
            return rows * width
        case Pack(length):
            return length
        case _:
            return 0
