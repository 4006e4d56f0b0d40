"""The public functions of the gated delta rule, a linear attention, and of the short convolution before it. In training
`gated_delta_rule` and `short_convolution` compute packed rows; `implementations` lists those of the former. In
generation `delta_rule_state` computes the state after a prompt, or `delta_rule_chunk` takes the prompt chunk by chunk,
and `delta_rule_step` and `short_convolution_step` take one more token."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.delta_rule import chunked, convolution, reference, triton

IMPLEMENTATIONS = {"triton": triton, "chunked": chunked, "reference": reference}


def implementations(key, value) -> dispatch.Table:
    """Returns the implementations in the order in which they are tried: {name: a function that returns the reason why
    it refuses a call with such arrays, or None}. key is [B, T, key_heads, K], value [B, T, heads, V]; only shapes and
    dtypes are used. The names are "triton", "chunked" (plain jnp by chunks) and "reference" (token by token); the last
    two refuse nothing. "triton" may compare its kernels with the reference on this GPU first, which takes seconds.
    `jaxtune info --kernels` prints the reasons."""
    return {
        "triton": lambda: triton.refusal(key, value),
        "chunked": lambda: None,
        "reference": lambda: None,
    }


def _check_layout(check: Arguments, layout) -> None:
    """For gated_delta_rule and short_convolution: checks that `layout` is a PackedLayout, and that its document bounds
    have the rows and tokens of the call's arrays, which `check` has seen before.

    Raises:
      TypeError, ValueError: it is not as PackedLayout describes it.
    """
    check.is_a("layout", layout, PackedLayout, "a PackedLayout: packed_layout((rows, length), segment_ids) makes one")
    check.array("layout.doc_start", layout.doc_start, "B T", jnp.int32)
    check.array("layout.doc_end", layout.doc_end, "B T", jnp.int32)


def _check_tokens(check: Arguments, key, value, decay, beta) -> None:
    """For all functions of the rule here: checks the arrays of tokens of a call, except query: key [B, T, key_heads, K]
    bfloat16, float16 or float32, value [B, T, heads, V] in key's dtype, decay and beta float32[B, T, heads], and that
    heads is a multiple of key_heads. check: the checker of the call (Arguments), which binds these sizes.

    Raises:
      TypeError, ValueError: an array is not as described here.
    """
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
    """The output of the gated delta rule (arXiv 2412.06464) for each token of packed documents; differentiable with
    respect to query, key, value, decay and beta. It is what a layer of linear attention computes in training, and for
    whole prompts.

    The state of a value head is a matrix that is 0 at the start of a document. Each token decays the state, replaces
    the share beta of what the state stores at the token's key by the token's value, and then reads the state at its
    query; reference.py has the formula. Query and key are normalised to unit vectors first, and the output is divided
    by sqrt(K). Decays, beta, states and sums are float32. The Triton kernels round factors of matrix products to key's
    dtype; "chunked" leaves them float32, but multiplies 16-bit calls with the device's default precision (TF32 on
    GPUs).

    Args:
      query, key: [B, T, key_heads, K] bfloat16, float16 or float32.
      value: [B, T, heads, V] in key's dtype; heads is a multiple of key_heads, and neighbouring heads / key_heads heads
        share a key head.
      decay: float32[B, T, heads], the logarithm of the factor on the state, finite, at most 0; from -104 on downwards
        the factor is 0.
      beta: float32[B, T, heads], in [0, 1].
      layout: document bounds, `packed_layout((B, T), segment_ids)`. The other arrays must be finite at padding too.
      implementation: "triton" (16 bits, K and V 128), "chunked", "reference", or None for the first that supports the
        call.
    Returns:
      [B, T, heads, V] in value's dtype; padding gives 0, and gets no gradient.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
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
    """Returns the state after the first `lengths` tokens of each row, float32[B, heads, K, V], from which generation
    continues with delta_rule_step. Each row is one document, a prompt. Keys are normalised to unit vectors first. It is
    computed in plain jnp, by chunks.

    Args:
      key: [B, T, key_heads, K] bfloat16, float16 or float32.
      value: [B, T, heads, V] in key's dtype; heads is a multiple of key_heads.
      decay: float32[B, T, heads], the logarithm of the factor on the state, at most 0.
      beta: float32[B, T, heads], in [0, 1], the share of what the state stores at the key that is replaced by the
        value.
      lengths: int[B], from 0 to T; tokens from there on are ignored, but must be finite.
    Returns:
      float32[B, heads, K, V]; 0 for a row of length 0.
    Raises:
      TypeError, ValueError: a dtype or shape is not as described here. The numbers in the arrays are not checked.
    """
    check = Arguments("delta_rule_state")
    _check_tokens(check, key, value, decay, beta)
    check.array("lengths", lengths, "B", INTEGERS)
    return chunked.state(key, value, decay, beta, lengths)


