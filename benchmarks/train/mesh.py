"""Train steps over several GPUs of one host, beside the same step on each of them alone.

    python benchmarks/train/mesh.py [CASE ...] [--devices 2] [--seconds 560] --output FILE.json

Each GPU gets the same tokens in every case. A step alone runs on all GPUs at once, a process each, and the slowest of
them is what a mesh is held against: GPUs of one host differ by a percent. Each run is one of benchmarks/train/step.py
in processes of its own, one case after the other: programs that compile beside others take longer, and time each
other's products. The file is written after each run and runs that it has are not made again. A case has a limit of its
own, so that one slow compile does not take the time of the rest.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.processes import ROOT, Call, Side
from benchmarks.record import commit_here, write

LEAST_SECONDS = 60  # less is not worth a start


@dataclass(frozen=True)
class Case:
    """title: what trains. arguments: of step.py. rows: a GPU. axis: of the mesh that all GPUs make, or None: each
    alone. beside: the case that it is held against, floor the least ratio of tokens per second and GPU, memory the
    largest ratio of peaks, least the least tokens per second and GPU. limit: seconds. profiled: a trace says what of
    its collectives ran under kernels."""

    title: str
    arguments: str
    rows: int
    axis: str | None = None
    beside: str | None = None
    floor: float | None = None
    memory: float | None = None
    least: int | None = None
    limit: int = 150
    profiled: bool = False

    def step_arguments(self, devices: int) -> list[str]:
        rows = self.rows * (devices if self.axis else 1)
        mesh = [f"--{self.axis}", str(devices)] if self.axis else []
        return [*shlex.split(self.arguments), "--rows", str(rows), *mesh]


_LORA = ("llama-3.1-8b bf16 LoRA r=16", "--plan auto --steps 8")
_FULL = ("llama-3.1-8b, all parameters, 8-bit AdamW", "--rank 0 --optim adamw_8bit --plan auto --steps 6")
# 0.70 of what a card alone takes with 8 rows: divided states alone leave 0.79 of it, residuals are each GPU's own.
_FULL_SMALL = (_FULL[0], _FULL[1] + " --budget-gb 73")
_FULL_SHORT = (_FULL[0], _FULL[1] + " --budget-gb 47")  # and here with 2 rows
_EXPERTS = (
    "qwen3-30b-a3b bf16 LoRA r=16 on attention and experts",
    "--shape qwen3-30b-a3b --optim adamw_8bit --plan auto --steps 6",
)
# Weights that a step gathers, where there is memory for them to lie whole on each GPU.
_LORA_GATHERED = (_LORA[0] + ", weights gathered", "--plan 'keep; whole=32' --steps 8")
_EXPERTS_GATHERED = (_EXPERTS[0] + ", weights gathered", _EXPERTS[1].replace("--plan auto", "--plan 'keep; whole=36'"))
_1B = (
    "llama-3.2-1b, all parameters, gradients sent in {0}",
    "--shape llama-3.2-1b --rank 0 --plan auto --gradient-sync {0}",
)
_1B_BF16, _1B_INT8, _1B_INT4 = ([text.format(sync) for text in _1B] for sync in ("bf16", "int8", "int4"))
_70B = ("llama-3.3-70b nf4 LoRA r=16", "--shape llama-3.3-70b --load-in nf4 --plan auto --steps 5")
CASES = {  # what matters most, first
    "70b_nf4_fsdp": Case(*_70B, 3, "fsdp", least=1600, limit=330),
    "8b_full": Case(*_FULL, 8),
    "8b_full_fsdp": Case(*_FULL_SMALL, 8, "fsdp", "8b_full", 0.95, 0.70, profiled=True),
    "8b_full_short": Case(*_FULL, 2),
    "8b_full_short_fsdp": Case(*_FULL_SHORT, 2, "fsdp", "8b_full_short", 0.95, 0.70, profiled=True),
    "8b_lora": Case(*_LORA, 8),
    "8b_lora_fsdp": Case(*_LORA_GATHERED, 8, "fsdp", "8b_lora", 0.97, profiled=True),
    "8b_lora_data": Case(*_LORA, 8, "data", "8b_lora", 0.985, profiled=True),
    "qwen3_moe": Case(*_EXPERTS, 8, limit=200),
    "qwen3_moe_fsdp": Case(*_EXPERTS, 8, "fsdp", "qwen3_moe", 0.92, limit=200, profiled=True),
    "qwen3_moe_fsdp_gathered": Case(*_EXPERTS_GATHERED, 8, "fsdp", "qwen3_moe", limit=200, profiled=True),
    "1b_full_data_bf16": Case(*_1B_BF16, 4, "data"),
    "1b_full_data_int8": Case(*_1B_INT8, 4, "data", "1b_full_data_bf16", 1.0),
    "1b_full_data_int4": Case(*_1B_INT4, 4, "data", "1b_full_data_bf16", 1.0),
}
# Cases that mesh_2.json does not have: they ran on two H100s, and gradient_sync_once.json has them.
NOT_MEASURED = {"1b_full_data_bf16", "1b_full_data_int8", "1b_full_data_int4"}
ENVIRONMENT = ("device", "versions")
KEPT = (
    *ENVIRONMENT,
    "commit",
    "time",
    "tokens_per_second_per_gpu",
    "step_seconds",
    "step_seconds_all",
    "peak_memory_gb_of_each",
    "residuals",
    "micro_batches",
    "mfu",
    "init_seconds",
    "compile_seconds_cold",
    "compile_seconds_cached",
    "predicted_peak_gb",
    "predicted_tokens_per_second",
    "losses",
    "parts",
    "failed",
)


def run(name: str, devices: int, side: Side, folder: Path, seconds: float) -> list[dict]:
    """The record of each process: one of a mesh, one of each card alone. folder: what they print goes there, too."""
    case = CASES[name]
    until = time.monotonic() + min(case.limit, seconds)
    started = []
    for card in [None] if case.axis else range(devices):
        output = folder / f"{name}_{card}.json"
        arguments = case.step_arguments(devices)
        arguments += ["--profile", str(output.with_suffix(""))] if case.profiled else []
        variables = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
        started.append(side.start(arguments, output, output.with_suffix(".log"), variables))
    found = [one.record(until - time.monotonic()) for one in started]
    for one, record in zip(started, found, strict=True):
        if "failed" in record:
            print(*one.log.read_text(errors="replace").splitlines()[-12:], sep="\n", flush=True)
    return [{key: record[key] for key in KEPT if key in record} for record in found]


def speed(runs: list[dict] | None) -> float | None:
    """Tokens per second and GPU of the slowest process; None where one is missing."""
    speeds = [run.get("tokens_per_second_per_gpu") for run in runs or [{}]]
    return None if None in speeds else min(speed for speed in speeds if speed is not None)


def commits(cases: dict[str, list[dict]]) -> str:
    """Those that the runs are of, the oldest run's first."""
    runs = [run for found in cases.values() for run in found if "commit" in run]
    return ", ".join(dict.fromkeys(run["commit"] for run in sorted(runs, key=lambda run: run["time"])))


