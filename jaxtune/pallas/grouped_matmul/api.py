"""Products of rows sorted by expert with the experts' weights, and their adapters and biases: the public functions,
with derivatives, and the choice of their implementation."""

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
    triton,
)
from jaxtune.pallas.grouped_matmul.layout import Groups
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
_MOSAIC = ("mosaic", _AHEAD)  # their kernels also multiply by an adapter's A and B, and compute the adapters' gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedLora:
    """A low-rank addition to each expert's weight [E, out, in], scale * b a, which is not added to the weight: rows are
    multiplied by `a` and the result, of r columns, by `b`."""

    a: jax.Array  # [E, r, in]; cast to x's dtype on use
    b: jax.Array  # [E, out, r]; cast to x's dtype on use
    # alpha / r, or alpha / sqrt(r) for rsLoRA
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class Static:
    """The static settings of a call of grouped_matmul, which `prepared` makes. They are hashable, because the functions
    with a custom derivative take them as a static argument."""

    transposed: bool  # weights are [E, in, out]
    scale: float  # the adapter's
    implementation: str  # the name of the implementation that multiplies
    adapter_first: bool  # the backward computes the adapter's gradients before the gradient of x
    # for a weight that is multiplied as it is stored, the requested implementation, in a tuple of one
    fp8: tuple[str | None, ...] = ()


def implementations(
    dtype, in_size: int, out_size: int, groups: Groups, weight=None, implementation: str | None = None
) -> dispatch.Table:
    """The implementations of a call in the order in which they are tried, each with a function that returns why it
    refuses it.

    Args:
      dtype: of x.
      in_size, out_size: columns and rows of an expert's weight, [out, in].
      groups: the experts of the sorted rows; only the size of its tiles is used.
      weight: the weight if it is in four bits; None for an array.
      implementation: the name that the caller requests, or None.
    """

    def mosaic_refusal():
        return mosaic.refusal(dtype, in_size, out_size, groups.tile_rows)

    def ahead_refusal():
        if weight is None:
            return "no weight in four bits"
        reason = mosaic_refusal() or mosaic_ahead.refusal(weight)
        return reason or first_use.refusal(_AHEAD, mosaic.product, weight)

    # On several devices it is used only if asked for: it is not proved that it cannot hang beside NCCL's kernels.
    if jax.sharding.get_abstract_mesh().size > 1:
        ahead_refusal = dispatch.on_request(_AHEAD, implementation, mosaic_ahead.NOT_PROVED, ahead_refusal)

    def triton_refusal():
        return triton.refusal(dtype, groups.tile_rows) or first_use.refusal("triton", triton.product, None)

    table = {
        _AHEAD: ahead_refusal,
        "mosaic": mosaic_refusal,
        "triton": triton_refusal,
        "reference": lambda: None,
    }
    if weight is None and implementation != _AHEAD:
        del table[_AHEAD]
    return table


def gathers(implementation: str) -> bool:
    """Whether an implementation's products gather tokens' rows themselves while they multiply, so that `forward` and
    `backward` may be given `tokens`, and no sorted copy of the tokens is made."""
    return implementation == "mosaic" and first_use.refusal("mosaic", mosaic.product, None, gathering=True) is None


def _product(x, weight, groups, contract, extra, static: Static, tokens):
    """The product of sorted rows with a weight, which is decoded once x is computed and not earlier, or multiplied as
    it is stored.

    Args:
      x: [rows, K], or [T, K] with `tokens`.
      weight: [E, ., .], an array or quantised.
      groups: the experts of the sorted rows.
      contract: the axis of the weight that is summed over, 1 or 2.
      extra: the adapter's two operands (reference.product), or None.
      static: the settings of the call, which name the implementation.
      tokens: int32[rows], the row of x for each sorted row; None: x is sorted.
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
    """The product of sorted rows (or of x [T, K] at `tokens`) with an adapter's A or B (`weight`), in x's dtype:
    [rows, n] for A or B [E, n, K] (contract = 2) or [E, K, n] (contract = 1). groups: the experts of the sorted rows.
    If `implementation` is a Mosaic one, its kernel computes it, and n is padded with zero columns to a multiple of 64,
    as the kernel's next product wants it."""
    if implementation in _MOSAIC:
        return mosaic.thin(x, weight, groups, contract, tokens)
    return reference.thin(x, weight, groups, contract)


