"""Verifies the logits of a merge on a small random batch, with the merged model's structure, in which each matrix is
merged when it multiplies. So the code between matrices is covered without a second model in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.components import set_compute
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import round_to_grid
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Linear, merged_weight, row_norm
from jaxtune.models.lora import copy_structure, matrices
from jaxtune.models.placement import partition
from jaxtune.models.placement.streams import on_device
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.stack.stack import run_stack
from jaxtune.models.stack.stack_layers import UNTUNED
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.meshes import on_any_mesh
from jaxtune.pallas.quant_matmul import LoraWeights

FP32_ROUNDOFF = 2.0**-24
# Factor on the bound for logits, which is statistical; see check_logits.
_MARGIN = 8.0
_PROBE_ROWS, _PROBE_LENGTH = 2, 16
_HEAD_ROWS = 8192  # how many rows of the head are in float32 at a time


def roundoff(dtype) -> float:
    """The unit roundoff of a floating-point dtype, the largest relative error of rounding to it."""
    return float(jnp.finfo(dtype).eps) / 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Merged(Stored):
    """A matrix that looks like a quantised weight and is merged with its adapter whenever it is decoded."""

    base: jax.Array | Stored  # the weight: [out, in], or of experts [E, out, in] or [E, in, out]
    a: jax.Array | None  # the adapter's A, [r, in] or of experts [E, r, in]; None: no adapter
    b: jax.Array | None  # its B, [out, r] or of experts [E, out, r]; None: no adapter
    magnitude: jax.Array | None  # DoRA's magnitude of each row, [out]; None: the adapter has none
    scale: float = dataclasses.field(metadata=dict(static=True))  # the adapter's factor on b a; 0 without an adapter
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # of the weight
    # the dtype to which a quantised weight is decoded, and in which the merged weight is stored
    dtype_name: str = dataclasses.field(metadata=dict(static=True))
    # the grid to which the linear's weight is rounded, or None
    fake_quant: FakeQuant | None = dataclasses.field(metadata=dict(static=True))
    transposed: bool = dataclasses.field(metadata=dict(static=True))  # whether experts' weights are [in, out]

    @staticmethod
    def of(linear: Linear | ExpertLinear, dtype: str) -> Merged:
        """dtype: to which a quantised weight is decoded."""
        weight, lora = linear.stored_weight, linear.lora
        magnitude = None if lora is None or lora.magnitude is None else lora.magnitude[...]
        return Merged(
            weight,
            None if lora is None else lora.a[...],
            None if lora is None else lora.b[...],
            magnitude,
            0.0 if lora is None else lora.scale,
            tuple(weight.shape),
            dtype if isinstance(weight, Stored) else weight.dtype.name,
            linear.fake_quant,
            isinstance(linear, ExpertLinear) and linear.transposed,
        )

    def problem(self) -> str | None:
        return None

    def block_length(self, axis: int) -> int | None:
        return None

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """Rounded to the grid of QAT, then to the dtype of the stored merged weight, before the cast to `dtype`."""
        weight = dense(on_device(self.base), self.dtype_name)
        if self.a is not None and self.b is not None:
            if weight.ndim == 3:
                adapters = (weight, self.a, self.b)
                stored = jax.lax.map(lambda expert: self._expert(*expert), adapters)
            else:
                scaled = None
                if self.magnitude is not None:
                    scaled = self.magnitude / row_norm(weight, self.a, self.b, self.scale)
                wide = merged_weight(weight, LoraWeights(self.a, self.b, scaled, self.scale))
                stored = (wide if self.fake_quant is None else self.fake_quant.round(wide)).astype(self.dtype_name)
        else:
            stored = weight if self.fake_quant is None else round_to_grid(weight, self.fake_quant, self.transposed)
        # Otherwise XLA may leave out the rounding, and the compared values would not be the stored ones.
        return jax.lax.optimization_barrier(stored).astype(dtype or self.dtype_name)

    def _expert(self, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        weight = weight.T if self.transposed else weight
        wide = merged_weight(weight, LoraWeights(a, b, None, self.scale))
        stored = (wide if self.fake_quant is None else self.fake_quant.round(wide)).astype(self.dtype_name)
        return stored.T if self.transposed else stored


@dispatch.unsaid()
def check_logits(model: Decoder, merged: Weights, views: dict[int, Merged], changed: int, at_once: bool) -> None:
    """Compares the logits of a random batch of the model with its adapter and of the merged model, in fp32. Activations
    are not rounded, so that only the rounding of weights differs.

    Rounding weights with unit roundoff u changes a product by about u / 2 of its size, and errors of `changed` products
    add up like a random walk. The root mean square of the difference must be at most 8 u sqrt(changed) times that of
    the logits around their mean, where u includes fp32's own sums.

      model: with its adapter.
      merged: the same model with the adapter merged, whose tensors may be computed only on use.
      views: {id() of a variable of the merged model: the Merged that computes its value}.
      changed: how many matrices are merged or decoded, or were trained whole.
      at_once: two threads compute both, which saves a second of compiling and takes twice the memory.

    Raises ArithmeticError for a larger difference, or a more precise one from a changed tensor's own verification.
    """
    walked = copy_structure(merged.model)
    pairs = _pairs(walked, merged.model)
    for name, (variable, original) in pairs.items():
        if id(original) in views:
            variable.set_value(views[id(original)])
        elif name in merged.makers:  # an embedding or a head, which one forward needs twice if it is tied
            variable.set_value(merged.makers[name]())
    plain = copy_structure(model)
    for _, matrix in matrices(plain):
        matrix.fp8 = False  # a merged model rounds no activations
        if matrix.fake_quant is not None:
            matrix.fake_quant = dataclasses.replace(matrix.fake_quant, inputs=False)
    with ThreadPoolExecutor(2 if at_once else 1, "logits") as pool:  # each needs programs of its own
        expected, actual = pool.map(_logits, (plain, walked))
    # Modules refer to each other: what the copy has would live until the garbage collector finds it.
    for variable, original in pairs.values():
        variable.set_value(original.get_value())
    del walked
    config = model.config
    widest = max(config.hidden_size, config.intermediate_size, config.query_size)
    allowed = roundoff(model.weight_dtype) + FP32_ROUNDOFF * widest**0.5
    bound = _MARGIN * allowed * changed**0.5
    middle = expected.mean(-1 if config.head.is_text else None, keepdims=True)  # of scores, over all tokens
    scale = np.sqrt(np.mean(np.square(expected - middle)))
    error = float(np.sqrt(np.mean(np.square(actual - expected))) / scale)
    if not error <= bound:
        for make in merged.makers.values():  # the check of a matrix may give a more precise error
            make()
        raise ArithmeticError(
            f"merge_adapter: the merged model's logits differ from the adapter model's by {error:.3g} of their size; "
            f"rounding explains {bound:.3g}. Nothing was merged"
        )


def _pairs(copy: Decoder, model: Decoder) -> dict[str, tuple[nnx.Variable, nnx.Variable]]:
    """{Hugging Face name of a tensor: (its variable in `copy`, its variable in `model`)}."""
    copied, originals = tensors_of(copy), tensors_of(model)
    return {name: (copied[name], originals[name]) for name in originals}


def _logits(model: Decoder) -> np.ndarray:
    """The logits (or scores) of a random batch, float32[rows, tokens, vocabulary] in host memory; changes the model's
    dtypes.
    """
    model.dtype = "float32"
    set_compute(model, {})
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (_PROBE_ROWS, _PROBE_LENGTH), np.int32)
    last = _last_layer(jnp.asarray(tokens), model)
    rows, graph_and_state = model.head_variable.shape[0], nnx.split(model)
    count = min(_HEAD_ROWS, rows)  # always as many, so that it is one program: the last ones overlap
    starts = (min(first, rows - count) for first in range(0, rows, count))
    chunks = [partition.on_host(_some_logits(*graph_and_state, last, first, count)) for first in starts]
    chunks[-1] = chunks[-1][..., -(rows % count or count) :]
    return np.concatenate(chunks, -1)


@on_any_mesh
def _last_layer(tokens: jax.Array, model: Decoder) -> jax.Array:
    """Decoder.run without the final norm, [rows, tokens, hidden]."""
    x, layout, layer_inputs = _before_layers(*nnx.split(model), tokens)
    return run_stack(model.layers, model.config.layers, x, layout, layer_inputs=layer_inputs)[0]


@functools.partial(jax.jit, static_argnums=0)
def _before_layers(graph: nnx.GraphDef, state: nnx.State, tokens: jax.Array):
    model = nnx.merge(graph, state)
    x = model.embed(tokens)
    return x, model.layout(tokens.shape), model.per_layer_inputs(tokens, x)


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=UNTUNED)
def _some_logits(graph: nnx.GraphDef, state: nnx.State, last: jax.Array, first: int, count: int) -> jax.Array:
    """The logits of `count` rows of the head from `first` on. last: before the final norm."""
    model = nnx.merge(graph, state)
    return model.logits(model.norm(last), first + jnp.arange(count))
