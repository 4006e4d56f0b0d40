"""Decode attention: the public function."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.decode_attention import reference

IMPLEMENTATIONS = {"reference": reference}


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
    """Attention of the newest token of each row over the row's cache, which holds that token too.

    Args:
      query: [B, heads, D] bfloat16, float16 or float32, of the newest tokens.
      keys, values: [B, kv_heads, capacity, D], heads a multiple of kv_heads, in query's dtype or float8_e4m3fn (whose
        numbers count as they are). The token at position p of a row is at index p % capacity (cache.py). Entries
        that are not seen must be finite, too.
      lengths: int32[B], tokens of each row with the newest one; 0 is an empty row, which gives 0. A row may be longer
        than the capacity: it then has its last `capacity` tokens there.
      scale: factor on query . key.
      window: the newest token sees itself and the window - 1 tokens before it, or None.
      soft_cap: cap * tanh(score / cap), or None (Gemma 2).
      sinks: float[heads], one extra logit a head without a value, or None (gpt-oss).
      implementation: "reference", or None for the first that supports the call.
    Returns:
      [B, heads, D] in query's dtype.
    Raises:
      TypeError, ValueError: an argument is not as described here.
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
    table: dispatch.Table = {"reference": lambda: None}
    chosen = IMPLEMENTATIONS[dispatch.choose("decode_attention", table, implementation)]
    lengths = jnp.asarray(lengths, jnp.int32)
    return chosen.decode(query, keys, values, lengths, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
