"""Products of few rows with codes, in Triton's interpreter: the numbers of `decode`, in 16 bits, and their sums."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import interpreted

from jaxtune.pallas.formats import FP8, MXFP4, NVFP4
from jaxtune.pallas.formats.fp8 import MATRIX, ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.quant_matmul import LoraWeights, coded, quant_matmul

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
    columns = steps * 512
    weights = [FORMATS[name](normal(size, columns, seed=seed + i, scale=0.05)) for i, size in enumerate(sizes)]
    x = normal(tokens, columns, seed=seed + 9)
    with interpreted(HOPPER):
        assert coded.refusal(weights[:3], x.dtype, tokens) is None
        outs = quant_matmul(x, weights)
    for out, weight in zip(outs, weights, strict=True):
        near(out, x, weight)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("many_rows", [0, 1 << 20])
def test_each_tile(name, many_rows, monkeypatch):
    """A row has the same bits alone and beside others."""
    monkeypatch.setattr(coded, "_MANY_ROWS", many_rows)
    weights, x = [FORMATS[name](normal(256, 1024, seed=i, scale=0.05)) for i in (1, 2)], normal(8, 1024)
    with interpreted(HOPPER):
        outs, alone = coded.products(x, weights), coded.products(x[5:6], weights)
    for out, row, weight in zip(outs, alone, weights, strict=True):
        near(out, x, weight)
        np.testing.assert_array_equal(out[5:6], row)


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
        (HOPPER, 1, jnp.bfloat16, (120, 512), "multiples of 16 and 128"),
        (HOPPER, 1, jnp.bfloat16, (128, 448), "multiples of 16 and 128"),
    ],
)
def test_refusals(capability, tokens, dtype, shape, reason):
    with interpreted(capability):
        assert reason in coded.refusal([Int8.encode(normal(*shape))], dtype, tokens)


# ---- assembly, which the interpreter does not run


def assembled(ptx: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The registers after inline PTX, computed in numpy; uint32 each, for many threads at a time."""
    registers = dict(registers)

    def value(operand: str):
        if operand.startswith(("0x", "0f")):
            return np.uint32(int(operand[2:], 16))
        return np.uint32(operand) if operand.isdigit() else registers[operand]

    def number(bits):
        return np.asarray(bits, np.uint32).view(np.float32)

    def halves(bits):
        return np.asarray(bits, np.uint32)[..., None].view(jnp.bfloat16).astype(np.float32)

    def permuted(low, high, selector):
        source = [(bits >> 8 * i) & 255 for bits in (low, high) for i in range(4)]
        indices = [(selector >> 4 * i) & 15 for i in range(4)]
        assert all((index < 8).all() for index in indices)
        return np.stack([np.choose(index, source) << 8 * i for i, index in enumerate(indices)]).sum(0, dtype=np.uint32)

    def bfloat16s(numbers):
        return np.ascontiguousarray(numbers.astype(jnp.bfloat16)).view(np.uint32)[..., 0]

    operations = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "xor.b32": lambda a, b: a ^ b,
        "shl.b32": lambda a, b: a << b,
        "shr.b32": lambda a, b: a >> b,
        "prmt.b32": permuted,
        "mul.rn.f32": lambda a, b: (number(a) * number(b)).view(np.uint32),
        "add.rn.f32": lambda a, b: (number(a) + number(b)).view(np.uint32),
        "neg.f32": lambda a: (-number(a)).view(np.uint32),
        # float64 has the product exactly
        "fma.rn.f32": lambda a, b, c: (
            (np.float64(number(a)) * number(b) + number(c)).astype(np.float32).view(np.uint32)
        ),
        "fma.rn.bf16x2": lambda a, b, c: bfloat16s(halves(a) * halves(b) + halves(c)),
        "cvt.rn.bf16x2.f32": lambda a, b: bfloat16s(np.stack([number(b), number(a)], -1)),
    }
    for line in ptx.replace("{", "").replace("}", "").replace("\n", "").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation and not operation.startswith(".reg"):
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = operations[operation](*map(value, sources))
    return registers


def test_assembly_decodes_every_word_of_codes():
    from jaxtune.pallas.formats.mxfp4 import TABLE
    from jaxtune.pallas.quant_matmul import coded_kernels

    words = np.arange(65536, dtype=np.uint32)
    codes = np.stack([words >> 4 * i & 15 for i in range(4)], -1)
    scales = np.random.default_rng(0).normal(size=65536).astype(np.float32)
    exponents = np.random.default_rng(1).integers(100, 150, 65536).astype(np.uint32)
    cases = [
        (coded_kernels.e2m1_ptx(False), scales.view(np.uint32), scales),
        (coded_kernels.e2m1_ptx(True), exponents << 23 | exponents << 7, np.exp2(exponents - 127.0).astype(np.float32)),
    ]
    for ptx, operand, factors in cases:
        registers = assembled(ptx, {"$2": words, "$3": operand})
        got = np.stack([registers["$0"], registers["$1"]], -1).view(np.uint16)
        np.testing.assert_array_equal(got, (TABLE[codes] * factors[:, None]).astype(jnp.bfloat16).view(np.uint16))


def test_assembly_decodes_every_byte_and_divides_every_scale():
    from jaxtune.pallas.quant_matmul import coded_kernels

    numbers = np.random.default_rng(0).integers(-128, 128, (4096, 4)).astype(np.int8)
    registers = assembled(coded_kernels.int8_ptx(), {"$4": numbers.view(np.uint32)[:, 0]})
    got = np.stack([registers[f"${i}"].view(np.float32) for i in range(4)], -1)
    np.testing.assert_array_equal(got, numbers.astype(np.float32))
    scales = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)[:, None]
    divisors = np.float32(10) ** np.random.default_rng(1).uniform(-6, 8, 2000).astype(np.float32)[None]
    scales, divisors = (np.ascontiguousarray(array) for array in np.broadcast_arrays(scales, divisors))
    operands = {"$1": scales, "$2": divisors, "$3": np.float32(1) / divisors}
    registers = assembled(coded_kernels.QUOTIENT_PTX, {name: array.view(np.uint32) for name, array in operands.items()})
    np.testing.assert_array_equal(registers["$0"].view(np.float32), scales / divisors)
