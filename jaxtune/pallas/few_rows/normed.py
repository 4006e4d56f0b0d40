"""`normed_products` and `normed_gated_product`: products with the RMS norm of the residual stream, to which the product
before them is added first. For a single row, whose norm takes a program less time than a kernel needs to begin and to
end, one kernel (normed_kernels.py) does what `added_norm` and `products` or `gated_product` do: each of its programs
norms the row for itself. Other calls run these two."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.few_rows import reference, triton
from jaxtune.pallas.few_rows.api import added_norm, gated_product, products
from jaxtune.pallas.few_rows.cases import drawn, wide
from jaxtune.pallas.quant_matmul import LoraWeights

_MOST_COLUMNS = 8192  # a program holds the whole row in registers for a while


def normed_products(
    x: jax.Array,
    parts: jax.Array,
    norm: jax.Array,
    weights: Sequence[jax.Array],
    loras: Sequence[LoraWeights | None] = (),
    *,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a product, given as partial sums, to the residual stream, and multiplies the RMS norm of the result by the
    transposes of one to three weights, such as those of query, key and value. It has no derivative.

    Args:
      x, parts, norm, eps, offset, float32: the stream, the partial sums, the norm's weight and its settings, as for
        `added_norm`.
      weights, loras: as for `products`.
      implementation: "triton" (one kernel; N of 1, at most 8,192 columns, no adapters, and what `products` needs, for
        weights of enough rows to occupy the GPU without splits), "apart" (`added_norm` and `products`, each by the
        implementation that it chooses), or None for the first that supports the call.
    Returns:
      (the partial sums that `products` returns, x plus the product [N, hidden] in x's dtype)
    Raises:
      TypeError, ValueError: an argument does not fit this description, or the named implementation does not support the
        call.
    """
    options: dict = dict(eps=eps, offset=offset, float32=float32)
    given = x, parts, norm, weights, loras, None, options
    if _chosen("normed_products", *given, implementation) == "triton":
        out, added = _by_kernel(x, parts, norm, weights, None, _tile(x, weights, None), **options)
        return out[None], added
    added, normed = added_norm(x, parts, norm, **options)
    return products(normed, weights, loras), added


