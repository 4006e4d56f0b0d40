"""Experts' gated activation together with the thin products of their down projection's adapters, forward and backward,
beside the kernels that do the same apart.

    python benchmarks/kernels/experts_gated_thin.py --output FILE.json [--only TEXT]

For the sorted rows of 8 x 2,048 tokens of three models, with experts of equal size and with a Zipf distribution's
sizes, bfloat16, rank 16: milliseconds, and the bytes that the fused kernel must read and write per second as a share of
the fastest copy's. "apart, XLA" is what runs without the kernels. Several tiles run in turns with it.
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
import numpy as np

from benchmarks.kernels.quant_matmul import copy_gb_per_s
from benchmarks.kernels.timing import arguments, beside_xla, compiled, normal, queued_ms, record_parts
from jaxtune.pallas.gated import RowGate, gated_rows, gated_rows_backward
from jaxtune.pallas.grouped_matmul import api, gated_thin
from jaxtune.pallas.grouped_matmul.gated_thin import Tile
from jaxtune.pallas.grouped_matmul.layout import groups_of

SILU, CLIPPED = RowGate("silu"), RowGate("silu", 7.0, 1.702, interleaved=True)
RANK, TOKENS = 16, 8 * 2048
# {model: experts, experts of a token, the experts' inner size, how they are gated}
SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 768, SILU),
    "gpt-oss-20b": (32, 4, 2880, CLIPPED),
    "Qwen3.5-35B-A3B": (256, 8, 512, SILU),
}
TIMES = 6  # calls in a program
FORWARDS = (gated_thin.FORWARD, Tile(32, 128, 4, 3), Tile(64, 128, 8, 3), Tile(32, 64, 4, 4))
BACKWARDS = (Tile(32, 64, 4, 3), Tile(32, 32, 2, 4), Tile(16, 64, 2, 4), Tile(64, 32, 4, 3))


def sizes_of(experts: int, chosen: int, even: bool) -> np.ndarray:
    """The experts' numbers of rows, which add up to those of all tokens."""
    share = np.ones(experts) if even else 1 / np.arange(1, experts + 1)
    sizes = np.floor(share / share.sum() * TOKENS * chosen).astype(np.int32)
    sizes[0] += TOKENS * chosen - sizes.sum()
    return sizes


def measure(experts: int, chosen: int, size: int, gate: RowGate, even: bool, copy: float) -> dict:
    groups = groups_of(jnp.asarray(sizes_of(experts, chosen, even)), TOKENS * chosen)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    gate_up, dgated, dinner = (
        jnp.where(inside, normal(i, groups.rows, n, size=2.0), 0) for i, n in enumerate((2 * size, size, 64))
    )
    weights = jnp.where(inside[:, 0], jax.random.uniform(jax.random.key(3), (groups.rows,), jnp.float32), 0)
    a = normal(4, experts, RANK, size)
    results, programs = {}, {}

    def forward(gate_up, weights, fused: bool):
        if fused:
            return gated_thin.gated_rows_thin(gate_up, weights, a, groups, gate)
        rows = gated_rows(gate_up, weights, gate)
        return rows, api._thin(rows, a, groups, 2, "mosaic", None)

    def backward(gate_up, weights, dgated, fused: bool):
        """(the gradients of gate_up and the weights, that of A), and what the next call takes for dgated."""
        if fused:
            found = gated_thin.gated_rows_thin_backward(gate_up, weights, dgated, dinner, RANK, groups, gate)
            return *found, dgated
        rows, dgate_up, dweights = gated_rows_backward(gate_up, weights, dgated, gate)
        return dgate_up, dweights, api.contracted(dinner, rows, groups, RANK, "mosaic", None), rows

    def forwards(gate_up, weights, fused: bool):
        found = []
        for _ in range(TIMES):  # tied, so that all run
            gate_up, weights, more = jax.lax.optimization_barrier((gate_up, weights, forward(gate_up, weights, fused)))
            found.append(more)
        return found

    def backwards(gate_up, weights, dgated, fused: bool):
        found = []
        for _ in range(TIMES):
            gate_up, dweights, da, dgated = backward(gate_up, weights, dgated, fused)
            found.append((dweights, da))
        return gate_up, dgated, found

    cases = [("forward", None), *(("forward", tile) for tile in FORWARDS)]
    cases += [("backward", None), *(("backward", tile) for tile in BACKWARDS)]
    for what, tile in cases:
        name = f"{what}, apart, XLA" if tile is None else f"{what}, apart, {tuple(tile)}"
        given = (gate_up, weights) if what == "forward" else (gate_up, weights, dgated)
        once, often = (forward, forwards) if what == "forward" else (backward, backwards)
        field = "FORWARD" if what == "forward" else "_INTERLEAVED" if gate.interleaved else "BACKWARD"
        fused = tile is not None
        try:
            with mock.patch.object(gated_thin, field, tile or getattr(gated_thin, field)):
                program = compiled(functools.partial(often, fused=fused), *given)
                found = compiled(functools.partial(once, fused=fused), *given)(*given)[:3]
            results[name] = (jnp.where(inside, found[0], 0), *found[1 : 2 if what == "forward" else 3])
            programs[name] = functools.partial(queued_ms, program, *given, count=4)
        except Exception as error:  # a tile that does not fit is a finding
            print(name, f"{type(error).__name__}: {str(error)[:160]}", flush=True)
    rows = TOKENS * chosen
    moved = {"forward": 3 * rows * size * 2 + rows * 128, "backward": 5 * rows * size * 2}
    return beside_xla(programs, results, TIMES, lambda name: moved[name.split(",")[0]], copy)


def main() -> int:
    options = arguments(__doc__).parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    for name, case in SHAPES.items():
        parts[name] = functools.partial(measure, *case, True, copy)
        parts[f"{name}, unequal experts"] = functools.partial(measure, *case, False, copy)
    return record_parts("experts_gated_thin", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
