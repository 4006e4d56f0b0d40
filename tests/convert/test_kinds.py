"""Each known key of each program gets each type of JSON: the recipe follows it, or an error names key and value."""

from __future__ import annotations

import json
import os

import pytest

from jaxtune.cli import main
from jaxtune.commands import proof
from jaxtune.convert import recipe_of
from jaxtune.convert.kinds import fitted
from jaxtune.convert.tables import table
from jaxtune.train.config import ConfigError

VALUES = (7, 0.5, "x", True, None, [1, "a"], {"a": {"b": [1]}})
ROWS = {"path": "org/rows", "type": "chat_template"}
SFT = {"base_model": "m", "datasets": [ROWS], "learning_rate": 1e-4}
GRPO = {**SFT, "rl": "grpo", "datasets": [{"path": "org/rows"}], "trl": {"reward_funcs": ["a.b"], "num_generations": 2}}
FACTORY = {"model_name_or_path": "m", "stage": "sft", "dataset": "mine", "dataset_dir": "registered"}
FACTORY |= {"template": "qwen3", "learning_rate": 1e-4}
TRL = {"model_name_or_path": "m", "use_peft": True, "lora_target_modules": "all-linear", "max_length": 512}


def _nested(base, section, key):
    """A function from a value to the config with it below a section, a mapping or a list of one."""
    entries = base[section] if isinstance(base[section], list) else [base[section]]
    return lambda value: (
        base | {section: [entries[0] | {key: value}] if isinstance(base[section], list) else entries[0] | {key: value}}
    )


def configs():
    """(program, key, TRL's trainer, a function from the key's value to a config)."""
    for program, base in (("axolotl", SFT), ("llama_factory", FACTORY)):
        for key in table(program).top.known_keys:
            yield program, key, None, lambda value, base=base, key=key: base | {key: value}
    for key in table("axolotl").sections["datasets"].known_keys:
        yield "axolotl", key, None, _nested(SFT, "datasets", key)
    for key in table("axolotl").sections["trl"].known_keys:
        yield "axolotl", key, None, _nested(GRPO, "trl", key)
    for trainer in ("sft", "dpo", "kto", "reward", "grpo", "rloo"):
        base = TRL | {"datasets": [{"path": "org/rows"}]}
        if trainer in ("grpo", "rloo"):
            base = {key: value for key, value in base.items() if key != "max_length"} | {"reward_funcs": ["a.b"]}
        keys = table("trl").sections[trainer].types.keys() | table("trl").top.types.keys()
        for key in keys:
            yield "trl", key, trainer, lambda value, base=base, key=key: base | {key: value}
        for key in table("trl").sections["datasets"].known_keys:
            yield "trl", key, trainer, _nested(base, "datasets", key)


@pytest.mark.parametrize("program", ["axolotl", "llama_factory", "trl"])
def test_each_key_with_each_type_is_followed_or_refused_by_name(program, tmp_path):
    (tmp_path / "registered").mkdir()
    (tmp_path / "registered/dataset_info.json").write_text('{"mine": {"hf_hub_url": "org/rows"}}')
    counts = {"followed": 0, "refused": 0}
    for name, key, trainer, config in configs():
        for value in VALUES if name == program else ():
            try:
                recipe = recipe_of(config(value), tmp_path, trainer)
                proof.prove(recipe)
            except ConfigError as error:
                assert key in str(error), (key, trainer, value, str(error))
                assert ": " in str(error)
                counts["refused"] += 1
            else:
                counts["followed"] += 1
    assert min(counts.values()) > 500


@pytest.mark.parametrize("program", ["axolotl", "llama_factory"])
def test_a_null_is_as_if_the_key_were_not_there(program, tmp_path):
    """Beside keys whose default is not null: these are said."""
    base = {"axolotl": SFT, "llama_factory": {**FACTORY, "dataset": "org/rows"}}[program]
    plain = recipe_of(base, tmp_path)
    tables = table(program).top
    for key in tables.known_keys - base.keys():
        if tables.defaults.get(key) in (None, False) and key != "bf16":
            recipe = recipe_of(base | {key: None}, tmp_path)
            assert (recipe.values, recipe.lacking) == (plain.values, plain.lacking), key
    if program == "axolotl":
        for key in table(program).sections["datasets"].known_keys - {"path", "type"}:
            recipe = recipe_of(_nested(SFT, "datasets", key)(None), tmp_path)
            assert (recipe.values, recipe.lacking) == (plain.values, plain.lacking), key