def peak(runs: list[dict]) -> float:
    """GB of the fullest GPU."""
    return max(gb for run in runs for gb in run["peak_memory_gb_of_each"])


def ratios(cases: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Of each mesh whose step alone was measured too: its tokens per second and GPU over the slower card's alone, and
    its peak over theirs."""
    found = {}
    for name, runs in cases.items():
        beside = CASES[name].beside
        here, alone = speed(runs), speed(cases.get(beside)) if beside else None
        if beside is not None and here is not None and alone is not None:
            found[name] = {"speed": here / alone, "memory": peak(runs) / peak(cases[beside])}
    return found


def missed(cases: dict[str, list[dict]]) -> list[str]:
    """What is under a floor or over the memory, in words."""
    words = []
    for name, runs in cases.items():
        least, here = CASES[name].least, speed(runs)
        if least is not None and here is not None and here < least:
            words.append(f"{name}: {here:,.0f} tokens/s a GPU, at least {least:,}")
    for name, ratio in ratios(cases).items():
        case = CASES[name]
        if ratio["speed"] < (case.floor or 0):
            words.append(f"{name}: {ratio['speed']:.3f} of the speed alone, floor {case.floor}")
        if case.memory is not None and ratio["memory"] > case.memory:
            words.append(f"{name}: {ratio['memory']:.2f} of the memory alone, at most {case.memory}")
    return words


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(words)
    wanted = options.cases or list(CASES)
    if unknown := set(wanted) - set(CASES):
        parser.error(f"no case of this name: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    call = Call(options.output, options.seconds)
    record = call.begun({"benchmark": "train/mesh", "devices": options.devices})
    cases, folder = record.get("cases", {}), Path(tempfile.mkdtemp())
    side = Side("new", ROOT, commit_here(), folder / "cache")
    for name in (name for name in wanted if speed(cases.get(name)) is None):
        if call.left < LEAST_SECONDS:
            print(f"{name}: no time is left", flush=True)
            continue
        began = time.monotonic()
        cases[name] = run(name, options.devices, side, folder, call.left)
        record |= {key: run.pop(key) for run in cases[name] for key in ENVIRONMENT if key in run}
        write(options.output, {**record, "commit": commits(cases), "cases": cases, "ratios": ratios(cases)})
        said = [run.get("failed") or round(run["tokens_per_second_per_gpu"]) for run in cases[name]]
        print(f"{name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    found = ratios(cases)
    print(*(f"{name}: {ratio}" for name, ratio in found.items()), *missed(cases), sep="\n", flush=True)
    return int(bool(missed(cases)) or any(speed(cases.get(name)) is None for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
