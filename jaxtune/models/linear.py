"""Linear layers and their LoRA adapters. Whether a tensor is trained is its type, `nnx.Param` or `Frozen`, so that
`nnx.split(model, nnx.Param, ...)` gives (graph, trainable, frozen).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.lax import optimization_barrier

from jaxtune.models import initial
from jaxtune.models.norm import Normed
from jaxtune.models.placement import partition
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.qat.qat_gradients import (
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
    """A tensor, an array or a quantised weight, that is not trained."""


class NeverTrained(Frozen):
    """A tensor that no training changes, such as Gemma 4's layer_scalar; merging an adapter makes other frozen ones
    trainable.
    """


class InputScale(nnx.Variable):
    """The observed scale float32[] under which a linear rounds its activations in QAT; no tensor of checkpoints."""


def frozen(variable: nnx.Variable) -> Frozen:
    """A `Frozen` with the value and metadata (logical axes) of `variable`."""
    return Frozen(variable.get_value(), **variable.get_metadata())


def trained(variable: nnx.Variable, value: jax.Array | jax.ShapeDtypeStruct) -> nnx.Param:
    """An `nnx.Param` with this value, or only its shape and dtype, and the metadata (logical axes) of `variable`."""
    return nnx.Param(value, **variable.get_metadata())


@jax.custom_vjp
def not_differentiated(frozens):
    """The pytree `frozens` unchanged; asking for its gradient raises a TypeError instead of giving misleading zeros."""
    return frozens


def _differentiated(frozens):
    """The forward rule, where a gradient of some tensor is asked for; `perturbed` of `frozens` says of which."""
    leaves = jax.tree_util.tree_leaves_with_path(frozens)
    names = [f"layers{jax.tree_util.keystr(path)}" for path, leaf in leaves if leaf.perturbed]
    raise TypeError(
        f"a gradient is asked for of {names[0]} and {len(names) - 1} more frozen tensors, which get none: "
        "differentiate with respect to what trains (nnx.split(model, nnx.Param, ...)), or use a model without adapters"
    )


not_differentiated.defvjp(_differentiated, lambda _, cotangents: (cotangents,), symbolic_zeros=True)


_DRAWN_BYTES = 2**28  # of adapters that are drawn at once


def first_rows(seed: int, sizes: Sequence[tuple[int, int, int]]) -> list[jax.Array]:
    """Each adapter's first A, float32[r, in], as PEFT draws it: Kaiming uniform with a = sqrt(5), in +-1 / sqrt(in).

    sizes: (number of the adapter among all, r, in) of each.
    """
    if not sizes:
        return []
    if initial.makes_shapes():
        return [initial.full((rank, columns), 0, np.float32) for _, rank, columns in sizes]
    numbers, ranks, columns = np.array(sizes).T
    count, bounds, elements = int(numbers.max()) + 1, (1.0 / np.sqrt(columns)).astype(np.float32), ranks * columns
    drawn: dict[int, jax.Array] = {}
    for size in np.unique(elements).tolist():
        places = np.flatnonzero(elements == size)
        step = min(len(places), max(1, _DRAWN_BYTES // (4 * size)))
        for start in range(0, len(places), step):
            adapters = np.resize(places[start : start + step], step)  # the last is filled up, for one program
            rows = _uniforms(np.int64(seed).astype(np.int32), numbers[adapters], bounds[adapters], count, size)
            if not isinstance(rows, Tracer):
                rows = np.asarray(rows)  # to cut it on a device would take a program for each shape
            shapes = [sizes[place][1:] for place in adapters.tolist()]
            matrices = [row.reshape(shape) for row, shape in zip(rows, shapes, strict=True)]
            drawn |= zip(
                adapters.tolist(), matrices if isinstance(rows, Tracer) else jax.device_put(matrices), strict=True
            )
    return [drawn[place] for place in range(len(sizes))]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _uniforms(seed, numbers: jax.Array, bounds: jax.Array, count: int, size: int) -> jax.Array:
    """float32[n, size]: row i begins with what jax.random.uniform draws for any shape, by key numbers[i] of `count`."""
    keys = jax.random.split(jax.random.key(seed), count)[numbers]
    return jax.vmap(lambda key, bound: jax.random.uniform(key, (size,), jnp.float32, -bound, bound))(keys, bounds)


class Lora(nnx.Module):
    """The LoRA adapter of one linear: a [r, in] and b [out, r] (zero at the start), float32. It adds scale * b a x to
    the output. With DoRA a magnitude [out] is the norm to which each row of W + scale b a is scaled.

      a, b: as they begin (`first_rows`, zeros).
      alpha: the scale is alpha / r, or alpha / sqrt(r) with rslora, as in PEFT; r is `rank`.
      rate: of dropout on the adapter's input.
      dora: the magnitude starts at zero; get_peft_model sets it to the norms of the weight's rows.
    """

    magnitude: nnx.Param | None

    def __init__(
        self,
        out_size: int,
        alpha: float,
        rate: float,
        a: jax.Array,
        b: jax.Array,
        *,
        rslora: bool = False,
        dora: bool = False,
    ):
        self.a: nnx.Variable = nnx.Param(a)
        self.b: nnx.Variable = nnx.Param(b)
        self.magnitude = nnx.Param(initial.full((out_size,), 0, jnp.float32)) if dora else None
        self.alpha = alpha
        self.rslora = rslora
        self.rate = rate

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """The factor on b a x (arXiv 2312.03732 with rslora)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def weights(self, base: jax.Array | Stored) -> LoraWeights:
        """The adapter as an argument of quant_matmul. With DoRA row_scale float32[out] is magnitude / row norms of the
        merged weight, through which no gradient passes, as in PEFT.

          base: the weight [out, in], which only DoRA reads.
        """
        a, b = self.a[...], self.b[...]
        row_scale = None
        if self.magnitude is not None:
            row_scale = self.magnitude[...] / jax.lax.stop_gradient(row_norm(dense(base), a, b, self.scale))
        return LoraWeights(a, b, row_scale, self.scale)


