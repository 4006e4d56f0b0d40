"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.generation.adapters import choose_adapters
from jaxtune.models.generation.limits import MOST_RANKED
from jaxtune.models.generation.structure import Structure
from jaxtune.models.programs.kept import Function

_CHUNK = 512  # tokens whose logits are in memory at once


def prompt_scores(
    structure: Structure,
    leaves: Sequence[jax.Array],
    tokens: Sequence[int],
    padded: int,
    top: int,
    adapter: int | None = None,
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """(the log-probability of each token but the first, in nats; the `top` likeliest tokens in the place of each).

    structure, leaves: the model.
    padded: the length of the program, at least as many tokens as there are.
    adapter: its number, 0: none; None: the model has none.
    """
    row = np.zeros((1, padded), np.int32)
    row[0, : len(tokens)] = tokens
    numbers = None if adapter is None else np.full(row.shape, adapter, np.int32)
    scores = scored(structure, list(leaves), row, np.int32(len(tokens)), numbers)
    logprobs, (ids, of_ids) = jax.tree.map(np.asarray, scores)
    count = len(tokens) - 1
    tops = [
        list(zip(ids[i, :top].tolist(), of_ids[i, :top].tolist(), strict=True)) if top else [] for i in range(count)
    ]
    return logprobs[:count].tolist(), tops


def _scored(structure: Structure, leaves, tokens, length, adapters):
    """(float32[T]: the log-probability of the token after each, (int32[T, K], float32[T, K]): the likeliest ones)."""
    model, width = structure.model(leaves), tokens.shape[1]
    choose_adapters(model, adapters)
    hidden = model.hidden_states(tokens, (jnp.arange(width) < length).astype(jnp.int32)[None])[0]
    targets = jnp.roll(tokens[0], -1)
    chunk = min(_CHUNK, width)
    padding = -width % chunk
    pieces = [jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))]

    def scores(operands):
        hidden, target = operands
        logits = model.logits(hidden[None])[0, :, : model.config.vocab_size].astype(jnp.float32)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logprobs, min(MOST_RANKED, model.config.vocab_size))
        return jnp.take_along_axis(logprobs, target[:, None], axis=1)[:, 0], (ids, values)

    results = jax.lax.map(scores, tuple(piece.reshape(-1, chunk, *piece.shape[1:]) for piece in pieces))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:width], results)


scored = Function(_scored, 1)
