"""Steps of models of experts with the grouped product's measured blocks, beside those with the blocks by rule.

    python benchmarks/train/tuned.py [CASE ...] [--rounds 2] [--seconds 540] [--each 120] --output FILE.json

First `jaxtune tune grouped_matmul` measures blocks, in a folder of its own beside FILE.json; then each case runs by the
rule's blocks and by the measured ones in turns, in processes of their own. A FILE.json that is there is added to. It
has what the tuner found (`blocks`), the runs, and of each case the ratio of the medians of tokens per second, measured
blocks over the rule's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.__main__ import kept, ratio
from benchmarks.cases import STEPS
from benchmarks.processes import ROOT, Call, Side, wait
from benchmarks.record import commit_here, write

CASES = ("qwen3_moe_kept", "gpt_oss_one")


def tune(side: Side, folder: Path, call: Call) -> dict:
    """{product: what the tuner found}, of the measurements in `folder`, which are made unless they are there."""
    if not (files := list(folder.glob("*.json"))):
        log = folder.with_suffix(".log")
        process: subprocess.Popen = side.run("-m", ["jaxtune", "tune", "grouped_matmul"], log)
        if problem := wait(process, call.left / 2):
            print(f"tune grouped_matmul: {problem}; see {log}", flush=True)
        files = list(folder.glob("*.json"))
    return json.loads(files[0].read_text(encoding="utf-8"))["entries"] if files else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"steps of `python -m benchmarks`; default: {CASES}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all")
    parser.add_argument("--each", type=float, default=120.0, help="for a run")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    names = options.cases or list(CASES)
    call = Call(options.output.resolve(), options.seconds)
    folder = call.output.with_suffix(".tuning")
    folder.mkdir(exist_ok=True)
    caches = Path(tempfile.mkdtemp())
    commit = commit_here()
    tuned = Side("tuned", ROOT, commit, caches / "tuned", {"JAXTUNE_TUNING_DIR": str(folder)})
    rule = Side("rule", ROOT, commit, caches / "rule", {"JAXTUNE_TUNING_DIR": str(caches / "nothing")})
    record = call.begun({"benchmark": "train/tuned", "commit": commit, "cases": {}, "ratios": {}})
    record["blocks"] = tune(tuned, folder, call)
    write(call.output, record)
    if not record["blocks"]:
        return 1
    done = {
        (name, run["side"], run["round"])
        for name, runs in record["cases"].items()
        for run in runs
        if "failed" not in run
    }
    turns = itertools.product(range(1, options.rounds + 1), names, (rule, tuned))
    missing = [turn for turn in turns if (turn[1], turn[2].name, turn[0]) not in done]
    call.ahead([(side, [STEPS[name] for name in names]) for side in (rule, tuned)] if missing else [])
    for number, name, side in missing:
        found = call.run(side, STEPS[name], f"{name}: {side.name} {number}", 30, options.each)
        if found is None:
            return 1
        runs = record["cases"][name] = [run for run in record["cases"].get(name, ()) if "failed" not in run]
        runs.append(kept(found) | {"side": side.name, "round": number})
        record["ratios"][name] = ratio(runs, rule.name, tuned.name)
        record |= {key: found[key] for key in ("device", "versions", "time") if key in found}
        write(call.output, record)
    print(record["ratios"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
