"""What one entry of several says is of that entry; a null is a value; files keep their split."""

from __future__ import annotations

import json

import pytest
import yaml

from jaxtune.cli import main
from jaxtune.convert.programs import recipe_of
from jaxtune.train.config.file import config_from_dict

AXOLOTL = {"base_model": "Qwen/Qwen3-0.6B", "adapter": "lora", "micro_batch_size": 2, "num_epochs": 1}
AXOLOTL |= {"learning_rate": 1e-4, "sequence_len": 512, "lora_target_linear": True}
TRL = {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "trl-lib/Capybara", "use_peft": True}
ALPACA, RAW = "data/alpaca.jsonl", "data/raw.jsonl"


def translated(tmp_path, config, trainer=None):
    found = recipe_of(config, tmp_path, *(() if trainer is None else (trainer,)))
    config_from_dict(found.values)
    return found


SPLITS = {"train": f"{ALPACA}", None: f"{ALPACA}", "train[:1]": f"{ALPACA}[:1]", "train[: 20]": f"{ALPACA}[:20]"}
LACKING = ("train[90%:]", "train[:10%]", "train[5:]", "test", "train+test", "train[-5:]")


@pytest.mark.parametrize("split", [*SPLITS, *LACKING])
@pytest.mark.parametrize("named", ["path", "data_files", "test_datasets", "factory", "trl"])
def test_a_split_of_a_file_is_said_or_named(tmp_path, split, named):
    entry = {"path": ALPACA, "type": "alpaca", "split": split}
    if named == "data_files":
        entry |= {"path": "json", "data_files": ALPACA}
    if named == "factory":
        (tmp_path / "data").mkdir()
        info = {"mine": {"file_name": "alpaca.jsonl", "split": split}}
        (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
        config = {"model_name_or_path": "m", "stage": "sft", "dataset": "mine", "template": "qwen3", "learning_rate": 1}
    elif named == "trl":
        config = {**TRL, "datasets": [{"path": "json", "data_files": ALPACA, "split": split}], "max_length": 8}
        del config["dataset_name"]
    else:
        config = {**AXOLOTL, "datasets": [{"path": RAW, "type": "alpaca"}]}
        config["test_datasets" if named == "test_datasets" else "datasets"] = [entry]
    found = translated(tmp_path, config, "sft" if named == "trl" else None)
    said = found.values["data"]["eval" if named == "test_datasets" else "train"]
    if split in SPLITS:
        assert said.removeprefix(f"{tmp_path}/") == SPLITS[split]
        assert not any("split" in line for line in found.lacking)
    else:
        [line] = [line for line in found.lacking if line.startswith("split of")]
        assert json.dumps(split) in line and "[:N]" in line


@pytest.mark.parametrize("first", [True, False])
def test_texts_beside_other_rows_leave_masking_on(tmp_path, first):
    sets = [{"path": RAW, "type": "completion"}, {"path": ALPACA, "type": "alpaca"}]
    found = translated(tmp_path, {**AXOLOTL, "datasets": sets if first else sets[::-1]})
    assert "train_on" not in found.values["data"]
    whole = translated(tmp_path, {**AXOLOTL, "datasets": sets, "train_on_inputs": True})
    assert whole.values["data"]["train_on"] == "all"


@pytest.mark.parametrize("turned", [False, True])
def test_columns_of_one_set_are_not_laid_on_others(tmp_path, turned):
    sets = [
        {"path": ALPACA, "type": "chat_template"},
        {"path": RAW, "type": "chat_template", "field_messages": "conversation"},
    ]
    found = translated(tmp_path, {**AXOLOTL, "datasets": sets[::-1] if turned else sets})
    assert any(line.startswith("columns of ") for line in found.lacking)
    assert found.values["data"].get("columns") == ({"messages": "conversation"} if turned else None)
    alike = [dict(one, field_messages="conversation") for one in sets]
    same = translated(tmp_path, {**AXOLOTL, "datasets": alike})
    assert same.values["data"]["columns"] == {"messages": "conversation"} and not same.lacking


def test_null_is_a_value(tmp_path, capsys):
    for trainer in ("sft", "dpo", "kto", "reward"):
        found = translated(tmp_path, {**TRL, "max_length": None}, trainer)
        assert "length" not in found.values["data"]
        assert any(line.startswith("max_length: null") for line in found.lacking)
        assert not any(line.startswith("data.length") for line in found.implied)
    found = translated(tmp_path, {**TRL, "max_grad_norm": None}, "sft")
    assert found.values["max_grad_norm"] is None
    found = translated(tmp_path, {**TRL, "learning_rate": None}, "sft")
    assert any(line.startswith("learning_rate: null") for line in found.lacking)
    rewards = {**TRL, "reward_funcs": ["mine.score"], "vllm_importance_sampling_clip_max": None}
    assert translated(tmp_path, rewards, "grpo").values["objective"]["importance_sampling_clip_max"] is None
    axolotl = {**AXOLOTL, "datasets": [{"path": ALPACA, "type": "alpaca"}], "wandb_project": None, "bf16": None}
    found = translated(tmp_path, axolotl)
    assert found.values["precision"] == "fp32" and not any("null" in line for line in found.lacking)


VISION = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "stage": "sft", "template": "qwen3_vl", "learning_rate": 1}


