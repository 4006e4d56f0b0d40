"""Routers, the part of a mixture of experts that gives each token its logits over the experts. Router is a plain
matrix; ScaledRouter (Gemma 4) also normalises and scales its input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, MoEConfig
from jaxtune.models.linear import Linear
from jaxtune.pallas.routing import expert_weights


class Router(nnx.Module):
    """The matrix that gives each token's logits over the experts: weight [E, hidden], optional bias [E]. MoE calls it
    to compute the logits, and `weights` to compute the factors of the chosen experts from them.

    Args:
      config: gives the hidden size and the range of initial weights.
      moe: gives the number of experts, whether there is a bias, and whether the weights of a token's experts sum to
        one.
      key: draws the initial weight.
      dtype: of the weight and the bias.
    Attributes:
      compute: the dtype's name in which the logits' product is computed, where a precision map names one
        (models/precision.py); None: in x's dtype.
    """

    compute: str | None = None

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        shape = (moe.num_experts, config.hidden_size)
        self.renormalize = moe.renormalize
        self.weight = nnx.Param((jax.random.normal(key, shape, jnp.float32) * config.initializer_range).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((moe.num_experts,), dtype)) if moe.router_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies x [T, hidden], the tokens, by the weight, and adds the bias if there is one: the logits float32[T,
        E]. The product is computed in x's dtype, or in the dtype `compute`, with sums in float32."""
        x = x if self.compute is None else x.astype(self.compute)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        weight = self.weight[...].astype(x.dtype)
        logits = jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32, precision=precision)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    def weights(self, logits: jax.Array, choice: jax.Array) -> jax.Array:
        """The factors by which the outputs of each token's experts are multiplied before they are summed: float32[T,
        k]; 0 where the token has no expert. MoE.down calls it, and generation's plain_layer.py. They are the softmax
        over the chosen logits if the config renormalises, else the softmax over all E; gradients pass to the logits.

        logits: float32[T, E], from a call of the router. choice: int32[T, k], the numbers of each token's experts; E
        where it has none."""
        return expert_weights(logits, choice, renormalize=self.renormalize)


class ScaledRouter(nnx.Module):
    """Gemma 4's router. It reads the residual stream x, and not the experts' normed input:

        logits = proj(rms_norm(x) * scale / sqrt(hidden))
        weight of a chosen expert e = softmax over the chosen logits * per_expert_scale[e]

    proj is a linear [E, hidden], which adapters can adapt as PEFT does and which is never quantised; scale is [hidden]
    and per_expert_scale [E]. The norm has no weight. MoE calls it in a segment of its own, and `weights` afterwards.

    Args:
      config: gives the hidden size, the norm's eps and the range of initial weights.
      moe: gives the number of experts.
      key: draws the initial weight of proj; both scales start at one.
      dtype: of the weights.
    """

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        self.eps = config.norm_eps
        size, std = (config.hidden_size, moe.num_experts), config.initializer_range
        self.proj = Linear(*size, bias=False, std=std, key=key, dtype=dtype)
        self.proj.quantizable = False
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((moe.num_experts,), dtype))

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Computes the logits of the residual stream x [B, T, hidden], proj(rms_norm(x) * scale / sqrt(hidden)): [B, T,
        E] in x's dtype; the norm is computed in float32. `key` draws the dropout mask of proj's adapter; None: no
        dropout."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scaled = wide.astype(x.dtype) * self.scale[...].astype(x.dtype)
        return self.proj((scaled.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype), key)

    def weights(self, logits: jax.Array, choice: jax.Array) -> jax.Array:
        """The factors by which the outputs of each token's experts are multiplied before they are summed: float32[T,
        k]; 0 where the token has no expert. MoE.down calls it. They are the softmax over the chosen logits times the
        experts' per_expert_scale.

        logits: [T, E], from a call of the router, reshaped. choice: int32[T, k], the numbers of each token's experts; E
        where it has none."""
        scale = self.per_expert_scale[...].astype(jnp.float32).at[choice].get(mode="clip")
        return expert_weights(logits, choice, renormalize=True) * scale