@meshes.on_any_mesh
def delta_rule_step(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One more token of each row, a step of generation: returns the token's output of the gated delta rule and the next
    state. Queries and keys are normalised to unit vectors first, and the output is divided by sqrt(K), as in
    gated_delta_rule.

    Args:
      query, key: [B, 1, key_heads, K] bfloat16, float16 or float32.
      value: [B, 1, heads, V] in key's dtype; heads is a multiple of key_heads.
      decay: float32[B, 1, heads], the logarithm of the factor on the state, at most 0.
      beta: float32[B, 1, heads], in [0, 1], the share of what the state stores at the key that is replaced by the
        value.
      state: float32[B, heads, K, V], before the token, from delta_rule_state or the step before; 0 at the start of a
        document.
    Returns:
      (out [B, 1, heads, V] in value's dtype, the state after the token, float32[B, heads, K, V]).
    Raises:
      TypeError, ValueError: an argument is not as described here.
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
    """The next T tokens of each row, whose document began before them or begins with them, for prompts that are
    prefilled chunk by chunk: returns their outputs of the gated delta rule and the next state. There are no document
    bounds and no lengths: all tokens continue the document. Generation passes no padding, because it first prefills as
    many tokens of a prompt as leave whole chunks, by gated_delta_rule and delta_rule_state. Queries and keys are
    normalised to unit vectors first, and the output is divided by sqrt(K), as in gated_delta_rule.

    Args:
      query, key: [B, T, key_heads, K] bfloat16, float16 or float32.
      value: [B, T, heads, V] in key's dtype; heads is a multiple of key_heads.
      decay: float32[B, T, heads], the logarithm of the factor on the state, at most 0.
      beta: float32[B, T, heads], in [0, 1], the share of what the state stores at the key that is replaced by the
        value.
      state: float32[B, heads, K, V], before the tokens; 0 at the start of a document.
    Returns:
      (out [B, T, heads, V] in value's dtype, the state after the tokens, float32[B, heads, K, V]).
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("delta_rule_chunk")
    _check_tokens(check, key, value, decay, beta)
    check.array("query", query, "B T key_heads K", key.dtype)
    check.array("state", state, "B heads K V", jnp.float32)
    return chunked.chunk(query, key, value, decay, beta, state)


@meshes.on_any_mesh
def short_convolution(x: jax.Array, weight: jax.Array, layout: PackedLayout) -> jax.Array:
    """Returns silu of each channel's causal convolution with k weights along its document; differentiable with respect
    to x and weight. It mixes a few neighbouring tokens before the gated delta rule. Sums are float32.

    Args:
      x: [B, T, C] bfloat16, float16 or float32, finite at padding, too.
      weight: float[C, k]; the last column multiplies the token itself, the first the token k - 1 before it.
      layout: the bounds of the documents, `packed_layout((B, T), segment_ids)`, which the convolution does not cross.
    Returns:
      [B, T, C] in x's dtype; padding gives 0, and gets no gradient.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("short_convolution")
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    _check_layout(check, layout)
    return convolution.forward(x, weight, layout)


@meshes.on_any_mesh
def short_convolution_parts(
    x: jax.Array,
    weight: jax.Array,
    layout: PackedLayout,
    parts: Sequence[int],
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Computes short_convolution of x and returns the result in parts, divided along its channels. A layer of linear
    attention takes its queries, keys and values from it in this way. Their gradients then need not be joined into one
    array. The function is differentiable with respect to x and weight.

    Args:
      x, weight, layout: as in short_convolution.
      parts: the number of channels of each part; they add up to C.
      implementation: "triton" (16 bits, four taps, three parts), "reference" (plain JAX), or None for the first that
        supports the call.
    Returns:
      a tuple of arrays [B, T, channels of the part] in x's dtype; padding gives 0, and gets no gradient.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = Arguments("short_convolution_parts")
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    _check_layout(check, layout)
    if sum(parts) != x.shape[-1]:
        raise ValueError(f"short_convolution_parts: parts = {tuple(parts)} must add up to C = {x.shape[-1]}")
    table: dispatch.Table = {
        "triton": lambda: convolution.refusal(x, weight, parts),
        "reference": lambda: None,
    }
    if dispatch.choose("short_convolution", table, implementation) == "triton":
        return convolution.in_parts(x, weight, layout, tuple(parts))
    return convolution.divided(convolution.forward(x, weight, layout), parts)


@meshes.on_any_mesh
def short_convolution_step(x: jax.Array, weight: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One more token of each row in generation: returns its short_convolution (silu of the sum over the last k tokens)
    and the next window.

    Args:
      x: [B, 1, C] bfloat16, float16 or float32, the token.
      weight: float[C, k]; the last column multiplies the token itself, the first the token k - 1 before it.
      window: [B, k - 1, C] in x's dtype, the k - 1 tokens before this one in order, 0 where there were none.
    Returns:
      (out [B, 1, C] in x's dtype, the next window, [B, k - 1, C], which ends with this token).
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("short_convolution_step", T=1)
    check.array("x", x, "B T C", FLOATS)
    check.array("weight", weight, "C k", FLOATS)
    check.array("window", window, f"B {weight.shape[1] - 1} C", x.dtype)
    return convolution.step(x, weight, window)
