"""The device side of the sampler: its arrays and its compiled programs.

A slot is one row of fixed arrays: for each mixer the row's state (caches of keys and values, or states of delta nets)
and a few numbers. `Programs` are the compiled functions, which `programs` makes (`programs_of` for a sampler): `decode`
makes the next tokens of all slots in one batch. A prompt's states are computed outside the slots, by `prefill` or
`pack` and, for a long prompt, `extend`; `insert` copies them into the slots that take the prompt.

The states of a row of n tokens cover its first n - 1 tokens: the newest token is the input of the next decoding step. A
prompt's last token is therefore decoded too, and a prefill computes no logits.

`Live` and `Rows` are the numbers of the slots, which `decode` changes and does not change, and `Emitted` its results.
`empty_rows` and `empty_states` make the arrays of empty slots, `states_shape` their shapes, `grown` longer caches, and
`mark_seen` records the tokens of a row for the repetition penalty. Prompts run through the layers by `_forward`, the
new tokens of a row by `through_layers`, and `_chosen` chooses the next token. Sampler (sampler.py) is the host side,
and Prefills (prefills.py) dispatches the prefills.
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
from jaxtune.models.generation.converted import head_of_step
from jaxtune.models.generation.layer_steps import States, split_layers, through_layers
from jaxtune.models.generation.sampling import (
    MOST_RANKED,
    Kind,
    Numbers,
    Sampling,
    filtered,
    penalised,
    uniform_of,
)
from jaxtune.models.generation.structure import Structure
from jaxtune.models.generation.xla_options import prompt_options, sampler_options
from jaxtune.models.layers.segment import Context
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack import layer_forward
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.decode_attention import inserted
from jaxtune.pallas.few_rows import MOST_ROWS, chosen_token, looked_up

type Array = jax.Array | np.ndarray

NEVER = np.iinfo(np.int32).max  # a length that no row reaches


class Live(NamedTuple):
    """What each decoding step changes of the row in each of the N slots, apart from its states. `decode` takes and
    returns it."""

    token: Array  # int32[N]: the newest token, which no state contains yet; any, where `active` is False
    length: Array  # int32[N]: tokens of the row, the newest one included
    # bool[N]: True while the slot's row decodes; False if it has ended or paused, or if the slot is empty
    active: Array


class Rows(NamedTuple):
    """What does not change while a row decodes, as arrays with one entry for the row in each of the N slots."""

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


def empty_rows(count: int, ends: int, vocab_size: int) -> Rows:
    """The Rows, with numpy arrays, of `count` empty slots, as a new Sampler has them. ends: how many end tokens each
    row has room for (E of Rows). vocab_size: the tokens of the vocabulary, an empty slot's top_k, which is off."""

    def whole(dtype):
        """Zeros of a dtype, one for each slot."""
        return np.zeros(count, dtype)

    off = Sampling().numbers(vocab_size)
    numbers = Numbers(*(np.full(count, value) for value in off))
    return Rows(
        whole(np.int32),
        whole(np.int32),
        np.full(count, NEVER, np.int32),
        np.full((count, ends), -1, np.int32),
        whole(np.uint32),
        whole(np.uint32),
        numbers,
    )


class Emitted(NamedTuple):
    """The tokens that a call of `decode` made in the N slots. The host reads them after it has dispatched the next
    call, if there is one."""

    tokens: jax.Array  # int32[steps, N]: slot i made the tokens [:counts[i], i]; the others are to be ignored
    logprobs: jax.Array  # float32[steps, N]: the log-probability of each token under the model (see _chosen)
    counts: jax.Array  # int32[N]: how many tokens the row in each slot made
    # (int32[steps, N, MOST_RANKED], the tokens with the largest logits in descending order, all if the vocabulary has
    # fewer; float32 of the same shape, their log-probabilities), or None without Kind.ranks
    ranked: tuple[jax.Array, jax.Array] | None


class Programs(NamedTuple):
    """The compiled functions of the sampler, defined below, which `programs` makes. Sampler calls `decode`; prefills.py
    calls the others, which compute the states of prompts and copy them into slots."""

    prefill: Callable[..., States]  # _prefill: the states after prompts
    pack: Callable[..., States]  # _pack: the states after several prompts that were concatenated in one row
    extend: Callable[..., States]  # _extend: the states after one more chunk of long prompts
    insert: Callable[..., States]  # _insert: copies prefilled states into slots, whose old states are donated
    # _decode: the next tokens of all slots, whose states, `live` and `seen` are donated
    decode: Callable[..., tuple[States, Live, jax.Array | None, Emitted]]


