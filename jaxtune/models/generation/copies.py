"""Sampling on several devices that each have a model's whole weights, without exchanges."""

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
    """The devices that have the whole weights, by ascending id."""
    first = jax.tree.leaves(nnx.state(model))[0]  # as Sharing.of does
    return sorted(first.sharding.device_set, key=lambda device: device.id)


def copy_on(model: Decoder, device: Device) -> Decoder:
    """The model on one device, from the arrays that it has whole; nothing is copied."""

    def on_device(array: jax.Array) -> jax.Array:
        return next(shard.data for shard in array.addressable_shards if shard.device == device)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(on_device, state))


class SamplerOfCopies:
    """A Sampler on each device. The first `rows` rows are divided into consecutive shares; a later one goes to the
    device with the fewest pending.

      model: whole on each device.
      make: model on one device -> its sampler.
    """

    def __init__(self, model: Decoder, devices: Sequence[Device], rows: int, make: Callable[[Decoder], Sampler]):
        self._devices, self._rows, self._submitted = devices, rows, 0
        self._samplers: list[Sampler] = []
        for device in devices:
            with jax.default_device(device):
                self._samplers.append(make(copy_on(model, device)))
        self._numbers: list[dict[int, int]] = [{} for _ in devices]  # of each device: {its number of a request: ours}

    def submit(self, prompt: Sequence[int], *arguments, **settings) -> int:
        """Submits a prompt, with further arguments of Sampler.submit. Returns its number, in the order
        of submission.
        """
        number, self._submitted = self._submitted, self._submitted + 1
        count = len(self._samplers)
        device_index = number * count // self._rows
        if number >= self._rows:
            device_index = min(range(count), key=lambda index: self._samplers[index].pending)
        with jax.default_device(self._devices[device_index]):
            device_request = self._samplers[device_index].submit(prompt, *arguments, **settings)
        self._numbers[device_index][device_request] = number
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()

    @property
    def pending(self) -> int:
        """The number of requests that are not done, on all devices."""
        return sum(sampler.pending for sampler in self._samplers)

    def step(self) -> list[Piece]:
        """About one round on every device that has work; new Pieces."""
        renumbered = []
        for device, sampler, numbers in zip(self._devices, self._samplers, self._numbers, strict=True):
            if sampler.pending:
                with jax.default_device(device):
                    pieces = sampler.step()
                renumbered += [dataclasses.replace(piece, request=numbers[piece.request]) for piece in pieces]
        return renumbered
