"""Products of rows sorted by expert with the experts' weights: the public functions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import mosaic, reference
from jaxtune.pallas.grouped_matmul.layout import Groups
from jaxtune.pallas.quant_matmul import FourBit, decoded

_PRODUCTS = {"mosaic": mosaic.product, "reference": reference.product}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedLora:
    """A low-rank addition to each expert's weight.

    Attributes:
      a: [E, r, in], b: [E, out, r]; cast to x's dtype on use.
      scale: alpha / r, or alpha / sqrt(r) for rsLoRA.
    """

    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class _Static:
    transposed: bool
    scale: float
    implementation: str


def implementations(dtype, in_size: int, out_size: int, groups: Groups) -> dispatch.Table:
    """The implementations of a call in the order in which they are tried, each with why it refuses it."""
    return {
        "mosaic": functools.partial(mosaic.refusal, dtype, in_size, out_size, groups.tile_rows),
        "reference": lambda: None,
    }


def _scaled(rows, scale):
    return rows if scale == 1.0 else (rows * scale).astype(rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x, weight, lora, groups, static: _Static):
    return _grouped_fwd(x, weight, lora, groups, static)[0]


def _grouped_fwd(x, weight, lora, groups, static: _Static):
    product = _PRODUCTS[static.implementation]
    contract = 1 if static.transposed else 2
    inner = extra = None
    if lora is not None:
        a, b = lora
        inner = reference.thin(x, a, groups, 2)
        extra = (_scaled(inner, static.scale), b.mT if static.transposed else b)
    array, tied = decoded(weight, x)
    out = product(tied, array.astype(x.dtype), groups, contract, extra)
    return out, (x, weight, lora, groups, inner)


def _grouped_bwd(static: _Static, residuals, dout):
    product = _PRODUCTS[static.implementation]
    x, weight, lora, groups, inner = residuals
    contract = 2 if static.transposed else 1
    extra = dlora = None
    if lora is not None:
        a, b = lora
        dinner = _scaled(reference.thin(dout, b, groups, 1), static.scale)
        extra = (dinner, a.mT if static.transposed else a)
        da = reference.contract_rows(dinner, x, groups, a.dtype)
        db = reference.contract_rows(dout, _scaled(inner, static.scale), groups, b.dtype)
        dlora = (da, db)
    array, tied = decoded(weight, dout)
    dx = product(tied, array.astype(dout.dtype), groups, contract, extra)
    # Dead code, which costs nothing, wherever the weight is frozen; weights in four bits have no gradient.
    dweight = None
    if not isinstance(weight, FourBit):
        sides = (x, dout) if static.transposed else (dout, x)
        dweight = reference.contract_rows(*sides, groups, weight.dtype)
    return dx, dweight, dlora, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | FourBit,
    groups: Groups,
    lora: GroupedLora | None = None,
    *,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each expert's rows by its weight, and by its adapter.

    Rows that hold nothing must be zero, and come out zero; see permute. Differentiable by x, a weight that is an array,
    and the adapter.

    Args:
      x: [rows, in], sorted as `groups` says; the compute dtype. Weights in another dtype are cast to it.
      weight: [E, out, in], or [E, in, out] if `transposed`; an array or in four bits (decoded for each product).
      implementation: "mosaic", "reference", or None for the first that supports the call.
    Returns:
      [rows, out] in x's dtype.
    """
    if weight.ndim != 3 or weight.shape[0] != groups.num_experts:
        raise ValueError(f"grouped_matmul: weight {weight.shape}; want [E, ., .] of {groups.num_experts} experts")
    in_size, out_size = weight.shape[1:] if transposed else weight.shape[:0:-1]
    if x.shape != (groups.rows, in_size):
        raise ValueError(f"grouped_matmul: x {x.shape} does not fit weight {weight.shape} and {groups.rows} rows")
    table = implementations(x.dtype, in_size, out_size, groups)
    static = _Static(
        transposed, 1.0 if lora is None else lora.scale, dispatch.choose("grouped_matmul", table, implementation)
    )
    return _grouped(x, weight, None if lora is None else (lora.a, lora.b), groups, static)


@jax.custom_vjp
def grouped_bias(rows: jax.Array, bias: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    """rows [rows, out] + weights [rows] times the bias of each row's expert, bias [E, out]; in rows' dtype."""
    added = weights.reshape(groups.tiles, -1, 1) * reference.per_tile(bias, groups)[:, None].astype(jnp.float32)
    return (reference.tiled(rows, groups) + added).reshape(rows.shape).astype(rows.dtype)


def _bias_fwd(rows, bias, weights, groups):
    return grouped_bias(rows, bias, weights, groups), (bias, weights, groups)


def _bias_bwd(residuals, drows):
    bias, weights, groups = residuals
    wide = reference.tiled(drows, groups).astype(jnp.float32)
    dbias = reference.per_expert((wide * weights.reshape(groups.tiles, -1, 1)).sum(1), groups).astype(bias.dtype)
    dweights = (wide * reference.per_tile(bias, groups)[:, None].astype(jnp.float32)).sum(2).reshape(weights.shape)
    return drows, dbias, dweights.astype(weights.dtype), None


grouped_bias.defvjp(_bias_fwd, _bias_bwd)
