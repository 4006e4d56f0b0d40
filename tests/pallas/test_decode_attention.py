"""Decode attention against its definition over the whole text of each row, in float64 of numpy: one body over all
implementations. A cache is filled by a prompt and by single tokens; some are rings that a text is longer than."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.decode.attention import (
    cache_capacity,
    cache_of,
    chunk_attention,
    chunk_written,
    decode_attention,
    written,
)

HEADS, KV_HEADS, DIM = 6, 2, 64
LENGTHS = (0, 1, 37, 128, 129, 300)  # an empty row, tiles that are full, a tile that has one key
FEATURES = {
    "plain": {},
    "window": {"window": 50},
    "soft_cap": {"soft_cap": 4.0},
    "sinks": {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    "all": {"window": 130, "soft_cap": 4.0, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
}


@functools.cache
def texts(lengths, heads=HEADS, kv_heads=KV_HEADS, dim=DIM):
    """query [B, heads, D], keys and values [B, T, kv_heads, D]: of float32, but exact in every dtype of a cache."""
    draw = np.random.default_rng(0)
    shapes = (len(lengths), heads, dim), *((len(lengths), max(1, *lengths), kv_heads, dim),) * 2
    return tuple(draw.standard_normal(shape).astype(jnp.float8_e4m3fn).astype(np.float32) for shape in shapes)


def scale_of(dim):
    return dim**-0.5


def definition(query, keys, values, lengths, *, scale, window=None, soft_cap=None, sinks=None):
    """One row and one head at a time, over the row's tokens."""
    out = np.zeros(query.shape)
    group = query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for head in range(query.shape[1] if length else 0):
            seen = slice(first, length), head // group
            scores = scale * np.float64(keys[row][seen]) @ np.float64(query[row, head])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(np.float64(sinks[head])))
            out[row, head] = weights @ np.float64(values[row][seen]) / total
    return out


def caches(keys, values, lengths, capacity, dtype):
    """The caches of the texts; rows that end earlier hold what is past their ends, as a slot has of an earlier text."""
    lengths = jnp.asarray(lengths, jnp.int32)
    return [cache_of(jnp.asarray(each, dtype), lengths, capacity) for each in (keys, values)]


def decoded(implementation, lengths, capacity, dtype, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, **features):
    query, *texts_of = texts(tuple(lengths), heads, kv_heads, dim)
    made = caches(*texts_of, lengths, capacity, dtype)
    with gpu_kernel.interpreted():
        got = decode_attention(
            jnp.asarray(query, dtype),
            *made,
            jnp.asarray(lengths, jnp.int32),
            scale=scale_of(dim),
            implementation=implementation,
            **features,
        )
    assert dispatch.record["decode_attention"][0] == implementation
    return np.asarray(got, np.float64)


def check(implementation, lengths, capacity, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, **features):
    """A 16-bit result is at most twice as far from the definition as XLA's own."""
    sizes = dict(heads=heads, kv_heads=kv_heads, dim=dim)
    want = definition(*texts(tuple(lengths), heads, kv_heads, dim), lengths, scale=scale_of(dim), **features)
    errors = [
        np.linalg.norm(decoded(name, lengths, capacity, jnp.bfloat16, **sizes, **features) - want)
        for name in (implementation, "reference")
    ]
    assert errors[0] <= 2 * errors[1]
    empty = np.asarray(lengths) == 0
    assert not decoded(implementation, lengths, capacity, jnp.bfloat16, **sizes, **features)[empty].any()


# ---- the cache


@pytest.mark.parametrize("capacity", [128, 200, 384])
def test_a_prompt_and_single_tokens_make_the_same_cache(capacity):
    """Of what a row's latest tokens left there; an empty row writes nothing."""
    lengths, more = (0, 5, 126, 290), 140
    _, keys, _ = texts(tuple(length + more for length in lengths))
    cache = cache_of(jnp.asarray(keys[:, : max(lengths)]), jnp.asarray(lengths), capacity)
    write = jax.jit(written, donate_argnums=0)
    for step in range(more):
        positions = np.asarray(lengths) + step
        new = keys[np.arange(len(lengths)), positions]
        cache = write(cache, jnp.asarray(new), jnp.where(jnp.asarray(lengths) == 0, -1, jnp.asarray(positions)))
    for row, length in enumerate(lengths[1:], 1):
        for position in range(max(0, length + more - capacity), length + more):
            np.testing.assert_array_equal(cache[row, :, position % capacity], keys[row, position])
    np.testing.assert_array_equal(cache[0], cache_of(jnp.asarray(keys[:, :290]), jnp.asarray(lengths), capacity)[0])


@pytest.mark.parametrize("position", [-1, 3, 130])
def test_one_row_alone(position):
    """Which has a program of its own."""
    cache = jnp.arange(2 * 128 * 4.0).reshape(1, 2, 128, 4)
    new = -jnp.ones((1, 2, 4))
    found = written(cache, new, jnp.asarray([position]))
    want = np.array(cache)
    if position >= 0:
        want[0, :, position % 128] = -1
    np.testing.assert_array_equal(found, want)


