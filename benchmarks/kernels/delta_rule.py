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
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the rest is torch's
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import median_ms
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


def exact(arrays, dout, layout, rows: int):
    """The definition in float32, for the first rows and heads that fit."""
    wide = [x[:rows].astype(jnp.float32) for x in arrays]
    short = jax.tree.map(lambda x: x[:rows], layout)
    return [np.asarray(x, np.float64) for x in programs("reference", short)[1](wide, dout[:rows].astype(jnp.float32))]


def checks(names, packed: bool) -> dict:
    """Errors relative to the definition over a row of 1,000 tokens (no whole number of chunks), and equal bits."""
    arrays, dout = operands(1, 1000)
    layout = layout_of(1, 1000, packed)
    want = exact(arrays, dout, layout, 1)
    found = {}
    for name in names:
        run = programs(name, layout)[1]
        first = [np.asarray(x) for x in run(arrays, dout)]
        errors = [
            np.linalg.norm(g.astype(np.float64) - w) / np.linalg.norm(w) for g, w in zip(first, want, strict=True)
        ]
        same = all(
            all(np.array_equal(a, np.asarray(b)) for a, b in zip(first, run(arrays, dout), strict=True))
            for _ in range(20)
        )
        found[name] = {
            "errors": {key: round(float(e), 5) for key, e in zip(RESULTS, errors, strict=True)},
            "bitwise_over_20_runs": same,
        }
    return found


def kernels(arrays, dout, layout) -> dict[str, float]:
    """Milliseconds of each Triton kernel alone."""
    query, key, value, decay, beta = arrays
    chunks = jax.jit(triton._chunks)
    made = jax.block_until_ready(chunks(query, key, decay, beta, value, layout))
    times = {"chunk": median_ms(chunks, query, key, decay, beta, value, layout)}
    for save in (False, True):
        states = jax.jit(lambda *a, save=save: triton._states(*a, save=save))
        times["forward, saving states" if save else "forward"] = median_ms(states, query, key, value, *made)
    _, error, kept = states(query, key, value, *made)
    back = jax.jit(triton._backward)
    times["backward"] = median_ms(back, query, key, dout, beta, error, kept, layout, *made)
    times["reverse"] = median_ms(jax.jit(triton._reverse), query, key, dout, *made)
    return times


def flash_linear_attention(rows: int, length: int) -> dict:
    """The same call through flash-linear-attention, or why there is none."""
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
        repeated = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (query, key))
        return chunk_gated_delta_rule(*repeated, value, decay, beta, use_qk_l2norm_in_kernel=True)[0]

    def both():
        return torch.autograd.grad(forward(), (query, key, value, decay, beta), gradient)

    found: dict = {}
    for name, function in (("forward_ms", torch.no_grad()(forward)), ("both_ms", both)):
        try:
            found[name] = median_ms(function, wait=lambda _: torch.cuda.synchronize())
        except Exception as error:  # it refuses some GPUs with some releases of Triton
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def must_show(record: dict) -> list[dict]:
    """The figures that are asked for, of what was measured."""
    asked = (
        ("forward_ms", "8 x 2,048, forward: ms", 0.7, 0.45),
        ("both_ms", "8 x 2,048, forward and backward: ms", 1.9, 1.3),
    )
    found = record["times"].get("8 x 2,048", {}).get("triton", {})
    return [
        dict(kernel="delta rule", what=what, value=found[key], floor=floor, goal=goal, at_most=True)
        for key, what, floor, goal in asked
        if key in found
    ]


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
    for packed in (False, True):
        record["checks"]["packed" if packed else "whole"] = checks(names, packed)
        say("checks, packed" if packed else "checks", record["checks"]["packed" if packed else "whole"])
    for case, (rows, length, packed) in CASES.items():
        arrays, dout = operands(rows, length)
        layout = layout_of(rows, length, packed)
        found = record["times"].setdefault(case, {})
        for name in names:
            forward, both = programs(name, layout)
            times = {"forward_ms": median_ms(forward, arrays, dout), "both_ms": median_ms(both, arrays, dout)}
            found[name] = times
            say(case, name, times)
        if "triton" in names:
            found["triton kernels"] = kernels(arrays, dout, layout)
            say(case, "kernels", found["triton kernels"])
        if not packed:
            found["flash-linear-attention"] = flash_linear_attention(rows, length)
            say(case, "flash-linear-attention", found["flash-linear-attention"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
