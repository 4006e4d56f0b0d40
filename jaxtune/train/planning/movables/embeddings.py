"""Tables of embeddings on the host, which then looks up the rows of each batch: the token embedding, unless the head is
tied to it, and per-layer embeddings (Gemma 4 E2B and E4B). Results are bitwise equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import host_table, partition
from jaxtune.train.config import AdapterConfig
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.movables.movable import Movable, Outcome, Seconds
from jaxtune.train.planning.parts import FROZEN, StepParts
from jaxtune.train.planning.step_spec import StepSpec

# {name of a table (Decoder.tables): its Hugging Face name}
TABLES = {"embedding": "model.embed_tokens.weight", "per_layer": "model.embed_tokens_per_layer.weight"}
TABLE_ROWS = "rows of embeddings on the host"  # a name of bytes in StepParts.fixed
# Bytes/s at which one thread of the host looks up rows: a low estimate, so that a lookup which takes longer than the
# step before it is not forecast to be hidden.
_LOOKUP_RATE = 2e9


@dataclasses.dataclass(frozen=True)
class Embeddings(Movable):
    """Frozen, undivided tables of a run that trains an adapter and does not generate, which needs each new token's row
    at once. Not those that the caller has on a device already, where they stay.
    """

    word = "embeddings"
    side = "host"
    worth = 1.002  # host memory is all that it takes

    bytes: float = 0.0  # of the tables; 0: there are none
    row_bytes: float = 0.0  # of a row of each of them
    names: tuple[str, ...] = ()  # as in Decoder.tables
    trains: bool = False  # whether there is a table of per-layer embeddings, and it trains

    @property
    def able(self) -> bool:
        return self.bytes > 0

    @classmethod
    def of(cls, model: Decoder, states: optax.OptState, spec: StepSpec) -> Embeddings:
        tables = model.tables
        values = {name: table.get_value() for name, table in tables.items() if not isinstance(table, nnx.Param)}
        trains = "per_layer" in tables and "per_layer" not in values
        if spec.mesh_shape.shard_count > 1 or not spec.model.adapts or spec.generates:
            return cls(trains=trains)
        values = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
        rows = {name: float(value.shape[1] * value.dtype.itemsize) for name, value in values.items()}
        return cls(sum(values[name].shape[0] * row for name, row in rows.items()), sum(rows.values()), (*rows,), trains)

    def _rows_bytes(self, costs: StepParts) -> float:
        """Device bytes of the rows of two steps: this step's, and the next one's, which are copied meanwhile."""
        return 2 * costs.shape.tokens(1) * self.row_bytes

    def levels(self, costs: StepParts, device: Device) -> Sequence[int]:
        return (1,) if self._rows_bytes(costs) < self.bytes else ()

    def placed[P: StepParts](self, costs: P, level: int) -> P:
        rows, moved = self._rows_bytes(costs), costs.moved
        fixed = {**costs.fixed, FROZEN: costs.fixed[FROZEN] - self.bytes, TABLE_ROWS: rows}
        moved = dataclasses.replace(
            moved, pageable_bytes=moved.pageable_bytes + self.bytes, batch_bytes=moved.batch_bytes + rows
        )
        return dataclasses.replace(costs, fixed=fixed, moved=moved)

    def seconds(self, costs: StepParts, device: Device) -> Seconds:
        """The host looks up a step's rows and copies them to each device, while devices compute the step before."""
        step = self._rows_bytes(costs) / 2 if costs.level(self.word) else 0.0
        return Seconds(beside=step * costs.shape.devices / _LOOKUP_RATE + step / (device.link or device.copy))

    def lines(self, costs: StepParts, outcome: Outcome, device: Device) -> list[str]:
        if costs.level(self.word):
            rows = costs.shape.rows * costs.shape.length * self.row_bytes
            return [
                f"  {' and '.join(host_table.TITLES[name] for name in self.names)} on the host "
                f"({self.bytes / 1e9:.2f} GB); {'its' if len(self.names) == 1 else 'their'} rows of each batch are "
                f"copied to the device beside its work ({rows / 1e9:.2f} GB a step)"
            ]
        return ["  table of per-layer embeddings on the device: it is trained"] if self.trains else []

    @classmethod
    def left_on_host(cls, adapter: AdapterConfig | None, generates: bool, tied: bool) -> Sequence[str]:
        if adapter is None or generates:
            return ()
        stays = tied or "embed_tokens" in (adapter.modules_to_save or ())
        return [tensor for name, tensor in TABLES.items() if name != "embedding" or not stays]

    @classmethod
    def moved(cls, model: Decoder, frozen: nnx.State, level: int, where: NamedSharding) -> nnx.State:
        tables = {
            name: partition.on_host(table) if level else partition.put(table, where)
            for name, table in host_table.tables_of(frozen, model.tables).items()
            if isinstance(table, np.ndarray) != bool(level)
        }
        return host_table.with_tables(frozen, tables) if tables else frozen

    @classmethod
    def looked_up(cls, model: Decoder, frozen: nnx.State, level: int) -> Mapping[str, host_table.Array]:
        return host_table.tables_of(frozen, model.tables) if level else {}

    @classmethod
    def declared(cls, model: Decoder, frozen: nnx.State, level: int) -> nnx.State:
        return host_table.without_rows(frozen, cls.looked_up(model, frozen, level))
