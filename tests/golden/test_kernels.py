"""Each call runs on the kernels on which it ran when it was recorded, on every kind of GPU."""

from __future__ import annotations

from tests.golden import kernels, records

RECORD = records.read("kernels")["cases"]


def test_the_kernels_of_each_call_are_the_recorded_ones():
    changes = list(records.differences({case: kernels.record(case) for case in kernels.CASES}, RECORD, 0.0))
    assert not changes, "\n".join(changes)
