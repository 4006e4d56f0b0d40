"""Configs of axolotl and LLaMA-Factory, as people have them, become recipes; what has no counterpart is said."""

from __future__ import annotations

import json

import pytest
import yaml

from jaxtune.cli import main
from jaxtune.train.config.file import load_config

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: AutoModelForCausalLM
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: openai/gsm8k
    name: main
    split: test
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 1024
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
deepspeed: deepspeed_configs/zero2.json
special_tokens:
  pad_token: "<|end_of_text|>"
"""
OWN_FORMAT = """
base_model: Qwen/Qwen2.5-0.5B
datasets:
  - path: json
    data_files: rows.jsonl
    ds_type: json
    type:
      field_instruction: question
      field_output: answer
      format: "[INST] {instruction} [/INST]"
rl: dpo
dpo_beta: 0.2
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 10
learning_rate: 1e-5
optimizer: lion_8bit
lr_scheduler: constant_with_warmup
warmup_steps: 5
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
quantization_bit: 4
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
use_galore: true
"""


def converted(text: str, tmp_path, capsys) -> tuple[dict, str, str]:
    """(the recipe, its comments, the file that was converted); the recipe loads."""
    config = tmp_path / "theirs.yaml"
    config.write_text(text)
    assert main(["convert", str(config)]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text(shown)
    load_config(str(tmp_path / "recipe.yaml"))
    comments = " ".join(line.lstrip("# ") for line in shown.splitlines() if line.startswith("#"))
    return yaml.safe_load(shown), comments, str(config)


def test_axolotls_qlora(tmp_path, capsys):
    recipe, comments, config = converted(AXOLOTL, tmp_path, capsys)
    assert recipe["model"] == {"path": "NousResearch/Llama-3.2-1B", "load_in": "nf4"}
    assert recipe["data"] == {
        "train": ["teknium/GPT4-LLM-Cleaned", "openai/gsm8k:main:test"],
        "length": 1024,
        "packing": True,
        "eval_rows": 0.1,
    }
    assert recipe["adapter"] == {"r": 32, "target_modules": "all-linear", "lora_alpha": 16, "lora_dropout": 0.05}
    assert (recipe["rows_per_step"], recipe["epochs"], recipe["precision"]) == (8, 4.0, "bf16")
    assert recipe["optim"] == {"learning_rate": 2e-4, "weight_decay": 0.0, "name": "adamw"}
    assert recipe["schedule"] == {"warmup_ratio": 0.1, "name": "cosine"}
    assert recipe["output"] == "./outputs/qlora-out"
    lacking = comments.partition("no counterpart for")[2]
    for name in ("deepspeed", "evals_per_epoch", "saves_per_epoch"):
        assert f"{name}: " in lacking
    assert "flash_attention" not in comments and "special_tokens" not in comments
    assert main(["train", config]) == 2
    told = capsys.readouterr().err
    assert "is a config of axolotl: " in told and f"convert {config}' prints the recipe" in told


def test_axolotls_own_format_and_preferences(tmp_path, capsys):
    recipe, comments, _ = converted(OWN_FORMAT, tmp_path, capsys)
    assert recipe["data"]["train"] == "rows.jsonl" and recipe["data"]["packing"] == "step"
    assert recipe["data"]["columns"] == {"instruction": "question", "output": "answer"}
    assert recipe["objective"] == {"name": "dpo", "beta": 0.2} and recipe["adapter"] is None
    assert recipe["schedule"] == {"warmup_steps": 5, "name": "constant"} and recipe["steps"] == 10
    assert 'optimizer: "lion_8bit"' in comments and "format of rows.jsonl" in comments


def test_llama_factorys_lora(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en", "split": "train"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    recipe, comments, _ = converted(LLAMA_FACTORY, tmp_path, capsys)
    assert recipe["data"]["train"] == [str(tmp_path / "data/identity.json"), "llamafactory/alpaca_en::train"]
    assert (recipe["data"]["length"], recipe["data"]["max_rows"], recipe["data"]["eval_rows"]) == (2048, 1000, 0.1)
    assert recipe["adapter"] == {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    assert recipe["model"]["load_in"] == "nf4" and recipe["rows_per_step"] == 8
    assert recipe["checkpoint"] == {"every_steps": 500} and recipe["evaluation"] == {"every_steps": 500}
    assert "use_galore: true" in comments and "template: llama3" in comments and "ddp_timeout" not in comments
    recipe, comments, _ = converted(LLAMA_FACTORY.replace("identity,", "mine,"), tmp_path, capsys)
    assert "mine is a name of LLaMA-Factory's dataset_info.json" in comments


def test_axolotls_data_files_are_all_read(tmp_path, capsys):
    """One or several, of a reader or in a folder; those of the hub or by split are named."""
    (tmp_path / "mine").mkdir()
    entries = [
        {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train"},
        {"path": str(tmp_path / "mine"), "data_files": "c.jsonl", "type": "alpaca"},
        {"path": "someone/rows", "data_files": ["d.jsonl"]},
        {"path": "csv", "data_files": {"train": "e.csv"}},
    ]
    recipe, comments, _ = converted(yaml.safe_dump({"base_model": "x", "datasets": entries}), tmp_path, capsys)
    assert recipe["data"]["train"] == ["a.jsonl", "b.jsonl", str(tmp_path / "mine/c.jsonl"), "someone/rows", "csv"]
    lacking = comments.partition("no counterpart for")[2]
    assert 'data_files of someone/rows: ["d.jsonl"] (local files: ' in lacking
    assert 'data_files of csv: {"train": "e.csv"} (local files: ' in lacking


def test_what_an_entry_of_dataset_info_says_is_followed_or_named(tmp_path, capsys):
    """Rows that are on another hub than Hugging Face's, made by a script, or only some of them."""
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"ms_hub_url": "LLM-Research/identity"},
        "alpaca_en_demo": {"hf_hub_url": "llamafactory/alpaca_en", "ms_hub_url": "llamafactory/alpaca_en"},
        "made": {"script_url": "makes_rows"},
        "some": {"file_name": "some.json", "num_samples": 100, "ranking": True},
        "inner": {"hf_hub_url": "a/b", "folder": "inner"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    text = LLAMA_FACTORY.replace("identity,alpaca_en_demo", "identity,alpaca_en_demo,made,some,inner")
    recipe, comments, _ = converted(text, tmp_path, capsys)
    assert recipe["data"]["train"][:3] == ["identity", "llamafactory/alpaca_en", "made"]
    assert recipe["data"]["train"][3:] == [str(tmp_path / "data/some.json"), "a/b"]
    lacking = comments.partition("no counterpart for")[2]
    assert 'ms_hub_url of identity: "LLM-Research/identity" (a file, or a data set of huggingface.co)' in lacking
    assert "script_url of made: " in lacking and "num_samples of some: 100" in lacking
    assert "folder of inner: " in lacking and "alpaca_en_demo" not in lacking and "ranking" not in lacking


@pytest.mark.parametrize("key", ["base_model", "model_name_or_path"])
def test_a_model_that_is_null_is_refused(key, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(f"{key}: null\n")
    assert main(["convert", str(tmp_path / "one.yaml")]) == 2
    assert f"{key} = null: the config names no model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["model: {path: base}\n", "a: 1\n"])
def test_what_is_of_no_program_is_refused(text, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "one.yaml")]) == 2
    assert "neither base_model (axolotl) nor model_name_or_path (LLaMA-Factory)" in capsys.readouterr().err