def normed_gated_product(
    x: jax.Array,
    parts: jax.Array,
    norm: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    activation: str,
    loras: Sequence[LoraWeights | None] = (),
    *,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a product, given as partial sums, to the residual stream, and computes from the RMS norm of the result the
    part of a gated MLP before the down projection. It has no derivative.

    Args:
      x, parts, norm, eps, offset, float32: the stream, the partial sums, the norm's weight and its settings, as for
        `added_norm`.
      gate, up, activation, loras: as for `gated_product`.
      implementation: "triton", "apart" (`added_norm` and `gated_product`) or None, as for `normed_products`.
    Returns:
      (what `gated_product` returns, x plus the product [N, hidden] in x's dtype)
    Raises:
      TypeError, ValueError: an argument does not fit this description, or the named implementation does not support the
        call.
    """
    options: dict = dict(eps=eps, offset=offset, float32=float32)
    matrices = gate, up
    given = x, parts, norm, matrices, loras, activation, options
    if _chosen("normed_gated_product", *given, implementation) == "triton":
        return _by_kernel(x, parts, norm, matrices, activation, _tile(x, matrices, activation), **options)
    added, normed = added_norm(x, parts, norm, **options)
    return gated_product(normed, gate, up, activation, loras), added


def _chosen(op: str, x, parts, norm, weights, loras, activation: str | None, options: dict, implementation) -> str:
    """Chooses between "triton" and "apart" for a call of `op`, "normed_products" or "normed_gated_product", whose
    arguments the others are; options: the norm's settings. activation: None for the former. Raises what they raise."""
    check = Arguments(op)
    check.array("x", x, "N in", FLOATS)
    check.array("parts", parts, "splits N in", FLOATS)
    check.array("norm", norm, "in", FLOATS)
    for index, weight in enumerate(weights):
        check.array(f"weights[{index}]", weight, f"out_{index} in", x.dtype)
    reason = _refusal(x, weights, loras, activation)
    if reason is not None and implementation is None:
        implementation = "apart"  # whose two parts say why they have no kernel, if they have none
    reasons = {"triton": lambda: reason or _first_use(op, x, norm, weights, activation, options), "apart": lambda: None}
    return dispatch.choose(op, reasons, implementation)


def _refusal(x, weights, loras, activation: str | None) -> str | None:
    """The reason why the kernel does not support a call on this GPU, or None. Arguments as for `_chosen`."""
    reason = triton.products_refusal(x, weights, loras, 1)
    if reason is None and activation is not None:
        reason = triton.gated_refusal(x, weights, loras, activation)
    if reason is not None:
        return reason
    if triton.padded_rank(loras):
        return "adapters"
    if x.shape[1] > _MOST_COLUMNS:
        return f"{x.shape[1]} columns; up to {_MOST_COLUMNS}"
    programs, enough = _width(weights, activation) // _tile(x, weights, activation).rows, triton.ENOUGH
    return None if programs >= enough else f"{programs} programs; at least {enough}, or the columns are divided"


def _tile(x, weights, activation: str | None) -> triton.Tile:
    """How the products are divided among programs: as without the norm. Arguments as for `_chosen`."""
    if activation is None:
        return triton.product_tile(x, weights, ())
    return triton.gated_tile(weights[0].shape[0], len(x), ())


def _width(weights, activation: str | None) -> int:
    """The columns of the result. Arguments as for `_chosen`."""
    return sum(weight.shape[0] for weight in weights) if activation is None else weights[0].shape[0]


def _first_use(op: str, x, norm, weights, activation: str | None, options: dict) -> str | None:
    """The reason why this GPU must not run the kernel for such calls, or None: it compares a small case with the
    reference, once for each kind of call. Arguments as for `_chosen`."""
    tile = _tile(x, weights, activation)

    def compare():
        rows = (tile.rows,) * 2 if activation else (tile.rows, 2 * tile.rows, tile.rows)[: len(weights)]
        stream, parts = drawn(0, 1, 2048, dtype=x.dtype), drawn(1, 2, 1, 2048, dtype=jnp.float32)
        matrices = [0.02 * drawn(3 + i, size, 2048, dtype=x.dtype) for i, size in enumerate(rows)]
        given = stream, parts, drawn(2, 2048, dtype=norm.dtype), matrices

        def wanted(x, parts, norm, matrices):
            added, normed = reference.added_norm(x, parts, norm, **options)
            if activation:
                return reference.gated_product(normed, matrices[0], matrices[1], activation), added
            return reference.products(normed, matrices)[0], added

        got = jax.jit(functools.partial(_by_kernel, activation=activation, tile=tile, **options))(*given)
        return list(got), list(dispatch.exactly(wanted)(*wide(given)))

    call = f"{x.dtype}, {norm.dtype}, {activation}, {len(weights)} weights, {tile}, {options}"
    return dispatch.first_use(op, "triton", call, compare)


def _by_kernel(x, parts, norm, weights, activation: str | None, tile: triton.Tile, *, eps, offset, float32):
    """Runs the kernel: ([1, sum of out_i] or with an activation [1, out], the stream [1, hidden]), in x's dtype. tile:
    how the products are divided among programs. The other arguments are those of the two functions."""
    from jaxtune.pallas.few_rows import normed_kernels

    inner, padding = x.shape[1], 3 - len(weights)
    sizes = [*(weight.shape[0] for weight in weights), *(0,) * padding]
    before = (parts,) if len(parts) else ()
    added, out = compat.triton_graph_call(
        normed_kernels.normed_product_kernel,
        (x, *before, norm, *weights, *(weights[0],) * padding),
        [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, _width(weights, activation)), x.dtype)],
        (_width(weights, activation) // tile.rows,),
        warps=tile.warps,
        stages=tile.stages,
        **({} if before else {"parts": None}),
        INNER=inner,
        WIDTH=1 << (inner - 1).bit_length(),
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=triton.padded(1),
        PARTS=len(parts),
        ACTIVATION=triton.ACTIVATIONS[activation] if activation else 0,
        STAGES=tile.stages,
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
    )
    return out, added
