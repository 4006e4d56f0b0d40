"""quant_matmul in plain jnp: XLA calls the vendor's GEMMs. Sums are float32; float32 operands are multiplied in full
float32.

The backward is written such that every sum is the `c` of a GEMM (a b + c): dx = dz A, + dy_1 W_1, + dy_2 W_2, ...
Autodiff would add the products pairwise, and XLA then spends a pass over memory on each addition. No decoded weight is
a residual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from jaxtune.pallas import dispatch, draws, one_order
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import low_rank
from jaxtune.pallas.quant_matmul.as_stored import product_of
from jaxtune.pallas.thin_pair import thin_pair, thin_pairs


class Static(NamedTuple):
    """How a call's products are computed: its arguments that are not arrays."""

    owners: tuple[int, ...]  # for each adapter the index of its weight
    scales: tuple[float, ...]  # for each adapter its scale
    kernels: ModuleType  # decodes weights and multiplies few tokens: this module, mosaic.py or triton.py
    # (): all quantised weights are decoded; else a tuple of one: the requested implementation of products with weights
    # as they are stored, or None
    as_stored: tuple[str | None, ...]
    # coded.few_products, which decodes in registers; None: it may not multiply
    few: Callable[[jax.Array, Mapping[int, jax.Array | Stored]], dict[int, jax.Array]] | None = None


class Rounded(NamedTuple):
    """What a backward takes of the gradients of outputs with adapters. A kernel that computes and rounds the gradients
    does not write them in 16 bits.
    """

    # The rounded gradients of all outputs, side by side, as input_gradient takes them. None: they are not rounded yet.
    coded: tuple[jax.Array, jax.Array] | None
    dinner: jax.Array  # [tokens, sum of ranks], the gradient of the low-rank inputs
    dbs: Sequence[jax.Array]  # for each adapter the gradient of its B, [out, r]


def refusal(weight: Stored, dtype) -> str | None:
    del weight, dtype
    return None


def dequantize(weight: Stored, dtype) -> jax.Array:
    return weight.decode(dtype)


def small_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """Why no kernel should multiply so few tokens by this weight undecoded, or None."""
    del weight, dtype, tokens
    return "a decoded weight and the vendor's GEMM"


def small_matmul(x: jax.Array, weight: Stored) -> jax.Array:
    """NotImplementedError: `small_refusal` refuses every call."""
    raise NotImplementedError(small_refusal(weight, x.dtype, x.shape[0]))


