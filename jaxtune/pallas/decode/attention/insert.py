"""Copies rows of one cache into rows of another; XLA's scatter does so at a tenth of the memory's speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, targets
from jaxtune.pallas.arguments import INTEGERS, Arguments

_BLOCK = 8192  # numbers that a program copies


def inserted(
    cache: jax.Array, staged: jax.Array, rows: jax.Array, slots: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """`cache` [N, kv_heads, capacity, D] with row rows[i] of `staged` at row slots[i], or nowhere if there is no such
    row; in place if it can be.

      staged: [R, kv_heads, its capacity, D] in the cache's dtype, of no larger capacity; a row's later entries stay.
      rows, slots: int32[G]; slots that exist all differ.
      implementation: "triton" (caches of 16 bits, or from compute capability 8.9 of e4m3), "reference", or None.
    """
    check = Arguments("inserted")
    check.array("cache", cache, "N kv_heads capacity D", str(cache.dtype))
    check.array("staged", staged, "R kv_heads room D", cache.dtype)
    check.array("rows", rows, "G", INTEGERS)
    check.array("slots", slots, "G", INTEGERS)
    if staged.shape[2] > cache.shape[2]:
        raise ValueError(f"inserted: staged has room for {staged.shape[2]} tokens, the cache for {cache.shape[2]}")

    def compare():
        shapes = ((5, 2, 256, 64), (4, 2, 128, 64))
        cache_case, staged_case = (
            jax.random.normal(jax.random.key(i), s).astype(cache.dtype) for i, s in enumerate(shapes)
        )
        operands = cache_case, staged_case, jnp.asarray([3, 0, 0], jnp.int32), jnp.asarray([1, 4, 5], jnp.int32)
        return [jax.jit(_by_kernel)(*operands)], [_by_scatter(*operands)]

    def refusal():
        if cache.dtype not in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn):
            return f"a cache of {cache.dtype}"
        if cache.dtype == jnp.float8_e4m3fn and (reason := targets.fp8_refusal()) is not None:
            return reason
        call = str(cache.dtype)
        return compat.triton_refusal() or dispatch.first_use("inserted", "triton", call, compare)

    implementation_name = dispatch.choose("inserted", {"triton": refusal, "reference": lambda: None}, implementation)
    return (_by_kernel if implementation_name == "triton" else _by_scatter)(cache, staged, rows, slots)


def _by_scatter(cache, staged, rows, slots):
    return cache.at[(slots, *map(slice, staged.shape[1:]))].set(staged[rows], mode="drop")


def _by_kernel(cache, staged, rows, slots):
    from jaxtune.pallas.decode.attention import triton_kernels

    count, kv_heads, capacity, dim = cache.shape
    staged_capacity = staged.shape[2]
    (cache,) = compat.triton_graph_call(
        triton_kernels.insert_kernel,
        (staged, jnp.asarray(rows, jnp.int32), jnp.asarray(slots, jnp.int32), cache),
        [jax.ShapeDtypeStruct(cache.shape, cache.dtype)],
        (-(-staged_capacity * dim // _BLOCK), kv_heads, len(rows)),
        warps=4,
        stages=1,
        aliases={3: 0},
        COUNT=count,
        KV_HEADS=kv_heads,
        CAPACITY=capacity,
        ROOM=staged_capacity,
        DIM=dim,
        BLOCK=_BLOCK,
    )
    return cache
