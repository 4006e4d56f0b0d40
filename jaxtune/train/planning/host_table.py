"""Where the planner may put the table of per-layer embeddings (Gemma 4 E2B and E4B): on the device, or on the host,
which then looks up the rows of each batch (Engine.place). The plan has it on the host if that is faster, or if no other
plan fits; results are the same in every bit. `table_of` gives the facts about a model's table (`Table`),
`may_be_on_host` says whether a run allows it, and `rows_seconds` forecasts the look-up."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.planning.devices import Device

TABLE = "model.embed_tokens_per_layer.weight"  # its Hugging Face name
# Bytes/s at which one thread of the host looks up rows: a low estimate, so that a lookup which takes longer than the
# step before it is not forecast to be hidden.
_LOOKUP_RATE = 2e9


def rows_seconds(rows_bytes: float, devices: int, device: Device) -> float:
    """Seconds in which the host looks up the rows of a step's tokens in the table of per-layer embeddings, for all
    `devices` of the run, and copies them to each. It does so while the devices compute the step before, so a step takes
    at least this long; a forecast takes the larger of both times.

    rows_bytes: StepCost.table_rows_bytes, of the rows on one device, which has those of two steps (the one that it
    computes and the next); each step looks up half of them. 0 with the table on the device.
    The result is the time of looking up the rows of all devices, at _LOOKUP_RATE, and of copying those of one device
    over its link (at the device's copy rate if it has none), as the links work at the same time."""
    step = rows_bytes / 2
    return step * devices / _LOOKUP_RATE + step / (device.link or device.copy)


def may_be_on_host(config: TrainConfig) -> bool:
    """Whether a run of `config` may have the model's table of per-layer embeddings in host memory: the run trains an
    adapter, so that the table is frozen, and the model generates nothing during the run, for which the device would
    need the row of each new token at once. The planner (`table_of`) and the loading of weights ask it."""
    return config.adapter is not None and not config.objective.samples and not config.evaluation.asking


@dataclasses.dataclass(frozen=True)
class Table:
    """The facts about a model's table of per-layer embeddings that the planner needs, as `table_of` finds them:
    StepCost.table. With 0 in `bytes`, no plan has the table on the host."""

    bytes: float = 0.0  # of the table, if it may be on the host; 0: it may not, or there is none
    row_bytes: float = 0.0  # of one of its rows, if it may be on the host
    trains: bool = False  # whether there is such a table, and it trains


NO_TABLE = Table()  # of a model that has none, or whose table must stay on the device


def table_of(model: Decoder, config: TrainConfig, parts: int) -> Table:
    """The planner's facts about the table of per-layer embeddings of `model` in a run of `config`: a Table with its
    sizes if it may be on the host, otherwise with zeros (and trains=True if it trains). It may not if it trains, if
    `parts`, the number of devices over which weights are divided, is more than 1, if the config does not allow it
    (may_be_on_host), or if the model was given with the table on a device, where the caller keeps it. step_cost calls
    it; where the table then is, the choice of a plan decides."""
    table = None if model.per_layer is None else model.per_layer.weight
    if table is None or isinstance(table, nnx.Param):
        return Table(trains=table is not None)
    value = table.get_value()
    if parts > 1 or not may_be_on_host(config) or isinstance(value, jax.Array):
        return NO_TABLE
    row = float(value.shape[1] * value.dtype.itemsize)
    return Table(value.shape[0] * row, row)
