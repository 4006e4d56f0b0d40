"""Rounding rows to FP8, beside XLA's form.

    python benchmarks/kernels/to_fp8.py --output FILE.json [--only TEXT] [--tile 1,2048,16,4 ...]

For the calls of a layer of Llama-3.1-8B (16,384 tokens) and of the experts of Qwen3-30B-A3B (the same, eight experts a
token), with a scale for each row and for each 128 numbers of a row, bfloat16: milliseconds, and the bytes that must be
read and written per second as a share of the fastest copy's. The tile in use, several others of the kernel (rows,
columns, warps, steps), or those given by --tile, run in turns with XLA's program. `other_codes` and `other_scales`: how
many differ from XLA's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, compiled, in_turns, normal, queued_ms, record_parts
from jaxtune.pallas.grouped_matmul import fp8_experts
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import fp8_product, fp8_rounding
from jaxtune.pallas.quant_matmul.fp8_rounding import Tile

TOKENS, EXPERTS, CHOSEN = 16384, 128, 8


class Call(NamedTuple):
    widths: tuple[int, ...]
    scaled: bool = False  # by factors
    experts: bool = False  # whether rows are sorted by expert
    gathered: bool = False  # from tokens
    blocks: bool = False


CALLS = {
    "attention's or the MLP's input": Call((4096,)),
    "inner rows": Call((14336,)),
    "gradients of query, key and value": Call((4096, 1024, 1024), True),
    "gradients of gate and up": Call((14336, 14336), True),
    "gradients of gate and up of Qwen3-32B": Call((25600, 25600), True),
    "experts' input": Call((2048,), False, True, True),
    "experts' inner rows": Call((768,), False, True),
    "gradients of experts' outputs": Call((2048,), True, True, True),
    "gradients of experts' gate and up": Call((1536,), True, True),
    "blocks: attention's or the MLP's input": Call((4096,), blocks=True),
    "blocks: inner rows": Call((14336,), blocks=True),
    "blocks: gradients of query, key and value": Call((4096, 1024, 1024), blocks=True),
    "blocks: gradients of gate and up": Call((14336, 14336), blocks=True),
    "blocks: experts' input": Call((2048,), False, True, True, True),
    "blocks: experts' inner rows": Call((768,), False, True, False, True),
}
BLOCK_TILES = ((8, 128, 4, 8), (64, 128, 8, 2))
TILES = {  # by the longest row, without factors and with
    2048: (((8, 256, 8), (1, 1024, 4)), ((8, 256, 8, 4), (1, 1024, 4, 4))),
    4096: (((1, 2048, 8),), ()),
    8192: ((), ((1, 1024, 4), (1, 2048, 8, 4))),
    16384: (((1, 1024, 4), (1, 2048, 16)), ()),
    28672: ((), ((1, 2048, 16, 8), (1, 4096, 32, 4))),
    51200: ((), ((1, 2048, 32, 4), (1, 4096, 32))),
}
BYTES = 1.5e9  # that a program moves, at least


def operands(call: Call, groups, seed: int) -> list[jax.Array]:
    rows = TOKENS if call.gathered or not call.experts else groups.rows
    return [normal(10 * seed + index, rows, width) for index, width in enumerate(call.widths)]


@jax.jit
def differing(got, want) -> list[jax.Array]:
    """How many codes and how many scales are not the same bits."""

    def count(one, other, kind):
        one, other = (jax.lax.bitcast_convert_type(each, kind) for each in (one, other))
        return (one != other).sum()

    kinds = jnp.uint8, jnp.int32
    return [sum(count(a[part], b[part], kind) for a, b in zip(got, want)) for part, kind in enumerate(kinds)]


def measure(call: Call, copy: float, tiles: list[Tile]) -> dict:
    groups = groups_of(jnp.full(EXPERTS, TOKENS * CHOSEN // EXPERTS, jnp.int32), TOKENS * CHOSEN)
    rows, total = groups.rows if call.experts else TOKENS, sum(call.widths)
    moved = rows * (3 * total + 4 * (total / 128 if call.blocks else 1))  # bytes
    calls = max(1, round(BYTES / moved))
    tokens = jax.random.permutation(jax.random.key(1), jnp.arange(rows) % TOKENS) if call.gathered else None
    shape = (EXPERTS, total) if call.experts else (total,)
    factors = jax.random.uniform(jax.random.key(2), shape, jnp.float32, 0.5, 2.0) if call.scaled else None
    given = [operands(call, groups, seed) for seed in range(calls)], factors, groups, tokens

    def by_xla(arrays, factors, groups, tokens):
        if call.experts:
            codes, scales = fp8_experts._rounded(arrays[0], factors, groups, tokens, call.blocks)
        else:
            codes, scales = fp8_product.side_by_side(arrays, factors, call.blocks, "reference")
        return codes, scales.T if call.blocks else scales[:, 0]

    def by_kernel(arrays, factors, groups, tokens):
        experts = groups.tile_expert if call.experts else None
        return fp8_rounding.rounded(arrays, factors, experts, tokens, call.blocks)

    def program(way: Callable):
        return compiled(lambda all, *others: [way(arrays, *others) for arrays in all], *given)

    made = {"XLA": program(by_xla)}
    own = fp8_rounding.tile(total, call.scaled, call.blocks)
    others = BLOCK_TILES
    if not call.blocks:
        others = next(found for most, found in TILES.items() if total <= most)[call.scaled]
    for tile in tiles or [own, *(Tile(*each) for each in others)]:
        with mock.patch.object(fp8_rounding, "tile", lambda *of, tile=tile: tile):
            made[str(tuple(tile))] = program(by_kernel)
    times = in_turns({name: functools.partial(queued_ms, run, *given, count=10) for name, run in made.items()})
    want, found = made["XLA"](*given), {}
    for name, took in times.items():
        ms = took / calls
        codes, scales = map(int, differing(made[name](*given), want))
        share = round(moved / ms / 1e6 / copy, 3)
        found[name] = {"ms": round(ms, 4), "of_copy": share, "other_codes": codes, "other_scales": scales}
    return found | {"in_use": str(tuple(own)), "megabytes": round(moved / 1e6), "codes": calls * rows * total}


def tile(text: str) -> Tile:
    return Tile(*map(int, text.split(",")))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tile", type=tile, action="append", default=[], help="instead of several of each size")
    options = parser.parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    for name, call in CALLS.items():
        parts[name] = functools.partial(measure, call, copy, options.tile)
    return record_parts("to_fp8", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
