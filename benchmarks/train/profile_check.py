"""Is the profile true? The three largest kernels of the 8B step, each alone: read by jaxtune.profile, timed by
the wall clock without a profiler, and by Nsight Compute where it is installed.

    python benchmarks/train/profile_check.py [--tokens 16384] [--calls 40] [--output FILE.json]

A call lasts milliseconds and calls are dispatched ahead, so the wall clock over many of them is their time.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

import jaxtune
from benchmarks.record import environment, write
from jaxtune.pallas.attention import attention_backward, attention_forward, packed_layout

HIDDEN, INTERMEDIATE, LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 14336, 2048, 32, 8, 128


def operations(tokens: int):
    """name -> (jitted function, arguments): the step's largest products and the attention's backward."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    rows = max(1, tokens // LENGTH)

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    product = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    query, dout = (normal(rows, LENGTH, HEADS, HEAD_DIM) for _ in range(2))
    key, value = (normal(rows, LENGTH, KEY_HEADS, HEAD_DIM) for _ in range(2))
    layout = packed_layout((rows, LENGTH))
    scale = HEAD_DIM**-0.5
    out, lse = jax.jit(lambda q, k, v: attention_forward(q, k, v, layout, scale=scale))(query, key, value)
    backward = jax.jit(lambda *a: attention_backward(*a, layout, scale=scale))
    return {
        "gate_up": (product, (normal(tokens, HIDDEN), normal(INTERMEDIATE, HIDDEN))),
        "down": (product, (normal(tokens, INTERMEDIATE), normal(HIDDEN, INTERMEDIATE))),
        "attention_backward": (backward, (query, key, value, out, lse, dout)),
    }


def run(function, arguments, calls: int) -> float:
    """Milliseconds a call by the wall clock."""
    began = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls * 1e3


def by_ncu(tokens: int) -> dict[str, float]:
    """kernel name -> median milliseconds, from Nsight Compute; empty where it is not installed."""
    if shutil.which("ncu") is None:
        return {}
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv", "--metrics",
               "gpu__time_duration.sum", "--kernel-name", "regex:nvjet|gemm|cudnn|attention|flash|bprop",
               sys.executable, __file__, "--under-ncu", "--tokens", str(tokens)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    start = done.stdout.find('"ID"')
    if start < 0:
        print("ncu gave no table:", (done.stdout + done.stderr)[-600:], file=sys.stderr)
        return {}
    scale = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0}
    seen = defaultdict(list)
    for row in csv.DictReader(io.StringIO(done.stdout[start:])):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            value = float(row["Metric Value"].replace(",", ""))
            seen[row["Kernel Name"]].append(value * scale[row["Metric Unit"]])
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--output")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.under_ncu:
        for function, arguments in operations(options.tokens).values():
            run(function, arguments, 6)
        return 0
    ncu = by_ncu(options.tokens)  # first: this process has not taken the device's memory yet
    rows = []
    for name, (function, arguments) in operations(options.tokens).items():
        run(function, arguments, options.calls)
        before = run(function, arguments, options.calls)
        with tempfile.TemporaryDirectory() as scratch:
            with jaxtune.profile.capture(Path(scratch) / "profile"):
                for _ in range(options.calls):
                    result = function(*arguments)
                jax.block_until_ready(result)
            report = jaxtune.profile.show(Path(scratch) / "profile")
        after = run(function, arguments, options.calls)
        calls = options.calls / len(report.steps_ms)
        wall = (before + after) / 2
        read = sum(row.ms for row in report.kernels) / calls
        kernels = {row.name: row.ms / row.count for row in report.kernels}
        rows.append({"operation": name, "wall_ms": wall, "profile_ms": read, "profile_over_wall": read / wall,
                     "kernels_ms": kernels})  # fmt: skip
        print(f"{name}: wall {wall:.4f} ms, profile {read:.4f} ms, ratio {read / wall:.4f}")
        print("   ", kernels)
    print("ncu:", ncu)
    record = {"benchmark": "train/profile_check", **environment(), "tokens": options.tokens, "calls": options.calls,
              "operations": rows, "ncu_ms": ncu}  # fmt: skip
    if options.output:
        write(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
