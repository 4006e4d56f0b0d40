"""A decoding step's mixture of experts without a sort of tokens and without padded rows. The plain implementation
multiplies every token by every expert: ask `experts_have_kernels` first. TypeError or ValueError for wrong arguments.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.decode.few_rows import experts_triton, reference
from jaxtune.pallas.decode.few_rows.cases import in_float32, normal_array
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul import few_sizes

_IMPLEMENTATIONS = {"triton": experts_triton, "reference": reference}
_CASE = 256  # the hidden size of the case on which kernels are compared with the reference; experts have half of it


def _case(count: int, choices: int, experts: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x [count, 256], choice int32[count, choices], weights float32[count, choices]): nearly all
    tokens have expert 0.
    """
    tokens, choice_index = jnp.arange(count, dtype=jnp.int32)[:, None], jnp.arange(choices, dtype=jnp.int32)
    turn = 1 + (tokens + choice_index) % max(experts - 1, 1)
    choice = jnp.where(tokens == 0, experts, jnp.where(choice_index == choices - 1, 0, turn))
    return (
        normal_array(0, count, _CASE, dtype=dtype),
        choice,
        jax.nn.softmax(normal_array(1, count, choices, dtype=jnp.float32)),
    )


def _case_adapters(lora: GroupedLora | None, matrices: jax.Array, dtype) -> GroupedLora | None:
    if lora is None:
        return None
    (experts, rows, columns), rank = matrices.shape, lora.a.shape[1]
    exists = jnp.arange(rank) < lora.read_rank
    a = jnp.where(exists[:, None], normal_array(3, experts, rank, columns, dtype=dtype), 0)
    b = jnp.where(exists, 0.1 * normal_array(4, experts, rows, rank, dtype=dtype), 0)
    return dataclasses.replace(lora, a=a, b=b)


def _call_text(count: int, dtype, weight, choices: int, lora: GroupedLora | None) -> str:
    text = f"{dtype}, {few_sizes.padded(count)} rows, {choices} of {len(weight)} experts"
    if lora is None:
        return text
    padding = f" of {lora.a.shape[1]}" if lora.own_ranks else ""
    return f"{text}, adapters of rank {lora.read_rank}{padding}"


def _gated_refusal(x, gate_up, choices: int, activation: str, lora: GroupedLora | None) -> str | None:
    """Why the kernel must not run a call, its check at first use included, or None."""

    def compare():
        experts = len(gate_up)
        rows, choice, weights = _case(few_sizes.padded(len(x)), choices, experts, x.dtype)
        matrices = 0.1 * normal_array(2, experts, _CASE, _CASE, dtype=x.dtype)
        operands = rows, matrices, jax.tree.map(lambda side: 0.3 * side, _case_adapters(lora, matrices, x.dtype))
        kernel, exact = (
            lambda x, matrices, lora, module=module: module.experts_gated(
                x, matrices, choice, weights, activation, lora
            )
            for module in (experts_triton, reference)
        )
        return [jax.jit(kernel)(*operands)], [dispatch.exactly(exact)(*in_float32(operands))]

    reason = experts_triton.gated_refusal(x, gate_up, choices, activation, lora)
    call = f"{_call_text(len(x), x.dtype, gate_up, choices, lora)}, {activation}"
    return reason or dispatch.first_use("experts_gated", "triton", call, compare)


