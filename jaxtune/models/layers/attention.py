"""Softmax attention, a mixer: projections in, attention over a packed row, projection out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import ATTENTION_BYTES, ATTENTION_STAGE
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context, Residual, Segment, Sizes
from jaxtune.models.linear import Linear, apply_together
from jaxtune.models.norm import norm_of
from jaxtune.models.rope import rotate, scaled_by_position
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import attention_backward, attention_forward
from jaxtune.pallas.decode_attention import (
    cache_capacity,
    cache_of,
    chunk_attention,
    chunk_written,
    decode_attention,
    written,
)


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Part.config of an attention that differs from the decoder's; a setting that is None is the decoder's.

    qk_norm: as the decoder's, or "none". Which window and rotary base it has, the LayerSpec says.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention_scale: float | None = None
    qk_norm: Literal["head", "projection", "none"] | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    attention_gate: bool | None = None
    attention_sinks: bool | None = None
    their_name: str = "self_attn"

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> Attention:
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        del own["their_name"]
        if self.qk_norm == "none":
            own["qk_norm"] = None
        return Attention(dataclasses.replace(config, **own), key, dtype)


class Attention(nnx.Module):
    """q_proj, k_proj, v_proj (or one qkv_proj) and o_proj, with optional norms of queries and keys.

    With attention_gate, q_proj gives each head a gate after its query, whose sigmoid multiplies what the head gives.

    Queries and keys that are normed are residuals as the projections gave them: a norm's derivative reads what it
    normed, which would otherwise be multiplied again. Attention norms and rotates them once more in the backward.
    """

    state_reads = ("key", "value")

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = jax.random.split(key, 4)
        hidden, std = config.hidden_size, config.initializer_range

        def linear(k, in_size, out_size, bias):
            return Linear(in_size, out_size, bias=bias, std=std, key=k, dtype=dtype)

        if config.fused_qkv:
            self.qkv_proj = linear(keys[0], hidden, config.query_size + 2 * config.kv_size, config.qkv_bias)
        else:
            queries = config.query_size * (2 if config.attention_gate else 1)
            self.q_proj = linear(keys[0], hidden, queries, config.qkv_bias)
            self.k_proj = linear(keys[1], hidden, config.kv_size, config.qkv_bias)
            self.v_proj = linear(keys[2], hidden, config.kv_size, config.qkv_bias)
        self.o_proj = linear(keys[3], config.query_size, hidden, config.out_bias)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.attention_sinks else None
        if config.qk_norm:
            whole = config.qk_norm == "projection"
            sizes = (config.query_size, config.kv_size) if whole else (config.head_dim, config.head_dim)
            self.q_norm = norm_of(config, sizes[0], dtype)
            self.k_norm = norm_of(config, sizes[1], dtype)

    def segments(self) -> tuple[Segment, ...]:
        width = self.config.query_size
        gates = (Residual("output_gate"),) if self.config.attention_gate else ()

        def multiplications(tokens: int, length: int, backward: bool) -> float:
            fit = ATTENTION_STAGE.of("cudnn", dispatch.device_kind() or "")
            whole = fit.slower * (1 + fit.half_tokens / length) * tokens * width * length
            return whole * (fit.backward if backward else 1.0)

        return (
            Segment(
                "project",
                (INPUT,),
                (
                    Residual("query"),
                    Residual("key"),
                    Residual("value", decided_with="key"),
                    *gates,
                ),
                Attention._project,
                matrices=("qkv_proj",) if self.config.fused_qkv else ("q_proj", "k_proj", "v_proj"),
            ),
            Segment(
                "attend",
                ("query", "key", "value"),
                (
                    Residual("attention_out"),
                    Residual("lse", decided_with="attention_out"),
                ),
                Attention._attend,
                backward=_attend_backward,
                attention_width=width,
                multiplications=multiplications,
            ),
            Segment(
                "mix",
                ("attention_out", *(gate.name for gate in gates)),
                (Residual(OUTPUT),),
                Attention._mix,
                matrices=("o_proj",),
            ),
        )

    def options(self, window: int | None) -> dict[str, Any]:
        """Arguments of the attention functions that are the same for training and generation."""
        sinks = None if self.sinks is None else self.sinks[...]
        config = self.config
        return dict(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)

    def project(self, x: jax.Array, rotary, key: jax.Array | None = None):
        """[B, T, hidden] -> query [B, T, heads, D], key and value [B, T, kv_heads, D], normed and rotated; and with
        attention_gate, the gates [B, T, heads, D]."""
        query, key_, *others = self._projections(x, key)
        return self._query(query, rotary), self._key(key_, rotary), *others

    def _projections(self, x: jax.Array, key: jax.Array | None):
        """What `project` gives, neither normed nor rotated."""
        config = self.config
        if config.fused_qkv:
            both = self.qkv_proj(x, key)
            q, kv = config.query_size, config.kv_size
            query, key_, value = both[..., :q], both[..., q : q + kv], both[..., q + kv :]
        else:
            query, key_, value = apply_together(x, (self.q_proj, self.k_proj, self.v_proj), key)
        gates = ()
        if config.attention_gate:
            query, *gates = jnp.split(query.reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1)
        query, key_, value = (a.reshape(*a.shape[:2], -1, config.head_dim) for a in (query, key_, value))
        return query, key_, value, *gates

    def _query(self, x: jax.Array, rotary) -> jax.Array:
        return scaled_by_position(rotate(self._normed("q_norm", x), rotary, self.config.interleaved_rotary), rotary)

    def _key(self, x: jax.Array, rotary) -> jax.Array:
        return rotate(self._normed("k_norm", x), rotary, self.config.interleaved_rotary)

    def _normed(self, norm: str, x: jax.Array) -> jax.Array:
        """x [B, T, heads, D] by the norm of that name, if there is one: each head alone, or all together."""
        if self.config.qk_norm is None:
            return x
        shape = x.shape if self.config.qk_norm == "head" else (*x.shape[:2], -1)
        return getattr(self, norm)(x.reshape(shape)).reshape(x.shape)

    def output(self, out: jax.Array, gate: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """[B, T, heads, D], of a gate too -> [B, T, hidden]."""
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*out.shape[:2], -1), key)

    def _project(self, context: Context, x: jax.Array):
        if self.config.qk_norm is None:
            return self.project(x, context.rotary, context.key)
        return self._projections(x, context.key)

    def attended(self, context: Context, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The residuals query and key, as attention reads them."""
        if self.config.qk_norm is None:
            return query, key
        return self._query(query, context.rotary), self._key(key, context.rotary)

    def _attend(self, context: Context, query: jax.Array, key: jax.Array, value: jax.Array):
        query, key = self.attended(context, query, key)
        return attention_forward(query, key, value, context.layout, **self.options(context.spec.window))

    def _mix(self, context: Context, out: jax.Array, *gates: jax.Array):
        return (self.output(out, *gates, key=context.key),)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The caches of keys and values [B, kv_heads, capacity, D] that hold the prompt and have room for new_tokens
        more, or for the layer's window of them."""
        key, value = values["key"], values["value"]
        if self.config.qk_norm is not None:
            key = self._key(key, context.rotary)
        capacity = cache_capacity(key.shape[1] + new_tokens, context.spec.window)
        return cache_of(key, lengths, capacity), cache_of(value, lengths, capacity)

    def step(self, x: jax.Array, state, at: jax.Array, context: Context):
        query, key, value, *gates = self.project(x, context.rotary)
        options = self.options(context.spec.window)
        if x.shape[1] > 1:
            out = chunk_attention(query, key, value, state[0], state[1], at, **options)
            keys, values = (chunk_written(kept, new, at) for kept, new in zip(state, (key, value), strict=True))
            return self.output(out, *gates), (keys, values)
        keys, values = (written(kept, new[:, 0], at) for kept, new in zip(state, (key, value), strict=True))
        out = decode_attention(query[:, 0], keys, values, at + 1, **options)
        return self.output(out[:, None], *gates), (keys, values)

    # ---- what the planner asks

    def waiting_bytes(self, sizes: Sizes) -> float:
        return ATTENTION_BYTES.of("cudnn", sizes.device).waiting * sizes["query"]

    def backward_bytes(self, sizes: Sizes) -> float:
        """Gradients of query, key and value, those two as attention reads them, and what of the residual stream is
        beside them."""
        fit = ATTENTION_BYTES.of("cudnn", sizes.device)
        stream = fit.stream * sizes["layer_input"]
        if self.config.qk_norm is not None:
            stream += sizes["query"] + sizes["key"]
        if sizes.tiles == 1:
            return 2 * sizes["query"] + sizes["key"] + sizes["value"] + stream
        own = (2 + fit.work_space) * sizes["query"]
        return own + sizes["key"] + sizes["value"] + stream - sizes["layer_input"]


def _attend_backward(module_of, trainable, context: Context, inputs, outputs, gradients):
    """The kernels' own backward, from the saved output and log-sum-exp."""
    attention: Attention = module_of(trainable)
    options = attention.options(context.spec.window)
    out, lse = outputs

    def read(trainable, query, key):
        attention: Attention = module_of(trainable)
        sinks = attention.sinks[...] if isinstance(attention.sinks, nnx.Param) else None
        return *attention.attended(context, query, key), sinks

    (query, key, sinks), pullback = jax.vjp(read, trainable, *inputs[:2])
    dquery, dkey, dvalue, dsinks = attention_backward(
        query, key, inputs[2], out, lse, gradients[0], context.layout, **options
    )
    if sinks is None and attention.config.qk_norm is None:
        return None, (dquery, dkey, dvalue)
    dtrainable, dquery, dkey = pullback((dquery, dkey, None if sinks is None else dsinks))
    return dtrainable, (dquery, dkey, dvalue)
