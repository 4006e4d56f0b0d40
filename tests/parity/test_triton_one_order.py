"""The kernels of operations in one order, run by Triton's interpreter. In float16, as the interpreter multiplies it."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch, gpu_kernel, one_order
from jaxtune.pallas.attention import attention_forward, packed_layout
from jaxtune.pallas.decode.attention import cache_of, chunk_attention, decode_attention
from jaxtune.pallas.decode.few_rows import added_norm, experts_down, experts_gated, gated_product, placed
from jaxtune.pallas.gated import RowGate, activated, gated_rows
from jaxtune.pallas.grouped_matmul import GroupedLora, gated_thin
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.normed_heads import normed, normed_heads, rotated
from jaxtune.pallas.quant_matmul import LoraWeights
from jaxtune.pallas.routing import matmul_of_tokens, matmul_to_tokens, route, row_weights


def drawn(number: int, *shape: int, dtype=jnp.float16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape), dtype)


@pytest.fixture(autouse=True)
def exactly():
    with interpreted((9, 0)), one_order.exact():
        yield


@pytest.mark.parametrize(("rows", "columns", "out", "rank"), [(3, 200, 40, 0), (70, 136, 90, 7), (300, 64, 520, 0)])
def test_products(rows, columns, out, rank):
    x, weight = drawn(0, rows, columns), drawn(1, out, columns)
    adapter = (drawn(2, rows, rank), drawn(3, out, rank)) if rank else None
    got = one_order.adapted(x, weight, adapter)
    wide = [np.float32(array) for array in (x, weight, *(adapter or ()))]
    want = np.float16(wide[0] @ wide[1].T)
    if rank:
        want = want + np.float16(wide[2] @ wide[3].T)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(("out", "tile_rows"), [(128, 64), (128 * 132, 128)])
def test_few_rows_round_a_product_and_its_adapter_as_many_do(out, tile_rows):
    """Of whole numbers, whose sums are exact, so that a rounding in another place shows."""
    from jaxtune.pallas.decode.few_rows import triton as few

    draw = np.random.default_rng(0)
    x, weight, a, b = (
        jnp.asarray(draw.integers(-40, 41, shape), jnp.float16) for shape in ((5, 256), (out, 256), (4, 256), (out, 4))
    )
    lora = LoraWeights(a, b, None, 0.3)
    assert few.product_tile(x, [weight], [lora]).rows == tile_rows
    inner = one_order.adapted(x, a)
    inner = (inner.astype(jnp.float32) * 0.3).astype(jnp.float16)
    want = one_order.adapted(x, weight, (inner, b))
    got = few.products(x, [weight], [lora])
    assert got.shape == (1, 5, out)
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_are_rounded_once(activation):
    gate, up = 3 * drawn(0, 7, 300), drawn(1, 7, 300)
    with one_order.exact(False):
        want = activated(gate.astype(jnp.float32), up.astype(jnp.float32), activation)
    got = activated(gate, up, activation)
    np.testing.assert_allclose(np.float32(got), want, rtol=2**-11 + 1e-5, atol=2e-6)


def test_a_gated_product_of_few_rows_has_the_bits_of_many():
    """Of whole numbers, whose sums are exact."""
    draw = np.random.default_rng(0)
    shapes = (5, 256), (128, 256), (128, 256), (4, 256), (128, 4), (4, 256), (128, 4)
    x, *weights_and_sides = (jnp.asarray(draw.integers(-3, 4, shape), jnp.float16) for shape in shapes)
    weights, sides = weights_and_sides[:2], weights_and_sides[2:]
    loras = [LoraWeights(*pair, None, 0.5) for pair in itertools.batched(sides, 2)]
    apart = [
        one_order.adapted(x, weight, ((one_order.adapted(x, lora.a).astype(jnp.float32) * 0.5).astype(x.dtype), lora.b))
        for weight, lora in zip(weights, loras, strict=True)
    ]
    got = gated_product(x / 16, *(weight / 16 for weight in weights), "silu", [])
    plain = [one_order.adapted(x / 16, weight / 16) for weight in weights]
    np.testing.assert_array_equal(got, activated(*plain, "silu"))
    np.testing.assert_array_equal(gated_product(x, *weights, "silu", loras), activated(*apart, "silu"))


@pytest.mark.parametrize("float32", [True, False])
def test_norms_have_the_bits_of_a_decoding_step(float32):
    x, weight = drawn(0, 2, 9, 192), drawn(1, 192)
    got = normed(x, weight, 1e-5, 1.0, float32)
    rows = x.reshape(18, 192)
    zeros = jnp.zeros((1, *rows.shape), x.dtype)
    _, want = added_norm(rows, zeros, weight, eps=1e-5, offset=1.0, float32=float32, implementation="triton")
    np.testing.assert_array_equal(got.reshape(18, 192), want)


@pytest.mark.parametrize("norms", [True, False])
def test_heads_have_the_bits_of_a_decoding_step(norms):
    rows, heads, kv_heads, dim = 5, 4, 2, 64
    projected, angles = drawn(0, rows, heads + 2 * kv_heads, dim), drawn(1, rows, dim // 2, dtype=jnp.float32)
    table = jnp.cos(angles), jnp.sin(angles)
    weights = (drawn(2, dim), drawn(3, dim)) if norms else None
    cache = jnp.zeros((rows, kv_heads, 128, dim), jnp.float16)
    positions = jnp.arange(rows, dtype=jnp.int32)
    query, keys, values = placed(projected.reshape(1, rows, -1), cache, cache, positions, table, weights)
    parts = projected[:, None, :heads], projected[:, None, heads : heads + kv_heads]
    of_training = [angles[:, None] for angles in table]
    if weights is None:
        got = [rotated(False, part, *of_training) for part in parts]
    else:
        got = [normed_heads(part, weight, tuple(of_training)) for part, weight in zip(parts, weights, strict=True)]
    np.testing.assert_array_equal(got[0][:, 0], query)
    np.testing.assert_array_equal(got[1][:, 0], keys[np.arange(rows), :, np.arange(rows)])
    np.testing.assert_array_equal(projected[:, heads + kv_heads :], values[np.arange(rows), :, np.arange(rows)])


def test_log_probabilities_depend_neither_on_rows_nor_on_what_follows_the_vocabulary():
    logits, temperatures = 4 * drawn(0, 6, 5000, dtype=jnp.float32), jnp.linspace(0.5, 1.5, 6)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5000, (6, 3)), jnp.int32)
    got, sums = one_order.log_probabilities(logits, tokens, temperatures, 5000)
    scores = np.float64(logits) / np.float64(temperatures)[:, None]
    lse = np.log(np.exp(scores).sum(1))
    np.testing.assert_allclose(sums, lse, rtol=1e-5)
    np.testing.assert_allclose(got, np.take_along_axis(scores, np.asarray(tokens), 1) - lse[:, None], atol=1e-4)
    wider = jnp.pad(logits, ((0, 0), (0, 8)), constant_values=100.0)
    one, _ = one_order.log_probabilities(wider[4:5], tokens[4:5, 1:2], temperatures[4:5], 5000)
    np.testing.assert_array_equal(one, got[4:5, 1:2])


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    ahead=st.integers(0, 70),
    heads=st.sampled_from([(3, 1), (2, 2), (4, 2)]),
    dim=st.sampled_from([64, 128]),
    limits=st.booleans(),
)
@example(lengths=[5, 65, 1, 129], ahead=0, heads=(3, 1), dim=64, limits=True)
@example(lengths=[70], ahead=3, heads=(18, 1), dim=64, limits=False)
def test_attention_of_a_document_has_the_same_bits_wherever_it_begins(lengths, ahead, heads, dim, limits):
    """Packed behind others, alone in a row, in a decoding step and in a chunk; any number of queries to a key's."""
    heads, kv_heads = heads
    bounds = [ahead, *(ahead + end for end in itertools.accumulate(lengths))]
    length = bounds[-1] + 6
    query, key, value = (drawn(n, 1, length, count, dim) for n, count in enumerate((heads, kv_heads, kv_heads)))
    segments = np.zeros((1, length), np.int32)
    for number, (start, end) in enumerate(itertools.pairwise(bounds), 1):
        segments[0, start:end] = number
    options: dict = dict(scale=dim**-0.5)
    if limits:
        options |= dict(soft_cap=5.0, sinks=jnp.linspace(-1, 1, heads))
    packed, lse = attention_forward(query, key, value, packed_layout((1, length), jnp.asarray(segments)), **options)
    assert not np.asarray(packed)[0, segments[0] == 0].any() and np.isfinite(np.asarray(lse)).all()
    for start, end in itertools.pairwise(bounds):
        parts = [array[:, start:end] for array in (query, key, value)]
        alone, _ = attention_forward(*parts, packed_layout((1, end - start)), **options)
        np.testing.assert_array_equal(packed[:, start:end], alone)
        count = end - start
        caches = [cache_of(array, jnp.asarray([count]), 256) for array in parts[1:]]
        newest = decode_attention(parts[0][:, -1], *caches, jnp.asarray([count]), **options)
        np.testing.assert_array_equal(newest, alone[:, -1])
        before = count // 3
        caches = [cache_of(array[:, : max(before, 1)], jnp.asarray([before]), 256) for array in parts[1:]]
        chunk = chunk_attention(*(part[:, before:] for part in parts), *caches, jnp.asarray([before]), **options)
        np.testing.assert_array_equal(chunk, alone[:, before:])


