"""What the planner, offload and long rows reach, beside what must be shown of them.

    python benchmarks/train/memory.py [CASE ...] [--seconds 560] --output FILE.json

Each case is measured by benchmarks/train/step.py in a process of its own; with a budget its allocator
holds no more, so that exceeding it fails, and fails alone. The programs of the cases are compiled side by side
beforehand, in one process each, into one cache: where XLA times algorithms in the measured process, its buffers can be
the peak. 8B shape, NF4 + LoRA r=16, 8 x 2,048 tokens unless said.

A FILE.json that is there is added to: cases that it holds without a failure are not run again, and the verdicts are
made anew over all of them; so several calls of at most --seconds make one record. Beside it, a .log of what the runs
print. The stored record's cases that are not here were made once, `longest` by `d6c9863:benchmarks/train/longest.py`,
the others by `08e68ab:benchmarks/train/memory.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.cases import Step
from benchmarks.processes import ROOT, Call, Side
from benchmarks.record import commit_here, driver_bytes, write

EVERYTHING = "layer_input, query, key, value, attention_out, lse, mid, gate, up"
_OFFLOAD_ALL = ", ".join(f"{name}=offload" for name in EVERYTHING.split(", "))
_8B = "--shape llama-3.1-8b --load-in nf4"
_LONG = f"{_8B} --rows 1 --length 65536 --budget-gb 40"
_FULL = "--shape llama-3.1-8b --rows 2 --rank 0 --optim adamw_8bit"
CASES = {
    "kept": Step(f"{_8B} --plan keep --micro-batches 1"),
    "recompute": Step(f"{_8B} --plan recompute --micro-batches 1"),
    "inputs_offloaded": Step(f"{_8B} --plan 'recompute, layer_input=offload' --micro-batches 1"),
    "24gb": Step(f"{_8B} --plan auto --budget-gb 24"),
    "24gb_one": Step(f"{_8B} --plan auto --budget-gb 24 --micro-batches 1"),
    "16gb": Step(f"{_8B} --plan auto --budget-gb 16"),
    "16gb_one": Step(f"{_8B} --plan auto --budget-gb 16 --micro-batches 1"),
    "10.8gb": Step(f"{_8B} --plan auto --budget-gb 10.8"),
    "link_bound": Step(f"{_8B} --plan '{_OFFLOAD_ALL}' --micro-batches 1"),
    "compile": Step(f"{_8B} --plan '{_OFFLOAD_ALL}' --micro-batches 1", steps=3, cold=True),
    "document_recompute": Step(f"{_LONG} --plan recompute", steps=3),
    "document": Step(f"{_LONG} --plan auto", steps=3),
    "1b_full": Step("--shape llama-3.2-1b --rank 0 --plan keep --micro-batches 1"),
    "3b": Step("--shape llama-3.2-3b --length 4096 --plan 'gate=recompute, up=recompute' --micro-batches 1", steps=3),
    "full_8b": Step(f"{_FULL} --plan auto"),
    "full_8b_kept": Step(f"{_FULL} --plan keep --micro-batches 1"),
    "full_8b_states_on_host": Step(f"{_FULL} --plan keep --micro-batches 1 --optim-offload"),
}
# case: (whose speed it is held against, floor of the ratio or None, goal or None)
COMPARED: dict[str, tuple[str, float | None, float | None]] = {
    "inputs_offloaded": ("recompute", 0.98, 0.995),
    "24gb": ("kept", 0.93, 0.98),
    "24gb_one": ("kept", 0.88, 0.92),
    "16gb": ("kept", 0.90, 0.95),
    "16gb_one": ("kept", 0.83, 0.88),
    "document": ("document_recompute", 1.15, 1.25),
    "full_8b": ("full_8b_kept", None, 0.9),
    "full_8b_states_on_host": ("full_8b_kept", None, None),
}
TOKENS_PER_SECOND = {"24gb": (15_700, None), "10.8gb": (12_500, 15_000)}  # floor, goal
LESS_GB = 3.8  # that layer inputs on the host save at least
LINK_BOUND = (1.10, 1.05)  # a link-bound step over max(compute, transfer): floor, goal
COMPILE_SECONDS = {"cold": (90.0, 45.0), "cached": (10.0, 5.0)}
PEAKS = (0.97, 1.07)  # predicted over measured
PEAK_CASES = 8  # that this is asked of: of at least so many


def pool_of(case: Step) -> dict[str, str]:
    """What holds the allocator of a case to its budget: variables of its environment."""
    from jaxtune.train.planning.devices import CONTEXT_BYTES

    words, total = case.arguments.split(), driver_bytes()
    if "--budget-gb" not in words or not total:
        return {}
    budget = float(words[words.index("--budget-gb") + 1]) * 1e9
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{(budget - CONTEXT_BYTES) / total:.5f}"}


def must_show(cases: dict[str, dict]) -> list[dict]:
    """[{what, value, floor, goal, at_most}] of what these cases measured; at_most: less is better.

    floor and goal are None where nothing is asked but the figure itself.
    """
    from jaxtune.train.planning.devices import find_device

    ran = {name: record for name, record in cases.items() if "failed" not in record}
    rows: list[dict] = []

    def show(what: str, value: float, floor=None, goal=None, at_most: bool = False) -> None:
        rows.append({"what": what, "value": value, "floor": floor, "goal": goal, "at_most": at_most})

    speeds = {name: record["tokens_per_second"] for name, record in ran.items()}
    for name, (other, floor, goal) in COMPARED.items():
        if {name, other} <= speeds.keys():
            show(f"{name}: speed over {other}", speeds[name] / speeds[other], floor, goal)
    for name, bounds in TOKENS_PER_SECOND.items():
        if name in speeds:
            show(f"{name}: tokens/s", speeds[name], *bounds)
    if {"recompute", "inputs_offloaded"} <= ran.keys():
        less = ran["recompute"]["peak_memory_gb"] - ran["inputs_offloaded"]["peak_memory_gb"]
        show("inputs_offloaded: GB less than recompute", less, LESS_GB)
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
        show("full fine-tuning of 8B, 2 x 2,048: tokens/s", speeds["full_8b"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    names = options.cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case of this name: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    call = Call(options.output, options.seconds)
    record = call.begun({"benchmark": "train/memory", "cases": {}})
    names = [name for name in names if "failed" in record["cases"].get(name, {"failed": "not run"})]
    side = Side("new", ROOT, commit_here(), Path(tempfile.mkdtemp()))
    call.ahead([(side, [CASES[name] for name in names])])
    for name in names:
        found = call.run(side, CASES[name], name, 30, 150, pool_of(CASES[name]))
        if found is None:
            break
        record["cases"][name] = found
        record["must_show"] = must_show(record["cases"])
        record |= {key: found[key] for key in ("device", "versions", "commit", "time") if key in found}
        write(options.output, record)  # after every case: a run that is cut short is not lost
    for row in record.get("must_show", ()):
        print(row)
    return int(any("failed" in record["cases"].get(name, {"failed": "not run"}) for name in names))


if __name__ == "__main__":
    sys.exit(main())
