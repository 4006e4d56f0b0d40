"""The matrices of a mixture of experts: `ExpertLinear` has one matrix of every expert, stacked in one array (a layer of
experts, experts.py, has two of them), and `ExpertLora` their LoRA adapters, one for each expert, stacked likewise.
`_merged_and_rounded` computes the weights of quantisation-aware training (QAT) where they are frozen: adapters merged
in, and rounded to a grid."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.linear import merged_weight
from jaxtune.models.qat_gradients import gradients_of, straight_through, unclipped_gradients
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul
from jaxtune.pallas.quant_matmul import LoraWeights
from jaxtune.pallas.routing import Routing, matmul_of_tokens, matmul_to_tokens, token_bias

_RANK_STEP = 64  # grouped_matmul's kernels sum over multiples of this many numbers, so ranks are padded to them


class ExpertLora(nnx.Module):
    """The LoRA adapters of one matrix of every expert, stacked: a [E, r, in] and b [E, out, r] (zero at the start),
    float32. It is the attribute `lora` of an ExpertLinear, whose output gets scale * b a x added; under `fake_quant` it
    is merged into the weight instead, before that is rounded. get_peft_model (models/lora.py) makes it.

    The scale follows from `alpha` and `rslora`, as in PEFT. There is no dropout, because PEFT has none on experts.
    `weights` gives the adapters to the kernels.

    Args:
      experts, in_size, out_size, rank: E, in, out and r of these shapes.
      alpha: the adapters' output is multiplied by alpha / r.
      key: draws the initial a.
      rslora: True: it is multiplied by alpha / sqrt(r) instead; False: by alpha / r.
    """

    rate = 0.0  # of dropout
    magnitude = None  # of DoRA, which PEFT does not have on experts

    def __init__(
        self,
        experts: int,
        in_size: int,
        out_size: int,
        rank: int,
        alpha: float,
        key: jax.Array,
        *,
        rslora: bool = False,
    ):
        # PEFT draws all experts' A as one matrix [E r, in]: uniform in +-1 / sqrt(in), as for a linear.
        bound = 1.0 / math.sqrt(in_size)
        self.a = nnx.Param(jax.random.uniform(key, (experts, rank, in_size), jnp.float32, -bound, bound))
        self.b = nnx.Param(jnp.zeros((experts, out_size, rank), jnp.float32))
        self.alpha = alpha
        self.rslora = rslora

    @property
    def rank(self) -> int:
        """The rank r of the adapters, read from the shape of a. `scale` divides by it, and saved adapters and exports
        record it."""
        return self.a.shape[1]

    @property
    def scale(self) -> float:
        """The factor on the adapters' product b a x: alpha / r, or alpha / sqrt(r) with rslora. `weights` passes it to
        the products, and a GGUF export of adapters computes its alpha from it."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def weights(self) -> GroupedLora:
        """The adapters as the argument of grouped_matmul, the product of rows that are sorted by expert: a, b and the
        scale. ExpertLinear.adapter returns it, and merging reads it."""
        return GroupedLora(self.a[...], self.b[...], self.scale)


