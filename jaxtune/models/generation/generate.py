"""Generation with a key/value cache: ragged prompts in one batch, two compiled programs a bucket of shapes.

One is the prefill, the training forward with what its mixers keep; the other a loop of single tokens, which ends when
every row has ended or the host wants to look. Rows are padded on the right: each writes its next token at its own
length.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.sampling import Kind, Numbers, Sampling, filtered, penalised
from jaxtune.models.layers.segment import Context
from jaxtune.models.placement import partition
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack import layer_forward
from jaxtune.pallas.attention import PackedLayout
from jaxtune.pallas.linear_cross_entropy import filled_up, linear_token_losses

_SMALLEST_LENGTH = 16  # of a bucket of prompts or of new tokens
_STEPS_BETWEEN_LOOKS = 16  # tokens between looks for stop strings; what a row has past one is dropped


@overload
def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], *args: Any, output_logprobs: Literal[False] = ..., **options: Any
) -> list[list[int]]: ...


@overload
def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], *args: Any, output_logprobs: Literal[True], **options: Any
) -> tuple[list[list[int]], list[list[float]]]: ...


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_strings: str | Sequence[str] = (),
    tokenizer: Any = None,
    streamer: Callable[[int, list[int]], None] | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    output_logprobs: bool = False,
    deterministic: bool = False,
) -> list[list[int]] | tuple[list[list[int]], list[list[float]]]:
    """Continues each prompt.

    Batch, longest prompt and max_new_tokens are padded to powers of two, and the programs are compiled for each such
    triple once. A row of a longrope model that passes its original context takes the long factors from that token on,
    and the cache is built anew, as transformers does for a row alone; that compiles programs for the longer prompts.

    Args:
      prompts: token ids, of any lengths.
      max_new_tokens: at most so many new tokens a row.
      temperature, top_k, top_p, min_p, repetition_penalty: see sampling.Sampling; temperature 0 takes the likeliest
        token.
      seed: of sampling. What a row draws depends on seed, its index and its step only. A sequence has a seed for each
        prompt, which then draws as it does alone with that seed, whatever else is in the batch.
      stop_strings: a row ends with the token that completes one of them in its new text. Needs `tokenizer`.
      streamer: called with a row's index and its new tokens as soon as they are there, a token at a time.
      eos_token_ids: tokens that end a row. None: those of the model's generation_config.json or config.json, if it
        was loaded; an empty sequence: no token does.
      output_logprobs: also return the logarithm of each new token's probability under the model itself: softmax of
        its logits, without temperature, penalty or filters.
      deterministic: these logarithms are computed once more, by the forward and the loss of training over each whole
        text, with the kernels that a run with `deterministic: true` takes. Else they are those of the single steps,
        which equal them within the rounding of the model's dtype.
    Returns:
      for each prompt its new tokens, up to and with the one that ended it; with output_logprobs (those, logarithms).
    Raises:
      ValueError: no prompts, an empty one, ids outside the vocabulary, too many tokens for the model's positions; a
        setting out of its range; stop_strings without a tokenizer; weights that are divided over devices; a model that
        scores texts.
    """
    config = model.config
    if config.num_labels is not None:
        raise ValueError("generate: this model scores texts (a reward model) and cannot continue them")
    rows = _checked(prompts, max_new_tokens, config.vocab_size, config.context_length)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if stops and (tokenizer is None or not all(stops)):
        raise ValueError(
            f"generate: stop_strings = {stops!r}: "
            + ("give the tokenizer that turns tokens into text" if tokenizer is None else "one of them is empty")
        )
    count, longest = len(rows), max(map(len, rows))
    batch, new_bucket = _bucket(count, 1), _bucket(max_new_tokens, _SMALLEST_LENGTH)
    lengths = np.ones(batch, np.int32)
    lengths[:count] = [len(row) for row in rows]
    start = lengths.copy()
    tokens = np.zeros((batch, _bucket(longest, _SMALLEST_LENGTH)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    logprobs = np.zeros(tokens.shape, np.float32)
    ended = np.arange(batch) >= count  # rows that only fill the bucket
    # Once: walking over a model of 32 layers takes the host as long as the device takes for a thousand tokens.
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    partition.require_undivided((trainable, frozen), "generate")
    switch = min(
        (
            rope.original_max_position_embeddings or config.max_position_embeddings
            for rope in config.rotary
            if rope.kind == "longrope"
        ),
        default=np.iinfo(np.int32).max,
    )
    ends = np.atleast_1d(np.asarray(end_token_ids(model) if eos_token_ids is None else eos_token_ids, np.int32))
    request = _Request(
        start,
        np.int32(max_new_tokens),
        np.int32(switch),
        ends,
        _row_keys(seed, count, batch),
        sampling.numbers(config.vocab_size),
    )
    steps = np.int32(1 if streamer is not None else _STEPS_BETWEEN_LOOKS if stops else max_new_tokens)
    shown = start.copy()
    while True:
        # Until a row passes the switch of longrope; then on, with a prefill of everything.
        begun_short = lengths <= switch
        carry = _prefill(graph, new_bucket, sampling.kind, trainable, frozen, tokens, logprobs, lengths, ended, request)
        while True:
            tokens, logprobs, lengths, ended = map(np.array, jax.device_get(carry[:4]))
            _stop(stops, tokenizer, tokens, start, shown, lengths, ended)
            for row in np.flatnonzero(lengths > shown):
                if streamer is not None:
                    streamer(int(row), tokens[row, shown[row] : lengths[row]].tolist())
            shown = lengths.copy()
            if ended.all():
                answers = [tokens[i, start[i] : lengths[i]].tolist() for i in range(count)]
                if not output_logprobs:
                    return answers
                if deterministic:
                    logprobs = np.asarray(_of_the_forward(graph, trainable, frozen, tokens, lengths))
                return answers, [logprobs[i, start[i] : lengths[i]].tolist() for i in range(count)]
            if (~ended & begun_short & (lengths > switch)).any():
                break
            carry = _decode(
                graph, sampling.kind, trainable, frozen, carry._replace(lengths=lengths, ended=ended), request, steps
            )
        width = _bucket(int(lengths.max()), _SMALLEST_LENGTH)
        tokens, logprobs = (
            np.pad(part, ((0, 0), (0, max(0, width - part.shape[1]))))[:, :width] for part in (tokens, logprobs)
        )


def _row_keys(seed: int | Sequence[int], count: int, batch: int) -> jax.Array:
    """A key for each row: of the one seed and its index, or of its own seed, as if it were alone."""
    if isinstance(seed, int | np.integer):
        return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(batch))
    seeds = np.asarray(seed)
    if seeds.shape != (count,) or not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(f"generate: seed = {seed!r}: must be an integer, or {count} of them, one a prompt")
    seeds = np.concatenate([seeds, np.zeros(batch - count, seeds.dtype)])
    return jax.vmap(lambda own: jax.random.fold_in(jax.random.key(own), 0))(jnp.asarray(seeds))


def _stop(stops: Sequence[str], tokenizer: Any, tokens, start, shown, lengths, ended) -> None:
    """Ends rows at the token that completes a stop string; lengths and ended are changed.

    A stop string can begin in tokens that were looked at before, but not end there.
    """
    for row in np.flatnonzero(lengths > shown) if stops else ():
        new = tokens[row, start[row] : lengths[row]]
        if not _holds(tokenizer.decode(new), stops):
            continue
        for length in range(shown[row] - start[row] + 1, len(new) + 1):
            if _holds(tokenizer.decode(new[:length]), stops):
                lengths[row], ended[row] = start[row] + length, True
                break


def _holds(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())


def _checked(prompts, max_new_tokens, vocab_size, max_positions) -> list[np.ndarray]:
    if len(prompts) == 0:
        raise ValueError("generate: prompts is empty; give at least one list of token ids")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens = {max_new_tokens!r}: must be a positive integer")
    rows = []
    for index, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"generate: prompt {index} is not a list of token ids; encode text with the tokenizer first"
            )
        if row.size == 0:
            raise ValueError(f"generate: prompt {index} is empty; it needs at least one token, such as BOS")
        if row.min() < 0 or row.max() >= vocab_size:
            bad = int(row.min() if row.min() < 0 else row.max())
            raise ValueError(f"generate: prompt {index} holds token id {bad}, outside the vocabulary of {vocab_size}")
        if row.size + max_new_tokens > max_positions:
            raise ValueError(
                f"generate: prompt {index} of {row.size} tokens and max_new_tokens = {max_new_tokens} need "
                f"{row.size + max_new_tokens} positions; the model has {max_positions}: shorten one of them"
            )
        rows.append(row)
    return rows


def end_token_ids(model: Decoder) -> list[int]:
    """Tokens that end a text: of the model's generation_config.json, else config.json; none if it was made here."""
    if model.source is not None:
        for text in (model.source.generation_config, model.source.config):
            ids = json.loads(text).get("eos_token_id") if text else None
            if ids is not None:
                return [ids] if isinstance(ids, int) else list(ids)
    return []


