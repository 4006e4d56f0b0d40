"""Tensors that four-bit formats may stumble over, made from seeds: tests and parity scripts make the same ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tiny import CONFIGS

# Rows of whole blocks, as bitsandbytes' CPU kernel wants them.
CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 128}


def cases() -> dict[str, np.ndarray]:
    """{name: float32 array}. Rows of those that are named `rows ...` are multiples of 64: see oracle_decodes."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape).astype(np.float32)

    some_zero = normal(24, 64)
    some_zero[::5] = 0
    one_large = normal(8, 128)
    one_large[3, 70] = 1e4
    on_bounds = np.repeat(np.float32([1.0, -0.8480964, 0.03979015, -0.045525018]), 32).reshape(2, 64)
    return {
        "rows normal": normal(136, 128),  # a nested block and a bit
        "rows bfloat16": normal(64, 192).astype(ml_dtypes.bfloat16).astype(np.float32),
        "rows zero blocks": some_zero,
        "rows all zero": np.zeros((4, 64), np.float32),
        "rows 1e-30": normal(8, 64) * np.float32(1e-30),
        "rows 3e4": normal(8, 64) * np.float32(3e4),
        "rows outlier": one_large,
        "rows on bounds": on_bounds,
        "rows constant": np.full((2, 64), -0.125, np.float32),
        "odd": normal(7, 13),
        "one": np.array([[-3.5]], np.float32),
        "short": normal(3, 10),
        "short zero block": np.concatenate([normal(64), np.zeros(5, np.float32)]),
    }
