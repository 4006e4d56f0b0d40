"""Whose each moment of the device is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.profile.timeline import charge, find_period, gaps
from jaxtune.profile.trace import KERNEL, TO_HOST, Event


def events_of(rows):
    return sorted((Event(float(a), float(a + n), "k", "s", kind) for a, n, kind in rows), key=lambda e: e.start_ns)


def test_a_moment_belongs_to_the_kernel_that_began_first():
    first, dependent, late = events_of([(0, 10, KERNEL), (8, 6, KERNEL), (20, 5, KERNEL)])
    charge([first, dependent, late])
    assert [e.self_ns for e in (first, dependent, late)] == [10, 4, 5]


def test_a_copy_counts_only_where_no_kernel_runs():
    kernel, copy, second = events_of([(0, 10, KERNEL), (5, 10, TO_HOST), (12, 10, TO_HOST)])
    charge([kernel, copy, second])
    assert [e.self_ns for e in (kernel, copy, second)] == [10, 5, 7]


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from([KERNEL, TO_HOST])), min_size=1, max_size=25
    )
)
def test_charges_and_gaps_fill_the_span_once(rows):
    events = events_of(rows)
    charge(events)
    taken = np.zeros((2, 100), bool)
    for start, length, kind in rows:
        taken[int(kind == KERNEL), start : start + length] = True
    assert sum(e.self_ns for e in events if e.kind == KERNEL) == taken[1].sum()
    assert sum(e.self_ns for e in events if e.kind == TO_HOST) == (taken[0] & ~taken[1]).sum()
    free = sum(done - begun for begun, done in gaps(events, 0.0, 100.0))
    assert free == 100 - taken.any(axis=0).sum()


@pytest.mark.parametrize(
    ("names", "period"), [("ababab", 2), ("aabaab", 3), ("aaaa", 1), ("abc", 3), ("ababa", 2), ("", 0), ("a", 1)]
)
def test_period(names, period):
    assert find_period(names) == period
