"""Costs of one layer: bytes of its residuals (values between segments that its backward reads) and work of its
segments. They follow from shapes and from what segments declare; layers are traced, not run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.fitted import ATTENTION_TIME, EXPERT_GRADIENT_TIME
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block, Renamed, sizes_of
from jaxtune.models.layers.segment import Context, Segment, Sizes, matrix_of, weights_per_token
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack.stack import layer_forward
from jaxtune.models.stack.stack_layers import with_low_rank_kept
from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.fitted import device_name
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.grouped_matmul import mosaic_ahead
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS
from jaxtune.train.planning.devices import Device, float32_time

_PROBE_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one segment, from which its seconds are predicted; per token and of the forward, unless a field says
    otherwise. The backward is predicted from the same figures.
    """

    # Of products, and Segment.token_flops. A product that is slower or faster than in 16 bits counts the FLOPs that a
    # 16-bit product does in its time.
    flops: float = 0.0
    # Of attention scores and weighted sums, times Segment.attention_slower[0], which is above 1 for slow head dims.
    attention_flops: float = 0.0
    # The same FLOPs of the forward, times Segment.attention_slower[1], the factor of the backward. The planner
    # multiplies the time that they give by the usual ratio of backward to forward.
    attention_flops_backward: float = 0.0
    # The same two if each row is one document: the compiled step puts copies beside attention of that duration.
    row_attention_flops: float = 0.0
    row_attention_flops_backward: float = 0.0
    moved_bytes: float = 0.0  # read and written by everything that is not a product
    # The part of moved_bytes that is not moved when it is computed again: what its products write, which what follows
    # reads to activate or add it, and, once Hopper's product brings tokens' rows itself, their copies.
    written_bytes: float = 0.0
    row_bytes: float = 0.0
    # Time of its own kernels, in the forward and in the backward, beyond FLOPs and moved_bytes, as the bytes that a
    # device copy moves in that time.
    kernel_forward: float = 0.0
    kernel_backward: float = 0.0
    weight_flops: float = 0.0  # of the products that compute the weights' gradients, without experts'
    expert_weight_flops: float = 0.0  # of those that compute the gradients of experts' weights
    weight_bytes: float = 0.0  # bytes of weights that are read once a pass, whatever the number of tokens
    decoded: float = 0.0  # number of weights that are decoded (from a quantised format) once a pass
    decoded_beside: float = 0.0  # number of experts' weights that Hopper's kernel decodes while it multiplies
    empty_flops: float = 0.0  # once a pass: products with the rows that pad experts' last tiles

    def decoded_numbers(self, tokens: float, beside_rows: float) -> float:
        """Weights that take time of their own to decode in a pass of `tokens` tokens. beside_rows: ProductTime's, where
        a kernel decodes experts' weights while it multiplies; else math.inf.
        """
        if not self.decoded_beside:
            return self.decoded
        rows = TILE_ROWS / 2 * tokens * self.flops / self.empty_flops  # of an expert, on average
        return self.decoded + self.decoded_beside * min(1.0, beside_rows / rows)

    def expert_gradient_seconds(self, tokens: float, rate: float, device: Device) -> float:
        """Seconds to compute the gradients of experts' weights, padding of the last tiles included; 0 if none trains.
        rate: FLOP/s of dense products of these tokens. Hopper has a kernel for it, elsewhere XLA does it.
        tokens: of a micro-batch on this device.
        """
        if not self.expert_weight_flops:
            return 0.0
        fit = EXPERT_GRADIENT_TIME.of("mosaic" if device.hopper else "reference", device.name)
        flops, empty = self.expert_weight_flops * tokens, self.empty_flops
        summed = (flops + empty) / (2.0 * TILE_ROWS)  # numbers of the weights of all tiles' experts
        return (flops / rate + empty / device.gemm) / fit.share + summed * fit.sum_bytes / device.copy


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers with equal residuals and equal work, measured once. A layer has parts (mixers such as attention, and
    feed-forwards), a part has segments, which read and make named residuals.
    """

    block: Block  # one of the layers, with abstract arrays
    residuals: Mapping[str, float]  # bytes per token of each residual
    padding: Mapping[str, float]  # bytes of each residual that do not depend on the tokens (empty rows of experts)
    work: Mapping[str, Work]  # {name of a segment: the work of its forward and backward}
    # a function from (tokens of the prompt, tokens generated after it) to the bytes that the layer keeps of one
    # sequence while it generates, such as its cache of keys and values; 0 if it reads another layer's cache
    state_bytes: Callable[[int, int], float]

    def residual_bytes(self, name: str, tokens: float) -> float:
        """Bytes of a residual for `tokens` tokens, padding included. KeyError if the layer has none of this name."""
        return self.residuals[name] * tokens + self.padding[name]

    @functools.cached_property
    def renamed(self) -> Renamed:
        return self.block.renamed

    @functools.cached_property
    def outputs(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """{part: output names of each of its segments}, in the order in which parts run."""
        return {
            layer_part: tuple(s.outputs for s in self.block.part_segments(layer_part))
            for layer_part in self.block.parts
        }

    @functools.cached_property
    def mixer_outputs(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """`outputs` of the mixers alone."""
        return {mixer: self.outputs[mixer] for mixer in self.block.mixers}

    @functools.cached_property
    def derivative_bytes(self) -> tuple[tuple[tuple[str, ...], Callable[[Sizes], float]], ...]:
        """For each segment that declares Segment.derivative_bytes, such as the delta net's recurrence: (its outputs, a
        function from the layer's Sizes to bytes). The segment's derivative keeps these bytes from its recomputation
        until the gradient of its outputs arrives.
        """
        block = self.block

        def of_part(layer_part: str, bytes_of: Callable[[Sizes], float]) -> Callable[[Sizes], float]:
            return lambda sizes: bytes_of(sizes_of(layer_part, sizes, self.renamed))

        segments = ((layer_part, s) for layer_part in block.parts for s in block.part_segments(layer_part))
        return tuple(
            (s.outputs, of_part(layer_part, s.derivative_bytes))
            for layer_part, s in segments
            if s.derivative_bytes is not None
        )


def kind_of(
    layer: Block, spec, shape, length: int, dtype, document: float | None = None, seen: float | None = None
) -> LayerKind:
    """The LayerKind of a layer. Layers of equal structure, shapes and arguments get the same object (a cache of 64), so
    kinds can be told apart by identity.

      layer: its arrays may be abstract.
      spec: its entry in DecoderConfig.layers.
      shape: the model's DecoderConfig.
      length: tokens of a row.
      dtype: the compute dtype.
      document: tokens of a document, on which the work of attention depends; None: a row's.
      seen: keys that a token attends to; None: of a causal document.
    """
    graph, trained, frozen = nnx.split(layer, nnx.Param, ...)
    leaves, structure = jax.tree.flatten((trained, frozen))
    abstract = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
    lengths = document or float(length), float(length)
    return _kind_of(graph, spec, shape, lengths, dtype, abstract, structure, device_name(), seen)


@functools.lru_cache(64)
def _kind_of(
    graph, spec, shape, lengths: tuple[float, float], dtype, leaves, structure, device: str, seen: float | None
) -> LayerKind:
    """`kind_of` of hashable values. lengths: of a document, and of a row. leaves: (shape, dtype) of each array of the
    tree `structure`.
    """
    arrays = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    block = nnx.merge(graph, *arrays)
    once, twice = (_residual_shapes(graph, spec, shape, dtype, arrays, n * _PROBE_TOKENS) for n in (1, 2))
    residuals = {name: (nbytes(twice[name]) - nbytes(once[name])) / _PROBE_TOKENS for name in once}
    padding = {name: 2 * nbytes(once[name]) - nbytes(twice[name]) for name in once}
    # What a layer takes from outside is read by its segments, and is counted where it is made.
    taken_bytes = {name: math.prod(dims) * float(dtype.itemsize) for name, dims in block.takes.items()}
    moved = residuals | taken_bytes | {LAYER_OUTPUT: residuals[LAYER_INPUT]}
    seen_keys = [(seen, math.inf) if seen is not None else _seen(spec.window, length) for length in lengths]
    work = {
        s.name: _segment_work(s, block, moved, seen_keys, shape.hidden_size, dtype, device) for s in block.segments()
    }
    state_bytes = functools.partial(_state_bytes, graph, spec, shape, dtype, arrays)
    return LayerKind(block, residuals, padding, work, state_bytes)


def _seen(window: int | None, document: float) -> tuple[float, float]:
    """(keys that a token of a document attends to on average, its tokens as of `_attention_slower`)"""
    width = min(window or document, document)
    return width - (width - 1) * width / (2 * document), document if width < document else math.inf


def _attention_slower(segment: Segment, seen_keys: float, document: float, device: str) -> tuple[float, float]:
    """(forward, backward): how many times as long attention takes as with heads of 128 and no window.

    document: tokens of one, for a windowed layer; math.inf: there is no window.
    """
    fit = ATTENTION_TIME.of("cudnn", device)
    narrow, in_window = fit.narrow if segment.head_dim <= 64 else 1.0, fit.window_keys * 128 / segment.head_dim
    slower = []
    for slow, half in zip(segment.attention_slower, (fit.half_tokens, fit.half_tokens_backward), strict=True):
        windowed = 1.0 if math.isinf(document) else (1 + in_window / seen_keys) / (1 + half / document)
        slower.append(slow * narrow * max(windowed, 1.0))
    return slower[0], slower[1]


def _segment_work(
    segment: Segment, block: Block, residuals, seen_keys: Sequence[tuple[float, float]], hidden: int, dtype, device: str
) -> Work:
    """The work of a segment; float32 matrices count by the rate of the GPU compiled for.

    residuals: {name: bytes per token} of all values that segments read or make.
    seen_keys: `_seen` of documents, and of whole rows.
    """
    sums = dict.fromkeys((f.name for f in dataclasses.fields(Work)), 0.0)
    for name in segment.matrices:
        matrix = matrix_of(block, name)
        size, used_weights, weight = math.prod(matrix.sizes), weights_per_token(segment, matrix), matrix.stored_weight
        if matrix.num_experts:
            sums["empty_flops"] += 2.0 * size * TILE_ROWS / 2
            # Tokens are copied to the rows sorted by expert, and back.
            sums["row_bytes"] += segment.experts_per_token * hidden * dtype.itemsize
            if matrix.fp8:  # rows are rounded: inputs in the forward, gradients in the backward
                rounded = segment.experts_per_token * sum(matrix.sizes[-2:]) / 2
                sums["moved_bytes"] += rounded * (dtype.itemsize + 1) / 2
        # A module's own float32 product runs at the device's float32 rate and copies what it reads to float32.
        wide = matrix.compute == "float32" and dtype.itemsize < 4
        plain = float32_time(targets.device_kind() or "") if wide else 1.0
        sums["flops"] += (
            2.0 * used_weights * (weight.product_time(matrix.fp8, device) if isinstance(weight, Stored) else plain)
        )
        sums["moved_bytes"] += 4.0 * sum(matrix.sizes[-2:]) if wide else 0.0
        sums["weight_bytes"] += nbytes(weight)
        if isinstance(weight, Stored):
            multiplied = weight.unswapped if weight.swapped else weight
            in_kernel = matrix.num_experts and not matrix.fp8 and mosaic_ahead.refusal(multiplied) is None
            sums["decoded_beside" if in_kernel else "decoded"] += weight.decoded_share(matrix.fp8) * size
        trained = "expert_weight_flops" if matrix.num_experts else "weight_flops"
        sums[trained] += 2.0 * used_weights if isinstance(matrix.weight, nnx.Param) else 0.0
    sums["moved_bytes"] += sums["row_bytes"]
    sums["flops"] += segment.token_flops
    sums["kernel_forward"], sums["kernel_backward"] = segment.kernel_bytes
    if segment.attention_width:
        for prefix, (keys, document) in zip(("", "row_"), seen_keys, strict=True):
            forward, backward = _attention_slower(segment, keys, document, device)
            sums[f"{prefix}attention_flops"] = 4.0 * segment.attention_width * keys * forward
            sums[f"{prefix}attention_flops_backward"] = 4.0 * segment.attention_width * keys * backward
    else:
        written = sum(residuals[name] for name in segment.outputs)
        sums["moved_bytes"] += sum(residuals[name] for name in segment.reads) + written
        sums["written_bytes"] = written if segment.matrices else 0.0
    return Work(**sums)


def _residual_shapes(graph, spec, shape, dtype, arrays, tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
    """{residual: its shape and dtype} for one row of `tokens` tokens."""
    return _traced(graph, spec, shape, dtype, arrays, tokens, lambda block, values, layout: values)


def _state_bytes(graph, spec, shape, dtype, arrays, prompt: int, new: int) -> float:
    """Bytes that a layer keeps of one row to generate `new` tokens after `prompt` tokens, such as caches."""

    def state(block: Block, values, layout: PackedLayout):
        return block.first_state(values, jnp.full((1,), prompt, jnp.int32), new, Context(spec, layout))

    return nbytes(_traced(graph, spec, shape, dtype, arrays, prompt, state))


def _traced(graph, spec: LayerSpec, shape: DecoderConfig, dtype, arrays, tokens: int, result: Callable):
    """Shapes of result(block, {residual: value}, layout) after the layer's forward on one row of `tokens` tokens."""

    def run(trainable, frozen, x):
        layout = packed_layout((1, tokens), None, 1)
        tables = rotary_tables(shape, layout.positions())
        layout = PackedLayout(layout.doc_start, layout.doc_end, tables, layout.max_documents, layout.full)
        block = nnx.merge(graph, trainable, frozen)
        names = tuple(residual.name for residual in block.residuals())
        taken_values = {name: jnp.zeros((1, tokens, *dims), dtype) for name, dims in block.takes.items()}
        # The function without jit, so that no run on another device reuses what is traced here.
        one_layer = inspect.unwrap(layer_forward)
        values = one_layer(graph, spec, names, trainable, frozen, x, layout, None, taken=taken_values)[1]
        return result(block, values, layout)

    with dispatch.unchecked():
        return jax.eval_shape(run, *arrays, jax.ShapeDtypeStruct((1, tokens, shape.hidden_size), dtype))


