"""Continues a list of prompts in one call, and computes log-probabilities of answers as training does, because those of
decoding steps differ by rounding.
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
from jaxtune.models.generation.division import Sharing
from jaxtune.models.generation.prefixes import worthwhile_bytes
from jaxtune.models.generation.requests import (
    Constraint,
    PromptPictures,
    StopStrings,
    checked_length,
    checked_prompt,
    constraints_of,
    one_a_prompt,
    seeds_of,
)
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.sampling import Sampling
from jaxtune.models.generation.xla_options import AS_TRAINED
from jaxtune.models.placement import partition
from jaxtune.pallas import one_order
from jaxtune.pallas.linear_cross_entropy import linear_token_losses

_SMALLEST_LENGTH = 16  # training_logprobs pads prompts, and new tokens, to at least this many
_MOST_SLOTS = 256
_STEPS = 8  # of a round of decoding
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
    pictures: Sequence[PromptPictures | None] | None = None,
    constraints: Sequence[Constraint | None] | None = None,
    cache: str | None = None,
) -> list[list[int]] | tuple[list[list[int]], list[list[float]]]:
    """Continues each prompt; at most 256 rows a device decode at once, as memory allows.

    Programs are compiled for each power of two of rows, or what memory allows, and each bucket of lengths. When a row
    of a longrope model outgrows the original context, its cache is computed anew with the long factors, as transformers
    does for a single row.

    Args:
      prompts: token ids of each.
      max_new_tokens: of each answer, at most.
      temperature: divides the logits; 0 takes the most likely token.
      seed: one, or one a prompt, which then draws as if alone.
      top_k: only this many most likely tokens remain; 0: all.
      top_p: the fewest most likely tokens with at least this total probability remain.
      min_p: tokens remain that are at least this many times as likely as the likeliest.
      repetition_penalty: divides positive logits of tokens that the row contains, and multiplies negative ones.
      stop_strings: a row ends with the token that completes one; needs `tokenizer`.
      tokenizer: decodes tokens for stop_strings; None: there are none.
      streamer: gets a row's index and its new tokens, one at a time.
      eos_token_ids: None: those of the model's files.
      output_logprobs: also returns each new token's log softmax, in nats, without temperature, penalty or filters.
      deterministic: a row has the same bits whatever the other prompts are, and log-probabilities come from
        `training_logprobs`, not from the decoding steps.
      pictures: of each prompt, or None for one without; needs a model with its tower. None: no prompt has any.
      constraints: which tokens each answer may make, such as `Grammars.constraint` of a JSON schema or an expression,
        or None for any; each is of one answer. None: no answer has any.
      cache: "fp8": keys and values are stored in e4m3, as Sampler does; None: in the model's dtype.

    Returns each prompt's new tokens, with the one that ended it; with output_logprobs (tokens, log-probabilities).

    Raises ValueError for an empty or too long prompt, ids outside the vocabulary, a setting out of range, a model that
    scores texts, too little memory, a constraint that fails, or deterministic log-probabilities over divided weights.
    """
    config = model.config
    if not config.head.is_text:
        raise ValueError(f"generate: {config.head.description} and cannot continue texts")
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
    pictures = one_a_prompt(pictures, len(rows), "generate: pictures")
    constraints = constraints_of(constraints, len(rows), "generate")
    if deterministic and output_logprobs:
        _require_training_logprobs(model, pictures, cache)
    steps = 1 if streamer is not None else _STEPS
    sampler = _sampler(model, rows, max(limits), deterministic, steps, cache=cache)
    answers: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    with sampler:
        row_of = {
            sampler.submit(
                row,
                max_new_tokens,
                temperature,
                row_seed,
                index=seed_index,
                pictures=pictures[index],
                constraint=constraints[index],
                **settings,
            ): index
            for index, (row, (row_seed, seed_index)) in enumerate(zip(rows, seeds, strict=True))
        }
        while sampler.pending:
            for piece in sampler.step():
                if piece.finish_reason == "failed":
                    raise ValueError(f"generate: {piece.error}")
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


def _require_training_logprobs(model: Decoder, pictures: Sequence[PromptPictures | None], cache: str | None) -> None:
    """ValueError where deterministic log-probabilities, those of training, cannot be had."""
    if any(each is not None for each in pictures):
        raise ValueError("generate: deterministic log-probabilities of prompts with pictures are not supported")
    if cache is not None:
        raise ValueError(
            f"generate: cache = {cache!r}: deterministic log-probabilities are those of training, which reads keys "
            "and values unrounded; leave one of them out"
        )
    partition.require_undivided(nnx.state(model), "generate: deterministic log-probabilities")


def begin(
    shapes: Decoder, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, free_bytes: float | None = None
) -> None:
    """Begins to load or compile, in threads, the programs with which `generate` continues one prompt, if programs are
    kept.

    shapes: the model as shapes. sampling: without biases. free_bytes: of device memory beside it; None: unknown.
    """
    with _sampler(shapes, [prompt], len(prompt) + max_new_tokens, free_bytes=free_bytes) as sampler:
        sampler.begin(len(prompt), max_new_tokens, sampling, len(sampler.ends))


def _sampler(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    length: int,
    deterministic: bool = False,
    steps: int = _STEPS,
    free_bytes: float | None = None,
    cache: str | None = None,
) -> Sampler:
    """That of `generate`, for rows of `length` tokens at most."""
    return Sampler(
        model,
        _SLOTS_OF_SAME_BITS if deterministic else None,
        length,
        most_slots=Sharing.of(model).slots(_bucket(len(rows), 1), _MOST_SLOTS),
        free_bytes=free_bytes,
        deterministic=deterministic,
        tokens_per_round=steps,
        prefix_bytes=None if deterministic else worthwhile_bytes(rows),
        cache=cache,
    )


def _bucket(size: int, smallest: int) -> int:
    """The next power of two, so that few programs are compiled."""
    return max(smallest, 1 << (size - 1).bit_length())


def training_logprobs(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    max_new_tokens: int,
    exact: bool = False,
) -> list[list[float]]:
    """Log-probabilities of each answer's tokens, in nats, as training with `deterministic: true` computes them. Texts
    are padded to other shapes than a step's, so bits may differ from a step's.

    model: not divided over devices.
    rows: token ids of each prompt.
    answers: token ids of one answer to each.
    max_new_tokens: of the run; it decides the padding.
    exact: as a sampler with `exact`, to the bit.
    """
    width = _bucket(max(map(len, rows)), _SMALLEST_LENGTH) + _bucket(max_new_tokens, _SMALLEST_LENGTH)
    tokens, lengths = np.zeros((_bucket(len(rows), 1), width), np.int32), np.ones(_bucket(len(rows), 1), np.int32)
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        lengths[index] = len(row) + len(answer)
        tokens[index, : lengths[index]] = [*row, *answer]
    graph, state = nnx.split(model)
    logprobs = np.asarray(_token_logprobs(graph, exact, state, tokens, lengths))
    return [logprobs[i, len(row) : lengths[i]].tolist() for i, row in enumerate(rows)]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=AS_TRAINED)
def _token_logprobs(graph, exact: bool, state, tokens, lengths) -> jax.Array:
    """float32[B, T]: each token's log-probability as training computes it; 0 for a row's first. tokens: int32[B, T],
    the first lengths[i] of row i real.
    """
    with one_order.exact(exact):
        return _logprobs(nnx.merge(graph, state), tokens, lengths)


def _logprobs(model: Decoder, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    real = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    hidden = model.hidden_states(tokens, real)
    targets, weights = (jnp.pad(array[:, 1:], ((0, 0), (0, 1))) for array in (tokens, real))
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
