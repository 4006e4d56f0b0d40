"""Backward of gated activations, of an MLP and of experts. Public functions raise TypeError or ValueError for wrong
arguments or an implementation that refuses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.gated import mosaic, reference, triton
from jaxtune.pallas.gated.reference import RowGate

IMPLEMENTATIONS = {"mosaic": mosaic, "reference": reference}


@meshes.on_any_mesh
def gated_backward(
    gate: jax.Array, up: jax.Array, dgated: jax.Array, activation: str, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(activation(gate) * up, gradient of gate, gradient of up), in the arguments' shape and dtype. The first is
    computed again, so a forward need not keep it. The kernel writes over its arguments if nothing else reads them:
    three arrays are live, not six, at what is otherwise the peak of a training step's memory.

      gate, up: of one shape and dtype, bfloat16, float16 or float32.
      dgated: gradient of activation(gate) * up.
      activation: "silu", "gelu_tanh" or "gelu".
      implementation: "mosaic" (Hopper, bfloat16, "silu" or "gelu_tanh", a multiple of 1,024 elements below 2^32, also
        of each device's shard), "reference", or None: the first that supports the call.
    """
    check = Arguments("gated_backward")
    check.array("gate", gate, "...", FLOATS)
    shape = " ".join(map(str, gate.shape))
    check.array("up", up, shape, gate.dtype)
    check.array("dgated", dgated, shape, gate.dtype)
    check.choice("activation", activation, tuple(reference.ACTIVATIONS))

    def implementation_name(gate):
        return dispatch.choose("gated_backward", implementations(gate.dtype, gate.size, activation), implementation)

    def run(gate, up, dgated):
        return IMPLEMENTATIONS[implementation_name(gate)].gated_backward(gate, up, dgated, activation)

    # XLA divides the reference by itself.
    return (run if implementation_name(gate) == "reference" else meshes.on_each_device(run, rows=3))(gate, up, dgated)


def implementations(dtype, size: int, activation: str) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. "mosaic" may first compare its kernel with the
    reference on this GPU, which takes seconds. size: elements of an array. dtype: of gate and up.

      activation: a key of ACTIVATIONS.
    """

    def refusal():
        return mosaic.refusal(dtype, size, activation) or _first_use(activation)

    return {"mosaic": refusal, "reference": lambda: None}


def _first_use(activation: str) -> str | None:

    def compare():
        gate, up, dgated = (4 * jax.random.normal(jax.random.key(0), (3, 7, mosaic.CHUNK))).astype(jnp.bfloat16)
        kernel_results = jax.jit(mosaic.gated_backward, static_argnums=3)(gate, up, dgated, activation)
        gate, up, dgated = (array.astype(jnp.float32) for array in (gate, up, dgated))
        return kernel_results, reference.gated_backward(gate, up, dgated, activation)

    return dispatch.first_use("gated_backward", "mosaic", activation, compare)


@meshes.on_any_mesh
def gated_rows_backward(
    gate_up: jax.Array, weights: jax.Array, dgated: jax.Array, gate: RowGate, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Backward of experts' gated activation: (inner rows times their weights, computed again, [rows, I]; gradient of
    gate_up; gradient of weights, float32[rows]). The kernel takes one pass, and writes the first two over its arguments
    if nothing else reads these.

      gate_up: [rows, 2 I] bfloat16, float16 or float32.
      weights: float32[rows], the router's.
      dgated: [rows, I] in gate_up's dtype, gradient of the weighted inner rows.
      implementation: "triton" (16 bits, "silu", "gelu_tanh" or clipped), "reference", or None.
    """
    check = Arguments("gated_rows_backward")
    check.array("dgated", dgated, "rows I", FLOATS)
    rows, size = dgated.shape
    check.array("gate_up", gate_up, f"{rows} {2 * size}", dgated.dtype)
    check.array("weights", weights, "rows", jnp.float32)
    check.is_a("gate", gate, RowGate, "a RowGate")
    check.choice("gate.activation", gate.activation, tuple(reference.ACTIVATIONS))
    name = dispatch.choose("gated_rows_backward", row_implementations(gate_up, gate), implementation)
    return (triton if name == "triton" else reference).gated_rows_backward(gate_up, weights, dgated, gate)


def row_implementations(gate_up, gate: RowGate) -> dispatch.Table:
    """As `implementations`, of gated_rows_backward. gate_up: an array or a shape."""
    return {"triton": lambda: triton.refusal(gate_up, gate), "reference": lambda: None}


def in_place(dtype, gate: RowGate) -> bool:
    """Whether a kernel of gated_rows_backward, which writes over its arguments, supports such rows on some GPU."""
    return triton.unsupported(dtype, gate) is None
