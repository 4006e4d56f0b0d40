"""The Triton kernels of a decoding step, in Triton's interpreter, against their reference. In float16: the interpreter
does not round to bfloat16 as a GPU does."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from near_numbers import near, normal
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.decode.few_rows import (
    added_norm,
    chosen_token,
    experts_down,
    experts_gated,
    experts_have_kernels,
    gated_product,
    placed,
    products,
    reference,
    triton,
    unsharded,
)
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul import LoraWeights

HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, (64,)), (33, (64,)), (2, (128, 64, 192)), (129, (128, 64, 192)), (129, (256,)), (200, (128, 256))],
)
def test_products_add_up_to_those_of_xla(rows, sizes):
    x = normal(rows, 2048)
    weights = [normal(size, 2048, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    with interpreted(HOPPER):
        parts = products(x, weights)
    assert dispatch.record["products"][0] == "triton"
    assert parts.shape == (8, rows, sum(sizes)) and parts.dtype == jnp.float32
    near(parts.sum(0), reference.products(x.astype(jnp.float32), weights)[0], 1e-4)


@pytest.mark.parametrize(("rows", "sizes"), [(1, (4096,)), (17, (4096,)), (32, (2048, 1024, 3072))])
def test_a_product_of_few_rows_and_a_large_weight_is_one_sum(rows, sizes):
    """Beside other rows a row has the same bits; products with adapters, and of more rows, are divided."""
    x, weights = normal(40, 512), [normal(size, 512, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    with interpreted(HOPPER):
        whole, alone = products(x[:rows], weights), products(x[:1], weights)
    assert whole.shape == (1, rows, sum(sizes)) and whole.dtype == x.dtype
    np.testing.assert_array_equal(whole[:, :1], alone)
    near(whole[0], reference.products(x[:rows], weights)[0])
    loras = [adapter(size, 512, 8, 1.0, 3) for size in sizes]
    for count, adapters in ((rows, loras), (33, [])):
        programs = sum(sizes) // triton.product_tile(x[:count], weights, adapters).rows
        assert not triton._undivided(count, adapters, programs)
    assert triton._undivided(rows, [], 64) and not triton._undivided(rows, [], 63)


def test_a_product_of_many_rows_is_divided_for_the_kernel_that_adds_it():
    """As XLA would divide it to occupy the multiprocessors; one with adapters is one sum."""
    x, weight = normal(257, 2048), normal(64, 2048, seed=1, scale=0.05)
    with interpreted(HOPPER):
        parts = products(x, [weight])
        assert products(x, [weight], [adapter(64, 2048, 8, 1.0, 3)]).shape == (1, 257, 64)
    assert dispatch.record["products"][0] == "reference"
    assert parts.shape == (8, 257, 64) and parts.dtype == jnp.float32
    near(parts.sum(0), reference.products(x.astype(jnp.float32), [weight])[0], 1e-4)
    with interpreted((8, 0)):
        assert products(x, [weight]).shape == (1, 257, 64)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_gated_product_of_many_rows_is_activated_by_a_kernel(activation, adapted):
    x, gate, up = normal(130, 256), *(normal(136, 256, seed=i, scale=0.1) for i in (1, 2))
    loras = [adapter(136, 256, 8, 2.0, seed) for seed in (3, 5)] if adapted else []
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, activation, loras)
    assert dispatch.record["activated"][0] == "triton"
    want = gated_product(x, gate, up, activation, loras, implementation="reference")
    assert (np.asarray(got) == np.asarray(want)).mean() > 0.98
    near(got, want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product(activation):
    x, gate, up = normal(5, 256), *(normal(128, 256, seed=i, scale=0.1) for i in (1, 2))
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, activation)
    assert dispatch.record["gated_product"][0] == "triton"
    near(got, reference.gated_product(x, gate, up, activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_rounds_as_training_does(activation):
    """Nearly all numbers have the same bits; the interpreter rounds to nearest only in float16."""
    x, gate, up = normal(5, 256), *(normal(128, 256, seed=i, scale=0.1) for i in (1, 2))
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, activation)
    assert (np.asarray(got) == np.asarray(reference.gated_product(x, gate, up, activation))).mean() > 0.98


def adapter(out: int, size: int, rank: int, scale: float, seed: int) -> LoraWeights:
    return LoraWeights(
        normal(rank, size, seed=seed, scale=0.03), normal(out, rank, seed=seed + 1, scale=0.3), scale=scale
    )


def wide(tree):
    return jax.tree.map(lambda array: array.astype(jnp.float32), tree)


@pytest.mark.full
@pytest.mark.parametrize(("rows", "sizes"), [(5, (128, 64, 192)), (33, (128, 64, 192)), (100, (128, 128, 256))])
def test_adapters_are_part_of_the_products(rows, sizes):
    """Of several ranks and scales, and one weight has none; the sums are those of merged weights. More than 64 rows
    have larger tiles."""
    x = normal(rows, 2048)
    weights = [normal(size, 2048, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    loras = [adapter(sizes[0], 2048, 8, 2.0, 10), None, adapter(sizes[2], 2048, 20, 0.7, 20)]
    with interpreted(HOPPER):
        parts = products(x, weights, loras)
    assert dispatch.record["products"][0] == "triton"
    assert parts.shape == (8, rows, sum(sizes)) and parts.dtype == jnp.float32
    near(parts.sum(0), reference.products(wide(x), wide(weights), wide(loras))[0], 5e-4)
    merged = [
        weight if lora is None else weight + lora.scale * lora.b @ lora.a
        for weight, lora in zip(wide(weights), wide(loras), strict=True)
    ]
    near(parts.sum(0), reference.products(wide(x), merged)[0], 5e-4)
    plain = reference.products(wide(x), wide(weights))[0]
    assert np.linalg.norm(parts.sum(0) - plain) > 0.1 * np.linalg.norm(plain)


def test_undivided_products_with_adapters_round_as_training_does():
    """The weight's product and the adapter's are rounded apart; rounded together, a quarter would have other bits."""
    x, weight = normal(5, 256), normal(96 * 64, 256, seed=1, scale=0.05)
    lora = adapter(len(weight), 256, 8, 2.0, 10)
    with interpreted(HOPPER):
        got = products(x, [weight], [lora])
    assert dispatch.record["products"][0] == "triton" and len(got) == 1
    assert (np.asarray(got) == np.asarray(reference.products(x, [weight], [lora]))).mean() > 0.98


@pytest.mark.parametrize("which", [(True, True), (False, True), (True, False)])
def test_a_gated_product_with_adapters(which):
    x, gate, up = normal(5, 256), *(normal(128, 256, seed=i, scale=0.1) for i in (1, 2))
    loras = [adapter(128, 256, rank, 1.5, 30 + rank) if has else None for has, rank in zip(which, (16, 4), strict=True)]
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, "silu", loras)
    assert dispatch.record["gated_product"][0] == "triton"
    near(got, reference.gated_product(wide(x), wide(gate), wide(up), "silu", wide(loras)))
    assert np.linalg.norm(got - reference.gated_product(x, gate, up, "silu")) > 0.1 * np.linalg.norm(got)


def gated(lora: LoraWeights, rows: int, seed: int) -> LoraWeights:
    """With a gate of two adapters' columns, of which each row takes one's or none, in an axis of its own."""
    draw = np.random.default_rng(seed)
    owners, factors = draw.integers(1, 3, lora.a.shape[0]), draw.uniform(0.5, 2, lora.a.shape[0]).astype(np.float32)
    chosen = draw.integers(0, 3, rows)[:, None] == owners
    return dataclasses.replace(lora, gate=jnp.where(chosen, factors, 0)[:, None])


@given(
    rows=st.sampled_from([1, 5, 17, 65, 128]),
    ranks=st.lists(st.sampled_from([None, 5, 16, 24, 64]), min_size=3, max_size=3).filter(any),
    seed=st.integers(0, 99),
)
@example(rows=5, ranks=[64, None, 16], seed=0)
@settings(max_examples=4, deadline=None)
def test_each_row_takes_its_own_columns(rows, ranks, seed):
    """Of adapters side by side; a column that a row does not take adds nothing, even where it is not finite."""
    sizes = 128, 64, 128
    x, weights = normal(rows, 512), [normal(size, 512, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    loras = [
        rank and gated(adapter(size, 512, rank, 1.0, 10 + i), rows, seed + i)
        for i, (size, rank) in enumerate(zip(sizes, ranks, strict=True))
    ]
    pair = [loras[0], loras[2]]
    with interpreted(HOPPER):
        parts = products(x, weights, loras)
        joined = gated_product(x, weights[0], weights[2], "silu", pair)
    most = max(rank or 0 for rank in (ranks[0], ranks[2]))
    assert dispatch.record["products"][0] == "triton"
    assert dispatch.record["gated_product"][0] == ("reference" if rows > 64 and most > 32 else "triton")
    near(parts.astype(jnp.float32).sum(0), reference.products(wide(x), wide(weights), wide(loras))[0], 1e-3)
    near(joined, reference.gated_product(wide(x), *wide([weights[0], weights[2]]), "silu", wide(pair)))
    for index, lora in enumerate(loras):
        if lora is not None:
            free = np.asarray(lora.gate[:, 0] == 0).all(0)
            loras[index] = dataclasses.replace(lora, a=lora.a.at[free].set(jnp.inf))
    with interpreted(HOPPER):
        np.testing.assert_array_equal(products(x, weights, loras), parts)


def test_a_row_with_an_adapter_has_the_same_bits_beside_others():
    x, weight, lora = normal(16, 512), normal(64, 512, seed=1), adapter(64, 512, 16, 2.0, 2)
    with interpreted(HOPPER):
        whole, alone = products(x, [weight], [lora]), products(x.at[1:].set(7.0), [weight], [lora])
    np.testing.assert_array_equal(whole[:, 0], alone[:, 0])


@given(
    columns=st.integers(8, 24).map(lambda number: 64 * number),
    sizes=st.lists(st.integers(1, 2).map(lambda number: 64 * number), min_size=1, max_size=3),
    rows=st.sampled_from([1, 5, 17, 65, 130]),
    rank=st.sampled_from([0, 5, 16]),
)
@example(columns=576, sizes=[192, 192], rows=3, rank=16)  # keys and values of SmolLM2-135M
@settings(max_examples=3, deadline=None)
def test_products_of_an_odd_number_of_64_columns(columns, sizes, rows, rank):
    """From 512 columns on, in splits that are whole numbers of 64s, with adapters and without."""
    x = normal(rows, columns)
    weights = [normal(size, columns, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    loras = [adapter(size, columns, rank, 2.0, 10 + i) for i, size in enumerate(sizes)] if rank else []
    few = rows <= 128 or not rank
    with interpreted(HOPPER):
        parts = products(x, weights, loras)
        gated = gated_product(x, weights[0], weights[0], "silu", [loras[0]] * 2 if rank else [])
    assert dispatch.record["products"][0] == ("triton" if few else "reference")
    near(parts.astype(jnp.float32).sum(0), reference.products(wide(x), wide(weights), wide(loras))[0])
    near(gated, reference.gated_product(wide(x), *[wide(weights[0])] * 2, "silu", wide([loras[0]] * 2 if rank else [])))


@given(
    count=st.sampled_from([2, 3, 4]),
    part=st.sampled_from([64, 128, 192, 256, 384]),
    rows=st.integers(1, 70),
    rank=st.sampled_from([0, 8]),
)
@example(count=2, part=192, rows=5, rank=8)
@settings(max_examples=4, deadline=None)
def test_products_of_columns_in_parts_have_the_bits_of_whole_ones(count, part, rows, rank):
    x, weight = normal(rows, count * part), normal(64, count * part, seed=1, scale=0.05)
    parts = jnp.moveaxis(x.reshape(rows, count, part), 1, 0)
    loras = [adapter(64, count * part, rank, 2.0, 3)] if rank else []
    np.testing.assert_array_equal(unsharded(parts), x)
    with interpreted(HOPPER):
        np.testing.assert_array_equal(products(parts, [weight], loras), products(x, [weight], loras))
        whole_steps = count * part % 128 == 0 or count * part >= 512
        assert dispatch.record["products"][0] == ("triton" if whole_steps else "reference")
    np.testing.assert_array_equal(products(parts, [weight], loras), products(x, [weight], loras))


@given(
    count=st.integers(2, 5),
    part=st.integers(1, 90),
    rows=st.integers(1, 9),
    splits=st.sampled_from([1, 3]),
)
@settings(max_examples=8, deadline=None)
def test_a_sum_in_parts_of_columns_has_the_bits_of_a_whole_one(count, part, rows, splits):
    size = count * part
    x, weight, sums = normal(rows, size), normal(size, seed=2), normal(splits, rows, size, seed=1, dtype=jnp.float32)
    parts = jnp.moveaxis(sums.reshape(splits, rows, count, part), 2, 1)
    for context in (interpreted(), contextlib.nullcontext()):
        with context:
            got, want = added_norm(x, parts, weight, eps=1e-5), added_norm(x, sums, weight, eps=1e-5)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
    for others in ((count, part + 1), (count + 1, part), (0, part), (size + 1, 1)):
        with pytest.raises(ValueError, match=f"{others[0]} shards of {others[1]} columns; x has {size}"):
            added_norm(x, jnp.zeros((splits, others[0], rows, others[1]), x.dtype), weight, eps=1e-5)


@pytest.mark.parametrize(("columns", "supported"), [(448, False), (512, True), (576, True), (608, False), (256, True)])
def test_columns_of_products_with_kernels(columns, supported):
    with interpreted(HOPPER):
        x, weight = normal(2, columns), normal(64, columns)
        products(x, [weight])
        assert dispatch.record["products"][0] == ("triton" if supported else "reference")
        gated_product(x, weight, weight, "silu")
    assert dispatch.record["gated_product"][0] == ("triton" if supported else "reference")


def test_a_call_that_no_kernel_supports_says_why():
    lora = adapter(64, 256, 65, 1.0, 1)
    with interpreted(HOPPER), pytest.raises(ValueError, match="adapters of rank 65; up to 64"):
        products(normal(5, 256), [normal(64, 256)], [lora], implementation="triton")
    with pytest.raises(ValueError, match=r"loras.0. has a row_scale .DoRA.: use quant_matmul"):
        products(normal(5, 256), [normal(64, 256)], [dataclasses.replace(lora, row_scale=jnp.ones(64))])
    with interpreted(HOPPER), pytest.raises(ValueError, match="weights .100, 256.; multiples of 64 rows and of 128 c"):
        products(normal(5, 256), [normal(100, 256)], implementation="triton")
    with interpreted(HOPPER), pytest.raises(ValueError, match="300 rows; from 1 to 256"):
        products(normal(300, 256), [normal(64, 256)], implementation="triton")
    with interpreted(HOPPER), pytest.raises(ValueError, match="activation gelu"):
        gated_product(normal(5, 256), normal(64, 256), normal(64, 256), "gelu", implementation="triton")


@pytest.mark.parametrize(("splits", "options"), [(1, {}), (3, {"offset": 1.0, "float32": True})])
def test_a_sum_and_its_norm(splits, options):
    """The sum has the bits of the reference: it is what the residual stream is."""
    x, weight = normal(3, 200), normal(200, seed=2)
    parts = normal(splits, 3, 200, seed=1, dtype=jnp.float16 if splits == 1 else jnp.float32)
    with interpreted():
        added, normed = added_norm(x, parts, weight, eps=1e-5, **options)
    assert dispatch.record["added_norm"][0] == "triton"
    want = (
        reference.added_norm(x, parts, weight, eps=1e-5, offset=0.0, float32=False)
        if not options
        else (reference.added_norm(x, parts, weight, eps=1e-5, **options))
    )
    np.testing.assert_array_equal(added, want[0])
    near(normed, want[1])


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_heads_are_normed_turned_and_written(rotates, norms):
    heads, kv_heads, dim, capacity = 4, 2, 32, 128
    positions = jnp.asarray([0, -1, 200, 127], jnp.int32)
    keys, values = (normal(4, kv_heads, capacity, dim, seed=i) for i in (1, 2))
    parts = normal(2, 4, (heads + 2 * kv_heads) * dim, seed=3, dtype=jnp.float32)
    angles = normal(4, dim // 2, seed=4, dtype=jnp.float32)
    table = (jnp.cos(angles), jnp.sin(angles)) if rotates else None
    weights = (normal(dim, seed=5), normal(dim, seed=6)) if norms else None
    with interpreted():
        got = placed(parts, keys, values, positions, table, weights, eps=1e-6)
    assert dispatch.record["placed"][0] == "triton"
    want = reference.placed(parts, keys, values, positions, table, weights, eps=1e-6, offset=0.0, float32=False)
    live = positions >= 0
    near(got[0][live], want[0][live])
    for new, expected, old in zip(got[1:], want[1:], (keys, values), strict=True):
        near(new, expected, 5e-4)
        np.testing.assert_array_equal(new[1], old[1])  # of the row that does not decode
        np.testing.assert_array_equal((new != old).any(-1).sum((1, 2)), [2, 0, 2, 2])


def choice_of(kind: str, tokens: int, k: int, experts: int):
    """Experts of tokens, all different. `spread`: by chance, but nobody chooses expert 0; `one`: all tokens choose the
    last expert, beside others; `idle`: as spread, and every third token has none."""
    draws = jax.random.uniform(jax.random.key(9), (tokens, experts)).at[:, 0].set(-1.0)
    draws = draws.at[:, experts - 1].set(2.0) if kind == "one" else draws
    choice = jax.lax.top_k(draws, k)[1].astype(jnp.int32)
    return jnp.where(jnp.arange(tokens)[:, None] % 3 == 0, experts, choice) if kind == "idle" else choice


def experts_case(tokens: int, k: int, experts: int, hidden: int = 128, inner: int = 64):
    """(x, gate_up, down, the router's weights)."""
    x, gate_up = normal(tokens, hidden), normal(experts, 2 * inner, hidden, seed=1, scale=0.1)
    weights = jax.nn.softmax(normal(tokens, k, seed=3, dtype=jnp.float32))
    return x, gate_up, normal(experts, hidden, inner, seed=2, scale=0.1), weights


@pytest.mark.parametrize("kind", ["spread", "one", "idle"])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(2, 8, 16), (65, 1, 4), (65, 8, 40), (17, 3, 5)])
def test_tokens_meet_their_experts(tokens, k, experts, kind):
    """Also where more tokens choose an expert than are multiplied at once. What nothing writes would be NaN."""
    choice, (x, gate_up, down, weights) = choice_of(kind, tokens, k, experts), experts_case(tokens, k, experts)
    with interpreted(HOPPER):
        h = experts_gated(x, gate_up, choice, weights, "silu")
        parts = experts_down(h, down, choice)
    assert [dispatch.record[name][0] for name in ("experts_gated", "experts_down")] == ["triton"] * 2
    want = reference.experts_gated(x, gate_up, choice, weights, "silu", None)
    assert h.shape == (tokens * k, 64) and h.dtype == x.dtype
    near(h, want)
    near(parts, reference.experts_down(wide(h), wide(down), choice, None), 1e-5)
    assert parts.shape == (k, tokens, 128) and parts.dtype == jnp.float32
    idle = np.asarray(choice == experts)
    assert not np.any(np.asarray(h).reshape(tokens, k, -1)[idle]) and not np.any(np.asarray(parts).swapaxes(0, 1)[idle])
    assert np.all(np.asarray(parts).swapaxes(0, 1)[~idle].any(-1))


