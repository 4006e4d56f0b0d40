"""Tables of embeddings that a plan may have on the host, which then looks up the rows of each batch: the token
embedding, unless the head is tied to it, and per-layer embeddings (Gemma 4 E2B and E4B). Results are bitwise equal.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.planning.devices import Device

# {name of a table (Decoder.tables): its Hugging Face name}
TABLES = {"embedding": "model.embed_tokens.weight", "per_layer": "model.embed_tokens_per_layer.weight"}
# Bytes/s at which one thread of the host looks up rows: a low estimate, so that a lookup which takes longer than the
# step before it is not forecast to be hidden.
_LOOKUP_RATE = 2e9


def rows_seconds(rows_bytes: float, devices: int, device: Device) -> float:
    """Seconds in which the host looks up a step's rows and copies them to each device, while devices compute the step
    before: a step takes at least this long. rows_bytes: on one device, of two steps.
    """
    step = rows_bytes / 2
    return step * devices / _LOOKUP_RATE + step / (device.link or device.copy)


def may_be_on_host(config: TrainConfig, samples: bool) -> bool:
    """Whether a run may have tables on the host: it trains an adapter, so they are frozen, and does not generate, which
    needs each new token's row at once.
    """
    return config.adapter is not None and not samples and not config.evaluation.asking


def left_on_host(config: TrainConfig, tied: bool) -> list[str]:
    """Hugging Face names of the tensors that loading leaves in host memory until the plan is known: a table that left
    the device would leave a gap between other weights. tied: whether the loaded model's head is its embedding.
    """
    objective = objective_of(config)
    if config.adapter is None or not may_be_on_host(config, objective.samples):
        return []
    stays = tied and objective.head.is_text
    stays = stays or "embed_tokens" in (config.adapter.modules_to_save or ())
    return [tensor for name, tensor in TABLES.items() if name != "embedding" or not stays]


@dataclasses.dataclass(frozen=True)
class Table:
    """A model's tables that may be on the host; 0 bytes: none."""

    bytes: float = 0.0  # of the tables that may be on the host; 0: there are none
    row_bytes: float = 0.0  # of a row of each of them
    names: tuple[str, ...] = ()  # of the tables, as in Decoder.tables
    trains: bool = False  # whether there is a table of per-layer embeddings, and it trains


NO_TABLE = Table()  # of a model whose tables must stay on the device


def table_of(model: Decoder, config: TrainConfig, shards: int, samples: bool) -> Table:
    """The tables of `model` that may be on the host: frozen, undivided (`shards` is 1), allowed by `may_be_on_host`,
    and not given on a device already, where the caller keeps them.
    """
    values = {name: table.get_value() for name, table in model.tables.items() if not isinstance(table, nnx.Param)}
    trains = "per_layer" in model.tables and "per_layer" not in values
    if shards > 1 or not may_be_on_host(config, samples):
        return Table(trains=trains)
    values = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
    rows = {name: float(value.shape[1] * value.dtype.itemsize) for name, value in values.items()}
    return Table(sum(values[name].shape[0] * row for name, row in rows.items()), sum(rows.values()), (*rows,), trains)
