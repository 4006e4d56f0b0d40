"""Decode attention beside XLA's over the whole capacity and cuDNN's paged form, in one run on one GPU.

    python benchmarks/kernels/decode_attention.py --output FILE.json [--only TEXT] [--blocks]

A program is several layers of one step, each with caches of its own, as a step has them: bytes of different layers are
not in the L2, and what depends on the lengths alone is computed once. Milliseconds are of one layer. "of copy" is the
speed at which the keys and values that rows see are read, over the fastest copy of the run. Errors are relative to
float32. --blocks measures the Mosaic kernel with other blocks, on three cases.

cuDNN's paged form is a private function of JAX. It has neither a soft cap nor sinks.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, compiled, distance, figure, median_ms, normal, record_parts, same_bits
from jaxtune.pallas import tuning
from jaxtune.pallas.decode.attention import mosaic, reference, triton
from jaxtune.pallas.decode.attention.shapes import CASES, Case

CACHE_BYTES = 4_000_000_000  # of all layers of a program, at most
IN_ANY_BATCH = ("64 rows", "64 rows, head dim 64, window 128", "64 rows, head dim 256, soft cap")
PAGE = 64  # keys of a page of cuDNN's
OTHER_BLOCKS = {
    "64 rows": ((64, 3, 1), (128, 1, 1), (128, 1, 2)),
    "64 rows, head dim 64, sinks": ((64, 3, 3), (64, 2, 4), (128, 2, 2)),
    "64 rows, head dim 256, soft cap": ((64, 1, 1), (128, 1, 1)),
}


def options_of(case: Case) -> dict:
    sinks = jnp.linspace(-1, 1, case.heads) if case.sinks else None
    return dict(scale=case.dim**-0.5, window=case.window, soft_cap=case.soft_cap, sinks=sinks)


def operands(case: Case) -> tuple:
    """query, (keys, values) of each layer, lengths"""
    shape = (case.rows, case.kv_heads, case.capacity, case.dim)
    layers = int(np.clip(CACHE_BYTES // (4 * np.prod(shape)), 2, 8))
    caches = [(normal(2 * layer, *shape), normal(2 * layer + 1, *shape)) for layer in range(layers)]
    return normal(100, case.rows, case.heads, case.dim), caches, jnp.asarray(case.lengths())


def pages_of(cache):
    """[rows * pages, kv_heads, PAGE, D] of a cache, as cuDNN's paged form reads it."""
    rows, kv_heads, capacity, dim = cache.shape
    pages = cache.reshape(rows, kv_heads, capacity // PAGE, PAGE, dim).swapaxes(1, 2)
    return pages.reshape(-1, kv_heads, PAGE, dim)


def cudnn_paged(query, keys, values, lengths, *, scale, **_):
    """keys, values: pages_of the caches."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    rows = len(lengths)
    table = jnp.arange(len(keys), dtype=jnp.int32).reshape(rows, 1, -1, 1)
    return paged_attention(
        query[:, :, None],
        keys,
        values,
        jnp.ones(rows, jnp.int32),
        lengths,
        table,
        table,
        scale=scale,
        mask_type=MaskType.PADDING,
        qkv_layout="BNTH",
    )[:, :, 0]


def contenders(case: Case) -> dict[str, Callable]:
    found: dict[str, Callable] = {"mosaic": mosaic.decode, "xla": reference.decode}
    if importlib.util.find_spec("jax_triton"):
        found["triton"] = triton.decode
    if case.soft_cap is None and not case.sinks and case.window is None:
        found["cudnn_paged"] = cudnn_paged
    return found


def step(decode: Callable, case: Case) -> Callable:
    def run(query, caches, lengths):
        for keys, values in caches:
            query = decode(query, keys, values, lengths, **options_of(case))
        return query

    return run


def same_in_any_batch(decode: Callable, case: Case, whole, query, keys, values, lengths) -> bool:
    """Whether rows have the same bits alone and in a batch of others, in other slots, as in the whole batch."""
    decode = jax.jit(functools.partial(decode, **options_of(case)))
    for picked in ([case.rows // 2], list(range(case.rows))[::-3]):
        rows = jnp.asarray(picked)
        if not bool((decode(query[rows], keys[rows], values[rows], lengths[rows]) == whole[rows]).all()):
            return False
    return True


def measure(case: Case, copy: float) -> dict:
    query, caches, lengths = operands(case)
    keys, values = caches[0]
    few = slice(0, 64)  # rows, for float32
    given = (query[few], keys[few], values[few])
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(reference.decode, **options_of(case)))
        want = exact(*(each.astype(jnp.float32) for each in given), lengths[few])
    found: dict = {"live_mb": case.live_bytes() / 1e6, "layers": len(caches)}

    def programs(decode):
        """One layer and the step, each with its arguments."""
        made = [tuple(map(pages_of, layer)) for layer in caches] if decode is cudnn_paged else caches
        one, all_layers = (query, *made[0], lengths), (query, made, lengths)
        layer = functools.partial(decode, **options_of(case))
        return (compiled(layer, *one), one), (compiled(step(decode, case), *all_layers), all_layers)

    with ThreadPoolExecutor() as pool:
        coming = {name: pool.submit(programs, decode) for name, decode in contenders(case).items()}
    for name, decode in contenders(case).items():
        try:
            (one, given), (program, step_arguments) = coming.pop(name).result()
            ms = median_ms(program, *step_arguments, count=8) / len(caches)
            out = one(*given)
            found[name] = {
                "ms": round(ms, 5),
                "of_copy": round(case.live_bytes() / ms / 1e6 / copy, 4),
                "error": distance(out[few], want),
            }
            if name in ("mosaic", "triton"):
                found[name]["bitwise_over_20_runs"] = same_bits(functools.partial(one, *given))
            if name in ("mosaic", "triton") and case.name in IN_ANY_BATCH:
                same = same_in_any_batch(decode, case, out, query, keys, values, lengths)
                found[name]["same_bits_in_any_batch"] = same
        except Exception as error:  # what a contender cannot do is a finding
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return found


def other_blocks(case: Case, tried: tuple, copy: float) -> dict:
    query, caches, lengths = operands(case)
    found = {}
    for blocks in ((), *tried):
        chosen = mosaic.Blocks(*blocks) if blocks else mosaic.HEURISTIC[case.dim]
        with tuning.forced("decode attention", chosen.as_dict()):
            try:
                program = compiled(step(lambda *a, **o: mosaic.decode(*a, **o), case), query, caches, lengths)
                ms = median_ms(program, query, caches, lengths, count=8) / len(caches)
                found[str(chosen)] = [round(ms, 5), round(case.live_bytes() / ms / 1e6 / copy, 4)]
            except Exception as error:  # does not fit
                found[str(chosen)] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def must_show(record: dict) -> Iterator[dict]:
    for case in CASES:
        times = record.get(case.name, {})
        ours, xla, vendor = (times.get(name, {}).get("ms") for name in ("mosaic", "xla", "cudnn_paged"))
        if ours is None:
            continue
        floor = 0.8 if case.name in ("64 rows", "128 rows", "256 rows") else None
        yield figure("decode attention", f"{case.name}: share of copy", times["mosaic"]["of_copy"], floor)
        for other, words in ((xla, "XLA's over the whole capacity"), (vendor, "cuDNN's paged")):
            if other is not None:
                yield figure("decode attention", f"{case.name}: speed over {words}", other / ours, 1.0)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", action="store_true", help="other blocks of the Mosaic kernel, too")
    options = parser.parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    if options.blocks:
        named = {case.name: case for case in CASES}
        for name, tried in OTHER_BLOCKS.items():
            parts[f"{name}: blocks"] = functools.partial(other_blocks, named[name], tried, copy)
    parts |= {case.name: functools.partial(measure, case, copy) for case in CASES}
    return record_parts("decode_attention", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
