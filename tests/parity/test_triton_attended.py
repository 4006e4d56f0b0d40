"""`attended` in Triton's interpreter: a new token's heads are normed, turned and written, and its attention is that of
plain JAX."""

from __future__ import annotations

import contextlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_numbers import near, normal
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.decode.attention import reference as attention_reference
from jaxtune.pallas.decode.few_rows import attended, attended_kernels, placed, reference
from jaxtune.pallas.decode.few_rows.cases import in_float32
from jaxtune.pallas.decode.few_rows.shards import unsharded_heads

HOPPER = (9, 0)
# The module, whose name in its package is that of the function.
attended_module = importlib.import_module("jaxtune.pallas.decode.few_rows.attended")


ATTENDED = {
    "plain": (6, 2, 64, 256, 2, {}),
    "everything": (6, 2, 128, 256, 1, {"window": 100, "soft_cap": 4.0, "sinks": jnp.linspace(-1, 1, 6)}),
    "ring": (4, 2, 64, 128, 3, {"window": 100}),
    "head_dim_256": (2, 1, 256, 256, 2, {}),
    "many_heads": (20, 1, 64, 256, 2, {}),
}


def attended_case(heads: int, kv_heads: int, dim: int, capacity: int, splits: int, positions):
    count = len(positions)
    keys, values = (normal(count, kv_heads, capacity, dim, seed=i) for i in (1, 2))
    parts = normal(splits, count, (heads + 2 * kv_heads) * dim, seed=3, dtype=jnp.float32)
    angles = normal(count, dim // 2, seed=4, dtype=jnp.float32)
    return parts, keys, values, jnp.asarray(positions, jnp.int32), (jnp.cos(angles), jnp.sin(angles))


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("case", ATTENDED)
def test_a_token_attends_to_what_is_written(case, norms):
    """Rows without a token, with their first one, at borders of tiles, and longer than the cache."""
    *sizes, masking = ATTENDED[case]
    given = attended_case(*sizes, (0, -1, 5, 31, 32, 127, 128, 300))
    dim, options = sizes[2], {"scale": sizes[2] ** -0.5, "window": None, "soft_cap": None, "sinks": None} | masking
    weights = (normal(dim, seed=5), normal(dim, seed=6)) if norms else None
    with interpreted():
        got = attended(*given, weights, **options)
    assert dispatch.record["attended"][0] == "triton"
    exact = [array.astype(jnp.float32) for array in given[:3]]
    query, keys, values = reference.placed(
        *exact, *given[3:], weights and in_float32(weights), eps=1e-6, offset=0.0, float32=False
    )
    near(got[0], attention_reference.decode(query, keys, values, given[3] + 1, **options), 2e-3)
    assert not got[0][1].any()
    for new, expected, old in zip(got[1:], (keys, values), given[1:3], strict=True):
        near(new, expected, 5e-4)
        assert ((new != old).any(-1).sum((1, 2)) == jnp.where(given[3] < 0, 0, sizes[1])).all()


@given(
    devices=st.sampled_from([2, 3]),
    of_device=st.integers(1, 2),
    group=st.integers(1, 3),
    splits=st.sampled_from([1, 2]),
    dim=st.sampled_from([64, 128]),
    by_kernel=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_heads_in_the_parts_of_devices_give_the_bits_of_joined_ones(devices, of_device, group, splits, dim, by_kernel):
    kv_heads = devices * of_device
    heads = kv_heads * group
    whole, *others = attended_case(heads, kv_heads, dim, 128, splits, (0, -1, 5, 200))
    each = whole.reshape(splits, 4, heads + 2 * kv_heads, dim)
    kinds = [jnp.split(kind, devices, axis=2) for kind in jnp.split(each, (heads, heads + kv_heads), axis=2)]
    parts = [jnp.concatenate(kind, axis=2).reshape(splits, 4, -1) for kind in zip(*kinds, strict=True)]
    parts = jnp.stack(parts, axis=1)
    np.testing.assert_array_equal(unsharded_heads(parts, kv_heads, dim), whole)
    with interpreted() if by_kernel else contextlib.nullcontext():
        got, want = (attended(sums, *others, scale=0.1) for sums in (parts, whole))
    assert dispatch.record["attended"][0] == ("triton" if by_kernel else "apart")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    for count in (kv_heads + 1, 0):
        with pytest.raises(ValueError, match=f"{count} shards of {kv_heads} key/value heads"):
            attended(jnp.zeros((1, count, 4, dim), whole.dtype), *others, scale=0.1)


def test_a_row_attends_with_the_same_bits_in_every_batch_slot_and_capacity():
    parts, keys, values, positions, table = attended_case(6, 2, 64, 256, 2, (0, -1, 5, 31, 32, 127, 128, 200))
    picked = jnp.asarray([6, 2])
    with interpreted():
        whole, *_ = attended(parts, keys, values, positions, table, scale=0.1)
        longer = (jnp.pad(each[picked], ((0, 0), (0, 0), (0, 128), (0, 0))) for each in (keys, values))
        some, *_ = attended(
            parts[:, picked], *longer, positions[picked], tuple(part[picked] for part in table), scale=0.1
        )
    np.testing.assert_array_equal(some, whole[picked])


@pytest.mark.parametrize("dim", [128, 512])
def test_what_a_cache_holds_past_the_rows_end_is_not_read(dim):
    """NaN there, of which no weight makes a zero."""
    parts, keys, values, positions, table = attended_case(4, 2, dim, 128, 1, (0, -1, 5, 31, 32, 96))
    past = jnp.arange(128)[None, None, :, None] >= jnp.maximum(positions, 0)[:, None, None, None]
    with interpreted(HOPPER):
        clean, *_ = attended(parts, keys, values, positions, table, scale=0.1)
        spoilt = (jnp.where(past, jnp.nan, cache) for cache in (keys, values))
        got, *_ = attended(parts, *spoilt, positions, table, scale=0.1)
    np.testing.assert_array_equal(got, clean)


def test_few_rows_may_attend_in_larger_tiles():
    """In other tiles the sums have other bits."""
    given = attended_case(4, 2, 128, 256, 2, (0, -1, 127, 128, 129, 200, 300))
    with interpreted(HOPPER):
        alike, larger = (attended(*given, scale=0.1, batch_invariant=invariant)[0] for invariant in (True, False))
    near(larger, alike, 1e-3)
    assert (np.asarray(larger) != np.asarray(alike)).any()


# The positions of rows, and masking. A cache has six tiles of 128 keys, so that six programs share a head of one or two
# rows with two key/value heads, and five one of three rows with eight; some programs have no keys to read.
SHARED = {
    "one row": ((700,), {}),
    "its first token": ((0,), {"sinks": jnp.linspace(-1, 1, 8)}),
    "no token": ((-1,), {"sinks": jnp.linspace(-1, 1, 8)}),
    "the end of a tile": ((128,), {"sinks": jnp.linspace(-1, 1, 8)}),
    "a full cache, window": ((767,), {"window": 300, "soft_cap": 5.0}),
    "a ring, window": ((1000,), {"window": 300, "sinks": jnp.linspace(-1, 1, 8)}),
    "three rows": ((640, -1, 900), {}),
    "no rotation": ((700, 300), {}),
}


def seen_calls(monkeypatch) -> list[dict]:
    """A list to which each call of the kernel of `attended` then appends its arguments, as they are after it."""
    calls, kernel = [], attended_kernels.attended_kernel

    class Seen:
        arg_names = kernel.arg_names

        def __getitem__(self, grid):
            def run(**given):
                kernel[grid](**given)
                calls.append(given)

            return run

    monkeypatch.setattr(attended_kernels, "attended_kernel", Seen())
    return calls


@pytest.mark.parametrize("case", SHARED)
def test_several_programs_share_a_head_of_few_rows(case, monkeypatch):
    """The last one of them adds up their sums, so that the result is that of a single program but for rounding, and
    sets their number back to zero for the next layer."""
    calls = seen_calls(monkeypatch)
    positions, masking = SHARED[case]
    given = attended_case(32 if len(positions) == 3 else 8, 8 if len(positions) == 3 else 2, 128, 768, 2, positions)
    given = (*given[:4], None) if case == "no rotation" else given
    options = {"scale": 128**-0.5, "window": None, "soft_cap": None, "sinks": None} | masking
    with interpreted(HOPPER):
        got = attended(*given, **options, batch_invariant=False)
        alone = attended(*given, **options)
    assert [call["SHARES"] for call in calls] == [5 if len(positions) == 3 else 6, 1]
    counts = calls[0]["rotations"][calls[0]["ROTATES"] * len(positions) * 128 :]
    assert len(counts) == len(positions) * given[1].shape[1] and not counts.any()
    for array, other in zip(got[1:], alone[1:], strict=True):
        np.testing.assert_array_equal(array, other)
    exact = [array.astype(jnp.float32) for array in given[:3]]
    query, keys, values = reference.placed(*exact, *given[3:], None, eps=1e-6, offset=0.0, float32=False)
    want = attention_reference.decode(query, keys, values, given[3] + 1, **options)
    assert not got[0][given[3] < 0].any()
    near(got[0], want, 2e-3)


@pytest.mark.parametrize(
    ("kv_heads", "invariant", "shares", "window"), [(2, False, 2, 100), (132, False, 1, None), (2, True, 1, 100)]
)
def test_the_check_at_first_use_misses_no_tile(kv_heads, invariant, shares, window, monkeypatch):
    """A program reads several tiles in it, and a result differs if as many keys as a tile has are left out. It has a
    window if the call has one."""
    checks, right = [], attended_module._by_kernel
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: checks.append(compare))
    given = attended_case(kv_heads, kv_heads, 128, 256, 1, (3,))

    def with_fewer_keys(parts, keys, *given, tile, masking, **settings):
        assert (masking["window"] is None) == (window is None)
        fewer = (masking["window"] or keys.shape[2]) - tile.step
        return right(parts, keys, *given, tile=tile, masking=masking | {"window": fewer}, **settings)

    with interpreted(HOPPER):
        attended(*given, scale=0.1, window=window, batch_invariant=invariant)
        calls = seen_calls(monkeypatch)
        monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
        assert dispatch._difference(checks[0]) is None
        [call] = calls
        assert call["SHARES"] == shares and call["CAPACITY"] >= (call["STAGES"] + 2) * shares * call["STEP"]
        monkeypatch.setattr(attended_module, "_by_kernel", with_fewer_keys)
        assert "differs from the reference" in str(dispatch._difference(checks[0]))


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_each_form_of_the_kernel_is_checked(cache_dtype, monkeypatch):
    """With and without sinks, of one and of several splits, in each dtype; the ring of tiles is used again."""
    checks = {}
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: checks.update({call: compare}))
    parts, keys, values, rows, _ = attended_case(2, 1, 128, 256, 2, (3,))
    parts, keys, values = (
        jnp.repeat(parts, 133, 1),
        *(jnp.repeat(a, 133, 0).astype(cache_dtype) for a in (keys, values)),
    )
    forms = [(None, parts), (jnp.zeros(2), parts), (None, parts[:1]), (None, parts[:1].astype(jnp.bfloat16))]
    with interpreted(HOPPER), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attended_module, "_by_kernel", lambda *_, **__: None)
        for sinks, sums in forms:
            arguments = sums, keys, values, jnp.repeat(rows, 133)
            attended(*arguments, scale=0.1, sinks=sinks, batch_invariant=False, dtype=jnp.bfloat16)
    assert len(checks) == len(forms)
    calls, right = [], attended_module._by_kernel
    monkeypatch.setattr(
        attended_module, "_by_kernel", lambda *a, **how: calls.append((a[0], a[1], how)) or right(*a, **how)
    )
    monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
    with interpreted(HOPPER):
        for compare in checks.values():
            assert dispatch._difference(compare) is None
    for (sinks, sums), (case, cache, how) in zip(forms, calls, strict=True):
        tile = how["tile"]
        assert tile.warps == 1 and cache.shape[2] >= (tile.stages + 2) * tile.step
        assert (how["masking"]["sinks"] is None) == (sinks is None) and (case.shape[0], case.dtype) == (
            len(sums),
            sums.dtype,
        )


