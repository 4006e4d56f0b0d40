"""Recipes of any bytes and any values: a config, or a ConfigError in words."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import config_from_dict, config_keys, config_to_dict, config_to_yaml, load_config

WHOLE = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


def read(tmp_path_factory, content: bytes, *overrides: str):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(content)
    return load_config(str(path), overrides)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "holds over 10,000 values, aliases counted each time"),
        ("model: &m {path: *m}", "is nested too deeply|is not YAML"),
        ("a: &a [*a]", "is nested too deeply"),
        ("[" * 50_000, "is nested too deeply"),
        ("steps: " + "9" * 5000, "steps = .*expected integer"),
        ("steps: 99999999999", r"steps = 99999999999: must be at most 2,147,483,647"),
        ("seed: 4294967296", r"seed = 4294967296: must be at most 4,294,967,295"),
        ("adapter: {r: 1000000000}", r"adapter.r = 1000000000: must be at most 65,536"),
        ("optim: {eps: 1e-300}", "optim.eps = 1e-300: must be a number that float32 holds"),
        ("optim: {learning_rate: .nan}", "optim.learning_rate"),
        ("rows_per_step: 1000000", "times data.length = 2048 is 2,048,000,000 tokens a step|model.path|data"),
        ("data: {train: x, num_workers: 1000000}", "data.num_workers = 1000000: must be at most 1,024"),
    ],
    ids=["bomb", "own key", "own item", "deep", "digits", "steps", "seed", "rank", "eps", "nan", "rows", "workers"],
)
def test_absurd_recipes_are_refused_in_words(tmp_path_factory, content, message):
    whole = "model: {path: m}\n" * ("model" not in content) + "data: {train: x}\n" * ("data" not in content)
    if content.startswith("rows"):
        content = content.replace("1000000", "1000000\nseed: -1")
        message = "seed|tokens a step"
    with pytest.raises(ConfigError, match=message):
        read(tmp_path_factory, ((whole if content[0] not in "[" else "") + content).encode())


def test_an_anchor_may_stand_for_a_value(tmp_path_factory):
    config = read(tmp_path_factory, b"model: {path: &x m}\ndata: {train: *x}\n")
    assert config.model.path == config.data.train == "m"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["qat=int4", "qat.group_size=32"], 32),
        (["qat.group_size=32", "qat=int4"], 32),
        (["qat.group_size=32"], 32),
        (["qat=int4"], 128),
        (["qat=int4", "qat.group_size=32", "qat=null"], None),
    ],
)
def test_the_short_form_of_a_section_goes_with_its_keys(tmp_path_factory, overrides, expected):
    for recipe in (WHOLE, WHOLE | {"qat": "int4"}):
        config = read(tmp_path_factory, yaml.safe_dump(recipe).encode(), *overrides)
        assert (config.qat and config.qat.group_size) == expected


@given(st.binary(max_size=200) | st.text("{}[]&*a:- \n\t\"'#|>!%@0123.eE+x", max_size=80).map(str.encode))
@settings(max_examples=60)
def test_any_bytes(tmp_path_factory, content):
    with pytest.raises(ConfigError):  # nothing so short is a whole recipe
        read(tmp_path_factory, content)


KEYS = [key.name for key in config_keys()]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**60), 10**60),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["{recipe}", "int4", "nf4", "-0", "1e999", "[", "*a", "\ud800", "\0"]),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers()),
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
@settings(max_examples=80)
def test_any_values(changes):
    values = json.loads(json.dumps(WHOLE))
    for key, value in changes.items():
        *sections, last = key.split(".")
        at = values
        for section in sections:
            at = at.setdefault(section, {}) if isinstance(at.get(section, {}), dict) else {}
        at[last] = value
    try:
        config = config_from_dict(values)
    except ConfigError as error:
        assert str(error)
        return
    assert config_from_dict(config_to_dict(config)) == config
    config_to_yaml(config).encode()


@given(st.lists(st.tuples(st.sampled_from([*KEYS, "x", "", ".", "qat"]), st.text(max_size=12)), max_size=3))
@settings(max_examples=60)
def test_any_overrides(tmp_path_factory, changes):
    overrides = [f"{key}={text}" for key, text in changes]
    try:
        read(tmp_path_factory, yaml.safe_dump(WHOLE).encode(), *overrides)
    except ConfigError as error:
        assert str(error)
