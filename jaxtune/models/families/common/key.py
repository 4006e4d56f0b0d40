"""Declarations of the keys of config.json: what a key may hold, its default, and which of our fields it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

Config = Mapping[str, Any]  # a parsed config.json
Fields = dict[str, Any]  # what is read from one, or written to one
Check = Callable[[str, Any], None]  # raises ValueError for a value that the key of that name cannot hold
REQUIRED, LEFT_OUT = object(), object()


class Conversion(NamedTuple):
    """How the value of a key becomes that of our field, and back."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


FLOAT = Conversion(float, lambda ours: ours)


class Entry(Protocol):
    """What a family's table has in it: a Key, or an object that reads several keys.

    `fields` in `read` are those that the entries before it have given; `layers` is one of them, which several entries
    may change in turn.
    """

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that it reads. They are checked, and have their defaults, before anything is read."""
        ...

    @property
    def gives(self) -> tuple[str, ...]:
        """Fields that no other entry may give: an entry of a family replaces the common one that gives the same."""
        ...

    def read(self, hf: Config, fields: Config) -> Fields:
        """{field: value} by a config.json in which every declared key has a value."""
        ...

    def write(self, config: Any) -> Fields:
        """{key: value} for the config.json of a DecoderConfig."""
        ...


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of config.json.

    A default is a value, or a function of the config.json in which all keys declared before this one have values.

        Key("rms_norm_eps", "norm_eps", values.positive, 1e-6)
        Key("logits_scaling", "logit_scale", values.positive, 1.0, conversion=RECIPROCAL)
    """

    name: str
    field: str | tuple[str, ...]
    """The field of DecoderConfig, or of what a Record makes, that has its value; several have the same value. ():
    code reads the key."""
    check: Check
    default: Any = REQUIRED
    """What a file without the key means. REQUIRED: such a file is refused."""
    null: Any = LEFT_OUT
    """What null in a file means. LEFT_OUT: the default."""
    conversion: Conversion | None = None
    written: Callable[[Any], Any] | None = None
    """The value that is written, of the whole DecoderConfig. None: that of the first field, converted."""

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
    """Keys that make one object, such as MoEConfig, or the shape of a mixer."""

    make: type
    keys: tuple[Key, ...]
    """Their fields are the arguments of `make`, and attributes of what it returns."""
    fixed: Config = dataclasses.field(default_factory=dict)
    """Further arguments, which are the same in all models of the family."""
    field: str | None = None
    """The field of DecoderConfig that has the object. None: something else holds it, such as a layer."""

    @property
    def gives(self) -> tuple[str, ...]:
        return () if self.field is None else (self.field,)

    def made(self, hf: Config) -> Any:
        """The object that a config.json describes."""
        arguments = dict(self.fixed)
        for key in self.keys:
            arguments |= key.read(hf, {})
        return self.make(**arguments)

    def described(self, made: Any) -> Fields:
        """{key: value} that `made` is read from."""
        return {name: value for key in self.keys for name, value in key.write(made).items()}

    def read(self, hf: Config, fields: Config) -> Fields:
        return {} if self.field is None else {self.field: self.made(hf)}

    def write(self, config: Any) -> Fields:
        return {} if self.field is None else self.described(getattr(config, self.field))


def checked(hf: Config, keys: Iterable[Key]) -> None:
    """Raises ValueError for a value that its key cannot hold, by key and value."""
    for key in keys:
        if hf.get(key.name) is not None:
            key.check(f"config.json: {key.name}", hf[key.name])


def completed(hf: Config, keys: Iterable[Key], defaults: Config) -> Fields:
    """The config.json in which every key has a value: its own, what null means, or the default.

    Args:
      defaults: those of a family, which come before the keys' own.
    Raises:
      ValueError: a key that has no default is missing.
    """
    complete = dict(hf)
    seen: set[str] = set()
    for key in keys:
        if key.name in seen:
            continue
        seen.add(key.name)
        if hf.get(key.name) is not None:
            continue
        value = key.null if key.name in hf and key.null is not LEFT_OUT else defaults.get(key.name, key.default)
        if value is REQUIRED:
            raise ValueError(f"config.json of a {hf.get('model_type')!r} model lacks {key.name!r}")
        complete[key.name] = value(complete) if callable(value) else value
    return complete
