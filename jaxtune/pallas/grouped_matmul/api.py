"""Products of rows sorted by expert with the experts' weights, and their adapters and biases: the public functions,
with derivatives, and the choice of their implementation.

`grouped_matmul` is the product, with the adapters of a GroupedLora; `grouped_bias` adds biases. The products of
jaxtune.pallas.routing, which gather the rows from tokens or sum the results by token, use its parts: `checked` checks
the arguments, `prepared` chooses one of the `implementations` and makes the Static settings, `forward` and `backward`
compute, and `gathers` says whether the implementation gathers rows itself. `fills_adapters` and `filled_adapter` are
for samplers.
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
    """The LoRA adapters of one projection of all experts of a layer, such as down: for each expert's weight [out, in]
    the addition scale * b a. It is not added to the weight: rows are multiplied by the transposed `a`, and the result,
    which has r columns (the rank), by the transposed `b`. A layer of experts makes it from its parameters for the
    products of jaxtune.pallas.routing, which are grouped products too, and samplers for those of
    jaxtune.pallas.few_rows."""

    a: jax.Array  # [E, r, in]; cast to the dtype of the rows on use
    b: jax.Array  # [E, out, r]; cast to the dtype of the rows on use
    # the factor of the addition: alpha / r, or alpha / sqrt(r) for rsLoRA
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Static:
    """The static settings of a call of grouped_matmul, or of a product of jaxtune.pallas.routing, which `prepared`
    makes. They are hashable, because the functions with a custom derivative take them as a static argument."""

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


def fills_adapters(dtype, in_size: int, out_size: int) -> bool:
    """Whether each product of rows in `dtype` with experts' weights [out_size, in_size] casts and pads the adapters. It
    is True if Mosaic's kernel, which sums over ranks in steps of 64, supports these sizes and this dtype on this GPU. A
    caller that multiplies often by the same adapters, such as a sampler, can then do both once, by `filled_adapter`,
    with the same results."""
    return mosaic.refusal(jnp.dtype(dtype), in_size, out_size, TILE_ROWS) is None


def filled_adapter(side: jax.Array, axis: int, dtype) -> jax.Array:
    """Returns one side of the adapters, A [E, r, in] or B [E, out, r], cast to `dtype`, that of the rows, and padded
    with zeros along `axis`, that of the rank r (1 for A, 2 for B), to a multiple of 64. A sampler calls it once for
    adapters for which `fills_adapters` says that every product would do the same."""
    return mosaic.filled(side.astype(dtype), axis)


def implementations(
    dtype, in_size: int, out_size: int, groups: Groups, weight=None, implementation: str | None = None
) -> dispatch.Table:
    """The table from which dispatch.choose takes the implementation of a call: {name: a function that returns the
    reason why the implementation refuses the call, or None}, in the order in which they are tried. Such a function may
    compare its kernel with plain JAX on this GPU (first_use.py). `prepared` chooses from the table, and `jaxtune info`
    prints why implementations refuse. "mosaic_ahead" is first, except for experts of few rows, whose weights a pass
    decodes first.

    Args:
      dtype: of the rows, x.
      in_size, out_size: the columns and rows of an expert's weight [out, in].
      groups: the layout of the sorted rows, of which the rows of a tile and of the buffer are used.
      weight: the weight if it is quantised and may be decoded while it is multiplied; None: it is an array, or is
        multiplied in FP8 as it is stored, and the table has no "mosaic_ahead", unless the caller requests that.
      implementation: the name that the caller requests, or None. On several devices "mosaic_ahead" is only used on
        request, because it is not proved that its programs cannot hang beside NCCL's kernels.
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
    """Whether products by `implementation` read the rows of tokens at given indices while they multiply. True: the
    caller may pass tokens, with `tokens` of `forward` or `dout_tokens` of `backward`, and no sorted copy of them is
    made. False: it must pass sorted rows there. It is True for "mosaic" only, unless its kernel fails its check on this
    GPU, which compares gathered products with plain JAX at the first use. jaxtune.pallas.routing asks it."""
    return implementation == "mosaic" and first_use.refusal("mosaic", mosaic.product, None, gathering=True) is None


def fills(implementation: str) -> bool:
    """Whether products by `implementation` take an adapter's low-rank input with its rank padded to a multiple of 64,
    as a Mosaic one does. The forward and backward of routing's gated_to_tokens ask it, whose kernels pad it so."""
    return implementation in _MOSAIC


