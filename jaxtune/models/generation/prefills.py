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
from jaxtune.models.generation.prefixes import BLOCK, Prefixes, block_keys
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.slot_plan import length_bucket
from jaxtune.models.generation.structure import Structure
from jaxtune.models.layers.attention import Attention

_SMALLEST = 16  # prompts are padded to at least this many tokens
_SHORTEST_PACKED = 128  # from this padded length on, prompts are packed; caches of shorter ones are as long as this
_KEPT = 4  # how many batches of prefilled prompts can wait for slots at a time
_NO_SLOT = np.iinfo(np.int32).max  # a slot to which nothing is copied
_AHEAD = 2  # with fewer of them, prompts are prefilled for which no slot is free yet
_SHORTEST_PIECE = 512  # to which the last piece of a prompt is padded at least


@dataclasses.dataclass(eq=False)
class Batch:
    """Prefilled prompts with their states (what mixers keep of earlier tokens, such as keys and values)."""

    states: device.States  # those of all rows of the batch: arrays whose first axis is the row
    rows: dict[bytes, int]  # {Request.key: row of the batch that has this prompt}
    reused: int = 0  # tokens of the prompt, which is alone, whose states an earlier prompt had left

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
    """A prompt that is being prefilled in several pieces."""

    request: Request  # a waiting request with this prompt; others may have the same
    keys: list[bytes]  # of its whole blocks; empty if no beginnings are reused
    known: int  # how many of them had been there
    states: device.States = None  # the states after its first `done` tokens
    done: int = 0  # how many tokens of the prompt are in the states
    reused: int = 0  # and how many of these an earlier prompt had left


