"""Routing of tokens to experts: the public functions.

T is the number of tokens, k the number of experts that each token chooses, E the number of all experts. A pair is a
token with one of its k experts; pair t * k + j is token t with its j-th choice. Sorting puts the pairs into a buffer of
rows, expert by expert, and within an expert in the order of the tokens. Each expert's rows are padded with empty rows,
which belong to no pair, to a multiple of tile_rows; more empty rows may follow the last expert, because the buffer's
size must not depend on the choice. Every sum has a fixed order, without atomics, in forward and backward, so the same
input gives the same bits.

Errors (TypeError, ValueError) cover classes, dtypes, shapes and numbers; the contents of arrays are not checked.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes, one_order
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.grouped_matmul import api as grouped
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups, floor_divided
from jaxtune.pallas.quant_matmul import low_rank
from jaxtune.pallas.routing import first_use, mosaic, mosaic_sort, reference

# Implementations of `spread`. The sum over a token's rows is always computed by the reference.
IMPLEMENTATIONS = {"reference": reference, "mosaic": mosaic}
_SORTS = {
    "reference": reference.Passes(reference.BLOCK, reference.histogram, reference.slots),
    "mosaic": reference.Passes(mosaic_sort.BLOCK, mosaic_sort.histogram, mosaic_sort.slots),
}
_MANY = 128  # with this many experts or more, our sort is faster than XLA's in most runs (notes/routing.md)
_SORT_REASON = f"slower than XLA's for fewer than {_MANY} experts"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The row of each pair (a token with one of its k experts) in the buffer sorted by expert, and the pair of each
    row.
    """

    slots: jax.Array  # int32[T, k]: the row of each pair; for a pair without an expert, the number of all rows
    source: jax.Array  # int32[rows]: the number of the pair in each row, t * k + j; T * k for empty rows
    groups: Groups  # which tiles of rows belong to which expert, for products with experts


@meshes.on_any_mesh
def choose_experts(logits: jax.Array, k: int, real: jax.Array | None = None) -> jax.Array:
    """The k experts with the largest logits of each token, int32[T, k]: largest first, of equal ones the lower index.
    No gradient.

      logits: [T, E].
      real: bool[T], False for padding, all of whose choices are E (no expert). None: all tokens are real.
    """
    check = Arguments("choose_experts")
    check.array("logits", logits, "T E", FLOATS)
    experts = logits.shape[1]
    check.number("k", k, whole=True, least=1, below=experts + 1)
    if real is not None:
        check.array("real", real, "T", jnp.bool_)
    choice = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1].astype(jnp.int32)
    return choice if real is None else jnp.where(real[:, None], choice, experts)


