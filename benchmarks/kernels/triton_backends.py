"""The Triton kernels beside FlashAttention-2, the vendor's GEMM and a copy, in one run on one GPU.

    python benchmarks/kernels/triton_backends.py --output FILE.json

Attention: 32,768 tokens in rows of 8,192, 32 query and 8 key/value heads, bf16; also with the tiles of a consumer card
(99 KB of shared memory). Every kernel is checked against the fp32 reference first. Four-bit weights: 14,336 x 4,096 NF4
with double quantisation, through copies of the weight of more than four times the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the rest for torch
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import environment, write
from jaxtune.pallas.attention import packed_layout, reference, triton
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.quant_matmul import triton as quant

HEADS, KV_HEADS = 32, 8
CHECKS = {
    "packed": (128, {}),
    "window, soft cap, sinks": (128, {"window": 300, "soft_cap": 20.0, "sinks": np.linspace(-1, 1, HEADS)}),
    "head dim 64": (64, {}),
}
OUTER, INNER, COPIES = 14336, 4096, 8


def milliseconds(function, *arguments, repeats: int = 5, inner: int = 4) -> float:
    """Median over `repeats` of the mean of `inner` runs queued together."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(inner):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begun) / inner * 1e3)
    return statistics.median(times)


def operands(rows: int, length: int, dim: int, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, heads, dim) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]


def check(dim: int, features: dict, length: int) -> dict:
    """Errors of out, dq, dk, dv relative to the fp32 reference, of Triton and of XLA in bf16; padding; equal bits."""
    segments = np.array(log_normal_segments(1, length, mean=length // 10, sigma=0.8))
    segments[:, length // 2 : length // 2 + 37] = 0
    layout = packed_layout((1, length), jnp.asarray(segments))
    options = dict(features, scale=dim**-0.5)
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)

    def run(module, query, key, value, dout):
        out, lse = module.forward(query, key, value, layout, **options)
        return [
            x for x in (out, *module.backward(query, key, value, out, lse, dout, layout, **options)) if x is not None
        ]

    def program(module, arrays):  # autotuning XLA's own products would take most of the benchmark's time
        lowered = jax.jit(lambda *a: run(module, *a)).lower(*arrays)
        return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})

    small = operands(1, length, dim)
    wide = [x.astype(jnp.float32) for x in small]
    exact = program(reference, wide)(*wide)
    errors, kept = {}, {}
    for name, module in (("triton", triton), ("xla", reference)):
        kept[name] = program(module, small)
        pairs = zip(kept[name](*small), exact, strict=True)
        arrays = [(np.asarray(got, np.float64), np.asarray(want, np.float64)) for got, want in pairs]
        errors[name] = [round(float(np.linalg.norm(g - w) / np.linalg.norm(w)), 5) for g, w in arrays]
    first = [np.asarray(x) for x in kept["triton"](*small)]
    same = all(
        all(np.array_equal(a, np.asarray(b)) for a, b in zip(first, kept["triton"](*small), strict=True))
        for _ in range(20)
    )
    clean = not any(x[:, segments[0] == 0].any() for x in first[:4])
    return {**errors, "bitwise_over_20_runs": same, "padding_is_zero": clean}


def attention_times(dim: int, documents: bool) -> dict[str, float]:
    rows, length = 4, 8192
    segments = jnp.asarray(log_normal_segments(rows, length, mean=512, sigma=0.8)) if documents else None
    layout = packed_layout((rows, length), segments)
    query, key, value, dout = operands(rows, length, dim)
    options = dict(scale=dim**-0.5)
    forward = jax.jit(lambda q, k, v: triton.forward(q, k, v, layout, **options))
    backward = jax.jit(lambda *a: triton.backward(*a, layout, **options)[:3])
    out, lse = forward(query, key, value)
    return {
        "forward_ms": milliseconds(forward, query, key, value),
        "backward_ms": milliseconds(backward, query, key, value, out, lse, dout),
    }


