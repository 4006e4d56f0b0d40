"""Declarations of the keys of config.json: the values that a key allows, its default, and the field that it sets. A
family's table consists of entries: a Key (which may have a Conversion between the key's value and the field's), a
Record of several keys, or another object with the interface Entry. Family.from_hf checks a file with `checked` and
fills in defaults with `completed` before the entries read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

Config = Mapping[str, Any]  # a parsed config.json, or other values by name that are only read
Fields = dict[str, Any]  # what is read from one, or written to one
Check = Callable[[str, Any], None]  # takes key and value, and raises ValueError for a value that is not allowed
REQUIRED, LEFT_OUT = object(), object()  # markers for Key.default and Key.null


class Conversion(NamedTuple):
    """A pair of functions between the value of a key in config.json and that of a field of DecoderConfig, for a Key
    whose two values differ in form (Key.conversion). Neither is called for None, which stays None."""

    read: Callable[[Any], Any]  # from the key's value to the field's
    write: Callable[[Any], Any]  # from the field's value to the key's


# For a number that is a float in DecoderConfig and may be an integer in config.json.
FLOAT = Conversion(float, lambda ours: ours)


class Entry(Protocol):
    """The interface of an entry in a family's table, which translates between some keys of config.json and some fields
    of DecoderConfig: a Key, or an object that reads several keys at once.

    `keys` are the keys that it reads, and `gives` the fields that it sets, except `layers` where it changes that of an
    earlier entry. `read` makes fields from a config.json, and `write` makes the config.json's keys from a
    DecoderConfig. `read` also gets the fields that earlier entries have set, because several entries change `layers` in
    turn.
    """

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that it reads, which are checked and get their defaults before anything is read."""
        ...

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the fields of DecoderConfig that this entry sets. An entry of a family replaces the common entry
        (table.py) that gives one of the same fields, so an entry that only changes `layers` does not name it.

        Family.from_hf looks for two names: after the entry that gives `layers` it sets the family's stages, and an
        entry that gives `moe` shows that the family has experts."""
        ...

    def read(self, hf: Config, fields: Config) -> Fields:
        """{field of DecoderConfig: value} from a config.json (`hf`) in which every declared key has a value, which may
        be None. fields: the fields that Family.fields and earlier entries have set, in the same form."""
        ...

    def write(self, config: Any) -> Fields:
        """{key: value} for the config.json of a DecoderConfig (`config`), which is saved with a model: the inverse of
        `read`. A key among a Record's gets the Record's object as `config`."""
        ...


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of config.json, its check and the field that it sets: the usual Entry of a family's table (Family.keys).

    A default is a value, or a function of the config.json in which all keys that were declared earlier have values.

        Key("rms_norm_eps", "norm_eps", values.positive, 1e-6)
        Key("logit_scale", "logit_scale", values.positive, 0.0625, conversion=FLOAT)
    """

    name: str
    """The key in config.json."""
    field: str | tuple[str, ...]
    """The field of DecoderConfig, or of a Record's object, that it sets, or several that it sets to the same value; ()
    if another entry reads the key, or it is only checked."""
    check: Check
    """(what errors call the key, the value) -> None; raises ValueError for a value that is not allowed. It is not
    called for null."""
    default: Any = REQUIRED
    """The value for a file without the key, unless Family.defaults has another; REQUIRED: such a file is refused."""
    null: Any = LEFT_OUT
    """The value for null in a file, or a function as for the default; LEFT_OUT: the default."""
    conversion: Conversion | None = None
    """Converts between the key's value and the field's; None: they are equal."""
    written: Callable[[Any], Any] | None = None
    """Takes the whole DecoderConfig and returns the value to write; None: the first field's value is written,
    converted, or the key is not written if it sets no field."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key alone, because a Key is an Entry too, whose keys Family.declared lists."""
        return (self,)

    @property
    def gives(self) -> tuple[str, ...]:
        """The fields that it sets, as a tuple; a common entry that sets one of them is replaced (Entry.gives)."""
        return (self.field,) if isinstance(self.field, str) else self.field

    def read(self, hf: Config, fields: Config) -> Fields:
        """{field: the key's value, converted unless it is None} for each field that it sets; {} if it sets none. hf: a
        config.json in which the key has a value; `fields` is not used, but all Entries take it."""
        value = hf[self.name]
        if self.conversion is not None and value is not None:
            value = self.conversion.read(value)
        return dict.fromkeys(self.gives, value)

    def write(self, config: Any) -> Fields:
        """{key: its value} for the config.json of `config`, a DecoderConfig (or of a Record's object): what `written`
        returns, or else the value of the first field that the key sets, converted back; {} for a key that sets no field
        and has no `written`."""
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
    """An entry of families' tables (Entry) for several keys of config.json that describe one object, such as a
    MoEConfig or the shape of a mixer. `made` makes the object from a config.json, and `described` makes the keys from
    the object; `read` and `write` do so for the object in a field of DecoderConfig."""

    make: type
    """The class of the object."""
    keys: tuple[Key, ...]
    """Their fields are arguments of `make`, and attributes of the object."""
    fixed: Config = dataclasses.field(default_factory=dict)
    """Further arguments of `make`, which are the same in all models of the family."""
    field: str | None = None
    """The field of DecoderConfig that is set to the object; None: another entry uses it, for example for layers."""

    @property
    def gives(self) -> tuple[str, ...]:
        """The field of DecoderConfig that is set to the object, as a tuple. It is empty if the Record sets no field,
        because another Entry, such as LayerTypes for mixers, calls `made` and `described` itself."""
        return () if self.field is None else (self.field,)

    def made(self, hf: Config) -> Any:
        """Makes the object that a config.json describes, for `read` or for another entry that uses it, such as
        LayerTypes: calls the class `make` with the fields of `keys` and with `fixed`. hf: a config.json in which every
        key has a value (`completed`); one that is missing is a KeyError. Errors of `make`, such as ValueError for
        values that do not fit each other, are passed on."""
        arguments = dict(self.fixed)
        for key in self.keys:
            arguments |= key.read(hf, {})
        return self.make(**arguments)

    def described(self, made: Any) -> Fields:
        """{key: value} for the config.json of an object of the class `make`: the inverse of `made`, for `write`
        and for the entries that call `made`. made: the object."""
        return {name: value for key in self.keys for name, value in key.write(made).items()}

    def read(self, hf: Config, fields: Config) -> Fields:
        """{field: the object} that the config.json `hf` describes; {} if the Record sets no field. `fields` is not
        used, but all Entries take it."""
        return {} if self.field is None else {self.field: self.made(hf)}

    def write(self, config: Any) -> Fields:
        """The keys of config.json, {key: value}, that describe the object which the DecoderConfig `config` has in its
        attribute `self.field`, such as its MoEConfig in the attribute moe. That object must not be None; `read`
        always sets it. If `self.field` itself is None, the result is {}, because another Entry writes the keys of the
        object."""
        return {} if self.field is None else self.described(getattr(config, self.field))


def checked(hf: Config, keys: Iterable[Key]) -> None:
    """Raises ValueError for a value of a config.json (`hf`) that its key does not allow, with key and value;
    Family.from_hf calls it first. keys: those that are checked; null is always allowed, and so is a key that is
    missing."""
    for key in keys:
        if hf.get(key.name) is not None:
            key.check(f"config.json: {key.name}", hf[key.name])


def completed(hf: Config, keys: Iterable[Key], defaults: Config) -> Fields:
    """The config.json `hf` with a value for every key, so that it can be read key by key. A key that is missing gets
    its default; one that is null gets the value that null stands for (Key.null), or else its default.

    Args:
      hf: the parsed config.json.
      keys: the declared keys, in the order of their declaration, in which a default may depend on earlier keys. Of
        several with one name the first gives the default.
      defaults: {key's name: its default in the family}, which take precedence over Key.default.
    Raises:
      ValueError: a required key is missing, or null where null has no value of its own.
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