@dispatch.exactly
def exact_product(x: jax.Array, weight: Stored) -> jax.Array:
    """x [tokens, in] times the decoded weight in full float32, float32[tokens, out], compiled without autotuning."""
    return jnp.dot(x.astype(jnp.float32), weight.decode(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


def _product(x, weight, contract, dtype=None):
    """dot_general over one axis of each, contract = (axis of x, axis of weight), in x's dtype with float32 sums."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        ((contract[:1], contract[1:]), ((), ())),
        precision=precision,
        preferred_element_type=dtype or x.dtype,
    )


def decoded(weight, x, kernels: ModuleType):
    """(the weight as an array in x's dtype, x). Use the returned x, to which a barrier ties the decoding: otherwise XLA
    would decode once for forward and backward and keep the result, or decode outside of a loop over tokens.

      kernels: the module that decodes: this one, mosaic.py or triton.py.
    """
    if isinstance(weight, Stored):
        weight, x = optimization_barrier((weight, x))
        weight = kernels.dequantize(weight, x.dtype)
    return weight, x


def _product_and_adapter(x, weight, contract, kernels: ModuleType, thin_operands=None, bias=None, product=None):
    """x times one weight, plus an adapter's product and a bias, in x's dtype: forward for contract (1, 1), backward for
    (1, 0).

      thin_operands: None, or in the forward one adapter's (u [tokens, r], b [out, r]); in the backward all adapters' (u
      [tokens, sum of ranks], a [sum of ranks, in]).
      product: x times the weight, if it is known.
    """
    call = (weight, x.dtype, x.shape[0])
    if one_order.is_exact() and contract == (1, 1):
        weight, x = decoded(weight, x, kernels)
        adapter = None if thin_operands is None else (thin_operands[0], thin_operands[1].astype(x.dtype))
        out = one_order.adapted(x, weight.astype(x.dtype), adapter)
        return out if bias is None else out + bias.astype(out.dtype)
    if product is not None:
        out = product
    elif isinstance(weight, Stored) and contract == (1, 1) and kernels.small_refusal(*call) is None:
        out = kernels.small_matmul(x, weight)
    else:
        if thin_operands is not None:
            # Otherwise XLA may make one GEMM of several small weights that share x, and add its parts to the thin
            # products: the output is then rounded before the adapter's part is added, and most of that part is lost.
            weight, x = optimization_barrier((weight, x))
        weight, x = decoded(weight, x, kernels)
        out = _product(x, weight, contract)
    if thin_operands is not None:
        # The order matters: XLA makes the right operand the c of the left GEMM.
        u, side = thin_operands
        out = out + _product(u, side, contract)
    return out if bias is None else out + bias.astype(out.dtype)


def scaled(array, scale):
    """`array` times an adapter's `scale`, in float32, as the scale itself would be rounded in part's dtype."""
    return array if scale == 1.0 else (array.astype(jnp.float32) * scale).astype(array.dtype)


def _parts(joined, loras):
    """Splits [n, sum of ranks] into one [n, r] for each adapter."""
    start = 0
    for a, _ in loras:
        yield joined[:, start : start + a.shape[0]]
        start += a.shape[0]


def _join(loras, dtype):
    """Stacks all A's, [sum of ranks, in]: a product with A takes as long as reading x, so one serves all adapters."""
    return jnp.concatenate([a.astype(dtype) for a, _ in loras], axis=0)


def _gated(inner, loras):
    """`inner` times each adapter's gate, or its scale; 0 where the gate is, whatever `inner` is there."""
    parts = []
    for columns, lora in zip(_parts(inner, [(lora.a, lora.b) for lora in loras]), loras, strict=True):
        if lora.gate is None:
            parts.append(scaled(columns, lora.scale))
            continue
        gate = lora.gate.reshape(-1, lora.gate.shape[-1])
        if len(gate) not in (1, len(columns)):
            raise ValueError(f"quant_matmul: a gate of {len(gate)} tokens for {len(columns)}")
        product = columns.astype(jnp.float32) * gate
        parts.append(jnp.where(gate != 0, product, 0).astype(columns.dtype))
    return jnp.concatenate(parts, axis=1)


def low_rank_input(x, source, loras):
    """(inner in x's dtype, or None without adapters; source), both from an earlier run if it has them
    (low_rank.collected). No gradient flows through inner, because `_products` returns the whole gradient.

      x: [tokens, in]. source: the adapters' input, Factors of x, or None: x. loras: (a [r, in], b [out, r]) each.
    """
    if not loras:
        return None, source
    x, loras = jax.lax.stop_gradient((source if isinstance(source, jax.Array) else x, loras))

    def made(earlier):
        if earlier is not None:
            return earlier
        joined = _join(loras, x.dtype)
        return one_order.adapted(x, joined) if one_order.is_exact() else _product(x, joined, (1, 1))

    recorded = low_rank.recorded(made)
    if not isinstance(recorded, low_rank.OfNormed):
        return recorded, source
    if isinstance(source, low_rank.Factors):  # nothing reads its own factors of rows then, and XLA removes them
        source = source._replace(of_rows=recorded.of_rows)
    return recorded.inner, source


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _products(x, source, weights, loras, biases, inner, static: Static):
    """For each weight x W^T + scale (x A^T) B^T + bias, [tokens, out_i] in x's dtype.

    source: the adapters' input, if dropout makes it differ from x, or the Factors of x; None: x.
    inner: without a gradient of its own: those of x, source and the A's include it.
    """
    del source  # `inner` is made of it
    return outputs(x, weights, loras, biases, inner, static)


def outputs(x, weights, loras, biases, inner, static: Static, coded: dict | None = None) -> tuple[jax.Array, ...]:
    """`_products` without a derivative of its own. coded: {(product_of(weight), its kind): x in the form of such
    products}; if all weights have it, only x's dtype matters.

      weights, biases: [out_i, in], [out_i] or None. loras: (a, b) of each adapter. inner: [tokens, sum of ranks].
    """
    adapters: list = [None] * len(weights)
    if loras:
        for owner, thin_input, (_, b) in zip(static.owners, adapter_inputs(loras, inner, static), loras, strict=True):
            adapters[owner] = (thin_input, b)
    coded = dict(coded or {})
    plain = {index: weight for index, weight in enumerate(weights) if _kind(weight, static)[0] is None}
    few = {} if static.few is None or one_order.is_exact() else static.few(x, plain)
    results = []
    for index, (weight, adapter, bias) in enumerate(zip(weights, adapters, biases, strict=True)):
        stored, kind = _kind(weight, static)
        if stored is not None:
            if (stored, kind) not in coded:
                coded[stored, kind] = stored.operand(x, kind, static.as_stored[0])
            out = stored.forward(coded[stored, kind], weight, adapter, x.dtype, static.as_stored[0])
            results.append(out if bias is None else out + bias.astype(out.dtype))
        else:
            product = few.get(index)
            results.append(_product_and_adapter(x, weight, (1, 1), static.kernels, adapter, bias, product))
    return tuple(results)


def _products_fwd(x, source, weights, loras, biases, inner, static: Static):
    return outputs(x, weights, loras, biases, inner, static), (x, source, weights, loras, biases, inner)


def products_backward(static: Static, residuals, doutputs, rounded: Rounded | None = None):
    """Gradients of (x, source, weights, loras, biases, inner); None for absent arguments, inner, Factors and quantised
    weights. XLA removes an array's gradient if it is frozen. x's gradient does not include source's, through which
    dropout leads back to x.

      rounded: what the backward takes where a kernel has rounded the gradients: `doutputs` are then Nones, the weights
      of one kind, and there is no bias.
      static, residuals: from the forward.
      doutputs: [tokens, out_i] each.
    """
    x, source, weights, loras, biases, inner = residuals
    dsource = adapter_product = coded = None
    dloras = ()
    if loras:
        if rounded is None:
            rounded = adapter_gradients(doutputs, weights, loras, inner, static)
        coded, dinner, dbs = rounded
        factors = isinstance(source, low_rank.Factors)
        if factors:
            da = source.contracted(dinner, loras[0][0].dtype)
        else:
            da = _product(dinner, x if source is None else source, (0, 0), loras[0][0].dtype)
        dloras = tuple((da_columns.T, db) for da_columns, db in zip(_parts(da.T, loras), dbs, strict=True))
        adapter_product = (dinner, _join(loras, x.dtype))
        if source is not None and not factors:
            dsource, adapter_product = _product(*adapter_product, (1, 0)), None
    dx = input_gradient(doutputs, weights, adapter_product, x.dtype, static, coded)
    dweights = tuple(weight_gradient(dout, x, weight) for dout, weight in zip(doutputs, weights, strict=True))
    dbiases = tuple(bias_gradient(dout, bias) for dout, bias in zip(doutputs, biases, strict=True))
    return dx, dsource, dweights, dloras, dbiases, None


def adapter_gradients(doutputs, weights, loras, inner, static: Static) -> Rounded:
    """The gradients of `inner` and of the B's. If all weights are multiplied undecoded and have adapters, a kernel may
    also round the outputs' gradients, which it then reads once. doutputs: [tokens, out_i] each.

      weights: [out_i, in]. loras: (a, b) of each adapter. inner: [tokens, sum of ranks], their low-rank inputs.
    """
    kinds = {_kind(weight, static) for weight in weights}
    [(product, kind), *other_kinds] = kinds
    if product is not None and not other_kinds and len(loras) == len(weights):
        thin = scaled_parts(inner, loras, static)
        kernel_results = product.rounded_gradients(doutputs, thin, [b for _, b in loras], kind, static.as_stored[0])
        if kernel_results is not None:
            coded, products, dbs = kernel_results
            dbs = [db.astype(b.dtype) for db, (_, b) in zip(dbs, loras, strict=True)]
            return Rounded(coded, scaled_parts(products, loras, static), dbs)
    adapted = [doutputs[owner] for owner in static.owners]
    together = thin_pairs(adapted, [b for _, b in loras], scaled_parts(inner, loras, static))
    if together is not None:
        return Rounded(None, scaled_parts(together[0], loras, static), together[1])
    thin_inputs = adapter_inputs(loras, inner, static)
    pairs = [
        thin_pair(dout, b, thin_input) for dout, thin_input, (_, b) in zip(adapted, thin_inputs, loras, strict=True)
    ]
    thins, dbs = zip(*pairs, strict=True)
    return Rounded(None, jnp.concatenate([*map(scaled, thins, static.scales)], axis=1), list(dbs))


def _kind(weight, static: Static) -> tuple:
    """(the module of undecoded products with the weight, its kind), or (None, None) if it is decoded."""
    stored = product_of(weight) if static.as_stored else None
    return stored, None if stored is None else stored.kind(weight)


def adapter_inputs(loras, inner, static: Static) -> list[jax.Array]:
    """Each adapter's low-rank input times its scale, [tokens, r].

    loras: (a, b) of each adapter. inner: [tokens, sum of ranks]. static: gives the scales.
    """
    return [scaled(columns, scale) for scale, columns in zip(static.scales, _parts(inner, loras), strict=True)]


def scaled_parts(joined, loras, static: Static) -> jax.Array:
    """[n, sum of ranks], each part times its adapter's scale. joined: [n, sum of ranks], side by side.

    loras: (a, b) of each adapter. static: gives the scales.
    """
    if len(set(static.scales)) == 1:
        return scaled(joined, static.scales[0])  # parts would be cut out first, and joined again
    return jnp.concatenate([*map(scaled, _parts(joined, loras), static.scales)], axis=1)


def input_gradient(doutputs, weights, adapters, dtype, static: Static, coded=None) -> jax.Array:
    """The sum of dy W over the weights, plus the adapters' product, [tokens, in] in `dtype`: one product for all
    undecoded weights of a kind.

      adapters: None, or (the gradient of inner, all A's [sum of ranks, in]).
      coded: None, or the gradients of undecoded weights of one kind, side by side and rounded, in place of `doutputs`.
      doutputs, weights: [tokens, out_i], [out_i, in] each. static: of the forward.
    """
    # {(module of products with weights as stored, or None; kind): (gradient, weight) of each}
    groups: dict[tuple, list] = {}
    for pair in zip(doutputs, weights, strict=True):
        groups.setdefault(_kind(pair[1], static), []).append(pair)
    dx = None
    for (stored, _), pairs in groups.items():
        if stored is None:
            for dout, weight in pairs:
                term = _product_and_adapter(dout, weight, (1, 0), static.kernels, adapters)
                dx = term if dx is None else term + dx  # the order matters: XLA makes the right operand the left's c
                adapters = None
        else:
            adapter = None if adapters is None else (adapters[0], adapters[1].T)
            douts, kind_weights = zip(*pairs, strict=True)
            term = stored.backward(douts, kind_weights, adapter, dtype, static.as_stored[0], coded)
            dx = term if dx is None else term + dx
            adapters = None
    assert dx is not None
    return dx


def weight_gradient(dout, x, weight) -> jax.Array | None:
    """dout^T x, [out, in], which XLA removes if the weight is frozen; None for a quantised one.

    dout, x: [tokens, out], [tokens, in].
    """
    return None if isinstance(weight, Stored) else _product(dout, x, (0, 0), weight.dtype)


def bias_gradient(dout, bias) -> jax.Array | None:
    return None if bias is None else dout.astype(jnp.float32).sum(0).astype(bias.dtype)


_products.defvjp(_products_fwd, products_backward)


def dropout(x, rate, key, run: jax.Array | int = 0):
    """Inverted dropout of x [rows, columns]. The rate is rounded to 2^-16; the same key, rate, shape and part give the
    same mask. run: int32[], the number of x among equal runs of rows of a larger array, of whose mask x gets its part.

      key: typed or uint32[2].
    """
    keep = draws.mask(key, x.shape, rate, run)
    return jnp.where(keep, x.astype(jnp.float32) / (1.0 - rate), 0).astype(x.dtype)


def matmul(x, weights, loras, biases, dropout_rate, dropout_key, dropout_part, kernels: ModuleType, as_stored, few):
    """quant_matmul of checked arguments and a chosen implementation. A row_scale multiplies both products, in float32,
    before the bias is added.

      x: [..., in]. weights: [out_i, in]. loras, biases: a LoraWeights or None, an array or None for each.
      dropout_rate, dropout_key: of the adapters' inputs; a rate of 0: no dropout.
      dropout_part: x's number among equal runs of rows.
      kernels: the module that decodes and multiplies few tokens. as_stored, few: of Static.
    """
    flat = x.reshape(-1, x.shape[-1])
    owners = tuple(index for index, lora in enumerate(loras) if lora is not None)
    source = None
    if owners and dropout_key is not None and dropout_rate > 0.0:
        source = dropout(flat, dropout_rate, dropout_key, dropout_part)
    elif owners:
        source = low_rank.factors_of(x)
        source = None if source is None else source.flat()
    pairs = tuple((loras[index].a, loras[index].b) for index in owners)
    scales = tuple(loras[index].scale for index in owners)
    # A row scale is applied between the product and its bias.
    row_scales = [None if lora is None else lora.row_scale for lora in loras]
    product_biases = tuple(bias if scale is None else None for bias, scale in zip(biases, row_scales, strict=True))
    static = Static(owners, scales, kernels, as_stored, few)
    inner, source = low_rank_input(flat, source, pairs)
    products: tuple[jax.Array, ...]
    if any(loras[index].gate is not None for index in owners):
        inner = _gated(inner, [loras[index] for index in owners])
        products = outputs(
            flat, tuple(weights), pairs, product_biases, inner, static._replace(scales=(1.0,) * len(owners))
        )
    else:
        products = _products(flat, source, tuple(weights), pairs, product_biases, inner, static)
    finished = []
    for out, row_scale, bias in zip(products, row_scales, biases, strict=True):
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        if row_scale is not None:
            out = (out.astype(jnp.float32) * row_scale.astype(jnp.float32)).astype(x.dtype)
            out = out if bias is None else out + bias.astype(out.dtype)
        finished.append(out)
    return tuple(finished)
