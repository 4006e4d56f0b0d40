"""Prompts, answers and settings that hypothesis draws for the sampler and for all that call it, and each row alone.

JAXTUNE_DRAWS=300 draws as many sets for each caller, of prompts of up to 3,000 tokens; without it a few shorter ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from jaxtune import Decoder, Sampler
from jaxtune.models.config import LayerSpec
from jaxtune.models.generation.generate import training_logprobs
from jaxtune.models.generation.requests import Row

VOCAB = 48
DRAWS = int(os.environ.get("JAXTUNE_DRAWS", 0))
MOST, POSITIONS = (3000, 3200) if DRAWS else (520, 640)  # tokens of a prompt, and with its answer
_BUCKETS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)


def draws(few: int):
    """The decorator that sets how many sets are drawn."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=DRAWS or few, suppress_health_check=checks, phases=[Phase.explicit, Phase.generate])


_sets = itertools.count(1)


def forget_programs() -> None:
    """After every 20 sets: a process can map so many compiled programs (vm.max_map_count), and each set has its own."""
    if next(_sets) % 20 == 0:
        jax.clear_caches()


@functools.cache
def model_of(vocab_size: int = VOCAB) -> Decoder:
    """With a window that is shorter than the shortest cache, one within a bucket, and a layer without one. In float32,
    and far from even, so that rounding changes no token."""
    layers = (LayerSpec(window=50), LayerSpec(window=300), LayerSpec())
    return tiny_model(initializer_range=0.5, max_position_embeddings=POSITIONS, layers=layers, vocab_size=vocab_size)


class Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, tokens, **options):
        return "".join(chr(ord("A") + int(token)) for token in tokens)


@st.composite
def prompts(draw, vocab_size: int = VOCAB) -> tuple[int, ...]:
    """Token ids; every other length is around one to which prompts or caches are padded."""
    around = [size + more for size in _BUCKETS for more in (-1, 0, 1, 2) if size + more <= MOST]
    length = draw(st.one_of(st.sampled_from(around), st.integers(1, MOST)))
    return tuple(np.random.default_rng(draw(st.integers(0, 99))).integers(0, vocab_size, length).tolist())


@st.composite
def new_tokens(draw, longest: int) -> int:
    """How many tokens are made; often as many as fill a cache, or one more."""
    fills = [size + more - longest for size in _BUCKETS for more in (0, 1) if 0 < size + more - longest < 40]
    return draw(st.sampled_from(fills) if fills and draw(st.booleans()) else st.integers(1, 20))


@st.composite
def choices(draw, ends: bool = True) -> dict:
    """How tokens are chosen and where a row ends: arguments of Sampler.submit and of generate."""
    temperature = draw(st.sampled_from([0.0, 0.8, 1.3]))
    found = dict(temperature=temperature, repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4])))
    if temperature:
        found |= draw(st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 20}]))
    if ends:
        found["eos_token_ids"] = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        if draw(st.booleans()):
            texts = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=1, max_size=2)
            found |= dict(stop_strings=draw(st.lists(texts, min_size=1, max_size=2)), tokenizer=Letters())
    return found


@dataclasses.dataclass(frozen=True)
class Asked:
    """A row that is asked for."""

    prompt: tuple[int, ...]
    new: int
    choice: dict
    seed: int


@st.composite
def asked(draw, earlier: Sequence[Asked] = ()) -> Asked:
    again = [one.prompt for one in earlier]
    prompt = draw(st.sampled_from(again)) if again and draw(st.integers(0, 3)) == 0 else draw(prompts())
    return Asked(prompt, draw(new_tokens(len(prompt))), draw(choices()), draw(st.integers(-5, 2**40)))


@st.composite
def asked_rows(draw, most: int = 5) -> list[Asked]:
    rows: list[Asked] = []
    for _ in range(draw(st.integers(1, most))):
        rows.append(draw(asked(rows)))
    return rows


@functools.cache
def _one_slot(vocab_size: int) -> Sampler:
    """Whose bits depend on nothing but the row, and whose programs serve all rows."""
    return Sampler(model_of(vocab_size), 1, POSITIONS, deterministic=True)


def alone(one: Asked, vocab_size: int = VOCAB, index: int = 0) -> Row:
    """The row when nothing else is asked for."""
    sampler = _one_slot(vocab_size)
    sampler.submit(one.prompt, one.new, seed=one.seed, index=index, **one.choice)
    row = Row(0, [], [], "length")
    while sampler.pending:
        for piece in sampler.step():
            row.ids.extend(piece.ids)
            row.logprobs.extend(piece.logprobs)
            row = dataclasses.replace(row, finish_reason=piece.finish_reason or "length")
    return row


def check_by_forward(one: Asked, row: Row) -> None:
    """The row's log-probabilities are those of a forward pass over its whole text, which knows no caches."""
    [expected] = training_logprobs(model_of(), [one.prompt], [row.ids], one.new)
    np.testing.assert_allclose(row.logprobs, expected, atol=2e-3)
