"""Forecasts of the planner beside what benchmarks/results measured on an H200, for every step whose case and plan are
known: forecast over measured, of speed and peak memory. In ten minutes of a core, without a GPU:

    python -m benchmarks.forecasts [--only TEXT] [--output FILE.json]

Older records are of slower kernels than forecasts are for. Plans of residuals that are no more are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from benchmarks.cases import STEPS
from benchmarks.random_model import in_blocks
from benchmarks.record import write
from benchmarks.shapes import SHAPES
from benchmarks.train import step
from jaxtune.models.decoder import Decoder
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas.fitted import planned_for
from jaxtune.train.config import AdapterConfig, DataConfig, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from jaxtune.train.planning.choice import CHUNK_LOGITS, choose
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.movables import MOVABLES
from jaxtune.train.planning.step_spec import StepSpec

RESULTS = Path(__file__).parent / "results"
_CARD, _HOST_GB = "NVIDIA H200", 2000.0


class Measured(NamedTuple):
    name: str  # file and keys of the record
    commit: str
    tokens_per_second: float
    peak_gb: float
    plan: str
    micro_batches: int
    places: frozenset[str]  # words of movables that are not counted in the plan's text
    predicted_gb: float  # of the peak, by the planner of then
    config: TrainConfig
    hf: dict
    blocks: bool  # whether scales are by blocks, as official checkpoints of FP8 have them
    document_tokens: float | None  # BatchSource.document_tokens; None: of whole rows, or of a file that is not here


def _nodes(node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """(keys, dict) of all dicts of a file that have both a forecast and a measured speed."""
    if isinstance(node, dict):
        if node.get("predicted_tokens_per_second") and node.get("tokens_per_second"):
            yield path, node
        for key, value in node.items():
            yield from _nodes(value, (*path, key))
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value, path)


def _options(path: tuple[str, ...], node: dict):
    """Arguments of step.py of a record: those of its case, or what it says itself; None: neither."""
    case = next((word for key in reversed(path) for word in key.split(", ") if word in STEPS), None)
    if case is not None:
        words = shlex.split(STEPS[case].arguments.replace("{folder}", "folder"))
        return step.arguments().parse_args(words)
    if node.get("shape") not in SHAPES or node.get("rows") is None or node.get("length") is None:
        return None
    options = step.arguments().parse_args(["--shape", node["shape"], "--rows", str(node["rows"])])
    for name in ("length", "load_in", "compute", "qat", "scales", "documents"):
        setattr(options, name, node.get(name) or getattr(options, name))
    options.rank, options.optim = node.get("adapter_rank", 16), node.get("optimizer", "adamw")
    options.objective = node.get("objective") or "sft"
    if node.get("precision"):
        options.precision = ",".join(f"{pattern}={word}" for pattern, word in node["precision"].items())
    return options


def _streamed(node: dict) -> tuple[TrainConfig, dict, str, int]:
    """(config, shape, plan, micro-batches) of a record of benchmarks.streamed, whose embeddings are on the host."""
    changes = dict(change.split("=", 1) for change in node["changes"])
    hf = SHAPES[node["shape"]]
    experts = "adapter.target_parameters" in changes
    pattern = changes.get("adapter.rank_pattern", "{}").strip("{}")
    config = TrainConfig(
        model=ModelConfig(path="shape", load_in=None if node["load_in"] == "bf16" else node["load_in"]),
        data=DataConfig(train="rows", length=node["length"]),
        adapter=AdapterConfig(
            r=int(changes.get("adapter.r", 16)),
            target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj") if experts else None,
            rank_pattern={k.strip(): int(v) for k, v in (pair.split(":") for pair in pattern.split(",") if pair)},
        ),
        rows_per_step=node["rows_per_step"],
        steps=10,
        optim=OptimConfig(name=changes.get("optim.name", "adamw")),
    )
    text, micro = node["plans"][-1].rsplit(";", 1)
    count = micro.split()[0]
    return config, hf, text, 1 if count == "one" else int(count)


def measured() -> Iterator[Measured]:
    for file in sorted(RESULTS.rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for path, node in _nodes(content):
            if "H200" not in str(node.get("device") or content.get("device") or "H200"):
                continue
            name = " ".join([str(file.relative_to(RESULTS).with_suffix("")), *path])
            if node.get("benchmark") == "streamed":
                (config, hf, plan, micro), blocks, mean = _streamed(node), False, node["document_tokens"]
                name = f"{name} {node['shape']}"
            else:
                options = _options(path, node)
                if (
                    options is None
                    or "residuals" not in node
                    or node.get("mesh_fsdp", 1) * node.get("mesh_data", 1) > 1
                ):
                    continue
                config, hf, blocks = step.train_config(options), SHAPES[options.shape], options.scales == "blocks"
                mean = (
                    None
                    if options.documents not in ("packed", "pairs")
                    else step.dataset_of(options, 2).rows.document_tokens
                )
                plan, micro = node["residuals"], node.get("micro_batches") or options.micro_batches or 1
            places = frozenset(word for word in MOVABLES if node.get(word) in ("host", "device"))
            places |= {"embeddings"} if node.get("benchmark") == "streamed" else set()
            if (fewer := re.search(r"with (\d+) of its \d+ layers", name)) is not None:
                hf = hf | {"num_hidden_layers": int(fewer[1])}
            yield Measured(
                name,
                str(node.get("commit", ""))[:8],
                node["tokens_per_second"],
                node.get("peak_memory_gb") or 0.0,
                plan,
                micro,
                places,
                node.get("predicted_peak_gb") or 0.0,
                config,
                hf,
                blocks,
                mean,
            )


def _known(plan: str, names: set[str]) -> str | None:
    """The plan without residuals that are not there any more, where another says of them what they said; else None."""

    def of_layers(section: str) -> str | None:
        layers, colon, items = section.rpartition(":")
        words = [item.strip() for item in items.split(",")]
        unknown = [word for word in words if "=" in word and word.split("=")[0] not in names]
        said = {word.split("=")[0] for word in words}
        beside = {"gate_up": {"gate", "up", "keep", "recompute"}, "gate": {"gate_up"}, "up": {"gate_up"}}
        if any(not said & beside.get(word.split("=")[0], set()) for word in unknown):
            return None
        return f"{layers}{colon} {', '.join(word for word in words if word not in unknown) or 'keep'}"

    sections = [
        section if re.fullmatch(r"\s*\w+=\d+\s*", section) else of_layers(section) for section in plan.split(";")
    ]
    return None if None in sections else ";".join(section for section in sections if section)


def _spec(config: TrainConfig, record: Measured) -> StepSpec:
    return dataclasses.replace(StepSpec.of(config), document_tokens=record.document_tokens)


def forecast_of(record: Measured, models: dict[str, Decoder]) -> Forecast | None:
    """None: its plan has what is not there any more."""
    config = record.config
    key = repr(
        (sorted(record.hf.items(), key=str), record.blocks, config.model, config.adapter, config.precision, config.qat)
    )
    spec = _spec(config, record)
    if key not in models:
        models.clear()
        model = abstract_model(config_from_hf(record.hf), spec.model)
        models[key] = nnx.eval_shape(in_blocks, model) if record.blocks else model
    costs = step_cost(models[key], spec)
    plan = _known(record.plan, {residual.name for residual in costs.layers.all_residuals})
    if plan is None:
        return None
    config = dataclasses.replace(config, memory=MemoryConfig(plan=plan), micro_batches=record.micro_batches)
    spec = _spec(config, record)
    costs = step_cost(models[key], spec)
    for word, movable in costs.movables.items():
        if not movable.counted and movable.able:
            level = int(word in record.places)
            costs = costs.limited({word: (level, level)})
    device, chunks = find_device(_CARD, host_gb=_HOST_GB), CHUNK_LOGITS
    plans = [choose(costs, spec, device, None, (chunk,)) for chunk in chunks]
    # Records do not say how many tokens' logits there are at a time; their forecasts of memory do.
    return min(plans, key=lambda best: abs(best.peak_bytes / 1e9 - record.predicted_gb))


def row_of(record: Measured, best: Forecast) -> dict[str, object]:
    """speed, memory: forecast over measured."""
    return {
        "name": record.name,
        "commit": record.commit,
        "experts": config_from_hf(record.hf).moe is not None,
        "tokens_per_second": record.tokens_per_second,
        "speed": round(best.tokens_per_second / record.tokens_per_second, 4),
        "peak_gb": record.peak_gb,
        "memory": round(best.peak_bytes / 1e9 / record.peak_gb, 4) if record.peak_gb else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forecasts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="records of which the name holds this")
    parser.add_argument("--output", help="file for the table as JSON")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    models: dict[str, Decoder] = {}
    with planned_for(_CARD):
        for record in measured():
            if options.only not in record.name:
                continue
            best = forecast_of(record, models)
            if best is None:
                print(f"left out: {record.name}", flush=True)
                continue
            rows.append(row := row_of(record, best))
            print(f"{row['speed']:.3f} {row['memory'] or 0:.3f} {record.commit} {record.name}", flush=True)
    if options.output:
        write(options.output, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