def _product(x, weight, groups, contract, extra, static: Static, tokens):
    """The product of sorted rows with their experts' weights, plus the adapter's, [rows, n] in x's dtype, for `forward`
    and for the gradient of the rows in `backward`. An array is cast to x's dtype. A quantised weight is decoded once x
    is computed and not earlier, so that XLA keeps no decoded weights; or it is multiplied without decoding it first, by
    "mosaic_ahead", which decodes in its kernel, or in FP8 if static.fp8 says so.

    Args:
      x: [rows, K], or [T, K] with `tokens`.
      weight: [E, n, K] (contract = 2) or [E, K, n] (contract = 1), an array or quantised.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      contract: the axis of the weight that is summed over, 1 or 2.
      extra: None, or (u [rows, r], l [E, n, r] or [E, r, n]), whose product is added: an adapter's. u is multiplied by
        static.scale already.
      static: the settings of the call, which name the implementation.
      tokens: int32[rows], the row of x for each sorted row, T for an empty row; None: x is sorted.
    """
    implementation = static.implementation
    if static.fp8:
        plain = _PRODUCTS[implementation]
        return AS_STORED[weight.compute](x, weight, groups, contract, extra, tokens, plain, *static.fp8)
    if implementation != _AHEAD:
        weight, x = decoded(weight, x)
        weight = weight.astype(x.dtype)
    own = () if tokens is None else (tokens,)
    return _PRODUCTS[implementation](x, weight, groups, contract, extra, *own)


def _thin(x, weight, groups, contract, implementation, tokens):
    """The product of sorted rows with one side of an adapter, in x's dtype: [rows, n], n being the rank. `forward`
    multiplies x by A with it, `backward` dout by B; the adapter's scale is not in the result. With a Mosaic
    implementation n is padded with zero columns to a multiple of 64, as the kernel of the next product needs it.

    Args:
      x: the rows [rows, K], or [T, K] with `tokens`.
      weight: A or B, [E, n, K] (contract = 2) or [E, K, n] (contract = 1).
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      contract: the axis of the weight that is summed over.
      implementation: the name of the call's implementation; those that are not Mosaic's use plain JAX here.
      tokens: int32[rows], the row of x for each sorted row; None, as always with plain JAX: x is sorted.
    """
    if implementation in _MOSAIC:
        return mosaic.thin(x, weight, groups, contract, tokens)
    return reference.thin(x, weight, groups, contract)


def contracted(thin, wide, groups, rank, implementation, tokens):
    """The gradient of an adapter's A, or of its B transposed: float32[E, rank, n], which is thin^T wide, summed over
    the rows of each expert. A Mosaic kernel computes it if `implementation` is a Mosaic one and the kernel passes its
    check on this GPU; otherwise plain JAX multiplies, and for a Mosaic implementation another kernel adds up tiles if
    it can (mosaic_sums.py). The backward of routing's gated_to_tokens calls it too.

    Args:
      thin: the factor with the adapter's rank as columns, [rows, at least rank]; columns from `rank` on are padding, to
        which the kernel's is added. It is multiplied by the adapter's scale already.
      wide: the other factor, the rows x or the gradients of their products: [rows, n], or [T, n] with `tokens`.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      rank: of the adapter.
      implementation: the name of the call's implementation.
      tokens: int32[rows], the row of `wide` for each sorted row; None: `wide` is sorted.
    """
    if implementation in _MOSAIC and mosaic_contract.refusal(wide.dtype) is None:
        return mosaic_contract.contract_rows(mosaic.filled(thin, 1), wide, groups, rank, tokens)
    sums = mosaic_sums.per_expert if implementation in _MOSAIC else reference.per_expert
    return reference.contract_rows(thin[:, :rank], reference.rows_of(wide, tokens), groups, jnp.float32, sums)


