"""Forms of the kernel of `attended` for Llama-3.1-8B beside the one in use, in one run on one GPU.

    python benchmarks/kernels/attended_forms.py --output FILE.json [--only TEXT]

"alone": several layers of the attention, each with caches of its own; microseconds of a layer. "programs": when the
programs of a kernel begin and end, from the GPU's clock. "steps": the same within decode_step.py's layers. All rows
have 456 tokens. Every figure is the median of several programs' runs, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import attended_form_kernels, decode_step
from benchmarks.kernels.decode_step import DIM, HEADS, KV_HEADS, LAYERS, attended, few
from benchmarks.kernels.timing import arguments, distance, in_turns, normal, queued_ms, record_parts
from jaxtune.pallas import compat
from jaxtune.pallas.decode_attention.splits import log2_sinks
from jaxtune.pallas.few_rows import attended_kernels

CAPACITY, LENGTH = 768, 456


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of the kernel: its tile (keys, warps, stages), and the flags of form_kernel that are not usual; None: the
    kernel in use."""

    tile: tuple[int, int, int] = (32, 4, 4)
    flags: tuple[tuple[str, int], ...] | None = None


USUAL = dict(EARLY=0, AHEAD=0, OWN_ROWS=16, SUM=0, OWN_PARTS=1, MATH=1, TIMES=0)


def form(*tile: int, **flags: int) -> Form:
    assert len(tile) == 3 and flags.keys() <= USUAL.keys()
    return Form((tile[0], tile[1], tile[2]), tuple(flags.items()))


def soon(*tile: int, **flags: int) -> Form:
    """As much as possible is read before anything else."""
    return form(*tile, EARLY=1, AHEAD=tile[0] * (tile[2] - 1), **flags)


FORMS = {
    "in use": Form((32, 4, 3)),
    "late": form(32, 4, 3),
    "one warp": form(16, 1, 3),
    "one warp, early": form(16, 1, 3, EARLY=1),
    "one warp, ahead": form(16, 1, 3, AHEAD=32),
    "one warp, soon": soon(16, 1, 3),
    "one warp, four rows": form(16, 1, 3, OWN_ROWS=4),
    "one warp, four rows, soon": soon(16, 1, 3, OWN_ROWS=4),
    "one warp, two stages": form(16, 1, 2),
    "two warps, four rows": form(16, 2, 3, OWN_ROWS=4),
    "one warp in use": Form((16, 1, 3)),
}
TIMED = ("late", "one warp", "one warp, soon")
FEW_FORMS = {
    "in use": Form((128, 8, 3)),
    "soon": soon(128, 8, 3),
    "256 keys": Form((256, 8, 2)),
    "256 keys, 16 warps": Form((256, 16, 2)),
    "16 warps": Form((128, 16, 3)),
    "4 warps": Form((128, 4, 3)),
    "64 keys": Form((64, 4, 6)),
}
ONLY_FEW: dict[str, decode_step.Way] = {
    "four stages of query, key and value": (decode_step.Tile(64, 128, 4, 4), 1),
    "ten stages of query, key and value": (decode_step.Tile(64, 128, 4, 10), 1),
}


def called(chosen: Form, parts, before, table, positions, keys, values):
    """(the attention, the caches, the programs' times) by a form of the kernel. before: an array that must be ready."""
    splits, count, _ = parts.shape
    step, warps, stages = chosen.tile
    sinks, group = log2_sinks(None, HEADS), 16
    shapes = [jax.ShapeDtypeStruct((count, HEADS, DIM), keys.dtype)]
    shapes += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values)]
    sizes = dict(COUNT=count, HEADS=HEADS, KV_HEADS=KV_HEADS, DIM=DIM, CAPACITY=keys.shape[2], SPLITS=splits)
    sizes |= dict(STEP=step, GROUP=group, STAGES=stages)
    masking = dict(SCALE=DIM**-0.5, CAP=0.0)
    if chosen.flags is None:
        out, keys, values = compat.triton_graph_call(
            attended_kernels.attended_kernel,
            (parts, before, before, *table, positions, sinks, keys, values),
            shapes,
            (KV_HEADS, count),
            warps=warps,
            stages=stages,
            aliases={7: 1, 8: 2},
            **sizes | masking | dict(NORMS=0, ROTATES=1, EPS=1e-6, OFFSET=0.0, FLOAT32=0, WINDOW=0),
        )
        return out, keys, values, None
    flags = USUAL | dict(chosen.flags)
    return compat.triton_graph_call(
        attended_form_kernels.form_kernel,
        (parts, before, *table, positions, sinks, keys, values),
        [*shapes, jax.ShapeDtypeStruct((count * KV_HEADS, 4), jnp.int32)],
        (KV_HEADS, count),
        warps=warps,
        stages=stages,
        aliases={6: 1, 7: 2},
        **sizes | masking | flags,
    )


