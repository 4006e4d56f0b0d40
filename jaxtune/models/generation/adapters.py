"""Adapters of a sampler: several over one base, of which each row of a batch has its own or none.

Those of one linear lie side by side along the rank, so one product serves rows with any of them: a gate lets each token
take the columns of its own (linear.GatedLora). Columns are added in buckets, so that another adapter rarely compiles.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.adapters.adapter_files import adapter_on_host
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import end_token_ids
from jaxtune.models.linear import GatedLora, Linear
from jaxtune.models.lora import copy_structure, experts, has_adapter, linears, matrices

_FEWEST_COLUMNS = 16
_FREE = -1  # the owner of a column that no adapter has


class Sides(NamedTuple):
    """One linear's adapter, numpy arrays in the dtype in which it multiplies."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r]
    scale: float


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter in host memory."""

    sides: Mapping[str, Sides]  # by the linears' names
    ends: tuple[int, ...]  # ids of the tokens that end a text

    @classmethod
    def of(cls, model: Decoder, name: str = "the adapter") -> Self:
        """The adapter of a model. ValueError for one that only a model of its own can have, and without any.

        name: for errors.
        """
        if not has_adapter(model):
            raise ValueError(f"{name}: the model has no adapter")
        saved = [holder.original for holder in (model.embedding, model.head) if holder is not None]
        for is_so, what in (
            (any(matrix.lora is not None for _, matrix in experts(model)), "adapters of experts (target_parameters)"),
            (any(linear.lora and linear.lora.magnitude is not None for _, linear in linears(model)), "DoRA (use_dora)"),
            (any(original is not None for original in saved), "modules trained whole (modules_to_save)"),
            (any(matrix.fake_quant is not None for _, matrix in matrices(model)), "weights that QAT rounds"),
        ):
            if is_so:
                raise ValueError(
                    f"{name} has {what}, which rows of one batch cannot have apart: merge it (jaxtune export ADAPTER "
                    "FOLDER) and take the merged model"
                )
        sides = {}
        for module, linear in linears(model):
            if (lora := linear.lora) is not None:
                dtype = _dtype(model, linear)
                a, b = (np.asarray(side.get_value()).astype(dtype) for side in (lora.a, lora.b))
                if not (np.isfinite(a).all() and np.isfinite(b).all()):
                    raise ValueError(f"{name}: the adapter of {module} is not finite in {dtype}")
                sides[module] = Sides(a, b, lora.scale)
        return cls(sides, tuple(end_token_ids(model)))


def read_adapter(base: Decoder, folder: str | os.PathLike) -> Adapter:
    """The adapter of a PEFT folder. ValueError: as load_adapter and `Adapter.of`."""
    return Adapter.of(adapter_on_host(base, folder), str(folder))


def _dtype(model: Decoder, linear: Linear) -> np.dtype:
    """In which a linear's adapter multiplies; float32 if a precision map gives it another dtype than the model's."""
    return jnp.dtype(model.dtype if linear.compute is None else "float32")


class _Columns(NamedTuple):
    """The adapters of one linear."""

    a: jax.Array  # [R, in]
    b: jax.Array  # [out, R]
    owners: np.ndarray  # int32[R]
    scales: np.ndarray  # float32[R]

    @property
    def taken(self) -> int:
        return int((self.owners != _FREE).sum())

    def resized(self, width: int) -> _Columns:
        """With `width` columns, at least as many as are taken, and these first."""
        taken = np.flatnonzero(self.owners != _FREE)
        indices = np.full(width, len(self.owners), np.int32)
        owners, scales = np.full(width, _FREE, np.int32), np.zeros(width, np.float32)
        indices[: len(taken)] = taken
        owners[: len(taken)], scales[: len(taken)] = self.owners[taken], self.scales[taken]
        a, b = _moved(self.a, self.b, indices)
        return _Columns(a, b, owners, scales)

    def filled(self, number: int, sides: Sides) -> _Columns:
        """With an adapter in free columns, of which there are enough."""
        indices = np.flatnonzero(self.owners == _FREE)[: len(sides.a)].astype(np.int32)
        owners, scales = self.owners.copy(), self.scales.copy()
        owners[indices], scales[indices] = number, sides.scale
        a, b = _written(self.a, self.b, indices, sides.a, sides.b)
        return _Columns(a, b, owners, scales)


@jax.jit
def _moved(a, b, indices):
    """The columns `indices`, zeros for those that there are not."""
    return tuple(jnp.take(side, indices, axis=axis, mode="fill", fill_value=0) for side, axis in ((a, 0), (b, 1)))


@jax.jit
def _written(a, b, indices, new_a, new_b):
    return a.at[indices].set(new_a), b.at[:, indices].set(new_b)


class AdapterBank:
    """The adapters over one base, by number; it does not change: its methods return another.

    Attributes:
      ranks: the largest sum of the ranks of one linear's adapters.
    """

    def __init__(self, base: Decoder, columns: Mapping[str, _Columns] | None = None):
        self._base, self._columns = base, dict(columns or {})
        self.ranks = max((columns.taken for columns in self._columns.values()), default=0)

    def __bool__(self) -> bool:
        return bool(self._columns)

    def over(self, base: Decoder) -> AdapterBank:
        """The same adapters over other weights."""
        return AdapterBank(base, self._columns)

    def ranks_with(self, adapter: Adapter) -> int:
        """`ranks` with one more adapter."""
        sums = (len(sides.a) + self._taken(name) for name, sides in adapter.sides.items())
        return max(self.ranks, *sums)

    @property
    def bytes(self) -> int:
        """On the device."""
        return sum(columns.a.nbytes + columns.b.nbytes for columns in self._columns.values())

    def bytes_of(self, ranks: int) -> int:
        """Device bytes of adapters of all linears whose ranks are `ranks` in sum."""
        sizes = ((sum(linear.sizes), _dtype(self._base, linear).itemsize) for _, linear in linears(self._base))
        return sum(size * itemsize * _width(ranks) for size, itemsize in sizes)

    def with_adapter(self, number: int, adapter: Adapter) -> AdapterBank:
        """With one more. number: above 0, by which rows ask for it."""
        columns = dict(self._columns)
        modules = dict(linears(self._base))
        for name, sides in adapter.sides.items():
            width = _width(self._taken(name) + len(sides.a))
            if (present := columns.get(name)) is None:
                (out_size, in_size), dtype = modules[name].sizes, _dtype(self._base, modules[name])
                a, b = jnp.zeros((width, in_size), dtype), jnp.zeros((out_size, width), dtype)
                present = _Columns(a, b, np.full(width, _FREE, np.int32), np.zeros(width, np.float32))
            present = present if width == len(present.owners) else present.resized(width)
            columns[name] = present.filled(number, sides)
        jax.block_until_ready([(entry.a, entry.b) for entry in columns.values()])  # memory may be short
        return AdapterBank(self._base, columns)

    def without(self, number: int) -> AdapterBank:
        columns = {}
        for name, present in self._columns.items():
            owners = np.where(present.owners == number, _FREE, present.owners)
            present = present._replace(owners=owners, scales=np.where(owners == _FREE, 0, present.scales))
            if present.taken:
                width = _width(present.taken)
                columns[name] = present if width == len(owners) else present.resized(width)
        return AdapterBank(self._base, columns)

    def model(self) -> Decoder:
        """The base with the adapters as GatedLora; the base itself without any."""
        if not self._columns:
            return self._base
        model = copy_structure(self._base)
        for name, linear in linears(model):
            if (columns := self._columns.get(name)) is not None:
                linear.lora = GatedLora(
                    columns.a, columns.b, jnp.asarray(columns.owners), jnp.asarray(columns.scales, jnp.float32)
                )
        return model

    def _taken(self, name: str) -> int:
        columns = self._columns.get(name)
        return 0 if columns is None else columns.taken


def _width(ranks: int) -> int:
    """The columns of a linear whose adapters have as many ranks."""
    return max(_FEWEST_COLUMNS, 1 << (ranks - 1).bit_length())


def choose_adapters(model: Decoder, adapters: jax.Array | None) -> None:
    """Sets in place whose columns each token takes.

    adapters: int32[B, T], the number of each token's adapter, 0: none; None: no token has one. The tower takes the
      first's.
    """
    of_tower = set() if model.vision is None else {id(linear) for _, linear in model.vision.linears()}
    for _, linear in linears(model):
        if isinstance(lora := linear.lora, GatedLora):
            if adapters is None:
                linear.lora = nnx.data(None)
            else:
                lora.choose(adapters[:1, :1] if id(linear) in of_tower else adapters)
