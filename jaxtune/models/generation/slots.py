"""The device side of the sampler: its arrays and its compiled programs.

A slot is one row of fixed arrays: each mixer's state (caches of keys and values, or states of delta nets) and a few
numbers. States of a row of n tokens cover its first n - 1: the newest is the input of the next step. So a prompt's last
token is decoded, too, and a prefill computes no logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.adapters import choose_adapters
from jaxtune.models.generation.converted import head_of_step
from jaxtune.models.generation.layer_steps import States, layers_of_steps, split_layers, through_layers
from jaxtune.models.generation.limits import MOST_RANKED
from jaxtune.models.generation.sampling import (
    Adjustments,
    Array,
    Kind,
    Numbers,
    Sampling,
    biased,
    filtered,
    lessened,
    penalised,
    uniform_of,
)
from jaxtune.models.generation.structure import Structure, shaped
from jaxtune.models.generation.xla_options import prompt_options, sampler_options
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.segment import Context
from jaxtune.models.placement import gathers, partition
from jaxtune.models.placement.streams import Arrivals, with_arrived
from jaxtune.models.programs.kept import Function
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack.stack import layer_forward
from jaxtune.models.vision.pictures import Pictures
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.decode.attention import implementations, inserted
from jaxtune.pallas.decode.few_rows import MOST_ROWS, chosen_token, looked_up, masked
from jaxtune.pallas.one_order import exactly_if, is_exact, log_probabilities

NEVER = np.iinfo(np.int32).max  # a length that no row reaches


class Live(NamedTuple):
    """What each decoding step changes of the N slots, apart from states."""

    token: Array  # int32[N]: the newest token, which no state contains yet; any, where `active` is False
    length: Array  # int32[N]: tokens of the row, the newest one included
    # bool[N]: True while the slot's row decodes; False if it has ended or paused, or if the slot is empty
    active: Array


class Rows(NamedTuple):
    """What does not change while a row decodes, for each of the N slots."""

    start: Array  # int32[N]: how many tokens the prompt has
    limit: Array  # int32[N]: the row ends when it has this many tokens
    # int32[N]: the row pauses when it has more tokens than this, because its states must then be computed anew (a
    # longrope model changes its factors there)
    pause: Array
    ends: Array  # int32[N, E]: tokens that end the row, padded with -1
    # uint32[N]: the sampling seed; with `index` and the number of tokens made it determines the row's random draws
    seed: Array
    index: Array  # uint32[N]: tells rows with the same seed apart
    numbers: Numbers  # the sampling settings
    adjustments: Adjustments | None = None  # None without Kind.adjusts
    # uint32[N, (V + 31) // 32]: a bit for each token that each row may make; None: any. Only for rounds of one step
    masks: Array | None = None
    # int32[N]: a new token's position less its index in the row, where pictures advance by fewer positions than they
    # have tokens; None for a model that reads no pictures
    delta: Array | None = None
    adapter: Array | None = None  # int32[N]: the number of the row's adapter, 0: none; None: the model has none


def empty_adjustments(count: int, width: int) -> Adjustments:
    """Numpy arrays that change nothing. width: tokens of a row for which each has room."""
    floats, ints = np.zeros((count, width), np.float32), np.zeros((count, width), np.int32)
    return Adjustments(np.zeros(count, np.float32), np.zeros(count, np.float32), ints, floats, ints.copy())


def empty_rows(count: int, ends: int, vocab_size: int, pictures: bool = False) -> Rows:
    """Numpy arrays of empty slots.

    count: of the slots.
    ends: end tokens for which each has room.
    vocab_size: tokens of the model's vocabulary.
    pictures: whether the model reads pictures.
    """

    def zeros(dtype):
        return np.zeros(count, dtype)

    off = Sampling().numbers(vocab_size)
    numbers = Numbers(*(np.full(count, value) for value in off))
    return Rows(
        zeros(np.int32),
        zeros(np.int32),
        np.full(count, NEVER, np.int32),
        np.full((count, ends), -1, np.int32),
        zeros(np.uint32),
        zeros(np.uint32),
        numbers,
        delta=zeros(np.int32) if pictures else None,
    )


# What a call of `decode` made in the N slots:
#   tokens int32[steps, N]: slot i made [:counts[i], i], the others are to be ignored
#   logprobs float32[steps, N]: of each token under the model (see _chosen)
#   counts int32[N]: how many tokens the row in each slot made
#   ranked: (int32[steps, N, MOST_RANKED], the tokens with the largest logits in descending order, all if the vocabulary
#     has fewer; float32 of the same shape, their log-probabilities), or None without Kind.ranks
type Emitted = tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]


class Programs(NamedTuple):
    """The compiled functions of the sampler."""

    prefill: Function  # prefill: the states after prompts
    pack: Function  # pack: the states after several prompts that were concatenated in one row
    extend: Function  # extend: the states after one more piece of long prompts
    insert: Function  # insert: copies prefilled states into slots, whose old states are donated
    # decode: the next tokens of all slots, whose states, `live` and `seen` are donated
    decode: Function
    # the two halves of a step whose masks depend on the newest tokens, so that the host makes them meanwhile
    logits: Function  # logits, with donated states and `live`
    choose: Function  # choose, with donated `live` and `seen`
    grow: Function  # grown: an array with a longer axis
    mark: Function  # _marked: `seen` with other counts of one slot; donated


def programs_of(deterministic: bool, slots: int, exact: bool = False) -> Programs:
    """The programs of a sampler with `slots` slots. deterministic: has an effect on a GPU only.

    exact: as of Sampler.
    """
    return programs(deterministic and jax.default_backend() == "gpu", slots > MOST_ROWS, exact)


@functools.cache
def programs(same_choices: bool, many_rows: bool, exact: bool = False) -> Programs:
    """The sampler's functions, one object for equal arguments, so that samplers share their programs.

    same_choices: every process computes the same bits, and a row has the same bits beside any other rows.
    many_rows: the slots are more than few_rows' kernels multiply (MOST_ROWS).
    exact: sums in one order (pallas/one_order/README.md), as training with `exact` adds.
    """
    of = functools.partial(exactly_if, exact)
    of_steps, of_prompts = sampler_options(same_choices, many_rows), prompt_options(same_choices)
    return Programs(
        Function(of(prefill), 2, options=of_prompts),
        Function(of(pack), 2, options=of_prompts),
        Function(of(extend), 1, donated=(1,), options=of_prompts),
        Function(insert, 0, donated=(0,), options=of_steps),
        Function(functools.partial(of(decode), same_choices), 3, donated=(1, 2, 3), options=of_steps),
        Function(functools.partial(of(logits), same_choices), 1, donated=(1, 2), options=of_steps),
        Function(of(choose), 2, donated=(1, 2), options=of_steps),
        Function(grown, 1),
        Function(_marked, 0, donated=(0,)),
    )


def empty_states(structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], rows: int, capacity: int) -> States:
    """Zeros as the states of rows (KV caches and the like), allocated at once.

    structure: the model without its arrays.
    shapes: of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)); a model of these shapes is traced,
      not run, to learn the states' shapes.
    rows: number of rows.
    capacity: tokens for which each has room.
    """
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), states_shape(structure, tuple(shapes), rows, capacity))


def states_shape(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], rows: int, capacity: int) -> States:
    """The states of rows as jax.ShapeDtypeStructs.

    structure: the model without its arrays.
    shapes: of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)).
    rows: number of rows.
    capacity: tokens for which each has room.
    """
    row_states = _row_shape(structure, shapes, capacity)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), row_states)


@functools.lru_cache(64)
def _row_shape(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], capacity: int) -> States:
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    of_shapes = functools.partial(prefill, structure, capacity, alike={})
    with dispatch.unchecked():
        return jax.eval_shape(of_shapes, list(shapes), tokens, counts, counts)


def reads_lengths(structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], slots: int, capacity: int) -> bool:
    """Whether a decoding step reads of each cache what its row has, as decode_attention's kernels do, so that longer
    caches take no more time.
    """
    model = shaped(structure, tuple(shapes))
    states = states_shape(structure, tuple(shapes), slots, capacity)
    with dispatch.unchecked():
        for layer, layer_states in zip(model.layers, states, strict=True):
            for name, mixer in layer.mixers.items():
                if type(mixer) is Attention and not mixer.takes:
                    query = jax.ShapeDtypeStruct((slots, mixer.config.num_heads, mixer.config.head_dim), model.dtype)
                    table = implementations(query, layer_states[name][0])
                    if next(name for name, refusal in table.items() if refusal() is None) == "reference":
                        return False
    return True


def logits_shape(structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], slots: int) -> jax.ShapeDtypeStruct:
    """Of the logits of a decoding step."""

    def of_hidden(leaves, hidden):
        return _head_of_step(structure, leaves, slots)(hidden)[:, 0]

    hidden = jax.ShapeDtypeStruct((slots, 1, structure.config.hidden_size), shaped(structure, tuple(shapes)).dtype)
    with dispatch.unchecked():
        return jax.eval_shape(of_hidden, list(shapes), hidden)


def prefill(
    structure: Structure,
    capacity: int,
    leaves,
    tokens,
    lengths,
    totals,
    positions=None,
    pictures=None,
    adapters=None,
    alike: dict | None = None,
) -> States:
    """The states, with room for `capacity` tokens, after the first lengths[i] tokens of each row i, by the forward pass
    of training.

      tokens: int32[R, T], prompts without their last token, padded at the end.
      lengths, totals: int32[R], from 1 to T; tokens of the whole prompt, which choose a longrope model's factors.
      positions: int32[R, T, axes], where they are not the tokens' indices; None: they are.
      pictures: Pictures of the rows, then one; None: text alone.
      adapters: int32[R], the number of each row's adapter, 0: none; None: the model has none.
      alike: as of `_forward`.
    """
    model = structure.model(leaves)
    choose_adapters(model, None if adapters is None else jnp.broadcast_to(adapters[:, None], tokens.shape))
    layout = _rows_layout(model.config, tokens.shape, lengths, totals, positions)
    layout = model.picture_layout(layout, pictures)

    def first_state(layer, spec, residuals):
        return layer.first_state(residuals, lengths, capacity - tokens.shape[1], Context(spec, layout))

    with jax.named_scope("prefill"):
        return _forward(model, tokens, layout, first_state, pictures, alike)


def pack(structure: Structure, width: int, leaves, tokens, starts, lengths, totals, adapters=None) -> States:
    """The states of G prompts, a row for each, that were concatenated in one row and do not see each other. Mixers must
    all be attention, and layers exchange nothing.

      width: the most tokens of a prompt.
      tokens: int32[1, T], prompts without their last token.
      starts, lengths: int32[G], first indices, ascending, and tokens; T and 0 for none.
      totals, adapters: int32[G], as for `prefill`.
    """
    model, length = structure.model(leaves), tokens.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    prompt = jnp.maximum((index[:, None] >= starts).sum(1) - 1, 0)
    choose_adapters(model, None if adapters is None else adapters[prompt][None])
    position = index - starts[prompt]
    segments = jnp.where(position < lengths[prompt], prompt + 1, 0).astype(jnp.int32)
    layout = packed_layout((1, length), segments[None], max_documents=len(starts))
    tables = rotary_tables(model.config, position[None], totals[prompt][None])
    layout = dataclasses.replace(layout, rotary=tables)
    rows = _rows_layout(model.config, (len(starts), width), lengths, totals)
    token_indices = jnp.minimum(starts[:, None] + jnp.arange(width, dtype=jnp.int32), length - 1)

    def first_state(layer, spec, residuals):
        unpacked = {name: value[0][token_indices] for name, value in residuals.items()}
        return layer.first_state(unpacked, lengths, 0, Context(spec, rows))

    with jax.named_scope("prefill"):
        return _forward(model, tokens, layout, first_state)


def _rows_layout(config: DecoderConfig, shape: tuple[int, int], lengths, totals, positions=None) -> PackedLayout:
    """The layout of `shape` (R, T) rows with one prompt each. positions: int32[R, T, axes]; None: the indices."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    layout = packed_layout(shape, (index < lengths[:, None]).astype(jnp.int32), max_documents=1)
    tables = rotary_tables(config, index if positions is None else positions, totals[:, None])
    return dataclasses.replace(layout, rotary=tables)


