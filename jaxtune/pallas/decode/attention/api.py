"""Attention of one new token of each row over the row's key/value cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes, one_order
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.attention import in_tiles
from jaxtune.pallas.decode.attention import as_trained, mosaic, reference, triton

IMPLEMENTATIONS = {"mosaic": mosaic, "triton": triton, "reference": reference}


def implementations(query, keys, *, soft_cap=None) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of preference; a first use compares a kernel, in seconds.

    query, keys: [B, heads, D], and the cache [B, kv_heads, capacity, D]; arrays or shapes.
    """

    def kernel(name):
        module = IMPLEMENTATIONS[name]
        return lambda: module.refusal(query, keys) or _first_use(name, module, query, keys, soft_cap)

    # Of caches that Triton's kernel reads in one pass, it is the faster one on Hopper too.
    names = ("triton", "mosaic") if keys.shape[2] <= triton.WHOLE else ("mosaic", "triton")
    return {name: kernel(name) for name in names} | {"reference": lambda: None}


def _first_use(name: str, module, query, keys, soft_cap) -> str | None:
    """Compares a small case with the reference: rows empty, of whole and broken tiles, longer than the cache, and a
    ring.
    """
    (_, heads, dim), kv_heads, dtype = query.shape, keys.shape[1], jnp.dtype(query.dtype)
    group = heads // kv_heads
    call = f"{dtype.name}, {keys.dtype} cache, head dim {dim}, {group} heads a key/value head, {module.variant(query)}"
    if soft_cap is not None:
        call += ", soft cap"
    capacity = 512
    if name == "triton" and keys.shape[2] > triton.WHOLE:
        capacity, call = 1280, call + ", in splits"

    def compare():
        lengths = jnp.asarray([0, 1, 64, capacity + 88, capacity - 212, capacity + 1], jnp.int32)
        shapes = (len(lengths), 2 * group, dim), *((len(lengths), 2, capacity, dim),) * 2
        draws = zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
        query, key, value = (jax.random.normal(seed, shape).astype(dtype) for seed, shape in draws)
        key, value = key.astype(keys.dtype), value.astype(keys.dtype)
        options = dict(scale=dim**-0.5, window=capacity - 12, soft_cap=soft_cap, sinks=jnp.linspace(-1, 1, 2 * group))
        kernel_result = jax.jit(lambda *operands: module.decode(*operands, **options))(query, key, value, lengths)
        exact = dispatch.exactly(functools.partial(reference.decode, **options))
        query, key, value = (array.astype(jnp.float32) for array in (query, key, value))
        return [kernel_result], [exact(query, key, value, lengths)]

    return dispatch.first_use("decode_attention", name, call, compare)


@meshes.on_any_mesh
def decode_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of the newest token of each row over the row's cache, which contains that token already: [B, heads, D]
    in query's dtype. Not differentiable. With the kernels, a row's result has the same bits alone, in any batch and in
    any slot. Raises TypeError or ValueError for wrong arguments or an implementation that refuses.

      query: [B, heads, D] bfloat16, float16 or float32.
      keys, values: [B, kv_heads, capacity, D], heads a multiple of kv_heads, in query's dtype or float8_e4m3fn (no
        scales). The token at position p is at index p % capacity. Invisible entries must be finite, too.
      lengths: int32[B], tokens of each row with the newest; 0 gives 0. Of a longer row the cache has the last
        `capacity`.
      scale: factor on query . key, a Python number.
      window: the newest token sees itself and the window - 1 before it; None: all.
      soft_cap: scores s become cap * tanh(s / cap).
      sinks: float[heads], an extra logit per head that has no value.
      implementation: "mosaic" (Hopper; D of 64, 96, 128 or 256, at most 64 query heads a KV head), "triton" (compute
        capability 8.0 on, with FP8 caches 8.9; D a multiple of 16 up to 512), "reference" (jnp), or None: the first
        that supports the call. Kernels need 16-bit queries and whole tiles of keys (cache_capacity); "mosaic" reads no
        FP8.
    """
    check = Arguments("decode_attention")
    check.array("query", query, "B heads D", FLOATS)
    check.array("keys", keys, "B kv_heads capacity D", (str(query.dtype), "float8_e4m3fn"))
    check.array("values", values, "B kv_heads capacity D", keys.dtype)
    check.array("lengths", lengths, "B", INTEGERS)
    if query.shape[1] % keys.shape[1]:
        raise ValueError(
            f"decode_attention: {query.shape[1]} query heads are not a multiple of {keys.shape[1]} key/value heads"
        )
    check.number("scale", scale)
    check.number("window", window, whole=True, least=1, optional=True)
    check.number("soft_cap", soft_cap, above=0, optional=True)
    if sinks is not None:
        check.array("sinks", sinks, "heads", FLOATS)
    if one_order.runs_kernels():
        before, options = jnp.asarray(lengths, jnp.int32) - 1, dict(scale=scale, window=window, soft_cap=soft_cap)
        return as_trained.attended(query[:, None], keys, values, before, sinks=sinks, **options)[:, 0]
    if one_order.is_exact():
        options = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return in_tiles.cached(query[:, None], keys, values, jnp.asarray(lengths, jnp.int32)[:, None] - 1, **options)[
            :, 0
        ]
    implementation_name = dispatch.choose(
        "decode_attention", implementations(query, keys, soft_cap=soft_cap), implementation
    )
    function = functools.partial(
        IMPLEMENTATIONS[implementation_name].decode, scale=scale, window=window, soft_cap=soft_cap
    )

    def run(query, keys, values, lengths, sinks):
        return function(query, keys, values, lengths, sinks=sinks)

    # XLA divides the reference over the mesh.
    run = run if implementation_name == "reference" else meshes.on_each_device(run, rows=4)
    return run(query, keys, values, jnp.asarray(lengths, jnp.int32), sinks)
