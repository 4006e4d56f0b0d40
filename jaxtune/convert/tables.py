"""What becomes of each key of another program's config: PROGRAM.yaml, beside the program's own keys and defaults."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Section:
    """Keys of a config or of a nested mapping. Each key of `defaults` is in one of the others."""

    defaults: Mapping[str, Any]
    """What a key is if it is left out; None: nothing."""
    types: Mapping[str, str]
    """{key: the kinds of its values, of jaxtune.convert.kinds}"""
    same_value: Mapping[str, str]
    """{key: the recipe's key with the same value}"""
    read: frozenset[str]
    """Keys that the program's module translates."""
    neutral: frozenset[str]
    """Keys without an effect on the trained weights here."""
    instead: Mapping[str, str]
    """{neutral key: what does its work here}"""
    refused: frozenset[str]
    """Keys of methods that no recipe can mean."""
    lost: Mapping[str, str]
    """{key without a counterpart that changes training: what to use instead, or ""}"""

    @property
    def known_keys(self) -> frozenset[str]:
        return self.read | self.neutral | self.refused | self.same_value.keys() | self.lost.keys()


@dataclasses.dataclass(frozen=True)
class Table:
    """The tables of one program."""

    versions: Mapping[str, str]
    marks: tuple[str, ...]
    top: Section
    sections: Mapping[str, Section]
    optimizers: Mapping[str, str]
    schedules: Mapping[str, str]
    schedule_arguments: Mapping[str, Mapping[str, str]]
    """{scheduler: {argument: key of the section `schedule`}}"""
    refused_schedules: Mapping[str, str]
    """{scheduler: what to use instead}"""
    templates: Mapping[str, str]
    nulls: frozenset[str]
    """Keys with another default, of which the module reads that they are null."""


def _yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def _section(
    values: Mapping[str, Any], defaults: Mapping[str, Any], types: Mapping[str, str], base: Mapping[str, Any]
) -> Section:
    def names(key: str) -> frozenset[str]:
        return frozenset((values.get(key) or "").split())

    same_keys, read, refused, lost = values.get("same") or {}, names("read"), names("refused"), values.get("lost") or {}
    listed = read | refused | names("neutral") | same_keys.keys() | lost.keys()
    return Section(
        defaults={**defaults, **(values.get("defaults") or {})},
        types={**types, **(base.get("types") or {}), **(values.get("types") or {})},
        same_value=same_keys,
        read=read,
        neutral=names("neutral") | (frozenset((base.get("neutral") or "").split()) - listed),
        instead={**(base.get("instead") or {}), **(values.get("instead") or {})},
        refused=refused,
        lost={**{key: fix for key, fix in (base.get("lost") or {}).items() if key not in listed}, **lost},
    )


@functools.cache
def table(program: str) -> Table:
    """The tables of axolotl, llama_factory or trl."""
    values = _yaml(program)
    schema = json.loads((_FOLDER / "schemas" / f"{program}.json").read_text(encoding="utf-8"))
    names = _yaml("transformers")  # of optimizers and schedules, which all programs have
    shared = {} if program == "axolotl" else names
    keys: dict[str, dict[str, Any]] = schema["keys"]
    types: dict[str, dict[str, str]] = schema["types"]
    nested = values.get("sections") or {}
    return Table(
        versions=schema["versions"],
        marks=tuple(values["marks"]),
        top=_section(values, keys[""], types[""], shared),
        sections={
            name: _section(nested.get(name) or values, defaults, types[name], {} if name in nested else shared)
            for name, defaults in keys.items()
            if name
        },
        optimizers={**names["optimizers"], **(values.get("optimizers") or {})},
        schedules=names["schedules"],
        schedule_arguments=names["schedule_arguments"],
        refused_schedules={**names["refused_schedules"], **(values.get("refused_schedules") or {})},
        templates=values.get("templates") or {},
        nulls=frozenset((values.get("nulls") or "").split()),
    )
