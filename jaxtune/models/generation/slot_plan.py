"""Plans by the free device memory how many rows a sampler decodes at a time (slots) and how long they may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.load_memory import free_bytes
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.converted import LEAST_ROWS, Convertible, convertible_of
from jaxtune.models.generation.structure import Structure, structure_of, takes_cache, with_cache

SLOTS = 64  # the default number of slots
PREFILL_TOKENS = 2048  # the default of the most tokens that one program prefills
_SHORTEST_CACHE = 128  # in tokens; a power of two
_LEAST_LENGTH = 256  # there are fewer slots until rows of this many tokens fit
_AT_ONCE = 4  # how many times prefill_tokens one program prefills while most slots are free
_PREFIXES = 0.1  # the share of free memory for the states of prompts' beginnings
_PREFIX_BYTES = 10**9  # for them where the free memory is unknown
_SPARED = 0.1  # the share of free memory that is left for activations of prefills and other buffers of programs


def length_bucket(tokens: int, least: int = _SHORTEST_CACHE) -> int:
    """The length to which `tokens` are padded: a power of two, or three quarters of one from 384 on. Few, because each
    compiles programs. It never falls as `tokens` rises, so that a padded prompt fits into its row's cache.

    >>> [length_bucket(tokens) for tokens in (1, 129, 300, 513, 800)], length_bucket(20, least=16)
    ([128, 256, 384, 768, 1024], 32)
    """
    power = max(least, next_power(tokens))
    shorter = power * 3 // 4
    return shorter if power > 256 and shorter >= max(tokens, least) else power


def next_power(number: int) -> int:
    """The smallest power of two that is not below it.

    >>> [next_power(number) for number in (0, 1, 3, 8)]
    [1, 1, 4, 8]
    """
    return 1 << max(0, number - 1).bit_length()


def fewer_slots(slots: int) -> int:
    """The next lower number of slots that is tried: a power of two, or three quarters of one.

    >>> [fewer_slots(slots) for slots in (100, 64, 48, 4, 3, 2)]
    [96, 48, 32, 3, 2, 1]
    """
    power = next_power(slots)
    return next(count for count in (power * 3 // 4, power // 2, power * 3 // 8) if count < slots)


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """The slots and the most tokens of a row; str() is a line for reports."""

    slots: int  # the number of rows that decode in one batch
    length: int  # the most tokens that a row may have, its prompt included
    bytes: int  # device bytes of the states of all slots at this length, and of the logits of a step
    # device bytes of the weights that are converted once and kept so in memory (converted.py)
    converted_bytes: int = 0
    # the number of layers, from the first one, that these are of; each product of the layers after them decodes its
    # weight, or casts its experts' adapters, again
    converted_layers: int = 0
    adapter_bytes: int = 0  # device bytes of a sampler's adapters, or that stay free for them
    prefix_bytes: int = 0  # device bytes for the states of prompts' beginnings
    picture_bytes: int = 0  # device bytes of the prefill of a row of pictures alone
    cache: str | None = None  # in what keys and values are stored; None: the model's dtype

    def __str__(self) -> str:
        size = self.converted_bytes / 1e9
        converted = f", layers converted once: {self.converted_layers}, {size:.2f} GB" if self.converted_layers else ""
        adapters = f", adapters: {self.adapter_bytes / 1e9:.2f} GB" if self.adapter_bytes else ""
        prefixes = f", beginnings of prompts: {self.prefix_bytes / 1e9:.2f} GB" if self.prefix_bytes else ""
        pictures = f", a prefill of pictures: {self.picture_bytes / 1e9:.2f} GB" if self.picture_bytes else ""
        cached = f", keys and values in {self.cache}" if self.cache else ""
        more = f"{cached}{converted}{adapters}{prefixes}{pictures}"
        return f"{self.slots} slots of {self.length:,} tokens, {self.bytes / 1e9:.2f} GB{more}"


def slot_bytes(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], slots: int, length: int) -> int:
    """Device bytes of the slots' states, and of the values around a step's logits (16 bytes for each slot and token of
    the vocabulary).

      structure: the model without its arrays.
      shapes: of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)).
      slots: rows that decode in one batch.
      length: tokens of a row, prompt and answer.
    """
    states = device.states_shape(structure, shapes, slots, length_bucket(length))
    state_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(states))
    return state_bytes + 16 * slots * structure.config.vocab_size


def slots_for(
    model: Decoder,
    room_bytes: float,
    length: int,
    most_slots: int,
    converts: bool = True,
    exact: bool = False,
    prefix_bytes: int = 0,
    cache: str | None = None,
) -> SlotPlan:
    """The slots of a device with which a sampler would run rows. Raises ValueError if no slot fits, the model has too
    few positions, or as with_cache.

      model: arrays or jax.ShapeDtypeStructs.
      room_bytes: free device memory, less that of a prefill with pictures.
      length: tokens of a row, prompt and answer.
      most_slots: more are not tried.
      converts: whether layers may be converted: not with `deterministic`, nor of divided or streamed weights.
      exact, prefix_bytes, cache: as of Sampler.
    """
    graph, state = nnx.split(with_cache(model, cache))
    leaves, treedef = jax.tree.flatten(state)
    structure = structure_of(graph, treedef, model.config)
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)

    def bytes_of(slots: int, tokens: int) -> int:
        return slot_bytes(structure, shapes, slots, tokens)

    convertible = convertible_of(structure, shapes, PREFILL_TOKENS, None) if converts else None
    positions = model.config.context_length
    options = positions, room_bytes, None, length, most_slots, convertible, prefix_bytes
    takes_fp8 = takes_cache(model, cache, exact)
    return dataclasses.replace(plan_slots(bytes_of, *options, exact=exact, takes_fp8=takes_fp8), cache=cache)


def plan_slots(
    bytes_of: Callable[[int, int], int],
    positions: int,
    room_bytes: float | None,
    slots: int | None = None,
    length: int | None = None,
    most_slots: int = SLOTS,
    convertible: Convertible | None = None,
    prefix_bytes: int = 0,
    picture_bytes_of: Callable[[int], int] = lambda tokens: 0,
    exact: bool = False,
    takes_fp8: bool = False,
) -> SlotPlan:
    """Chooses the slots, then the length of rows: `most_slots`, or as many of `fewer_slots` as rows of 256 tokens (of
    `length`) fit into; 256 tokens, doubled as long as they fit and the model has positions. As many layers as fit
    beside them and `prefix_bytes` are converted; a planned length leaves room for all if these take at most half of the
    free memory. A planned length also leaves room for `prefix_bytes`, of which a fixed length gets what slots leave.

      bytes_of: (slots, tokens of a row) -> bytes of their states and of a step's logits.
      positions: the most tokens of a row that the model allows.
      room_bytes: free device memory, a tenth of it for other buffers; None: unknown, which limits and converts nothing.
      slots, length: fixed; None: planned.
      most_slots: more are not tried.
      convertible: layers that can be converted to a faster format; None: none.
      prefix_bytes: the most for states of prompts' beginnings.
      picture_bytes_of: tokens of a row -> bytes of its prefill beside its states, if all are of pictures; counted
        unless slots and length are fixed.
      exact: as of Sampler.
      takes_fp8: whether keys and values could be stored so, for the message.

    Raises ValueError for a number that is not a positive integer, a length above `positions`, or no room.
    """
    if isinstance(prefix_bytes, bool) or not isinstance(prefix_bytes, int) or prefix_bytes < 0:
        raise ValueError(f"Sampler: prefix_bytes = {prefix_bytes!r}: must be an integer, at least 0")
    for name, value in (("slots", slots), ("length", length), ("most_slots", most_slots)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"Sampler: {name} = {value!r}: must be a positive integer")
    if length is not None and length > positions:
        raise ValueError(f"Sampler: length = {length}: the model has {positions} positions")
    room = float("inf") if room_bytes is None else room_bytes * (1 - _SPARED)
    all_room = room

    def counted(tokens: int) -> int:
        return 0 if room_bytes is None or (slots and length) else picture_bytes_of(tokens)

    def needed(count: int, tokens: int) -> int:
        return bytes_of(count, tokens) + counted(tokens)

    decodes = convertible is not None and any(convertible.layers)

    def planned(room: float, slots: int | None, reserved: int = 0) -> SlotPlan:
        count, tokens = _planned(needed, positions, room, slots, length, most_slots, reserved, decodes, takes_fp8)
        return SlotPlan(count, tokens, bytes_of(count, tokens), picture_bytes=counted(tokens))

    plan = planned(room, slots, prefix_bytes)

    def with_prefixes(plan: SlotPlan) -> SlotPlan:
        rest = all_room - plan.bytes - plan.converted_bytes - plan.picture_bytes
        return dataclasses.replace(plan, prefix_bytes=int(min(prefix_bytes, max(rest, 0))))

    if room_bytes is None or convertible is None:
        return with_prefixes(plan)
    convertible = convertible.for_rows(plan.slots, exact)
    # A program that packs prompts keeps states for up to twice the tokens that it prefills.
    prefilled = plan.bytes / plan.slots * max(1.0, 2 * convertible.prefill_tokens / plan.length)
    room = min(room, room_bytes - convertible.buffer_bytes - prefilled) - prefix_bytes
    all_layers_bytes = sum(convertible.layers)
    least = needed(plan.slots, length or min(positions, _LEAST_LENGTH))
    if 0 < all_layers_bytes <= min(room / 2, room - least):
        plan = planned(room - all_layers_bytes, plan.slots)
    layers, size = convertible.within(room - plan.bytes - plan.picture_bytes)
    return with_prefixes(dataclasses.replace(plan, converted_bytes=size, converted_layers=layers))


def prefilled_at_once(plan: SlotPlan, room_bytes: float | None, prefill_tokens: int) -> int:
    """The most tokens that one program prefills while most slots are free: four times `prefill_tokens` if memory is
    left.

      plan: slots, length and bytes of the sampler.
      room_bytes: free device memory; None: unknown.
      prefill_tokens: the most that a program prefills while slots decode.
    """
    if room_bytes is None:
        return prefill_tokens
    # The states have room for up to twice the tokens. As much again is for the activations.
    needed_bytes = 2 * 2 * _AT_ONCE * prefill_tokens * plan.bytes / (plan.slots * plan.length)
    free_bytes = room_bytes - plan.bytes - plan.converted_bytes - plan.prefix_bytes
    return (_AT_ONCE if needed_bytes <= free_bytes else 1) * prefill_tokens


def _planned(
    bytes_of: Callable[[int, int], int],
    positions: int,
    room: float,
    slots: int | None,
    length: int | None,
    most_slots: int,
    reserved: int = 0,
    decodes: bool = False,
    takes_fp8: bool = False,
) -> tuple[int, int]:
    """(slots, length) for `room` bytes without converted weights. ValueError if not even one slot fits.

    decodes: whether steps of `LEAST_ROWS` and more decode weights that are not converted; slightly more would be slower
      than one less.
    """

    def fits(slots: int, length: int) -> bool:
        return bytes_of(slots, length) <= room

    slot_count = slots or most_slots
    shortest = length or min(positions, _LEAST_LENGTH)
    while slots is None and slot_count > 1 and not fits(slot_count, shortest):
        slot_count = fewer_slots(slot_count)
        if decodes and LEAST_ROWS <= slot_count < next_power(LEAST_ROWS):
            slot_count = LEAST_ROWS - 1
    if not fits(slot_count, shortest):
        fewer_bits = ', keys and values in FP8 (objective.cache=fp8, Sampler(cache="fp8"))' if takes_fp8 else ""
        raise ValueError(
            f"Sampler: {slot_count} slots of {shortest} tokens take {bytes_of(slot_count, shortest) / 1e9:.2f} GB, and "
            f"{room / (1 - _SPARED) / 1e9:.2f} GB of device memory are left beside the model: fewer slots, a shorter "
            f"length{fewer_bits}, or a model in fewer bits (load_in)"
        )
    while length is None and shortest < positions:
        longer = min(positions, 2 * shortest)
        if bytes_of(slot_count, longer) > room - reserved:
            break
        shortest = longer
    return slot_count, shortest


def prefix_room(room: float | None) -> int:
    """The usual bytes for states of prompts' beginnings: a tenth of the free memory, 1 GB where it is unknown."""
    return int(_PREFIXES * room) if room is not None else _PREFIX_BYTES


def room_bytes(share: float = 1.0) -> float | None:
    """The share (0 to 1) of the free bytes on this process's first device; None if it reports none, as a CPU."""
    free = free_bytes()
    return None if free is None else free * share
