"""Public functions of the gated delta rule, a linear attention, and of the short convolution before it.

Neighbouring heads / key_heads value heads share a key head. All functions raise TypeError or ValueError for wrong
shapes and dtypes; numbers are not checked. Outputs are divided by sqrt(K); decays below -104 make the state 0; decays,
states and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.delta_rule import chunked, convolution, reference, triton

IMPLEMENTATIONS = {"triton": triton, "chunked": chunked, "reference": reference}


def implementations(key, value) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial; only shapes and dtypes are read. "triton" may
    first compare its kernels with the reference on this GPU, which takes seconds.
    """
    return {
        "triton": lambda: triton.refusal(key, value),
        "chunked": lambda: None,
        "reference": lambda: None,
    }


def _check_layout(check: Arguments, layout) -> None:
    check.is_a("layout", layout, PackedLayout, "a PackedLayout: packed_layout((rows, length), segment_ids) makes one")
    check.array("layout.doc_start", layout.doc_start, "B T", jnp.int32)
    check.array("layout.doc_end", layout.doc_end, "B T", jnp.int32)


def _check_tokens(check: Arguments, key, value, decay, beta) -> None:
    check.array("key", key, "B T key_heads K", FLOATS)
    check.array("value", value, "B T heads V", key.dtype)
    check.array("decay", decay, "B T heads", jnp.float32)
    check.array("beta", beta, "B T heads", jnp.float32)
    if value.shape[2] % key.shape[2]:
        raise ValueError(f"{check.op}: {value.shape[2]} value heads are not a multiple of {key.shape[2]} key heads")


@meshes.on_any_mesh
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    layout: PackedLayout,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Output of the gated delta rule (arXiv 2412.06464) for packed documents, [B, T, heads, V] in value's dtype, 0 at
    padding; differentiable in all arrays but the layout.

    A value head's state is a matrix, 0 at a document's start. A token decays it, replaces the share beta of what it
    stores at the token's key by the token's value, then reads it at its query; reference.py has the formula. The Triton
    kernels round factors of products to key's dtype; "chunked" keeps them float32 but multiplies 16-bit calls with the
    device's default precision (TF32 on GPUs).

      layout: `packed_layout((B, T), segment_ids)`. The other arrays must be finite at padding, too.
      implementation: "triton" (16 bits, K and V 128), "chunked", "reference", or None: the first that supports the
        call.
      query, key: [B, T, key_heads, K] of one float dtype; normalised first. value: [B, T, heads, V] in it.
      decay: float32[B, T, heads], logarithm of the factor on the state, at most 0.
      beta: float32[B, T, heads] in [0, 1]; unchecked, and above 1 the kernels' float16 steps may overflow.
    """
    check = Arguments("gated_delta_rule")
    _check_tokens(check, key, value, decay, beta)
    check.array("query", query, "B T key_heads K", key.dtype)
    _check_layout(check, layout)
    name = dispatch.choose("gated_delta_rule", implementations(key, value), implementation)
    return IMPLEMENTATIONS[name].forward(query, key, value, decay, beta, layout)


@meshes.on_any_mesh
def delta_rule_state(
    key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, lengths: jax.Array
) -> jax.Array:
    """float32[B, heads, K, V]: the state after the first `lengths` (int[B], 0 to T) tokens of each row, which is one
    document; 0 for length 0. Later tokens are ignored but must be finite. Plain jnp, by chunks.

      key, value: [B, T, key_heads, K], [B, T, heads, V]. decay: float32[B, T, heads], logarithms, at most 0.
      beta: float32[B, T, heads] in [0, 1].
    """
    check = Arguments("delta_rule_state")
    _check_tokens(check, key, value, decay, beta)
    check.array("lengths", lengths, "B", INTEGERS)
    return chunked.state(key, value, decay, beta, lengths)


@meshes.on_any_mesh
def delta_rule_step(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out [B, 1, heads, V] in value's dtype, next state float32[B, heads, K, V]) for one more token of each row (T =
    1).

      state: before the token; 0 at a document's start.
      query, key, value: [B, 1, key_heads, K] twice, [B, 1, heads, V].
      decay: float32[B, 1, heads], logarithm, at most 0. beta: float32[B, 1, heads] in [0, 1].
    """
    check = Arguments("delta_rule_step", T=1)
    _check_tokens(check, key, value, decay, beta)
    check.array("query", query, "B T key_heads K", key.dtype)
    check.array("state", state, "B heads K V", jnp.float32)
    return reference.step(query, key, value, decay, beta, state)


