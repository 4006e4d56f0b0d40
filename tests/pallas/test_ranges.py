"""How kernels that sum over rows divide them."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from jaxtune.pallas import targets
from jaxtune.pallas.ranges import firsts_of, ranges_of

COUNTS = st.integers(1, 5000)


@given(COUNTS, COUNTS, st.integers(1, 16))
def test_every_tile_is_in_one_range_and_no_range_is_empty(tiles, blocks, programs):
    with targets.compile_for((9, 0)):
        ranges, steps = ranges_of(tiles, blocks, programs)
        most = max(1, targets.multiprocessors() * programs // blocks)
    assert (ranges - 1) * steps < tiles <= ranges * steps
    assert ranges <= most


@given(st.lists(st.integers(0, 100)))
def test_sizes_begin_where_those_before_end(sizes):
    firsts = firsts_of(sizes)
    assert len(firsts) == len(sizes)
    assert [*firsts, sum(sizes)][1:] == list(itertools.accumulate(sizes))
