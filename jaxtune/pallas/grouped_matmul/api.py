"""Products of rows sorted by expert with the experts' weights, adapters and biases: the public functions, their
derivatives, and the choice of an implementation.

`contract` is the axis of a weight that is summed over; `tokens`, int32[rows], gives the row of x [T, ...] for each
sorted row, T for an empty one; None: x is sorted. The contents of arrays are not checked.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.grouped_matmul import (
    first_use,
    fp8_experts,
    mosaic,
    mosaic_ahead,
    mosaic_contract,
    mosaic_sums,
    reference,
    thin_pair,
    triton,
)
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS, Groups
from jaxtune.pallas.quant_matmul import decoded
from jaxtune.pallas.quant_matmul.reference import scaled

_PRODUCTS = {
    "mosaic": mosaic.product,
    "mosaic_ahead": mosaic.product,
    "triton": triton.product,
    "reference": reference.product,
}
# Products that take experts as they are stored, by the value of model.compute that asks for it.
AS_STORED = {"fp8": fp8_experts.product}
_AHEAD = "mosaic_ahead"  # takes a weight in four bits as it is stored; the others need it decoded
# The rows of a buffer for each expert, with the empty ones of its tiles (about half a tile), from which on a product
# takes as long as the warpgroups that decode beside it. With fewer, products wait for these, and a pass decodes faster.
_FEW_ROWS = 320
_MOSAIC = ("mosaic", _AHEAD)  # their kernels also multiply by an adapter's A and B, and compute the adapters' gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedLora:
    """LoRA adapters of one projection of all experts: scale * b a is added to each weight [out, in], by two thin
    products with the rows.
    """

    a: jax.Array  # [E, r, in]; cast to the dtype of the rows on use
    b: jax.Array  # [E, out, r]; cast to the dtype of the rows on use
    # the factor of the addition: alpha / r, or alpha / sqrt(r) for rsLoRA
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    # how many ranks are not zeros of padded_adapter; None: all
    own_ranks: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def read_rank(self) -> int:
        """How many ranks a kernel has to read."""
        return self.own_ranks or self.a.shape[1]


@dataclasses.dataclass(frozen=True)
class Static:
    """The static settings of a grouped product, hashable because functions with a custom derivative take them."""

    transposed: bool  # True: weights are [E, in, out]; False: [E, out, in]
    scale: float  # the factor of the adapter's product, GroupedLora.scale; 1 without an adapter
    # the name of the implementation that multiplies, such as "mosaic"; for an FP8 weight that is multiplied without
    # decoding, of the one that multiplies by the adapter's A and B, and by the weight if no FP8 kernel does
    implementation: str
    # True: the backward computes the adapter's gradients before that of x, so that x can be freed; False: in any order
    adapter_first: bool
    # for an FP8 weight that is multiplied without decoding, a tuple of one: the FP8 implementation that the caller
    # requests, or None; empty for every other weight
    fp8: tuple[str | None, ...] = ()
    weight_trains: bool = True  # whether the backward computes the weight's gradient; False: it is zero


def pads_adapters(dtype, in_size: int, out_size: int) -> bool:
    """Whether each product of rows in `dtype` with weights [out_size, in_size] casts and pads the adapters, which a
    caller such as a sampler can do once by `padded_adapter`, with the same results.
    """
    return mosaic.refusal(jnp.dtype(dtype), in_size, out_size, TILE_ROWS) is None


def padded_adapter(side: jax.Array, axis: int, dtype) -> jax.Array:
    """A [E, r, in] or B [E, out, r], cast to the rows' dtype, its rank (axis 1 of A, 2 of B) padded with zeros to a
    multiple of 64. side: A or B. axis: of the rank.
    """
    return mosaic.padded_rank_axis(side.astype(dtype), axis)


def implementations(
    dtype, in_size: int, out_size: int, groups: Groups, weight=None, implementation: str | None = None
) -> dispatch.Table:
    """{name: returns the reason of a refusal, or None}, in order of preference. "mosaic_ahead" is first, except for
    experts of few rows, whose weights a pass decodes faster.

      weight: a quantised weight that may be decoded while it is multiplied; None: no "mosaic_ahead", unless requested.
      implementation: the requested name, or None.
      dtype, in_size, out_size: of the rows, and sizes of the weights [E, out, in]. groups: gives rows and experts.
    """

    refused = functools.partial(mosaic.refusal, dtype, in_size, out_size, groups.tile_rows)

    def mosaic_refusal():
        return refused() or first_use.refusal("mosaic", mosaic.product, None)

    def ahead_refusal():
        if weight is None:
            return "no weight in four bits"
        reason = refused() or mosaic_ahead.refusal(weight)
        return reason or first_use.refusal(_AHEAD, mosaic.product, weight)

    # On several devices it is used only if asked for: it is not proved that it cannot hang beside NCCL's kernels.
    if jax.sharding.get_abstract_mesh().size > 1:
        ahead_refusal = dispatch.on_request(_AHEAD, implementation, mosaic_ahead.NOT_PROVED, ahead_refusal)

    def triton_refusal():
        return triton.refusal(dtype, groups.tile_rows) or first_use.refusal("triton", triton.product, None)

    few = groups.rows < _FEW_ROWS * groups.num_experts
    table = {
        **({} if few else {_AHEAD: ahead_refusal}),
        "mosaic": mosaic_refusal,
        _AHEAD: ahead_refusal,  # a key that is there keeps its place
        "triton": triton_refusal,
        "reference": lambda: None,
    }
    if weight is None and implementation != _AHEAD:
        del table[_AHEAD]
    return table


def gathers(implementation: str) -> bool:
    """Whether products by `implementation` read the rows of tokens at given indices while they multiply, so that no
    sorted copy is made: "mosaic", if its kernel passes its check on this GPU. Otherwise `tokens` must be None.
    """
    return implementation == "mosaic" and first_use.refusal("mosaic", mosaic.product, None, gathering=True) is None


def pads_rank(implementation: str) -> bool:
    """Whether products by `implementation` take an adapter's low-rank input with its rank padded to multiples of 64."""
    return implementation in _MOSAIC