@pytest.mark.parametrize(
    ("frozen", "tower"),
    [((None, None), None), ((False, None), "layers"), ((None, False), "merger"), ((False, False), "all")],
)
def test_pictures_of_llama_factory(tmp_path, frozen, tower):
    columns = {"messages": "messages", "images": "images"}
    info = {"shown": {"file_name": "shown.json", "formatting": "sharegpt", "columns": columns}}
    info["plain"] = {"file_name": "plain.json"}
    info["heard"] = {"file_name": "heard.json", "columns": {"audios": "audios"}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    keys = dict(zip(("freeze_vision_tower", "freeze_multi_modal_projector"), frozen, strict=True))
    config = {**VISION, "dataset": "shown", "image_max_pixels": 262144}
    config |= {key: value for key, value in keys.items() if value is not None}
    found = translated(tmp_path, config)
    data = found.values["data"]
    assert (data["images"], data["max_pixels"]) == (str(tmp_path / "data"), 262144)
    assert data["template"] == "tokenizer" and found.values["model"].get("tower") == tower
    assert [line.partition(":")[0] for line in found.lacking] == ["template"]
    elsewhere = translated(tmp_path, {**config, "media_dir": "photos", "image_min_pixels": 64})
    assert elsewhere.values["data"]["images"] == "photos"
    assert any(line.startswith("image_min_pixels: 64") for line in elsewhere.lacking)
    implied = translated(tmp_path, {key: value for key, value in config.items() if key != "image_max_pixels"})
    assert implied.values["data"]["max_pixels"] == 589824
    plain = translated(tmp_path, {**config, "dataset": "plain"})
    assert not {"images", "max_pixels"} & plain.values["data"].keys() and "tower" not in plain.values["model"]
    heard = translated(tmp_path, {**config, "dataset": "heard"})
    assert any(line.startswith("audios of heard") for line in heard.lacking)


def test_rows_with_tools_and_modules_by_a_pattern_are_named(tmp_path):
    (tmp_path / "data").mkdir()
    info = {"calls": {"file_name": "calls.json", "formatting": "sharegpt", "columns": {"tools": "tools"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    found = translated(tmp_path, {**VISION, "template": "qwen3", "dataset": "calls"})
    assert any(line.startswith("tools of calls") for line in found.lacking)
    roles = {"assistant": ["gpt", "function_call"], "tool": ["observation"]}
    sets = [{"path": ALPACA, "type": "chat_template", "roles": roles}]
    assert not translated(tmp_path, {**AXOLOTL, "datasets": sets}).lacking
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj"
    found = translated(
        tmp_path, {**AXOLOTL, "lora_target_linear": False, "datasets": sets, "lora_target_modules": pattern}
    )
    assert found.values["adapter"]["target_modules"] == "all-linear"
    assert any(line.startswith("lora_target_modules") for line in found.lacking)


@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"])
def test_rewards_of_trl_by_name(tmp_path, name):
    for said in (name, f"trl.rewards.{name}"):
        found = translated(tmp_path, {**TRL, "reward_funcs": [said]}, "grpo")
        assert found.values["objective"]["reward_funcs"] == [f"trl_rewards.py:{name}"]
        [line] = [line for line in found.lacking if line.startswith("reward_funcs")]
        made = {}
        exec(line.partition("with: ")[2].removesuffix(")"), made)
        assert callable(made[name])


def test_a_lost_split_is_said_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**AXOLOTL, "datasets": [{"path": ALPACA, "type": "alpaca", "split": "train[5:]"}]}))
    assert main(["convert", str(path)]) == 3
    assert "split of data/alpaca.jsonl" in capsys.readouterr().err