class GatedLora(Lora):
    """Adapters of several models in one, side by side along the rank: a [R, in], b [out, R]. Each token takes the
    columns of its own adapter; the others add 0. Not trained.

      owners: int32[R], the number of the adapter that has a column; -1: nobody.
      scales: float32[R], the columns' factors.
    """

    def __init__(self, a: jax.Array, b: jax.Array, owners: jax.Array, scales: jax.Array):
        self.a, self.b = Frozen(a), Frozen(b)
        self.owners, self.scales = Frozen(owners), Frozen(scales)
        self.gate: Frozen | None = nnx.data(None)
        self.magnitude, self.alpha, self.rslora, self.rate = None, float(a.shape[0]), False, 0.0

    def choose(self, adapters: jax.Array) -> None:
        """Sets whose columns each token takes: int32[...], its adapter's number; 0: none."""
        chosen = adapters[..., None] == self.owners[...]
        self.gate = Frozen(jnp.where(chosen, self.scales[...], 0.0))

    def weights(self, base: jax.Array | Stored) -> LoraWeights:
        """ValueError before `choose`."""
        if self.gate is None:
            raise ValueError("GatedLora: whose columns a token takes is not chosen")
        return LoraWeights(self.a[...], self.b[...], gate=self.gate[...])


def row_norm(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The Euclidean norms of the rows of weight + scale b a, float32[out], without forming the sum:

      |w + s b a|^2 = |w|^2 + 2 s (w a^T) . b + s^2 b (a a^T) . b        (arXiv 2402.09353)

    weight: [out, in].
    a, b: the adapter's matrices, [r, in] and [out, r].
    scale: of the adapter, such as alpha / r.
    """
    precision = jax.lax.Precision.HIGHEST
    square = jnp.einsum("oi,oi->o", weight, weight, preferred_element_type=jnp.float32, precision=precision)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    cross = jnp.einsum("oi,ri->or", weight.astype(jnp.float32), a, precision=precision)
    gram = jnp.einsum("ri,si->rs", a, a, precision=precision)
    inner = 2 * scale * cross + scale * scale * jnp.einsum("or,rs->os", b, gram, precision=precision)
    return jnp.sqrt(square + (inner * b).sum(-1))


def merged_weight(weight: jax.Array, lora: LoraWeights) -> jax.Array:
    """row_scale * (weight + scale b a), float32[out, in], of an array [out, in]."""
    update = jnp.einsum(
        "or,ri->oi", lora.b.astype(jnp.float32), lora.a.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    wide = weight.astype(jnp.float32) + lora.scale * update
    return wide if lora.row_scale is None else lora.row_scale[:, None] * wide


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def merged_and_rounded(
    spec: FakeQuant, weight: jax.Array | Stored, lora: LoraWeights | None, x: jax.Array
) -> jax.Array:
    """The frozen weight [out, in] with the adapter merged in, rounded to the grid. The adapter gets the gradient where
    the merged weight is in the grid's range, whatever `clips` says; weight and x get none.

      spec: the grid. lora: None: the weight alone is rounded.
      weight: [out, in], an array or quantised.
      x: the activations that it multiplies. An optimization barrier ties the rounding to them; otherwise XLA would
        round once for forward and recomputation, and keep the rounded weight between.
    """
    weight, lora, _ = optimization_barrier((weight, lora, x))
    weight = dense(weight, spec.dtype)
    return spec.round(weight if lora is None else merged_weight(weight, lora))


def _merged_and_rounded_bwd(spec: FakeQuant, residuals, dmerged: jax.Array):
    weight, lora, dmerged = optimization_barrier((*residuals, dmerged))
    weight = dense(weight, spec.dtype)
    return None, unclipped_gradients(spec, lambda lora: merged_weight(weight, lora), lora, dmerged), None


merged_and_rounded.defvjp(
    lambda spec, weight, lora, x: (merged_and_rounded(spec, weight, lora, x), (weight, lora)), _merged_and_rounded_bwd
)


class Clips(nnx.Module):
    """The limits, scalars of the checkpoint, to which a linear's input and output are clamped (Gemma 4's towers)."""

    def __init__(self, dtype):
        low, high = jnp.asarray(-jnp.inf, dtype), jnp.asarray(jnp.inf, dtype)
        self.input_min, self.input_max = NeverTrained(low), NeverTrained(high)
        self.output_min, self.output_max = NeverTrained(low), NeverTrained(high)

    def of_input(self, x: jax.Array) -> jax.Array:
        return clamped(x, self.input_min[...], self.input_max[...])

    def of_output(self, x: jax.Array) -> jax.Array:
        return clamped(x, self.output_min[...], self.output_max[...])


def clamped(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """x within limits, with the gradient of x where it is, at the limits too, and else 0."""
    low, high = low.astype(x.dtype), high.astype(x.dtype)
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


class Linear(nnx.Module):
    """A linear layer: weight [out, in] as in Hugging Face checkpoints or quantised, optional bias [out], optional
    adapter.

      std: the standard deviation of the initial weight.

    Attributes:
      fp8: True: a weight stored in FP8 is multiplied as it is, by inputs rounded to FP8; False: it is decoded first.
      clips: the limits of inputs and outputs; None: there are none.
      compute: the dtype's name that a precision map gives the product: x is cast to it, the output back; None: x's
        dtype.
      fake_quant: for QAT: the grid to which the weight, with its adapter merged in, is rounded before it multiplies,
        and x too if `fake_quant.rounds_inputs`.
      observer: called on the host whenever the linear computes, with each token's largest magnitude, float32[...,
        tokens].
      original: a head's weight before training, if it trains beside adapters (modules_to_save).
    """

    num_experts = 0  # as ExpertLinear has, for code that handles both
    quantizable = True  # whether `quantize` and loading in a format of few bits encode it; a router's is not
    original: nnx.Variable | None = None
    input_scale: nnx.Variable | None = None
    observer: Callable[[jax.Array], None] | None = None
    clips: Clips | None = None
    compute: str | None = None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, std: float, key: jax.Array, dtype):
        self.weight: nnx.Variable = nnx.Param(initial.normal(key, (out_size, in_size), std, dtype), axes=("out", "in"))
        self.bias = nnx.Param(initial.full((out_size,), 0, dtype)) if bias else None
        self.lora: Lora | None = nnx.data(None)  # a Lora, once the model has adapters
        self.fake_quant: FakeQuant | None = None
        self.fp8 = False

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in), also of a quantised weight, whose codes have another shape."""
        out_size, in_size = self.weight.shape
        return out_size, in_size

    @property
    def stored_weight(self) -> jax.Array | Stored:
        """The array or quantised weight; a variable with the latter cannot be indexed as others are."""
        return self.weight.get_value()

    def low_rank_bytes(self, itemsize: int) -> float:
        """Bytes of one token's product with the adapter's A; 0.0 without an adapter. itemsize: bytes of a number."""
        return 0.0 if self.lora is None else float(self.lora.rank * itemsize)

    def only_adapted(self, dtype, drops: bool) -> bool:
        """Whether the linear is `plain` and has an adapter. dtype: of x. drops: whether dropout masks are drawn."""
        return self.lora is not None and self.plain(dtype, drops)

    def plain(self, dtype, drops: bool) -> bool:
        """Whether the linear, applied to x in `dtype`, is only the product with a frozen weight, and perhaps an adapter
        and a bias: no DoRA, adapters of several models, QAT, observer, limits or dtype of its own, and if `drops`, no
        dropout.
        """
        if isinstance(self.lora, GatedLora):
            return False
        if self.lora is not None and (self.lora.magnitude is not None or (drops and self.lora.rate > 0)):
            return False
        changed = self.fake_quant is not None or self.observer is not None or self.clips is not None
        plain = not changed and not isinstance(self.weight, nnx.Param)
        return plain and (self.compute is None or self.compute == dtype)

    def rounded_weight(self, x: jax.Array) -> jax.Array:
        """The weight [out, in], with its adapter merged in, rounded to the grid of `fake_quant` (not None), in the
        weight's dtype if it is trained, else the grid's. A trained weight gets the gradient of `straight_through`; a
        frozen one none, and its adapter only if the grid clips (otherwise _with_adapter gives it).

          x: the activations that it multiplies, to which the rounding is tied.
        """
        assert self.fake_quant is not None
        weight = self.stored_weight
        if isinstance(self.weight, nnx.Param):
            return straight_through(self.fake_quant, weight, jax.lax.stop_gradient(x))
        lora = None if self.lora is None else self.lora.weights(weight)
        lora = lora if self.fake_quant.clips else jax.lax.stop_gradient(lora)
        weight, x = jax.lax.stop_gradient((weight, x))
        return merged_and_rounded(self.fake_quant, weight, lora, x)

    def __call__(self, x: jax.Array | Normed, key: jax.Array | None = None) -> jax.Array:
        """x [..., in] -> [..., out] in x's dtype. `key` draws the adapter's dropout mask; None: no dropout."""
        return apply_fused(x, (self,), key)[0]


