"""Fake quantisation: a weight rounded to what a low-bit format can hold, for quantisation-aware training.

Forward, the rounded weight; backward, the gradient passes straight through to the weight (arXiv 1308.3432, 1712.05877).
Over an adapter it is the merged weight that is rounded, as a deployed model's is; the adapter's gradients are those of
the plain adapter, which need no dense gradient of the merged weight.
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
    """Symmetric int4: each group of a row is -8..7 times a scale, the least one that clips nothing.

    scale = max(max(w) / 7, -min(w) / 8), rounded to `dtype`; to nearest even. What W4A16 formats hold (GPTQ and
    compressed-tensors, symmetric; torchao's SYMMETRIC_NO_CLIPPING_ERR): a kernel that multiplies code and scale in
    `dtype` gets these very values.
    """
    groups = weight.astype(jnp.float32).reshape(weight.shape[0], -1, group_size)
    scale = int4_scales(groups, dtype).astype(jnp.float32)
    return (int4_codes(groups, scale) * scale).astype(dtype).reshape(weight.shape)


def int4_scales(groups: jax.Array, dtype: str) -> jax.Array:
    """[out, n, 1] in dtype: the scales of groups float32[out, n, group]."""
    # XLA may make a product of a division by a constant, or not: a product is the same in every program.
    seventh = np.float32(1 / 7)
    scale = jnp.maximum(groups.max(-1, keepdims=True) * seventh, -groups.min(-1, keepdims=True) / 8)
    return scale.astype(dtype)


def int4_codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """float32, whole numbers from -8 to 7: the codes of groups with scales float32[out, n, 1]."""
    return jnp.clip(jnp.round(groups / jnp.where(scale == 0, 1, scale)), -8, 7)


@dataclasses.dataclass(frozen=True)
class Format:
    """round(weight [out, in], group_size, dtype) -> [out, in] in dtype; groups lie along the input."""

    round: Callable[[jax.Array, int, str], jax.Array]
    group_sizes: tuple[int, ...]


FORMATS = {"int4": Format(int4, (32, 64, 128))}


@dataclasses.dataclass(frozen=True)
class FakeQuant:
    """How a linear's weight is rounded. dtype: of the rounded values and their scales, whatever computes with them."""

    format: str
    group_size: int
    dtype: str

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"qat format {self.format!r} is not supported; supported: {', '.join(FORMATS)}")
        sizes = FORMATS[self.format].group_sizes
        if self.group_size not in sizes:
            wanted = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
            raise ValueError(f"qat group_size {self.group_size}: {self.format} has groups of {wanted}")

    @classmethod
    def of_record(cls, where: str, record: Any) -> FakeQuant:
        """What a file records of a grid, which `where` names.

        Raises:
          ValueError: a grid that is not known here, or a dtype that is none of a model's.
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

    def held_by(self, dtype: str) -> bool:
        """Whether a dtype holds every rounded value."""
        return jnp.promote_types(self.dtype, dtype) == dtype

    def fits(self, in_size: int) -> bool:
        return in_size % self.group_size == 0

    def round(self, weight: jax.Array) -> jax.Array:
        """[out, in] -> [out, in] in self.dtype."""
        with jax.named_scope("fake_quantise"):
            return FORMATS[self.format].round(weight, self.group_size, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight_through(spec: FakeQuant, weight: jax.Array, x: jax.Array) -> jax.Array:
    """The rounded weight, in weight's own dtype; its gradient is the weight's.

    Rounding is tied to x: else XLA shares it between forward and backward and keeps the rounded weight for as long.
    """
    weight, _ = optimization_barrier((weight, x))
    return spec.round(weight).astype(weight.dtype)


straight_through.defvjp(
    lambda spec, weight, x: (straight_through(spec, weight, x), None), lambda spec, _, dweight: (dweight, None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapter_gradients(out: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """`out` [..., out] as it is. Backward, a [r, in] and b [out, r] get the gradients of scale b a x."""
    del x, a, b, scale
    return out


def _adapter_gradients_bwd(scale, residuals, dout):
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
