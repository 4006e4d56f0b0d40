"""Products of few rows with codes, in Triton's interpreter: the numbers of `decode`, in 16 bits, and their sums."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assembly import assembled
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import interpreted

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NVFP4
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.gated import ACTIVATIONS
from jaxtune.pallas.quant_matmul import LoraWeights, coded, few_product, quant_matmul

HOPPER = (9, 0)


def nvfp4(divides: bool, by_row: bool):
    def encode(numbers):
        weight = NVFP4.encode(numbers)
        scale = weight.tensor_scale if divides else 1 / weight.tensor_scale
        if by_row:
            scale = scale * (1 + jnp.arange(len(numbers), dtype=jnp.float32)[:, None] % 3)
        return dataclasses.replace(weight, tensor_scale=scale, divides=divides)

    return encode


FORMATS = {
    "fp8 rows": lambda numbers: FP8.encode(numbers, ROW),
    "fp8 tiles": lambda numbers: FP8.encode(numbers, TILE),
    "fp8 matrix": lambda numbers: FP8.encode(numbers, MATRIX),
    "int8": Int8.encode,
    "nvfp4": nvfp4(True, False),
    "nvfp4 multiplied, by rows": nvfp4(False, True),
    "mxfp4": MXFP4.encode,
}


def least_columns(name: str) -> int:
    return 512 if name == "fp8 tiles" else 256


def normal(*shape, seed=0, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def near(got, x, weight):
    """Within the rounding of float32 sums and of the result."""
    x, decoded = np.asarray(x, np.float64), np.asarray(weight.decode(jnp.bfloat16), np.float64)
    exact = x @ decoded.T
    bound = np.abs(x) @ np.abs(decoded).T * 1e-6 + np.abs(exact) * 2.0**-8
    assert got.dtype == jnp.bfloat16 and (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@given(
    tokens=st.integers(1, 16),
    sizes=st.lists(st.sampled_from([128, 256]), min_size=1, max_size=4),
    steps=st.integers(1, 3),
    seed=st.integers(0, 100),
)
@settings(max_examples=4)
def test_products_are_those_of_decoded_weights(name, tokens, sizes, steps, seed):
    columns = steps * least_columns(name)
    weights = [FORMATS[name](normal(size, columns, seed=seed + i, scale=0.05)) for i, size in enumerate(sizes)]
    x = normal(tokens, columns, seed=seed + 9)
    with interpreted(HOPPER):
        assert coded.refusal(weights[:3], x.dtype, tokens) is None
        outs = quant_matmul(x, weights)
    for out, weight in zip(outs, weights, strict=True):
        near(out, x, weight)


def in_order(x, weight):
    """The product with the decoded weight: a float32 sum of each range of columns, 16 at a time, and the sum of these,
    all in ascending order.
    """
    x, decoded = np.asarray(x, np.float64), np.asarray(weight.decode(jnp.bfloat16), np.float64)
    result, size = np.zeros((len(x), len(decoded)), np.float32), x.shape[1] // coded.RANGES
    for begin in range(0, x.shape[1], size):
        total = np.zeros_like(result)
        for start in range(begin, begin + size, 16):
            total = (total + x[:, start : start + 16] @ decoded[:, start : start + 16].T).astype(np.float32)
        result = total if begin == 0 else result + total
    return result


TILES = [coded.Tile(16, 128, 3), coded.Tile(32, 128, 2), coded.Tile(16, 256, 2), coded.Tile(16, 64, 3)]


@pytest.mark.parametrize(
    ("name", "tile"),
    [(name, tile) for name in FORMATS for tile in TILES if coded.RANGES * tile.depth >= least_columns(name)],
    ids=str,
)
def test_each_tile_keeps_the_order_of_sums(name, tile):
    """So a row has the same bits alone and beside others."""
    columns = coded.RANGES * tile.depth * 3
    weights = [FORMATS[name](normal(128, columns, seed=i, scale=0.05)) for i in (1, 2)]
    x = normal(16, columns)
    with interpreted(HOPPER):
        for rows in (x[5:6], x[:7], x):
            for out, weight in zip(coded._products(rows, weights, tile), weights, strict=True):
                np.testing.assert_array_equal(out, in_order(rows, weight).astype(jnp.bfloat16))


@pytest.mark.parametrize("name", FORMATS)
@given(
    tokens=st.integers(1, 16),
    blocks=st.integers(1, 2),
    steps=st.integers(1, 3),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 100),
)
@settings(max_examples=3)
def test_the_activation_is_that_of_two_products(name, tokens, blocks, steps, activation, seed):
    """Rounded in the steps in which kernels of 16-bit weights round, within an ulp of exp."""
    columns = steps * least_columns(name)
    gate, up = (FORMATS[name](normal(128 * blocks, columns, seed=seed + i, scale=0.05)) for i in (0, 1))
    x = normal(tokens, columns, seed=seed + 9)
    with interpreted(HOPPER):
        got = few_product(x, [gate, up], activation)
    gate, up = (jnp.asarray(in_order(x, weight)).astype(jnp.bfloat16) for weight in (gate, up))
    assert got is not None and got.dtype == jnp.bfloat16
    want = np.float32(ACTIVATIONS[activation](gate) * up)
    np.testing.assert_allclose(np.float32(got), want, rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize("name", ["fp8 tiles", "int8", "nvfp4"])
@given(
    tokens=st.integers(1, 16),
    blocks=st.integers(1, 2),
    activation=st.sampled_from([None, "silu"]),
    ranks=st.lists(st.integers(0, 20), min_size=2, max_size=2).filter(any),
    gated=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=4)
def test_adapters_of_drawn_ranks(name, tokens, blocks, activation, ranks, gated, seed):
    """Their products, with a scale or each row's factors, are added before the activation; rank 0: none."""
    columns, draw = least_columns(name), np.random.default_rng(seed)
    weights = [FORMATS[name](normal(128 * blocks, columns, seed=seed + i, scale=0.05)) for i in (0, 1)]
    x, loras = normal(tokens, columns, seed=seed + 9), []
    for rank in ranks:
        gate = jnp.asarray(draw.integers(0, 3, (tokens, rank)), jnp.float32) if gated else None
        a, b = normal(rank, columns, seed=seed + 3, scale=0.05), normal(128 * blocks, rank, seed=seed + 4, scale=0.3)
        loras.append(LoraWeights(a, b, scale=0.5, gate=gate) if rank else None)
    with interpreted(HOPPER):
        got = few_product(x, weights, activation, loras)
    assert got is not None
    exact = [np.asarray(in_order(x, weight), np.float64) for weight in weights]
    for index, lora in enumerate(loras):
        if lora is not None:
            inner = np.float64(x) @ np.float64(lora.a).T * (np.float64(lora.gate) if gated else lora.scale)
            exact[index] += inner @ np.float64(lora.b).T
    one, other = (jnp.asarray(out, jnp.float32) for out in exact)
    want = ACTIVATIONS[activation](one) * other if activation else jnp.concatenate([one, other], axis=1)
    assert np.linalg.norm(np.float64(got) - np.float64(want)) <= 8e-3 * np.linalg.norm(np.float64(want))


