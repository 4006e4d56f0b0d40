"""RMSNorm and LayerNorm. Each casts to the compute dtype at the same point of its computation as the families do that
use it, so that results agree with transformers'. `norm_of` makes the one that a decoder's config asks for; layers, the
final norm, and norms of queries and keys are made so."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.pallas.normed_heads import inverse_rms
from jaxtune.pallas.normed_stream import has_kernel, normed_stream
from jaxtune.pallas.quant_matmul import low_rank


class RMSNorm(nnx.Module):
    """RMS normalisation over the last axis: x / rms(x) * weight, with statistics in fp32; with an offset, x / rms(x) *
    (offset + weight).

    If there is an offset (Gemma), or `float32` is set (OLMo 2, gpt-oss), the product with the weight is computed in
    fp32 and then cast; otherwise the cast comes first (Llama). Each family thus rounds as its reference implementation
    does.

    Args:
      size: of the last axis, which is normed.
      eps: added to the mean square.
      offset: added to the weight, which starts at 1 - offset.
      dtype: of the weight.
      float32: True: the product with the weight is computed in fp32 although there is no offset; False: only with one.
    Attributes:
      compute: the dtype's name in which the product with the weight is computed, where a precision map names one
        (models/precision.py); it has no effect on a norm that computes in fp32 already. None: as described here.
    """

    compute: str | None = None

    def __init__(self, size: int, eps: float, offset: float = 0.0, dtype=jnp.float32, float32: bool = False):
        self.eps = eps
        self.offset = offset
        self._float32 = float32 or offset != 0.0
        self.weight = nnx.Param(jnp.full((size,), 1.0 - offset, dtype))

    @property
    def float32(self) -> bool:
        """Whether the product with the weight is computed in fp32, before the cast to x's dtype: if the norm was made
        so or has an offset, or a precision map asks for it. Kernels of generation that compute this norm inside another
        operation get it as a setting."""
        return self._float32 or self.compute == "float32"

    @property
    def rounding(self) -> dict:
        """The keyword arguments eps, offset and float32 of operations that compute this norm (normed_stream), unless
        `compute` names a dtype of 16 bits."""
        return dict(eps=self.eps, offset=self.offset, float32=self.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., size] over its last axis, with the mean square in float32, and multiplies it by the weight
        (plus the offset): [..., size] in x's dtype."""
        return self.beside(x)[1]

    def by_kernel(self, x: jax.Array) -> bool:
        """Whether a kernel computes the gradient of this norm of x [..., size], so that `beside` saves a pass."""
        return (self.float32 or self.compute is None) and has_kernel(x, self.weight[...])

    def factors(self, x: jax.Array) -> low_rank.Factors:
        """The factors whose product, if it is rounded as the norm rounds, is the normed x [..., size]."""
        weight = self.weight[...].astype(jnp.float32)
        return low_rank.Factors(x, inverse_rms(x, self.eps), weight + self.offset if self.offset else weight)

    def beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x [..., size], the normed x). Whoever takes x from here, and not from before the norm, has its gradient
        added where that of the norm is computed (normed_stream)."""
        weight = self.weight[...]
        if self.float32 or self.compute is None:
            return normed_stream(x, weight, **self.rounding)
        dtype = jnp.dtype(self.compute)
        wide = x.astype(jnp.float32)
        wide = wide * inverse_rms(wide, self.eps)
        return x, (wide.astype(dtype) * weight.astype(dtype)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Normed:
    """An RMSNorm of x that is not computed yet, as an input of linears, which may compute it within their products
    (apply_fused). A segment gets it in place of INPUT if it declares so (Segment.norms)."""

    norm: RMSNorm
    x: jax.Array  # [..., size], what is normed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x, and of the normed x."""
        return self.x.shape

    def value(self) -> jax.Array:
        """The normed x [..., size], computed by the norm itself."""
        return self.norm(self.x)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, without bias: (x - mean(x)) / sqrt(variance(x) + eps) * weight.

    Everything is computed in fp32 before the cast to x's dtype, as in transformers' CohereLayerNorm. Only models whose
    config says `centred_norm` (Command R) have it.

    Args:
      size: of the last axis, which is normed.
      eps: added to the variance.
      dtype: of the weight.
    Attributes:
      compute: the dtype's name that a precision map (models/precision.py) gives this norm, or None; it has no effect,
        as this norm computes in fp32 in any case.
    """

    compute: str | None = None

    def __init__(self, size: int, eps: float, dtype=jnp.float32):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norms x [..., size] over its last axis and multiplies it by the weight, all in float32: [..., size] in x's
        dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def norm_of(config: DecoderConfig, size: int, dtype) -> RMSNorm | LayerNorm:
    """Makes the norm over `size` numbers that the decoder's config asks for: a LayerNorm if it says `centred_norm`,
    otherwise an RMSNorm with the config's offset (`norm_offset`) and rounding (`float32_norm`). Both have the config's
    norm_eps. The norms of the residual stream, of queries and keys, of per-layer embeddings and before the head are
    made so; a delta net's output norm is not. dtype: of its weight."""
    if config.centred_norm:
        return LayerNorm(size, config.norm_eps, dtype)
    return RMSNorm(size, config.norm_eps, config.norm_offset, dtype, config.float32_norm)
