"""The backward of gated activations: the public functions `gated_backward`, of an MLP, and `gated_rows_backward`, of
experts, and the choice of their implementations (`implementations` and `row_implementations`). `_first_use` checks the
MLP's kernel before a GPU uses it."""

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
    """The backward of an MLP's gated activation. Returns (activation(gate) * up, the gradient of gate, the gradient of
    up), all in the shape and dtype of the arguments. The first is computed again, so that a forward need not keep it
    for the down projection's gradient. The kernel writes over its arguments if nothing else reads them, so that three
    arrays of this size are live and not six, at what is otherwise the peak of a training step's memory. The backward of
    the MLP (models/layers/mlp.py) calls it.

    Args:
      gate, up: the arrays of the forward, of one shape and one dtype: bfloat16, float16 or float32.
      dgated: the gradient of activation(gate) * up, in the same shape and dtype.
      activation: "silu", "gelu_tanh" or "gelu".
      implementation: "mosaic" (the kernel), "reference" (plain JAX), or None for the first that supports the call.
        "mosaic" needs a Hopper GPU, bfloat16, "silu" or "gelu_tanh", and a multiple of 1,024 elements, fewer than 2^32;
        on several devices this is asked for the whole arrays and for the part of each device.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = Arguments("gated_backward")
    check.array("gate", gate, "...", FLOATS)
    shape = " ".join(map(str, gate.shape))
    check.array("up", up, shape, gate.dtype)
    check.array("dgated", dgated, shape, gate.dtype)
    check.choice("activation", activation, tuple(reference.ACTIVATIONS))

    def chosen(gate):
        return dispatch.choose("gated_backward", implementations(gate.dtype, gate.size, activation), implementation)

    def run(gate, up, dgated):
        return IMPLEMENTATIONS[chosen(gate)].gated_backward(gate, up, dgated, activation)

    # XLA divides the reference by itself.
    return (run if chosen(gate) == "reference" else meshes.on_each_device(run, rows=3))(gate, up, dgated)


def implementations(dtype, size: int, activation: str) -> dispatch.Table:
    """The table from which dispatch.choose takes the implementation of a call: {name: a function that returns the
    reason why the implementation refuses the call, or None}, in the order in which they are tried: "mosaic", then
    "reference", which refuses nothing. The function of "mosaic" may compare the kernel with the reference on this GPU,
    which takes seconds. `gated_backward` chooses from the table, and `jaxtune info` prints why implementations refuse.

    Args:
      dtype: of the arrays.
      size: the number of elements of each.
      activation: a key of ACTIVATIONS, such as "silu".
    """

    def refusal():
        return mosaic.refusal(dtype, size, activation) or _first_use(activation)

    return {"mosaic": refusal, "reference": lambda: None}


def _first_use(activation: str) -> str | None:
    """Compares the Mosaic kernel with the plain JAX implementation on a small random case, once for each activation on
    a kind of GPU; a pass is stored in the user's cache. Returns the reason why this GPU must not run the kernel for
    `activation`, "silu" or "gelu_tanh", or None, also without a check if there is no GPU, or if the check is not done
    in this call (dispatch.first_use). `implementations` asks it after mosaic.refusal."""

    def compare():
        gate, up, dgated = (4 * jax.random.normal(jax.random.key(0), (3, 7, mosaic.CHUNK))).astype(jnp.bfloat16)
        got = jax.jit(mosaic.gated_backward, static_argnums=3)(gate, up, dgated, activation)
        gate, up, dgated = (each.astype(jnp.float32) for each in (gate, up, dgated))
        return got, reference.gated_backward(gate, up, dgated, activation)

    return dispatch.first_use("gated_backward", "mosaic", activation, compare)


@meshes.on_any_mesh
def gated_rows_backward(
    gate_up: jax.Array, weights: jax.Array, dgated: jax.Array, gate: RowGate, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The backward of experts' gated activation (gated_rows). Returns (the inner rows times their weights, computed
    again [rows, I]; the gradient of gate_up [rows, 2 I]; the gradient of weights, float32[rows]). The kernel computes
    the three in one pass over memory, and writes the first two over its arguments if nothing else reads these. The
    backward of a layer of experts (models/layers/experts.py) calls it.

    Args:
      gate_up: [rows, 2 I] bfloat16, float16 or float32, gate and up of each row.
      weights: float32[rows], the router's weight of each row.
      dgated: [rows, I] in gate_up's dtype, the gradient of the inner rows times their weights.
      gate: how an inner row is computed from gate and up.
      implementation: "triton" (the kernel: 16 bits, and an activation that is "silu" or "gelu_tanh", or clipped),
        "reference" (plain JAX), or None for the first that supports the call.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
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
    """The table from which dispatch.choose takes the implementation of a call of `gated_rows_backward`: {name: a
    function that returns the reason why the implementation refuses the call, or None}, in the order in which they are
    tried. `gated_rows_backward` chooses from the table, and `jaxtune info --kernels` prints it.

    Args:
      gate_up: [rows, 2 I], gate and up of each row, as an array or as a jax.ShapeDtypeStruct.
      gate: how an inner row is computed from gate and up.
    """
    return {"triton": lambda: triton.refusal(gate_up, gate), "reference": lambda: None}


def in_place(dtype, gate: RowGate) -> bool:
    """Whether a kernel of gated_rows_backward, which writes over its arguments, supports rows of this dtype and gate on
    the GPUs for which there is one. The planner asks it."""
    return triton.unsupported(dtype, gate) is None
