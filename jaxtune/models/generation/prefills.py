"""Prefills prompts, once for all waiting rows that have the same prompt, and keeps their states until slots take them
(`Prefills`, of which a sampler has one). A `Batch` has the states of the prompts that one program prefilled, or of one
long prompt, and a `_Long` those of a long prompt of which chunks are missing. At most four batches of prompts are kept;
if there are more, the oldest is dropped, and those of its prompts for which rows still wait are prefilled
again."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.slot_plan import length_bucket
from jaxtune.models.generation.structure import Structure
from jaxtune.models.layers.attention import Attention

_SMALLEST = 16  # prompts are padded to at least this many tokens
_SHORTEST_PACKED = 128  # from this padded length on, prompts are packed; caches of shorter ones are as long as this
_KEPT = 4  # how many batches of prefilled prompts can wait for slots at a time
_NO_SLOT = np.iinfo(np.int32).max  # a slot to which nothing is copied
_AHEAD = 2  # with fewer of them, prompts are prefilled for which no slot is free yet


@dataclasses.dataclass(eq=False)
class Batch:
    """Prompts that have been prefilled by one program, or a long one by several, with their states (what the layers'
    mixers keep of earlier tokens, such as caches of keys and values), until `insert` copies these into slots."""

    states: device.States  # those of all rows of the batch: arrays whose first axis is the row
    rows: dict[bytes, int]  # {Request.key: row of the batch that has this prompt}

    def insert(
        self, programs: device.Programs, states: device.States, placed: Sequence[tuple[int, int]]
    ) -> device.States:
        """Copies rows of this batch into slots, and returns the new states of all slots; those given, if the model has
        no states.

        Args:
          programs: the compiled functions.
          states: of all slots; they are donated.
          placed: (row of this batch, slot) pairs.
        """
        arrays = jax.tree.leaves(self.states)
        if not arrays:  # no layer of the model has a mixer
            return states
        size = len(arrays[0])
        for first in range(0, len(placed), size):
            some = [*placed[first : first + size]]
            some += [(0, _NO_SLOT)] * (size - len(some))  # so that one program serves any number
            rows, slots = (np.array(part, np.int32) for part in zip(*some, strict=True))
            states = programs.insert(states, self.states, rows, slots)
        return states


@dataclasses.dataclass
class _Long:
    """A prompt that is being prefilled in several chunks. Prefills has at most one at a time."""

    request: Request  # a waiting request with this prompt; others may have the same
    states: device.States  # the states after its first `done` tokens
    done: int  # how many tokens of the prompt have been prefilled


class Prefills:
    """Prefills the prompts of waiting requests before a slot is free, and keeps their states (such as caches of keys
    and values). `wanted` and `unwanted` count the requests that wait for a prompt, `advance` prefills, `ready` finds a
    prompt's states, and `take` hands them to a request that gets a slot.

    For models whose mixers are attention and whose layers exchange nothing, one program computes several prompts packed
    into one row of `chunk` tokens, or of half as many, without padding between them, if they fill at least half of the
    row, and if the next power of two of their lengths is the same, from 128 to half of `chunk`. While most slots are
    free the row has `at_once` tokens, if prompts fill it. All other prompts are padded rows of a batch (`_padded`). The
    states of every prompt fit into the slots' caches of that time, and so into all later ones. A prompt longer than
    `chunk` tokens is prefilled in several programs: a forward pass over its first tokens, as many as leave whole
    chunks, and then one program for each chunk.

    A program takes also prompts that get no slot yet, unless `one`: when slots become free one at a time, prompts would
    otherwise be prefilled one at a time, and a program of few tokens takes about as long as one of several times as
    many.

    Args:
      programs: the compiled functions.
      structure: the model without its arrays.
      shapes: the shapes and dtypes of the model's arrays.
      chunk: the most tokens that one program prefills, without padding.
      at_once: the most tokens of a program that packs prompts while most slots are free, at least `chunk`.
      one: True: each prompt is prefilled alone, so that its states do not depend on which other prompts wait; False:
        several prompts may share a program.

    Attributes:
      switch: the row length above which a longrope model uses its long factors and needs other states, or slots.NEVER.
    """

    def __init__(
        self,
        programs: device.Programs,
        structure: Structure,
        shapes: Sequence[jax.ShapeDtypeStruct],
        chunk: int,
        at_once: int,
        one: bool,
    ):
        self._programs, self._structure, self._shapes, self._one = programs, structure, shapes, one
        self._chunk, self._at_once = chunk, at_once
        layers = structure.model(shapes).layers
        mixers = [mixer for layer in layers for mixer in layer.mixers.values()]
        alone = not any(layer.takes or layer.gives for layer in layers)
        self._packs = not one and alone and all(type(mixer) is Attention for mixer in mixers)
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
        """Counts a request among those that wait for the states of its prompt. Returns the prompt's key, which the
        caller stores as request.key: the bytes of the tokens as int32, so that requests with equal prompts have the
        same key and share one prefill. If there are more than four batches (`_keep`), the states may be dropped while
        requests wait for them, and are then computed again; otherwise they stay until none waits."""
        key = np.asarray(request.tokens, np.int32).tobytes()
        self._wanted[key] += 1
        return key

    def unwanted(self, request: Request) -> None:
        """Registers that a request no longer waits for its prompt, because it was cancelled or gets a slot. If none
        waits for any prompt of a batch, the batch is dropped from this object's list and freed when nobody refers to it
        any more: `take`, which calls this method, has a caller that refers to it and still copies states. A prompt that
        is in work in chunks is dropped if no request waits for it."""
        self._wanted[request.key] -= 1
        if self._wanted[request.key] <= 0:
            del self._wanted[request.key]
            self._batches = [b for b in self._batches if any(key in self._wanted for key in b.rows)]
            if self._long is not None and self._long.request.key not in self._wanted:
                self._long = None

    def ready(self, request: Request) -> Batch | None:
        """The batch that contains the request's prompt, or None if it is not prefilled, as at first and after its batch
        was dropped. The sampler gives a slot to a request only if there is one."""
        return next((batch for batch in reversed(self._batches) if request.key in batch.rows), None)

    def take(self, request: Request) -> int:
        """Registers that a request, whose prompt is ready, gets a slot and no longer waits. Returns the row of its
        prompt in the batch that `ready` returned. The batch is dropped here if no other request waits for its prompts,
        so the caller calls `ready` first, and copies the states of the row (Batch.insert) before it dispatches the next
        round, which decodes the slot."""
        batch = self.ready(request)
        assert batch is not None
        self.unwanted(request)
        return batch.rows[request.key]

    def forget(self) -> None:
        """Waits for all prefilled states and frees them."""
        jax.block_until_ready([batch.states for batch in self._batches])
        if self._long is not None:
            jax.block_until_ready(self._long.states)
        self._batches, self._long = [], None

    def advance(
        self, leaves: Sequence[jax.Array], waiting: Iterable[Request], free: int, left: float, capacity: int
    ) -> int:
        """Dispatches one program: the next chunk of a long prompt, or the prompt of the first request that waits and
        those of others that are alike. `ready` finds the states of complete prompts.

        Args:
          leaves: the model's arrays.
          waiting: requests in the order in which they get slots; the states of the first are not ready.
          free: how many of them get a slot now, at least one.
          left: how many tokens may be prefilled before the next round; infinity while most slots are free.
          capacity: the tokens of the slots' caches, enough for the row of the first request.
        Returns:
          the tokens that the program computes, padding included; 1 for a prompt of one token, which needs none.
        """
        if self._long is not None:
            return self._next_chunk(leaves, self._long)
        # As many as a program can take, unless prompts would wait in too many batches (_keep drops the oldest).
        ahead = 2 * self._chunk // _SHORTEST_PACKED if len(self._batches) < _AHEAD and not self._one else 0
        nearest = list(itertools.islice(waiting, max(free, ahead)))
        first = nearest[0]
        count = len(first.tokens) - 1
        if count == 0:
            states = device.empty_states(self._structure, self._shapes, 1, 1)
            self._keep(Batch(states, {first.key: 0}))
            return 1
        if count > self._chunk:
            begin = (count - 1) % self._chunk + 1
            self._long = _Long(first, self._prefill(leaves, [first], begin, length_bucket(count)), begin)
            return _padded(begin)
        width = _padded(count)
        others = {r.key: r for r in nearest if len(r.tokens) > 1 and _padded(len(r.tokens) - 1) <= capacity}
        others = [request for request in others.values() if self.ready(request) is None]
        if self._packs and _SHORTEST_PACKED <= _power(count) <= self._chunk // 2:
            alike = [request for request in others if _power(len(request.tokens) - 1) == _power(count)]
            if (size := self._packed(leaves, alike, _power(count), left)) is not None:
                return size
            others = [first]
        alike = [request for request in others if _padded(len(request.tokens) - 1) == width]
        rows = max(1, self._chunk // width)
        # Either a full batch or a single prompt; every other number of prompts would need a program of its own.
        chosen = alike[: rows if len(alike) >= rows and not self._one else 1]
        self._keep(Batch(self._prefill(leaves, chosen, width, width), {r.key: i for i, r in enumerate(chosen)}))
        return width * len(chosen)

    def _packed(self, leaves, alike: Sequence[Request], power: int, left: float) -> int | None:
        """Packs the first of these prompts into one row, of which none is longer than `power` or as short as half of
        it: the row's tokens, or None if too few are there. left: as for `advance`."""
        # (tokens of a row, the least that prompts must fill of it): the largest row must leave room for none.
        sizes = [(self._at_once, self._at_once - power)] if self._chunk < self._at_once <= left else []
        sizes += [(size, size / 2) for size in (self._chunk, self._chunk // 2)]
        for size, least in sizes:
            packed = self._fitting(alike, 2 * size // power, size)
            lengths = [len(request.tokens) - 1 for request in packed]
            if len(packed) > 1 and sum(lengths) >= least:
                states = self._pack(leaves, packed, _padded(max(lengths)), size)
                self._keep(Batch(states, {request.key: row for row, request in enumerate(packed)}))
                return size
        return None

    def _prefill(self, leaves, requests: Sequence[Request], count: int, capacity: int) -> device.States:
        """The states after at most the first `count` tokens of each request, without its newest one, which the first
        decoding step reads. capacity: the tokens for which each row of the states has room, at least the padded
        `count`."""
        tokens = np.zeros((len(requests), _padded(count)), np.int32)
        lengths, totals = np.zeros(len(requests), np.int32), np.zeros(len(requests), np.int32)
        for row, request in enumerate(requests):
            some = request.tokens[:-1][:count]
            tokens[row, : len(some)] = some
            lengths[row], totals[row] = len(some), len(request.tokens)
        return self._programs.prefill(self._structure, capacity, leaves, tokens, lengths, totals)

    def _fitting(self, requests: Sequence[Request], most: int, size: int) -> list[Request]:
        """The longest beginning of the list `requests`, of at most `most` requests, whose prompts have at most `size`
        tokens in all, each without its newest one, so that one row has room for them (`_pack`)."""
        lengths = itertools.accumulate(len(request.tokens) - 1 for request in requests)
        return [r for r, end in zip(requests[:most], lengths, strict=False) if end <= size]

    def _pack(self, leaves, requests: Sequence[Request], width: int, size: int) -> device.States:
        """The states after the prompts of some requests, which one program computes packed into one row of `size`
        tokens, one prompt behind the other. width: the tokens of a row for which the states have room, the longest
        prompt's length with padding."""
        tokens = np.zeros((1, size), np.int32)
        room = 2 * size // _power(width)
        starts, lengths, totals = np.full(room, size, np.int32), *np.zeros((2, room), np.int32)
        at = 0
        for row, request in enumerate(requests):
            count = len(request.tokens) - 1
            tokens[0, at : at + count] = request.tokens[:-1]
            starts[row], lengths[row], totals[row] = at, count, count + 1
            at += count
        return self._programs.pack(self._structure, width, leaves, tokens, starts, lengths, totals)

    def _next_chunk(self, leaves, long: _Long) -> int:
        """Dispatches the program that prefills the next chunk of a long prompt, `long`, whose states and count of
        tokens it updates, and returns the chunk's number of tokens. After the last chunk the states are kept as a
        Batch, which `ready` finds, and no long prompt is in work. leaves: the model's arrays."""
        tokens = np.array([long.request.tokens[long.done : long.done + self._chunk]], np.int32)
        at, totals = np.array([long.done], np.int32), np.array([len(long.request.tokens)], np.int32)
        long.states = self._programs.extend(self._structure, leaves, long.states, tokens, at, totals)
        long.done += self._chunk
        if long.done == len(long.request.tokens) - 1:
            self._long = None
            self._keep(Batch(long.states, {long.request.key: 0}))
        return self._chunk

    def _keep(self, batch: Batch) -> None:
        """Adds a batch of prefilled prompts, which `ready` finds from then on. If there are more than _KEPT (4)
        batches, the oldest one is dropped; those of its prompts for which requests still wait are prefilled again
        later."""
        self._batches = [*self._batches[-(_KEPT - 1) :], batch]


def _padded(tokens: int) -> int:
    """The length to which a prompt of `tokens` tokens is padded."""
    return length_bucket(tokens, _SMALLEST)


def _power(tokens: int) -> int:
    """The next power of two, by which prompts are alike enough for one packed row."""
    return 1 << (tokens - 1).bit_length()
