"""Products with frozen weights in FP8 beside those in bfloat16, in one run on one GPU.

    python benchmarks/kernels/fp8.py --output FILE.json [--tokens 16384] [--tiles]

The linears of Llama 3.1 8B: forward is x W^T, backward dy W. FP8 has scales by rows, multiplied by our kernel (mosaic)
or by XLA's products (reference), or in blocks of 128 x 128 (mosaic). "given": the operands are codes and scales
already, and there is no adapter; the others round x or dy and add an adapter of rank 16, as training does. Wall clock
over queued calls, all sides of a case in turns, the median; TFLOP/s of the frozen product's own FLOPs. "errors" are
distances from bfloat16's, by the Frobenius norm. Each case is written as it comes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import COMPILERS, QUEUED, RANK, compiled, distance
from benchmarks.kernels.timing import in_turns, queued_ms
from benchmarks.record import environment, write
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_mosaic, fp8_product, quant_matmul

# (out, in): query and output projection, key and value, gate and up, down.
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
# Beside what fp8_mosaic.blocks_for chooses: (256, 4, 16), and (256, 3, 16) with an adapter.
TILES = [fp8_mosaic.Blocks(*sizes) for sizes in ((256, 4, 8), (256, 4, 32), (256, 3, 16), (128, 6, 16), (128, 4, 32))]


def forward(x, weight, lora, implementation=None):
    return quant_matmul(x, [weight], [lora], fp8=isinstance(weight, FP8), implementation=implementation)[0]


def backward(dy, weight, lora, implementation=None):
    """Of the forward, which is not computed: the gradient of x needs nothing of it."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight, lora, implementation), x)[1](dy)[0]


def given(direction: str, operand, stored: FP8, implementation: str) -> tuple[Callable, tuple]:
    """The product of codes, which in the backward are transposed in the program."""
    blocks = fp8_product.in_blocks(stored)
    if direction == "backward" and not blocks:
        operand = operand * stored.scales[:, 0]
    coded = jax.jit(fp8_product.rounded, static_argnums=1)(operand, blocks)

    def run(coded, weight):
        if direction == "forward":
            return fp8_product.forward(coded, weight, None, jnp.bfloat16, implementation)
        scales = weight.scales.T if blocks else None
        return fp8_product.multiply(coded, weight.codes.T, scales, None, jnp.bfloat16, blocks, implementation)

    return run, (coded, stored)


def rounded_by_kernel(x, weight, lora):
    """The forward by XLA's product of what our kernel rounds."""
    coded = fp8_product.side_by_side([x], None)
    more = (x @ lora.a.T.astype(x.dtype), lora.b.astype(x.dtype))
    return fp8_product.forward(coded, weight, more, x.dtype, "reference")


def in_tiles(tile: fp8_mosaic.Blocks, coded, weight):
    codes, scale = coded
    scales = weight.scales[:, 0]
    arguments = dict(dtype=jnp.bfloat16, in_blocks=False, blocks=tile)
    return fp8_mosaic.product(codes, weight.codes, scale[:, 0], scales, **arguments)


def tiles_of(operand, plain) -> dict[str, tuple[Callable, tuple]]:
    """Sides of the forward by rows, given, in tiles that are not chosen."""
    stored = FP8.encode(plain)
    coded = jax.jit(fp8_product.rounded)(operand)
    return {f"rows, given, {tile}": (functools.partial(in_tiles, tile), (coded, stored)) for tile in TILES}


