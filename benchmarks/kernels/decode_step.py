"""The kernels of a decoding step of Llama-3.1-8B with other tiles, in one run on one GPU.

    python benchmarks/kernels/decode_step.py --output FILE.json [--only TEXT]

"steps": several layers, with weights and caches of their own, so that none is in the L2. One kernel at a time gets
another tile or other splits, or is left to XLA; microseconds are of a whole layer, so that what a kernel costs those
around it is in them. "attention": several layers of the attention alone, each with caches of its own, over caches of
full slots (all rows equally long) and over those of rows of unequal lengths. Every figure is the median of several
programs' runs; `default` is the code as it is.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, compiled, distance, normal, queued_ms, record_parts
from jaxtune.pallas.decode import few_rows
from jaxtune.pallas.decode.attention import mosaic, triton
from jaxtune.pallas.decode.few_rows import triton as few
from jaxtune.pallas.decode.few_rows.triton import Tile

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
LAYERS = 6
# {product: its weights' rows and columns}; a gated product has two of them
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gated": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
WEIGHTS = {"q": (HIDDEN, HIDDEN), "k": (1024, HIDDEN), "v": (1024, HIDDEN), "o": SHAPES["o"]}
WEIGHTS |= {"gate": SHAPES["gated"], "up": SHAPES["gated"], "down": SHAPES["down"]}
# The module, whose name is that of its function too.
attended = importlib.import_module("jaxtune.pallas.decode.few_rows.attended")
type Way = str | tuple[Tile, int]  # "default", "xla", or the tile and the number of splits

_PLAIN, _WIDE = Tile(64, 128, 4, 4), Tile(128, 64, 8, 4)
TRIED: dict[int, dict[str, tuple[Way, ...]]] = {
    64: {
        "qkv": ((Tile(64, 128, 4, 6), 1), (Tile(64, 128, 4, 6), 2), (Tile(64, 128, 8, 4), 1), (_WIDE, 2)),
        "o": ((Tile(64, 128, 4, 6), 2), (Tile(64, 128, 4, 5), 2), (Tile(64, 256, 4, 3), 2), (Tile(128, 64, 8, 6), 4)),
        "gated": ((Tile(128, 64, 8, 3), 1), (Tile(64, 128, 4, 4), 1), (Tile(64, 64, 4, 8), 1)),
        "down": (
            (Tile(64, 128, 4, 6), 2),
            (Tile(64, 128, 4, 5), 2),
            (Tile(64, 256, 4, 3), 2),
            (Tile(128, 64, 8, 6), 4),
        ),
    },
    1: {
        "qkv": ("xla", (_PLAIN, 2), (_PLAIN, 1), (Tile(64, 128, 4, 8), 2), (Tile(64, 256, 4, 4), 2)),
        "o": ("xla", (_PLAIN, 4), (Tile(64, 128, 4, 8), 2), (Tile(64, 256, 4, 4), 2), (Tile(64, 256, 4, 4), 4)),
        "gated": ("xla", (Tile(64, 128, 4, 4), 1), (Tile(64, 128, 4, 6), 1), (Tile(128, 64, 8, 6), 1)),
        "down": ("xla", (_PLAIN, 4), (Tile(64, 128, 4, 8), 2), (Tile(64, 256, 4, 4), 2), (Tile(64, 256, 4, 4), 4)),
    },
    128: {
        "qkv": ((_WIDE, 2), (Tile(128, 64, 8, 6), 2), (Tile(64, 128, 8, 4), 1)),
        "o": ((_WIDE, 4), (Tile(128, 64, 8, 6), 4), (Tile(64, 128, 8, 4), 2)),
        "gated": ((_WIDE, 1), (Tile(64, 128, 4, 3), 1), (Tile(64, 64, 4, 4), 1)),
        "down": ((_WIDE, 4), (Tile(128, 64, 8, 6), 4), (Tile(64, 128, 8, 4), 2)),
    },
    256: {"qkv": ("xla",)},
}
# Other tiles of the attention within a step.
STEP_ATTENTION: dict[int, tuple[tuple[int, int, int], ...]] = {
    1: ((32, 4, 8), (32, 4, 12), (32, 1, 12), (32, 2, 12), (64, 4, 6), (128, 8, 3)),
    64: ((32, 4, 4), (16, 1, 3), (32, 2, 3), (32, 1, 3)),
    128: ((32, 4, 3), (32, 4, 4), (16, 1, 4), (32, 2, 4)),
    256: ((32, 4, 3), (16, 1, 2)),
}
# Keys of a tile, warps, stages of the kernel that reads whole caches.
ATTENTION = ((32, 4, 4), (32, 2, 3), (32, 2, 4), (16, 2, 6), (32, 1, 4), (32, 1, 3), (16, 1, 6), (64, 1, 2), (64, 2, 2))
# {name: (rows, capacity, (mean, deviation of the logarithm) of the lengths or the length of all)}
CACHES = {
    "64 rows of 456": (64, 768, 456),
    "128 rows of 456": (128, 768, 456),
    "256 rows of 456": (256, 768, 456),
    "64 unequal rows": (64, 3072, None),
    "128 unequal rows": (128, 3072, None),
}


def weights(seed: int) -> dict[str, jax.Array]:
    return {name: normal(100 * seed + i, *shape, size=0.02) for i, (name, shape) in enumerate(WEIGHTS.items())}


def product(way: Way, x, matrices, gated: bool = False):
    """[splits, N, out] of a product, or [1, N, out] of a gated one, by one of the ways."""
    if way == "xla":
        parts = [x @ matrix.T for matrix in matrices]
        return (jax.nn.silu(parts[0]) * parts[1] if gated else jnp.concatenate(parts, axis=-1))[None]
    if way == "default":
        return (
            few_rows.gated_product(x, matrices[0], matrices[1], "silu")[None]
            if gated
            else few_rows.products(x, matrices)
        )
    assert not isinstance(way, str)
    tile, splits = way
    width = matrices[0].shape[0] if gated else sum(matrix.shape[0] for matrix in matrices)
    dtype = x.dtype if splits == 1 else jnp.float32
    return few._multiplied(x, matrices, (), tile, splits, int(gated), width, dtype)


def step(ways: dict[str, Way], x, layers, norm, positions, table, caches):
    """A decoding step of some layers: (its result, the caches)."""
    normed, after = x, []
    for w, (keys, values) in zip(layers, caches, strict=True):
        heads = product(ways["qkv"], normed, [w["q"], w["k"], w["v"]])
        out, *kept = few_rows.attended(heads, keys, values, positions, table, scale=DIM**-0.5, batch_invariant=False)
        after.append(tuple(kept))
        out = out.reshape(len(out), HIDDEN)
        x, normed = few_rows.added_norm(x, product(ways["o"], out, [w["o"]]), norm, eps=1e-6)
        gated = product(ways["gated"], normed, [w["gate"], w["up"]], gated=True)[0]
        x, normed = few_rows.added_norm(x, product(ways["down"], gated, [w["down"]]), norm, eps=1e-6)
    return x, after


def medians(programs: dict[str, Callable[[], object]], per: int) -> dict[str, float]:
    """Microseconds of a layer of each program, run in turns. programs: {name: returns what it computes}."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(5):
        for name, run in programs.items():
            times[name].append(1e3 * queued_ms(run, count=10) / per)
    return {name: round(statistics.median(took), 2) for name, took in times.items()}