def _product(x, weight, groups, contract, extra, static: Static, tokens):
    """x W, plus the adapter's product: [rows, n] in x's dtype, without a decoded weight that outlives it.

    weight: [E, n, K] (contract = 2) or [E, K, n] (contract = 1).
    extra: None, or the adapter's (u [rows, r], scaled already; l [E, n, r] or [E, r, n]).
    """
    implementation = static.implementation
    if static.fp8:
        plain = _PRODUCTS[implementation]
        return AS_STORED[weight.compute](x, weight, groups, contract, extra, tokens, plain, *static.fp8)
    if implementation != _AHEAD:
        weight, x = decoded(weight, x)
        weight = weight.astype(x.dtype)
    token_arguments = () if tokens is None else (tokens,)
    return _PRODUCTS[implementation](x, weight, groups, contract, extra, *token_arguments)


def _thin(x, weight, groups, contract, implementation, tokens):
    """x times one side of an adapter, unscaled: [rows, n], with Mosaic padded to a multiple of 64."""
    if implementation in _MOSAIC:
        return mosaic.thin(x, weight, groups, contract, tokens)
    return reference.thin(x, weight, groups, contract)


def contracted(thin, wide, groups, rank, implementation, tokens):
    """The gradient of an adapter's A, or of B transposed: float32[E, rank, n], thin^T wide summed over each expert's
    rows. thin: [rows, at least rank], scaled already; wide: [rows, n], or [T, n] with `tokens`.

      groups: Groups of the rows. rank: columns of thin that count.
      implementation: of Static. tokens: int32[rows], each row's token, or None.
    """
    if implementation in _MOSAIC and mosaic_contract.refusal(wide.dtype) is None:
        return mosaic_contract.contract_rows(mosaic.padded_rank_axis(thin, 1), wide, groups, rank, tokens)
    sums = mosaic_sums.per_expert if implementation in _MOSAIC else reference.per_expert
    return reference.contract_rows(thin[:, :rank], reference.rows_of(wide, tokens), groups, jnp.float32, sums)


def _thin_pair(dout, b, inner, groups, implementation, tokens):
    """(dout b [rows, r] as of `_thin`, the gradient of B float32[E, out, r]: dout^T inner summed over each expert's
    rows).
    """
    if implementation in _MOSAIC and tokens is None and thin_pair.refusal(dout, b) is None:
        return thin_pair.thin_pair(dout, b, inner, groups)
    db = contracted(inner, dout, groups, b.shape[2], implementation, tokens)
    return _thin(dout, b, groups, 1, implementation, tokens), db.mT