def experts_adapters(layers: Sequence[Block], dtype) -> float:
    """Bytes of the copies of experts' adapters in the kernels' layout and `dtype`; 0 for float32, in which adapters are
    stored.
    """
    matrices = [matrix for layer in layers for *_, matrix in layer.matrices() if matrix.num_experts and matrix.lora]
    return sum(matrix.adapter_bytes(dtype.itemsize) for matrix in matrices) if dtype.itemsize < 4 else 0.0


def low_rank_bytes(layer: Block, segment: tuple[str, tuple[str, ...]], dtype) -> float:
    """Bytes per token of the low-rank inputs that a layer keeps for a segment (name, outputs), unless the plan
    recomputes what they need. dtype: the compute dtype.
    """
    segments = with_low_rank_kept(layer.segments(), ())
    return sum(_low_rank_bytes(layer, s, dtype) for s in segments if (s.name, s.outputs) == segment)


def _low_rank_bytes(layer: Block, segment: Segment, dtype) -> float:
    """None under quantisation-aware training."""
    matrices = [matrix_of(layer, name) for name in segment.matrices]
    adapted = [matrix for matrix in matrices if matrix.lora is not None and matrix.fake_quant is None]
    adapter_sizes = [(matrix.low_rank_bytes(dtype.itemsize), matrix.num_experts) for matrix in adapted]
    return float(sum(size * (segment.experts_per_token if experts else 1) for size, experts in adapter_sizes))


def masked_sizes(model: Decoder) -> list[int]:
    """Input features of each adapter with dropout. One masked input and its mask exist at a time, so the largest
    counts.
    """
    return [m.sizes[1] for layer in model.layers for *_, m in layer.matrices() if m.lora is not None and m.lora.rate]


def nbytes(tree) -> float:
    """Bytes of all arrays of a tree, which may be abstract; whole arrays, not per device."""
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))
