"""A recipe as it is read from another program's config, and what of that config it cannot say."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.convert.kinds import fitted
from jaxtune.convert.tables import Section, Table
from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import ConfigKey, config_keys

# Sections of a recipe on which the trained weights do not depend: a default of the other program is not written there.
_BESIDE = ("output", "checkpoint.", "metrics.", "evaluation.", "data.num_workers", "data.buffer_size", "deterministic")


@dataclasses.dataclass
class Translation:
    """The recipe `values`, with a line for each thing that it lacks, does otherwise, or takes from defaults."""

    program: str
    table: Table
    config: Mapping[str, Any]
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    lacking: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    implied: list[str] = dataclasses.field(default_factory=list)
    only_rows: bool = False
    """Whether the program trains on nothing that a template writes before an answer."""
    apart: bool = False
    """Whether the program tokenises plain prompts and their answers apart."""
    proved: list[str] = dataclasses.field(default_factory=list)
    """The rows that were rendered."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    nulls: set[str] = dataclasses.field(default_factory=set)
    """Keys that are null in the config and that nothing has read as null yet."""
    renames: list[Mapping[str, str]] = dataclasses.field(default_factory=list)
    """The columns' names of each set of rows so far."""

    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    """{dotted key of the recipe: the config's key that was read before it was set, with its value}"""
    _read: tuple[str, object] = ("", None)

    def __post_init__(self) -> None:
        self.nulls |= {key for key, value in self.config.items() if value is None}
        self.config = self.fitted(self.table.top.types, self.config)
        self.defaults = {**self.table.top.defaults, **self.defaults}

    def fitted(self, types: Mapping[str, str], config: object, section_name: str = "") -> dict[str, Any]:
        """The keys of a mapping that are not null, each of a kind that the program takes; ConfigError for another.

        types: {key: its kinds, of `kinds`}; other keys have any.
        section_name: what messages call the mapping; "": the config itself.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{section_name} = {short(config)}: {self.program} takes a mapping of keys to values there"
            )
        values = {}
        for key, value in config.items():
            if value is None:
                continue
            try:
                values[key] = fitted(value, types.get(key, "any"))
            except ValueError as error:
                name = f"{key} of {section_name}" if section_name else key
                raise ConfigError(f"{name} = {short(value)}: {self.program} takes {error} there") from None
        return values

    def __getitem__(self, key: str) -> Any:
        """The other program's key: the config's value, else that program's default; None for a null with a meaning."""
        if key in self.table.nulls and (key in self.nulls or key in self._read_nulls):
            self._as_null(key)
            return None
        if key in self.config:
            self._read = key, self.config[key]
        return self.config.get(key, self.defaults.get(key))

    @functools.cached_property
    def _read_nulls(self) -> set[str]:
        return set()

    def _as_null(self, key: str) -> None:
        self.nulls.discard(key)
        self._read_nulls.add(key)

    def sets(self, *keys: str) -> bool:
        return any(key in self.config for key in keys)

    def first(self, *keys: str) -> Any:
        """The value of the first of several names that the config has, else the first default."""
        key = next((key for key in keys if key in self.config), None)
        return self[key] if key else next((self[key] for key in keys if self[key] is not None), None)

    def set(self, key: str, value: Any, *sources: str) -> None:
        """Sets a key of the recipe.

        key: dotted, such as "optimizer.learning_rate".
        value: as in YAML.
        sources: the config's keys that say so. If it has none of them, the value is the program's default, and is
          written only where it differs from ours. No sources: it is written.
        """
        if sources and not self.sets(*sources):
            if key.startswith(_BESIDE) or (key in _ours() and _ours()[key].default == _word(value)):
                return
            self.implied.append(f"{key}: {_word(value)}")
        self.origins[key] = f"{self._read[0]} = {short(self._read[1])}" if self._read[0] else ""
        *sections, last = key.split(".")
        inner = self.values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value

    def get(self, key: str) -> Any:
        """The recipe's dotted key; None if it is not set."""
        inner: Any = self.values
        for section in key.split("."):
            inner = inner.get(section) if isinstance(inner, Mapping) else None
        return inner

    def lack(self, subject: str, value: Any, fix: str = "") -> None:
        """Notes something that the recipe lacks, once.

        subject: what the other program's config has, such as its key.
        value: its value there.
        fix: a remedy or a reason; "": none.
        """
        line = f"{subject}: {short(value)}" + (f" ({fix})" if fix else "")
        if line not in self.lacking:
            self.lacking.append(line)

    def set_same(
        self, section: Section, config: Mapping[str, Any], defaults: Mapping[str, Any], only: str = ""
    ) -> None:
        """Sets the keys that have one value in both programs.

        section: what is known of the config's keys.
        config: this part of the other program's config.
        defaults: the other program's, {its key: value}.
        only: a prefix of the recipe's keys; "": all are set.
        """
        for key, ours in section.same_value.items():
            if ours.startswith(only) and config is self.config and self.set_null(key, ours):
                continue
            if not ours.startswith(only) or (value := config.get(key, defaults.get(key))) is None:
                continue
            self._read = (key, value) if key in config else ("", None)
            self.set(ours, value, *(() if key in config else (key,)))

    def set_null(self, key: str, ours: str) -> bool:
        """Sets a key of the recipe to null, if the config's is null against its default and ours may be."""
        if key not in self.nulls or not self.defaults.get(key) or "null" not in _ours()[ours].type:
            return False
        self.set(ours, None)
        self._as_null(key)
        return True

    def leftovers(self, section: Section, config: Mapping[str, Any], section_name: str = "") -> None:
        """Lists keys that change training and are not translated; ConfigError for a method that no recipe can mean.

        section: what is known of the config's keys.
        config: this part of the other program's config.
        section_name: what messages call it; "": the config itself.
        """
        for key, value in config.items():
            if key in section.read or key in section.same_value or value is None:
                continue
            default = (self.defaults if section is self.table.top else section.defaults).get(key)
            if value == default or (default is None and value in (False, "", [], {})):
                continue
            name = f"{key} of {section_name}" if section_name else key
            if key in section.refused:
                raise ConfigError(f"{name} = {short(value)}: a method of {self.program} that jaxtune does not have")
            if key in section.neutral:
                if key in section.instead:
                    self.notes.append(f"{name}: {section.instead[key]}")
                continue
            fix = section.lost.get(key, f"no key of {self.program} {_versions(self.table)}")
            self.lack(name, value, fix)
        for key in sorted(self.nulls if section is self.table.top else ()):
            if self.defaults.get(key) and key not in section.neutral:
                self.lack(key, None, f"its default there, {short(self.defaults[key])}, is taken")

    def choose(self, keys: Sequence[str], ours: str, names: Mapping[str, str]) -> None:
        """Sets a key of the recipe to our name for a value; an unknown name is lacking, a missing one leaves it out.

        keys: of the other program; the first that is set has the value.
        ours: the recipe's dotted key.
        names: {the other program's name: ours}.
        """
        value = self.first(*keys)
        if value is None:
            return
        if str(value) in names:
            self.set(ours, names[str(value)], *keys)
        else:
            self.lack(next((key for key in keys if key in self.config), keys[0]), value, f"{ours} has no such name")


@functools.cache
def _ours() -> dict[str, ConfigKey]:
    """The recipe's keys by name."""
    return {key.name: key for key in config_keys()}


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | None) else str(value)


def _versions(table: Table) -> str:
    return ", ".join(table.versions.values())


def short(value: Any) -> str:
    """JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