def adapters_of(matrices, rank: int, dtype=jnp.float16, seed: int = 5) -> GroupedLora:
    experts, rows, columns = matrices.shape
    a = normal(experts, rank, columns, seed=seed, scale=0.1, dtype=dtype)
    return GroupedLora(a, normal(experts, rows, rank, seed=seed + 1, scale=0.3, dtype=dtype), 0.7)


@pytest.mark.full
@pytest.mark.parametrize(
    ("which", "rank", "dtype"), [((1, 1), 64, "float16"), ((1, 0), 5, "float32"), ((0, 1), 16, "float16")]
)
def test_adapters_are_part_of_the_experts_products(which, rank, dtype):
    """The sums are those of merged matrices; also where an expert's tokens are multiplied in two parts."""
    tokens, k, experts = 65, 8, 40
    choice, (x, gate_up, down, weights) = choice_of("one", tokens, k, experts), experts_case(tokens, k, experts)
    choice = choice.at[3].set(experts)
    loras = [adapters_of(m, rank, dtype) if has else None for has, m in zip(which, (gate_up, down), strict=True)]
    with interpreted(HOPPER):
        assert experts_have_kernels(x, (gate_up, down), k, "silu", tuple(loras))
        h = experts_gated(x, gate_up, choice, weights, "silu", loras[0])
        parts = experts_down(h, down, choice, loras[1])
    assert [dispatch.record[name][0] for name in ("experts_gated", "experts_down")] == ["triton"] * 2
    merged = [
        wide(m) if lora is None else wide(m) + lora.scale * jnp.einsum("eor,eri->eoi", *wide((lora.b, lora.a)))
        for m, lora in zip((gate_up, down), loras, strict=True)
    ]
    near(h, reference.experts_gated(wide(x), merged[0], choice, weights, "silu", None))
    near(parts, reference.experts_down(wide(h), merged[1], choice, None), 5e-4)
    near(parts, reference.experts_down(wide(h), wide(down), choice, wide(loras[1])), 5e-4)
    near(h, reference.experts_gated(wide(x), wide(gate_up), choice, weights, "silu", wide(loras[0])))
    plain = reference.experts_down(wide(h), wide(down), choice, None)
    assert not which[1] or np.linalg.norm(parts - plain) > 0.1 * np.linalg.norm(plain)


