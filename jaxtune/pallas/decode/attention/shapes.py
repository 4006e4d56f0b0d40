"""Decoding steps of real models, for the benchmark of decode attention."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One decoding step, whose rows' lengths are spread evenly from `shortest` to `longest`."""

    name: str  # its name in reports
    rows: int  # rows of the batch
    shortest: int = 200  # tokens of the shortest row, the newest included
    longest: int = 1200  # tokens of the longest row, the newest included
    capacity: int = 1280  # tokens for which the cache has room
    heads: int = 32  # query heads
    kv_heads: int = 8  # key and value heads
    dim: int = 128  # size of a head
    window: int | None = None  # sliding window in tokens, or None
    soft_cap: float | None = None  # cap on scores, or None
    sinks: bool = False  # whether heads have sinks

    def lengths(self) -> np.ndarray:
        """int32[rows] in random order, the same at every call, the newest token included."""
        spread = np.linspace(self.shortest, self.longest, self.rows).round().astype(np.int32)
        return np.random.default_rng(0).permutation(spread)

    def live_bytes(self) -> int:
        """Bytes of the 16-bit keys and values that the rows see, which a kernel must read."""
        visible_tokens = np.minimum(self.lengths(), min(self.window or self.capacity, self.capacity))
        return int(visible_tokens.sum()) * self.kv_heads * self.dim * 2 * 2


CASES = (
    Case("64 rows", 64),
    Case("128 rows", 128),
    Case("256 rows", 256),
    Case("1 row of 700", 1, 700, 700),
    Case("1 row of 32,768", 1, 32768, 32768, 32768),
    Case("8 rows of 8,192", 8, 8192, 8192, 8192),
    Case("64 rows, capacity 8,192", 64, capacity=8192),
    Case("64 rows, head dim 64, sinks", 64, heads=64, dim=64, sinks=True),
    Case("64 rows, head dim 64, window 128", 64, heads=64, dim=64, capacity=128, window=128, sinks=True),
    Case("64 rows, head dim 96", 64, heads=32, kv_heads=32, dim=96),
    Case("64 rows, head dim 256, soft cap", 64, heads=8, kv_heads=4, dim=256, soft_cap=50.0),
    Case("64 rows, one query head a KV head", 64, heads=16, kv_heads=16),
)
