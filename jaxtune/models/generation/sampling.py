"""How the next token is drawn: names and definitions of Hugging Face's generate."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Numbers(NamedTuple):
    """The settings of each row as arrays, so that a program serves all values."""

    # bool[N]: whether the row draws its tokens, and does not take the likeliest one.
    draws: Any
    # float32[N]; 1 where the row does not draw.
    temperature: Any
    # int32[N]; the size of the vocabulary where it is off.
    top_k: Any
    # float32[N] each; 1, 0 and 1 where they are off.
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    # float32[N]: logits are divided by it for the log-probability of a token.
    logprob_temperature: Any


class Kind(NamedTuple):
    """What a program has to do for at least one of its rows; static."""

    draws: bool
    filters: bool
    penalises: bool

    def __or__(self, other: Kind) -> Kind:  # type: ignore[override]
        return Kind(*(one or another for one, another in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is done to the logits, in this order; the defaults do nothing.

    repetition_penalty: logits of tokens that the row has already are divided by it where they are positive and
      multiplied where negative. temperature: logits are divided by it; 0 takes the likeliest token. top_k: only so many
      likeliest tokens are left (and their equals); 0: all. top_p: only the likeliest tokens are left, as few as have
      this much probability together. min_p: only tokens are left with at least this part of the likeliest one's
      probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    scaled_logprobs: bool = False
    """Whether the log-probability of a token is that of the logits divided by the temperature; otherwise it is that of
    the logits themselves. Penalty and filters count in neither."""

    def __post_init__(self):
        for key, right, must in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 for all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "positive"),
        ):
            if not right:
                raise ValueError(f"generate: {key} = {getattr(self, key)!r}: must be {must}")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ValueError(
                f"generate: top_k = {self.top_k}, top_p = {self.top_p}, min_p = {self.min_p} have no effect with "
                "temperature = 0, which takes the likeliest token: set a temperature, or drop them"
            )

    @property
    def kind(self) -> Kind:
        draws = self.temperature > 0
        filters = draws and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return Kind(draws, filters, self.repetition_penalty != 1.0)

    def numbers(self, vocab_size: int) -> Numbers:
        """The settings as numbers of one row."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        top_p, min_p, penalty = map(np.float32, (self.top_p, self.min_p, self.repetition_penalty))
        draws, temperature = np.bool_(self.kind.draws), np.float32(self.temperature or 1.0)
        of_logprob = temperature if self.scaled_logprobs else np.float32(1.0)
        return Numbers(draws, temperature, np.int32(top_k), top_p, min_p, penalty, of_logprob)


def penalised(logits: jax.Array, seen: jax.Array, penalty: Any) -> jax.Array:
    """logits float32[B, V] with the repetition penalty on tokens that are seen, bool[B, V]."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: jax.Array, numbers: Numbers) -> jax.Array:
    """logits [B, V], divided by the temperature already, with -inf where top_k, top_p and min_p leave no token.

    Each takes what the one before has left as the whole distribution. A row whose settings are off keeps all.
    """
    top_k, top_p, min_p = (jnp.reshape(a, (-1, 1)) for a in (numbers.top_k, numbers.top_p, numbers.min_p))
    descending = -jnp.sort(-logits, axis=-1)
    within = descending >= jnp.take_along_axis(descending, jnp.broadcast_to(top_k - 1, (len(logits), 1)), axis=-1)
    probabilities = jax.nn.softmax(jnp.where(within, descending, -jnp.inf), axis=-1)
    # Of a token: what the likelier ones have together. The likeliest always stays.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = within & ((before < top_p) | (top_p >= 1))
    kept = kept.at[:, 0].set(True) & (probabilities >= min_p * probabilities[:, :1])
    lowest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)
