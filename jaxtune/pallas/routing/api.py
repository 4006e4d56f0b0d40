"""Routing of tokens to experts: the public functions.

A pair is a token with one of its k experts; pair t * k + j is token t with its j-th choice. Sorting puts the pairs into
a buffer of rows, expert by expert, and within an expert in the order of the tokens. Every sum has a fixed order,
without atomics, in the backward as in the forward, so the same input gives the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.grouped_matmul import api as grouped
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups, divided
from jaxtune.pallas.routing import first_use, mosaic, mosaic_sort, reference

# Implementations of `spread`. The sum over a token's rows is always computed by the reference.
IMPLEMENTATIONS = {"reference": reference, "mosaic": mosaic}
_SORTS = {
    "reference": reference.Passes(reference.BLOCK, reference.histogram, reference.slots),
    "mosaic": reference.Passes(mosaic_sort.BLOCK, mosaic_sort.histogram, mosaic_sort.slots),
}
_MANY = 128  # with this many experts or more, our sort is faster than XLA's in most runs (README.md)
_SORT_REASON = f"slower than XLA's for fewer than {_MANY} experts"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The position in the sorted buffer of every pair, a token with one of its k experts; `route` makes it."""

    slots: jax.Array  # int32[T, k]: the row of each pair; the number of rows for pairs without an expert
    source: jax.Array  # int32[rows]: the pair of each row; T * k for empty rows
    groups: Groups  # the experts of the rows