def _thin_pair(dout, b, inner, groups, implementation, tokens):
    """Computes the two products of an adapter's backward that read dout. Returns (dout b [rows, r], in the form of
    `_thin`; the gradient of B, float32[E, out, r]). The gradient of B is dout^T inner, summed over the rows of each
    expert.

    One kernel computes both products if the implementation is a Mosaic one, the rows are sorted, and thin_pair.refusal
    has no reason against it. Otherwise `_thin` and `contracted` compute one product each, so that dout is read twice.
    If rows are gathered from tokens, dout is k times as small as sorted rows, and reading it twice costs little.

    Args:
      dout: the gradients of the product, [rows, out], or [T, out] with `tokens`.
      b: the adapter's B, [E, out, r].
      inner: the rows times the adapter's A and its scale, [rows, at least r]; columns from r on are padding.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      implementation: the name of the call's implementation.
      tokens: int32[rows], the row of dout for each sorted row; None: dout is sorted.
    """
    if implementation in _MOSAIC and tokens is None and thin_pair.refusal(dout, b) is None:
        return thin_pair.thin_pair(dout, b, inner, groups)
    db = contracted(inner, dout, groups, b.shape[2], implementation, tokens)
    return _thin(dout, b, groups, 1, implementation, tokens), db.mT


def _weight_gradient(left, right, groups, dtype, implementation):
    """The gradient of a weight that is an array: [E, p, q] in `dtype`, which is left^T right, summed over the rows of
    each expert. A Mosaic kernel computes it if `implementation` is a Mosaic one and the kernel passes its check on this
    GPU; otherwise plain JAX does: if p and q are above 256, it adds up the tiles one by one, and else it stores the
    products of all tiles first (reference.contract_rows).

    Args:
      left, right: [rows, p] and [rows, q], sorted by expert: for a weight [E, in, out] the rows x and the gradients of
        their products, for a weight [E, out, in] these gradients and x.
      groups: which expert each tile of rows belongs to.
      dtype: of the weight.
      implementation: the name of the call's implementation; a Mosaic one has refused p and q that are no multiples of
        64.
    """
    if implementation in _MOSAIC and mosaic_contract.weight_refusal(left.dtype, dtype) is None:
        return mosaic_contract.weight_gradient(left, right, groups, dtype)
    return reference.contract_rows(left, right, groups, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, weight, lora, groups, static: Static):
    """The grouped product as a function with a custom derivative, [rows, out] in x's dtype. grouped_matmul calls it
    with what `prepared` returns.

    Args:
      x: the sorted rows [rows, in].
      weight: [E, out, in], or [E, in, out] if static.transposed; an array or quantised.
      lora: (a [E, r, in], b [E, out, r]) of the adapter, whose factor is static.scale; or None.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      static: the settings of the call, from `prepared`.
    """
    return forward(x, weight, lora, groups, static)[0]


def _with_bias(u, b, bias):
    """The two factors of an adapter's product with the experts' biases in them: (u, b) whose last column, which is
    padding, is one in u and the bias in b. So the product adds the biases without a pass over its result, before it is
    rounded. `forward` calls it.

    Args:
      u: the rows times the adapter's A and its scale, [rows, r], r padded by a Mosaic implementation with zeros.
      b: the adapter's B, [E, out, rank], rank being smaller than r.
      bias: [E, out] in u's dtype.
    """
    last = jnp.arange(u.shape[1]) == u.shape[1] - 1
    b = jnp.pad(b.astype(u.dtype), ((0, 0), (0, 0), (0, u.shape[1] - b.shape[2])))
    return jnp.where(last, jnp.ones((), u.dtype), u), jnp.where(last, bias[:, :, None], b)


def forward(x, weight, lora, groups, static: Static, tokens=None, bias=None, inner=None):
    """Computes the grouped product and the residuals of its derivative. jaxtune.pallas.routing also calls it, for rows
    that are gathered from tokens, and with biases.

    Args:
      x, weight, lora, static: what `prepared` returns; lora is (a, b) or None.
      groups: which expert each tile of rows belongs to; the rows are sorted by expert.
      tokens: int32[rows], the row of x [T, in] for each sorted row, T for an empty row; only for an implementation that
        `gathers`. None: x is sorted, [rows, in].
      bias: [E, out], which is added to the rows of each expert, as by grouped_bias; the adapter's product does it where
        its rank is padded. Empty rows get it or not. None: there is none.
      inner: what `low_rank_of` returned in an earlier call with the same rows and adapter; None: it is computed.
    Returns:
      (the product [rows, out], residuals for `backward`). The residuals are (x, weight, lora, groups, inner), inner
      being x times the adapter's A, [rows, r] (as it was given, or r padded to a multiple of 64 by a Mosaic
      implementation), or None without an adapter.
    """
    contract = 1 if static.transposed else 2
    extra = None
    if lora is not None:
        a, b = lora
        if inner is None:
            inner = _thin(x, a, groups, 2, static.implementation, tokens)
        u = scaled(inner, static.scale)
        u = mosaic.filled(u, 1) if fills(static.implementation) else u
        if bias is not None and u.shape[1] > b.shape[2] and bias.dtype == u.dtype:
            (u, b), bias = _with_bias(u, b, bias), None
        extra = (u, b.mT if static.transposed else b)
    out = _product(x, weight, groups, contract, extra, static, tokens)
    if bias is not None:
        out = _biased(out, bias, groups)
    return out, (x, weight, lora, groups, inner)