def flash_attention_2_times(dim: int) -> dict[str, float]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = [(4, heads, 8192, dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)

    def timed(function):
        times = []
        for number in range(6):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(4):
                function()
            torch.cuda.synchronize()
            if number:
                times.append((time.perf_counter() - begun) / 4 * 1e3)
        return statistics.median(times)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attend()
        dout = torch.randn_like(out)
        return {
            "forward_ms": timed(attend),
            "backward_ms": timed(lambda: torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)),
        }


def four_bit() -> dict:
    """Decoding against a copy, and products of few rows against the vendor's bf16 GEMM; one program over all copies."""
    keys = jax.random.split(jax.random.key(1), COPIES)
    encode = jax.jit(lambda k: NF4.encode(0.02 * jax.random.normal(k, (OUTER, INNER), jnp.bfloat16)))
    weights = [encode(k) for k in keys]
    dense = [w.decode(jnp.bfloat16) for w in weights]
    equal = bool(jnp.array_equal(quant.dequantize(weights[0], jnp.bfloat16), dense[0]))
    per_weight = 1.0 / COPIES
    decode_ms = per_weight * milliseconds(jax.jit(lambda ws: [quant.dequantize(w, jnp.bfloat16) for w in ws]), weights)
    moved = weights[0].nbytes + dense[0].nbytes
    copy_ms = per_weight * milliseconds(jax.jit(lambda ws: [-w for w in ws]), dense)
    result = {
        "decode_equals_reference": equal,
        "decode_bytes_per_second": moved / decode_ms * 1e3,
        "copy_bytes_per_second": 2 * dense[0].nbytes / copy_ms * 1e3,
        "few_rows": {},
    }
    for count in (1, 4, 16):
        x = jax.random.normal(jax.random.key(count), (count, INNER)).astype(jnp.bfloat16)
        ours = jax.jit(lambda x, ws: [quant.small_matmul(x, w) for w in ws])
        vendor = jax.jit(lambda x, ws: [jnp.einsum("mk,nk->mn", x, w) for w in ws])
        exact = np.asarray(x, np.float64) @ np.asarray(weights[0].decode(jnp.float32), np.float64).T
        error = np.linalg.norm(np.asarray(ours(x, weights)[0], np.float64) - exact) / np.linalg.norm(exact)
        times = {"triton_us": 1e3 * per_weight * milliseconds(ours, x, weights, inner=10)}
        times["bf16_gemm_us"] = 1e3 * per_weight * milliseconds(vendor, x, dense, inner=10)
        result["few_rows"][count] = {
            "error": float(error),
            **times,
            "ratio": times["bf16_gemm_us"] / times["triton_us"],
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    record: dict = {"benchmark": "kernels/triton_backends", **environment(), "checks": {}, "attention": {}}
    for name, (dim, features) in CHECKS.items():
        record["checks"][name] = check(dim, features, 1500)
        print(name, record["checks"][name], flush=True)
    record["four_bit"] = four_bit()
    print(json.dumps(record["four_bit"]), flush=True)
    for dim, documents in ((128, True), (128, False), (64, False)):
        case = {"triton": attention_times(dim, documents)}
        with mock.patch.object(triton, "tiles", lambda dim: triton.TILES[99][dim]):
            case["triton_99_kb"] = attention_times(dim, documents)
        if not documents:
            case["flash2_torch"] = flash_attention_2_times(dim)
        for times in case.values():
            times["both_ms"] = times["forward_ms"] + times["backward_ms"]
        if "flash2_torch" in case:
            for name in ("triton", "triton_99_kb"):
                for key in ("forward", "both"):
                    case[name][f"{key}_speed_of_flash2"] = case["flash2_torch"][f"{key}_ms"] / case[name][f"{key}_ms"]
        name = f"{'log-normal documents' if documents else 'dense'}, head dim {dim}"
        record["attention"][name] = case
        print(name, json.dumps(case), flush=True)
        write(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
