"""Linear layers and their LoRA adapters.

Whether a tensor is trained is its type: an `nnx.Param` is trained, a `Frozen` is not. `nnx.split(model, nnx.Param,
...)` therefore gives (graph, trainable, frozen), and `nnx.value_and_grad` differentiates only what is trained. `frozen`
and `trained` make a variable of one type from one of the other, and `not_differentiated` raises an error if a gradient
of a layer's frozen tensor is asked for.

A layer is a `Linear`, its adapter a `Lora`, and its observed scale of activations an `InputScale`. `apply_fused`
applies linears that share an input, such as query, key and value, in one operation. `row_norm` computes the norms of
rows that DoRA needs, `merged_weight` adds an adapter to its weight, and `merged_and_rounded` also rounds the sum for
quantisation-aware training (QAT). lora.py selects the linears that get an adapter; experts have matrices and adapters
of their own (layers/expert_linear.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.norm import Normed
from jaxtune.models.placement import partition
from jaxtune.models.qat_gradients import (
    adapter_gradients,
    adapter_noise,
    magnitude_gradients,
    straight_through,
    unclipped_gradients,
)
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.quant_matmul import LoraWeights, normed_matmul, quant_matmul
from jaxtune.pallas.quant_matmul.reference import dropout


class Frozen(nnx.Variable):
    """A variable whose tensor is not trained and never receives a gradient. Its value is an array or a quantised
    weight. `frozen` makes it, so that nnx.Param selects what trains."""


class NeverTrained(Frozen):
    """A tensor of the checkpoint that no training changes, full fine-tuning included, such as Gemma 4's layer_scalar.
    Merging an adapter makes other frozen tensors trainable again, but not these."""


class InputScale(nnx.Variable):
    """The scale float32[] under which a linear rounds its activations in quantisation-aware training, in formats that
    observe it (models/observed_inputs.py). It is never trained, and no tensor of a checkpoint: records have it as a
    number (FakeQuant.input_scales)."""


def frozen(variable: nnx.Variable) -> Frozen:
    """Makes a `Frozen` variable, which is not trained, with the value (an array or a quantised weight) and the metadata
    (logical axes) of `variable`, which stays as it is. lora.freeze replaces all trained variables of a model so, and
    generation/converted.py the quantised weights that it decodes."""
    return Frozen(variable.get_value(), **variable.get_metadata())


def trained(variable: nnx.Variable, value: jax.Array | jax.ShapeDtypeStruct) -> nnx.Param:
    """Makes an `nnx.Param`, which is trained, with this value, or only its shape and dtype, and the metadata (logical
    axes) of another variable. The caller puts it in that variable's place in a module; `variable` stays as it is. So
    get_peft_model makes the weights of an embedding or head that is trained whole, and merge_adapter those of the
    merged model, some of which have only a shape at first."""
    return nnx.Param(value, **variable.get_metadata())


@jax.custom_vjp
def not_differentiated(frozens):
    """Returns `frozens`, a pytree with the frozen tensors of a model's layers, unchanged. The stack passes them through
    it, so that whoever asks for a gradient with respect to them gets a TypeError instead of misleading zeros."""
    return frozens


def _differentiated(frozens):
    """The forward rule of `not_differentiated`, which JAX calls only if the gradient of at least one tensor is asked
    for. It always raises a TypeError that names one of these tensors, because zeros would mislead. frozens: the tree
    with, in place of each tensor, an object of custom_vjp's symbolic zeros, whose attribute `perturbed` says whether
    the gradient of this tensor is asked for."""
    leaves = jax.tree_util.tree_leaves_with_path(frozens)
    names = [f"layers{jax.tree_util.keystr(path)}" for path, leaf in leaves if leaf.perturbed]
    raise TypeError(
        f"a gradient is asked for of {names[0]} and {len(names) - 1} more frozen tensors, which get none: "
        "differentiate with respect to what trains (nnx.split(model, nnx.Param, ...)), or use a model without adapters"
    )


not_differentiated.defvjp(_differentiated, lambda _, cotangents: (cotangents,), symbolic_zeros=True)


class Lora(nnx.Module):
    """The LoRA adapter of one linear, its attribute `lora`: a [r, in] and b [out, r] (zero at the start), float32, and
    with DoRA a magnitude [out] (zero at the start; None without DoRA). All are `nnx.Param`s, which are trained.

    The linear's output gets scale * b a x added, where the scale follows from alpha and rslora, as in PEFT. With DoRA
    each row of the merged weight, W + scale b a, is scaled to the norm that the magnitude has for it. `weights` gives
    the adapter to the kernels. get_peft_model makes adapters, and load_adapter does so by calling it.

    Args:
      in_size, out_size, rank: in, out and r of these shapes.
      alpha: the adapter's output is multiplied by alpha / r.
      rate: of dropout on the adapter's input in training, at least 0 and below 1.
      key: draws the initial a.
      rslora: True: the output is multiplied by alpha / sqrt(r) instead; False: by alpha / r.
      dora: True: the adapter has a magnitude, which get_peft_model sets to the norms of the weight's rows; False: it
        has none.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        rank: int,
        alpha: float,
        rate: float,
        key: jax.Array,
        *,
        rslora: bool = False,
        dora: bool = False,
    ):
        # PEFT's initialisation, Kaiming uniform with a = sqrt(5): uniform in +-1 / sqrt(in).
        bound = 1.0 / math.sqrt(in_size)
        self.a = nnx.Param(jax.random.uniform(key, (rank, in_size), jnp.float32, -bound, bound))
        self.b = nnx.Param(jnp.zeros((out_size, rank), jnp.float32))
        self.magnitude = nnx.Param(jnp.zeros((out_size,), jnp.float32)) if dora else None
        self.alpha = alpha
        self.rslora = rslora
        self.rate = rate

    @property
    def rank(self) -> int:
        """The rank r of the adapter, read from the shape of a. `scale` divides by it, and saved adapters and exports
        record it."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """The factor on the adapter's product b a x: alpha / r, or alpha / sqrt(r) with rslora (arXiv 2312.03732).
        `weights` passes it to the products, and a GGUF export of adapters computes its alpha from it."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def weights(self, base: jax.Array | Stored) -> LoraWeights:
        """The adapter as the argument of quant_matmul: a, b, the scale, and with DoRA the factor on each row of the
        merged weight, and so on each output (row_scale, float32[out]; None without DoRA). Merges read it too.

        base: the weight [out, in] that it adapts, an array or quantised. Only DoRA reads it, because its factor on a
        row is the magnitude divided by the norm of that row of the merged weight. No gradient passes through the norm,
        as in PEFT."""
        a, b = self.a[...], self.b[...]
        row_scale = None
        if self.magnitude is not None:
            row_scale = self.magnitude[...] / jax.lax.stop_gradient(row_norm(dense(base), a, b, self.scale))
        return LoraWeights(a, b, row_scale, self.scale)


