"""The public functions of decoding steps, and the choice of their implementations.

A decoding step of some dozen rows is bound by the bytes of the weights, and next by the number of its kernels: each
costs some microseconds whatever it computes. These operations are the pieces of a layer that are one kernel each. They
pass partial sums on: products whose columns are divided among programs are added up by the operation that reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.few_rows import reference, triton

IMPLEMENTATIONS = {"triton": triton, "reference": reference}


def _chosen(op: str, refusal, first_use, implementation: str | None) -> str:
    """The name of the implementation that runs a call: "triton" if `refusal` and then `first_use` give no reason
    against it, else "reference".

    Args:
      op: the operation, for messages.
      refusal: a function without arguments that returns why the kernel cannot serve the call, or None.
      first_use: one that compares the kernel with the reference on this GPU, and returns why it must not run, or
        None.
      implementation: the name that the caller requests, which raises ValueError if it cannot serve the call; None:
        the first that can.
    """
    return dispatch.choose(op, {"triton": lambda: refusal() or first_use(), "reference": lambda: None}, implementation)


def _chosen_product(op: str, x, refusal, first_use, implementation: str | None) -> str:
    """As `_chosen`, whose other arguments (op, refusal, first_use, implementation) it has, for a product with x [N,
    in]. For other numbers of rows than the kernel's the vendor's product is right, so the reference is taken at once,
    and dispatch has nothing to warn of."""
    few = triton.LEAST_ROWS <= x.shape[0] <= triton.MOST_ROWS
    return _chosen(op, refusal, first_use, implementation if few or implementation else "reference")


def _drawn(seed: int, *shape: int, dtype) -> jax.Array:
    """An array of this shape and dtype of normal numbers, drawn by `seed`, as an operand of a check at first use."""
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _wide(arrays):
    """A pytree of arrays with its floating-point ones in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays)


def products(x: jax.Array, weights: Sequence[jax.Array], *, implementation: str | None = None) -> jax.Array:
    """Multiplies a few rows by one to three weights that share them.

    Args:
      x: [N, in].
      weights: each [out_i, in], in x's dtype.
      implementation: "triton", "reference", or None for the first that supports the call.
    Returns:
      partial sums [splits, N, sum of out_i], float32, or with one split the products in x's dtype. Their sum over the
      splits, rounded to x's dtype, is the products side by side.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("products")
    check.array("x", x, "N in", FLOATS)
    for index, weight in enumerate(weights):
        check.array(f"weights[{index}]", weight, f"out_{index} in", x.dtype)

    def compare():
        given = _drawn(0, 8, 2048, dtype=x.dtype), [_drawn(i, 64 * i, 2048, dtype=x.dtype) for i in (1, 2, 1)]
        return [jax.jit(triton.products)(*given).sum(0)], [dispatch.exactly(reference.products)(*_wide(given))[0]]

    def first_use():
        return dispatch.first_use("products", "triton", f"{x.dtype}, {triton.padded(len(x))} rows", compare)

    chosen = _chosen_product("products", x, lambda: triton.products_refusal(x, weights), first_use, implementation)
    return IMPLEMENTATIONS[chosen].products(x, weights)


def gated_product(
    x: jax.Array, gate: jax.Array, up: jax.Array, activation: str, *, implementation: str | None = None
) -> jax.Array:
    """activation(x gate^T) * (x up^T) for a few rows: the first half of a gated MLP.

    Args:
      x: [N, in].
      gate, up: [out, in], in x's dtype.
      activation: a key of gated.ACTIVATIONS. Its argument, its result and x up^T are rounded to x's dtype.
      implementation: as in `products`.
    Returns:
      [N, out] in x's dtype.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("gated_product")
    check.array("x", x, "N in", FLOATS)
    check.array("gate", gate, "out in", x.dtype)
    check.array("up", up, "out in", x.dtype)

    def compare():
        given = _drawn(0, 8, 2048, dtype=x.dtype), *(0.02 * _drawn(i, 128, 2048, dtype=x.dtype) for i in (1, 2))
        got, want = (functools.partial(each.gated_product, activation=activation) for each in (triton, reference))
        return [jax.jit(got)(*given)], [dispatch.exactly(want)(*_wide(given))]

    def first_use():
        call = f"{x.dtype}, {activation}, {triton.padded(len(x))} rows"
        return dispatch.first_use("gated_product", "triton", call, compare)

    def refusal():
        return triton.gated_refusal(x, (gate, up), activation)

    chosen = _chosen_product("gated_product", x, refusal, first_use, implementation)
    return IMPLEMENTATIONS[chosen].gated_product(x, gate, up, activation)


