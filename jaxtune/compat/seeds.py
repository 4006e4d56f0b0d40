"""The seed of what scripts sample: one for the process, as in torch, so that each call of generate draws anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np

_FIRST = 0  # a process that sets no seed repeats itself, as with torch


def _from(seed: int) -> Iterator[int]:
    return (int(np.random.SeedSequence([seed, call]).generate_state(1)[0]) for call in itertools.count())


_seeds = _from(_FIRST)


def set_seed(seed: int, deterministic: bool = False) -> None:
    """transformers': sampling, `random` and NumPy continue from `seed`. Runs have SFTConfig's seed and
    full_determinism.
    """
    del deterministic
    begin_at(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def begin_at(seed: int) -> None:
    """The next draws of `generate` are the first of `seed`."""
    global _seeds
    _seeds = _from(abs(seed))


def next_seed() -> int:
    """A seed for one call of `generate`, below 2^32."""
    return next(_seeds)
