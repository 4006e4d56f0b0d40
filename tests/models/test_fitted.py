"""The table of fitted numbers: which row a device and an implementation get."""

from __future__ import annotations

import pytest

from jaxtune.models import fitted
from jaxtune.models.fitted import Fitted

_TABLE = Fitted(
    {
        ("H200", "mosaic"): (1.0, "steps on an H200"),
        ("RTX 4090", "triton"): (2.0, "steps on a 4090"),
        ("H200", "triton"): (3.0, "steps on an H200"),
    }
)


@pytest.mark.parametrize(
    ("implementation", "device", "numbers"),
    [
        ("mosaic", "NVIDIA H200", 1.0),
        ("triton", "NVIDIA H200", 3.0),
        ("triton", "NVIDIA GeForce RTX 4090", 2.0),
        ("triton", "RTX 3090", 2.0),  # not measured: the first device that has the implementation
        ("mosaic", "cpu", 1.0),
        ("reference", "RTX 4090", 1.0),  # an implementation without numbers: the first row
    ],
)
def test_a_device_has_its_own_numbers_or_those_that_stand_in(implementation, device, numbers):
    assert _TABLE.of(implementation, device) == numbers


def test_every_row_names_its_source():
    tables = [table for table in vars(fitted).values() if isinstance(table, Fitted)]
    assert len(tables) > 8
    for table in tables:
        for (device, implementation), (numbers, source) in table.rows.items():
            assert device and implementation and len(source.split()) >= 2
            assert table.of(implementation, f"NVIDIA {device}") == numbers
