"""A gated activation with the thin products of the down projection's adapter, beside XLA's and Mosaic's passes.

    python benchmarks/kernels/gated_down.py --output FILE.json [--only TEXT] [--tile 32,128,4,3,5 ...]

For MLPs of several widths and ranks, 16,384 tokens, bfloat16: milliseconds, and the bytes that the kernel must read and
write per second as a share of the fastest copy's. "forward" is activation(gate) * up and its product with the adapter's
A; "rounded" is that with the first rounded to e4m3 in blocks of 128; "backward" the gradients of gate and up, and that
of A; "backward_rounded" these, with the first two also rounded. Several tiles of the kernels (rows, columns, warps,
stages, programs of a multiprocessor), or those given by --tile, take turns with what they replace: XLA's passes, or in
the backward the Mosaic kernel and a GEMM, or the kernel without codes and that of fp8_rounding.py, with whose results
theirs are compared (`same_as_two`: gradients, A's, codes and scales).
`from_float32`: the largest distance of a result from plain JAX in float32. `same_bits`: whether 20 runs with the tile
in use gave the same. `other_codes`: the shares of codes and of scales that differ from those of XLA.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
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
TIMES = 3  # calls in a program


def turns(programs: dict, results: dict, want: tuple, moved: float, copy: float) -> dict:
    """{name: the figures of a program}, of which each makes TIMES calls; results: what one call of each gave."""
    found = {}
    for name, took in in_turns(programs).items():
        ms = took / TIMES
        far = max(distance(one, other) for one, other in zip(results[name], want, strict=True))
        found[name] = {"ms": round(ms, 4), "of_copy": round(moved / ms / 1e6 / copy, 3), "from_float32": round(far, 5)}
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
    """The passes that the kernel of the backward replaces: the results, and what takes the memory of dgated."""
    gated, dgate, dup = gated_backward(gate, up, dgated, "silu", implementation="mosaic")
    return (dgate, dup, reference.thin_product(dinner, gated, (0, 0), jnp.float32)), gated


def kernel(gate, up, dgated, dinner):
    return gated_thin_backward(gate, up, dgated, dinner, "silu", implementation="triton"), dgated


def often(run: Callable, gate, up, dgated, dinner):
    """Each result is the next call's argument, so that no call needs a copy of its arguments."""
    das = []
    for _ in range(TIMES):
        (gate, up, da), dgated = run(gate, up, dgated, dinner)
        das.append(da)
    return gate, up, dgated, das


def in_place_ms(program: Callable, given, count: int = 6) -> float:
    """Milliseconds of a program that takes the memory of its first three arguments and gives it back."""
    *wide, dinner = [*map(jnp.copy, given[:3]), given[3]]
    *wide, _ = jax.block_until_ready(program(*wide, dinner))
    begun = time.perf_counter()
    for _ in range(count):
        *wide, _ = program(*wide, dinner)
    jax.block_until_ready(wide)
    return (time.perf_counter() - begun) / count * 1e3


def backward(size: int, rank: int, copy: float, tiles: list[Tile]) -> dict:
    given = *(normal(k, TOKENS, size) for k in range(3)), normal(3, TOKENS, rank)
    programs, results = {}, {}
    for tile in (None, *(tiles or BACKWARD_TILES)):
        run = before if tile is None else kernel
        name = "Mosaic and XLA" if tile is None else str(tuple(tile))
        with mock.patch.object(thin_triton, "backward_tile", lambda rounds=False, tile=tile: tile):
            program = compiled(functools.partial(often, run), *given, donate_argnums=(0, 1, 2))
            results[name] = compiled(lambda *given, run=run: run(*given)[0], *given)(*given)
        programs[name] = functools.partial(in_place_ms, program, given)
    wide = [each.astype(jnp.float32) for each in given]
    want = compiled(functools.partial(reference.gated_thin_backward, activation="silu"), *wide)(*wide)
    del wide
    found = turns(programs, results, want, 10 * TOKENS * size, copy)
    program = compiled(lambda *given: kernel(*given)[0], *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


def rounded_apart(gate, up, dgated, dinner):
    """The two kernels that one replaces: the results, with the codes last, and what takes the memory of dgated."""
    dgate, dup, da = thin.backward_by_kernel(gate, up, dgated, dinner, "silu")
    return (dgate, dup, (da, *fp8_product.side_by_side([dgate, dup], None, True))), dgated


def rounded_at_once(gate, up, dgated, dinner):
    dgate, dup, *coded, da = thin.backward_by_kernel(gate, up, dgated, dinner, "silu", rounds=True)
    return (dgate, dup, (da, *coded)), dgated


def backward_rounded(size: int, rank: int, copy: float, tiles: list[Tile]) -> dict:
    given = *(normal(k, TOKENS, size) for k in range(3)), normal(3, TOKENS, rank)
    programs, results = {}, {}
    for tile in (None, *(tiles or BACKWARD_TILES)):
        run = rounded_apart if tile is None else rounded_at_once
        name = "two kernels" if tile is None else str(tuple(tile))
        own = thin_triton.backward_tile() if tile is None else tile
        with mock.patch.object(thin_triton, "backward_tile", lambda rounds=False, own=own: own):
            program = compiled(functools.partial(often, run), *given, donate_argnums=(0, 1, 2))
            dgate, dup, (da, codes, scales) = compiled(lambda *given, run=run: run(*given)[0], *given)(*given)
        results[name] = dgate, dup, da, codes.astype(jnp.float32), scales
        programs[name] = functools.partial(in_place_ms, program, given)
    want = results["two kernels"]
    found = turns(programs, results, want, 12 * TOKENS * size, copy)
    found["same_as_two"] = {
        name: [bool((one == other).all()) for one, other in zip(result, want, strict=True)]
        for name, result in results.items()
    }

    def all_results(*given):
        """Codes as bfloat16, which has all of them."""
        dgate, dup, (da, codes, scales) = rounded_at_once(*given)[0]
        return dgate, dup, da, codes.astype(jnp.bfloat16), scales

    program = compiled(all_results, *given)
    return found | {"same_bits": same_bits(lambda: program(*given))}


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
