"""Reads recipes and `key.sub=value` overrides into a TrainConfig, writes them, and compares two.

Pydantic checks strictly: an unknown key or a wrong type is an error that names the key and the nearest valid one. YAML
is read as YAML 1.2 reads it: only `true` and `false` are booleans (`on` and `no` are strings), `1e-4` is a number, and
a key may stand once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from jaxtune.train.config import DEFAULT_OUTPUT, SHORTHANDS, ConfigError, TrainConfig

# ---- The schema as rows


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema: `name` is dotted, `type` is in words, `default` is as YAML writes it."""

    name: str
    type: str
    default: str
    help: str


def config_keys() -> list[ConfigKey]:
    """Every key of a TrainConfig in the order of the schema; `--help` and the documentation are made of it."""
    return list(_keys_of(TrainConfig, ""))


def _keys_of(cls: type, prefix: str) -> Iterator[ConfigKey]:
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
    """The dataclass in a type such as `Annotated[AdapterConfig | None, help]`."""
    for member in _members(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    # Literal[...] | None is a typing.Union before Python 3.14.
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


_WORDS = {int: "integer", float: "number", bool: "true or false", str: "string", types.NoneType: "null"}


def _describe(hint: Any) -> str:
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
            words.append(f"mapping of names to {'integers' if arguments[1] is int else 'numbers'}")
        elif dataclasses.is_dataclass(member):
            words.append("section of keys")
        else:
            words.append(_WORDS[member])
    return " or ".join(words)


# ---- Reading


def packaged_recipes() -> dict[str, Path]:
    """Name -> file of the recipes in the package."""
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_summary(path: Path) -> str:
    """What a recipe is for: the first line of the comment that it begins with."""
    first_line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first_line.lstrip("# ") if first_line.startswith("#") else ""


def load_config(recipe: str, overrides: Sequence[str] = (), rows_needed: bool = True) -> TrainConfig:
    """Read a recipe and apply `key.sub=value` overrides.

    Args:
        recipe: path of a YAML file, or name of a packaged recipe. In its values `{package}` is the folder of the
            jaxtune package; in `output`, `{recipe}` is the recipe's name.
        overrides: e.g. `["optim.learning_rate=1e-4", "adapter=null", "adapter.target_modules=[q_proj, v_proj]"]`; a
            value is a YAML scalar, `[list]`, `{mapping}` or quoted string.
        rows_needed: False lets data.train be missing, which is then "".

    Raises:
        ConfigError: everything that is wrong, one line each: key, value, where it stands, and the nearest valid key.
    """
    path = _find_recipe(recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe {path}: {error}") from None
    origins: dict[str, str] = {}
    values = _parse_yaml(text, str(path), origins)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys: a recipe is a YAML mapping such as 'model: {{path: ...}}'")
    values = _substitute(values, "{package}", str(Path(__file__).parents[2]))
    for override in overrides:
        _apply_override(values, override, origins)
    if not rows_needed and isinstance(values.setdefault("data", {}), dict):
        values["data"].setdefault("train", "")
    output = values.setdefault("output", DEFAULT_OUTPUT)
    if isinstance(output, str):
        values["output"] = output.replace("{recipe}", path.stem)
    return config_from_dict(values, origins)


def load_to_evaluate(recipe: str, overrides: Sequence[str] = ()) -> tuple[TrainConfig, int]:
    """(as load_config, rows that the recipe takes out of data.train although the config does not): an override that
    names held-out rows, data.eval, stands in place of the recipe's data.eval_rows."""
    keys = {override.split("=")[0].strip() for override in overrides}
    if "data.eval" in keys and "data.eval_rows" not in keys:
        try:
            others = [override for override in overrides if override.split("=")[0].strip() != "data.eval"]
            taken = load_config(recipe, others).data.eval_rows
        except ConfigError:  # which the whole of it may mend, or shows too
            taken = 0
        if taken:
            return load_config(recipe, [*overrides, "data.eval_rows=0"]), taken
    return load_config(recipe, overrides), 0


def _find_recipe(recipe: str) -> Path:
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


# What YAML 1.2's core schema calls numbers (https://yaml.org/spec/1.2.2, section 10.3.2); 1.1 reads 1e-4 as a string.
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_CONSTANTS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_SPECIAL_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


# A recipe has some hundred values, a few levels deep. More is an accident, or anchors that multiply ("a: &a [x, x]").
_MOST_VALUES = 10_000
_DEEPEST = 20
_LONGEST_NUMBER = 40


def _scalar(text: str) -> Any:
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
    """YAML text -> dicts, lists and scalars; `origins` receives dotted key -> 'source:line'."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
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
                raise ConfigError(f"{key} stands twice ({line}): keep one")
            if origins is not None:
                origins[key] = line
            result[name] = read(value_node, key, depth + 1)
        return result

    return read(node, "")


def _substitute(value: Any, name: str, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(item, name, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, name, text) for item in value]
    return value.replace(name, text) if isinstance(value, str) else value


def _apply_override(values: dict[str, Any], override: str, origins: dict[str, str]) -> None:
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
    # A plain value is taken as it stands, so that `data.response_part=### Response:` is neither comment nor mapping.
    text = text.strip()
    value = _parse_yaml(text, origin) if text.startswith(("[", "{", '"', "'")) else _scalar(text)
    if not sections and last in SHORTHANDS and isinstance(value, str) and isinstance(values.get(last), dict):
        # qat.group_size=32 qat=int4: the short form names one key of the section, and leaves the others.
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
    """Check nested plain values (what `config_to_dict` gives) and make a TrainConfig of them.

    `origins` says for error messages where a dotted key was set. Raises ConfigError with one line for each fault.
    """
    for key, value in flat_keys(values).items():
        try:
            f"{key} {value}".encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{ascii(key)[1:-1]} = {value!a}: half a character, which no file can hold") from None
    try:
        # Strict mode takes dicts for dataclasses and lists for tuples from JSON only.
        return _adapter().validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        lines: dict[str, str] = {}
        for fault in error.errors():
            key, text = _explain(fault, origins or {})
            lines.setdefault(key, text)  # a union reports a fault for each of its members: one is enough
        raise ConfigError("\n".join(lines.values())) from None


def _explain(fault: Any, origins: Mapping[str, str]) -> tuple[str, str]:
    """The key and the message of one of pydantic's faults."""
    key, hint, section = _locate(fault["loc"])
    kind, value = fault["type"], fault["input"]
    if kind == "value_error":  # from a __post_init__, whose message begins with the key
        text = str(fault["ctx"]["error"])
        return key, text + _where(text.split(" ", 1)[0], origins)
    where = _where(key, origins)
    if kind == "unexpected_keyword_argument":
        return key, f"unknown key {key}{where}; {_nearest(key, section)}"
    if kind == "missing" and not isinstance(fault["loc"][-1], int):  # a number is a place in a pair
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
    """' (file:line)' of the key, or of the innermost section around it that was set somewhere."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:end]))
        if origin is not None:
            return f" ({origin})"
    return ""


def _locate(location: tuple[int | str, ...]) -> tuple[str, Any, type]:
    """The dotted key of a pydantic location, its type, and the dataclass it belongs to.

    Stops at the first part that is no field: an unknown key (kept), or the member of a union (dropped).
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
    """Nested dicts, lists and scalars, every key present; `config_from_dict` reads them back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_scalar` would read as something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_NUMBER.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^({_INTEGER.pattern})$"), list("-+0123456789"))


def config_to_yaml(config: TrainConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal config."""
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flat_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested mappings; an empty one is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
