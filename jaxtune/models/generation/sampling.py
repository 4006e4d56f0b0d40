"""How the next token is chosen from the logits, with the definitions of Hugging Face's generate."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.generation.limits import FILTERS, MOST_RANKED

type Array = jax.Array | np.ndarray


class Numbers(NamedTuple):
    """The sampling settings of N rows as arrays, so that one program serves all values."""

    draws: Any  # bool[N]: whether the row samples its tokens; otherwise it takes the most likely one
    temperature: Any  # float32[N]; 1 where the row does not sample
    top_k: Any  # int32[N]; the size of the vocabulary where it is off
    top_p: Any  # float32[N]; 1 where it is off
    min_p: Any  # float32[N]; 0 where it is off
    repetition_penalty: Any  # float32[N]; 1 where it is off
    # float32[N]: the logits are divided by it before the log-probability of a token is computed; 1, or `temperature` if
    # the row's scaled_logprobs is True
    logprob_temperature: Any


class Adjustments(NamedTuple):
    """What is added to the logits of N rows; few rows have it, so most programs do without."""

    presence_penalty: Array  # float32[N]; 0 where it is off
    frequency_penalty: Array  # float32[N]; 0 where it is off
    tokens: Array  # int32[N, B], padded with any
    bias: Array  # float32[N, B], of these tokens; 0 is padding
    until: Array  # int32[N, B]: added while the row has fewer tokens, the prompt's included


class Kind(NamedTuple):
    """The operations that a program must contain for its rows; static, so that one that no row needs costs nothing."""

    draws: bool  # the random choice of tokens; False: every row takes its most likely token
    filters: bool  # top_k, top_p or min_p, which all need the logits in sorted order
    penalises: bool  # a penalty of repetition, presence or frequency, which need the tokens that a row contains
    ranks: bool = False  # the log-probabilities of the most likely tokens (top_logprobs)
    adjusts: bool = False  # Adjustments

    def __or__(self, other: Kind) -> Kind:  # type: ignore[override]
        """The operations that either needs."""
        return Kind(*(a or b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling settings of one row, applied in the order biases, repetition_penalty, frequency_penalty and
    presence_penalty, temperature, top_k, top_p, min_p. Raises ValueError for one out of range, or filters with
    temperature 0, where they have no effect.
    """

    # the logits are divided by it, and a token is drawn at random; 0: the most likely token is taken
    temperature: float = 0.0
    top_k: int = 0  # only this many most likely tokens remain (and those that are equally likely); 0: all
    top_p: float = 1.0  # only the most likely tokens remain, as few as have at least this total probability
    min_p: float = 0.0  # only tokens remain that are at least this many times as likely as the most likely one
    # the logits of tokens that the row already contains are divided by it if positive, multiplied if negative
    repetition_penalty: float = 1.0
    top_logprobs: int = 0  # how many of the most likely tokens are returned with each new token; at most MOST_RANKED
    scaled_logprobs: bool = False
    """Whether log-probabilities are of the logits divided by the temperature; always without penalty and filters."""
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer already contains
    frequency_penalty: float = 0.0  # subtracted from them as often as the answer contains them
    # (token, what is added to its logit, as long as the row has fewer tokens than this, the prompt's included)
    biases: tuple[tuple[int, float, int], ...] = ()

    def __post_init__(self):
        for key, right, must in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 for all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("top_logprobs", self.top_logprobs in range(MOST_RANKED + 1), f"a whole number from 0 to {MOST_RANKED}"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "positive"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
        ):
            if not right:
                raise ValueError(f"generate: {key} = {getattr(self, key)!r}: must be {must}")
        if self.temperature == 0 and any(getattr(self, key) != neutral for key, neutral in FILTERS.items()):
            raise ValueError(
                f"generate: top_k = {self.top_k}, top_p = {self.top_p}, min_p = {self.min_p} have no effect with "
                "temperature = 0, which takes the likeliest token: set a temperature, or drop them"
            )

    @functools.cached_property
    def kind(self) -> Kind:
        draws = self.temperature > 0
        filters = draws and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        counts = (self.presence_penalty, self.frequency_penalty) != (0.0, 0.0)
        penalises = self.repetition_penalty != 1.0 or counts
        return Kind(draws, filters, penalises, self.top_logprobs > 0, counts or bool(self.biases))

    def numbers(self, vocab_size: int) -> Numbers:
        """The settings as numpy scalars; those that are off get values without an effect."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        top_p, min_p, penalty = map(np.float32, (self.top_p, self.min_p, self.repetition_penalty))
        draws, temperature = np.bool_(self.kind.draws), np.float32(self.temperature or 1.0)
        of_logprob = temperature if self.scaled_logprobs else np.float32(1.0)
        return Numbers(draws, temperature, np.int32(top_k), top_p, min_p, penalty, of_logprob)


def biased(logits: jax.Array, adjustments: Adjustments, length: jax.Array) -> jax.Array:
    """The logits [N, V] with biases. length: int32[N], tokens of each row."""
    bias = jnp.where(length[:, None] < adjustments.until, adjustments.bias, 0.0)
    return logits.at[jnp.arange(len(logits))[:, None], adjustments.tokens].add(bias)


def lessened(logits: jax.Array, adjustments: Adjustments, made: jax.Array) -> jax.Array:
    """The logits [N, V] less the penalties of presence and frequency. made: int32[N, V], how often each answer contains
    a token.
    """
    presence, frequency = (a[:, None] for a in (adjustments.presence_penalty, adjustments.frequency_penalty))
    return logits - frequency * made - presence * (made > 0)


def penalised(logits: jax.Array, seen: jax.Array, penalty: Any) -> jax.Array:
    """Divides the positive logits of tokens that the row contains by the penalty, and multiplies the negative ones.

    logits, seen: float32[B, V]; bool[B, V].
    penalty: a number or float32[B, 1]; 1 changes nothing.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: jax.Array, numbers: Numbers) -> jax.Array:
    """The logits [B, V], already divided by the temperature, with -inf for tokens that top_k, top_p and min_p remove.
    Each filter takes what the one before left as the whole distribution. The most likely token remains; of equally
    likely ones all or none.
    """
    top_k, top_p, min_p = (jnp.reshape(a, (-1, 1)) for a in (numbers.top_k, numbers.top_p, numbers.min_p))
    descending = -jnp.sort(-logits, axis=-1)
    in_top_k = descending >= jnp.take_along_axis(descending, jnp.broadcast_to(top_k - 1, (len(logits), 1)), axis=-1)
    probabilities = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    # The total probability of the tokens that are more likely. The most likely token always remains.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    remaining = in_top_k & ((before < top_p) | (top_p >= 1))
    remaining = remaining.at[:, 0].set(True) & (probabilities >= min_p * probabilities[:, :1])
    lowest = jnp.where(remaining, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def uniform_of(
    seed: jax.Array | np.ndarray, index: jax.Array | np.ndarray, token_counts: jax.Array | np.ndarray
) -> jax.Array:
    """float32[N] from 0 to 1: jax.random.key(seed) folded with index and token_counts, so that draws depend neither on
    slots nor on other rows.

      seed, index: uint32[N], of each row.
      token_counts: int32[N], tokens that each row has made.
    """
    keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(seed), seed], axis=-1), impl="threefry2x32")
    for number in (index, token_counts):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    return jax.vmap(jax.random.uniform)(keys)
