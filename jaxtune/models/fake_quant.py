"""Fake quantisation for quantisation-aware training: rounds a weight to values that a low-bit format can represent.

The forward uses the rounded weight; in the backward the gradient passes unchanged to the weight (straight-through,
arXiv 1308.3432, 1712.05877). With an adapter the merged weight is rounded, as it is in a deployed model. The adapter's
gradients are then those of the adapter without rounding, for which no dense gradient of the merged weight is needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier


def int4(weight: jax.Array, group_size: int, dtype: str) -> jax.Array:
    """Rounds a weight [out, in] to symmetric int4: each group of a row is a scale times integers from -8 to 7.

    The scale is max(max(w) / 7, -min(w) / 8), the smallest one that clips nothing, rounded to `dtype`; codes are
    rounded to nearest even. These are the values of W4A16 formats (GPTQ and compressed-tensors, symmetric; torchao's
    SYMMETRIC_NO_CLIPPING_ERR): a kernel that multiplies code and scale in `dtype` computes with exactly them.

    Args:
      weight: [out, in], of any floating-point dtype.
      group_size: how many consecutive weights of a row share a scale; it must divide `in`.
      dtype: of the scales and of the result.
    """
    groups = weight.astype(jnp.float32).reshape(weight.shape[0], -1, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return (int4_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int4_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """The scales with which a weight is rounded to int4, [out, n, 1] in `dtype`, one for each group of a row. groups:
    float32[out, n, group], the weight, each row of which is divided into n groups of consecutive numbers."""
    # XLA may or may not turn a division by a constant into a product; a product is the same in every program.
    seventh = np.float32(1 / 7)
    scale = jnp.maximum(groups.max(-1, keepdims=True) * seventh, -groups.min(-1, keepdims=True) / 8)
    return scale.astype(dtype)


def int4_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """The codes of a weight that is rounded to int4: whole numbers from -8 to 7, as float32[out, n, group], of which
    code * scale is the rounded weight. groups: float32[out, n, group], the weight in n groups a row. scale:
    float32[out, n, 1], the scales of the groups, from int4_scales."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -8, 7)


@dataclasses.dataclass(frozen=True)
class Format:
    """A low-bit format to which weights can be rounded; its groups are consecutive weights along the input."""

    # (weight [out, in], group_size, dtype) -> rounded weight [out, in] in dtype
    round: Callable[[jax.Array, int, str], jax.Array]
    group_sizes: tuple[int, ...]  # the group sizes that it supports


FORMATS = {"int4": Format(int4, (32, 64, 128))}


@dataclasses.dataclass(frozen=True)
class FakeQuant:
    """The grid (format, groups, dtype) to which QAT rounds the weights of linears; immutable and hashable. `round`
    rounds a weight, `fits` says which weights can be rounded, and `represented_by` in which dtypes they can be saved.
    Raises ValueError for a format or group size that is not supported."""

    format: str  # key of FORMATS
    group_size: int  # how many consecutive weights of a row share a scale
    dtype: str  # of the rounded values and their scales, whatever dtype computes with them

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"qat format {self.format!r} is not supported; supported: {', '.join(FORMATS)}")
        sizes = FORMATS[self.format].group_sizes
        if self.group_size not in sizes:
            wanted = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
            raise ValueError(f"qat group_size {self.group_size}: {self.format} has groups of {wanted}")

    @classmethod
    def of_record(cls, where: str, record: Any) -> FakeQuant:
        """The grid that a file records as an object with format, group_size and dtype. record: that object, as JSON
        has it.

        where: the file and key, for errors.

        Raises:
          ValueError: a grid that is not supported, or a dtype that models do not have.
        """
        if not isinstance(record, Mapping) or not all(isinstance(record.get(key), str) for key in ("format", "dtype")):
            raise ValueError(f"{where} = {record!r}: must be an object with format, group_size and dtype")
        if record["dtype"] not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{where}: dtype = {record['dtype']!r} is none of bfloat16, float16 and float32")
        try:
            return cls(record["format"], record.get("group_size", 0), record["dtype"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def __str__(self) -> str:
        return f"{self.format} in groups of {self.group_size}, {self.dtype}"

    def represented_by(self, dtype: str) -> bool:
        """Whether a dtype (its name) represents every value of the grid exactly, so that weights can be saved in it."""
        return jnp.promote_types(self.dtype, dtype) == dtype

    def fits(self, in_size: int) -> bool:
        """Whether in_size, the input size of a linear, is a multiple of group_size. QAT does not round a linear for
        which it is not."""
        return in_size % self.group_size == 0

    def round(self, weight: jax.Array) -> jax.Array:
        """Rounds a weight [out, in] to the grid; the result has the grid's dtype."""
        with jax.named_scope("fake_quantise"):
            return FORMATS[self.format].round(weight, self.group_size, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> jax.Array:
    """A weight [out, in] rounded to the grid `spec`, in the weight's own dtype. In the backward, the gradient of the
    result is passed unchanged to the weight.

    x: the activations that the rounded weight will multiply. An optimization barrier makes the rounding depend on them,
    so that forward and backward each round. Otherwise XLA would round once for both, and keep the rounded weight in
    memory in between.
    """
    weight, _ = optimization_barrier((weight, x))
    return spec.round(weight).astype(weight.dtype)


straight_through.defvjp(
    lambda spec, weight, x: (straight_through(spec, weight, x), None), lambda spec, _, dweight: (dweight, None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapter_gradients(out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns `out`, a linear's output [..., out], unchanged. In the backward the adapter's matrices a [r, in] and b
    [out, r] get the gradients that the term `scale b a x` would give, so that the adapter trains although `out` was
    computed from the rounded merged weight. x: [..., in], the linear's input, which gets no gradient here. scale: the
    adapter's scale."""
    del x, a, b, scale
    return out


def _adapter_gradients_bwd(scale, residuals, dout):
    """The backward rule of `adapter_gradients`: (dout itself for out, None for x, the gradients of a and b that the sum
    `scale b a x` would give). residuals: (x, a, b)."""
    x, a, b = residuals
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dy, x = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])

    def product(left, right, dtype=x.dtype):
        return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)

    inner = product(x, a.astype(x.dtype).T)
    dinner = product(dy, b.astype(x.dtype))
    da, db = product(dinner.T, x, a.dtype), product(dy.T, inner, b.dtype)
    return dout, None, scale * da, scale * db


adapter_gradients.defvjp(lambda out, x, a, b, scale: (out, (x, a, b)), _adapter_gradients_bwd)
