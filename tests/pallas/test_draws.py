"""Random numbers of divided rows."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from jaxtune.pallas import draws

KEY = jax.random.key(3)


@pytest.mark.parametrize(
    "draw",
    [draws.uniform, lambda key, shape, part=0: draws.mask(key, shape, 0.3, part)],
    ids=["uniform", "mask"],
)
def test_parts_are_those_of_the_whole(draw):
    parts, tokens, width = 4, 6, 41
    whole = draw(KEY, (parts * tokens, width))
    part = jax.jit(lambda index: draw(KEY, (tokens, width), index))
    np.testing.assert_array_equal(jnp.concatenate([part(jnp.int32(index)) for index in range(parts)]), whole)
    assert whole.shape == (parts * tokens, width)


def test_uniform_is_that_of_jax():
    np.testing.assert_array_equal(draws.uniform(KEY, (12, 41)), jax.random.uniform(KEY, (12, 41)))


def test_numbers_past_32_bits_of_elements():
    tokens, width, index = 70_000, 30_000, 3
    number = np.uint64(width) * (np.uint64(index * tokens) + np.arange(tokens - 2, tokens, dtype=np.uint64))
    number = number[:, None] + np.arange(width, dtype=np.uint64)
    assert (number >> np.uint64(32)).min() == 1
    words = [jnp.asarray(word.astype(np.uint32)) for word in (number >> np.uint64(32), number & np.uint64(0xFFFFFFFF))]
    want = threefry2x32_p.bind(*jax.random.key_data(KEY), *words)
    got = draws.hashes_of_rows(KEY, jnp.arange(index * tokens, (index + 1) * tokens, dtype=jnp.uint32)[-2:], width)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.95])
def test_a_mask_has_its_rate_in_every_column_and_they_are_independent(rate):
    """Columns a quarter of the width apart come of one hash."""
    rows, width = 1 << 14, 12
    masks = [np.asarray(draws.mask(key, (rows, width), rate)) for key in jax.random.split(KEY)]
    columns = np.concatenate(masks, 1)
    assert (np.abs(columns.mean(0) - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / rows)).all()
    related = np.corrcoef(columns.T) - np.eye(2 * width)
    assert np.abs(related).max() < 5 / np.sqrt(rows)


def test_rates_that_round_to_none():
    assert np.asarray(draws.mask(KEY, (64, 64), 0.0)).all() and np.asarray(draws.mask(KEY, (64, 64), 1e-6)).all()


def test_keys_of_any_kind():
    keys = [KEY, jax.random.key(4), jax.random.PRNGKey(5), jax.random.key(3, impl="rbg")]
    masks = [np.asarray(draws.mask(key, (64, 64), 0.5)) for key in keys]
    assert all((one != other).any() for one, other in itertools.combinations(masks, 2))
    np.testing.assert_array_equal(draws.mask(jax.random.key_data(KEY), (64, 64), 0.5), masks[0])


def test_masks_are_the_same_under_jax_enable_x64():
    for key in (KEY, jax.random.key(3, impl="rbg")):
        want = draws.mask(key, (64, 64), 0.5)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(draws.mask(key, (64, 64), 0.5), want)


def test_what_is_too_wide():
    with pytest.raises(ValueError, match="65536 hashes"):
        draws.uniform(KEY, (1, 1 << 16))
    with pytest.raises(ValueError, match="65536 hashes"):
        draws.mask(KEY, (1, 1 << 18), 0.5)
    assert draws.mask(KEY, (1, (1 << 18) - 4), 0.5).any()