@meshes.on_any_mesh
def choose_experts(logits: jax.Array, k: int, real: jax.Array | None = None) -> jax.Array:
    """int32[T, k]: the indices of the k largest of logits [T, E], the largest first, and of equal ones the lower index
    first.

    Args:
      logits: [T, E].
      k: number of experts of a token.
      real: bool[T], or None for all; a token that is not real (padding) gets E, no expert.
    Raises:
      TypeError, ValueError: an argument is not as described here.
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
    """float32[T, k]: the weight of each token's experts, 0 where it has no expert. Differentiable with respect to
    logits.

    Args:
      logits: [T, E].
      choice: int32[T, k] from choose_experts; E means no expert.
      renormalize: the weights of a token sum to one: the softmax over its chosen logits, which equals the softmax over
        all experts divided by the sum over the chosen ones (gpt-oss, Mixtral, Qwen3-MoE's norm_topk_prob). Otherwise
        the softmax over all.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("expert_weights")
    check.array("logits", logits, "T E", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    logits = logits.astype(jnp.float32)
    there = choice < logits.shape[1]
    weights = reference.chosen(logits if renormalize else jax.nn.softmax(logits, axis=-1), choice)
    if renormalize:  # masked with a finite number, because a token may have no expert at all
        weights = jax.nn.softmax(jnp.where(there, weights, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.where(there, weights, 0.0)


@meshes.on_any_mesh
def route(
    choice: jax.Array, num_experts: int, tile_rows: int = TILE_ROWS, *, implementation: str | None = None
) -> Routing:
    """Sorts the pairs of choice int32[T, k] by expert, stably. Pairs with `num_experts` or more have no expert.

    Args:
      choice: int32[T, k] from choose_experts.
      num_experts: E.
      tile_rows: each expert's rows are padded to a multiple of it.
      implementation: "reference", "mosaic", or None for the faster one.
    Raises:
      TypeError, ValueError: an argument is not as described here.
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
    """The implementations of `spread`, which copies tokens to their rows, in the order in which they are tried, each
    with a function that returns why it refuses the call.

    Args:
      dtype: of the tokens.
      hidden: numbers of a token.
      k: experts of a token.
    """

    def refusal():
        return mosaic.refusal(dtype, hidden, k) or first_use.refusal("mosaic", mosaic)

    return {"mosaic": refusal, "reference": lambda: None}


def sort_implementations(num_experts: int, implementation: str | None = None) -> dispatch.Table:
    """The implementations of the sort in `route` for this number of experts, in the order in which they are tried,
    each with a function that returns why it refuses the call; `implementation` is the name that the caller requests,
    or None. Ours is first only for many experts, where it was measured to be faster."""

    def refusal():
        return mosaic_sort.refusal() or first_use.sort_refusal("mosaic", _SORTS["mosaic"])

    if num_experts >= _MANY:
        return {"mosaic": refusal, "reference": lambda: None}
    return {"reference": lambda: None, "mosaic": dispatch.on_request("mosaic", implementation, _SORT_REASON, refusal)}


def _check_routing(op: str, routing: Routing) -> Arguments:
    """Returns a checker for a call of `op`, with the classes, shapes and dtypes of the routing checked.

    Raises:
      TypeError, ValueError: it is not as `Routing` describes it.
    """
    check = Arguments(op)
    check.is_a("routing", routing, Routing, "a Routing, as route makes")
    grouped.check_groups(check, routing.groups, "routing.groups")
    check.sizes["rows"] = (routing.groups.rows, " (of the routing's tiles)")
    check.array("routing.slots", routing.slots, "T k", jnp.int32)
    check.array("routing.source", routing.source, "rows", jnp.int32)
    return check


def _spread(x, routing, implementation):
    """Copies each token x [T, H] to the rows of its pairs by the routing: [rows, H], with zeros in empty rows.
    `implementation` is a name, or None for the first that supports the call."""
    table = implementations(x.dtype, x.shape[1], routing.slots.shape[1])
    name = dispatch.choose("routing spread", table, implementation)
    return IMPLEMENTATIONS[name].spread(x, routing.slots, routing.source)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(x, routing, implementation):
    """permute(x, routing, implementation) with a custom derivative, because that of a gather would be a scatter, which
    adds in no fixed order: [rows, H]."""
    return _spread(x, routing, implementation)


def _permute_fwd(x, routing, implementation):
    """The forward rule of `_permute`, with its arguments x, routing and implementation: (the tokens in their rows
    [rows, H], the routing as residual)."""
    return _permute(x, routing, implementation), routing


def _permute_bwd(implementation, routing, drows):
    """The backward rule of `_permute`, from drows [rows, H], the gradient of the rows: (the gradient of x [T, H], in
    which each token has the sum of its rows' gradients; None for the routing). implementation is not used."""
    del implementation
    return reference.summed(drows, routing.slots), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@meshes.on_any_mesh
def permute(x: jax.Array, routing: Routing, *, implementation: str | None = None) -> jax.Array:
    """x [T, H] -> [rows, H]: each pair's token in its row. Empty rows are zero, and their gradients must be zero.
    Gradients are summed over a token's pairs in float32, in the order of its choices.

    Args:
      x: [T, H].
      routing: from route.
      implementation: "reference", "mosaic", or None for the first that supports the call.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    _check_routing("permute", routing).array("x", x, "T H", FLOATS)
    return _permute(x, routing, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpermute(rows, routing, implementation):
    """unpermute(rows, routing, implementation) with a custom derivative, which copies gradients to rows as `permute`
    copies tokens: [T, H]."""
    del implementation
    return reference.summed(rows, routing.slots)


def _unpermute_fwd(rows, routing, implementation):
    """The forward rule of `_unpermute`, with its arguments rows, routing and implementation: (the sums of each token's
    rows [T, H], the routing as residual)."""
    return _unpermute(rows, routing, implementation), routing


def _unpermute_bwd(implementation, routing, dx):
    """The backward rule of `_unpermute`, from dx [T, H], the gradient of the sums: (the gradient of the rows [rows,
    H], in which every row of a token has the token's gradient and empty rows have zeros; None for the routing).
    implementation: of the copy."""
    return _spread(dx, routing, implementation), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@meshes.on_any_mesh
def unpermute(rows: jax.Array, routing: Routing, *, implementation: str | None = None) -> jax.Array:
    """rows [rows, H] -> [T, H]: the sum of each token's rows, in float32 in the order of its choices, in the rows'
    dtype. Empty rows must be zero.

    Args:
      rows: [rows, H].
      routing: from route.
      implementation: of the gradient, which copies tokens to their rows: "reference", "mosaic", or None for the first
        that supports the call. The sum has a single implementation.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    _check_routing("unpermute", routing).array("rows", rows, "rows H", FLOATS)
    return _unpermute(rows, routing, implementation)


def _row_tokens(routing):
    """int32[rows]: the token of each row of the routing's sorted buffer; T for empty rows. Products that gather their
    rows from the tokens while they multiply take it."""
    return divided(routing.source, routing.slots.shape[1])


def _as_rows(x, routing, static):
    """Tokens x [T, n] in the form in which a product takes sorted rows: (x itself, int32[rows] with the token of each
    row) if its implementation gathers rows while it multiplies, else (the sorted rows [rows, n], None). static: the
    settings of the product (grouped_matmul.api.Static), which name its implementation. routing: which rows each token
    has."""
    if grouped.gathers(static.implementation):
        return x, _row_tokens(routing)
    return _spread(x, routing, None), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _of_tokens(x, weight, lora, routing, static):
    """matmul_of_tokens with a custom derivative, of x, weight, lora ((a, b), or None), routing and static, the
    settings of the product (grouped_matmul.api.Static), as grouped_matmul.api.prepared returns them: [rows, out]."""
    return _of_tokens_fwd(x, weight, lora, routing, static)[0]


def _of_tokens_fwd(x, weight, lora, routing, static):
    """The forward rule of `_of_tokens`, with its arguments x, weight, lora, routing and static: (out [rows, out],
    residuals). The residuals are (those of grouped_matmul.api.forward, but with x [T, in] in place of the sorted rows,
    which are more than k times as large; the routing)."""
    rows, tokens = _as_rows(x, routing, static)
    out, (_, *residuals) = grouped.forward(rows, weight, lora, routing.groups, static, tokens)
    return out, ((x, *residuals), routing)


def _of_tokens_bwd(static, residuals, dout):
    """The backward rule of `_of_tokens`, from its static settings, its residuals and dout [rows, out]: (the gradient
    of x [T, in], in which each token has the sum of its rows' gradients; that of the weight, None if it is quantised;
    those of the adapter's (a, b), or None; None for the routing)."""
    residuals, routing = residuals
    drows, *others = grouped.backward(static, residuals, dout, _row_tokens(routing))
    return reference.summed(drows, routing.slots), *others, None


_of_tokens.defvjp(_of_tokens_fwd, _of_tokens_bwd)


@meshes.on_any_mesh
def matmul_of_tokens(
    x: jax.Array,
    weight,
    routing: Routing,
    lora: grouped.GroupedLora | None = None,
    *,
    transposed: bool = False,
    derivative_follows: bool = False,
    fp8: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """grouped_matmul(permute(x, routing), ...): x [T, in] -> [rows, out]. The permuted rows are not stored for the
    gradients, which gather from x.

    Args:
      x: [T, in] bfloat16, float16 or float32.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised.
      routing: from route.
      lora: the adapter, or None.
      derivative_follows, fp8, implementation: options of the product, which grouped_matmul explains.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    _check_routing("matmul_of_tokens", routing)
    grouped.checked("matmul_of_tokens", "x", x, "T in", weight, routing.groups, lora, transposed, routing)
    x, weight, sides, static = grouped.prepared(
        x, weight, routing.groups, lora, transposed, derivative_follows, fp8, implementation
    )
    return _of_tokens(x, weight, sides, routing, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _to_tokens(rows, weight, lora, routing, static):
    """matmul_to_tokens with a custom derivative, of rows, weight, lora ((a, b), or None), routing and static, the
    settings of the product (grouped_matmul.api.Static), as grouped_matmul.api.prepared returns them: [T, out]."""
    return _to_tokens_fwd(rows, weight, lora, routing, static)[0]


def _to_tokens_fwd(rows, weight, lora, routing, static):
    """The forward rule of `_to_tokens`, with its arguments rows, weight, lora, routing and static: (out [T, out],
    residuals). The residuals are (those of grouped_matmul.api.forward, the routing); the product [rows, out] is not
    among them."""
    out, residuals = grouped.forward(rows, weight, lora, routing.groups, static)
    return reference.summed(out, routing.slots), (residuals, routing)


def _to_tokens_bwd(static, residuals, dout):
    """The backward rule of `_to_tokens`, from its static settings, its residuals and dout [T, out]: (the gradient of
    the rows [rows, in]; that of the weight, None if it is quantised; those of the adapter's (a, b), or None; None for
    the routing)."""
    residuals, routing = residuals
    dout, tokens = _as_rows(dout, routing, static)
    return *grouped.backward(static, residuals, dout, dout_tokens=tokens), None


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
    implementation: str | None = None,
) -> jax.Array:
    """unpermute(grouped_matmul(rows, ...), routing): rows [rows, in] -> [T, out]. The gradient of the result stays [T,
    out] and is permuted where it is needed.

    Args:
      rows: [rows, in] bfloat16, float16 or float32, sorted by expert as `routing` says; empty rows are zero.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised.
      routing: from route.
      lora: the adapter, or None.
      fp8, implementation: options of the product, which grouped_matmul explains.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    _check_routing("matmul_to_tokens", routing)
    grouped.checked("matmul_to_tokens", "rows", rows, "rows in", weight, routing.groups, lora, transposed, routing)
    rows, weight, sides, static = grouped.prepared(
        rows, weight, routing.groups, lora, transposed, False, fp8, implementation
    )
    return _to_tokens(rows, weight, sides, routing, static)


@meshes.on_any_mesh
def token_bias(out: jax.Array, weights: jax.Array, bias: jax.Array, choice: jax.Array) -> jax.Array:
    """out [T, n] plus the weighted biases of each token's experts, summed in float32; in out's dtype. It adds the bias
    of the experts' down projection to the sum over each token's experts.

    Args:
      out: [T, n].
      weights: float32[T, k]; 0 where there is no expert.
      bias: [E, n].
      choice: int32[T, k] from choose_experts.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("token_bias")
    check.array("out", out, "T n", FLOATS)
    check.array("weights", weights, "T k", jnp.float32)
    check.array("bias", bias, "E n", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    return _with_bias(out, weights, bias, choice)


@jax.custom_vjp
def _with_bias(out, weights, bias, choice):
    """token_bias(out, weights, bias, choice) with a custom derivative, whose sums over tokens have a fixed order: [T,
    n] in out's dtype."""
    total = out.astype(jnp.float32)
    for weight, expert in zip(weights.T, choice.T, strict=True):
        total += weight[:, None] * bias.at[expert].get(mode="clip").astype(jnp.float32)
    return total.astype(out.dtype)


def _token_bias_fwd(out, weights, bias, choice):
    """The forward rule of `_with_bias`: (out plus the biases [T, n], the residuals (weights, bias, choice))."""
    return _with_bias(out, weights, bias, choice), (weights, bias, choice)


def _token_bias_bwd(residuals, dout):
    """The backward rule of `_with_bias`, from its residuals (weights, bias, choice) and dout [T, n]: (the gradient of
    out, which is dout itself; of the weights, float32[T, k]; of the bias [E, n]; None for the choice)."""
    weights, bias, choice = residuals
    exact: Any = dict(precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    dweights = reference.chosen(jnp.einsum("tn,en->te", dout, bias.astype(dout.dtype), **exact), choice)
    # XLA removes this if the bias is frozen.
    by_expert = reference.chosen_by(weights, choice, bias.shape[0])
    dbias = jnp.einsum("te,tn->en", by_expert, dout.astype(jnp.float32), **exact)
    return dout, dweights, dbias.astype(bias.dtype), None


_with_bias.defvjp(_token_bias_fwd, _token_bias_bwd)


@meshes.on_any_mesh
def row_weights(weights: jax.Array, routing: Routing) -> jax.Array:
    """weights [T, k] -> [rows]: each pair's weight in its row of the routing; 0 in empty rows.

    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    _check_routing("row_weights", routing).array("weights", weights, "T k", FLOATS)
    return _row_weights(weights, routing)


@jax.custom_vjp
def _row_weights(weights, routing):
    """row_weights(weights, routing) with a custom derivative, which is a gather and not a scatter: [rows]."""
    return reference.rows_of(weights.reshape(-1), routing.source)


def _row_weights_fwd(weights, routing):
    """The forward rule of `_row_weights`, with its arguments weights and routing: (the weight of each row [rows], the
    routing as residual)."""
    return _row_weights(weights, routing), routing


def _row_weights_bwd(routing, drows):
    """The backward rule of `_row_weights`, from drows [rows]: (the gradient of the weights [T, k], in which each pair
    has that of its row, and 0 without a row; None for the routing)."""
    return reference.rows_of(drows, routing.slots), None


_row_weights.defvjp(_row_weights_fwd, _row_weights_bwd)
