"""The rotation and its gradient, which is written by hand, against the formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.config import RopeConfig
from jaxtune.models.rope import rotary_table, rotate

HEAD_DIM = 32


def by_complex_numbers(x, table):
    """Dimensions i and i + half as one complex number, times cos + i sin."""
    cos, sin = (part[:, :, None, :] for part in table)
    half = cos.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)
    return jnp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=10_000.0),
        RopeConfig(theta=10_000.0, partial_rotary_factor=0.75),
        RopeConfig(theta=10_000.0, kind="yarn", factor=8.0, original_max_position_embeddings=64),
    ],
    ids=["whole", "part of a head", "yarn, scaled"],
)
def test_rotation_and_its_gradient(rope):
    keys = jax.random.split(jax.random.key(0), 2)
    x, dout = (jax.random.normal(key, (2, 5, 3, HEAD_DIM)) for key in keys)
    positions = jnp.array([[0, 1, 2, 3, 4], [0, 1, 0, 90, 91]])
    table = rotary_table(rope, HEAD_DIM, 128, positions)
    if rope.kind == "yarn":
        assert float(jnp.hypot(*table)[0, 0, 0]) > 1.1  # a factor, which the gradient has as well
    (out, pullback), (want, want_pullback) = (
        jax.vjp(lambda x, turn=turn: turn(x, table), x) for turn in (rotate, by_complex_numbers)
    )
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pullback(dout)[0], want_pullback(dout)[0], rtol=1e-5, atol=1e-6)


def test_without_a_table_nothing_turns():
    x = jnp.ones((1, 2, 1, HEAD_DIM))
    assert rotate(x, None) is x
