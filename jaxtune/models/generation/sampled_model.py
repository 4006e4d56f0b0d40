"""The weights that a sampler computes with: a model and the adapters over it, which change while rows decode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.generation.adapters import Adapter, AdapterBank, read_adapter
from jaxtune.models.generation.converted import Converted
from jaxtune.models.generation.ready import Ready
from jaxtune.models.generation.structure import Structure, flattened, shapes_of, with_cache
from jaxtune.models.lora import has_adapter


class Weights(NamedTuple):
    """What programs are compiled for and called with."""

    structure: Structure
    leaves: list[jax.Array]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    gated: bool  # whether rows may have adapters
    newest: int  # the last adapter's number

    @property
    def are_arrays(self) -> bool:
        return not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self.leaves)


class NamedAdapter(NamedTuple):
    number: int  # above 0; by which the weights know it
    ends: tuple[int, ...]  # tokens that end its rows


class SampledModel:
    """A model with its adapters. What is loaded or freed is in `weights` after the next `switch`.

    Attributes:
      weights: those in use.
      bank: all adapters, also those that come.
      ends: ids of the tokens that end a row of the model alone.
      cache: the format of keys and values in CACHES; None: the model's dtype.
    """

    def __init__(
        self,
        model: Decoder,
        cache: str | None = None,
        adapters: Mapping[str, Adapter | str | os.PathLike] | None = None,
        most_ranks: int | None = None,
    ):
        self._base = None if has_adapter(model) else model
        self.bank, self.ends = AdapterBank(model), end_token_ids(model)
        self.cache, self._most_ranks = cache, most_ranks
        self._converted: Converted | None = None
        self._named: dict[str, NamedAdapter] = {}
        self._last_number = 0
        self._dropped: set[int] = set()  # adapters' numbers that rows still have
        for name, adapter in (adapters or {}).items():
            self.bank, self._named[name] = self._with_adapter(name, adapter)
        self.weights = self._weights_of(self.bank)
        self._coming: Weights | None = None  # for which programs are being compiled

    @property
    def adapter_bytes(self) -> int:
        """Device bytes of the adapters, as many as the most ranks take."""
        return max(self.bank.bytes, 0 if self._most_ranks is None else self.bank.bytes_of(self._most_ranks))

    def convert(self, layers: int, mesh: Mesh | None = None, linears: bool = True) -> None:
        """Converts the weights of so many layers once, as Converted does."""
        self._converted = Converted(layers, mesh, linears)
        structure, leaves = self._converted.of(self.weights.structure, self.weights.leaves)
        self.weights = self.weights._replace(structure=structure, leaves=leaves, shapes=shapes_of(leaves))

    # ---- adapters

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def adapter(self, name: str | None) -> NamedAdapter:
        """That of a name, or the model alone for None. ValueError for an unknown name."""
        if name is None:
            return NamedAdapter(0, tuple(self.ends))
        if name not in self._named:
            names = ", ".join(self._named) or "none"
            raise ValueError(f"Sampler: adapter = {name!r} is not loaded: there are {names}")
        return self._named[name]

    def load(self, name: str, adapter: Adapter | str | os.PathLike) -> None:
        """ValueError: as Sampler.load_adapter."""
        bank, named = self._with_adapter(name, adapter)
        self._come(bank)
        self._named[name] = named

    def drop(self, name: str) -> int:
        """Forgets a name, and returns the number of its adapter, whose memory `free` returns."""
        number = self.adapter(name).number
        del self._named[name]
        self._dropped.add(number)
        return number

    def is_dropped(self, number: int) -> bool:
        return number in self._dropped

    def free(self, number: int) -> None:
        """Frees the columns of a dropped adapter that no row has."""
        self._dropped.remove(number)
        self._come(self.bank.without(number))

    def _with_adapter(self, name: str, adapter: Adapter | str | os.PathLike) -> tuple[AdapterBank, NamedAdapter]:
        if self._base is None:
            raise ValueError(f"Sampler: adapter {name!r}: the model has one already: give the base (without_adapter)")
        if name in self._named:
            raise ValueError(f"Sampler: adapter {name!r} is loaded already: drop it first, or take another name")
        adapter = adapter if isinstance(adapter, Adapter) else read_adapter(self._base, adapter)
        ranks, limit = self.bank.ranks_with(adapter), self._most_ranks
        if limit is not None and ranks > limit:
            raise ValueError(
                f"Sampler: adapter {name!r}: with it the ranks are {ranks} in sum, and adapter_ranks is {limit}: drop "
                "another first, or set more"
            )
        self._last_number += 1
        return self.bank.with_adapter(self._last_number, adapter), NamedAdapter(self._last_number, adapter.ends)

    # ---- weights

    def can_switch(self, ready: Ready) -> bool:
        """Whether programs are ready for the weights that come; otherwise they are being compiled, and rows decode with
        those in use. RuntimeError: in vain.
        """
        coming = self._coming
        return coming is None or ready.follows(coming.structure, coming.shapes, coming.gated)

    def switch(self) -> bool:
        """Takes the weights that come; rounds that run are not changed. Returns whether there were any."""
        if self._coming is None:
            return False
        self.weights, self._coming = self._coming, None
        return True

    def replace(self, model: Decoder) -> None:
        """Has another model's weights come, under the same adapters. ValueError for another structure."""
        bank = self.bank.over(model)
        weights = self._weights_of(bank)
        if weights.structure is not self.weights.structure:
            raise ValueError("Sampler: update with a model of another structure: make a new Sampler")
        self.bank, self._coming = bank, weights
        self._base = None if has_adapter(model) else model

    def _come(self, bank: AdapterBank) -> None:
        weights = self._weights_of(bank)
        self.bank, self._coming = bank, weights

    def _weights_of(self, bank: AdapterBank) -> Weights:
        structure, leaves = flattened(with_cache(bank.model(), self.cache))
        if self._converted is not None:
            structure, leaves = self._converted.of(structure, leaves)
        return Weights(structure, leaves, shapes_of(leaves), bool(bank), self._last_number)
