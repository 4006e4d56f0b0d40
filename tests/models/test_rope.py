"""The rotation and its gradient, which is written by hand, against the formula."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_model

from jaxtune.models.config import RopeConfig
from jaxtune.models.rope import rotary_frequencies, rotary_table, rotate

HEAD_DIM = 32


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies_are_the_same_on_every_processor(theta):
    """Rounded once, from float64: powers in float32 are not."""
    found = rotary_frequencies(RopeConfig(theta=theta), 128, 4096)[0]
    np.testing.assert_array_equal(found, np.float32([theta ** (-index / 64) for index in range(64)]))
    assert found.dtype == np.float32


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


# ---- longrope chooses its factors for each document

ORIGINAL = 12  # positions
LONGROPE = RopeConfig(
    kind="longrope",
    original_max_position_embeddings=ORIGINAL,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(1.0, 4.0, 9.0, 16.0),
)
SIZES = (5, ORIGINAL + 8, ORIGINAL, ORIGINAL + 1)  # tokens of the documents


def _loss(model, tokens, segment_ids):
    """Summed cross entropy of the next token within each document."""
    logits = jax.nn.log_softmax(model(tokens, segment_ids)[:, :-1])
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return -(jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] * inside).sum()


@pytest.fixture(scope="module")
def longrope():
    """(function of rows of documents that gives (loss, gradients), documents)"""
    model = tiny_model(initializer_range=0.5, rotary=(LONGROPE,))
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 48, size, np.int32) for size in SIZES]
    graph, weights = nnx.split(model)
    program = jax.jit(jax.value_and_grad(lambda weights, *batch: _loss(nnx.merge(graph, weights), *batch)))

    def of(*rows):
        """Of a batch of rows; a row is a list of documents' numbers, padded to the length of all documents."""
        tokens, segments = np.zeros((2, len(rows), sum(SIZES)), np.int32)
        for row, members in enumerate(rows):
            at = 0
            for number, document in enumerate(members, 1):
                inside = slice(at, at + SIZES[document])
                tokens[row, inside], segments[row, inside] = documents[document], number
                at += SIZES[document]
        return program(weights, tokens, segments)

    return of


def _assert_close(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_packed_longrope_is_each_document_alone(longrope):
    """In one row, and as rows of one batch: neighbours do not change which factors a document takes."""
    alone = [longrope([document]) for document in range(len(SIZES))]
    want = jax.tree.map(lambda *parts: sum(parts), *alone)
    _assert_close(longrope([1, 0, 2, 3]), want)
    _assert_close(longrope([0], [1], [2], [3]), want)


def test_longrope_does_not_depend_on_micro_batches(longrope):
    rows = [0, 2], [0], [1], [3]  # the first micro-batch holds short documents only
    whole = longrope(*rows)
    _assert_close(jax.tree.map(jnp.add, longrope(*rows[:2]), longrope(*rows[2:])), whole)


def test_a_document_s_length_chooses_its_factors():
    positions = jnp.arange(4)[None]
    short, long = (rotary_table(LONGROPE, 8, 64, positions, jnp.full((1, 1), n)) for n in (ORIGINAL, ORIGINAL + 1))
    assert not np.array_equal(short[0], long[0])
    both = rotary_table(LONGROPE, 8, 64, positions, jnp.array([[ORIGINAL, ORIGINAL, ORIGINAL + 1, ORIGINAL + 1]]))
    np.testing.assert_array_equal(both[0][:, :2], short[0][:, :2])
    np.testing.assert_array_equal(both[0][:, 2:], long[0][:, 2:])


def test_positions_that_begin_later_count_too():
    """A document whose positions go past the original context is a long one, however few tokens it has."""
    model = tiny_model(rotary=(LONGROPE,))
    positions = jnp.arange(ORIGINAL - 2, ORIGINAL + 2)[None]
    table = model.layout((1, 4), positions=positions).rotary[0]
    np.testing.assert_array_equal(table[0], rotary_table(LONGROPE, 8, 64, positions)[0])
    long = rotary_table(LONGROPE, 8, 64, positions, jnp.full((1, 1), ORIGINAL + 1))
    np.testing.assert_array_equal(table[0], long[0])


@hypothesis.given(sections=st.lists(st.integers(0, 14), min_size=2, max_size=4), seed=st.integers(0, 2**16))
def test_positions_of_several_axes(sections, seed):
    """Each pair turns by its axis alone; where all axes are equal, bit for bit as with one."""
    rope, axes = RopeConfig(theta=1e4, partial_rotary_factor=0.5, sections=tuple(sections)), len(sections)
    drawn = np.random.default_rng(seed).integers(0, 5000, (2, 3, axes)).astype(np.int32)
    tables = [rotary_table(rope, 64, 64, jnp.asarray(drawn[..., axis])) for axis in range(axes)]
    cos, sin = rotary_table(rope, 64, 64, jnp.asarray(drawn))
    for pair in range(16):
        axis = pair % axes if pair < axes * sections[pair % axes] else 0
        np.testing.assert_array_equal(cos[..., pair], tables[axis][0][..., pair])
        np.testing.assert_array_equal(sin[..., pair], tables[axis][1][..., pair])
    same = rotary_table(rope, 64, 64, jnp.repeat(drawn[..., :1], axes, -1))
    np.testing.assert_array_equal(same, tables[0])


def test_positions_need_the_model_s_axes():
    rope = RopeConfig(sections=(2, 1, 1))
    with pytest.raises(ValueError, match="have 2 axes, and the model's 3"):
        rotary_table(rope, 8, 64, jnp.zeros((1, 4, 2), jnp.int32))
    with pytest.raises(ValueError, match="have 3 axes, and the model's 1"):
        rotary_table(RopeConfig(), 8, 64, jnp.zeros((1, 4, 3), jnp.int32))
