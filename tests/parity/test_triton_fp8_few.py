"""Products of few rows in FP8, in Triton's interpreter: rounded as fp8_product rounds, and their sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_numbers import near
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.decode.few_rows import added_norm, added_norm_coded
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import fp8_few, fp8_product

HOPPER = (9, 0)


def drawn(draw, *shape):
    return jnp.asarray(draw.standard_normal(shape), jnp.bfloat16)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 9),
    by_blocks=st.booleans(),
    special=st.sampled_from([None, 0.0, np.nan, np.inf, 1e-38]),
    seed=st.integers(0, 99),
)
def test_rows_are_rounded_as_in_training(rows, blocks, by_blocks, special, seed):
    draw = np.random.default_rng(seed)
    x = drawn(draw, rows, 128 * blocks)
    if special is not None:
        x = x.at[0].set(special) if special == 0 else x.at[0, 5].set(special)
    with interpreted(HOPPER):
        got = fp8_few.rounded(x, by_blocks)
    codes, scales = fp8_product.rounded(x, by_blocks)
    expected = scales.T if by_blocks else scales[:, 0]
    np.testing.assert_array_equal(got.scales, expected)
    sure = np.isfinite(np.asarray(scales)).all(1)
    np.testing.assert_array_equal(np.float32(got.codes)[sure], np.float32(codes)[sure])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 256),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    steps=st.integers(1, 6),
    block=st.sampled_from([ROW, MATRIX, TILE]),
    activation=st.sampled_from([None, "silu", "gelu_tanh"]),
    seed=st.integers(0, 99),
)
def test_products_of_drawn_sizes(rows, sizes, steps, block, activation, seed):
    """Those of the decoded codes, and each row has the bits that it has alone."""
    draw = np.random.default_rng(seed)
    sizes = sizes if activation is None else [sizes[0]] * 2
    sizes = [128 * size for size in sizes]
    x, columns = drawn(draw, rows, 128 * steps), 128 * steps
    weights = [FP8.encode(0.05 * drawn(draw, size, columns), block) for size in sizes]
    with interpreted(HOPPER):
        assert fp8_few.refusal(weights, jnp.bfloat16, rows, activation) is None
        coded = fp8_few.rounded(x, block == TILE)
        out = fp8_few.product(coded, weights, activation)
        last = fp8_few.Coded(coded.codes[-1:], coded.scales[..., -1:])
        alone = fp8_few.product(last, weights, activation)
    assert out.shape == (fp8_few.splits_of(weights, activation), rows, sizes[0] if activation else sum(sizes))
    np.testing.assert_array_equal(np.float32(out[:, -1:]), np.float32(alone))
    scales = jnp.repeat(coded.scales.T, 128, axis=1) if block == TILE else coded.scales[:, None]
    wide = coded.codes.astype(jnp.float32) * scales
    exact = [dispatch.exactly(jnp.matmul)(wide, weight.decode(jnp.float32).T) for weight in weights]
    exact = ACTIVATIONS[activation](exact[0]) * exact[1] if activation else jnp.concatenate(exact, axis=1)
    near(out.astype(jnp.float32).sum(0), exact, 8e-3 if out.dtype == jnp.bfloat16 else 1e-5)


def test_splits_follow_from_the_weights():
    def weight(out, columns):
        return jax.eval_shape(lambda: FP8.encode(jnp.zeros((out, columns), jnp.bfloat16), ROW))

    assert fp8_few.splits_of([weight(4096, 4096)], None) == 2
    assert fp8_few.splits_of([weight(4096, 14336)], None) == 2
    assert fp8_few.splits_of([weight(4096, 4096), weight(1024, 4096), weight(1024, 4096)], None) == 1
    assert fp8_few.splits_of([weight(14336, 4096)] * 2, "silu") == 1


@pytest.mark.parametrize(
    ("rows", "sizes", "columns", "activation", "said"),
    [
        (257, (128,), 256, None, "257 rows"),
        (1, (96,), 256, None, "multiples of 64"),
        (1, (128,), 192, None, "multiples of 64 and 128"),
        (1, (128, 256), 256, "silu", "activation"),
        (1, (128,), 256, "silu", "activation"),
        (1, (128,), 16512, None, "16384"),
    ],
)
def test_what_is_refused(rows, sizes, columns, activation, said):
    weights = [FP8.encode(jnp.zeros((size, columns), jnp.bfloat16), ROW) for size in sizes]
    with interpreted(HOPPER):
        assert said in fp8_few.refusal(weights, jnp.bfloat16, rows, activation)
    with interpreted((8, 9)):
        assert "Hopper" in fp8_few.refusal(weights, jnp.bfloat16, 1)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    splits=st.integers(1, 3),
    blocks=st.booleans(),
    float32=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_norm_is_rounded_where_it_is_made(rows, columns, splits, blocks, float32, seed):
    """The codes of the norm that the same kernel writes, which is that of the kernel without codes."""
    draw = np.random.default_rng(seed)
    x, weight = drawn(draw, rows, 128 * columns), drawn(draw, 128 * columns)
    sums = jnp.asarray(draw.standard_normal((splits, rows, 128 * columns)), jnp.float32)
    with interpreted(HOPPER):
        plain = added_norm(x, sums, weight, eps=1e-5, float32=float32)
        added, normed, coded = added_norm_coded(x, sums, weight, blocks, eps=1e-5, float32=float32)
        apart = fp8_few.rounded(normed, blocks)
    assert dispatch.record["added_norm"][0] == "triton"
    for got, want in zip((added, normed, *coded), (*plain, *apart), strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))
    *_, reference = added_norm_coded(x, sums, weight, blocks, eps=1e-5, float32=float32, implementation="reference")
    near(coded.decode(), reference.decode(), 0.02)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("block", [ROW, MATRIX, TILE])
@pytest.mark.parametrize("tokens", [1, 256])
def test_the_check_at_first_use(tokens, block, activation, monkeypatch):
    checked = []

    def check(op, name, call, compare):
        checked.append(call)
        for got, want in zip(*compare(), strict=True):
            near(got, want, 1e-2)

    monkeypatch.setattr(dispatch, "first_use", check)
    weights = [FP8.encode(jnp.ones((256, 512), jnp.bfloat16), block)] * 2
    with interpreted(HOPPER), jax.disable_jit():
        assert fp8_few.refusal(weights, jnp.bfloat16, tokens, activation) is None
        added_norm_coded(
            *(jnp.ones(shape, jnp.bfloat16) for shape in ((1, 256), (1, 1, 256), (256,))), block == TILE, eps=1e-5
        )
    assert len(checked) == 2