def test_a_cache_is_no_longer_than_the_window_in_whole_tiles():
    assert cache_capacity(700) == 768
    assert cache_capacity(700, window=128) == 128
    assert cache_capacity(100, window=1000) == 128


# ---- what is computed


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.gpu
def test_reference_against_the_definition(features):
    """fp32 against float64: operands of order 1, sums of at most 300 terms."""
    query, keys, values = texts(LENGTHS)
    options = dict(FEATURES[features], scale=scale_of(DIM))
    for capacity in {cache_capacity(max(LENGTHS)), cache_capacity(max(LENGTHS), options.get("window"))}:
        made = caches(keys, values, LENGTHS, capacity, jnp.float32)
        got = decode_attention(
            jnp.asarray(query), *made, jnp.asarray(LENGTHS, jnp.int32), implementation="reference", **options
        )
        want = definition(query, keys, values, LENGTHS, **options)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-6)
        assert not np.asarray(got[0]).any(), "an empty row gives zeros"


@pytest.mark.full
@hypothesis.settings(max_examples=20)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
    room=st.integers(0, 30),
)
def test_any_ring(lengths, window, room):
    """Of any capacity that is at least the window, or the text."""
    lengths = tuple(lengths)
    query, keys, values = texts(lengths, dim=16)
    capacity = (max(1, *lengths) if window is None else window) + room
    made = caches(keys, values, lengths, capacity, jnp.float32)
    options = dict(scale=scale_of(16), window=window)
    got = decode_attention(jnp.asarray(query), *made, jnp.asarray(lengths), implementation="reference", **options)
    np.testing.assert_allclose(got, definition(query, keys, values, lengths, **options), rtol=2e-5, atol=3e-6)


def test_a_row_longer_than_its_cache_sees_what_is_left():
    query, keys, values = texts((300,))
    made = caches(keys, values, (300,), 128, jnp.float32)
    got = decode_attention(jnp.asarray(query), *made, jnp.asarray([300]), scale=0.1)
    want = definition(query, keys, values, (300,), scale=0.1, window=128)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-6)


# ---- chunks of a prompt


@pytest.mark.parametrize("count", [1, 5, 130])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.gpu
def test_a_chunk_sees_itself_and_the_cache(features, count):
    """Each new token against the definition of decode attention over its row up to it."""
    before = (0, 3, 128, 170)
    _, keys, values = texts(tuple(length + count for length in before))
    asked = np.random.default_rng(1).standard_normal((len(before), count, HEADS, DIM)).astype(np.float32)
    options = dict(FEATURES[features], scale=scale_of(DIM))
    capacity = cache_capacity(max(before), options.get("window"))
    made = caches(keys[:, : max(before)], values[:, : max(before)], before, capacity, jnp.float32)
    places = np.asarray(before)[:, None] + np.arange(count)
    new = [jnp.asarray(each[np.arange(len(before))[:, None], places]) for each in (keys, values)]
    got = chunk_attention(jnp.asarray(asked), *new, *made, jnp.asarray(before), **options)
    for place in {0, count // 2, count - 1}:
        want = definition(asked[:, place], keys, values, [length + place + 1 for length in before], **options)
        np.testing.assert_allclose(got[:, place], want, rtol=2e-5, atol=3e-6)


@pytest.mark.full
@hypothesis.settings(max_examples=8, deadline=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
@hypothesis.given(
    before=st.lists(st.integers(0, 1100), min_size=1, max_size=3),
    count=st.integers(1, 520),
    more=st.integers(0, 9),
    features=st.sampled_from(sorted(FEATURES)),
)
def test_a_longer_cache_gives_a_chunk_the_same_bits(before, count, more, features):
    """Of any number of tiles, of which more than those that exist hold other finite numbers."""
    rng = np.random.default_rng(count)
    options = dict(FEATURES[features], scale=scale_of(16))
    query = jnp.asarray(rng.standard_normal((len(before), count, HEADS, 16)), jnp.float32)
    new = jnp.asarray(rng.standard_normal((2, len(before), count, KV_HEADS, 16)), jnp.float32)
    _, keys, values = texts(tuple(before), dim=16)
    found = []
    for capacity in (cache_capacity(max(*before, 1)), cache_capacity(max(*before, 1)) + 128 * more):
        made = [cache_of(jnp.asarray(a), jnp.asarray(before), capacity) for a in (keys, values)]
        unused = jnp.arange(capacity)[None, :] >= jnp.asarray(before)[:, None]
        made = [jnp.where(unused[:, None, :, None], 3.0 * more, cache) for cache in made]
        found.append(np.asarray(chunk_attention(query, *new, *made, jnp.asarray(before), **options)))
    np.testing.assert_array_equal(found[0], found[1])
    place = count // 2
    for row, length in enumerate(before):
        olds = keys[row, :length], values[row, :length]
        every = [np.concatenate([old, fresh[row]])[None] for old, fresh in zip(olds, np.asarray(new), strict=True)]
        want = definition(np.asarray(query[row : row + 1, place]), *every, [length + place + 1], **options)
        np.testing.assert_allclose(found[0][row : row + 1, place], want, rtol=3e-5, atol=5e-6)


@pytest.mark.parametrize("capacity", [128, 384])
def test_a_chunk_is_written_as_its_tokens_are(capacity):
    before = (0, 5, 126)
    _, keys, _ = texts((400,) * 3)
    cache = cache_of(jnp.asarray(keys[:, :126]), jnp.asarray(before), capacity)
    for count in (3, 128, 150):
        new = np.stack([keys[row, length : length + count] for row, length in enumerate(before)])
        found, expected = chunk_written(cache, jnp.asarray(new), jnp.asarray(before)), cache
        for step in range(count):
            expected = written(expected, jnp.asarray(new[:, step]), jnp.asarray(before) + step)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.full
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    before=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    capacity=st.integers(1, 90),
)
def test_the_padding_of_a_chunk_is_not_written(before, counts, capacity):
    """In a ring, too, where it would replace what later tokens see."""
    counts = counts[: len(before)]
    _, keys, _ = texts((100,) * len(before), dim=16)
    cache = cache_of(jnp.asarray(keys[:, :60]), jnp.asarray(before), capacity)
    new = np.stack([keys[row, length : length + 40] for row, length in enumerate(before)])
    found = chunk_written(cache, jnp.asarray(new), jnp.asarray(before), jnp.asarray(counts))
    expected = cache
    for step in range(40):
        places = np.where(step < np.array(counts), np.array(before) + step, -1)
        expected = written(expected, jnp.asarray(new[:, step]), jnp.asarray(places))
    np.testing.assert_array_equal(found, expected)


# ---- the kernels for Hopper, interpreted where there is none


@pytest.mark.full
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.gpu
def test_mosaic_against_the_definition(features):
    check("mosaic", LENGTHS, 384, **FEATURES[features])


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "features"),
    [
        (4, 1, 128, {}),
        (3, 3, 96, {"sinks": np.linspace(-1, 1, 3, dtype=np.float32)}),  # heads that share nothing
        (2, 1, 256, {"soft_cap": 4.0}),
        (20, 1, 64, {}),  # more heads than a program of the second kernel has, and the last one's are not full
    ],
)
@pytest.mark.gpu
def test_mosaic_head_dims_and_groups(heads, kv_heads, dim, features):
    check("mosaic", (1, 300), 384, heads, kv_heads, dim, **features)