def with_end_token_ids(model: Decoder, tokens: Sequence[int]) -> Decoder:
    """The model, changed in place: its texts, and those of the folder that it is saved to, also end with these."""
    source, ends = model.source, end_token_ids(model)
    more = [token for token in dict.fromkeys(tokens) if token not in ends and token < model.config.vocab_size]
    if source is None or not more:
        return model
    config = json.loads(source.config)
    others = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    settings = others if source.generation_config is None else json.loads(source.generation_config)
    text = json.dumps(settings | {"eos_token_id": [*ends, *more]}, indent=2) + "\n"
    model.source = dataclasses.replace(source, generation_config=text)
    return model


class _Request(NamedTuple):
    """What does not change while tokens are generated."""

    start: Any  # int32[B], tokens of the prompt
    max_new: Any  # int32[]
    switch: Any  # int32[], the length that a row of longrope must not pass
    ends: Any  # int32[n]
    keys: Any  # key[B]
    numbers: Numbers


class _Carry(NamedTuple):
    """What a step hands to the next."""

    tokens: Any  # int32[B, P + new]
    logprobs: Any  # float32[B, P + new]
    lengths: Any  # int32[B], tokens there are
    ended: Any  # bool[B]
    begun_short: Any  # bool[B]: it had at most `switch` tokens at the prefill
    seen: Any  # bool[B, V], tokens that the row has; None where nothing is penalised
    states: Any  # of the mixers


