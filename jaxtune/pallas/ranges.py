"""How kernels that sum over rows divide them: each program sums a range of tiles, and XLA adds the ranges' sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxtune.pallas import targets


def ranges_of(tiles: int, blocks: int, programs: int) -> tuple[int, int]:
    """(ranges of rows, tiles of a range) with about `programs` programs a multiprocessor, of `blocks` a range."""
    ranges = min(tiles, max(1, targets.multiprocessors() * programs // blocks))
    steps = -(-tiles // ranges)
    return -(-tiles // steps), steps


def firsts_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each of the sizes begins, one behind the other.

    >>> firsts_of([3, 1, 2])
    (0, 3, 4)
    """
    return tuple(itertools.accumulate(sizes[:-1], initial=0)) if sizes else ()
