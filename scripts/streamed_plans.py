"""Prints the table of docs/memory.md: forecasts of models whose weights stream, by card. In two minutes of a core:
python -m scripts.streamed_plans
"""

from __future__ import annotations

from benchmarks.shapes import PUBLISHED, SHAPES
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas.fitted import planned_for
from jaxtune.train.config import AdapterConfig, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from jaxtune.train.planning import devices, search
from jaxtune.train.planning.choice import PlanError
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.step_spec import StepSpec

LENGTH, RANK, EXPERTS_RANK = 2048, 16, 2
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Name, name of its shape, format of its weights, rows a step, whether experts have adapters, rank.
MODELS = (
    ("Llama-3.1-8B, bf16", "llama-3.1-8b", None, 8, False, RANK),
    ("Qwen3-32B, NF4", "qwen3-32b", "nf4", 8, False, RANK),
    ("Llama-3.3-70B, NF4", "llama-3.3-70b", "nf4", 8, False, RANK),
    ("Qwen3-30B-A3B, bf16", "qwen3-30b-a3b", None, 32, True, RANK),
    ("gpt-oss-120b, MXFP4", "openai/gpt-oss-120b", "mxfp4", 16, True, EXPERTS_RANK),
)
# Name, as a card of so many GiB (None: its own), GB of host memory.
CARDS = (
    ("RTX 3060", None, 64.0),
    ("RTX 4090", None, 64.0),
    ("RTX 4090", None, 128.0),
    ("RTX 5090", None, 128.0),
    ("H200", 12.0, 256.0),
    ("H200", 24.0, 256.0),
)


def cell(
    hf: dict, load_in: str | None, rows: int, experts: bool, rank: int, card: str, gib: float | None, host_gb: float
) -> str:
    """Tokens/s, and the layers whose weights stream."""
    memory = MemoryConfig(budget_gb=gib)
    config = TrainConfig(
        model=ModelConfig(path="shape", load_in=load_in),
        data=DataConfig(train="none", length=LENGTH),
        adapter=AdapterConfig(r=rank, target_parameters=EXPERTS if experts else None),
        rows_per_step=rows,
        steps=10,
        memory=memory,
    )
    with planned_for(card):
        spec, device, shape = StepSpec.of(config), devices.find_device(card, host_gb=host_gb), config_from_hf(hf)
        costs = step_cost(abstract_model(shape, spec.model), spec)
        limit = devices.budget(config.memory, device)
        assert limit is not None
        try:
            best, _ = search.next_plan(costs, spec, device, search.Room(limit, devices.limit(config.memory, device)))
        except PlanError:
            return "-"
    level = best.plan.level("streamed")
    return f"{best.tokens_per_second:,.0f}" + (f" ({level} of {shape.num_layers})" if level else "")


def main() -> None:
    names = [
        f"{card}{f' as {gib:g} GiB' if gib else ''}, {host_gb:g} GB of host memory" for card, gib, host_gb in CARDS
    ]
    print("| | " + " | ".join(names) + " |\n|" + "---|" * (len(CARDS) + 1))
    for name, shape, load_in, rows, experts, rank in MODELS:
        hf = PUBLISHED[shape] if shape in PUBLISHED else SHAPES[shape]
        cells = [cell(hf, load_in, rows, experts, rank, card, gib, host_gb) for card, gib, host_gb in CARDS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
