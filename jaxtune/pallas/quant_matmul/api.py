"""Products of activations with weights of linears, quantised or not, and their adapters; the choice of the
implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4, Stored
from jaxtune.pallas.formats.four_bit import FourBit
from jaxtune.pallas.formats.fp8 import ROW
from jaxtune.pallas.quant_matmul import coded, fp8_product, mosaic, reference, triton
from jaxtune.pallas.quant_matmul.as_stored import product_of
from jaxtune.pallas.quant_matmul.lora_weights import LoraWeights, check_adapter

# Implementations of decoding and of small products; products of many tokens use the vendor's GEMM.
IMPLEMENTATIONS = {"mosaic": mosaic, "triton": triton, "reference": reference}
_WITH_KERNELS = (FourBit, MXFP4, NVFP4)  # XLA decodes other formats in one pass


@meshes.on_any_mesh
def quant_matmul(
    x: jax.Array,
    weights: Sequence[jax.Array | Stored],
    loras: Sequence[LoraWeights | None] | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_run: jax.Array | int = 0,
    fp8: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """For each weight x W^T + scale (x A^T) B^T + bias, [..., out_i] in x's dtype.

    Pass weights that share x in one call: the backward then sums their gradients of x without extra passes over memory.
    Differentiable in x, weights that are arrays, adapters and biases. TypeError or ValueError for an argument that does
    not fit, or an implementation that refuses.

      x: [..., in] bfloat16, float16 or float32, to which weights are cast.
      weights: each [out_i, in]. Quantised ones are decoded for each product, or, for few tokens, in the kernel; no
      decoded weight is kept.
      loras, biases: for each weight, or None; a row_scale multiplies both products before the bias.
      dropout_rate, dropout_key: dropout of the adapters' input, one mask for all weights (PEFT draws one for each
      module).
      dropout_run: int32[], x's run if tokens are divided over devices in equal runs, so that the mask does not depend
      on the division.
      fp8: multiply FP8 weights undecoded, by x and gradients rounded to e4m3. Adapters multiply x unrounded.
      implementation: "mosaic", "triton", "reference", or None for the first that supports the call. Without quantised
      weights only "reference" does.
    """
    check = Arguments("quant_matmul")
    check.array("x", x, "... in", FLOATS)
    check.sequence("weights", weights, "arrays or quantised weights")
    count = len(weights)
    for name, sequence in (("loras", loras), ("biases", biases)):
        if sequence is not None:
            check.sequence(name, sequence, "one for each weight, or None in its place", count)
    loras = tuple(loras) if loras is not None else (None,) * count
    biases = tuple(biases) if biases is not None else (None,) * count
    for i, (weight, lora, bias) in enumerate(zip(weights, loras, biases, strict=True)):
        check.array(f"weights[{i}]", weight, f"out_{i} in", FLOATS, stored=(Stored,))
        if lora is not None:
            check_adapter(check, i, lora, f"out_{i}")
            if lora.row_scale is not None:
                check.array(f"loras[{i}].row_scale", lora.row_scale, f"out_{i}", FLOATS)
        if bias is not None:
            check.array(f"biases[{i}]", bias, f"out_{i}", FLOATS)
    check.is_a("fp8", fp8, bool, "True or False")
    check.number("dropout_rate", dropout_rate, least=0, below=1)
    typed = isinstance(dropout_key, jax.Array) and jnp.issubdtype(dropout_key.dtype, jax.dtypes.prng_key)
    if dropout_key is not None and not typed:
        check.array("dropout_key", dropout_key, "2", jnp.uint32)  # of jax.random.PRNGKey
    chosen = choose(weights, x.dtype, fp8, implementation)
    if not (isinstance(dropout_run, int) and dropout_run == 0):
        check.array("dropout_run", jnp.asarray(dropout_run), "", INTEGERS)
    dropout = dropout_rate, dropout_key, dropout_run
    return reference.matmul(x, weights, loras, biases, *dropout, *chosen)


def choose(
    weights: Sequence[jax.Array | Stored], dtype, fp8: bool, implementation: str | None
) -> tuple[ModuleType, tuple[str | None, ...], Callable | None]:
    """How a call's products are computed: (kernels, as_stored, few) of reference.Static.

    dtype: of x. fp8: FP8 weights are multiplied undecoded.
    weights: of one call. implementation: the requested name, or None.
    """
    as_stored = (implementation,) if fp8 and any(product_of(weight) is not None for weight in weights) else ()
    decoded_weights = [weight for weight in weights if not as_stored or product_of(weight) is None]
    few = coded.few_products if implementation is None else None
    if as_stored and not decoded_weights:
        return reference, as_stored, None
    name = dispatch.choose("quant_matmul", implementations(decoded_weights, dtype, implementation), implementation)
    return IMPLEMENTATIONS[name], as_stored, few


def decoded(weight: jax.Array | Stored, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the weight as an array, x): a quantised weight of any shape is decoded to x's dtype.

    Use the returned x in the product: a barrier between the two makes XLA decode when x has been computed. Otherwise it
    would keep decoded weights from forward to backward, or decode later layers' ahead.
    """
    if not isinstance(weight, Stored):
        return weight, x
    name = dispatch.choose("quant_matmul", implementations([weight], x.dtype), None)
    return reference.decoded(weight, x, IMPLEMENTATIONS[name])


@meshes.on_any_mesh
def in_e4m3(x: jax.Array) -> FP8:
    """Rounds x [..., rows, width] to e4m3 with one float32 scale for each row. Decoded values round to the same codes
    again; a row that is not finite affects only that row.

    TypeError or ValueError unless x is bfloat16, float16 or float32 with two axes.
    """
    Arguments("in_e4m3").array("x", x, "... rows width", FLOATS)
    codes, scales = fp8_product.operand(x.reshape(-1, x.shape[-1]), False)
    return FP8(codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1), ROW, x.dtype.name)


def implementations(weights: Sequence[jax.Array | Stored], dtype, implementation: str | None = None) -> dispatch.Table:
    """{name: returns the reason of a refusal, or None}, in order of preference, for decoding `weights` to `dtype`.

    implementation: the requested name. None: arrays and formats without a kernel alone get only "reference"; if a name
    is given, "mosaic" and "triton" refuse them.
    """
    packed = [weight for weight in weights if isinstance(weight, Stored)]
    if implementation is None and not any(isinstance(weight, _WITH_KERNELS) for weight in packed):
        return {"reference": lambda: None}

    def refusal(kernels) -> str | None:
        if not packed:
            return "no quantised weight"
        return next((reason for w in packed if (reason := kernels.refusal(w, dtype)) is not None), None)

    return {
        name: functools.partial(refusal, kernels) if kernels is not reference else lambda: None
        for name, kernels in IMPLEMENTATIONS.items()
    }