def row_norm(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The Euclidean norms of the rows of weight + scale b a, float32[out], computed without forming the sum. DoRA's
    factors (Lora.weights) are the magnitude divided by them, and a new adapter's magnitude is set to them.

        |w + s b a|^2 = |w|^2 + 2 s (w a^T) . b + s^2 b (a a^T) . b        (arXiv 2402.09353)

    weight: [out, in], an array that is not quantised. a: [r, in]. b: [out, r]. scale: the adapter's factor
    (Lora.scale)."""
    precision = jax.lax.Precision.HIGHEST
    square = jnp.einsum("oi,oi->o", weight, weight, preferred_element_type=jnp.float32, precision=precision)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    cross = jnp.einsum("oi,ri->or", weight.astype(jnp.float32), a, precision=precision)
    gram = jnp.einsum("ri,si->rs", a, a, precision=precision)
    inner = 2 * scale * cross + scale * scale * jnp.einsum("or,rs->os", b, gram, precision=precision)
    return jnp.sqrt(square + (inner * b).sum(-1))


def merged_weight(weight: jax.Array, lora: LoraWeights) -> jax.Array:
    """Merges an adapter into the weight [out, in], an array that is not quantised: row_scale * (weight + scale b a),
    computed in float32 and returned as float32[out, in]. Saving merged models and quantisation-aware training need it.
    lora: the adapter's a, b, scale and row_scale; the last is DoRA's factor on each row, and None (no factor) for other
    adapters."""
    update = jnp.einsum(
        "or,ri->oi", lora.b.astype(jnp.float32), lora.a.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    wide = weight.astype(jnp.float32) + lora.scale * update
    return wide if lora.row_scale is None else lora.row_scale[:, None] * wide


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def merged_and_rounded(
    spec: FakeQuant, weight: jax.Array | Stored, lora: LoraWeights | None, x: jax.Array
) -> jax.Array:
    """The weight [out, in] with the adapter `lora` merged in unless it is None, rounded to the grid `spec`, in the
    grid's dtype; Linear.rounded_weight calls it for frozen weights. In the backward, the adapter gets the gradient of
    the rounded weight where the merged weight is in the grid's range, whatever the grid's `clips` says (the caller
    stops the adapter's gradient if it is False); weight and x get none.

    x: the activations that the rounded weight will multiply; an optimization barrier makes the rounding depend on them,
    so that no rounded weight is kept from the forward to the backward: the stack's backward computes a segment again,
    and so rounds again, and without the barrier XLA would round once for both."""
    weight, lora, _ = optimization_barrier((weight, lora, x))
    weight = dense(weight, spec.dtype)
    return spec.round(weight if lora is None else merged_weight(weight, lora))


def _merged_and_rounded_bwd(spec: FakeQuant, residuals, dmerged: jax.Array):
    """The backward rule of `merged_and_rounded`: (None, the gradient of the adapter, None). spec: the grid. residuals:
    (weight, lora) of the forward. dmerged: [out, in], the gradient of the rounded weight. The merged weight is computed
    again, from the weight as it is stored, to see which numbers are in the grid's range."""
    weight, lora, dmerged = optimization_barrier((*residuals, dmerged))
    weight = dense(weight, spec.dtype)
    return None, unclipped_gradients(spec, lambda lora: merged_weight(weight, lora), lora, dmerged), None


merged_and_rounded.defvjp(
    lambda spec, weight, lora, x: (merged_and_rounded(spec, weight, lora, x), (weight, lora)), _merged_and_rounded_bwd
)


class Linear(nnx.Module):
    """A linear layer: weight [out, in] as in Hugging Face checkpoints or quantised, optional bias [out], optional
    adapter. Calling it on x [..., in] gives [..., out]. Weight and bias are `nnx.Param`s (trained) until lora.freeze
    makes them `Frozen`.

    Args:
      in_size, out_size: in and out of these shapes.
      bias: whether there is a bias.
      std: the standard deviation of the initial weight.
      key: draws it.
      dtype: of weight and bias.
    Attributes:
      lora: the adapter (Lora), or None.
      fp8: True: a weight that is stored in FP8 is multiplied as it is, by inputs rounded to FP8; False (the default):
        it is decoded first. It has no effect on other weights.
      compute: the dtype's name in which the linear multiplies, where a precision map names one (models/precision.py): x
        is cast to it, and the output back to x's dtype; None: in x's dtype.
      fake_quant: for quantisation-aware training: the grid to which the weight, with its adapter merged in, is rounded
        before it multiplies, and x too if `fake_quant.rounds_inputs`; None: nothing is rounded.
      input_scale: an InputScale, if `fake_quant` has a format whose activations are rounded under an observed scale;
        else None.
      observer: called on the host whenever the linear computes, with the largest magnitude of each token's inputs,
        float32[..., tokens]; models/observed_inputs.py sets it to observe ranges. None: nothing is called.
      original: for a head that is trained beside adapters (modules_to_save), its weight before training; else None.
    """

    num_experts = 0  # as ExpertLinear has, for code that handles both
    quantizable = True  # whether `quantize` and loading in a format of few bits encode it; a router's is not
    original: nnx.Variable | None = None
    input_scale: nnx.Variable | None = None
    observer: Callable[[jax.Array], None] | None = None
    compute: str | None = None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, std: float, key: jax.Array, dtype):
        self.weight: nnx.Variable = nnx.Param(
            (jax.random.normal(key, (out_size, in_size), jnp.float32) * std).astype(dtype), axes=("out", "in")
        )
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None
        self.lora: Lora | None = nnx.data(None)  # a Lora, once the model has adapters
        self.fake_quant: FakeQuant | None = None
        self.fp8 = False

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in), the shape of the weight, also of a quantised one, whose codes have another shape. Adapters are
        made in these sizes, and a format is checked against `in` before the weight is quantised."""
        out_size, in_size = self.weight.shape
        return out_size, in_size

    @property
    def stored_weight(self) -> jax.Array | Stored:
        """The weight in the form in which the model stores it: an array, or a quantised weight (Stored), whose variable
        cannot be indexed as others are. Products, savers and merges read it."""
        return self.weight.get_value()

    def low_rank_bytes(self, itemsize: int) -> float:
        """Bytes of one token's low-rank input, its product with the adapter's A; 0.0 without an adapter. The planner
        counts it. itemsize: bytes of one number in the compute dtype."""
        return 0.0 if self.lora is None else float(self.lora.rank * itemsize)

    def only_adapted(self, dtype, drops: bool) -> bool:
        """Whether the linear is `plain` and has an adapter. MLP, which has another operation for such a linear, asks
        it. The arguments are those of `plain`."""
        return self.lora is not None and self.plain(dtype, drops)

    def plain(self, dtype, drops: bool) -> bool:
        """Whether the linear, applied to x in `dtype`, is no more than the product with a frozen weight, and perhaps an
        adapter and a bias. An adapter with DoRA is more, and so are quantisation-aware training, an observer, a dtype
        of its own, and, if `drops`, an adapter with dropout. apply_fused, which has another operation for such linears
        that share a norm's result, asks it."""
        if self.lora is not None and (self.lora.magnitude is not None or (drops and self.lora.rate > 0)):
            return False
        plain = self.fake_quant is None and self.observer is None and not isinstance(self.weight, nnx.Param)
        return plain and (self.compute is None or self.compute == dtype)

    def rounded_weight(self, x: jax.Array) -> jax.Array:
        """For quantisation-aware training: the weight [out, in] rounded to the grid of `fake_quant`, with the adapter
        merged in first if there is one. It has the weight's dtype if the weight is trained, otherwise the grid's.

        x: the activations that it multiplies. The rounding is tied to them; otherwise XLA would keep the rounded weight
        from the forward to the backward. The gradient passes the rounding to a trained weight as `straight_through`
        says. A frozen one gets none, and its adapter only if `fake_quant` clips gradients; otherwise _with_adapter
        gives the adapter its own. `fake_quant` must not be None. _fused calls it."""
        assert self.fake_quant is not None
        weight = self.stored_weight
        if isinstance(self.weight, nnx.Param):
            return straight_through(self.fake_quant, weight, jax.lax.stop_gradient(x))
        lora = None if self.lora is None else self.lora.weights(weight)
        lora = lora if self.fake_quant.clips else jax.lax.stop_gradient(lora)
        weight, x = jax.lax.stop_gradient((weight, x))
        return merged_and_rounded(self.fake_quant, weight, lora, x)

    def __call__(self, x: jax.Array | Normed, key: jax.Array | None = None) -> jax.Array:
        """x [..., in] -> [..., out] in x's dtype: the product with the weight, plus adapter and bias where there are
        any. `key` draws the adapter's dropout mask; None: no dropout."""
        return apply_fused(x, (self,), key)[0]


