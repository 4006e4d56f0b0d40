"""Inline PTX in numpy, for many threads at a time."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np


def _value(operand: str, registers):
    if operand.startswith(("0x", "0f")):
        return np.uint32(int(operand[2:], 16))
    return np.uint32(operand) if operand.isdigit() else registers[operand]


def _number(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def _halves(bits, dtype=jnp.bfloat16):
    return np.ascontiguousarray(np.asarray(bits, np.uint32)[..., None]).view(dtype).astype(np.float32)


def _permuted(low, high, selector):
    source = [(bits >> 8 * i) & 255 for bits in (low, high) for i in range(4)]
    indices = [(selector >> 4 * i) & 15 for i in range(4)]
    assert all((index < 8).all() for index in indices)
    return np.stack([np.choose(index, source) << 8 * i for i, index in enumerate(indices)]).sum(0, dtype=np.uint32)


def _two(numbers, dtype=jnp.bfloat16):
    return np.ascontiguousarray(numbers.astype(dtype)).view(np.uint32)[..., 0]


def _codes(pair):
    """Two e4m3 of 16 bits."""
    codes = np.stack([pair & 255, pair >> 8 & 255], -1).astype(np.uint8)
    return codes.view(jnp.float8_e4m3fn).astype(np.float32)


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "mul.rn.f32": lambda a, b: (_number(a) * _number(b)).view(np.uint32),
    "add.rn.f32": lambda a, b: (_number(a) + _number(b)).view(np.uint32),
    "neg.f32": lambda a: (-_number(a)).view(np.uint32),
    # float64 has the product exactly
    "fma.rn.f32": lambda a, b, c: (np.float64(_number(a)) * _number(b) + _number(c)).astype(np.float32).view(np.uint32),
    "mul.rn.f16x2": lambda a, b: _two(_halves(a, np.float16) * _halves(b, np.float16), np.float16),
    "cvt.rn.bf16x2.f32": lambda a, b: _two(np.stack([_number(b), _number(a)], -1)),
    "cvt.rn.f16x2.e4m3x2": lambda a: _two(_codes(a), np.float16),
    "cvt.f32.f16": lambda a: (
        np.asarray(a, np.uint32).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ),
}


def assembled(ptx: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The registers, uint32 each, after inline PTX."""
    registers = dict(registers)
    for line in ptx.strip().removeprefix("{").removesuffix("}").replace("\n", "").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if not operation or operation.startswith(".reg"):
            continue
        halves = re.match(r"\{(\w+), (\w+)\}, (\S+)$", operands)
        with np.errstate(all="ignore"):
            if halves:
                word = _value(halves[3], registers)
                registers |= {halves[1]: word & 0xFFFF, halves[2]: word >> 16}
            else:
                target, *sources = (operand.strip() for operand in operands.split(","))
                registers[target] = _OPERATIONS[operation](*(_value(source, registers) for source in sources))
    return registers
