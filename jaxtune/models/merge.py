"""Merging an adapter into its base, with proof that the result computes the same."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.layers.experts import ExpertLinear
from jaxtune.models.linear import Frozen, Linear, merged_weight, trained
from jaxtune.models.lora import copy_structure, matrices
from jaxtune.models.quant import convert_qat, dequantize, qat_spec
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

_FP32_ROUNDOFF = 2.0**-24
# Margin of the bound on logits, which is statistical; see _check_logits.
_LOGITS_MARGIN = 8.0
_PROBE_ROWS, _PROBE_LENGTH = 2, 16


@functools.partial(jax.jit, static_argnames=("dtype", "fake_quant"))
def _merge_and_check(weight: jax.Array, lora: LoraWeights, probe: jax.Array, dtype, fake_quant: FakeQuant | None):
    """(merged weight in dtype, is it finite, largest error of its product with probe over the error allowed).

    With fake_quant the merged weight is then put on its grid, which the check leaves out: it is not an error.

    The product with the merged weight is compared with the adapter's own forward, in fp32. Rounding each weight to the
    storage dtype moves output o by at most u sum_i |w_oi x_i|, u its unit roundoff; the fp32 sums of n terms in either
    path by at most n u32 times the sum of the terms' magnitudes. So the bound holds for every correct merge.
    """
    wide = merged_weight(weight, lora)
    if fake_quant is None:
        stored = wide.astype(dtype)
        wide = stored.astype(jnp.float32)
    else:
        stored = fake_quant.round(wide).astype(dtype)
    expected = quant_matmul(probe, [weight.astype(jnp.float32)], [lora])[0]
    got = quant_matmul(probe, [wide])[0]

    def size(w):  # [.., in] x [out, in] of magnitudes
        return jnp.einsum("bi,oi->bo", jnp.abs(probe), jnp.abs(w), precision=jax.lax.Precision.HIGHEST)

    inner = jnp.einsum("bi,ri->br", jnp.abs(probe), jnp.abs(lora.a), precision=jax.lax.Precision.HIGHEST)
    terms = size(weight.astype(jnp.float32)) + abs(lora.scale) * jnp.einsum(
        "br,or->bo", inner, jnp.abs(lora.b), precision=jax.lax.Precision.HIGHEST
    )
    terms = terms if lora.row_scale is None else terms * jnp.abs(lora.row_scale)
    length = weight.shape[1] + lora.a.shape[0]
    # Subnormal results round absolutely, not relatively.
    tiny = jnp.abs(probe).sum(-1, keepdims=True) * float(jnp.finfo(dtype).smallest_subnormal)
    allowed = _roundoff(dtype) * size(wide) + 2 * length * _FP32_ROUNDOFF * terms + tiny
    return stored, jnp.isfinite(wide).all(), (jnp.abs(got - expected) / allowed).max()


@functools.partial(jax.jit, static_argnums=3)
def _merge_experts(weight: jax.Array, lora: GroupedLora, probe: jax.Array, transposed: bool):
    """As _merge_and_check, expert by expert; the worst of the experts."""

    def one(expert):
        weight, a, b = expert
        weight = weight.T if transposed else weight
        lora_of = LoraWeights(a, b, None, lora.scale)
        stored, finite, error = _merge_and_check(weight, lora_of, probe, weight.dtype, fake_quant=None)
        return stored.T if transposed else stored, finite, error

    stored, finite, errors = jax.lax.map(one, (weight, lora.a, lora.b))
    return stored, finite.all(), errors.max()


def _roundoff(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 2


@dispatch.unsaid()  # it checks in float32, once: kernels for training refuse that, and nobody misses them
def merge_adapter(model: Decoder) -> Decoder:
    """The model with its adapter added into the weights: w + scale b a, rescaled for DoRA, in fp32, tensor by tensor.

    Merged weights have the dtype that the base is stored in; modules_to_save take the place of the base's. The result
    is a base again: no adapters, every tensor an `nnx.Param`, tied heads tied.

    Over quantised weights the adapter is merged into the dequantised ones, which it was trained over, in the compute
    dtype: the merged model's weights are 16-bit (32-bit where it computes in float32), those without an adapter too.
    In a model prepared for QAT the merged weights are put on its grid, as its forward does; see convert_qat.

    Checks before returning that every merged weight is finite and acts like its adapter (a bound that always holds for
    a right merge, see _merge_and_check), and that the logits of a small random batch agree (see _check_logits).

    Returns:
      a new model; it shares with `model` what did not change.
    Raises:
      ValueError: no adapter.
      ArithmeticError: a check failed; nothing is returned.
    """
    adapted = [name for name, matrix in matrices(model) if matrix.lora is not None]
    if not adapted:
        raise ValueError("merge_adapter: this model has no adapter")
    merged = copy_structure(model)
    # The norms are never trained whole beside an adapter, so they still have the dtype of the base.
    dtype = model.norm.weight.get_value().dtype
    outcomes = {}
    for index, (name, linear) in enumerate(matrices(merged)):
        if linear.lora is None:
            continue
        weight = dense(linear.stored_weight, model.dtype)
        probe = jax.random.normal(jax.random.key(index), (8, linear.sizes[-1]), jnp.float32)
        if isinstance(linear, ExpertLinear):
            stored, finite, error = _merge_experts(weight, linear.lora.weights(), probe, linear.transposed)
        else:
            stored, finite, error = _merge_and_check(
                weight, linear.lora.weights(weight), probe, dtype=weight.dtype, fake_quant=linear.fake_quant
            )
            linear.fake_quant = None
        linear.weight = trained(linear.weight, stored)
        linear.lora = nnx.data(None)
        outcomes[name] = (finite, error)
    for module in (merged.embedding, merged.head):
        if module is not None and isinstance(module.weight, nnx.Param):
            module.weight = trained(module.weight, module.weight.get_value().astype(dtype))
            if module.original is not None:
                del module.original
            outcomes[model.config.head_name if isinstance(module, Linear) else "embed_tokens"] = (
                jnp.isfinite(module.weight.get_value()).all(), jnp.zeros(()),
            )  # fmt: skip
    for name, (finite, error) in jax.device_get(outcomes).items():
        if not finite:
            raise ArithmeticError(f"merge_adapter: {name} is not finite in {dtype} after merging; nothing was merged")
        if not error <= 1.0:
            raise ArithmeticError(
                f"merge_adapter: {name} does not act like its adapter: {error:.3g} times the rounding error allowed"
            )
    if missed := sorted(set(adapted) - set(outcomes)):
        raise ArithmeticError(f"merge_adapter: not merged: {', '.join(missed)}")
    changed = len(outcomes) + sum(isinstance(matrix.stored_weight, Stored) for _, matrix in matrices(merged))
    merged = dequantize(merged)
    if qat_spec(merged) is not None:
        merged = convert_qat(merged)  # the linears without an adapter
    merged.qat = qat_spec(model)
    for _, module in nnx.iter_modules(merged):
        for name, value in list(vars(module).items()):
            if isinstance(value, Frozen):
                setattr(module, name, trained(value, value.get_value()))
    merged.base_digest = merged.base_fingerprint = None  # it is another base now
    _check_logits(model, merged, changed)
    return merged


def _check_logits(model: Decoder, merged: Decoder, changed: int) -> None:
    """Compares logits on a random batch, both models computing in fp32: only the rounding of stored weights is left.

    Rounding weights at random, with unit roundoff u, changes a product by about u / 2 of its size, and errors of
    `changed` products add like a random walk. So the root mean square of the difference must be at most
    8 u sqrt(changed) of that of the logits about their mean, where u counts fp32's own sums too. The check of each
    matrix is the sharp one; this one is for what lies between them.
    """
    config = model.config
    tokens = jax.random.randint(jax.random.key(0), (_PROBE_ROWS, _PROBE_LENGTH), 0, config.vocab_size)

    def logits(module):
        module = copy_structure(module)
        module.dtype = "float32"
        return module(tokens)

    expected, got = logits(model), logits(merged)
    widest = max(config.hidden_size, config.intermediate_size, config.query_size)
    roundoff = _roundoff(merged.norm.weight.get_value().dtype) + _FP32_ROUNDOFF * widest**0.5
    bound = _LOGITS_MARGIN * roundoff * changed**0.5
    middle = expected.mean(-1 if config.num_labels is None else None, keepdims=True)  # of scores, over all tokens
    scale = jnp.sqrt(jnp.mean(jnp.square(expected - middle)))
    error = float(jnp.sqrt(jnp.mean(jnp.square(got - expected))) / scale)
    if not error <= bound:
        raise ArithmeticError(
            f"merge_adapter: the merged model's logits differ from the adapter model's by {error:.3g} of their size; "
            f"rounding explains {bound:.3g}. Nothing was merged"
        )