def _forward(
    model: Decoder,
    tokens,
    layout: PackedLayout,
    first_state: Callable[..., object],
    pictures: Pictures | None = None,
    alike: dict | None = None,
) -> States:
    """Runs prompts, int32[R, T], through all layers as training does: a state for each.

    alike: {}, where shapes alone matter: of layers that are alike one runs.
    """
    x = model.embed(tokens)
    states, shared, deep = [], {}, []
    if pictures is not None:
        gathers.gather_all(model.vision)
        x, deep = model.with_pictures(x, pictures)
    decoder_values = model.per_layer_inputs(tokens, x, pictures=pictures) or [{}] * len(model.layers)
    splits = split_layers(model)
    weights = [state for _, *state in splits]
    arrivals, gathered = Arrivals(weights), list(map(gathers.gather, partition.shards(weights[:1])))
    for index, ((graph, *state), spec, layer_values) in enumerate(
        zip(splits, model.config.layers, decoder_values, strict=True)
    ):
        kind = None
        if alike is not None:
            kind = graph, spec, tuple(jax.typeof(leaf) for leaf in jax.tree.leaves(state))
            if kind in alike:
                states.append(alike[kind])
                continue
        state = partition.with_whole(with_arrived(state, arrivals.take(index)), gathered)
        layer = nnx.merge(graph, *state)
        inputs = layer_values | {name: shared[name] for name in layer.takes if name not in layer_values}
        residual_names = tuple(dict.fromkeys((*layer.state_reads, *layer.gives)))
        x, residuals, _, gathered, copies = layer_forward(
            graph,
            spec,
            residual_names,
            *state,
            x,
            layout,
            None,
            gathers=partition.shards(weights[index + 1 : index + 2]),
            taken=inputs,
            to_device=arrivals.beside(index),
        )
        arrivals.arrive(index, copies)
        shared |= {name: residuals[residual] for residual, name in layer.gives.items()}
        states.append(first_state(layer, spec, residuals))
        if alike is not None and not layer.takes and not layer.gives:
            alike[kind] = states[-1]
        x = x + deep[len(states) - 1] if len(states) <= len(deep) else x
    return states