def built(ways: dict[str, tuple[Callable, tuple]], options: dict) -> tuple[dict[str, Callable], dict[str, str]]:
    """({name: calls the program}, {name: why it has none}) of functions with their arguments, compiled side by side."""

    def make(function, given):
        return functools.partial(compiled(function, *given, options=options), *given)

    with ThreadPoolExecutor(12) as pool:
        coming = {name: pool.submit(make, *way) for name, way in ways.items()}
    programs, failed = {}, {}
    for name, future in coming.items():
        try:
            programs[name] = future.result()
            jax.block_until_ready(programs[name]())
        except Exception as error:  # a tile that does not fit is a finding
            programs.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return programs, failed


def steps_of(rows: int) -> dict:
    """The step with other tiles of one product, and with other settings of kernels, at a time."""
    positions, capacity = jnp.full(rows, 455, jnp.int32), 768
    angles = normal(2, rows, DIM // 2, dtype=jnp.float32)
    given = normal(0, rows, HIDDEN), [weights(seed) for seed in range(1, LAYERS + 1)], normal(1, HIDDEN), positions
    given = *given, (jnp.cos(angles), jnp.sin(angles))
    shape = rows, KV_HEADS, capacity, DIM
    held = [[(normal(2 * i, *shape), normal(2 * i + 1, *shape)) for i in range(LAYERS)]]
    usual: dict[str, Way] = dict.fromkeys(SHAPES, "default")
    options = {"xla_gpu_dot_merger_threshold_mb": 0} if rows > few.MOST_ROWS else {}
    if jax.default_backend() != "gpu":
        options = {}
    programs, lowered, failed = {}, {}, {}

    def lower(name: str, ways: dict[str, Way], attention: triton.Tile | None = None) -> None:
        chosen = attended._tile if attention is None else lambda *_: attention
        try:
            with mock.patch.object(attended, "_tile", chosen):
                function = functools.partial(step, ways)
                lowered[name] = jax.jit(function, donate_argnums=5).lower(*given, held[0])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:160]}"

    def run(program):
        result, held[0] = program(*given, held[0])
        return result

    lower("default", usual)
    for tile in STEP_ATTENTION.get(rows, ()):
        lower(f"attention {tile}", usual, attention=triton.Tile(*tile))
    for name, tried in TRIED[rows].items():
        for way in tried:
            text = way if isinstance(way, str) else (way[0].rows, way[0].depth, way[0].warps, way[0].stages, way[1])
            lower(f"{name} {text}", usual | {name: way})
    with ThreadPoolExecutor(12) as pool:
        coming = {name: pool.submit(low.compile, compiler_options=dict(options)) for name, low in lowered.items()}
    right = None
    for name, future in coming.items():
        try:
            program = functools.partial(run, future.result())
            result = program()
            right = result if right is None else right
            apart = distance(result, right)
            if not apart < 0.02:
                failed[name] = f"differs by {apart}"
            programs[name] = program
        except Exception as error:  # a tile that does not fit is a finding
            failed[name] = f"{type(error).__name__}: {str(error)[:160]}"
    found = medians(programs, LAYERS)
    rest = sorted((time - found["default"], name) for name, time in found.items() if name != "default")
    less = {name: round(by, 2) for by, name in rest}
    return {"us_of_a_layer": found["default"], "more_than_default": less, "failed": failed}


