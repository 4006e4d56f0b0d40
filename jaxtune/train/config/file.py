"""Reads recipes and `key.sub=value` overrides into a TrainConfig (`load_config`; `load_to_evaluate` for `jaxtune
evaluate`), writes one (`config_to_yaml`, `config_to_dict`), and lists the keys of the schema (`config_keys`) and the
packaged recipes. `read_values` reads YAML unchecked, `config_from_dict` checks, `flat_keys` makes {dotted key: value}.

Pydantic checks strictly: an unknown key or a wrong type is an error that names the key and the nearest valid one. YAML
is read by the rules of YAML 1.2: only `true` and `false` are booleans (`on` and `no` are strings), `1e-4` is a number,
and a key that occurs twice is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
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

from jaxtune.system.invocation import spelled
from jaxtune.train.config import DEFAULT_OUTPUT, SHORTHANDS, ConfigError, TrainConfig
from jaxtune.train.config.elsewhere import program_of

# ---- The schema as rows


@dataclass(frozen=True)
class ConfigKey:
    """One key of the configuration's schema: its name, type, default and help text, as `config_keys` lists it."""

    name: str
    """The dotted key, such as "optim.learning_rate"."""
    type: str
    """Its type in words, such as "number or null"; "section" for a section that is null by default."""
    default: str
    """Its default as YAML, or "required"."""
    help: str
    """Its help text, from the Annotated hint of its field."""


def config_keys() -> list[ConfigKey]:
    """Every key of a TrainConfig in the order of the schema (`_keys_of`), for `--help`, the documentation and hints.
    Records of older versions that lack a key get its default from it. No value is checked by it."""
    return list(_keys_of(TrainConfig, ""))


