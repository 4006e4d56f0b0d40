"""quant_matmul of an RMS norm's result that nothing else reads. Where all weights are multiplied as they are stored, a
kernel computes what the products need (fp8_normed.py), and no normed x is written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import thin
from jaxtune.pallas.normed_heads import inverse_rms
from jaxtune.pallas.normed_stream import normed_stream
from jaxtune.pallas.quant_matmul import low_rank, reference
from jaxtune.pallas.quant_matmul.api import LoraWeights, quant_matmul
from jaxtune.pallas.quant_matmul.as_stored import product_of
from jaxtune.pallas.quant_matmul.fp8_product import NormRounding
from jaxtune.pallas.quant_matmul.lora_weights import check_adapter


@meshes.on_any_mesh
def normed_matmul(
    x: jax.Array,
    norm_weight: jax.Array,
    weights: Sequence[jax.Array | Stored],
    loras: Sequence[LoraWeights | None],
    biases: Sequence[jax.Array | None],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    fp8: bool = False,
) -> tuple[jax.Array, ...]:
    """quant_matmul of the RMS norm of x over its last axis: for each weight [..., out_i] in x's dtype. Differentiable
    as normed_stream and quant_matmul are.

    For FP8 weights with scales of one kind, and 2,048 rows of 512 numbers or more, a kernel rounds to e4m3 alone, and
    not to x's dtype first: its results are nearer to float32's. TypeError or ValueError for an argument that is not as
    here.

      x: [..., in] bfloat16, float16 or float32. norm_weight: float[in].
      weights: [out_i, in], arrays or quantised. biases: [out_i] or None for each.
      loras: for each weight its adapter, without a row_scale or gate, or None.
      eps: added to the mean square. offset: added to the norm's weight, if float32.
      float32: True: only the product with the norm's weight is rounded; False: both factors are rounded first, too.
      fp8: multiply FP8 weights undecoded, by rows rounded to e4m3.
    """
    check = Arguments("normed_matmul")
    check.array("x", x, "... in", FLOATS)
    check.array("norm_weight", norm_weight, "in", FLOATS)
    check.sequence("weights", weights, "arrays or quantised weights")
    check.sequence("loras", loras, "one for each weight, or None in its place", len(weights))
    check.sequence("biases", biases, "one for each weight, or None in its place", len(weights))
    check.is_a("fp8", fp8, bool, "True or False")
    for i, (weight, lora, bias) in enumerate(zip(weights, loras, biases, strict=True)):
        check.array(f"weights[{i}]", weight, f"out_{i} in", FLOATS, stored=(Stored,))
        if lora is not None:
            check_adapter(check, i, lora, f"out_{i}")
            if lora.row_scale is not None:
                raise ValueError(f"normed_matmul: loras[{i}].row_scale must be None: use quant_matmul for DoRA")
            if lora.gate is not None:
                raise ValueError(f"normed_matmul: loras[{i}].gate must be None: use quant_matmul")
        if bias is not None:
            check.array(f"biases[{i}]", bias, f"out_{i}", FLOATS)
    rounding = NormRounding(eps, offset, float32)
    if not (fp8 and _by_kernel(x, weights, loras)):
        return _plain(x, norm_weight, weights, loras, biases, rounding, fp8)
    rows, operands = x.reshape(-1, x.shape[-1]), (tuple(weights), tuple(loras), tuple(biases))
    run = functools.partial(_normed, rounding, rows, norm_weight, *operands)
    # Without adapters there is no low-rank input, so that none is kept.
    outs = low_rank.of_function(run) if any(loras) else run(None)[0]
    return tuple(out.reshape(*x.shape[:-1], out.shape[-1]) for out in outs)


def _by_kernel(x, weights, loras) -> bool:
    """Whether a kernel runs a call whose weights may be multiplied undecoded."""
    products = {product_of(weight) for weight in weights}
    product = products.pop()
    if products or product is None or not thin.is_large(x.size // x.shape[-1], x.shape[-1]):
        return False
    kinds = {product.kind(weight) for weight in weights}
    kind = kinds.pop()
    if kinds:
        return False
    rows = jax.ShapeDtypeStruct((x.size // x.shape[-1], x.shape[-1]), x.dtype)
    rank = sum(lora.a.shape[0] for lora in loras if lora is not None)
    table = {"triton": lambda: product.normed_refusal(rows, rank, kind), "reference": lambda: None}
    return dispatch.choose("normed_to_fp8", table, None) == "triton"


def _plain(x, norm_weight, weights, loras, biases, rounding: NormRounding, fp8: bool) -> tuple[jax.Array, ...]:
    normed = normed_stream(x, norm_weight, **rounding._asdict())[1]
    return quant_matmul(normed, weights, loras, biases, fp8=fp8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(rounding: NormRounding, x, norm_weight, weights, loras, biases, earlier):
    """By the kernel: (outputs [tokens, out_i], OfNormed or None)."""
    product = product_of(weights[0])
    assert product is not None
    kind = product.kind(weights[0])
    adapters = [lora for lora in loras if lora is not None]
    needs_product = adapters and earlier is None
    a = jnp.concatenate([lora.a.astype(jnp.float32) for lora in adapters]) if needs_product else None
    coded, of_normed = product.normed_operand(x, norm_weight, rounding, a, kind)
    owners = tuple(index for index, lora in enumerate(loras) if lora is not None)
    static = reference.Static(owners, tuple(lora.scale for lora in adapters), reference, (None,))
    pairs, of_normed = tuple((lora.a, lora.b) for lora in adapters), of_normed if earlier is None else earlier
    inner = None if of_normed is None else of_normed.inner
    return reference.outputs(x, weights, pairs, biases, inner, static, {(product, kind): coded}), of_normed


def _normed_fwd(rounding: NormRounding, x, norm_weight, weights, loras, biases, earlier):
    """Runs the two operations whose derivatives these are."""
    trained = norm_weight.perturbed
    values = (x, norm_weight, weights, loras, biases, earlier)
    x, norm_weight, weights, loras, biases, earlier = jax.tree.map(lambda leaf: leaf.value, values)

    def plain(x, norm_weight, loras, biases):
        norm_weight = norm_weight if trained else jax.lax.stop_gradient(norm_weight)
        with low_rank.collected(None if earlier is None else (earlier,)) as recorded:
            outs = _plain(x, norm_weight, weights, loras, biases, rounding, True)
        return outs, tuple(recorded)

    outs, pullback, recorded = jax.vjp(plain, x, norm_weight, loras, biases, has_aux=True)
    if recorded and earlier is None:
        [inner] = recorded
        assert isinstance(inner, jax.Array)
        earlier = low_rank.OfNormed(inner, inverse_rms(x, rounding.eps))
    return (outs, earlier), (pullback, None if not trained else ())


def _normed_bwd(rounding: NormRounding, residuals, gradients):
    """The norm's weight gets a gradient only if `trained` is not None. The second output's cotangent is ignored."""
    pullback, trained = residuals
    douts, _ = gradients
    douts = tuple(map(_as_array, douts))
    dx, dweight, dloras, dbiases = pullback(douts)
    return dx, None if trained is None else dweight, None, dloras, dbiases, None


def _as_array(gradient) -> jax.Array:
    """Zeros for a symbolic zero, of a result that nothing reads."""
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(gradient.shape, str(gradient.dtype))
    return gradient


_normed.defvjp(_normed_fwd, _normed_bwd, symbolic_zeros=True)
