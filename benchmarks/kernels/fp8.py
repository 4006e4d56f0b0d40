"""Products with frozen weights in FP8 beside those in bfloat16, in one run on one GPU.

    python benchmarks/kernels/fp8.py --output FILE.json [--tokens 16384]

The linears of Llama 3.1 8B, without adapters: forward is x W^T, backward dy W. "given": the operands are codes and
scales already; "quantised": x or dy is rounded in the same program, as training does it. Wall clock over queued calls,
all sides of a case in turns, the median; TFLOP/s of the product's own FLOPs. "error" is the distance from the product
in bfloat16 over that product, by the Frobenius norm. Each case is written as it comes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import COMPILERS, compiled, distance, wall_ms
from benchmarks.record import environment, write
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.quant_matmul import fp8_product, quant_matmul

# (out, in): query and output projection, key and value, gate and up, down.
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
ROUNDS = 5


def forward(x, weight):
    return quant_matmul(x, [weight], fp8=isinstance(weight, FP8))[0]


def backward(dy, weight):
    """Of the forward, which is not computed: no gradient here needs x."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight), x)[1](dy)[0]


def sides_of(direction: str, operand, plain, stored: FP8) -> dict[str, tuple[Callable, tuple]]:
    """{side: (what is timed, its arguments)}; operand: x or dy, bfloat16."""
    whole, along = (forward, 1) if direction == "forward" else (backward, 0)
    codes, scale = jax.jit(fp8_product.rounded)(operand)

    def given(codes, scale, weight):
        return fp8_product.of_codes(codes, scale, weight, along, operand.dtype)

    return {
        "bf16": (whole, (operand, plain)),
        "fp8, quantised": (whole, (operand, stored)),
        "fp8, given": (given, (codes, scale, stored)),
        "quantising alone": (fp8_product.rounded, (operand,)),
    }


def measured(out: int, in_: int, tokens: int, direction: str) -> dict:
    keys = jax.random.split(jax.random.key(0))
    plain = jax.random.normal(keys[0], (out, in_), jnp.bfloat16) * 0.02
    operand = jax.random.normal(keys[1], (tokens, in_ if direction == "forward" else out), jnp.bfloat16)
    sides = sides_of(direction, operand, plain, FP8.encode(plain))
    with ThreadPoolExecutor(COMPILERS) as pool:
        waiting = {name: pool.submit(compiled, run, *arguments) for name, (run, arguments) in sides.items()}
        programs = {name: future.result() for name, future in waiting.items()}
    product = {name: programs[name](*sides[name][1]) for name in ("bf16", "fp8, quantised")}
    error = distance(product["fp8, quantised"], product["bf16"])
    del product
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (_, arguments) in sides.items():
            times[name].append(wall_ms(programs[name], arguments))
    ms = {name: statistics.median(each) for name, each in times.items()}
    flops = 2 * tokens * out * in_
    return {
        "direction": direction,
        "shape": [out, in_],
        "tokens": tokens,
        "error": error,
        "ms": ms,
        "tflops": {name: flops / each / 1e9 for name, each in ms.items() if name != "quantising alone"},
        "over_bf16": {name: ms["bf16"] / ms[name] for name in ms if name.startswith("fp8")},
        "cublaslt_fp8": "matmul$f8" in (programs["fp8, quantised"].as_text() or ""),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script elsewhere")
    options = parser.parse_args()
    record = {"benchmark": "kernels/fp8", **environment(), "products": []}
    for direction in ("forward", "backward"):
        for out, in_ in SHAPES:
            tokens = options.tokens // options.scale
            row = measured(out // options.scale, in_ // options.scale, tokens, direction)
            record["products"].append(row)
            write(options.output, record)
            print(json.dumps({key: row[key] for key in ("direction", "shape", "error", "tflops", "ms")}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