def programs_of(deterministic: bool, slots: int) -> Programs:
    """The programs of a sampler with `slots` slots, for its constructor, made by `programs`. deterministic: as for
    jaxtune.Sampler; it makes a difference on a GPU only."""
    return programs(deterministic and jax.default_backend() == "gpu", slots > MOST_ROWS)


@functools.cache
def programs(same_choices: bool, many_rows: bool) -> Programs:
    """The sampler's functions as jitted programs, each compiled when it is first called with new shapes or static
    arguments. Equal arguments give the same object, so that samplers share what is compiled.

    same_choices, many_rows: as for sampler_options, by which and by prompt_options XLA's options are chosen. With
    same_choices a row gets the same bits beside any other rows, too.
    """
    jit = functools.partial(jax.jit, compiler_options=sampler_options(same_choices, many_rows))
    of_prompts = functools.partial(jax.jit, compiler_options=prompt_options(same_choices))
    return Programs(
        of_prompts(_prefill, static_argnums=(0, 1)),
        of_prompts(_pack, static_argnums=(0, 1)),
        of_prompts(_extend, static_argnums=0, donate_argnames="states"),
        jit(_insert, donate_argnames="states"),
        jit(
            functools.partial(_decode, same_choices),
            static_argnums=(0, 1, 2),
            donate_argnames=("states", "live", "seen"),
        ),
    )


def empty_states(structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], rows: int, capacity: int) -> States:
    """The generation states (caches of keys and values, states of delta nets) of `rows` rows that have no tokens yet:
    zeros, with room for `capacity` tokens in each row. The sampler allocates its slots so, and a prompt of one token
    needs no other states.

    Args:
      structure: the model without its arrays.
      shapes: the shape and dtype of each of the model's arrays, in the order of jax.tree.leaves(nnx.state(model)); only
        the shapes of the states are derived from them.
    """
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), states_shape(structure, tuple(shapes), rows, capacity))


@functools.lru_cache(64)
def states_shape(structure: Structure, shapes: tuple[jax.ShapeDtypeStruct, ...], rows: int, capacity: int) -> States:
    """The shapes of the generation states of `rows` rows of at most `capacity` tokens, as a pytree of
    jax.ShapeDtypeStruct; nothing is computed. The sampler's plan takes the bytes of slots from it.

    structure: the model without its arrays. shapes: the shape and dtype of each of them, in the order of
    jax.tree.leaves(nnx.state(model))."""
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    one = jax.eval_shape(functools.partial(_prefill, structure, capacity), list(shapes), tokens, counts, counts)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), one)


def _prefill(structure: Structure, capacity: int, leaves, tokens, lengths, totals) -> States:
    """The states after the first lengths[i] tokens of each row i, one prompt to a row, computed by the forward pass of
    training. Prefills begins long prompts with it, and computes all that are not packed (`_pack`).

    Args:
      structure, leaves: the model without its arrays, and its arrays.
      capacity: the number of tokens for which the states have room, at least T.
      tokens: int32[R, T], prompts without their last token, with padding after them.
      lengths: int32[R], from 1 to T: how many of a row's tokens are not padding.
      totals: int32[R], tokens that the row has, its last one included; by them a longrope model chooses its factors.
    """
    model = structure.model(leaves)
    layout = _rows_layout(model.config, tokens.shape, lengths, totals)

    def first(layer, spec, kept):
        """The layer's state, from its residuals `kept`."""
        return layer.first_state(kept, lengths, capacity - tokens.shape[1], Context(spec, layout))

    with jax.named_scope("prefill"):
        return _forward(model, tokens, layout, first)


