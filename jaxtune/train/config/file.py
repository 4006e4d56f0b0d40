"""Reads recipes and `key.sub=value` overrides into a TrainConfig, writes one, and lists the keys of the schema.

Unknown keys and wrong types are errors that name the nearest valid key. YAML has the rules of YAML 1.2: only `true` and
`false` are booleans (`on` and `no` are strings), `1e-4` is a number, and a key that occurs twice is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from jaxtune.system.files import read_plain
from jaxtune.system.invocation import spelled
from jaxtune.train.config import DEFAULT_OUTPUT, SHORTHANDS, ConfigError, TrainConfig
from jaxtune.train.config.elsewhere import program_of

# ---- The schema as rows


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema."""

    name: str
    """Dotted, such as "optim.learning_rate"."""
    type: str
    """In words, such as "number or null"; "section" for one that is null by default."""
    default: str
    """As YAML, or "required"."""
    help: str


def config_keys() -> list[ConfigKey]:
    """Every key of a TrainConfig, in the order of the schema."""
    return list(_keys_of(TrainConfig, ""))


def _keys_of(cls: type, prefix: str) -> Iterator[ConfigKey]:
    """The keys of a section and of sections in it; a section itself only if its default is null."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for item in dataclasses.fields(cls):
        hint, name = hints[item.name], prefix + item.name
        section = _section(hint)
        if section is None or item.default is None:
            default = "required" if item.default is dataclasses.MISSING else json.dumps(item.default)
            text = hint.__metadata__[0]
            yield ConfigKey(name, "section" if section else _describe(hint), default.strip('"'), text)
        if section is not None:
            yield from _keys_of(section, name + ".")


def _section(hint: Any) -> type | None:
    """The dataclass in a field's type, such as `Annotated[AdapterConfig | None, help]`, if it is a section."""
    for member in _members(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union type, without the help text of an `Annotated`; (the type itself,) if it is no union."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    # Literal[...] | None is a typing.Union before Python 3.14.
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


_WORDS = {int: "integer", float: "number", bool: "true or false", str: "string", types.NoneType: "null"}


def _describe(hint: Any) -> str:
    """A field's type in words, such as "integer or null"."""
    words = []
    for member in _members(hint):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            words.append(" | ".join(arguments))
        elif origin is tuple:
            pair = [_WORDS[member_type] for member_type in typing.get_args(arguments[0]) if member_type is not str]
            elements = f"[string, {pair[0]}] pairs" if pair else "pairs of strings"
            words.append(f"list of {elements if typing.get_origin(arguments[0]) is tuple else 'strings'}")
        elif origin is dict:
            elements = {int: "integers", float: "numbers", str: "names"}.get(arguments[1], "values")
            words.append(f"mapping of names to {elements}")
        elif dataclasses.is_dataclass(member):
            words.append("section of keys")
        else:
            words.append(_WORDS[member])
    return " or ".join(words)


# ---- Reading


def packaged_recipes() -> dict[str, Path]:
    """{name: YAML file} of the packaged recipes, sorted by name."""
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_summary(path: Path) -> str:
    """The comment in a recipe's first line; "" if there is none."""
    first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first_line.lstrip("# ") if first_line.startswith("#") else ""


def load_config(recipe: str, overrides: Sequence[str] = (), rows_needed: bool = True) -> TrainConfig:
    """Reads a recipe and applies overrides to it. ConfigError has a line for each fault: key, value and place.

    A config of another program is an error that names `jaxtune convert`.
        recipe: a YAML file, or the name of a packaged recipe. {package} in values becomes the package's folder,
            {recipe} in `output` the recipe's name.
        overrides: such as "optim.learning_rate=1e-4" or "adapter.target_modules=[q_proj]"; values are YAML.
        rows_needed: False: a missing data.train is "".
    """
    path = _find_recipe(recipe)
    origins: dict[str, str] = {}
    values = read_values(path, origins)
    if (program := program_of(values)) is not None:
        command = spelled(f"convert {shlex.quote(recipe)}")
        raise ConfigError(f"{path} is a config of {program}: '{command}' prints the recipe that it means")
    values = _substitute(values, "{package}", str(Path(__file__).parents[2]))
    _unset_replaced(values, overrides)
    for override in overrides:
        _apply_override(values, override, origins)
    if not rows_needed and isinstance(values.setdefault("data", {}), dict):
        values["data"].setdefault("train", "")
    output = values.setdefault("output", DEFAULT_OUTPUT)
    if isinstance(output, str):
        values["output"] = output.replace("{recipe}", path.stem)
    return config_from_dict(values, origins)


def names_code(values: object) -> bool:
    """Whether a value in a config's nested values names code of the user's, as file.py:name."""
    if isinstance(values, str):  # any text: too long for a path, or beginning with a "~" that is nobody's
        return os.path.isfile(os.path.expanduser(values.rpartition(":")[0]))
    if isinstance(values, Mapping):
        return any(map(names_code, values.values()))
    return isinstance(values, list | tuple) and any(map(names_code, values))


def read_values(path: Path, origins: dict[str, str] | None = None) -> dict[str, Any]:
    """The nested values of a YAML file, unchecked; ConfigError if it is no YAML mapping.

    origins: receives {dotted key: "file:line"}.
    """
    try:
        text = read_plain(path, _MOST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe {path}: {error}") from None
    values = _parse_yaml(text, str(path), origins)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys: a recipe is a YAML mapping such as 'model: {{path: ...}}'")
    return values


def load_to_evaluate(recipe: str, overrides: Sequence[str] = ()) -> tuple[TrainConfig, float]:
    """(the configuration, the unset data.eval_rows or 0). An override of data.eval unsets the recipe's data.eval_rows,
    which cannot be set beside it.

    These rows, a number or a share below 1, must still be left out of data.train: a run's checkpoint is recognised by
    its training rows.
    """
    override_values = {
        key.strip(): value.strip() for key, _, value in (override.partition("=") for override in overrides)
    }
    if _scalar(override_values.get("data.eval", "")) is not None and "data.eval_rows" not in override_values:
        try:
            # without the keys of evaluations, which may need data.eval
            others = [override for override in overrides if not re.match(r"\s*(data\.eval\s*=|evaluation\b)", override)]
            held_out_rows = load_config(recipe, others).data.eval_rows
        except ConfigError:  # the call below, with all overrides, shows the error if there still is one
            held_out_rows = 0
        if held_out_rows:
            return load_config(recipe, [*overrides, "data.eval_rows=0"]), held_out_rows
    return load_config(recipe, overrides), 0


def _find_recipe(recipe: str) -> Path:
    """The file of a packaged recipe's name, or of a path; ConfigError names the nearest name, or config.yaml."""
    recipes = packaged_recipes()
    if recipe in recipes:
        return recipes[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    if (path / "config.yaml").is_file():
        raise ConfigError(f"{recipe} is a run's folder: its recipe is {path / 'config.yaml'}")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ConfigError(f"no recipe file {recipe}")
    near = difflib.get_close_matches(recipe, recipes, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise ConfigError(f"no packaged recipe {recipe!r}{hint}; packaged: {', '.join(recipes)}; or give a YAML file")


# The numbers of YAML 1.2's core schema (https://yaml.org/spec/1.2.2, section 10.3.2). YAML 1.1 reads 1e-4 as a string.
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_CONSTANTS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_SPECIAL_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


# Limits of a recipe, which has some hundred values a few levels deep. More is an accident, or comes from anchors that
# multiply ("a: &a [x, x]").
_MOST_BYTES = 2**26
_MOST_VALUES = 10_000
_DEEPEST = 20
_LONGEST_NUMBER = 40


def _scalar(text: str) -> Any:
    """An unquoted scalar by YAML 1.2: None (also for ""), a bool, a number, or a string (always over 40 characters)."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _SPECIAL_NUMBER.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def _parse_yaml(text: str, source: str, origins: dict[str, str] | None = None) -> Any:
    """Parses YAML; ConfigError for a key that is set twice, too many values or levels.

    source: for messages. origins: receives "source:line" for each dotted key.
    """
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        hint = "; quote a pattern that begins with *" if "undefined alias" in str(error) else ""
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply: a recipe has at most {_DEEPEST} levels") from None
    values = 0

    def read(node: yaml.Node | None, prefix: str, depth: int = 0) -> Any:
        nonlocal values
        if node is None:
            return None
        values += 1
        if values > _MOST_VALUES:
            raise ConfigError(f"{source} holds over {_MOST_VALUES:,} values, aliases counted each time: no recipe does")
        if depth > _DEEPEST:
            raise ConfigError(f"{source} is nested too deeply: a recipe has at most {_DEEPEST} levels")
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [read(item, prefix, depth + 1) for item in node.value]
        result = {}
        for key_node, value_node in node.value:
            name = str(key_node.value)
            key = f"{prefix}.{name}" if prefix else name
            line = f"{source}:{key_node.start_mark.line + 1}"
            if name in result:
                raise ConfigError(f"{key} is set twice ({line}): keep one")
            if origins is not None:
                origins[key] = line
            result[name] = read(value_node, key, depth + 1)
        return result

    return read(node, "")


def _substitute(value: Any, name: str, text: str) -> Any:
    """`value` copied, with `name` ("{package}") replaced in all strings."""
    if isinstance(value, dict):
        return {key: _substitute(item, name, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, name, text) for item in value]
    return value.replace(name, text) if isinstance(value, str) else value


# Keys of which one replaces the other: `steps=6` of the command unsets a recipe's `epochs`.
_REPLACING = (
    ("steps", "epochs"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("schedule.decay_steps", "schedule.decay_ratio"),
    ("evaluation.every_steps", "evaluation.every_epochs"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
)


def _unset_replaced(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Unsets the recipe's keys whose counterpart is overridden; two overrides of a pair contradict each other."""
    key_values = [override.partition("=") for override in overrides]
    keys = [key.strip() for key, _, text in key_values if _scalar(text.strip()) is not None]
    overridden_keys = [key.strip() for key, _, _ in key_values]
    for pair in _REPLACING:
        for key, counterpart in (pair, pair[::-1]):
            *sections, last = counterpart.split(".")
            inner = values.get(sections[0]) if sections else values
            if key in keys and counterpart not in overridden_keys and isinstance(inner, dict):
                inner.pop(last, None)


def _apply_override(values: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    """Sets one key in nested values, in place; a string for a section of SHORTHANDS, such as qat=int4, sets one key of
    it.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip(". "):
        raise ConfigError(f"cannot read override {override!r}: write key=value, for example optim.learning_rate=1e-4")
    origin = f"override {override!r}"
    *sections, last = key.split(".")
    for depth, name in enumerate(sections):
        if depth == 0 and isinstance(values.get(name), str) and name in SHORTHANDS:
            values[name] = {SHORTHANDS[name]: values[name]}
        if values.get(name) is None:  # also a section that the recipe sets to null
            values[name] = {}
            origins[".".join(sections[: depth + 1])] = origin
        values = values[name]
        if not isinstance(values, dict):
            raise ConfigError(f"{'.'.join(sections[: depth + 1])} has no keys of its own ({origin})")
    # An unquoted value is not parsed as YAML, where `data.response_part=### Response:` would be a comment.
    text = text.strip()
    value = _parse_yaml(text, origin) if text.startswith(("[", "{", '"', "'")) else _scalar(text)
    if not sections and last in SHORTHANDS and isinstance(value, str) and isinstance(values.get(last), dict):
        # With qat.group_size=32 qat=int4, the short form sets one key of the section and keeps the others.
        _apply_override(values, f"{last}.{SHORTHANDS[last]}={text}", origins)
        return
    values[last] = value
    for old in [old for old in origins if old.startswith(key + ".")]:
        del origins[old]
    origins[key] = origin


# ---- Checking


@functools.cache
def _adapter() -> pydantic.TypeAdapter[TrainConfig]:
    return pydantic.TypeAdapter(TrainConfig)


def config_from_dict(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> TrainConfig:
    """A TrainConfig of nested plain values; ConfigError has a line for each fault.

    origins: where each dotted key was set, such as "file:line", for messages.
    """
    for key, value in flat_keys(values).items():
        try:
            f"{key} {value}".encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{ascii(key)[1:-1]} = {value!a}: half of a surrogate pair, which no file can have"
            ) from None
    try:
        # In strict mode, only JSON may have objects for dataclasses and lists for tuples.
        return _adapter().validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        lines: dict[str, str] = {}
        for fault in error.errors():
            key, text = _explain(fault, origins or {})
            lines.setdefault(key, text)  # a union reports a fault for each of its members, of which one is shown
        raise ConfigError("\n".join(lines.values())) from None


def _explain(fault: Any, origins: Mapping[str, str]) -> tuple[str, str]:
    """(dotted key, message) of one entry of pydantic's `errors()`."""
    key, hint, section = _locate(fault["loc"])
    kind, value = fault["type"], fault["input"]
    if kind == "value_error":  # from a __post_init__, whose message begins with the key
        text = str(fault["ctx"]["error"])
        return key, text + _where(text.split(" ", 1)[0], origins)
    where = _where(key, origins)
    if kind == "unexpected_keyword_argument":
        return key, f"unknown key {key}{where}; {_nearest(key, section)}"
    if kind == "missing" and not isinstance(fault["loc"][-1], int):  # a number is an index in a pair
        return key, f"{key} is missing ({_describe(hint)}): it must be set"
    text = f"{key} = {json.dumps(value, ensure_ascii=False)}{where}: expected {_describe(hint)}"
    if isinstance(value, str):
        choices = [choice for member in _members(hint) for choice in typing.get_args(member) if isinstance(choice, str)]
        near = difflib.get_close_matches(value, choices, 1)
        text += f"; nearest: {near[0]}" if near else ""
    elif str in _members(hint) and not isinstance(value, dict | list):
        text += "; put it in quotes to make it a string"
    return key, text


def _where(key: str, origins: Mapping[str, str]) -> str:
    """ " (file:line)" of the dotted key, or of the innermost section around it; "" if neither is known."""
    names = key.split(".")
    for end in range(len(names), 0, -1):
        origin = origins.get(".".join(names[:end]))
        if origin is not None:
            return f" ({origin})"
    return ""


def _locate(location: tuple[int | str, ...]) -> tuple[str, Any, type]:
    """(dotted key, the last field's type or None, the dataclass with the field) of pydantic's "loc"."""
    section, hint, names = TrainConfig, None, []
    for name in location:
        hints = typing.get_type_hints(section, include_extras=True)
        names.append(str(name))
        if name not in hints:
            break
        hint = hints[str(name)]
        inner = _section(hint)
        if inner is None:
            break
        if name is not location[-1]:
            section = inner
    return ".".join(names), hint, section


def _nearest(key: str, section: type) -> str:
    """A hint for an unknown key: the nearest valid one of its section or of all, or else the section's keys."""
    prefix, _, name = key.rpartition(".")
    siblings = [item.name for item in dataclasses.fields(section)]
    near = difflib.get_close_matches(name, siblings, 1, cutoff=0.7)
    if near:
        return f"did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    every = [item.name for item in config_keys()]
    elsewhere = [valid_key for valid_key in every if valid_key.rpartition(".")[2] == name] or difflib.get_close_matches(
        key, every, 1
    )
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"valid keys here: {', '.join(siblings)}"


# ---- Writing and comparing


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dicts, lists and scalars, with every key."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists


class _Dumper(yaml.SafeDumper):
    """Quotes strings that look like YAML 1.2's numbers, which `_scalar` would read back as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_NUMBER.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^({_INTEGER.pattern})$"), list("-+0123456789"))


def config_to_yaml(config: TrainConfig | Mapping[str, Any]) -> str:
    """A configuration, or a recipe's nested values, as YAML that `load_config` reads back equal."""
    values = config if isinstance(config, Mapping) else config_to_dict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested mappings; an empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