def sides_of(direction: str, operand, plain, lora) -> dict[str, tuple[Callable, tuple]]:
    """{side: (what is timed, its arguments)}; operand: x or dy, bfloat16."""
    rows, blocks = FP8.encode(plain), FP8.encode(plain, TILE)
    whole = forward if direction == "forward" else backward

    def by(implementation, weight):
        return functools.partial(whole, implementation=implementation), (operand, weight, lora)

    both = {"rows, mosaic rounds, reference": (rounded_by_kernel, (operand, rows, lora))}
    return (both if direction == "forward" else {}) | {
        "bf16": by(None, plain),
        "rows, mosaic": by("mosaic", rows),
        "rows, reference": by("reference", rows),
        "blocks, mosaic": by("mosaic", blocks),
        "bf16, given": (functools.partial(whole, lora=None), (operand, plain)),
        "rows, mosaic, given": given(direction, operand, rows, "mosaic"),
        "rows, reference, given": given(direction, operand, rows, "reference"),
        "blocks, mosaic, given": given(direction, operand, blocks, "mosaic"),
        "quantising rows, mosaic": (lambda x: fp8_product.side_by_side([x], None), (operand,)),
        "quantising rows, reference": (fp8_product.rounded, (operand,)),
        "quantising blocks": (functools.partial(fp8_product.rounded, blocks=True), (operand,)),
    }


def measured(out: int, in_: int, tokens: int, direction: str, tiles: bool) -> dict:
    keys = jax.random.split(jax.random.key(0), 4)
    plain = jax.random.normal(keys[0], (out, in_), jnp.bfloat16) * 0.02
    operand = jax.random.normal(keys[1], (tokens, in_ if direction == "forward" else out), jnp.bfloat16)
    a, b = (
        jax.random.normal(key, shape) * 0.02 for key, shape in zip(keys[2:], ((RANK, in_), (out, RANK)), strict=True)
    )
    sides = sides_of(direction, operand, plain, LoraWeights(a, b, None, 1.0))
    if tiles and direction == "forward":
        sides |= tiles_of(operand, plain)
    refused, programs = {}, {}
    with ThreadPoolExecutor(COMPILERS) as pool:
        waiting = {name: pool.submit(compiled, run, *arguments) for name, (run, arguments) in sides.items()}
    for name, future in waiting.items():
        try:
            programs[name] = future.result()
        except Exception as error:  # what does not run on this GPU is a finding
            refused[name] = f"{type(error).__name__}: {str(error)[:300]}"
    products = [name for name in programs if not name.startswith("quantising")]
    errors = {}
    for name, program in programs.items():
        if not name.startswith("quantising"):
            result = program(*sides[name][1])
            base = programs["bf16, given" if "given" in name else "bf16"](
                *sides["bf16"][1][: 2 if "given" in name else 3]
            )
            errors[name] = distance(result, base)
    ms = in_turns(
        {
            name: functools.partial(queued_ms, program, *sides[name][1], count=QUEUED)
            for name, program in programs.items()
        }
    )
    flops = 2 * tokens * out * in_
    return {
        "direction": direction,
        "shape": [out, in_],
        "tokens": tokens,
        "ms": ms,
        "tflops": {name: flops / ms[name] / 1e9 for name in products},
        "over_bf16": {name: ms["bf16, given" if "given" in name else "bf16"] / ms[name] for name in products},
        "errors": errors,
        "refused": refused,
        "cublaslt_fp8": "matmul$f8" in (programs["rows, reference"].as_text() or ""),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true", help="other tiles of our kernel too, forward by rows")
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script elsewhere")
    options = parser.parse_args()
    record = {"benchmark": "kernels/fp8", **environment(), "products": []}
    for direction in ("forward", "backward"):
        for out, in_ in SHAPES:
            tokens = options.tokens // options.scale
            row = measured(out // options.scale, in_ // options.scale, tokens, direction, options.tiles)
            record["products"].append(row)
            write(options.output, record)
            shown = {name: [round(row["tflops"][name]), round(ratio, 3)] for name, ratio in row["over_bf16"].items()}
            print(direction, row["shape"], "[TFLOP/s, over bf16]", json.dumps(shown), flush=True)
            print(
                "  errors", {name: round(error, 4) for name, error in row["errors"].items()}, row["refused"], flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