def _weight_gradient(left, right, groups, dtype, implementation):
    """The gradient of an array: [E, p, q], left^T right summed over each expert's rows [rows, p] and [rows, q]."""
    if implementation in _MOSAIC and mosaic_contract.weight_refusal(left.dtype, dtype) is None:
        return mosaic_contract.weight_gradient(left, right, groups, dtype)
    return reference.contract_rows(left, right, groups, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, weight, lora, groups, static: Static):
    return forward(x, weight, lora, groups, static)[0]


def _with_bias(u, b, bias):
    """(u, b) with the biases in their last column: one in u, the bias in b, so that the product adds them."""
    last = jnp.arange(u.shape[1]) == u.shape[1] - 1
    b = jnp.pad(b.astype(u.dtype), ((0, 0), (0, 0), (0, u.shape[1] - b.shape[2])))
    return jnp.where(last, jnp.ones((), u.dtype), u), jnp.where(last, bias[:, :, None], b)


def forward(x, weight, lora, groups, static: Static, tokens=None, bias=None, inner=None):
    """(the product [rows, out], residuals for `backward`), from the results of `prepared`.

    tokens: int32[rows], the row of x of each sorted row, T for an empty one; only if the implementation `gathers`.
    bias: [E, out]. Empty rows get it or not.
    inner: the low-rank input x A^T, [rows, r], of an earlier call; None: it is computed.
    lora: (a [E, r, in], b [E, out, r]) or None. static: all from `prepared`.
    x: [rows, in] or with `tokens` [T, in]. weight: array or Stored. groups: Groups of the rows.
    """
    contract = 1 if static.transposed else 2
    extra = None
    if lora is not None:
        a, b = lora
        if inner is None:
            inner = _thin(x, a, groups, 2, static.implementation, tokens)
        u = scaled(inner, static.scale)
        u = mosaic.padded_rank_axis(u, 1) if pads_rank(static.implementation) else u
        if bias is not None and u.shape[1] > b.shape[2] and bias.dtype == u.dtype:
            (u, b), bias = _with_bias(u, b, bias), None
        extra = (u, b.mT if static.transposed else b)
    out = _product(x, weight, groups, contract, extra, static, tokens)
    if bias is not None:
        out = _biased(out, bias, groups)
    return out, (x, weight, lora, groups, inner)


def low_rank_of(residuals) -> jax.Array | None:
    """An adapter's low-rank input [rows, r], without padding, from `forward`'s residuals; None without an adapter."""
    *_, lora, _, inner = residuals
    return None if lora is None else inner[:, : lora[0].shape[1]]


def backward(static: Static, residuals, dout, x_tokens=None, dout_tokens=None):
    """(gradient of the sorted rows [rows, in]; of the weight, None if it is quantised or does not train; of (a, b), or
    None).

      dout: [rows, out], or [T, out] with `dout_tokens`, only if the implementation `gathers`.
      x_tokens: the row of the residuals' x [T, in] for each sorted row.
      static: from `prepared`; residuals: from `forward`.
    """
    x, weight, lora, groups, inner = residuals
    dinner = dlora = None
    if lora is not None:
        a, b = lora
        dinner, db = adapter_gradients(static, b, inner, groups, dout, dout_tokens)
        da = contracted(dinner, x, groups, a.shape[1], static.implementation, x_tokens)
        dlora = (da.astype(a.dtype), db.astype(b.dtype))
        if static.adapter_first:
            dlora, dout = jax.lax.optimization_barrier((dlora, dout))
    dx = rows_gradient(static, weight, lora, dinner, groups, dout, dout_tokens)
    dweight = None
    if static.weight_trains and not isinstance(weight, Stored):
        rows, drows = reference.rows_of(x, x_tokens), reference.rows_of(dout, dout_tokens)
        sides = (rows, drows) if static.transposed else (drows, rows)
        dweight = _weight_gradient(*sides, groups, weight.dtype, static.implementation)
    return dx, dweight, dlora


