"""The Triton kernels over four-bit weights, in Triton's interpreter: the bits of decode, and products of few rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas.formats import FP4, NF4
from jaxtune.pallas.quant_matmul import triton

# Whole programs; a tail of blocks; a last block that is short; an odd number of elements; less than a block.
SHAPES = [(128, 64), (300, 96), (7, 333), (5, 7), (1, 3)]


def normal(*shape, seed=0, dtype=jnp.float16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_bits_are_those_of_decode(shape, double_quant, dtype):
    """Scales from 1e-4 to 1e3: a rounding that is left out, or one too many, shows."""
    scales = 10.0 ** jax.random.uniform(jax.random.key(1), (shape[0], 1), minval=-4, maxval=3)
    weight = NF4.encode(normal(*shape, dtype=jnp.float32) * scales, double_quant)
    with interpreted():
        got = triton.dequantize(weight, dtype)
    want = weight.decode(dtype)
    assert got.shape == shape and got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


def test_fp4_has_its_own_table():
    nf4 = NF4.encode(normal(16, 64), double_quant=False)
    weight = FP4(nf4.codes, nf4.absmax, None, None, None, nf4.shape, "float16")
    with interpreted():
        np.testing.assert_array_equal(triton.dequantize(weight), weight.decode())


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
@pytest.mark.parametrize("shape", [(40, 128), (33, 1088)])
def test_products_of_few_rows(shape, count, double_quant):
    weight = NF4.encode(normal(*shape, seed=2) * 0.02, double_quant)
    x = normal(count, shape[1], seed=3)
    exact = np.asarray(x, np.float64) @ np.asarray(weight.decode(jnp.float32), np.float64).T
    xla = np.asarray(jnp.einsum("mk,nk->mn", x, weight.decode(x.dtype), preferred_element_type=x.dtype), np.float64)
    with interpreted():
        got = triton.small_matmul(x, weight)
    assert got.shape == (count, shape[0]) and got.dtype == x.dtype
    error = np.linalg.norm(np.asarray(got, np.float64) - exact)
    assert error <= 2 * np.linalg.norm(xla - exact)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("shape", "count"), [((128, 1088), 17), ((64, 4096), 40)])
def test_products_of_some_dozen_rows(shape, count, double_quant):
    """The second shape's columns are divided among four programs. Codes are looked up as the interpreter can."""
    weight = NF4.encode(normal(*shape, seed=2) * 0.02, double_quant)
    x = normal(count, shape[1], seed=3)
    exact = np.asarray(x, np.float64) @ np.asarray(weight.decode(jnp.float32), np.float64).T
    xla = np.asarray(jnp.einsum("mk,nk->mn", x, weight.decode(x.dtype), preferred_element_type=x.dtype), np.float64)
    with interpreted((9, 0)):
        got = triton.few_matmul(x, weight)
    assert got.shape == (count, shape[0]) and got.dtype == x.dtype
    assert np.linalg.norm(np.asarray(got, np.float64) - exact) <= 2 * np.linalg.norm(xla - exact)


def emulated(ptx: str, word: int) -> list[int]:
    """The registers $0 to $3 after these instructions, of which there are four kinds, with $4 = word."""
    registers = {"$4": word}

    def value(operand):
        return registers[operand] if operand in registers else int(operand, 0)

    for line in ptx.split(";")[1:-1]:
        name, *operands = line.replace(",", " ").split()
        target, *given = operands[0], *map(value, operands[1:])
        if name == "prmt.b32":
            table = given[0] | given[1] << 32
            assert not given[2] & 0x8888, "a selector's upper bit would repeat a sign"
            nibbles = [given[2] >> 4 * place & 7 for place in range(4)]
            found = sum((table >> 8 * nibble & 255) << 8 * place for place, nibble in enumerate(nibbles))
        else:
            found = {
                "and.b32": lambda a, b: a & b,
                "shr.b32": lambda a, b: a >> b,
                "lop3.b32": lambda a, b, c, table: a & ~c | b & c if table == 0xD8 else None,
            }[name](*given)
        registers[target] = found
    return [registers[f"${number}"] for number in range(4)]


def test_the_instructions_that_decode_find_every_entry():
    from jaxtune.pallas.quant_matmul.triton_few_kernels import decoding_ptx

    ptx = decoding_ptx(NF4.table)
    entries = np.asarray(NF4.table, np.float32).astype(jnp.bfloat16).view(np.uint16)
    for byte in range(256):
        four = np.array([byte, 255 - byte, byte ^ 0x5A, 17 * (byte & 15)], np.uint8)
        found = np.array(emulated(ptx, int(four.view("<u4")[0])), np.uint32).view(np.uint16)
        np.testing.assert_array_equal(found[:4], entries[four >> 4])
        np.testing.assert_array_equal(found[4:], entries[four & 15])
