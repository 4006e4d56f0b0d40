"""Declarations of the keys of config.json: allowed values, default, and the field that is set. A family's table
consists of entries: Keys, Records of several keys, or other objects with the interface Entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

Config = Mapping[str, Any]  # a parsed config.json, or other values by name that are only read
Fields = dict[str, Any]  # what is read from one, or written to one
Check = Callable[[str, Any], None]  # takes key and value, and raises ValueError for a value that is not allowed
REQUIRED, LEFT_OUT = object(), object()  # markers for Key.default and Key.null


class Conversion(NamedTuple):
    """Functions between a key's value and a field's. None stays None without a call."""

    read: Callable[[Any], Any]  # from the key's value to the field's
    write: Callable[[Any], Any]  # from the field's value to the key's


# For a number that is a float in DecoderConfig and may be an integer in config.json.
FLOAT = Conversion(float, lambda ours: ours)


class Entry(Protocol):
    """An entry of a family's table, which translates between keys of config.json and fields of DecoderConfig."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that it reads, which are checked and get their defaults before."""
        ...

    @property
    def gives(self) -> tuple[str, ...]:
        """The fields that it sets; a common entry of the same field is replaced. An entry that only changes `layers`
        does not name it. "layers": Family.stages are set in the layers after this entry's read; "moe": the family has
        experts, so their keys are not refused.
        """
        ...

    def read(self, hf: Config, fields: Config) -> Fields:
        """{field: value} from a config.json in which every declared key has a value, perhaps None. fields: those set
        earlier.
        """
        ...

    def write(self, config: Any) -> Fields:
        """The inverse of `read`, {key: value}. A key among a Record's gets the Record's object as `config`."""
        ...


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of config.json, its check and the field that it sets. A default that is a function gets the config.json
    with all earlier keys.

        Key("rms_norm_eps", "norm_eps", values.positive, 1e-6)
        Key("logit_scale", "logit_scale", values.positive, 0.0625, conversion=FLOAT)
    """

    name: str
    field: str | tuple[str, ...]
    """The field or fields of DecoderConfig, or of a Record's object; () if another entry reads the key, or it is only
    checked.
    """
    check: Check
    """Raises ValueError for (what errors call the key, a value that is not allowed); not called for null."""
    default: Any = REQUIRED
    """The value for a missing key, or a function, unless Family.defaults has one; REQUIRED: such a file is refused."""
    null: Any = LEFT_OUT
    """The value for null, or a function; LEFT_OUT: the default."""
    conversion: Conversion | None = None
    written: Callable[[Any], Any] | None = None
    """DecoderConfig -> the value to write; None: the first field's value, or nothing if there is no field."""

    @property
    def keys(self) -> tuple[Key, ...]:
        return (self,)

    @property
    def gives(self) -> tuple[str, ...]:
        return (self.field,) if isinstance(self.field, str) else self.field

    def read(self, hf: Config, fields: Config) -> Fields:
        value = hf[self.name]
        if self.conversion is not None and value is not None:
            value = self.conversion.read(value)
        return dict.fromkeys(self.gives, value)

    def write(self, config: Any) -> Fields:
        if self.written is not None:
            return {self.name: self.written(config)}
        if not self.gives:
            return {}
        value = getattr(config, self.gives[0])
        if self.conversion is not None and value is not None:
            value = self.conversion.write(value)
        return {self.name: value}


@dataclasses.dataclass(frozen=True)
class Record:
    """An entry for several keys that describe one object, such as a MoEConfig or a mixer's shape."""

    make: type
    keys: tuple[Key, ...]
    """Their fields are arguments of `make` and attributes of the object."""
    fixed: Config = dataclasses.field(default_factory=dict)
    """Further arguments of `make`."""
    field: str | None = None
    """The field of DecoderConfig for the object; None: another entry uses it."""

    @property
    def gives(self) -> tuple[str, ...]:
        return () if self.field is None else (self.field,)

    def build(self, hf: Config) -> Any:
        """The object that a completed config.json describes."""
        arguments = dict(self.fixed)
        for key in self.keys:
            arguments |= key.read(hf, {})
        return self.make(**arguments)

    def described(self, instance: Any) -> Fields:
        """The inverse of `instance`."""
        return {name: value for key in self.keys for name, value in key.write(instance).items()}

    def read(self, hf: Config, fields: Config) -> Fields:
        return {} if self.field is None else {self.field: self.build(hf)}

    def write(self, config: Any) -> Fields:
        return {} if self.field is None else self.described(getattr(config, self.field))


def require_allowed(hf: Config, keys: Iterable[Key]) -> None:
    """Raises ValueError for a value of a known key that the key does not allow; null, missing and unknown keys pass."""
    for key in keys:
        if hf.get(key.name) is not None:
            key.check(f"config.json: {key.name}", hf[key.name])


def completed(hf: Config, keys: Iterable[Key], defaults: Config) -> Fields:
    """The config.json with a value for every key: its default if missing, what null stands for if null.

      hf: config.json of the text model.
      keys: in the order of declaration; of several with one name the first gives the default.
      defaults: the family's, before Key.default.

    Raises ValueError for a required key without a value.
    """
    complete = dict(hf)
    visited: set[str] = set()
    for key in keys:
        if key.name in visited:
            continue
        visited.add(key.name)
        if hf.get(key.name) is not None:
            continue
        value = key.null if key.name in hf and key.null is not LEFT_OUT else defaults.get(key.name, key.default)
        if value is REQUIRED:
            raise ValueError(f"config.json of a {hf.get('model_type')!r} model lacks {key.name!r}")
        complete[key.name] = value(complete) if callable(value) else value
    return complete