def of_experts(*shapes: tuple[int, ...], most: int = 40) -> list[jax.Array]:
    """Whole numbers, whose sums are exact, so that a rounding in another place shows."""
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.integers(-most, most + 1, shape), jnp.float16) for shape in shapes]


@pytest.mark.parametrize("rank", [0, 4, 20])
@pytest.mark.parametrize("tokens", [2, 40])
def test_experts_of_few_tokens_round_as_those_of_many(tokens, rank):
    """Adapters are part of one sum; a token without experts gets zeros."""
    experts, k, hidden, inner = 5, 2, 128, 64
    x, gate_up, down, h = of_experts(
        (tokens, hidden), (experts, 128, hidden), (experts, 128, inner), (tokens, k, inner)
    )
    gate_up, h = gate_up / 4096, h.reshape(-1, inner)
    sides = of_experts(
        (experts, rank, hidden), (experts, 128, rank), (experts, rank, inner), (experts, 128, rank), most=3
    )
    a, b, down_a, down_b = sides
    loras = [GroupedLora(a / 128, b / 64, 0.3), GroupedLora(down_a, down_b, 0.3)] if rank else [None, None]
    choice = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k])
    choice = choice.astype(jnp.int32).at[1].set(experts)
    weights = jnp.abs(drawn(3, tokens, k, dtype=jnp.float32))
    with gpu_kernel.interpreted():
        routing = route(choice, experts)
        many = matmul_of_tokens(x, gate_up, routing, loras[0])
        gated = gated_rows(many, row_weights(weights, routing), RowGate("silu"))
        rows = jnp.zeros((routing.groups.rows, inner), h.dtype).at[routing.slots.reshape(-1)].set(h, mode="drop")
        want = matmul_to_tokens(rows, down, routing, loras[1])
        assert dispatch.record["grouped_matmul"][0] == "mosaic"
    got = experts_gated(x, gate_up, choice, weights, "silu", loras[0])
    slots = routing.slots.reshape(-1, 1)
    want_gated = jnp.where(slots < len(gated), gated.at[slots[:, 0]].get(mode="clip"), 0)
    np.testing.assert_array_equal(got, want_gated)
    parts = experts_down(h, down, choice, loras[1])
    assert parts.dtype == h.dtype and not np.asarray(parts[:, 1]).any()
    got, _ = added_norm(jnp.zeros_like(want), parts, jnp.ones(128, h.dtype), eps=1e-6)
    np.testing.assert_array_equal(got, want)
    assert np.asarray(want[0]).any() and np.isfinite(np.asarray(want)).all()


@pytest.mark.parametrize("rank", [3, 16])
def test_inner_rows_are_rounded_alike_whichever_kernel_computes_them(rank):
    groups = groups_of(jnp.asarray((300, 0, 1), jnp.int32), 310)
    inside = (jnp.arange(groups.tile_rows) < groups.tile_sizes[:, None]).reshape(-1, 1)
    gate_up, weights = jnp.where(inside, drawn(0, groups.rows, 256), 0), drawn(1, groups.rows, dtype=jnp.float32)
    a, gate = drawn(2, 3, rank, 128), RowGate("silu")
    rows, _ = gated_thin.gated_rows_thin(gate_up, weights, a, groups, gate)
    np.testing.assert_array_equal(jnp.where(inside, rows, 0), gated_rows(gate_up, weights, gate))
