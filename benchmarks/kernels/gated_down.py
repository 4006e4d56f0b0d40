"""A gated activation with the thin products of the down projection's adapter, beside XLA's and Mosaic's passes.

    python benchmarks/kernels/gated_down.py --output FILE.json [--only TEXT] [--tile 32,128,4,3,5 ...]

For MLPs of several widths and ranks, 16,384 tokens, bfloat16: milliseconds, and the bytes that the kernel must read and
write per second as a share of the fastest copy's. "forward" is activation(gate) * up and its product with the adapter's
A; "rounded" is that with the first rounded to e4m3 in blocks of 128; "backward" the gradients of gate and up, and that
of A; "backward_rounded" these, the first two rounded and multiplied by the thin arrays of the adapters of gate and up.
Several tiles of the kernels (rows, columns, warps, stages, programs of a multiprocessor), or those given by --tile,
take turns with what they replace: XLA's passes, or in the backward the Mosaic kernel and a GEMM, or the kernel without
codes, that of fp8_rounding.py and twice that of thin_pair.
`from_float32`: the largest distance of a result from plain JAX in float32, or with "backward_rounded" from those of the
four kernels (`from_four`), whose codes and scales are also compared bit for bit (`same_codes`). `same_bits`: whether 20
runs with the tile in use gave the same. `other_codes`: the shares of codes and of scales that differ from those of XLA.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import (
    arguments,
    compiled,
    distance,
    in_turns,
    normal,
    queued_ms,
    record_parts,
    same_bits,
)
from jaxtune.pallas.gated import gated_backward, gated_thin, gated_thin_backward, reference, thin, thin_triton
from jaxtune.pallas.gated.thin_triton import Tile
from jaxtune.pallas.quant_matmul import fp8_product
from jaxtune.pallas.thin_pair import thin_pair

TOKENS = 16384
# (I, rank): Llama-3.1-8B with two ranks, Qwen3-1.7B, Qwen3-14B
SHAPES = ((14336, 16), (14336, 32), (6144, 16), (17408, 32))
FORWARD_TILES = (
    Tile(32, 128, 4, 3),
    Tile(16, 128, 4, 4),
    Tile(64, 128, 8, 3),
)
BACKWARD_TILES = (
    Tile(16, 128, 4, 3, 16),
    Tile(16, 128, 4, 3, 8),
    Tile(16, 128, 4, 4, 16),
    Tile(32, 128, 4, 3, 10),
)
ROUNDED_TILES = (
    Tile(16, 128, 4, 3, 12),
    Tile(16, 128, 4, 3, 6),
    Tile(16, 128, 4, 2, 12),
    Tile(16, 128, 8, 3, 8),
    Tile(32, 128, 4, 2, 8),
)
TIMES = 3  # calls in a program


def turns(programs: dict, results: dict, want, moved: float, copy: float, far: str = "from_float32") -> dict:
    """{name: the figures of a program}, of which each makes TIMES calls; results: what one call of each gave. far: the
    name of the distance from `want`."""
    found = {}
    for name, took in in_turns(programs).items():
        ms = took / TIMES
        furthest = max(distance(one, other) for one, other in zip(results[name], want, strict=True))
        found[name] = {"ms": round(ms, 4), "of_copy": round(moved / ms / 1e6 / copy, 3), far: round(furthest, 5)}
    return found


def forward(size: int, rank: int, copy: float, tiles: list[Tile], rounds: bool = False) -> dict:
    pairs = [(normal(2 * k, TOKENS, size), normal(2 * k + 1, TOKENS, size)) for k in range(TIMES)]
    a = normal(30, rank, size, dtype=jnp.float32)
    programs, results = {}, {}

    def once(gate, up, a, kernel: bool):
        if rounds and kernel:
            codes, scales, inner = thin.by_kernel(gate, up, a, "silu", "e4m3")
            return (codes, scales), inner
        x, inner = gated_thin(gate, up, a, "silu", implementation="triton" if kernel else "reference")
        return (fp8_product.rounded(x, True) if rounds else x), inner

    for tile in (None, *(tiles or FORWARD_TILES)):

        def often(pairs, a, kernel=tile is not None):
            return [once(*pair, a, kernel) for pair in pairs]

        name = "XLA" if tile is None else str(tuple(tile))
        with mock.patch.object(thin_triton, "tile", lambda *of, tile=tile: tile):
            program = compiled(often, pairs, a)
        value, inner = program(pairs, a)[0]
        results[name] = decoded(*value) if rounds else value, inner
        programs[name] = functools.partial(queued_ms, program, pairs, a, count=6)
    wide = [each.astype(jnp.float32) for each in (*pairs[0], a)]
    want = compiled(functools.partial(reference.gated_thin, activation="silu"), *wide)(*wide)
    found = turns(programs, results, want, (5 if rounds else 6) * TOKENS * size, copy)
    program = compiled(functools.partial(once, kernel=True), *pairs[0], a)
    found["same_bits"] = same_bits(lambda: jax.tree.leaves(program(*pairs[0], a))[rounds:])
    if rounds:
        x, _ = gated_thin(*pairs[0], a, "silu", implementation="triton")
        (codes, scales), _ = program(*pairs[0], a)
        exact, exact_scales = compiled(lambda x: fp8_product.rounded(x, True), x)(x)
        others = codes.astype(jnp.float32) != exact.astype(jnp.float32)
        found["other_codes"] = float(others.mean()), float((scales != exact_scales).mean())
    return found


def decoded(codes, scales) -> jax.Array:
    return (codes.astype(jnp.float32).reshape(*scales.shape, -1) * scales[..., None]).reshape(codes.shape)


def rounded(*of) -> dict:
    return forward(*of, rounds=True)


def before(gate, up, dgated, dinner):
    """The passes that the kernel of the backward replaces: the results, and what the next call takes, with an array in
    the memory of dgated."""
    gated, dgate, dup = gated_backward(gate, up, dgated, "silu", implementation="mosaic")
    return (dgate, dup, reference.thin_product(dinner, gated, (0, 0), jnp.float32)), (dgate, dup, gated, dinner)


def kernel(gate, up, dgated, dinner):
    results = gated_thin_backward(gate, up, dgated, dinner, "silu", implementation="triton")
    return results, (*results[:2], dgated, dinner)


def often(run: Callable, wide: Sequence[jax.Array], dinner, *others):
    """Results of each call are arguments of the next one, so that no call needs a copy of its arguments."""
    found = []
    for _ in range(TIMES):
        results, (*wide, dinner) = run(*wide, dinner, *others)
        found.append([each for each in jax.tree.leaves(results) if not any(each is other for other in wide)])
    return wide, found


def in_place_ms(program: Callable, given: tuple, *others, count: int = 6) -> float:
    """Milliseconds of a program that takes the memory of its first three arguments and gives it back."""
    wide, dinner = [*map(jnp.copy, given[:3])], given[3]
    wide, _ = jax.block_until_ready(program(wide, dinner, *others))
    begun = time.perf_counter()
    for _ in range(count):
        wide, _ = program(wide, dinner, *others)
    jax.block_until_ready(wide)
    return (time.perf_counter() - begun) / count * 1e3


def backward(size: int, rank: int, copy: float, tiles: list[Tile]) -> dict:
    given = *(normal(k, TOKENS, size) for k in range(3)), normal(3, TOKENS, rank)
    programs, results = {}, {}
    for tile in (None, *(tiles or BACKWARD_TILES)):
        run = before if tile is None else kernel
        name = "Mosaic and XLA" if tile is None else str(tuple(tile))
        with mock.patch.object(thin_triton, "backward_tile", lambda tile=tile: tile):
            program = compiled(functools.partial(often, run), [*given[:3]], given[3], donate_argnums=0)
            results[name] = compiled(lambda *given, run=run: run(*given)[0], *given)(*given)
        programs[name] = functools.partial(in_place_ms, program, given)
    wide = [each.astype(jnp.float32) for each in given]
    want = compiled(functools.partial(reference.gated_thin_backward, activation="silu"), *wide)(*wide)
    del wide
    found = turns(programs, results, want, 10 * TOKENS * size, copy)
    program = compiled(lambda *given: kernel(*given)[0], *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


def rounded_apart(gate, up, dgated, dinner, inners, bs):
    """The four kernels that one replaces: the results of rounded_gradients, and what the next call takes."""
    dgate, dup, da = gated_thin_backward(gate, up, dgated, dinner, "silu", implementation="triton")
    coded = fp8_product.side_by_side([dgate, dup], None, True)
    pairs = [
        thin_pair(dout, b, inner, implementation="triton")
        for dout, b, inner in zip((dgate, dup), bs, inners, strict=True)
    ]
    thins, dbs = zip(*pairs, strict=True)
    return (coded, jnp.concatenate(thins, axis=1), da, [*dbs]), (dgate, dup, dgated, thins[0])


def rounded_at_once(gate, up, dgated, dinner, inners, bs, tile: Tile):
    results = thin_triton.rounded_gradients(gate, up, dgated, dinner, inners, bs, "silu", tile)
    return results, (gate, up, dgated, results[1][:, : dinner.shape[1]])


def backward_rounded(size: int, rank: int, copy: float, tiles: list[Tile]) -> dict:
    given = *(normal(k, TOKENS, size) for k in range(3)), normal(3, TOKENS, rank)
    inners = [normal(k, TOKENS, rank) for k in (4, 5)]
    bs = [normal(k, size, rank, size=0.1, dtype=jnp.float32) for k in (6, 7)]
    programs, results = {}, {}
    for tile in (None, *(tiles or ROUNDED_TILES)):
        run: Callable = rounded_apart if tile is None else functools.partial(rounded_at_once, tile=tile)
        name = "four kernels" if tile is None else str(tuple(tile))
        program = compiled(functools.partial(often, run), [*given[:3]], given[3], inners, bs, donate_argnums=0)
        once = compiled(lambda *given, run=run: run(*given)[0], *given, inners, bs)
        results[name] = jax.tree.leaves(once(*given, inners, bs))
        programs[name] = functools.partial(in_place_ms, program, given, inners, bs)
        print(f"{name}: {programs[name]() / TIMES:.4f} ms", flush=True)
    want = results["four kernels"]
    found = turns(programs, results, want, 8 * TOKENS * size, copy, "from_four")
    for name, result in results.items():
        pairs = zip(result[:2], want[:2], strict=True)
        found[name]["same_codes"] = all(
            bool((one.astype(jnp.float32) == other.astype(jnp.float32)).all()) for one, other in pairs
        )

    def all_results(*given):
        """Codes as bfloat16, which has all of them."""
        (codes, scales), *others = rounded_at_once(*given, thin_triton.rounded_tile())[0]
        return codes.astype(jnp.bfloat16), scales, others

    program = compiled(all_results, *given, inners, bs)
    return found | {"same_bits": same_bits(lambda: program(*given, inners, bs))}


def tile(text: str) -> Tile:
    return Tile(*map(int, text.split(",")))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tile", type=tile, action="append", default=[], help="instead of several")
    options = parser.parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    for size, rank in SHAPES:
        for what in (backward, forward, *((rounded, backward_rounded) if size == 14336 else ())):
            name = f"{what.__name__}, {TOKENS} x {size}, rank {rank}"
            parts[name] = functools.partial(what, size, rank, copy, options.tile)
    return record_parts("gated_down", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
