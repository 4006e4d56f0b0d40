"""Routing of tokens to experts: the public functions.

T is the number of tokens, k the number of experts that each token chooses, E the number of all experts. A pair is a
token with one of its k experts; pair t * k + j is token t with its j-th choice. Sorting puts the pairs into a buffer of
rows, expert by expert, and within an expert in the order of the tokens. Each expert's rows are padded with empty rows,
which belong to no pair, to a multiple of tile_rows; more empty rows may follow the last expert, because the buffer's
size must not depend on the choice. Every sum has a fixed order, without atomics, in forward and backward, so the same
input gives the same bits.

A layer of experts calls `choose_experts` and `expert_weights` (the choice from the router's logits, and its weights),
`route` (the sort, which returns a Routing), `matmul_of_tokens` (from tokens to rows), `row_weights` (by which it
multiplies the rows), `matmul_to_tokens` (from rows to tokens, whose rows are summed without weights) and, if experts
have biases, `token_bias`. `permute` and `unpermute` are the copy to rows and the sum without a product; only tests call
them. `implementations` (of the copy) and `sort_implementations` say which kernels run.
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
from jaxtune.pallas.quant_matmul import low_rank
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
    """Where each pair (a token with one of its k experts) is in the buffer of rows that are sorted by expert, and which
    pair each row has. `route` makes it. The copies of tokens to rows and the sums of a token's rows take it, alone
    (`permute`, `unpermute`) or in products with experts (`matmul_of_tokens`, `matmul_to_tokens`), and `row_weights`
    takes it."""

    slots: jax.Array  # int32[T, k]: the row of each pair; for a pair without an expert, the number of all rows
    source: jax.Array  # int32[rows]: the number of the pair in each row, t * k + j; T * k for empty rows
    groups: Groups  # which tiles of rows belong to which expert, for products with experts


@meshes.on_any_mesh
def choose_experts(logits: jax.Array, k: int, real: jax.Array | None = None) -> jax.Array:
    """Chooses the k experts with the largest logits for each token: int32[T, k], the indices of the k largest of logits
    [T, E], the largest first, and of equal ones the lower index first. It has no gradient. It is jax.lax.top_k
    everywhere; there is no kernel for it. A layer of experts calls it with the logits of its router.

    Args:
      logits: [T, E], the router's.
      k: the number of experts of a token.
      real: bool[T], False for a token that is padding; all its choices are E, which stands for no expert. None: all
        tokens are real.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
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
    """The factors by which the outputs of a token's experts are multiplied before they are summed: float32[T, k], 0
    where a choice is no expert. They are differentiable with respect to logits, so that the router learns. The method
    `weights` of models' routers calls it; that of a ScaledRouter then scales the result.

    Args:
      logits: [T, E], the router's.
      choice: int32[T, k] from choose_experts; E means no expert.
      renormalize: True: the weights of a token that has an expert sum to one. They are the softmax over its chosen
        logits, which equals the softmax over all experts divided by its sum over the chosen ones (gpt-oss, Mixtral,
        Qwen3-MoE's norm_topk_prob). False: they are the chosen experts' part of the softmax over all experts.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
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
    """Sorts all pairs (a token with one of its experts) by expert, and returns where each pair is in the sorted buffer
    of rows. The sort is stable: an expert's rows are in the order of the tokens. A layer of experts calls it twice with
    the same choice, before gate and up and before down: these are separate segments, which share the choice and not the
    Routing. XLA may keep the forward's sort for the backward (BackwardOrder.free).

    Args:
      choice: int32[T, k] from choose_experts; other numbers than 0 to num_experts - 1 mean no expert, and get no row.
      num_experts: E, the number of all experts.
      tile_rows: each expert's rows are padded with empty rows to a multiple of it, because kernels multiply tiles of
        rows that belong to one expert.
      implementation: "reference" (XLA), "mosaic", or None for the one that was measured to be faster: the kernel from
        128 experts on, if it runs on this GPU.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
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
    """The implementations of the copy of tokens to their rows (`permute`) in the order in which they are tried: {name:
    a function that returns the reason why it refuses the call, or None}. `_spread` chooses from them, and `jaxtune info
    --kernels` prints them.

    Args:
      dtype: of the tokens.
      hidden: H, how many numbers a token has.
      k: the number of experts of a token.
    """

    def refusal():
        return mosaic.refusal(dtype, hidden, k) or first_use.refusal("mosaic", mosaic)

    return {"mosaic": refusal, "reference": lambda: None}


