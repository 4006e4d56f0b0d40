"""The programs of six real configurations, compiled for an H200 that is not there: which kernels they have, what memory
they take, and how many large kernels run while something is on its way to or from the host.

Each has two to four layers of the model, under the plan that the planner chooses for all of them.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import numpy as np

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
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.tokens.documents import Document
from jaxtune.train.planning.plan import StepPlan
from tests.golden import engine
from tests.gpu.aot.target import H200
from tests.train.tiny_runs import dataset

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ALONE = MeshConfig()
_LORA, _ON_EXPERTS = AdapterConfig(), AdapterConfig(target_parameters=_EXPERTS)


@dataclasses.dataclass(frozen=True)
class Case:
    """model: of PUBLISHED. documents: in a row; settings: of the TrainConfig."""

    model: str
    layers: int = 2
    load_in: str | None = None
    adapter: AdapterConfig | None = _LORA
    rows: int = 8
    length: int = 2048
    documents: int = 1
    settings: dict = dataclasses.field(default_factory=dict)


CASES = {
    "8B, bf16": Case("meta-llama/Llama-3.1-8B"),
    "8B, NF4 in 24 GB": Case(
        "meta-llama/Llama-3.1-8B", 4, "nf4", settings=dict(memory=MemoryConfig(budget_gb=24e9 / 2**30), micro_batches=1)
    ),
    "8B, packed": Case("meta-llama/Llama-3.1-8B", rows=2, length=8192, documents=16),
    "8B, all trained by 8-bit AdamW": Case(
        "meta-llama/Llama-3.1-8B", adapter=None, rows=2, settings=dict(optim=OptimConfig("adamw_8bit", weights="bf16"))
    ),
    "gpt-oss-20b, NF4": Case("openai/gpt-oss-20b", 2, "nf4", _ON_EXPERTS),
    "Qwen3-30B-A3B, bf16": Case("Qwen/Qwen3-30B-A3B", adapter=_ON_EXPERTS),
}


def record(name: str, mesh: MeshConfig = ALONE, layers: int | None = None) -> dict:
    """mesh: of devices that share so many times the rows. layers: if not the case's."""
    programs, plan = compiled(name, mesh, layers)
    return {"plan": plan} | {name: described(program) for name, program in programs.items()}


def compiled(name: str, mesh: MeshConfig = ALONE, layers: int | None = None) -> tuple[dict, dict]:
    """({program's name: compiled}, the plan), arguments as of `record`."""
    case = CASES[name]
    config, rows = _asked(case, mesh)
    return engine.compiled_programs(H200, PUBLISHED[case.model], config, rows, layers or case.layers)


def compiled_with(name: str, mesh: MeshConfig, layers: int, plan: StepPlan, resident: int = 0) -> tuple[dict, tuple]:
    """engine.few_layers of a case."""
    config, rows = _asked(CASES[name], mesh)
    return engine.few_layers(H200, PUBLISHED[CASES[name].model], config, rows, layers, plan, resident)


def _asked(case: Case, mesh: MeshConfig) -> tuple[TrainConfig, TokenDataset]:
    """What a case asks for, for so many devices that share so many times the rows, and these."""
    devices = mesh.data * mesh.fsdp
    config = TrainConfig(
        model=ModelConfig(path=case.model, load_in=case.load_in),
        data=DataConfig(train="made here", length=case.length),
        adapter=case.adapter,
        rows_per_step=case.rows * devices,
        mesh=mesh,
        steps=10,
        output="not written",
        **case.settings,
    )
    size = case.length // case.documents
    whole = Document(np.zeros(size, np.int32), np.ones(size, bool))
    return config, dataset([whole] * (case.documents * config.rows_per_step), case.length)


def described(program) -> dict:
    """{"kernels": {kernel: count}, "temporary_bytes", "host_bytes", "copies": [...]} of a compiled program."""
    memory, text = program.memory_analysis(), program.as_text()
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes,
        "kernels": kernels(text),
        "copies": copies(text),
    }


# Instructions that start no kernel.
_NOTHING = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy-start", "copy-done", "iota")
_LARGE = re.compile(r'custom_call_target="(__cublas\$lt\$matmul|mosaic_gpu|triton_kernel_call)')
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")


def _computations(text: str) -> dict[str, list[str]]:
    """{name: lines} of a program's text, without those that are run inside a kernel."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            lines = found.setdefault(header[1], [])
        else:
            lines.append(line)
    inside = {
        name for one in found.values() for line in one for name in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line)
    }
    return {name: one for name, one in found.items() if name not in inside}


def kernels(text: str) -> dict[str, int]:
    """How many kernels there are of each name and shape of results; names without their numbers."""
    counts: collections.Counter[str] = collections.Counter()
    for lines in _computations(text).values():
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None or match[3] in _NOTHING:
                continue
            name, shape, opcode = match.groups()
            if opcode == "custom-call":
                target = re.search(r'custom_call_target="([^"]*)"', line)
                name = target[1] if target else opcode
            elif opcode == "fusion":
                name = re.sub(r"[.\d]+$", "", name)
            else:
                name = opcode
            counts[f"{name} {re.sub(r'{[^}]*}| ', '', shape)}"] += 1
    return dict(sorted(counts.items()))


def copies(text: str) -> list[list]:
    """[direction, shape, large kernels that run under it] of every copy between device and host, in order of start.

    Large are products, of libraries or of ours.
    """
    return [
        ["to host" if "S(5)" in shape else "to device", re.sub(r"{[^}]*}", "", shape), under]
        for opcode, shape, under in _windows(text, ("copy",))
    ]


def collectives(text: str) -> list[list]:
    """[what, arrays, large kernels that run under it] of every collective, in order of start; -1 under one that is
    waited for."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    return [[kind, re.sub(r"{[^}]*}", "", shape).count("["), under] for kind, shape, under in _windows(text, kinds)]


def _windows(text: str, kinds: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """(kind, shape of the result, large kernels between start and end) of a program's asynchronous instructions, in
    order of start, and of those that are not, which have -1."""
    entry = next(lines for name, lines in _computations(text).items() if f"ENTRY %{name} " in text)
    begun: dict[str, Any] = {}
    count = 0
    for line in entry:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode = match.groups()
        count += _LARGE.search(line) is not None
        kind = opcode.removesuffix("-start").removesuffix("-done")
        if kind not in kinds or opcode == "copy":
            continue
        if opcode == f"{kind}-start":
            begun[name] = count
        elif opcode == f"{kind}-done":
            operand = re.search(rf"{kind}-done\((?:.* )?%?([\w.-]+)\)", line)
            assert operand is not None
            begun[operand[1]] = (kind, shape, count - begun[operand[1]])
        else:
            begun[name] = (kind, shape, -1)
    return list(begun.values())
