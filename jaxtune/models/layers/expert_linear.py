"""The matrices of a mixture of experts, one array for all experts, and their LoRA adapters, stacked likewise."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models import initial
from jaxtune.models.linear import merged_weight
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.qat.qat_gradients import gradients_of, straight_through, unclipped_gradients
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul
from jaxtune.pallas.quant_matmul import LoraWeights
from jaxtune.pallas.routing import Routing, matmul_of_tokens, matmul_to_tokens, token_bias

_RANK_STEP = 64  # grouped_matmul's kernels sum over multiples of this many numbers, so ranks are padded to them


class ExpertLora(nnx.Module):
    """LoRA adapters of one matrix of every expert: a [E, r, in] and b [E, out, r] (zero at the start), float32. There
    is no dropout, because PEFT has none on experts.

      alpha: the scale is alpha / r, or alpha / sqrt(r) with rslora, as in PEFT.
    """

    rate = 0.0  # of dropout
    magnitude = None  # of DoRA, which PEFT does not have on experts
    own_ranks: int | None = None  # how many ranks are not padding, of a sampler's copy; None: all

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
        shape = (experts, rank, in_size)
        a = initial.drawn(lambda: jax.random.uniform(key, shape, jnp.float32, -bound, bound), shape, jnp.float32)
        self.a = nnx.Param(a)
        self.b = nnx.Param(initial.full((experts, out_size, rank), 0, jnp.float32))
        self.alpha = alpha
        self.rslora = rslora

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def scale(self) -> float:
        """The factor on b a x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def weights(self) -> GroupedLora:
        """The adapters as an argument of grouped_matmul."""
        return GroupedLora(self.a[...], self.b[...], self.scale, self.own_ranks)