def extend(structure: Structure, leaves, states, tokens, starts, counts, totals, adapters=None) -> States:
    """The states (donated) after the next tokens of each row, a piece of long prompts.

    tokens: int32[R, C], padded at the end.
    starts, counts: int32[R], tokens that the states contain, and how many of the C there are.
    totals, adapters: int32[R], as for `prefill`.
    """
    model = structure.model(leaves)
    choose_adapters(model, None if adapters is None else jnp.broadcast_to(adapters[:, None], tokens.shape))
    with jax.named_scope("extend"):
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        tables = rotary_tables(model.config, starts[:, None] + index, totals[:, None])
        real = index < counts[:, None]
        layers = layers_of_steps(model, tokens.shape[1])
        return through_layers(model, layers, tokens, states, starts, tables, real)[1]


def insert(states, staged, rows, slots) -> States:
    """Copies row rows[i] of `staged` into slot slots[i] of `states`, or nowhere if there is no such slot. Caches of
    `staged` may be shorter. rows, slots: int32[G].
    """

    def insert_rows(slot_states, staged_states):
        if len(staged_states) == len(slots) == 1:
            return jax.lax.dynamic_update_slice(slot_states, staged_states, (slots[0], *(0,) * (slot_states.ndim - 1)))
        heads_alike = slot_states.ndim == 4 and (slot_states.shape[1], slot_states.shape[3]) == (
            staged_states.shape[1],
            staged_states.shape[3],
        )
        if heads_alike and slot_states.dtype in (
            jnp.bfloat16,
            jnp.float16,
            jnp.float8_e4m3fn,
        ):  # a cache, of keys or of values
            return inserted(slot_states, staged_states, rows, slots)
        return slot_states.at[(slots, *map(slice, staged_states.shape[1:]))].set(staged_states[rows], mode="drop")

    return jax.tree.map(insert_rows, states, staged)


