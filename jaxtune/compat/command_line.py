"""transformers' HfArgumentParser and TRL's TrlParser: dataclasses from the command line and from YAML."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import json
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import yaml

from jaxtune.compat.settings import SFTConfig
from jaxtune.system.files import read_text
from jaxtune.system.terminal import say

type DataClass = object  # of a script's dataclass
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class _Option:
    """An argument of some of the dataclasses."""

    kinds: tuple[type, ...]
    hint: object  # its type; object: any value
    default: object


class HfArgumentParser(argparse.ArgumentParser):
    """transformers' parser: an option for each field of the dataclasses. What is not given is left to the dataclass, so
    that a config knows which arguments a script gives.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **options: object):
        super().__init__(**{"formatter_class": argparse.RawTextHelpFormatter, "allow_abbrev": False, **options})
        kinds = dataclass_types or ()
        self.dataclass_types = list(kinds) if isinstance(kinds, Iterable) else [kinds]
        self._options: dict[str, _Option] = {}
        for name, option in _options(self.dataclass_types).items():
            self._options[name] = option
            self._add(name, option)

    def _add(self, name: str, option: _Option) -> None:
        """Adds a field's option; a list takes several words, and nothing is converted here."""
        flags = list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
        several = _has(option.hint, (list, tuple, set, Sequence)) and not isinstance(option.hint, str)
        truth = _has(option.hint, (bool,)) or isinstance(option.default, bool)
        metavar = name.upper()
        if truth and not several:
            self.add_argument(*flags, dest=name, nargs="?", const=True, default=argparse.SUPPRESS, metavar=metavar)
        else:
            nargs = "+" if several else None
            self.add_argument(*flags, dest=name, nargs=nargs, default=argparse.SUPPRESS, metavar=metavar)
        if truth:
            off = list(dict.fromkeys((f"--no_{name}", f"--no-{name.replace('_', '-')}")))
            self.add_argument(
                *off, dest=name, action="store_const", const=False, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )

    def error(self, message: str) -> NoReturn:
        """Leaves out the usage, which is a page here."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args_into_dataclasses(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[DataClass, ...]:
        """An object of each dataclass, and with return_remaining_strings the words that belong to none. args: words;
        None: sys.argv. look_for_args_file has no effect; args_filename and args_file_flag raise ValueError.
        """
        del look_for_args_file
        if args_filename or args_file_flag:
            raise ValueError(
                "HfArgumentParser: files of arguments are not read; parse_yaml_file and parse_json_file are"
            )
        configs, remaining = self._parsed(args, {})
        if return_remaining_strings:
            return (*configs, remaining)
        if remaining:
            self.error(self._unknown(remaining))
        return configs

    def parse_dict(self, args: Mapping[str, object], allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        configs, unknown = self._of_values(args)
        if unknown and not allow_extra_keys:
            raise ValueError(f"keys that no dataclass has: {self._unknown(unknown)}")
        return configs

    def parse_json_file(self, json_file: str | os.PathLike, allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        return self.parse_dict(json.loads(read_text(json_file)), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike, allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        return self.parse_dict(_yaml(yaml_file), allow_extra_keys)

    def _parsed(
        self, args: Iterable[str] | None, defaults: Mapping[str, object]
    ) -> tuple[tuple[DataClass, ...], list[str]]:
        space, remaining = self.parse_known_args(sys.argv[1:] if args is None else list(args))
        typed = vars(space)
        script_values = {name: value for name, value in typed.items() if name not in self._options}
        try:
            configs, _ = self._of_values({**defaults, **{n: v for n, v in typed.items() if n in self._options}})
        except ValueError as error:
            self.error(str(error))
        return (*configs, *([argparse.Namespace(**script_values)] if script_values else [])), remaining

    def _of_values(self, values: Mapping[str, object]) -> tuple[tuple[DataClass, ...], list[str]]:
        typed_values = {n: _value(n, v, self._options[n].hint) for n, v in values.items() if n in self._options}
        configs = []
        for kind in self.dataclass_types:
            arguments = {name: value for name, value in typed_values.items() if kind in self._options[name].kinds}
            if missing := [name for name in _required(kind) if name not in arguments]:
                raise ValueError(f"{kind.__name__} needs {', '.join(f'--{name}' for name in missing)}")
            configs.append(kind(**arguments))
        return tuple(configs), [name for name in values if name not in self._options]

    def _unknown(self, words: Sequence[str]) -> str:
        """The words that are no option, each with the nearest option."""
        lines = []
        for word in words:
            if (
                not word.startswith("-")
                and word not in words[:1]
                and any(other_word.startswith("-") for other_word in words)
            ):
                continue  # a value
            name = word.lstrip("-").partition("=")[0].replace("-", "_")
            near = difflib.get_close_matches(name, self._options, 1)
            lines.append(word + (f" (did you mean --{near[0]}?)" if near else ""))
        return ", ".join(lines)


class TrlParser(HfArgumentParser):
    """TRL's parser: `--config FILE` names a YAML file; the command line replaces its values, and they the defaults."""

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **options: object):
        super().__init__(dataclass_types, **options)
        if "config" in self._options:
            owner = self._options["config"].kinds[0].__name__
            raise ValueError(f"TrlParser: {owner} has a field `config`, which is the name of the YAML file's option")
        self.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE", help="a YAML file of these options")

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[DataClass, ...]:
        """An object of each dataclass. Sets the YAML file's mapping `env` in the environment.

        return_remaining_strings: also returns words that belong to no dataclass, the file's as "--name", "value";
          separate_remaining_strings: both sources apart.
        fail_with_unknown_args: False prints unknown keys of the file.
        args: words; None: sys.argv.
        """
        words = sys.argv[1:] if args is None else list(args)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        space, words = finder.parse_known_args(words)
        values = {} if space.config is None else _yaml(space.config)
        env = values.pop("env", None) or {}
        if not isinstance(env, Mapping):
            raise ValueError(f"{space.config}: env = {env!r}: must be a mapping of variables")
        os.environ.update({str(name): str(value) for name, value in env.items()})
        unknown = [name for name in values if name not in self._options]
        configs, remaining = self._parsed(words, {name: value for name, value in values.items() if name not in unknown})
        if return_remaining_strings:
            extra = [word for name in unknown for word in (f"--{name}", str(values[name]))]
            return (*configs, extra, remaining) if separate_remaining_strings else (*configs, extra + remaining)
        if remaining:
            self.error(self._unknown(remaining))
        if unknown and fail_with_unknown_args:
            raise ValueError(f"{space.config}: keys that no dataclass has: {self._unknown(unknown)}")
        if unknown:
            say(f"{space.config}: not read: {self._unknown(unknown)}")
        return configs