@meshes.on_any_mesh
def expert_weights(logits: jax.Array, choice: jax.Array, *, renormalize: bool) -> jax.Array:
    """The factors of a token's experts' outputs, float32[T, k]; 0 where a choice is no expert. Differentiable in
    logits.

      logits: [T, E].
      choice: int32[T, k]; E means no expert.
      renormalize: True: the softmax over the chosen logits, so a token's weights sum to one (gpt-oss, Mixtral,
      Qwen3-MoE's norm_topk_prob). False: the chosen experts' part of the softmax over all.
    """
    check = Arguments("expert_weights")
    check.array("logits", logits, "T E", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    logits = logits.astype(jnp.float32)
    has_expert = choice < logits.shape[1]
    softmax = one_order.softmax if one_order.is_exact() else jax.nn.softmax
    weights = reference.chosen_values(logits if renormalize else softmax(logits), choice)
    if renormalize:  # masked with a finite number, because a token may have no expert at all
        weights = softmax(jnp.where(has_expert, weights, jnp.finfo(jnp.float32).min))
    return jnp.where(has_expert, weights, 0.0)


@meshes.on_any_mesh
def route(
    choice: jax.Array, num_experts: int, tile_rows: int = TILE_ROWS, *, implementation: str | None = None
) -> Routing:
    """Sorts all pairs by expert, stably: an expert's rows are in the order of the tokens.

    choice: int32[T, k]; a number other than 0 to num_experts - 1 means no expert, and gets no row.
    tile_rows: each expert's rows are padded to a multiple of it.
    implementation: "reference" (XLA), "mosaic" (ValueError if it refuses), or None: the kernel from 128 experts on,
    where it was measured to be faster.
    """
    check = Arguments("route")
    check.array("choice", choice, "T k", jnp.int32)
    check.number("num_experts", num_experts, whole=True, least=1)
    check.number("tile_rows", tile_rows, whole=True, least=1)
    tokens, k = choice.shape
    name = dispatch.choose("routing sort", sort_implementations(num_experts, implementation), implementation)
    slots, source, groups = reference.sort_pairs(choice.reshape(-1), num_experts, tile_rows, _SORTS[name])
    return Routing(slots.reshape(tokens, k), source, groups)


def implementations(dtype, hidden: int, k: int) -> dispatch.Table:
    """Implementations of the copy of tokens to rows, in order of preference: {name: returns the reason of a refusal, or
    None}. dtype, hidden: of the tokens [T, hidden]. k: experts of a token.
    """

    def refusal():
        return mosaic.refusal(dtype, hidden, k) or first_use.refusal("mosaic", mosaic)

    return {"mosaic": refusal, "reference": lambda: None}


def sort_implementations(num_experts: int, implementation: str | None = None) -> dispatch.Table:
    """Implementations of `route`'s sort, in order of preference: {name: returns the reason of a refusal, or None}.
    Below 128 experts the kernel runs only if `implementation` requests it.
    """

    def refusal():
        return mosaic_sort.refusal() or first_use.sort_refusal("mosaic", _SORTS["mosaic"])

    if num_experts >= _MANY:
        return {"mosaic": refusal, "reference": lambda: None}
    return {"reference": lambda: None, "mosaic": dispatch.on_request("mosaic", implementation, _SORT_REASON, refusal)}


def check_routing(op: str, routing: Routing) -> Arguments:
    """Checks `routing`, and returns the checker with the sizes T, k, E and rows for other arguments of the public
    function `op`. TypeError or ValueError for another class, dtype or shape.
    """
    check = Arguments(op)
    check.is_a("routing", routing, Routing, "a Routing, as route makes")
    grouped.check_groups(check, routing.groups, "routing.groups")
    check.sizes["rows"] = (routing.groups.rows, " (of the routing's tiles)")
    check.array("routing.slots", routing.slots, "T k", jnp.int32)
    check.array("routing.source", routing.source, "rows", jnp.int32)
    return check


def _spread(x, routing, implementation):
    """x [T, H] in the rows of its pairs, [rows, H], with zeros in empty rows."""
    table = implementations(x.dtype, x.shape[1], routing.slots.shape[1])
    name = dispatch.choose("routing spread", table, implementation)
    return IMPLEMENTATIONS[name].spread(x, routing.slots, routing.source)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(x, routing, implementation):
    """Its derivative sums each token's rows in a fixed order, unlike a scatter."""
    return _spread(x, routing, implementation)


def _permute_fwd(x, routing, implementation):
    return _permute(x, routing, implementation), routing


def _permute_bwd(implementation, routing, drows):
    del implementation
    return reference.summed(drows, routing.slots), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@meshes.on_any_mesh
def permute(x: jax.Array, routing: Routing, *, implementation: str | None = None) -> jax.Array:
    """Copies each token to the rows of its pairs: x [T, H] -> [rows, H], with zeros in empty rows.

    Gradients of empty rows must be zero. A token's gradient is the sum of its rows', in float32 in the order of its
    choices.

      routing: of these tokens. implementation: "mosaic", "reference", or None: the first that supports the call.
    """
    check_routing("permute", routing).array("x", x, "T H", FLOATS)
    return _permute(x, routing, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpermute(rows, routing, implementation):
    del implementation
    return reference.summed(rows, routing.slots)


def _unpermute_fwd(rows, routing, implementation):
    return _unpermute(rows, routing, implementation), routing


def _unpermute_bwd(implementation, routing, dx):
    return _spread(dx, routing, implementation), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@meshes.on_any_mesh
def unpermute(rows: jax.Array, routing: Routing, *, implementation: str | None = None) -> jax.Array:
    """Sums each token's rows: [rows, H] -> [T, H] in the rows' dtype, in float32 in the order of the token's choices.
    Empty rows must be zero; a token without an expert gets zeros.

      routing: by which the rows were made.
      implementation: "mosaic", "reference" or None, of the backward's copy of gradients to rows, which checks it.
    """
    check_routing("unpermute", routing).array("rows", rows, "rows H", FLOATS)
    return _unpermute(rows, routing, implementation)


def _row_tokens(routing):
    """The token of each row, int32[rows]; T for empty rows."""
    return floor_divided(routing.source, routing.slots.shape[1])


def as_rows(x, routing, static):
    """Tokens x [T, n] in the form in which the product takes sorted rows: (x, the token of each row int32[rows]) if its
    implementation gathers rows while it multiplies, else (the rows [rows, n], None).

      routing: of the tokens. static: of the product.
    """
    if grouped.gathers(static.implementation):
        return x, _row_tokens(routing)
    return _spread(x, routing, None), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _of_tokens(x, weight, lora, bias, routing, earlier_inner, static):
    """(out [rows, out], the adapter's low-rank input [rows, r] or None). earlier_inner: that input, or None."""
    return _of_tokens_fwd(x, weight, lora, bias, routing, earlier_inner, static)[0]


def _of_tokens_fwd(x, weight, lora, bias, routing, earlier_inner, static):
    """Residuals have x [T, in] in place of the sorted rows, which are more than k times as large."""
    rows, tokens = as_rows(x, routing, static)
    out, (_, *residuals) = grouped.forward(rows, weight, lora, routing.groups, static, tokens, bias, earlier_inner)
    product_residuals = x, *residuals
    return (out, grouped.low_rank_of(product_residuals)), (product_residuals, bias, routing)


def _of_tokens_bwd(static, residuals, gradients):
    (residuals, bias, routing), (dout, _) = residuals, gradients
    # XLA removes this if the bias is frozen.
    dbias = None if bias is None else grouped.bias_gradient(dout, bias, routing.groups)
    drows, *parameter_gradients = grouped.backward(static, residuals, dout, _row_tokens(routing))
    return reference.summed(drows, routing.slots), *parameter_gradients, dbias, None, None


_of_tokens.defvjp(_of_tokens_fwd, _of_tokens_bwd)


@meshes.on_any_mesh
def matmul_of_tokens(
    x: jax.Array,
    weight,
    routing: Routing,
    lora: grouped.GroupedLora | None = None,
    bias: jax.Array | None = None,
    *,
    transposed: bool = False,
    derivative_follows: bool = False,
    fp8: bool = False,
    weight_trains: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each token by its k experts' weights: x [T, in] -> [rows, out] in x's dtype, sorted by expert.

    It computes grouped_matmul(permute(x, routing), ...), but the backward gathers the sorted rows again. Empty rows are
    zero, or have a bias; gradients of empty rows must be zero. Differentiable in x, a weight that is an array, the
    adapter and the bias.

      x: bfloat16, float16 or float32. lora: adapters, or None.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array or quantised.
      bias: [E, out]. A Mosaic implementation adds it in the adapter's product, where its rank is padded, before the sum
      is rounded; else it is added to the rounded product.
      derivative_follows: a quantised weight is decoded once for the forward and x's gradient, and x freed early.
      fp8: multiply an FP8 weight undecoded, by rows rounded to e4m3. weight_trains: False: no gradient of it.
      implementation: "mosaic", "mosaic_ahead", "triton", "reference" or None.
    """
    check_routing("matmul_of_tokens", routing)
    check = grouped.checked("matmul_of_tokens", "x", x, "T in", weight, routing.groups, lora, transposed, routing)
    if bias is not None:
        check.array("bias", bias, "E out", FLOATS)
    x, weight, sides, static = grouped.prepared(
        x, weight, routing.groups, lora, transposed, derivative_follows, fp8, weight_trains, implementation
    )
    return low_rank.of_function(
        lambda earlier_inner: _of_tokens(x, weight, sides, bias, routing, earlier_inner, static)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _to_tokens(rows, weight, lora, routing, earlier_inner, static):
    """(out [T, out], the adapter's low-rank input [rows, r] or None). earlier_inner: that input, or None."""
    return _to_tokens_fwd(rows, weight, lora, routing, earlier_inner, static)[0]


def _to_tokens_fwd(rows, weight, lora, routing, earlier_inner, static):
    out, residuals = grouped.forward(rows, weight, lora, routing.groups, static, inner=earlier_inner)
    return (reference.summed(out, routing.slots), grouped.low_rank_of(residuals)), (residuals, routing)


def _to_tokens_bwd(static, residuals, gradients):
    (residuals, routing), (dout, _) = residuals, gradients
    dout, tokens = as_rows(dout, routing, static)
    return *grouped.backward(static, residuals, dout, dout_tokens=tokens), None, None


_to_tokens.defvjp(_to_tokens_fwd, _to_tokens_bwd)


@meshes.on_any_mesh
def matmul_to_tokens(
    rows: jax.Array,
    weight,
    routing: Routing,
    lora: grouped.GroupedLora | None = None,
    *,
    transposed: bool = False,
    fp8: bool = False,
    weight_trains: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each row by its expert's weight and sums each token's rows: rows [rows, in] -> [T, out].

    It computes unpermute(grouped_matmul(rows, ...), routing), but the gradient of the result stays [T, out] until the
    backward gathers its rows. Products are rounded to the rows' dtype, summed in float32 in the order of the token's
    choices, and rounded again; a token without an expert gets zeros. Differentiable in rows, a weight that is an array,
    and the adapter; gradients of empty rows are zero.

      rows: bfloat16, float16 or float32; empty rows are zero. lora: adapters, or None.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array or quantised.
      fp8: multiply an FP8 weight undecoded, by rows rounded to e4m3. weight_trains: False: no gradient of it.
      implementation: "mosaic", "mosaic_ahead", "triton", "reference" or None.
    """
    check_routing("matmul_to_tokens", routing)
    grouped.checked("matmul_to_tokens", "rows", rows, "rows in", weight, routing.groups, lora, transposed, routing)
    rows, weight, sides, static = grouped.prepared(
        rows, weight, routing.groups, lora, transposed, False, fp8, weight_trains, implementation
    )
    return low_rank.of_function(lambda earlier_inner: _to_tokens(rows, weight, sides, routing, earlier_inner, static))


@meshes.on_any_mesh
def token_bias(out: jax.Array, weights: jax.Array, bias: jax.Array, choice: jax.Array) -> jax.Array:
    """Adds each token's experts' biases, times their weights, to out [T, n], in float32; the result has out's dtype.
    Differentiable in out, weights and bias.

      weights: float32[T, k]; 0 where a choice is no expert.
      bias: [E, n].
      choice: int32[T, k].
    """
    check = Arguments("token_bias")
    check.array("out", out, "T n", FLOATS)
    check.array("weights", weights, "T k", jnp.float32)
    check.array("bias", bias, "E n", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    return _with_bias(out, weights, bias, choice)


@jax.custom_vjp
def _with_bias(out, weights, bias, choice):
    """Its derivative sums over tokens in a fixed order."""
    total = out.astype(jnp.float32)
    for weight, expert in zip(weights.T, choice.T, strict=True):
        total += weight[:, None] * bias.at[expert].get(mode="clip").astype(jnp.float32)
    return total.astype(out.dtype)


def _token_bias_fwd(out, weights, bias, choice):
    return _with_bias(out, weights, bias, choice), (weights, bias, choice)


def _token_bias_bwd(residuals, dout):
    weights, bias, choice = residuals
    exact: Any = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    dweights = reference.chosen_values(jnp.einsum("tn,en->te", dout, bias.astype(dout.dtype), **exact), choice)
    # XLA removes this if the bias is frozen.
    by_expert = reference.chosen_by(weights, choice, bias.shape[0])
    dbias = jnp.einsum("te,tn->en", by_expert, dout.astype(jnp.float32), **exact)
    return dout, dweights, dbias.astype(bias.dtype), None


_with_bias.defvjp(_token_bias_fwd, _token_bias_bwd)


@meshes.on_any_mesh
def row_weights(weights: jax.Array, routing: Routing) -> jax.Array:
    """The weight of each row's pair: weights [T, k] -> [rows], 0 in empty rows. Differentiable in weights.

    A layer multiplies rows by it before the down projection, so that a token's rows need only be summed after it.
    """
    check_routing("row_weights", routing).array("weights", weights, "T k", FLOATS)
    return _row_weights(weights, routing)


@jax.custom_vjp
def _row_weights(weights, routing):
    """Its derivative is a gather; a gather's would be a scatter."""
    return reference.rows_of(weights.reshape(-1), routing.source)


def _row_weights_fwd(weights, routing):
    return _row_weights(weights, routing), routing


def _row_weights_bwd(routing, drows):
    return reference.rows_of(drows, routing.slots), None


_row_weights.defvjp(_row_weights_fwd, _row_weights_bwd)
