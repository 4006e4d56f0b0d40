"""Generation: continues a list of prompts of any lengths in one call (`generate`), by the sampler (sampler.py).

It also computes the log-probabilities of answers as training does (`training_logprobs`), because those of the decoding
steps differ by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.requests import StopStrings, checked_length, checked_prompt, seeds_of
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.sampling import Sampling
from jaxtune.models.generation.xla_options import AS_TRAINED
from jaxtune.models.placement import partition
from jaxtune.pallas.linear_cross_entropy import linear_token_losses

_SMALLEST_LENGTH = 16  # training_logprobs pads prompts, and new tokens, to at least this many
_MOST_SLOTS = 256
_SLOTS_OF_SAME_BITS = 32  # slots for any number of prompts, see Sampler's `deterministic`


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

    As many rows decode at once as there are prompts, at most 256 and as memory allows; others follow as rows end.
    Sampler serves several calls and requests over time. The programs are compiled once for each power of two of rows
    and for each bucket of lengths. A row of a longrope model that grows past the original context uses the long factors
    from that token on, and its cache is computed anew, as transformers does for a single row.

    Args:
      prompts: token ids, of any lengths.
      max_new_tokens: the most new tokens of a row.
      temperature: the logits are divided by it; 0 takes the most likely token.
      top_k: only this many most likely tokens remain; 0: all.
      top_p: only the most likely tokens remain, as few as have at least this total probability.
      min_p: only tokens remain that are at least this many times as likely as the most likely one.
      repetition_penalty: divides the positive logits of tokens that the row already contains, and multiplies the
        negative ones.
      seed: what a row draws depends only on seed, its index and its step. A sequence has a seed for each prompt, whose
        row then draws as it does alone with that seed.
      stop_strings: a row ends with the token that completes one of them in its new text; needs `tokenizer`.
      tokenizer: its `decode` turns new tokens into the text in which stop strings are looked for; not used otherwise.
      streamer: called with a row's index and its new tokens as soon as they are known, one token at a time.
      eos_token_ids: tokens that end a row. None: those of the model's generation_config.json or config.json; an empty
        sequence: none.
      output_logprobs: also returns the log-probability of each new token under the model: log softmax of its logits,
        without temperature, penalty or filters.
      deterministic: a row's tokens have the same bits whatever the other prompts are; then the sampler has 32 slots for
        any number of prompts. Log-probabilities are then computed once more, by the forward and the loss of training
        over each whole text (training_logprobs). Otherwise they are those of the decoding steps, which differ by the
        rounding of the model's dtype.
    Returns:
      for each prompt its new tokens, up to and including the one that ended it; with output_logprobs (these,
        log-probabilities).
    Raises:
      ValueError: no prompts, an empty one, ids outside the vocabulary, too many tokens for the model's positions; a
        setting out of its range; stop_strings without a tokenizer; weights divided over devices; a model that scores
        texts; too little device memory for a single row of this length, or for 32 if `deterministic`.
    """
    config = model.config
    if not config.head.is_text:
        raise ValueError(f"generate: {config.head.what} and cannot continue texts")
    if len(prompts) == 0:
        raise ValueError("generate: prompts is empty; give at least one list of token ids")
    rows = [checked_prompt(row, config.vocab_size, f"generate: prompt {i}") for i, row in enumerate(prompts)]
    limits = [
        checked_length(row, max_new_tokens, config.context_length, f"generate: prompt {i}", "the model has")
        for i, row in enumerate(rows)
    ]
    settings: dict[str, Any] = dict(
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, eos_token_ids=eos_token_ids
    )
    Sampling(temperature, top_k, top_p, min_p, repetition_penalty)  # raises before memory is allocated
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if stops:
        StopStrings(stops, tokenizer)
        settings |= dict(stop_strings=stops, tokenizer=tokenizer)
    seeds = seeds_of(seed, len(rows), "generate")
    partition.require_undivided(nnx.state(model), "generate")
    sampler = Sampler(
        model,
        _SLOTS_OF_SAME_BITS if deterministic else None,
        max(limits),
        most_slots=min(_bucket(len(rows), 1), _MOST_SLOTS),
        deterministic=deterministic,
        tokens_per_round=1 if streamer is not None else 8,
    )
    answers: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    with sampler:
        row_of = {
            sampler.submit(row, max_new_tokens, temperature, own, index=place, **settings): index
            for index, (row, (own, place)) in enumerate(zip(rows, seeds, strict=True))
        }
        while sampler.pending:
            for piece in sampler.step():
                index = row_of[piece.request]
                answers[index] += piece.ids
                logprobs[index] += piece.logprobs
                if streamer is not None and piece.ids:
                    streamer(index, piece.ids)
    if not output_logprobs:
        return answers
    if deterministic:
        logprobs = training_logprobs(model, rows, answers, max_new_tokens)
    return answers, logprobs


def _bucket(size: int, smallest: int) -> int:
    """`size`, a number of rows or tokens, at least 1, rounded up to a power of two, and to at least `smallest`, so that
    few programs are compiled. `generate` rounds the number of slots by it, and training_logprobs rows and lengths."""
    return max(smallest, 1 << (size - 1).bit_length())


def training_logprobs(
    model: Decoder, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[float]]:
    """The log-probabilities of answers to prompts under `model` as training computes them, for each answer a list with
    one number, in nats, for each of its tokens.

    Attention runs in the kernel of a run with `deterministic: true`, and matrix products in the vendor's first
    algorithm, as there. `generate` with `deterministic` and `output_logprobs` returns them. rows: the prompts' token
    ids; answers: their new tokens, at most max_new_tokens each. Texts are padded to lengths that few programs serve,
    which follow from the longest prompt and max_new_tokens. Those shapes are not a training step's, so the numbers need
    not equal, bit for bit, those that a step computes.
    """
    width = _bucket(max(map(len, rows)), _SMALLEST_LENGTH) + _bucket(max_new_tokens, _SMALLEST_LENGTH)
    tokens, lengths = np.zeros((_bucket(len(rows), 1), width), np.int32), np.ones(_bucket(len(rows), 1), np.int32)
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        lengths[index] = len(row) + len(answer)
        tokens[index, : lengths[index]] = [*row, *answer]
    graph, state = nnx.split(model)
    found = np.asarray(_token_logprobs(graph, state, tokens, lengths))
    return [found[i, len(row) : lengths[i]].tolist() for i, row in enumerate(rows)]


@functools.partial(jax.jit, static_argnums=0, compiler_options=AS_TRAINED)
def _token_logprobs(graph, state, tokens, lengths) -> jax.Array:
    """float32[B, T]: the log-probability of each token given those before it, as training computes it, for
    training_logprobs.

    The model is nnx.merge(graph, state); tokens are int32[B, T], of which the first lengths[i] (int32[B]) are real in
    row i. A row's first token has 0; the entries of padding have no meaning.
    """
    model = nnx.merge(graph, state)
    real = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    hidden = model.hidden_states(tokens, real)
    targets, weights = (jnp.pad(part[:, 1:], ((0, 0), (0, 1))) for part in (tokens, real))
    head, hidden = model.head_operands(hidden)
    losses = linear_token_losses(
        hidden,
        head,
        targets,
        weights.astype(jnp.float32),
        head_gradient=False,
        soft_cap=model.config.final_soft_cap,
        logit_scale=model.config.logit_scale,
    )
    return jnp.pad(-losses[:, :-1], ((0, 0), (1, 0)))
