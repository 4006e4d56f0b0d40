"""Attention, forward and backward, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/attention.py --output FILE.json

32,768 tokens a case, 32 query and 8 key/value heads, bf16. Beside our kernels: cuDNN from JAX, also in its
deterministic mode (its packed path is exact up to 32 documents a row; beyond that its dq is wrong and the time stands
for comparison only), cuDNN and FlashAttention-2 from torch; our Triton kernels where jax-triton is installed, also with
tiles that fit the 99 KB of shared memory of consumer cards. TFLOP/s count what is visible: 4 D a visible pair and head
forward, 2.5 times that backward. "predicted" is the time that the visible 128 x 128 tiles would take at the speed of
the fastest dense kernel of the run. Every feature is checked against the fp32 reference first.

All programs are compiled first, by a few threads, and then timed one after the other: about 90 s on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
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
from unittest import mock

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
    patch: contextlib.AbstractContextManager = dataclasses.field(default_factory=contextlib.nullcontext)
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
            if self.module is not mosaic or case.dim <= max(mosaic.BACKWARD_KEY):
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
            result: dict = {"forward_ms": milliseconds(lambda: self.forward(query, key, value, layout))}
            if self.backward is not None:
                result["backward_ms"] = milliseconds(lambda: self.backward(query, key, value, out, lse, dout, layout))
            if self.module is not cudnn and self.module is not reference:
                result["bitwise_over_20_runs"] = self._same(case, out, lse, layout)
            return result
        except jax.errors.JaxRuntimeError as error:  # cuDNN's packed backward may want more memory than there is
            return {"error": str(error)[:200]}

    def _same(self, case, out, lse, layout) -> bool:
        query, key, value, dout = operands(case.rows, case.length, case.heads, case.kv_heads, case.dim)
        equal = jax.jit(lambda a, b: jnp.array([(x == y).all() for x, y in zip(a, b, strict=True)]).all())

        def everything(out, lse):
            gradients = () if self.backward is None else self.backward(query, key, value, out, lse, dout, layout)
            return (out, lse, *gradients)

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
        if case.name in ("dense 8,192", "packed, log-normal mean 512", "head dim 64"):
            found.append(Contender("triton_99kb", triton, patch=mock.patch.object(triton, "_SHARED_MEMORY_KB", {})))
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


# What `check` compares: every feature and head dim, on one short packed row with padding.
CHECKS = {
    "packed": {},
    "window": {"window": 300},
    "soft cap": {"soft_cap": 30.0},
    "sinks": {"sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
    "head dim 64": {"dim": 64},
    "head dim 256": {"dim": 256, "soft_cap": 30.0, "window": 300},
}


def check(features: dict) -> dict[str, list[float]]:
    """Relative errors of out, dq, dk, dv (and the sinks' gradient), of our kernels and of XLA's bf16, against fp32."""
    features = dict(features)
    case = Case("check", 1, 2048, heads=8, kv_heads=2, dim=features.pop("dim", 128), documents="log-normal")
    segments = case.segments().copy()
    segments[0, 100:140] = segments[0, -77:] = 0
    layout = packed_layout(segments.shape, jnp.asarray(segments))
    options = {"scale": case.dim**-0.5, **features}

    def run(module, query, key, value, dout):
        out, lse = module.forward(query, key, value, layout, **options)
        if case.dim > max(mosaic.BACKWARD_KEY):
            return [out]
        gradients = module.backward(query, key, value, out, lse, dout, layout, **options)
        return [x for x in (out, *gradients) if x is not None]

    def error(got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        return round(float(np.linalg.norm(got - want) / np.linalg.norm(want)), 5)

    small = operands(1, case.length, case.heads, case.kv_heads, case.dim)

    def results(module, operands):
        # XLA's search for the fastest matrix products would take longer than the rest of the benchmark.
        program = jax.jit(functools.partial(run, module), compiler_options={"xla_gpu_autotune_level": 0})
        return program(*operands)

    exact = results(reference, [x.astype(jnp.float32) for x in small])
    return {
        name: [error(g, e) for g, e in zip(results(module, small), exact, strict=True)]
        for name, module in (("mosaic", mosaic), ("xla", reference))
    }


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


def summary(rows: list[dict], layout_ms: float) -> list[dict]:
    """What the kernels are held to, each line with its figure, floor and goal; None where it was not measured."""
    by_name = {row["case"]: row for row in rows}

    def time_of(case, name, key):
        return by_name.get(case, {}).get("times", {}).get(name, {}).get(key)

    def fastest(case, names, key):
        found = [t for t in (time_of(case, name, key) for name in names) if t]
        return min(found) if found else None

    def ratio(above, below):
        return round(above / below, 3) if above and below else None

    lines = []

    def line(what, value, floor, goal):
        lines.append({"what": what, "value": value, "floor": floor, "goal": goal})

    both, forward = "both_ms", "forward_ms"
    vendor = ("cudnn_jax", "cudnn_torch")
    exact = ("cudnn_jax_deterministic", "cudnn_torch_deterministic")
    for case in ("dense 8,192", "dense 32,768"):
        ours, ours_forward = time_of(case, "mosaic", both), time_of(case, "mosaic", forward)
        line(f"{case}, forward: speed over cuDNN's", ratio(fastest(case, vendor, forward), ours_forward), 0.9, 1.0)
        line(f"{case}, forward+backward: speed over cuDNN's", ratio(fastest(case, vendor, both), ours), 0.75, 0.95)
        line(
            f"{case}, forward+backward: over cuDNN's deterministic", ratio(fastest(case, exact, both), ours), 1.0, None
        )
    for key, part in ((forward, "forward"), (both, "forward+backward")):
        ours = time_of("dense 2,048", "mosaic", key)
        line(
            f"dense 2,048, {part}: over cuDNN from JAX",
            ratio(time_of("dense 2,048", "cudnn_jax", key), ours),
            1.0,
            None,
        )
        torch_ms = time_of("dense 2,048", "cudnn_torch", key)
        line(f"dense 2,048, {part}: over cuDNN from torch", ratio(torch_ms, ours), None, 1.0)
    packed = "packed, log-normal mean 512"
    ours = time_of(packed, "mosaic", both)
    line(f"{packed}: over cuDNN's packed path", ratio(time_of(packed, "cudnn_jax", both), ours), 1.5, None)
    line(f"{packed}: over cuDNN's dense", ratio(fastest("dense 8,192", vendor, both), ours), 3.0, None)
    for case, floor, goal in (("32 documents a row", 2.5, 4.0), ("64 documents a row", 4.0, 8.0)):
        line(
            f"{case}: over cuDNN packed",
            ratio(time_of(case, "cudnn_jax", both), time_of(case, "mosaic", both)),
            floor,
            goal,
        )
    for case in (packed, "window 4,096", "window 128"):
        predicted = by_name.get(case, {}).get("predicted", {}).get(both)
        line(
            f"{case}: time over that predicted by visible tiles",
            ratio(time_of(case, "mosaic", both), predicted),
            1.5,
            1.2,
        )
    for case in ("soft cap", "sinks", "head dim 64"):
        for key, part in (("forward_tflops", "forward"), ("both_tflops", "forward+backward")):
            plain = time_of("dense 8,192", "mosaic", key)
            line(
                f"{case}, {part}: TFLOP/s over the plain case's", ratio(time_of(case, "mosaic", key), plain), 0.75, 0.9
            )
    wide, wide_packed = "head dim 256", "head dim 256, packed, soft cap"
    ours = time_of(wide, "mosaic", forward)
    line(f"{wide}, forward: speed over cuDNN's", ratio(fastest(wide, vendor, forward), ours), None, 1.0)
    ours = time_of(wide_packed, "mosaic", forward)
    line(f"{wide_packed}, forward: speed over XLA's", ratio(time_of(wide_packed, "xla", forward), ours), 1.0, None)
    ours = time_of(packed, "mosaic", both)
    line("layout of 8 x 8,192, share of one layer's attention", ratio(layout_ms, ours and 2 * ours), 0.01, 0.003)
    for key, part in ((forward, "forward"), (both, "forward+backward")):
        line(
            f"dense 8,192, {part}: Triton over FlashAttention-2",
            ratio(time_of("dense 8,192", "flash2_torch", key), time_of("dense 8,192", "triton", key)), 0.8, 1.0,
        )  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cases", help="comma-separated parts of case names")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.cases or any(p in c.name for p in options.cases.split(","))]
    began = time.perf_counter()
    result: dict = {"benchmark": "kernels/attention", **environment(), "checks": {}, "cases": []}
    pool = ThreadPoolExecutor(COMPILERS)
    checks = {name: pool.submit(check, features) for name, features in CHECKS.items()}
    compiled = {}
    for case in cases:
        compiled[case.name] = []
        for contender in contenders(case):
            if isinstance(contender.patch, contextlib.nullcontext):
                compiled[case.name].append(pool.submit(contender.compile, case))
    for name, found in checks.items():
        result["checks"][name] = found.result()
        print(f"check {name:14s} {result['checks'][name]}", flush=True)
    for case in cases:
        record = {"case": case.name, "pairs": visible_pairs(case), "tiles": visible_tiles(case), "times": {}}
        result["cases"].append(record)
    pool.shutdown(wait=True)  # timing starts when nothing compiles any more
    for case, record in zip(cases, result["cases"], strict=True):
        ready = [future.result() for future in compiled[case.name]]
        for contender in contenders(case):
            if not isinstance(contender.patch, contextlib.nullcontext):
                with contender.patch:  # changes what every thread sees: compiled alone
                    ready.append(contender.compile(case))
        times = record["times"] = {contender.name: contender.times(case) for contender in ready}
        times.update(measure_torch(case))
        flops = 4 * case.heads * case.dim * record["pairs"]
        for found in times.values():
            if "forward_ms" in found:
                found["forward_tflops"] = flops / found["forward_ms"] / 1e9
            if "backward_ms" in found:
                found["both_ms"] = found["forward_ms"] + found["backward_ms"]
                found["both_tflops"] = 3.5 * flops / found["both_ms"] / 1e9
        shown = {
            name: [round(t[key], 3) for key in ("forward_ms", "both_ms") if key in t]
            for name, t in times.items()
            if "forward_ms" in t
        }
        print(f"[{time.perf_counter() - began:5.1f}] {case.name:28s} {shown}", flush=True)
        operands.cache_clear()
        write(options.output, result)  # what was measured stays, whatever comes
    dense = [r for r in result["cases"] if r["case"].startswith("dense")]
    if dense:
        # The fastest dense kernel of the run sets what a visible tile should cost.
        per_tile = {
            key: min(t[key] / r["tiles"] for r in dense for t in r["times"].values() if key in t)
            for key in ("forward_ms", "both_ms")
        }
        for record in result["cases"]:
            record["predicted"] = {key: value * record["tiles"] for key, value in per_tile.items()}
    result["layout_8x8192_ms"] = layout_cost()
    result["must_show"] = summary(result["cases"], result["layout_8x8192_ms"])
    result["seconds"] = round(time.perf_counter() - began, 1)
    write(options.output, result)
    for line in result["must_show"]:
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
