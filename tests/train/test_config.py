"""The config: reading, overriding, refusing, writing back."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from jaxtune.train.config import (
    AdapterConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    QatConfig,
    TrainConfig,
)
from jaxtune.train.config import sections as schema
from jaxtune.train.config.file import (
    _parse_yaml,
    config_from_dict,
    config_keys,
    config_to_dict,
    config_to_yaml,
    flat_keys,
    load_config,
    names_code,
    packaged_recipes,
    recipe_summary,
)

MINIMAL = "model: {path: some/model}\ndata: {train: rows.jsonl}\n"


@pytest.fixture
def recipe(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def error_of(recipe_path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe_path, overrides)
    return str(caught.value)


def test_defaults(recipe):
    config = load_config(recipe(MINIMAL))
    assert config == TrainConfig(
        model=ModelConfig(path="some/model"), data=DataConfig(train="rows.jsonl"), output="runs/mine"
    )
    assert (config.epochs, config.steps, config.adapter, config.rows_per_step) == (1.0, None, None, 8)
    assert load_config(recipe(MINIMAL + "steps: 10")).epochs is None
    assert hash(config) == hash(load_config(recipe(MINIMAL)))


def test_overrides_win_and_are_yaml(recipe):
    path = recipe(MINIMAL + "optim: {learning_rate: 1e-3, name: sgd}\nadapter: null\n")
    config = load_config(
        path,
        [
            "optim.learning_rate=1e-4",
            "adapter.r=4",  # opens a section that the recipe sets to null
            "adapter.target_modules=[q_proj, v_proj]",
            'adapter.rank_pattern={"layers.0.q_proj": 8}',
            "checkpoint.every_minutes=null",
            "data.eval=a=b.jsonl",
            "data.instruction_part=### Question:",
            'data.response_part="A:\\n"',
            "data.mask_spans=[[<think>, </think>], ['[', ']']]",
            "output=runs/x-{recipe}",
        ],
    )
    assert config.optim == OptimConfig(name="sgd", learning_rate=1e-4)
    assert config.adapter == AdapterConfig(
        r=4, target_modules=("q_proj", "v_proj"), rank_pattern={"layers.0.q_proj": 8}
    )
    assert config.checkpoint.every_minutes is None
    assert config.data.eval == "a=b.jsonl"
    assert (config.data.instruction_part, config.data.response_part) == ("### Question:", "A:\n")
    assert config.data.mask_spans == (("<think>", "</think>"), ("[", "]"))
    assert load_config(recipe(config_to_yaml(config), "again.yaml")) == config
    assert config.output == "runs/x-mine"
    assert load_config(path, ["adapter={}"]).adapter == AdapterConfig()
    assert load_config(path, ["adapter.r=4", "adapter=null"]).adapter is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2.5e+3", -2500.0),
        ("+7", 7),
        ("010", 10),
        ("0x10", 16),
        ("0o17", 15),
        ("-.inf", float("-inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-11-20", "2026-11-20"),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("[1, a, 2.0]", [1, "a", 2.0]),
        ("{a: {b: no}}", {"a": {"b": "no"}}),
    ],
)
def test_yaml_means_what_it_says(text, value):
    result = _parse_yaml(text, "here")
    assert result == value and type(result) is type(value)


def test_yaml_faults_name_file_and_line(recipe):
    assert error_of(recipe(MINIMAL + "seed: 1\nseed: 2\n")).endswith("mine.yaml:4): keep one")
    assert "mine.yaml is not YAML" in error_of(recipe("model: [1,\n"))
    assert "holds no keys" in error_of(recipe("- a\n"))
    assert "holds no keys" in error_of(recipe(""))
    assert "override 'seed=[1' is not YAML" in error_of(recipe(MINIMAL), "seed=[1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {learing_rate: 1e-4}", "unknown key optim.learing_rate (FILE:3); did you mean optim.learning_rate?"),
        ("learning_rate: 1e-4", "unknown key learning_rate (FILE:3); did you mean optim.learning_rate?"),
        ("adapter:\n  rank: 3", "unknown key adapter.rank (FILE:4); did you mean adapter.r?"),
        ("mesh: {something_else: 3}", "unknown key mesh.something_else (FILE:3); valid keys here: data"),
        ("steps: true", "steps = true (FILE:3): expected integer or null"),
        ("steps: 1.5", "steps = 1.5 (FILE:3): expected integer or null"),
        ("rows_per_step: '8'", 'rows_per_step = "8" (FILE:3): expected integer'),
        ("deterministic: 1", "deterministic = 1 (FILE:3): expected true or false"),
        ("deterministic: on", 'deterministic = "on" (FILE:3): expected true or false'),
        ("max_grad_norm: true", "max_grad_norm = true (FILE:3): expected number or null"),
        ("output: 2026", "output = 2026 (FILE:3): expected string; put it in quotes to make it a string"),
        (
            "optim: {name: adamv}",
            'optim.name = "adamv" (FILE:3): expected adamw | adamw_8bit | lion | lion_8bit | muon | adafactor | sgd; '
            "nearest: adamw",
        ),
        ("optim: null", "optim = null (FILE:3): expected section of keys"),
        ("optim: 3", "optim = 3 (FILE:3): expected section of keys"),
        ("qat: int3", 'qat.format = "int3" (FILE:3): expected int4'),
        (
            "qat: {xxxxxxxxxxxx: 5}",
            "unknown key qat.xxxxxxxxxxxx (FILE:3); valid keys here: format, group_size, start, gradients",
        ),
        ("qat: {group_size: 48}", "qat.group_size = 48: int4 has groups of 32, 64 or 128 (FILE:3)"),
        ("steps: 4\nqat: {start: 4}", "qat.start = 4: must be below steps = 4 (FILE:4)"),
        (
            "qat: {format: nvfp4, group_size: 32}",
            "qat.group_size = 32: nvfp4 has blocks of its own size",
        ),
        ("adapter: lora", 'adapter = "lora" (FILE:3): expected section of keys or null'),
        ("adapter: {target_modules: [1]}", "adapter.target_modules = [1] (FILE:3): expected string or list of strings"),
        ("adapter: {rank_pattern: {q_proj: a}}", "adapter.rank_pattern"),
        ("optim: {learning_rate: -1}", "optim.learning_rate = -1.0: must be greater than 0 (FILE:3)"),
        ("optim: {learning_rate: .nan}", "optim.learning_rate = nan: must be greater than 0"),
        ("optim: {beta2: 1.0}", "optim.beta2 = 1.0: must be from 0 to below 1"),
        ("schedule: {cycles: 2}", "schedule.cycles = 2: needs schedule.name = cosine_with_restarts"),
        ("schedule: {name: constant, min_ratio: 0.1}", "schedule.min_ratio = 0.1: needs schedule.name = linear or"),
        ("schedule: {name: inverse_sqrt, min_ratio: 1}", "schedule.min_ratio = 1.0: needs schedule.name = linear or"),
        ("neftune_noise_alpha: 0", "neftune_noise_alpha = 0.0: must be greater than 0"),
        ("schedule: {min_ratio: 2}", "schedule.min_ratio = 2.0: must be from 0 to 1"),
        ("micro_batches: 3", "micro_batches = 3: must divide rows_per_step = 8 (FILE:3)"),
        ("mesh: {data: 2}\nmicro_batches: 8", "mesh.data = 2: must divide the 1 rows of a micro-batch"),
        ("steps: 5\nepochs: 1", "steps = 5 and epochs = 1.0 are both set: keep one"),
        ("steps: 0", "steps = 0: must be greater than 0"),
        ("schedule: {warmup_steps: 5, warmup_ratio: 0.1}", "schedule.warmup_steps = 5: unset it or"),
        ("evaluation: {exact_match_rows: 5}", "evaluation.exact_match_rows = 5: needs held-out rows to ask: set"),
        ("evaluation: {every_steps: 5}", "evaluation.every_steps = 5: needs rows"),
        ("adapter: {path: a, r: 8}", "adapter.r = 8: adapter.path brings its own settings; remove it"),
        ("adapter: {lora_dropout: 1.0}", "adapter.lora_dropout = 1.0: must be from 0 to below 1"),
        ("adapter: {target_modules: []}", "adapter.target_modules = (): name at least one module"),
        ("adapter: {rank_pattern: {q_proj: 0}}", "adapter.rank_pattern.q_proj = 0: must be greater than 0 (FILE:3)"),
    ],
)
def test_a_wrong_key_or_value_is_refused(recipe, text, message):
    path = recipe(MINIMAL + text + "\n")
    message = message.replace("FILE", path)
    assert message in error_of(path)
    assert len(error_of(path).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.from_config=c.json"], "model.path and model.from_config are both set"),
        (["model.path=null"], "model.path is missing"),
        (["data.mask_spans=[<think>]"], 'data.mask_spans = "<think>" (override'),
        (["data.mask_spans=[[a]]"], 'data.mask_spans = ["a"] (override'),
        (["data.mask_spans=[[a, ' ']]"], "data.mask_spans = (('a', ' '),): an opening and a closing must not be empty"),
        (["model={from_config: c.json}"], "model.tokenizer = None: model.from_config needs a tokenizer folder"),
        (["model={from_config: c.json, tokenizer: t}", "adapter={}"], "training from scratch trains all"),
        (["model={from_config: c.json, tokenizer: t, load_in: nf4}"], "is not quantised"),
        (["model.load_in=nf4"], "model.load_in = 'nf4': quantised weights are frozen and train through an adapter"),
        (["model.load_in=int4"], "model.load_in = \"int4\" (override 'model.load_in=int4'): expected nf4 | fp8"),
        (["data.eval=e.jsonl", "data.eval_rows=5"], "data.eval_rows = 5: takes rows out of data.train"),
        (["data.instruction_part=Q:"], "data.response_part = None: data.instruction_part needs it"),
        (["data.response_part=A:"], "data.instruction_part = None: data.response_part needs it"),
        (["data.train_on=all", "data.last_response_only=true"], "needs data.train_on=responses"),
        (["data={}"], "data.train is missing (string or list of strings or list of [string, number] pairs)"),
        (["seed"], "cannot read override 'seed': write key=value"),
        (["steps.x=1"], "steps = {\"x\": 1} (override 'steps.x=1'): expected integer or null"),
        (["steps=ten"], "steps = \"ten\" (override 'steps=ten'): expected integer or null"),
        (["output="], "output = null (override 'output='): expected string"),
    ],
)
def test_faults_between_keys_and_in_overrides(recipe, overrides, message):
    assert message in error_of(recipe(MINIMAL), *overrides)


def test_every_fault_is_told_at_once(recipe):
    path = recipe("model: {path: m}\ndata: {trian: x}\nsteps: true\n")
    lines = error_of(path, "precision=fp8").splitlines()
    assert sorted(line.split(" ")[0] for line in lines) == ["data.train", "precision", "steps", "unknown"]


def test_an_override_into_a_value_is_refused(recipe):
    assert "seed has no keys of its own (override 'seed.x=1')" in error_of(recipe(MINIMAL + "seed: 3\n"), "seed.x=1")


def test_a_config_built_in_python_is_checked_too():
    model, data = ModelConfig(path="m"), DataConfig(train="d")
    with pytest.raises(ConfigError, match="micro_batches = 3: must divide"):
        TrainConfig(model=model, data=data, micro_batches=3)
    with pytest.raises(ConfigError, match=r"optim\.learning_rate = 0"):
        OptimConfig(learning_rate=0)
    config = TrainConfig(model=model, data=data)
    assert config.output == "runs/default"
    assert TrainConfig(model=model, data=data, output="~/a").output == os.path.expanduser("~/a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_recipes_are_found_by_name_and_refused_by_name(tmp_path):
    names = packaged_recipes()
    assert {"lora-8b", "full-1b", "lora-0.5b"} <= set(names)
    text = error_of("lora-8")
    assert "nearest: lora-8b" in text and all(name in text for name in names)
    assert error_of("no/such.yaml") == "no recipe file no/such.yaml"
    (tmp_path / "config.yaml").touch()
    assert error_of(str(tmp_path)) == f"{tmp_path} is a run's folder: its recipe is {tmp_path / 'config.yaml'}"
    assert "cannot read recipe" not in text


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_packaged_recipes_load(name):
    config = load_config(name, ["data.train=rows.jsonl"])
    assert config.output == f"runs/{name}"
    assert len(recipe_summary(packaged_recipes()[name])) > 10
    assert "{package}" not in config_to_yaml(config)


def test_recipes_of_large_models():
    for size in ("8b", "14b", "32b"):
        config = load_config(f"qlora-{size}", ["data.train=rows.jsonl"])
        assert config.model.load_in == "nf4" and config.adapter is not None
        assert config.model.path is not None and size in config.model.path.lower()
    full = load_config("full-8b-8bit-adam", ["data.train=rows.jsonl"])
    assert full.adapter is None and full.model.load_in is None and full.optim.name == "adamw_8bit"
    assert full.micro_batches == 1  # else the gradients are float32


def test_package_folder_in_a_recipe(recipe):
    config = load_config(recipe("model: {path: '{package}/quickstart/model'}\ndata: {train: x}\n"))
    assert config.model.path is not None and config.model.path.endswith("/jaxtune/quickstart/model")


def test_every_key_has_help_and_is_listed_once():
    keys = config_keys()
    names = [key.name for key in keys]
    assert len(names) == len(set(names)) > 60
    assert all(key.help.endswith(".") and key.type and key.default for key in keys)
    by_name = {key.name: key for key in keys}
    assert by_name["data.train"].default == "required"
    assert by_name["adapter"].default == "null"
    assert by_name["optim.name"].type == "adamw | adamw_8bit | lion | lion_8bit | muon | adafactor | sgd"
    # The listed keys are those of a config with every section open.
    sections = dict(adapter=AdapterConfig(), qat=QatConfig(), mesh=MeshConfig())
    full = config_to_dict(TrainConfig(ModelConfig(path="m"), DataConfig(train="d"), **sections))
    assert set(flat_keys(full)) == set(names) - set(sections)


def test_written_config_reads_back_equal(recipe):
    config = load_config(
        recipe(MINIMAL), ["adapter.target_modules=[q_proj]", "optim.eps=1e-12", "checkpoint.every_steps=7"]
    )
    assert load_config(recipe(config_to_yaml(config), "resolved.yaml")) == config
    assert config_from_dict(config_to_dict(config)) == config


TRICKY = st.one_of(
    st.sampled_from(
        [
            "1e5",
            "1e-4",
            "on",
            "no",
            "null",
            "~",
            "010",
            "0x1",
            "1_000",
            "12:30",
            ".5",
            "5.",
            "=",
            "-",
            "2026-11-20",
            "true",
            " a",
            "a: b",
            "# x",
            "{a}",
            "[",
            "\n",
            "x\ny",
            "'",
            '"',
            "é",
            "<<",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
)


@given(text=TRICKY, rate=st.floats(min_value=1e-36, max_value=1e36), seed=st.integers(0, 2**32 - 1))
def test_any_string_and_number_survives_writing(tmp_path_factory, text, rate, seed):
    config = TrainConfig(
        ModelConfig(path=text),
        DataConfig(train=text, template=text),
        adapter=AdapterConfig(target_modules=(text,), rank_pattern={text: 3}),
        optim=OptimConfig(learning_rate=rate),
        seed=seed,
        output="out",
    )
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(str(path)) == config


def test_written_config_means_the_same_to_other_readers(recipe):
    config = load_config(recipe(MINIMAL), ["optim.learning_rate=1e-5", "data.template=on"])
    assert yaml.safe_load(config_to_yaml(config)) == config_to_dict(config)


@pytest.mark.parametrize(
    "key", ["objective.reward_funcs", "objective.tools", "objective.environment_factory", "objective.rollout_func"]
)
def test_code_of_the_users_is_told_from_values(recipe, tmp_path, monkeypatch, key):
    (tmp_path / "mine.py").write_text("def f(): ...")
    monkeypatch.chdir(tmp_path)

    def names(path: str, *overrides: str) -> bool:
        return names_code(config_to_dict(load_config(path, overrides)))

    path = recipe(MINIMAL + "objective: {name: grpo, reward_funcs: [exact_number]}\n")
    assert not names(path)
    for value in ("mine.py:f", f"{tmp_path}/mine.py:f"):
        assert names(path, f"{key}=[{value}]" if key.endswith("s") else f"{key}={value}")
    assert names(recipe(MINIMAL), "data.eval=rows.jsonl", "evaluation.generate=[mine.py:f]")


@given(text=st.text(), repeats=st.integers(1, 300))
@example(text="~no-such-user/mine.py:f", repeats=1)
@example(text="Answer so: x", repeats=100)
@example(text="a\0.py:f", repeats=1)
def test_any_text_may_be_a_value_beside_code(text, repeats):
    assert not names_code({"data": {"system_prompt": [text * repeats]}})


def test_no_packaged_recipe_names_code():
    for name in packaged_recipes():
        assert not names_code(config_to_dict(load_config(name, ["data.train=rows.jsonl"])))


def test_sections_and_error_keys_agree():
    """`require`'s messages name dotted keys by hand: each must exist."""
    names = {key.name for key in config_keys()}
    folder = Path(schema.__file__).parent
    files = (folder / "sections.py", folder / "model.py", folder / "objective.py")
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r'\b(?:positive|not_negative|fraction)\("([\w.]+)"', source))
    named |= set(re.findall(r'\brequire\([^"]*?"(\w+\.\w+)",', source))
    assert len(named) > 20
    assert named <= names
    sections = {hint for hint in typing.get_type_hints(TrainConfig).values() if dataclasses.is_dataclass(hint)}
    assert all(hasattr(section, "__pydantic_config__") for section in sections)