def _append(model: Decoder, kind: Kind, request: _Request, carry: _Carry, hidden) -> _Carry:
    """The carry with the next token of each row, chosen from the hidden state [B, 1, hidden] of its last one."""
    logits = model.logits(model.norm(hidden))[:, 0, : model.config.vocab_size].astype(jnp.float32)
    numbers, row = request.numbers, jnp.arange(len(carry.lengths))
    scores = penalised(logits, carry.seen, numbers.repetition_penalty) if kind.penalises else logits
    if kind.draws:
        scores = scores / numbers.temperature
        scores = filtered(scores, numbers) if kind.filters else scores
        keys = jax.vmap(jax.random.fold_in)(request.keys, carry.lengths - request.start)
        token = jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)
    else:
        token = scores.argmax(-1).astype(jnp.int32)
    logprob = logits[row, token] - jax.nn.logsumexp(logits, axis=-1)
    active = ~carry.ended
    # Ended rows write nothing: their index is out of bounds.
    at = jnp.where(active, carry.lengths, carry.tokens.shape[1])
    lengths = carry.lengths + active
    ends = (token[:, None] == request.ends).any(-1) | (lengths - request.start >= request.max_new)
    return carry._replace(
        tokens=carry.tokens.at[row, at].set(token, mode="drop"),
        logprobs=carry.logprobs.at[row, at].set(logprob, mode="drop"),
        lengths=lengths,
        ended=carry.ended | (active & ends),
        seen=carry.seen.at[row, token].set(True) if kind.penalises else None,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    graph, new_bucket: int, kind: Kind, trainable, frozen, tokens, logprobs, lengths, ended, request
) -> _Carry:
    """The carry after the first new token of each row.

    Args:
      tokens: int32[B, P]; logprobs: float32[B, P], of those that were generated before; lengths: int32[B];
      ended: bool[B].
    """
    model = nnx.merge(graph, trainable, frozen)
    with jax.named_scope("prefill"):
        # A row is its prompt, then padding.
        real = jnp.arange(tokens.shape[1]) < lengths[:, None]
        layout = model.layout(tokens.shape, real.astype(jnp.int32), max_documents=1)
        x = model.embed(tokens)
        states = []
        for layer, spec in zip(model.layers, model.config.layers, strict=True):
            layer_graph, *state = nnx.split(layer, nnx.Param, ...)
            x, kept, *_ = layer_forward(layer_graph, spec, layer.mixer.state_reads, *state, x, layout, None)
            states.append(layer.mixer.first_state(kept, lengths, new_bucket, Context(spec, layout)))
        seen = None
        if kind.penalises:
            row = jnp.arange(len(lengths))[:, None]
            seen = jnp.zeros((len(lengths), model.config.vocab_size), bool).at[row, tokens].max(real)
        room = ((0, 0), (0, new_bucket))
        carry = _Carry(
            jnp.pad(tokens, room), jnp.pad(logprobs, room), lengths, ended, lengths <= request.switch, seen, states
        )
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return _append(model, kind, request, carry, last)