def _merged(weight: jax.Array, lora: GroupedLora | None, transposed: bool) -> jax.Array:
    """One expert's weight as [out, in], with its adapter merged in, which makes it float32."""
    weight = weight.T if transposed else weight
    return weight if lora is None else merged_weight(weight, LoraWeights(lora.a, lora.b, None, lora.scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _merged_and_rounded(
    spec: FakeQuant, transposed: bool, weight: jax.Array | Stored, lora: GroupedLora | None, x: jax.Array
) -> jax.Array:
    """Frozen weights of all experts with adapters merged in, rounded to the grid one expert at a time, in the stored
    shape.

      transposed: whether `weight` is [E, in, out].
      x: a barrier ties the rounding to these activations, so that forward and backward each round.
    """
    weight, lora, _ = optimization_barrier((weight, lora, x))

    def round_expert(expert):
        weight, lora = expert
        rounded = spec.round(_merged(weight, lora, transposed))
        return rounded.T if transposed else rounded

    return jax.lax.map(round_expert, (dense(weight, spec.dtype), lora))


def _merged_and_rounded_bwd(spec: FakeQuant, transposed: bool, residuals, dmerged: jax.Array):
    """Each expert's weight is merged again, one at a time."""
    weight, lora, dmerged = optimization_barrier((*residuals, dmerged))

    def expert_gradient(expert):
        weight, lora, dmerged = expert
        dmerged = dmerged.T if transposed else dmerged
        return unclipped_gradients(spec, lambda lora: _merged(weight, lora, transposed), lora, dmerged)

    return None, jax.lax.map(expert_gradient, (dense(weight, spec.dtype), lora, dmerged)), None  # weight, lora, x


_merged_and_rounded.defvjp(
    lambda spec, transposed, weight, lora, x: (
        _merged_and_rounded(spec, transposed, weight, lora, x),
        (weight, lora),
    ),
    _merged_and_rounded_bwd,
)


class ExpertLinear(nnx.Module):
    """One matrix for each of E experts: weight [E, out, in], or [E, in, out] if `transposed` (as in Hugging Face's
    class), an array or quantised; optional biases [E, out] and adapters.

    Attributes:
      compute: the dtype's name that a precision map gives the product: its input is cast to it, the output back; None:
        the input's dtype.
      fp8: whether a weight stored in FP8 is multiplied as it is, by inputs rounded to FP8; not under `fake_quant`.
      fake_quant: for QAT: the grid to which the weights, with their adapters merged in, are rounded before they
        multiply, and perhaps the inputs.
    """

    quantizable = True  # as Linear has, for code that handles both
    compute: str | None = None

    def __init__(
        self, experts: int, in_size: int, out_size: int, *, transposed: bool, bias: bool, std: float, key, dtype
    ):
        shape = (experts, in_size, out_size) if transposed else (experts, out_size, in_size)
        axes = ("experts", "in", "out") if transposed else ("experts", "out", "in")
        self.weight: nnx.Variable = nnx.Param(initial.normal(key, shape, std, dtype), axes=axes)
        self.bias = nnx.Param(initial.full((experts, out_size), 0, dtype)) if bias else None
        self.lora: ExpertLora | None = nnx.data(None)  # an ExpertLora, once the model has adapters
        self.fake_quant: FakeQuant | None = None
        self.transposed = transposed
        self.fp8 = False

    @property
    def num_experts(self) -> int:
        """E; a Linear has 0, which tells the two apart."""
        return self.weight.shape[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, out, in), whether or not the weight is transposed or quantised."""
        experts, first, second = self.weight.shape
        return (experts, second, first) if self.transposed else (experts, first, second)

    @property
    def trains(self) -> bool:
        """Whether the weight trains; adapters do not count."""
        return isinstance(self.weight, nnx.Param)

    @property
    def product_has_weight_gradient(self) -> bool:
        """Whether the product's backward needs the gradient of its weight: the weight trains, or a merged adapter gets
        its own through it, where `fake_quant` clips.
        """
        through = self.lora is not None and self.fake_quant is not None and self.fake_quant.clips
        return self.trains or through

    @property
    def stored_weight(self) -> jax.Array | Stored:
        return self.weight.get_value()

    def rounded_weight(self, x: jax.Array) -> jax.Array:
        """The weights rounded to the grid of `fake_quant` (not None), in the stored shape: trained ones in their dtype,
        with the gradient of `straight_through`; frozen ones with their adapters merged in, in the grid's dtype, without
        a gradient, which the adapters get from here only if the grid clips.

          x: the activations that they multiply, to which the rounding is tied.
        """
        assert self.fake_quant is not None
        if self.trains:
            weight = self.weight[...].swapaxes(1, 2) if self.transposed else self.weight[...]
            rounded: jax.Array = straight_through(self.fake_quant, weight, jax.lax.stop_gradient(x))
            return rounded.swapaxes(1, 2) if self.transposed else rounded
        lora = self.adapter() if self.fake_quant.clips else jax.lax.stop_gradient(self.adapter())
        weight, x = jax.lax.stop_gradient((self.stored_weight, x))
        return _merged_and_rounded(self.fake_quant, self.transposed, weight, lora, x)

    def only_adapted(self, dtype) -> bool:
        """Whether the product with rows in `dtype` is that with frozen weights and adapters, and perhaps biases."""
        plain = self.lora is not None and self.fake_quant is None and not self.trains
        return plain and (self.compute is None or self.compute == dtype)

    def adapter(self) -> GroupedLora | None:
        return None if self.lora is None else self.lora.weights()

    def adapter_bytes(self, itemsize: int) -> float:
        """Bytes of the adapters' copies that grouped_matmul's Mosaic kernels read: in the compute dtype, with ranks
        padded to multiples of 64; 0.0 without adapters. itemsize: bytes of a number.
        """
        if self.lora is None:
            return 0.0
        experts, rank, in_size = self.lora.a.shape
        return float(experts * (in_size + self.lora.b.shape[1]) * -(-rank // _RANK_STEP) * _RANK_STEP * itemsize)

    def low_rank_bytes(self, itemsize: int) -> float:
        """Bytes of a row's product with the adapter's A; 0.0 without adapters. itemsize: bytes of a number."""
        return 0.0 if self.lora is None else float(self.lora.rank * itemsize)

    def of_tokens(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Multiplies each token of x [T, in] by the matrices of its experts: [rows, out] in x's dtype, a row for each
        pair of token and expert, sorted by expert and padded with empty rows to whole tiles. A decoded weight is kept
        for the derivative, which is expected right after.

          routing: how tokens are sorted by expert.
        """
        lora, input_dtype = self.adapter(), x.dtype
        x = x.astype(self.compute or input_dtype)
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
        return out.astype(input_dtype)

    def to_tokens(self, rows: jax.Array, routing: Routing, choice: jax.Array, weights: jax.Array) -> jax.Array:
        """Multiplies rows [rows, in], sorted by expert and already times the router's weights, by the experts'
        matrices, and sums for each token: [T, out] in the rows' dtype.

          rows: [rows, in].
          routing: how tokens are sorted by expert.
          choice: int32[T, k], each token's experts; E for none.
          weights: float32[T, k], the router's, by which biases are multiplied.
        """
        lora, input_dtype = self.adapter(), rows.dtype
        rows = rows.astype(self.compute or input_dtype)
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
        return out.astype(input_dtype)
