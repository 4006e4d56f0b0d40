"""Routers, which give each token its logits over the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig, MoEConfig
from jaxtune.models.linear import Linear
from jaxtune.pallas import one_order
from jaxtune.pallas.routing import expert_weights
from jaxtune.pallas.routing.reference import chosen_values


class Router(nnx.Module):
    """weight [E, hidden], optional bias [E]. `compute`: the dtype's name that a precision map gives the product, or
    None.
    """

    compute: str | None = None

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        shape = (moe.num_experts, config.hidden_size)
        self.renormalize = moe.renormalize
        self.weight = nnx.Param(initial.normal(key, shape, config.initializer_range, dtype))
        self.bias = nnx.Param(initial.full((moe.num_experts,), 0, dtype)) if moe.router_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, hidden] -> logits float32[T, E]; the product is in x's dtype or `compute`, with sums in float32."""
        x = x if self.compute is None else x.astype(self.compute)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        weight = self.weight[...].astype(x.dtype)
        if one_order.is_exact():
            logits = one_order.product(x, weight)
        else:
            logits = jnp.einsum("td,ed->te", x, weight, preferred_element_type=jnp.float32, precision=precision)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    def weights(self, logits: jax.Array, choice: jax.Array) -> jax.Array:
        """The factors float32[T, k] on the outputs of each token's experts: softmax over the chosen logits if
        renormalised, else over all E. Gradients pass to the logits.

          choice: int32[T, k], each token's experts; E, which gets 0, where it has none.
        """
        return expert_weights(logits, choice, renormalize=self.renormalize)


class SigmoidRouter(Router):
    """Weights are sigmoids of the logits."""

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        super().__init__(config, moe, key, dtype)
        self.groups, self.best_groups = moe.groups, moe.best_groups
        self.scale, self.eps = moe.weight_scale, moe.sum_eps

    def ranked(self, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Scores [T, E] by which experts are chosen: sigmoids plus the bias, -inf outside a token's best groups, which
        are those with the largest sums of two scores.
        """
        scores = jax.nn.sigmoid(logits)
        scores = scores if bias is None else scores + bias
        if self.best_groups == self.groups:
            return scores
        grouped = scores.reshape(len(scores), self.groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), self.best_groups)[1]
        inside = (best[..., None] == jnp.arange(self.groups)).any(1)
        return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)

    def weights(self, logits: jax.Array, choice: jax.Array) -> jax.Array:
        """float32[T, k] as Router.weights, from sigmoids."""
        weights = chosen_values(jax.nn.sigmoid(logits), choice)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + self.eps)
        return weights * self.scale


class ScaledRouter(nnx.Module):
    """Gemma 4's router. It reads the residual stream x, and not the experts' normed input:

        logits = proj(rms_norm(x) * scale / sqrt(hidden))
        weight of a chosen expert e = softmax over the chosen logits * per_expert_scale[e]

    proj [E, hidden] can have an adapter, as in PEFT, and is never quantised. The norm has no weight.
    """

    def __init__(self, config: DecoderConfig, moe: MoEConfig, key, dtype):
        self.eps = config.norm_eps
        size, std = (config.hidden_size, moe.num_experts), config.initializer_range
        self.proj = Linear(*size, bias=False, std=std, key=key, dtype=dtype)
        self.proj.quantizable = False
        self.scale = nnx.Param(initial.full((config.hidden_size,), 1, dtype))
        self.per_expert_scale = nnx.Param(initial.full((moe.num_experts,), 1, dtype))

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """x [B, T, hidden] -> logits [B, T, E] in x's dtype. key: draws the dropout mask of proj's adapter; None: no
        dropout.
        """
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scaled = wide.astype(x.dtype) * self.scale[...].astype(x.dtype)
        return self.proj((scaled.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype), key)

    def weights(self, logits: jax.Array, choice: jax.Array) -> jax.Array:
        """The factors float32[T, k] on the outputs of each token's experts: softmax over the chosen logits, times each
        expert's scale.

          logits: [T, E].
          choice: int32[T, k], each token's experts; E, which gets 0, where it has none.
        """
        scale = self.per_expert_scale[...].astype(jnp.float32).at[choice].get(mode="clip")
        return expert_weights(logits, choice, renormalize=True) * scale