@pytest.mark.parametrize("rank", [3, 16])
def test_padding_of_experts_adapters_is_not_read(rank):
    tokens, k, experts = 17, 3, 5
    choice, (x, gate_up, down, weights) = choice_of("spread", tokens, k, experts), experts_case(tokens, k, experts)
    results = []
    for padding in (0, 64 - rank):
        loras = [adapters_of(matrices, rank) for matrices in (gate_up, down)]
        if padding:
            a = [jnp.pad(lora.a, ((0, 0), (0, padding), (0, 0)), constant_values=jnp.nan) for lora in loras]
            b = [jnp.pad(lora.b, ((0, 0), (0, 0), (0, padding)), constant_values=jnp.nan) for lora in loras]
            loras = [GroupedLora(*sides, 0.7, rank) for sides in zip(a, b, strict=True)]
        with interpreted(HOPPER):
            assert experts_have_kernels(x, (gate_up, down), k, "silu", (loras[0], loras[1]))
            h = experts_gated(x, gate_up, choice, weights, "silu", loras[0])
            results.append((h, experts_down(h, down, choice, loras[1])))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_the_reference_is_each_pair_by_itself():
    tokens, k, experts = 7, 3, 5
    choice, (x, gate_up, down, weights) = choice_of("idle", tokens, k, experts), experts_case(tokens, k, experts)
    x, gate_up, down = wide((x, gate_up, down))
    h = reference.experts_gated(x, gate_up, choice, weights, "gelu_tanh", None)
    parts = reference.experts_down(h, down, choice, None)
    for t in range(tokens):
        for j in range(k):
            expert = int(choice[t, j])
            if expert == experts:
                assert not np.any(parts[j, t])
                continue
            gate, up = jnp.split(gate_up[expert] @ x[t], 2)
            near(parts[j, t], down[expert] @ (jax.nn.gelu(gate) * up * weights[t, j]), 1e-5)


