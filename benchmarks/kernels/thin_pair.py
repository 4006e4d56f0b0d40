"""The two thin products of an adapter's backward, beside XLA's.

    python benchmarks/kernels/thin_pair.py --output FILE.json [--only TEXT] [--tile 64,512,4,3,1 ...]

For gradients of outputs of several sizes and ranks, bfloat16: milliseconds, and the bytes that must be read and written
per second as a share of the fastest copy's. Several tiles of the kernel (rows, columns, warps, stages, programs of a
multiprocessor), or those given by --tile, run in turns with XLA's program; the float32 sums of what programs wrote are
part of the kernel's time. `same_bits`: whether 20 runs with the tile in use gave the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, beside_xla, compiled, normal, queued_ms, record_parts, same_bits
from jaxtune.pallas.thin_pair import thin_pair, triton
from jaxtune.pallas.thin_pair.triton import Tile

# Tokens, numbers of the output, rank: gate and up of Llama-3.1-8B, its queries and its keys, a micro-batch of 4,096
# tokens, a larger rank, gpt-oss-20b.
SHAPES = (
    (16384, 14336, 16),
    (16384, 4096, 16),
    (16384, 1024, 16),
    (4096, 14336, 16),
    (16384, 2880, 16),
    (16384, 14336, 32),
    (16384, 14336, 64),
)
TILES = {  # by the rank
    16: (
        (64, 512, 4, 3, 1),
        (64, 512, 4, 3, 2),
        (64, 512, 4, 2, 1),
        (64, 256, 4, 3, 1),
        (64, 256, 4, 2, 2),
        (64, 256, 4, 2, 4),
        (128, 256, 4, 3, 1),
    ),
    32: ((64, 512, 8, 2, 1), (64, 256, 4, 3, 1), (64, 256, 8, 3, 1)),
    64: ((64, 512, 8, 2, 1), (64, 256, 4, 3, 1), (64, 256, 8, 3, 1)),
}
BYTES = 500e6  # of gradients that a program reads, at least, so that none is in the L2


def measure(tokens: int, out: int, rank: int, copy: float, tiles: list[Tile]) -> dict:
    calls = max(1, round(BYTES / (2 * tokens * out)))
    douts, inners = ([normal(10 * k + i, tokens, size) for i in range(calls)] for k, size in ((0, out), (1, rank)))
    given = douts, normal(30, out, rank, dtype=jnp.float32), inners

    def pairs(way: str | None) -> Callable:
        return lambda douts, b, inners: [
            thin_pair(dout, b, inner, implementation=way) for dout, inner in zip(douts, inners, strict=True)
        ]

    programs: dict[str, Callable[[], float]] = {}
    results = {}
    for tile in (None, *(tiles or (Tile(*each) for each in TILES[rank]))):
        with mock.patch.object(triton, "tile", lambda width, tile=tile: tile):
            program = compiled(pairs("reference" if tile is None else "triton"), *given)
        name = "XLA" if tile is None else str(tuple(tile))
        results[name] = program(*given)[0]
        programs[name] = functools.partial(queued_ms, program, *given, count=10)
    moved = 2 * (tokens * out + 2 * tokens * rank) + 8 * out * rank  # bytes
    found: dict = beside_xla(programs, results, calls, lambda name: moved, copy)
    program = compiled(pairs("triton"), *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


def tile(text: str) -> Tile:
    return Tile(*map(int, text.split(",")))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tile", type=tile, action="append", default=[], help="instead of several of each rank")
    options = parser.parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    for shape in SHAPES:
        parts["{} x {}, rank {}".format(*shape)] = functools.partial(measure, *shape, copy, options.tile)
    return record_parts("thin_pair", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
