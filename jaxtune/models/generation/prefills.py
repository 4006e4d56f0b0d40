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
from jaxtune.models.generation.prefixes import BLOCK, Prefixes, block_keys, which_are_caches
from jaxtune.models.generation.ready import Blocks, Extend, Grow, Insert, Look, Pack, Prefill, Ready, Size
from jaxtune.models.generation.requests import Request
from jaxtune.models.generation.slot_plan import length_bucket, next_power
from jaxtune.models.generation.structure import Structure, shaped
from jaxtune.models.layers.attention import Attention

_SMALLEST = 16  # prompts are padded to at least this many tokens
_SHORTEST_PACKED = 64  # tokens of the caches of packed prompts, at least
_SHORTEST_PACK, _PROMPTS = 512, 4  # tokens of a packed row, at least, and of its longest prompts if it is longer
_FREE_TOKENS = 128  # a program of fewer takes as long, as it reads all weights
_KEPT = 4  # how many batches of prefilled prompts can wait for slots at a time
_NO_SLOT = np.iinfo(np.int32).max  # a slot to which nothing is copied
_LEAST_USUAL, _STEP = _FREE_TOKENS, 4  # widths that are compiled ahead: the longest, and each a quarter of the last
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
    width: int  # of the program for the last piece
    room: int  # tokens for which the states have room
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

    If all mixers are attention and layers exchange nothing, one program packs prompts that round up to the same power
    of two, 64 or more, into one row of 512 tokens (of four times as many where two do not fit), of `chunk` tokens, half
    as many, or `at_once` while most slots are free, unless they would take less alone. Other prompts are padded rows.

    A program also takes prompts that get no slot yet, unless `one_at_a_time`: slots become free one at a time, and a
    program of few tokens takes about as long as one of several times as many.

      structure, shapes: the model without its arrays, and their shapes in the order of jax.tree.leaves.
      one_at_a_time: each prompt is prefilled alone, so that its states do not depend on other prompts.
      ready: where the program for a prompt's length is not compiled, a longer one's is used, for pictures also one of
        more patches; not with one_at_a_time.
      gated: whether rows may have adapters.
      prefix_bytes: for the states of prompts' beginnings; 0: nothing is stored, with the same pieces; None: nothing is.
      devices: that share the rows of a program, of `chunk` tokens each; nothing is packed for several.

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
        gated: bool = False,
        prefix_bytes: int | None = None,
        devices: int = 1,
    ):
        self._programs, self._one = programs, one_at_a_time
        self._exact: dict[tuple[int, int], tuple[int, int]] = {}  # results of _chosen that no later program changes
        self.use(structure, shapes, gated)
        self._chunk, self._at_once, self._ready = chunk, at_once, ready
        layers = shaped(structure, tuple(shapes)).layers
        mixers = [mixer for layer in layers for mixer in layer.mixers.values()]
        alone = not any(layer.takes or layer.gives for layer in layers)
        self._devices = devices
        self._packs = not one_at_a_time and devices == 1 and alone and all(type(mixer) is Attention for mixer in mixers)
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
            are_caches = which_are_caches(structure, self._shapes, self._states_shape(1))
            self._prefixes = Prefixes(self._piece, prefix_bytes, are_caches)
        self._wanted: collections.Counter[bytes] = collections.Counter()
        self._batches: list[Batch] = []
        self._long: _Long | None = None

    def use(self, structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], gated: bool) -> None:
        """Takes the model with other adapters; states of prompts stay."""
        self._structure, self._shapes, self._gated = structure, tuple(shapes), gated
        self._exact.clear()

    def add_waiting(self, request: Request) -> bytes:
        """Counts a request among those that wait for its prompt. Returns the prompt's key for request.key; equal
        prompts with the same adapter share it.
        """
        key = np.asarray([request.adapter, *request.tokens], np.int32).tobytes()
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
        self.forget_batches()
        if self._prefixes is not None:
            self._prefixes.forget()

    def forget_adapter(self, number: int) -> None:
        """Frees the states of beginnings of prompts with an adapter."""
        if self._prefixes is not None:
            self._prefixes.forget_adapter(number)

    def forget_batches(self) -> None:
        """Waits for the states of prompts that wait for slots, and frees them."""
        jax.block_until_ready([batch.states for batch in self._batches])
        if self._long is not None:
            jax.block_until_ready(self._long.states)
        self._batches, self._long = [], None

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
            states = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._states_shape(1))
            self._keep(Batch(states, {first.key: 0}))
            return 1
        if first.pictures is not None:
            look = self._chosen_look(first, capacity) or _look(first)
            states = self._prefill(leaves, [first], count, look.width, look.width, look.patches)
            self._keep(Batch(states, {first.key: 0}))
            return look.width
        if count > self._piece:
            self._long = self._begun(first, capacity)
            return self._next_piece(leaves, self._long)
        width, _ = self._chosen(count, capacity) or (_padded(count), 0)
        alike = [r for r in nearest if r.pictures is None and 1 < len(r.tokens) <= self._piece + 1]
        candidates = {r.key: r for r in alike if _padded(len(r.tokens) - 1) <= capacity}
        candidates = [request for request in candidates.values() if self.ready(request) is None]
        if self._packs and (power := _power(first)) <= self._chunk // 2:
            alike = [request for request in candidates if _power(request) == power]
            if (size := self._packed(leaves, alike, power, width, budget, capacity)) is not None:
                return size
            candidates = [first]
        alike = [request for request in candidates if _padded(count) <= _padded(len(request.tokens) - 1) <= width]
        rows = max(1, self._chunk // width)
        # Either a full batch or a single prompt, or one a device; any other number would need a program of its own.
        full = len(alike) >= rows * self._devices and not self._one
        full = full and self._ready.choose(_batch_sizes(rows, width, capacity), ()) == 0
        batch_requests = alike[: (rows if full else 1) * (1 if self._one else self._devices)]
        count = (rows if full else 1) * self._devices if len(batch_requests) > 1 else 1
        states = self._prefill(leaves, batch_requests, width, width, width, 0, count)
        self._keep(Batch(states, {r.key: i for i, r in enumerate(batch_requests)}))
        return width * len(batch_requests)

    def serves(self, request: Request, capacity: int) -> bool:
        """Whether the programs for a prompt are compiled; otherwise they are being compiled. RuntimeError: in vain."""
        count = len(request.tokens) - 1
        if count == 0:
            return self._ready.choose([Insert(capacity, 1, 1)]) is not None
        if request.pictures is not None:
            return self._chosen_look(request, capacity) is not None
        return self._chosen(count, capacity) is not None

    def of_lone(self, count: int, capacity: int) -> list[Size]:
        """The programs for `count` tokens of one prompt without pictures, while all programs count as ready."""
        if count == 0:
            return [Insert(capacity, 1, 1)]
        width, room = self._chosen(count, capacity) or (_padded(count), 0)
        if count > self._piece:
            return self._long_sizes(count, width, room, capacity)
        return _batch_sizes(1, width, capacity)

    def usual(self, capacity: int) -> list[Size]:
        """The programs that serve all prompts whose rows fit into `capacity`, each longer than it by at most some
        times; the slowest first.
        """
        sizes: list[Size] = [Insert(capacity, 1, 1)]
        width = min(_padded(self._piece), capacity)
        if capacity > self._piece:
            sizes += self._long_sizes(capacity, self._piece, capacity, capacity)
        for power in self._usual_packs(min(capacity, self._piece)):
            sizes += self._pack_sizes(self._least_pack(power), min(power, capacity), capacity)
        while True:
            rows = {1} if self._packs or self._one else {1, max(1, self._chunk // width)}
            for count in sorted(rows):
                sizes += _batch_sizes(count, width, capacity)
            if width <= _LEAST_USUAL:
                return sorted(sizes, key=_tokens, reverse=True)
            width = _padded(width // _STEP)

    def usual_bursts(self, most: int) -> list[tuple[int, int]]:
        """(tokens of a prompt, up to `most`, number of prompts) that are packed, for each program of `usual`."""
        return [
            (power + 1, self._least_pack(power) // max(power, _FREE_TOKENS))
            for power in self._usual_packs(min(self._piece, most))
            if power < most
        ]

    def _chosen(self, count: int, capacity: int) -> tuple[int, int] | None:
        """(width of the program for a prompt or its last piece, capacity of its states); None if none is compiled."""
        if (known := self._exact.get((count, capacity))) is not None:
            return known
        long = count > self._piece
        widths = [self._width_of_last(count) if long else _padded(count)]
        most = self._piece if long else min(self._piece, capacity)
        while not self._one and widths[-1] < most:
            widths.append(self._width_of_last(widths[-1] + 1) if long else _padded(widths[-1] + 1))
        rooms = [length_bucket(count)] if self._one else [length_bucket(count), capacity]
        pairs = [(width, room) for width in widths for room in (rooms if long else [width])]
        sizes = (
            self._long_sizes(count, *pair, capacity) if long else _batch_sizes(1, pair[0], capacity) for pair in pairs
        )
        index = self._ready.choose(*sizes)
        if index == 0:
            self._exact[count, capacity] = pairs[0]
        return None if index is None else pairs[index]

    def _chosen_look(self, request: Request, capacity: int) -> Look | None:
        """The program for a prompt with pictures; None if none is compiled."""
        exact = _look(request)
        larger = [] if self._one else [look for look in self._ready.looks(exact) if look.width <= capacity]
        looks = [exact, *larger]
        index = self._ready.choose(*([look, Insert(capacity, 1, look.width)] for look in looks))
        return None if index is None else looks[index]

    def _width_of_last(self, count: int) -> int:
        """The padded tokens of the last piece of a long prompt of `count` tokens."""
        return min(self._piece, length_bucket((count - 1) % self._piece + 1, _SHORTEST_PIECE))

    def _long_sizes(self, count: int, width: int, room: int, capacity: int) -> list[Size]:
        first = _padded(self._piece)
        widths = {width} if count <= 2 * self._piece else {width, self._piece}
        blocks = [] if self._prefixes is None else [Blocks(self._piece, room)]
        extends = (Extend(width, room) for width in widths)
        return [Prefill(1, first, first), Grow(1, first, room), *extends, *blocks, Insert(capacity, 1, room)]

    def _states_shape(self, room: int) -> device.States:
        return device.states_shape(self._structure, self._shapes, 1, room)

    def _grown(self, state: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
        return state if state.shape == new.shape else self._programs.grow(new.shape, state)

    def _pack_sizes(self, size: int, width: int, capacity: int) -> list[Size]:
        rows = _rows_of_pack(size, width)
        return [Pack(size, width, rows), Insert(capacity, rows, width)]

    def _least_pack(self, power: int) -> int:
        """Tokens of the shortest row of packed prompts of up to `power` tokens."""
        return min(self._chunk, _SHORTEST_PACK if 2 * power <= _SHORTEST_PACK else _PROMPTS * power)

    def _usual_packs(self, most: int) -> list[int]:
        """The `_power` of prompts, of up to about `most` tokens, that are packed in the shortest rows."""
        powers = itertools.takewhile(lambda power: power // 2 < most, map(_SHORTEST_PACKED.__lshift__, range(16)))
        return [power for power in powers if self._packs and 2 * power <= min(self._chunk, _SHORTEST_PACK)]

    def _packed(
        self, leaves, alike: Sequence[Request], power: int, width: int, budget: float, capacity: int
    ) -> int | None:
        """Packs the first of `alike`, whose `_power` it is: the row's tokens, or None if they are too few."""
        sizes = [self._least_pack(power)]
        if not self._ready.beside:
            sizes = [self._chunk, self._chunk // 2, *(size for size in sizes if size < self._chunk // 2)]
            sizes = [self._at_once, *sizes] if self._chunk < self._at_once <= budget else sizes
        for size in sizes:
            packed = self._fitting(alike, 2 * size // power, size)
            lengths = [len(request.tokens) - 1 for request in packed]
            if size > self._chunk:  # the largest row must leave room for none
                fills = sum(lengths) >= size - power
            else:
                fills = len(packed) * max(width, _FREE_TOKENS) >= size
            if len(packed) > 1 and fills:
                caches = min(power, capacity) if self._ready.beside else max(_SHORTEST_PACKED, _padded(max(lengths)))
                if self._ready.choose(self._pack_sizes(size, caches, capacity), ()) != 0:
                    continue
                states = self._pack(leaves, packed, caches, size)
                self._keep(Batch(states, {request.key: row for row, request in enumerate(packed)}))
                return size
        return None

    def _prefill(
        self,
        leaves,
        requests: Sequence[Request],
        count: int,
        capacity: int,
        width: int,
        patches: int = 0,
        rows: int = 1,
    ) -> device.States:
        """States after `count` tokens of each request, never its newest; padded to `width`, `rows` and `patches`."""
        tokens = np.zeros((rows, width), np.int32)
        lengths, totals = np.ones(rows, np.int32), np.ones(rows, np.int32)
        for row, request in enumerate(requests):
            prompt = request.tokens[:-1][:count]
            tokens[row, : len(prompt)] = prompt
            lengths[row], totals[row] = len(prompt), len(request.tokens)
        arguments = leaves, tokens, lengths, totals
        if (pictures := requests[0].pictures) is not None:
            arguments = *arguments, *pictures.padded(tokens.shape[1], patches)
        elif self._gated:
            arguments = *arguments, None, None
        return self._programs.prefill(self._structure, capacity, *arguments, *self._adapters(requests, rows))

    def _adapters(self, requests: Sequence[Request], count: int) -> tuple[np.ndarray, ...]:
        """The last argument of programs: int32[count], the requests' adapters; none if there are none."""
        numbers = np.zeros(count, np.int32)
        numbers[: len(requests)] = [request.adapter for request in requests]
        return (numbers,) if self._gated else ()

    def _fitting(self, requests: Sequence[Request], most: int, size: int) -> list[Request]:
        lengths = itertools.accumulate(len(request.tokens) - 1 for request in requests)
        return [r for r, end in zip(requests[:most], lengths, strict=False) if end <= size]

    def _pack(self, leaves, requests: Sequence[Request], width: int, size: int) -> device.States:
        """The states after prompts, less their last tokens, that are packed in one row of `size` tokens."""
        tokens = np.zeros((1, size), np.int32)
        room = _rows_of_pack(size, width)
        starts, lengths, totals = np.full(room, size, np.int32), *np.zeros((2, room), np.int32)
        offset = 0
        for row, request in enumerate(requests):
            count = len(request.tokens) - 1
            tokens[0, offset : offset + count] = request.tokens[:-1]
            starts[row], lengths[row], totals[row] = offset, count, count + 1
            offset += count
        arrays = tokens, starts, lengths, totals, *self._adapters(requests, room)
        return self._programs.pack(self._structure, width, leaves, *arrays)

    def _begun(self, request: Request, capacity: int) -> _Long:
        """A long prompt, with the states of its beginning if they are stored."""
        prompt = request.tokens[:-1]
        exact = self._width_of_last(len(prompt)), length_bucket(len(prompt))
        width, room = self._chosen(len(prompt), capacity) or exact
        if self._prefixes is None:
            return _Long(request, width, room, [], 0)
        # A row's length decides which factors longrope has.
        keys = block_keys(prompt, self._piece, (request.adapter, len(request.tokens) > self.switch))
        usable, known = self._prefixes.find(keys)
        long = _Long(request, width, room, keys, known)
        if usable:
            long.states = self._prefixes.restored(keys[:usable], self._states_shape(room))
            long.done = long.reused = usable * self._piece
        return long

    def _next_piece(self, leaves, long: _Long) -> int:
        """Dispatches the next piece of a long prompt; its tokens with padding, or 1 if there is none."""
        prompt, width = long.request.tokens[:-1], 1
        if long.done < len(prompt):
            count = min(self._piece, len(prompt) - long.done)
            width = self._piece if long.done + count < len(prompt) else long.width
            if long.done == 0:
                first = _padded(self._piece)
                states = self._prefill(leaves, [long.request], self._piece, first, first)
                long.states = jax.tree.map(self._grown, states, self._states_shape(long.room))
            else:
                tokens = np.zeros((1, width), np.int32)
                tokens[0, :count] = prompt[long.done : long.done + count]
                numbers = (np.array([number], np.int32) for number in (long.done, count, len(long.request.tokens)))
                arrays = tokens, *numbers, *self._adapters([long.request], 1)
                long.states = self._programs.extend(self._structure, leaves, long.states, *arrays)
            long.done += count
            blocks = long.done // self._piece
            if self._prefixes is not None and long.done == blocks * self._piece:
                whole = blocks in (long.known, len(long.keys))
                self._prefixes.add(long.keys[:blocks], long.states, whole, long.request.adapter)
        if long.done == len(prompt):
            self._long = None
            self._keep(Batch(long.states, {long.request.key: 0}, long.reused))
        return width

    def _keep(self, batch: Batch) -> None:
        self._batches = [*self._batches[-(_KEPT - 1) :], batch]


def _padded(tokens: int) -> int:
    return length_bucket(tokens, _SMALLEST)


def _look(request: Request) -> Look:
    assert request.pictures is not None
    patches = request.pictures.pictures.patch_segments.shape[1]
    return Look(_padded(len(request.tokens) - 1), length_bucket(patches))


def _power(request: Request) -> int:
    """The length by which prompts are packed together."""
    return max(_SHORTEST_PACKED, next_power(len(request.tokens) - 1))


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
        case Pack(length) | Extend(length):
            return length
        case _:
            return 0