def test_an_adapters_keys_that_full_fine_tuning_left_behind_are_dropped(tmp_path, capsys):
    for text in ("base_model: org/model\n", "model_name_or_path: org/model\nstage: sft\nfinetuning_type: full\n"):
        recipe, _, _ = converted(text + "lora_alpha: 16\nlora_dropout: 0.1\n", tmp_path, capsys)
        assert recipe["adapter"] is None


@pytest.mark.parametrize("text", ["[1]", '{"identity": "identity.json"}'])
def test_a_dataset_info_that_is_no_object_of_objects_is_refused(text, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(text)
    (tmp_path / "one.yaml").write_text(LLAMA_FACTORY)
    assert main(["convert", str(tmp_path / "one.yaml")]) == 2
    assert "dataset_info.json is no object of data sets" in capsys.readouterr().err


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path, capsys):
    """load_config reads numbers by YAML 1.2, of which PyYAML quotes fewer."""
    converted("base_model: org/model\noutput_dir: '1e5'\n", tmp_path, capsys)
    assert load_config(str(tmp_path / "recipe.yaml")).output == "1e5"


def test_values_of_other_types_are_named_or_left_to_jaxtune(tmp_path, capsys):
    """DeepSpeed's auto, lists where a name is expected, and both of LLaMA-Factory's ways to pack."""
    axolotl = "base_model: org/model\ndatasets: [{path: org/rows, type: alpaca}]\ngradient_accumulation_steps: auto\n"
    (tmp_path / "one.yaml").write_text(axolotl + "micro_batch_size: 2\nchat_template: [chatml]\noptimizer: [adamw]\n")
    assert main(["convert", str(tmp_path / "one.yaml")]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["rows_per_step"] == 2
    assert 'chat_template: ["chatml"]' in said.out + said.err and 'optimizer: ["adamw"]' in said.out + said.err
    factory = "model_name_or_path: org/model\nstage: sft\ndataset: org/rows\npacking: true\nneat_packing: true\n"
    (tmp_path / "two.yaml").write_text(factory)
    assert main(["convert", str(tmp_path / "two.yaml")]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["data"]["packing"] is True and "neat_packing" not in said.out + said.err