def added_norm(
    x: jax.Array,
    parts: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds a product to the residual stream, and norms the result for the next part.

    Args:
      x: [N, hidden], the residual stream.
      parts: [splits, N, hidden], the partial sums of a product, as `products` gives them.
      weight: [hidden], of the RMS norm.
      eps: added to the mean square.
      offset: added to the weight.
      float32: whether the product with the weight is rounded only once, as models.norm.RMSNorm describes.
      implementation: as in `products`.
    Returns:
      (x plus the product, its norm), both [N, hidden] in x's dtype.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("added_norm")
    check.array("x", x, "N hidden", FLOATS)
    check.array("parts", parts, "splits N hidden", FLOATS)
    check.array("weight", weight, "hidden", FLOATS)
    options = dict(eps=eps, offset=offset, float32=float32)

    def compare():
        given = _drawn(0, 5, 768, dtype=x.dtype), _drawn(1, 3, 5, 768, dtype=jnp.float32), _drawn(2, 768, dtype=x.dtype)
        got, want = (functools.partial(each.added_norm, **options) for each in (triton, reference))
        return list(jax.jit(got)(*given)), list(dispatch.exactly(want)(*_wide(given)))

    def first_use():
        return dispatch.first_use("added_norm", "triton", f"{x.dtype}, {options}", compare)

    chosen = _chosen("added_norm", lambda: triton.added_norm_refusal(x), first_use, implementation)
    return IMPLEMENTATIONS[chosen].added_norm(x, parts, weight, **options)


def placed(
    parts: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    table: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms and rotates the heads of one new token a row, and writes its keys and values into the caches.

    Args:
      parts: [splits, N, (heads + 2 kv_heads) D], the partial sums of query, key and value side by side, as `products`
        gives them.
      keys, values: the caches, [N, kv_heads, capacity, D] (decode_attention/cache.py).
      positions: int32[N], of the tokens in their rows; a negative one is not written, and its query means nothing.
      table: (cos, sin) of the positions, float32[N, D / 2], by which the halves of queries and keys are rotated; None:
        they are not.
      norms: the weights [D] of the RMS norms of each head's query and key before the rotation; None: no norms.
      eps, offset, float32: of these norms, as in `added_norm`.
      implementation: as in `products`.
    Returns:
      (query [N, heads, D] in the caches' dtype, keys, values): the caches are not copied if they are donated or not
      read again.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("placed")
    check.array("parts", parts, "splits N width", FLOATS)
    check.array("keys", keys, "N kv_heads capacity D", FLOATS)
    check.array("values", values, "N kv_heads capacity D", keys.dtype)
    check.array("positions", positions, "N", INTEGERS)
    for name, given, shape in (("table", table, "N half"), ("norms", norms, "D")):
        for index, array in enumerate(given or ()):
            check.array(f"{name}[{index}]", array, shape, FLOATS)
    positions = jnp.asarray(positions, jnp.int32)
    options = dict(eps=eps, offset=offset, float32=float32)
    dim, dtype = keys.shape[3], keys.dtype

    def compare():
        rows = jnp.asarray([0, -1, 200, 77, 127], jnp.int32)
        caches = [_drawn(i, 5, 2, 128, dim, dtype=dtype) for i in (1, 2)]
        angles = _drawn(3, 5, dim // 2, dtype=jnp.float32)
        tables = None if table is None else (jnp.cos(angles), jnp.sin(angles))
        weights = None if norms is None else tuple(_drawn(i, dim, dtype=norms[0].dtype) for i in (4, 5))
        given = _drawn(0, 2, 5, 7 * dim, dtype=jnp.float32), *caches, rows, tables, weights
        got, want = (functools.partial(each.placed, **options) for each in (triton, reference))
        got, want = list(jax.jit(got)(*given)), list(dispatch.exactly(want)(*_wide(given)))
        live = rows[:, None, None] >= 0
        return [jnp.where(live, got[0], 0), *got[1:]], [jnp.where(live, want[0], 0), *want[1:]]

    def first_use():
        call = f"{dtype}, head dim {dim}, {options}, {table is not None}, {norms is not None}"
        return dispatch.first_use("placed", "triton", call, compare)

    chosen = _chosen("placed", lambda: triton.placed_refusal(parts, keys, table), first_use, implementation)
    return IMPLEMENTATIONS[chosen].placed(parts, keys, values, positions, table, norms, **options)