def attention_of(name: str, copy: float) -> dict:
    rows, capacity, length = CACHES[name]
    draw = np.random.default_rng(0)
    lengths = np.full(rows, length) if length else 200 + np.clip(draw.lognormal(6.2, 0.7, rows), 1, 2048)
    lengths = jnp.asarray(lengths.astype(np.int32))
    shape = (rows, KV_HEADS, capacity, DIM)
    layers = int(np.clip(8e9 // (4 * np.prod(shape)), 2, 8))
    caches = [(normal(2 * i, *shape), normal(2 * i + 1, *shape)) for i in range(layers)]
    query = normal(100, rows, HEADS, DIM)

    def run(decode, query, caches, lengths):
        for keys, values in caches:
            query = decode(query, keys, values, lengths)
        return query

    def whole(tile, query, keys, values, lengths):
        from jaxtune.pallas.decode.attention.triton import _decode_whole

        kept = triton.WHOLE_TILES[DIM]
        triton.WHOLE_TILES[DIM] = triton.Tile(*tile)
        try:
            return _decode_whole(query, keys, values, lengths, DIM**-0.5, None, None, None)
        finally:
            triton.WHOLE_TILES[DIM] = kept

    ways = {f"whole {tile}": functools.partial(whole, tile) for tile in ATTENTION}
    ways |= {"mosaic": functools.partial(mosaic.decode, scale=DIM**-0.5)}
    if capacity > triton.WHOLE:
        ways |= {"triton splits": functools.partial(triton.decode, scale=DIM**-0.5)}
    made = {}
    for way, decode in ways.items():  # one after another: tiles are settings of a module while a function is traced
        programs, failed = built({way: (functools.partial(run, decode), (query, caches, lengths))}, {})
        made |= programs
        if failed:
            print(failed, flush=True)
    live = 4 * KV_HEADS * DIM * float(lengths.sum())
    times = medians(made, layers)
    return {"us": times, "of_copy": {way: round(live / us / 1e3 / copy, 3) for way, us in times.items()}}


def main() -> int:
    options = arguments(__doc__).parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    parts |= {f"attention, {name}": functools.partial(attention_of, name, copy) for name in CACHES}
    parts |= {f"steps, {rows} rows": functools.partial(steps_of, rows) for rows in TRIED}
    return record_parts("decode_step", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