def _keys_of(cls: type, prefix: str) -> Iterator[ConfigKey]:
    """Yields the keys of a section and of the sections in it, such as optim.eps. A section itself, such as `adapter`,
    is yielded only if its default is null. `config_keys` lists the schema by it. cls: the section's dataclass. prefix:
    put before the names of its keys, such as "optim."."""
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
    """The dataclass in a field's type `hint`, such as `Annotated[AdapterConfig | None, help]`, if it is a section; else
    None. `_keys_of` and `_locate` walk through the sections by it."""
    for member in _members(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union type `hint`, or (the type itself,) if it is no union, without the help text of an
    `Annotated`. `_section` looks for a section of keys among them, and `_describe` and error messages name them."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    # Literal[...] | None is a typing.Union before Python 3.14.
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


_WORDS = {int: "integer", float: "number", bool: "true or false", str: "string", types.NoneType: "null"}


def _describe(hint: Any) -> str:
    """The type of a field (`hint`, its annotation) in words for help texts and errors, such as "integer or null"."""
    words = []
    for member in _members(hint):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            words.append(" | ".join(arguments))
        elif origin is tuple:
            pair = [_WORDS[part] for part in typing.get_args(arguments[0]) if part is not str]
            of = f"[string, {pair[0]}] pairs" if pair else "pairs of strings"
            words.append(f"list of {of if typing.get_origin(arguments[0]) is tuple else 'strings'}")
        elif origin is dict:
            of = {int: "integers", float: "numbers", str: "names"}.get(arguments[1], "values")
            words.append(f"mapping of names to {of}")
        elif dataclasses.is_dataclass(member):
            words.append("section of keys")
        else:
            words.append(_WORDS[member])
    return " or ".join(words)


# ---- Reading


def packaged_recipes() -> dict[str, Path]:
    """{name: file} of the packaged recipes, YAML files of configurations, sorted by name, to find and to list them."""
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_summary(path: Path) -> str:
    """The first line of the comment at the beginning of the recipe file at `path`, which says what it is for; "" if
    there is none. Lists of the packaged recipes show it."""
    first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first_line.lstrip("# ") if first_line.startswith("#") else ""


def load_config(recipe: str, overrides: Sequence[str] = (), rows_needed: bool = True) -> TrainConfig:
    """Reads a recipe and applies `key.sub=value` overrides to it, for the commands train and sensitivity, and, through
    `load_to_evaluate`, evaluate. A run reads by it whether the config.yaml in its output folder is its own.

    Args:
        recipe: the path of a YAML file, or the name of a packaged recipe. In its values, `{package}` becomes the folder
            of the jaxtune package; in `output`, `{recipe}` becomes the recipe's name.
        overrides: such as `["optim.learning_rate=1e-4", "adapter=null", "adapter.target_modules=[q_proj, v_proj]"]`; a
            value is a YAML scalar, `[list]`, `{mapping}` or quoted string.
        rows_needed: whether data.train must be set. If False, as only `jaxtune train --plan` says, a missing one is "".
    Raises:
        ConfigError: the recipe cannot be read, is the config of another program (`jaxtune convert` translates those),
            or has faults. The message has one line for each fault: the key, the value, the file and line, and the
            nearest valid key.
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


def read_values(path: Path, origins: dict[str, str] | None = None) -> dict[str, Any]:
    """The keys and values of a YAML file, a recipe or another program's config, as nested dicts, lists and scalars,
    unchecked: `load_config` reads recipes by it, `jaxtune convert` the others.

    Args:
        path: the file.
        origins: if given, receives {dotted key: "file:line"} for error messages.
    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe {path}: {error}") from None
    values = _parse_yaml(text, str(path), origins)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys: a recipe is a YAML mapping such as 'model: {{path: ...}}'")
    return values


def load_to_evaluate(recipe: str, overrides: Sequence[str] = ()) -> tuple[TrainConfig, float]:
    """Reads a recipe for `jaxtune evaluate`, whose held-out rows may be replaced by an override of data.eval. Such an
    override also unsets the recipe's data.eval_rows, which cannot be set beside data.eval, unless an override sets it;
    data.eval=null leaves it as it is.

    Args:
        recipe: the path of a YAML file, or the name of a packaged recipe; data.train must be set, as for training.
        overrides: texts such as "data.eval=rows.jsonl".
    Returns:
        The configuration, and the data.eval_rows that was unset (0 if none was): a number of rows, or below 1 a share.
            The command leaves these rows out of data.train as the run did, because a run's checkpoint is recognised by
            its training rows.
    Raises:
        ConfigError: the recipe cannot be read, or it has faults.
    """
    given = {key.strip(): value.strip() for key, _, value in (override.partition("=") for override in overrides)}
    if _scalar(given.get("data.eval", "")) is not None and "data.eval_rows" not in given:
        try:
            others = [override for override in overrides if override.split("=")[0].strip() != "data.eval"]
            taken = load_config(recipe, others).data.eval_rows
        except ConfigError:  # the call below, with all overrides, shows the error if there still is one
            taken = 0
        if taken:
            return load_config(recipe, [*overrides, "data.eval_rows=0"]), taken
    return load_config(recipe, overrides), 0


def _find_recipe(recipe: str) -> Path:
    """Returns the file of a recipe. `recipe` is the name of a packaged one, which is looked up first, or a path.
    Raises:
      ConfigError: there is no such file (the message for a name lists the packaged ones, and the nearest one if any is
        near), or the path is a run's folder (the message names the config.yaml in it).
    """
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
_MOST_VALUES = 10_000
_DEEPEST = 20
_LONGEST_NUMBER = 40


def _scalar(text: str) -> Any:
    """The value of `text`, an unquoted scalar of a recipe or an override, by the rules of YAML 1.2: None (also for ""),
    a bool, an int, a float or the string itself. A text of over 40 characters is always a string."""
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
    """Parses YAML, of a recipe or of an override whose value is a list, a mapping or quoted, to dicts, lists, scalars.

    Args:
        text: the YAML; an empty text gives None.
        source: its file name, or the override, for messages.
        origins: if given, receives "source:line" for each dotted key.
    Raises:
        ConfigError: it is not YAML, has a key twice, more than 10,000 values, or more than 20 levels of nesting.
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
        """The value of a node; prefix: the dotted key of the mapping that it is in, or ""; depth: its level, from 0."""
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
    """`value`, nested dicts and lists of a recipe, copied with `name` ("{package}") replaced by `text` in strings."""
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
    parts = [override.partition("=") for override in overrides]
    keys = [key.strip() for key, _, text in parts if _scalar(text.strip()) is not None]
    named = [key.strip() for key, _, _ in parts]
    for pair in _REPLACING:
        for key, other in (pair, pair[::-1]):
            *sections, last = other.split(".")
            inner = values.get(sections[0]) if sections else values
            if key in keys and other not in named and isinstance(inner, dict):
                inner.pop(last, None)


def _apply_override(values: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    """Sets one key in a recipe's nested values, in place. Sections that are missing or null are made; names are not
    checked. A string for a section of `SHORTHANDS`, such as qat=int4, sets one key of it (qat.format) if the recipe has
    that section as a mapping. A recipe's `qat: int4` becomes such a mapping for an override such as qat.start=5.

    Args:
        values: the recipe.
        override: "key.sub=value".
        origins: where each dotted key was set, for messages; it is updated.
    Raises:
        ConfigError: the override cannot be read, or a name before the last one in its key has a value with no keys.
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
    """Pydantic's validator of a TrainConfig, for `config_from_dict`; building it takes a while, so it is built once."""
    return pydantic.TypeAdapter(TrainConfig)


def config_from_dict(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> TrainConfig:
    """Checks nested plain values, such as those of a recipe, and makes a TrainConfig of them: `load_config` returns it,
    and `jaxtune convert` only checks. Configs that checkpoints record are not read by it.

    Args:
        values: dicts, lists and scalars.
        origins: where each dotted key was set, such as "file:line", for messages.
    Raises:
        ConfigError: the values have faults; the message has one line for each.
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
    """Returns (the dotted key, the message for the user) of `fault`, one entry of pydantic's `errors()`;
    `config_from_dict` raises a line for each. origins: where each dotted key was set, such as "file:line"."""
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
    """Returns the place where the dotted key `key` was set, as " (file:line)" for `_explain`'s message. If `origins`
    does not have the key, as for one in a mapping that an override set, it is the place of the innermost section around
    it that `origins` has; "" if there is none. origins: {dotted key: "file:line", or the override that set it}."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:end]))
        if origin is not None:
            return f" ({origin})"
    return ""


def _locate(location: tuple[int | str, ...]) -> tuple[str, Any, type]:
    """Finds the field of the configuration that an error of pydantic is about, for `_explain`. location: the "loc" of
    one of its `errors()`, the names (or indices of lists) on the way from TrainConfig to the faulty value.

    Returns (the field's dotted key; the type of the last field on that way, or None; the dataclass that has the field).
    The walk ends at a field that is no section (indices and members of a union follow), or with an unknown key.
    """
    section, hint, names = TrainConfig, None, []
    for part in location:
        hints = typing.get_type_hints(section, include_extras=True)
        names.append(str(part))
        if part not in hints:
            break
        hint = hints[str(part)]
        inner = _section(hint)
        if inner is None:
            break
        if part is not location[-1]:
            section = inner
    return ".".join(names), hint, section


def _nearest(key: str, section: type) -> str:
    """A hint for an unknown dotted key, for `_explain`: "did you mean ...?" with the nearest valid key of its section
    (the dataclass `section`) or of all sections, or else the keys of the section."""
    prefix, _, name = key.rpartition(".")
    siblings = [item.name for item in dataclasses.fields(section)]
    near = difflib.get_close_matches(name, siblings, 1, cutoff=0.7)
    if near:
        return f"did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    every = [item.name for item in config_keys()]
    elsewhere = [other for other in every if other.rpartition(".")[2] == name] or difflib.get_close_matches(
        key, every, 1
    )
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"valid keys here: {', '.join(siblings)}"


# ---- Writing and comparing


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """`config` as nested dicts, lists and scalars with every key, as checkpoints and profiles record it;
    `config_from_dict` would make an equal config of it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists


class _Dumper(yaml.SafeDumper):
    """Quotes strings that look like numbers of YAML 1.2, which `_scalar` would read back as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_NUMBER.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^({_INTEGER.pattern})$"), list("-+0123456789"))


def config_to_yaml(config: TrainConfig | Mapping[str, Any]) -> str:
    """`config`, with every key, or a recipe's nested values, as YAML that `load_config` reads back as they are: a run's
    config.yaml, and what `jaxtune convert` prints."""
    values = config if isinstance(config, Mapping) else config_to_dict(config)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of the nested mappings of `tree`; an empty mapping counts as a value. Configurations are
    compared and shown in this form. prefix: put before every key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
