"""A sampler whose keys and values are stored in e4m3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import golden_model, tiny_model

from jaxtune import Sampler, generate
from jaxtune.models.generation import sampler as sampler_module
from jaxtune.models.generation import slots
from jaxtune.models.layers import attention
from jaxtune.pallas.decode.attention import as_cached


def prompts_of(vocab: int, lengths) -> list[list[int]]:
    return [[(7 * row + 5 * place + 3) % vocab for place in range(length)] for row, length in enumerate(lengths)]


def rows_of(model, cache, lengths=(3, 19, 1, 47, 30), **options):
    prompts = prompts_of(model.config.vocab_size, lengths)
    with Sampler(model, slots=3, length=64, cache=cache, **options) as sampler:
        rows = list(sampler.run(prompts, 12, temperature=0.8, seed=5, eos_token_ids=()))
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(sampler._caches.states)}
    return rows, dtypes


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 16, "prefix_bytes": 10**6}], ids=["whole", "in pieces"])
@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "gpt_oss", "gemma4_shared"))]
)
def test_keys_and_values_are_rounded_as_they_are_stored(name, options, monkeypatch):
    """A cache in float32 of the same rounded numbers gives the same tokens and bits."""
    model = golden_model(name)
    rows, dtypes = rows_of(model, "fp8", **options)
    assert dtypes == {"float8_e4m3fn"}
    plain, dtypes = rows_of(model, None, **options)
    assert dtypes == {"float32"}

    def rounded(numbers, dtype):
        return as_cached(numbers, jnp.float8_e4m3fn).astype(dtype)

    monkeypatch.setattr(attention, "as_cached", rounded)
    monkeypatch.setattr("jaxtune.pallas.decode.few_rows.reference.as_cached", rounded)
    slots.programs.cache_clear()
    jax.clear_caches()
    same, _ = rows_of(model, None, **options)
    monkeypatch.undo()
    slots.programs.cache_clear()
    jax.clear_caches()
    assert [row.ids for row in rows] == [row.ids for row in same]
    np.testing.assert_allclose(*([p for row in each for p in row.logprobs] for each in (rows, same)), atol=1e-5)
    assert [row.logprobs for row in rows] != [row.logprobs for row in plain]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_what_is_too_large_becomes_the_largest_number(numbers):
    given_numbers = jnp.asarray(numbers, jnp.float32)
    cached = np.asarray(as_cached(given_numbers, jnp.float8_e4m3fn), np.float32)
    assert np.isfinite(cached).all() and (np.abs(cached) <= 448).all()
    inside = np.abs(numbers) <= 448
    np.testing.assert_allclose(cached[inside], np.asarray(numbers)[inside], rtol=2**-4, atol=2**-10)
    assert (np.abs(cached[~inside]) == 448).all()
    np.testing.assert_array_equal(as_cached(given_numbers, jnp.float32), given_numbers)


def test_the_plan_has_the_bytes_of_the_caches(monkeypatch):
    """Of 16-bit rows twice as many fit."""
    model = tiny_model("bfloat16", head_dim=32, max_position_embeddings=4096)
    with Sampler(model, slots=4, length=2048) as wide, Sampler(model, slots=4, length=2048, cache="fp8") as narrow:
        head = 16 * 4 * model.config.vocab_size
        assert (wide.plan.bytes - head) == 2 * (narrow.plan.bytes - head) > 0
    monkeypatch.setattr(sampler_module, "room_bytes", lambda share: 2.0 * wide.plan.bytes / 4)
    lengths = [Sampler(model, slots=1, cache=cache).plan.length for cache in (None, "fp8")]
    assert lengths == [2048, 4096]


def test_generate_and_errors():
    model = golden_model("llama")
    prompts = prompts_of(model.config.vocab_size, (5, 9))
    answers = generate(model, prompts, 6, cache="fp8", eos_token_ids=())
    assert [len(answer) for answer in answers] == [6, 6]
    with pytest.raises(ValueError, match="cache = 'int8': 'fp8' or None"):
        Sampler(model, cache="int8")