def apply_fused(
    x: jax.Array | Normed, linears: tuple[Linear, ...], key: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Applies several linears to the same x [..., in] in one operation, which reads x once: one output [..., out] for
    each, in x's dtype. Each `compute` dtype is an operation of its own, and so is each linear if their grids differ and
    one rounds x. A Normed x is normed within the operation if all linears are `plain` and multiply in FP8, otherwise
    before it.

      linears: all read x; at least one.
      key: draws the dropout mask that an operation's adapters share, with the largest of their rates; None: no dropout.
    """
    if isinstance(x, Normed):
        norm, unnormed = x.norm, x.x
        if all(linear.fp8 and linear.plain(unnormed.dtype, key is not None) for linear in linears):
            weights = [linear.stored_weight for linear in linears]
            loras = [linear.lora and linear.lora.weights(linear.stored_weight) for linear in linears]
            biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
            return normed_matmul(unnormed, norm.weight[...], weights, loras, biases, **norm.rounding, fp8=True)
        x = x.value()
    if any(linear.clips is not None for linear in linears):
        return tuple(_clipped(x, linear, key) for linear in linears)
    kinds = dict.fromkeys(linear.compute for linear in linears)
    if any(kinds):
        output_by_index: dict[int, jax.Array] = {}
        for kind in kinds:
            indices = [i for i, linear in enumerate(linears) if linear.compute == kind]
            cast_x = x if kind is None else x.astype(kind)
            outputs = _fused(cast_x, tuple(linears[i] for i in indices), key)
            output_by_index |= {i: out.astype(x.dtype) for i, out in zip(indices, outputs, strict=True)}
        return tuple(output_by_index[i] for i in range(len(linears)))
    return _fused(x, linears, key)


def _clipped(x: jax.Array, linear: Linear, key: jax.Array | None) -> jax.Array:
    clips, kind = linear.clips, linear.compute or x.dtype
    x = x if clips is None else clips.of_input(x)
    out = _fused(x.astype(kind), (linear,), key)[0].astype(x.dtype)
    return out if clips is None else clips.of_output(out)


def _fused(x: jax.Array, linears: tuple[Linear, ...], key: jax.Array | None) -> tuple[jax.Array, ...]:
    """apply_fused for linears that all multiply in x's dtype, or with `fp8` in FP8."""
    specs = {linear.fake_quant for linear in linears}
    if len(specs) > 1 and any(spec is not None and spec.rounds_inputs for spec in specs):
        return tuple(_fused(x, (linear,), key)[0] for linear in linears)  # some multiply x as it is
    for linear in linears:
        if linear.observer is not None:
            jax.debug.callback(linear.observer, jnp.abs(x).max(-1).astype(jnp.float32))
    rates = [linear.lora.rate for linear in linears if linear.lora is not None]
    rate = max(rates, default=0.0)
    rounded_x, observed = x, linears[0].input_scale  # linears with the same input have observed the same scale
    for spec in specs:
        rounded_x = x if spec is None else spec.round_inputs(x, None if observed is None else observed.get_value())
    weights, loras, biases = [], [], []
    for linear in linears:
        rounded = linear.fake_quant is not None
        weights.append(linear.rounded_weight(x) if rounded else linear.stored_weight)
        lora = None if rounded else linear.lora
        loras.append(None if lora is None else lora.weights(linear.stored_weight))
        biases.append(None if linear.bias is None or _bias_follows(linear) else linear.bias[...])
    outputs = quant_matmul(
        rounded_x,
        weights,
        loras,
        biases,
        dropout_rate=rate,
        dropout_key=key,
        dropout_run=partition.row_shard_index(),
        fp8=any(linear.fp8 for linear in linears),
    )
    dropped = rounded_x
    if key is not None and rate > 0 and any(linear.lora and linear.fake_quant for linear in linears):
        flat = rounded_x.reshape(-1, rounded_x.shape[-1])
        dropped = dropout(flat, rate, key, partition.row_shard_index()).reshape(rounded_x.shape)
    return tuple(
        out if linear.lora is None or linear.fake_quant is None else _with_adapter(out, linear, rounded_x, dropped)
        for out, linear in zip(outputs, linears, strict=True)
    )


def _bias_follows(linear: Linear) -> bool:
    """Whether _with_adapter adds the bias: in QAT with DoRA, whose magnitude needs the product without it."""
    return linear.fake_quant is not None and linear.lora is not None and linear.lora.magnitude is not None


def _with_adapter(out: jax.Array, linear: Linear, x: jax.Array, dropped: jax.Array) -> jax.Array:
    """Finishes the output of a linear whose merged weight was rounded: adds dropout's noise, and the bias if
    _bias_follows.

      out: [..., out], the product of x and the rounded weight; x: [..., in], rounded if the format rounds activations.
      dropped: x after dropout; x itself without.
    """
    assert linear.lora is not None and linear.fake_quant is not None
    lora, clips = linear.lora.weights(linear.stored_weight), linear.fake_quant.clips
    b = lora.b if lora.row_scale is None else jax.lax.stop_gradient(lora.row_scale)[:, None] * lora.b
    if dropped is not x:
        out = out + adapter_noise(x, dropped, lora.a, b, lora.scale, both_terms=clips)
    elif not clips:
        out = adapter_gradients(out, x, lora.a, b, lora.scale)
    if linear.lora.magnitude is not None and not clips:
        out = magnitude_gradients(out, linear.lora.magnitude[...])
    return out + linear.bias[...].astype(out.dtype) if linear.bias is not None and _bias_follows(linear) else out
