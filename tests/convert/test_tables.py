"""Every key of each program's schema has one class, and what tables call ours exists."""

from __future__ import annotations

import itertools

import pytest

from jaxtune.convert.tables import table
from jaxtune.train.config.file import config_keys

PROGRAMS = ("axolotl", "llama_factory", "trl")


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_key_of_a_program_has_one_class(program):
    tables = table(program)
    for name, section in {"": tables.top, **tables.sections}.items():
        shared = tables.top.known_keys if program == "trl" else frozenset()
        assert not section.defaults.keys() - section.known_keys - shared, name
        classes = (section.read, section.neutral, section.refused, section.same_value.keys(), section.lost.keys())
        for one, other in itertools.combinations(classes, 2):
            assert not one & other, name
        assert section.instead.keys() <= section.neutral | section.lost.keys(), name


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_keys_that_tables_name_exist(program):
    ours = {key.name for key in config_keys()}
    tables = table(program)
    for section in (tables.top, *tables.sections.values()):
        assert set(section.same_value.values()) <= ours