def test_adapters_that_the_kernel_does_not_add():
    weight, x = FORMATS["int8"](normal(128, 512)), normal(2, 512)
    wide = LoraWeights(normal(65, 512), normal(128, 65))
    dora = LoraWeights(normal(8, 512), normal(128, 8), jnp.ones(128))
    with interpreted(HOPPER):
        assert few_product(x, [weight], None, [wide]) is None and few_product(x, [weight], None, [dora]) is None


def test_other_gated_products_have_no_such_kernel():
    gate, up, x = (normal(*shape, seed=i) for i, shape in enumerate([(128, 512), (128, 512), (2, 512)]))
    with interpreted(HOPPER):
        assert few_product(x, [gate, up], "silu") is None
        assert few_product(x, [Int8.encode(gate), FP8.encode(up, ROW)], "silu") is None
        assert few_product(x, [Int8.encode(gate), Int8.encode(up)], "relu_squared") is None
        assert few_product(x.astype(jnp.float16), [Int8.encode(gate), Int8.encode(up)], "silu") is None
        assert few_product(jnp.tile(x, (9, 1)), [Int8.encode(gate), Int8.encode(up)], "silu") is None
        assert few_product(x, [Int8.encode(gate)], "silu") is None
        assert few_product(x, [Int8.encode(gate), Int8.encode(jnp.tile(up, (2, 1)))], "silu") is None
        assert few_product(x, [Int8.encode(gate), Int8.encode(up)], "silu") is not None