def grown(shape: tuple[int, ...], state: jax.Array) -> jax.Array:
    """An array padded with zeros at the end of each axis to `shape`."""
    return jnp.pad(state, [(0, new - old) for old, new in zip(state.shape, shape, strict=True)])


def _marked(seen, slot, counts) -> jax.Array:
    """`seen` with the counts (seen_counts) of a slot's row."""
    return seen.at[slot].set(counts)


def seen_counts(tokens: Sequence[int], start: int, vocab_size: int) -> np.ndarray:
    """int32[V]: 2 for each time that an answer has a token, and 1 if the prompt, the first `start` tokens, has it."""
    row = np.asarray(tokens, np.int64)
    counts = 2 * np.bincount(row[start:], minlength=vocab_size)
    counts[row[:start]] += 1
    return counts.astype(np.int32)


def decode(
    batch_invariant: bool,
    structure: Structure,
    kind: Kind,
    steps: int,
    leaves,
    states,
    live: Live,
    seen,
    changed,
    new_live: Live,
    rows: Rows,
) -> tuple[States, Live, jax.Array | None, Emitted]:
    """Makes `steps` tokens in each active slot, fewer where a row ends or pauses (Rows.pause). Returns (states, live,
    seen, Emitted); the first three are the next call's, and donated.

      batch_invariant: a row has the same bits beside any other rows.
      seen: int32[N, V] of `seen_counts`; None without Kind.penalises.
      changed, new_live: bool[N], slots in which the host started or ended a row; their `live`.
    """
    live = _changed(live, changed, new_live)
    forward = _forward_of_step(batch_invariant, structure, leaves, rows.delta, rows.adapter, len(live.token))
    order = jnp.arange(steps, dtype=jnp.int32)
    uniform = _uniform(rows, live.length, steps) if kind.draws else None

    def decode_step(step_state, step):
        """Makes a token in each active slot: (the next step_state, `ranked` of Emitted of this step)."""
        states, live, positions, draws, seen, tokens, logprobs = step_state
        with jax.named_scope("decode"):
            logits, states = forward(states, live, positions)
            token, logprob, ranked = _chosen(structure.config.vocab_size, kind, logits, seen, rows, live.length, draws)
        after = _after(live, token, rows)
        if kind.penalises:
            seen = seen.at[jnp.arange(len(token)), token].add(2 * live.active)
        # What a scan slices and stacks would be copied, and the next kernels wait for copies.
        draws = None if uniform is None else jnp.where(after.active, _of_step(uniform, step + 1), -1.0)
        this_step = (order == step)[:, None]
        tokens, logprobs = jnp.where(this_step, token, tokens), jnp.where(this_step, logprob, logprobs)
        return (states, after, _position(after), draws, seen, tokens, logprobs), ranked

    blank = jnp.zeros((steps, len(live.token)), jnp.int32), jnp.zeros((steps, len(live.token)), jnp.float32)
    first_state = (states, live, _position(live), None if uniform is None else uniform[0], seen, *blank)
    (states, after, _, _, seen, tokens, logprobs), ranked = jax.lax.scan(decode_step, first_state, order)
    return states, after, seen, (tokens, logprobs, jnp.subtract(after.length, live.length), ranked)


