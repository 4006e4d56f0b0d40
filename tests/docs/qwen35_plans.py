"""The table of plans in docs/qwen35.md, and the plans themselves, beside this file: what the planner says of each card
that has all frozen weights.

    PYTHONPATH=tests/models .venv/bin/python -m tests.docs.qwen35_plans [ROW ...]

chooses those of these rows anew, of all where none is named, which takes minutes, and writes both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

from step_costs import costs_of

from jaxtune.models.files.model_folder import find_config
from jaxtune.models.registry import config_from_hf
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.file import load_config
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import budget, find_device
from jaxtune.train.planning.forecasts import Forecast, forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec

FILE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "qwen35.md"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
CARDS = {
    "16 GB": "RTX 4060 Ti 16GB",
    "24 GB": "RTX 4090",
    "48 GB": "A40",
    "80 GB": "A100",
    "141 GB": "H200",
}
# Of each row the recipe, and what is set beside it.
ROWS: dict[str, tuple[str, list[str]]] = {
    "4B": ("qwen3.5-4b", []),
    "9B": ("qwen3.5-9b", []),
    "27B": ("qwen3.5-27b", []),
    "35B-A3B": ("qwen3.5-35b-a3b", []),
    "35B-A3B, `adapter.target_parameters=null`": ("qwen3.5-35b-a3b", ["adapter.target_parameters=null"]),
}
FORMATS = {"bf16": None, "NF4": "nf4"}


@functools.cache
def step_of(row: str, weights: str) -> tuple[TrainConfig, StepCost]:
    """The config of a row over frozen weights in this format, and what its step consists of."""
    recipe, changes = ROWS[row]
    config = load_config(recipe, changes, rows_needed=False)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, load_in=FORMATS[weights]))
    shape = config_from_hf(find_config(config.model.path or ""))
    return config, costs_of(shape, config).without_last_resorts()


def chosen(row: str, card: str) -> dict:
    """The faster of the formats' best plans, bf16's where both are as fast but for a hundredth; that which needs least
    where none fits."""
    device, found = find_device(CARDS[card]), {}
    for weights in FORMATS:
        config, parts = step_of(row, weights)
        try:
            best = choose(parts, StepSpec.of(config), device, budget(config.memory, device))
            found[weights] = (True, best.tokens_per_second * (1.01 if weights == "bf16" else 1.0), best)
        except PlanError as error:
            found[weights] = (False, -error.smallest.peak_bytes, error.smallest)
    weights = max(found, key=lambda name: found[name][:2])
    fits, _, best = found[weights]
    return {"weights": weights, "fits": fits, "plan": best.plan.to_record()} | figures(best)


def forecast_of(row: str, card: str, record: dict) -> tuple[Forecast, float]:
    """What the planner says of a recorded plan today, and the bytes that there are."""
    config, parts = step_of(row, record["weights"])
    plan = StepPlan.from_record(record["plan"], parts.shape.num_layers, parts.layers.all_residuals)
    device = find_device(CARDS[card])
    limit = budget(config.memory, device)
    assert limit is not None
    return forecast(parts, plan, device), limit


def figures(best: Forecast) -> dict[str, float]:
    return {"tokens_per_second": round(best.tokens_per_second, 1), "peak_gb": round(best.peak_bytes / 1e9, 3)}


def table(plans: dict) -> str:
    lines = [f"| model | {' | '.join(CARDS)} |", "|---" * (1 + len(CARDS)) + "|"]
    for row in ROWS:
        cells = []
        for card in CARDS:
            found = plans[row][card]
            speed = f"{found['tokens_per_second']:,.0f}, {found['weights']}"
            cells.append(speed if found["fits"] else f"no: {found['peak_gb']:.1f} GB in {found['weights']}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with(text: str, plans: dict) -> str:
    """The page with the table of these plans."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(plans)}\n{END}{rest.split(END)[1]}"


def main(rows: list[str]) -> None:
    plans = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for row in rows or ROWS:
        plans[row] = {card: chosen(row, card) for card in CARDS}
        FILE.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
        print(row, {card: found["tokens_per_second"] for card, found in plans[row].items()}, flush=True)
    if plans.keys() >= ROWS.keys():
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), plans), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
