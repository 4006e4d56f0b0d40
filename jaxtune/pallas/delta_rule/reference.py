"""The gated delta rule token by token in float32, which defines the operation, and one token of it; slow.

A value head's state S [key_dim, value_dim] is 0 at a document's start. A token with unit vectors q and k of its key
head, value v, decay g <= 0 and share beta does

  S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q / sqrt(key_dim)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_EPS = 1e-6  # added to the squared length of a vector that is normalised


def unit(x: jax.Array) -> jax.Array:
    """float32 x / sqrt(|x|^2 + 1e-6) along the last axis; 0 where x is 0."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPS)


def forward(query, key, value, decay, beta, layout):
    """As api.gated_delta_rule: [B, T, heads, V], token by token, which defines it."""
    rows, _, heads, _ = value.shape
    begins = jnp.arange(value.shape[1]) == layout.doc_start
    real = jnp.arange(value.shape[1]) < layout.doc_end
    state = jnp.zeros((rows, heads, key.shape[-1], value.shape[-1]), jnp.float32)

    def scan_token(state, token):
        query, key, value, decay, beta, begins, real = token
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        out, state = _token(query, key, value, decay, beta, state)
        return state, jnp.where(real[:, None, None], out, 0.0)

    by_token = [jnp.moveaxis(array, 1, 0) for array in (query, key, value, decay, beta, begins, real)]
    return jnp.moveaxis(jax.lax.scan(scan_token, state, tuple(by_token))[1], 0, 1).astype(value.dtype)


def step(query, key, value, decay, beta, state):
    """As api.delta_rule_step: (out [B, 1, heads, V], next state)."""
    out, state = _token(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], state)
    return out[:, None].astype(value.dtype), state


def _token(query, key, value, decay, beta, state):
    """(out float32[B, heads, V], next state) of one token of each row."""
    heads = value.shape[1]
    query, key = (jnp.repeat(unit(x), heads // x.shape[1], axis=1)[..., None] for x in (query, key))
    state = state * jnp.exp(decay.astype(jnp.float32))[..., None, None]
    error = (value.astype(jnp.float32) - (state * key).sum(-2)) * beta.astype(jnp.float32)[..., None]
    state = state + key * error[..., None, :]
    return (state * query).sum(-2) / math.sqrt(key.shape[-2]), state