def _pack(structure: Structure, width: int, leaves, tokens, starts, lengths, totals) -> States:
    """The states after G prompts, a row for each, which were concatenated in a single row, for models whose mixers are
    all attention and whose layers exchange nothing. So prompts of unequal lengths need no padding; they do not see each
    other.

    Args:
      structure, leaves: the model without its arrays, and its arrays.
      width: the most tokens of a prompt, for which the states have room.
      tokens: int32[1, T], the prompts, each without its last token.
      starts: int32[G], the index of each prompt's first token, ascending; T for an entry without a prompt.
      lengths: int32[G], how many tokens each prompt has in `tokens`; 0 for an entry without a prompt.
      totals: int32[G], tokens of each prompt with its last one; by them a longrope model chooses its factors.
    """
    model, length = structure.model(leaves), tokens.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    prompt = jnp.maximum((index[:, None] >= starts).sum(1) - 1, 0)
    position = index - starts[prompt]
    segments = jnp.where(position < lengths[prompt], prompt + 1, 0).astype(jnp.int32)
    layout = packed_layout((1, length), segments[None], max_documents=len(starts))
    tables = rotary_tables(model.config, position[None], totals[prompt][None])
    layout = dataclasses.replace(layout, rotary=tables)
    rows = _rows_layout(model.config, (len(starts), width), lengths, totals)
    places = jnp.minimum(starts[:, None] + jnp.arange(width, dtype=jnp.int32), length - 1)

    def first(layer, spec, kept):
        """The layer's state with a row for each prompt, from the residuals `kept` of the packed row."""
        unpacked = {name: value[0][places] for name, value in kept.items()}
        return layer.first_state(unpacked, lengths, 0, Context(spec, rows))

    with jax.named_scope("prefill"):
        return _forward(model, tokens, layout, first)


def _rows_layout(config: DecoderConfig, shape: tuple[int, int], lengths, totals) -> PackedLayout:
    """The layout (document boundaries and rotary tables) of R rows that contain one prompt each. `_prefill` runs its
    prompts with it, and `_pack`, after it has run them in one row, makes their states with it. config: the decoder's.
    shape: (R, T). lengths: int32[R], how many tokens of a row are no padding. totals: int32[R], as for `_prefill`."""
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    layout = packed_layout(shape, (index < lengths[:, None]).astype(jnp.int32), max_documents=1)
    return dataclasses.replace(layout, rotary=rotary_tables(config, index, totals[:, None]))


def _forward(model: Decoder, tokens, layout: PackedLayout, first_state: Callable[..., object]) -> States:
    """Runs prompts through all layers of `model` as training does, and returns the generation states, a list with one
    for each layer. tokens: int32[R, T]. layout: the tokens' document boundaries and rotary tables. first_state: (layer,
    its LayerSpec, {name: value} of the residuals that the layer's `state_reads` and `gives` name) -> the layer's
    state."""
    x = model.embed(tokens)
    states, shared = [], {}
    given = model.given(tokens, x) or [{}] * len(model.layers)
    for layer, spec, own in zip(model.layers, model.config.layers, given, strict=True):
        graph, *state = nnx.split(layer, nnx.Param, ...)
        taken = own | {name: shared[name] for name in layer.takes if name not in own}
        wanted = tuple(dict.fromkeys((*layer.state_reads, *layer.gives)))
        x, kept, *_ = layer_forward(graph, spec, wanted, *state, x, layout, None, taken=taken)
        shared |= {name: kept[residual] for residual, name in layer.gives.items()}
        states.append(first_state(layer, spec, kept))
    return states


