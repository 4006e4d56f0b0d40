"""The norm before products in FP8 with the rounding to e4m3 and the product with adapters' A, beside XLA's passes.

    python benchmarks/kernels/fp8_normed.py --output FILE.json [--only TEXT] [--tile 64,128,8,3 ...]

For norms of several widths and ranks, 16,384 tokens, bfloat16: milliseconds, and the bytes that the kernel must read
and write per second as a share of the fastest copy's. "blocks" has a scale for each 128 numbers of a row, "rows" one
for each row. Several tiles of the kernel (rows, columns, warps, stages), or those given by --tile, take turns with what
it replaces: XLA's norm, the kernel of fp8_rounding.py, and a GEMM. `from_float32`: the largest distance of codes times
scales, of the rows' inverse root mean squares, and of the product, from plain JAX in float32. `same_bits`: whether 20
runs with the tile in use gave the same. `first_use`: what the check before the first use on this GPU says, null if it
passes.
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
    compiled,
    distance,
    in_turns,
    normal,
    queued_ms,
    record_parts,
    same_bits,
)
from jaxtune.pallas.normed_heads import inverse_rms, normed
from jaxtune.pallas.quant_matmul import fp8_normed, fp8_product
from jaxtune.pallas.quant_matmul.fp8_normed import Tile

TOKENS, EPS = 16384, 1e-5
# (size, ranks together, whether the size has all tiles): Llama-3.1-8B's query, key and value, its gate and up, the
# latter without adapters; Qwen3-14B's query, key and value; two of 70B's
SHAPES = ((4096, 48, True), (4096, 32, True), (4096, 0, False), (5120, 48, True), (8192, 48, True), (2048, 32, True))
TILES = (
    Tile(64, 128, 8, 3),
    Tile(64, 128, 8, 4),
    Tile(64, 128, 4, 3),
    Tile(64, 128, 16, 3),
    Tile(128, 128, 8, 4),
    Tile(128, 128, 16, 4),
    Tile(32, 128, 4, 4),
)
ROW_TILES = (Tile(64, 256, 8, 3), Tile(64, 256, 16, 3))  # beside those of blocks
TIMES = 3  # calls in a program


def before(x, weight, a, blocks: bool):
    """The passes that the kernel replaces."""
    n = jax.lax.optimization_barrier(normed(x, weight, EPS, 0.0, False))
    inner = None if a is None else jnp.dot(n, a.astype(n.dtype).T, preferred_element_type=n.dtype)
    codes, scales = fp8_product.operand(n, blocks)
    return codes, scales.T, inverse_rms(x, EPS), inner  # scales as the kernels write them


def after(x, weight, a, blocks: bool):
    codes, scales, of_rows, inner = fp8_normed.normed(x, weight.astype(x.dtype), a, EPS, blocks)
    return codes, scales.T, of_rows, inner


def decoded(codes, scales, of_rows, inner) -> list[jax.Array]:
    """The numbers that codes and scales stand for, the factors of rows, and the product if there is one."""
    wide = codes.astype(jnp.float32).reshape(*scales.T.shape, -1) * scales.T[..., None]
    return [wide.reshape(codes.shape), of_rows, *([] if inner is None else [inner])]


def exact(x, weight, a) -> list[jax.Array]:
    """The same of plain JAX in float32."""
    wide = normed(x.astype(jnp.float32), weight.astype(jnp.float32), EPS, 0.0, True)
    products = [] if a is None else [jnp.dot(wide, a.T, precision=jax.lax.Precision.HIGHEST)]
    return [wide, inverse_rms(x, EPS), *products]


def measured(size: int, rank: int, blocks: bool, copy: float, tiles: list[Tile], sweeps: bool) -> dict:
    xs = [normal(k, TOKENS, size) for k in range(TIMES)]
    weight = (1 + 0.1 * jax.random.normal(jax.random.key(20), (size,))).astype(jnp.bfloat16)
    a = normal(30, rank, size, dtype=jnp.float32) if rank else None
    want = compiled(exact, xs[0], weight, a)(xs[0], weight, a)
    programs, found, errors = {}, {}, {}
    swept = (*TILES, *(() if blocks else ROW_TILES)) if sweeps else (fp8_normed.tile(fp8_normed.width_of(rank), size),)
    for tile in (None, *(tiles or swept)):
        name = "XLA" if tile is None else str(tuple(tile))
        once = before if tile is None else after

        def often(xs, weight, a, once=once):
            return [once(x, weight, a, blocks) for x in xs]

        try:
            with mock.patch.object(fp8_normed, "tile", lambda *of, tile=tile: tile):
                program = compiled(often, xs, weight, a)
            results = decoded(*program(xs, weight, a)[0])
        except Exception as error:
            errors[name] = str(error)[:200]
            continue
        far = max(distance(one, other) for one, other in zip(results, want, strict=True))
        products = distance(results[2], want[2]) if rank else None
        found[name] = {"from_float32": round(far, 5), "product_from_float32": products}
        programs[name] = functools.partial(queued_ms, program, xs, weight, a, count=6)
    moved = TOKENS * (3 * size + 2 * rank + 4 * (1 + (size // 128 if blocks else 1)))
    for name, took in in_turns(programs).items():
        ms = took / TIMES
        found[name] |= {"ms": round(ms, 4), "of_copy": round(moved / ms / 1e6 / copy, 3)}

    def bits(x, weight, a):
        codes, scales, of_rows, inner = after(x, weight, a, blocks)
        codes = jax.lax.bitcast_convert_type(codes.reshape(TOKENS, -1, 4), jnp.uint32)
        return codes, scales, of_rows, *([] if inner is None else [inner])

    program = compiled(bits, xs[0], weight, a)
    return found | errors | {"same_bits": same_bits(lambda: program(xs[0], weight, a))}


def first_use() -> dict:
    """{a kind of call: what the check says}."""
    cases = [(rank, blocks) for rank in (0, 16, 32, 48) for blocks in (True, False)]
    shape = jax.ShapeDtypeStruct((TOKENS, 4096), jnp.bfloat16)
    return {f"rank {r}, {'blocks' if b else 'rows'}": fp8_product.normed_refusal(shape, r, b) for r, b in cases}


def tile(text: str) -> Tile:
    return Tile(*map(int, text.split(",")))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--tile", type=tile, action="append", default=[], help="instead of several")
    options = parser.parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy, "first_use": first_use}
    for size, rank, sweeps in SHAPES:
        for blocks in (True, False):
            name = f"{'blocks' if blocks else 'rows'}, {TOKENS} x {size}, rank {rank}"
            parts[name] = functools.partial(measured, size, rank, blocks, copy, options.tile, sweeps)
    return record_parts("fp8_normed", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
