"""The product of activations with a linear's weight, quantised or not, and its adapter (quant_matmul), the decoding of
a weight (decoded), and the choice of the implementation of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.formats import FP8, Stored
from jaxtune.pallas.formats.fp8 import ROW
from jaxtune.pallas.quant_matmul import fp8_product, mosaic, reference, triton
from jaxtune.pallas.quant_matmul.as_stored import product_of

# Implementations of decoding and of small products; products of many tokens use the vendor's GEMM.
IMPLEMENTATIONS = {"mosaic": mosaic, "triton": triton, "reference": reference}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeights:
    """A low-rank addition to a weight [out, in], scale * b a, which a product with x applies as two thin products."""

    a: jax.Array  # [r, in]; cast to x's dtype on use
    b: jax.Array  # [out, r]; cast to x's dtype on use
    # float32[out] or None; multiplies the output before the bias (DoRA's magnitude over the row norms)
    row_scale: jax.Array | None = None
    # alpha / r, or alpha / sqrt(r) for rsLoRA
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))


@meshes.on_any_mesh
def quant_matmul(
    x: jax.Array,
    weights: Sequence[jax.Array | Stored],
    loras: Sequence[LoraWeights | None] | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_part: jax.Array | int = 0,
    fp8: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Multiplies x by one to n weights that share it, with their adapters and biases.

    Args:
      x: [..., in] bfloat16, float16 or float32, the compute dtype; weights in another dtype are cast to it.
      weights: each [out_i, in], an array or quantised (`formats.NF4.encode(array)`, `FP8.encode(array)`).
        Quantised ones are decoded to x's dtype for each product, get no gradient, and leave nothing decoded behind for
        the backward.
      loras, biases: one entry a weight (float[out_i]), or None for none at all.
      dropout_rate, dropout_key: dropout on the adapters' input, one mask for the whole group (PEFT draws one for
        each module); no dropout without a key. The rate is rounded to 2^-16.
      dropout_part: int32[], which of equal parts x is of all the tokens that the mask is drawn for, in order: the same
        mask however tokens are divided over devices.
      fp8: weights in FP8 are multiplied as they are stored: rows of x, and of gradients, are rounded to e4m3, each by
        its largest magnitude, or for scales of 128 x 128 each 128 numbers of a row by their own, and sums are float32
        (fp8_product.py). Adapters multiply x as it is.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call.
    Returns:
      one [..., out_i] in x's dtype for each weight.
    Raises:
      TypeError, ValueError: an argument is not as described here.
    """
    check = Arguments("quant_matmul")
    check.array("x", x, "... in", FLOATS)
    check.sequence("weights", weights, "arrays or quantised weights")
    count = len(weights)
    for name, given in (("loras", loras), ("biases", biases)):
        if given is not None:
            check.sequence(name, given, "one for each weight, or None in its place", count)
    loras = tuple(loras) if loras is not None else (None,) * count
    biases = tuple(biases) if biases is not None else (None,) * count
    for i, (weight, lora, bias) in enumerate(zip(weights, loras, biases, strict=True)):
        check.array(f"weights[{i}]", weight, f"out_{i} in", FLOATS, stored=(Stored,))
        if lora is not None:
            check.is_a(f"loras[{i}]", lora, LoraWeights, "a LoraWeights or None")
            check.array(f"loras[{i}].a", lora.a, f"r_{i} in", FLOATS)
            check.array(f"loras[{i}].b", lora.b, f"out_{i} r_{i}", FLOATS)
            check.number(f"loras[{i}].scale", lora.scale)
            if lora.row_scale is not None:
                check.array(f"loras[{i}].row_scale", lora.row_scale, f"out_{i}", FLOATS)
        if bias is not None:
            check.array(f"biases[{i}]", bias, f"out_{i}", FLOATS)
    check.is_a("fp8", fp8, bool, "True or False")
    check.number("dropout_rate", dropout_rate, least=0, below=1)
    typed = isinstance(dropout_key, jax.Array) and jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key)
    if dropout_key is not None and not typed:
        check.array("dropout_key", dropout_key, "2", jnp.uint32)  # of jax.random.PRNGKey
    as_stored = (implementation,) if fp8 and any(product_of(weight) is not None for weight in weights) else ()
    others = [weight for weight in weights if not as_stored or product_of(weight) is None]
    kernels = reference
    if others or not as_stored:
        name = dispatch.choose("quant_matmul", implementations(others, x.dtype, implementation), implementation)
        kernels = IMPLEMENTATIONS[name]
    if not (isinstance(dropout_part, int) and dropout_part == 0):
        check.array("dropout_part", jnp.asarray(dropout_part), "", INTEGERS)
    return reference.matmul(x, weights, loras, biases, dropout_rate, dropout_key, dropout_part, kernels, as_stored)


def decoded(weight: jax.Array | Stored, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weight as an array, x), for a product of the two: a quantised weight, of any shape, is decoded to x's dtype by
    the first implementation that supports it; an array stays as it is.

    The use of the returned x ties the decoding to x: it happens once x is computed and not earlier, so that XLA neither
    keeps decoded weights nor decodes those of later layers ahead.
    """
    if not isinstance(weight, Stored):
        return weight, x
    name = dispatch.choose("quant_matmul", implementations([weight], x.dtype), None)
    return reference.decoded(weight, x, IMPLEMENTATIONS[name])


@meshes.on_any_mesh
def in_e4m3(x: jax.Array) -> FP8:
    """x [..., rows, width], bfloat16, float16 or float32, rounded to e4m3 as a product in FP8 rounds it, with a scale
    for each row: the form in which a model keeps residuals in FP8.

    A row that is not finite makes only itself not finite. Rounding the decoded values again gives the same codes.

    Raises:
      TypeError, ValueError: x is not as described here.
    """
    Arguments("in_e4m3").array("x", x, "... rows width", FLOATS)
    codes, scales = fp8_product.operand(x.reshape(-1, x.shape[-1]), False)
    return FP8(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1), ROW, x.dtype.name)


def implementations(weights: Sequence[jax.Array | Stored], dtype, implementation: str | None = None) -> dispatch.Table:
    """The implementations of a call in the order in which they are tried, each with a function that returns why it
    refuses it.

    Args:
      weights: of the call, each [out_i, in].
      dtype: of x.
      implementation: the name that the caller requests, or None. If all weights are arrays, only the vendor's GEMM is
        listed, unless this names another, which then refuses the call.
    """
    packed = [weight for weight in weights if isinstance(weight, Stored)]
    if not packed and implementation is None:
        return {"reference": lambda: None}

    def refusal(kernels) -> str | None:
        if not packed:
            return "no quantised weight"
        return next((reason for w in packed if (reason := kernels.refusal(w, dtype)) is not None), None)

    return {
        name: functools.partial(refusal, kernels) if kernels is not reference else lambda: None
        for name, kernels in IMPLEMENTATIONS.items()
    }