def _contracted(thin, wide, groups, rank, implementation, tokens):
    """The gradient of an adapter's A, or of B transposed: float32[E, rank, n], thin^T wide summed over the rows of each
    expert, by the Mosaic kernel if `implementation` is one and the GPU passes its check, else by the reference.

    Args:
      thin: [rows, at least rank]; columns from `rank` on are padding.
      wide: [rows, n], or [T, n] with `tokens`.
      groups: the experts of the sorted rows.
      rank: the adapter's.
      implementation: that of the call.
      tokens: int32[rows], the row of `wide` for each sorted row; None: `wide` is sorted.
    """
    if implementation in _MOSAIC and mosaic_contract.refusal(wide.dtype) is None:
        return mosaic_contract.contract_rows(thin, wide, groups, rank, tokens)
    sums = mosaic_sums.per_expert if implementation in _MOSAIC else reference.per_expert
    return reference.contract_rows(thin[:, :rank], reference.rows_of(wide, tokens), groups, jnp.float32, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, weight, lora, groups, static: Static):
    """grouped_matmul with a custom derivative, of x, weight, lora ((a, b) or None), groups and static as `prepared`
    returns them: [rows, out]."""
    return forward(x, weight, lora, groups, static)[0]


def forward(x, weight, lora, groups, static: Static, tokens=None):
    """The product with its residuals, of arguments in the form in which `prepared` returns them: (out [rows, out],
    residuals for `backward`). The residuals are (x, weight, lora, groups, inner), inner being x times the adapter's A,
    or None without an adapter. static: the settings of the call.

    jaxtune.pallas.routing calls it for rows that are gathered from tokens: `tokens` is then int32[rows], the row of x
    [T, in] for each sorted row, T for an empty one; the implementation must be one that `gathers`. lora: (a, b) or
    None.
    """
    contract = 1 if static.transposed else 2
    inner = extra = None
    if lora is not None:
        a, b = lora
        inner = _thin(x, a, groups, 2, static.implementation, tokens)
        extra = (scaled(inner, static.scale), b.mT if static.transposed else b)
    out = _product(x, weight, groups, contract, extra, static, tokens)
    return out, (x, weight, lora, groups, inner)


def backward(static: Static, residuals, dout, x_tokens=None, dout_tokens=None):
    """The gradients of `forward`: (that of the sorted rows [rows, in], that of the weight or None if it is quantised,
    those of (a, b) or None without an adapter).

    Args:
      static: the settings of the call, as in the forward.
      residuals: from `forward`.
      dout: the gradient of its result, [rows, out], or [T, out] with `dout_tokens`.
      x_tokens: int32[rows], the row of the residuals' x [T, in] for each sorted row; None: x is sorted.
      dout_tokens: int32[rows], the row of dout for each sorted row, for an implementation that `gathers`; None: dout is
        sorted.
    """
    x, weight, lora, groups, inner = residuals
    contract = 2 if static.transposed else 1
    extra = dlora = None
    if lora is not None:
        a, b = lora
        dinner = scaled(_thin(dout, b, groups, 1, static.implementation, dout_tokens), static.scale)
        extra = (dinner, a.mT if static.transposed else a)
        da = _contracted(dinner, x, groups, a.shape[1], static.implementation, x_tokens)
        db = _contracted(scaled(inner, static.scale), dout, groups, a.shape[1], static.implementation, dout_tokens)
        # Without this XLA would keep db and its sums until the end of the program, where each is copied.
        db = with_layout_constraint(db.mT, Layout(major_to_minor=(0, 1, 2)))
        dlora = (da.astype(a.dtype), db.astype(b.dtype))
        if static.adapter_first:
            dlora, dout = jax.lax.optimization_barrier((dlora, dout))
    dx = _product(dout, weight, groups, contract, extra, static, dout_tokens)
    # XLA removes this if the weight is frozen; weights in four bits have no gradient.
    dweight = None
    if not isinstance(weight, Stored):
        rows, drows = reference.rows_of(x, x_tokens), reference.rows_of(dout, dout_tokens)
        dweight = reference.contract_rows(
            *((rows, drows) if static.transposed else (drows, rows)), groups, weight.dtype
        )
    return dx, dweight, dlora


def _grouped_fwd(x, weight, lora, groups, static):
    """The forward rule of `_grouped`, with its arguments x, weight, lora, groups and static: (out [rows, out],
    residuals), both from `forward`."""
    return forward(x, weight, lora, groups, static)


def _grouped_bwd(static, residuals, dout):
    """The backward rule of `_grouped`, from its static argument, the residuals and dout [rows, out]: (gradient of the
    rows, of the weight or None if it is quantised, of the adapter's (a, b) or None, None for the groups)."""
    return *backward(static, residuals, dout), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def check_groups(check: Arguments, groups: Groups, name: str = "groups") -> None:
    """Checks the class, dtypes and shapes of a layout of sorted rows; check: the checker of the call (Arguments);
    `name` is the argument's, for messages.

    Raises:
      TypeError, ValueError: `groups` is not as `Groups` describes it.
    """
    check.is_a(name, groups, Groups, "a Groups: that of a Routing, as route makes")
    for part, shape in (("tile_expert", "tiles"), ("count", ""), ("tile_sizes", "tiles"), ("sizes", "E")):
        check.array(f"{name}.{part}", getattr(groups, part), shape, jnp.int32)


