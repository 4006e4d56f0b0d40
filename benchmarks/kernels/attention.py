"""Attention, forward and backward, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/attention.py --output FILE.json

32,768 tokens a case, 32 query and 8 key/value heads, bf16. Beside our kernels: cuDNN from JAX, also in its
deterministic mode (its packed path is exact up to 32 documents a row; beyond that its dq is wrong and the time stands
for comparison only), cuDNN and FlashAttention-2 from torch; our Triton kernels where jax-triton is installed. TFLOP/s
count what is visible: 4 D a visible pair and head forward, 2.5 times that backward. "predicted" is the time that the
visible 128 x 128 tiles would take at the speed of the fastest dense kernel of the run. `make gpu-test` checks every
feature against the fp32 reference.

All programs are compiled first, by a few threads, and then timed one after the other: about 90 s on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The rest is for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import environment, write
from jaxtune.pallas.attention import api, cudnn, mosaic, packed_layout, reference
from jaxtune.pallas.attention.shapes import CASES, Case

TILE = 128
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
COMPILERS = 6


def visible_pairs(case: Case) -> float:
    """Pairs of query and key that the case makes visible, in one head."""
    segments = case.segments()
    if segments is None:
        window = min(case.window or case.length, case.length)
        return case.rows * (window * (window + 1) / 2 + (case.length - window) * window)
    return sum(float(n) * (n + 1) / 2 for row in segments for n in np.bincount(row)[1:])


def visible_tiles(case: Case) -> int:
    """128 x 128 tiles with at least one visible pair, over all rows."""
    segments = case.segments()
    layout = packed_layout((case.rows, case.length), None if segments is None else jnp.asarray(segments))
    lower = np.asarray(layout.doc_start)
    if case.window is not None:
        lower = np.maximum(lower, np.arange(case.length) - case.window + 1)
    first = lower[:, ::TILE] // TILE
    return int((np.arange(case.length // TILE) - first + 1).sum())


def milliseconds(function, wait=jax.block_until_ready, seconds: float = 0.2) -> float:
    """Median over rounds of the mean of a few runs queued together, in about `seconds`: the same for every contender,
    since the longer a GPU works the slower it gets."""
    for _ in range(2):
        wait(function())
    begun = time.perf_counter()
    wait(function())
    once = time.perf_counter() - begun
    runs = 4 if once < 0.02 else 2
    rounds = max(3, min(9, round(seconds / (runs * once))))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(runs):
            result = function()
        wait(result)
        times.append((time.perf_counter() - begun) / runs * 1e3)
    return statistics.median(times)


@functools.cache
def operands(rows, length, heads, kv_heads, dim):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def options_of(case: Case) -> dict:
    options: dict = {"scale": case.dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    if case.sinks:
        options["sinks"] = jnp.linspace(-1, 1, case.heads)
    return options


def layout_of(case: Case, promise: bool):
    segments = case.segments()
    if segments is None:
        return packed_layout((case.rows, case.length))
    return packed_layout((case.rows, case.length), jnp.asarray(segments), int(segments.max()) if promise else None)


@dataclasses.dataclass
class Contender:
    """An implementation on a case: its compiled programs, or why there are none."""

    name: str
    module: object
    promise: bool = False  # whether it needs to be told the most documents a row
    compiler_options: dict = dataclasses.field(default_factory=dict)
    forward: object = None
    backward: object = None
    error: str | None = None

    def compile(self, case: Case):
        layout, options = layout_of(case, self.promise), options_of(case)
        query, key, value, dout = operands(case.rows, case.length, case.heads, case.kv_heads, case.dim)

        def forward(query, key, value, layout):
            return self.module.forward(query, key, value, layout, **options)

        def backward(query, key, value, out, lse, dout, layout):
            return self.module.backward(query, key, value, out, lse, dout, layout, **options)[:3]

        lse = jax.ShapeDtypeStruct((case.rows, case.heads, case.length), jnp.float32)
        try:
            lowered = jax.jit(forward).lower(query, key, value, layout)
            self.forward = lowered.compile(compiler_options=self.compiler_options)
            lowered = jax.jit(backward).lower(query, key, value, query, lse, dout, layout)
            self.backward = lowered.compile(compiler_options=self.compiler_options)
        except Exception as error:  # a limit of the library or of the GPU: it belongs in the record
            self.error = f"{type(error).__name__}: {str(error)[:200]}"
        return self

    def times(self, case: Case) -> dict:
        if self.error:
            return {"error": self.error}
        layout = layout_of(case, self.promise)
        query, key, value, dout = operands(case.rows, case.length, case.heads, case.kv_heads, case.dim)
        try:
            out, lse = self.forward(query, key, value, layout)
            result: dict = {
                "forward_ms": milliseconds(lambda: self.forward(query, key, value, layout)),
                "backward_ms": milliseconds(lambda: self.backward(query, key, value, out, lse, dout, layout)),
            }
            if self.module is not cudnn and self.module is not reference:
                result["bitwise_over_20_runs"] = self._same(case, out, lse, layout)
            return result
        except jax.errors.JaxRuntimeError as error:  # cuDNN's packed backward may want more memory than there is
            return {"error": str(error)[:200]}

    def _same(self, case, out, lse, layout) -> bool:
        query, key, value, dout = operands(case.rows, case.length, case.heads, case.kv_heads, case.dim)
        equal = jax.jit(lambda a, b: jnp.array([(x == y).all() for x, y in zip(a, b, strict=True)]).all())

        def everything(out, lse):
            return (out, lse, *self.backward(query, key, value, out, lse, dout, layout))

        first = everything(out, lse)
        same = []
        for _ in range(20 if case.length <= 8192 else 3):
            same.append(equal(first, everything(*self.forward(query, key, value, layout))))
        return all(bool(s) for s in same)


def contenders(case: Case) -> list[Contender]:
    found = [Contender("mosaic", mosaic)]
    if case.soft_cap is None and not case.sinks:
        found.append(Contender("cudnn_jax", cudnn, promise=True))
        if case.name in ("dense 8,192", "dense 32,768", "packed, log-normal mean 512"):
            found.append(Contender("cudnn_jax_deterministic", cudnn, True, DETERMINISTIC))
    if case.dim > 128:  # what runs where cuDNN does not
        found.append(Contender("xla", reference))
    triton = api.IMPLEMENTATIONS.get("triton")
    if triton is not None and importlib.util.find_spec("jax_triton") and case.dim <= 128:
        found.append(Contender("triton", triton))
    return found


def _torch_times(query, key, value) -> dict[str, float]:
    import torch

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def timed(function):
        return milliseconds(function, lambda _: torch.cuda.synchronize())

    out = attend()
    dout = torch.randn_like(out)
    return {
        "forward_ms": timed(attend),
        "backward_ms": timed(lambda: torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)),
    }


def measure_torch(case: Case) -> dict[str, dict]:
    """cuDNN and FlashAttention-2 through torch's scaled_dot_product_attention, whole causal rows only."""
    if (
        case.documents is not None
        or case.window
        or case.soft_cap
        or case.sinks
        or not importlib.util.find_spec("torch")
    ):
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [(case.rows, heads, case.length, case.dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    arrays = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    result: dict[str, dict] = {}
    for name, backend, deterministic in (
        ("cudnn_torch", SDPBackend.CUDNN_ATTENTION, False),
        ("cudnn_torch_deterministic", SDPBackend.CUDNN_ATTENTION, True),
        ("flash2_torch", SDPBackend.FLASH_ATTENTION, False),
        ("flash2_torch_deterministic", SDPBackend.FLASH_ATTENTION, True),
    ):
        if deterministic and case.name != "dense 8,192":
            continue
        try:
            torch.use_deterministic_algorithms(deterministic)
            with sdpa_kernel(backend):
                result[name] = _torch_times(*arrays)
        except RuntimeError as error:
            result[name] = {"error": str(error)[:200]}
        finally:
            torch.use_deterministic_algorithms(False)
    del arrays
    torch.cuda.empty_cache()
    return result


def layout_cost(times: int = 50) -> float:
    """Milliseconds to build the layout of 8 x 8,192 tokens with rotary tables, by the device's clock: many builds, each
    from other ids, in one program, so that the host's call counts little."""
    from jaxtune.models.config import RopeConfig
    from jaxtune.models.rope import rotary_table

    packed = next(case for case in CASES if case.documents == "log-normal")
    segments = jnp.asarray(np.tile(packed.segments(), (8 // packed.rows, 1)))

    def build(number, built):
        layout = packed_layout(segments.shape, segments + number)
        table = rotary_table(RopeConfig(theta=500000.0), 128, 131072, layout.positions())
        return layout.doc_start, layout.doc_end, table

    program = jax.jit(lambda built: jax.lax.fori_loop(0, times, build, built))
    first = build(0, None)
    return milliseconds(lambda: program(first)) / times


def must_show(rows: list[dict], layout_ms: float) -> list[dict]:
    """What the kernels are held to: [{kernel, what, value, floor, goal, at_most}] of what was measured."""
    by_name = {row["case"]: row for row in rows}

    def of(case: str, names: str, key: str) -> float | None:
        """The least of these contenders' figures."""
        times = by_name.get(case, {}).get("times", {})
        return min((times[name][key] for name in names.split() if key in times.get(name, {})), default=None)

    lines = []

    def line(what: str, above: float | None, below: float | None, floor, goal, at_most=False) -> None:
        if above and below:
            value = round(above / below, 3)
            lines.append(dict(kernel="attention", what=what, value=value, floor=floor, goal=goal, at_most=at_most))

    vendor, exact = "cudnn_jax cudnn_torch", "cudnn_jax_deterministic cudnn_torch_deterministic"
    packed, wide = "packed, log-normal mean 512", "head dim 256"
    # (case, whose speed ours is held against, what it is called, which times, floor, goal)
    fw, both = "forward", "forward+backward"
    against = [
        ("dense 8,192", vendor, "speed over cuDNN's", fw, 0.9, 1.0),
        ("dense 8,192", vendor, "speed over cuDNN's", both, 0.75, 0.95),
        ("dense 8,192", exact, "over cuDNN's deterministic", both, 1.0, None),
        ("dense 32,768", vendor, "speed over cuDNN's", fw, 0.9, 1.0),
        ("dense 32,768", vendor, "speed over cuDNN's", both, 0.75, 0.95),
        ("dense 32,768", exact, "over cuDNN's deterministic", both, 1.0, None),
        ("dense 2,048", "cudnn_jax", "over cuDNN from JAX", fw, 1.0, None),
        ("dense 2,048", "cudnn_torch", "over cuDNN from torch", fw, None, 1.0),
        ("dense 2,048", "cudnn_jax", "over cuDNN from JAX", both, 1.0, None),
        ("dense 2,048", "cudnn_torch", "over cuDNN from torch", both, None, 1.0),
        (packed, "cudnn_jax", "over cuDNN's packed path", both, 1.5, None),
        ("32 documents a row", "cudnn_jax", "over cuDNN packed", both, 2.5, 4.0),
        ("64 documents a row", "cudnn_jax", "over cuDNN packed", both, 4.0, 8.0),
        (wide, vendor, "speed over cuDNN's", fw, None, 1.0),
        (wide, vendor, "speed over cuDNN's", both, 0.75, 1.0),
        (f"{wide}, packed, soft cap", "xla", "speed over XLA's", fw, 1.0, None),
        (f"{wide}, packed, soft cap", "xla", "speed over XLA's", both, 1.0, None),
    ]
    keys = {fw: "forward_ms", both: "both_ms"}
    for case, others, words, part, floor, goal in against:
        line(f"{case}, {part}: {words}", of(case, others, keys[part]), of(case, "mosaic", keys[part]), floor, goal)
    ours = of(packed, "mosaic", "both_ms")
    line(f"{packed}: over cuDNN's dense", of("dense 8,192", vendor, "both_ms"), ours, 3.0, None)
    for case in (packed, "window 4,096", "window 128"):
        predicted = by_name.get(case, {}).get("predicted", {}).get("both_ms")
        what = f"{case}: time over that predicted by visible tiles"
        line(what, of(case, "mosaic", "both_ms"), predicted, 1.5, 1.2, at_most=True)
    for case in ("soft cap", "sinks", "head dim 64"):
        for key, part in (("forward_tflops", fw), ("both_tflops", both)):
            plain = of("dense 8,192", "mosaic", key)
            line(f"{case}, {part}: TFLOP/s over the plain case's", of(case, "mosaic", key), plain, 0.75, 0.9)
    what = "layout of 8 x 8,192, share of one layer's attention"
    line(what, layout_ms, ours and 2 * ours, 0.01, 0.003, at_most=True)
    for part, key in keys.items():
        theirs, triton = of("dense 8,192", "flash2_torch", key), of("dense 8,192", "triton", key)
        line(f"dense 8,192, {part}: Triton over FlashAttention-2", theirs, triton, 0.8, 1.0)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cases", help="comma-separated parts of case names")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.cases or any(p in c.name for p in options.cases.split(","))]
    began = time.perf_counter()
    result: dict = {"benchmark": "kernels/attention", **environment(), "cases": []}
    with ThreadPoolExecutor(COMPILERS) as pool:  # timing starts when nothing compiles any more
        waiting = [[pool.submit(contender.compile, case) for contender in contenders(case)] for case in cases]
    for case, futures in zip(cases, waiting, strict=True):
        ready = [future.result() for future in futures]
        times = {contender.name: contender.times(case) for contender in ready} | measure_torch(case)
        record = {"case": case.name, "pairs": visible_pairs(case), "tiles": visible_tiles(case), "times": times}
        flops = 4 * case.heads * case.dim * record["pairs"]
        for found in times.values():
            if "forward_ms" in found:
                found["forward_tflops"] = flops / found["forward_ms"] / 1e9
            if "backward_ms" in found:
                found["both_ms"] = found["forward_ms"] + found["backward_ms"]
                found["both_tflops"] = 3.5 * flops / found["both_ms"] / 1e9
        result["cases"].append(record)
        shown = {name: [round(t[key], 3) for key in ("forward_ms", "both_ms") if key in t] for name, t in times.items()}
        print(f"[{time.perf_counter() - began:5.1f}] {case.name:28s} {shown}", flush=True)
        operands.cache_clear()
        write(options.output, result)  # what was measured stays, whatever comes
    dense = [r for r in result["cases"] if r["case"].startswith("dense")]
    for key in ("forward_ms", "both_ms"):
        # The fastest dense kernel of the run sets what a visible tile should cost.
        per_tile = min((t[key] / r["tiles"] for r in dense for t in r["times"].values() if key in t), default=None)
        for record in result["cases"] if per_tile else ():
            record.setdefault("predicted", {})[key] = per_tile * record["tiles"]
    result["layout_8x8192_ms"] = layout_cost()
    result["must_show"] = must_show(result["cases"], result["layout_8x8192_ms"])
    result["seconds"] = round(time.perf_counter() - began, 1)
    write(options.output, result)
    for line in result["must_show"]:
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
