"""The gated delta rule token by token in float32 (`forward`), which defines the operation; and one token of it, for
generation (`step`). `unit` normalises queries and keys. Other implementations are compared with `forward`; it is slow.

The state S [key_dim, value_dim] of every value head is 0 at the start of a document. A token with the unit vectors q
and k of its key head, its value v, its decay g <= 0 and its share beta does

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q / sqrt(key_dim)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_EPS = 1e-6  # added to the squared length of a vector that is normalised


def unit(x: jax.Array) -> jax.Array:
    """Normalises vectors, as the rule does with queries and keys: returns x / sqrt(|x|^2 + 1e-6) along the last axis in
    float32, which is 0 where x is 0. `_token` and chunked.py call it."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _EPS)


def forward(query, key, value, decay, beta, layout):
    """Returns the output [B, T, heads, V] in value's dtype of the gated delta rule over packed documents, computed
    token by token; padding gives 0. Other implementations are compared with it.

    query and key are [B, T, key_heads, K], value [B, T, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, T, heads]; layout: the document bounds.
    Queries and keys are normalised here, the output is divided by sqrt(K), and neighbouring heads / key_heads heads
    share a key head.
    """
    rows, _, heads, _ = value.shape
    begins = jnp.arange(value.shape[1]) == layout.doc_start
    real = jnp.arange(value.shape[1]) < layout.doc_end
    state = jnp.zeros((rows, heads, key.shape[-1], value.shape[-1]), jnp.float32)

    def one(state, token):
        query, key, value, decay, beta, begins, real = token
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        out, state = _token(query, key, value, decay, beta, state)
        return state, jnp.where(real[:, None, None], out, 0.0)

    by_token = [jnp.moveaxis(array, 1, 0) for array in (query, key, value, decay, beta, begins, real)]
    return jnp.moveaxis(jax.lax.scan(one, state, tuple(by_token))[1], 0, 1).astype(value.dtype)


def step(query, key, value, decay, beta, state):
    """Returns (out [B, 1, heads, V], the next state) for one more token of each row, a step of generation, for
    delta_rule_step: with the unit vectors q and k, the state decays to exp(decay) S, takes k (beta (v - S^T k))^T, and
    out is S^T q / sqrt(K). out has value's dtype; the next state is as `state`. Queries and keys are normalised here,
    and neighbouring heads / key_heads heads share a key head.

    query and key are [B, 1, key_heads, K], value [B, 1, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, 1, heads]; state, before the token, is
    float32[B, heads, K, V].
    """
    out, state = _token(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], state)
    return out[:, None].astype(value.dtype), state


def _token(query, key, value, decay, beta, state):
    """One token of each row in float32, the body of `forward` and `step`: the state S becomes exp(decay) S, then S + k
    (beta (v - S^T k))^T, where q and k are unit vectors. Returns (out = S^T q / sqrt(K), float32[B, heads, V]; the next
    state, float32[B, heads, K, V]). query, key: [B, key_heads, K], not normalised yet; value [B, heads, V], decay and
    beta [B, heads], state, before the token, [B, heads, K, V]. Neighbouring heads / key_heads heads share a key
    head."""
    heads = value.shape[1]
    query, key = (jnp.repeat(unit(x), heads // x.shape[1], axis=1)[..., None] for x in (query, key))
    state = state * jnp.exp(decay.astype(jnp.float32))[..., None, None]
    error = (value.astype(jnp.float32) - (state * key).sum(-2)) * beta.astype(jnp.float32)[..., None]
    state = state + key * error[..., None, :]
    return (state * query).sum(-2) / math.sqrt(key.shape[-2]), state
