"""Products of activations with weights of linears, quantised or not, and their adapters: quant_matmul, the function
that models call; decoded, which decodes a weight for another product; in_e4m3, which rounds activations to FP8;
LoraWeights, an adapter; and the choice of the implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType

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
    """A low-rank adapter of a weight [out, in]: it adds scale * b a to the weight. quant_matmul never stores the sum;
    it adds scale * (x a^T) b^T to the product with x instead. Linears make it from their adapter's parameters for a
    call of quant_matmul, and merged_weight (models/linear.py), which does compute the sum, takes it too."""

    a: jax.Array  # [r, in]; cast to x's dtype on use
    b: jax.Array  # [out, r]; cast to x's dtype on use
    # float32[out] or None (no factor); multiplies the output, weight and adapter, before the bias is added: DoRA's
    # magnitude of each output divided by the norm of its row of the weight
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
    """Multiplies x by one or several weights, and adds their adapters and biases: for each weight x W^T + scale (x A^T)
    B^T + bias. Weights that share x, such as those of queries, keys and values, are multiplied in one call, so that
    their gradients with respect to x are summed without extra passes over memory. If an adapter has a row_scale, the
    sum of both products is multiplied by it before the bias is added. Differentiable with respect to x, weights that
    are arrays, adapters and biases.

    Args:
      x: [..., in] bfloat16, float16 or float32, the compute dtype; weights in another dtype are cast to it.
      weights: each [out_i, in], an array or quantised (`formats.NF4.encode(array)`, `FP8.encode(array)`). Quantised
        ones are decoded to x's dtype for each product, or, in the forward of few tokens, while a kernel multiplies;
        they get no gradient, and no decoded weight is kept for the backward.
      loras: for each weight its adapter, or None for none; or None if no weight has one.
      biases: for each weight its bias, float[out_i], or None for none; or None if no weight has one.
      dropout_rate, dropout_key: dropout of the adapters' input, with one mask for all weights of the call (PEFT draws
        one for each module). Without a key there is no dropout. The rate is rounded to 2^-16.
      dropout_part: int32[]. If tokens are divided over devices in equal contiguous runs, the number of the run that x
        is. The mask of a token then does not depend on how tokens are divided.
      fp8: True: weights in FP8 are multiplied as they are stored. For this, rows of x and of gradients are rounded to
        e4m3, each row by its largest magnitude, or, for weights with scales of 128 x 128 numbers, each 128 numbers of a
        row by their largest; sums are float32 (fp8_product.py). Adapters multiply x unrounded. False: weights in FP8
        are decoded like all others.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call. The implementation
        decodes weights, multiplies few tokens by codes, and with `fp8` multiplies in FP8; arrays are always multiplied
        by XLA, so "mosaic" and "triton" refuse a call without quantised weights.
    Returns:
      a tuple with one [..., out_i] in x's dtype for each weight.
    Raises:
      TypeError, ValueError: a class, dtype, shape or number is not as described here (the contents of arrays are not
        checked), or the requested implementation is unknown or refuses the call.
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
    kernels, as_stored = chosen(weights, x.dtype, fp8, implementation)
    if not (isinstance(dropout_part, int) and dropout_part == 0):
        check.array("dropout_part", jnp.asarray(dropout_part), "", INTEGERS)
    return reference.matmul(x, weights, loras, biases, dropout_rate, dropout_key, dropout_part, kernels, as_stored)


def chosen(
    weights: Sequence[jax.Array | Stored], dtype, fp8: bool, implementation: str | None
) -> tuple[ModuleType, tuple[str | None, ...]]:
    """Chooses how a call's products with its weights are computed: (kernels, as_stored), which reference.Static
    describes. quant_matmul and gated_matmul call it. weights, fp8, implementation: those of the call. dtype: of x."""
    as_stored = (implementation,) if fp8 and any(product_of(weight) is not None for weight in weights) else ()
    others = [weight for weight in weights if not as_stored or product_of(weight) is None]
    if as_stored and not others:
        return reference, as_stored
    name = dispatch.choose("quant_matmul", implementations(others, dtype, implementation), implementation)
    return IMPLEMENTATIONS[name], as_stored


def decoded(weight: jax.Array | Stored, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decodes a weight that is about to be multiplied by x: returns (the weight as an array, x). A quantised weight, of
    any shape, is decoded to x's dtype by the first implementation that supports it; an array and its x are returned
    unchanged. Products other than quant_matmul's need it, such as those of experts, and so does a sampler that keeps
    decoded weights.

    The caller must use the returned x in its product. A barrier between the two makes XLA decode when x has been
    computed and not earlier; otherwise it would keep decoded weights from forward to backward, or decode those of later
    layers ahead.
    """
    if not isinstance(weight, Stored):
        return weight, x
    name = dispatch.choose("quant_matmul", implementations([weight], x.dtype), None)
    return reference.decoded(weight, x, IMPLEMENTATIONS[name])


@meshes.on_any_mesh
def in_e4m3(x: jax.Array) -> FP8:
    """Rounds x [..., rows, width], bfloat16, float16 or float32, to e4m3, with one float32 scale for each row along the
    last axis, as quant_matmul does before a product in FP8. The stack of layers stores in this form, for the backward,
    the activations that a residual plan places in "fp8" (an MLP's gate and up), in half the memory of 16 bits; the
    result's `decode` returns them, rounded, in x's dtype.

    A row that is not finite makes only that row of the result not finite. If the decoded values are rounded again, the
    codes are the same.

    Raises:
      TypeError, ValueError: x has another dtype, or fewer than two axes.
    """
    Arguments("in_e4m3").array("x", x, "... rows width", FLOATS)
    codes, scales = fp8_product.operand(x.reshape(-1, x.shape[-1]), False)
    return FP8(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1), ROW, x.dtype.name)


def implementations(weights: Sequence[jax.Array | Stored], dtype, implementation: str | None = None) -> dispatch.Table:
    """The implementations of a call in the order in which they are tried: {name: a function that returns the reason why
    it refuses the call, or None}. `quant_matmul` and `decoded` take the first that does not refuse (dispatch.choose),
    and `jaxtune info` prints why others do.

    Args:
      weights: those of the call, each [out_i, in]; an implementation other than "reference" refuses if it cannot decode
        one of the quantised ones.
      dtype: of x, to which weights are decoded.
      implementation: the name that the caller requests, or None. If it is None and all weights are arrays, only
        "reference" (XLA's product of arrays) is listed; if it is a name, all are, and for arrays alone "mosaic" and
        "triton" refuse.
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
