"""The gradients of the norm of a residual stream, beside what XLA makes of plain JAX.

    python benchmarks/kernels/normed_stream.py --output FILE.json [--only TEXT]

For rows of several sizes, 8 x 2,048 tokens, bfloat16: milliseconds, and the bytes that must be read and written per
second (GB/s) as a share of the fastest copy's. The gradient is added to another one, as in a layer. Several tiles of
the kernel run in turns with XLA's programs; so does the norm itself, which is XLA's everywhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, beside_xla, compiled, normal, queued_ms, record_parts
from jaxtune.pallas.normed_stream import normed_stream, triton
from jaxtune.pallas.normed_stream.triton import Tile

ROWS, LENGTH = 8, 2048
SIZES = (1024, 2048, 2880, 4096, 5120)
# By the numbers of a row, rounded up to a power of two: rows of a tile, warps, programs.
TILES = {
    1024: ((1, 2, 512), (1, 4, 512), (2, 4, 512), (4, 4, 512), (4, 8, 512)),
    2048: ((1, 2, 512), (1, 4, 512), (2, 4, 512), (2, 8, 512)),
    4096: ((1, 4, 512), (1, 8, 512), (1, 8, 1024), (2, 8, 512)),
    8192: ((1, 8, 512), (1, 16, 512), (1, 16, 256)),
}
COPIES = 2  # of the arrays, so that none is in the L2


def measure(size: int, copy: float) -> dict:
    x, dnormed, passed = ([normal(10 * k + i, ROWS, LENGTH, size) for i in range(COPIES)] for k in range(3))
    weight = normal(40, size)

    def forward() -> Callable:
        return lambda xs, weight: [normed_stream(x, weight, implementation="reference")[1] for x in xs]

    def backward(way, both) -> Callable:
        def one(x, weight, *gradients):
            norm = functools.partial(normed_stream, implementation=way)
            if both:
                return jax.vjp(norm, x, weight)[1](gradients)
            return jax.vjp(lambda x: norm(x, weight), x)[1](gradients)

        return lambda xs, weight, *others: [
            one(x, weight, *gradients) for x, *gradients in zip(xs, *others, strict=True)
        ]

    programs: dict[str, Callable[[], float]] = {}
    results = {}
    given = x, weight, passed, dnormed
    program = compiled(forward(), x, weight)
    programs["norm, XLA"] = functools.partial(queued_ms, program, x, weight, count=10)
    for what, both in (("gradient of x", False), ("both gradients", True)):
        for tile in (None, *(Tile(*each) for each in TILES[1 << (size - 1).bit_length()])):
            with mock.patch.object(triton, "tile", lambda width, tile=tile: tile):
                program = compiled(backward("reference" if tile is None else "triton", both), *given)
            name = f"{what}, {'XLA' if tile is None else tuple(tile)}"
            results[name] = jax.tree.leaves(program(*given))[0]
            programs[name] = functools.partial(queued_ms, program, *given, count=10)
    moved = 2 * x[0].size  # bytes of one array
    return beside_xla(programs, results, COPIES, lambda name: moved * (2 if name.startswith("norm") else 4), copy)


def main() -> int:
    options = arguments(__doc__).parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    parts |= {str(size): functools.partial(measure, size, copy) for size in SIZES}
    return record_parts("normed_stream", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
