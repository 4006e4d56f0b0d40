"""The attention half of a block: projections in, projection out. The attention itself is run by stack.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.linear import Linear, apply_together
from jaxtune.models.norm import RMSNorm
from jaxtune.models.rope import rotate


class Attention(nnx.Module):
    """q_proj, k_proj, v_proj (or one qkv_proj) and o_proj, with optional norms of queries and keys."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = jax.random.split(key, 4)
        hidden, std = config.hidden_size, config.initializer_range

        def linear(k, in_size, out_size, bias):
            return Linear(in_size, out_size, bias=bias, std=std, key=k, dtype=dtype)

        if config.fused:
            self.qkv_proj = linear(keys[0], hidden, config.query_size + 2 * config.kv_size, config.qkv_bias)
        else:
            self.q_proj = linear(keys[0], hidden, config.query_size, config.qkv_bias)
            self.k_proj = linear(keys[1], hidden, config.kv_size, config.qkv_bias)
            self.v_proj = linear(keys[2], hidden, config.kv_size, config.qkv_bias)
        self.o_proj = linear(keys[3], config.query_size, hidden, config.out_bias)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.attention_sinks else None
        if config.qk_norm:
            whole = config.qk_norm == "projection"
            sizes = (config.query_size, config.kv_size) if whole else (config.head_dim, config.head_dim)
            self.q_norm = RMSNorm(sizes[0], config.norm_eps, config.norm_offset, dtype)
            self.k_norm = RMSNorm(sizes[1], config.norm_eps, config.norm_offset, dtype)

    def options(self, window: int | None) -> dict[str, Any]:
        """Arguments of the attention functions that are the same for training and generation."""
        sinks = None if self.sinks is None else self.sinks[...]
        config = self.config
        return dict(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)

    def project(self, x: jax.Array, rotary, key: jax.Array | None = None):
        """[B, T, hidden] -> query [B, T, heads, D], key and value [B, T, kv_heads, D], normed and rotated."""
        config = self.config
        if config.fused:
            both = self.qkv_proj(x, key)
            q, kv = config.query_size, config.kv_size
            query, key_, value = both[..., :q], both[..., q : q + kv], both[..., q + kv :]
        else:
            query, key_, value = apply_together(x, (self.q_proj, self.k_proj, self.v_proj), key)
        if config.qk_norm == "projection":
            query, key_ = self.q_norm(query), self.k_norm(key_)
        query, key_, value = (a.reshape(*a.shape[:2], -1, config.head_dim) for a in (query, key_, value))
        if config.qk_norm == "head":
            query, key_ = self.q_norm(query), self.k_norm(key_)
        return rotate(query, rotary), rotate(key_, rotary), value

    def output(self, out: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[B, T, heads, D] -> [B, T, hidden]."""
        return self.o_proj(out.reshape(*out.shape[:2], -1), key)
