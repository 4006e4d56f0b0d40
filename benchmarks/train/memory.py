"""Speed under a memory budget: what the planner's choices reach beside keeping everything.

    python benchmarks/train/memory.py [--cases kept,24gb,...] [--steps 5] --output FILE.json

First every case's programs are compiled side by side into one cache (memory is not limited there). Then each case is
measured in a process of its own, by benchmarks/train/step.py; a case with a budget gets an allocator that holds no
more, so that exceeding it fails. 8B shape, NF4 + LoRA r=16, 8 x 2,048 tokens unless said. `--shape` makes it smaller.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

EVERYTHING = "layer_input, query, key, value, attention_out, lse, mid, gate, up"
_OFFLOAD_ALL = ", ".join(f"{name}=offload" for name in EVERYTHING.split(", "))
# Arguments of step.py; "budget_gb" and "length" are used here too.
CASES: dict[str, dict] = {
    "kept": dict(plan="keep", micro_batches=1),
    "recompute": dict(plan="recompute", micro_batches=1),
    "inputs_offloaded": dict(plan="recompute, layer_input=offload", micro_batches=1),
    "24gb": dict(plan="auto", budget_gb=24),
    "24gb_one": dict(plan="auto", budget_gb=24, micro_batches=1),
    "16gb": dict(plan="auto", budget_gb=16),
    "16gb_one": dict(plan="auto", budget_gb=16, micro_batches=1),
    "10.8gb": dict(plan="auto", budget_gb=10.8),
    "link_bound": dict(plan=_OFFLOAD_ALL, micro_batches=1),
    "document_recompute": dict(plan="recompute", rows=1, length=65536, budget_gb=40),
    "document": dict(plan="auto", rows=1, length=65536, budget_gb=40),
    "longest": dict(plan="auto", rows=1, length=350_208, rank=32, budget_gb=80, steps=2),
    "full_8b": dict(plan="auto", rows=2, rank=0, load_in=None, optim="adamw_8bit"),
    "full_8b_kept": dict(plan="keep", rows=2, rank=0, load_in=None, optim="adamw_8bit"),
}
# case: (whose speed it is held against, floor of the ratio, goal)
COMPARED = {
    "inputs_offloaded": ("recompute", 0.98, 0.995),
    "24gb": ("kept", 0.93, 0.98),
    "24gb_one": ("kept", 0.88, 0.92),
    "16gb": ("kept", 0.90, 0.95),
    "16gb_one": ("kept", 0.83, 0.88),
    "document": ("document_recompute", 1.15, 1.25),
    "full_8b": ("full_8b_kept", 0.9, 0.9),
}
FLOORS_TOKENS_PER_SECOND = {"24gb": 15_700, "10.8gb": 12_500}


def step_arguments(case: dict, options) -> list[str]:
    settings = dict(shape=options.shape, load_in="nf4", steps=options.steps) | case
    settings |= json.loads(options.override)
    return [text for key, value in settings.items() if value is not None
            for text in (f"--{key.replace('_', '-')}", str(value))]  # fmt: skip


def compile_all(cases: list[str], options, cache: str) -> None:
    """Compiles the programs of every case into `cache`, side by side, from shapes alone."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from benchmarks.shapes import SHAPES
    from benchmarks.train.step import arguments, make_trainer, train_config
    from jaxtune.models.registry import config_from_hf
    from jaxtune.train.memory import abstract_model

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    where = SingleDeviceSharding(jax.devices()[0])

    def one(name: str) -> None:
        wanted = arguments().parse_args(step_arguments(CASES[name], options))
        trainer = make_trainer(wanted, abstract_model(config_from_hf(SHAPES[wanted.shape]), train_config(wanted)))

        def placed(tree):
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=trainer._replicated), tree)

        state = placed(jax.eval_shape(lambda t: trainer.program.init(t, 0), trainer._trainable))
        sums = placed(jax.eval_shape(trainer.program.zero_sums, state.trainable))
        trainer.compile(state, sums, placed(trainer._frozen))

    np.asarray(jax.device_put(0, where))  # the backend starts once, before the threads
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for name, future in {name: pool.submit(one, name) for name in cases}.items():
            if future.exception() is not None:  # its own run will say why
                print(f"{name}: not compiled beforehand: {str(future.exception()).splitlines()[0][:300]}", flush=True)