@pytest.mark.parametrize("tokens", [64, 40])
def test_a_token_with_experts_has_the_same_bits_beside_others(tokens):
    """Whatever the others choose and hold, NaN too, and whichever slot it has."""
    k, experts = 2, 16
    x, gate_up, down, weights = experts_case(tokens, k, experts)
    found = []
    for kind, slot in (("spread", 0), ("one", tokens - 1)):
        choice = choice_of(kind, tokens, k, experts).at[slot].set(jnp.asarray([15, 3]))
        rows = jnp.full_like(x, jnp.nan if kind == "one" else 1.0).at[slot].set(x[0])
        with interpreted(HOPPER):
            h = experts_gated(rows, gate_up, choice, jnp.full_like(weights, 0.5), "gelu_tanh")
            parts = experts_down(h, down, choice)
        found.append((h[slot * k : slot * k + k], parts[:, slot]))
    assert np.all(np.isfinite(found[0][1]))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tokens=200), "200 rows; from 2 to 128"),
        (dict(inner=96), "matrices of 96 rows and 128 columns; multiples of 64"),
        (dict(hidden=96), "matrices of 64 rows and 96 columns; multiples of 64"),
        (dict(k=17, experts=20), "17 experts a token; up to 16"),
        (dict(activation="gelu"), "activation gelu"),
        (dict(rank=65), "adapters of rank 65; up to 64"),
        (dict(dtype=jnp.float32), "x in float32, weights in float32; one of 16 bits"),
    ],
)
def test_experts_that_no_kernel_multiplies(change, message):
    sizes = dict(tokens=5, k=2, experts=4) | change
    activation, dtype = sizes.pop("activation", "silu"), sizes.pop("dtype", jnp.float16)
    rank = sizes.pop("rank", 0)
    x, gate_up, down, weights = experts_case(**sizes)
    x, gate_up, down = (array.astype(dtype) for array in (x, gate_up, down))
    choice = choice_of("spread", sizes["tokens"], sizes["k"], sizes["experts"])
    loras = adapters_of(gate_up, rank) if rank else None, None
    with interpreted(HOPPER):
        assert not experts_have_kernels(x, (gate_up, down), sizes["k"], activation, loras)
        with pytest.raises(ValueError, match=message):
            experts_gated(x, gate_up, choice, weights, activation, loras[0], implementation="triton")
    with pytest.raises(ValueError, match="h is .*; its shape must be .rows, inner. with rows = "):
        experts_down(x[1:], down, choice)
    x, gate_up, down, _ = experts_case(5, 2, 4)
    for capability in ((8, 0), HOPPER):
        with interpreted(capability):
            assert experts_have_kernels(x, (gate_up, down), 2, "silu") == (capability == HOPPER)


