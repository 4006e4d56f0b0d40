"""What the planner, offload and long rows reach, beside what must be shown of them.

    python benchmarks/train/memory.py [--cases kept,24gb,...] [--seconds 560] --output FILE.json
    python benchmarks/train/memory.py --list

Each case is measured by benchmarks/train/step.py in a process of its own; with a budget its allocator
holds no more, so that exceeding it fails, and fails alone. The programs of step.py's cases are compiled side by side
beforehand, in one process, into one cache: where XLA times algorithms in the measured process, its buffers can be the
peak. 8B shape, NF4 + LoRA r=16, 8 x 2,048 tokens unless said.

A FILE.json that is there is added to: cases that it holds without a failure are not run again, and the verdicts are
made anew over all of them; so several calls of at most --seconds make one record. Beside it, a .log of what the runs
print. The record's case `longest` was a search made once: `git show d6c9863:benchmarks/train/longest.py`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compare
from benchmarks.cases import Step
from benchmarks.record import commit_here, driver_bytes, environment, write

EVERYTHING = "layer_input, query, key, value, attention_out, lse, mid, gate, up"
_OFFLOAD_ALL = ", ".join(f"{name}=offload" for name in EVERYTHING.split(", "))
_INPUTS = "recompute, layer_input=offload"
_14B, _32B = dict(shape="qwen3-14b", rows=4), dict(shape="qwen3-32b", rows=2)
_FULL = dict(rows=2, rank=0, load_in=None, optim="adamw_8bit")
# Arguments of step.py; "budget_gb" is used here too. cold: its own empty cache.
CASES: dict[str, dict[str, Any]] = {
    "kept": dict(plan="keep", micro_batches=1),
    "recompute": dict(plan="recompute", micro_batches=1),
    "inputs_offloaded": dict(plan=_INPUTS, micro_batches=1),
    "inputs_serial": dict(plan=_INPUTS, micro_batches=1, transfers="serial"),
    "24gb": dict(plan="auto", budget_gb=24),
    "24gb_one": dict(plan="auto", budget_gb=24, micro_batches=1),
    "16gb": dict(plan="auto", budget_gb=16),
    "16gb_one": dict(plan="auto", budget_gb=16, micro_batches=1),
    "10.8gb": dict(plan="auto", budget_gb=10.8),
    "link_bound": dict(plan=_OFFLOAD_ALL, micro_batches=1),
    "compile": dict(plan=_OFFLOAD_ALL, micro_batches=1, cold=True, steps=3),
    "document_recompute": dict(plan="recompute", rows=1, length=65536, budget_gb=40, steps=3),
    "document": dict(plan="auto", rows=1, length=65536, budget_gb=40, steps=3),
    "14b_recompute": dict(_14B, plan="recompute", micro_batches=1, steps=3),
    "14b_offloaded": dict(_14B, plan=_INPUTS, micro_batches=1, steps=3),
    "14b_serial": dict(_14B, plan=_INPUTS, micro_batches=1, transfers="serial", steps=3),
    "32b_recompute": dict(_32B, plan="recompute", micro_batches=1, steps=3),
    "32b_offloaded": dict(_32B, plan=_INPUTS, micro_batches=1, steps=3),
    "32b_serial": dict(_32B, plan=_INPUTS, micro_batches=1, transfers="serial", steps=3),
    "1b_full": dict(shape="llama-3.2-1b", rank=0, load_in=None, plan="keep", micro_batches=1),
    "3b": dict(shape="llama-3.2-3b", rows=8, length=4096, load_in=None, plan="gate=recompute, up=recompute",
               micro_batches=1, steps=3),
    "full_8b": dict(_FULL, plan="auto"),
    "full_8b_kept": dict(_FULL, plan="keep", micro_batches=1),
    "full_8b_states_on_host": dict(_FULL, plan="keep", micro_batches=1, optim_offload=True),
}  # fmt: skip
STEPS = 8  # unless said
DEFAULT = "kept,24gb,24gb_one,16gb,16gb_one,10.8gb,recompute,inputs_offloaded"
# case: (whose speed it is held against, floor of the ratio or None, goal or None)
COMPARED: dict[str, tuple[str, float | None, float | None]] = {
    "inputs_offloaded": ("recompute", 0.98, 0.995),
    "inputs_serial": ("recompute", None, None),
    "24gb": ("kept", 0.93, 0.98),
    "24gb_one": ("kept", 0.88, 0.92),
    "16gb": ("kept", 0.90, 0.95),
    "16gb_one": ("kept", 0.83, 0.88),
    "document": ("document_recompute", 1.15, 1.25),
    "14b_offloaded": ("14b_recompute", None, None),
    "14b_serial": ("14b_recompute", None, None),
    "32b_offloaded": ("32b_recompute", None, None),
    "32b_serial": ("32b_recompute", None, None),
    "full_8b": ("full_8b_kept", None, 0.9),
    "full_8b_states_on_host": ("full_8b_kept", None, None),
}
# (model, overlapped, serial, published gain of overlapping a reload, on a B200)
RELOADS = (
    ("8B", "inputs_offloaded", "inputs_serial", 0.084),
    ("14B", "14b_offloaded", "14b_serial", 0.067),
    ("32B", "32b_offloaded", "32b_serial", 0.0461),
)
FLOORS_TOKENS_PER_SECOND = {"24gb": 15_700, "10.8gb": 12_500}
GOALS_TOKENS_PER_SECOND = {"10.8gb": 15_000}
LESS_GB = 3.8  # that layer inputs on the host save at least
LINK_BOUND = (1.10, 1.05)  # a link-bound step over max(compute, transfer): floor, goal
COMPILE_SECONDS = {"cold": (90.0, 45.0), "cached": (10.0, 5.0)}
PEAKS = (0.97, 1.07)  # predicted over measured
PEAK_CASES = 8  # that this is asked of: of at least so many


def step_of(name: str) -> Step:
    case = {"shape": "llama-3.1-8b", "load_in": "nf4", "steps": STEPS} | CASES[name]
    steps = case.pop("steps")
    case.pop("cold", None)
    texts = []
    for key, value in case.items():
        if value is not None and value is not False:
            texts += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return Step(name, shlex.join(texts), steps)


def run_case(name: str, side: compare.Side, log: Path, seconds: float) -> dict:
    """The record of one case, or {"failed": why}."""
    from jaxtune.train.planning.devices import CONTEXT_BYTES

    case, variables = CASES[name], {}
    total = driver_bytes("total")
    if case.get("budget_gb") and total:
        pool = case["budget_gb"] * 1e9 - CONTEXT_BYTES
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{pool / total:.5f}"
    began = time.perf_counter()
    record = compare.run_once(side, step_of(name), log, seconds, variables, not case.get("cold"))
    if "failed" not in record:
        record["seconds_in_all"] = time.perf_counter() - began
    return record


def must_show(cases: dict[str, dict]) -> list[dict]:
    """[{what, value, floor, goal, at_most}] of what these cases measured; at_most: less is better.

    floor and goal are None where nothing is asked but the figure itself.
    """
    from jaxtune.train.planning.devices import find_device

    ran = {name: record for name, record in cases.items() if "failed" not in record}
    rows: list[dict] = []

    def show(what: str, value: float | None, floor=None, goal=None, at_most: bool = False) -> None:
        if value is not None:
            rows.append({"what": what, "value": value, "floor": floor, "goal": goal, "at_most": at_most})

    def ratio(key: str, name: str, other: str) -> float | None:
        return ran[name][key] / ran[other][key] if name in ran and other in ran else None

    for name, (other, floor, goal) in COMPARED.items():
        show(f"{name}: speed over {other}", ratio("tokens_per_second", name, other), floor, goal)
    for name, floor in FLOORS_TOKENS_PER_SECOND.items():
        if name in ran:
            show(f"{name}: tokens/s", ran[name]["tokens_per_second"], floor, GOALS_TOKENS_PER_SECOND.get(name))
    if {"recompute", "inputs_offloaded"} <= ran.keys():
        less = ran["recompute"]["peak_memory_gb"] - ran["inputs_offloaded"]["peak_memory_gb"]
        show("inputs_offloaded: GB less than recompute", less, LESS_GB)
    for model, overlapped, serial, published in RELOADS:
        gain = ratio("tokens_per_second", overlapped, serial)
        if gain is not None:
            show(f"{model}: gain of overlapped transfers over serial (published {100 * published:.2f} %)", gain - 1)
    if {"link_bound", "kept"} <= ran.keys():
        record = ran["link_bound"]
        transfer = 2 * record["host_gb"] * 1e9 / find_device(record["device"]).link
        bound = max(ran["kept"]["step_seconds"], transfer)
        show("link_bound: time over max(compute, transfer)", record["step_seconds"] / bound, *LINK_BOUND, at_most=True)
    for kind, (floor, goal) in COMPILE_SECONDS.items():
        if "compile" in ran:
            seconds = ran["compile"][f"compile_seconds_{kind}"]
            show(f"compile of the step that offloads everything, {kind}: s", seconds, floor, goal, at_most=True)
    peaks = {
        name: record["predicted_peak_gb"] / record["peak_memory_gb"]
        for name, record in ran.items()
        if record.get("peak_memory_gb") and "predicted_peak_gb" in record
    }
    if len(peaks) >= PEAK_CASES:
        show(f"predicted over measured peak, least of {len(peaks)} cases", min(peaks.values()), PEAKS[0])
        show(f"predicted over measured peak, most of {len(peaks)} cases", max(peaks.values()), PEAKS[1], at_most=True)
    if "full_8b" in ran:
        show("full fine-tuning of 8B, 2 x 2,048: tokens/s", ran["full_8b"]["tokens_per_second"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=DEFAULT, help="some of those of --list, by commas")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds that a case may take")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all: a case begins only if it could end")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {case}" for name, case in CASES.items()))
        return 0
    if options.output is None:
        parser.error("--output is missing")
    names = options.cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: there is no {unknown[0]!r}; there are {', '.join(CASES)}")
    began = time.perf_counter()
    record: dict[str, Any] = {"benchmark": "train/memory", "cases": {}}
    if Path(options.output).exists():
        record = json.loads(Path(options.output).read_text(encoding="utf-8"))
    names = [name for name in names if "failed" in record["cases"].get(name, {"failed": "not run"})]
    side = compare.Side("new", compare.ROOT, commit_here(), Path(tempfile.mkdtemp()))
    log = Path(options.output).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    if together := [step_of(name) for name in names if not CASES[name].get("cold")]:
        compare.compile_ahead([(side, together)], log, options.seconds)
        record["compile_seconds_side_by_side"] = time.perf_counter() - began
    for name in names:
        left = options.seconds - (time.perf_counter() - began)
        if left < 30:
            record["cases"].setdefault(name, {"failed": "no time was left"})
            continue
        found = record["cases"][name] = run_case(name, side, log, min(left, options.timeout))
        record["must_show"] = must_show(record["cases"])
        speed, peak = (found.get(key, float("nan")) for key in ("tokens_per_second", "peak_memory_gb"))
        print(name, found.get("failed") or f"{speed:,.0f} tokens/s {peak:.2f} GB", flush=True)
        ran = next((case for case in record["cases"].values() if "device" in case), {})
        where = {key: ran[key] for key in ("device", "versions", "commit", "time") if key in ran}
        write(options.output, {**record, **where})  # after every case: a run that is cut short is not lost
    record["must_show"] = must_show(record["cases"])
    ran = next((case for case in record["cases"].values() if "device" in case), None) or environment()
    write(options.output, {**record, **{key: ran[key] for key in ("device", "versions", "commit", "time")}})
    for row in record["must_show"]:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