def _merged(weight: jax.Array, lora: GroupedLora | None, transposed: bool) -> jax.Array:
    """One expert's weight [out, in] with its adapter merged in, which makes it float32; without one it keeps its dtype.
    `_merged_and_rounded` and its backward call it for one expert at a time. weight: an array, [out, in], or [in, out]
    if `transposed`. lora: the adapter, a [r, in] and b [out, r], which have no axis of experts here; None: there is
    none."""
    weight = weight.T if transposed else weight
    return weight if lora is None else merged_weight(weight, LoraWeights(lora.a, lora.b, None, lora.scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _merged_and_rounded(
    spec: FakeQuant, transposed: bool, weight: jax.Array | Stored, lora: GroupedLora | None, x: jax.Array
) -> jax.Array:
    """The weights of all experts with their adapters merged in, if there are any, rounded to the grid `spec` one expert
    at a time, in the shape of the stored ones and the grid's dtype. ExpertLinear.rounded_weight calls it for frozen
    weights. In the backward, the gradient of the rounded weights passes to the adapters where the merged weights are in
    the grid's range; weight and x get none. This backward is only used with clipped gradients: with straight-through
    ones rounded_weight passes adapters through which no gradient flows.

    Args:
      spec: the grid.
      transposed: whether `weight` is [E, in, out]; False: [E, out, in].
      weight: an array or quantised.
      lora: the adapters, or None.
      x: the activations that the rounded weights will multiply. An optimization barrier ties the rounding to them, so
        that forward and backward each round and no rounded weight is kept in between.
    """
    weight, lora, _ = optimization_barrier((weight, lora, x))

    def one(expert):
        """Merges and rounds one expert's weight; expert: (the weight, its adapter or None)."""
        weight, lora = expert
        rounded = spec.round(_merged(weight, lora, transposed))
        return rounded.T if transposed else rounded

    return jax.lax.map(one, (dense(weight, spec.dtype), lora))


def _merged_and_rounded_bwd(spec: FakeQuant, transposed: bool, residuals, dmerged: jax.Array):
    """The backward rule of `_merged_and_rounded`: (None for the weight, the gradients of the adapters in the form of
    `lora`, None for x). Each expert's weight is merged again, one at a time. spec: the grid. transposed: whether the
    weights are [E, in, out]. residuals: (weight, lora) of the forward. dmerged: the gradient of the rounded weights, in
    their shape."""
    weight, lora, dmerged = optimization_barrier((*residuals, dmerged))

    def one(expert):
        """The gradient of one expert's adapter; expert: (the weight, its adapter, the gradient of the rounded
        weight)."""
        weight, lora, dmerged = expert
        dmerged = dmerged.T if transposed else dmerged
        return unclipped_gradients(spec, lambda lora: _merged(weight, lora, transposed), lora, dmerged)

    return None, jax.lax.map(one, (dense(weight, spec.dtype), lora, dmerged)), None


_merged_and_rounded.defvjp(
    lambda spec, transposed, weight, lora, x: (
        _merged_and_rounded(spec, transposed, weight, lora, x),
        (weight, lora),
    ),
    _merged_and_rounded_bwd,
)


class ExpertLinear(nnx.Module):
    """One weight matrix for each of E experts, stacked in one array, with optional biases [E, out] and optional
    adapters.

    The weight is [E, out, in], or [E, in, out] if `transposed` (as in Hugging Face's class), as an array or quantised.
    `of_tokens` multiplies each token by the matrices of its experts and gives rows that are sorted by expert;
    `to_tokens` multiplies such rows and sums them for each token.

    Args:
      experts, in_size, out_size: E, in and out of these shapes.
      transposed: whether the weight is [E, in, out]; False: [E, out, in].
      bias: whether there are biases.
      std: the standard deviation of the initial weights.
      key: draws them.
      dtype: of weight and biases.
    Attributes:
      compute: the dtype's name in which the experts multiply, where a precision map names one (models/precision.py):
        what they multiply is cast to it, and the output back; None: in the dtype of what they multiply.
      fp8: whether a weight that is stored in FP8 is multiplied as it is, without decoding, by inputs rounded to FP8;
        not under `fake_quant`. False until compute_in_fp8 sets it.
      fake_quant: for quantisation-aware training: the grid to which the weights, with their adapters merged in, are
        rounded before they multiply; it may also round what they multiply (FakeQuant.round_inputs). None: nothing is
        rounded.
      lora: the adapters (ExpertLora), or None.
    """

    quantizable = True  # as Linear has, for code that handles both
    compute: str | None = None

    def __init__(
        self, experts: int, in_size: int, out_size: int, *, transposed: bool, bias: bool, std: float, key, dtype
    ):
        shape = (experts, in_size, out_size) if transposed else (experts, out_size, in_size)
        axes = ("experts", "in", "out") if transposed else ("experts", "out", "in")
        self.weight: nnx.Variable = nnx.Param(
            (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype), axes=axes
        )
        self.bias = nnx.Param(jnp.zeros((experts, out_size), dtype)) if bias else None
        self.lora: ExpertLora | None = nnx.data(None)  # an ExpertLora, once the model has adapters
        self.fake_quant: FakeQuant | None = None
        self.transposed = transposed
        self.fp8 = False

    @property
    def num_experts(self) -> int:
        """The number of experts E. It is 0 for a Linear, so code that handles both can tell them apart by it, as counts
        of work (weights_per_token) and lists of a model's matrices (models/lora.py) do; other code asks isinstance."""
        return self.weight.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, out, in), the sizes of the weight, always in this order, whether or not it is transposed or
        quantised. Adapters are made in these sizes, and a format is checked against `in` before the weight is
        quantised."""
        experts, first, second = self.weight.shape
        return (experts, second, first) if self.transposed else (experts, first, second)

    @property
    def trains(self) -> bool:
        """Whether the weight trains (its variable is an nnx.Param), and so is an array with a gradient. It says nothing
        of the adapters. Under `fake_quant` it decides how the weight is rounded (`rounded_weight`), and it is part of
        product_has_weight_gradient."""
        return isinstance(self.weight, nnx.Param)

    @property
    def product_has_weight_gradient(self) -> bool:
        """Whether the backward of the product must compute the gradient of its weight: if the weight trains, or if an
        adapter that is merged into it gets its gradient through it, which is so where `fake_quant` clips gradients. The
        grouped products get it as `weight_trains`."""
        through = self.lora is not None and self.fake_quant is not None and self.fake_quant.clips
        return self.trains or through

    @property
    def stored_weight(self) -> jax.Array | Stored:
        """The weight in the form in which the model stores it: an array, or a quantised weight (Stored), [E, out, in]
        or, if transposed, [E, in, out]. The products here, the planner, savers and merges read it."""
        return self.weight.get_value()

    def rounded_weight(self, x: jax.Array) -> jax.Array:
        """For quantisation-aware training: the weights in the shape of the stored ones, rounded to the grid of
        `fake_quant`. A frozen weight gets its adapters merged in first, if there are any, one expert at a time, so that
        only one merged matrix is in float32, and the result has the grid's dtype. A trained one has no adapters, and
        keeps its dtype. `of_tokens` and `to_tokens` multiply by the result.

        x: the activations that they multiply. As in Linear, the rounding is tied to them, so that forward and backward
        each round; the gradient passes the rounding to trained weights as `straight_through` says. Frozen ones get
        none. Their adapters get gradients here only if `fake_quant` clips them; otherwise `of_tokens` and `to_tokens`
        add the adapters' gradients. `fake_quant` must not be None (AssertionError)."""
        assert self.fake_quant is not None
        if self.trains:
            weight = self.weight[...].swapaxes(1, 2) if self.transposed else self.weight[...]
            rounded: jax.Array = straight_through(self.fake_quant, weight, jax.lax.stop_gradient(x))
            return rounded.swapaxes(1, 2) if self.transposed else rounded
        lora = self.adapter() if self.fake_quant.clips else jax.lax.stop_gradient(self.adapter())
        weight, x = jax.lax.stop_gradient((self.stored_weight, x))
        return _merged_and_rounded(self.fake_quant, self.transposed, weight, lora, x)

    def only_adapted(self, dtype) -> bool:
        """Whether the product with rows in `dtype` is no more than that with frozen weights and adapters, and perhaps
        biases. Quantisation-aware training and a dtype of its own are more. MoE.down, which has another operation for
        such experts, asks it."""
        plain = self.lora is not None and self.fake_quant is None and not self.trains
        return plain and (self.compute is None or self.compute == dtype)

    def adapter(self) -> GroupedLora | None:
        """The adapters as the argument of grouped_matmul (a, b and the scale); None if there are none. `of_tokens`,
        `to_tokens` and `rounded_weight` call it, and generation's faster step (plain_layer.py), which has kernels of
        its own."""
        return None if self.lora is None else self.lora.weights()

    def adapter_bytes(self, itemsize: int) -> float:
        """Returns how many bytes the copies of the adapters A [E, r, in] and B [E, out, r] take that the Mosaic kernels
        of grouped_matmul read: in the compute dtype, with the rank r padded to a multiple of 64; 0.0 without adapters.
        The planner adds it to its other estimates, which are floats, and the sampler's plan counts it too. itemsize:
        bytes of one number in the compute dtype."""
        if self.lora is None:
            return 0.0
        experts, rank, in_size = self.lora.a.shape
        return float(experts * (in_size + self.lora.b.shape[1]) * -(-rank // _RANK_STEP) * _RANK_STEP * itemsize)

    def low_rank_bytes(self, itemsize: int) -> float:
        """Returns the bytes of a row's low-rank input, which is the product of the row and the adapter's A. It is 0.0
        without adapters. The planner adds it to a plan's memory. itemsize: bytes of one number in the compute dtype."""
        return 0.0 if self.lora is None else float(self.lora.rank * itemsize)

    def of_tokens(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Multiplies each token of x [T, in] by the matrices of its experts: [rows, out], one row for each pair of
        token and expert, sorted by expert, in x's dtype, adapters and biases included. Empty rows pad the rows of each
        expert to whole tiles. Under `fake_quant` the weights are rounded, and the inputs if it rounds inputs.
        MoE.gate_up calls it.

        If a quantised weight must be decoded, the decoded weight is kept for the derivative, which is expected to be
        computed right after (`derivative_follows` of grouped_matmul). routing: which token and expert each row belongs
        to, from `route`."""
        lora, given = self.adapter(), x.dtype
        x = x.astype(self.compute or given)
        if self.fake_quant is None:
            weight, added = self.stored_weight, lora
        else:
            weight, added = self.rounded_weight(x), None
            x = self.fake_quant.round_inputs(x)
        fp8 = self.fp8 and self.fake_quant is None
        bias = None if self.bias is None else self.bias[...]
        out = matmul_of_tokens(
            x,
            weight,
            routing,
            added,
            bias if self.fake_quant is None else None,
            transposed=self.transposed,
            derivative_follows=True,
            fp8=fp8,
            weight_trains=self.product_has_weight_gradient,
        )
        if self.fake_quant is not None and lora is not None and not self.fake_quant.clips:
            a, b = (lora.scale * lora.a).astype(x.dtype), lora.b.astype(x.dtype)
            inner = matmul_of_tokens(jax.lax.stop_gradient(x), a, routing)
            out = gradients_of(out, grouped_matmul(inner, b, routing.groups))
        if self.fake_quant is not None and bias is not None:
            out = grouped_bias(out, bias, routing.groups)
        return out.astype(given)

    def to_tokens(self, rows: jax.Array, routing: Routing, choice: jax.Array, weights: jax.Array) -> jax.Array:
        """Multiplies rows [rows, in], one for each pair of token and expert and sorted by expert, by the experts'
        matrices, and sums the results of each token: [T, out] in the rows' dtype, adapters and biases included. Under
        `fake_quant` the weights are rounded, and the rows if it rounds inputs. MoE.down calls it.

        Args:
          rows: they have been multiplied by the router's weights already.
          routing: which expert and token each row belongs to, from `route`.
          choice: int32[T, k], each token's experts; E for none.
          weights: float32[T, k], the router's weights of these experts, by which the biases are multiplied if there are
            any.
        """
        lora, given = self.adapter(), rows.dtype
        rows = rows.astype(self.compute or given)
        product = functools.partial(
            matmul_to_tokens, transposed=self.transposed, weight_trains=self.product_has_weight_gradient
        )
        if self.fake_quant is None:
            out = product(rows, self.stored_weight, routing, lora, fp8=self.fp8)
        else:
            weight, rows = self.rounded_weight(rows), self.fake_quant.round_inputs(rows)
            out = product(rows, weight, routing)
            if lora is not None and not self.fake_quant.clips:
                a, b = (lora.scale * lora.a).astype(rows.dtype), lora.b.astype(rows.dtype)
                inner = grouped_matmul(jax.lax.stop_gradient(rows), a, routing.groups)
                out = gradients_of(out, matmul_to_tokens(inner, b, routing))
        out = out if self.bias is None else token_bias(out, weights, self.bias[...], choice)
        return out.astype(given)
