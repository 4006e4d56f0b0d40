"""How the next token is chosen from the logits: the settings of a row (Sampling) and their effect on logits. Names and
definitions are those of Hugging Face's generate.

The compiled programs get the settings of all rows as arrays (Numbers), and as a static argument which operations they
contain (Kind). They apply `penalised`, the temperature and `filtered` in this order, and draw by `uniform_of`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_RANKED = 20  # the most tokens of which top_logprobs gives log-probabilities


class Numbers(NamedTuple):
    """The sampling settings of N rows as arrays, one number for each row, which the compiled programs get as an
    argument. So one program serves all values of the settings. The sampler writes what `Sampling.numbers` returns for a
    row into that row's entries; the values of settings that are off have no effect."""

    draws: Any  # bool[N]: whether the row samples its tokens; otherwise it takes the most likely one
    temperature: Any  # float32[N]; 1 where the row does not sample
    top_k: Any  # int32[N]; the size of the vocabulary where it is off
    top_p: Any  # float32[N]; 1 where it is off
    min_p: Any  # float32[N]; 0 where it is off
    repetition_penalty: Any  # float32[N]; 1 where it is off
    # float32[N]: the logits are divided by it before the log-probability of a token is computed; 1, or `temperature` if
    # the row's scaled_logprobs is True
    logprob_temperature: Any


class Kind(NamedTuple):
    """Which operations a program must contain because at least one of its rows needs them. It is a static argument of
    the programs, so that an operation that no row needs costs nothing. `a | b` has the operations that a or b needs; a
    sampler joins so the kinds of all rows that it has ever placed in slots, and never drops one."""

    draws: bool  # the random choice of tokens; False: every row takes its most likely token
    filters: bool  # top_k, top_p or min_p, which all need the logits in sorted order
    penalises: bool  # the repetition penalty
    ranks: bool = False  # the log-probabilities of the most likely tokens (top_logprobs)

    def __or__(self, other: Kind) -> Kind:  # type: ignore[override]
        """Returns the operations that either of the two, this one and `other`, needs."""
        return Kind(*(one or another for one, another in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling settings of one row, checked. Sampler.submit makes it of its arguments for the row's Request.

    The operations are applied to the logits in the order repetition_penalty, temperature, top_k, top_p, min_p. The
    defaults change no logits and take the most likely token. The property `kind` says which operations the row needs,
    and `numbers` gives its settings as one entry of a program's arrays.

    Raises:
      ValueError: a setting out of its range, or filters (top_k, top_p, min_p) with temperature 0, where they have no
        effect.
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
    """True: the log-probability of a token is computed from the logits divided by the temperature; False: from the
    logits themselves. In both cases it is computed without penalty and filters."""

    def __post_init__(self):
        """Raises ValueError for a setting out of its range, or for top_k, top_p or min_p with temperature 0."""
        for key, right, must in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 for all tokens"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("top_logprobs", self.top_logprobs in range(MOST_RANKED + 1), f"a whole number from 0 to {MOST_RANKED}"),
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
        """The operations that a program must contain for this row. The sampler joins it (`|`) with the Kinds of the
        rows that it placed in slots before, and `decode` is compiled for the result."""
        draws = self.temperature > 0
        filters = draws and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return Kind(draws, filters, self.repetition_penalty != 1.0, self.top_logprobs > 0)

    def numbers(self, vocab_size: int) -> Numbers:
        """The settings as a Numbers of numpy scalars, which the sampler writes into this row's entry of a program's
        arrays. Settings that are off get the values that have no effect (see the fields of Numbers). vocab_size: the
        tokens of the model's vocabulary, which a top_k of 0, or a larger one, becomes."""
        top_k = min(self.top_k or vocab_size, vocab_size)
        top_p, min_p, penalty = map(np.float32, (self.top_p, self.min_p, self.repetition_penalty))
        draws, temperature = np.bool_(self.kind.draws), np.float32(self.temperature or 1.0)
        of_logprob = temperature if self.scaled_logprobs else np.float32(1.0)
        return Numbers(draws, temperature, np.int32(top_k), top_p, min_p, penalty, of_logprob)


def penalised(logits: jax.Array, seen: jax.Array, penalty: Any) -> jax.Array:
    """Applies the repetition penalty: returns the logits, of which those of tokens that the row contains are divided by
    the penalty if they are positive, and multiplied by it if negative. A decoding step calls it first (Kind.penalises).

    Args:
      logits: float32[B, V], one for each token of the vocabulary.
      seen: bool[B, V], whether the row contains the token.
      penalty: a number, or float32[B, 1], one for each row; 1 changes nothing.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(logits: jax.Array, numbers: Numbers) -> jax.Array:
    """Applies top_k, top_p and min_p: returns the logits [B, V] with -inf for the tokens that these remove.

    Each filter treats the tokens that the one before left as the whole distribution. A row whose filters are off keeps
    all tokens, and every row keeps its most likely one. Of equally likely tokens all remain or none. A decoding step
    calls it between temperature and draw (Kind.filters).

    Args:
      logits: [B, V], already divided by the temperature.
      numbers: the settings of the B rows, of which top_k, top_p and min_p are read.
    """
    top_k, top_p, min_p = (jnp.reshape(a, (-1, 1)) for a in (numbers.top_k, numbers.top_p, numbers.min_p))
    descending = -jnp.sort(-logits, axis=-1)
    within = descending >= jnp.take_along_axis(descending, jnp.broadcast_to(top_k - 1, (len(logits), 1)), axis=-1)
    probabilities = jax.nn.softmax(jnp.where(within, descending, -jnp.inf), axis=-1)
    # The total probability of the tokens that are more likely. The most likely token always remains.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = within & ((before < top_p) | (top_p >= 1))
    kept = kept.at[:, 0].set(True) & (probabilities >= min_p * probabilities[:, :1])
    lowest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def uniform_of(seed: jax.Array | np.ndarray, index: jax.Array | np.ndarray, made: jax.Array | np.ndarray) -> jax.Array:
    """float32[N]: the random number from 0 to 1 by which the next token of each of N rows is drawn. Its key is
    jax.random.key(seed), folded with the row's index and with `made`. So a row's draws depend neither on its slot nor
    on the other rows.

    seed, index: uint32[N], of the rows. made: int32[N], how many tokens each row has made so far."""
    keys = jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(seed), seed], axis=-1), impl="threefry2x32")
    for number in (index, made):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    return jax.vmap(jax.random.uniform)(keys)
