"""The rows in a sampler's slots: the numbers and settings by which the device decodes each."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.limits import NO_MASK
from jaxtune.models.generation.requests import Request, fill_masks
from jaxtune.models.generation.sampling import Kind, Sampling
from jaxtune.models.generation.slot_plan import next_power

_FEWEST_ENDS = 4  # the array of end tokens has at least this many columns
_FEWEST_BIASES = 8  # and that of biases
_GREEDY = Kind(False, False, False)


def kind_of(requests: Iterable[Request]) -> Kind:
    """What a program must have to decode them together."""
    return functools.reduce(Kind.__or__, {request.sampling.kind for request in requests}, _GREEDY)


class SlotRows:
    """What the host sets of each slot's row takes effect with the next round.

      adjusts: whether the arrays have room for biases before a row needs it.

    Attributes:
      requests: of each slot; None: it is free.
      host: the arrays as the host has them.
      live, seen: on the device, as the last round left them; seen int32[slots, vocabulary]: how often each row has each
        token (slots.seen_counts), None before a row with a penalty.
    """

    def __init__(
        self,
        programs: device.Programs,
        count: int,
        vocab_size: int,
        pictures: bool,
        adjusts: bool,
        division: Division | None = None,
    ):
        self._programs, self._vocab_size, self._division = programs, vocab_size, division
        self.requests: list[Request | None] = [None] * count
        self.host = device.empty_rows(count, _FEWEST_ENDS, vocab_size, pictures)
        self.host = self.host._replace(
            adapter=np.zeros(count, np.int32),
            adjustments=device.empty_adjustments(count, _FEWEST_BIASES) if adjusts else None,
        )
        self._changed = np.zeros(count, bool)
        self._new_live = device.Live(*(np.zeros(count, dtype) for dtype in (np.int32, np.int32, bool)))
        self.live = self._put(jax.tree.map(np.copy, self._new_live))
        self.seen: device.Array | None = None
        self._unchanged = self._put((self._changed.copy(), jax.tree.map(np.copy, self._new_live)))
        self._sent: device.Rows | None = None  # as the last round got them; None after a change
        self.lets_wait = True  # whether rounds are dispatched ahead while a constraint waits
        self._masks: np.ndarray | None = None  # Rows.masks, of the rows in the slots of `_masked`
        self._masked: set[int] = set()

    @property
    def taken(self) -> list[Request]:
        """The requests that have a slot."""
        return [request for request in self.requests if request is not None]

    @property
    def free(self) -> list[int]:
        """The slots that no request has, those of the devices with the fewest requests first."""
        count = len(self.requests) if self._division is None else len(self.requests) // self._division.devices
        ranks = []
        for first in range(0, len(self.requests), count):
            requests = self.requests[first : first + count]
            free = [first + place for place, request in enumerate(requests) if request is None]
            ranks += enumerate(free, count - len(free))
        return [slot for _, slot in sorted(ranks)]

    @property
    def ends(self) -> int:
        """Columns of the end tokens."""
        return self.host.ends.shape[1]

    @property
    def biases(self) -> int:
        """Columns of the biases, in the arrays that have any."""
        return _FEWEST_BIASES if self.host.adjustments is None else self.host.adjustments.bias.shape[1]

    @property
    def constrained(self) -> bool:
        """Whether a row's next token needs a mask."""
        return any(request.is_constrained if self.lets_wait else request.constraint for request in self.taken)

    @property
    def follows(self) -> bool:
        """Whether a row's tokens may need masks."""
        return any(request.constraint is not None for request in self.taken)

    # ---- changes of slots

    def place(self, request: Request, slot: int, pause: int) -> None:
        """Gives a request a slot, whose states the caller copies. pause: slots.Rows.pause."""
        self.requests[slot], request.slot = request, slot
        request.placements += 1
        self._change(slot, request.tokens[-1], len(request.tokens), True)
        self._set_ends(slot, request)
        rows, numbers = self.host, request.sampling.numbers(self._vocab_size)
        values = (request.start, request.limit, pause, request.seed & 0xFFFFFFFF, request.index & 0xFFFFFFFF)
        arrays = (rows.start, rows.limit, rows.pause, rows.seed, rows.index, *rows.numbers)
        for array, value in zip(arrays, (*values, *numbers), strict=True):
            array[slot] = value
        self._adjust(slot, request.sampling)
        if rows.adapter is not None:
            rows.adapter[slot] = request.adapter
        if rows.delta is not None:
            rows.delta[slot] = 0 if request.pictures is None else request.pictures.delta
        self._sent = None
        if request.sampling.kind.penalises:
            counts = device.seen_counts(request.tokens, request.start, self._vocab_size)
            self.seen = self._programs.mark(self.seen_of(request.sampling.kind), np.int32(slot), counts)

    def end(self, slot: int) -> None:
        """Frees the slot of a row that the device would go on decoding."""
        self.requests[slot] = None
        self._change(slot, token=0, length=1, active=False)

    def count_seen(self) -> None:
        """Makes room for `seen`."""
        self.seen = self._put(np.zeros((len(self.requests), self._vocab_size), np.int32))

    def _change(self, slot: int, token: int, length: int, active: bool) -> None:
        self._changed[slot] = True
        for array, value in zip(self._new_live, (token, length, active), strict=True):
            array[slot] = value

    def _set_ends(self, slot: int, request: Request) -> None:
        if (count := len(request.ends)) > self.ends:
            added_columns = next_power(count) - self.ends
            ends = np.pad(self.host.ends, ((0, 0), (0, added_columns)), constant_values=-1)
            self.host = self.host._replace(ends=ends)
        self.host.ends[slot] = -1
        self.host.ends[slot, :count] = sorted(request.ends)

    def _adjust(self, slot: int, sampling: Sampling) -> None:
        """Sets a slot's Adjustments, which the arrays have once a request needs them."""
        adjustments, count = self.host.adjustments, len(sampling.biases)
        if adjustments is None:
            if not sampling.kind.adjusts:
                return
            adjustments = device.empty_adjustments(len(self.requests), _FEWEST_BIASES)
        if (added := count - adjustments.bias.shape[1]) > 0:
            added += next_power(count) - count
            wide = (np.pad(array, ((0, 0), (0, added))) for array in adjustments[2:])
            adjustments = device.Adjustments(*adjustments[:2], *wide)
        self.host = self.host._replace(adjustments=adjustments)
        adjustments.presence_penalty[slot], adjustments.frequency_penalty[slot] = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        adjustments.bias[slot] = 0
        for column, values in enumerate(sampling.biases):
            for array, value in zip(adjustments[2:], values, strict=True):
                array[slot, column] = value

    # ---- what a round gets

    def changes(self) -> tuple[device.Array, device.Live]:
        """(bool[slots]: changed since the last call, new numbers). Without changes nothing is sent: the device would
        wait for it.
        """
        if not self._changed.any():
            return self._unchanged
        changed, self._changed = self._changed, np.zeros_like(self._changed)
        return changed, device.Live(*(array.copy() for array in self._new_live))

    def sent(self, kind: Kind, gated: bool) -> device.Rows:
        """The arrays that a round of this kind reads; what the device has not yet is sent. gated: with adapters."""
        rows = self._sent or jax.tree.map(np.copy, self.host)  # the host changes its arrays
        if rows is self._sent and isinstance(rows.start, np.ndarray):
            rows = self._put(rows)  # not before the second round, as it takes the host 2 ms
        self._sent = rows
        adjustments, adapter = rows.adjustments if kind.adjusts else None, rows.adapter if gated else None
        return rows._replace(adjustments=adjustments, adapter=adapter)

    def seen_of(self, kind: Kind) -> device.Array | None:
        """`seen`, for a round that needs it."""
        if kind.penalises and self.seen is None:
            self.count_seen()
        return self.seen if kind.penalises else None

    def masks(self) -> np.ndarray:
        """Rows.masks: an array whose use by earlier rounds is over, as they have been read."""
        if self._masks is None:
            self._masks = np.full((len(self.requests), (self._vocab_size + 31) // 32), NO_MASK)
        rows = {
            slot: request.constraint
            for slot, request in enumerate(self.requests)
            if request is not None and request.constraint is not None
        }
        self._masks[[*(self._masked - rows.keys())]] = NO_MASK
        self._masked = set(rows)
        fill_masks([(constraint, slot) for slot, constraint in rows.items()], self._masks)
        return self._masks

    def _put[T](self, tree: T) -> T:
        return jax.device_put(tree) if self._division is None else self._division.put(tree)