def adapter_gradients(static: Static, b, inner, groups, dout, dout_tokens=None):
    """(the gradient of `inner` [rows, at least r], padded by a Mosaic implementation; of B, float32[E, out, r]).

    static: from `prepared`. groups: Groups of the rows. b: [E, out, r]. inner: the unscaled low-rank input.
    dout: [rows, out], or [T, out] with `dout_tokens`, int32[rows], the token of each sorted row.
    """
    inner = scaled(inner, static.scale)
    dinner, db = _thin_pair(dout, b, inner, groups, static.implementation, dout_tokens)
    # Without this XLA would keep db and its sums until the end of the program, where each is copied.
    return scaled(dinner, static.scale), with_layout_constraint(db, Layout(major_to_minor=(0, 1, 2)))


def rows_gradient(static: Static, weight, lora, dinner, groups, dout, dout_tokens=None):
    """The gradient of the sorted rows, [rows, in]: dout times the weight, plus the adapter's part, dinner A. lora: (a,
    b) or None. dinner: [rows, at least r], or None without an adapter.

      static, weight: from `prepared`. groups: Groups of the rows.
      dout: [rows, out], or [T, out] with `dout_tokens`, int32[rows], the token of each sorted row.
    """
    extra = None
    if lora is not None:
        extra = (dinner, lora[0].mT if static.transposed else lora[0])
    return _product(dout, weight, groups, 2 if static.transposed else 1, extra, static, dout_tokens)


def _grouped_fwd(x, weight, lora, groups, static):
    return forward(x, weight, lora, groups, static)


def _grouped_bwd(static, residuals, dout):
    return *backward(static, residuals, dout), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def check_groups(check: Arguments, groups: Groups, name: str = "groups") -> None:
    """Checks that the argument `name` is a Groups whose arrays fit each other; `check` then knows E.

    groups: what must be one.
    """
    check.is_a(name, groups, Groups, "a Groups: that of a Routing, as route makes")
    for field, shape in (("tile_expert", "tiles"), ("count", ""), ("tile_sizes", "tiles"), ("sizes", "E")):
        check.array(f"{name}.{field}", getattr(groups, field), shape, jnp.int32)


def checked(
    op: str, name: str, x, shape: str, weight, groups: Groups, lora, transposed: bool, routing=None
) -> Arguments:
    """Checks the arguments of the product `op`, and returns the checker, which knows the sizes E, in and out. routing:
    the Routing with the groups, whose arrays are checked too; None: the product takes groups.

      name, shape: of the argument x, such as "[rows, in]". transposed: weight is [E, in, out].
      lora: GroupedLora or None.
    """
    check = Arguments(op)
    check_groups(check, groups, "groups" if routing is None else "routing.groups")
    check.sizes["rows"] = (groups.rows, " (of the groups' tiles)")
    if routing is not None:
        check.array("routing.slots", routing.slots, "T k", jnp.int32)
        check.array("routing.source", routing.source, "rows", jnp.int32)
    check.array(name, x, shape, FLOATS)
    check.array("weight", weight, "E in out" if transposed else "E out in", FLOATS, stored=(Stored,))
    if lora is not None:
        check.is_a("lora", lora, GroupedLora, "a GroupedLora or None")
        check.array("lora.a", lora.a, "E r in", FLOATS)
        check.array("lora.b", lora.b, "E out r", FLOATS)
        check.number("lora.scale", lora.scale)
    return check


