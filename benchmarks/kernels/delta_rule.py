"""The gated delta rule of a Qwen3.5-9B layer, in one run on one GPU.

    python benchmarks/kernels/delta_rule.py --output FILE.json

16 key heads and 32 value heads of 128, 16,384 tokens in bf16: 8 rows of 2,048, one of 16,384, and 8 rows of 2,048
packed with documents of log-normal lengths. Of every implementation: forward, forward and backward, the errors of out
and of every gradient against the definition in float32 (token by token), and whether 20 runs give the same bits. Beside
them flash-linear-attention's kernels (`pip install flash-linear-attention torch`), where they can be had; why not is
said where they cannot. The file is written after every measurement.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import in_turns, median_ms, queued_ms
from benchmarks.record import environment, write
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.pallas.delta_rule import api, gated_delta_rule, triton

KEY_HEADS, HEADS, DIM = 16, 32, 128
CASES = {"8 x 2,048": (8, 2048, False), "8 x 2,048 packed": (8, 2048, True), "1 x 16,384": (1, 16384, False)}
RESULTS = ("out", "dquery", "dkey", "dvalue", "ddecay", "dbeta")


def operands(rows: int, length: int):
    """(query, key, value, decay, beta), gradient of out; decays as a model begins with (Mamba's)."""
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = [(rows, length, heads, DIM) for heads in (KEY_HEADS, KEY_HEADS, HEADS, HEADS)]
    query, key, value, dout = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=False))
    speed = jax.random.uniform(keys[4], (HEADS,), minval=0.01, maxval=16.0)
    decay = -speed * jax.nn.softplus(jax.random.normal(keys[5], (rows, length, HEADS)) - 4.0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[6], (rows, length, HEADS)))
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
    return arrays, dout, layout, [np.asarray(x, np.float64) for x in results]


def check(name: str, packed: bool) -> dict:
    """Errors relative to the definition, and whether 20 runs give equal bits."""
    arrays, dout, layout, want = exact(packed)
    run = programs(name, layout)[1]
    first = [np.asarray(x) for x in run(arrays, dout)]
    return {
        "errors": {
            key: round(float(np.linalg.norm(g.astype(np.float64) - w) / np.linalg.norm(w)), 5)
            for key, g, w in zip(RESULTS, first, want, strict=True)
        },
        "bitwise_over_20_runs": all(
            all(np.array_equal(a, np.asarray(b)) for a, b in zip(first, run(arrays, dout), strict=True))
            for _ in range(20)
        ),
    }


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


def flash_linear_attention(rows: int, length: int, ours: dict, note) -> dict:
    """The same call through flash-linear-attention, in turns with `ours` (functions to be timed, by name), or why there
    is none; `note` is called after each figure. Its kernels run as one CUDA graph: what Python takes to launch them is
    not counted."""
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

    def to_torch(x):
        return torch.from_numpy(np.array(x.astype(jnp.float32))).cuda()

    query, key, value = (to_torch(x).bfloat16().requires_grad_() for x in arrays[:3])
    decay, beta = (to_torch(x).requires_grad_() for x in arrays[3:])
    gradient = to_torch(dout).bfloat16()

    def forward():
        with torch.no_grad():
            return chunk_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0]

    def both():
        out = chunk_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0]
        return out, *torch.autograd.grad(out, (query, key, value, decay, beta), gradient)

    def wait(_):
        torch.cuda.synchronize()

    found: dict = {}
    for name, function in (("forward_ms", forward), ("both_ms", both)):
        try:
            begun = time.perf_counter()
            with candidates_compiled_together():
                wait(function())
            found[f"{name}, seconds of tuning"] = round(time.perf_counter() - begun, 1)
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
            found[f"{name}, launched by Python"] = median_ms(function, wait=wait)
            if name == "both_ms":
                found["apart from ours"] = {
                    key: round(float(np.linalg.norm(a - b) / np.linalg.norm(b)), 5)
                    for key, a, b in zip(
                        RESULTS,
                        (x.detach().float().cpu().numpy() for x in results),
                        (np.asarray(x, np.float32) for x in ours[name](arrays, dout)),
                        strict=True,
                    )
                }
        except Exception as error:  # it refuses some GPUs with some releases of Triton
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
        note(found)
    return found


def must_show(record: dict) -> list[dict]:
    """The figures that are asked for, of what was measured."""
    found = record["times"].get("8 x 2,048", {})
    ours, theirs = (found.get(name, {}) for name in ("triton", "flash-linear-attention"))
    rows = [
        dict(kernel="delta rule", what=what, value=ours[key], floor=floor, goal=goal, at_most=True)
        for key, what, floor, goal in (
            ("forward_ms", "8 x 2,048, forward: ms", 0.7, 0.45),
            ("both_ms", "8 x 2,048, forward and backward: ms", 1.9, 1.3),
        )
        if key in ours
    ]
    if "forward_ms, ours in turns" in theirs:
        ratio = round(theirs["forward_ms"] / theirs["forward_ms, ours in turns"], 3)
        what = "8 x 2,048, forward: times as fast as flash-linear-attention"
        rows.append(dict(kernel="delta rule", what=what, value=ratio, floor=1.0, goal=1.3, at_most=False))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    record: dict = {"benchmark": "kernels/delta_rule", **environment(), "checks": {}, "times": {}}

    def say(*parts):
        print(*parts, flush=True)
        write(options.output, record | {"must_show": must_show(record)})

    names = [name for name in api.IMPLEMENTATIONS if name != "reference"]
    refused = triton.refusal(jax.ShapeDtypeStruct((1, 64, KEY_HEADS, DIM), jnp.bfloat16),
                             jax.ShapeDtypeStruct((1, 64, HEADS, DIM), jnp.bfloat16))  # fmt: skip
    if refused is not None:
        names.remove("triton")
        record["triton_refused"] = refused
        say("triton:", refused)
    for name in names:  # the kernels first: what is asked for is measured before time runs out
        for packed in (False, True):
            of = "packed" if packed else "whole"
            record["checks"].setdefault(of, {})[name] = check(name, packed)
            say("checks,", of, name, record["checks"][of][name])
        for case, (rows, length, packed) in CASES.items():
            arrays, dout = operands(rows, length)
            layout = layout_of(rows, length, packed)
            found = record["times"].setdefault(case, {})
            ours = dict(zip(("forward_ms", "both_ms"), programs(name, layout), strict=True))
            found[name] = {key: median_ms(function, arrays, dout) for key, function in ours.items()}
            say(case, name, found[name])
            if name == "triton":
                found["triton kernels"] = kernels(arrays, dout, layout)
                say(case, "kernels", found["triton kernels"])
                if not packed:

                    def note(theirs, found=found, case=case):
                        found["flash-linear-attention"] = theirs
                        say(case, "flash-linear-attention", theirs)

                    note(flash_linear_attention(rows, length, ours, note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