class Prefills:
    """Prefills the prompts of waiting requests before a slot is free, and keeps their states.

    A prompt longer than a piece is prefilled alone, in pieces that end at multiples of a piece's tokens, the last with
    padding: what states a piece leaves depends on the tokens up to its end alone. A piece has `chunk` tokens, or with
    `prefix_bytes` at most 512, and the states after each are stored for later prompts that begin with the same tokens
    (prefixes.py), which get the bits that they get without. Only what a prefill made is stored, no decoded token, and
    nothing of prompts with pictures.

    If all mixers are attention and layers exchange nothing, one program packs shorter prompts into one row of `chunk`
    tokens, or half as many, or `at_once` while most slots are free. They must fill half of it, and round up to the same
    power of two. Other prompts are padded rows.

    A program also takes prompts that get no slot yet, unless `one_at_a_time`: slots become free one at a time, and a
    program of few tokens takes about as long as one of several times as many.

      structure, shapes: the model without its arrays, and their shapes in the order of jax.tree.leaves.
      one_at_a_time: each prompt is prefilled alone, so that its states do not depend on other prompts.
      prefix_bytes: for the states of prompts' beginnings; 0: nothing is stored, with the same pieces; None: nothing is.

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
        prefix_bytes: int | None = None,
    ):
        self._programs, self._structure, self._shapes, self._one = programs, structure, shapes, one_at_a_time
        self._chunk, self._at_once = chunk, at_once
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
        self._piece = chunk if prefix_bytes is None else min(chunk, BLOCK)
        self._prefixes: Prefixes | None = None
        if prefix_bytes:
            has_cache = [{name: mixer.has_cache for name, mixer in layer.mixers.items()} for layer in layers]
            states = device.states_shape(structure, tuple(shapes), 1, 1)
            is_cache = jax.tree.map(lambda has, state: [has] * len(jax.tree.leaves(state)), has_cache, states)
            self._prefixes = Prefixes(self._piece, prefix_bytes, jax.tree.leaves(is_cache))
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
        if not request.placements:  # not what its first stay in a slot has left
            request.reused = batch.reused
        return batch.rows[request.key]

    def forget(self) -> None:
        """Waits for all prefilled states and frees them, also those of prompts' beginnings."""
        jax.block_until_ready([batch.states for batch in self._batches])
        if self._long is not None:
            jax.block_until_ready(self._long.states)
        self._batches, self._long = [], None
        if self._prefixes is not None:
            self._prefixes.forget()

    def advance(
        self, leaves: Sequence[jax.Array], waiting: Iterable[Request], free: int, budget: float, capacity: int
    ) -> int:
        """Dispatches one program: the next piece of a long prompt, or the first waiting prompt and others alike.
        Returns its tokens with padding; 1 for a prompt of one token, which needs none.

          leaves: the model's arrays, in the order of jax.tree.leaves.
          waiting: in the order of slots; the first is not ready.
          free: how many of them get a slot now, at least one.
          budget: tokens that may be prefilled before the next round.
          capacity: tokens of the slots' caches.
        """
        if self._long is not None:
            return self._next_piece(leaves, self._long)
        # As many as a program can take, unless prompts would wait in too many batches (_keep drops the oldest).
        ahead = 2 * self._chunk // _SHORTEST_PACKED if len(self._batches) < _AHEAD and not self._one else 0
        nearest = list(itertools.islice(waiting, max(free, ahead)))
        first = nearest[0]
        count = len(first.tokens) - 1
        if count == 0:
            states = device.empty_states(self._structure, self._shapes, 1, 1)
            self._keep(Batch(states, {first.key: 0}))
            return 1
        if first.pictures is not None:
            self._keep(Batch(self._prefill(leaves, [first], count, _padded(count)), {first.key: 0}))
            return _padded(count)
        if count > self._piece:
            self._long = self._begun(first)
            return self._next_piece(leaves, self._long)
        width = _padded(count)
        alike = [r for r in nearest if r.pictures is None and 1 < len(r.tokens) <= self._piece + 1]
        candidates = {r.key: r for r in alike if _padded(len(r.tokens) - 1) <= capacity}
        candidates = [request for request in candidates.values() if self.ready(request) is None]
        if self._packs and _SHORTEST_PACKED <= _power(count) <= self._chunk // 2:
            alike = [request for request in candidates if _power(len(request.tokens) - 1) == _power(count)]
            if (size := self._packed(leaves, alike, _power(count), budget)) is not None:
                return size
            candidates = [first]
        alike = [request for request in candidates if _padded(len(request.tokens) - 1) == width]
        rows = max(1, self._chunk // width)
        # Either a full batch or a single prompt; every other number of prompts would need a program of its own.
        batch_requests = alike[: rows if len(alike) >= rows and not self._one else 1]
        self._keep(
            Batch(self._prefill(leaves, batch_requests, width, width), {r.key: i for i, r in enumerate(batch_requests)})
        )
        return width * len(batch_requests)

    def _packed(self, leaves, alike: Sequence[Request], power: int, budget: float) -> int | None:
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
                states = self._pack(leaves, packed, _padded(max(lengths)), size)
                self._keep(Batch(states, {request.key: row for row, request in enumerate(packed)}))
                return size
        return None

    def _prefill(self, leaves, requests: Sequence[Request], count: int, capacity: int) -> device.States:
        """States after `count` tokens of each request, never its newest, which the first decoding step reads. One with
        pictures is alone.
        """
        tokens = np.zeros((len(requests), _padded(count)), np.int32)
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
        room = 2 * size // _power(width)
        starts, lengths, totals = np.full(room, size, np.int32), *np.zeros((2, room), np.int32)
        offset = 0
        for row, request in enumerate(requests):
            count = len(request.tokens) - 1
            tokens[0, offset : offset + count] = request.tokens[:-1]
            starts[row], lengths[row], totals[row] = offset, count, count + 1
            offset += count
        return self._programs.pack(self._structure, width, leaves, tokens, starts, lengths, totals)

    def _begun(self, request: Request) -> _Long:
        """A long prompt, with the states of its beginning if they are stored."""
        prompt = request.tokens[:-1]
        if self._prefixes is None:
            return _Long(request, [], 0)
        keys = block_keys(prompt, self._piece, len(request.tokens) > self.switch)  # by which longrope has its factors
        usable, known = self._prefixes.find(keys)
        long = _Long(request, keys, known)
        if usable:
            empty = device.empty_states(self._structure, self._shapes, 1, length_bucket(len(prompt)))
            long.states = self._prefixes.restored(keys[:usable], empty)
            long.done = long.reused = usable * self._piece
        return long

    def _next_piece(self, leaves, long: _Long) -> int:
        """Dispatches the next piece of a long prompt, whose states are donated. Returns its tokens with padding, or 1
        if there is none.
        """
        prompt, width = long.request.tokens[:-1], 1
        if long.done < len(prompt):
            count = min(self._piece, len(prompt) - long.done)
            width = min(self._piece, length_bucket(count, _SHORTEST_PIECE))
            if long.done == 0:
                states = self._prefill(leaves, [long.request], self._piece, _padded(self._piece))
                shapes = device.states_shape(self._structure, tuple(self._shapes), 1, length_bucket(len(prompt)))
                long.states = jax.tree.map(lambda state, new: device.grown(state, new.shape), states, shapes)
            else:
                tokens = np.zeros((1, width), np.int32)
                tokens[0, :count] = prompt[long.done : long.done + count]
                numbers = (np.array([number], np.int32) for number in (long.done, count, len(long.request.tokens)))
                long.states = self._programs.extend(self._structure, leaves, long.states, tokens, *numbers)
            long.done += count
            blocks = long.done // self._piece
            if self._prefixes is not None and long.done == blocks * self._piece:
                self._prefixes.add(long.keys[:blocks], long.states, blocks in (long.known, len(long.keys)))
        if long.done == len(prompt):
            self._long = None
            self._keep(Batch(long.states, {long.request.key: 0}, long.reused))
        return width

    def _keep(self, batch: Batch) -> None:
        self._batches = [*self._batches[-(_KEPT - 1) :], batch]


def _padded(tokens: int) -> int:
    return length_bucket(tokens, _SMALLEST)


def _power(tokens: int) -> int:
    """The next power of two; prompts with the same one may share a packed row."""
    return 1 << (tokens - 1).bit_length()
