"""How many slots a sampler has, and how long their rows may be, by the memory that is left beside the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

SLOTS = 64  # as many as are planned where nobody says how many
_LEAST_LENGTH = 256  # of rows, before slots are given up for longer ones
_SPARED = 0.1  # of the memory left: activations of a prefill, and what programs hold beside the slots


def capacity_bucket(tokens: int) -> int:
    """Room for a row of this length: 128 times a power of two, or three quarters of one.

    >>> [capacity_bucket(tokens) for tokens in (1, 129, 300, 513, 800)]
    [128, 256, 384, 768, 1024]
    """
    whole = 128
    while whole < tokens:
        whole *= 2
    return whole * 3 // 4 if whole > 256 and tokens <= whole * 3 // 4 else whole


@dataclasses.dataclass(frozen=True)
class SlotPlan:
    """What a sampler allocates."""

    # Rows that decode in one batch.
    slots: int
    # Tokens that a row may have, its prompt included.
    length: int
    # Of the states of all slots at this length, and of the logits, in bytes.
    bytes: int

    def __str__(self) -> str:
        return f"{self.slots} slots of {self.length:,} tokens, {self.bytes / 1e9:.2f} GB"


def plan_slots(
    bytes_of: Callable[[int, int], int],
    positions: int,
    room_bytes: float | None,
    slots: int | None = None,
    length: int | None = None,
    most_slots: int = SLOTS,
) -> SlotPlan:
    """As many slots, at most `most_slots`, and rows as long as there is room for; what is given is kept.

    Args:
      bytes_of: (slots, tokens of a row) -> bytes. positions: of the model. room_bytes: memory that is left; None: not
        known, which limits nothing.
    Raises:
      ValueError: what is given does not fit.
    """
    for name, value in (("slots", slots), ("length", length), ("most_slots", most_slots)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"Sampler: {name} = {value!r}: must be a positive integer")
    if length is not None and length > positions:
        raise ValueError(f"Sampler: length = {length}: the model has {positions} positions")
    room = float("inf") if room_bytes is None else room_bytes * (1 - _SPARED)

    def fits(slots: int, length: int) -> bool:
        return bytes_of(slots, length) <= room

    chosen = slots or most_slots
    shortest = length or min(positions, _LEAST_LENGTH)
    while slots is None and chosen > 1 and not fits(chosen, shortest):
        chosen //= 2
    if not fits(chosen, shortest):
        raise ValueError(
            f"Sampler: {chosen} slots of {shortest} tokens take {bytes_of(chosen, shortest) / 1e9:.2f} GB, and "
            f"{(room_bytes or 0) / 1e9:.2f} GB of device memory are left beside the model: fewer slots, a shorter "
            "length, or a model in fewer bits (load_in)"
        )
    while length is None and shortest < positions and fits(chosen, longer := min(positions, 2 * shortest)):
        shortest = longer
    return SlotPlan(chosen, shortest, bytes_of(chosen, shortest))


def room_bytes(share: float = 1.0) -> float | None:
    """This share of the first device's bytes that nothing uses; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return float(stats["bytes_limit"] - stats["bytes_in_use"]) * share