def apply_fused(
    x: jax.Array | Normed, linears: tuple[Linear, ...], key: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Applies several linears to the same x [..., in] in one operation, which reads x once: a tuple with one output
    [..., out] for each, in x's dtype, adapters and biases included. Projections that share an input, such as query, key
    and value, are computed so, and a Linear that is called applies itself by it.

    Linears that multiply in different dtypes (`compute`) are one operation for each dtype, and linears that differ in
    `fake_quant` are one each if any of these rounds x. Weights with a `fake_quant` are rounded with their adapters
    merged in, and x is rounded before it multiplies them if `fake_quant.rounds_inputs`. key: draws the dropout mask,
    which the adapters of an operation share, with the largest of their rates; None: no dropout.

    If x is a Normed, and the linears are all `plain` and multiply in FP8, the norm is part of the operation
    (normed_matmul); for others it is computed first."""
    if isinstance(x, Normed):
        norm, given = x.norm, x.x
        if all(linear.fp8 and linear.plain(given.dtype, key is not None) for linear in linears):
            weights = [linear.stored_weight for linear in linears]
            loras = [linear.lora and linear.lora.weights(linear.stored_weight) for linear in linears]
            biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
            return normed_matmul(given, norm.weight[...], weights, loras, biases, **norm.rounding, fp8=True)
        x = x.value()
    kinds = dict.fromkeys(linear.compute for linear in linears)
    if any(kinds):
        found: dict[int, jax.Array] = {}
        for kind in kinds:
            places = [i for i, linear in enumerate(linears) if linear.compute == kind]
            part = x if kind is None else x.astype(kind)
            outputs = _fused(part, tuple(linears[i] for i in places), key)
            found |= {i: out.astype(x.dtype) for i, out in zip(places, outputs, strict=True)}
        return tuple(found[i] for i in range(len(linears)))
    return _fused(x, linears, key)


def _fused(x: jax.Array, linears: tuple[Linear, ...], key: jax.Array | None) -> tuple[jax.Array, ...]:
    """Applies `linears`, which all multiply in x's dtype, to the same x [..., in] in one operation: a tuple with one
    output [..., out] for each, adapters and biases included. If they differ in their `fake_quant` and one of these
    rounds x, each is an operation of its own. If one of them has `fp8`, all weights of the operation that are stored in
    FP8 are multiplied so. key: draws the dropout mask that the adapters of an operation share, with the largest of
    their rates; None: no dropout. apply_fused calls it for each dtype."""
    specs = {linear.fake_quant for linear in linears}
    if len(specs) > 1 and any(spec is not None and spec.rounds_inputs for spec in specs):
        return tuple(_fused(x, (linear,), key)[0] for linear in linears)  # some multiply x as it is
    for linear in linears:
        if linear.observer is not None:
            jax.debug.callback(linear.observer, jnp.abs(x).max(-1).astype(jnp.float32))
    rates = [linear.lora.rate for linear in linears if linear.lora is not None]
    rate = max(rates, default=0.0)
    seen, observed = x, linears[0].input_scale  # linears with the same input have observed the same scale
    for spec in specs:
        seen = x if spec is None else spec.round_inputs(x, None if observed is None else observed.get_value())
    weights, loras, biases = [], [], []
    for linear in linears:
        rounded = linear.fake_quant is not None
        weights.append(linear.rounded_weight(x) if rounded else linear.stored_weight)
        lora = None if rounded else linear.lora
        loras.append(None if lora is None else lora.weights(linear.stored_weight))
        biases.append(None if linear.bias is None or _bias_follows(linear) else linear.bias[...])
    outputs = quant_matmul(
        seen,
        weights,
        loras,
        biases,
        dropout_rate=rate,
        dropout_key=key,
        dropout_part=partition.part_of_rows(),
        fp8=any(linear.fp8 for linear in linears),
    )
    dropped = seen
    if key is not None and rate > 0 and any(linear.lora and linear.fake_quant for linear in linears):
        flat = seen.reshape(-1, seen.shape[-1])
        dropped = dropout(flat, rate, key, partition.part_of_rows()).reshape(seen.shape)
    return tuple(
        out if linear.lora is None or linear.fake_quant is None else _with_adapter(out, linear, seen, dropped)
        for out, linear in zip(outputs, linears, strict=True)
    )


def _bias_follows(linear: Linear) -> bool:
    """Whether the bias of `linear` is added after its product, by _with_adapter: in quantisation-aware training with
    DoRA, because the magnitude's gradient is computed from the product without it."""
    return linear.fake_quant is not None and linear.lora is not None and linear.lora.magnitude is not None


def _with_adapter(out: jax.Array, linear: Linear, x: jax.Array, dropped: jax.Array) -> jax.Array:
    """Finishes the output of a linear whose merged weight was rounded. Returns `out`, whose value only dropout's noise
    changes, plus the bias if `_bias_follows` (otherwise `out` has it already). The noise is the adapter's product with
    dropout minus that without.

    In the backward, the adapter, DoRA's magnitude included, gets its gradients from the result, as if it were not
    rounded. Only if `fake_quant.clips` (numbers outside the grid's range get no gradient), it gets them through the
    rounded weight instead (merged_and_rounded), and from the result only those of dropout's noise. _fused calls it.

    Args:
      out: [..., out], the product of x and the rounded weight.
      linear: has an adapter and a `fake_quant`.
      x: [..., in], its input, rounded if the format rounds activations.
      dropped: x after dropout; x itself without dropout.
    """
    assert linear.lora is not None and linear.fake_quant is not None
    lora, clips = linear.lora.weights(linear.stored_weight), linear.fake_quant.clips
    b = lora.b if lora.row_scale is None else jax.lax.stop_gradient(lora.row_scale)[:, None] * lora.b
    if dropped is not x:
        out = out + adapter_noise(x, dropped, lora.a, b, lora.scale, both=clips)
    elif not clips:
        out = adapter_gradients(out, x, lora.a, b, lora.scale)
    if linear.lora.magnitude is not None and not clips:
        out = magnitude_gradients(out, linear.lora.magnitude[...])
    return out + linear.bias[...].astype(out.dtype) if linear.bias is not None and _bias_follows(linear) else out