@meshes.on_any_mesh
def delta_rule_chunk(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, heads, V] in value's dtype, next state) for the next T tokens of each row, which all continue its
    document: there are no bounds, lengths or padding.

      state: float32[B, heads, K, V], before the tokens; 0 at a document's start.
      query, key, value: [B, T, key_heads, K] twice, [B, T, heads, V].
      decay: float32[B, T, heads], logarithms, at most 0. beta: float32[B, T, heads] in [0, 1].
    """
    check = Arguments("delta_rule_chunk")
    _check_tokens(check, key, value, decay, beta)
    check.array("query", query, "B T key_heads K", key.dtype)
    check.array("state", state, "B heads K V", jnp.float32)
    return chunked.chunk(query, key, value, decay, beta, state)


@meshes.on_any_mesh
def short_convolution(
    x: jax.Array, weight: jax.Array, layout: PackedLayout, *, activation: Literal["silu"] | None = "silu"
) -> jax.Array:
    """Each channel's causal convolution along its document, then silu, [B, T, C] in x's dtype, 0 at padding; float32
    sums. Differentiable in x and weight.

      x: [B, T, C] bfloat16, float16 or float32, finite at padding, too.
      weight: float[C, k]; the last column multiplies the token itself, the first the token k - 1 before it.
      layout: of the rows (packed_layout), whose documents the convolution does not cross.
    """
    check = Arguments("short_convolution")
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    _check_layout(check, layout)
    return convolution.forward(x, weight, layout, activation)


@meshes.on_any_mesh
def short_convolution_parts(
    x: jax.Array,
    weight: jax.Array,
    layout: PackedLayout,
    part_sizes: Sequence[int],
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """short_convolution divided along channels: arrays [B, T, size] for each of `part_sizes`, which add up to C. Their
    gradients need not be joined into one array.

      implementation: "triton" (16 bits, four taps, three parts), "reference", or None: the first that supports the
        call.
      x: [B, T, C] in a float dtype, finite at padding, too. weight: float[C, k], the token's own column last.
      layout: of the rows (packed_layout), whose documents the convolution does not cross.
    """
    check = Arguments("short_convolution_parts")
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    _check_layout(check, layout)
    if sum(part_sizes) != x.shape[-1]:
        raise ValueError(f"short_convolution_parts: part_sizes = {tuple(part_sizes)} must add up to C = {x.shape[-1]}")
    table: dispatch.Table = {
        "triton": lambda: convolution.refusal(x, weight, part_sizes),
        "reference": lambda: None,
    }
    if dispatch.choose("short_convolution", table, implementation) == "triton":
        return convolution.in_parts(x, weight, layout, tuple(part_sizes))
    return convolution.divided(convolution.forward(x, weight, layout), part_sizes)


@meshes.on_any_mesh
def short_convolution_step(x: jax.Array, weight: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(short_convolution of one more token x [B, 1, C] of each row, the next window).

    weight: float[C, k], the token's own column last.
    window: [B, k - 1, C] in x's dtype, the tokens before this one in order, 0 where there were none.
    """
    check = Arguments("short_convolution_step", T=1)
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    check.array("window", window, f"B {weight.shape[1] - 1} C", x.dtype)
    return convolution.step(x, weight, window)