@pytest.mark.full
@pytest.mark.parametrize(("capacity", "window"), [(128, 128), (128, 100), (640, 600), (640, 130)])
@pytest.mark.gpu
def test_mosaic_rings(capacity, window):
    """Some with splits that hold both ends of what is seen, or nothing between them."""
    check("mosaic", (60, 700), capacity, window=window)


@pytest.mark.full
@pytest.mark.gpu
def test_mosaic_gives_a_row_the_same_bits_in_every_batch_slot_and_capacity():
    lengths = (300, 0, 37, 129)
    features = {"sinks": FEATURES["sinks"]["sinks"]}
    query, keys, values = (jnp.asarray(each, jnp.bfloat16) for each in texts(lengths))
    found = []
    for rows, capacity in (((0, 1, 2, 3), 384), ((3, 0), 384), ((0,), 1024), ((3,), 256)):
        given = jnp.asarray([lengths[row] for row in rows])
        picked = jnp.asarray(rows)
        made = [cache_of(each[picked], given, capacity) for each in (keys, values)]
        with gpu_kernel.interpreted():
            out = decode_attention(query[picked], *made, given, scale=0.1, implementation="mosaic", **features)
        found.append(dict(zip(rows, np.asarray(out.astype(jnp.float32)), strict=True)))
    for other in found[1:]:
        for row, out in other.items():
            np.testing.assert_array_equal(out, found[0][row])


def test_no_slot_is_occupied():
    assert not decoded("mosaic", (0, 0), 128, jnp.bfloat16).any()


def test_what_the_kernels_refuse():
    query, cache = jnp.zeros((1, 2, 64), jnp.bfloat16), jnp.zeros((1, 1, 128, 64), jnp.bfloat16)
    options = dict(scale=0.1, implementation="mosaic")
    one = jnp.ones(1, jnp.int32)
    for arrays, words in (
        ((query.astype(jnp.float32), cache.astype(jnp.float32)), "dtype float32"),
        ((query, cache.astype(jnp.float8_e4m3fn)), "a cache of float8_e4m3fn"),
        ((query, cache[:, :, :100]), "capacity 100, no multiple of 64"),
        ((query[..., :40], cache[..., :40]), "head dim 40; there are 64, 96, 128, 256"),
    ):
        with gpu_kernel.interpreted(), pytest.raises(ValueError, match=words):
            decode_attention(arrays[0], arrays[1], arrays[1], one, **options)
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        decode_attention(query, cache, cache, one, **options)


def test_a_cache_in_fp8_counts_as_its_numbers():
    query, keys, values = texts((100,), dim=16)
    made = caches(keys, values, (100,), 128, jnp.float8_e4m3fn)
    got = decode_attention(jnp.asarray(query), *made, jnp.asarray([100]), scale=0.25)
    want = definition(query, keys, values, (100,), scale=0.25)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=3e-6)
