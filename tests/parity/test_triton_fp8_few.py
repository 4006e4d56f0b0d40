"""Products of few rows in FP8, in Triton's interpreter: rounded as fp8_product rounds, and their sums."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_numbers import near
from triton_interpreter import interpreted

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.decode.few_rows import added_norm, added_norm_coded
from jaxtune.pallas.formats import FP8
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_few, fp8_product

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
    ranks=st.none() | st.lists(st.integers(0, 33), min_size=3, max_size=3).filter(any),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_drawn_sizes(rows, sizes, steps, block, activation, ranks, gated, seed):
    """Those of the decoded codes plus the adapters', and each row has the bits that it has alone."""
    draw = np.random.default_rng(seed)
    sizes = sizes if activation is None else [sizes[0]] * 2
    sizes = [128 * size for size in sizes]
    x, columns = drawn(draw, rows, 128 * steps), 128 * steps
    weights = [FP8.encode(0.05 * drawn(draw, size, columns), block) for size in sizes]
    with interpreted(HOPPER):
        loras = adapters(draw, ranks, sizes, columns, rows if gated else None)
        assert fp8_few.refusal(weights, jnp.bfloat16, rows, activation, loras) is None
        coded = fp8_few.rounded(x, block == TILE)
        out = fp8_few.product(coded, weights, activation, x, loras)
        last = fp8_few.Coded(coded.codes[-1:], coded.scales[..., -1:])
        last_loras = [lora and dataclasses.replace(lora, gate=lora.gate[-1:] if gated else None) for lora in loras]
        alone = fp8_few.product(last, weights, activation, x[-1:], last_loras)
    assert out.shape == (fp8_few.splits_of(weights, activation), rows, sizes[0] if activation else sum(sizes))
    np.testing.assert_array_equal(np.float32(out[:, -1:]), np.float32(alone))
    scales = jnp.repeat(coded.scales.T, 128, axis=1) if block == TILE else coded.scales[:, None]
    wide = coded.codes.astype(jnp.float32) * scales
    exact = [dispatch.exactly(jnp.matmul)(wide, weight.decode(jnp.float32).T) for weight in weights]
    for index, lora in enumerate(loras):
        if lora is not None:
            inner = np.float64(x) @ np.float64(lora.a).T * (np.float64(lora.gate) if gated else lora.scale)
            exact[index] += jnp.asarray(inner @ np.float64(lora.b).T, jnp.float32)
    exact = ACTIVATIONS[activation](exact[0]) * exact[1] if activation else jnp.concatenate(exact, axis=1)
    near(out.astype(jnp.float32).sum(0), exact, 8e-3 if out.dtype == jnp.bfloat16 else 1e-5)


def adapters(draw, ranks, sizes, columns: int, gated_rows: int | None) -> list[LoraWeights | None]:
    """Of rank 0: None. gated_rows: factors of so many rows in place of a scale; a third of them is 0."""
    if ranks is None or not any(ranks[: len(sizes)]):
        return []
    return [
        LoraWeights(
            0.05 * drawn(draw, rank, columns),
            0.3 * drawn(draw, size, rank),
            scale=1.5,
            gate=None
            if gated_rows is None
            else jnp.asarray(draw.integers(0, 3, (gated_rows, rank)) * 0.75, jnp.float32),
        )
        if rank
        else None
        for rank, size in zip(ranks, sizes, strict=False)
    ]


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


# Tokens; sizes of weights; columns; activation; ranks; whether each row has its own adapter.
CHECKED = {
    "one sum": (1, (6144,), 512, None, (), False),
    "splits": (1, (256,), 1024, None, (), False),
    "three weights": (16, (256, 128, 128), 768, None, (), False),
    "a wide row": (2, (256,), 4224, None, (), False),
    "gated": (64, (256, 256), 512, "silu", (), False),
    "a block of rows": (100, (256, 256), 512, "gelu_tanh", (16, 16), False),
    "two blocks of rows": (129, (256, 256), 512, "silu", (8, 0), False),
    "odd ranks": (3, (128, 128, 128), 640, None, (1, 0, 33), False),
    "adapters of rows": (3, (128, 256), 256, None, (8, 33), True),
    "gated, adapters of rows": (16, (256, 256), 384, "silu", (5, 16), True),
}


