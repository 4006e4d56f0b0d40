"""Operations of a decoding step in plain JAX, which define the kernels' results."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import one_order
from jaxtune.pallas.decode.attention.cache import as_cached, written
from jaxtune.pallas.decode.few_rows.shards import unsharded
from jaxtune.pallas.gated import ACTIVATIONS, activated
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.quant_matmul import quant_matmul
from jaxtune.pallas.quant_matmul.fp8_few import Coded
from jaxtune.pallas.quant_matmul.reference import scaled


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("ni,oi->no", x, weight, precision=precision, preferred_element_type=x.dtype)


def each_product(x, weights, loras):
    """[N, out_i] in x's dtype for each weight, with its adapter."""
    if one_order.is_exact() or any(lora is not None for lora in loras):
        loras = loras or [None] * len(weights)
        return list(quant_matmul(x, weights, loras, implementation="reference"))
    return [_product(x, weight) for weight in weights]


def products(x, weights, loras=(), splits: int = 1):
    """[1, N, sum of out_i] in x's dtype; with `splits`, for one weight without an adapter, float32[splits, N, out]."""
    x = x if x.ndim == 2 else unsharded(x)
    if splits == 1:
        return jnp.concatenate(each_product(x, weights, loras), axis=-1)[None]
    (weight,) = weights
    ranges = (array.reshape(len(array), splits, -1) for array in (x, weight))
    return jnp.einsum("nsi,osi->sno", *ranges, preferred_element_type=jnp.float32)


def gated_product(x, gate, up, activation, loras=()):
    """As api.gated_product."""
    gate, up = each_product(x, (gate, up), loras)
    return activated(gate, up, activation)


def _of_experts(rows, matrices, choice, lora, dtype):
    """Rows times their experts' transposed matrices: [N, k, out] in `dtype`, zeros for no expert.

    rows: [N, k, in], or [N, 1, in] if a token's k experts share a row; matrices: [E, out, in]; choice: int32[N, k].
    """
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def product(rows, matrix):
        matrix = matrix.astype(rows.dtype)
        return jnp.einsum("nki,oi->nko", rows, matrix, precision=precision, preferred_element_type=jnp.float32)

    def add(total, numbered):
        expert, matrix, adapter = numbered
        out = product(rows, matrix)
        if adapter is not None:
            out += product(scaled(product(rows, adapter.a).astype(rows.dtype), adapter.scale), adapter.b)
        return jnp.where((choice == expert)[:, :, None], out.astype(dtype), total), None

    numbered = jnp.arange(len(matrices), dtype=jnp.int32), matrices, lora
    return jax.lax.scan(add, jnp.zeros((*choice.shape, matrices.shape[1]), dtype), numbered)[0]


def experts_gated(x, gate_up, choice, weights, activation, lora):
    """As experts.experts_gated."""
    gate, up = jnp.split(_of_experts(x[:, None], gate_up, choice, lora, x.dtype).astype(jnp.float32), 2, axis=-1)
    out = ACTIVATIONS[activation](gate) * up * weights[:, :, None]
    return out.astype(x.dtype).reshape(choice.size, -1)


def experts_down(h, down, choice, lora):
    """As experts.experts_down."""
    rows = h.reshape(*choice.shape, -1)
    return _of_experts(rows, down, choice, lora, h.dtype if one_order.is_exact() else jnp.float32).swapaxes(0, 1)


def _sum(partial_sums, dtype):
    """Adds partial sums [splits, ...] in ascending order, as the kernels do."""
    total = partial_sums[0]
    for partial_sum in partial_sums[1:]:
        total = total + partial_sum
    return total.astype(dtype)


def added_norm(x, partial_sums, weight, blocks=None, *, eps, offset, float32):
    """As api.added_norm, or with `blocks` as api.added_norm_coded."""
    sums = _sum(partial_sums, x.dtype)
    added = x + (sums if sums.ndim == 2 else unsharded(sums))
    out = normed(added, weight, eps, offset, float32)
    return (added, out) if blocks is None else (added, out, Coded.of(out, blocks))


def placed(partial_sums, keys, values, positions, table, norms, dtype=None, *, eps, offset, float32):
    """As api.placed."""
    kv_heads, dim, rows = keys.shape[1], keys.shape[3], partial_sums.shape[1]
    heads = partial_sums.shape[2] // dim - 2 * kv_heads
    projected = _sum(partial_sums, dtype or keys.dtype).reshape(rows, -1, dim)
    query, key, value = jnp.split(projected, (heads, heads + kv_heads), axis=1)
    if norms is not None:
        query, key = (
            normed(array, weight, eps, offset, float32) for array, weight in zip((query, key), norms, strict=True)
        )
    if table is not None:
        cos, sin = (angles[:, None, :] for angles in table)

        def rotated(array):
            low, high = jnp.split(array.astype(jnp.float32), 2, axis=-1)
            return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(array.dtype)

        query, key = rotated(query), rotated(key)
    key, value = as_cached(key, keys.dtype), as_cached(value, values.dtype)
    return query, written(keys, key, positions), written(values, value, positions)
