"""MXFP4 against its definition, number by number."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas.formats import MXFP4


@pytest.mark.gpu
def test_decode_is_the_definition():
    """Every code and every scale of a finite number; the first of two in the low nibble."""
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (255, 2, 16)).astype(np.uint8)
    scales = np.stack([np.arange(255), draw.integers(0, 255, 255)], 1).astype(np.uint8)
    weight = MXFP4.from_blocks(jnp.asarray(blocks), jnp.asarray(scales), "float32")
    assert weight.shape == (255, 64) and weight.size == 255 * 64 and weight.nbytes == 255 * (32 + 2)
    want = np.zeros((255, 2, 32))
    for row, part, place in np.ndindex(want.shape):
        code = int(blocks[row, part, place // 2]) >> 4 * (place % 2) & 15
        exponent, fraction = code >> 1 & 3, code & 1
        magnitude = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
        want[row, part, place] = (-1) ** (code >> 3) * magnitude * 2.0 ** (int(scales[row, part]) - 127)
    got = np.asarray(weight.decode(), np.float64).reshape(want.shape)
    normal = (np.abs(want) == 0) | ((np.abs(want) >= 2.0**-126) & (np.abs(want) < 2.0**128))  # XLA's CPU code flushes
    np.testing.assert_array_equal(got[normal], want[normal])
    assert normal.mean() > 0.97
    assert weight.decode(jnp.bfloat16).dtype == jnp.bfloat16