def test_weights_of_several_kinds_with_adapters_and_biases():
    """Those of one kind share a kernel; a weight that has none, and one asked for by name, is decoded."""
    names = ["int8", "fp8 rows", "int8", "nvfp4"]
    weights = [FORMATS[name](normal(128, 512, seed=i, scale=0.05)) for i, name in enumerate(names)]
    weights.append(normal(96, 512, seed=5, scale=0.05))
    sizes = [weight.shape[0] for weight in weights]
    loras = [LoraWeights(normal(4, 512, seed=6), normal(size, 4, seed=7, scale=0.1), scale=0.5) for size in sizes]
    biases = [normal(size, seed=8) for size in sizes]
    x = normal(2, 3, 512)
    want = quant_matmul(x, weights, loras, biases, implementation="reference")
    calls = []
    with interpreted(HOPPER), pytest.MonkeyPatch.context() as patch:
        products = coded.products
        patch.setattr(coded, "products", lambda x, weights: calls.append(len(weights)) or products(x, weights))
        outs = quant_matmul(x, weights, loras, biases)
        quant_matmul(x, weights, implementation="reference")
    assert calls == [2, 1, 1]
    for out, one in zip(outs, want, strict=True):
        np.testing.assert_allclose(np.float32(out), np.float32(one), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("capability", "tokens", "dtype", "shape", "reason"),
    [
        ((8, 0), 1, jnp.bfloat16, (128, 512), "Hopper"),
        (HOPPER, 17, jnp.bfloat16, (128, 512), "17 rows"),
        (HOPPER, 0, jnp.bfloat16, (128, 512), "0 rows"),
        (HOPPER, 1, jnp.float16, (128, 512), "float16"),
        (HOPPER, 1, jnp.bfloat16, (120, 512), "multiples of 16 and 512"),
        (HOPPER, 1, jnp.bfloat16, (128, 448), "multiples of 16 and 256"),
    ],
)
def test_refusals(capability, tokens, dtype, shape, reason):
    with interpreted(capability):
        assert reason in coded.refusal([Int8.encode(normal(*shape))], dtype, tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_each_form_of_the_kernel_is_checked(name, monkeypatch):
    """One row, up to 8 and up to 16 are other programs."""
    weight, texts = FORMATS[name](normal(128, 1024)), []
    monkeypatch.setattr(coded.dispatch, "first_use", lambda *words: texts.append(words[:3]))
    with interpreted(HOPPER):
        for tokens in range(1, 17):
            assert coded.refusal([weight], jnp.bfloat16, tokens) is None
    assert len(set(texts)) == len(set(texts[:1])) + len(set(texts[1:8])) + len(set(texts[8:])) == 3


# Ranks of two weights; whether each row has its own adapter; columns; activation.
ADAPTED = {
    "one rank": ((16, 16), False, 1024, None),
    "other ranks": ((1, 33), False, 1024, None),
    "one weight without": ((0, 8), False, 1024, None),
    "columns of another depth": ((16, 16), False, 1280, None),
    "own adapters": ((8, 16), True, 1024, None),
    "gated": ((8, 16), False, 1024, "silu"),
    "gated, own adapters": ((8, 16), True, 1024, "gelu_tanh"),
}


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_each_form_of_adapters_is_checked(name, monkeypatch):
    """By a case of the same ranks, which reads columns in the same steps, and more of them than are in flight."""
    checks, calls = {}, []
    monkeypatch.setattr(coded.dispatch, "first_use", lambda op, kind, call, compare: checks.update({call: compare}))
    with interpreted(HOPPER), jax.disable_jit():
        run = compat.triton_graph_call
        monkeypatch.setattr(
            compat,
            "triton_graph_call",
            lambda kernel, *a, **call: calls.append((kernel.__name__, call)) or run(kernel, *a, **call),
        )
        for index, (ranks, own, columns, activation) in enumerate(ADAPTED.values(), 1):
            weights = [FORMATS[name](normal(128, columns))] * 2
            loras = [
                LoraWeights(normal(n, columns), normal(128, n), gate=jnp.ones((3, n)) if own else None) if n else None
                for n in ranks
            ]
            assert coded.refusal(weights, jnp.bfloat16, 3, activation, loras) is None
            assert len(checks) == index
            calls.clear()
            assert dispatch._difference([*checks.values()][-1]) is None
            (first, thin), (second, product) = calls
            assert (first, second) == ("thin_kernel", "coded_kernel") and thin["GATED"] == own
            assert thin["DEPTH"] == (512 if columns % 512 == 0 else 256)
            assert thin["INNER"] // thin["DEPTH"] > thin["STAGES"]
            assert (product["FIRST_RANK"], product["SECOND_RANK"]) == ranks == (thin["FIRST_RANK"], thin["SECOND_RANK"])


# ---- assembly, which the interpreter does not run


def test_assembly_decodes_every_word_of_codes():
    from jaxtune.pallas.formats.mxfp4 import TABLE
    from jaxtune.pallas.quant_matmul import coded_kernels

    words = np.arange(65536, dtype=np.uint32)
    others = np.random.default_rng(2).permutation(words)
    scales = np.random.default_rng(0).normal(size=(2, 65536)).astype(np.float32)
    for scaled in (True, False):
        factors = scales * np.float32(64) if scaled else scales
        operands = {"$4": words, "$5": others, "$6": factors[0].view(np.uint32), "$7": factors[1].view(np.uint32)}
        registers = assembled(coded_kernels.e2m1_ptx(scaled), operands)
        for index, one in enumerate((words, others)):
            got = np.stack([registers[f"${2 * index + half}"] for half in range(2)], -1).view(np.uint16)
            codes = np.stack([one >> 4 * i & 15 for i in range(4)], -1)
            want = (TABLE[codes] * scales[index][:, None]).astype(jnp.bfloat16)
            np.testing.assert_array_equal(got, want.view(np.uint16))


def test_assembly_decodes_every_byte_and_divides_every_scale():
    from jaxtune.pallas.quant_matmul import coded_kernels

    draw = np.random.default_rng(0)
    numbers = draw.integers(-128, 128, (4096, 4)).astype(np.int8)
    codes = draw.permutation(np.arange(4096, dtype=np.int32) % 256).astype(np.uint8)
    codes = np.where(codes & 127 == 127, 0, codes).astype(np.uint8).reshape(-1, 4)  # without NaN
    factors = draw.uniform(-6, 6, 4096).astype(np.float32)
    for ptx, bytes_of_codes, wide in [
        (coded_kernels.int8_ptx(), numbers, lambda scale: numbers.astype(np.float32) * scale * np.float32(1 / 127)),
        (coded_kernels.fp8_ptx(), codes, lambda scale: codes.view(jnp.float8_e4m3fn).astype(np.float32) * scale),
    ]:
        scales = factors[: len(bytes_of_codes)]
        operands = {"$2": bytes_of_codes.view(np.uint32)[:, 0], "$3": scales.view(np.uint32)}
        registers = assembled(ptx, operands)
        got = np.stack([registers["$0"], registers["$1"]], -1).view(np.uint16)
        np.testing.assert_array_equal(got, wide(scales[:, None]).astype(jnp.bfloat16).view(np.uint16))
    scales = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)[:, None]
    divisors = np.float32(10) ** np.random.default_rng(1).uniform(-6, 8, 2000).astype(np.float32)[None]
    scales, divisors = (np.ascontiguousarray(array) for array in np.broadcast_arrays(scales, divisors))
    operands = {"$1": scales, "$2": divisors, "$3": np.float32(1) / divisors}
    registers = assembled(coded_kernels.QUOTIENT_PTX, {name: array.view(np.uint32) for name, array in operands.items()})
    np.testing.assert_array_equal(registers["$0"].view(np.float32), scales / divisors)
