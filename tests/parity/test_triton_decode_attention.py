"""The Triton decode kernels' bodies, run by Triton's interpreter, against the reference. In float16: the interpreter
does not round to bfloat16 as a GPU does."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import attention_forward, packed_layout
from jaxtune.pallas.decode.attention import as_trained, cache_of, decode_attention, inserted

LENGTHS = (0, 1, 37, 64, 300)
LONG = 1152  # of a cache that is read in splits; shorter ones are read in one pass
SINKS = np.linspace(-1, 1, 6, dtype=np.float32)
CASES = {
    "plain": (6, 2, 64, 384, {}),
    "everything": (6, 2, 128, 384, {"window": 130, "soft_cap": 4.0, "sinks": SINKS}),
    "ring": (4, 2, 64, 128, {"window": 100}),
    "ring_that_leaves_out_splits": (4, 2, 64, 640, {"window": 70}),
    "head_dim_96": (3, 3, 96, 384, {}),
    "head_dim_256": (2, 1, 256, 384, {}),
    "head_dim_512": (2, 1, 512, 384, {}),
    "many_heads": (20, 1, 64, 384, {}),
    "in_splits": (6, 2, 64, LONG, {}),
    "in_splits_everything": (6, 2, 128, LONG, {"window": 130, "soft_cap": 4.0, "sinks": SINKS}),
    "in_splits_head_dim_256": (2, 1, 256, LONG, {}),
}


def operands(lengths, heads, kv_heads, dim, capacity, dtype, cache_dtype):
    draw = np.random.default_rng(0)

    def drawn(*shape):
        return jnp.asarray(draw.standard_normal(shape).astype(jnp.float8_e4m3fn).astype(np.float32))

    given = jnp.asarray(lengths, jnp.int32)
    query = drawn(len(lengths), heads, dim).astype(dtype)
    made = [drawn(len(lengths), max(lengths), kv_heads, dim).astype(cache_dtype) for _ in range(2)]
    return query, *(cache_of(each, given, capacity) for each in made), given


def check(heads, kv_heads, dim, capacity, features, capability=(8, 0), cache_dtype=None, lengths=LENGTHS):
    def run(implementation, dtype, cache_dtype):
        arrays = operands(lengths, heads, kv_heads, dim, capacity, dtype, cache_dtype)
        got = decode_attention(*arrays, scale=dim**-0.5, implementation=implementation, **features)
        return np.asarray(got, np.float64)

    want = run("reference", jnp.float32, jnp.float32)
    xla = run("reference", jnp.float16, jnp.float16)
    with interpreted(capability):
        got = run("triton", jnp.float16, cache_dtype or jnp.float16)
    assert dispatch.record["decode_attention"][0] == "triton"
    assert np.linalg.norm(got - want) <= 2 * np.linalg.norm(xla - want)
    assert not got[lengths.index(0)].any(), "an empty row gives zeros"


@pytest.mark.parametrize("case", CASES)
def test_kernels_against_the_reference(case):
    check(*CASES[case])


def test_a_cache_in_fp8():
    check(*CASES["everything"], capability=(8, 9), cache_dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="FP8 needs compute capability 8.9"):
        check(*CASES["plain"], cache_dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize("window", [1100, 300])
def test_a_ring_in_splits(window):
    check(2, 1, 64, LONG, {"window": window}, lengths=(1300, 0, 1152, 900))


@pytest.mark.parametrize("capacity", [384, LONG])
def test_a_row_has_the_same_bits_in_every_batch_slot_and_capacity(capacity):
    query, keys, values, lengths = operands(LENGTHS, 6, 2, 64, capacity, jnp.float16, jnp.float16)
    with interpreted():
        whole = decode_attention(query, keys, values, lengths, scale=0.1, implementation="triton", sinks=SINKS)
        picked = jnp.asarray([4, 2])
        room = ((0, 0), (0, 0), (0, 256), (0, 0))
        longer = (jnp.pad(each[picked], room) for each in (keys, values))
        some = decode_attention(
            query[picked], *longer, lengths[picked], scale=0.1, implementation="triton", sinks=SINKS
        )
    np.testing.assert_array_equal(some, whole[picked])


def test_rows_of_a_cache_are_inserted():
    """Into slots in any order; nothing is copied to a slot that there is not, and places behind stay."""
    draw = np.random.default_rng(1)
    cache, staged = (jnp.asarray(draw.standard_normal(s), jnp.float16) for s in ((5, 2, 384, 64), (4, 2, 256, 64)))
    rows, slots = jnp.asarray([3, 0, 3, 1], jnp.int32), jnp.asarray([4, 1, 0, 5], jnp.int32)
    with interpreted():
        got = inserted(cache, staged, rows, slots)
    assert dispatch.record["inserted"][0] == "triton"
    want = np.array(cache)
    for row, slot in ((3, 4), (0, 1), (3, 0)):
        want[slot, :, :256] = staged[row]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(inserted(cache, staged, rows, slots, implementation="reference"), want)
    with pytest.raises(ValueError, match="staged has room for 384 tokens, the cache for 256"):
        inserted(staged, cache, rows, slots)


@pytest.mark.parametrize("case", ["plain", "everything", "head_dim_96", "many_heads"])
def test_the_kernel_in_the_order_of_training_has_its_bits(case):
    """Of the newest tokens, for which the forward of training reads the same keys in another tile of queries."""
    heads, kv_heads, dim, capacity, features = CASES[case]
    features = {name: jnp.asarray(value) if name == "sinks" else value for name, value in features.items()}
    features = {name: value for name, value in features.items() if name != "window"} | {"scale": dim**-0.5}
    lengths, length = jnp.asarray([1, 37, 64, 129, 300], jnp.int32), 320
    draw = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(draw.standard_normal((len(lengths), length, count, dim)), jnp.float16)
        for count in (heads, kv_heads, kv_heads)
    )
    real = (np.arange(length) < lengths[:, None]).astype(np.int32)
    newest = query[np.arange(len(lengths)), lengths - 1]
    with interpreted((9, 0)):
        layout = packed_layout((len(lengths), length), jnp.asarray(real), max_documents=1)
        want, _ = attention_forward(query, key, value, layout, implementation="triton", **features)
        caches = [cache_of(array, lengths, capacity) for array in (key, value)]
        got = as_trained.attended(newest[:, None], *caches, lengths - 1, **features)[:, 0]
    np.testing.assert_array_equal(got, want[np.arange(len(lengths)), lengths - 1])
