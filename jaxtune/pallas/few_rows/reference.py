"""The operations of a decoding step in plain JAX, such as products, added_norm and placed, which define the results of
the kernels; api.py describes the arguments in more detail. They run where no kernel supports a call, and the kernels
are compared with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas.decode_attention.cache import written
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.quant_matmul import quant_matmul


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, in] times the transpose of a weight [out, in]: [N, out] in x's dtype. `each_product` multiplies by weights
    without adapters so. Numbers in float32 are multiplied in full float32, without TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("ni,oi->no", x, weight, precision=precision, preferred_element_type=x.dtype)


def each_product(x, weights, loras):
    """For `products` and `gated_product`: multiplies x [N, in] by the transpose of each of `weights`, [out_i, in], with
    its adapter. Returns a list of [N, out_i] in x's dtype. loras: the adapter of each weight or None, or empty; if
    there is one, quant_matmul's plain implementation multiplies, else einsums do."""
    if any(lora is not None for lora in loras):
        return list(quant_matmul(x, weights, loras, implementation="reference"))
    return [_product(x, weight) for weight in weights]


def products(x, weights, loras=(), splits: int = 1):
    """Multiplies x [N, in] by the transposes of all weights, each [out_i, in], with their adapters `loras`: one for
    each weight or None, or none at all. Returns the results side by side in the form of the kernel's partial sums, with
    a single split: [1, N, sum of out_i], in x's dtype. With more `splits`, for a single weight without an adapter, it
    returns the sums over as many equal ranges of the columns, float32[splits, N, out]. This plain implementation runs
    where the kernel refuses a call, and the kernel is compared with it."""
    if splits == 1:
        return jnp.concatenate(each_product(x, weights, loras), axis=-1)[None]
    (weight,) = weights
    ranges = (array.reshape(len(array), splits, -1) for array in (x, weight))
    return jnp.einsum("nsi,osi->sno", *ranges, preferred_element_type=jnp.float32)


def gated_product(x, gate, up, activation, loras=()):
    """Computes activation(x gate^T) * (x up^T), [N, out] in x's dtype, the part of a gated MLP before the down
    projection. x is [N, in], gate and up are [out, in], with the adapters `loras` (of gate and up, each may be None; or
    none at all), and activation is a key of ACTIVATIONS. This plain implementation runs where the kernel refuses a
    call, and the kernel is compared with it."""
    gate, up = each_product(x, (gate, up), loras)
    return activated(gate, up, activation)


def activated(gate, up, activation):
    """Computes activation(gate) * up, [N, out] in gate's dtype, each step rounded to it. This plain implementation runs
    where the kernel refuses a call, and the kernel is compared with it."""
    return ACTIVATIONS[activation](gate) * up