def sort_implementations(num_experts: int, implementation: str | None = None) -> dispatch.Table:
    """The implementations of the sort in `route` in the order in which they are tried: {name: a function that returns
    the reason why it refuses the call, or None}. `route` chooses from them, and `jaxtune info --kernels` prints them.
    The kernel is first only from 128 experts on, where it was measured to be faster than XLA; for fewer it runs only on
    request.

    Args:
      num_experts: E, the number of all experts.
      implementation: the name that the caller requests, or None.
    """

    def refusal():
        return mosaic_sort.refusal() or first_use.sort_refusal("mosaic", _SORTS["mosaic"])

    if num_experts >= _MANY:
        return {"mosaic": refusal, "reference": lambda: None}
    return {"reference": lambda: None, "mosaic": dispatch.on_request("mosaic", implementation, _SORT_REASON, refusal)}


def check_routing(op: str, routing: Routing) -> Arguments:
    """Checks the class, the shapes and the dtypes of `routing` for a call of the public function `op`, whose name is in
    error messages. It returns the checker (Arguments) with the sizes T, k, E and rows, with which the call then checks
    its other arguments.

    Raises:
      TypeError, ValueError: `routing` is no Routing, or one of its arrays has another dtype or shape.
    """
    check = Arguments(op)
    check.is_a("routing", routing, Routing, "a Routing, as route makes")
    grouped.check_groups(check, routing.groups, "routing.groups")
    check.sizes["rows"] = (routing.groups.rows, " (of the routing's tiles)")
    check.array("routing.slots", routing.slots, "T k", jnp.int32)
    check.array("routing.source", routing.source, "rows", jnp.int32)
    return check


