"""Backward of experts' gated activation by a Triton kernel.

Its time is that of memory. XLA reads gate, up and the gradient twice: one pass computes the inner rows and the weights'
gradient, a sum over columns, another the gradients of gate and up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, meshes
from jaxtune.pallas.gated import reference
from jaxtune.pallas.gated.reference import RowGate


class Tile(NamedTuple):
    """How the kernel divides its work."""

    rows: int  # of a program
    columns: int  # of gate, and of up, that are computed at once
    warps: int  # of a program


TILE = Tile(2, 512, 4)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def refusal(gate_up, gate: RowGate) -> str | None:
    """Why the kernel cannot compute a call, or None; it may run its check at first use."""
    reason = compat.triton_refusal() or unsupported(gate_up.dtype, gate)
    return reason or _first_use(jnp.dtype(gate_up.dtype), gate)


def unsupported(dtype, gate: RowGate) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if gate.limit is None and gate.activation not in ACTIVATIONS:
        return f"activation {gate.activation}"
    return None


def _first_use(dtype, gate: RowGate) -> str | None:
    """Why this GPU must not run the kernel, or None: it is compared with plain JAX."""

    def compare():
        keys = jax.random.split(jax.random.key(0), 3)
        gate_up, dgated = (3 * jax.random.normal(key, (37, size)) for key, size in zip(keys, (832, 416)))
        weights = jax.random.uniform(keys[2], (37,))
        arrays = gate_up.astype(dtype), weights, dgated.astype(dtype)
        kernel_results = jax.jit(gated_rows_backward, static_argnums=3)(*arrays, gate)
        float32_operands = (array.astype(jnp.float32) for array in arrays)
        exact = dispatch.exactly(
            lambda gate_up, row_weights, dout: reference.gated_rows_backward(gate_up, row_weights, dout, gate)
        )
        return kernel_results, exact(*float32_operands)

    return dispatch.first_use("gated_rows_backward", "triton", f"{dtype}, {gate}", compare)


def gated_rows_backward(gate_up, weights, dgated, gate: RowGate):
    """(Weighted inner rows, gradients of gate_up and of weights), in float32 and rounded once. The first two results
    take dgated's and gate_up's memory; XLA copies these first if something else reads them.

      gate_up: [rows, 2 I] of 16 bits. weights: float32[rows]. dgated: [rows, I], of the weighted inner rows.
    """
    from jaxtune.pallas.gated import kernels

    clipped = gate.limit is not None

    def run(gate_up, weights, dgated):
        like = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (gate_up, dgated, weights)]
        dgate_up, gated, dweights = compat.triton_call(
            kernels.gated_rows_gradient_kernel,
            (gate_up, weights, dgated),
            like,
            (-(-len(gate_up) // TILE.rows),),
            warps=TILE.warps,
            stages=1,
            aliases={0: 0, 2: 1},
            ROWS=len(gate_up),
            SIZE=dgated.shape[1],
            BLOCK_ROWS=TILE.rows,
            BLOCK=TILE.columns,
            ACTIVATION=0 if clipped else ACTIVATIONS[gate.activation],
            CLIPPED=int(clipped),
            LIMIT=float(gate.limit or 0.0),
            ALPHA=float(gate.alpha if clipped else 1.0),
            INTERLEAVED=int(gate.interleaved),
        )
        return gated, dgate_up, dweights

    return meshes.on_each_device(run, rows=3)(gate_up, weights, dgated)