def _extend(structure: Structure, leaves, states, tokens, at, totals) -> States:
    """The states after C more tokens of each row, by which a long prompt is prefilled in chunks.

    Args:
      structure, leaves: the model without its arrays, and its arrays.
      states: the states of the R rows, from _prefill or from the chunk before; donated.
      tokens: int32[R, C], none of them padding.
      at: int32[R], how many tokens the states contain already.
      totals: int32[R], tokens of the whole prompt with its last one, by which a longrope model chooses its factors.
    """
    model = structure.model(leaves)
    with jax.named_scope("extend"):
        positions = at[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        tables = rotary_tables(model.config, positions, totals[:, None])
        real = jnp.ones(len(at), bool)
        return through_layers(model, split_layers(model), tokens, states, at, tables, real)[1]


def _insert(states, staged, rows, slots) -> States:
    """Copies the states of prefilled rows into slots, and returns the states of all slots: row rows[i] of `staged` goes
    into slot slots[i], or nowhere if there is no slot of that number.

    states: those of all slots. staged: those of the prefilled rows; their caches may have a smaller capacity. Both are
    pytrees of arrays whose first axis is rows. rows, slots: int32[G]."""

    def one(kept, new):
        """Copies rows of `new`, one array of `staged`, into the slots of `kept`, that of `states`."""
        if len(new) == len(slots) == 1:
            return jax.lax.dynamic_update_slice(kept, new, (slots[0], *(0,) * (kept.ndim - 1)))
        heads_alike = kept.ndim == 4 and (kept.shape[1], kept.shape[3]) == (new.shape[1], new.shape[3])
        if heads_alike and kept.dtype in (jnp.bfloat16, jnp.float16):  # a cache, of keys or of values
            return inserted(kept, new, rows, slots)
        return kept.at[(slots, *map(slice, new.shape[1:]))].set(new[rows], mode="drop")

    return jax.tree.map(one, states, staged)


@functools.partial(jax.jit, static_argnums=1)
def grown(state: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`state`, one array of the slots' states, padded with zeros at the end of each axis to `shape`. The sampler grows
    its caches by it, for longer rows."""
    return jnp.pad(state, [(0, new - old) for old, new in zip(state.shape, shape, strict=True)])


@functools.partial(jax.jit, donate_argnums=0)
def mark_seen(seen, slot, tokens, length) -> jax.Array:
    """Records the tokens of a row that gets a slot, which the repetition penalty reads: returns the new `seen`, whose
    entries of that slot are replaced.

    seen: bool[N, V], whether the row in each slot contains a token; donated. slot: int32[], the slot's number. tokens:
    int32[T], of which the row contains the first `length`."""
    row = jnp.zeros(seen.shape[1], bool).at[tokens].max(jnp.arange(len(tokens)) < length)
    return seen.at[slot].set(row)


def _decode(
    batch_invariant: bool,
    structure: Structure,
    kind: Kind,
    steps: int,
    leaves,
    states,
    live: Live,
    seen,
    changed,
    given: Live,
    rows: Rows,
) -> tuple[States, Live, jax.Array | None, Emitted]:
    """Makes `steps` more tokens in each active slot, or fewer where a row ends (an end token, or Rows.limit) or pauses
    (Rows.pause: the states of a longrope model must be computed anew).

    Args:
      batch_invariant: whether a row must have the same bits beside any other rows; if so, no kernel is chosen by their
        number.
      structure, leaves: the model without its arrays, and its arrays.
      kind: which sampling operations the program contains.
      states, live: of the N slots, as the last call returned them; donated.
      seen: bool[N, V], whether each row contains a token; None without Kind.penalises; donated.
      changed: bool[N], the slots in which the host has started or ended a row since the last call.
      given: the values that replace those of `live` in the `changed` slots.
      rows: what does not change while rows decode.
    Returns:
      (states, live, seen, the tokens made): the first three are the arguments of the next call.
    """
    live = Live(*(jnp.where(changed, new, old) for new, old in zip(given, live, strict=True)))
    model = structure.model(leaves)
    splits = split_layers(model)
    if len(live.token) > 1:  # XLA does not pad the head for a product with a single row
        head = model.head_variable
        head.set_value(head_of_step(model, head[...]))

    order = jnp.arange(steps, dtype=jnp.int32)
    uniform = _uniform(rows, live.length, steps) if kind.draws else None

    def one(before, step):
        """Makes a token in each active slot: (what the next step gets, Emitted.ranked of this one)."""
        states, live, at, drawn, seen, tokens, logprobs = before
        with jax.named_scope("decode"):
            tables = rotary_tables(model.config, jnp.maximum(at, 0)[:, None], jnp.maximum(live.length, 1)[:, None])
            new, real = live.token[:, None], live.active
            hidden, states = through_layers(model, splits, new, states, at, tables, real, batch_invariant)
            token, logprob, ranked = _chosen(model, kind, hidden, seen, rows.numbers, drawn)
        length = live.length + live.active
        continues = live.active & (length < rows.limit) & (length <= rows.pause)
        for column in range(rows.ends.shape[1]):  # a reduction would be a kernel of its own
            continues &= token != rows.ends[:, column]
        if kind.penalises:
            seen = seen.at[jnp.arange(len(token)), token].max(live.active)
        live = Live(token, length, continues)
        # What a scan slices and stacks would be copied, and the next kernels wait for copies.
        drawn = None if uniform is None else jnp.where(continues, _of_step(uniform, step + 1), -1.0)
        own = (order == step)[:, None]
        tokens, logprobs = jnp.where(own, token, tokens), jnp.where(own, logprob, logprobs)
        return (states, live, _position(length, continues), drawn, seen, tokens, logprobs), ranked

    made = jnp.zeros((steps, len(live.token)), jnp.int32), jnp.zeros((steps, len(live.token)), jnp.float32)
    before = states, live, _position(live.length, live.active), None if uniform is None else uniform[0], seen, *made
    (states, after, _, _, seen, tokens, logprobs), ranked = jax.lax.scan(one, before, order)
    return states, after, seen, Emitted(tokens, logprobs, jnp.subtract(after.length, live.length), ranked)


def _of_step(uniform: jax.Array, step: jax.Array) -> jax.Array:
    """For `_decode`: float32[N], the random numbers of a step, uniform[step], or the last ones. uniform: of `_uniform`,
    float32[steps, N]. step: int32[]. Comparisons become part of another kernel, a slice would not."""
    return functools.reduce(
        lambda found, at: jnp.where(step == at, uniform[at], found), range(len(uniform)), uniform[-1]
    )


def _position(length, active) -> jax.Array:
    """For `_decode`: int32[N], the position of each row's newest token, or -1 for a slot that does not decode. It is
    computed with what a step changes of `length` and `active`, int32[N] and bool[N] (Live), in one kernel."""
    return jnp.where(active, length - 1, -1)


def _uniform(rows: Rows, lengths, steps: int) -> jax.Array:
    """For `_decode`: float32[steps, N], the random numbers by which the next tokens of each row are drawn; -1 for a row
    whose tokens are not drawn. All are computed before the first step, in which each would take three kernels. Those of
    a row that ends or pauses before the last step are not used.

    rows: what does not change while rows decode. lengths: int32[N], of the rows before the first step."""
    made = lengths - rows.start + jnp.arange(steps, dtype=jnp.int32)[:, None]
    drawn = jax.vmap(uniform_of, (None, None, 0))(rows.seed, rows.index, made)
    return jnp.where(rows.numbers.draws, drawn, -1.0)


def _chosen(model: Decoder, kind: Kind, hidden, seen, numbers: Numbers, uniform):
    """Chooses the next token of each row from its hidden state after the final norm, for `_decode`.

    Args:
      model: the decoder, whose head computes the logits.
      kind: which sampling operations the program contains.
      hidden: [N, 1, hidden].
      seen: bool[N, V], whether each row contains a token; None without Kind.penalises.
      numbers: the rows' sampling settings.
      uniform: float32[N], this step's of `_uniform`; None without Kind.draws.
    Returns:
      (the tokens int32[N], the log-probability of each under the model, float32[N]: that of the logits divided by the
        row's logprob_temperature, without penalty and filters; Emitted.ranked of this step, without the axis of steps)
    """
    vocab_size = model.config.vocab_size
    own, logits = numbers.logprob_temperature, model.logits(hidden)[:, 0]
    token, logprob, peak, total = chosen_token(logits, vocab_size, numbers.temperature, own, uniform)
    logits = logits[:, :vocab_size].astype(jnp.float32)
    if kind.penalises or kind.filters:
        # Rows without these settings keep their token, so that its bits do not depend on the settings of other rows.
        scores = penalised(logits, seen, numbers.repetition_penalty[:, None]) if kind.penalises else logits
        other = likeliest = scores.argmax(-1).astype(jnp.int32)
        if uniform is not None:
            scores = scores / numbers.temperature[:, None]
            scores = filtered(scores, numbers) if kind.filters else scores
            other = jnp.where(uniform >= 0, looked_up(scores, likeliest, jnp.maximum(uniform, 0.0)), likeliest)
        concerned = (numbers.repetition_penalty != 1) | (numbers.top_k < vocab_size) | (numbers.top_p < 1)
        concerned |= numbers.min_p > 0
        token = jnp.where(concerned, other, token)
        of_token = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        logprob = jnp.where(concerned, (of_token - peak) / own - total, logprob)
    ranked = None
    if kind.ranks:
        values, tokens = jax.lax.top_k(logits, min(MOST_RANKED, vocab_size))
        ranked = tokens, (values - peak[:, None]) / own[:, None] - total[:, None]
    return token, logprob, ranked