def device_memory_bytes() -> float | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def run_case(name: str, options, cache: str, folder: Path) -> dict:
    """The record of one case, or {"failed": why}."""
    from jaxtune.train.devices import CONTEXT_BYTES

    case, environment = CASES[name], dict(os.environ)
    total = device_memory_bytes()
    if case.get("budget_gb") and total:
        pool = case["budget_gb"] * 1e9 - CONTEXT_BYTES
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{pool / total:.5f}"
    output = folder / f"{name}.json"
    script = Path(__file__).with_name("step.py")
    command = [sys.executable, str(script), *step_arguments(case, options), "--cache", cache, "--output", str(output)]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.timeout} s"}
    if not output.exists():
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        return {"failed": " | ".join(lines[-3:])[:1000] or f"exit code {done.returncode}"}
    record = json.loads(output.read_text(encoding="utf-8"))
    record["seconds_in_all"] = time.perf_counter() - began
    return record


def verdict(name: str, cases: dict[str, dict]) -> dict:
    """What must be shown of a case, beside what was: {} where nothing is asked of it, or it did not run."""
    record = cases[name]
    speed = record.get("tokens_per_second")
    if speed is None:
        return {}
    shown: dict = {}
    if name in COMPARED and cases.get(COMPARED[name][0], {}).get("tokens_per_second"):
        other, floor, goal = COMPARED[name]
        ratio = speed / cases[other]["tokens_per_second"]
        shown |= {"against": other, "ratio": ratio, "floor": floor, "goal": goal, "met": ratio >= floor}
        if name == "inputs_offloaded":
            shown["less_gb"] = cases[other]["peak_memory_gb"] - record["peak_memory_gb"]
            shown["met"] = shown["met"] and shown["less_gb"] >= 3.8
    if name in FLOORS_TOKENS_PER_SECOND:
        shown["floor_tokens_per_second"] = FLOORS_TOKENS_PER_SECOND[name]
        shown["met"] = shown.get("met", True) and speed >= FLOORS_TOKENS_PER_SECOND[name]
    shown["predicted_over_measured_peak"] = record["predicted_peak_gb"] / record["peak_memory_gb"]
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="kept,24gb,24gb_one,16gb,16gb_one,10.8gb", help=", ".join(CASES))
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--override", default="{}", help="JSON of step.py's arguments that every case gets")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="programs that are compiled side by side")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--cache", default=tempfile.mkdtemp(), help="folder of compiled programs")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # this process only compiles these cases
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    if options.compile:
        compile_all(options.compile.split(","), options, options.cache)
        return 0
    names = options.cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"--cases: there is no {unknown[0]!r}; there are {', '.join(CASES)}")
    from benchmarks.record import environment, write

    began = time.perf_counter()
    # In a process of its own: it must give the device back before the cases begin.
    flags = ["--shape", options.shape, "--override", options.override, "--steps", str(options.steps)]
    flags += ["--threads", str(options.threads), "--cache", options.cache, "--output", options.output]
    subprocess.run([sys.executable, __file__, "--compile", options.cases, *flags], check=False)
    record: dict = {
        "benchmark": "train/memory",
        "compile_seconds_side_by_side": time.perf_counter() - began,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            record["cases"][name] = run_case(name, options, options.cache, Path(folder))
            shown = record["cases"][name]["verdict"] = verdict(name, record["cases"])
            speed, peak = (record["cases"][name].get(key) for key in ("tokens_per_second", "peak_memory_gb"))
            print(
                name, record["cases"][name].get("failed") or f"{speed:,.0f} tokens/s {peak:.2f} GB {shown}", flush=True
            )
            ran = next((case for case in record["cases"].values() if "device" in case), {})
            where = {key: ran[key] for key in ("device", "versions", "commit", "time") if key in ran}
            write(options.output, {**record, **where})  # after every case: a run that is cut short is not lost
    if not any("device" in case for case in record["cases"].values()):
        write(options.output, {**record, **environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
