"""quant_matmul in plain jnp: XLA calls the vendor's matrix products (GEMMs). Sums are float32; float32 operands are
multiplied in full float32.

The backward is written such that every sum is the `c` of a GEMM (a b + c): dx = dz A, + dy_1 W_1, + dy_2 W_2, ...
Autodiff would add the products pairwise, and XLA then spends a pass over memory on each addition.

Quantised weights are decoded before each product, in forward and backward, unless they are multiplied as they are
stored (as_stored.py) or, in the forward, the tokens are few; no decoded weight is a residual. The argument `kernels` is
the module that decodes weights, and multiplies few tokens by a weight without decoding it first: this module, mosaic.py
or triton.py. Each has the functions `refusal`, `dequantize`, `small_refusal` and `small_matmul`.

`matmul` is the whole operation. `decoded`, `scaled` and `dropout` are parts of it that others use too, and
`exact_product` is what the kernels for few tokens are compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from jaxtune.pallas import dispatch, draws
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import low_rank
from jaxtune.pallas.quant_matmul.as_stored import product_of
from jaxtune.pallas.thin_pair import thin_pair


class Static(NamedTuple):
    """How the products of a call with its weights and adapters are computed: its arguments that are not arrays."""

    owners: tuple[int, ...]  # for each adapter the index of its weight
    scales: tuple[float, ...]  # for each adapter its scale
    kernels: ModuleType  # decodes weights and multiplies few tokens: this module, mosaic.py or triton.py
    # (): all quantised weights are decoded; else a tuple of one: the requested implementation of products with weights
    # as they are stored, or None
    as_stored: tuple[str | None, ...]


class Rounded(NamedTuple):
    """What the gradients of outputs are in a backward, where their outputs have adapters: rounded, if a kernel does it
    for the product with the weights, and what the adapters need of them. A kernel that computes the gradients too does
    not write them in 16 bits, and `products_backward` gets these fields in their place."""

    # The rounded gradients of all outputs, side by side, as input_gradient takes them. None: they are not rounded yet.
    coded: tuple[jax.Array, jax.Array] | None
    dinner: jax.Array  # [tokens, sum of ranks], the gradient of the low-rank inputs
    dbs: Sequence[jax.Array]  # for each adapter the gradient of its B, [out, r]


def refusal(weight: Stored, dtype) -> str | None:
    """Returns the reason why `dequantize` of this module cannot decode a weight to `dtype`: always None, because it can
    decode all. mosaic.py and triton.py have a function of this name too; api.implementations asks only those two, and
    nothing calls this one."""
    del weight, dtype
    return None


def dequantize(weight: Stored, dtype) -> jax.Array:
    """The quantised weight, decoded in XLA to an array of its shape in `dtype`. The modules mosaic and triton have a
    kernel of the same name for it; this one is used where they refuse the weight, or "reference" is requested."""
    return weight.decode(dtype)


def small_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """Returns the reason, in words, why `small_matmul` of this module cannot multiply this number of tokens in `dtype`
    by a weight. It always returns one: the module has no such product, so `_times`, which asks it, decodes the weight
    for a GEMM instead."""
    del weight, dtype, tokens
    return "a decoded weight and the vendor's GEMM"


def small_matmul(x: jax.Array, weight: Stored) -> jax.Array:
    """Not available here: `small_refusal` refuses every call. In mosaic.py and triton.py, the function of this name
    multiplies x [tokens, in] by the codes of a weight [out, in] without decoding it first.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(small_refusal(weight, x.dtype, x.shape[0]))


