"""The gated delta rule of a Qwen3.5-9B layer, in one run on one GPU.

    python benchmarks/kernels/delta_rule.py --output FILE.json

16 key heads and 32 value heads of 128, 16,384 tokens in bf16: 8 rows of 2,048, one of 16,384, and 8 rows of 2,048
packed with documents of log-normal lengths. Of every implementation: forward, forward and backward, the errors of out
and of every gradient against the definition in float32 (token by token), and whether 20 runs give the same bits. Beside
them flash-linear-attention's kernels (`pip install flash-linear-attention torch`), where they can be had; why not is
said where they cannot. The file is written after every measurement.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import (
    arguments,
    distance,
    figure,
    in_turns,
    median_ms,
    normal,
    queued_ms,
    record_parts,
    same_bits,
)
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.pallas.delta_rule import api, gated_delta_rule, triton

KEY_HEADS, HEADS, DIM = 16, 32, 128
CASES = {"8 x 2,048": (8, 2048, False), "8 x 2,048 packed": (8, 2048, True), "1 x 16,384": (1, 16384, False)}
RESULTS = ("out", "dquery", "dkey", "dvalue", "ddecay", "dbeta")


def operands(rows: int, length: int):
    """(query, key, value, decay, beta), gradient of out; decays as a model begins with (Mamba's)."""
    heads = (KEY_HEADS, KEY_HEADS, HEADS, HEADS)
    query, key, value, dout = (normal(seed, rows, length, count, DIM) for seed, count in enumerate(heads))
    speed = jax.random.uniform(jax.random.key(4), (HEADS,), minval=0.01, maxval=16.0)
    decay = -speed * jax.nn.softplus(normal(5, rows, length, HEADS, dtype=jnp.float32) - 4.0)
    beta = jax.nn.sigmoid(normal(6, rows, length, HEADS, dtype=jnp.float32))
    return (query, key, value, decay, beta), dout


def layout_of(rows: int, length: int, packed: bool):
    if not packed:
        return packed_layout((rows, length))
    return packed_layout((rows, length), jnp.asarray(log_normal_segments(rows, length, mean=256, sigma=0.8)))


def programs(name: str, layout):
    """(forward, forward and backward) of (arrays, dout)."""

    def forward(arrays, dout):
        return gated_delta_rule(*arrays, layout, implementation=name)

    def both(arrays, dout):
        out, pull = jax.vjp(lambda *arrays: forward(arrays, dout), *arrays)
        return out, *pull(dout.astype(out.dtype))

    return jax.jit(forward), jax.jit(both)


@functools.cache
def exact(packed: bool):
    """(arguments in bf16, gradient of out, layout, the definition's results in float32) of a row of 1,000 tokens, which
    is no whole number of chunks."""
    arrays, dout = operands(1, 1000)
    layout = layout_of(1, 1000, packed)
    wide = [x.astype(jnp.float32) for x in arrays]
    results = programs("reference", layout)[1](wide, dout.astype(jnp.float32))
    return arrays, dout, layout, results


def check(name: str, packed: bool) -> dict:
    """Errors relative to the definition, and whether 20 runs give equal bits."""
    arrays, dout, layout, want = exact(packed)
    run = programs(name, layout)[1]
    errors = {key: distance(got, true) for key, got, true in zip(RESULTS, run(arrays, dout), want, strict=True)}
    return {"errors": errors, "bitwise_over_20_runs": same_bits(lambda: run(arrays, dout))}


def kernels(arrays, dout, layout) -> dict[str, float]:
    """Milliseconds of each Triton kernel alone."""
    query, key, value, decay, beta = arrays
    chunks = jax.jit(triton._chunks)
    made = jax.block_until_ready(chunks(query, key, decay, beta, value, layout))
    times = {"chunk": median_ms(chunks, query, key, decay, beta, value, layout)}
    for save in (False, True):
        states = jax.jit(lambda *a, save=save: triton._states(*a, save=save))
        times["forward, saving states" if save else "forward"] = median_ms(states, query, key, value, made)
    _, error, kept = states(query, key, value, made)
    back = jax.jit(triton._backward)
    times["backward"] = median_ms(back, query, key, dout, error, kept, layout, made)
    times["reverse"] = median_ms(jax.jit(triton._reverse), query, key, dout, made)
    return times


@contextlib.contextmanager
def candidates_compiled_together():
    """Triton's autotuner compiles its candidates one after the other, which takes minutes; here a kernel's are compiled
    side by side before it times them. Which they are, and which is taken, stays its own."""
    from triton import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs

    def prune_configs(self, kwargs):
        candidates = original(self, kwargs)
        call = {key: value for key, value in kwargs.items() if key != "warmup"}
        with AsyncCompileMode(pool, ignore_errors=True):
            for candidate in candidates:
                self.fn.warmup(*self.nargs.values(), **call, **candidate.all_kwargs())
        return candidates

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        Autotuner.prune_configs = prune_configs
        try:
            yield
        finally:
            Autotuner.prune_configs = original


def flash_linear_attention(rows: int, length: int) -> dict:
    """Whole rows through flash-linear-attention, in turns with our Triton kernels, or why there is nothing to time.
    Its kernels run as one CUDA graph: what Python takes to launch them is not counted."""
    # It keeps its files in the home folder, which some machines do not have.
    folder = tempfile.mkdtemp()
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        os.environ[name] = folder
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        return {"missing": str(error)}

    arrays, dout = operands(rows, length)
    ours = dict(zip(("forward_ms", "both_ms"), programs("triton", layout_of(rows, length, False)), strict=True))

    def to_torch(x):
        wide = torch.from_numpy(np.array(x.astype(jnp.float32))).cuda()
        return wide.bfloat16() if x.dtype == jnp.bfloat16 else wide

    tensors, gradient = [to_torch(x).requires_grad_() for x in arrays], to_torch(dout)

    def both():
        out = chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)[0]
        return out, *torch.autograd.grad(out, tensors, gradient)

    def forward():
        with torch.no_grad():
            return chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)[0]

    def wait(_):
        torch.cuda.synchronize()

    found: dict = {}
    for name, function in (("forward_ms", forward), ("both_ms", both)):
        try:
            with candidates_compiled_together():
                wait(function())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = function()
            times = in_turns(
                {
                    "theirs": functools.partial(queued_ms, graph.replay, count=16, wait=wait),
                    "ours": functools.partial(queued_ms, ours[name], arrays, dout, count=16),
                }
            )
            found[name], found[f"{name}, ours in turns"] = round(times["theirs"], 4), round(times["ours"], 4)
            if name == "both_ms":
                theirs = (jnp.asarray(x.detach().float().cpu().numpy()) for x in results)
                pairs = zip(RESULTS, theirs, ours[name](arrays, dout), strict=True)
                found["apart from ours"] = {key: distance(got, want) for key, got, want in pairs}
        except Exception as error:  # it refuses some GPUs with some releases of Triton
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
        print("  flash-linear-attention", found, flush=True)
    return found