@pytest.mark.parametrize(
    ("value", "kinds", "found"),
    [
        ("500_000", "int|null", 500_000),
        (8.0, "int", 8),
        ("1e-5", "text|float", 1e-5),
        ("yes", '"auto"|bool', True),
        ("auto", '"auto"|bool|null', "auto"),
        (1, "bool", True),
        ([["1", 2.0]], "list[list[int]]|null", [[1, 2]]),
        (2.5, "int|float", 2.5),
    ],
)
def test_a_number_or_a_yes_in_quotes_is_what_it_says(value, kinds, found):
    assert fitted(value, kinds) == found and type(fitted(value, kinds)) is type(found)


@pytest.mark.parametrize(
    ("value", "kinds", "taken"),
    [
        (True, "int|null", "a whole number"),
        ([1], "list[text]|null", "a list of text"),
        ("often", '"drop"|"raise"|null', '"drop" or "raise"'),
        (float("nan"), "float", "a number"),
        (10**400, "float", "a number"),
        ({1: 2}, "mapping", "a mapping with names"),
    ],
)
def test_what_is_taken_is_said(value, kinds, taken):
    with pytest.raises(ValueError, match=taken):
        fitted(value, kinds)


@pytest.mark.parametrize("datasets", [7, "x", [7], [[1, 2]], [None], {"path": "a"}, [{"path": [1]}]])
def test_datasets_of_another_type_are_refused(datasets, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(json.dumps({"base_model": "m", "datasets": datasets}))
    assert main(["convert", str(tmp_path / "config.yaml")]) == 3
    shown = capsys.readouterr()
    assert "datasets = " in shown.err or "path of datasets = [1]" in shown.err
    assert "axolotl takes" in shown.err and not shown.out


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
def test_what_is_no_regular_file_is_an_error(kind, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert main(["convert", str(path)]) == 2
    assert f"cannot read recipe {path}" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    path.rename(tmp_path / "data" / "dataset_info.json")
    (tmp_path / "config.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: qwen\n")
    assert main(["convert", str(tmp_path / "config.yaml")]) == 3  # the data set is not registered
    assert "data set a" in capsys.readouterr().err


ELSEWHERE = {"hf_hub_url": "org/rows", "ms_hub_url": "org/rows", "script_url": "script", "cloud_file_name": "s3://rows"}


@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_file_beside_an_address_is_not_what_is_read(key, tmp_path):
    (tmp_path / "registered").mkdir()
    entry = {"file_name": "rows.json", key: ELSEWHERE[key]}
    (tmp_path / "registered/dataset_info.json").write_text(json.dumps({"mine": entry}))
    recipe = recipe_of(FACTORY, tmp_path)
    assert recipe.get("data.train") == ("org/rows" if key == "hf_hub_url" else "mine")
    assert any(line.startswith(f"{key} of mine") for line in recipe.lacking) == (key != "hf_hub_url")


@pytest.mark.parametrize("key", ["file_name", "columns", "tags", "formatting", "ranking", "split", "num_samples"])
def test_what_an_entry_of_dataset_info_has_is_checked(key, tmp_path):
    (tmp_path / "registered").mkdir()
    for value in ([1, "a"], {"prompt": 7}, {"prompt": None}, 0.5):
        entry = {"file_name": "rows.json", key: value}
        (tmp_path / "registered/dataset_info.json").write_text(json.dumps({"mine": entry}))
        if key in ("columns", "tags") and value == {"prompt": None}:
            assert recipe_of(FACTORY, tmp_path).get("data.train")
        else:
            with pytest.raises(ConfigError, match=f"{key} of mine"):
                recipe_of(FACTORY, tmp_path)
