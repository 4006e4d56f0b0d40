"""The backward of experts' gated activation, beside what XLA makes of plain JAX.

    python benchmarks/kernels/gated_rows.py --output FILE.json [--only TEXT]

For the sorted rows of 8 x 2,048 tokens of four models, bfloat16: milliseconds, and the bytes that must be read and
written per second as a share of the fastest copy's. Several tiles of the kernel run in turns with XLA's program.
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
from benchmarks.kernels.timing import arguments, beside_xla, compiled, normal, queued_ms, record_parts
from jaxtune.pallas.gated import RowGate, gated_rows_backward, triton
from jaxtune.pallas.gated.triton import Tile

SILU, CLIPPED = RowGate("silu"), RowGate("silu", 7.0, 1.702, interleaved=True)
# {model: rows, the experts' inner size, how they are gated}
SHAPES = {
    "Qwen3-30B-A3B": (147328, 768, SILU),
    "gpt-oss-20b": (69504, 2880, CLIPPED),
    "Qwen3.5-35B-A3B": (163840, 512, SILU),
    "Qwen1.5-MoE": (73216, 1408, SILU),
}
TIMES = 8  # calls in a program
TILES = (Tile(8, 256, 4), Tile(4, 256, 4), Tile(8, 128, 4), Tile(4, 512, 4), Tile(2, 512, 4), Tile(1, 1024, 4))


def measure(rows: int, size: int, gate: RowGate, copy: float) -> dict:
    gate_up, dgated = normal(0, rows, 2 * size, size=2.0), normal(1, rows, size)
    weights = jax.random.uniform(jax.random.key(2), (rows,), jnp.float32)
    given = gate_up, weights, dgated
    results, programs = {}, {}
    for tile in (None, *TILES):
        way = "reference" if tile is None else "triton"

        def often(gate_up, weights, dgated, way=way):
            """Each result is the next call's argument, so that no call needs a copy of its arguments."""
            dweights = []
            for _ in range(TIMES):
                dgated, gate_up, more = gated_rows_backward(gate_up, weights, dgated, gate, implementation=way)
                dweights.append(more)
            return dgated, gate_up, dweights

        def once(gate_up, weights, dgated, way=way):
            return gated_rows_backward(gate_up, weights, dgated, gate, implementation=way)

        name = "XLA" if tile is None else str(tuple(tile))
        with mock.patch.object(triton, "TILE", tile or triton.TILE):
            program = compiled(often, *given)
            results[name] = compiled(once, *given)(*given)
        programs[name] = functools.partial(queued_ms, program, *given, count=4)
    moved = 6 * rows * size * 2  # bytes
    return beside_xla(programs, results, TIMES, lambda name: moved, copy)


def main() -> int:
    options = arguments(__doc__).parse_args()
    copy = copy_gb_per_s(2**29)
    parts: dict[str, Callable] = {"copy_gb_per_s": lambda: copy}
    parts |= {name: functools.partial(measure, *case, copy) for name, case in SHAPES.items()}
    return record_parts("gated_rows", options, parts, lambda record: ())


if __name__ == "__main__":
    sys.exit(main())