@dispatch.exactly
def exact_product(x: jax.Array, weight: Stored) -> jax.Array:
    """The product of x [tokens, in] and the decoded weight [out, in] in full float32, float32[tokens, out], with which
    the kernels for a few tokens are compared at their first use. It is jitted without autotuning (dispatch.exactly)."""
    return jnp.dot(x.astype(jnp.float32), weight.decode(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


def _product(x, weight, contract, dtype=None):
    """Multiplies two matrices over one axis of each, in x's dtype with float32 sums (jax.lax.dot_general): [the other
    axis of x, the other axis of weight]. The forward and backward here compute all products by it that are neither a
    kernel's nor multiplied as stored.

    Args:
      x: of two dimensions; float32 is multiplied in full float32.
      weight: an array of two dimensions, cast to x's dtype.
      contract: (the axis of x, the axis of weight) that are summed over.
      dtype: of the result; None: x's.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        ((contract[:1], contract[1:]), ((), ())),
        precision=precision,
        preferred_element_type=dtype or x.dtype,
    )


def decoded(weight, x, kernels: ModuleType):
    """Decodes a weight that is about to be multiplied by x: returns (the weight as an array, x). A quantised weight is
    decoded to x's dtype by kernels.dequantize; an array and its x are returned unchanged. `_times` calls it, and
    api.decoded for products of other modules. kernels: the module that decodes, this one, mosaic.py or triton.py.

    The caller must use the returned x in its product, because a barrier ties the decoding to it. Otherwise XLA would
    decode once for forward and backward and keep the decoded weight in between, or move the decoding out of a loop over
    tokens.
    """
    if isinstance(weight, Stored):
        weight, x = optimization_barrier((weight, x))
        weight = kernels.dequantize(weight, x.dtype)
    return weight, x


def _times(x, weight, contract, kernels: ModuleType, more=None, bias=None):
    """Multiplies x by one weight, and adds an adapter's product and a bias, if they are given. The result is in x's
    dtype: [tokens, out] in the forward, [tokens, in] in the backward. Both call it for each weight that is not
    multiplied as it is stored.

    Args:
      x: in the forward the activations, [tokens, in]; in the backward the gradients of the outputs, [tokens, out].
      weight: [out, in], an array or quantised. A quantised weight is decoded first, by kernels.dequantize. In a forward
        of few tokens kernels.small_matmul multiplies by its codes instead, if kernels.small_refusal returns None.
      contract: the axes that are summed over, (axis of x, axis of weight): (1, 1) in the forward, (1, 0) in the
        backward.
      kernels: the module whose dequantize, small_refusal and small_matmul decode weights and multiply few tokens: this
        one, mosaic.py or triton.py.
      more: None, or two thin operands, whose product over the same axes is added. In the forward they are those of this
        weight's adapter, (u [tokens, r], b [out, r]). In the backward they are those of all adapters of the call, (u
        [tokens, sum of ranks], a [sum of ranks, in]), and only the first product for the gradient of x gets them;
        `products_backward` itself adds up the products of all weights.
      bias: float[columns of the result], or None.
    """
    call = (weight, x.dtype, x.shape[0])
    if isinstance(weight, Stored) and contract == (1, 1) and kernels.small_refusal(*call) is None:
        out = kernels.small_matmul(x, weight)
    else:
        if more is not None:
            # Otherwise XLA may make one GEMM of several small weights that share x, and add its parts to the thin
            # products: the output is then rounded before the adapter's part is added, and most of that part is lost.
            weight, x = optimization_barrier((weight, x))
        weight, x = decoded(weight, x, kernels)
        out = _product(x, weight, contract)
    if more is not None:
        # The order matters: XLA makes the right operand the c of the left GEMM.
        u, side = more
        out = out + _product(u, side, contract)
    return out if bias is None else out + bias.astype(out.dtype)


def scaled(part, scale):
    """Multiplies the array `part`, an operand of an adapter's product, by the adapter's number `scale`; the result has
    part's dtype, and is `part` itself for a scale of 1. It is multiplied in float32, because in part's dtype the number
    itself would be rounded first. The forward and backward of products with adapters call it, here and in
    grouped_matmul."""
    return part if scale == 1.0 else (part.astype(jnp.float32) * scale).astype(part.dtype)


def _parts(joined, loras):
    """Splits `joined` [n, sum of ranks] along its columns into one [n, r] for each adapter; a generator. loras: the
    adapters' pairs (a [r, in], b), in the same order. The forward and backward rules of `_products` split by it the
    product of the tokens with the stacked A's (`_join`), which is a residual, and the backward rule also the gradient
    of the stacked A's, transposed."""
    at = 0
    for a, _ in loras:
        yield joined[:, at : at + a.shape[0]]
        at += a.shape[0]


def _join(loras, dtype):
    """Stacks the A's of several adapters, pairs (a [r, in], b) in `loras`, into one thin matrix [sum of ranks, in] of
    `dtype`. The time of a product with A is that of reading x, so one product serves all adapters. The forward and
    backward rules of `_products` call it."""
    return jnp.concatenate([a.astype(dtype) for a, _ in loras], axis=0)


def low_rank_input(x, source, loras):
    """The product of the adapters' input [tokens, in] with all A's, and `source`, as `_products` takes the two: (inner
    [tokens, sum of ranks] in x's dtype, or None without adapters; source). If an earlier run made inner
    (low_rank.kept), it is that run's, and so are the factors of the rows if `source` is Factors and that run kept them
    (low_rank.OfNormed). No gradient flows through inner, because `_products` returns the whole gradient.

    Args:
      x: [tokens, in].
      source: that of `_products`.
      loras: a pair (a [r, in], b [out_i, r]) for each adapter.
    """
    if not loras:
        return None, source
    x, loras = jax.lax.stop_gradient((source if isinstance(source, jax.Array) else x, loras))
    made = low_rank.one(lambda given: _product(x, _join(loras, x.dtype), (1, 1)) if given is None else given)
    if not isinstance(made, low_rank.OfNormed):
        return made, source
    if isinstance(source, low_rank.Factors):  # nothing reads its own factors of rows then, and XLA removes them
        source = source._replace(of_rows=made.of_rows)
    return made.inner, source


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _products(x, source, weights, loras, biases, inner, static: Static):
    """The outputs of all weights, a tuple of [tokens, out_i], from x [tokens, in], with adapters and biases: x W^T +
    scale (x A^T) B^T + bias for each weight, in x's dtype. Its custom derivative decodes quantised weights again in the
    backward instead of keeping decoded ones. `matmul` calls it, applies row scales to the outputs, and adds the bias of
    an output with a row scale after that, so this function gets None for it.

    Args:
      x: [tokens, in].
      source: the adapters' input, [tokens, in], if it differs from x because of dropout, or the Factors of x
        (low_rank.py); None: it is x.
      weights: all that share x, each [out_i, in].
      loras: a pair (a [r, in], b [out_i, r]) for each adapter; weights without one have no entry.
      biases: for each weight [out_i] or None.
      inner: the product of the adapters' input with all A's (low_rank_input), [tokens, sum of ranks]; None without
        adapters. It gets no gradient of its own: those of x, source and the A's include it.
      static: how the products are computed.
    """
    del source  # `inner` is made of it
    return outputs(x, weights, loras, biases, inner, static)


def outputs(x, weights, loras, biases, inner, static: Static, coded: dict | None = None) -> tuple[jax.Array, ...]:
    """What `_products` computes, without a derivative of its own. The forwards of gated_matmul and normed_matmul call
    it too.

    Args:
      x: [tokens, in].
      weights: all that share x, each [out_i, in].
      loras: a pair (a [r, in], b [out_i, r]) for each adapter; weights without one have no entry.
      biases: for each weight [out_i] or None.
      inner: the product of the adapters' input with all A's, [tokens, sum of ranks]; None without adapters.
      static: how the products are computed.
      coded: {(product_of(weight), its kind): x in the form of products with such weights}, for those for which it is
        there already; None: it is computed for all. If it is there for all weights, only x's dtype matters.
    """
    more: list = [None] * len(weights)
    if loras:
        for owner, part, (_, b) in zip(static.owners, adapter_inputs(loras, inner, static), loras, strict=True):
            more[owner] = (part, b)
    coded = dict(coded or {})
    found = []
    for weight, added, bias in zip(weights, more, biases, strict=True):
        stored, kind = _kind(weight, static)
        if stored is not None:
            if (stored, kind) not in coded:
                coded[stored, kind] = stored.operand(x, kind, static.as_stored[0])
            out = stored.forward(coded[stored, kind], weight, added, x.dtype, static.as_stored[0])
            found.append(out if bias is None else out + bias.astype(out.dtype))
        else:
            found.append(_times(x, weight, (1, 1), static.kernels, added, bias))
    return tuple(found)


def _products_fwd(x, source, weights, loras, biases, inner, static: Static):
    """The forward rule of `_products`, with its arguments: (outputs, residuals). The residuals are the arguments except
    `static`."""
    return outputs(x, weights, loras, biases, inner, static), (x, source, weights, loras, biases, inner)


def products_backward(static: Static, residuals, doutputs, rounded: Rounded | None = None):
    """The backward rule of `_products`: the gradients of (x, source, weights, loras, biases, inner), in this structure.
    An entry is None where the argument is None, for `inner`, for Factors as `source`, and for a quantised weight, which
    gets no gradient. That of an array is always computed; XLA removes it if the weight is frozen. The gradient of x
    does not include that of `source`, through which the caller's dropout leads back to x.

    Args:
      static: how the products are computed.
      residuals: from `_products_fwd`.
      doutputs: the gradients of the outputs, a tuple of [tokens, out_i].
      rounded: what the backward takes of them where the kernel that computes them has rounded them: `doutputs` are then
        Nones, the weights of one kind, and there is no bias. gated_mlp, which calls this function too, may have it.
    """
    x, source, weights, loras, biases, inner = residuals
    dsource = more = coded = None
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
        dloras = tuple((part.T, db) for part, db in zip(_parts(da.T, loras), dbs, strict=True))
        more = (dinner, _join(loras, x.dtype))
        if source is not None and not factors:
            dsource, more = _product(*more, (1, 0)), None
    dx = input_gradient(doutputs, weights, more, x.dtype, static, coded)
    dweights = tuple(weight_gradient(dout, x, weight) for dout, weight in zip(doutputs, weights, strict=True))
    dbiases = tuple(bias_gradient(dout, bias) for dout, bias in zip(doutputs, biases, strict=True))
    return dx, dsource, dweights, dloras, dbiases, None


def adapter_gradients(doutputs, weights, loras, inner, static: Static) -> Rounded:
    """The gradients of adapters that are computed from those of their outputs: that of `inner`, of which the gradients
    of x and of the A's are made, and those of the B's. If all weights are multiplied as they are stored and have
    adapters, a kernel may compute all this and round the gradients of the outputs, which it then reads once.

    Args:
      doutputs: the gradients of all outputs of a call, a tuple of [tokens, out_i].
      weights: each [out_i, in].
      loras: a pair (a [r, in], b [out_i, r]) for each adapter; weights without one have no entry.
      inner: the product of the adapters' input with all A's, [tokens, sum of ranks].
      static: how the products are computed.
    """
    kinds = {_kind(weight, static) for weight in weights}
    [(product, kind), *others] = kinds
    if product is not None and not others and len(loras) == len(weights):
        thin = scaled_parts(inner, loras, static)
        found = product.rounded_gradients(doutputs, thin, [b for _, b in loras], kind, static.as_stored[0])
        if found is not None:
            coded, products, dbs = found
            dbs = [db.astype(b.dtype) for db, (_, b) in zip(dbs, loras, strict=True)]
            return Rounded(coded, scaled_parts(products, loras, static), dbs)
    parts = adapter_inputs(loras, inner, static)
    pairs = [
        thin_pair(doutputs[owner], b, part) for owner, part, (_, b) in zip(static.owners, parts, loras, strict=True)
    ]
    thins, dbs = zip(*pairs, strict=True)
    return Rounded(None, jnp.concatenate([*map(scaled, thins, static.scales)], axis=1), list(dbs))


def _kind(weight, static: Static) -> tuple:
    """(the module of products with the weight as it is stored, its kind there), or (None, None) if it is decoded.
    static: how the products are computed."""
    stored = product_of(weight) if static.as_stored else None
    return stored, None if stored is None else stored.kind(weight)


def adapter_inputs(loras, inner, static: Static) -> list[jax.Array]:
    """For each adapter its low-rank input times its scale, [tokens, r], which is multiplied by B, and by which the
    transposed gradient of the output is multiplied for the gradient of B. loras, inner, static: those of
    `adapter_gradients`."""
    return [scaled(part, scale) for scale, part in zip(static.scales, _parts(inner, loras), strict=True)]


def scaled_parts(joined, loras, static: Static) -> jax.Array:
    """Multiplies what adapters have side by side, `joined` [n, sum of ranks], each part by its adapter's scale. loras,
    static: those of `adapter_gradients`."""
    if len(set(static.scales)) == 1:
        return scaled(joined, static.scales[0])  # parts would be cut out first, and joined again
    return jnp.concatenate([*map(scaled, _parts(joined, loras), static.scales)], axis=1)


def input_gradient(doutputs, weights, more, dtype, static: Static, coded=None) -> jax.Array:
    """The gradient of the x that weights share: the sum of dy W over them, plus the adapters' product, [tokens, in] in
    `dtype`. Weights that are multiplied as they are stored get one product for all of the same kind.

    Args:
      doutputs: the gradients of the outputs, a tuple of [tokens, out_i].
      weights: each [out_i, in].
      more: None, or the adapters' two operands (the gradient of their low-rank inputs [tokens, sum of ranks], all A's
        [sum of ranks, in]), whose product is added.
      dtype: of x.
      static: how the products are computed.
      coded: None; or the gradients of weights that are all of one kind and multiplied as they are stored, side by side,
        as the module of such products takes them rounded (as_stored.py); `doutputs` are then not read.
    """
    parts: dict[tuple, list] = {}  # {(module of products with weights as stored, or None; kind): weights and gradients}
    for pair in zip(doutputs, weights, strict=True):
        parts.setdefault(_kind(pair[1], static), []).append(pair)
    dx = None
    for (stored, _), pairs in parts.items():
        if stored is None:
            for dout, weight in pairs:
                part = _times(dout, weight, (1, 0), static.kernels, more)
                dx = part if dx is None else part + dx  # the order matters: XLA makes the right operand the left's c
                more = None
        else:
            added = None if more is None else (more[0], more[1].T)
            douts, of_kind = zip(*pairs, strict=True)
            part = stored.backward(douts, of_kind, added, dtype, static.as_stored[0], coded)
            dx = part if dx is None else part + dx
            more = None
    assert dx is not None
    return dx


def weight_gradient(dout, x, weight) -> jax.Array | None:
    """The gradient of a weight, [out, in] in its dtype, which XLA removes if the weight is frozen; None for a quantised
    one, which has none. dout: [tokens, out]. x: [tokens, in]."""
    return None if isinstance(weight, Stored) else _product(dout, x, (0, 0), weight.dtype)


def bias_gradient(dout, bias) -> jax.Array | None:
    """The gradient of a bias [out], in its dtype; None without one. dout: [tokens, out]."""
    return None if bias is None else dout.astype(jnp.float32).sum(0).astype(bias.dtype)


_products.defvjp(_products_fwd, products_backward)


def dropout(x, rate, key, part: jax.Array | int = 0):
    """Inverted dropout of x [rows, columns]: each number becomes zero with probability `rate`, and the others are
    multiplied by 1 / (1 - rate), in float32. The result has x's dtype. The same key, rate, shape and part give the same
    mask. `matmul` calls it for the adapters' input, and so do linears of models that compute their adapters' products
    separately (quantisation-aware training).

    Args:
      x: the adapters' input.
      rate: from 0 to below 1, rounded to 2^-16.
      key: of jax.random.
      part: int32[]. If x is one of several equal contiguous runs of rows of a larger array (the tokens of the batch's
        rows that one device has), the number of the run, from 0. The mask is that part of the larger array's mask, so
        that the mask of a token does not depend on how many devices share the batch's rows.
    """
    keep = draws.mask(key, x.shape, rate, part)
    return jnp.where(keep, x.astype(jnp.float32) / (1.0 - rate), 0).astype(x.dtype)


def matmul(x, weights, loras, biases, dropout_rate, dropout_key, dropout_part, kernels: ModuleType, as_stored: tuple):
    """quant_matmul after its arguments were checked and an implementation was chosen: multiplies x [..., in] by each
    weight and adds adapters and biases. If an adapter has a row_scale, the sum of its and the weight's product is
    multiplied by it, in float32, before the bias is added. It returns a tuple of [..., out_i] in x's dtype. Only
    api.quant_matmul calls it, for every implementation.

    Args:
      x: [..., in].
      weights: each [out_i, in], an array or quantised.
      loras: a LoraWeights or None for each weight.
      biases: [out_i] or None for each weight.
      dropout_rate, dropout_key: dropout of the adapters' input; without a key there is none.
      dropout_part: int32[]. If tokens are divided over devices in equal runs, the number of the run that x is.
      kernels: the module that decodes weights and multiplies few tokens: this one, mosaic.py or triton.py.
      as_stored: an empty tuple: all quantised weights are decoded. A tuple of one: weights whose format has a product
        without decoding (as_stored.product_of) are multiplied by it, and the tuple's element is the implementation that
        the caller requests, or None.
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
    added = tuple(bias if scale is None else None for bias, scale in zip(biases, row_scales, strict=True))
    static = Static(owners, scales, kernels, as_stored)
    inner, source = low_rank_input(flat, source, pairs)
    products: tuple[jax.Array, ...] = _products(flat, source, tuple(weights), pairs, added, inner, static)
    finished = []
    for out, row_scale, bias in zip(products, row_scales, biases, strict=True):
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        if row_scale is not None:
            out = (out.astype(jnp.float32) * row_scale.astype(jnp.float32)).astype(x.dtype)
            out = out if bias is None else out + bias.astype(out.dtype)
        finished.append(out)
    return tuple(finished)