def prepared(
    x,
    weight,
    groups: Groups,
    lora: GroupedLora | None,
    transposed: bool,
    derivative_follows: bool,
    fp8: bool,
    weight_trains: bool,
    implementation: str | None,
):
    """Chooses the implementation, and returns (x, weight, (a, b) or None, Static) for `forward`; call `checked` first.
    ValueError if a requested implementation refuses.

    Use the returned x from then on: if the weight is decoded here, x is tied to it, so that XLA does not decode
    earlier. A `swapped` weight is returned in its own order.

      derivative_follows: decode a quantised weight once, here, for the forward and x's gradient, and compute the
      adapter's gradients first.
      transposed: weight is [E, in, out]. weight_trains: its gradient is needed.
      x: [rows, in] or tokens [T, in]. weight: array or Stored. lora: GroupedLora or None.
      fp8: multiply an FP8 weight undecoded. implementation: the requested name, or None.
    """
    if isinstance(weight, Stored) and weight.swapped:
        weight, transposed = weight.unswapped, not transposed
    in_size, out_size = weight.shape[1:] if transposed else weight.shape[:0:-1]
    as_stored = fp8 and isinstance(weight, Stored) and weight.compute in AS_STORED
    packed = weight if isinstance(weight, Stored) and not as_stored else None
    table = implementations(x.dtype, in_size, out_size, groups, packed, implementation)
    name = dispatch.choose("grouped_matmul", table, implementation)
    requested = (implementation,) if as_stored else ()
    static = Static(transposed, 1.0 if lora is None else lora.scale, name, derivative_follows, requested, weight_trains)
    if derivative_follows and packed is not None and name != _AHEAD:
        array, x = decoded(weight, x)
        weight = jax.lax.stop_gradient(array)
    return x, weight, None if lora is None else (lora.a, lora.b), static


@meshes.on_any_mesh
def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | Stored,
    groups: Groups,
    lora: GroupedLora | None = None,
    *,
    transposed: bool = False,
    derivative_follows: bool = False,
    fp8: bool = False,
    weight_trains: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each expert's rows by its weight, and adds the product with its adapter: [rows, out] in x's dtype.

    Empty rows, which pad each expert's rows to whole tiles, must be zero; their results are zero. Differentiable in x,
    a weight that is an array and trains, and the adapter. TypeError or ValueError for an argument that does not fit, or
    an implementation that refuses.

      x: [rows, in] bfloat16, float16 or float32, sorted by expert; weights are cast to its dtype.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or quantised and then decoded for each product.
      groups: from `routing.route(choice, E).groups`. lora: adapters, or None.
      derivative_follows: the derivative is computed soon, and x has no other use: a quantised weight is decoded once
      for both, and the adapter's gradients precede x's, so that x can be freed.
      fp8: multiply an FP8 weight undecoded, by rows rounded to e4m3, forward and for x's gradient; adapters multiply x
      unrounded.
      weight_trains: False: the weight's gradient is zero, and no kernel of it is compiled.
      implementation: "mosaic", "mosaic_ahead" (decodes four bits while it multiplies; on several devices only on
      request; not for fp8), "triton", "reference", or None for the first that supports the call.
    """
    checked("grouped_matmul", "x", x, "rows in", weight, groups, lora, transposed)
    x, weight, sides, static = prepared(
        x, weight, groups, lora, transposed, derivative_follows, fp8, weight_trains, implementation
    )
    return _grouped(x, weight, sides, groups, static)


@meshes.on_any_mesh
def grouped_bias(rows: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """Adds to each row the bias of its expert, bias [E, out]: [rows, out] in the rows' dtype. Differentiable in both.

    Empty rows get a bias too, and their gradients must be zero: the bias's gradient is the sum over all rows of the
    expert's tiles.
    """
    check = Arguments("grouped_bias")
    check_groups(check, groups)
    check.sizes["rows"] = (groups.rows, " (of the groups' tiles)")
    check.array("rows", rows, "rows out", FLOATS)
    check.array("bias", bias, "E out", FLOATS)
    return _biased(rows, bias, groups)


@jax.custom_vjp
def _biased(rows, bias, groups):
    """Sums in float32; the bias's gradient is summed over an expert's rows in a fixed order."""
    tile_biases = reference.per_tile(bias, groups)[:, None].astype(jnp.float32)
    return (reference.tiled(rows, groups).astype(jnp.float32) + tile_biases).reshape(rows.shape).astype(rows.dtype)


def _bias_fwd(rows, bias, groups):
    return _biased(rows, bias, groups), (bias, groups)


def _bias_bwd(residuals, drows):
    bias, groups = residuals
    return drows, bias_gradient(drows, bias, groups), None


def bias_gradient(drows, bias, groups):
    """The sums of drows [rows, out] over each expert's rows, in a fixed order: [E, out] in the bias's dtype.

    groups: Groups of the rows.
    """
    wide = reference.tiled(drows, groups).astype(jnp.float32)
    return reference.per_expert(wide.sum(1), groups).astype(bias.dtype)


_biased.defvjp(_bias_fwd, _bias_bwd)
