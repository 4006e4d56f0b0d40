"""Which operations give a token other bits in the sampler than in the training forward.

The training forward runs layer by layer, with all residuals as results. Each operation of a decoding step then gets
what the training forward made before it, so that its result differs for its own reasons only. A difference that fusion
makes is seen in log-probabilities alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation import plain_layer
from jaxtune.models.generation.xla_options import AS_TRAINED, prompt_options, sampler_options
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT, Block
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.places import MID
from jaxtune.models.layers.segment import Context
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack.stack import layer_forward
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.decode.few_rows import MOST_ROWS, added_norm, chosen_token
from jaxtune.pallas.gated import activated, gated_rows, gated_thin
from jaxtune.pallas.linear_cross_entropy import linear_token_losses
from jaxtune.pallas.routing import route, row_weights

_PACKED = 2048  # tokens of a row of several documents
_UNORDERED = ("lse", "gate_up", "router_sums")  # residuals that are no token's own, or that only a backward reads
_NOT_COMPARED = (*_UNORDERED, "choice")  # the latter is compared apart, where experts are chosen


@dataclasses.dataclass(frozen=True)
class Compared:
    """One operation, on the same numbers in both programs."""

    phase: str  # "packed", a training forward of other rows; "prompts", "packed prompts", or "decoding"
    layer: int | None  # None: behind the last layer
    operation: str
    numbers: int  # how many results were compared
    differing: int  # of these, how many have other bits
    largest: float  # absolute difference


class NotPlainError(ValueError):
    """A model whose operations cannot be compared one by one."""


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where in rows the documents' tokens are."""

    cells: np.ndarray  # int32[R, T], the index of each cell's token among all; -1 for padding
    segments: np.ndarray  # int32[R, T], the documents' numbers in a row, from 1; 0 for padding

    @property
    def most(self) -> int:
        """Documents of a row."""
        return int(self.segments.max(initial=1))


