"""An MLP's second half: its down projection of activation(gate) * up, where the weight is frozen and has an adapter.
The product with up is not kept for the backward; both directions multiply it by the adapter's thin array where they
compute it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.lax import optimization_barrier

from jaxtune.pallas import meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import ACTIVATIONS, activated, gated_thin, gated_thin_backward, thin_of_gated
from jaxtune.pallas.quant_matmul import low_rank, reference
from jaxtune.pallas.quant_matmul.api import LoraWeights, choose
from jaxtune.pallas.quant_matmul.as_stored import product_of


@meshes.on_any_mesh
def gated_matmul(
    gate: jax.Array,
    up: jax.Array,
    weight: jax.Array | Stored,
    lora: LoraWeights,
    bias: jax.Array | None = None,
    *,
    activation: str,
    fp8: bool = False,
) -> jax.Array:
    """quant_matmul of x = activation(gate) * up with one weight, its adapter and bias: [..., out] in gate's dtype.

    Its derivative computes x again, and writes the gradients of gate and up over them where a kernel can. An array gets
    its gradient too, for which x is computed once more. TypeError or ValueError for an argument that is not as here.

      gate, up: [..., in] bfloat16, float16 or float32.
      weight: [out, in], an array or quantised.
      lora: without a row_scale.
      activation: "silu", "gelu_tanh" or "gelu".
      fp8: multiply an FP8 weight undecoded, by x rounded to e4m3.
    """
    check = Arguments("gated_matmul")
    check.array("gate", gate, "... in", FLOATS)
    check.array("up", up, " ".join(map(str, gate.shape)), gate.dtype)
    check.array("weight", weight, "out in", FLOATS, stored=(Stored,))
    check.is_a("lora", lora, LoraWeights, "a LoraWeights")
    check.array("lora.a", lora.a, "r in", FLOATS)
    check.array("lora.b", lora.b, "out r", FLOATS)
    check.number("lora.scale", lora.scale)
    if lora.row_scale is not None:
        raise ValueError("gated_matmul: lora.row_scale must be None: use quant_matmul for adapters with DoRA")
    if lora.gate is not None:
        raise ValueError("gated_matmul: lora.gate must be None: use quant_matmul")
    if bias is not None:
        check.array("bias", bias, "out", FLOATS)
    check.choice("activation", activation, tuple(ACTIVATIONS))
    check.is_a("fp8", fp8, bool, "True or False")
    static = reference.Static((0,), (lora.scale,), *choose([weight], gate.dtype, fp8, None))
    flat = (array.reshape(-1, array.shape[-1]) for array in (gate, up))
    run = functools.partial(_gated, activation, static, *flat, weight, (lora.a, lora.b), bias)
    out: jax.Array = low_rank.of_function(run)
    return out.reshape(*gate.shape[:-1], out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(activation: str, static: reference.Static, gate, up, weight, lora, bias, earlier_inner):
    """([tokens, out], the adapter's low-rank input [tokens, r]), whose earlier value is earlier_inner, if not None."""
    product = product_of(weight) if static.as_stored else None
    if product is None:
        if earlier_inner is None:
            x, inner = gated_thin(gate, up, lora[0], activation)
        else:
            x, inner = activated(gate, up, activation), earlier_inner
        [out] = reference.outputs(x, (weight,), (lora,), (bias,), inner, static)
        return out, inner
    kind, [implementation] = product.kind(weight), static.as_stored
    if earlier_inner is None:
        coded, inner = product.gated_operand(gate, up, lora[0], activation, kind, implementation)
    else:
        coded, inner = product.operand(ACTIVATIONS[activation](gate) * up, kind, implementation), earlier_inner
    adapter = reference.scaled(inner, static.scales[0]), lora[1]
    out = product.forward(coded, weight, adapter, gate.dtype, implementation)
    return (out if bias is None else out + bias.astype(out.dtype)), inner


def _gated_fwd(activation: str, static: reference.Static, gate, up, weight, lora, bias, earlier_inner):
    """Computes the low-rank input apart from the output: the stack's backward runs this rule and needs no output."""
    if earlier_inner is None:
        earlier_inner = thin_of_gated(gate, up, lora[0], activation)
    results: tuple[jax.Array, jax.Array] = _gated(activation, static, gate, up, weight, lora, bias, earlier_inner)
    return results, (gate, up, weight, lora, bias, earlier_inner)


def _gated_bwd(activation: str, static: reference.Static, residuals, gradients):
    argument_gradients, _ = _second_half_backward(activation, static, residuals, gradients[0], None)
    return *argument_gradients, None


_gated.defvjp(_gated_fwd, _gated_bwd)


def _second_half_backward(activation: str, static: reference.Static, residuals, dout, first: tuple | None):
    """((gradients of gate, up, weight, lora and bias), None), or Nones for gate's and up's and their Rounded."""
    gate, up, weight, lora, bias, inner = residuals
    a = lora[0]
    coded, dinner, [db] = reference.adapter_gradients((dout,), (weight,), (lora,), inner, static)
    dgated = reference.input_gradient((dout,), (weight,), (dinner, a.astype(gate.dtype)), gate.dtype, static, coded)
    activation_arguments, rounded = (gate, up, dgated, dinner, activation), None
    if first is None:
        dgate, dup, da = gated_thin_backward(*activation_arguments)
    else:
        (dgate, dup), da, rounded = _rounded_gradients(activation_arguments, *first)
    dweight = reference.weight_gradient(dout, ACTIVATIONS[activation](gate) * up, weight)
    return (dgate, dup, dweight, (da.astype(a.dtype), db), reference.bias_gradient(dout, bias)), rounded


def _rounded_gradients(activation_arguments: tuple, static: reference.Static, weights, loras, biases, inner):
    """((gradients of gate and up, or Nones), of the A of down in float32, None or the Rounded of the first two)."""
    product = product_of(weights[0])
    assert product is not None
    adapters = None
    if not any(bias is not None for bias in biases):  # a bias needs its output's gradient itself
        thin_inputs = reference.adapter_inputs(loras, inner, static)
        adapters = [(thin_input, b) for thin_input, (_, b) in zip(thin_inputs, loras, strict=True)]
    gradients, da, kernel_results = product.gated_gradients(*activation_arguments, adapters, product.kind(weights[0]))
    if kernel_results is None:
        return gradients, da, None
    coded, products, dbs = kernel_results
    dbs = [db.astype(b.dtype) for db, (_, b) in zip(dbs, loras, strict=True)]
    return gradients, da, reference.Rounded(coded, reference.scaled_parts(products, loras, static), dbs)


@meshes.on_any_mesh
def gated_mlp(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    weights: Sequence[Stored],
    loras: Sequence[LoraWeights],
    biases: Sequence[jax.Array | None] = (None, None, None),
    *,
    activation: str,
) -> jax.Array:
    """gated_matmul of gate and up, which an earlier run computed, with the derivative of the whole MLP: [..., out] in
    x's dtype.

    One kernel then computes the gradients of gate and up, rounds them for the product with both weights, and multiplies
    them by the adapters' B's and low-rank inputs. All weights are multiplied undecoded. TypeError or ValueError for an
    argument that is not as here.

      x: [..., in] bfloat16, float16 or float32.
      gate, up: [..., I]; x and the adapters get the gradients.
      weights: of gate [I, in], up [I, in] and down [out, I]; `joins` must accept the first two.
      loras: without a row_scale. activation: "silu", "gelu_tanh" or "gelu".
      biases: of gate, up and down, or None.
    """
    check = Arguments("gated_mlp")
    check.array("x", x, "... in", FLOATS)
    check.array("gate", gate, "... I", x.dtype)
    check.array("up", up, " ".join(map(str, gate.shape)), x.dtype)
    check.choice("activation", activation, tuple(ACTIVATIONS))
    for name, sequence, description in (("weights", weights, "quantised weights"), ("loras", loras, "adapters")):
        check.sequence(name, sequence, description, 3)
    plain = all(lora.row_scale is None and lora.gate is None for lora in loras)
    if not (plain and joins(*weights[:2])):
        description = "weights of gate and up must be in FP8 with scales of 128 x 128, loras without row_scale and gate"
        raise ValueError(f"gated_mlp: {description}: use quant_matmul and gated_matmul")
    first, second = (
        reference.Static(owners, tuple(lora.scale for lora in group_loras), *choose(group_weights, x.dtype, True, None))
        for owners, group_loras, group_weights in (((0, 1), loras[:2], weights[:2]), ((0,), loras[2:], weights[2:]))
    )
    pairs = tuple((lora.a, lora.b) for lora in loras)
    source = low_rank.factors_of(x)
    source = None if source is None else source.flat()
    x, *inputs = (array.reshape(-1, array.shape[-1]) for array in (x, gate, up))
    inner, source = reference.low_rank_input(x, source, pairs[:2])
    parameters = tuple(weights), pairs, tuple(biases), inner
    run = functools.partial(_mlp, activation, first, second, x, source, *inputs, *parameters)
    out: jax.Array = low_rank.of_function(run)
    return out.reshape(*gate.shape[:-1], out.shape[-1])


def joins(gate: jax.Array | Stored, up: jax.Array | Stored) -> bool:
    """Whether gated_mlp takes such weights of gate and up: FP8 with scales of 128 x 128 numbers."""
    product = product_of(gate)
    return product is not None and product is product_of(up) and bool(product.kind(gate) and product.kind(up))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _mlp(activation: str, first, second, x, source, gate, up, weights, loras, biases, inner, earlier_inner):
    """`_gated` of gate and up; first, second: how the products of gate and up, and of down, are computed."""
    return _gated(activation, second, gate, up, weights[2], loras[2], biases[2], earlier_inner)


def _mlp_fwd(activation: str, first, second, x, source, gate, up, weights, loras, biases, inner, earlier_inner):
    results, second_residuals = _gated_fwd(activation, second, gate, up, weights[2], loras[2], biases[2], earlier_inner)
    return results, ((x, source, weights[:2], loras[:2], biases[:2], inner), second_residuals)


def _mlp_bwd(activation: str, first, second, residuals, gradients):
    (x, source, *product_residuals), second_residuals = residuals
    (dgate, dup, _, dlora, dbias), rounded = _second_half_backward(
        activation, second, second_residuals, gradients[0], (first, *product_residuals)
    )
    # As between the segments of a layer: what follows is not computed earlier, and the adapter's gradients not later.
    (x, source, *product_residuals), dgate, dup, rounded, dlora = optimization_barrier(
        ((x, source, *product_residuals), dgate, dup, rounded, dlora)
    )
    dx, _, _, dloras, dbiases, _ = reference.products_backward(
        first, (x, source, *product_residuals), (dgate, dup), rounded
    )
    return dx, None, None, None, None, (*dloras, dlora), (*dbiases, dbias), None, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)
