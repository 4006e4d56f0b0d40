"""Whose each moment of the device is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.profile.report import make_report
from jaxtune.profile.timeline import charge, find_period, gaps
from jaxtune.profile.trace import KERNEL, TO_DEVICE, TO_HOST, Event, Trace


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


def test_copies_that_run_beside_each_other_are_not_under_compute():
    rows = [(0, 10, KERNEL), (5, 15, TO_HOST), (8, 12, TO_DEVICE), (10, 10, TO_DEVICE), (20, 5, KERNEL)]
    events = events_of(rows)
    for event in events:
        event.step = 0
    report = make_report(Trace("a", "jax", "", events, [(0.0, 25.0)]))
    times = {row.name: (row.ms, row.hidden_ms, row.exposed_ms) for row in report.transfers}
    expected = {"copies to device": (12e-6, 2e-6, 10e-6), "copies to host": (15e-6, 5e-6, 10e-6)}
    assert times == {name: pytest.approx(row) for name, row in expected.items()}


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
