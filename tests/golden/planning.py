"""What the planner chooses and predicts for models, devices, budgets and rows: by its own figures, nothing compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxtune.models.files.published import PUBLISHED
from jaxtune.train.config import (
    AdapterConfig,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from tests.golden import engine

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_LORA, _ON_EXPERTS = AdapterConfig(), AdapterConfig(target_parameters=_EXPERTS)
_ADAM8 = OptimConfig("adamw_8bit")

# name: (model, weights, adapter, settings of the TrainConfig)
MODELS = {
    "8B": ("meta-llama/Llama-3.1-8B", None, _LORA, {}),
    "8B NF4": ("meta-llama/Llama-3.1-8B", "nf4", _LORA, {}),
    "8B full": ("meta-llama/Llama-3.1-8B", None, None, dict(optim=_ADAM8)),
    "8B full, states on the host": (
        "meta-llama/Llama-3.1-8B",
        None,
        None,
        dict(optim=dataclasses.replace(_ADAM8, offload=True)),
    ),
    "1B full": ("meta-llama/Llama-3.2-1B-Instruct", None, None, {}),
    "14B NF4": ("Qwen/Qwen3-14B", "nf4", _LORA, {}),
    "32B NF4": ("Qwen/Qwen3-32B", "nf4", _LORA, {}),
    "gpt-oss-20b": ("openai/gpt-oss-20b", None, _ON_EXPERTS, {}),
    "gpt-oss-20b NF4": ("openai/gpt-oss-20b", "nf4", _ON_EXPERTS, {}),
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", None, _ON_EXPERTS, {}),
    "Mixtral NF4": ("mistralai/Mixtral-8x7B-Instruct-v0.1", "nf4", _LORA, {}),
}

_GB = 1e9 / 2**30  # of the budgets below, which were recorded in GB of 1e9 bytes, in those of memory.budget_gb

# (device, budget in GB, rows, length, settings) of each model.
_H200 = ("H200", None, 8, 2048, {})
CASES = {
    "8B": (
        _H200,
        ("H200", 40, 8, 2048, {}),
        ("A100 80GB", None, 8, 2048, dict(micro_batches=2)),
        ("H200", None, 1, 65536, {}),
        ("H200", None, 8, 2048, dict(mesh=MeshConfig(data=2))),
        ("H200", None, 8, 2048, dict(memory=MemoryConfig(plan="gate=offload, up=offload"))),
        ("H200", 24, 8, 2048, dict(micro_batches=1, memory=MemoryConfig(budget_gb=24 * _GB, plan="recompute"))),
    ),
    "8B NF4": (
        _H200,
        ("H200", 24, 8, 2048, {}),
        ("H200", 12, 8, 2048, {}),
        ("RTX 4090", None, 8, 2048, {}),
        ("RTX 3090", None, 4, 1024, dict(micro_batches=4)),
        ("H200", None, 1, 131072, {}),
        ("RTX 4090", None, 1, 32768, {}),
        ("RTX 4090", 7, 1, 2048, {}),
    ),
    "8B full": (_H200, ("H200", 60, 2, 2048, {}), ("A100 80GB", None, 8, 2048, dict(micro_batches=8))),
    "8B full, states on the host": (
        ("H200", None, 8, 2048, dict(micro_batches=1)),
        ("A100 80GB", None, 4, 4096, dict(micro_batches=4)),
    ),
    "1B full": (
        _H200,
        ("RTX 4090", None, 8, 2048, dict(micro_batches=2)),
        ("H200", None, 8, 2048, dict(precision="fp32")),
    ),
    "14B NF4": (("H200", None, 4, 4096, {}), ("RTX 4090", None, 2, 4096, dict(micro_batches=2))),
    "32B NF4": (
        ("H200", None, 4, 2048, {}),
        ("H200", 48, 4, 2048, dict(micro_batches=1)),
        ("A100 80GB", None, 1, 65536, {}),
        ("RTX 4090", None, 1, 2048, {}),
    ),
    "gpt-oss-20b": (_H200, ("A100 80GB", None, 8, 2048, dict(micro_batches=2)), ("H200", 60, 1, 65536, {})),
    "gpt-oss-20b NF4": (
        _H200,
        ("RTX 4090", None, 8, 2048, dict(micro_batches=8)),
        ("H200", 32, 8, 2048, dict(micro_batches=1)),
    ),
    "Qwen3-30B-A3B": (
        _H200,
        ("H200", 100, 8, 2048, dict(micro_batches=1)),
        ("A100 80GB", None, 8, 2048, dict(micro_batches=8)),
    ),
    "Mixtral NF4": (("H200", None, 4, 4096, dict(micro_batches=1)), ("A100 80GB", 40, 4, 4096, dict(micro_batches=2))),
}


def _text(device: str, budget: float | None, rows: int, length: int, settings: dict) -> str:
    parts = [device, f"{rows} x {length}", *([] if budget is None else [f"in {budget} GB"])]
    for key, value in settings.items():
        value = {"memory": getattr(value, "plan", None), "mesh": getattr(value, "data", None)}.get(key, value)
        parts.append(f"{key}={value}")
    return ", ".join(parts)


def record(model: str) -> dict[str, dict]:
    """{case: what is chosen and predicted}"""
    return dict(_records(model))


def _records(model: str) -> Iterator[tuple[str, dict]]:
    path, load_in, adapter, common = MODELS[model]
    for device, budget, rows, length, settings in CASES[model]:
        config = TrainConfig(
            model=ModelConfig(path=path, load_in=load_in),
            data=DataConfig(train="none", length=length),
            adapter=adapter,
            rows_per_step=rows,
            steps=10,
            output="not written",
            **(dict(memory=MemoryConfig(budget_gb=budget and budget * _GB)) | common | settings),
        )
        parts = engine.cost(PUBLISHED[path], config)
        yield _text(device, budget, rows, length, settings), engine.plan_record(parts, config, device)