@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_with_batch_invariance_no_choice_depends_on_the_number_of_rows(cache_dtype):
    with interpreted(HOPPER):
        for dim, capacity in [(64, 1024), (128, 1024), (128, 2304), (256, 3072)]:
            choices = set()
            for rows in (1, 16, 17, 33, 34, 256):
                parts = jax.ShapeDtypeStruct((1, rows, 6 * 8 * dim), jnp.float32)
                keys = jax.ShapeDtypeStruct((rows, 8, capacity, dim), cache_dtype)
                refused = attended_module.refusal(parts, keys, True, jnp.bfloat16) is not None
                choices.add((refused, attended_module._tile(parts, keys, True)))
            assert len(choices) == 1


def test_longer_caches_are_written_and_read_apart():
    given = attended_case(6, 2, 64, 1152, 1, (700, -1))
    with interpreted():
        got = attended(*given, scale=0.1)
        assert dispatch.record["attended"][0] == "apart"
        query, *caches = placed(*given)
    want = attention_reference.decode(query, *caches, given[3] + 1, scale=0.1, window=None, soft_cap=None, sinks=None)
    near(got[0], want)


@settings(max_examples=12, deadline=None)
@given(
    group=st.integers(1, 8),
    cache_dtype=st.sampled_from([jnp.bfloat16, jnp.float8_e4m3fn]),
    positions=st.lists(st.integers(-1, 600), min_size=1, max_size=3),
    everything=st.booleans(),
    splits=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_the_kernel_in_gluon(group, cache_dtype, positions, everything, splits, seed):
    """Of drawn positions, before and beyond the end of a cache of more tiles than are read ahead; with norms, rotation,
    a window, a soft cap and sinks."""
    kv_heads, capacity, dim, count = 2, 256, 128, len(positions)
    heads = group * kv_heads
    keys, values = (normal(count, kv_heads, capacity, dim, seed=seed + i).astype(cache_dtype) for i in (1, 2))
    parts = normal(splits, count, (heads + 2 * kv_heads) * dim, seed=seed + 3, dtype=jnp.float32)
    rows, table, norms = jnp.asarray(positions, jnp.int32), None, None
    masking = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None}
    if everything:
        angles = normal(count, dim // 2, seed=seed + 4, dtype=jnp.float32)
        table = jnp.cos(angles), jnp.sin(angles)
        norms = tuple(normal(dim, seed=seed + i).astype(jnp.bfloat16) for i in (5, 6))
        masking |= {"window": 200, "soft_cap": 4.0, "sinks": jnp.linspace(-1, 1, heads)}
    rounding = {"eps": 1e-6, "offset": 0.0, "float32": False}
    tile = attended_module._MANY_IN_FP8 if cache_dtype == jnp.float8_e4m3fn else attended_module._MANY_TILE
    operands = parts, keys, values, rows, table, norms
    with interpreted(HOPPER):
        out, *caches = attended_module._by_kernel(
            *operands, jnp.dtype(jnp.bfloat16), tile=tile, shares=1, rounding=rounding, masking=masking
        )
    query, *expected = reference.placed(*operands, jnp.bfloat16, **rounding)
    exact = [array.astype(jnp.float32) for array in (query, *expected)]
    near(out.astype(jnp.float32), attention_reference.decode(*exact, rows + 1, **masking), 1e-2)
    for got, want in zip(caches, expected, strict=True):
        near(got.astype(jnp.float32), want.astype(jnp.float32), 5e-3)