def operands(rows: int):
    """(parts, the rotation's table, positions, the caches of each layer)."""
    angles = normal(2, rows, DIM // 2, dtype=jnp.float32)
    parts = normal(3, 1, rows, (HEADS + 2 * KV_HEADS) * DIM)
    shape = rows, KV_HEADS, CAPACITY, DIM
    caches = [(normal(2 * i, *shape), normal(2 * i + 1, *shape)) for i in range(LAYERS)]
    return parts, (jnp.cos(angles), jnp.sin(angles)), jnp.full(rows, LENGTH - 1, jnp.int32), caches


def chain(chosen: Form, parts, table, positions, caches):
    """The attention of some layers: (that of each, the programs' times of each, the caches)."""
    out, after, times, every = jnp.zeros((parts.shape[1], HEADS, DIM), caches[0][0].dtype), [], [], []
    for keys, values in caches:
        out, keys, values, spent = called(chosen, parts, out, table, positions, keys, values)
        after.append((keys, values))
        times.append(spent)
        every.append(out)
    return every, times, after


def compiled_forms(lowered: dict[str, Callable]) -> tuple[dict, dict[str, str]]:
    """({name: the program}, {name: why it has none}). lowered: {name: gives what is to be compiled}, traced in turn."""
    made, failed = {}, {}
    with ThreadPoolExecutor(12) as pool:
        coming = {}
        for name, lower in lowered.items():
            try:
                coming[name] = pool.submit(lower().compile)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:160]}"
        for name, future in coming.items():
            try:
                made[name] = future.result()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return made, failed


def medians(runs: dict[str, Callable]) -> dict[str, float]:
    """Microseconds of a layer."""
    ways = {name: functools.partial(queued_ms, run, count=10) for name, run in runs.items()}
    return {name: round(1e3 * ms / LAYERS, 2) for name, ms in in_turns(ways, rounds=11).items()}


def course(before, layer) -> dict:
    """What the programs of a layer did, by their times and those of the layer before: [programs, 4] each."""
    begin, end = ((layer[:, i] - layer[:, 0].min()) / 1e3 for i in (0, 1))
    core = layer[:, 2]
    beside = [int(((core == one) & (begin <= now) & (end > now)).sum()) for one, now in zip(core, begin, strict=True)]
    moments = np.linspace(0.0, end.max(), 24, endpoint=False)
    return {
        "span": round(float(end.max()), 2),
        "after the layer before": round(float(layer[:, 0].min() - before[:, 1].max()) / 1e3, 2),
        "most programs of a multiprocessor": max(beside),
        "us of a program, 0 10 50 90 100 %": np.percentile(end - begin, [0, 10, 50, 90, 100]).round(1).tolist(),
        "ends, 0 10 50 90 100 %": np.percentile(end, [0, 10, 50, 90, 100]).round(1).tolist(),
        "running": [int(((begin <= now) & (end > now)).sum()) for now in moments],
    }


def programs_of(rows: int) -> dict:
    """When programs begin and end, microseconds from the first one's begin; of the layer that is median by its span."""
    *given, caches = operands(rows)
    found = {}
    for name in TIMED:
        chosen = dataclasses.replace(FORMS[name], flags=(*(FORMS[name].flags or ()), ("TIMES", 1)))
        program = jax.jit(functools.partial(chain, chosen), donate_argnums=3).lower(*given, caches).compile()
        for _ in range(3):
            _, times, caches = program(*given, caches)
        layers = [np.asarray(layer).astype(np.int64) & 0xFFFFFFFF for layer in times]
        rest = [course(before, layer) for before, layer in itertools.pairwise(layers)]
        found[name] = sorted(rest, key=lambda one: one["span"])[len(rest) // 2]
    return found


def steps_of(rows: int, forms: dict[str, Form], products: dict[str, decode_step.Way]) -> dict:
    """Microseconds of a layer with each form of the attention, and with other products of query, key and value."""
    *_, (cos, sin), positions, caches = operands(rows)
    layers = [decode_step.weights(seed) for seed in range(1, LAYERS + 1)]
    given = normal(0, rows, decode_step.HIDDEN), layers, normal(1, decode_step.HIDDEN), positions, (cos, sin)
    usual: dict[str, decode_step.Way] = dict.fromkeys(decode_step.SHAPES, "default")
    held = [caches]
    options = {"xla_gpu_dot_merger_threshold_mb": 0} if rows > few.MOST_ROWS else {}

    def lower(name: str):
        chosen = forms.get(name, forms["in use"])
        ways = usual | ({"qkv": products[name]} if name in products else {})

        def by_form(parts, keys, values, positions, table, norms, **_):
            return called(chosen, parts, jnp.zeros(8, keys.dtype), table, positions, keys, values)[:3]

        with (
            mock.patch.object(attended, "_by_kernel", by_form),
            mock.patch.object(attended, "_first_use", lambda *_: None),
        ):
            lowered = jax.jit(functools.partial(decode_step.step, ways), donate_argnums=5).lower(*given, held[0])
        return mock.Mock(compile=functools.partial(lowered.compile, compiler_options=dict(options)))

    names = [*forms, *products]
    programs, failed = compiled_forms({name: functools.partial(lower, name) for name in names})

    def run(program):
        result, held[0] = program(*given, held[0])
        return result

    runs, right = {}, None
    for name, program in programs.items():
        result = run(program)
        right = result if right is None else right
        if not distance(result, right) < 0.02 and "constants" not in name:
            failed[name] = f"differs by {distance(result, right)}"
        runs[name] = functools.partial(run, program)
    return {"us_of_a_layer": medians(runs), "failed": failed}


def main() -> int:
    options = arguments(__doc__).parse_args()
    parts: dict[str, Callable] = {"steps, 1 rows": functools.partial(steps_of, 1, FEW_FORMS, ONLY_FEW)}
    parts |= {f"steps, {rows} rows": functools.partial(steps_of, rows, FORMS, {}) for rows in (128, 256, 64, 32)}
    parts |= {"programs, 128 rows": functools.partial(programs_of, 128)}
    return record_parts("attended_forms", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
