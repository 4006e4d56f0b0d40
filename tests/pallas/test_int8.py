"""int8 by rows against its definition in numpy. tests/parity/test_int8.py compares it with bitsandbytes itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

SHAPE = (3, 24, 40)  # experts, rows, columns


def by_definition(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, largest magnitudes of rows) of float32 [..., out, in], in float16 first. One over the magnitude is
    rounded before it is multiplied by 127."""
    half = values.astype(np.float16).astype(np.float32)
    absmax = np.abs(half).max(-1)
    inverse = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax > 0)
    return np.rint(half * (inverse * np.float32(127))[..., None]).astype(np.int8), absmax


def values(scale: float = 1.0) -> np.ndarray:
    found = (scale * np.random.default_rng(0).standard_normal(SHAPE)).astype(np.float32)
    found[1, 3] = 0
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 2e-6, 1e-7, 1e4])  # float16 has no normal numbers below 6.1e-5
@pytest.mark.gpu
def test_bytes_are_those_of_its_definition(scale, dtype):
    array = jnp.asarray(values(scale), dtype)
    codes, absmax = by_definition(np.asarray(array).astype(np.float32))
    for weight in (Int8.encode(array), jax.jit(Int8.encode)(array)):
        np.testing.assert_array_equal(weight.codes, codes)
        np.testing.assert_array_equal(weight.absmax, absmax)
    assert (weight.shape, weight.dtype_name, weight.nbytes) == (SHAPE, dtype, codes.nbytes + absmax.nbytes)
    decoded = np.asarray(weight.decode("float32"))
    np.testing.assert_allclose(decoded, codes * absmax[..., None] / np.float64(127), rtol=2e-7)
    # Half a step of the codes, and half of float16's.
    limit = absmax[..., None] * (1 / 254 + 2**-11) + 2**-25
    assert (np.abs(decoded - np.asarray(array).astype(np.float32)) <= limit).all()
    assert weight.decode().dtype == dtype and not decoded[1, 3].any()


def test_halves_go_to_even_codes():
    row = np.arange(-127, 127.5, 0.5, np.float32)[None]
    np.testing.assert_array_equal(Int8.encode(jnp.asarray(row)).codes, np.rint(row).astype(np.int8))


def test_a_row_beyond_float16_keeps_its_numbers():
    """bitsandbytes would store an infinite magnitude, and decode it to no number."""
    array = jnp.asarray([[1e5, -5e4, 0.0], [3.0, 1.0, -2.0]], jnp.bfloat16)
    weight = Int8.encode(array)
    np.testing.assert_array_equal(weight.absmax, np.asarray([array[0, 0], 3.0], np.float32))
    np.testing.assert_allclose(weight.decode("float32"), array.astype("float32"), atol=1e5 / 253)
    np.testing.assert_array_equal(weight.codes[1], Int8.encode(array[1:]).codes[0])


@pytest.mark.parametrize("axis", range(3))
def test_a_part_of_a_divided_tensor_decodes_to_the_part(axis):
    weight = Int8.encode(jnp.asarray(values()))
    parts = {0: 3, 1: 4, 2: 5}[axis]
    size = SHAPE[axis] // parts
    axes = weight.shard_axes(axis, parts)
    assert axes is not None and weight.shard_axes(axis, 7) is None and weight.block_length(axis) == 1

    def second(array, along):
        return array if along is None else jax.lax.slice_in_dim(array, size, 2 * size, axis=along)

    part = jax.tree.unflatten(jax.tree.structure(weight), map(second, jax.tree.leaves(weight), axes))
    want = jax.lax.slice_in_dim(weight.decode(), size, 2 * size, axis=axis)
    np.testing.assert_array_equal(part.decode(), want)


def test_experts_are_joined_of_their_matrices_and_taken_apart():
    weight = Int8.encode(jnp.asarray(values()))
    pieces = [weight.piece(index, start, 12) for index in range(3) for start in (0, 12)]
    np.testing.assert_array_equal(pieces[3].decode(), weight.decode()[1, 12:])
    again = Int8.joined([jax.tree.map(np.asarray, piece) for piece in pieces], SHAPE)
    jax.tree.map(np.testing.assert_array_equal, again, weight)
    wrong = Int8(weight.codes, weight.absmax[..., :5], "float32")
    with pytest.raises(ValueError, match=r"absmax is \[3, 5\]; codes of \[3, 24, 40\] need \[3, 24\]"):
        wrong.decode()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_equal_those_over_the_decoded_weight(dtype):
    """Forward and backward, with an adapter, and nothing of the decoded weight is kept between the two."""
    weight = Int8.encode(jnp.asarray(values()[0], dtype))
    keys = jax.random.split(jax.random.key(0), 3)
    x, a, b = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((6, 40), (2, 40), (24, 2)), strict=True)
    )

    def run(weight):
        def loss(x, a, b):
            return jnp.sin(quant_matmul(x, [weight], [LoraWeights(a, b, None, 0.5)])[0].astype("float32")).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, a, b)

    jax.tree.map(np.testing.assert_array_equal, run(weight), run(weight.decode(dtype)))
    _, pullback = jax.vjp(lambda x: quant_matmul(x, [weight])[0], x)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size == weight.size]
    assert [leaf.dtype for leaf in kept] == [jnp.int8]