def _of_experts(rows, matrices, choice, lora, dtype):
    """Multiplies rows by the transposed matrices of their experts, expert by expert: [N, k, out] in `dtype`, and zeros
    where `choice` has no expert. rows: [N, k, in], or [N, 1, in] if all k experts of a token multiply the same row.
    matrices: [E, out, in]. choice: int32[N, k]. lora: the adapters of the matrices, or None."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def product(rows, matrix):
        matrix = matrix.astype(rows.dtype)
        return jnp.einsum("nki,oi->nko", rows, matrix, precision=precision, preferred_element_type=jnp.float32)

    def add(total, numbered):
        expert, matrix, adapter = numbered
        out = product(rows, matrix)
        if adapter is not None:
            out += product((adapter.scale * product(rows, adapter.a)).astype(rows.dtype), adapter.b)
        return jnp.where((choice == expert)[:, :, None], out.astype(dtype), total), None

    numbered = jnp.arange(len(matrices), dtype=jnp.int32), matrices, lora
    return jax.lax.scan(add, jnp.zeros((*choice.shape, matrices.shape[1]), dtype), numbered)[0]


def experts_gated(x, gate_up, choice, weights, activation, lora):
    """Computes activation(gate) * up * weight for each token and each of its experts: [N * k, inner] in x's dtype, that
    of token t and its j-th expert at t * k + j, and zeros where a choice is no expert. gate and up are rounded to x's
    dtype; what follows is float32 until it is rounded. This plain implementation runs where the kernel refuses a call,
    and the kernel is compared with it.

    Args:
      x: [N, hidden], the tokens.
      gate_up: [E, 2 * inner, hidden], the experts' matrices.
      choice: int32[N, k], each token's experts.
      weights: float32[N, k], the router's.
      activation: a key of ACTIVATIONS.
      lora: the adapters of gate_up, or None.
    """
    gate, up = jnp.split(_of_experts(x[:, None], gate_up, choice, lora, x.dtype).astype(jnp.float32), 2, axis=-1)
    out = ACTIVATIONS[activation](gate) * up * weights[:, :, None]
    return out.astype(x.dtype).reshape(choice.size, -1)


def experts_down(h, down, choice, lora):
    """Multiplies each row of h [N * k, inner] by the matrix of its expert: float32[k, N, hidden], and zeros where a
    choice is no expert. down: [E, hidden, inner], the experts' matrices. choice: int32[N, k], each token's experts; row
    t * k + j of h is that of token t and its j-th expert. lora: the adapters of down, or None. This plain
    implementation runs where the kernel refuses a call, and the kernel is compared with it."""
    rows = h.reshape(*choice.shape, -1)
    return _of_experts(rows, down, choice, lora, jnp.float32).swapaxes(0, 1)


def _sum(parts, dtype):
    """Adds the partial sums of a product, parts [splits, ...], over the splits in ascending order, as the kernels do,
    and returns the sum without that axis, rounded to `dtype`."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.astype(dtype)


def added_norm(x, parts, weight, *, eps, offset, float32):
    """Adds a product, given as partial sums, to the residual stream. Returns (the sum, its RMS norm), both [N, hidden]
    in x's dtype. This plain implementation runs where the kernel refuses a call, and the kernel is compared with it.

    Args:
      x: [N, hidden], the residual stream.
      parts: [splits, N, hidden], the partial sums of the product.
      weight: [hidden], that of the norm.
      eps: the number that the RMS norm adds to the mean square.
      offset: the number that it adds to its weight; it is ignored if float32 is False.
      float32: True: normed numbers times the weight are rounded once, to x's dtype. False: the normed numbers and the
        weight are rounded first, and the product again.
    """
    added = x + _sum(parts, x.dtype)
    return added, normed(added, weight, eps, offset, float32)


def placed(parts, keys, values, positions, table, norms, *, eps, offset, float32):
    """Norms and rotates the queries and keys of one new token in each of N sequences, and writes its keys and values
    into the caches. Returns (query [N, heads, D] in the caches' dtype, the new cache of keys, the new cache of values).
    A query at a negative position has no meaning. This plain implementation runs where the kernel refuses a call, and
    the kernel is compared with it.

    Args:
      parts: [splits, N, (heads + 2 kv_heads) D], the partial sums of query, key and value side by side.
      keys, values: the caches, [N, kv_heads, capacity, D]. A token is written at its position modulo capacity.
      positions: int32[N], the position of each new token in its sequence; for a negative one nothing is written.
      table: (cos, sin) of the rotation's angles, float32[N, D / 2]; None: no rotation.
      norms: the weights [D] of the RMS norms of the query and the key; None: no norms.
      eps: the number that the norms add to the mean square.
      offset: the number that they add to their weights; it is ignored if float32 is False.
      float32: True: normed numbers times the weight are rounded once, to the caches' dtype. False: the normed numbers
        and the weight are rounded first, and the product again.
    """
    kv_heads, dim, rows = keys.shape[1], keys.shape[3], parts.shape[1]
    heads = parts.shape[2] // dim - 2 * kv_heads
    each = _sum(parts, keys.dtype).reshape(rows, -1, dim)
    query, key, value = jnp.split(each, (heads, heads + kv_heads), axis=1)
    if norms is not None:
        query, key = (
            normed(array, weight, eps, offset, float32) for array, weight in zip((query, key), norms, strict=True)
        )
    if table is not None:
        cos, sin = (part[:, None, :] for part in table)

        def rotated(array):
            low, high = jnp.split(array.astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(array.dtype)

        query, key = rotated(query), rotated(key)
    return query, written(keys, key, positions), written(values, value, positions)