def measure(name: str, rows: int, length: int, packed: bool) -> dict:
    """Milliseconds of an implementation; of the Triton kernels each alone, too."""
    arrays, dout = operands(rows, length)
    layout = layout_of(rows, length, packed)
    both = zip(("forward_ms", "both_ms"), programs(name, layout), strict=True)
    found: dict = {key: median_ms(function, arrays, dout) for key, function in both}
    return found | ({"kernels": kernels(arrays, dout, layout)} if name == "triton" else {})


def must_show(record: dict) -> Iterator[dict]:
    ours, theirs = (record.get(f"8 x 2,048, {name}", {}) for name in ("triton", "flash-linear-attention"))
    keys = (("forward_ms", "forward", (0.7, 0.45), (1.0, 1.3)), ("both_ms", "forward and backward", (1.9, 1.3), ()))
    for key, words, bounds, _ in keys:
        if ours:
            yield figure("delta rule", f"8 x 2,048, {words}: ms", ours[key], *bounds, at_most=True)
    for key, words, _, bounds in keys:
        if f"{key}, ours in turns" in theirs:
            what = f"8 x 2,048, {words}: times as fast as flash-linear-attention"
            yield figure("delta rule", what, theirs[key] / theirs[f"{key}, ours in turns"], *bounds)


def main() -> int:
    options = arguments(__doc__).parse_args()
    names = [name for name in api.IMPLEMENTATIONS if name != "reference"]
    shapes = (jax.ShapeDtypeStruct((1, 64, heads, DIM), jnp.bfloat16) for heads in (KEY_HEADS, HEADS))
    if (refused := triton.refusal(*shapes)) is not None:
        names.remove("triton")
        print("triton:", refused)
    parts = {}
    for name in names:  # the kernels first: what is asked for is measured before time runs out
        for packed in (False, True):
            words = "packed" if packed else "whole"
            parts[f"checks, {words}, {name}"] = functools.partial(check, name, packed)
        parts |= {f"{case}, {name}": functools.partial(measure, name, *sizes) for case, sizes in CASES.items()}
    for case, (rows, length, packed) in CASES.items():
        if not packed and "triton" in names:
            parts[f"{case}, flash-linear-attention"] = functools.partial(flash_linear_attention, rows, length)
    return record_parts("delta_rule", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
