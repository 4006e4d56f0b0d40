"""Forecasts of small steps beside what an H200 measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shapes import SHAPES
from jaxtune.models.registry import config_from_hf
from jaxtune.train.config import AdapterConfig, DataConfig, ModelConfig, TrainConfig
from jaxtune.train.planning import search
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import budget, find_device, limit
from jaxtune.train.planning.recipe_plans import planned_for
from jaxtune.train.planning.step_spec import StepSpec

FILE = Path(__file__).parents[2] / "benchmarks/results/small_steps_once.json"
RECORDED = json.loads(FILE.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", RECORDED)
def test_forecasts_are_within_an_eighth_of_the_measured_speed(case):
    """A plan keeps all residuals there, as it was measured."""
    shape, _, rows = case.partition(", ")
    count, length = (int(number) for number in rows.split(" x "))
    config = TrainConfig(
        model=ModelConfig(path=shape),
        data=DataConfig(train="random tokens", length=length),
        adapter=AdapterConfig(r=16, target_modules="all-linear"),
        steps=1,
        precision="bf16",
        rows_per_step=count,
        micro_batches=1,
    )
    with planned_for("H200"):
        spec = StepSpec.of(config)
        costs = step_cost(abstract_model(config_from_hf(SHAPES[shape]), spec.model), spec)
        device = find_device("H200")
        room = search.Room(budget(config.memory, device), limit(config.memory, device))
        predicted, _ = search.next_plan(costs, spec, device, room)
    assert predicted.tokens_per_second == pytest.approx(RECORDED[case]["tokens_per_second"], rel=0.12)
