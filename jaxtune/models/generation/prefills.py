"""Prefills prompts, once for all waiting rows with the same prompt, and keeps their states until slots take them. Of
more than four batches the oldest is dropped; its prompts are prefilled again if rows wait for them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.prefixes import BLOCK, Added, Prefixes, block_keys, which_are_caches
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
    reused: dict[bytes, int]  # {Request.key: tokens of the prompt whose states an earlier prompt had left}
    divided: bool  # whether several devices have the rows

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
            # One program serves any number; but devices exchange as many rows as there are pairs.
            count = min(size, next_power(len(pairs))) if self.divided else size
            pairs += [(0, _NO_SLOT)] * (count - len(pairs))
            rows, slots = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
            states = programs.insert(states, self.states, rows, slots)
        return states


class _Pieces(NamedTuple):
    """How a prompt is prefilled in several pieces."""

    count: int
    width: int  # of the program for the last piece
    room: int  # tokens for which the states have room
    reused: int  # how many first pieces an earlier prompt had left


class _Blocks(NamedTuple):
    """Whole blocks of a prompt."""

    keys: list[bytes]  # empty if no beginnings are reused
    known: int  # how many of them had been there


@dataclasses.dataclass
class _Long:
    """Prompts, one a device at most, that are being prefilled in pieces."""

    requests: list[Request]  # waiting ones with these prompts; others may have the same
    pieces: list[_Pieces]  # of each
    blocks: list[_Blocks]  # of each
    computed: list[int]  # how many pieces of each are in the states, once there are any
    states: device.States = None  # a row for each device; any numbers where it has no prompt

    @property
    def room(self) -> int:
        return max(pieces.room for pieces in self.pieces)


class Prefills:
    """Prefills the prompts of waiting requests before a slot is free, and keeps their states.

    A prompt longer than a piece is prefilled alone on its device, in pieces that end at multiples of a piece's tokens,
    the last with padding: what states a piece leaves depends on the tokens up to its end alone. A piece has `chunk`
    tokens, or with `prefix_bytes` at most 512, and the states after each are stored for later prompts that begin with
    the same tokens (prefixes.py), which get the bits that they get without. Only what a prefill made is stored, no
    decoded token, and nothing of prompts with pictures.

    If all mixers are attention and layers exchange nothing, one program packs prompts that round up to the same power
    of two, 64 or more, into one row a device of 512 tokens (of four times as many where two do not fit), of `chunk`
    tokens, half as many, or `at_once` while most slots are free, unless they would take less alone. Other prompts are
    padded rows.

    A program also takes prompts that get no slot yet, unless `one_at_a_time`: slots become free one at a time, and a
    program of few tokens takes about as long as one of several times as many.

      structure, shapes: the model without its arrays, and their shapes in the order of jax.tree.leaves.
      one_at_a_time: each prompt is prefilled alone on its device, so that its states do not depend on other prompts.
      ready: where the program for a prompt's length is not compiled, a longer one's is used, for pictures also one of
        more patches; not with one_at_a_time.
      gated: whether rows may have adapters.
      prefix_bytes: for the states of prompts' beginnings; 0: nothing is stored, with the same pieces; None: nothing is.
      division: of the devices that share the rows of each program, of `chunk` tokens on each.

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
        division: Division | None = None,
    ):
        self._programs, self._one = programs, one_at_a_time
        self._division, self._devices = division, 1 if division is None else division.devices
        self._exact: dict[tuple[int, int], tuple[int, int]] = {}  # results of _chosen that no later program changes
        self.use(structure, shapes, gated)
        self._chunk, self._at_once, self._ready = chunk, at_once, ready
        layers = shaped(structure, tuple(shapes)).layers
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
            are_caches = which_are_caches(structure, self._shapes, self._states_shape(1))
            self._prefixes = Prefixes(self._piece, prefix_bytes, are_caches, division)
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
            if self._long is not None and all(each.key not in self._wanted for each in self._long.requests):
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
            request.reused = batch.reused.get(request.key, 0)
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
        """Dispatches one program: the next piece of long prompts, or the first waiting prompt and others alike.
        Returns its tokens on a device with padding; 1 for a prompt of one token, which needs none.

          leaves: the model's arrays, in the order of jax.tree.leaves.
          waiting: in the order of slots; the first is not ready.
          free: how many of them get a slot now, at least one.
          budget: tokens that may be prefilled before the next round.
          capacity: tokens of the slots' caches.
        """
        if self._long is not None:
            return self._next_piece(leaves, self._long)
        # As many as a program can take, unless prompts would wait in too many batches (_keep drops the oldest).
        many = 2 * self._chunk // _SHORTEST_PACKED * self._devices
        ahead = many if len(self._batches) < _AHEAD and not self._one else 0
        nearest = list(itertools.islice(waiting, max(free, ahead)))
        first = nearest[0]
        count = len(first.tokens) - 1
        if count == 0:
            states = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._states_shape(1))
            self._keep(states, {first.key: 0})
            return 1
        missing = {request.key: request for request in nearest if self.ready(request) is None}
        if first.pictures is not None:
            look = self._chosen_look(first, capacity) or _look(first)
            alike = [r for r in missing.values() if r.pictures is not None and _look(r) == _look(first)]
            self._prefill_rows(leaves, alike[: self._devices], 1, look.width, look.patches)
            return look.width
        texts = [request for request in missing.values() if request.pictures is None and len(request.tokens) > 1]
        if count > self._piece:
            self._long = self._begun(first, texts, capacity)
            return self._next_piece(leaves, self._long)
        width, _ = self._chosen(count, capacity) or (_padded(count), 0)
        candidates = [r for r in texts if len(r.tokens) <= self._piece + 1 and _padded(len(r.tokens) - 1) <= capacity]
        lone = self._one
        if self._packs and (power := _power(first)) <= self._chunk // 2:
            lone = True
            alike = [request for request in candidates if _power(request) == power]
            if (size := self._packed(leaves, alike, power, width, budget, capacity)) is not None:
                return size
        alike = [request for request in candidates if _padded(count) <= _padded(len(request.tokens) - 1) <= width]
        rows = max(1, self._chunk // width)
        # Either a full batch or a prompt a device; any other number would need a program of its own.
        full = len(alike) >= rows * self._devices and not lone
        full = full and self._ready.choose(_batch_sizes(rows, width, capacity), ()) == 0
        rows = rows if full else 1
        self._prefill_rows(leaves, alike[: rows * self._devices], rows, width)
        return width * rows

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

    def _states_shape(self, room: int, rows: int = 1) -> device.States:
        return device.states_shape(self._structure, self._shapes, rows, room)

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
        """Packs the first of `alike`, whose `_power` it is, into a row a device: its tokens, or None if they are too
        few.
        """
        sizes = [self._least_pack(power)]
        if not self._ready.beside:
            sizes = [self._chunk, self._chunk // 2, *(size for size in sizes if size < self._chunk // 2)]
            sizes = [self._at_once, *sizes] if self._chunk < self._at_once <= budget else sizes
        for size in sizes:
            turns = (alike[index :: self._devices] for index in range(self._devices))
            packed = [self._fitting(turn, 2 * size // power, size) for turn in turns]
            lengths = [[len(request.tokens) - 1 for request in row] for row in packed]
            most = max(map(len, packed))
            if size > self._chunk:  # the largest row must leave room for none
                fills = min(map(sum, lengths)) >= size - power
            else:
                fills = most * max(width, _FREE_TOKENS) >= size
            if most > 1 and fills:
                longest = max(map(max, filter(None, lengths)))
                caches = min(power, capacity) if self._ready.beside else max(_SHORTEST_PACKED, _padded(longest))
                if self._ready.choose(self._pack_sizes(size, caches, capacity), ()) != 0:
                    continue
                states, room = self._pack(leaves, packed, caches, size), _rows_of_pack(size, caches)
                pairs = ((r, index * room + row) for index, each in enumerate(packed) for row, r in enumerate(each))
                self._keep(states, {request.key: row for request, row in pairs})
                return size
        return None

    def _prefill_rows(self, leaves, requests: Sequence[Request], rows: int, width: int, patches: int = 0) -> None:
        """Keeps the states after requests, of which each device takes `rows`."""
        states = self._prefill(leaves, requests, width, width, patches, rows * self._devices)
        self._keep(states, {request.key: row for row, request in enumerate(requests)})

    def _prefill(
        self, leaves, requests: Sequence[Request], count: int, width: int, patches: int, rows: int
    ) -> device.States:
        """States after `count` tokens of each request, never its newest; padded to `width`, `rows` and `patches`."""
        tokens = np.zeros((rows, width), np.int32)
        lengths, totals = np.ones(rows, np.int32), np.ones(rows, np.int32)
        for row, request in enumerate(requests):
            prompt = request.tokens[:-1][:count]
            tokens[row, : len(prompt)] = prompt
            lengths[row], totals[row] = len(prompt), len(request.tokens)
        arguments = leaves, tokens, lengths, totals
        if requests[0].pictures is not None:
            seen = [request.pictures.padded(width, patches) for request in requests if request.pictures is not None]
            seen += seen[:1] * (rows - len(seen))
            pictures = seen[0] if rows == 1 else jax.tree.map(lambda *each: np.concatenate(each), *seen)
            arguments = *arguments, *pictures
        elif self._gated:
            arguments = *arguments, None, None
        return self._programs.prefill(self._structure, width, *arguments, *self._adapters(requests, rows))

    def _adapters(self, requests: Sequence[Request], count: int) -> tuple[np.ndarray, ...]:
        """The last argument of programs: int32[count], the requests' adapters; none if there are none."""
        numbers = np.zeros(count, np.int32)
        numbers[: len(requests)] = [request.adapter for request in requests]
        return (numbers,) if self._gated else ()

    def _fitting(self, requests: Sequence[Request], most: int, size: int) -> list[Request]:
        lengths = itertools.accumulate(len(request.tokens) - 1 for request in requests)
        return [r for r, end in zip(requests[:most], lengths, strict=False) if end <= size]

    def _pack(self, leaves, packed: Sequence[Sequence[Request]], width: int, size: int) -> device.States:
        """The states after prompts, less their last tokens, of which each device packs some into its row of `size`
        tokens.
        """
        tokens = np.zeros((len(packed), size), np.int32)
        room = _rows_of_pack(size, width)
        starts = np.full((len(packed), room), size, np.int32)
        lengths, totals, numbers = np.zeros((3, *starts.shape), np.int32)
        for index, requests in enumerate(packed):
            offset = 0
            for row, request in enumerate(requests):
                count, place = len(request.tokens) - 1, (index, row)
                tokens[index, offset : offset + count] = request.tokens[:-1]
                starts[place], lengths[place], totals[place] = offset, count, count + 1
                numbers[place] = request.adapter
                offset += count
        of_prompts = starts, lengths, totals, *((numbers,) if self._gated else ())
        return self._programs.pack(self._structure, width, leaves, tokens, *(array.ravel() for array in of_prompts))

    def _begun(self, first: Request, texts: Iterable[Request], capacity: int) -> _Long:
        """The first prompt, which is long, and other long ones for other devices, with the states of their beginnings
        if all have some.
        """
        long = _Long([], [], [], [])
        texts = (text for text in texts if text.key != first.key and len(text.tokens) > self._piece + 1)
        for request in itertools.chain([first], texts):
            pieces, blocks = self._pieces(request, capacity)
            if not long.requests or self._go_together(long.pieces[0], pieces, capacity):
                long.requests.append(request)
                long.pieces.append(pieces)
                long.blocks.append(blocks)
                long.computed.append(pieces.reused)
            if len(long.requests) == self._devices:
                break
        if all(long.computed):
            empty = None if self._division is None else self._states_shape(long.room, self._devices)
            long.states = self._with_beginnings(long, self._division.put(empty) if self._division else None)
        return long

    def _go_together(self, first: _Pieces, other: _Pieces, capacity: int) -> bool:
        """Whether a prompt is prefilled beside the first one, in whose slots' caches there must be room for it."""
        # Padding that depends on other prompts may change bits; a longer cache does not (chunk_attention).
        alike = first.width == other.width and (
            first.width == self._piece or first.count - first.reused == other.count - other.reused
        )
        return other.room <= capacity and (alike or not self._one)

    def _with_beginnings(self, long: _Long, states: device.States) -> device.States:
        """The states, a row for each device, with those of beginnings in the rows of prompts that have some. None: of
        one prompt on one device.
        """
        for row, (pieces, blocks) in enumerate(zip(long.pieces, long.blocks, strict=True)):
            if pieces.reused and self._prefixes is not None:
                beginning = self._prefixes.restored(blocks.keys[: pieces.reused], self._states_shape(long.room))
                if self._division is None:
                    return beginning
                rows = np.zeros(1, np.int32), np.array([row], np.int32)
                states = self._programs.insert(states, beginning, *rows)
        return states

    def _pieces(self, request: Request, capacity: int) -> tuple[_Pieces, _Blocks]:
        """Of a long prompt."""
        prompt = request.tokens[:-1]
        exact = self._width_of_last(len(prompt)), length_bucket(len(prompt))
        width, room = self._chosen(len(prompt), capacity) or exact
        count = -(-len(prompt) // self._piece)
        if self._prefixes is None:
            return _Pieces(count, width, room, 0), _Blocks([], 0)
        # A row's length decides which factors longrope has.
        keys = block_keys(prompt, self._piece, (request.adapter, len(request.tokens) > self.switch))
        usable, known = self._prefixes.find(keys)
        return _Pieces(count, width, room, usable), _Blocks(keys, known)

    def _next_piece(self, leaves, long: _Long) -> int:
        """Dispatches the next piece of long prompts; its tokens with padding, or 1 if there is none."""
        width = 1
        unfinished = [row for row, pieces in enumerate(long.pieces) if long.computed[row] < pieces.count]
        if unfinished and long.states is None:
            unfinished = [row for row in unfinished if not long.computed[row]]
            width, first = self._piece, _padded(self._piece)
            states = self._prefill(leaves, long.requests, width, first, 0, self._devices)
            shapes = self._states_shape(long.room, self._devices)
            long.states = self._with_beginnings(long, jax.tree.map(self._grown, states, shapes))
        elif unfinished:
            width = max(self._width_of_next(long, row) for row in unfinished)
            long.states = self._programs.extend(
                self._structure, leaves, long.states, *self._next_arguments(long, unfinished, width)
            )
        for row in unfinished:
            long.computed[row] += 1
        self._store(long, unfinished)
        if all(count == pieces.count for count, pieces in zip(long.computed, long.pieces, strict=True)):
            self._long = None
            rows = {request.key: row for row, request in enumerate(long.requests)}
            tokens = (pieces.reused * self._piece for pieces in long.pieces)
            self._keep(long.states, rows, dict(zip(rows, tokens, strict=True)))
        return width

    def _width_of_next(self, long: _Long, row: int) -> int:
        pieces = long.pieces[row]
        return self._piece if long.computed[row] + 1 < pieces.count else pieces.width

    def _next_arguments(self, long: _Long, unfinished: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
        """Of `extend`, behind the states: the next tokens of these rows, none of the others."""
        tokens = np.zeros((self._devices, width), np.int32)
        starts, counts, totals = (np.full(self._devices, number, np.int32) for number in (0, 0, 1))
        for row in unfinished:
            request, start = long.requests[row], long.computed[row] * self._piece
            piece = request.tokens[:-1][start : start + self._piece]
            tokens[row, : len(piece)] = piece
            starts[row], counts[row], totals[row] = start, len(piece), len(request.tokens)
        return tokens, starts, counts, totals, *self._adapters(long.requests, self._devices)

    def _store(self, long: _Long, rows: Iterable[int]) -> None:
        """The last block of each of these rows, if it is whole."""
        if self._prefixes is None:
            return
        added = {}
        for row in rows:
            (keys, known), computed = long.blocks[row], long.computed[row]
            if computed <= len(keys):
                added[row] = Added(keys[:computed], computed in (known, len(keys)), long.requests[row].adapter)
        self._prefixes.add(added, long.states)

    def _keep(self, states: device.States, rows: dict[bytes, int], reused: dict[bytes, int] | None = None) -> None:
        self._batches = [*self._batches[-(_KEPT - 1) :], Batch(states, rows, reused or {}, self._devices > 1)]


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
