"""Where the planner may put tables of embeddings of which a step reads the rows of its tokens and nothing else: the
token embedding, unless the head is tied to it, and the table of per-layer embeddings (Gemma 4 E2B and E4B). They are on
the device, or on the host, which then looks up the rows of each batch (Engine.place). The plan has all of them on the
host if that is faster, or if no other plan fits; results are the same in every bit. `table_of` gives the facts about a
model's tables (`Table`), `may_be_on_host` says whether a run allows it, `left_on_host` which tensors loading leaves
there, and `rows_seconds` forecasts the look-up."""

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
    """Seconds in which the host looks up the rows of a step's tokens in the tables of embeddings, for all `devices` of
    the run, and copies them to each. It does so while the devices compute the step before, so a step takes at least
    this long; a forecast takes the larger of both times.

    rows_bytes: StepCost.table_rows_bytes, of the rows on one device, which has those of two steps (the one that it
    computes and the next); each step looks up half of them. 0 with the tables on the device.
    The result is the time of looking up the rows of all devices, at _LOOKUP_RATE, and of copying those of one device
    over its link (at the device's copy rate if it has none), as the links work at the same time."""
    step = rows_bytes / 2
    return step * devices / _LOOKUP_RATE + step / (device.link or device.copy)


def may_be_on_host(config: TrainConfig) -> bool:
    """Whether a run of `config` may have the model's tables of embeddings in host memory: the run trains an adapter, so
    that they are frozen, and the model generates nothing during the run, for which the device would need the row of
    each new token at once. The planner (`table_of`) and the loading of weights (`left_on_host`) ask it."""
    return config.adapter is not None and not config.objective.samples and not config.evaluation.asking


def left_on_host(config: TrainConfig, tied: bool) -> list[str]:
    """Hugging Face names of the tensors that loading on one device leaves in host memory for a run of `config`, which
    moves them to where its plan has them: of the tables that a plan may have there. A table that the plan puts on the
    device comes last, and one that the plan moved to the host would leave a gap between the other weights. tied:
    whether the head of the loaded model is its embedding; an objective's own head is tied to none."""
    if config.adapter is None or not may_be_on_host(config):
        return []
    stays = tied and objective_of(config).head.is_text
    stays = stays or "embed_tokens" in (config.adapter.modules_to_save or ())
    return [tensor for name, tensor in TABLES.items() if name != "embedding" or not stays]


@dataclasses.dataclass(frozen=True)
class Table:
    """The facts about a model's tables of embeddings that the planner needs, as `table_of` finds them: StepCost.table.
    With 0 in `bytes`, no plan has a table on the host."""

    bytes: float = 0.0  # of the tables that may be on the host; 0: there are none
    row_bytes: float = 0.0  # of a row of each of them
    names: tuple[str, ...] = ()  # of the tables, as in Decoder.tables
    trains: bool = False  # whether there is a table of per-layer embeddings, and it trains


NO_TABLE = Table()  # of a model whose tables must stay on the device


def table_of(model: Decoder, config: TrainConfig, parts: int) -> Table:
    """The planner's facts about the tables of embeddings of `model` in a run of `config`: a Table of those that may be
    on the host, with zeros if there are none (and trains=True if per-layer embeddings train). A table may not be there
    if it trains, if `parts`, the number of devices over which weights are divided, is more than 1, if the config does
    not allow it (may_be_on_host), or if the model was given with the table on a device, where the caller keeps it.
    step_cost calls it; where the tables then are, the choice of a plan decides."""
    values = {name: table.get_value() for name, table in model.tables.items() if not isinstance(table, nnx.Param)}
    trains = "per_layer" in model.tables and "per_layer" not in values
    if parts > 1 or not may_be_on_host(config):
        return Table(trains=trains)
    values = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
    rows = {name: float(value.shape[1] * value.dtype.itemsize) for name, value in values.items()}
    return Table(sum(values[name].shape[0] * row for name, row in rows.items()), sum(rows.values()), (*rows,), trains)