def _down_refusal(count: int, dtype, down, choices: int, lora: GroupedLora | None) -> str | None:
    """As _gated_refusal, of experts_down."""
    tile = experts_triton.down_tile(down.shape[1])

    def compare():
        experts = len(down)
        rows, choice, _ = _case(few_sizes.padded(count), choices, experts, dtype)
        rows = jnp.repeat(rows[:, : _CASE // 2], choices, axis=0)
        matrices = normal_array(2, experts, 3 * tile.rows, _CASE // 2, dtype=dtype)
        operands = rows, matrices, _case_adapters(lora, matrices, dtype)
        kernel, exact = (
            lambda rows, matrices, lora, module=module: module.experts_down(rows, matrices, choice, lora)
            for module in (experts_triton, reference)
        )
        return [jax.jit(kernel)(*operands)], [dispatch.exactly(exact)(*in_float32(operands))]

    reason = experts_triton.down_refusal(count, dtype, down, choices, lora)
    call = f"{_call_text(count, dtype, down, choices, lora)}, tiles of {tile.rows}"
    return reason or dispatch.first_use("experts_down", "triton", call, compare)


def _check_adapters(check: Arguments, lora: GroupedLora | None, rows: str, columns: str) -> None:
    if lora is not None:
        check.is_a("lora", lora, GroupedLora, "a GroupedLora or None")
        check.array("lora.a", lora.a, f"E r {columns}", FLOATS)
        check.array("lora.b", lora.b, f"E {rows} r", FLOATS)


def experts_have_kernels(
    x: jax.Array,
    matrices: tuple[jax.Array, jax.Array],
    choices: int,
    activation: str,
    loras: tuple[GroupedLora | None, GroupedLora | None] = (None, None),
) -> bool:
    """Whether both `experts_gated` and `experts_down` run as kernels here; the first use on a GPU takes seconds.

    matrices: (gate_up [E, 2 * inner, hidden], down [E, hidden, inner]); loras: their adapters.
    choices: experts of a token.
    x: [N, hidden], array or shape. activation: a key of gated.ACTIVATIONS.
    """
    reason = _gated_refusal(x, matrices[0], choices, activation, loras[0])
    return (reason or _down_refusal(len(x), x.dtype, matrices[1], choices, loras[1])) is None


def experts_gated(
    x: jax.Array,
    gate_up: jax.Array,
    choice: jax.Array,
    weights: jax.Array,
    activation: str,
    lora: GroupedLora | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """activation(x gate^T) * (x up^T) * weight for a few tokens and each of their experts, in one kernel that does not
    read the matrices of experts without tokens: [N * k, inner] in x's dtype, token t's j-th expert at t * k + j, zeros
    for no expert. Not differentiable.

      x: [N, hidden]; "triton" supports N from 2 to 128.
      gate_up: [E, 2 * inner, hidden], gate's rows before up's, in x's dtype.
      choice: int32[N, k], each token's experts, all different; numbers outside of 0 to E - 1 are none.
      weights: float32[N, k], the router's.
      activation: a key of gated.ACTIVATIONS. x gate^T and x up^T are rounded to x's dtype; the rest is float32.
      lora: adapters; "triton" supports ranks up to 64. Arrays in another dtype are cast in each call.
      implementation: "triton" (16-bit floats on Hopper, hidden and inner multiples of 64, k up to 16, "silu" or
        "gelu_tanh"), "reference", or None: the first that supports the call.
    """
    check = Arguments("experts_gated")
    check.array("x", x, "N hidden", FLOATS)
    check.array("gate_up", gate_up, "E both hidden", x.dtype)
    check.array("choice", choice, "N k", jnp.int32)
    check.array("weights", weights, "N k", jnp.float32)
    _check_adapters(check, lora, "both", "hidden")
    check.choice("activation", activation, tuple(ACTIVATIONS))
    if gate_up.shape[1] % 2:
        raise ValueError(f"experts_gated: gate_up has {gate_up.shape[1]} rows an expert; those of gate and up are even")
    refusals = {
        "triton": lambda: _gated_refusal(x, gate_up, choice.shape[1], activation, lora),
        "reference": lambda: None,
    }
    implementation_name = dispatch.choose("experts_gated", refusals, implementation)
    return _IMPLEMENTATIONS[implementation_name].experts_gated(x, gate_up, choice, weights, activation, lora)


def experts_down(
    h: jax.Array,
    down: jax.Array,
    choice: jax.Array,
    lora: GroupedLora | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies the rows of few tokens' experts by the experts' down matrices, as `experts_gated` does. Not
    differentiable.

    Returns partial sums float32[k, N, hidden], the product of token t and its j-th expert at [j, t], zeros for no
    expert; `added_norm` adds them in order and rounds once. routing.matmul_to_tokens rounds each product first, and so
    does this within one_order.exact: the sums are then in h's dtype.

      h: [N * k, inner] of `experts_gated`.
      down: [E, hidden, inner] in h's dtype.
      choice: int32[N, k], each token's experts, all different; numbers outside of 0 to E - 1 are none.
      lora: adapters, or None; "triton" supports ranks up to 64.
      implementation: "triton", "reference", or None: the first that supports the call.
    """
    check = Arguments("experts_down")
    check.array("choice", choice, "N k", jnp.int32)
    check.sizes["rows"] = (choice.size, " (N times k)")
    check.array("h", h, "rows inner", FLOATS)
    check.array("down", down, "E hidden inner", h.dtype)
    _check_adapters(check, lora, "hidden", "inner")
    refusals = {
        "triton": lambda: _down_refusal(len(choice), h.dtype, down, choice.shape[1], lora),
        "reference": lambda: None,
    }
    implementation_name = dispatch.choose("experts_down", refusals, implementation)
    return _IMPLEMENTATIONS[implementation_name].experts_down(h, down, choice, lora)