def low_rank_of(residuals) -> jax.Array | None:
    """The low-rank input of an adapter, the product of the rows and its A, [rows, r], from the residuals of `forward`:
    without the columns to which a Mosaic implementation pads it. A layer keeps it for its backward. None without an
    adapter."""
    *_, lora, _, inner = residuals
    return None if lora is None else inner[:, : lora[0].shape[1]]


def backward(static: Static, residuals, dout, x_tokens=None, dout_tokens=None):
    """Computes the gradients of `forward`, given that of its result. jaxtune.pallas.routing also calls it, for rows
    that are gathered from tokens.

    Args:
      static: the settings of the call, as in `forward`.
      residuals: from `forward`.
      dout: the gradient of the product, [rows, out], or [T, out] with `dout_tokens`.
      x_tokens: int32[rows], the row of the residuals' x [T, in] for each sorted row, for any implementation; None: x is
        sorted.
      dout_tokens: int32[rows], the row of dout for each sorted row, for an implementation that `gathers`; None: dout is
        sorted.
    Returns:
      (the gradient of the sorted rows [rows, in], that of the weight or None if it is quantised or does not train,
      those of the adapter's (a, b) or None without an adapter).
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
    """Computes what an adapter's gradients need of that of a product, and the gradient of B: (the gradient of `inner`
    [rows, at least r], padded by a Mosaic implementation, from which `rows_gradient` and the gradient of A are
    computed; that of B, float32[E, out, r]). `backward` and the backward of routing's gated_to_tokens call it.

    Args:
      static, groups, dout, dout_tokens: as for `backward`.
      b: the adapter's B, [E, out, r].
      inner: the low-rank input of `forward`, padded or not.
    """
    inner = scaled(inner, static.scale)
    dinner, db = _thin_pair(dout, b, inner, groups, static.implementation, dout_tokens)
    # Without this XLA would keep db and its sums until the end of the program, where each is copied.
    return scaled(dinner, static.scale), with_layout_constraint(db, Layout(major_to_minor=(0, 1, 2)))


def rows_gradient(static: Static, weight, lora, dinner, groups, dout, dout_tokens=None):
    """Computes the gradient of the sorted rows of `forward`, [rows, in]: dout times the weight, plus the adapter's
    part. `backward` and the backward of routing's gated_to_tokens call it.

    Args:
      static, dout, dout_tokens: as for `backward`.
      weight, lora, groups: residuals of `forward`.
      dinner: the gradient of the residual `inner`, from `adapter_gradients`; None without an adapter.
    """
    extra = None
    if lora is not None:
        extra = (dinner, lora[0].mT if static.transposed else lora[0])
    return _product(dout, weight, groups, 2 if static.transposed else 1, extra, static, dout_tokens)


def _grouped_fwd(x, weight, lora, groups, static):
    """The forward rule of `_grouped` for jax.custom_vjp. It takes the arguments of `_grouped` (x, weight, lora, groups,
    static), and returns (the product [rows, out], the residuals for the backward rule), both from `forward`."""
    return forward(x, weight, lora, groups, static)


def _grouped_bwd(static, residuals, dout):
    """The backward rule of `_grouped` for jax.custom_vjp, from the static settings, the residuals, and dout [rows,
    out], the gradient of the product. Returns (the gradient of x, that of the weight or None if it is quantised or does
    not train, those of the adapter's (a, b) or None without one, None for the groups)."""
    return *backward(static, residuals, dout), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def check_groups(check: Arguments, groups: Groups, name: str = "groups") -> None:
    """Checks that an argument is a Groups, the layout of sorted rows, and that its arrays have the dtypes and shapes
    that fit each other. Afterwards `check` also knows the number of experts, E, which the arguments that are checked
    later must have. `checked`, grouped_bias and jaxtune.pallas.routing call it.

    Args:
      check: the object that checks the arguments of the call (Arguments).
      groups: the argument.
      name: the argument's name, for messages.
    Raises:
      TypeError, ValueError: `groups` is no Groups, or one of its arrays has another dtype or shape.
    """
    check.is_a(name, groups, Groups, "a Groups: that of a Routing, as route makes")
    for part, shape in (("tile_expert", "tiles"), ("count", ""), ("tile_sizes", "tiles"), ("sizes", "E")):
        check.array(f"{name}.{part}", getattr(groups, part), shape, jnp.int32)


def checked(
    op: str, name: str, x, shape: str, weight, groups: Groups, lora, transposed: bool, routing=None
) -> Arguments:
    """Checks the arguments of a grouped product, and returns the object that did, which knows the sizes E, in and out.
    The operations are grouped_matmul, which takes sorted rows, and matmul_of_tokens and matmul_to_tokens of
    jaxtune.pallas.routing, which take tokens and their routing.

    Args:
      op: the operation's name, for messages.
      name: the name of the argument x, for messages.
      x: the rows or tokens.
      shape: the shape that x must have, in words such as "rows in" or "T in" (Arguments.array).
      weight: an array of floats or a quantised weight (Stored), [E, out, in], or [E, in, out] if `transposed`.
      groups: a Groups whose rows are those of x, if x is sorted.
      lora: a GroupedLora with a [E, r, in] and b [E, out, r], or None.
      transposed: whether each expert's weight is [in, out].
      routing: the Routing from which the groups are, if the operation takes one: its arrays are checked too, and
        messages call the groups "routing.groups". None: the operation takes the groups.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
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
    """Chooses the implementation of a grouped product, and returns (x, weight, (a, b) of the adapter or None, the
    Static settings), which are arguments of `forward`. grouped_matmul and the products of jaxtune.pallas.routing call
    it after `checked`. The caller must use the returned x from then on: if the weight is decoded here, x is tied to the
    decoded weight, so that XLA does not decode earlier; otherwise both are returned unchanged, except that a quantised
    weight whose arrays are in the other order of axes (Stored.swapped) is returned in that order.

    Args:
      x: the rows sorted by expert, [rows, in], or the tokens.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array or quantised.
      groups: which expert each tile of sorted rows belongs to.
      lora: the adapter, or None.
      transposed: whether each expert's weight is [in, out].
      derivative_follows: True: a weight that has to be decoded is decoded here, once for the forward and the gradient
        of x, and the returned weight is then an array without a gradient; the backward computes the adapter's gradients
        first (Static.adapter_first). False: each product decodes the weight.
      fp8: whether a weight in FP8 is multiplied without decoding. A requested implementation is then also that of the
        FP8 product, which may refuse it later, in `forward`.
      weight_trains: whether the backward computes the gradient of a weight that is an array.
      implementation: the name that the caller requests, or None.
    Raises:
      ValueError: the requested implementation is unknown or refuses the call.
    """
    if isinstance(weight, Stored) and weight.swapped:
        weight, transposed = weight.unswapped, not transposed
    in_size, out_size = weight.shape[1:] if transposed else weight.shape[:0:-1]
    as_stored = fp8 and isinstance(weight, Stored) and weight.compute in AS_STORED
    packed = weight if isinstance(weight, Stored) and not as_stored else None
    table = implementations(x.dtype, in_size, out_size, groups, packed, implementation)
    name = dispatch.choose("grouped_matmul", table, implementation)
    asked = (implementation,) if as_stored else ()
    static = Static(transposed, 1.0 if lora is None else lora.scale, name, derivative_follows, asked, weight_trains)
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
    """Multiplies the rows of each expert of a mixture by the expert's weight, and adds the product with its adapter. It
    is a matrix product for each expert, of as many rows as tokens chose it. Layers of experts call it for rows that are
    sorted already, such as an adapter's products in quantisation-aware training; most of their products are those of
    jaxtune.pallas.routing, which gather rows or sum results by token too.

    Empty rows, with which each expert's rows are padded to whole tiles, must be zero; their results are zero.
    Differentiable with respect to x, a weight that is an array and trains, and the adapter.

    Args:
      x: [rows, in] bfloat16, float16 or float32, sorted by expert as `groups` says; its dtype is the compute dtype, to
        which other weights are cast.
      weight: an array or a quantised weight (Stored), [E, out, in], or [E, in, out] if `transposed`. A quantised one is
        decoded for each product, but see derivative_follows and fp8; "mosaic_ahead" decodes one in four bits while it
        multiplies.
      groups: which expert each tile of rows belongs to, from `routing.route(choice, E).groups`.
      lora: the adapter, or None.
      transposed: True: each expert's weight is [in, out]. False: [out, in].
      derivative_follows: True: the derivative is computed soon, and x has no other use. A weight that has to be decoded
        is then decoded once for both, and the adapter's gradients are computed before x's, so that x can be freed.
        False: a weight is decoded again for the gradient of x.
      fp8: True: a weight in FP8 is multiplied without decoding, in the forward and for the gradient of x, with rows
        that are rounded to e4m3 (fp8_experts.py); adapters multiply x unrounded. False: it is decoded. For other
        weights it has no effect.
      weight_trains: whether the weight's gradient is computed; False: it is zero, and no kernel of it is compiled or
        checked. A quantised weight has no gradient in either case.
      implementation: "mosaic", "mosaic_ahead", "triton", "reference" (plain JAX), or None for the first that supports
        the call. On several devices "mosaic_ahead" is only used if it is requested. For a weight that is multiplied in
        FP8 the FP8 product must have the requested implementation too: it has no "mosaic_ahead".
    Returns:
      [rows, out] in x's dtype.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (flags and the contents of arrays
        are not checked), or the requested implementation is unknown or refuses the call.
    """
    checked("grouped_matmul", "x", x, "rows in", weight, groups, lora, transposed)
    x, weight, sides, static = prepared(
        x, weight, groups, lora, transposed, derivative_follows, fp8, weight_trains, implementation
    )
    return _grouped(x, weight, sides, groups, static)


@meshes.on_any_mesh
def grouped_bias(rows: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """Adds to each row the bias of its expert. Returns [rows, out] in the dtype of `rows`. Differentiable with respect
    to rows and bias. Empty rows of an expert's tiles get its bias too (those of the last tiles, which have no expert,
    get the last expert's), so they are no longer zero; the gradients that arrive for them must be zero, because the
    bias's gradient is the sum over all rows of its expert's tiles. A layer of experts adds the biases of its first
    projection (gate and up) with it in quantisation-aware training; else matmul_of_tokens adds them.

    Args:
      rows: [rows, out], sorted by expert.
      bias: [E, out].
      groups: which expert each tile of rows belongs to.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here; flags and the contents of arrays
        are not checked.
    """
    check = Arguments("grouped_bias")
    check_groups(check, groups)
    check.sizes["rows"] = (groups.rows, " (of the groups' tiles)")
    check.array("rows", rows, "rows out", FLOATS)
    check.array("bias", bias, "E out", FLOATS)
    return _biased(rows, bias, groups)


@jax.custom_vjp
def _biased(rows, bias, groups):
    """Adds to each of rows [rows, out] the bias of its expert, bias [E, out], as a function with a custom derivative,
    in which the bias's gradient is summed over an expert's rows in a fixed order. The sum with the bias is float32.
    groups: which expert each tile of rows belongs to. Returns [rows, out] in the dtype of `rows`."""
    added = reference.per_tile(bias, groups)[:, None].astype(jnp.float32)
    return (reference.tiled(rows, groups).astype(jnp.float32) + added).reshape(rows.shape).astype(rows.dtype)


def _bias_fwd(rows, bias, groups):
    """The forward rule of `_biased` for jax.custom_vjp. It takes the arguments of `_biased`, and returns (the rows plus
    biases [rows, out], the residuals (bias, groups) for the backward rule)."""
    return _biased(rows, bias, groups), (bias, groups)


def _bias_bwd(residuals, drows):
    """The backward rule of `_biased` for jax.custom_vjp, from the residuals (bias, groups) and drows [rows, out], the
    gradient of the result. Returns (the gradient of rows, which is drows itself; that of the bias [E, out], the sums of
    drows over each expert's rows; None for the groups)."""
    bias, groups = residuals
    return drows, bias_gradient(drows, bias, groups), None


def bias_gradient(drows, bias, groups):
    """The gradient of the experts' biases, [E, out] in the dtype of `bias`: the sums over each expert's rows of drows
    [rows, out], the gradient of the rows to which they were added, in a fixed order. jaxtune.pallas.routing calls it
    for biases that a product adds."""
    wide = reference.tiled(drows, groups).astype(jnp.float32)
    return reference.per_expert(wide.sum(1), groups).astype(bias.dtype)


_biased.defvjp(_bias_fwd, _bias_bwd)
