"""The second half of a layer of experts: its down projection of the gated activation, for frozen weights with adapters.

Neither the forward nor the backward reads the inner rows again for the adapters: both multiply them by the adapters'
thin arrays where they compute them (grouped_matmul/gated_thin.py), if a kernel can.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from jaxtune.pallas import meshes
from jaxtune.pallas.gated import RowGate, gated_rows, gated_rows_backward
from jaxtune.pallas.grouped_matmul import api as grouped
from jaxtune.pallas.grouped_matmul import gated_thin
from jaxtune.pallas.quant_matmul import low_rank
from jaxtune.pallas.routing import reference
from jaxtune.pallas.routing.api import Routing, as_rows, check_routing

_ROWS = 4096  # fewer rows are left to XLA


@meshes.on_any_mesh
def gated_to_tokens(
    gate_up: jax.Array,
    row_weights: jax.Array,
    gate: RowGate,
    weight,
    routing: Routing,
    lora: grouped.GroupedLora,
    *,
    transposed: bool = False,
    fp8: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """matmul_to_tokens of gated_rows, for weights that do not train: gate_up [rows, 2 in] -> [T, out].

    The backward computes the inner rows again from gate_up, and writes the gradient of gate_up over it where a kernel
    can. Differentiable in gate_up, row_weights and the adapters.

      gate_up: bfloat16, float16 or float32, sorted by expert.
      row_weights: float32[rows], the router's weight of each row; 0 for empty rows.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised.
      routing: of the rows. lora: adapters.
      fp8: multiply an FP8 weight undecoded. implementation: of grouped_matmul, or None.
    """
    check_routing("gated_to_tokens", routing)
    arguments = "gate_up", gate_up, "rows both", weight, routing.groups, lora, transposed, routing
    check = grouped.checked("gated_to_tokens", *arguments)
    in_size = weight.shape[1 if transposed else 2]
    if gate_up.shape[1] != 2 * in_size:
        raise ValueError(f"gated_to_tokens: gate_up has {gate_up.shape[1]} columns, and weight needs {2 * in_size}")
    check.is_a("lora", lora, grouped.GroupedLora, "a GroupedLora")
    check.array("row_weights", row_weights, "rows", jnp.float32)
    check.is_a("gate", gate, RowGate, "a RowGate")
    gate_up, weight, sides, static = grouped.prepared(
        gate_up, weight, routing.groups, lora, transposed, False, fp8, False, implementation
    )
    assert sides is not None
    run = functools.partial(_gated, gate, static, gate_up, row_weights, weight, sides, routing)
    return low_rank.of_function(run)


def _by_kernels(gate_up, lora, gate: RowGate, static: grouped.Static) -> bool:
    """Whether kernels compute the activation and the adapters' products with it."""
    mosaic = grouped.pads_rank(static.implementation) and len(gate_up) >= _ROWS
    return mosaic and gated_thin.refusal(gate_up, lora[0].shape[1], gate) is None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(gate: RowGate, static: grouped.Static, gate_up, row_weights, weight, lora, routing: Routing, earlier_inner):
    """([T, out], the adapters' low-rank input [rows, r]).

    row_weights: float32[rows].
    lora: (a [E, r, in], b [E, out, r]).
    earlier_inner: the low-rank input from an earlier run; None: it is computed.
    """
    inner = earlier_inner
    if inner is None and _by_kernels(gate_up, lora, gate, static):
        rows, inner = gated_thin.gated_rows_thin(gate_up, row_weights, lora[0], routing.groups, gate)
    else:
        rows = gated_rows(gate_up, row_weights, gate)
    out, residuals = grouped.forward(rows, weight, lora, routing.groups, static, inner=inner)
    return reference.summed(out, routing.slots), grouped.low_rank_of(residuals)


def _gated_fwd(gate, static, gate_up, row_weights, weight, lora, routing, earlier_inner):
    """Computes the low-rank input apart from the output: the stack's backward runs this rule and needs no output."""
    if earlier_inner is None and _by_kernels(gate_up, lora, gate, static):
        operands = gate_up, row_weights, lora[0], routing.groups, gate
        _, earlier_inner = gated_thin.gated_rows_thin(*operands, thin_alone=True)
    results: tuple[jax.Array, jax.Array] = _gated(
        gate, static, gate_up, row_weights, weight, lora, routing, earlier_inner
    )
    return results, (gate_up, row_weights, weight, lora, routing, results[1])


def _gated_bwd(gate, static, residuals, gradients):
    """What reads gate_up's gradient waits for the adapters' gradients, after which their operands are free."""
    (gate_up, row_weights, weight, lora, routing, inner), (dout, _) = residuals, gradients
    (a, b), groups = lora, routing.groups
    dout, tokens = as_rows(dout, routing, static)
    dinner, db = grouped.adapter_gradients(static, b, inner, groups, dout, tokens)
    drows = grouped.rows_gradient(static, weight, lora, dinner, groups, dout, tokens)
    if _by_kernels(gate_up, lora, gate, static):
        kernel_results = gated_thin.gated_rows_thin_backward(
            gate_up, row_weights, drows, dinner, a.shape[1], groups, gate
        )
        dgate_up, dweights, da = kernel_results
    else:
        rows, dgate_up, dweights = gated_rows_backward(gate_up, row_weights, drows, gate)
        da = grouped.contracted(dinner, rows, groups, a.shape[1], static.implementation, None)
    dgate_up, dlora = optimization_barrier((dgate_up, (da.astype(a.dtype), db.astype(b.dtype))))
    return dgate_up, dweights, None, dlora, None, None


_gated.defvjp(_gated_fwd, _gated_bwd)