def differences(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    *,
    sampled: Decoder | None = None,
    steps: int = 4,
    same_choices: bool = False,
) -> Iterator[Compared]:
    """Compares every operation, layer by layer. NotPlainError for a model with other layers than plain_layer's.

    texts: token ids of prompts with their answers; all are decoded in one batch.
    prompts: how many tokens of each are its prompt.
    sampled: with which prompts are prefilled and tokens decoded, as Sampler.model; None: `model`.
    steps: how many tokens of each answer are decoded.
    same_choices: as a sampler's `deterministic`.
    """
    sampled = model if sampled is None else sampled
    for index, (layer, spec) in enumerate(zip(sampled.layers, model.config.layers, strict=True)):
        if not plain_layer.is_plain(layer, spec):
            raise NotPlainError(f"layer {index} is not plain: its operations cannot be compared one by one")
    width = -(-max(map(len, texts)) // 16) * 16
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    whole = _in_rows(list(map(len, texts)), width, 1)
    before = [count - 1 for count in prompts]
    per_row = max(1, _PACKED // width)
    arrangements = {
        "packed": (_in_rows(list(map(len, texts)), width, per_row), AS_TRAINED),
        "prompts": (_in_rows(before, width, 1), prompt_options(same_choices)),
        "packed prompts": (_in_rows(before, width, max(1, _PACKED // max(before))), prompt_options(same_choices)),
    }
    positions = np.stack(
        [np.linspace(prompt - 1, len(text) - 2, steps) for text, prompt in zip(texts, prompts, strict=True)]
    ).astype(np.int32)  # [B, steps]
    decodes = jax.jit(
        _decoded,
        static_argnums=(0, 1, 2, 3),
        compiler_options=sampler_options(same_choices, len(texts) > MOST_ROWS),
    )
    runs = {
        phase: jax.jit(_arranged, static_argnums=(0, 1), compiler_options=how[1]) for phase, how in arrangements.items()
    }
    layout = _layout(model, whole)
    x = jax.jit(lambda model, tokens: model.embed(tokens))(model, tokens)
    norms = [*(plain_layer.norm_before(layer, "mixer") for layer in model.layers[1:]), model.norm]
    layers = zip(model.layers, sampled.layers, model.config.layers, norms, strict=True)
    for index, (layer, sampled_layer, spec, norm) in enumerate(layers):
        graph, *state = nnx.split(layer, nnx.Param, ...)
        sampled_graph, *sampled_state = nnx.split(sampled_layer, nnx.Param, ...)
        values = _trained(graph, spec, *state, x, layout, norm)
        for phase, (places, _) in arrangements.items():
            of_layer = (graph, spec, *state) if phase == "packed" else (sampled_graph, spec, *sampled_state)
            residuals = runs[phase](*of_layer, _gathered(x, places.cells), _layout(model, places))
            for name, value in residuals.items():
                expected = _gathered(values[name], places.cells)
                yield _compared(phase, index, name, value, expected, jnp.asarray(places.cells >= 0))
        for step in range(steps):
            chosen = jnp.asarray(positions[:, step])
            tables = _tables(model, chosen, [len(text) for text in texts])
            capacity = -(-(width + 1) // 128) * 128
            caches = _caches(graph, spec, *state, capacity, {n: values[n] for n in layer.state_reads}, chosen, layout)
            at = {name: _at(value, chosen) for name, value in values.items() if name not in _UNORDERED}
            after = _caches(
                graph, spec, *state, capacity, {n: values[n] for n in layer.state_reads}, chosen + 1, layout
            )
            statics = sampled_graph, spec, nnx.graphdef(norm), same_choices
            results = decodes(*statics, *sampled_state, nnx.state(norm), at, caches, chosen, tables)
            at |= {name: _cached(cache, chosen) for name, cache in zip(("key", "value"), after["mixer"], strict=True)}
            for name, value in results.items():
                yield _compared("decoding", index, name, value, at[name], None)
        x = values[LAYER_OUTPUT]
    yield from _of_head(model, x, positions, same_choices)


def _in_rows(lengths: Sequence[int], width: int, per_row: int) -> _Places:
    """Documents of `lengths` first tokens, `per_row` behind each other in each row; width: tokens of one among all."""
    groups = [range(first, min(first + per_row, len(lengths))) for first in range(0, len(lengths), per_row)]
    size = max(sum(lengths[i] for i in group) for group in groups)
    cells = np.full((len(groups), -(-size // 16) * 16), -1, np.int32)
    segments = np.zeros_like(cells)
    for row, group in enumerate(groups):
        start = 0
        for number, document in enumerate(group, 1):
            end = start + lengths[document]
            cells[row, start:end] = document * width + np.arange(lengths[document])
            segments[row, start:end] = number
            start = end
    return _Places(cells, segments)


def _layout(model: Decoder, places: _Places) -> PackedLayout:
    layout = packed_layout(places.cells.shape, jnp.asarray(places.segments), max_documents=places.most)
    tables = rotary_tables(model.config, layout.positions(), layout.doc_end - layout.doc_start)
    return dataclasses.replace(layout, rotary=tables)


def _tables(model: Decoder, positions: jax.Array, lengths: Sequence[int]):
    return rotary_tables(model.config, positions[:, None], jnp.asarray(lengths, jnp.int32)[:, None])


def _gathered(values: jax.Array, cells: np.ndarray) -> jax.Array:
    """values [B, width, ...] of all tokens -> [R, T, ...] of cells; padding gets a token's, which nothing reads."""
    return values.reshape(-1, *values.shape[2:])[jnp.maximum(jnp.asarray(cells), 0)]


def _at(values: jax.Array, positions: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B, ...], each row's at its position."""
    if len(values) != len(positions):  # int32[B * T, k], as experts' choices are
        values = values.reshape(len(positions), -1, *values.shape[1:])
    index = positions.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _cached(cache: jax.Array, positions: jax.Array) -> jax.Array:
    """[B, kv_heads, capacity, D] -> [B, kv_heads, D], the token at each row's position."""
    return jnp.take_along_axis(cache, (positions % cache.shape[2])[:, None, None, None], axis=2)[:, :, 0]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=AS_TRAINED)
def _trained(graph, spec: LayerSpec, trainable, frozen, x, layout: PackedLayout, norm) -> dict[str, jax.Array]:
    """What a training step computes in a layer, by the names of residuals and of plain_layer's operations."""
    block: Block = nnx.merge(graph, trainable, frozen)
    attention, feed_forward = block.parts["mixer"], block.parts["mlp"]
    names = tuple(residual.name for residual in block.residuals()[1:])
    output, values, *_ = layer_forward(graph, spec, names, trainable, frozen, x, layout, None)
    normed = block.normed("mixer", x)
    heads = attention._projections(normed, None)
    more = {
        LAYER_INPUT: x,
        LAYER_OUTPUT: output,
        "first norm": normed,
        "query, key, value": jnp.concatenate([a.reshape(*a.shape[:2], -1) for a in heads], -1),
        "attention": values["attention_out"],
        "output": attention.output(values["attention_out"]),
        "stream": values[MID],
        "norm": block.normed("mlp", values[MID]),
        "next norm": norm(output),
    }
    if type(feed_forward) is MLP:
        gate, up = values["gate"], values["up"]
        more["gated"] = _gated(feed_forward, gate, up)
        more["down"] = feed_forward.down(gate, up)
    if type(feed_forward) is MoE:
        more |= _of_experts(feed_forward, block.normed("mlp", values[MID]), values["gate_up"], values["choice"])
    return values | more


def _of_experts(moe: MoE, x: jax.Array, gate_up: jax.Array, choice: jax.Array) -> dict[str, jax.Array]:
    weights, routing = moe.weights(x, choice), route(choice, moe.moe.num_experts)
    rows = gated_rows(gate_up, row_weights(weights, routing), moe.gate)
    gated = rows.at[routing.slots].get(mode="fill", fill_value=0)
    down = moe.down(gate_up, choice, x)
    return {"router's weights": weights, "gated": gated.reshape(*x.shape[:2], -1), "down": down}


def _gated(feed_forward: MLP, gate: jax.Array, up: jax.Array) -> jax.Array:
    """activation(gate) * up as MLP.down computes it."""
    linear, activation = feed_forward.down_proj, feed_forward.config.activation
    if not linear.only_adapted(gate.dtype, False):
        return activated(gate, up, activation)
    assert linear.lora is not None
    size = gate.shape[-1]
    out, _ = gated_thin(gate.reshape(-1, size), up.reshape(-1, size), linear.lora.a[...], activation)
    return out.reshape(gate.shape)


def _arranged(graph, spec: LayerSpec, trainable, frozen, x, layout: PackedLayout) -> dict[str, jax.Array]:
    """A layer's residuals, and its output, by the stack's function."""
    block: Block = nnx.merge(graph, trainable, frozen)
    names = tuple(r.name for r in block.residuals()[1:] if r.name not in _NOT_COMPARED)
    output, values, *_ = layer_forward(graph, spec, names, trainable, frozen, x, layout, None)
    return {name: values[name] for name in names} | {LAYER_OUTPUT: output}


@functools.partial(jax.jit, static_argnums=(0, 1, 4), compiler_options=AS_TRAINED)
def _caches(graph, spec, trainable, frozen, capacity: int, values, lengths, layout: PackedLayout):
    block: Block = nnx.merge(graph, trainable, frozen)
    room = capacity - next(iter(values.values())).shape[1]
    return block.first_state(values, lengths, room, Context(spec, layout))


def _decoded(
    graph,
    spec: LayerSpec,
    norm_graph,
    batch_invariant: bool,
    trainable,
    frozen,
    norm_state,
    at,
    caches,
    positions,
    tables,
) -> dict[str, jax.Array]:
    """A decoding step's results of what the training forward, {name: [B, ...]}, made before each operation."""
    block: Block = nnx.merge(graph, trainable, frozen)
    next_weight = nnx.merge(norm_graph, norm_state).weight[...]
    results: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> jax.Array:
        trained = at.get(name)
        summed = value
        if name in ("query, key, value", "output", "down"):  # partial sums, which their reader adds up and rounds
            summed = functools.reduce(jnp.add, list(value.astype(jnp.float32))).astype(at[LAYER_INPUT].dtype)
        if trained is None:
            return value
        results[name] = summed.reshape(trained.shape)
        if name == "query, key, value":
            return trained[None]
        if name in ("output", "down"):
            return value
        return trained.reshape(value.shape)

    stream = plain_layer.Stream(at[LAYER_INPUT], at["first norm"])
    index = jnp.zeros((len(positions), 1), jnp.int32)
    context = Context(spec, PackedLayout(index, index + 1, tables, max_documents=1))
    stream, state = plain_layer.step(block, stream, caches, positions, context, next_weight, batch_invariant, tap)
    nothing = jnp.zeros((1, *stream.x.shape), stream.x.dtype)
    norm, mixer = plain_layer.norm_before(block, "mlp"), block.parts["mixer"]
    options = plain_layer.rounding(norm)
    results["norm"] = added_norm(at["stream"], nothing, norm.weight[...], **options)[1]
    results[LAYER_OUTPUT] = stream.x
    results["next norm"] = added_norm(at[LAYER_OUTPUT], nothing, next_weight, **options)[1]
    assert type(mixer) is Attention
    keys = {name: _cached(cache, positions) for name, cache in zip(("key", "value"), state["mixer"], strict=True)}
    order = ("query, key, value", *keys, "attention", "output", "stream", "norm", "choice", "router's weights", "gated")
    results |= keys
    return {name: results[name] for name in (*order, "down", LAYER_OUTPUT, "next norm") if name in results}


def _of_head(model: Decoder, x: jax.Array, positions: np.ndarray, same_choices: bool) -> Iterator[Compared]:
    """The log-probability of the most likely token by a step's logits, and by the training loss."""
    options = sampler_options(same_choices, len(x) > MOST_ROWS)
    norm = jax.jit(lambda norm, x: norm(x), compiler_options=AS_TRAINED)
    for step in range(positions.shape[1]):
        hidden = _at(x, jnp.asarray(positions[:, step]))[:, None]
        hidden = norm(model.norm, hidden)
        tokens, logprobs = jax.jit(_drawn, compiler_options=options)(model, hidden)
        trained = jax.jit(_losses, compiler_options=AS_TRAINED)(model, hidden, tokens)
        yield _compared("decoding", None, "log-probability", logprobs, 0.0 - trained[:, 0], None)


def _drawn(model: Decoder, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    unit = jnp.ones(len(hidden), jnp.float32)
    return chosen_token(model.logits(hidden)[:, 0], model.config.vocab_size, unit, unit, None)[:2]


def _losses(model: Decoder, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    head, hidden = model.head_operands(hidden)
    weights, cap = jnp.ones((len(tokens), 1), jnp.float32), model.config.final_soft_cap
    scale = model.config.logit_scale
    return linear_token_losses(
        hidden, head, tokens[:, None], weights, head_gradient=False, soft_cap=cap, logit_scale=scale
    )


def _compared(phase: str, layer: int | None, name: str, value, expected, real: jax.Array | None) -> Compared:
    numbers, differing, largest = _counted(value, expected, real)
    return Compared(phase, layer, name, int(numbers), int(differing), float(largest))


@jax.jit
def _counted(value: jax.Array, expected: jax.Array, real: jax.Array | None):
    """(numbers, how many have other bits, the largest absolute difference) where `real`, of the leading axes."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[value.dtype.itemsize]
    bits = (jax.lax.bitcast_convert_type(array, kind) for array in (value, expected.astype(value.dtype)))
    differ = functools.reduce(jnp.not_equal, bits)
    apart = jnp.abs(value.astype(jnp.float32) - expected.astype(jnp.float32))
    if real is None:
        return value.size, differ.sum(dtype=jnp.int32), apart.max()
    real = real.reshape(*real.shape, *(1,) * (value.ndim - real.ndim))
    count = real.sum() * (value.size // real.size)
    return count, (differ & real).sum(dtype=jnp.int32), jnp.where(real, apart, 0).max()
