"""Attention, forward and backward, beside the best known alternatives in one run on one GPU.

    python benchmarks/kernels/attention.py --output FILE.json

32,768 tokens a case, 32 query and 8 key/value heads (of 256: 16 and 8, of 512: 16 and 1), bf16. Beside our
kernels: cuDNN from JAX, also in its deterministic mode (its packed path is exact up to 32 documents a row; beyond that
its dq is wrong and the time stands for comparison only), cuDNN and FlashAttention-2 from torch; our Triton kernels
where jax-triton is installed. TFLOP/s count what is visible: 4 D a visible pair and head forward, 2.5 times that
backward. "predicted" is the time that the visible 128 x 128 tiles would take at the speed of the fastest dense kernel
of the run. `make gpu-test` checks every feature against the fp32 reference.

A case's two programs are compiled side by side, and then timed one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# The rest is for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import (
    arguments,
    compiled,
    figure,
    median_ms,
    normal,
    queued_ms,
    record_parts,
    same_bits,
    torch_on_gpu,
)
from jaxtune.models.config import RopeConfig
from jaxtune.models.rope import rotary_table
from jaxtune.pallas.attention import api, cudnn, mosaic, packed_layout, reference
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


def milliseconds(function: Callable, wait: Callable = jax.block_until_ready) -> float:
    """The same for every contender, since the longer a GPU works the slower it gets."""
    once = queued_ms(function, count=1, wait=wait)
    return median_ms(function, count=4 if once < 20 else 1, wait=wait)


def operands(case: Case) -> list[jax.Array]:
    """query, key, value, gradient of out"""
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [normal(seed, case.rows, case.length, count, case.dim) for seed, count in enumerate(heads)]


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


@dataclasses.dataclass(frozen=True)
class Contender:
    """promise: whether it needs to be told the most documents a row."""

    module: Any
    promise: bool = False
    deterministic: bool = False

    def calls(self, case: Case) -> list[tuple[Callable, tuple]]:
        """forward and backward, each with its arguments; out and lse are of no attention, but have its shapes."""
        layout, options = layout_of(case, self.promise), options_of(case)
        query, key, value, dout = operands(case)

        def forward(query, key, value, layout):
            return self.module.forward(query, key, value, layout, **options)

        def backward(query, key, value, out, lse, dout, layout):
            return self.module.backward(query, key, value, out, lse, dout, layout, **options)[:3]

        lse = jnp.zeros((case.rows, case.heads, case.length), jnp.float32)
        return [
            (forward, (query, key, value, layout)),
            (backward, (query, key, value, query, lse, dout, layout)),
        ]


def contenders(case: Case) -> dict[str, Contender]:
    found = {"mosaic": Contender(mosaic)}
    if case.soft_cap is None and not case.sinks:
        found["cudnn_jax"] = Contender(cudnn, promise=True)
        if case.name in ("dense 8,192", "dense 32,768", "packed, log-normal mean 512"):
            found["cudnn_jax_deterministic"] = Contender(cudnn, True, deterministic=True)
    if case.dim not in (64, 128):  # what runs where no kernel does
        found["xla"] = Contender(reference)
    triton = api.IMPLEMENTATIONS.get("triton")
    if triton is not None and importlib.util.find_spec("jax_triton"):
        found["triton"] = Contender(triton)
    return found


def times_of(contender: Contender, case: Case) -> dict:
    """Milliseconds of forward and backward, and of our kernels whether 20 runs of both give the same bits."""
    calls = contender.calls(case)
    options = {"xla_gpu_deterministic_ops": True} if contender.deterministic else {}
    (_, inputs), (_, (query, key, value, *_, dout, layout)) = calls
    try:
        with ThreadPoolExecutor() as pool:
            forward, backward = pool.map(lambda call: compiled(call[0], *call[1], options=options), calls)
        out, lse = forward(*inputs)
        found: dict = {
            "forward_ms": milliseconds(lambda: forward(*inputs)),
            "backward_ms": milliseconds(lambda: backward(query, key, value, out, lse, dout, layout)),
        }
    except Exception as error:  # what does not compile is a finding; cuDNN's packed backward may want too much memory
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if contender.module not in (cudnn, reference):

        def both():
            out, lse = forward(*inputs)
            return out, lse, backward(query, key, value, out, lse, dout, layout)

        found["bitwise_over_20_runs"] = same_bits(both)
    return found


def torch_times(case: Case) -> dict[str, dict]:
    """cuDNN and FlashAttention-2 through torch's scaled_dot_product_attention, whole causal rows only."""
    torch = torch_on_gpu()
    if torch is None or case.documents is not None or case.window or case.soft_cap or case.sinks:
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.cuda.empty_cache()  # of the last case
    shapes = [(case.rows, heads, case.length, case.dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    arrays = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True, enable_gqa=True)

    def timed(function):
        return milliseconds(function, lambda _: torch.cuda.synchronize())

    found: dict[str, dict] = {}
    for name, backend in (("cudnn_torch", SDPBackend.CUDNN_ATTENTION), ("flash2_torch", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                forward_ms, out = timed(attend), attend()
                dout = torch.randn_like(out)
                backward = functools.partial(torch.autograd.grad, out, arrays, dout, retain_graph=True)
                found[name] = {"forward_ms": forward_ms, "backward_ms": timed(backward)}
        except RuntimeError as error:
            found[name] = {"error": str(error)[:200]}
    return found


def measure(case: Case) -> dict:
    """{"tiles": visible ones, "times": {contender: its milliseconds and TFLOP/s}}"""
    times = {name: times_of(contender, case) for name, contender in contenders(case).items()} | torch_times(case)
    flops = 4 * case.heads * case.dim * visible_pairs(case)
    for found in times.values():
        if "forward_ms" in found:
            found["both_ms"] = found["forward_ms"] + found["backward_ms"]
            found["forward_tflops"] = flops / found["forward_ms"] / 1e9
            found["both_tflops"] = 3.5 * flops / found["both_ms"] / 1e9
    return {"tiles": visible_tiles(case), "times": times}


def layout_cost(times: int = 50) -> float:
    """Milliseconds to build the layout of 8 x 8,192 tokens with rotary tables, by the device's clock: many builds, each
    from other ids, in one program, so that the host's call counts little."""
    packed = next(case for case in CASES if case.documents == "log-normal")
    segments = jnp.asarray(np.tile(packed.segments(), (8 // packed.rows, 1)))

    def build(number, built):
        layout = packed_layout(segments.shape, segments + number)
        table = rotary_table(RopeConfig(theta=500000.0), 128, 131072, layout.positions())
        return layout.doc_start, layout.doc_end, table

    program = jax.jit(lambda built: jax.lax.fori_loop(0, times, build, built))
    first = build(0, None)
    return milliseconds(lambda: program(first)) / times


VENDOR, EXACT = "cudnn_jax cudnn_torch", "cudnn_jax_deterministic"
PACKED, ODD = "packed, log-normal mean 512", "head dim 96, packed"
WIDE, WIDEST = "head dim 256", "head dim 512"
PARTS = {"forward": "forward", "forward+backward": "both"}  # and what keys of times begin with
# (case, whose speed ours is held against, what it is called, {part of PARTS: (floor, goal)})
AGAINST = (
    ("dense 8,192", VENDOR, "speed over cuDNN's", {"forward": (0.9, 1.0), "forward+backward": (0.75, 0.95)}),
    ("dense 8,192", EXACT, "over cuDNN's deterministic", {"forward+backward": (1.0, None)}),
    ("dense 32,768", VENDOR, "speed over cuDNN's", {"forward": (0.9, 1.0), "forward+backward": (0.75, 0.95)}),
    ("dense 32,768", EXACT, "over cuDNN's deterministic", {"forward+backward": (1.0, None)}),
    ("dense 2,048", "cudnn_jax", "over cuDNN from JAX", dict.fromkeys(PARTS, (1.0, None))),
    ("dense 2,048", "cudnn_torch", "over cuDNN from torch", dict.fromkeys(PARTS, (None, 1.0))),
    (PACKED, "cudnn_jax", "over cuDNN's packed path", {"forward+backward": (1.5, None)}),
    ("32 documents a row", "cudnn_jax", "over cuDNN packed", {"forward+backward": (2.5, 4.0)}),
    ("64 documents a row", "cudnn_jax", "over cuDNN packed", {"forward+backward": (4.0, 8.0)}),
    (WIDE, VENDOR, "speed over cuDNN's", {"forward": (None, 1.0), "forward+backward": (0.75, 1.0)}),
    (f"{WIDE}, packed, soft cap", "xla", "speed over XLA's", dict.fromkeys(PARTS, (1.0, None))),
    (WIDEST, "xla", "speed over XLA's", dict.fromkeys(PARTS, (1.0, None))),
    (f"{WIDEST}, packed", "xla", "speed over XLA's", dict.fromkeys(PARTS, (1.0, None))),
)


def must_show(record: dict) -> Iterator[dict]:
    dense = [found for name, found in record.items() if name.startswith("dense")]

    def of(case: str, names: str, key: str) -> float | None:
        """The least of these contenders' figures."""
        times = record.get(case, {}).get("times", {})
        return min((times[name][key] for name in names.split() if key in times.get(name, {})), default=None)

    def ratios() -> Iterator[tuple]:
        """what, what is above, what is below, floor, goal and, where less is better, True"""
        for case, others, words, bounds in AGAINST:
            for part, (floor, goal) in bounds.items():
                key = f"{PARTS[part]}_ms"
                yield f"{case}, {part}: {words}", of(case, others, key), of(case, "mosaic", key), floor, goal
        ours = of(PACKED, "mosaic", "both_ms")
        yield f"{PACKED}: over cuDNN's dense", of("dense 8,192", VENDOR, "both_ms"), ours, 3.0, None
        # The fastest dense kernel of the run sets what a visible tile should cost.
        costs = [t["both_ms"] / found["tiles"] for found in dense for t in found["times"].values() if "both_ms" in t]
        for case in (PACKED, "window 4,096", "window 128"):
            predicted = min(costs, default=0.0) * record.get(case, {}).get("tiles", 0)
            what = f"{case}: time over that predicted by visible tiles"
            yield what, of(case, "mosaic", "both_ms"), predicted, 1.5, 1.2, True
        for case in ("soft cap", "sinks", "head dim 64"):
            for part, key in PARTS.items():
                above, below = (of(name, "mosaic", f"{key}_tflops") for name in (case, "dense 8,192"))
                yield f"{case}, {part}: TFLOP/s over the plain case's", above, below, 0.75, 0.9
        for part, key in PARTS.items():
            above, below = (of(name, "mosaic", f"{key}_tflops") for name in (WIDEST, "dense 8,192"))
            yield f"{WIDEST}, {part}: TFLOP/s over head dim 128's", above, below, 0.4, 0.55
            # Four documents of 2,048 tokens see what four rows of 2,048 tokens see.
            packed, whole = (of(f"{WIDEST}, {name}", "mosaic", f"{key}_ms") for name in ("4 documents a row", "2,048"))
            yield f"{WIDEST}, {part}: documents of 2,048 packed over whole rows", whole, packed, 0.95, 1.0
        what = "layout of 8 x 8,192, share of one layer's attention"
        yield what, record.get("layout of 8 x 8,192"), ours and 2 * ours, 0.01, 0.003, True
        for part, key in PARTS.items():
            theirs, triton = (of("dense 8,192", name, f"{key}_ms") for name in ("flash2_torch", "triton"))
            yield f"dense 8,192, {part}: Triton over FlashAttention-2", theirs, triton, 0.8, 1.0
            xla, triton = (of(ODD, name, f"{key}_ms") for name in ("xla", "triton"))
            yield f"{ODD}, {part}: Triton over XLA", xla, triton, 3.0, None

    for what, above, below, *bounds in ratios():
        if above and below:
            yield figure("attention", what, above / below, *bounds)


def main() -> int:
    options = arguments(__doc__).parse_args()
    parts: dict[str, Callable] = {case.name: functools.partial(measure, case) for case in CASES}
    return record_parts("attention", options, parts | {"layout of 8 x 8,192": layout_cost}, must_show)


if __name__ == "__main__":
    sys.exit(main())
