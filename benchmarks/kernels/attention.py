"""Attention, forward and backward, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/attention.py --output FILE.json

32,768 tokens a case, 32 query and 8 key/value heads, bf16. Beside our kernels: cuDNN from JAX (whole rows; its packed
path up to 32 documents a row is exact, beyond that its dq is wrong and the time stands for comparison only), cuDNN and
FlashAttention-2 from torch. TFLOP/s count what is visible: 4 D a visible pair and head forward, 2.5 times that
backward. "predicted" is the time that the visible 128 x 128 tiles would take at the speed of the fastest dense kernel
of the run. Every case is checked against the fp32 reference on one row first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

# Half for jax, the rest for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import environment, write
from jaxtune.pallas.attention import cudnn, mosaic, packed_layout, reference
from jaxtune.pallas.attention.shapes import CASES, Case

TILE = 128


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


def milliseconds(function, *arguments, repeats: int = 7, inner: int = 4) -> float:
    """Median over `repeats` of the mean of `inner` runs queued together."""
    for _ in range(2):
        jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(inner):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begun) / inner * 1e3)
    return statistics.median(times)


def operands(case: Case, rows: int, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(rows, case.length, h, case.dim) for h in heads]
    return [jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


def options_of(case: Case) -> dict:
    options: dict = {"scale": case.dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    if case.sinks:
        options["sinks"] = jnp.linspace(-1, 1, case.heads)
    return options


def layout_of(case: Case, rows: int, promise: bool):
    segments = case.segments()
    if segments is None:
        return packed_layout((rows, case.length))
    most = int(segments.max()) if promise else None
    return packed_layout((rows, case.length), jnp.asarray(segments[:rows]), most)


def check(case: Case) -> dict[str, float]:
    """Relative errors of out, dq, dk, dv on one row, of our kernels and of XLA's own bf16, against fp32."""
    if case.length > 8192:  # the fp32 reference of a long row would take longer than the whole benchmark
        case = Case(**{**case.__dict__, "length": 4096, "rows": 1})
    layout, options = layout_of(case, 1, False), options_of(case)

    def run(module, query, key, value, dout):
        out, lse = module.forward(query, key, value, layout, **options)
        return (out, *module.backward(query, key, value, out, lse, dout, layout, **options)[:3])

    def error(got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    small = operands(case, 1)
    exact = jax.jit(lambda *a: run(reference, *a))(*(x.astype(jnp.float32) for x in small))
    errors = {}
    for name, module in (("mosaic", mosaic), ("xla", reference)):
        got = jax.jit(lambda *a, module=module: run(module, *a))(*small)
        errors[name] = [round(error(g, e), 5) for g, e in zip(got, exact, strict=True)]
    again = jax.jit(lambda *a: run(mosaic, *a))
    first = again(*small)
    same = all(
        all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, again(*small), strict=True))
        for _ in range(20)
    )
    return {**errors, "bitwise_over_20_runs": same}


def measure_jax(case: Case) -> dict[str, dict]:
    query, key, value, dout = operands(case, case.rows)
    options = options_of(case)
    result: dict[str, dict] = {}
    for name, module in (("mosaic", mosaic), ("cudnn_jax", cudnn)):
        layout = layout_of(case, case.rows, True)
        if module is cudnn and (case.soft_cap or case.sinks):
            continue

        def forward(query, key, value, module=module, layout=layout):
            return module.forward(query, key, value, layout, **options)

        def backward(query, key, value, out, lse, dout, module=module, layout=layout):
            return module.backward(query, key, value, out, lse, dout, layout, **options)[:3]

        forward, backward = jax.jit(forward), jax.jit(backward)
        try:
            out, lse = forward(query, key, value)
            result[name] = {
                "forward_ms": milliseconds(forward, query, key, value),
                "backward_ms": milliseconds(backward, query, key, value, out, lse, dout),
            }
        except jax.errors.JaxRuntimeError as error:  # cuDNN's packed backward may want more memory than there is
            result[name] = {"error": str(error)[:200]}
    return result


def _torch_times(query, key, value) -> dict[str, float]:
    import torch

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def timed(function):
        times = []
        for number in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(4):
                function()
            torch.cuda.synchronize()
            if number > 1:
                times.append((time.perf_counter() - begun) / 4 * 1e3)
        return statistics.median(times)

    out = attend()
    dout = torch.randn_like(out)
    return {
        "forward_ms": timed(attend),
        "backward_ms": timed(lambda: torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)),
    }


def measure_torch(case: Case) -> dict[str, dict]:
    """cuDNN and FlashAttention-2 through torch's scaled_dot_product_attention, whole causal rows only."""
    if case.documents is not None or case.window or case.soft_cap or case.sinks:
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [(case.rows, heads, case.length, case.dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    arrays = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    result: dict[str, dict] = {}
    for name, backend in (
        ("cudnn_torch", SDPBackend.CUDNN_ATTENTION),
        ("flash2_torch", SDPBackend.FLASH_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                result[name] = _torch_times(*arrays)
        except RuntimeError as error:
            result[name] = {"error": str(error)[:200]}
    del arrays
    torch.cuda.empty_cache()
    return result


def layout_cost() -> float:
    """Milliseconds to build the layout of 8 x 8,192 tokens with rotary tables."""
    from jaxtune.models.config import RopeConfig
    from jaxtune.models.rope import rotary_table

    segments = jnp.asarray(np.tile(CASES[3].segments(), (2, 1)))

    @jax.jit
    def build(segments):
        layout = packed_layout(segments.shape, segments)
        table = rotary_table(RopeConfig(theta=500000.0), 128, 131072, layout.positions())
        return layout.doc_start, layout.doc_end, table

    return milliseconds(build, segments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cases", help="comma-separated parts of case names")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.cases or any(p in c.name for p in options.cases.split(","))]
    rows = []
    for case in cases:
        record = {"case": case.name, "pairs": visible_pairs(case), "tiles": visible_tiles(case)}
        record["errors"] = check(case)
        record["times"] = {**measure_jax(case), **measure_torch(case)}
        flops = 4 * case.heads * case.dim * record["pairs"]
        for times in record["times"].values():
            if "forward_ms" in times:
                times["both_ms"] = times["forward_ms"] + times["backward_ms"]
                times["forward_tflops"] = flops / times["forward_ms"] / 1e9
                times["both_tflops"] = 3.5 * flops / times["both_ms"] / 1e9
        rows.append(record)
        shown = {
            k: (round(t["forward_ms"], 3), round(t["both_ms"], 3)) for k, t in record["times"].items() if "both_ms" in t
        }
        print(f"{case.name:30s} {record['errors']['bitwise_over_20_runs']} {shown}", flush=True)
    dense = [r for r in rows if r["case"].startswith("dense")]
    if dense:
        # The fastest dense kernel of the run sets what a visible tile should cost.
        per_tile = {
            key: min(t[key] / r["tiles"] for r in dense for t in r["times"].values() if key in t)
            for key in ("forward_ms", "both_ms")
        }
        for record in rows:
            record["predicted"] = {key: value * record["tiles"] for key, value in per_tile.items()}
    layout_ms = layout_cost()
    packed = next((r for r in rows if r["case"].startswith("packed")), None)
    result = {"benchmark": "kernels/attention", **environment(), "cases": rows, "layout_8x8192_ms": layout_ms}
    if packed is not None:
        result["layout_share_of_one_layer"] = layout_ms / (2 * packed["times"]["mosaic"]["both_ms"])
    write(options.output, result)
    print(json.dumps({"layout_ms": layout_ms, "share": result.get("layout_share_of_one_layer")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
