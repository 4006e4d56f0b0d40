"""Attention's shapes in real models (CASES, 32,768 tokens each), and rows of documents of realistic lengths."""

from __future__ import annotations

import dataclasses

import numpy as np

SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one call of attention."""

    name: str  # its name in reports
    rows: int  # rows of the batch
    length: int  # tokens of a row
    heads: int = 32  # query heads
    kv_heads: int = 8  # key and value heads
    dim: int = 128  # size of a head
    # None: every row is one document; a number: each row has this number of equal documents; "log-normal": documents
    # of log-normal lengths
    documents: str | int | None = None
    window: int | None = None  # sliding window in tokens, or None
    soft_cap: float | None = None  # cap on scores, or None
    sinks: bool = False  # whether heads have sinks

    def segments(self) -> np.ndarray | None:
        """int32[rows, length] segment ids from 1 in each row, without padding, the same at every call; None if each row
        is one document. A number of documents must divide the length, or rows come out shorter.
        """
        if self.documents is None:
            return None
        if isinstance(self.documents, int):
            row = np.repeat(np.arange(1, self.documents + 1, dtype=np.int32), self.length // self.documents)
            return np.tile(row, (self.rows, 1))
        return log_normal_segments(self.rows, self.length, mean=512, sigma=0.8)


def log_normal_segments(rows: int, length: int, mean: float, sigma: float, seed: int = SEED) -> np.ndarray:
    """int32[rows, length] segment ids from 1 in each row, full of documents of log-normal lengths, as in instruction
    data.

      mean: tokens; sigma: standard deviation of a length's logarithm.
    """
    rng = np.random.default_rng(seed)
    segments = np.zeros((rows, length), np.int32)
    for row in range(rows):
        offset = number = 0
        while offset < length:
            number += 1
            size = int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 1, length - offset))
            segments[row, offset : offset + size] = number
            offset += size
    return segments


CASES = (
    Case("dense 2,048", 16, 2048),
    Case("dense 4,096", 8, 4096),
    Case("dense 8,192", 4, 8192),
    Case("dense 32,768", 1, 32768),
    Case("packed, log-normal mean 512", 4, 8192, documents="log-normal"),
    Case("32 documents a row", 4, 8192, documents=32),
    Case("64 documents a row", 4, 8192, documents=64),
    Case("window 4,096", 1, 32768, window=4096),
    Case("window 128", 1, 32768, window=128),
    Case("soft cap", 4, 8192, soft_cap=30.0),
    Case("sinks", 4, 8192, sinks=True),
    Case("head dim 64", 4, 8192, dim=64),
    Case("head dim 64, 2,048", 16, 2048, dim=64),
    Case("head dim 96, packed", 4, 8192, kv_heads=32, dim=96, documents="log-normal"),  # Phi-3's
    Case("head dim 256", 4, 8192, heads=16, dim=256),
    Case("head dim 256, packed, soft cap", 4, 8192, heads=16, dim=256, documents="log-normal", soft_cap=50.0),
    Case("head dim 512", 4, 8192, heads=16, kv_heads=1, dim=512),
    Case("head dim 512, packed", 4, 8192, heads=16, kv_heads=1, dim=512, documents="log-normal"),
    Case("head dim 512, 4 documents a row", 4, 8192, heads=16, kv_heads=1, dim=512, documents=4),
    Case("head dim 512, 2,048", 16, 2048, heads=16, kv_heads=1, dim=512),
)
