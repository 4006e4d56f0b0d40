"""Linear layers and their adapters.

Trainability is a type: a trainable tensor is an `nnx.Param`, a frozen one a `Frozen`. `nnx.split(model, nnx.Param,
...)` therefore gives (graph, trainable, frozen), and `nnx.value_and_grad` differentiates what trains and nothing else.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.pallas.quant_matmul import FourBit, LoraWeights, dense, quant_matmul


class Frozen(nnx.Variable):
    """A tensor that never receives a gradient: an array or a quantised pytree."""


class Lora(nnx.Module):
    """Adapter of one linear: a [r, in], b [out, r] (zero at the start), float32; DoRA's magnitude [out].

    alpha, rslora: what scale comes from; adapter files hold these. rate: dropout on the adapter's input while training.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        rank: int,
        alpha: float,
        rate: float,
        key: jax.Array,
        *,
        rslora: bool = False,
        dora: bool = False,
    ):
        # Kaiming uniform with a = sqrt(5), PEFT's start: uniform in +-1 / sqrt(in).
        bound = 1.0 / math.sqrt(in_size)
        self.a = nnx.Param(jax.random.uniform(key, (rank, in_size), jnp.float32, -bound, bound))
        self.b = nnx.Param(jnp.zeros((out_size, rank), jnp.float32))
        self.magnitude = nnx.Param(jnp.zeros((out_size,), jnp.float32)) if dora else None
        self.alpha = alpha
        self.rslora = rslora
        self.rate = rate

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def weights(self, base: jax.Array | FourBit) -> LoraWeights:
        a, b = self.a[...], self.b[...]
        row_scale = None
        if self.magnitude is not None:
            row_scale = self.magnitude[...] / jax.lax.stop_gradient(row_norm(dense(base), a, b, self.scale))
        return LoraWeights(a, b, row_scale, self.scale)


def row_norm(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """float32[out]: the norms of the rows of weight + scale b a, without forming the sum.

    |w + s b a|^2 = |w|^2 + 2 s (w a^T) . b + s^2 b (a a^T) . b   (DoRA, arXiv 2402.09353).
    """
    precision = jax.lax.Precision.HIGHEST
    square = jnp.einsum("oi,oi->o", weight, weight, preferred_element_type=jnp.float32, precision=precision)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    cross = jnp.einsum("oi,ri->or", weight.astype(jnp.float32), a, precision=precision)
    gram = jnp.einsum("ri,si->rs", a, a, precision=precision)
    inner = 2 * scale * cross + scale * scale * jnp.einsum("or,rs->os", b, gram, precision=precision)
    return jnp.sqrt(square + (inner * b).sum(-1))


class Linear(nnx.Module):
    """weight [out, in] as in Hugging Face checkpoints or in four bits, optional bias [out], optional adapter."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, std: float, key: jax.Array, dtype):
        self.weight: nnx.Variable = nnx.Param(
            (jax.random.normal(key, (out_size, in_size), jnp.float32) * std).astype(dtype)
        )
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None
        self.lora: Lora | None = nnx.data(None)  # a Lora, once the model has adapters

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in)"""
        out_size, in_size = self.weight.shape
        return out_size, in_size

    @property
    def stored_weight(self) -> jax.Array | FourBit:
        """The weight as it is kept; it cannot be indexed, as variables are, where it is in four bits."""
        return self.weight.get_value()

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[..., in] -> [..., out] in x's dtype; key draws the adapter's dropout mask."""
        return apply_together(x, (self,), key)[0]


def apply_together(x: jax.Array, linears: tuple[Linear, ...], key: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """Applies linears that share x in one quant_matmul."""
    rates = [linear.lora.rate for linear in linears if linear.lora is not None]
    return quant_matmul(
        x,
        [linear.stored_weight for linear in linears],
        [None if linear.lora is None else linear.lora.weights(linear.stored_weight) for linear in linears],
        [None if linear.bias is None else linear.bias[...] for linear in linears],
        dropout_rate=max(rates, default=0.0),
        dropout_key=key,
    )
