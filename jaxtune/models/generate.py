"""Generation with a key/value cache: ragged prompts in one batch, one compiled program a bucket of shapes.

A program is a prefill, which is the training forward with keys and values kept, and a while loop of single tokens
that ends when every row has ended. Rows are padded on the right: each writes its next token at its own length.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.config import LayerSpec
from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.segment import Context
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack import layer_forward
from jaxtune.pallas.attention import PackedLayout

_SMALLEST_LENGTH = 16  # of a bucket of prompts or of new tokens


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_token_ids: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Continues each prompt.

    Batch, longest prompt and max_new_tokens are padded to powers of two, and a program is compiled for each such
    triple once. A row of a longrope model that passes its original context takes the long factors from that token on,
    and the cache is built anew, as transformers does for a row alone; that compiles a program for the longer prompts.

    Args:
      prompts: token ids, of any lengths.
      max_new_tokens: at most so many new tokens a row.
      temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
      seed: of sampling. What a row draws depends on seed, its index and its step only.
      top_k, top_p, min_p: which tokens sampling may take, all of them by default: the k likeliest (0: all); of these
        the likeliest until their probabilities reach top_p; of these, those with at least min_p times the largest
        probability. In this order, each over what the one before left, as in transformers.
      eos_token_ids: tokens that end a row. None: those of the model's generation_config.json or config.json, if it
        was loaded; an empty sequence: no token does.
    Returns:
      for each prompt its new tokens, up to and with the one that ended it.
    Raises:
      ValueError: no prompts, an empty one, ids outside the vocabulary, too many tokens for the model's positions.
    """
    config = model.config
    rows = _checked(prompts, max_new_tokens, temperature, config.vocab_size, config.max_position_embeddings)
    _check_sampling(temperature, top_k, top_p, min_p)
    limited = (top_k, top_p, min_p) != (0, 1.0, 0.0)
    limits = (np.int32(top_k or config.vocab_size), np.float32(top_p), np.float32(min_p))
    ends = np.atleast_1d(np.asarray(end_token_ids(model) if eos_token_ids is None else eos_token_ids, np.int32))
    count, longest = len(rows), max(map(len, rows))
    batch, new_bucket = _bucket(count, 1), _bucket(max_new_tokens, _SMALLEST_LENGTH)
    lengths = np.ones(batch, np.int32)
    lengths[:count] = [len(row) for row in rows]
    start = lengths.copy()
    tokens = np.zeros((batch, _bucket(longest, _SMALLEST_LENGTH)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    ended = np.arange(batch) >= count  # rows that only fill the bucket
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    switch = min(
        (
            rope.original_max_position_embeddings or config.max_position_embeddings
            for rope in config.rotary
            if rope.kind == "longrope"
        ),
        default=np.iinfo(np.int32).max,
    )
    key = jax.random.key(seed)
    while True:
        # Until a row passes the switch of longrope; then on, with a prefill of everything.
        tokens, lengths, ended = jax.device_get(
            _program(
                graph, new_bucket, temperature > 0, limited, trainable, frozen, tokens, lengths, start, ended,
                np.int32(max_new_tokens), np.int32(switch), ends, key, np.float32(temperature or 1.0), limits,
            )
        )  # fmt: skip
        if ended.all():
            return [tokens[i, start[i] : lengths[i]].tolist() for i in range(count)]
        width = _bucket(int(lengths.max()), _SMALLEST_LENGTH)
        tokens = np.pad(tokens, ((0, 0), (0, max(0, width - tokens.shape[1]))))[:, :width]


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())


def _checked(prompts, max_new_tokens, temperature, vocab_size, max_positions) -> list[np.ndarray]:
    if len(prompts) == 0:
        raise ValueError("generate: prompts is empty; give at least one list of token ids")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens = {max_new_tokens!r}: must be a positive integer")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature = {temperature}: must be 0 (greedy) or more")
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


def _check_sampling(temperature, top_k, top_p, min_p) -> None:
    for name, value, good, what in (
        ("top_k", top_k, isinstance(top_k, int) and top_k >= 0, "a whole number, 0 for all tokens"),
        ("top_p", top_p, 0.0 < top_p <= 1.0, "above 0 and at most 1"),
        ("min_p", min_p, 0.0 <= min_p <= 1.0, "from 0 to 1"),
    ):
        if not good:
            raise ValueError(f"generate: {name} = {value!r}: must be {what}")
    if temperature == 0 and (top_k, top_p, min_p) != (0, 1.0, 0.0):
        raise ValueError(
            f"generate: top_k = {top_k}, top_p = {top_p}, min_p = {min_p} have no effect with temperature = 0, which "
            "takes the likeliest token: set a temperature, or drop them"
        )