@functools.partial(jax.jit, static_argnums=0)
def _of_the_forward(graph, trainable, frozen, tokens, lengths) -> jax.Array:
    """float32[B, T], the logarithm of each token's probability after those before it, as training computes it."""
    model = nnx.merge(graph, trainable, frozen)
    real = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    hidden = model.hidden_states(tokens, real)
    targets, weights = (jnp.pad(part[:, 1:], ((0, 0), (0, 1))) for part in (tokens, real))
    losses = linear_token_losses(
        hidden,
        model.head_variable[...],
        targets,
        weights.astype(jnp.float32),
        head_gradient=False,
        soft_cap=model.config.final_soft_cap,
        logit_scale=model.config.logit_scale,
    )
    return jnp.pad(-losses[:, :-1], ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnames=("carry",))
def _decode(graph, kind: Kind, trainable, frozen, carry: _Carry, request: _Request, steps) -> _Carry:
    """Up to `steps` more tokens: until every row has ended, or one that had at most `switch` tokens has more."""
    model = nnx.merge(graph, trainable, frozen)
    config = model.config
    splits = [nnx.split(layer, nnx.Param, ...) for layer in model.layers]
    if len(carry.lengths) > 1:  # a product with one row is none of those that XLA fills up
        head = model.head_variable
        head.set_value(filled_up(head[...].astype(model.dtype)))

    def unfinished(loop):
        step, carry = loop
        passed = ~carry.ended & carry.begun_short & (carry.lengths > request.switch)
        return (step < steps) & ~carry.ended.all() & ~passed.any()

    def one(loop):
        step, carry = loop
        with jax.named_scope("decode"):
            # The newest token is not in the states yet.
            at = carry.lengths - 1
            x = model.embed(carry.tokens[jnp.arange(len(at)), at][:, None])
            tables = rotary_tables(config, at[:, None], carry.lengths[:, None])
            states = []
            for (layer_graph, *state), spec, kept in zip(splits, config.layers, carry.states, strict=True):
                x, kept = _layer_step(layer_graph, spec, *state, x, tables, kept, at)
                # Else what reads the residual stream adds up all the layers below it again.
                x = jax.lax.optimization_barrier(x)
                states.append(kept)
            return step + 1, _append(model, kind, request, carry._replace(states=states), x)

    return jax.lax.while_loop(unfinished, one, (jnp.int32(0), carry))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_step(graph, spec: LayerSpec, trainable, frozen, layer_input, tables, cache, at):
    """One layer for one new token a row: (layer_output [B, 1, hidden], cache with the token at index `at` int32[B])."""
    bounds = jnp.zeros((len(at), 1), jnp.int32)  # one token a row, all of it real
    context = Context(spec, PackedLayout(bounds, bounds + 1, tables, max_documents=1, full=True))
    return nnx.merge(graph, trainable, frozen).step(layer_input, cache, at, context)
