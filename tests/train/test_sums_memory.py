"""What the planner takes to lie in the memory of gradient sums before gradients are written there."""

from __future__ import annotations

import dataclasses

import pytest
from step_costs import costs_of

from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, ResidualPlan
from jaxtune.train.config import AdapterConfig, DataConfig, ModelConfig, OptimConfig, TrainConfig
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.sums_memory import NO_SUMS, SumsMemory

SHAPE = dataclasses.replace(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), vocab_size=32000)


def test_a_value_lies_where_it_fits_and_the_largest_come_first():
    sums = SumsMemory(layers=((10.0, 4.0), (10.0, 4.0)), around=(50.0,))
    assert sums.bytes([(8.0, 2.0), (4.0, 1.0), (11.0, 2.0)], 2, backward=False) == 11 + 8 + 8 + 4
    assert sums.bytes([(8.0, 2.0), (4.0, 1.0), (11.0, 2.0)], 1, backward=True) == 8 + 4  # the head's gradient is there
    assert sums.bytes([(60.0, 1.0), (8.0, 0.5)], 2, backward=False) == 4
    assert sums.copies(1, 14.0) == [(5.0, 1.0), (2.0, 1.0)]
    assert NO_SUMS.bytes([(1.0, 1.0)], 2, backward=False) == 0


def peaks(adapter=None, **settings) -> dict[int, float]:
    """{number of micro-batches: bytes of gradient sums in the forecast}, of the same rows in each."""
    found = {}
    for micro in (1, 2):
        config = TrainConfig(
            model=ModelConfig(path="a shape"),
            data=DataConfig(train="rows"),
            adapter=adapter,
            rows_per_step=8,
            micro_batches=micro,
            steps=1,
            **settings,
        )
        parts = costs_of(SHAPE, config)
        plan = StepPlan(ResidualPlan.uniform(KEEP, SHAPE.num_layers), micro, 1024)
        one = forecast(parts, plan, find_device("NVIDIA H200", 140e9))
        found[micro] = one.parts["gradient sums"] / parts.fixed["gradient sums"]
    return found


@pytest.mark.full
def test_sums_are_counted_whole_where_they_are_read():
    full = peaks(optim=OptimConfig(weights="fp32"))
    assert full[1] < 0.5 and full[2] == 1
    assert peaks(adapter=AdapterConfig()) == {1: 1, 2: 1}