def logits(
    batch_invariant: bool, structure: Structure, leaves, states, live: Live, changed, new_live: Live, delta, adapter
) -> tuple[States, Live, jax.Array]:
    """The first half of a step of `decode`, whose second is `choose`: (states, live, logits [N, V or more]). delta,
    adapter: as Rows has them.
    """
    live = _changed(live, changed, new_live)
    forward = _forward_of_step(batch_invariant, structure, leaves, delta, adapter, len(live.token))
    with jax.named_scope("decode"):
        logits, states = forward(states, live, _position(live))
    return states, live, logits


def choose(
    structure: Structure, kind: Kind, logits, live: Live, seen, rows: Rows
) -> tuple[Live, jax.Array | None, Emitted]:
    """(live, seen, Emitted) after a step with these logits."""
    with jax.named_scope("decode"):
        draws = _uniform(rows, live.length, 1)[0] if kind.draws else None
        token, logprob, ranked = _chosen(structure.config.vocab_size, kind, logits, seen, rows, live.length, draws)
    after = _after(live, token, rows)
    if kind.penalises:
        seen = seen.at[jnp.arange(len(token)), token].add(2 * live.active)
    counts = jnp.subtract(after.length, live.length)
    return after, seen, (token[None], logprob[None], counts, jax.tree.map(lambda array: array[None], ranked))


def _changed(live: Live, changed, new_live: Live) -> Live:
    return Live(*(jnp.where(changed, new, old) for new, old in zip(new_live, live, strict=True)))


def _forward_of_step(
    batch_invariant: bool, structure: Structure, leaves, delta, adapter, slots: int
) -> Callable[[States, Live, jax.Array], tuple[jax.Array, States]]:
    """(states, live, positions int32[N]) -> (logits [N, V or more] of the next tokens, states)."""
    model, head = structure.model(leaves), _head_of_step(structure, leaves, slots)
    choose_adapters(model, None if adapter is None else jnp.asarray(adapter)[:, None])
    splits = layers_of_steps(model, 1)

    def forward(states, live, positions):
        index = jnp.maximum(positions, 0) if delta is None else jnp.maximum(positions, 0) + delta
        tables = rotary_tables(model.config, index[:, None], jnp.maximum(live.length, 1)[:, None])
        new, real = live.token[:, None], live.active
        hidden, states = through_layers(model, splits, new, states, positions, tables, real, batch_invariant)
        return head(hidden)[:, 0], states

    return forward


