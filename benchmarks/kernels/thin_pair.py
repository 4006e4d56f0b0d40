"""The two thin products of an adapter's backward, beside XLA's.

    python benchmarks/kernels/thin_pair.py --output FILE.json [--only TEXT] [--tile 64,512,4,3,1 ...]
    python benchmarks/kernels/thin_pair.py --output FILE.json --only experts
    python benchmarks/kernels/thin_pair.py --output FILE.json --only rounded

For gradients of outputs of several sizes and ranks, bfloat16: milliseconds, and the bytes that must be read and written
per second as a share of the fastest copy's. Several tiles of the kernel (rows, columns, warps, stages, programs of a
multiprocessor), or those given by --tile, run in turns with XLA's program; the float32 sums of what programs wrote are
part of the kernel's time. `same_bits`: whether 20 runs with the tile in use gave the same.

For experts, whose kernel is in grouped_matmul, it takes turns with the two Mosaic kernels that it replaces: "Mosaic".
`rounded` is the kernel that also rounds the gradients of one or several outputs to e4m3 (fp8_gradients.py), beside the
two kernels that it replaces: "apart". `same_codes`: whether codes and scales have the same bits as those.
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
from benchmarks.kernels.timing import (
    arguments,
    beside_xla,
    compiled,
    distance,
    in_turns,
    normal,
    queued_ms,
    record_parts,
    same_bits,
)
from jaxtune.pallas.grouped_matmul import mosaic, mosaic_contract
from jaxtune.pallas.grouped_matmul import thin_pair as of_experts
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import fp8_gradients, fp8_product
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
}
# Experts, chosen by a token, numbers of the output, whether the router is balanced, else by Zipf: 16,384 tokens.
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 1536, True),
    "gpt-oss-20b": (32, 4, 5760, True),
    "Qwen3-30B-A3B, Zipf": (128, 8, 1536, False),
}
EXPERTS_TILES = ((64, 512, 4, 3, 2), (64, 256, 4, 3, 2), (64, 512, 4, 3, 5), (128, 256, 4, 3, 2))
# Numbers of the outputs that share x, rank: o and down of Llama-3.1-8B, its queries, keys and values.
ROUNDED = (((4096,), 16), ((4096, 1024, 1024), 16), ((4096,), 32), ((4096, 1024, 1024), 32))
ROUNDED_TILES = ((64, 256, 8, 3, 2), (64, 256, 8, 4, 2), (64, 256, 8, 4, 1))
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
        with mock.patch.object(triton, "tile", lambda *of, tile=tile: tile):
            program = compiled(pairs("reference" if tile is None else "triton"), *given)
        name = "XLA" if tile is None else str(tuple(tile))
        results[name] = program(*given)[0]
        programs[name] = functools.partial(queued_ms, program, *given, count=10)
    moved = 2 * (tokens * out + 2 * tokens * rank) + 8 * out * rank  # bytes
    found: dict = beside_xla(programs, results, calls, lambda name: moved, copy)
    program = compiled(pairs("triton"), *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


def measure_experts(experts: int, chosen: int, out: int, balanced: bool, copy: float, tiles: list[Tile]) -> dict:
    pairs, rank = 16384 * chosen, 16
    share = 1 / (1.0 + jnp.arange(experts) * (not balanced))
    sizes = jnp.floor(pairs * share / share.sum()).astype(jnp.int32)
    groups = groups_of(sizes, pairs)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    dout, inner = (normal(seed, groups.rows, size) * inside for seed, size in ((0, out), (1, rank)))
    given = dout, normal(2, experts, out, rank, dtype=jnp.float32), mosaic.padded_rank_axis(inner, 1), groups

    def two(dout, b, inner, groups):
        return mosaic.thin(dout, b, groups, 1), mosaic_contract.contract_rows(inner, dout, groups, rank).mT

    made = {"Mosaic": compiled(two, *given)}
    for tile in tiles or (Tile(*each) for each in EXPERTS_TILES):
        with mock.patch.object(of_experts, "TILE", tile):
            made[str(tuple(tile))] = compiled(lambda *given: of_experts.thin_pair(*given), *given)
    times = in_turns({name: functools.partial(queued_ms, program, *given, count=10) for name, program in made.items()})
    moved = 2 * (pairs * (out + rank + 64)) + 8 * experts * out * rank  # bytes
    want, found = made["Mosaic"](*given), {}
    for name, ms in times.items():
        far = max(distance(*both) for both in zip(made[name](*given), want, strict=True))
        found[name] = {"ms": round(ms, 4), "of_copy": round(moved / ms / 1e6 / copy, 3), "from_mosaic": round(far, 6)}
    program = compiled(of_experts.thin_pair, *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


def rounded_apart(douts, inner, bs):
    """The two kernels that one replaces."""
    coded = fp8_product.side_by_side(douts, None, True)
    parts = jnp.split(inner, len(bs), axis=1)
    pairs = [thin_pair(*each, implementation="triton") for each in zip(douts, bs, parts, strict=True)]
    thins, dbs = zip(*pairs, strict=True)
    return coded, jnp.concatenate(thins, axis=1), list(dbs)


def measure_rounded(outs: tuple[int, ...], rank: int, copy: float, tiles: list[Tile]) -> dict:
    tokens, total = 16384, sum(outs)
    calls = max(1, round(BYTES / (2 * tokens * total)))
    douts = [[normal(10 * k + i, tokens, out) for i, out in enumerate(outs)] for k in range(calls)]
    bs = [normal(200 + i, out, rank, dtype=jnp.float32) for i, out in enumerate(outs)]
    given = normal(100, tokens, rank * len(outs)), bs
    made: dict[str, Callable] = {"apart": rounded_apart}
    for tile in tiles or (Tile(*each) for each in ROUNDED_TILES):
        made[str(tuple(tile))] = functools.partial(fp8_gradients.rounded_pair, shape=tile)
    programs, results = {}, {}
    for name, run in made.items():
        program = compiled(lambda all_douts, *given, run=run: [run(each, *given) for each in all_douts], douts, *given)
        results[name] = jax.tree.leaves(program(douts, *given)[0])
        programs[name] = functools.partial(queued_ms, program, douts, *given, count=10)
    moved = tokens * (3 * total + total / 32 + 4 * rank * len(outs)) + 8 * total * rank  # bytes
    found, want = {}, results["apart"]
    for name, took in in_turns(programs).items():
        codes, *others = zip(results[name], want, strict=True)
        equal = [(one.astype(jnp.float32) == other.astype(jnp.float32)).all() for one, other in (codes, others[0])]
        found[name] = {
            "ms": round(took / calls, 4),
            "of_copy": round(moved / (took / calls) / 1e6 / copy, 3),
            "same_codes": bool(equal[0] & equal[1]),
            "from_apart": round(max(distance(*both) for both in others[1:]), 7),
        }

    def all_results(douts):
        """Codes as bfloat16, which has all of them."""
        (codes, scales), *others = fp8_gradients.rounded_pair(douts, *given, fp8_gradients.tile())
        return codes.astype(jnp.bfloat16), scales, others

    program = compiled(all_results, douts[0])
    return found | {"same_bits": same_bits(lambda: program(douts[0]))}


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
    for outs, rank in ROUNDED:
        name = f"rounded, 16384 x {' and '.join(map(str, outs))}, rank {rank}"
        parts[name] = functools.partial(measure_rounded, outs, rank, copy, options.tile)
    for name, of in EXPERTS.items():
        parts[f"experts of {name}"] = functools.partial(measure_experts, *of, copy, options.tile)
    return record_parts("thin_pair", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
