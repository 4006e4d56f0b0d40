"""Samplers of several devices that share the rows, for a model whose weights every device has, such as one that is
being trained on them: each device samples a part of the answers, without exchanges. `devices_of` finds the devices,
`copy_on` makes the model of one of them, and `DividedSampler` has a sampler on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.requests import Piece
from jaxtune.models.generation.sampler import Sampler

type Device = Any  # a jax.Device


def devices_of(model: Decoder) -> list[Device]:
    """The devices that have the whole weights of a model, in the order of their numbers, for a DividedSampler; where
    answers are sampled in training, one device means that a Sampler is enough. model: one whose weights are not divided
    over devices."""
    first = jax.tree.leaves(nnx.state(model))[0]
    return sorted(first.sharding.device_set, key=lambda device: device.id)


def copy_on(model: Decoder, device: Device) -> Decoder:
    """A model on one device for a Sampler, made of the arrays of `model` that `device` already has; nothing is copied.
    model: a model whose weights are whole on each of several devices, this one included."""

    def own(array: jax.Array) -> jax.Array:
        """The copy of an array that is on the device."""
        return next(shard.data for shard in array.addressable_shards if shard.device == device)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(own, state))


class DividedSampler:
    """Samplers of several devices with methods of one (`Sampler.submit`, `step`, `pending` and `close`). The rows that
    are submitted first are divided into consecutive parts, one for each device; a later row goes to the device with the
    fewest rows that are not done.

    Args:
      model: its weights are whole on each device.
      devices: the devices.
      rows: the number of rows that are submitted first, at least one.
      make: makes the sampler of a device from the model with that device's weights.
    """

    def __init__(self, model: Decoder, devices: Sequence[Device], rows: int, make: Callable[[Decoder], Sampler]):
        self._devices, self._rows, self._submitted = devices, rows, 0
        self._samplers: list[Sampler] = []
        for device in devices:
            with jax.default_device(device):
                self._samplers.append(make(copy_on(model, device)))
        self._numbers: list[dict[int, int]] = [{} for _ in devices]  # of each device: {its number of a request: ours}

    def submit(self, prompt: Sequence[int], *arguments, **settings) -> int:
        """Submits a prompt to one of the samplers; returns the request's number (from 0, in the order of submission),
        which `step` gives with its tokens.

        prompt: token ids. arguments, settings: the other arguments of Sampler.submit, such as max_new_tokens."""
        number, self._submitted = self._submitted, self._submitted + 1
        count = len(self._samplers)
        place = number * count // self._rows
        if number >= self._rows:
            place = min(range(count), key=lambda index: self._samplers[index].pending)
        with jax.default_device(self._devices[place]):
            own = self._samplers[place].submit(prompt, *arguments, **settings)
        self._numbers[place][own] = number
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the samplers of all devices."""
        for sampler in self._samplers:
            sampler.close()

    @property
    def pending(self) -> int:
        """The number of requests that are not done, on all devices; the caller calls `step` until it is 0."""
        return sum(sampler.pending for sampler in self._samplers)

    def step(self) -> list[Piece]:
        """Makes about one round (a few tokens of each row) of progress on every device that has work. Returns the new
        Pieces, each with new tokens of one request. A device computes its next round while the results of the others
        are read."""
        found = []
        for device, sampler, numbers in zip(self._devices, self._samplers, self._numbers, strict=True):
            if sampler.pending:
                with jax.default_device(device):
                    pieces = sampler.step()
                found += [dataclasses.replace(piece, request=numbers[piece.request]) for piece in pieces]
        return found
