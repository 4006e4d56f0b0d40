"""The programs of real configurations have the kernels, the memory and the transfers that were recorded."""

from __future__ import annotations

import pytest

from tests.golden import programs, records

RECORD = records.read("programs")["cases"]


@pytest.mark.parametrize("name", programs.CASES)
def test_a_program_is_the_recorded_one(name):
    changes = list(records.differences(programs.record(name), RECORD[name], records.BYTES))
    assert not changes, "\n".join(changes)


def test_every_configuration_is_recorded():
    assert RECORD.keys() == programs.CASES.keys()