def checked(op: str, name: str, x, shape: str, weight, groups: Groups, lora, transposed: bool, routing=None) -> None:
    """Checks the arguments of a product that takes sorted rows or tokens: grouped_matmul, and routing's
    matmul_of_tokens and matmul_to_tokens.

    Args:
      op: the operation, for messages.
      name, shape: the name of x and its shape in words, such as "rows in" or "T in" (Arguments.array).
      x, weight, groups, lora, transposed: the arguments, which must be as grouped_matmul describes them.
      routing: the Routing that has the groups, if the caller was given one; None if it was given the groups.
    Raises:
      TypeError, ValueError: an argument is not as described there.
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


def prepared(
    x,
    weight,
    groups: Groups,
    lora: GroupedLora | None,
    transposed: bool,
    derivative_follows: bool,
    fp8: bool,
    implementation: str | None,
):
    """(x, weight, (a, b) or None, static) in the form that `forward` takes, with the implementation chosen. The
    arguments x, weight, groups, lora, transposed, derivative_follows, fp8 and implementation are grouped_matmul's. If
    derivative_follows, a weight that has to be decoded is decoded here, once for the forward and the gradient of x."""
    in_size, out_size = weight.shape[1:] if transposed else weight.shape[:0:-1]
    as_stored = fp8 and isinstance(weight, Stored) and weight.compute in AS_STORED
    packed = weight if isinstance(weight, Stored) and not as_stored else None
    table = implementations(x.dtype, in_size, out_size, groups, packed, implementation)
    name = dispatch.choose("grouped_matmul", table, implementation)
    asked = (implementation,) if as_stored else ()
    static = Static(transposed, 1.0 if lora is None else lora.scale, name, derivative_follows, asked)
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
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each expert's rows by its weight, and adds its adapter's product.

    Empty rows must be zero, and their results are zero; see permute. Differentiable with respect to x, a weight that is
    an array, and the adapter.

    Args:
      x: [rows, in] bfloat16, float16 or float32, sorted as `groups` says; its dtype is the compute dtype, to which
        other weights are cast.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array, or in four bits as from
        `formats.NF4.encode(array)` or `MXFP4` (decoded for each product, by "mosaic_ahead" while it multiplies).
      groups: `routing.route(choice, E).groups`.
      lora: the adapter, or None.
      derivative_follows: the derivative is computed soon, and x has no other use. A weight that has to be decoded is
        then decoded once for both, and the adapter's gradients are computed before x's, so that x can be freed.
      fp8: a weight in FP8 is multiplied as it is stored, in the forward and for the gradient of x: rows are
        rounded to e4m3 (fp8_experts.py). Adapters multiply x unrounded.
      implementation: "mosaic", "mosaic_ahead", "triton", "reference", or None for the first that supports the call.
    Returns:
      [rows, out] in x's dtype.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    checked("grouped_matmul", "x", x, "rows in", weight, groups, lora, transposed)
    x, weight, sides, static = prepared(x, weight, groups, lora, transposed, derivative_follows, fp8, implementation)
    return _grouped(x, weight, sides, groups, static)


@meshes.on_any_mesh
def grouped_bias(rows: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """rows [rows, out] plus the bias of each row's expert, bias [E, out]; in rows' dtype. groups: which expert each
    row belongs to.

    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("grouped_bias")
    check_groups(check, groups)
    check.sizes["rows"] = (groups.rows, " (of the groups' tiles)")
    check.array("rows", rows, "rows out", FLOATS)
    check.array("bias", bias, "E out", FLOATS)
    return _biased(rows, bias, groups)


@jax.custom_vjp
def _biased(rows, bias, groups):
    """grouped_bias of rows, bias and groups with a custom derivative, in which the bias's gradient is summed over an
    expert's rows in a fixed order: [rows, out] in rows' dtype."""
    added = reference.per_tile(bias, groups)[:, None].astype(jnp.float32)
    return (reference.tiled(rows, groups).astype(jnp.float32) + added).reshape(rows.shape).astype(rows.dtype)


def _bias_fwd(rows, bias, groups):
    """The forward rule of `_biased`: (the rows plus biases [rows, out], the residuals (bias, groups))."""
    return _biased(rows, bias, groups), (bias, groups)


def _bias_bwd(residuals, drows):
    """The backward rule of `_biased`, from its residuals (bias, groups): (the gradient of rows, which is drows [rows,
    out] itself; that of the bias [E, out], its sums over each expert's rows; None for the groups)."""
    bias, groups = residuals
    wide = reference.tiled(drows, groups).astype(jnp.float32)
    return drows, reference.per_expert(wide.sum(1), groups).astype(bias.dtype), None


_biased.defvjp(_bias_fwd, _bias_bwd)