@pytest.mark.parametrize("size", [300, 4096, 9001])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_a_token_is_chosen(size, draws, masks):
    """As by the definition, whose sums have another order; of equal largest logits the first; padding has no part. A
    row whose mask allows all tokens has the bits of rows without masks.
    """
    rows = 40
    logits = 3 * normal(rows, size + 7, dtype=jnp.float32)
    logits = logits.at[:, size:].set(50.0).at[3, 7].set(20.0).at[3, size - 5].set(20.0).at[5, 11:].set(-jnp.inf)
    heat, own = jnp.linspace(0.3, 2.0, rows), jnp.where(jnp.arange(rows) % 3 == 0, 1.0, 0.7)
    own = jnp.where(jnp.arange(rows) % 3 == 1, heat, own)
    uniform = jnp.where(jnp.arange(rows) % 4 == 3, -1.0, jnp.linspace(0.0, 0.999, rows)) if draws else None
    with interpreted():
        plain = chosen_token(logits, size, heat, own, uniform)
    words = None
    if masks:
        allowed = jax.random.bernoulli(jax.random.key(1), jnp.linspace(0.01, 0.9, rows)[:, None], (rows, size))
        allowed = allowed.at[:3].set(False).at[:3, size - 1].set(True).at[3:6].set(True).at[5, 3].set(False)
        bits = jnp.pad(allowed, ((0, 0), (0, -size % 32))).reshape(rows, -1, 32).astype(jnp.uint32)
        words = (bits << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    with interpreted():
        token, *numbers = chosen_token(logits, size, heat, own, uniform, words)
        rest = (None if array is None else array[4:6] for array in (uniform, words))
        few = chosen_token(logits[4:6], size, heat[4:6], own[4:6], *rest)
    assert dispatch.record["chosen_token"][0] == "triton"
    want = chosen_token(logits, size, heat, own, uniform, words, implementation="reference")
    if masks:
        assert (token[:3] == size - 1).all() and allowed[jnp.arange(rows), token].all()
        for with_masks, without in zip((token, *numbers), plain, strict=True):
            np.testing.assert_array_equal(with_masks[3:5], without[3:5])
    np.testing.assert_array_equal(token, want[0])
    for got, expected in zip(numbers, want[1:], strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    for alone, whole in zip(few, (token, *numbers), strict=True):
        np.testing.assert_array_equal(alone, whole[4:6])
    assert token[3] == (7 if not draws else want[0][3]) and token[3] < size
    if draws and not masks:
        assert (token != logits[:, :size].argmax(-1)).sum() > 15


@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_cache_has_the_dtype_of_its_queries_or_fp8(dtype, cache):
    """In which all is rounded, which a kernel of another dtype would do once more."""
    keys = jax.ShapeDtypeStruct((2, 1, 64, 64), cache)
    with interpreted(HOPPER):
        refused = triton.placed_refusal(keys, dtype)
    rounded = dtype or cache
    supported = rounded in (jnp.bfloat16, jnp.float16) and cache in (rounded, jnp.float8_e4m3fn)
    assert (refused is None) == supported


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ranks", [(16, 16), (1, 33), (0, 8)])
def test_adapters_are_checked_by_their_own_ranks(ranks, gated, monkeypatch):
    checks, x = {}, normal(3, 512)
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: checks.update({call: compare}))
    monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
    weights = [normal(128, 512, seed=i, scale=0.05) for i in (1, 2)]
    loras = [
        LoraWeights(normal(rank, 512), normal(128, rank), gate=jnp.ones((3, rank)) if gated else None) if rank else None
        for rank in ranks
    ]
    with interpreted(HOPPER):
        products(x, weights, loras)
        gated_product(x, *weights, "gelu_tanh", loras)
        assert len(checks) == 2 and all(f"ranks {ranks[0]}, {ranks[1]}" in call for call in checks)
        for compare in checks.values():
            assert dispatch._difference(compare) is None
