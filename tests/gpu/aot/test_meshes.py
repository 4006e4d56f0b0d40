"""Steps over eight H200s that are not there: what they exchange, under what, and what they take beside the forecast."""

from __future__ import annotations

import pytest

from jaxtune.models.stack.residual_plan import KEEP, LayerPlan, ResidualPlan
from jaxtune.train.config import MeshConfig
from jaxtune.train.planning.plan import StepPlan
from tests.golden import programs

LAYERS = 3
EXPERTS, PACKED_BASE = "Qwen3-30B-A3B, bf16", "8B, NF4 in 24 GB"


def collectives_of_layers(program) -> dict[str, list[int]]:
    """{kind: large kernels that run under each}, of those of several arrays."""
    found: dict[str, list[int]] = {}
    for kind, arrays, under in programs.collectives(program.as_text()):
        if arrays > 2:
            found.setdefault(kind, []).append(under)
    return found


@pytest.mark.full
@pytest.mark.parametrize("resident", [0, LAYERS])
def test_adapters_on_experts_over_eight_devices(resident):
    """A layer's experts, 1.2 GB, are gathered under another layer, both ways; those that are whole on each device are
    not, nor embedding and head. Adapters are whole: half of the sums of their gradients or more run under what computes
    the next ones, and their update exchanges nothing. The planner's bytes are the compiler's."""
    plan = StepPlan(ResidualPlan.uniform(KEEP, LAYERS), 1, 1766)
    compiled, (needed, forecast) = programs.compiled_with(EXPERTS, MeshConfig(fsdp=8), LAYERS, plan, resident)
    found = collectives_of_layers(compiled["accumulate"])
    if resident:
        assert "all-gather" not in found and "reduce-scatter" not in found
    else:  # but the first layer's, which nothing runs before: two more for the forward, two for the backward
        first, *others = found["all-gather"]
        assert first == 0 and len(others) == 2 * (LAYERS - 1)
        # The backward's first ends before the last layer's attention, where its experts' gradients are added up: at the
        # kernel of a norm's gradient, after two large products. The others have a layer: seven kernels, as an adapter's
        # two thin products of a gradient are one, the products with its A are those of the forward, and the gradient of
        # the down projection's A is computed with the activation's.
        assert sum(under >= 7 for under in others) == len(others) - 1 and min(others) >= 2
    sums = [under for kind, _, under in programs.collectives(compiled["accumulate"].as_text()) if kind == "all-reduce"]
    assert sums and sum(under > 5 for under in sums) >= len(sums) / 2
    assert not programs.collectives(compiled["update"].as_text())
    assert 0.97 * needed <= forecast <= 1.07 * needed


@pytest.mark.full
def test_host_copies_beside_gathers():
    """Four-bit layers that offload, on data 2 x fsdp 4: gathered as packed bytes under another layer, and what goes to
    the host and back has its window of products as on one device."""
    plan = StepPlan(ResidualPlan.uniform(LayerPlan(gate="offload", up="offload"), LAYERS), 1, 523)
    (compiled, _), (alone, _) = (
        programs.compiled_with(PACKED_BASE, mesh, LAYERS, plan) for mesh in (MeshConfig(2, 4), MeshConfig())
    )
    under = collectives_of_layers(compiled["accumulate"])["all-gather"]
    assert sum(count >= 5 for count in under) == 2 * (LAYERS - 1)
    got, want = (sorted(programs.copies(each["accumulate"].as_text())) for each in (compiled, alone))
    assert [copy[:2] for copy in got] == [copy[:2] for copy in want] and len(want) == 4 * (LAYERS - 1)
    assert sum(copy[2] for copy in got) >= 0.95 * sum(copy[2] for copy in want)
    assert min(copy[2] for copy in got) >= min(copy[2] for copy in want)