@pytest.mark.parametrize("block", [ROW, MATRIX, TILE])
@pytest.mark.parametrize("case", CHECKED)
def test_the_check_at_first_use(case, block, monkeypatch):
    """It has the kernels' settings in the call but sizes, and more steps than are in flight."""
    tokens, sizes, columns, activation, ranks, gated = CHECKED[case]
    checks, runs = [], []
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: checks.append(compare))
    weights = [FP8.encode(jnp.ones((size, columns), jnp.bfloat16), block) for size in sizes]
    loras = adapters(np.random.default_rng(0), ranks or None, sizes, columns, tokens if gated else None)
    x = jnp.ones((tokens, columns), jnp.bfloat16)
    with interpreted(HOPPER), jax.disable_jit():
        run = compat.triton_graph_call
        assert fp8_few.refusal(weights, jnp.bfloat16, tokens, activation, loras) is None

        def recorded(kernel, *arguments, **call):
            runs.append((kernel.__name__, call))
            return run(kernel, *arguments, **call)

        monkeypatch.setattr(compat, "triton_graph_call", recorded)
        for got, want in zip(*checks[0](), strict=True):
            near(got, want, 1e-2)
        checked, runs[:] = list(runs), []
        fp8_few.product(fp8_few.rounded(x, block == TILE), weights, activation, x, loras)
    assert checks[1:] == []
    [product] = (call for kind, call in checked if kind == "few_product_kernel")
    assert product["INNER"] // product["DEPTH"] // product["SPLITS"] >= 2 * product["STAGES"] + 2
    for name, call in runs:
        same = [other for kind, other in checked if kind == name and form(other) == form(call)]
        assert same, name
        if name == "thin_kernel":
            assert same[0]["INNER"] // same[0]["DEPTH"] > call["STAGES"]


def form(call: dict) -> dict:
    """What decides a kernel's code, but for sizes and factors."""
    sizes = {"COUNT", "INNER", "FIRST", "SECOND", "THIRD", "SIZE", "WIDTH"}
    words = {key: value for key, value in call.items() if key not in sizes and "SCALE" not in key}
    if "SPLITS" in call:
        words |= {
            "several": call["COUNT"] > call["TOKENS"],
            "weights": [call[n] > 0 for n in ("SECOND", "THIRD")],
        }
    return words


@settings(max_examples=12, deadline=None)
@given(columns=st.integers(1, 1000).filter(lambda n: n % 128), rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_blocks_divide_a_row(columns, rows, seed):
    draw = np.random.default_rng(seed)
    x, sums = drawn(draw, rows, columns), jnp.zeros((1, rows, columns), jnp.float32)
    with interpreted(HOPPER):
        for run in (
            lambda: fp8_few.rounded(x, True),
            lambda: fp8_few.Coded.of(x, True),
            lambda: added_norm_coded(x, sums, x[0], True, eps=1e-5),
            lambda: added_norm_coded(x, sums, x[0], True, eps=1e-5, implementation="reference"),
        ):
            with pytest.raises(ValueError, match=f"rows of {columns} numbers in blocks of 128"):
                run()


def test_adapters_need_the_rows_as_they_were():
    weights = [FP8.encode(jnp.ones((128, 256), jnp.bfloat16), ROW)]
    with interpreted(HOPPER):
        coded, loras = (
            fp8_few.rounded(jnp.ones((1, 256), jnp.bfloat16), False),
            adapters(np.random.default_rng(0), [4], (128,), 256, None),
        )
        with pytest.raises(ValueError, match="unrounded"):
            fp8_few.product(coded, weights, loras=loras)


@pytest.mark.parametrize("blocks", [None, False, True])
@pytest.mark.parametrize("hidden", [256, 2176])
def test_a_norm_is_checked_with_as_many_warps(hidden, blocks, monkeypatch):
    checks, warps = [], []
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, call, compare: checks.append(compare))
    operands = [jnp.ones(shape, jnp.bfloat16) for shape in ((1, hidden), (1, 1, hidden), (hidden,))]
    with interpreted(HOPPER), jax.disable_jit():
        run = compat.triton_graph_call
        monkeypatch.setattr(
            compat, "triton_graph_call", lambda *a, **settings: warps.append(settings["warps"]) or run(*a, **settings)
        )
        if blocks is None:
            added_norm(*operands, eps=1e-5)
        else:
            added_norm_coded(*operands, blocks, eps=1e-5)
        for got, want in zip(*checks[0](), strict=True):
            near(got, want, 1e-2)
    assert warps == [8 if hidden > 2048 else 4] * 2