def _yaml(path: str | os.PathLike) -> dict[str, object]:
    values = yaml.safe_load(read_text(path))
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)}: must be a YAML mapping of options")
    return values


def _options(kinds: Sequence[type]) -> dict[str, _Option]:
    """The options of the dataclasses, with arguments that a config knows and does not follow."""
    options: dict[str, _Option] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        defaults_of_kind = kind() if issubclass(kind, SFTConfig) else None
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            before = options.get(field.name)
            owners = (*(before.kinds if before else ()), kind)
            options[field.name] = _Option(owners, hints.get(field.name, object), _default(defaults_of_kind, field))
    for kind in kinds:
        if issubclass(kind, SFTConfig):
            for name, argument in kind.table.items():
                default = argument.free[0] if argument.free else None
                options.setdefault(name, _Option((kind,), object, default))
    return options


def _default(config: SFTConfig | None, field: dataclasses.Field) -> object:
    if config is not None:
        return getattr(config, field.name)
    return None if field.default is dataclasses.MISSING else field.default


def _required(kind: type) -> list[str]:
    """The fields that have no default; SFTConfigs need none."""
    if issubclass(kind, SFTConfig):
        return []
    missing = dataclasses.MISSING
    return [
        f.name for f in dataclasses.fields(kind) if f.init and f.default is missing and f.default_factory is missing
    ]


def _kinds(hint: object) -> list[object]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for member in typing.get_args(hint) for kind in _kinds(member)]
    return [typing.get_origin(hint) or hint]


def _has(hint: object, kinds: tuple[object, ...]) -> bool:
    return any(kind in kinds for kind in _kinds(hint))


def _value(name: str, value: object, hint: object) -> object:
    """A value of a command line or of YAML as its type `hint` asks for; ValueError if it is none."""
    if isinstance(value, list):
        if not _has(hint, (list, tuple, set, Sequence)):
            return [_value(name, entry, object) for entry in value]
        element = next((typing.get_args(entry)[:1] for entry in _members(hint) if _is_list(entry)), ())
        items = [_value(name, entry, element[0] if element else object) for entry in value]
        # One word for an argument that is a list or a text, such as "all-linear".
        return items[0] if len(items) == 1 and isinstance(items[0], str) and _has(hint, (str,)) else items
    kinds = _kinds(hint)
    if isinstance(value, bool) and str in kinds and bool not in kinds:
        return "yes" if value else "no"  # YAML's words, as in `eval_strategy: no`
    if not isinstance(value, str):
        return float(value) if isinstance(value, int) and not isinstance(value, bool) and kinds == [float] else value
    return _of_text(name, value, hint, kinds)


def _of_text(name: str, text: str, hint: object, kinds: list[object]) -> object:
    """The text as the first kind of `hint` that takes it; else ValueError."""
    for member in _members(hint):
        if typing.get_origin(member) is typing.Literal:
            choices = typing.get_args(member)
            for choice in choices:
                if str(choice) == text:
                    return choice
            if kinds == [typing.Literal]:
                raise ValueError(f"{name} = {text!r}: must be one of {', '.join(map(repr, choices))}")
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            return member(text)
    if text.lower() in ("none", "null") and ((type(None) in kinds and str not in kinds) or hint is object):
        return None
    if text.lower() in _WORDS and (bool in kinds or (hint is object and text.lower() in ("true", "false"))):
        return _WORDS[text.lower()]
    if text[:1] in "{[" and (hint is object or _has(hint, (dict, Mapping, list, tuple, Sequence))):
        return json.loads(text)
    for number in (int, float):
        if number in kinds or (float in kinds and number is int) or hint is object:
            try:
                return float(text) if number is int and int not in kinds and hint is not object else number(text)
            except ValueError:
                continue
    if hint is object or str in kinds:
        return text
    if _has(hint, (list, tuple, set, Sequence)):
        return [text]
    words = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None))
    raise ValueError(f"{name} = {text!r}: must be {words}")


def _members(hint: object) -> list[object]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [nested for member in typing.get_args(hint) for nested in _members(member)]
    return [hint]


def _is_list(hint: object) -> bool:
    return (typing.get_origin(hint) or hint) in (list, tuple, set, Sequence)