def _head_of_step(structure: Structure, leaves, slots: int) -> Callable[[jax.Array], jax.Array]:
    """hidden states [N, 1, hidden] -> logits [N, 1, V or more]."""
    model = structure.model(leaves)
    head = model.head_variable
    part = head.get_value()
    if isinstance(part, partition.Shard):
        assert part.axis == 0
        head.set_value(head_of_step(model, part.array))

        def logits(hidden: jax.Array) -> jax.Array:
            rows = gathers.rows_of_all(hidden)
            return gathers.own_rows(model.logits(rows)[..., : part.array.shape[0]])

        return logits
    if slots > 1:  # XLA does not pad the head for a product with a single row
        head.set_value(head_of_step(model, head[...]))
    return model.logits


def _after(live: Live, token, rows: Rows) -> Live:
    """With one more token in each active slot."""
    length = live.length + live.active
    continues = live.active & (length < rows.limit) & (length <= rows.pause)
    for column in range(rows.ends.shape[1]):  # a reduction would be a kernel of its own
        continues &= token != rows.ends[:, column]
    return Live(token, length, continues)


def _of_step(uniform: jax.Array, step: jax.Array) -> jax.Array:
    """uniform[step], float32[N], or the last. Comparisons fuse into another kernel, a slice would not."""
    return functools.reduce(
        lambda value, index: jnp.where(step == index, uniform[index], value), range(len(uniform)), uniform[-1]
    )


def _position(live: Live) -> jax.Array:
    return jnp.where(live.active, live.length - 1, -1)


def _uniform(rows: Rows, lengths, steps: int) -> jax.Array:
    """float32[steps, N], the random numbers of the next tokens; -1 for rows that do not draw."""
    counts = lengths - rows.start + jnp.arange(steps, dtype=jnp.int32)[:, None]
    draws = jax.vmap(uniform_of, (None, None, 0))(rows.seed, rows.index, counts)
    return jnp.where(rows.numbers.draws, draws, -1.0)


def _chosen(vocab_size: int, kind: Kind, logits, seen, rows: Rows, length, uniform):
    """(tokens int32[N], log-probabilities float32[N] of logits / logprob_temperature without penalty and filters,
    `ranked` of Emitted of this step).

      logits: [N, V or more].
      length: int32[N], tokens of each row.
      uniform: float32[N]; None without Kind.draws.
    """
    numbers = rows.numbers
    logprob_temperature = numbers.logprob_temperature
    token, logprob, peak, total = chosen_token(
        logits, vocab_size, numbers.temperature, logprob_temperature, uniform, rows.masks
    )
    logits = logits[:, :vocab_size].astype(jnp.float32)
    if kind.penalises or kind.filters or kind.adjusts:
        # Rows without these settings keep their token, so that its bits do not depend on the settings of other rows.
        adjustments = rows.adjustments
        scores = logits if adjustments is None else biased(logits, adjustments, length)
        if kind.penalises:
            scores = penalised(scores, seen > 0, numbers.repetition_penalty[:, None])
            scores = scores if adjustments is None else lessened(scores, adjustments, seen >> 1)
        if rows.masks is not None:
            scores = masked(scores, rows.masks)  # a token that is allowed alone is taken though a bias leaves it out
        filtered_token = likeliest = scores.argmax(-1).astype(jnp.int32)
        if uniform is not None:
            scores = scores / numbers.temperature[:, None]
            scores = filtered(scores, numbers) if kind.filters else scores
            filtered_token = jnp.where(uniform >= 0, looked_up(scores, likeliest, jnp.maximum(uniform, 0.0)), likeliest)
        is_filtered = (numbers.repetition_penalty != 1) | (numbers.top_k < vocab_size) | (numbers.top_p < 1)
        is_filtered |= numbers.min_p > 0
        if adjustments is not None:
            is_filtered |= (adjustments.presence_penalty != 0) | (adjustments.frequency_penalty != 0)
            is_filtered |= (adjustments.bias != 0).any(-1)
        token = jnp.where(is_filtered, filtered_token, token)
        of_token = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        of_token = (of_token - peak) / logprob_temperature - total
        if is_exact():
            of_token = log_probabilities(logits, token[:, None], logprob_temperature, vocab_size)[0][:, 0]
        logprob = jnp.where(is_filtered, of_token, logprob)
    ranked = None
    if kind.ranks:
        values, tokens = jax.lax.top_k(logits, min(MOST_RANKED, vocab_size))
        of_values = (values - peak[:, None]) / logprob_temperature[:, None] - total[:, None]
        if is_exact():
            of_values, _ = log_probabilities(logits, tokens, logprob_temperature, vocab_size)
        ranked = tokens, of_values
    return token, logprob, ranked
