"""Messages of jaxtune.train in the words of a script: its arguments in place of a recipe's keys."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from jaxtune.compat.defaults import defaults
from jaxtune.compat.settings import SFTConfig
from jaxtune.convert.tables import table
from jaxtune.system.progress import heartbeat
from jaxtune.system.terminal import rewording
from jaxtune.train.config.file import config_keys
from jaxtune.train.user_code.errors import UserCodeError

# Arguments that TRL's newest configs lack and that are followed here.
_BESIDE = ("max_prompt_length", "embedding_learning_rate", "max_new_tokens")
_RECIPES = "a recipe's "
# Whole phrases: what fits, as the planner proposes it.
_PHRASES = {
    "memory.plan=null micro_batches=null (the planner chooses)": "gradient_checkpointing=True (the planner chooses)",
    "model.load_in=nf4": "from_pretrained's load_in_4bit=True",
    "objective.cache=fp8": "from_pretrained's float8_kv_cache=True",
    "model.load_in=int8": "from_pretrained's load_in_8bit=True",
}
# Arguments of functions for a recipe's keys, beside those of adapters, which have the same names.
_ARGUMENTS = {
    "model.rope_scaling": "rope_scaling",
    "model.max_position_embeddings": "max_seq_length",
    "model.load_in": "load_in_4bit",
    "model.compute": "load_in_fp8",
    "objective.cache": "float8_kv_cache",
    "data.length": "max_seq_length",
}
_RANK = re.compile(r"adapter=\{r: (\d+)\}")
_VALUES = {"null": "None", "true": "True", "false": "False"}
# Keys without a dot that are words, too: they are keys where a value follows.
_WITH_VALUE = r"(?= ?=(?!=))"
_ENTRIES = ("__init__", "config", "train", "evaluate", "predict", "train_dataset", "_prepared", "_epoch_steps")


@functools.cache
def _candidates() -> dict[str, list[str]]:
    """{a recipe's key: arguments of scripts that mean it, the last may be words}"""
    arguments = yaml.safe_load(Path(__file__).with_name("wording.yaml").read_text(encoding="utf-8"))
    same_meaning = {ours: [argument] for argument, ours in table("trl").top.same_value.items()}
    return {key.name: [] for key in config_keys()} | same_meaning | arguments


@functools.cache
def arguments_of(kind: type[SFTConfig]) -> frozenset[str]:
    """The names that a script's config has in TRL, as far as they are followed here."""
    names = defaults("TRL", kind.section)
    return frozenset(field.name for field in dataclasses.fields(kind) if field.name in names or field.name in _BESIDE)


@functools.cache
def _words(kind: type[SFTConfig] | None) -> dict[str, str]:
    """{a recipe's key: what a script with this config calls it}."""
    if kind is None:
        return {key: _of_functions(key, names) for key, names in _candidates().items()}
    has, followed = arguments_of(kind), {field.name for field in dataclasses.fields(kind)}
    words = {}
    for key, names in _candidates().items():
        # A name that no config here has is words, or an argument of a trainer or a function.
        fitting_names = [name for name in names if name in has or (name not in followed and name not in _anywhere())]
        words[key] = fitting_names[0] if fitting_names and fitting_names[0] else _RECIPES + key
    return words


def _of_functions(key: str, names: list[str]) -> str:
    section, _, name = key.rpartition(".")
    if section == "adapter":
        return name
    words = [words for words in names if words in _ARGUMENTS or not words.isidentifier()]
    return _ARGUMENTS.get(key) or (words[-1] if words and words[-1] else _RECIPES + key)


@functools.cache
def _anywhere() -> frozenset[str]:
    """Fields of all configs here."""
    kinds, names = [SFTConfig], set()
    for kind in kinds:
        kinds += kind.__subclasses__()
        names |= {field.name for field in dataclasses.fields(kind)}
    return frozenset(names)


@functools.cache
def _pattern() -> re.Pattern[str]:
    keys = sorted(_candidates(), key=len, reverse=True)
    dotted = "|".join(re.escape(key) for key in keys if "." in key or "_" in key)
    plain = "|".join(re.escape(key) for key in keys if "." not in key and "_" not in key)
    before = rf"(?<![\w./'])(?<!{_RECIPES})"
    return re.compile(rf"{before}(?:({dotted})(?![\w/]|\.\w)|({plain}){_WITH_VALUE})(?:(?<==)|=(null|true|false)\b)?")


def in_script_words(text: str, kind: type[SFTConfig] | None, of_user: bool = False) -> str:
    """A message of jaxtune.train with a script's arguments in place of a recipe's keys.

    kind: the script's config; None: of a function that loads a model or adds an adapter.
    of_user: the text has words of the script's own, in which "seed =" and the like are no keys.
    """
    for phrase, words in _PHRASES.items():
        text = text.replace(phrase, words)
    text = _RANK.sub(r"an adapter of rank \1", text)
    words = _words(kind)

    def replaced(match: re.Match[str]) -> str:
        value = match[3]
        if of_user and match[2]:
            return match[0]
        return words[match[1] or match[2]] + ("" if value is None else f"={_VALUES[value]}")

    return _pattern().sub(replaced, text)


class ScriptWords:
    """A trainer whose errors and printed lines name the script's arguments."""

    config_type: type[SFTConfig]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for name in _ENTRIES:
            entry = vars(cls).get(name)
            if isinstance(entry, property) and entry.fget is not None:
                setattr(cls, name, property(_worded(entry.fget), doc=entry.__doc__))
            elif isinstance(entry, functools.cached_property):
                entry.func = _worded(entry.func)
            elif callable(entry):
                setattr(cls, name, _worded(entry))


def _worded[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def method(*arguments: P.args, **options: P.kwargs) -> R:
        with _said_in_words_of(getattr(arguments[0], "config_type", SFTConfig)):
            return function(*arguments, **options)

    return method


def worded[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that loads a model or adds an adapter, whose errors and lines name its arguments."""

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        with _said_in_words_of(None):
            return function(*arguments, **options)

    return called


@contextlib.contextmanager
def _said_in_words_of(kind: type[SFTConfig] | None) -> Iterator[None]:
    with rewording(lambda text: in_script_words(text, kind)), heartbeat():
        try:
            yield
        except ValueError as error:
            if error.args and isinstance(error.args[0], str):
                of_user = isinstance(error, UserCodeError)
                error.args = (in_script_words(error.args[0], kind, of_user), *error.args[1:])
            raise
