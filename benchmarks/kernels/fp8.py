"""Products with frozen weights in FP8 beside those in bfloat16, in one run on one GPU.

    python benchmarks/kernels/fp8.py --output FILE.json [--tokens 16384]

The linears of Llama 3.1 8B: forward is x W^T, backward dy W. FP8 has scales by rows, multiplied by our kernel (mosaic)
or by XLA's products (reference), or in blocks of 128 x 128 (mosaic). All round x or dy and add an adapter of rank 16,
as training does; rounding is measured alone, too. Wall clock over queued calls, all sides of a case in turns, the
median. "errors" are distances from bfloat16's, by the Frobenius norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import QUEUED, RANK
from benchmarks.kernels.timing import (
    arguments,
    compiled_together,
    distance,
    figure,
    in_turns,
    normal,
    queued_ms,
    record_parts,
)
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import TILE
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, quant_matmul

# (out, in): query and output projection, key and value, gate and up, down.
SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
SIDES = ("rows, mosaic", "rows, reference", "blocks, mosaic")


def forward(x, weight, lora, implementation=None):
    return quant_matmul(x, [weight], [lora], fp8=isinstance(weight, FP8), implementation=implementation)[0]


def backward(dy, weight, lora, implementation=None):
    """Of the forward, which is not computed: the gradient of x needs nothing of it."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight, lora, implementation), x)[1](dy)[0]


def measure(direction: str, out: int, in_: int, tokens: int) -> dict:
    """Milliseconds of each side, how many times as fast as bfloat16 it is, and its error."""
    plain = normal(0, out, in_, size=0.02)
    operand = normal(1, tokens, in_ if direction == "forward" else out)
    a, b = normal(2, RANK, in_, size=0.02, dtype=jnp.float32), normal(3, out, RANK, size=0.02, dtype=jnp.float32)
    lora, weights = LoraWeights(a, b, None, 1.0), {"rows": FP8.encode(plain), "blocks": FP8.encode(plain, TILE)}
    whole = forward if direction == "forward" else backward
    calls: dict[str, tuple[Callable, tuple]] = {
        "bf16": (whole, (operand, plain, lora)),
        "quantising rows, mosaic": (lambda x: fp8_product.side_by_side([x], None), (operand,)),
        "quantising rows, reference": (fp8_product.rounded, (operand,)),
        "quantising blocks": (functools.partial(fp8_product.rounded, blocks=True), (operand,)),
    }
    for side in SIDES:
        scales, implementation = side.split(", ")
        calls[side] = functools.partial(whole, implementation=implementation), (operand, weights[scales], lora)
    programs, refused = compiled_together(calls)
    ms = in_turns(
        {name: functools.partial(queued_ms, run, *calls[name][1], count=QUEUED) for name, run in programs.items()}
    )
    found: dict = {"ms": ms, "over_bf16": {}, "errors": {}, "refused": refused}
    for side in (side for side in SIDES if side in programs):
        result, exact = (programs[name](*calls[name][1]) for name in (side, "bf16"))
        found["over_bf16"][side], found["errors"][side] = ms["bf16"] / ms[side], distance(result, exact)
    return found


def must_show(record: dict) -> Iterator[dict]:
    """With an adapter and rounding, over the products of a layer and both directions, each once."""
    for side in SIDES:
        found = [part["ms"] for name, part in record.items() if name.startswith(("forward", "backward"))]
        found = [ms for ms in found if side in ms]
        if found:
            value = sum(ms["bf16"] for ms in found) / sum(ms[side] for ms in found)
            yield figure("FP8 product", f"{side}: speed over bf16 weights, {len(found)} products", value)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script elsewhere")
    options = parser.parse_args()
    parts = {
        f"{direction} {out} x {in_}": functools.partial(
            measure, direction, out // options.scale, in_ // options.scale, options.tokens // options.scale
        )
        for direction in ("forward", "backward")
        for out, in_ in SHAPES
    }
    return record_parts("fp8", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
