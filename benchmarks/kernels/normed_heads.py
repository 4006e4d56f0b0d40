"""The norm and rotation of queries and of keys, and its gradients, beside what XLA makes of plain JAX.

    python benchmarks/kernels/normed_heads.py --output FILE.json [--only TEXT]

For the heads of three models, 8 x 2,048 tokens, bfloat16: milliseconds, and the bytes that must be read and written per
second (GB/s) as a share of the fastest copy's. Several tiles of the kernels run in turns with XLA's programs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, beside_xla, compiled, normal, queued_ms, record_parts
from jaxtune.pallas.normed_heads import normed_heads, triton
from jaxtune.pallas.normed_heads.triton import Tile

ROWS, LENGTH = 8, 2048
# {what: heads, their size}
SHAPES = {
    "Qwen3-0.6B query": (16, 128),
    "Qwen3-0.6B key": (8, 128),
    "Qwen3-30B-A3B query": (32, 128),
    "Gemma 3 4B query": (8, 256),
}
TILES = tuple(Tile(*each) for each in ((2048, 4, 8), (1024, 2, 8), (1024, 4, 8), (2048, 8, 8), (4096, 4, 4)))
COPIES = 3  # of the arrays, so that none is in the L2


def measure(heads: int, dim: int, copy: float) -> dict:
    x = [normal(i, ROWS, LENGTH, heads, dim) for i in range(COPIES)]
    douts = [normal(10 + i, ROWS, LENGTH, heads, dim) for i in range(COPIES)]
    weight, angles = normal(20, dim), normal(21, ROWS, LENGTH, dim // 2, dtype=jnp.float32)
    table = jnp.cos(angles), jnp.sin(angles)

    def forward(way) -> Callable:
        return lambda xs, weight, table: [normed_heads(x, weight, table, implementation=way) for x in xs]

    def backward(way, both) -> Callable:
        def one(x, weight, table, dout):
            def run(x, weight):
                return normed_heads(x, weight, table, implementation=way)

            dx, dweight = jax.vjp(run, x, weight)[1](dout)
            return (dx, dweight) if both else dx

        return lambda xs, weight, table, douts: [one(x, weight, table, d) for x, d in zip(xs, douts, strict=True)]

    programs: dict[str, Callable[[], float]] = {}
    results = {}
    kinds: list[tuple[str, Callable, tuple]] = [
        ("forward", forward, (x, weight, table)),
        ("gradient of x", lambda way: backward(way, False), (x, weight, table, douts)),
        ("both gradients", lambda way: backward(way, True), (x, weight, table, douts)),
    ]
    for what, make, given in kinds:
        for way, tiles in (("reference", [None]), ("triton", TILES)):
            for tile in tiles:
                used = tile or TILES[0]
                with mock.patch.multiple(triton, FORWARD=used._replace(steps=1), BACKWARD=used):
                    program = compiled(make(way), *given)
                name = f"{what}, {'XLA' if tile is None else tuple(tile)}"
                results[name] = jax.tree.leaves(program(*given))[0]
                programs[name] = functools.partial(queued_ms, program, *given, count=10)
    moved = 2 * x[0].size  # bytes of one array
    return beside_xla(programs, results, COPIES, lambda name: moved * (2 if name.startswith("forward") else 3), copy)


def main() -> int:
    options = arguments(__doc__).parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    parts |= {name: functools.partial(measure, *sizes, copy) for name, sizes in SHAPES.items()}
    return record_parts("normed_heads", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