def _limited(logits: jax.Array, top_k, top_p, min_p) -> jax.Array:
    """logits [B, V], with -inf where a token may not be taken; see generate. The likeliest token always stays."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    ordered = jnp.where(jnp.arange(logits.shape[-1]) < top_k, ordered, -jnp.inf)
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    ordered = jnp.where(before < top_p, ordered, -jnp.inf)
    shares = jax.nn.softmax(ordered, axis=-1)
    ordered = jnp.where(shares >= min_p * shares[:, :1], ordered, -jnp.inf)
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _program(
    graph, new_bucket: int, sample: bool, limited: bool, trainable, frozen, tokens, lengths, start, ended,
    max_new, switch, ends, key, temperature, limits,
):  # fmt: skip
    """Generates until every row has ended, or one that had at most `switch` tokens has more.

    Args:
      tokens: int32[B, P]; lengths: int32[B], those there are; start: int32[B], those of the prompt.
      ended: bool[B]. max_new, switch: int32. ends: int32[n]. temperature: float32, used if `sample`;
        limits: top_k, top_p, min_p, used if `limited`.
    Returns:
      (tokens int32[B, P + new_bucket], lengths, ended)
    """
    model = nnx.merge(graph, trainable, frozen)
    config = model.config
    batch, prompt_length = tokens.shape
    row = jnp.arange(batch)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(row)
    splits = [nnx.split(layer, nnx.Param, ...) for layer in model.layers]

    begun_short = lengths <= switch

    def choose(hidden, lengths):
        """hidden [B, 1, hidden] of each row's last token -> its next token, int32[B]."""
        logits = model.logits(model.norm(hidden))[:, 0]
        if not sample:
            return logits.argmax(-1).astype(jnp.int32)
        step_keys = jax.vmap(jax.random.fold_in)(keys, lengths - start)
        logits /= temperature
        if limited:
            logits = _limited(logits, *limits)
        return jax.vmap(jax.random.categorical)(step_keys, logits).astype(jnp.int32)

    def append(tokens, lengths, ended, token):
        active = ~ended
        # Ended rows write nothing: their index is out of bounds.
        at = jnp.where(active, lengths, tokens.shape[1])
        tokens = tokens.at[row, at].set(token, mode="drop")
        lengths = lengths + active
        ended |= active & ((token[:, None] == ends).any(-1) | (lengths - start >= max_new))
        return tokens, lengths, ended

    with jax.named_scope("prefill"):
        # A row is its prompt, then padding.
        segment_ids = (jnp.arange(prompt_length) < lengths[:, None]).astype(jnp.int32)
        layout = model.layout(tokens.shape, segment_ids, max_documents=1)
        x = model.embed(tokens)
        caches = []
        for (layer_graph, *state), spec in zip(splits, config.layers, strict=True):
            mixer = nnx.merge(layer_graph, *state).mixer
            x, kept, _ = layer_forward(layer_graph, spec, mixer.state_reads, *state, x, layout, None)
            caches.append(mixer.first_state(kept, lengths, new_bucket))
        token = choose(jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1), lengths)
        tokens = jnp.pad(tokens, ((0, 0), (0, new_bucket)))
        carry = (*append(tokens, lengths, ended, token), caches)

    def unfinished(carry):
        _, lengths, ended, _ = carry
        return ~ended.all() & ~(~ended & begun_short & (lengths > switch)).any()

    def step(carry):
        tokens, lengths, ended, caches = carry
        with jax.named_scope("decode"):
            # The newest token is not in the cache yet.
            at = lengths - 1
            x = model.embed(tokens[row, at][:, None])
            tables = rotary_tables(config, at[:, None], lengths[:, None])
            new_caches = []
            for (layer_graph, *state), spec, cache in zip(splits, config.layers, caches, strict=True):
                x, cache = _layer_step(layer_graph, spec, *state, x, tables, cache, at)
                new_caches.append(cache)
            return *append(tokens, lengths, ended, choose(x, lengths)), new_caches

    return jax.lax.while_loop(unfinished, step, carry)[:3]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_step(graph, spec: LayerSpec, trainable, frozen, layer_input, tables, cache, at):
    """One layer for one new token a row: (layer_output [B, 1, hidden], cache with the token at index `at` int32[B])."""
    bounds = jnp.zeros((len(at), 1), jnp.int32)  # one token a row, all of it real
    context = Context(spec, PackedLayout(bounds, bounds + 1, tables, max_documents=1, full=True))
    return nnx.merge(graph, trainable, frozen).step(layer_input, cache, at, context)