def _spread(x, routing, implementation):
    """Copies each token of x [T, H] to the rows of its pairs, as `routing` says: [rows, H], with zeros in empty rows.
    It chooses the implementation; `permute`, the derivative of `unpermute`, and products that do not gather rows use
    it. implementation: "reference", "mosaic", or None for the first that supports the call. Raises ValueError if the
    requested one is unknown or refuses the call."""
    table = implementations(x.dtype, x.shape[1], routing.slots.shape[1])
    name = dispatch.choose("routing spread", table, implementation)
    return IMPLEMENTATIONS[name].spread(x, routing.slots, routing.source)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _permute(x, routing, implementation):
    """Copies each token of x [T, H] to the rows of its pairs in the buffer that is sorted by expert, [rows, H], as
    `permute` does, without its checks. It has a custom derivative, which sums each token's rows in a fixed order; the
    derivative of a gather would be a scatter, which adds in no fixed order. routing: which rows each token has;
    implementation: the name of the one that copies, or None."""
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
    """Copies each pair's token to its row in the buffer that is sorted by expert: x [T, H] -> [rows, H]. Empty rows are
    zero, and the gradients that arrive for them must be zero too. The gradient of a token is the sum of its rows'
    gradients, in float32 in the order of its choices. Models use matmul_of_tokens instead, which includes the copy;
    tests compare it with this function.

    Args:
      x: [T, H].
      routing: from route.
      implementation: "reference", "mosaic", or None for the first that supports the call.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
    """
    check_routing("permute", routing).array("x", x, "T H", FLOATS)
    return _permute(x, routing, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unpermute(rows, routing, implementation):
    """Sums each token's rows, rows [rows, H] -> [T, H], as `unpermute` does, without its checks. It has a custom
    derivative, which copies each token's gradient to its rows. routing: which rows each token has; implementation:
    which one makes this copy, a name or None."""
    del implementation
    return reference.summed(rows, routing.slots)


def _unpermute_fwd(rows, routing, implementation):
    """The forward rule of `_unpermute`, with its arguments rows, routing and implementation: (the sums of each token's
    rows [T, H], the routing as residual)."""
    return _unpermute(rows, routing, implementation), routing


def _unpermute_bwd(implementation, routing, dx):
    """The backward rule of `_unpermute`, from dx [T, H], the gradient of the sums: (the gradient of the rows [rows, H],
    in which every row of a token has the token's gradient and empty rows have zeros; None for the routing).
    implementation: which one makes this copy, a name or None."""
    return _spread(dx, routing, implementation), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


@meshes.on_any_mesh
def unpermute(rows: jax.Array, routing: Routing, *, implementation: str | None = None) -> jax.Array:
    """Sums each token's rows: rows [rows, H] -> [T, H] in the rows' dtype. The sums are float32, in the order of the
    token's choices; a token without an expert gets zeros. It undoes the sort after the experts' products. Models use
    matmul_to_tokens instead, which includes the sum; tests compare it with this function.

    Args:
      rows: [rows, H]; empty rows must be zero.
      routing: from route.
      implementation: which one copies gradients to their rows in the backward: "reference", "mosaic", or None for the
        first that supports the call; it is chosen, and checked, there. For the sum itself there is only one.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
    """
    check_routing("unpermute", routing).array("rows", rows, "rows H", FLOATS)
    return _unpermute(rows, routing, implementation)


def _row_tokens(routing):
    """The token of each row of the buffer that is sorted by expert, from the pairs of `routing`: int32[rows], T for
    empty rows. Grouped products that gather their rows from the tokens while they multiply take it as an argument, and
    so does every backward whose residuals have tokens in place of rows. `as_rows` and `_of_tokens_bwd` call it."""
    return divided(routing.source, routing.slots.shape[1])


def as_rows(x, routing, static):
    """Brings tokens x [T, n] into the form in which the grouped product takes rows that are sorted by expert. If its
    implementation gathers rows while it multiplies, that is (x itself, int32[rows] with the token of each row);
    otherwise it is (the sorted rows [rows, n], None). The forward of matmul_of_tokens calls it for x, and the backward
    of matmul_to_tokens for the gradient of the result.

    Args:
      x: [T, n], tokens or gradients of tokens.
      routing: which rows each token has.
      static: the settings of the product (grouped_matmul.api.Static), which name its implementation.
    """
    if grouped.gathers(static.implementation):
        return x, _row_tokens(routing)
    return _spread(x, routing, None), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _of_tokens(x, weight, lora, bias, routing, given, static):
    """Multiplies each token of x [T, in] by the weights of its experts, as `matmul_of_tokens` does, with a custom
    derivative: (out [rows, out], the adapter's low-rank input [rows, r], None without an adapter). weight: in
    the form that grouped_matmul.api.prepared returns; lora: the adapter's (a, b), or None; bias: [E, out], or None;
    routing: which rows each token has; given: the low-rank input of an earlier run (quant_matmul/low_rank.py), or None;
    static: the settings of the product (grouped_matmul.api.Static)."""
    return _of_tokens_fwd(x, weight, lora, bias, routing, given, static)[0]


def _of_tokens_fwd(x, weight, lora, bias, routing, given, static):
    """The forward rule of `_of_tokens`, with its arguments: (its results, residuals). The residuals are those of
    grouped_matmul.api.forward, the bias and the routing. In place of the sorted rows, which are more than k times as
    large, they contain x [T, in]."""
    rows, tokens = as_rows(x, routing, static)
    out, (_, *residuals) = grouped.forward(rows, weight, lora, routing.groups, static, tokens, bias, given)
    kept = x, *residuals
    return (out, grouped.low_rank_of(kept)), (kept, bias, routing)


def _of_tokens_bwd(static, residuals, gradients):
    """The backward rule of `_of_tokens`: (the gradient of x [T, in], in which each token has the sum of its rows'
    gradients; that of the weight, None if it is quantised or does not train; those of the adapter's (a, b), or None
    without one; that of the bias, or None without one; None for the routing and the low-rank input). static: the
    settings of the product; residuals: from `_of_tokens_fwd`; gradients: of the results, of which that of the first,
    [rows, out], is used."""
    (residuals, bias, routing), (dout, _) = residuals, gradients
    # XLA removes this if the bias is frozen.
    dbias = None if bias is None else grouped.bias_gradient(dout, bias, routing.groups)
    drows, *others = grouped.backward(static, residuals, dout, _row_tokens(routing))
    return reference.summed(drows, routing.slots), *others, dbias, None, None


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
    """Multiplies each token by the weights of its k experts: x [T, in] -> [rows, out], one row for each pair of a token
    and an expert, sorted by expert. It computes grouped_matmul(permute(x, routing), ...), for example the experts' up
    projection, but the sorted rows are not stored for the backward, which gathers them from x again, and biases are
    added. The result has x's dtype, and zeros in empty rows, to which a bias may be added. Differentiable with respect
    to x, a weight that is an array, the adapter and the bias; the gradients that arrive for empty rows must be zero.
    ExpertLinear.of_tokens calls it.

    Args:
      x: [T, in] bfloat16, float16 or float32.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised.
      routing: from route.
      lora: the adapter, or None.
      bias: [E, out], for each expert, or None. A Mosaic implementation adds it in the adapter's product, where its rank
        is padded, before the sum is rounded; else it is added to the rounded product.
      transposed: whether the last axis of the weight is `out` (True) or `in` (False).
      derivative_follows: True: the derivative is computed soon, and x has no other use. A weight that has to be decoded
        is then decoded once for both, and the adapter's gradients are computed before x's, so that x can be freed.
        False: it is decoded again for the gradient of x.
      fp8: True: a weight in FP8 is multiplied without decoding, by tokens that are rounded to FP8. False: it is
        decoded. It has no effect on other weights.
      weight_trains: whether the gradient of a weight that is an array is computed; False: it is zero.
      implementation: of the product, as in grouped_matmul: "mosaic", "mosaic_ahead", "triton", "reference" (plain JAX),
        or None for the first that supports the call.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
    """
    check_routing("matmul_of_tokens", routing)
    check = grouped.checked("matmul_of_tokens", "x", x, "T in", weight, routing.groups, lora, transposed, routing)
    if bias is not None:
        check.array("bias", bias, "E out", FLOATS)
    x, weight, sides, static = grouped.prepared(
        x, weight, routing.groups, lora, transposed, derivative_follows, fp8, weight_trains, implementation
    )
    return low_rank.of_function(lambda given: _of_tokens(x, weight, sides, bias, routing, given, static))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _to_tokens(rows, weight, lora, routing, given, static):
    """Multiplies each of rows [rows, in] by the weight of its expert and sums the rows of each token, as
    `matmul_to_tokens` does, with a custom derivative: (out [T, out], the adapter's low-rank input [rows, r], None
    without an adapter). weight: in the form that grouped_matmul.api.prepared returns; lora: the adapter's (a, b),
    or None; routing: which rows each token has; given: the low-rank input of an earlier run (quant_matmul/low_rank.py),
    or None; static: the settings of the product (grouped_matmul.api.Static)."""
    return _to_tokens_fwd(rows, weight, lora, routing, given, static)[0]


def _to_tokens_fwd(rows, weight, lora, routing, given, static):
    """The forward rule of `_to_tokens`, with its arguments: (its results, residuals). The residuals are those of
    grouped_matmul.api.forward and the routing; the product before the sum, [rows, out], is not among them."""
    out, residuals = grouped.forward(rows, weight, lora, routing.groups, static, inner=given)
    return (reference.summed(out, routing.slots), grouped.low_rank_of(residuals)), (residuals, routing)


def _to_tokens_bwd(static, residuals, gradients):
    """The backward rule of `_to_tokens`: (the gradient of the rows [rows, in]; that of the weight, None if it is
    quantised or does not train; those of the adapter's (a, b), or None without one; None for the routing and the
    low-rank input). static: the settings of the product; residuals: from `_to_tokens_fwd`; gradients: of the results,
    of which that of the first, [T, out], is used."""
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
    """Multiplies each row by the weight of its expert, and sums the rows of each token: rows [rows, in] -> [T, out]. It
    computes unpermute(grouped_matmul(rows, ...), routing), for example the experts' down projection. The gradient of
    the result stays [T, out], and its rows are gathered only where the backward needs them. The products are rounded to
    the rows' dtype, summed in float32 in the order of the token's choices, and rounded again; a token without an expert
    gets zeros. A weight that has to be decoded is decoded again for the gradient of the rows. Differentiable with
    respect to rows, a weight that is an array, and the adapter. The gradients of empty rows are zero.
    ExpertLinear.to_tokens calls it.

    Args:
      rows: [rows, in] bfloat16, float16 or float32, sorted by expert as `routing` says; empty rows are zero.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised.
      routing: from route.
      lora: the adapter, or None.
      transposed: whether the last axis of the weight is `out` (True) or `in` (False).
      fp8: True: a weight in FP8 is multiplied without decoding, by rows that are rounded to FP8. False: it is decoded.
        It has no effect on other weights.
      weight_trains: whether the gradient of a weight that is an array is computed; False: it is zero.
      implementation: of the product, as in grouped_matmul: "mosaic", "mosaic_ahead", "triton", "reference" (plain JAX),
        or None for the first that supports the call.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
    """
    check_routing("matmul_to_tokens", routing)
    grouped.checked("matmul_to_tokens", "rows", rows, "rows in", weight, routing.groups, lora, transposed, routing)
    rows, weight, sides, static = grouped.prepared(
        rows, weight, routing.groups, lora, transposed, False, fp8, weight_trains, implementation
    )
    return low_rank.of_function(lambda given: _to_tokens(rows, weight, sides, routing, given, static))


@meshes.on_any_mesh
def token_bias(out: jax.Array, weights: jax.Array, bias: jax.Array, choice: jax.Array) -> jax.Array:
    """Adds the biases of each token's experts, each times the expert's weight for the token, to out [T, n], with
    float32 sums; the result has out's dtype. It is differentiable with respect to out, weights and bias.
    matmul_to_tokens has no bias, so this adds that of the experts' down projection after the sum over each token's
    experts. ExpertLinear.to_tokens calls it.

    Args:
      out: [T, n].
      weights: float32[T, k] from expert_weights; they must be 0 where a choice is no expert.
      bias: [E, n], for each expert.
      choice: int32[T, k] from choose_experts.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check = Arguments("token_bias")
    check.array("out", out, "T n", FLOATS)
    check.array("weights", weights, "T k", jnp.float32)
    check.array("bias", bias, "E n", FLOATS)
    check.array("choice", choice, "T k", jnp.int32)
    return _with_bias(out, weights, bias, choice)


@jax.custom_vjp
def _with_bias(out, weights, bias, choice):
    """Adds to out [T, n] the sum of bias[e] times the token's weight over its experts e, as `token_bias` does, with a
    custom derivative, whose sums over tokens have a fixed order. weights: float32[T, k]; bias: [E, n]; choice: int32[T,
    k]. Returns [T, n] in out's dtype."""
    total = out.astype(jnp.float32)
    for weight, expert in zip(weights.T, choice.T, strict=True):
        total += weight[:, None] * bias.at[expert].get(mode="clip").astype(jnp.float32)
    return total.astype(out.dtype)


def _token_bias_fwd(out, weights, bias, choice):
    """The forward rule of `_with_bias`: (out [T, n] plus the biases of each token's experts times their weights, the
    residuals (weights, bias, choice) for `_token_bias_bwd`). weights: float32[T, k]. bias: [E, n]. choice: int32[T,
    k]."""
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
    """The weight of each row: weights [T, k], the router's, -> [rows] in the same dtype, the weight of the pair (a
    token with one of its experts) in each row; 0 in empty rows. A layer of experts multiplies the rows by it before the
    down projection, so that the rows of each token need only be summed after it. It is differentiable with respect to
    the weights. routing: from route.

    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check_routing("row_weights", routing).array("weights", weights, "T k", FLOATS)
    return _row_weights(weights, routing)


@jax.custom_vjp
def _row_weights(weights, routing):
    """The weight of each row, [rows], from the weights [T, k] of pairs of a token and an expert, as `row_weights`
    computes it, with a custom derivative, which is a gather; the derivative of a gather would be a scatter. routing:
    which pair each row has."""
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
