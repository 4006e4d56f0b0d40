"""RMSNorm and LayerNorm. Each casts to the compute dtype where its families' reference implementations do, so that
results agree with transformers'.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig
from jaxtune.pallas.normed_heads import inverse_rms
from jaxtune.pallas.normed_stream import has_kernel, normed_stream
from jaxtune.pallas.quant_matmul import low_rank


class RMSNorm(nnx.Module):
    """RMS normalisation over the last axis: x / rms(x) * (offset + weight), with statistics in fp32. With an offset
    (Gemma) or `float32` (OLMo 2, gpt-oss) the product with the weight is computed in fp32 and then cast; otherwise the
    cast comes first (Llama).

      offset: added to the weight, which starts at 1 - offset.

    Attributes:
      compute: the dtype's name that a precision map gives the product with the weight, unless that is in fp32 already.
    """

    compute: str | None = None

    def __init__(self, size: int, eps: float, offset: float = 0.0, dtype=jnp.float32, float32: bool = False):
        self.eps = eps
        self.offset = offset
        self._float32 = float32 or offset != 0.0
        self.weight = nnx.Param(initial.full((size,), 1.0 - offset, dtype))

    @property
    def float32(self) -> bool:
        """Whether the product with the weight is computed in fp32, before the cast to x's dtype."""
        return self._float32 or self.compute == "float32"

    @property
    def rounding(self) -> dict:
        """The keyword arguments of operations that compute this norm, unless `compute` names a dtype of 16 bits."""
        return dict(eps=self.eps, offset=self.offset, float32=self.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The normed x [..., size], in x's dtype."""
        return self.stream_and_normed(x)[1]

    def by_kernel(self, x: jax.Array) -> bool:
        """Whether a kernel computes this norm's gradient of x [..., size], so that `stream_and_normed` saves a pass."""
        return (self.float32 or self.compute is None) and has_kernel(x, self.weight[...])

    def factors(self, x: jax.Array) -> low_rank.Factors:
        """The factors whose product, rounded as the norm rounds, is the normed x [..., size]."""
        weight = self.weight[...].astype(jnp.float32)
        return low_rank.Factors(x, inverse_rms(x, self.eps), weight + self.offset if self.offset else weight)

    def stream_and_normed(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x [..., size], the normed x). The gradient of this x is added within the kernel of the norm's gradient, so
        read x from here, not from before the norm.
        """
        weight = self.weight[...]
        if self.float32 or self.compute is None:
            return normed_stream(x, weight, **self.rounding)
        dtype = jnp.dtype(self.compute)
        wide = x.astype(jnp.float32)
        wide = wide * inverse_rms(wide, self.eps)
        return x, (wide.astype(dtype) * weight.astype(dtype)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Normed:
    """An RMSNorm of x that is not computed yet, so that linears may compute it within their products (apply_fused)."""

    norm: RMSNorm
    x: jax.Array  # [..., size], what is normed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def value(self) -> jax.Array:
        return self.norm(self.x)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. All is computed
    in fp32 before the cast to x's dtype, as in transformers' CohereLayerNorm, so `compute` has no effect.
    """

    compute: str | None = None

    def __init__(self, size: int, eps: float, dtype=jnp.float32, *, bias: bool = False):
        self.eps = eps
        self.weight = nnx.Param(initial.full((size,), 1, dtype))
        self.bias = nnx.Param(initial.full((size,), 0, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """The normed x [..., size], in x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * self.weight[...].astype(jnp.float32)
        return (wide if self.bias is None else wide + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def norm_of(config: DecoderConfig, size: int, dtype) -> RMSNorm | LayerNorm:
    """The norm that the config asks for, with weights of ones.

    config: of the decoder.
    size: numbers of a token that are normed together.
    dtype: of the weight as stored.
    """
    if config.centred_norm:
        return LayerNorm(size, config.norm_eps, dtype, bias=config.norm_bias)
    return RMSNorm(size, config.norm_eps, config.norm_offset, dtype, config.float32_norm)
